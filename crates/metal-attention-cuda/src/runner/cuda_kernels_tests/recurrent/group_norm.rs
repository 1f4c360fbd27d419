//! Norms of groups of a row with gates and RWKV-7's bonus, and functions of each element (`recurrent.cu`).

use std::sync::Arc;

use super::super::{Expected, assert_close, pass, poisoned, random, read, to_f64};
use super::{Input, States, segment, sigmoid};
use crate::CudaExecutor;
use crate::args::{ElementwiseFunction, GroupNormArgs, GroupNormKind, OutputGate};
use crate::slice::{DevicePtr, DeviceSlice};

#[derive(Debug, Clone, Copy)]
struct GroupNorm {
    n: usize,
    n_group: usize,
    n_tokens: usize,
    kind: GroupNormKind,
    gate: OutputGate,
    of_groups: bool,
    bias: bool,
    bonus: bool,
    in_place: bool,
}

const EPS: f32 = 1e-3;

fn check(pass: &mut CudaExecutor, case: GroupNorm) {
    let what = format!("{case:?}");
    let GroupNorm { n, n_group, n_tokens, .. } = case;
    let (gpu, width) = (Arc::clone(&pass.runner.gpu), n * n_group);
    // Not centred, and groups of different sizes.
    let size = |group: usize| [1.0f32, 30.0, 0.1][group % 3];
    let x: Vec<f32> = random(1, n_tokens * width).iter().enumerate().map(|(i, v)| (v + 0.3) * size(i / n)).collect();
    let n_weights = if case.of_groups { width } else { n };
    let (weight, bias, factor) = (random(2, n_weights), random(3, n_weights), random(4, width));
    let [r, k, v] = [5, 6, 7].map(|seed| random(seed, n_tokens * width));
    let gate = Input::new(&gpu, random(8, n_tokens * width), width);
    let upload = |v: &Vec<f32>| gpu.upload("norm", v).unwrap();
    let [x_buffer, weight_buffer, bias_buffer, factor_buffer] = [&x, &weight, &bias, &factor].map(upload);
    let [r_buffer, k_buffer, v_buffer] = [&r, &k, &v].map(upload);
    let out = poisoned(&gpu, n_tokens * width);
    let of_bonus = |address: DevicePtr<f32>| if case.bonus { address } else { DevicePtr::NULL };
    let args = GroupNormArgs {
        x: x_buffer.ptr(),
        out: if case.in_place { x_buffer.ptr() } else { out.ptr() },
        weight: weight_buffer.ptr(),
        bias: if case.bias { bias_buffer.ptr() } else { DevicePtr::NULL },
        gate: gate.args(),
        r: of_bonus(r_buffer.ptr()),
        k: of_bonus(k_buffer.ptr()),
        v: of_bonus(v_buffer.ptr()),
        factor: of_bonus(factor_buffer.ptr()),
        n: n as u32,
        n_group: n_group as u32,
        of_groups: u32::from(case.of_groups),
        norm: case.kind as u32,
        gate_kind: case.gate as u32,
        eps: EPS,
    };
    let states = States::new(&gpu, 1, &[segment(0, 0, n_tokens, 0, 1)]);
    let batch = states.batch(&pass.spec, &pass.cache, &[segment(0, 0, n_tokens, 0, 1)]);
    pass.runner.group_norm(batch, &args).unwrap();
    let got: Vec<f32> = read(&gpu, if case.in_place { &x_buffer } else { &out }, n_tokens * width);
    let mut expected = Vec::new();
    for token in 0..n_tokens {
        let gates = gate.row(token);
        for group in 0..n_group {
            let at = token * width + group * n;
            let x = to_f64(&x[at..][..n]);
            let mean = if case.kind == GroupNormKind::Layer { x.iter().sum::<f64>() / n as f64 } else { 0.0 };
            let squares = x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n as f64;
            let norms = case.kind != GroupNormKind::None;
            let rms = if norms { 1.0 / (squares + f64::from(EPS)).sqrt() } else { 1.0 };
            let products =
                (0..n).map(|i| f64::from(r[at + i]) * f64::from(k[at + i]) * f64::from(factor[group * n + i]));
            let (bonus, size) = products.fold((0.0, 0.0f64), |(sum, size), v| (sum + v, size + v * v));
            // A mean has the error of values some times as large as those of the group.
            let largest = x.iter().fold(0.0f64, |a, v| a.max(v.abs())) * rms;
            for i in 0..n {
                let of_weight = if case.of_groups { group * n + i } else { i };
                let mut value = (x[i] - mean) * rms;
                if norms {
                    value *= f64::from(weight[of_weight]);
                }
                if case.bias {
                    value += f64::from(bias[of_weight]);
                }
                let mut error = 1e-6 * (largest + value.abs()) + 2e-7;
                if case.bonus {
                    value += bonus * f64::from(v[at + i]);
                    error += 1e-6 * (size.sqrt() + value.abs());
                }
                let gate = gates[group * n + i];
                let factor = match case.gate {
                    OutputGate::None => 1.0,
                    OutputGate::AsItIs => gate,
                    OutputGate::Silu => gate * sigmoid(gate),
                    OutputGate::Sigmoid => sigmoid(gate),
                };
                expected.push(Expected { value: value * factor, error });
            }
        }
    }
    assert_close(&got, &expected, width, &what);
}

#[test]
fn group_norms() {
    let Some(mut pass) = pass() else { return };
    for (i, (n, n_group, n_tokens)) in [
        (1, 1, 1),
        (1, 7, 3),
        (8, 3, 2),
        (31, 5, 3),
        (64, 4, 1),
        (255, 2, 2),
        (256, 9, 1),
        (257, 3, 2),
        (770, 1, 3),
        (4097, 2, 1),
    ]
    .into_iter()
    .enumerate()
    {
        for (j, kind) in [GroupNormKind::None, GroupNormKind::Rms, GroupNormKind::Layer].into_iter().enumerate() {
            for (k, gate) in
                [OutputGate::None, OutputGate::AsItIs, OutputGate::Silu, OutputGate::Sigmoid].into_iter().enumerate()
            {
                check(
                    &mut pass,
                    GroupNorm {
                        n,
                        n_group,
                        n_tokens,
                        kind,
                        gate,
                        of_groups: (i + k) % 2 == 0,
                        bias: j == 2 && k != 3,
                        bonus: (i + j + k) % 3 == 0,
                        in_place: (j + k) % 2 == 0,
                    },
                );
            }
        }
    }
}

#[test]
fn functions_of_each_element() {
    let Some(mut pass) = pass() else { return };
    let gpu = Arc::clone(&pass.runner.gpu);
    for (width, n_tokens) in [(1, 1), (255, 1), (257, 1), (37, 7), (3001, 2)] {
        for function in [
            ElementwiseFunction::Tanh,
            ElementwiseFunction::Sigmoid,
            ElementwiseFunction::Squared,
            ElementwiseFunction::SigmoidTimes,
        ] {
            let [x, with] = [1, 2].map(|seed| super::random_of(6.0, seed, width * n_tokens));
            let [x_buffer, with_buffer] = [&x, &with].map(|v| gpu.upload("rows", v).unwrap());
            let second =
                if function == ElementwiseFunction::SigmoidTimes { with_buffer.slice() } else { DeviceSlice::NONE };
            let states = States::new(&gpu, 1, &[segment(0, 0, n_tokens, 0, 1)]);
            let batch = states.batch(&pass.spec, &pass.cache, &[segment(0, 0, n_tokens, 0, 1)]);
            pass.runner.elementwise(batch, function, x_buffer.slice(), second, width).unwrap();
            let value = |(x, with): (f64, f64)| match function {
                ElementwiseFunction::Tanh => x.tanh(),
                ElementwiseFunction::Sigmoid => sigmoid(x),
                ElementwiseFunction::Squared => x.max(0.0) * x.max(0.0),
                ElementwiseFunction::SigmoidTimes => sigmoid(with) * x,
            };
            let values = to_f64(&x).into_iter().zip(to_f64(&with)).map(value);
            let expected: Vec<_> = values.map(|value| Expected { value, error: 6e-7 * value.abs() + 1e-7 }).collect();
            let got = read(&gpu, &x_buffer, width * n_tokens);
            assert_close(&got, &expected, width, &format!("{function:?} of {n_tokens} rows of {width}"));
        }
    }
}
