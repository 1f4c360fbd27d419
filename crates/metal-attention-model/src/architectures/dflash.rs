//! DFlash, DFlash-2 and DSpark: drafters that propose a block of tokens at once.

use super::decoder::{WindowRope, decoder};
use super::eagle3::other_target;
use crate::attention::Mask;
use crate::block_conv::BlockConvSpec;
use crate::dflash::{BlockChoice, DFLASH, DflashSpec};
use crate::metadata_reader::MetadataReader;
use crate::spec::{NormKind, OutputSpec};
use crate::state_input::{ProjectedState, StateInput};
use crate::{ModelError, ModelSpec, RopeLayout};

/// Most tokens of a block; files have 8 or 16.
const MAX_BLOCK: usize = 1024;

/// The drafter of a file whose architecture is `dflash`, for `target`.
pub(crate) fn read_dflash(k: &MetadataReader<'_>, target: &ModelSpec) -> Result<DflashSpec, ModelError> {
    if k.architecture() != DFLASH {
        let why = format!("must be {DFLASH}");
        return Err(ModelError::InvalidValue {
            key: "general.architecture".into(),
            value: k.architecture().to_owned(),
            why,
        });
    }
    if let Some(n) = k.n_expert()? {
        return Err(k.unsupported("expert_count", n, "drafters with experts are not implemented"));
    }
    let mut model = decoder(k, NormKind::Rms, RopeLayout::Halves)?;
    if model.n_vocab != target.n_vocab {
        return Err(other_target(k, "vocab_size", model.n_vocab, &target.n_vocab));
    }
    let has_ends = ["token_embd.weight", "output.weight"].iter().all(|name| k.has_tensor(name, false));
    if !has_ends && model.n_embd != target.n_embd {
        return Err(other_target(k, "embedding_length", model.n_embd, &target.n_embd));
    }
    let norm = k.norm(NormKind::Rms)?;
    model.norm_heads(norm.eps);
    model.takes_context = true;
    if let Some(window) = k.window()? {
        // Without a pattern all layers have the window.
        let windowed = k.windowed_layers(model.n_layer(), 0, false)?;
        let rope = k.freq_base("rope.freq_base_swa")?.map(|freq_base| WindowRope { freq_base });
        model.set_windows(&windowed, Mask::Window(window), rope);
    }
    if k.opt_usize("conv_kernel_size")?.is_some() || k.has_tensor("blk.0.attn_conv_base", false) {
        let n_tap = k.taps("conv_kernel_size")?;
        let group_size = k.positive("conv_group_size")?;
        let divides = model.n_embd.is_multiple_of(group_size);
        k.check("conv_group_size", group_size, divides, "must divide embedding_length")?;
        for layer in &mut model.layers {
            let conv = |tensor_stem| Some(BlockConvSpec { tensor_stem, n_tap, group_size });
            (layer.mixer_conv, layer.feed_forward_conv) = (conv("attn_conv"), conv("ffn_conv"));
        }
    }
    model.check_residuals()?;
    let has_selector = k.opt_usize("selector_rank")?.is_some() || k.has_tensor("selector_hidden.weight", false);
    let choice = match (has_selector, k.row_len("markov_w1.weight")) {
        (false, None) => BlockChoice::Likeliest,
        (true, None) => {
            let top_k = k.positive("selector_top_k")?;
            k.check("selector_top_k", top_k, top_k <= model.n_vocab, "must be at most the vocabulary")?;
            BlockChoice::Selector { rank: k.positive("selector_rank")?, top_k }
        }
        (false, Some(rank)) => BlockChoice::Markov { rank },
        (true, Some(rank)) => {
            return Err(k.unsupported("selector_rank", rank, "a selector beside a Markov head is not implemented"));
        }
    };
    let target_layers = k.opt_sizes("target_layers")?.ok_or_else(|| k.missing("target_layers"))?;
    let n = target_layers.len();
    k.check(
        "target_layers",
        n,
        (1..=MAX_BLOCK).contains(&n),
        "it is a list of layers of the model beside the drafter",
    )?;
    if let Some(&layer) = target_layers.iter().find(|&&layer| layer > target.n_layer()) {
        return Err(other_target(k, "target_layers", layer, &format!("{} layers", target.n_layer())));
    }
    let block_size = k.positive("block_size")?;
    k.check("block_size", block_size, (2..=MAX_BLOCK).contains(&block_size), "must be 2 to 1024")?;
    let mask_token = k.special_token("mask_token_id", model.n_vocab)?;
    let mut projection = ModelSpec {
        layers: Vec::new(),
        takes_context: false,
        output: OutputSpec { norm: Some(norm.with_tensor("enc.output_norm")), head: None, ..model.output.clone() },
        ..model.clone()
    };
    let width = target.n_embd.saturating_mul(n);
    projection.embedding.state = Some(StateInput::Projected(ProjectedState { width, norm: None }));
    Ok(DflashSpec { model, projection, target_layers, block_size, mask_token, choice })
}
