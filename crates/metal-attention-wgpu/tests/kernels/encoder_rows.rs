//! The kernels of picture encoders over elements and rows, `elementwise`, `row_sums`, `place_columns` and `rotate_pairs`, against
//! their twins.

use crate::support::{Elements, nmse, on_variants, random, run, variants};
use metal_attention_model::vision::{EncoderActivation, NO_ROW};
use metal_attention_wgpu::WgpuError;
use metal_attention_wgpu::kernels::{
    ColumnPlace, ElementOp, RotateShape, SummedRows, elementwise, encoder_activation_twin, place_columns,
    place_columns_twin, rotate_pairs, rotate_pairs_twin, row_sums, row_sums_twin,
};

const ACTIVATIONS: [EncoderActivation; 5] = [
    EncoderActivation::Gelu,
    EncoderActivation::GeluErf,
    EncoderActivation::QuickGelu,
    EncoderActivation::Silu,
    EncoderActivation::SquaredRelu,
];

/// (elements of a row, rows)
const SHAPES: [(usize, usize); 5] = [(1, 1), (3, 5), (31, 9), (256, 3), (1153, 2)];

/// Element `i` of a result.
type ElementOf<'a> = Box<dyn Fn(usize) -> f32 + 'a>;

/// `n` indices below `end`, in no order.
fn indices(n: usize, end: usize) -> Vec<u32> {
    (0..n).map(|i| ((7 * i + 3) % end) as u32).collect()
}

#[test]
fn activations_match_their_twin() {
    for (gpu, (width, n_rows)) in on_variants(&SHAPES) {
        let (x, y) = (random(1, width * n_rows), random(2, width * n_rows));
        let x: Vec<f32> = x.iter().map(|x| 6.0 * x).collect();
        for activation in ACTIVATIONS {
            for gated in [false, true] {
                let [gx, gy] = [&x, &y].map(|v| Elements::new(gpu, v));
                let op =
                    if gated { ElementOp::ActivateGated(activation, &gy) } else { ElementOp::Activate(activation) };
                run(gpu, &[elementwise(gpu, op, &gx).unwrap()], 1);
                let want =
                    |(&x, &y): (&f32, &f32)| encoder_activation_twin(activation, x) * if gated { y } else { 1.0 };
                let want: Vec<f32> = x.iter().zip(&y).map(want).collect();
                let error = nmse(&gx.read(gpu), &want);
                // An exponential with an error of some 1e-6 where it is small, and an erf with one of 1.5e-7.
                assert!(error < 1e-12, "{activation:?}, {gated}, {width} by {n_rows}: {error:e}");
            }
        }
    }
}

#[test]
fn activations_of_large_inputs_are_zero_or_the_input_or_its_square() {
    let gpu = &variants()[0];
    for activation in ACTIVATIONS {
        let x = Elements::new(gpu, &[-1e30, -1e3, -100.0, 0.0, 100.0, 1e3, 1e8]);
        run(gpu, &[elementwise(gpu, ElementOp::Activate(activation), &x).unwrap()], 1);
        let got = x.read(gpu);
        // The exponential is bounded: what remains of the largest is 1e30 * exp(-80).
        assert!(got[0].abs() < 1e-4 && got[1..3].iter().all(|v| v.abs() < 1e-30), "{activation:?}: {got:?}");
        let want =
            [0.0, 100.0, 1e3, 1e8].map(|x: f32| if activation == EncoderActivation::SquaredRelu { x * x } else { x });
        assert_eq!(got[3..], want, "{activation:?}");
    }
}

#[test]
fn sums_factors_and_ranges_are_exact() {
    for (gpu, (width, n_rows)) in on_variants(&SHAPES) {
        let (x, y, row) = (random(1, width * n_rows), random(2, width * n_rows), random(3, width));
        let [gy, grow] = [&y, &row].map(|v| Elements::new(gpu, v));
        let (one, range) = (Elements::new(gpu, &[0.3]), Elements::new(gpu, &[-0.4, 0.5]));
        let (x, y, row) = (&x, &y, &row);
        let cases: [(ElementOp<'_>, ElementOf<'_>); 5] = [
            (ElementOp::Add(&gy), Box::new(|i| x[i] + y[i])),
            (ElementOp::AddRow(&grow, width), Box::new(|i| x[i] + row[i % width])),
            (ElementOp::MultiplyRow(&grow, width), Box::new(|i| x[i] * row[i % width])),
            (ElementOp::MultiplyRow(&one, 1), Box::new(|i| x[i] * 0.3)),
            (ElementOp::Clamp(&range), Box::new(|i| x[i].clamp(-0.4, 0.5))),
        ];
        for (op, want) in cases {
            let gx = Elements::new(gpu, x);
            run(gpu, &[elementwise(gpu, op, &gx).unwrap()], 1);
            let want: Vec<f32> = (0..x.len()).map(want).collect();
            assert_eq!(gx.read(gpu), want, "{op:?}, {width} by {n_rows}");
        }
    }
}

#[test]
fn sums_of_rows_match_their_twin() {
    for (gpu, (width, n_rows)) in on_variants(&SHAPES) {
        let x = random(1, width * n_rows);
        let gx = Elements::new(gpu, &x);
        for n in [1, 4, 9] {
            // Rows of which one in five is none, and one lies beyond the end.
            let mut rows = indices(3 * n, n_rows);
            rows.iter_mut().step_by(5).for_each(|row| *row = NO_ROW);
            rows[3 * n - 1] = n_rows as u32;
            let list = gpu.upload("rows", &rows).unwrap();
            for weighted in [false, true] {
                let factors = if weighted { random(n as u64, n * width) } else { vec![1.0; n * width] };
                let weights = Elements::new(gpu, &factors);
                let y = Elements::poisoned(gpu, 3 * width);
                let listed = SummedRows::Listed { rows: &list, n, weights: weighted.then_some(&weights) };
                run(gpu, &[row_sums(gpu, listed, width, &gx, &y).unwrap()], 1);
                let error = nmse(&y.read(gpu), &row_sums_twin(&x, width, &rows, n, &factors));
                assert!(error < 1e-13, "{n} of {width} by {n_rows}, {weighted}: {error:e}");
            }
        }
        for n in [1, 3] {
            let n_means = n_rows / n;
            let y = Elements::poisoned(gpu, n_means * width);
            run(gpu, &[row_sums(gpu, SummedRows::Mean { n }, width, &gx, &y).unwrap()], 1);
            let rows: Vec<u32> = (0..(n_means * n) as u32).collect();
            let want = row_sums_twin(&x, width, &rows, n, &vec![1.0 / n as f32; n * width]);
            let error = nmse(&y.read(gpu), &want);
            assert!(error < 1e-13, "means of {n} of {width} by {n_rows}: {error:e}");
        }
    }
}

#[test]
fn columns_are_placed_beside_others_and_by_turns() {
    for (gpu, (width, n_rows)) in on_variants(&SHAPES) {
        for (n, at, more) in [(1, 0, 0), (1, 2, 5), (4, 0, 0), (9, 3, 1)] {
            let place = ColumnPlace { width, n, at, y_width: at + width * n + more };
            let (x, before) = (random(1, n_rows * width * n), random(2, n_rows * place.y_width));
            let [gx, gy] = [&x, &before].map(|v| Elements::new(gpu, v));
            run(gpu, &[place_columns(gpu, place, &gx, &gy).unwrap()], 1);
            let rows = x.chunks_exact(width * n).zip(before.chunks_exact(place.y_width));
            let want: Vec<f32> = rows.flat_map(|(x, before)| place_columns_twin(place, x, before)).collect();
            assert_eq!(gy.read(gpu), want, "{place:?}");
        }
    }
}

#[test]
fn columns_outside_the_rows_are_refused() {
    let gpu = &variants()[0];
    let x = Elements::new(gpu, &[0.0; 24]);
    for (width, n, at, y_width) in [(4, 1, 5, 8), (4, 3, 0, 8), (0, 1, 0, 8)] {
        let place = ColumnPlace { width, n, at, y_width };
        let error = place_columns(gpu, place, &x, &x).unwrap_err();
        assert!(matches!(error, WgpuError::Mismatch { .. }), "{place:?}: {error}");
    }
}

#[test]
fn pairs_are_rotated_as_by_their_twin() {
    for (gpu, (n_head, head_dim, block, n_rows)) in
        on_variants(&[(1, 2, 2, 1), (3, 8, 4, 5), (2, 12, 12, 7), (16, 72, 72, 3), (5, 64, 2, 9), (1, 20, 10, 31)])
    {
        let shape = RotateShape { width: n_head * head_dim, head_dim, block };
        let (x, angles) = (random(1, n_rows * shape.width), random(2, n_rows * head_dim));
        let [gx, table] = [&x, &angles].map(|v| Elements::new(gpu, v));
        run(gpu, &[rotate_pairs(gpu, shape, &gx, &table).unwrap()], 1);
        let rows = x.chunks_exact(shape.width).zip(angles.chunks_exact(head_dim));
        let want: Vec<f32> = rows.flat_map(|(x, angles)| rotate_pairs_twin(shape, x, angles)).collect();
        let error = nmse(&gx.read(gpu), &want);
        assert!(error < 1e-13, "{shape:?}: {error:e}");
    }
}

#[test]
fn heads_of_partial_blocks_are_refused() {
    let gpu = &variants()[0];
    let x = Elements::new(gpu, &[0.0; 24]);
    for (width, head_dim, block) in [(24, 7, 2), (24, 12, 8), (24, 12, 3), (24, 0, 2), (24, 12, 0)] {
        let shape = RotateShape { width, head_dim, block };
        let error = rotate_pairs(gpu, shape, &x, &x).unwrap_err();
        assert!(matches!(error, WgpuError::Mismatch { .. }), "{shape:?}: {error}");
    }
}
