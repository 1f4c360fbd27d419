//! LFM2: gated short convolutions, and attention in some layers.

use super::decoder::{ExpertDefaults, around, attention, experts};
use crate::attention::Mask;
use crate::feed_forward::RouterScore;
use crate::metadata_reader::MetadataReader;
use crate::parts::Mixer;
use crate::recurrent::ShortConvSpec;
use crate::spec::NormKind;
use crate::{ModelError, ModelSpec, RopeLayout};

/// LFM2: layers without KV heads are short convolutions; norms of each head of queries and keys.
pub(super) fn lfm2(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    if k.opt_bool("attention.causal")? == Some(false) {
        let why = "convolutions to both sides are missing";
        return Err(k.unsupported("attention.causal", false, why));
    }
    for tensor in ["dense_2.weight", "dense_2_out.weight"] {
        if k.has_tensor(tensor, false) {
            let why = "an embedding of each token (ColBERT) is missing";
            return Err(k.unsupported("embedding_length_out", tensor, why));
        }
    }
    let (n_embd, n_layer) = (k.positive("embedding_length")?, k.n_layer()?);
    let n_tap = k.taps("shortconv.l_cache")?;
    let head_count = k.per_layer("attention.head_count", n_layer)?.ok_or_else(|| k.missing("attention.head_count"))?;
    let key = "attention.head_count_kv";
    let head_count_kv = k.per_layer_or_none(key, n_layer)?.ok_or_else(|| k.missing(key))?;
    let mixer = |(&n_head, &n_head_kv): (&usize, &usize)| {
        if n_head_kv == 0 {
            return Ok(Mixer::ShortConv(ShortConvSpec { width: n_embd, n_tap }));
        }
        attention(k, RopeLayout::Halves, head_count[0], (n_head, n_head_kv))
    };
    let mixers = head_count.iter().zip(&head_count_kv).map(mixer).collect::<Result<_, _>>()?;
    let mut m = around(k, NormKind::Rms, mixers)?;
    let norm = k.norm(NormKind::Rms)?;
    m.output.norm = Some(norm.with_tensor("token_embd_norm"));
    m.norm_heads(norm.eps);
    if let Some(window) = k.window()? {
        m.attention_mut().for_each(|(_, a)| a.mask = Mask::Window(window));
    }
    Ok(m)
}

/// LFM2 with experts after some dense layers, chosen by sigmoid and a bias.
pub(super) fn lfm2moe(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = lfm2(k)?;
    let defaults = ExpertDefaults { score: RouterScore::Sigmoid, renormalize: true };
    let mut e = experts(k, defaults, k.positive("feed_forward_length")?)?;
    e.router.choice_bias = true;
    e.router.renormalize = true;
    m.set_experts(k.opt_usize("leading_dense_block_count")?.unwrap_or(0), &e);
    Ok(m)
}
