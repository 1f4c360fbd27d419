//! Tests of the gated short convolution.

use crate::kernels::recurrent::StridedRowsMut;
use crate::kernels::recurrent::short_conv::ShortConv;
use crate::shared::SharedMut;
use crate::simd::Isa;
use crate::test_support::TestRandom;

/// The reference: the result, `[n_tokens, width]`, and the state after the tokens.
fn reference(inputs: &[f32], taps: &[f32], state: &[f32], width: usize) -> (Vec<f64>, Vec<f32>) {
    let n_before = taps.len() / width - 1;
    let mut seen = state.to_vec();
    for row in inputs.chunks_exact(3 * width) {
        seen.extend((0..width).map(|i| row[i] * row[2 * width + i]));
    }
    let n_tokens = inputs.len() / (3 * width);
    let y = |t: usize, i: usize| {
        let sum: f64 =
            (0..=n_before).map(|j| f64::from(taps[j * width + i]) * f64::from(seen[(t + j) * width + i])).sum();
        f64::from(inputs[(3 * t + 1) * width + i]) * sum
    };
    let out = (0..n_tokens).flat_map(|t| (0..width).map(move |i| (t, i))).map(|(t, i)| y(t, i)).collect();
    (out, seen[n_tokens * width..].to_vec())
}

/// The result of the kernel, computed for channels `0..cut` and `cut..width`; updates `state`.
fn run(isa: Isa, inputs: &[f32], taps: &[f32], state: &mut [f32], width: usize, cut: usize) -> Vec<f32> {
    let mut out = vec![f32::NAN; inputs.len() / 3];
    for channels in [0..cut, cut..width] {
        let (first, n_before, n_tokens) = (channels.start, taps.len() / width - 1, inputs.len() / (3 * width));
        let (state, out) = (SharedMut::new(state), SharedMut::new(&mut out));
        // SAFETY: one kernel runs after the other.
        let (state, out) = unsafe {
            let rows = |of, n| StridedRowsMut::shared(of, first, n, channels.len(), width);
            (rows(&state, n_before), rows(&out, n_tokens))
        };
        isa.run(ShortConv { inputs, taps, state, out, width, first });
    }
    out
}

#[test]
fn convolutions_agree_with_the_reference() {
    let mut random = TestRandom(5);
    for isa in Isa::available() {
        for (width, cut) in [(1, 0), (15, 7), (16, 16), (33, 16), (64, 48)] {
            for n_tap in [2, 3, 4, 16] {
                for n_tokens in [1, 2, 5, 20] {
                    let inputs = random.floats(n_tokens * 3 * width, 2.0);
                    let taps = random.floats(n_tap * width, 1.0);
                    let before = random.floats((n_tap - 1) * width, 4.0);
                    let (want, after) = reference(&inputs, &taps, &before, width);
                    let mut state = before.clone();
                    let found = run(isa, &inputs, &taps, &mut state, width, cut);
                    assert_eq!(state, after, "{isa:?} {width} {n_tap} {n_tokens}");
                    for (got, want) in found.iter().zip(&want) {
                        let error = (f64::from(*got) - want).abs();
                        assert!(error <= 3e-5, "{isa:?} {width} {n_tap} {n_tokens}: {got} {want}");
                    }
                    // Token by token the kernel gives the same bits.
                    let mut state = before;
                    let one = |row: &[f32]| run(isa, row, &taps, &mut state, width, width);
                    let singly: Vec<f32> = inputs.chunks_exact(3 * width).flat_map(one).collect();
                    assert_eq!((singly, state), (found, after), "{isa:?} {width} {n_tap} {n_tokens}");
                }
            }
        }
    }
}
