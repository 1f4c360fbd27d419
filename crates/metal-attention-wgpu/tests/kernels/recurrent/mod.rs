//! The kernels of recurrent layers against twins in float64, over batches of several sequences. A segment is a range of
//! tokens of one sequence whose state is read from one slot and written to one; a run is the consecutive segments of one
//! sequence in a batch.

mod convolution;
mod delta_rule;
mod group_norm;
mod low_rank;
mod mamba;
mod rwkv;
mod token_shift;

use crate::support::{nmse, random};
use metal_attention_model::Segment;
use metal_attention_wgpu::kernels::{ColumnRange, StateRange, segment_words};
use metal_attention_wgpu::{WgpuDevice, wgpu};

/// State slots in tests.
pub const N_SLOTS: usize = 9;

/// A segment of `n` tokens of sequence `seq` from position `pos`, whose state is read from slot `from` and written to slot
/// `to`.
fn segment(seq: usize, pos: usize, n: usize, from: u32, to: u32) -> Segment {
    Segment { seq, pos, n, from, to }
}

/// Batches: a single token whose state is updated in place or written to another slot; a prompt from an empty state with
/// checkpoints; several sequences, one updated in place, others from a shared state, with segments of one token and of many.
pub fn batches() -> Vec<Vec<Segment>> {
    vec![
        vec![segment(0, 5, 1, 3, 3)],
        vec![segment(0, 5, 1, 3, 4)],
        vec![segment(0, 0, 40, 0, 1), segment(0, 40, 19, 1, 2)],
        vec![
            segment(0, 7, 1, 5, 5),
            segment(0, 8, 1, 5, 6),
            segment(0, 9, 2, 6, 7),
            segment(2, 64, 17, 3, 2),
            segment(1, 64, 1, 3, 1),
            segment(3, 1, 1, 8, 8),
            segment(3, 2, 6, 8, 4),
        ],
    ]
}

/// Number of runs of `segments`.
pub fn n_runs(segments: &[Segment]) -> u32 {
    segment_words(segments, N_SLOTS)[0][0]
}

pub fn n_tokens(segments: &[Segment]) -> usize {
    segments.iter().map(|segment| segment.n).sum()
}

/// The kernels' encoding of `segments`, in a buffer large enough for one segment per token.
pub fn words_of(gpu: &WgpuDevice, segments: &[Segment]) -> wgpu::Buffer {
    let buffer = gpu.buffer("segments", 16 * (1 + 2 * n_tokens(segments)) as u64).unwrap();
    gpu.write(&buffer, &segment_words(segments, N_SLOTS));
    buffer
}

/// `x` in float64.
pub fn to_f64(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

pub fn silu(x: f32) -> f64 {
    let x = f64::from(x);
    x / (1.0 + (-x).exp())
}

/// The columns of `n` elements in a row of a buffer that has other columns around them.
pub fn rows_at(n: usize) -> ColumnRange {
    ColumnRange { stride: n + 5, first: 3 }
}

/// The elements of row `token`.
pub fn row(x: &[f32], at: ColumnRange, token: usize, n: usize) -> &[f32] {
    &x[token * at.stride + at.first..][..n]
}

/// Random states of `n` elements in each slot, with other data between the slots. Slot 0 is zero, the empty state.
pub fn states(n: usize) -> (StateRange, Vec<f32>) {
    let at = StateRange { n_slots: N_SLOTS, stride: n + 7, at: 4 };
    let mut all = random(77, N_SLOTS * at.stride);
    all[..at.stride].fill(0.0);
    (at, all)
}

/// A twin of `n` tokens of one sequence: from (the row of the first token in the batch, `n`, the state before) it returns
/// the results, `[n, n_out]`, and updates the state.
pub type Twin<'a> = dyn Fn(usize, usize, &mut Vec<f64>) -> Vec<f64> + 'a;

/// Compares the kernel's results in `out` and states in `after` with those of `twin`, and checks that other slots and the
/// data around results and states are unchanged. `out`: (buffer, columns, elements per token); `after`: (buffer, slots,
/// elements per state, contents before).
#[allow(clippy::too_many_arguments)]
pub fn check(
    gpu: &WgpuDevice,
    what: &str,
    segments: &[Segment],
    out: (&wgpu::Buffer, ColumnRange, usize),
    after: (&wgpu::Buffer, StateRange, usize, &[f32]),
    twin: &Twin<'_>,
    limit: f64,
) {
    let (out, out_at, n_out) = out;
    let (states, states_at, n_state, before) = after;
    let total = n_tokens(segments);
    let got: Vec<f32> = gpu.read(out, total * out_at.stride).unwrap();
    let mut want_states = before.to_vec();
    let offset = |slot: u32| slot as usize * states_at.stride + states_at.at;
    let mut token = 0;
    for s in segments {
        // A later segment of a run continues from the state of the one before, rounded to F32.
        let mut state = to_f64(&want_states[offset(s.from)..][..n_state]);
        let want: Vec<f32> = twin(token, s.n, &mut state).iter().map(|&x| x as f32).collect();
        let rows: Vec<f32> = (token..token + s.n).flat_map(|t| row(&got, out_at, t, n_out).to_vec()).collect();
        let error = nmse(&rows, &want);
        assert!(error < limit, "{what}, {s:?}: results are off by {error:e}");
        for (to, x) in want_states[offset(s.to)..].iter_mut().zip(&state) {
            *to = *x as f32;
        }
        token += s.n;
    }
    let got_states: Vec<f32> = gpu.read(states, before.len()).unwrap();
    for (slot, (got, want)) in got_states.chunks(states_at.stride).zip(want_states.chunks(states_at.stride)).enumerate()
    {
        let inside = states_at.at..states_at.at + n_state;
        let error = nmse(&got[inside.clone()], &want[inside.clone()]);
        assert!(error < limit, "{what}: the state of slot {slot} is off by {error:e}");
        assert_eq!(got[..inside.start], want[..inside.start], "{what}: before the state of slot {slot}");
        assert_eq!(got[inside.end..], want[inside.end..], "{what}: behind the state of slot {slot}");
    }
    for t in 0..total {
        let row = &got[t * out_at.stride..][..out_at.stride];
        let others = row[..out_at.first].iter().chain(&row[out_at.first + n_out..]);
        assert!(others.into_iter().all(|x| x.is_nan()), "{what}: written beside the results");
    }
}
