//! `PLaMo` 1 and 2.

use super::decoder::{attention, decoder, stack};
use super::mamba::{heads, mamba_with_heads};
use crate::attention::{NormOver, QkNorm};
use crate::feed_forward::{Activation, Dense};
use crate::metadata_reader::MetadataReader;
use crate::parts::{FeedForward, Mixer};
use crate::spec::NormKind;
use crate::{ModelError, ModelSpec, RopeLayout};

/// `PLaMo`: Llama with attention and feed-forward in parallel from one norm.
pub(super) fn plamo(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let mut m = decoder(k, NormKind::Rms, RopeLayout::Halves)?;
    m.side_by_side();
    m.set_own_head();
    Ok(m)
}

/// `PLaMo` 2: Mamba with a decay for each head, and attention with norms of each head of queries and keys; norms before
/// and after both.
pub(super) fn plamo2(k: &MetadataReader<'_>) -> Result<ModelSpec, ModelError> {
    let (norm, n_embd) = (k.norm(NormKind::Rms)?, k.positive("embedding_length")?);
    let mamba = mamba_with_heads(k, (n_embd / 16).max(64), norm.eps)?;
    let n_ff = k.positive("feed_forward_length")?;
    let feed_forward = FeedForward::Dense(Dense { n_ff, gated: true, activation: Activation::Silu, fused: true });
    let heads = heads(k)?;
    let layer = |&(n_head, n_head_kv): &(usize, usize)| {
        let mixer = match n_head_kv {
            0 => Mixer::Mamba(mamba),
            1.. => attention(k, RopeLayout::Halves, n_head, (n_head, n_head_kv))?,
        };
        Ok((mixer, feed_forward.clone()))
    };
    let mut m = stack(k, norm, heads.iter().map(layer).collect::<Result<_, ModelError>>()?)?;
    m.attention_mut().for_each(|(_, a)| a.fused_qkv = true);
    m.set_qk_norm(QkNorm { kind: NormKind::Rms, eps: norm.eps, over: NormOver::EachHead, after_rope: false });
    m.add_post_norms(norm.without_weight_suffix());
    Ok(m)
}
