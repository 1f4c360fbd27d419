//! RWKV over long sequences: the logits on the CPU against the papers' formulas computed in float64, token by token, with
//! the same weights.

use std::convert::Infallible;

use crate::toys::{Toy, batch, metadata, read, some_ids, toy};
use metal_attention::gguf::{GgufFile, GgufWriter, Tensor, TensorDecl, TensorType};
use metal_attention::{CacheType, CpuExecutor, ForwardPass, SessionOptions};
use metal_attention_cpu::CpuOptions;
use metal_attention_model::{
    ChannelMixWeights, DenseWeights, FeedForward, Layer, Linear, Loaded, LowRankWeights, Mixer, NormKind, NormWeights,
    RWKV6_MIXES, Rwkv6Spec, Rwkv6Weights, Rwkv7Spec, Rwkv7Weights,
};
use metal_attention_testing::models::more_architectures;

/// Tokens of a long sequence.
const LONG: usize = 8192;

/// A linear layer in float64: a matrix row by row, and its bias.
struct Matrix {
    rows: Vec<Vec<f64>>,
    bias: Option<Vec<f32>>,
}

impl Matrix {
    fn new(linear: &Linear) -> Self {
        let row = |row: &[f32]| row.iter().map(|&x| f64::from(x)).collect();
        let all = linear.weight.to_f32();
        Self { rows: all.chunks_exact(linear.weight.row_len()).map(row).collect(), bias: linear.bias.clone() }
    }

    /// `W x + bias`
    fn times(&self, x: &[f64]) -> Vec<f64> {
        let bias = |i: usize| self.bias.as_ref().map_or(0.0, |bias| f64::from(bias[i]));
        self.rows.iter().enumerate().map(|(i, row)| bias(i) + dot(row, x)).collect()
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Elementwise: element `i` of the result is `of` applied to element `i` of all rows.
fn each<const N: usize>(rows: [&[f64]; N], of: impl Fn([f64; N]) -> f64) -> Vec<f64> {
    (0..rows[0].len()).map(|i| of(rows.map(|row| row[i]))).collect()
}

fn to_f64(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

fn normalized(kind: NormKind, eps: f64, weight: &[f32], bias: Option<&[f32]>, x: &[f64]) -> Vec<f64> {
    let mean = match kind {
        NormKind::Rms => 0.0,
        NormKind::Layer => x.iter().sum::<f64>() / x.len() as f64,
    };
    let square = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / x.len() as f64;
    let factor = 1.0 / (square + eps).sqrt();
    let bias = |i: usize| bias.map_or(0.0, |bias| f64::from(bias[i]));
    (0..x.len()).map(|i| (x[i] - mean) * factor * f64::from(weight[i]) + bias(i)).collect()
}

fn norm(norm: Option<&NormWeights>, x: &[f64]) -> Vec<f64> {
    let Some(norm) = norm else { return x.to_vec() };
    normalized(norm.kind, f64::from(norm.eps), &norm.weight, norm.bias.as_deref(), x)
}

/// The recurrent state of a layer.
#[derive(Default)]
struct State {
    /// The matrix of each head, `[n_head][head_dim of keys][head_dim of values]`.
    heads: Vec<Vec<Vec<f64>>>,
    /// The time mix's previous input, `[n_embd]`.
    time_shift: Vec<f64>,
    /// The channel mix's previous input, `[n_embd]`.
    channel_shift: Vec<f64>,
}

impl State {
    fn new(n_head: usize, head_dim: usize, width: usize) -> Self {
        let heads = vec![vec![vec![0.0; head_dim]; head_dim]; n_head];
        Self { heads, time_shift: vec![0.0; width], channel_shift: vec![0.0; width] }
    }
}

/// The token shift: interpolates from the input to the previous input `before`.
fn shifted(x: &[f64], before: &[f64], lerp: &[f32]) -> Vec<f64> {
    each([x, before, &to_f64(lerp)], |[x, before, lerp]| x + (before - x) * lerp)
}

/// `out = r S`, where `S` has a row for each element of `r`.
fn read_state(r: &[f64], state: &[Vec<f64>]) -> Vec<f64> {
    (0..state[0].len()).map(|j| r.iter().zip(state).map(|(r, row)| r * row[j]).sum()).collect()
}

/// The time mix of RWKV-7: arXiv 2503.14456, equations 3 to 21. `v_first` holds the values of the first layer.
fn time_mix_7(
    spec: &Rwkv7Spec,
    w: &Rwkv7Weights<Matrix>,
    x: &[f64],
    state: &mut State,
    v_first: &mut Option<Vec<f64>>,
) -> Vec<f64> {
    let low_rank = |w: &LowRankWeights<Matrix>, x: &[f64], f: fn(f64) -> f64| -> Vec<f64> {
        w.up.times(&w.down.times(x).into_iter().map(f).collect::<Vec<_>>())
    };
    let mut mixed = w.lerps.chunks_exact(spec.width).map(|lerp| shifted(x, &state.time_shift, lerp));
    let mut next = || mixed.next().unwrap();
    let [xr, xw, xk, xv, xa] = [next(), next(), next(), next(), next()];
    let (r, k, mut v) = (w.receptance.times(&xr), w.key.times(&xk), w.value.times(&xv));
    let d = low_rank(&w.decay, &xw, f64::tanh);
    let decay = each([&d, &to_f64(&w.decay_bias)], |[d, w0]| (-(-0.5f64).exp() * sigmoid(w0 + d)).exp());
    let a = low_rank(&w.rate, &xa, |x| x);
    let a = each([&a, &to_f64(&w.rate_bias)], |[a, a0]| sigmoid(a0 + a));
    match (&w.first_value, &v_first) {
        (Some((weights, bias)), Some(first)) => {
            let mix = low_rank(weights, &xv, |x| x);
            v = each([&v, first, &mix, &to_f64(bias)], |[v, first, mix, v0]| v + (first - v) * sigmoid(v0 + mix));
        }
        (None, None) => *v_first = Some(v.clone()),
        (Some(_), None) | (None, Some(_)) => panic!("the first layer has no values before it, and all others have"),
    }
    let g = w.gate.as_ref().map(|weights| low_rank(weights, &next(), sigmoid));
    let kappa = each([&k, &to_f64(&w.removed)], |[k, removed]| k * removed);
    let k = each([&k, &a, &to_f64(&w.kept)], |[k, a, kept]| k * (1.0 + (a - 1.0) * kept));

    let mut out = Vec::new();
    for (head, s) in state.heads.iter_mut().enumerate() {
        let range = head * spec.head_dim..(head + 1) * spec.head_dim;
        let [r, decay, k, v, a, kappa] = [&r, &decay, &k, &v, &a, &kappa].map(|row| &row[range.clone()]);
        let length = dot(kappa, kappa).sqrt().max(1e-12);
        let kappa: Vec<f64> = kappa.iter().map(|x| x / length).collect();
        let removed = read_state(&kappa, s);
        for (i, row) in s.iter_mut().enumerate() {
            for (j, s) in row.iter_mut().enumerate() {
                *s = *s * decay[i] - a[i] * kappa[i] * removed[j] + k[i] * v[j];
            }
        }
        let mut y = read_state(r, s);
        if let Some([weight, bias]) = &w.norm {
            y = normalized(NormKind::Layer, 64e-5, &weight[range.clone()], Some(&bias[range.clone()]), &y);
        }
        let bonus: f64 = (0..r.len()).map(|i| r[i] * k[i] * f64::from(w.bonus[range.start + i])).sum();
        out.extend(each([&y, v], |[y, v]| y + bonus * v));
    }
    if let Some(g) = g {
        out = each([&out, &g], |[y, g]| y * g);
    }
    state.time_shift = x.to_vec();
    w.out.times(&out)
}

/// The time mix of RWKV-6: arXiv 2404.05892, section 4.2. Without a bonus it is gated linear attention, arXiv 2312.06635.
fn time_mix_6(spec: &Rwkv6Spec, w: &Rwkv6Weights<Matrix>, x: &[f64], state: &mut State) -> Vec<f64> {
    let (rank, width) = (spec.mix_rank, spec.width);
    let inner = w.mix_down.times(&shifted(x, &state.time_shift, &w.lerp_x));
    let mixed = |m: usize| {
        let inner: Vec<f64> = inner[m * rank..(m + 1) * rank].iter().map(|x| x.tanh()).collect();
        let (lerp, more) = (to_f64(&w.lerps[m * width..(m + 1) * width]), w.mix_up[m].times(&inner));
        each([x, &state.time_shift, &lerp, &more], |[x, before, lerp, more]| x + (before - x) * (lerp + more))
    };
    let [xw, xk, xv, xr, xg]: [Vec<f64>; RWKV6_MIXES] = std::array::from_fn(mixed);
    let (r, k, v, g) = (w.receptance.times(&xr), w.key.times(&xk), w.value.times(&xv), w.gate.times(&xg));
    let inner: Vec<f64> = w.decay.down.times(&xw).iter().map(|x| x.tanh()).collect();
    let decay = each([&w.decay.up.times(&inner), &to_f64(&w.decay_bias)], |[d, w0]| (-(w0 + d).exp()).exp());

    let mut out = Vec::new();
    for (head, s) in state.heads.iter_mut().enumerate() {
        let range = head * spec.head_dim..(head + 1) * spec.head_dim;
        let kv_head = head * spec.n_head_kv / spec.n_head();
        let kv_range = kv_head * spec.head_dim..(kv_head + 1) * spec.head_dim;
        let (r, decay, v) = (&r[range.clone()], &decay[range.clone()], &v[kv_range.clone()]);
        let k = &k[kv_range];
        let y = if let (Some(u), Some([weight, bias])) = (&w.bonus, &w.norm) {
            let current: f64 = (0..r.len()).map(|i| r[i] * f64::from(u[range.start + i]) * k[i]).sum();
            let y = each([&read_state(r, s), v], |[y, v]| y + current * v);
            advance(s, decay, k, v);
            normalized(NormKind::Layer, 64e-5, &weight[range.clone()], Some(&bias[range.clone()]), &y)
        } else {
            advance(s, decay, &each([k, decay], |[k, decay]| k * (1.0 - decay)), v);
            let scale = 1.0 / (spec.head_dim as f64).sqrt();
            read_state(r, s).iter().map(|y| y * scale).collect()
        };
        let gate = |g: f64| if spec.bonus { g * sigmoid(g) } else { sigmoid(g) };
        out.extend(each([&y, &g[range]], |[y, g]| y * gate(g)));
    }
    state.time_shift = x.to_vec();
    w.out.times(&out)
}

/// The update of a head's state: `S = diag(decay) S + k^T v`.
fn advance(s: &mut [Vec<f64>], decay: &[f64], k: &[f64], v: &[f64]) {
    for (i, row) in s.iter_mut().enumerate() {
        for (s, v) in row.iter_mut().zip(v) {
            *s = decay[i] * *s + k[i] * v;
        }
    }
}

fn channel_mix(w: &ChannelMixWeights<Matrix>, x: &[f64], state: &mut State) -> Vec<f64> {
    let mut mixed = w.lerps.chunks_exact(x.len()).map(|lerp| shifted(x, &state.channel_shift, lerp));
    let k: Vec<f64> = w.key.times(&mixed.next().unwrap()).iter().map(|k| k.max(0.0).powi(2)).collect();
    let mut y = w.value.times(&k);
    if let Some(receptance) = &w.receptance {
        let r = receptance.times(&mixed.next().unwrap());
        y = each([&y, &r], |[y, r]| y * sigmoid(r));
    }
    state.channel_shift = x.to_vec();
    y
}

fn swiglu(w: &DenseWeights<Matrix>, x: &[f64]) -> Vec<f64> {
    let (gate, up) = (w.gate.as_ref().unwrap().times(x), w.up.times(x));
    w.down.times(&each([&gate, &up], |[gate, up]| gate * sigmoid(gate) * up))
}

/// The reference logits of the tokens at `positions`.
fn reference_logits(toy: &Toy, ids: &[u32], positions: &[usize]) -> Vec<Vec<f64>> {
    let (spec, weights) = (toy.model.spec(), toy.model.weights());
    let layer_to_f64 = |layer: &Layer<Loaded>| {
        let Ok(layer) = layer.map(&mut |linear| Ok::<_, Infallible>(Matrix::new(linear)));
        layer
    };
    let layers: Vec<_> = weights.layers.iter().map(layer_to_f64).collect();
    let matrix = |linear: &Option<_>| Matrix::new(linear.as_ref().unwrap());
    let (table, head) = (matrix(&weights.token_embd), matrix(&weights.output));
    let state = |mixer: &Mixer| {
        if let Mixer::Rwkv6(mix) = mixer {
            State::new(mix.n_head(), mix.head_dim, spec.n_embd)
        } else if let Mixer::Rwkv7(mix) = mixer {
            State::new(mix.n_head(), mix.head_dim, spec.n_embd)
        } else {
            panic!("a time mix, not {mixer:?}")
        }
    };
    let mut states: Vec<_> = spec.layers.iter().map(|layer| state(&layer.mixer)).collect();
    let mut found = Vec::new();
    for (pos, &id) in ids.iter().enumerate() {
        let mut x = table.rows[id as usize].clone();
        x = norm(weights.embedding_norm.as_ref(), &x);
        let mut v_first = None;
        for (layer, state) in layers.iter().zip(&mut states) {
            let h = norm(layer.mixer_norm.as_ref(), &x);
            let mixed = if let Mixer::Rwkv6(w) = &layer.mixer {
                time_mix_6(&w.spec, w, &h, state)
            } else if let Mixer::Rwkv7(w) = &layer.mixer {
                time_mix_7(&w.spec, w, &h, state, &mut v_first)
            } else {
                panic!("no time mix")
            };
            x = each([&x, &mixed], |[x, y]| x + y);
            let h = norm(layer.feed_forward_norm.as_ref(), &x);
            let more = if let FeedForward::ChannelMix(w) = &layer.feed_forward {
                channel_mix(w, &h, state)
            } else if let FeedForward::Dense(w) = &layer.feed_forward {
                swiglu(w, &h)
            } else {
                panic!("neither a channel mix nor SwiGLU")
            };
            x = each([&x, &more], |[x, y]| (x + y) * f64::from(layer.output_scale));
        }
        if positions.contains(&pos) {
            found.push(head.times(&norm(weights.output_norm.as_ref(), &x)));
        }
    }
    found
}

/// Squared error over the variance of `want`.
fn nmse(got: &[f32], want: &[f64]) -> f64 {
    let mean = want.iter().sum::<f64>() / want.len() as f64;
    let error: f64 = got.iter().zip(want).map(|(&got, want)| (f64::from(got) - want).powi(2)).sum();
    error / want.iter().map(|want| (want - mean).powi(2)).sum::<f64>()
}

/// Published models, and toys of architectures and options without a published file.
fn models() -> Vec<Toy> {
    const RANKS: [(&str, u32); 4] = [
        ("attention.decay_lora_rank", 6),
        ("attention.iclr_lora_rank", 5),
        ("attention.value_residual_mix_lora_rank", 4),
        ("wkv.head_size", 16),
    ];
    let published = ["rwkv6.gguf", "rwkv7.gguf"].map(|name| read(name, &more_architectures()[name]));
    let linear = [("wkv.head_size", 8), ("time_mix_extra_dim", 6), ("time_decay_extra_dim", 5)];
    let mut halved = metadata("rwkv6", 5, &linear);
    halved.set("rwkv6.rescale_every_n_layers", 2u32);
    let gated = [&RANKS[..], &[("attention.gate_lora_rank", 7)]].concat();
    let others = [
        toy("arwkv7", &metadata("arwkv7", 3, &RANKS)),
        toy("arwkv7 with a gate", &metadata("arwkv7", 3, &gated)),
        toy("rwkv6qwen2", &metadata("rwkv6qwen2", 3, &linear)),
        toy("rwkv6, rescaled", &halved),
    ];
    published.into_iter().chain(others).collect()
}

/// A tensor of a file: name, shape and bytes of F32 values.
type FileTensor = (String, Vec<usize>, Vec<u8>);

/// `file` with `edit` of each tensor in its place.
fn edited(file: &GgufFile, edit: &dyn Fn(&Tensor) -> Vec<FileTensor>) -> Vec<u8> {
    let all: Vec<_> = file.tensors().iter().flat_map(edit).collect();
    let decl =
        |(name, shape, _): &FileTensor| TensorDecl { name: name.clone(), shape: shape.clone(), ty: TensorType::F32 };
    let decls: Vec<_> = all.iter().map(decl).collect();
    let mut writer = GgufWriter::new(Vec::new(), 3, file.metadata(), &decls).unwrap();
    for (_, _, bytes) in &all {
        writer.write(bytes).unwrap();
    }
    writer.finish().unwrap()
}

/// `tensor` as it is.
fn unchanged(tensor: &Tensor) -> FileTensor {
    (tensor.name().to_owned(), tensor.shape().to_vec(), tensor.bytes().to_vec())
}

/// The model with decays that keep nearly all of a state for thousands of tokens.
fn with_slow_decay(toy: &Toy) -> Toy {
    let slow = |tensor: &Tensor| {
        let (name, shape, mut bytes) = unchanged(tensor);
        if name.ends_with("time_mix_decay.weight") || name.ends_with("time_mix_w0.weight") {
            bytes = (0..shape.iter().product()).flat_map(|i: usize| (-4.0 - (i % 8) as f32).to_le_bytes()).collect();
        }
        vec![(name, shape, bytes)]
    };
    read(toy.name, &edited(&toy.file, &slow))
}

/// The file with the token-shift weights of RWKV-6 in a tensor each, as in older files, instead of one fused tensor.
fn with_separate_lerps(file: &GgufFile) -> Vec<u8> {
    edited(file, &|tensor| {
        let (name, shape, bytes) = unchanged(tensor);
        if !name.ends_with("lerp_fused.weight") {
            return vec![(name, shape, bytes)];
        }
        let parts = ["w", "k", "v", "r", "g"].iter().zip(bytes.chunks_exact(bytes.len() / RWKV6_MIXES));
        let part = |(part, bytes): (&&str, &[u8])| {
            (name.replace("lerp_fused", &format!("lerp_{part}")), vec![shape[0], 1, 1], bytes.to_vec())
        };
        parts.map(part).collect()
    })
}

#[test]
fn token_shift_weights_may_be_in_a_tensor_each() {
    let fused = &more_architectures()["rwkv6.gguf"];
    let separate = with_separate_lerps(&GgufFile::from_bytes(fused).unwrap());
    let ids = some_ids(30);
    let [want, found] = [fused, &separate].map(|file| {
        let toy = read("rwkv6", file);
        let mut pass = CpuExecutor::session(
            &CpuOptions { n_threads: 2, ..Default::default() },
            &toy.model,
            &SessionOptions { n_ctx: 64, ..Default::default() },
        )
        .unwrap();
        let batch = batch(&pass, 0, &ids, true);
        pass.forward(&batch).unwrap().as_slice().to_vec()
    });
    assert!(found == want);
}

#[test]
fn long_sequences_agree_with_float64() {
    let ids = some_ids(LONG);
    let positions = [0, 1, 63, 64, 1000, LONG - 1];
    let options = SessionOptions { n_ctx: LONG, cache_type: CacheType::F32, exact: true, ..Default::default() };
    for toy in models() {
        let with_slow_decay = with_slow_decay(&toy);
        for (toy, slow) in [(toy, false), (with_slow_decay, true)] {
            let want = reference_logits(&toy, &ids, &positions);
            let mut pass =
                CpuExecutor::session(&CpuOptions { n_threads: 2, ..Default::default() }, &toy.model, &options).unwrap();
            let mut batch = batch(&pass, 0, &ids, false);
            for token in &mut batch {
                token.output = positions.contains(&token.pos);
            }
            let found = pass.forward(&batch).unwrap();
            assert_eq!(found.n_rows(), want.len());
            for ((i, want), pos) in want.iter().enumerate().zip(positions) {
                let error = nmse(found.row(i), want);
                println!("{}, slow: {slow}: after {pos} NMSE {error:.1e}", toy.name);
                assert!(error <= 1e-6, "{}, slow: {slow}: after {pos} NMSE {error:e}", toy.name);
            }
        }
    }
}
