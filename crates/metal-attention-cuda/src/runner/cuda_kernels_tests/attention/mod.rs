//! Softmax attention over the paged KV cache: decode kernels (`attention.cu`, `attention_on_units.cu`) with and without norm, RoPE
//! and append; the append alone, `prefill_attention.cu` and `general_attention.cu`.
//!
//! Positions that no sequence has, and pages below a window, hold NaN or numbers far from all others, so that a kernel that uses
//! them is off by more than any bound. After a kernel that appends, the cache is compared with the twin's, and all other positions
//! have to be as before.

mod decode;
mod inputs;
mod latent;
mod prefill;

use std::sync::Arc;

use bytemuck::Zeroable;
use half::f16;

use super::{Expected, assert_close, random, read};
use crate::CudaDevice;
use crate::args::{AttentionArgs, GateArgs, HeadArgs, PagesArgs, TokenArgs};
use crate::device::CudaBuffer;
use crate::slice::{DevicePtr, F16};

/// Positions of a page.
const PAGE: usize = 64;
/// F32 arithmetic: scores of size 4 with an error of some 2^-22, which is also the relative one of a weight, and fast exponentials;
/// relative to the largest value.
const F32_ERROR: f64 = 6e-6;

/// Numbers of masks: `Mask` of `kernels/masks.cuh`.
const CAUSAL: u32 = 0;
const WINDOW: u32 = 1;
const CHUNK: u32 = 2;
const FULL: u32 = 3;
const NEAR: u32 = 4;

/// A gate of the result.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Gate {
    None,
    /// After each query, with the sigmoid.
    InQueries,
    /// One for each element of the result.
    Elements {
        softplus: bool,
    },
    /// One for each head.
    Heads {
        softplus: bool,
    },
}

impl Gate {
    /// Elements from one head's gates to the next one's, and from that of one element to the next one's.
    fn steps(self, dim: usize) -> [usize; 2] {
        match self {
            Self::None => [0, 0],
            Self::InQueries => [2 * dim, 1],
            Self::Elements { softplus: _ } => [dim, 1],
            Self::Heads { softplus: _ } => [1, 0],
        }
    }

    /// The factor of a gate.
    fn factor(self, gate: f32) -> f64 {
        let gate = f64::from(gate);
        match self {
            Self::None => 1.0,
            Self::InQueries | Self::Elements { softplus: false } | Self::Heads { softplus: false } => {
                1.0 / (1.0 + (-gate).exp())
            }
            Self::Elements { softplus: true } | Self::Heads { softplus: true } => gate.exp().ln_1p(),
        }
    }
}

/// An attention.
#[derive(Debug, Clone, Copy)]
struct Shape {
    n_head: usize,
    n_head_kv: usize,
    dim: usize,
    /// 0: none, 1: interleaved, 2: halves.
    rotation: u32,
    n_rot: usize,
    /// 0: none, 1: one weight for all heads, 2: one for each head, 3: no weight.
    norm: u32,
    norm_after_rope: bool,
    soft_cap: f32,
    sinks: bool,
    gate: Gate,
    mask: u32,
    reach: usize,
    /// Whether each run is a bidirectional span.
    bidirectional: bool,
    f16: bool,
}

const EPS: f32 = 1e-5;

fn shape(n_head: usize, n_head_kv: usize, dim: usize) -> Shape {
    Shape {
        n_head,
        n_head_kv,
        dim,
        rotation: 1,
        n_rot: dim,
        norm: 0,
        norm_after_rope: false,
        soft_cap: 0.0,
        sinks: false,
        gate: Gate::None,
        mask: CAUSAL,
        reach: 0,
        bidirectional: false,
        f16: true,
    }
}

impl Shape {
    fn q_step(&self) -> usize {
        if self.gate == Gate::InQueries { 2 * self.dim } else { self.dim }
    }

    fn k_at(&self) -> usize {
        self.n_head * self.q_step()
    }

    fn v_at(&self) -> usize {
        self.k_at() + self.n_head_kv * self.dim
    }

    fn stride(&self) -> usize {
        self.v_at() + self.n_head_kv * self.dim
    }

    /// Elements from one token's gates to the next one's, where they are not among the queries: some more than there are gates.
    fn gate_stride(&self) -> usize {
        self.n_head * self.dim + 3
    }

    fn scale(&self) -> f32 {
        1.0 / (self.dim as f32).sqrt()
    }

    /// The indices that a token at `pos` sees. `last`: [`TokenArgs::last`].
    fn seen(&self, pos: usize, last: usize) -> std::ops::Range<usize> {
        let (next, end) = (pos + 1, last + 1);
        match self.mask {
            CAUSAL => 0..next.max(end),
            WINDOW => next.saturating_sub(self.reach)..next.max(end),
            CHUNK => pos / self.reach * self.reach..next.max(end),
            FULL => 0..end,
            NEAR => pos.saturating_sub(self.reach)..end.min(next + self.reach),
            other => panic!("mask {other}"),
        }
    }

    fn cached(&self, v: f32) -> f32 {
        if self.f16 { f16::from_f32(v).to_f32() } else { v }
    }
}

/// Keys or values on the host: of each position of each sequence, `[n_head_kv * dim]`; `None`: undefined.
type Rows = Vec<Vec<Option<Vec<f32>>>>;

/// A cache, the parameters of queries and keys, and the tokens of a batch.
struct Setup {
    gpu: Arc<CudaDevice>,
    shape: Shape,
    rows: [Rows; 2],
    /// Pages of each sequence.
    pages: Vec<Vec<u32>>,
    buffers: [CudaBuffer; 2],
    page_table: CudaBuffer,
    max_pages: usize,
    tokens: Vec<TokenArgs>,
    token_buffer: CudaBuffer,
    norms: [Vec<f32>; 2],
    norm_buffers: [CudaBuffer; 2],
    rope: Vec<f32>,
    rope_buffer: CudaBuffer,
    sinks: Vec<f32>,
    sink_buffer: CudaBuffer,
    qkv: Vec<f32>,
    /// Gates that are not among the queries, `[n_tokens, gate_stride]`.
    gates: Vec<f32>,
    gate_buffer: CudaBuffer,
}

impl Setup {
    /// `runs`: of each run of consecutive tokens, sequence, first position and number of tokens. `appended`: keys and values of the
    /// tokens are in the cache already. `undefined`: what the cache holds elsewhere.
    fn new(
        gpu: &Arc<CudaDevice>,
        shape: Shape,
        runs: &[(usize, usize, usize)],
        appended: bool,
        undefined: f32,
    ) -> Self {
        let n_seq = runs.iter().map(|run| run.0 + 1).max().unwrap();
        let end = runs.iter().map(|(_, pos, n)| pos + n).max().unwrap();
        let (max_pages, width) = (end.div_ceil(PAGE) + 1, shape.n_head_kv * shape.dim);
        let mut rows: [Rows; 2] = [0, 1].map(|_| vec![vec![None; max_pages * PAGE]; n_seq]);
        for &(seq, pos, n) in runs {
            for (which, rows) in rows.iter_mut().enumerate() {
                let n = if appended { pos + n } else { pos };
                let data = random((100 + 2 * seq + which) as u64, n * width);
                // A token sees nothing of earlier chunks, nor further back than the window.
                let first = shape.seen(pos, pos).start / PAGE * PAGE;
                for (pos, row) in data.chunks(width).enumerate().skip(first) {
                    rows[seq][pos] = Some(row.iter().map(|v| shape.cached(*v)).collect());
                }
            }
        }
        // In no order; page 0 belongs to none.
        let n_pages = n_seq * max_pages + 1;
        let page = |seq: usize, i: usize| (1 + (seq * max_pages + i) * 11 % (n_pages - 1)) as u32;
        assert!(!(n_pages - 1).is_multiple_of(11), "each page once");
        let pages: Vec<Vec<u32>> = (0..n_seq).map(|seq| (0..max_pages).map(|i| page(seq, i)).collect()).collect();
        let tokens: Vec<_> = runs
            .iter()
            .flat_map(|&(seq, pos, n)| {
                let end = (pos + n - 1) as u32;
                let looks_ahead = shape.bidirectional || [FULL, NEAR].contains(&shape.mask);
                (pos as u32..=end).map(move |pos| TokenArgs {
                    id: 0,
                    seq: seq as u32,
                    pos,
                    last: if looks_ahead { end } else { pos },
                    position: pos + 3,
                    rope_row: (max_pages * PAGE - 1) as u32 - pos,
                })
            })
            .collect();
        let weights = |seed: u64, n: usize| random(seed, n).iter().map(|v| 1.0 + v / 2.0).collect::<Vec<_>>();
        let norms = [weights(11, shape.n_head * shape.dim), weights(12, shape.n_head_kv * shape.dim)];
        let half = shape.n_rot / 2;
        let rope: Vec<f32> = (0..max_pages * PAGE * half)
            .map(|i| (i / half) as f64 * 1e4f64.powf(-((i % half) as f64) / half as f64))
            .flat_map(|angle| [angle.cos() as f32, angle.sin() as f32])
            .collect();
        let sinks: Vec<f32> = random(13, shape.n_head).iter().map(|v| 4.0 * v).collect();
        // Scores of some 4. Ready queries are scaled already.
        let size = if appended { 6.0 * shape.scale() } else { 3.0 };
        let qkv: Vec<f32> = random(14, tokens.len() * shape.stride()).iter().map(|v| size * v).collect();
        let gates: Vec<f32> = random(15, tokens.len() * shape.gate_stride()).iter().map(|v| 8.0 * v).collect();
        let empty = || gpu.zeros("cache", 16).unwrap();
        let mut setup = Self {
            gpu: Arc::clone(gpu),
            shape,
            rows,
            buffers: [empty(), empty()],
            page_table: gpu.upload("pages", &pages.concat()).unwrap(),
            max_pages,
            token_buffer: gpu.upload("tokens", &tokens).unwrap(),
            norm_buffers: [0, 1].map(|i| gpu.upload("norm", &norms[i]).unwrap()),
            rope_buffer: gpu.upload("RoPE", &rope).unwrap(),
            sink_buffer: gpu.upload("sinks", &sinks).unwrap(),
            pages,
            tokens,
            norms,
            rope,
            sinks,
            qkv,
            gate_buffer: gpu.upload("gates", &gates).unwrap(),
            gates,
        };
        setup.buffers = [0, 1].map(|which| {
            let elements = setup.elements(which, n_pages, undefined);
            if shape.f16 {
                let halves: Vec<u16> = elements.iter().map(|v| f16::from_f32(*v).to_bits()).collect();
                gpu.upload("cache", &halves).unwrap()
            } else {
                gpu.upload("cache", &elements).unwrap()
            }
        });
        setup
    }

    /// The index of a row in the cache.
    fn row_at(&self, seq: usize, pos: usize, kv: usize) -> usize {
        (self.pages[seq][pos / PAGE] as usize * self.shape.n_head_kv + kv) * PAGE + pos % PAGE
    }

    /// All elements of the keys (0) or values (1) as the device should hold them.
    fn elements(&self, which: usize, n_pages: usize, undefined: f32) -> Vec<f32> {
        let Shape { n_head_kv, dim, .. } = self.shape;
        let mut elements = vec![undefined; n_pages * n_head_kv * PAGE * dim];
        for (seq, positions) in self.rows[which].iter().enumerate() {
            for (pos, row) in positions.iter().enumerate() {
                for (kv, head) in row.iter().flat_map(|row| row.chunks(dim).enumerate()) {
                    elements[self.row_at(seq, pos, kv) * dim..][..dim].copy_from_slice(head);
                }
            }
        }
        elements
    }

    /// The elements of keys (0) or values (1) on the device.
    fn read_cache(&self, which: usize) -> Vec<f32> {
        let buffer = &self.buffers[which];
        if self.shape.f16 {
            let halves: Vec<u16> = read(&self.gpu, buffer, buffer.bytes() as usize / 2);
            return halves.iter().map(|bits| f16::from_bits(*bits).to_f32()).collect();
        }
        read(&self.gpu, buffer, buffer.bytes() as usize / 4)
    }

    /// Compares the cache with the twin's after the tokens have been appended, to `before`; its new rows are those of
    /// the twin from then on. `twin`: from a key (0) or value (1) head of a token as `qkv` has it, the number of the
    /// token and the head, the head in the cache.
    fn check_appended(
        &mut self,
        before: &[Vec<f32>; 2],
        what: &str,
        twin: impl Fn(&Self, usize, &[f64], usize, usize) -> Vec<f64>,
    ) {
        let Shape { n_head_kv, dim, f16, .. } = self.shape;
        for which in [0, 1] {
            let got = self.read_cache(which);
            let mut expected = before[which].clone();
            for (i, token) in self.tokens.clone().iter().enumerate() {
                let (seq, pos) = (token.seq as usize, token.pos as usize);
                let mut row = Vec::new();
                for kv in 0..n_head_kv {
                    let from = &self.qkv[i * self.shape.stride() + [self.shape.k_at(), self.shape.v_at()][which]..];
                    let head: Vec<f64> = from[kv * dim..][..dim].iter().map(|v| f64::from(*v)).collect();
                    let twin = twin(self, which, &head, i, kv);
                    let at = self.row_at(seq, pos, kv) * dim;
                    // Half a unit in the last place of F16; and a few of F32.
                    let of = if f16 { 1.0 / 2048.0 } else { 0.0 };
                    let twin =
                        twin.iter().map(|v| Expected { value: *v, error: of * v.abs() + 4e-6 }).collect::<Vec<_>>();
                    assert_close(
                        &got[at..][..dim],
                        &twin,
                        dim,
                        &format!("{what}: cache {which} of token {i}, head {kv}"),
                    );
                    expected[at..][..dim].copy_from_slice(&got[at..][..dim]);
                    row.extend_from_slice(&got[at..][..dim]);
                }
                self.rows[which][seq][pos] = Some(row);
            }
            let same = got.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan());
            assert!(same, "{what}: cache {which} has changed elsewhere");
        }
    }

    /// A key (0) or value (1) head in the cache of the kernels that append alone.
    fn appended(&self, which: usize, head: &[f64], token: usize, kv: usize) -> Vec<f64> {
        if which == 0 { self.made(head, 1, kv, self.tokens[token].pos as usize, 1.0) } else { head.to_vec() }
    }

    /// A query (`of` 0) or key (1) head after norm, RoPE and scale.
    fn made(&self, head: &[f64], of: usize, index: usize, pos: usize, scale: f32) -> Vec<f64> {
        let shape = &self.shape;
        let mut v = head.to_vec();
        let normalize = |v: &mut Vec<f64>| {
            let mean = v.iter().map(|v| v * v).sum::<f64>() / shape.dim as f64;
            let factor = 1.0 / (mean + f64::from(EPS)).sqrt();
            for (i, v) in v.iter_mut().enumerate() {
                let weight = match shape.norm {
                    1 => f64::from(self.norms[of][i]),
                    2 => f64::from(self.norms[of][index * shape.dim + i]),
                    _ => 1.0,
                };
                *v *= factor * weight;
            }
        };
        if shape.norm != 0 && !shape.norm_after_rope {
            normalize(&mut v);
        }
        self.rotate(&mut v, pos);
        if shape.norm != 0 && shape.norm_after_rope {
            normalize(&mut v);
        }
        v.iter().map(|v| v * f64::from(scale)).collect()
    }

    /// Rotates a head of a token at `pos`, whose row of the table is counted from the end.
    fn rotate(&self, v: &mut [f64], pos: usize) {
        let rope_row = self.max_pages * PAGE - 1 - pos;
        let Shape { rotation, n_rot, .. } = self.shape;
        let half = n_rot / 2;
        for i in 0..if rotation == 0 { 0 } else { half } {
            let (a, b) = if rotation == 2 { (i, i + half) } else { (2 * i, 2 * i + 1) };
            let [cos, sin] = [0, 1].map(|part| f64::from(self.rope[2 * (rope_row * half + i) + part]));
            (v[a], v[b]) = (v[a] * cos - v[b] * sin, v[a] * sin + v[b] * cos);
        }
    }

    /// The query of a token as `qkv` has it.
    fn raw_query(&self, token: usize, head: usize) -> Vec<f64> {
        let at = token * self.shape.stride() + head * self.shape.q_step();
        self.qkv[at..][..self.shape.dim].iter().map(|v| f64::from(*v)).collect()
    }

    /// The queries of all tokens as ready ones, `[n_tokens, n_head * dim]`: without the gates that `qkv` may have beside them.
    fn ready_queries(&self) -> Vec<f32> {
        let Shape { n_head, dim, .. } = self.shape;
        let head_at = |token, head| token * self.shape.stride() + head * self.shape.q_step();
        let heads = (0..self.tokens.len()).flat_map(|token| (0..n_head).map(move |head| head_at(token, head)));
        heads.flat_map(|at| self.qkv[at..][..dim].iter().copied()).collect()
    }

    /// The result of all tokens, from the queries that `query` makes of token and head. `slopes`: of ALiBi. `error`: relative to the
    /// largest value.
    fn expected(&self, query: impl Fn(usize, usize) -> Vec<f64>, slopes: Option<&[f32]>, error: f64) -> Vec<Expected> {
        let Shape { n_head, n_head_kv, dim, .. } = self.shape;
        let mut results = Vec::new();
        for (i, token) in self.tokens.iter().enumerate() {
            let (seq, pos) = (token.seq as usize, token.pos as usize);
            for head in 0..n_head {
                let (q, kv) = (query(i, head), head / (n_head / n_head_kv));
                let row = |which: usize, pos: usize| {
                    let row = self.rows[which][seq][pos].as_ref().expect("a position of the sequence");
                    &row[kv * dim..][..dim]
                };
                let seen = self.shape.seen(pos, token.last as usize);
                let scores: Vec<f64> = seen
                    .clone()
                    .map(|at| {
                        let mut score: f64 = row(0, at).iter().zip(&q).map(|(k, q)| f64::from(*k) * q).sum();
                        let cap = f64::from(self.shape.soft_cap);
                        if cap != 0.0 {
                            score = cap * (score / cap).tanh();
                        }
                        score - slopes.map_or(0.0, |slopes| f64::from(slopes[head]) * at.abs_diff(pos) as f64)
                    })
                    .collect();
                let sink = self.shape.sinks.then(|| f64::from(self.sinks[head]));
                let largest = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = scores.iter().copied().chain(sink).map(|score| (score - largest).exp()).sum();
                let mut out = vec![0.0; dim];
                for (at, score) in seen.zip(&scores) {
                    let weight = (score - largest).exp() / sum;
                    out.iter_mut().zip(row(1, at)).for_each(|(out, v)| *out += weight * f64::from(*v));
                }
                let gate = self.shape.gate;
                let gates = match gate {
                    Gate::InQueries => &self.qkv[i * self.shape.stride() + dim..],
                    Gate::None | Gate::Elements { softplus: _ } | Gate::Heads { softplus: _ } => {
                        &self.gates[i * self.shape.gate_stride()..]
                    }
                };
                let [head_step, element_step] = gate.steps(dim);
                let factors = (0..dim).map(|d| gate.factor(gates[head * head_step + d * element_step]));
                // Values are at most 1, those of new tokens 3; softplus makes them larger.
                results.extend(
                    out.iter().zip(factors).map(|(value, factor)| Expected {
                        value: value * factor,
                        error: 3.0 * error * factor.max(1.0),
                    }),
                );
            }
        }
        results
    }

    fn head_args(&self) -> HeadArgs {
        HeadArgs {
            q_norm: self.norm_buffers[0].ptr(),
            k_norm: self.norm_buffers[1].ptr(),
            rope: self.rope_buffer.ptr(),
            norm: self.shape.norm,
            norm_after_rope: u32::from(self.shape.norm_after_rope),
            rotation: self.shape.rotation,
            n_rot: self.shape.n_rot as u32,
            eps: EPS,
            scale: self.shape.scale(),
        }
    }

    fn pages_args(&self) -> PagesArgs {
        PagesArgs { pages: self.page_table.ptr(), n_pages: self.max_pages as u32, unused: 0 }
    }

    fn gate_args(&self, qkv: &CudaBuffer) -> GateArgs {
        let [head_step, element_step] = self.shape.gate.steps(self.shape.dim).map(|step| step as u32);
        let (gates, stride, activation) = match self.shape.gate {
            Gate::None => (DevicePtr::NULL, 0, 0),
            Gate::InQueries => (qkv.slice().skip(self.shape.dim).ptr(), self.shape.stride(), 0),
            Gate::Elements { softplus } | Gate::Heads { softplus } => {
                (self.gate_buffer.ptr(), self.shape.gate_stride(), u32::from(softplus))
            }
        };
        GateArgs { gates, stride: stride as u32, head_step, element_step, activation }
    }

    /// Arguments without the division among blocks.
    fn args(&self, qkv: &CudaBuffer, out: DevicePtr<f32>, packed: DevicePtr<F16>, order: u32) -> AttentionArgs {
        let s = &self.shape;
        AttentionArgs {
            inputs: self.head_args(),
            tokens: self.token_buffer.ptr(),
            pages: self.pages_args(),
            k_cache: self.buffers[0].ptr(),
            v_cache: self.buffers[1].ptr(),
            qkv: qkv.ptr(),
            out,
            packed,
            sinks: if s.sinks { self.sink_buffer.ptr() } else { DevicePtr::NULL },
            n_head: s.n_head as u32,
            n_head_kv: s.n_head_kv as u32,
            head_dim: s.dim as u32,
            stride: s.stride() as u32,
            n_token_tiles: order,
            mask: s.mask,
            reach: s.reach as u32,
            soft_cap: s.soft_cap,
            gate: self.gate_args(qkv),
            q_step: s.q_step() as u32,
            k_at: s.k_at() as u32,
            v_at: s.v_at() as u32,
            ..AttentionArgs::zeroed()
        }
    }
}

/// Asserts that the packed results are the F32 ones, rounded to F16.
fn assert_packed(halves: &[f32], floats: &[f32], what: &str) {
    for (half, float) in halves.iter().zip(floats) {
        assert_eq!(*half, f16::from_f32(*float).to_f32(), "{what}: packed");
    }
}
