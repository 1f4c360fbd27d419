//! The kernels of recurrent layers, over micro-batches of several sequences: segments of one and of many tokens, states
//! that are updated in place, copied to another slot, or shared by several sequences.
//!
//! All compute in F32; the bound is relative to the root mean square of the results, or states.

mod convolution;
mod delta_rule;
mod group_norm;
mod mamba;
mod rwkv;
mod token_shift;

use std::sync::Arc;

use metal_attention_model::{ModelSpec, Segment};

use super::super::{MicroBatch, MicroBatchSize, TokenOutput};
use super::{assert_near, random, read, to_f64};
use crate::CudaDevice;
use crate::args::{RowsArgs, StatesArgs};
use crate::device::CudaBuffer;
use crate::inputs::QueryTiles;
use crate::kv_cache::CudaKvCache;
use crate::recurrent_state::CudaRecurrentStates;

/// State slots.
const N_SLOTS: usize = 12;
/// Elements of a slot behind those that a test uses.
const SLACK: usize = 7;
/// The largest error of a scan of some 60 tokens, relative to the root mean square.
const SCAN_ERROR: f64 = 4e-6;

/// `n` tokens of sequence `seq` from position `pos`, whose state is read from slot `from` and written to slot `to`.
fn segment(seq: usize, pos: usize, n: usize, from: u32, to: u32) -> Segment {
    Segment { seq, pos, n, from, to }
}

/// One token of each of several sequences: in place, to another slot, from a state that others read, too, from no
/// state.
fn decode_steps() -> Vec<Vec<Segment>> {
    vec![
        vec![segment(0, 5, 1, 3, 3)],
        vec![segment(2, 9, 1, 3, 4), segment(0, 7, 1, 5, 5), segment(1, 9, 1, 3, 1), segment(3, 0, 1, 0, 11)],
    ]
}

/// Decode steps; a prompt without a state, of more than three tiles in two segments; several sequences with segments of
/// one token and of many, around a tile's 16 tokens, and one after a decode step.
fn batches() -> Vec<Vec<Segment>> {
    let mut batches = decode_steps();
    batches.push(vec![segment(0, 0, 40, 0, 1), segment(0, 40, 19, 1, 2)]);
    batches.push(vec![
        segment(0, 7, 1, 5, 5),
        segment(0, 8, 1, 5, 6),
        segment(0, 9, 2, 6, 7),
        segment(2, 64, 17, 3, 2),
        segment(1, 64, 1, 3, 1),
        segment(4, 0, 16, 0, 9),
        segment(3, 1, 1, 8, 8),
        segment(3, 2, 15, 8, 4),
    ]);
    batches
}

fn n_tokens(segments: &[Segment]) -> usize {
    segments.iter().map(|segment| segment.n).sum()
}

/// The states of one layer, on the device and as they were before.
struct States {
    gpu: Arc<CudaDevice>,
    on_device: CudaRecurrentStates,
    before: Vec<f32>,
    /// Elements that are used.
    n: usize,
}

impl States {
    /// Random states of `n` elements; slot 0 is that of a sequence without tokens.
    fn new(gpu: &Arc<CudaDevice>, n: usize, segments: &[Segment]) -> Self {
        let mut before = random(77, N_SLOTS * (n + SLACK));
        before[..n + SLACK].fill(0.0);
        let on_device = CudaRecurrentStates::of_one_layer(gpu, &before, n + SLACK, n_tokens(segments)).unwrap();
        Self { gpu: Arc::clone(gpu), on_device, before, n }
    }

    /// The arguments of a kernel that uses the elements from `first` on.
    fn args(&self, first: usize) -> StatesArgs {
        self.on_device.of_layer(0, first)
    }

    /// Writes the runs of `segments`, and returns their micro-batch. No kernel under test reads the cache.
    fn batch<'a>(&'a self, spec: &'a ModelSpec, cache: &'a CudaKvCache, segments: &[Segment]) -> MicroBatch<'a> {
        let runs = self.on_device.write(segments).unwrap();
        let n_tokens = n_tokens(segments);
        let output = TokenOutput::Hidden;
        let size = MicroBatchSize { n_tokens, n_outputs: 0, query_tiles: QueryTiles::default(), runs, output };
        MicroBatch { spec, cache, recurrent: &self.on_device, size, spans: None, states: &[], context: None }
    }

    /// All states as the device has them.
    fn read(&self) -> Vec<f32> {
        let (buffer, _, _) = self.on_device.slot_parts(0).next().unwrap();
        read(&self.gpu, buffer, self.before.len())
    }

    /// Compares results with those of `twin`, which gives the result of a token, by its index in the micro-batch, and
    /// updates the state. Returns all states of the twin.
    fn check_results(
        &self,
        segments: &[Segment],
        got: &[f32],
        limit: f64,
        what: &str,
        mut twin: impl FnMut(usize, &mut [f64]) -> Vec<f64>,
    ) -> Vec<Vec<f64>> {
        let slots = self.before.chunks(self.n + SLACK);
        let mut states: Vec<Vec<f64>> = slots.map(|slot| to_f64(&slot[..self.n])).collect();
        let (mut expected, mut token) = (Vec::new(), 0);
        for segment in segments {
            let mut state = states[segment.from as usize].clone();
            for _ in 0..segment.n {
                expected.extend(twin(token, &mut state));
                token += 1;
            }
            states[segment.to as usize] = state;
        }
        assert_near(got, &expected, expected.len() / token, limit, what);
        states
    }

    /// Compares results and states with those of `twin`. All else in the slots has to be as before. `limits`: of
    /// results and of states; 0: states have to be those of the twin, rounded to F32.
    fn check(
        &self,
        segments: &[Segment],
        got: &[f32],
        limits: [f64; 2],
        what: &str,
        twin: impl FnMut(usize, &mut [f64]) -> Vec<f64>,
    ) {
        let states = self.check_results(segments, got, limits[0], what, twin);
        let stride = self.n + SLACK;
        for (slot, (got, before)) in self.read().chunks(stride).zip(self.before.chunks(stride)).enumerate() {
            let written = segments.iter().any(|segment| segment.to as usize == slot);
            let what = format!("{what}: the state in slot {slot}");
            if written {
                assert_near(&got[..self.n], &states[slot], self.n, limits[1], &what);
            }
            let first = if written { self.n } else { 0 };
            assert_eq!(got[first..], before[first..], "{what}: what no kernel should write");
        }
    }
}

/// Rows of `n` elements in a buffer with other elements, which are NaN, around them.
struct Input {
    values: Vec<f32>,
    n: usize,
    buffer: CudaBuffer,
}

impl Input {
    /// Elements from one row to the next, beyond those of a row.
    const BESIDE: usize = 5;
    /// Elements before those of a row.
    const BEFORE: usize = 3;

    /// `rows` `[n_rows, n]`.
    fn new(gpu: &Arc<CudaDevice>, rows: Vec<f32>, n: usize) -> Self {
        let mut all = Vec::new();
        for row in rows.chunks(n) {
            all.extend([f32::NAN; Self::BEFORE]);
            all.extend_from_slice(row);
            all.extend([f32::NAN; Self::BESIDE - Self::BEFORE]);
        }
        Self { buffer: gpu.upload("rows", &all).unwrap(), values: rows, n }
    }

    fn args(&self) -> RowsArgs {
        RowsArgs::new(self.buffer.slice(), self.n + Self::BESIDE, Self::BEFORE)
    }

    fn row(&self, token: usize) -> Vec<f64> {
        to_f64(&self.values[token * self.n..][..self.n])
    }
}

/// Random numbers in `-size..size`.
fn random_of(size: f32, seed: u64, n: usize) -> Vec<f32> {
    random(seed, n).iter().map(|v| size * v).collect()
}

fn sigmoid(v: f64) -> f64 {
    1.0 / (1.0 + (-v).exp())
}

fn softplus(v: f64) -> f64 {
    v.max(0.0) + (-v.abs()).exp().ln_1p()
}

/// The sums of the short convolution for one token. `taps` `[n_tap, channels]`, those of the oldest token first;
/// `state`: the last inputs, `[n_tap - 1, channels]`.
fn convolved(x: &[f64], taps: &[f64], bias: Option<&[f64]>, state: &mut [f64]) -> Vec<f64> {
    let n = x.len();
    let mut inputs = state.to_vec();
    inputs.extend_from_slice(x);
    assert_eq!(inputs.len(), taps.len());
    let sum = |c: usize| inputs[c..].iter().step_by(n).zip(taps[c..].iter().step_by(n)).map(|(x, tap)| x * tap).sum();
    let sums: Vec<f64> = (0..n).map(sum).collect();
    state.copy_from_slice(&inputs[n..]);
    sums.iter().enumerate().map(|(c, sum)| sum + bias.map_or(0.0, |bias| bias[c])).collect()
}

/// Of each group of `n` elements, `x / sqrt(mean(x^2) + eps)`.
fn rms_normed(x: &[f64], n: usize, eps: f32) -> Vec<f64> {
    x.chunks(n)
        .flat_map(|group| {
            let mean = group.iter().map(|v| v * v).sum::<f64>() / n as f64;
            let factor = 1.0 / (mean + f64::from(eps)).sqrt();
            group.iter().map(move |v| v * factor)
        })
        .collect()
}
