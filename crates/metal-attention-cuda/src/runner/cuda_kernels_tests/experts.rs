//! Mixtures of experts (`experts.cu`): the choice of experts, alone and fused with norm and router product, the weighting of inputs,
//! activations, and the weighted sum. Scores are computed in F32; the random logits are far enough apart that such errors do not
//! change a choice, which the twin asserts.

use std::sync::Arc;

use super::{Expected, assert_close, device, launch, poisoned, random, read};
use crate::CudaDevice;
use crate::args::{ExpertsActivationArgs, ExpertsSumArgs, FusedRouteArgs, RouteArgs, WeighArgs};
use crate::kernels;
use crate::launch::LaunchGrid;
use crate::slice::DevicePtr;

/// The rules of a router.
#[derive(Debug, Clone, Copy)]
struct Router {
    n_expert: usize,
    n_used: usize,
    /// 0: softmax over all, 1: sigmoid of each, 2: softmax over the chosen ones.
    score: u32,
    renormalize: bool,
    groups: (usize, usize),
    choice_bias: bool,
    expert_scale: bool,
    weighs_input: bool,
}

/// An error of scores and weights, which are at most about 1.
const ERROR: f64 = 4e-6;
const SCALE: f32 = 1.5;

/// Whether `a` stays the larger of both with errors of F32.
fn is_clear(a: f64, b: f64) -> bool {
    b.is_infinite() || a - b > 2e-6 * (a.abs() + b.abs())
}

impl Router {
    /// The chosen experts of a token with these logits, best first, and their weights.
    fn route(&self, logits: &[f64], choice_bias: &[f32]) -> Vec<(usize, f64)> {
        let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = logits.iter().map(|v| (v - largest).exp()).sum();
        let scores: Vec<f64> = logits
            .iter()
            .map(|v| match self.score {
                0 => (v - largest).exp() / sum,
                1 => 1.0 / (1.0 + (-v).exp()),
                _ => *v,
            })
            .collect();
        let bias = |i: usize| if self.choice_bias { f64::from(choice_bias[i]) } else { 0.0 };
        let mut choice: Vec<f64> = scores.iter().enumerate().map(|(i, score)| score + bias(i)).collect();
        if let Some(of_group) = self.n_expert.checked_div(self.groups.0) {
            let mut best: Vec<(f64, usize)> = choice
                .chunks(of_group)
                .enumerate()
                .map(|(g, choice)| {
                    let mut sorted = choice.to_vec();
                    sorted.sort_by(|a, b| b.total_cmp(a));
                    (sorted[0] + sorted.get(1).unwrap_or(&0.0), g)
                })
                .collect();
            best.sort_by(|a, b| b.0.total_cmp(&a.0));
            if let Some(next) = best.get(self.groups.1) {
                assert!(is_clear(best[self.groups.1 - 1].0, next.0), "a close choice of groups");
            }
            for (_, g) in &best[self.groups.1..] {
                choice[g * of_group..][..of_group].fill(f64::NEG_INFINITY);
            }
        }
        let mut order: Vec<usize> = (0..self.n_expert).collect();
        order.sort_by(|a, b| choice[*b].total_cmp(&choice[*a]));
        for pair in order.windows(2).take(self.n_used) {
            assert!(is_clear(choice[pair[0]], choice[pair[1]]), "a close choice");
        }
        let chosen = &order[..self.n_used];
        let mut weights: Vec<f64> = chosen.iter().map(|i| scores[*i]).collect();
        if self.score == 2 {
            let largest = weights.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = weights.iter().map(|v| (v - largest).exp()).sum();
            weights = weights.iter().map(|v| (v - largest).exp() / sum).collect();
        }
        let sum = if self.renormalize { weights.iter().sum::<f64>().max(6.103_515_6e-5) } else { 1.0 };
        chosen.iter().zip(weights).map(|(i, weight)| (*i, weight / sum * f64::from(SCALE))).collect()
    }
}

/// `n` logits in -4..4 in random order, all well apart.
fn spread(seed: u64, n: usize) -> Vec<f64> {
    let values = random(500 + seed, n);
    let rank = |v: &f32| values.iter().filter(|other| *other < v).count();
    // Not evenly, so that sums of two differ, too.
    values.iter().map(|v| f64::from(8.0 * (rank(v) as f32 + 0.4 * v) / n as f32 - 4.0)).collect()
}

/// Launches the router for `n_tokens` tokens. `fused`: with norm and router product of rows of that many elements.
fn check_route(gpu: &Arc<CudaDevice>, router: Router, n_tokens: usize, fused: Option<usize>) {
    let what = format!("{router:?}, {n_tokens} tokens, fused {fused:?}");
    let Router { n_expert, n_used, .. } = router;
    let n_in = fused.unwrap_or(4);
    let (x, norm, bias) = (random(1, n_tokens * n_in), random(2, n_in), random(4, n_expert));
    // Logits of some 3.
    let size = 6.0 / (n_in as f32).sqrt();
    let rows: Vec<f32> = random(3, n_expert * n_in).iter().map(|v| size * v).collect();
    let mut normed: Vec<f64> = Vec::new();
    for row in x.chunks(n_in) {
        let mean = row.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / n_in as f64;
        let factor = 1.0 / (mean + f64::from(1e-5f32)).sqrt();
        normed.extend(row.iter().zip(&norm).map(|(v, w)| f64::from(*v) * factor * f64::from(*w)));
    }
    let product = |(token, i): (usize, usize)| {
        let terms = rows[i * n_in..][..n_in].iter().zip(&normed[token * n_in..]).map(|(w, x)| f64::from(*w) * x);
        terms.sum::<f64>() + f64::from(bias[i])
    };
    let logits: Vec<f64> = if fused.is_some() {
        (0..n_tokens).flat_map(|token| (0..n_expert).map(move |i| (token, i))).map(product).collect()
    } else {
        (0..n_tokens).flat_map(|token| spread(token as u64, n_expert)).collect()
    };
    let uploaded: Vec<f32> = logits.iter().map(|v| *v as f32).collect();
    let products =
        if fused.is_some() { poisoned(gpu, uploaded.len()) } else { gpu.upload("logits", &uploaded).unwrap() };
    let (choice_bias, expert_scale) = (random(6, n_expert), random(7, n_expert));
    let upload = |v: &[f32]| gpu.upload("router", v).unwrap();
    let (choice_buffer, scale_buffer) = (upload(&choice_bias), upload(&expert_scale));
    let n_items = n_tokens * n_used;
    let [experts, weights, input_weights] = [(); 3].map(|()| poisoned(gpu, n_items));
    let route = RouteArgs {
        products: products.ptr(),
        choice_bias: if router.choice_bias { choice_buffer.ptr() } else { DevicePtr::NULL },
        expert_scale: if router.expert_scale { scale_buffer.ptr() } else { DevicePtr::NULL },
        experts: experts.ptr(),
        weights: weights.ptr(),
        input_weights: if router.weighs_input { input_weights.ptr() } else { DevicePtr::NULL },
        n_expert: n_expert as u32,
        n_used: n_used as u32,
        score: router.score,
        renormalize: u32::from(router.renormalize),
        n_group: router.groups.0 as u32,
        n_group_used: router.groups.1 as u32,
        scale: SCALE,
        unused: 0,
    };
    let shared = 14 * n_expert;
    if fused.is_some() {
        let (x_buffer, norm_buffer, row_buffer, bias_buffer) =
            (upload(&x), upload(&norm), upload(&rows), upload(&bias));
        let (h, tickets) = (poisoned(gpu, n_tokens * n_in), gpu.zeros("tickets", 4 * n_tokens as u64).unwrap());
        let args = FusedRouteArgs {
            route,
            x: x_buffer.ptr(),
            norm: norm_buffer.ptr(),
            h: h.ptr(),
            router: row_buffer.ptr(),
            bias: bias_buffer.ptr(),
            tickets: tickets.ptr(),
            n_in: n_in as u32,
            eps: 1e-5,
        };
        let grid = LaunchGrid { blocks: [n_expert, n_tokens, 1], threads: 256, shared };
        launch(gpu, kernels::ROUTE_ALONE, grid, &args);
        let close = |v: &f64| Expected { value: *v, error: ERROR };
        let expected: Vec<_> = normed.iter().map(close).collect();
        assert_close(&read(gpu, &h, n_tokens * n_in), &expected, n_in, &format!("{what}: norm"));
        let expected: Vec<_> = logits.iter().map(|v| Expected { value: *v, error: 2.0 * ERROR }).collect();
        assert_close(&read(gpu, &products, n_tokens * n_expert), &expected, n_expert, &format!("{what}: logits"));
        assert_eq!(read::<u32>(gpu, &tickets, n_tokens), vec![0; n_tokens], "{what}: tickets");
    } else {
        let grid = LaunchGrid { blocks: [n_tokens, 1, 1], threads: 32, shared };
        launch(gpu, kernels::ROUTE, grid, &route);
    }
    let chosen: Vec<(usize, f64)> =
        logits.chunks(n_expert).flat_map(|logits| router.route(logits, &choice_bias)).collect();
    let found: Vec<usize> = read::<u32>(gpu, &experts, n_items).iter().map(|i| *i as usize).collect();
    assert_eq!(found, chosen.iter().map(|(i, _)| *i).collect::<Vec<_>>(), "{what}");
    let error = if fused.is_some() { 2.0 * ERROR } else { ERROR };
    let scale = |i: usize| if router.expert_scale { f64::from(expert_scale[i]) } else { 1.0 };
    let of_results = chosen.iter().map(|(i, weight)| {
        let value = if router.weighs_input { 1.0 } else { *weight } * scale(*i);
        Expected { value, error: error * (1.0 + weight) }
    });
    assert_close(&read(gpu, &weights, n_items), &of_results.collect::<Vec<_>>(), n_used, &what);
    if router.weighs_input {
        let of_inputs = chosen.iter().map(|(_, weight)| Expected { value: *weight, error: error * (1.0 + weight) });
        assert_close(&read(gpu, &input_weights, n_items), &of_inputs.collect::<Vec<_>>(), n_used, &what);
    }
}

/// Routers of awkward sizes and of all rules.
fn routers() -> Vec<Router> {
    let mut routers = Vec::new();
    for (i, (n_expert, n_used, groups)) in [
        (1, 1, (0, 0)),
        (4, 2, (0, 0)),
        (7, 7, (0, 0)),
        (33, 5, (0, 0)),
        (64, 8, (8, 3)),
        (60, 6, (4, 1)),
        (128, 40, (0, 0)),
        (255, 64, (0, 0)),
        (256, 8, (8, 4)),
        (16, 3, (16, 5)),
    ]
    .into_iter()
    .enumerate()
    {
        for score in 0..3 {
            let bits = i + score as usize;
            routers.push(Router {
                n_expert,
                n_used,
                score,
                renormalize: bits.is_multiple_of(2),
                groups,
                choice_bias: bits.is_multiple_of(3),
                expert_scale: bits % 4 == 1,
                weighs_input: bits % 5 == 2,
            });
        }
    }
    routers
}

#[test]
fn routes() {
    let Some(gpu) = device() else { return };
    for (i, router) in routers().into_iter().enumerate() {
        check_route(&gpu, router, [1, 3, 17][i % 3], None);
    }
}

#[test]
fn routes_fused_with_norm_and_product() {
    let Some(gpu) = device() else { return };
    for (i, router) in routers().into_iter().enumerate() {
        check_route(&gpu, router, 1 + i % 4, Some([4, 60, 576, 1028, 2052][i % 5]));
    }
}

#[test]
fn weighted_inputs() {
    let Some(gpu) = device() else { return };
    for (n, n_used, n_tokens) in [(1, 1, 1), (255, 3, 2), (257, 2, 5), (1000, 8, 3)] {
        let (x, weights) = (random(1, n_tokens * n), random(2, n_tokens * n_used));
        let (x_buffer, weight_buffer) = (gpu.upload("x", &x).unwrap(), gpu.upload("weights", &weights).unwrap());
        let out = poisoned(&gpu, n_tokens * n_used * n);
        let [n_arg, n_used_arg] = [n, n_used].map(|v| v as u32);
        let args =
            WeighArgs { x: x_buffer.ptr(), weights: weight_buffer.ptr(), out: out.ptr(), n: n_arg, n_used: n_used_arg };
        let grid = LaunchGrid { blocks: [n_tokens * n_used, n.div_ceil(256), 1], threads: 256, shared: 0 };
        launch(&gpu, kernels::WEIGH_INPUTS, grid, &args);
        let got: Vec<f32> = read(&gpu, &out, n_tokens * n_used * n);
        for (i, v) in got.iter().enumerate() {
            let item = i / n;
            assert_eq!(*v, weights[item] * x[item / n_used * n + i % n], "item {item}, element {}", i % n);
        }
    }
}

#[test]
fn experts_activations() {
    let Some(gpu) = device() else { return };
    for (n, n_items) in [(1, 1), (255, 7), (256, 2), (257, 3), (1000, 5)] {
        for (activation, gated) in
            [(0, true), (0, false), (1, true), (1, false), (2, true), (2, false), (3, true), (5, true)]
        {
            let width = if gated { 2 * n } else { n };
            let x: Vec<f32> = random(1, n_items * width).iter().map(|v| 6.0 * v).collect();
            let (x_buffer, out) = (gpu.upload("x", &x).unwrap(), poisoned(&gpu, n_items * n));
            let args = ExpertsActivationArgs {
                x: x_buffer.ptr(),
                out: out.ptr(),
                n: n as u32,
                gated: u32::from(gated),
                activation,
                limit: 3.5,
            };
            let grid = LaunchGrid { blocks: [n_items, n.div_ceil(256), 1], threads: 256, shared: 0 };
            launch(&gpu, kernels::EXPERTS_ACTIVATION, grid, &args);
            let mut expected = Vec::new();
            for row in x.chunks(width) {
                let row: Vec<f64> = row.iter().map(|v| f64::from(*v)).collect();
                let values = super::rows::activated(activation, 3.5, &row[..n], gated.then(|| &row[n..]));
                expected.extend(values.iter().map(|&value| Expected { value, error: 2e-6 * value.abs() + 4e-6 }));
            }
            let what = format!("activation {activation} of {n_items} times {n}, gated {gated}");
            assert_close(&read(&gpu, &out, n_items * n), &expected, n, &what);
        }
    }
}

#[test]
fn experts_sums() {
    let Some(gpu) = device() else { return };
    for (n, n_used, n_tokens, blocks) in [(1, 1, 1, 1), (255, 3, 2, 1), (257, 8, 5, 2), (1000, 64, 3, 4), (33, 0, 2, 1)]
    {
        for (shared, gated, add) in
            [(false, false, false), (true, false, true), (true, true, false), (true, true, true)]
        {
            let what =
                format!("{n_tokens} tokens of {n} at {n_used} experts: shared {shared}, gated {gated}, add {add}");
            let (y, weights) = (random(1, n_tokens * n_used * n), random(2, n_tokens * n_used));
            let (of_shared, gate, h, before) =
                (random(3, n_tokens * n), random(4, n), random(5, n_tokens * n), random(6, n_tokens * n));
            let upload = |v: &[f32]| gpu.upload("sum", v).unwrap();
            let [y_b, weights_b, shared_b, gate_b, h_b] = [&y, &weights, &of_shared, &gate, &h].map(|v| upload(v));
            let out = if add { upload(&before) } else { poisoned(&gpu, n_tokens * n) };
            let args = ExpertsSumArgs {
                y: y_b.ptr(),
                weights: weights_b.ptr(),
                shared: if shared { shared_b.ptr() } else { DevicePtr::NULL },
                gate: if gated { gate_b.ptr() } else { DevicePtr::NULL },
                h: h_b.ptr(),
                out: out.ptr(),
                n: n as u32,
                n_used: n_used as u32,
                add: u32::from(add),
                scale: 0.75,
            };
            let grid = LaunchGrid { blocks: [blocks, n_tokens, 1], threads: 256, shared: 0 };
            launch(&gpu, kernels::EXPERTS_SUM, grid, &args);
            let mut expected = Vec::new();
            for token in 0..n_tokens {
                let dot: f64 = (0..n).map(|i| f64::from(h[token * n + i]) * f64::from(gate[i])).sum();
                let factor = if gated { 1.0 / (1.0 + (-dot).exp()) } else { 1.0 };
                for i in 0..n {
                    let items = token * n_used..(token + 1) * n_used;
                    let mut value: f64 = items.map(|item| f64::from(weights[item]) * f64::from(y[item * n + i])).sum();
                    if shared {
                        value += factor * f64::from(of_shared[token * n + i]);
                    }
                    if add {
                        value = f64::from(before[token * n + i]) + 0.75 * value;
                    }
                    expected.push(Expected { value, error: 4e-6 });
                }
            }
            assert_close(&read(&gpu, &out, n_tokens * n), &expected, n, &what);
        }
    }
}
