//! The gated delta rule over long sequences: the logits of a small Qwen 3.5 model on the CPU against the papers' formulas
//! computed in float64.

use crate::toys::{Toy, metadata, some_ids, toy};
use metal_attention::{BatchToken, CacheType, CpuExecutor, ForwardPass, SessionOptions};
use metal_attention_cpu::CpuOptions;
use metal_attention_model::{
    AttentionSpec, AttentionWeights, DeltaRuleSpec, DeltaRuleWeights, DenseWeights, FeedForward, Linear, Mixer,
    NormWeights,
};

const N_TOKENS: usize = 8320;

/// A matrix in float64.
struct Matrix {
    n_in: usize,
    values: Vec<f64>,
}

impl Matrix {
    fn new(linear: &Linear) -> Self {
        assert!(linear.bias.is_none());
        Self { n_in: linear.weight.row_len(), values: to_f64(&linear.weight.to_f32()) }
    }

    /// The product with every row of `x`, `[n, n_in]`: `[n, n_out]`.
    fn times(&self, x: &[f64]) -> Vec<f64> {
        let product = |x: &[f64]| self.values.chunks_exact(self.n_in).map(|row| dot(row, x)).collect::<Vec<_>>();
        x.chunks_exact(self.n_in).flat_map(product).collect()
    }
}

fn to_f64(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn silu(x: f64) -> f64 {
    x * sigmoid(x)
}

fn rms_norm(x: &[f64], weight: &[f32], eps: f32) -> Vec<f64> {
    let factor = 1.0 / (dot(x, x) / x.len() as f64 + f64::from(eps)).sqrt();
    x.iter().zip(weight).map(|(x, w)| x * factor * f64::from(*w)).collect()
}

/// The RMS norm of every row of `x`.
fn norm(x: &[f64], norm: Option<&NormWeights>) -> Vec<f64> {
    let norm = norm.expect("a norm");
    x.chunks_exact(norm.weight.len()).flat_map(|row| rms_norm(row, &norm.weight, norm.eps)).collect()
}

/// The gated delta rule of arXiv 2412.06464, equation 10, with the state transposed, for each value head, after the short
/// convolution of its section 3.4. `h`: `[n_tokens, n_embd]`, as is the result.
fn delta_rule(spec: &DeltaRuleSpec, w: &DeltaRuleWeights, h: &[f64]) -> Vec<f64> {
    let DeltaRuleSpec { n_head_k, n_head_v, key_dim, value_dim, n_tap, eps, .. } = *spec;
    let [q, k, v, gate, beta, decay] =
        [&w.q, &w.k, &w.v, &w.gate, &w.beta, &w.decay].map(|linear| Matrix::new(linear).times(h));
    let n = beta.len() / n_head_v;
    let n_channels = w.taps.len() / n_tap;
    // The convolution with SiLU of the rows of `x`, whose channels are `first..` of the taps.
    let convolved = |x: &[f64], first: usize| -> Vec<f64> {
        let width = x.len() / n;
        let at = |t: usize, c: usize| {
            let tap = |j: usize| f64::from(w.taps[j * n_channels + first + c]);
            let inputs = (0..n_tap).filter_map(|j| (t + j + 1).checked_sub(n_tap).map(|from| (j, from)));
            silu(inputs.map(|(j, from)| tap(j) * x[from * width + c]).sum())
        };
        (0..n).flat_map(|t| (0..width).map(move |c| (t, c))).map(|(t, c)| at(t, c)).collect()
    };
    let unit = |x: Vec<f64>| -> Vec<f64> {
        let length = |head: &[f64]| (dot(head, head) + f64::from(eps)).sqrt();
        x.chunks_exact(key_dim).flat_map(|head| head.iter().map(|x| x / length(head)).collect::<Vec<_>>()).collect()
    };
    let n_keys = n_head_k * key_dim;
    let (q, k, v) = (unit(convolved(&q, 0)), unit(convolved(&k, n_keys)), convolved(&v, 2 * n_keys));
    let mut out = vec![0.0; n * n_head_v * value_dim];
    for head in 0..n_head_v {
        let key_head = head % n_head_k;
        let mut state = vec![0.0; key_dim * value_dim];
        for t in 0..n {
            let key_part = |x: &[f64]| x[t * n_keys + key_head * key_dim..][..key_dim].to_vec();
            let (q, k) = (key_part(&q), key_part(&k));
            let at = t * n_head_v + head;
            let v = &v[at * value_dim..][..value_dim];
            let step = (decay[at] + f64::from(w.dt_bias[head])).exp().ln_1p();
            let (alpha, beta) = ((f64::from(w.a[head]) * step).exp(), sigmoid(beta[at]));
            assert!(alpha < 1.0);
            for x in &mut state {
                *x *= alpha;
            }
            let read = |state: &[f64], x: &[f64], c: usize| -> f64 {
                x.iter().enumerate().map(|(i, x)| x * state[i * value_dim + c]).sum()
            };
            let u: Vec<f64> = (0..value_dim).map(|c| beta * (v[c] - read(&state, &k, c))).collect();
            for (row, k) in state.chunks_exact_mut(value_dim).zip(&k) {
                row.iter_mut().zip(&u).for_each(|(x, u)| *x += k * u);
            }
            let scale = 1.0 / (key_dim as f64).sqrt();
            let o: Vec<f64> = (0..value_dim).map(|c| scale * read(&state, &q, c)).collect();
            let gates = &gate[at * value_dim..][..value_dim];
            let normed = rms_norm(&o, &w.norm, eps);
            let head_out = out[at * value_dim..][..value_dim].iter_mut();
            head_out.zip(normed.iter().zip(gates)).for_each(|(out, (x, gate))| *out = x * silu(*gate));
        }
    }
    Matrix::new(&w.out).times(&out)
}

/// Softmax attention (arXiv 1706.03762) with grouped queries, RMS norms of queries and keys, RoPE of the first part of each
/// head (arXiv 2104.09864), and a sigmoid gate of each head's result. `h`: `[n_tokens, n_embd]`, as is the result.
fn attention(a: &AttentionSpec, w: &AttentionWeights, h: &[f64]) -> Vec<f64> {
    let (dim, group) = (a.head_dim, a.n_head / a.n_head_kv);
    let both = Matrix::new(&w.q).times(h);
    let k = Matrix::new(w.k.as_ref().expect("keys")).times(h);
    let v = Matrix::new(w.v.as_ref().expect("values")).times(h);
    let n = both.len() / (2 * dim * a.n_head);
    let (frequencies, _) = a.rope().expect("RoPE").frequencies(None);
    let eps = a.qk_norm.expect("norms").eps;
    let rotated = |head: &[f64], norm: &Option<NormWeights>, pos: usize| {
        let mut head = rms_norm(head, &norm.as_ref().expect("norms").weight, eps);
        let half = frequencies.len();
        for (i, frequency) in frequencies.iter().enumerate() {
            let (sin, cos) = (pos as f64 * frequency).sin_cos();
            let (x, y) = (head[i], head[i + half]);
            (head[i], head[i + half]) = (x * cos - y * sin, x * sin + y * cos);
        }
        head
    };
    let heads_of_keys = k.chunks_exact(dim).enumerate();
    let keys: Vec<Vec<f64>> = heads_of_keys.map(|(i, head)| rotated(head, &w.k_norm, i / a.n_head_kv)).collect();
    let mut out = Vec::with_capacity(n * a.n_head * dim);
    for (i, both) in both.chunks_exact(2 * dim).enumerate() {
        let (t, kv_head) = (i / a.n_head, i % a.n_head / group);
        let (q, gate) = both.split_at(dim);
        let q = rotated(q, &w.q_norm, t);
        let scores: Vec<f64> =
            (0..=t).map(|s| dot(&q, &keys[s * a.n_head_kv + kv_head]) * f64::from(a.scale)).collect();
        let largest = scores.iter().copied().fold(f64::MIN, f64::max);
        let weights: Vec<f64> = scores.iter().map(|x| (x - largest).exp()).collect();
        let total: f64 = weights.iter().sum();
        let mut sum = vec![0.0; dim];
        for (s, weight) in weights.iter().enumerate() {
            let value = &v[(s * a.n_head_kv + kv_head) * dim..][..dim];
            sum.iter_mut().zip(value).for_each(|(sum, v)| *sum += weight / total * v);
        }
        out.extend(sum.iter().zip(gate).map(|(x, gate)| x * sigmoid(*gate)));
    }
    Matrix::new(&w.out).times(&out)
}

fn feed_forward(w: &DenseWeights, h: &[f64]) -> Vec<f64> {
    let gate = Matrix::new(w.gate.as_ref().expect("a gate")).times(h);
    let up = Matrix::new(&w.up).times(h);
    let inner: Vec<f64> = gate.iter().zip(up).map(|(gate, up)| silu(*gate) * up).collect();
    Matrix::new(&w.down).times(&inner)
}

/// The reference logits of the tokens at `positions`, `[positions.len(), n_vocab]`.
fn reference_logits(toy: &Toy, ids: &[u32], positions: &[usize]) -> Vec<f64> {
    let (spec, w) = (toy.model.spec(), toy.model.weights());
    let table = to_f64(&w.token_embd.as_ref().unwrap().weight.to_f32());
    let row = |id: &u32| table[*id as usize * spec.n_embd..][..spec.n_embd].iter().copied();
    let mut x: Vec<f64> = ids.iter().flat_map(row).collect();
    let add = |x: &mut Vec<f64>, more: Vec<f64>| x.iter_mut().zip(more).for_each(|(x, more)| *x += more);
    for layer in &w.layers {
        let h = norm(&x, layer.mixer_norm.as_ref());
        let mixed = match &layer.mixer {
            Mixer::DeltaRule(w) => delta_rule(&w.spec, w, &h),
            Mixer::Attention(w) => attention(&w.spec, w, &h),
            other => panic!("another mixer: {other:?}"),
        };
        add(&mut x, mixed);
        let h = norm(&x, layer.feed_forward_norm.as_ref());
        let FeedForward::Dense(dense) = &layer.feed_forward else { panic!("not dense") };
        add(&mut x, feed_forward(dense, &h));
    }
    let wanted = positions.iter().flat_map(|pos| x[pos * spec.n_embd..][..spec.n_embd].iter().copied());
    let h = norm(&wanted.collect::<Vec<_>>(), w.output_norm.as_ref());
    Matrix::new(w.output.as_ref().expect("a head")).times(&h)
}

#[test]
fn long_sequences_agree_with_float64() {
    let keys = [
        ("ssm.group_count", 2),
        ("ssm.state_size", 16),
        ("ssm.time_step_rank", 4),
        ("ssm.inner_size", 64),
        ("ssm.conv_kernel", 4),
        ("rope.dimension_count", 8),
        ("full_attention_interval", 2),
    ];
    let toy = toy("the gated delta rule", &metadata("qwen35", 3, &keys));
    let ids = some_ids(N_TOKENS);
    let positions: Vec<usize> = (0..N_TOKENS).rev().step_by(N_TOKENS / 64).collect();
    let want = reference_logits(&toy, &ids, &positions);
    let options = SessionOptions { n_ctx: N_TOKENS, cache_type: CacheType::F32, exact: true, ..Default::default() };
    let mut pass =
        CpuExecutor::session(&CpuOptions { n_threads: 2, ..Default::default() }, &toy.model, &options).unwrap();
    let token = |(pos, &id): (usize, &u32)| BatchToken { id, seq: 0, pos, output: positions.contains(&pos) };
    let batch: Vec<_> = ids.iter().enumerate().map(token).collect();
    let got = pass.forward(&batch).unwrap();
    // `forward` returns rows in ascending order of positions, and `positions` descends.
    let got: Vec<f64> = (0..positions.len()).rev().flat_map(|row| to_f64(got.row(row))).collect();
    let nmse = |range: std::ops::Range<usize>| {
        let error: f64 = range.clone().map(|i| (got[i] - want[i]).powi(2)).sum();
        error / range.map(|i| want[i].powi(2)).sum::<f64>()
    };
    let (all, last) = (nmse(0..want.len()), nmse(0..toy.model.spec().n_vocab));
    println!("NMSE of all {all:.1e}, of the last token {last:.1e}");
    assert!(all < 1e-6 && last < 1e-6, "{all:e}, of the last token {last:e}");
}
