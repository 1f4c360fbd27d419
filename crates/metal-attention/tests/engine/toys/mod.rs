//! Toys: small models with random weights for tests, and helpers that several test files use.

// Each test file that includes this module uses a part of it.
#![allow(dead_code)]

use metal_attention::gguf::{GgufFile, GgufWriter, Metadata, TensorDecl, TensorType};
use metal_attention::{BatchToken, ForwardPass, ModelSpec};
use metal_attention_model::{LoadedModel, ModelShape};

/// Metadata of Qwen 3.5 with which all layers have attention, whose result is gated.
pub const GATED_ATTENTION: [(&str, u32); 7] = [
    ("full_attention_interval", 1),
    ("ssm.group_count", 1),
    ("ssm.state_size", 8),
    ("ssm.time_step_rank", 1),
    ("ssm.inner_size", 8),
    ("ssm.conv_kernel", 4),
    ("rope.dimension_count", 8),
];

/// A small model with random weights.
pub struct Toy {
    /// The name in messages.
    pub name: &'static str,
    pub model: LoadedModel,
    /// The file that it is in.
    pub file: GgufFile,
}

impl Toy {
    /// The same weights with an edited specification.
    pub fn with_spec(self, edit: impl FnOnce(&mut ModelSpec)) -> Self {
        let mut spec = self.model.spec().clone();
        edit(&mut spec);
        let model = LoadedModel::with_spec(&self.file, spec).expect("tensors of the same shapes");
        Self { model, ..self }
    }
}

/// The toy that `metadata` describes, with all tensors that its architecture requires, in F32.
pub fn toy(name: &'static str, metadata: &Metadata) -> Toy {
    toy_with_bf16(name, metadata, &|_| false)
}

/// [`toy`], with those matrices in BF16 for whose names `is_bf16` returns true.
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
        // With this scale activations keep their size from layer to layer, and softmax has several positions with noticeable
        // weights.
        let scale = 1.7 / (tensor.shape[0] as f32).sqrt();
        // Decays keep most of a state.
        let (mean, scale) = match tensor.name.rsplit_once('.') {
            _ if tensor.is_decay() => (-4.0, 1.0),
            Some((role, "bias")) if role.ends_with("ssm_dt") => (-4.0, 1.0),
            _ if tensor.is_matrix() => (0.0, scale),
            _ => (1.0, 0.3),
        };
        let values = (0..n).map(|_| mean + scale * random());
        // A BF16 value is the upper half of an F32 one.
        let first = if is_bf16(&tensor.name) { 2 } else { 0 };
        let bytes: Vec<u8> = values.flat_map(|v| v.to_le_bytes().into_iter().skip(first)).collect();
        writer.write(&bytes).expect("memory");
    }
    read(name, &writer.finish().expect("all tensors"))
}

/// Loads the model of a GGUF file.
pub fn read(name: &'static str, file: &[u8]) -> Toy {
    let file = GgufFile::from_bytes(file).expect("a file");
    Toy { name, model: LoadedModel::load(&file).expect("a model"), file }
}

/// The metadata of a small model with `more` keys, each without its prefix `ARCHITECTURE.`.
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

/// Metadata of Kimi Linear with four layers: latent attention in the second, the delta rule with heads of `head_dim`
/// elements in the others, experts in all but the first.
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

/// `n` ids of the toys' vocabulary.
pub fn some_ids(n: usize) -> Vec<u32> {
    (0..n).map(|i| ((i * i * 31 + i * 7 + 3) % 96) as u32).collect()
}

/// The batch that appends `ids` to sequence `seq`. Logits are requested of all tokens or only of the last.
pub fn batch(pass: &dyn ForwardPass, seq: usize, ids: &[u32], all: bool) -> Vec<BatchToken> {
    let start = pass.n_past(seq);
    let token = |(i, &id)| BatchToken { id, seq, pos: start + i, output: all || i + 1 == ids.len() };
    ids.iter().enumerate().map(token).collect()
}

/// Squared error over the squares of `want`.
pub fn nmse(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let error: f64 = want.iter().zip(got).map(|(w, g)| f64::from(w - g).powi(2)).sum();
    error / want.iter().map(|&w| f64::from(w).powi(2)).sum::<f64>()
}

/// The largest NMSE between a GPU's logits and the CPU's, which sums in another order. A state that is one token further, or
/// another sequence's, gives 1e-3 and more.
pub const LIMIT: f64 = 1e-8;

/// Appends `ids` to sequence `seq`. Returns the logits of all of them.
pub fn logits(pass: &mut dyn ForwardPass, seq: usize, ids: &[u32]) -> Vec<f32> {
    let batch = batch(pass, seq, ids, true);
    pass.forward(&batch).unwrap().as_slice().to_vec()
}

/// Checks that the NMSE of `got` is below [`LIMIT`].
#[track_caller]
pub fn close(got: &[f32], want: &[f32], what: &str) {
    let error = nmse(got, want);
    assert!(error < LIMIT, "{what}: NMSE {error:e}");
}

/// The batch token that appends `id` to sequence `seq`.
pub fn token(pass: &dyn ForwardPass, seq: usize, id: u32) -> BatchToken {
    BatchToken { id, seq, pos: pass.n_past(seq), output: true }
}

/// Appends `id` and the `n` tokens that are generated greedily after it, all but the last, to sequence `seq`. Returns those
/// `n`.
pub fn greedy(pass: &mut dyn ForwardPass, seq: usize, id: u32, n: usize) -> Vec<u32> {
    let mut ids = vec![id];
    for i in 0..n {
        let next = pass.forward_greedy(&[token(pass, seq, ids[i])]).unwrap()[0];
        ids.push(next);
    }
    ids.split_off(1)
}
