//! RWKV's token shift (`rwkv.cu`).

use super::super::super::ModelRunner;
use super::super::{launch, pass, poisoned, random, read, to_f64};
use super::{States, batches, n_tokens, segment};
use crate::args::TokenShiftArgs;
use crate::kernels;
use crate::slice::DevicePtr;

#[test]
fn token_shifts() {
    let Some(pass) = pass() else { return };
    let gpu = &pass.runner.gpu;
    let kernel = kernels::TOKEN_SHIFT;
    for (width, n_mix, by_token, advance) in
        [(1, 1, false, true), (65, 6, false, true), (130, 5, true, true), (127, 1, true, false), (256, 2, false, false)]
    {
        let mut all = batches();
        // Around the tokens of a block and those that a thread loads at a time.
        all.extend([2, 7, 8, 9, 15, 16, 17, 33].map(|n| vec![segment(0, 3, n, 2, 1)]));
        for segments in all {
            let what = format!("{n_mix} mixes of {width}, by token {by_token}, advance {advance}, {segments:?}");
            let n = n_tokens(&segments);
            let states = States::new(gpu, width, &segments);
            let (x, lerps, more) = (random(1, n * width), random(2, n_mix * width), random(3, n * n_mix * width));
            let [x_buffer, lerp_buffer, more_buffer] = [&x, &lerps, &more].map(|v| gpu.upload("rows", v).unwrap());
            let out = poisoned(gpu, n_mix * n * width);
            let batch = states.batch(&pass.spec, &pass.cache, &segments);
            let args = TokenShiftArgs {
                runs: ModelRunner::runs(batch).0,
                states: states.args(0),
                x: x_buffer.ptr(),
                lerps: lerp_buffer.ptr(),
                more: if by_token { more_buffer.ptr() } else { DevicePtr::NULL },
                out: out.ptr(),
                width: width as u32,
                n_mix: n_mix as u32,
                n_tokens: n as u32,
                advance: u32::from(advance),
            };
            let grid = ModelRunner::channels_of_runs(batch, width);
            launch(gpu, kernel, grid, &args);
            let by_mix: Vec<f32> = read(gpu, &out, n_mix * n * width);
            let row = |token: usize, mix: usize| &by_mix[(mix * n + token) * width..][..width];
            let by_token_first: Vec<f32> =
                (0..n).flat_map(|token| (0..n_mix).flat_map(move |mix| row(token, mix).to_vec())).collect();
            if !advance {
                assert_eq!(states.read(), states.before, "{what}: states");
            }
            let twin = |token: usize, state: &mut [f64]| {
                let x = to_f64(&x[token * width..][..width]);
                let mixed = (0..n_mix * width).map(|i| {
                    let more = if by_token { f64::from(more[token * n_mix * width + i]) } else { 0.0 };
                    let c = i % width;
                    x[c] + (state[c] - x[c]) * (f64::from(lerps[i]) + more)
                });
                let mixed: Vec<f64> = mixed.collect();
                state.copy_from_slice(&x);
                mixed
            };
            // Without the states, which stay.
            if advance {
                states.check(&segments, &by_token_first, [6e-7, 0.0], &what, twin);
            } else {
                states.check_results(&segments, &by_token_first, 6e-7, &what, twin);
            }
        }
    }
}
