//! The gated delta rule, against its twin: the rule only, and fused with the convolution before it and the gated norm after
//! it.

use super::{batches, check, n_runs, n_tokens, row, rows_at, states, to_f64, words_of};
use crate::support::{on_variants, poisoned, random, run, takes_fewer_cases};
use metal_attention_wgpu::kernels::{
    ColumnRange, ConvolutionShape, DecayGranularity, DeltaRuleBuffers, DeltaRuleShape, DeltaRuleStep,
    DeltaRuleStepBuffers, DeltaRuleToken, GateActivation, KeyHeads, StateRange, convolution_twin, delta_rule,
    delta_rule_step, delta_rule_twin,
};
use metal_attention_wgpu::{Bind, GridExtent};

/// (heads, key heads, elements of a key, elements of a value, whether each channel has a decay)
const SHAPES: [(usize, usize, usize, usize, bool); 6] = [
    (3, 1, 8, 8, false),
    (2, 2, 16, 24, true),
    (4, 2, 96, 96, false),
    (6, 2, 9, 5, false),
    (2, 1, 128, 128, false),
    (1, 1, 130, 33, true),
];

fn shape((n_head, n_key_head, key_dim, value_dim, by_channel): (usize, usize, usize, usize, bool)) -> DeltaRuleShape {
    let (decay_of, n_decay) =
        if by_channel { (DecayGranularity::OfChannels, n_head * key_dim) } else { (DecayGranularity::OfHeads, n_head) };
    let channels = 2 * n_key_head * key_dim + n_head * value_dim;
    DeltaRuleShape {
        n_head,
        n_key_head,
        key_heads: if n_head == 6 { KeyHeads::Grouped } else { KeyHeads::InTurn },
        key_dim,
        value_dim,
        decay_of,
        l2_eps: (key_dim != 9).then_some(1e-3),
        scale: if key_dim == 9 { 0.3 } else { 1.5 },
        x: rows_at(channels),
        decay: rows_at(n_decay),
        beta: ColumnRange { stride: n_head, first: 0 },
        out: rows_at(n_head * value_dim),
        states: StateRange { n_slots: 1, stride: 0, at: 0 },
    }
}

/// Twice `x`.
fn doubled(x: &[f32]) -> Vec<f32> {
    x.iter().map(|x| 2.0 * x).collect()
}

#[test]
fn delta_rules_match_their_twin() {
    let shapes: Vec<_> = SHAPES.map(shape).into_iter().enumerate().collect();
    for (gpu, (at, shape)) in on_variants(&shapes) {
        let channels = shape.channels();
        let n_out = shape.n_head * shape.value_dim;
        let n_decay = shape.decay.stride - 5;
        let a: Vec<f32> = random(5, shape.n_head).iter().map(|x| -x.abs()).collect();
        let decay_bias = random(6, n_decay);
        let (taps, bias, norm_weight) = (random(7, 4 * channels), random(8, channels), random(9, shape.value_dim));
        for (i, segments) in batches().into_iter().enumerate() {
            let n = n_tokens(&segments);
            let x = random(1, n * shape.x.stride);
            let decay = doubled(&random(2, n * shape.decay.stride));
            let beta = doubled(&random(3, n * shape.beta.stride));
            let gate_at = rows_at(n_out);
            let gate = doubled(&random(4, n * gate_at.stride));
            let words = words_of(gpu, &segments);
            let runs = GridExtent::Fixed(n_runs(&segments) + 1);
            let tokens_in_f64 = |token: usize, n: usize| -> Vec<[Vec<f64>; 3]> {
                let token_inputs = |t| {
                    let x = to_f64(row(&x, shape.x, t, channels));
                    [x, to_f64(row(&decay, shape.decay, t, n_decay)), to_f64(row(&beta, shape.beta, t, shape.n_head))]
                };
                (token..token + n).map(token_inputs).collect()
            };
            let (a64, bias64) = (to_f64(&a), to_f64(&decay_bias));
            let token_twin =
                |x: &[f64], [_, decay, beta]: &[Vec<f64>; 3], shape: &DeltaRuleShape, state: &mut [f64]| {
                    let token = DeltaRuleToken { x, decay, beta, a: &a64, decay_bias: &bias64 };
                    delta_rule_twin(shape, &token, state)
                };
            for fused in [false, true] {
                let matrices = shape.state_elements();
                let n_conv_state = if fused { 3 * channels } else { 0 };
                let (states_at, before) = states(n_conv_state + matrices);
                let shape =
                    DeltaRuleShape { states: StateRange { at: states_at.at + n_conv_state, ..states_at }, ..shape };
                let upload = |v: &Vec<f32>| gpu.upload("x", v).unwrap();
                let [gx, gd, gb, ga, gbias] = [&x, &decay, &beta, &a, &decay_bias].map(upload);
                let gs = upload(&before);
                let out = poisoned(gpu, n * shape.out.stride);
                let b = DeltaRuleBuffers {
                    x: &gx,
                    decay: &gd,
                    beta: &gb,
                    a: &ga,
                    decay_bias: &gbias,
                    states: &gs,
                    out: &out,
                    segments: &words,
                };
                let what = format!("{shape:?}, batch {i}, fused: {fused}");
                let [gt, gcb, gg, gw] = [&taps, &bias, &gate, &norm_weight].map(upload);
                let tickets = upload(&vec![0.0; n * shape.n_key_head]);
                let options = if takes_fewer_cases(gpu) { at % 4 } else { i };
                let has_bias = options % 2 == 0;
                let step = DeltaRuleStep {
                    width: 4,
                    bias: has_bias,
                    convolution_at: states_at.at,
                    norm_eps: 1e-3,
                    gate_kind: if options == 0 { GateActivation::Sigmoid } else { GateActivation::Silu },
                    gate: gate_at,
                };
                let dispatch = if fused {
                    let with = DeltaRuleStepBuffers {
                        taps: &gt,
                        bias: has_bias.then_some(&gcb as &dyn Bind),
                        gate: &gg,
                        norm_weight: &gw,
                        tickets: &tickets,
                    };
                    delta_rule_step(gpu, &shape, &step, &b, &with, runs).unwrap().expect("heads that fit")
                } else {
                    delta_rule(gpu, &shape, &b, runs).unwrap()
                };
                run(gpu, &[dispatch], n);
                let convolution = ConvolutionShape {
                    channels,
                    width: 4,
                    bias: has_bias,
                    silu: true,
                    x: shape.x,
                    out: shape.x,
                    states: shape.states,
                };
                let twin = |token: usize, n: usize, state: &mut Vec<f64>| -> Vec<f64> {
                    let tokens = tokens_in_f64(token, n);
                    let mut inputs: Vec<f64> = tokens.iter().flat_map(|[x, ..]| x.clone()).collect();
                    let mut matrices = state.split_off(n_conv_state);
                    if fused {
                        let bias = has_bias.then(|| to_f64(&bias));
                        inputs = convolution_twin(&convolution, &inputs, &to_f64(&taps), bias.as_deref(), state);
                    }
                    let mut results = Vec::new();
                    for (i, (x, token_inputs)) in inputs.chunks(channels).zip(&tokens).enumerate() {
                        let out = token_twin(x, token_inputs, &shape, &mut matrices);
                        let gate = to_f64(row(&gate, gate_at, token + i, n_out));
                        for (out, gate) in out.chunks(shape.value_dim).zip(gate.chunks(shape.value_dim)) {
                            let squares = out.iter().map(|x| x * x).sum::<f64>() / out.len() as f64;
                            let factor = 1.0 / (squares + f64::from(step.norm_eps)).sqrt();
                            results.extend(out.iter().zip(gate).zip(&norm_weight).map(|((x, g), w)| {
                                let sigmoid = 1.0 / (1.0 + (-g).exp());
                                let gate = match step.gate_kind {
                                    GateActivation::Silu => g * sigmoid,
                                    GateActivation::Sigmoid => sigmoid,
                                };
                                if fused { x * factor * f64::from(*w) * gate } else { *x }
                            }));
                        }
                    }
                    state.extend(matrices);
                    results
                };
                let after = (&gs, states_at, n_conv_state + matrices, &before[..]);
                check(gpu, &what, &segments, (&out, shape.out, n_out), after, &twin, 1e-11);
                let left: Vec<u32> = gpu.read(&tickets, n * shape.n_key_head).unwrap();
                assert!(left.iter().all(|&n| n == 0), "{what}: {left:?}");
            }
        }
    }
}
