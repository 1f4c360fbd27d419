//! `LoadedModel::load`: tensors that are missing or have another shape are named; tensors may be stored in other layouts.

use metal_attention_gguf::{GgufFile, GgufWriter, TensorDecl, TensorType};
use metal_attention_model::{
    AttentionWeights, DenseWeights, FeedForward, Layer, Linear, Loaded, LoadedModel, Mixer, ModelError, ModelShape,
    ModelSpec, NormWeights, Weights,
};

/// The shape of a small model.
fn shape(architecture: &'static str) -> ModelShape {
    ModelShape {
        architecture,
        n_layer: 2,
        n_embd: 16,
        n_head: 4,
        n_head_kv: 2,
        head_dim: 6,
        n_ff: 24,
        n_vocab: 10,
        ..ModelShape::named("custom").unwrap().clone()
    }
}

/// Writes the tensors of `shape` in F32, changed by `edit`; tensor `i` is filled with `i`.
fn load(shape: &ModelShape, edit: impl Fn(&mut Vec<TensorDecl>)) -> Result<Weights, ModelError> {
    let metadata = shape.metadata();
    let spec = ModelSpec::from_metadata(&metadata).unwrap();
    let declare =
        |t: metal_attention_model::TensorSpec| TensorDecl { name: t.name, shape: t.shape, ty: TensorType::F32 };
    let mut tensors: Vec<_> = shape.tensors(&spec).into_iter().map(declare).collect();
    edit(&mut tensors);
    let mut writer = GgufWriter::new(Vec::new(), 3, &metadata, &tensors).unwrap();
    for (i, tensor) in tensors.iter().enumerate() {
        for _ in 0..tensor.shape.iter().product::<usize>() {
            writer.write(&(i as f32).to_le_bytes()).unwrap();
        }
    }
    let file = GgufFile::from_bytes(&writer.finish().unwrap()).unwrap();
    LoadedModel::with_spec(&file, spec).map(|model| model.weights().clone())
}

fn attention(layer: &Layer<Loaded>) -> &AttentionWeights {
    let Mixer::Attention(a) = &layer.mixer else { panic!("not attention") };
    a
}

fn dense(layer: &Layer<Loaded>) -> &DenseWeights {
    let FeedForward::Dense(dense) = &layer.feed_forward else { panic!("not dense") };
    dense
}

/// The length of a norm's weight.
fn len(norm: Option<&NormWeights>) -> Option<usize> {
    norm.map(|norm| norm.weight.len())
}

#[test]
fn a_complete_file_loads() {
    for architecture in ["llama", "qwen2", "qwen3"] {
        for tied in [true, false] {
            let weights = load(&ModelShape { tied, ..shape(architecture) }, |_| {}).unwrap();
            assert_eq!(weights.output.as_ref().unwrap().weight.name() == "token_embd.weight", tied);
            let layer = &weights.layers[1];
            let a = attention(layer);
            let (k, v) = (a.k.as_ref().unwrap(), a.v.as_ref().unwrap());
            assert_eq!((a.q.weight.shape(), k.weight.shape()), (&[16, 24][..], &[16, 12][..]));
            assert_eq!(v.bias.as_ref().map(Vec::len), (architecture == "qwen2").then_some(12));
            assert_eq!(len(a.q_norm.as_ref()), (architecture == "qwen3").then_some(6));
            assert_eq!(dense(layer).down.weight.shape(), [24, 16]);
            assert_eq!(
                (len(layer.feed_forward_norm.as_ref()), len(weights.output_norm.as_ref())),
                (Some(16), Some(16))
            );
            let names: Vec<_> = layer.linears().iter().map(|linear| linear.weight.name()).collect();
            assert_eq!(names.len(), 7, "{names:?}");
            // Two layers, the embedding table and, if untied, a head.
            assert_eq!(weights.tensors().len(), 2 * 7 + 1 + usize::from(!tied));
        }
    }
}

#[test]
fn every_required_tensor_is_named_when_it_is_missing() {
    for architecture in ["llama", "qwen2", "qwen3"] {
        let shape = shape(architecture);
        let spec = ModelSpec::from_metadata(&shape.metadata()).unwrap();
        for required in shape.tensors(&spec) {
            let error = load(&shape, |tensors| tensors.retain(|t| t.name != required.name)).unwrap_err();
            let named = matches!(&error, ModelError::MissingTensor { name, shape } if *name == required.name && *shape == required.shape);
            assert!(named, "{}: {error}", required.name);
        }
    }
}

#[test]
fn every_tensor_of_another_shape_is_named() {
    let shape = ModelShape { tied: false, ..shape("qwen2") };
    let spec = ModelSpec::from_metadata(&shape.metadata()).unwrap();
    for required in shape.tensors(&spec) {
        let widen = |tensors: &mut Vec<TensorDecl>| {
            let tensor = tensors.iter_mut().find(|t| t.name == required.name).unwrap();
            *tensor.shape.last_mut().unwrap() += 2;
        };
        let error = load(&shape, widen).unwrap_err();
        let mut found = required.shape.clone();
        *found.last_mut().unwrap() += 2;
        let named = matches!(&error, ModelError::TensorShape { name, found: f, expected }
            if *name == required.name && *f == found && *expected == required.shape);
        assert!(named, "{}: {error}", required.name);
    }
}

#[test]
fn optional_tensors_are_checked_and_used_if_present() {
    let bias = |shape: Vec<usize>| {
        move |tensors: &mut Vec<TensorDecl>| {
            tensors.push(TensorDecl {
                name: "blk.0.attn_output.bias".into(),
                shape: shape.clone(),
                ty: TensorType::F32,
            });
        }
    };
    let weights = load(&shape("llama"), bias(vec![16])).unwrap();
    let n_tensors = 2 + 2 * 9;
    assert_eq!(attention(&weights.layers[0]).out.bias, Some(vec![n_tensors as f32; 16]));
    assert!(attention(&weights.layers[1]).out.bias.is_none());
    let error = load(&shape("llama"), bias(vec![8])).unwrap_err();
    assert!(error.to_string().contains("blk.0.attn_output.bias"), "{error}");

    let llama3 = ModelShape { rope_factors: ModelShape::named("llama-3.2-1b").unwrap().rope_factors, ..shape("llama") };
    assert_eq!(load(&llama3, |_| {}).unwrap().rope_factors["rope_freqs"].len(), 3);
}

#[test]
fn fused_and_tied_matrices_are_found() {
    let fuse = |tensors: &mut Vec<TensorDecl>| {
        tensors.retain(|t| !["blk.1.attn_q.weight", "blk.1.attn_k.weight"].contains(&t.name.as_str()));
        let v = tensors.iter_mut().find(|t| t.name == "blk.1.attn_v.weight").unwrap();
        (v.name, v.shape) = ("blk.1.attn_qkv.weight".into(), vec![16, 48]);
    };
    let weights = load(&shape("qwen2"), fuse).unwrap();
    let a = attention(&weights.layers[1]);
    let (k, v) = (a.k.as_ref().unwrap(), a.v.as_ref().unwrap());
    for (linear, n) in [(&a.q, 24), (k, 12), (v, 12)] {
        assert_eq!((linear.weight.name(), linear.weight.n_rows()), ("blk.1.attn_qkv.weight", n));
        assert_eq!(linear.bias.as_ref().unwrap().len(), n);
    }
    assert_ne!(k.bias, v.bias);

    let untied = ModelShape { tied: false, ..shape("llama") };
    let weights = load(&untied, |tensors| tensors.retain(|t| t.name != "token_embd.weight")).unwrap();
    assert_eq!(weights.token_embd.as_ref().unwrap().weight.name(), "output.weight");
}

#[test]
fn scales_of_whole_matrices_are_refused_unless_they_are_1() {
    let scale = |name: &str| TensorDecl { name: name.to_owned(), shape: vec![1], ty: TensorType::F32 };
    let name = "blk.0.ffn_up.scale";
    let error = load(&shape("llama"), |tensors| tensors.push(scale(name))).unwrap_err();
    assert!(
        matches!(&error, ModelError::TensorValue { name: found, value, .. } if found == name && *value > 1.0),
        "{error}"
    );
    // The second tensor is filled with 1. A scale of a tensor that does not exist is ignored.
    load(&shape("llama"), |tensors| tensors.insert(1, scale(name))).unwrap();
    load(&shape("llama"), |tensors| tensors.push(scale("blk.0.ffn_up.input_scale"))).unwrap();
}

/// The weights of a Qwen3-Next file in which each row of a matrix is filled with its number. `older`: with the fused
/// matrices of older files.
fn qwen3next(older: bool) -> Weights {
    let shape = ModelShape { n_layer: 1, ..ModelShape::custom("qwen3next").unwrap() };
    let metadata = shape.metadata();
    let spec = ModelSpec::from_metadata(&metadata).unwrap();
    let declare =
        |t: metal_attention_model::TensorSpec| TensorDecl { name: t.name, shape: t.shape, ty: TensorType::F32 };
    let mut tensors: Vec<_> = shape.tensors(&spec).into_iter().map(declare).collect();
    if older {
        tensors.retain(|t| !["blk.0.attn_qkv.weight", "blk.0.attn_gate.weight"].contains(&t.name.as_str()));
        tensors.push(TensorDecl { name: "blk.0.ssm_in.weight".into(), shape: vec![256, 384], ty: TensorType::F32 });
    }
    let mut writer = GgufWriter::new(Vec::new(), 3, &metadata, &tensors).unwrap();
    for tensor in &tensors {
        for i in 0..tensor.shape.iter().product::<usize>() {
            writer.write(&((i / tensor.shape[0]) as f32).to_le_bytes()).unwrap();
        }
    }
    let file = GgufFile::from_bytes(&writer.finish().unwrap()).unwrap();
    LoadedModel::with_spec(&file, spec).unwrap().weights().clone()
}

#[test]
fn delta_rule_rows_are_found_in_both_layouts() {
    let numbers = |linear: &Linear| -> Vec<usize> {
        let values = linear.weight.to_f32();
        values.chunks_exact(linear.weight.row_len()).map(|row| row[0] as usize).collect()
    };
    let rule = |weights: &Weights| match &weights.layers[0].mixer {
        Mixer::DeltaRule(rule) => rule.clone(),
        other => panic!("no delta rule: {other:?}"),
    };
    let range = |ranges: [std::ops::Range<usize>; 2]| ranges.into_iter().flatten().collect::<Vec<_>>();
    // Two key heads of 32 elements, each with two value heads of 32. Each key head has two rows of beta and two of the
    // decay.
    for older in [false, true] {
        let w = rule(&qwen3next(older));
        assert_eq!((numbers(&w.beta), numbers(&w.decay)), (vec![0, 1, 4, 5], vec![2, 3, 6, 7]));
        let [q, k, v, gate] = if older {
            [
                range([0..32, 192..224]),
                range([32..64, 224..256]),
                range([64..128, 256..320]),
                range([128..192, 320..384]),
            ]
        } else {
            [range([0..32, 32..64]), range([64..96, 96..128]), range([128..192, 192..256]), range([0..64, 64..128])]
        };
        assert_eq!([numbers(&w.q), numbers(&w.k), numbers(&w.v), numbers(&w.gate)], [q, k, v, gate], "{older}");
        // Taps are transposed: one tap of all channels after the other.
        assert_eq!((w.taps[0], w.taps[255], w.taps[256]), (0.0, 255.0, 0.0));
    }
}

/// The file of `shape` without the tensors of `lacking`; tensor `i` of the others is filled with `first + i`.
fn file_without(shape: &ModelShape, lacking: &[&str], first: f32) -> GgufFile {
    let metadata = shape.metadata();
    let spec = ModelSpec::from_metadata(&metadata).unwrap();
    let tensors = shape.tensors(&spec).into_iter().filter(|t| !lacking.contains(&t.name.as_str()));
    let tensors: Vec<_> = tensors.map(|t| TensorDecl { name: t.name, shape: t.shape, ty: TensorType::F32 }).collect();
    let mut writer = GgufWriter::new(Vec::new(), 3, &metadata, &tensors).unwrap();
    for (i, tensor) in tensors.iter().enumerate() {
        for _ in 0..tensor.shape.iter().product::<usize>() {
            writer.write(&(first + i as f32).to_le_bytes()).unwrap();
        }
    }
    GgufFile::from_bytes(&writer.finish().unwrap()).unwrap()
}

#[test]
fn a_second_model_reads_what_it_lacks_of_the_first() {
    let (table, head) = ("token_embd.weight", "output.weight");
    let own = ModelShape { tied: false, ..shape("llama") };
    let tied = ModelShape { tied: true, ..shape("llama") };
    let of_first = |weight: &Linear, first: &Linear| weight.weight.is_same(&first.weight);
    for first_shape in [&own, &tied] {
        let first = LoadedModel::load(&file_without(first_shape, &[], 100.0)).unwrap();
        let ends = [&first.weights().token_embd, &first.weights().output];
        let [first_table, first_head] = ends.map(|end| end.as_ref().unwrap());
        let beside = |lacking: &[&str]| {
            let file = file_without(&own, lacking, 0.0);
            LoadedModel::load_beside(&file, &first).map(|model| model.weights().clone())
        };
        // Both are the first's.
        let neither = beside(&[table, head]).unwrap();
        assert!(of_first(neither.token_embd.as_ref().unwrap(), first_table));
        assert!(of_first(neither.output.as_ref().unwrap(), first_head));
        assert_eq!(neither.own_head().is_some(), first.weights().own_head().is_some());
        // The table is the first's, the head the file's.
        let only_head = beside(&[table]).unwrap();
        assert!(of_first(only_head.token_embd.as_ref().unwrap(), first_table));
        assert!(only_head.own_head().is_some_and(|own| !of_first(own, first_head)));
        // A table without a head is a tied head, as in a model alone.
        let only_table = beside(&[head]).unwrap();
        assert!(!of_first(only_table.token_embd.as_ref().unwrap(), first_table));
        assert!(only_table.own_head().is_none() && only_table.output.is_some());
        // Everything else is the file's.
        assert!(neither.output_norm.as_ref().is_some_and(|norm| norm.weight[0] < 100.0));
        let both = beside(&[]).unwrap();
        assert!(!of_first(both.token_embd.as_ref().unwrap(), first_table) && both.own_head().is_some());
        let no_norm = beside(&[table, head, "output_norm.weight"]);
        assert!(matches!(no_norm, Err(ModelError::MissingTensor { name, .. }) if name == "output_norm.weight"));
    }
}

#[test]
fn a_first_model_of_another_width_or_vocabulary_is_refused() {
    let file = file_without(&shape("llama"), &["token_embd.weight", "output.weight"], 0.0);
    for other in [ModelShape { n_vocab: 11, ..shape("llama") }, ModelShape { n_embd: 24, ..shape("llama") }] {
        let first = LoadedModel::load(&file_without(&other, &[], 0.0)).unwrap();
        let error = LoadedModel::load_beside(&file, &first).unwrap_err();
        let ModelError::FirstTensorShape { name, found, expected } = &error else { panic!("{error}") };
        assert_eq!((name.as_str(), *found, *expected), ("token_embd.weight", [other.n_embd, other.n_vocab], [16, 10]));
        assert!(error.to_string().contains("token_embd.weight of shape [16, 10]"), "{error}");
    }
    let alone = LoadedModel::load(&file).unwrap_err();
    assert!(matches!(alone, ModelError::MissingTensor { .. }), "{alone}");
}
