//! RWKV's token shift against its twin.

use super::{batches, check, n_runs, n_tokens, row, rows_at, states, to_f64, words_of};
use crate::support::{gpu, poisoned, random, run};
use metal_attention_wgpu::kernels::{ColumnRange, TokenShiftBuffers, TokenShiftShape, token_shift, token_shift_twin};
use metal_attention_wgpu::{Bind, GridExtent};

#[test]
fn token_shifts_match_their_twin() {
    let Some(gpu) = gpu() else { return };
    for (channels, n_out, by_token, advance) in
        [(1, 1, false, true), (65, 6, false, true), (130, 5, true, true), (66, 1, false, false)]
    {
        let (x_at, n_mu) = (rows_at(channels), n_out * channels);
        let mu_at = rows_at(n_mu);
        let (states_at, before) = states(channels);
        let mu = random(2, n_mu);
        for segments in batches() {
            let n = n_tokens(&segments);
            let (x, mu_of_tokens) = (random(1, n * x_at.stride), random(3, n * mu_at.stride));
            // Each result is compared by itself. The states are the same with all of them.
            for j in 0..n_out {
                let upload = |v: &Vec<f32>| gpu.upload("x", v).unwrap();
                let [gx, gmu, gtokens, gs] = [&x, &mu, &mu_of_tokens, &before].map(upload);
                let out: Vec<_> = (0..n_out).map(|_| poisoned(gpu, n * channels)).collect();
                let results: Vec<&dyn Bind> = out.iter().map(|out| out as &dyn Bind).collect();
                let shape = TokenShiftShape {
                    channels,
                    n_out,
                    x: x_at,
                    mu_of_tokens: by_token.then_some(mu_at),
                    states: states_at,
                    advance,
                };
                let words = words_of(gpu, &segments);
                let b = TokenShiftBuffers {
                    x: &gx,
                    mu: &gmu,
                    mu_of_tokens: by_token.then_some(&gtokens as &dyn Bind),
                    states: &gs,
                    out: &results,
                    segments: &words,
                };
                let runs = GridExtent::Fixed(n_runs(&segments) + 1);
                run(gpu, &[token_shift(gpu, &shape, &b, runs).unwrap()], n);
                if !advance {
                    assert_eq!(gpu.read::<f32>(&gs, before.len()).unwrap(), before, "{shape:?}: states stay");
                    let unread = [&poisoned(gpu, n * channels) as &dyn Bind];
                    let b = TokenShiftBuffers { out: &unread, ..b };
                    let shape = TokenShiftShape { advance: true, ..shape };
                    run(gpu, &[token_shift(gpu, &shape, &b, runs).unwrap()], n);
                }
                let twin = |token: usize, n: usize, state: &mut Vec<f64>| -> Vec<f64> {
                    let token_result = |t: usize| {
                        let mut mu = to_f64(&mu);
                        if by_token {
                            let added = row(&mu_of_tokens, mu_at, t, n_mu);
                            mu.iter_mut().zip(added).for_each(|(mu, added)| *mu += f64::from(*added));
                        }
                        let all = token_shift_twin(&to_f64(row(&x, x_at, t, channels)), &mu, state);
                        all[j * channels..][..channels].to_vec()
                    };
                    (token..token + n).flat_map(token_result).collect()
                };
                let what = format!("{shape:?}, result {j}");
                let after = (&gs, states_at, channels, &before[..]);
                check(gpu, &what, &segments, (&out[j], ColumnRange::whole(channels), channels), after, &twin, 1e-12);
            }
        }
    }
}
