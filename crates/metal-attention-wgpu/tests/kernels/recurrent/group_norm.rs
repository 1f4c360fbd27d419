//! Norms of groups of elements, with and without a gate, against their twin.

use super::{row, rows_at, to_f64};
use crate::support::{nmse, poisoned, random, run, variants};
use metal_attention_model::NormKind;
use metal_attention_wgpu::Bind;
use metal_attention_wgpu::kernels::{GateActivation, GroupNormBuffers, GroupNormShape, group_norm, group_norm_twin};

#[test]
fn group_norms_match_their_twin() {
    for gpu in variants() {
        for (n, groups, n_tokens) in [(8, 3, 2), (24, 5, 3), (64, 2, 1), (768, 2, 2)] {
            for (i, gate) in [None, Some(GateActivation::Silu), Some(GateActivation::Sigmoid)].into_iter().enumerate() {
                for (kind, of_groups, bias) in [(NormKind::Rms, i == 0, false), (NormKind::Layer, i == 1, true)] {
                    let at = rows_at(groups * n);
                    let gate = gate.map(|kind| (kind, at));
                    let shape = GroupNormShape { n, groups, kind, eps: 1e-3, of_groups, bias, x: at, gate, out: at };
                    let n_weights = if of_groups { groups * n } else { n };
                    let [x, gates] = [1, 2].map(|seed| random(seed, n_tokens * at.stride));
                    let [weight, biases] = [3, 4].map(|seed| random(seed, n_weights));
                    let [gx, gg, gw, gb] = [&x, &gates, &weight, &biases].map(|v| gpu.upload("x", v).unwrap());
                    let out = poisoned(gpu, n_tokens * at.stride);
                    let b = GroupNormBuffers {
                        x: &gx,
                        weight: &gw,
                        bias: bias.then_some(&gb as &dyn Bind),
                        gate: gate.map(|_| &gg as &dyn Bind),
                        out: &out,
                    };
                    run(gpu, &[group_norm(gpu, &shape, &b).unwrap()], n_tokens);
                    let got: Vec<f32> = gpu.read(&out, n_tokens * at.stride).unwrap();
                    for t in 0..n_tokens {
                        let [x, gates] = [&x, &gates].map(|v| to_f64(row(v, at, t, groups * n)));
                        let group = |g: usize| {
                            let group_values = |v: &[f32]| to_f64(&v[if of_groups { g * n } else { 0 }..][..n]);
                            let bias = bias.then(|| group_values(&biases));
                            let gates = &gates[g * n..][..n];
                            group_norm_twin(&shape, &x[g * n..][..n], &group_values(&weight), bias.as_deref(), gates)
                        };
                        let want: Vec<f32> = (0..groups).flat_map(group).map(|x| x as f32).collect();
                        let error = nmse(row(&got, at, t, groups * n), &want);
                        assert!(error < 1e-12, "{shape:?}, token {t}: {error:e}");
                    }
                }
            }
        }
    }
}
