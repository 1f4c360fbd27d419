//! Block drafters as data.

use metal_attention_gguf::Metadata;
use metal_attention_model::{BlockChoice, BlockConvSpec, DflashSpec, Mask, ModelError, ModelShape, ModelSpec};

/// The target of the drafters.
pub(crate) fn target() -> ModelSpec {
    ModelSpec::from_metadata(&ModelShape::custom("llama").unwrap().metadata()).unwrap()
}

/// The metadata of a drafter for `target`, of DFlash-2 with `selects`.
pub(crate) fn dflash(target: &ModelSpec, selects: bool) -> Metadata {
    let mut m = Metadata::default();
    m.set("general.architecture", "dflash");
    let sizes = [("block_count", 2), ("embedding_length", target.n_embd), ("vocab_size", target.n_vocab)];
    let more = [("context_length", 512), ("feed_forward_length", 96), ("attention.head_count", 4), ("block_size", 8)];
    let of_dflash_2 = [("conv_kernel_size", 3), ("conv_group_size", 16), ("selector_rank", 8), ("selector_top_k", 4)];
    let of_dflash_2 = of_dflash_2.into_iter().filter(|_| selects);
    for (key, n) in sizes.into_iter().chain(more).chain(of_dflash_2) {
        m.set(format!("dflash.{key}"), n as u32);
    }
    m.set("dflash.attention.layer_norm_rms_epsilon", 1e-5_f32);
    m.set("dflash.target_layers", vec![2_u32, 0, 4]);
    m.set("tokenizer.ggml.mask_token_id", 3_u32);
    m
}

#[test]
fn block_drafters_have_layers_and_a_projection() {
    let target = target();
    let n_embd = target.n_embd;
    let spec = DflashSpec::from_metadata(&dflash(&target, false), &target).unwrap();
    let DflashSpec { model, projection, target_layers, block_size, mask_token, choice } = &spec;
    assert_eq!((&target_layers[..], *block_size, *mask_token, *choice), (&[2, 0, 4][..], 8, 3, BlockChoice::Likeliest));
    assert!(model.takes_context && model.n_layer() == 2 && !model.generates_text());
    assert_eq!((projection.n_layer(), projection.state_width()), (0, 3 * n_embd));
    assert!(!projection.takes_context && projection.output.head.is_none());
    assert_eq!((spec.max_drafts(), spec.block_len(4)), (7, 5));
    let names: Vec<_> = projection.tensors().into_iter().filter(|t| t.required).map(|t| t.name).collect();
    assert_eq!(names, ["fc.weight", "enc.output_norm.weight"]);
    let without_anchor = DflashSpec { choice: BlockChoice::Markov { rank: 8 }, ..spec.clone() };
    assert_eq!((without_anchor.max_drafts(), without_anchor.block_len(4)), (8, 4));
}

#[test]
fn dflash_2_has_convolutions_around_its_parts() {
    let target = target();
    let spec = DflashSpec::from_metadata(&dflash(&target, true), &target).unwrap();
    assert_eq!(spec.choice, BlockChoice::Selector { rank: 8, top_k: 4 });
    let conv = |tensor_stem| Some(BlockConvSpec { tensor_stem, n_tap: 3, group_size: 16 });
    for layer in &spec.model.layers {
        assert_eq!((layer.mixer_conv, layer.feed_forward_conv), (conv("attn_conv"), conv("ffn_conv")));
    }
    let n_embd = target.n_embd;
    let shape = |name: &str| spec.model.tensors().into_iter().find(|t| t.name == name).map(|t| t.shape);
    assert_eq!(shape("blk.1.ffn_conv_base"), Some(vec![n_embd, 3, 2]));
    assert_eq!(shape("blk.0.attn_conv_proj.weight"), Some(vec![n_embd, 2 * 3 * (n_embd / 16)]));
    // A model without blocks has no such convolutions.
    let other = ModelSpec { takes_context: false, ..spec.model.clone() };
    assert!(matches!(other.check_residuals(), Err(ModelError::InvalidResidual { layer: 0, .. })));
}

#[test]
fn layers_of_block_drafters_may_have_windows() {
    let target = target();
    let masks = |m: &Metadata| -> Vec<Mask> {
        let spec = DflashSpec::from_metadata(m, &target).unwrap();
        spec.model.layers.iter().filter_map(|layer| layer.mixer.attention()).map(|a| a.mask).collect()
    };
    let mut m = dflash(&target, false);
    assert_eq!(masks(&m), [Mask::Causal; 2]);
    m.set("dflash.attention.sliding_window", 100_u32);
    assert_eq!(masks(&m), [Mask::Window(100); 2]);
    m.set("dflash.attention.sliding_window_pattern", vec![false, true]);
    assert_eq!(masks(&m), [Mask::Causal, Mask::Window(100)]);
}
