//! Mamba (`mamba.cu`), its selection, and Mamba-2 (`mamba2.cu`), alone and fused with the convolution before it.

use std::sync::Arc;

use bytemuck::Zeroable;
use metal_attention_model::Segment;

use super::super::super::ModelRunner;
use super::super::super::recurrence::RecurrenceKernel;
use super::super::{assert_near, launch, pass, poisoned, random, read, to_f64};
use super::{
    Input, SCAN_ERROR, States, batches, convolved, decode_steps, n_tokens, random_of, rms_normed, sigmoid, softplus,
};
use crate::CudaExecutor;
use crate::args::{ConvolutionArgs, FusedDecodeArgs, FusedMamba2Args, Mamba2Args, MambaArgs, RowsArgs, SelectArgs};
use crate::kernels;
use crate::launch::LaunchGrid;
use crate::slice::{DevicePtr, DeviceSlice};

/// Rates of decay.
fn rates(seed: u64, n: usize) -> Vec<f32> {
    random(seed, n).iter().map(|v| -2.0 * v.abs() - 0.01).collect()
}

/// Launches Mamba's scan of `channels` channels with states of `d_state` elements.
fn check_mamba(pass: &mut CudaExecutor, channels: usize, d_state: usize, segments: &[Segment]) {
    let what = format!("{channels} channels, state {d_state}, {segments:?}");
    let (gpu, n) = (Arc::clone(&pass.runner.gpu), n_tokens(segments));
    let states = States::new(&gpu, channels * d_state, segments);
    let (x, dt, bc) = (random(1, n * channels), random_of(2.0, 2, n * channels), random(3, n * 2 * d_state));
    let (dt_bias, rates, skip) = (random(4, channels), rates(5, channels * d_state), random(6, channels));
    let gate = Input::new(&gpu, random_of(2.0, 7, n * channels), channels);
    let upload = |v: &Vec<f32>| gpu.upload("Mamba", v).unwrap();
    let [x_buffer, dt_buffer, bc_buffer] = [&x, &dt, &bc].map(upload);
    let [bias_buffer, rate_buffer, skip_buffer] = [&dt_bias, &rates, &skip].map(upload);
    let out = poisoned(&gpu, n * channels);
    let batch = states.batch(&pass.spec, &pass.cache, segments);
    let shape = [1, d_state, channels];
    let args = MambaArgs {
        scan: ModelRunner::scan_args(batch, RecurrenceKernel::MAMBA, states.args(0), out.slice(), shape),
        x: x_buffer.ptr(),
        dt: dt_buffer.ptr(),
        bc: bc_buffer.ptr(),
        gate: gate.args(),
        dt_bias: bias_buffer.ptr(),
        a: rate_buffer.ptr(),
        d: skip_buffer.ptr(),
    };
    pass.runner.launch_scan(batch, RecurrenceKernel::MAMBA, kernels::MAMBA, &args.scan, &args).unwrap();
    let got: Vec<f32> = read(&gpu, &out, n * channels);
    let [x, dt, bc, dt_bias, rates, skip] = [&x, &dt, &bc, &dt_bias, &rates, &skip].map(|v| to_f64(v));
    states.check(segments, &got, [SCAN_ERROR; 2], &what, |token, state| {
        let z = gate.row(token);
        let (b, c) = bc[token * 2 * d_state..][..2 * d_state].split_at(d_state);
        let of_channel = |i: usize| {
            let (x, dt) = (x[token * channels + i], softplus(dt[token * channels + i] + dt_bias[i]));
            let h = &mut state[i * d_state..][..d_state];
            let mut y = skip[i] * x;
            for s in 0..d_state {
                h[s] = (dt * rates[i * d_state + s]).exp() * h[s] + dt * b[s] * x;
                y += c[s] * h[s];
            }
            y * z[i] * sigmoid(z[i])
        };
        (0..channels).map(of_channel).collect()
    });
}

#[test]
fn mamba() {
    let Some(mut pass) = pass() else { return };
    for (channels, d_state) in [(1, 1), (31, 4), (33, 16), (64, 17), (70, 33), (32, 64), (130, 16)] {
        for segments in batches() {
            check_mamba(&mut pass, channels, d_state, &segments);
        }
    }
}

#[test]
fn mamba_selections() {
    let Some(pass) = pass() else { return };
    let gpu = &pass.runner.gpu;
    for (rank, d_state, n_tokens) in [(1, 1, 1), (5, 16, 3), (32, 31, 2), (33, 64, 5), (160, 8, 1)] {
        for (normed, last) in [(false, false), (true, true), (true, false)] {
            let what = format!("rank {rank}, state {d_state}, norms {normed}, dt last {last}");
            let n = rank + 2 * d_state + 3;
            let at = if last { [2 * d_state + 2, 0, d_state + 1] } else { [1, rank + 1, rank + d_state + 1] };
            let chosen = random(1, n_tokens * n);
            let weights = [random(2, rank), random(3, d_state), random(4, d_state)];
            let buffer = gpu.upload("selection", &chosen).unwrap();
            let weight_buffers = weights.each_ref().map(|v| gpu.upload("norms", v).unwrap());
            let (dt, bc) = (poisoned(gpu, n_tokens * rank), poisoned(gpu, n_tokens * 2 * d_state));
            let args = SelectArgs {
                chosen: buffer.ptr(),
                dt: dt.ptr(),
                bc: bc.ptr(),
                weights: weight_buffers.each_ref().map(|v| if normed { v.ptr() } else { DevicePtr::NULL }),
                n: n as u32,
                rank: rank as u32,
                d_state: d_state as u32,
                at: at.map(|at| at as u32),
                eps: 1e-3,
                unused: 0,
            };
            let grid = LaunchGrid { blocks: [n_tokens, 1, 1], threads: 96, shared: 0 };
            launch(gpu, kernels::MAMBA_SELECT, grid, &args);
            let part = |which: usize, row: &[f32]| {
                let len = weights[which].len();
                let x = to_f64(&row[at[which]..][..len]);
                if !normed {
                    return x;
                }
                let weights = to_f64(&weights[which]);
                rms_normed(&x, len, 1e-3).iter().zip(weights).map(|(x, weight)| x * weight).collect::<Vec<_>>()
            };
            let of_dt: Vec<f64> = chosen.chunks(n).flat_map(|row| part(0, row)).collect();
            let of_bc: Vec<f64> = chosen.chunks(n).flat_map(|row| [part(1, row), part(2, row)].concat()).collect();
            assert_near(&read(gpu, &dt, of_dt.len()), &of_dt, rank, 1e-6, &format!("{what}: dt"));
            assert_near(&read(gpu, &bc, of_bc.len()), &of_bc, 2 * d_state, 1e-6, &format!("{what}: B and C"));
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct Mamba2 {
    n_head: usize,
    n_group: usize,
    d_state: usize,
    head_dim: usize,
    /// Elements between the gates of two heads.
    gate_gap: usize,
}

impl Mamba2 {
    /// Channels of x, B and C.
    fn channels(&self) -> usize {
        self.n_head * self.head_dim + 2 * self.n_group * self.d_state
    }

    /// `S = exp(dt A) S + dt B^T x; out = (C S + D x) silu(z)` for all heads. `x`: x, B and C; `per_head`: rate A, D.
    fn twin(&self, x: &[f64], dt: &[f64], z: &[f64], per_head: [&[f64]; 2], state: &mut [f64]) -> Vec<f64> {
        let Self { n_head, n_group, d_state, head_dim, gate_gap } = *self;
        let (x, bc) = x.split_at(n_head * head_dim);
        let (b, c) = bc.split_at(n_group * d_state);
        let of_column = |(head, column): (usize, usize)| {
            let group = head / (n_head / n_group) * d_state;
            let (x, decay) = (x[head * head_dim + column], (dt[head] * per_head[0][head]).exp());
            let h = &mut state[(head * head_dim + column) * d_state..][..d_state];
            let mut y = per_head[1][head] * x;
            for s in 0..d_state {
                h[s] = decay * h[s] + dt[head] * b[group + s] * x;
                y += c[group + s] * h[s];
            }
            let z = z[head * (head_dim + gate_gap) + column];
            y * z * sigmoid(z)
        };
        (0..n_head).flat_map(|head| (0..head_dim).map(move |column| (head, column))).map(of_column).collect()
    }
}

/// `n_tap`: the taps of the convolution that is fused with the scan; `None`: no convolution.
fn check_mamba2(pass: &mut CudaExecutor, shape: Mamba2, segments: &[Segment], n_tap: Option<usize>) {
    let what = format!("{shape:?} {segments:?}, fused with taps {n_tap:?}");
    let Mamba2 { n_head, n_group, d_state, head_dim, gate_gap } = shape;
    let (channels, n_out, gates) = (shape.channels(), n_head * head_dim, n_head * (head_dim + gate_gap));
    let (gpu, n) = (Arc::clone(&pass.runner.gpu), n_tokens(segments));
    let n_inputs = n_tap.map_or(0, |n_tap| (n_tap - 1) * channels);
    let states = States::new(&gpu, n_inputs + n_out * d_state, segments);
    let x = Input::new(&gpu, random(1, n * channels), channels);
    let dt = Input::new(&gpu, random_of(2.0, 2, n * n_head), n_head);
    let gate = Input::new(&gpu, random_of(2.0, 3, n * gates), gates);
    let (dt_bias, rates, skip) = (random(4, n_head), rates(5, n_head), random(6, n_head));
    let (taps, bias) = (random(7, n_tap.unwrap_or(1) * channels), random(8, channels));
    let upload = |v: &Vec<f32>| gpu.upload("Mamba-2", v).unwrap();
    let [dt_buffer, rate_buffer, skip_buffer] = [&dt_bias, &rates, &skip].map(upload);
    let [tap_buffer, bias_buffer] = [&taps, &bias].map(upload);
    let out = poisoned(&gpu, n * n_out);
    let batch = states.batch(&pass.spec, &pass.cache, segments);
    let kernel = RecurrenceKernel::MAMBA2;
    // The fused kernel takes the first elements of x, B and C as channels of the convolution.
    let alone = n_tap.is_none();
    let of_x = |first: usize| {
        if alone {
            RowsArgs { first: x.args().first + first as u32, ..x.args() }
        } else {
            RowsArgs::new(DeviceSlice::NONE, 0, first)
        }
    };
    let args = Mamba2Args {
        scan: ModelRunner::scan_args(batch, kernel, states.args(n_inputs), out.slice(), [n_head, d_state, head_dim]),
        x: of_x(0),
        b: of_x(n_out),
        c: of_x(n_out + n_group * d_state),
        dt: dt.args(),
        gate: gate.args(),
        dt_bias: dt_buffer.ptr(),
        a: rate_buffer.ptr(),
        d: skip_buffer.ptr(),
        heads_of_group: (n_head / n_group) as u32,
        gate_step: (head_dim + gate_gap) as u32,
    };
    let has_bias = n % 2 == 1;
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
        let convolution = ModelRunner::convolution_of(batch, 0, convolution);
        let tickets = gpu.zeros("tickets", 4 * (n * n_group) as u64).unwrap();
        let fused = pass.runner.fused_decode_args(batch, kernel, &args.scan, convolution, None);
        let fused = FusedDecodeArgs { tickets: tickets.ptr(), ..fused.expect("a head within the limits") };
        pass.runner
            .launch_fused_decode(batch, kernel, kernels::MAMBA2_ALONE, &args.scan, &FusedMamba2Args { args, fused })
            .unwrap();
        assert_eq!(read::<u32>(&gpu, &tickets, n * n_group), vec![0; n * n_group], "{what}: tickets");
    } else {
        pass.runner.launch_scan(batch, kernel, kernels::MAMBA2, &args.scan, &args).unwrap();
    }
    let got: Vec<f32> = read(&gpu, &out, n * n_out);
    let [dt_bias, rates, skip, taps, bias] = [&dt_bias, &rates, &skip, &taps, &bias].map(|v| to_f64(v));
    states.check(segments, &got, [SCAN_ERROR; 2], &what, |token, state| {
        let (before, matrices) = state.split_at_mut(n_inputs);
        let mut x = x.row(token);
        if n_tap.is_some() {
            let sums = convolved(&x, &taps, has_bias.then_some(&bias), before);
            x = sums.iter().map(|v| v * sigmoid(*v)).collect();
        }
        let dt: Vec<f64> = dt.row(token).iter().zip(&dt_bias).map(|(v, bias)| softplus(v + bias)).collect();
        shape.twin(&x, &dt, &gate.row(token), [&rates, &skip], matrices)
    });
}

fn shapes() -> Vec<Mamba2> {
    [
        (1, 1, 1, 1, 0),
        (4, 2, 16, 5, 0),
        (6, 3, 9, 16, 0),
        (3, 1, 64, 17, 17),
        (4, 4, 65, 31, 0),
        (2, 1, 128, 40, 0),
        (2, 2, 130, 33, 3),
        (3, 1, 256, 6, 0),
    ]
    .map(|(n_head, n_group, d_state, head_dim, gate_gap)| Mamba2 { n_head, n_group, d_state, head_dim, gate_gap })
    .to_vec()
}

#[test]
fn mamba2() {
    let Some(mut pass) = pass() else { return };
    for shape in shapes() {
        for segments in batches() {
            check_mamba2(&mut pass, shape, &segments, None);
        }
    }
}

#[test]
fn mamba2_fused_with_convolution() {
    let Some(mut pass) = pass() else { return };
    for (i, shape) in shapes().into_iter().enumerate() {
        for segments in decode_steps() {
            check_mamba2(&mut pass, shape, &segments, Some([2, 3, 1][i % 3]));
            check_mamba2(&mut pass, shape, &segments, Some(4));
        }
    }
    // Two passes of all warps over the columns.
    let wide = Mamba2 { n_head: 2, n_group: 1, d_state: 16, head_dim: 100, gate_gap: 0 };
    check_mamba2(&mut pass, wide, &decode_steps()[1], Some(4));
}
