//! Small models for tests, and what the tests of several files share.

// Each test file that takes this in uses a part of it.
#![allow(dead_code)]

use metal_attention::gguf::{GgufFile, GgufWriter, Metadata, TensorDecl, TensorType};
use metal_attention::{BatchToken, ForwardPass, ModelSpec, Weights};
use metal_attention_model::ModelShape;

/// What makes all layers of a Qwen 3.5 attention whose result goes through a gate.
pub const GATED_ATTENTION: [(&str, u32); 7] = [
    ("full_attention_interval", 1),
    ("ssm.group_count", 1),
    ("ssm.state_size", 8),
    ("ssm.time_step_rank", 1),
    ("ssm.inner_size", 8),
    ("ssm.conv_kernel", 4),
    ("rope.dimension_count", 8),
];

/// A model with random weights.
pub struct Toy {
    pub name: &'static str,
    pub spec: ModelSpec,
    pub weights: Weights,
}

/// The model that `metadata` describes: what a file of its must have, in 32-bit floats.
pub fn toy(name: &'static str, metadata: &Metadata) -> Toy {
    toy_with_bf16(name, metadata, &|_| false)
}

/// The same, but that matrices of which `is_bf16` says so have 16 bits a number.
pub fn toy_with_bf16(name: &'static str, metadata: &Metadata, is_bf16: &dyn Fn(&str) -> bool) -> Toy {
    let spec = ModelSpec::from_metadata(metadata).unwrap_or_else(|e| panic!("{name}: {e}"));
    let tensors: Vec<_> = spec.tensors().into_iter().filter(|tensor| tensor.required).collect();
    let decl = |t: &metal_attention_model::TensorSpec| TensorDecl {
        ty: if is_bf16(&t.name) { TensorType::BF16 } else { TensorType::F32 },
        name: t.name.clone(),
        shape: t.shape.clone(),
    };
    let decls: Vec<_> = tensors.iter().map(decl).collect();
    let mut writer = GgufWriter::new(Vec::new(), 3, metadata, &decls).expect("a header");
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let mut random = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
    };
    for tensor in &tensors {
        let n: usize = tensor.shape.iter().product();
        // So that activations keep their size from layer to layer, and softmax sees more than one position.
        let scale = 1.7 / (tensor.shape[0] as f32).sqrt();
        // Of a state most is left after a token.
        let (mean, scale) = match tensor.name.rsplit_once('.') {
            _ if tensor.is_decay() => (-4.0, 1.0),
            Some((role, "bias")) if role.ends_with("ssm_dt") => (-4.0, 1.0),
            _ if tensor.is_matrix() => (0.0, scale),
            _ => (1.0, 0.3),
        };
        let values = (0..n).map(|_| mean + scale * random());
        // The upper half of a number in 32 bits is one in 16.
        let first = if is_bf16(&tensor.name) { 2 } else { 0 };
        let bytes: Vec<u8> = values.flat_map(|v| v.to_le_bytes().into_iter().skip(first)).collect();
        writer.write(&bytes).expect("memory");
    }
    read(name, &writer.finish().expect("all tensors"))
}

/// The model of a file.
pub fn read(name: &'static str, file: &[u8]) -> Toy {
    let file = GgufFile::from_bytes(file).expect("a file");
    let spec = ModelSpec::from_gguf(&file).expect("a model");
    let weights = Weights::load(&file, &spec).expect("its weights");
    Toy { name, spec, weights }
}

pub fn metadata(architecture: &'static str, n_layer: usize, more: &[(&str, u32)]) -> Metadata {
    let custom = ModelShape::named("custom").expect("a named shape").clone();
    let shape = ModelShape {
        architecture,
        n_layer,
        n_embd: 32,
        n_head: 4,
        n_head_kv: 2,
        head_dim: 16,
        n_ff: 40,
        n_vocab: 96,
        norm_eps: 1e-3,
        ..custom
    };
    let mut metadata = shape.metadata();
    for (key, value) in more {
        metadata.set(format!("{architecture}.{key}"), *value);
    }
    metadata
}

/// Kimi Linear, with latent attention in the second of four layers: experts after the first, heads of `head_dim` elements in
/// the others.
pub fn kimi_linear(head_dim: u32) -> Metadata {
    let keys = [
        ("attention.key_length_mla", 24),
        ("attention.value_length_mla", 12),
        ("attention.kv_lora_rank", 24),
        ("rope.dimension_count", 8),
        ("kda.head_dim", head_dim),
        ("ssm.conv_kernel", 4),
        ("leading_dense_block_count", 1),
        ("expert_count", 4),
        ("expert_used_count", 2),
        ("expert_feed_forward_length", 16),
        ("expert_shared_count", 1),
        ("expert_gating_func", 2),
    ];
    let mut metadata = metadata("kimi-linear", 4, &keys);
    metadata.set("kimi-linear.attention.head_count_kv", vec![0u32, 1, 0, 0]);
    metadata
}

pub fn some_ids(n: usize) -> Vec<u32> {
    (0..n).map(|i| ((i * i * 31 + i * 7 + 3) % 96) as u32).collect()
}

/// The batch of `ids` at the end of sequence `seq`, with all wanted or only the last.
pub fn batch(pass: &dyn ForwardPass, seq: usize, ids: &[u32], all: bool) -> Vec<BatchToken> {
    let start = pass.n_past(seq);
    let token = |(i, &id)| BatchToken { id, seq, pos: start + i, output: all || i + 1 == ids.len() };
    ids.iter().enumerate().map(token).collect()
}

pub fn nmse(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let error: f64 = want.iter().zip(got).map(|(w, g)| f64::from(w - g).powi(2)).sum();
    error / want.iter().map(|&w| f64::from(w).powi(2)).sum::<f64>()
}

/// The most that any logits may differ from the CPU's, which computes in other orders. A state that is a token further, or
/// another text's, gives 1e-3 and more.
pub const LIMIT: f64 = 1e-8;

/// Appends `ids` to sequence `seq`; all their logits.
pub fn logits(pass: &mut dyn ForwardPass, seq: usize, ids: &[u32]) -> Vec<f32> {
    let batch = batch(pass, seq, ids, true);
    pass.forward(&batch).unwrap().as_slice().to_vec()
}

/// Fails where `got` is not `want`.
#[track_caller]
pub fn close(got: &[f32], want: &[f32], what: &str) {
    let error = nmse(got, want);
    assert!(error < LIMIT, "{what}: NMSE {error:e}");
}

/// The token `id` that goes on with sequence `seq`.
pub fn token(pass: &dyn ForwardPass, seq: usize, id: u32) -> BatchToken {
    BatchToken { id, seq, pos: pass.n_past(seq), output: true }
}

/// `n` ids that greedy decoding appends to the text of sequence `seq` after `id`, which comes first.
pub fn greedy(pass: &mut dyn ForwardPass, seq: usize, id: u32, n: usize) -> Vec<u32> {
    let mut ids = vec![id];
    for i in 0..n {
        let next = pass.forward_greedy(&[token(pass, seq, ids[i])]).unwrap()[0];
        ids.push(next);
    }
    ids.split_off(1)
}
