//! Attention on the CPU against softmax attention computed in float64.
//!
//! The models have one layer with an identity matrix as the attention output projection and a feed-forward of zeros, so that
//! the layer's result is its input plus the attention.

use crate::support::{batch, bits, gguf, on_isa, start_on};
use half::f16;
use metal_attention_cpu::{CacheType, CpuForwardPass, Isa};
use metal_attention_gguf::{GgufFile, Metadata, TensorDecl, TensorType};
use metal_attention_model::{ForwardPass, SessionOptions};

const N_VOCAB: usize = 64;
const N_FF: usize = 16;
const EPS: f32 = 1e-5;
const N_TOKENS: usize = 1100;

/// Positions on both sides of the boundaries of the kernels' groups, chunks and splits.
const POSITIONS: [usize; 17] = [0, 1, 14, 15, 16, 17, 62, 63, 64, 65, 127, 510, 511, 512, 513, 1098, 1099];

/// A linear congruential generator, for the same numbers in every run.
struct Random(u64);

impl Random {
    fn float(&mut self, limit: f32) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 40) as f32 / (1u32 << 23) as f32 - 1.0) * limit
    }

    fn floats(&mut self, n: usize, limit: f32) -> Vec<f32> {
        (0..n).map(|_| self.float(limit)).collect()
    }
}

/// A model with one layer, in F32.
struct Model {
    n_head: usize,
    n_head_kv: usize,
    head_dim: usize,
    /// The sliding window; `None`: full attention.
    window: Option<usize>,
    /// The embedding, `[N_VOCAB, n_embd]`.
    embedding: Vec<f32>,
    /// The weights of all norms, `[n_embd]`.
    norm: Vec<f32>,
    /// The query projection, `[n_head * head_dim, n_embd]`.
    q: Vec<f32>,
    /// The key projection, `[n_head_kv * head_dim, n_embd]`.
    k: Vec<f32>,
    /// The value projection, with the shape of the keys'.
    v: Vec<f32>,
}

impl Model {
    fn new(n_head: usize, n_head_kv: usize, head_dim: usize) -> Self {
        let mut random = Random(head_dim as u64);
        let n_embd = n_head * head_dim;
        // With this limit the elements of queries, keys and values have a variance near 1.
        let limit = (3.0 / n_embd as f32).sqrt();
        Self {
            n_head,
            n_head_kv,
            head_dim,
            window: None,
            embedding: random.floats(N_VOCAB * n_embd, 1.0),
            norm: random.floats(n_embd, 0.3).into_iter().map(|w| 1.0 + w).collect(),
            q: random.floats(n_embd * n_embd, limit),
            k: random.floats(n_head_kv * head_dim * n_embd, limit),
            v: random.floats(n_head_kv * head_dim * n_embd, limit),
        }
    }

    fn n_embd(&self) -> usize {
        self.n_head * self.head_dim
    }

    /// The model as a GGUF file.
    fn file(&self) -> GgufFile {
        let n_embd = self.n_embd();
        let n_kv = self.n_head_kv * self.head_dim;
        let mut metadata = Metadata::new();
        metadata.set("general.architecture", "llama");
        metadata.set("llama.attention.layer_norm_rms_epsilon", EPS);
        for (key, value) in [
            ("embedding_length", n_embd),
            ("block_count", 1),
            ("attention.head_count", self.n_head),
            ("attention.head_count_kv", self.n_head_kv),
            ("feed_forward_length", N_FF),
            ("context_length", N_TOKENS),
            ("vocab_size", N_VOCAB),
            ("attention.sliding_window", self.window.unwrap_or(0)),
        ] {
            metadata.set(format!("llama.{key}"), value as u32);
        }
        let identity = (0..n_embd * n_embd).map(|i| if i / n_embd == i % n_embd { 1.0 } else { 0.0 }).collect();
        let tensor = |name: &str, shape: &[usize], values: &Vec<f32>| {
            let decl = TensorDecl { name: format!("{name}.weight"), shape: shape.to_vec(), ty: TensorType::F32 };
            (decl, values.iter().flat_map(|v| v.to_le_bytes()).collect())
        };
        let ffn = vec![0.0; n_embd * N_FF];
        gguf(
            &metadata,
            &[
                tensor("token_embd", &[n_embd, N_VOCAB], &self.embedding),
                tensor("output_norm", &[n_embd], &self.norm),
                tensor("blk.0.attn_norm", &[n_embd], &self.norm),
                tensor("blk.0.attn_q", &[n_embd, n_embd], &self.q),
                tensor("blk.0.attn_k", &[n_embd, n_kv], &self.k),
                tensor("blk.0.attn_v", &[n_embd, n_kv], &self.v),
                tensor("blk.0.attn_output", &[n_embd, n_embd], &identity),
                tensor("blk.0.ffn_norm", &[n_embd], &self.norm),
                tensor("blk.0.ffn_gate", &[n_embd, N_FF], &ffn),
                tensor("blk.0.ffn_up", &[n_embd, N_FF], &ffn),
                tensor("blk.0.ffn_down", &[N_FF, n_embd], &ffn),
            ],
        )
    }

    /// The embedding of `id`.
    fn x(&self, id: u32) -> &[f32] {
        &self.embedding[id as usize * self.n_embd()..][..self.n_embd()]
    }

    /// `matrix` times the normalised embedding of `id`, by head.
    fn project(&self, matrix: &[f32], id: u32) -> Vec<Vec<f64>> {
        let x = self.x(id);
        let mean = x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / x.len() as f64;
        let factor = 1.0 / (mean + f64::from(EPS)).sqrt();
        let h: Vec<f64> = x.iter().zip(&self.norm).map(|(&x, &w)| f64::from(x) * factor * f64::from(w)).collect();
        let rows = matrix.chunks_exact(h.len());
        let y: Vec<f64> = rows.map(|row| row.iter().zip(&h).map(|(&w, h)| f64::from(w) * h).sum()).collect();
        y.chunks_exact(self.head_dim).map(<[f64]>::to_vec).collect()
    }

    /// Rotates neighbouring elements `2i` and `2i + 1` by the angle `pos * 10000^(-2i / head_dim)`.
    fn rope(&self, mut head: Vec<f64>, pos: usize) -> Vec<f64> {
        for (i, pair) in head.chunks_exact_mut(2).enumerate() {
            let angle = pos as f64 * 10_000f64.powf(-2.0 * i as f64 / self.head_dim as f64);
            let (sin, cos) = angle.sin_cos();
            (pair[0], pair[1]) = (pair[0] * cos - pair[1] * sin, pair[0] * sin + pair[1] * cos);
        }
        head
    }

    /// The reference: attention's result at each of `positions`, `[n_head * head_dim]` each. Keys and values are rounded to
    /// `cache_type`.
    fn attention(&self, ids: &[u32], positions: &[usize], cache_type: CacheType) -> Vec<Vec<f64>> {
        let stored = |head: Vec<f64>| -> Vec<f64> {
            match cache_type {
                CacheType::F16 => head.into_iter().map(|v| f16::from_f64(v).to_f64()).collect(),
                CacheType::F32 => head,
            }
        };
        let project_all =
            |matrix: &[f32]| -> Vec<_> { (0..N_VOCAB as u32).map(|id| self.project(matrix, id)).collect() };
        let (q, k, v) = (project_all(&self.q), project_all(&self.k), project_all(&self.v));
        let mut out = vec![Vec::new(); positions.len()];
        for head in 0..self.n_head {
            let kv_head = head / (self.n_head / self.n_head_kv);
            let keys: Vec<_> = ids
                .iter()
                .enumerate()
                .map(|(pos, &id)| stored(self.rope(k[id as usize][kv_head].clone(), pos)))
                .collect();
            let values = v.iter().map(|heads| stored(heads[kv_head].clone())).collect::<Vec<_>>();
            for (&pos, out) in positions.iter().zip(&mut out) {
                let query = self.rope(q[ids[pos] as usize][head].clone(), pos);
                let first = self.window.map_or(0, |w| (pos + 1).saturating_sub(w));
                let scores: Vec<f64> = keys[first..=pos]
                    .iter()
                    .map(|key| key.iter().zip(&query).map(|(k, q)| k * q).sum::<f64>() / (self.head_dim as f64).sqrt())
                    .collect();
                let max = scores.iter().fold(f64::NEG_INFINITY, |a, &b| a.max(b));
                let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
                let mut result = vec![0.0; self.head_dim];
                for (score, &id) in scores.iter().zip(&ids[first..=pos]) {
                    for (r, v) in result.iter_mut().zip(&values[id as usize]) {
                        *r += (score - max).exp() / sum * v;
                    }
                }
                out.extend(result);
            }
        }
        out
    }
}

/// [`N_TOKENS`] random ids.
fn ids() -> Vec<u32> {
    let mut random = Random(9);
    (0..N_TOKENS).map(|_| (random.float(1.0).abs() * N_VOCAB as f32) as u32 % N_VOCAB as u32).collect()
}

fn options(cache_type: CacheType) -> SessionOptions {
    SessionOptions { n_ctx: N_TOKENS, cache_type, ..SessionOptions::default() }
}

/// Appends `ids` in one batch. Returns the hidden states after the layer, `[ids.len(), n_embd]`.
fn states(pass: &mut CpuForwardPass, ids: &[u32]) -> Vec<f32> {
    let batch = batch(pass, 0, ids);
    let mut states = Vec::new();
    pass.forward_traced(&batch, Some(&mut |_, x| states.extend_from_slice(x))).expect("a batch that fits");
    states
}

/// Runs `model` over [`ids`] and compares the attention at [`POSITIONS`] with the reference. Returns all hidden states.
fn check(model: &Model, isa: Isa, cache_type: CacheType) -> Vec<f32> {
    let ids = ids();
    let n_embd = model.n_embd();
    let mut pass = start_on(&on_isa(isa), &model.file(), &options(cache_type));
    let states = states(&mut pass, &ids);
    // F16 keys and values may be rounded differently from those in float64.
    let (limit, limit_rms) = match cache_type {
        CacheType::F32 => (1e-5, 2e-6),
        CacheType::F16 => (2e-3, 2e-4),
    };
    for (pos, want) in POSITIONS.into_iter().zip(model.attention(&ids, &POSITIONS, cache_type)) {
        let x = model.x(ids[pos]);
        let mut square = 0.0;
        for i in 0..n_embd {
            let got = f64::from(states[pos * n_embd + i]) - f64::from(x[i]);
            let error = (got - want[i]).abs();
            square += error * error;
            assert!(
                error <= limit,
                "{isa:?} {cache_type} heads of {}, window {:?}, position {pos} [{i}]: {got} {}",
                model.head_dim,
                model.window,
                want[i]
            );
        }
        let rms = (square / n_embd as f64).sqrt();
        assert!(rms <= limit_rms, "{isa:?} {cache_type} heads of {}, position {pos}: RMS {rms:e}", model.head_dim);
    }
    states
}

#[test]
fn head_lengths_and_groups() {
    for (n_head, n_head_kv, head_dim) in [(4, 2, 8), (3, 1, 16), (6, 2, 20), (5, 1, 64), (2, 2, 80), (2, 1, 128)] {
        let model = Model::new(n_head, n_head_kv, head_dim);
        for isa in Isa::available() {
            for cache_type in [CacheType::F32, CacheType::F16] {
                check(&model, isa, cache_type);
            }
        }
    }
}

#[test]
fn sliding_windows() {
    for head_dim in [16, 20] {
        let mut model = Model::new(4, 2, head_dim);
        for isa in Isa::available() {
            model.window = None;
            let everything = check(&model, isa, CacheType::F32);
            for window in [1, 2, 7, 16, 63, 64, 65, 100, 512, 520, N_TOKENS, 5000] {
                model.window = Some(window);
                let states = check(&model, isa, CacheType::F32);
                let same = window.min(N_TOKENS) * model.n_embd();
                assert_eq!(
                    bits(&states[..same]),
                    bits(&everything[..same]),
                    "{isa:?} window {window}: the first tokens"
                );
                assert!(same == everything.len() || states[same..] != everything[same..], "{isa:?} window {window}");
            }
        }
    }
}

#[test]
fn single_tokens_give_the_bits_of_a_prompt() {
    let ids = ids();
    for window in [None, Some(70), Some(600)] {
        let mut model = Model::new(3, 1, 20);
        model.window = window;
        for isa in Isa::available() {
            for cache_type in [CacheType::F32, CacheType::F16] {
                let mut pass = start_on(&on_isa(isa), &model.file(), &options(cache_type));
                let prompt = states(&mut pass, &ids);
                for first in [1080, 500, 0] {
                    // Keys and values before a short window are no longer cached, and are evaluated again.
                    let reached = pass.truncate(first);
                    assert_eq!(reached, if window == Some(70) && first == 500 { 0 } else { first });
                    if reached < first {
                        states(&mut pass, &ids[reached..first]);
                    }
                    for (i, &id) in ids[first..].iter().enumerate().take(20) {
                        let (_, state) = pass.forward_token_debug(id).expect("room for a token");
                        let want = &prompt[(first + i) * model.n_embd()..][..model.n_embd()];
                        assert_eq!(bits(&state[0]), bits(want), "{isa:?} {cache_type} {window:?} token {}", first + i);
                    }
                }
            }
        }
    }
}
