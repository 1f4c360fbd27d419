//! Mamba and Mamba-2 over long sequences: the logits after more than 8,192 tokens on the CPU against the papers' formulas
//! computed in float64.

use crate::toys::{Toy, batch, metadata, nmse, read, some_ids, toy};
use metal_attention::{CacheType, CpuExecutor, ForwardPass, SessionOptions};
use metal_attention_cpu::CpuOptions;
use metal_attention_model::{Linear, Mamba2Spec, Mamba2Weights, MambaSpec, MambaWeights, Mixer, NormWeights};
use metal_attention_testing::models::more_architectures;

const N_TOKENS: usize = 8_300;

/// Number of tokens at the end whose logits are compared.
const N_COMPARED: usize = 20;

/// A matrix `W` in float64.
struct Matrix {
    rows: Vec<Vec<f64>>,
}

impl Matrix {
    fn new(linear: &Linear) -> Self {
        let rows = linear.weight.to_f32().chunks(linear.weight.row_len()).map(doubles).collect();
        Self { rows }
    }

    /// `W x`
    fn times(&self, x: &[f64]) -> Vec<f64> {
        self.rows.iter().map(|row| dot(row, x)).collect()
    }
}

fn doubles(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| x.into()).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

fn rms_norm(x: &[f64], weight: &[f32], eps: f32) -> Vec<f64> {
    let scale = 1.0 / (dot(x, x) / x.len() as f64 + f64::from(eps)).sqrt();
    x.iter().zip(weight).map(|(x, &w)| x * scale * f64::from(w)).collect()
}

/// The short convolution with SiLU. `taps`: `[n_tap][channels]`, the oldest input's first.
struct Convolution {
    taps: Vec<Vec<f64>>,
    bias: Vec<f64>,
    /// The last `n_tap - 1` inputs, the oldest first.
    inputs: Vec<Vec<f64>>,
}

impl Convolution {
    fn new(taps: &[f32], n_tap: usize, bias: Option<&Vec<f32>>) -> Self {
        let taps: Vec<_> = taps.chunks(taps.len() / n_tap).map(doubles).collect();
        let n = taps[0].len();
        Self { bias: bias.map_or(vec![0.0; n], |bias| doubles(bias)), inputs: vec![vec![0.0; n]; n_tap - 1], taps }
    }

    /// The result for the next token's input.
    fn next(&mut self, x: &[f64]) -> Vec<f64> {
        self.inputs.push(x.to_vec());
        let channel =
            |c| self.bias[c] + self.taps.iter().zip(&self.inputs).map(|(taps, x)| taps[c] * x[c]).sum::<f64>();
        let out = (0..x.len()).map(|c| silu(channel(c))).collect();
        self.inputs.remove(0);
        out
    }
}

/// The reference of a mixer, with its state.
trait ReferenceMixer {
    /// The mixer's result for the next token's input, both `[n_embd]`.
    fn next(&mut self, h: &[f64]) -> Vec<f64>;
}

/// The reference of Mamba (arXiv 2312.00752).
struct MambaReference {
    spec: MambaSpec,
    weights: MambaWeights,
    conv: Convolution,
    /// The state, `[width][d_state]`.
    state: Vec<Vec<f64>>,
    input: Matrix,
    select: Matrix,
    dt: Matrix,
    out: Matrix,
}

impl MambaReference {
    fn new(spec: &MambaSpec, w: &MambaWeights) -> Self {
        Self {
            conv: Convolution::new(&w.taps, spec.n_tap, w.conv_bias.as_ref()),
            state: vec![vec![0.0; spec.d_state]; spec.width],
            input: Matrix::new(&w.input),
            select: Matrix::new(&w.select),
            dt: Matrix::new(&w.dt),
            out: Matrix::new(&w.out),
            weights: w.clone(),
            spec: *spec,
        }
    }
}

impl ReferenceMixer for MambaReference {
    fn next(&mut self, h: &[f64]) -> Vec<f64> {
        let MambaSpec { width, d_state, dt_rank, .. } = self.spec;
        let w = &self.weights;
        let xz = self.input.times(h);
        let (x, z) = xz.split_at(width);
        let x = self.conv.next(x);
        let selected = self.select.times(&x);
        let parts = [&selected[..dt_rank], &selected[dt_rank..dt_rank + d_state], &selected[dt_rank + d_state..]];
        let [dt, b, c] = [0, 1, 2].map(|i| match (&self.spec.norms, &w.norms) {
            (Some(norms), Some(weights)) => rms_norm(parts[i], &weights[i], norms.eps),
            (None, _) | (_, None) => parts[i].to_vec(),
        });
        let dt_bias = w.dt.bias.as_ref().unwrap();
        let y: Vec<f64> = self
            .dt
            .times(&dt)
            .iter()
            .enumerate()
            .map(|(channel, dt)| {
                let dt = softplus(dt + f64::from(dt_bias[channel]));
                let mut y = f64::from(w.d[channel]) * x[channel];
                for (i, s) in self.state[channel].iter_mut().enumerate() {
                    *s = (dt * f64::from(w.a[i * width + channel])).exp() * *s + dt * b[i] * x[channel];
                    y += c[i] * *s;
                }
                y * silu(z[channel])
            })
            .collect();
        self.out.times(&y)
    }
}

/// The reference of Mamba-2 (arXiv 2405.21060).
struct Mamba2Reference {
    spec: Mamba2Spec,
    weights: Mamba2Weights,
    conv: Convolution,
    /// The state, `[n_head][d_state][head_dim]`.
    state: Vec<Vec<Vec<f64>>>,
    input: Matrix,
    out: Matrix,
}

impl Mamba2Reference {
    fn new(spec: &Mamba2Spec, w: &Mamba2Weights) -> Self {
        Self {
            conv: Convolution::new(&w.taps, spec.n_tap, w.conv_bias.as_ref()),
            state: vec![vec![vec![0.0; spec.head_dim]; spec.d_state]; spec.n_head],
            input: Matrix::new(&w.input),
            out: Matrix::new(&w.out),
            weights: w.clone(),
            spec: *spec,
        }
    }
}

impl ReferenceMixer for Mamba2Reference {
    fn next(&mut self, h: &[f64]) -> Vec<f64> {
        let Mamba2Spec { n_head, head_dim, d_state, n_group, norm, .. } = self.spec;
        let (w, width) = (&self.weights, n_head * head_dim);
        let all = self.input.times(h);
        let (z, rest) = all.split_at(width);
        let (x_b_c, dt) = rest.split_at(width + 2 * n_group * d_state);
        let x_b_c = self.conv.next(x_b_c);
        let (x, b_c) = x_b_c.split_at(width);
        let (b, c) = b_c.split_at(n_group * d_state);
        let mut y = Vec::with_capacity(width);
        for head in 0..n_head {
            let group = head / (n_head / n_group) * d_state;
            let x = &x[head * head_dim..][..head_dim];
            let dt = softplus(dt[head] + f64::from(w.dt_bias[head]));
            let decay = (dt * f64::from(w.a[head])).exp();
            let mut out: Vec<f64> = x.iter().map(|x| f64::from(w.d[head]) * x).collect();
            for (i, row) in self.state[head].iter_mut().enumerate() {
                for (column, s) in row.iter_mut().enumerate() {
                    *s = decay * *s + dt * b[group + i] * x[column];
                    out[column] += c[group + i] * *s;
                }
            }
            y.extend(out);
        }
        let mut y: Vec<f64> = y.iter().zip(z).map(|(y, &z)| y * silu(z)).collect();
        if let (Some(eps), Some(weight)) = (norm, &w.norm) {
            let n = width / n_group;
            y = y.chunks(n).zip(weight.chunks(n)).flat_map(|(y, weight)| rms_norm(y, weight, eps)).collect();
        }
        self.out.times(&y)
    }
}

/// The reference logits of the last [`N_COMPARED`] tokens, of a model whose layers have a mixer and no feed-forward.
fn reference_logits(toy: &Toy, ids: &[u32]) -> Vec<f32> {
    let norm = |x: &[f64], w: &Option<NormWeights>, eps| rms_norm(x, &w.as_ref().unwrap().weight, eps);
    let eps = toy.model.spec().output.norm.unwrap().eps;
    let table = Matrix::new(toy.model.weights().token_embd.as_ref().unwrap());
    let head = Matrix::new(toy.model.weights().output.as_ref().unwrap());
    let layers = toy.model.weights().layers.iter();
    let mut mixers: Vec<Box<dyn ReferenceMixer>> = layers
        .map(|layer| -> Box<dyn ReferenceMixer> {
            match &layer.mixer {
                Mixer::Mamba(w) => Box::new(MambaReference::new(&w.spec, w)),
                Mixer::Mamba2(w) => Box::new(Mamba2Reference::new(&w.spec, w)),
                other => panic!("{}: {other:?}", toy.name),
            }
        })
        .collect();
    let mut logits = Vec::new();
    for (i, &id) in ids.iter().enumerate() {
        let mut x = table.rows[id as usize].clone();
        for (mixer, w) in mixers.iter_mut().zip(&toy.model.weights().layers) {
            let y = mixer.next(&norm(&x, &w.mixer_norm, eps));
            x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
        }
        if i + N_COMPARED >= ids.len() {
            logits.extend(head.times(&norm(&x, &toy.model.weights().output_norm, eps)).iter().map(|&x| x as f32));
        }
    }
    logits
}

#[test]
fn logits_after_thousands_of_tokens_agree_with_float64() {
    let ssm = [("ssm.conv_kernel", 4), ("ssm.inner_size", 64), ("ssm.state_size", 16), ("ssm.time_step_rank", 4)];
    let mut normalised = metadata("mamba", 3, &ssm);
    normalised.set("mamba.ssm.dt_b_c_rms", true);
    let groups = metadata("mamba2", 3, &[&ssm[..], &[("ssm.group_count", 2)]].concat());
    let published = ["mamba.gguf", "mamba2.gguf"].map(|name| read(name, &more_architectures()[name]));
    let toys = [("Falcon-Mamba", &normalised), ("two groups", &groups)].map(|(name, metadata)| toy(name, metadata));
    let ids = some_ids(N_TOKENS);
    for toy in published.iter().chain(&toys) {
        let options = SessionOptions { n_ctx: N_TOKENS, cache_type: CacheType::F32, exact: true, ..Default::default() };
        let mut pass =
            CpuExecutor::session(&CpuOptions { n_threads: 2, ..Default::default() }, &toy.model, &options).unwrap();
        let (before, compared) = ids.split_at(N_TOKENS - N_COMPARED);
        let tokens = batch(&pass, 0, before, false);
        pass.forward(&tokens).unwrap();
        let tokens = batch(&pass, 0, compared, true);
        let found = pass.forward(&tokens).unwrap().as_slice().to_vec();
        let error = nmse(&found, &reference_logits(toy, &ids));
        println!("{}: NMSE {error:.1e}", toy.name);
        assert!(error <= 1e-6, "{}: NMSE {error:e}", toy.name);
        assert!(found.iter().all(|x| x.is_finite()));
    }
}
