//! Models whose attention has a gate with a tensor of its own: which layers have which gate, window, rotation and activation.

use metal_attention_gguf::{GgufFile, GgufWriter, Metadata, TensorDecl, TensorType};
use metal_attention_model::{
    Activation, AttentionGate, AttentionSpec, FeedForward, GateActivation, GateWidth, LoadedModel, Mask, Mixer,
    ModelShape, ModelSpec, Positions, Rope, RopeFactors, RopeLayout, RopeScaling,
};

/// The small shape of an architecture with other keys.
fn spec(architecture: &str, change: impl Fn(&mut Metadata)) -> ModelSpec {
    let mut metadata = ModelShape::custom(architecture).unwrap().metadata();
    change(&mut metadata);
    ModelSpec::from_metadata(&metadata).unwrap()
}

fn attention(spec: &ModelSpec) -> Vec<&AttentionSpec> {
    spec.layers.iter().filter_map(|layer| layer.mixer.attention()).collect()
}

fn gate(width: GateWidth, activation: GateActivation) -> AttentionGate {
    AttentionGate::Tensor { width, activation }
}

#[test]
fn each_architecture_has_its_gate() {
    let (element, head) = (GateWidth::Element, GateWidth::Head);
    for (architecture, expected, n_rows) in [
        ("afmoe", gate(element, GateActivation::Sigmoid), 256),
        ("laguna", gate(head, GateActivation::Softplus), 4),
        ("muse-glimmer", gate(element, GateActivation::Sigmoid), 256),
        ("spark2_5", gate(head, GateActivation::Sigmoid), 4),
        ("step35", gate(head, GateActivation::Sigmoid), 4),
    ] {
        let spec = spec(architecture, |_| {});
        assert!(attention(&spec).iter().all(|a| a.gate == Some(expected)), "{architecture}");
        let tensors = spec.tensors();
        let gate = tensors.iter().find(|t| t.name == "blk.3.attn_gate.weight").unwrap();
        assert_eq!(gate.shape, [256, n_rows], "{architecture}");
    }
}

#[test]
fn layers_with_windows_rotate_otherwise() {
    let ropes = |spec: &ModelSpec| -> Vec<Option<Rope>> { attention(spec).iter().map(|a| a.rope().copied()).collect() };
    // The first layer is full; it alone has YaRN, whose other parameters are not read.
    let laguna = spec("laguna", |m| {
        m.set("laguna.rope.scaling.type", "yarn");
        m.set("laguna.rope.scaling.factor", 4.0f32);
        m.set("laguna.rope.scaling.yarn_beta_fast", 8.0f32);
    });
    let found = ropes(&laguna);
    assert_eq!(attention(&laguna)[0].mask, Mask::Causal);
    assert_eq!(attention(&laguna)[1].mask, Mask::Window(512));
    let full = found[0].unwrap();
    assert!(matches!(full.scaling, RopeScaling::Yarn { factor: 4.0, beta_fast: 32.0, beta_slow: 1.0, .. }), "{full:?}");
    assert_eq!((full.n_rot, full.freq_base), (64, 10_000.0));
    assert_eq!(found[1], Some(Rope::new(32, RopeLayout::Halves, 20_000.0)));
    // The last layer is full. It rotates half as many elements, and alone has divisors, which are stored for all.
    let found = ropes(&spec("step35", |_| {}));
    assert_eq!(found[0], Some(Rope::new(64, RopeLayout::Halves, 20_000.0)));
    let full = Rope { factors: RopeFactors::FirstOfTensor { n: 32 }, ..Rope::new(32, RopeLayout::Halves, 10_000.0) };
    assert_eq!(found[3], Some(full));
    // No base for windows: 10000, whatever the other layers have.
    let without = |m: &mut Metadata| {
        m.remove("step35.rope.freq_base_swa");
        m.set("step35.rope.freq_base", 70_000.0f32);
    };
    let bases: Vec<_> = ropes(&spec("step35", without)).iter().map(|rope| rope.unwrap().freq_base).collect();
    assert_eq!(bases, [10_000.0, 10_000.0, 10_000.0, 70_000.0]);
    // Full layers have no positions, wherever the pattern has them.
    let muse = spec("muse-glimmer", |m| m.set("muse-glimmer.attention.sliding_window_pattern", vec![0u32, 1, 1, 0]));
    assert_eq!(ropes(&muse).iter().map(Option::is_some).collect::<Vec<_>>(), [false, true, true, false]);
    // Every fourth layer has no positions, whether it has a window or not.
    let afmoe = spec("afmoe", |m| m.set("afmoe.attention.sliding_window_pattern", vec![0u32, 1, 1, 1]));
    let found: Vec<_> = attention(&afmoe).iter().map(|a| (a.mask, a.positions == Positions::None)).collect();
    let (full, window) = (Mask::Causal, Mask::Window(512));
    assert_eq!(found, [(full, false), (window, false), (window, false), (window, true)]);
}

#[test]
fn limits_of_activations_are_by_layer() {
    let step = spec("step35", |m| {
        m.set("step35.swiglu_clamp_exp", vec![0.0f32, 0.0, 0.5, 0.0]);
        m.set("step35.swiglu_clamp_shexp", vec![1.5f32, 0.25, 0.0, 0.0]);
    });
    let limit = |activation| match activation {
        Activation::ClampedSilu { limit } => Some(limit),
        Activation::Silu => None,
        other => panic!("{other:?}"),
    };
    let limits = step.layers.iter().map(|layer| match &layer.feed_forward {
        FeedForward::Dense(dense) => (limit(dense.activation), None),
        FeedForward::Experts(e) => (limit(e.expert.activation), Some(limit(e.shared.unwrap().dense.activation))),
        other => panic!("{other:?}"),
    });
    // The first layer is dense; dense layers have the limits of shared experts.
    let found: Vec<_> = limits.collect();
    assert_eq!(found, [(Some(1.5), None), (None, Some(Some(0.25))), (Some(0.5), Some(None)), (None, Some(None))]);
}

#[test]
fn epsilons_and_caps_are_those_of_muse_glimmer() {
    let muse = spec("muse-glimmer", |m| m.set("muse-glimmer.attention.layer_norm_rms_epsilon", 1e-3f32));
    let embedding = muse.embedding.norm.unwrap();
    assert!(!embedding.has_weight);
    let layer = &muse.layers[0];
    let eps = [
        Some(embedding),
        layer.mixer_norm,
        layer.mixer_post_norm,
        layer.feed_forward_norm,
        layer.feed_forward_post_norm,
    ]
    .map(|norm| norm.unwrap().eps);
    assert_eq!(eps, [1e-3, 1e-3, 1e-8, 1e-3, 1e-8]);
    let cap = |spec: &ModelSpec| spec.output.head.unwrap().soft_cap;
    let key = "muse-glimmer.final_logit_softcapping";
    assert_eq!(cap(&muse), Some(8.0));
    assert_eq!(cap(&spec("muse-glimmer", |m| m.set(key, 0.0f32))), None);
    assert_eq!(cap(&spec("muse-glimmer", |m| drop(m.remove(key)))), Some(30.0));
}

/// A file of the small shape whose tensors `edit` changes; all values are 1.
fn file(architecture: &str, edit: impl Fn(&mut Vec<TensorDecl>)) -> GgufFile {
    let shape = ModelShape::custom(architecture).unwrap();
    let metadata = shape.metadata();
    let spec = ModelSpec::from_metadata(&metadata).unwrap();
    let tensors = shape.tensors(&spec).into_iter();
    let mut tensors: Vec<_> =
        tensors.map(|t| TensorDecl { name: t.name, shape: t.shape, ty: TensorType::F32 }).collect();
    edit(&mut tensors);
    let mut writer = GgufWriter::new(Vec::new(), 3, &metadata, &tensors).unwrap();
    for tensor in &tensors {
        let n = tensor.shape.iter().product::<usize>();
        writer.write(&1.0f32.to_le_bytes().repeat(n)).unwrap();
    }
    GgufFile::from_bytes(&writer.finish().unwrap()).unwrap()
}

#[test]
fn the_file_decides_about_gates_norms_and_divisors() {
    let laguna = |n_rows| {
        let file = file("laguna", |tensors| {
            let gate = tensors.iter_mut().find(|t| t.name == "blk.1.attn_gate.weight").unwrap();
            gate.shape = vec![256, n_rows];
        });
        LoadedModel::load(&file).map(|model| attention(model.spec())[1].gate)
    };
    assert_eq!(laguna(4).unwrap(), Some(gate(GateWidth::Head, GateActivation::Softplus)));
    assert_eq!(laguna(256).unwrap(), Some(gate(GateWidth::Element, GateActivation::Softplus)));
    let error = laguna(8).unwrap_err().to_string();
    assert!(error.contains("blk.1.attn_gate.weight"), "{error}");

    let step = file("step35", |tensors| {
        tensors.retain(|t| !["blk.1.attn_gate.weight", "blk.2.attn_q_norm.weight"].contains(&t.name.as_str()));
        tensors.push(TensorDecl { name: "rope_freqs.weight".into(), shape: vec![32], ty: TensorType::F32 });
    });
    let model = LoadedModel::load(&step).unwrap();
    let (spec, weights) = (model.spec(), model.weights());
    let found: Vec<_> = attention(spec).iter().map(|a| (a.gate.is_some(), a.qk_norm.is_some())).collect();
    assert_eq!(found, [(true, true), (false, true), (true, false), (true, true)]);
    let Mixer::Attention(second) = &weights.layers[1].mixer else { panic!("attention") };
    assert!(second.gate.is_none());
    assert_eq!(weights.rope_factors["rope_freqs"].len(), 32);
    let n_used = |i: usize| weights.rope_factors(attention(spec)[i].rope().unwrap(), 64).map(<[f32]>::len);
    assert_eq!((n_used(0), n_used(3)), (None, Some(32)));
}
