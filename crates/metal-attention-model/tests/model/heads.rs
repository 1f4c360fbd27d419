//! Specs of prediction heads (multi-token prediction), and their lists of tensors.

use metal_attention_gguf::Metadata;
use metal_attention_model::{
    AttendedState, Eagle3Spec, FeedForward, HeadUse, JoinedState, Mixer, ModelError, ModelShape, ModelSpec, NormKind,
    StateInput, TensorSpec,
};

/// The heads of a small model of `architecture` with four blocks, of which the last `n_head` are heads.
fn heads(architecture: &str, n_head: u32) -> Result<Vec<ModelSpec>, ModelError> {
    let shape = ModelShape::custom(architecture).unwrap();
    let mut metadata = ModelShape { n_layer: 4, ..shape }.metadata();
    metadata.set(format!("{architecture}.nextn_predict_layers"), n_head);
    let layers = ModelSpec::from_metadata(&metadata)?.n_layer();
    assert_eq!(layers, 4 - n_head as usize, "{architecture}");
    ModelSpec::heads_from_metadata(&metadata)
}

#[test]
fn a_head_is_a_model_of_one_layer() {
    for architecture in ["deepseek2", "glm4moe", "hy_v3", "qwen35", "qwen35moe", "qwen3next"] {
        let all = heads(architecture, 1).unwrap();
        let [head] = &all[..] else { panic!("{architecture}: {} heads", all.len()) };
        assert_eq!((head.n_layer(), head.first_block), (1, 3), "{architecture}");
        let Some(StateInput::Joined(JoinedState { embedding_norm, state_norm, heads })) = head.embedding.state else {
            panic!("{architecture}: no state")
        };
        assert_eq!((embedding_norm.tensor_stem, state_norm.tensor_stem), ("nextn.enorm", "nextn.hnorm"));
        assert_eq!((heads, heads.state_before(3)), (HeadUse::Repeated, 4));
        // Not a recurrence, also where the block would be one by its number.
        let layer = &head.layers[0];
        assert!(matches!(layer.mixer, Mixer::Attention(_) | Mixer::LatentAttention(_)), "{architecture}");
        let names: Vec<_> = head.tensors().into_iter().map(|TensorSpec { name, .. }| name).collect();
        for name in ["token_embd.weight", "blk.3.nextn.eh_proj.weight", "blk.3.nextn.shared_head_norm.weight"] {
            assert!(names.iter().any(|found| found == name), "{architecture}: {name}");
        }
        assert!(!names.iter().any(|name| name.starts_with("output_norm") || name.starts_with("blk.0.")));
    }
}

#[test]
fn heads_of_a_chain_are_in_the_order_of_their_drafts() {
    let all = heads("step35", 2).unwrap();
    assert_eq!(all.iter().map(|head| head.first_block).collect::<Vec<_>>(), [2, 3]);
    for head in &all {
        let heads = head.embedding.state.unwrap().heads().unwrap();
        assert_eq!((heads, heads.state_before(2)), (HeadUse::Chained, 2));
        assert_eq!((head.n_layer(), head.ropes().len()), (1, 1));
    }
}

#[test]
fn the_head_of_nemotron_has_attention_experts_and_a_layer_norm() {
    let shape = ModelShape::custom("nemotron_h_moe").unwrap();
    let mut metadata = ModelShape { n_layer: 4, ..shape }.metadata();
    let name = |key: &str| format!("nemotron_h_moe.{key}");
    metadata.set(name("nextn_predict_layers"), 1_u32);
    metadata.set(name("attention.head_count_kv"), vec![0_u32, 2, 0, 2]);
    metadata.set(name("feed_forward_length"), vec![0_u32, 0, 48, 48]);
    metadata.set(name("attention.layer_norm_epsilon"), 1e-3_f32);
    for key in ["expert_used_count", "expert_feed_forward_length"] {
        metadata.set(name(key), 2_u32);
    }
    let all = ModelSpec::heads_from_metadata(&metadata).unwrap();
    let layer = &all[0].layers[0];
    assert!(matches!((&layer.mixer, &layer.feed_forward), (Mixer::Attention(_), FeedForward::Experts(_))));
    assert_eq!(layer.feed_forward_norm.unwrap().tensor_stem, "post_attention_norm");
    let norm = all[0].output.norm.unwrap();
    assert_eq!((norm.kind, norm.has_bias, norm.tensor_stem), (NormKind::Layer, false, "nextn.shared_head_norm"));
}

#[test]
fn heads_that_are_not_implemented_are_named() {
    assert!(heads("qwen35", 0).unwrap().is_empty());
    assert!(heads("llama", 0).unwrap().is_empty());
    match heads("llama", 1) {
        Err(ModelError::UnsupportedFeature { key, value, .. }) => {
            assert_eq!((key.as_str(), value.as_str()), ("llama.nextn_predict_layers", "1"));
        }
        other => panic!("{other:?}"),
    }
}

/// The metadata of an EAGLE-3 drafter for `target`.
pub(crate) fn eagle3(target: &ModelSpec) -> Metadata {
    let mut m = Metadata::default();
    m.set("general.architecture", "eagle3");
    let sizes = [("block_count", 1), ("embedding_length", target.n_embd), ("target_hidden_size", target.n_embd)];
    let more = [("context_length", 512), ("feed_forward_length", 96), ("attention.head_count", 4)];
    for (key, n) in sizes.into_iter().chain(more).chain([("vocab_size", target.n_vocab)]) {
        m.set(format!("eagle3.{key}"), n as u32);
    }
    m.set("eagle3.attention.layer_norm_rms_epsilon", 1e-5_f32);
    m.set("eagle3.target_layers", vec![2_u32, 0, 4]);
    m
}

#[test]
fn eagle3_has_a_layer_with_a_wide_input_and_a_projection() {
    let target = ModelSpec::from_metadata(&ModelShape::custom("llama").unwrap().metadata()).unwrap();
    let n_embd = target.n_embd;
    let mut m = eagle3(&target);
    m.set("eagle3.norm_before_fc", true);
    let Eagle3Spec { layer, projection, target_layers } = Eagle3Spec::from_metadata(&m, &target).unwrap();
    assert_eq!((target_layers, projection.state_width(), layer.state_width()), (vec![2, 0, 4], 3 * n_embd, n_embd));
    assert!(layer.attends_to_state() && layer.reads_tokens() && !projection.reads_tokens());
    let Some(StateInput::Attended(AttendedState { norms_residual: false, .. })) = layer.embedding.state else {
        panic!("{:?}", layer.embedding.state)
    };
    let shape = |spec: &ModelSpec, name: &str| {
        spec.tensors().into_iter().find(|tensor| tensor.name == name).map(|tensor| tensor.shape)
    };
    assert_eq!(shape(&layer, "blk.0.attn_q.weight"), Some(vec![2 * n_embd, n_embd]));
    assert_eq!(shape(&layer, "blk.0.attn_output.weight"), Some(vec![n_embd, n_embd]));
    assert_eq!(shape(&layer, "blk.0.attn_norm_2.weight"), Some(vec![n_embd]));
    let names: Vec<_> = projection.tensors().into_iter().map(|tensor| (tensor.name, tensor.shape)).collect();
    let wide = |name: &str, shape: &[usize]| (name.to_owned(), shape.to_vec());
    assert_eq!(names[..2], [wide("enc.output_norm.weight", &[3 * n_embd]), wide("fc.weight", &[3 * n_embd, n_embd])]);
    assert!(names[2..].iter().all(|(name, _)| name == "fc.bias"), "{names:?}");
    // Two layers cannot attend to one state.
    let two = ModelSpec { layers: vec![layer.layers[0].clone(); 2], ..layer };
    assert!(matches!(two.check_residuals(), Err(ModelError::InvalidResidual { layer: 0, .. })));
}
