//! The gated delta rule, with decays of heads and of channels (`delta_rule.cu`): the scan alone, and fused with the
//! convolution before it and the norm after it.

use std::sync::Arc;

use bytemuck::Zeroable;
use metal_attention_model::Segment;

use super::super::super::ModelRunner;
use super::super::super::recurrence::RecurrenceKernel;
use super::super::{pass, poisoned, random, read, to_f64};
use super::{
    Input, SCAN_ERROR, States, batches, convolved, decode_steps, n_tokens, random_of, rms_normed, sigmoid, softplus,
};
use crate::CudaExecutor;
use crate::args::{
    ConvolutionArgs, DeltaRuleArgs, FusedDecodeArgs, FusedDeltaRuleArgs, GroupNormArgs, GroupNormKind, OutputGate,
};
use crate::kernels::{self, EntryPoint};
use crate::slice::DevicePtr;

#[derive(Debug, Clone, Copy)]
struct Rule {
    n_head: usize,
    n_head_k: usize,
    key_dim: usize,
    value_dim: usize,
    /// Whether each channel of a key has a decay.
    of_channels: bool,
    /// Whether consecutive heads share a key head.
    grouped: bool,
}

const EPS: f32 = 1e-3;

impl Rule {
    fn channels(&self) -> usize {
        2 * self.n_head_k * self.key_dim + self.n_head * self.value_dim
    }

    fn n_decays(&self) -> usize {
        if self.of_channels { self.n_head * self.key_dim } else { self.n_head }
    }

    fn family(&self) -> [EntryPoint<DeltaRuleArgs>; 3] {
        if self.of_channels { kernels::DELTA_RULE_OF_CHANNELS } else { kernels::DELTA_RULE }
    }

    fn fused_family(&self) -> [EntryPoint<FusedDeltaRuleArgs>; 3] {
        if self.of_channels { kernels::DELTA_RULE_OF_CHANNELS_ALONE } else { kernels::DELTA_RULE_ALONE }
    }

    fn kernel(&self) -> RecurrenceKernel {
        if self.of_channels { RecurrenceKernel::DELTA_RULE_OF_CHANNELS } else { RecurrenceKernel::DELTA_RULE }
    }

    /// `S = g S; u = beta (v - k S); S = S + k^T u; out = q S` for all heads, with normalised queries and keys. `x`:
    /// queries, keys and values; `state`: `[head][value][key]`.
    fn twin(&self, x: &[f64], beta: &[f64], decays: &[f64], rates: &[f64], state: &mut [f64]) -> Vec<f64> {
        let Self { n_head, n_head_k, key_dim, value_dim, .. } = *self;
        let (queries, rest) = x.split_at(n_head_k * key_dim);
        let (keys, values) = rest.split_at(n_head_k * key_dim);
        let mut out = Vec::new();
        for head in 0..n_head {
            let key_head = if self.grouped { head / (n_head / n_head_k) } else { head % n_head_k };
            let unit = |v: &[f64]| {
                let v = &v[key_head * key_dim..][..key_dim];
                let length = (v.iter().map(|v| v * v).sum::<f64>() + f64::from(EPS)).sqrt();
                v.iter().map(|v| v / length).collect::<Vec<_>>()
            };
            let (q, k) = (unit(queries), unit(keys));
            let decay = |i: usize| {
                let at = if self.of_channels { head * key_dim + i } else { head };
                (rates[head] * softplus(decays[at])).exp()
            };
            for column in 0..value_dim {
                let s = &mut state[(head * value_dim + column) * key_dim..][..key_dim];
                (0..key_dim).for_each(|i| s[i] *= decay(i));
                let known: f64 = s.iter().zip(&k).map(|(s, k)| s * k).sum();
                let u = sigmoid(beta[head]) * (values[head * value_dim + column] - known);
                s.iter_mut().zip(&k).for_each(|(s, k)| *s += k * u);
                out.push(s.iter().zip(&q).map(|(s, q)| s * q).sum::<f64>() / (key_dim as f64).sqrt());
            }
        }
        out
    }
}

/// `n_tap`: the taps of the convolution that is fused with the scan; `None`: no convolution.
fn check(pass: &mut CudaExecutor, rule: Rule, segments: &[Segment], n_tap: Option<usize>) {
    let what = format!("{rule:?} {segments:?}, fused with taps {n_tap:?}");
    let Rule { n_head, n_head_k, key_dim, value_dim, .. } = rule;
    let (channels, n_out, n_decays) = (rule.channels(), n_head * value_dim, rule.n_decays());
    let (gpu, n) = (Arc::clone(&pass.runner.gpu), n_tokens(segments));
    let n_inputs = n_tap.map_or(0, |n_tap| (n_tap - 1) * channels);
    let states = States::new(&gpu, n_inputs + n_out * key_dim, segments);
    let x = Input::new(&gpu, random(1, n * channels), channels);
    let beta = Input::new(&gpu, random_of(2.0, 2, n * n_head), n_head);
    let decay = Input::new(&gpu, random_of(2.0, 3, n * n_decays), n_decays);
    let gate = Input::new(&gpu, random_of(2.0, 4, n * n_out), n_out);
    let rates: Vec<f32> = random(5, n_head).iter().map(|v| -v.abs()).collect();
    let (dt_bias, norm) = (random(6, n_decays), random(7, value_dim));
    let (taps, bias) = (random(8, n_tap.unwrap_or(1) * channels), random(9, channels));
    let upload = |v: &Vec<f32>| gpu.upload("rule", v).unwrap();
    let [rate_buffer, dt_buffer, norm_buffer, tap_buffer, bias_buffer] =
        [&rates, &dt_bias, &norm, &taps, &bias].map(upload);
    let out = poisoned(&gpu, n * n_out);
    let batch = states.batch(&pass.spec, &pass.cache, segments);
    let shape = [n_head, key_dim, value_dim];
    let args = DeltaRuleArgs {
        scan: ModelRunner::scan_args(batch, rule.kernel(), states.args(n_inputs), out.slice(), shape),
        x: x.args(),
        beta: beta.args(),
        decay: decay.args(),
        a: rate_buffer.ptr(),
        dt_bias: dt_buffer.ptr(),
        n_head_k: n_head_k as u32,
        heads_of_key: if rule.grouped { (n_head / n_head_k) as u32 } else { 0 },
        unused: 0,
        eps: EPS,
    };
    let tickets = gpu.zeros("tickets", 4 * (n * n_head_k) as u64).unwrap();
    let (has_bias, gate_kind) = (n % 2 == 1, if n % 2 == 1 { OutputGate::Sigmoid } else { OutputGate::Silu });
    if let Some(n_tap) = n_tap {
        let convolution = ConvolutionArgs {
            x: x.args(),
            taps: tap_buffer.ptr(),
            bias: if has_bias { bias_buffer.ptr() } else { DevicePtr::NULL },
            channels: channels as u32,
            n_tap: n_tap as u32,
            block: channels as u32,
            step: channels as u32,
            ..ConvolutionArgs::zeroed()
        };
        let norm = GroupNormArgs {
            weight: norm_buffer.ptr(),
            gate: gate.args(),
            n: value_dim as u32,
            n_group: n_head as u32,
            norm: GroupNormKind::Rms as u32,
            gate_kind: gate_kind as u32,
            eps: EPS,
            ..GroupNormArgs::zeroed()
        };
        let convolution = ModelRunner::convolution_of(batch, 0, convolution);
        let fused = pass.runner.fused_decode_args(batch, rule.kernel(), &args.scan, convolution, Some(norm));
        let fused = FusedDecodeArgs { tickets: tickets.ptr(), ..fused.expect("a head within the limits") };
        let fused = FusedDeltaRuleArgs { args, fused };
        pass.runner.launch_fused_decode(batch, rule.kernel(), rule.fused_family(), &args.scan, &fused).unwrap();
        assert_eq!(read::<u32>(&gpu, &tickets, n * n_head_k), vec![0; n * n_head_k], "{what}: tickets");
    } else {
        pass.runner.launch_scan(batch, rule.kernel(), rule.family(), &args.scan, &args).unwrap();
    }
    let got: Vec<f32> = read(&gpu, &out, n * n_out);
    let [rates, dt_bias, norm, taps, bias] = [&rates, &dt_bias, &norm, &taps, &bias].map(|v| to_f64(v));
    states.check(segments, &got, [SCAN_ERROR; 2], &what, |token, state| {
        let (before, matrices) = state.split_at_mut(n_inputs);
        let decays: Vec<f64> = decay.row(token).iter().zip(&dt_bias).map(|(v, bias)| v + bias).collect();
        if n_tap.is_none() {
            return rule.twin(&x.row(token), &beta.row(token), &decays, &rates, matrices);
        }
        let sums = convolved(&x.row(token), &taps, has_bias.then_some(&bias), before);
        let x: Vec<f64> = sums.iter().map(|v| v * sigmoid(*v)).collect();
        let heads = rms_normed(&rule.twin(&x, &beta.row(token), &decays, &rates, matrices), value_dim, EPS);
        let gates = gate.row(token);
        let gated = heads.iter().zip(&gates).enumerate().map(|(i, (v, gate))| {
            let factor = if gate_kind == OutputGate::Silu { gate * sigmoid(*gate) } else { sigmoid(*gate) };
            v * norm[i % value_dim] * factor
        });
        gated.collect()
    });
}

/// Heads, key heads, elements of a key and of a value; consecutive heads share a key head in some.
fn rules() -> Vec<Rule> {
    let mut rules = Vec::new();
    for (n_head, n_head_k, key_dim, value_dim, grouped) in [
        (1, 1, 1, 1, false),
        (3, 1, 8, 8, false),
        (6, 2, 9, 5, true),
        (4, 2, 64, 24, false),
        (2, 2, 65, 17, true),
        (2, 1, 128, 33, true),
        (1, 1, 130, 16, false),
        (4, 4, 96, 31, false),
    ] {
        for of_channels in [false, true] {
            rules.push(Rule { n_head, n_head_k, key_dim, value_dim, of_channels, grouped });
        }
    }
    rules
}

#[test]
fn delta_rules() {
    let Some(mut pass) = pass() else { return };
    for rule in rules() {
        for segments in batches() {
            check(&mut pass, rule, &segments, None);
        }
    }
    // The largest key.
    let largest = Rule { n_head: 1, n_head_k: 1, key_dim: 256, value_dim: 2, of_channels: true, grouped: false };
    check(&mut pass, largest, &batches()[3], None);
}

#[test]
fn delta_rules_fused_with_convolution_and_norm() {
    let Some(mut pass) = pass() else { return };
    for (i, rule) in rules().into_iter().enumerate() {
        for segments in decode_steps() {
            check(&mut pass, rule, &segments, Some([4, 2, 3, 1][i % 4]));
            check(&mut pass, rule, &segments, Some(4));
        }
    }
    // Two passes of all warps over the columns.
    let wide = Rule { n_head: 2, n_head_k: 1, key_dim: 32, value_dim: 100, of_channels: false, grouped: true };
    check(&mut pass, wide, &decode_steps()[1], Some(4));
}
