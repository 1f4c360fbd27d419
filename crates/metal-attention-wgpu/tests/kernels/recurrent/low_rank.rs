//! RWKV's low-rank products and the gate of its channel mix, against their twins.

use crate::support::{batch, nmse, poisoned, random, run, variants};
use metal_attention_wgpu::kernels::{
    LowRankActivation, LowRankShape, channel_gate, channel_gate_twin, low_rank, low_rank_twin,
};

#[test]
fn low_rank_products_match_their_twin() {
    use LowRankActivation::{AsItIs, Sigmoid, Tanh};
    let shapes: [(usize, &[(usize, LowRankActivation)]); 5] = [
        (1, &[(1, Tanh)]),
        (33, &[(64, AsItIs)]),
        (64, &[(5, Tanh), (5, Tanh), (5, Tanh), (5, Tanh), (5, Tanh)]),
        (130, &[(65, Tanh), (7, AsItIs), (1, AsItIs), (160, Sigmoid)]),
        (256, &[(128, Sigmoid), (96, Tanh)]),
    ];
    for gpu in variants() {
        for (width, parts) in shapes {
            let shape = LowRankShape { width, parts: parts.to_vec() };
            for (n, one) in [(1, true), (3, true), (1, false), (8, false), (19, false)] {
                let x: Vec<f32> = random(1, n * shape.n_in()).iter().map(|x| 30.0 * x * x * x).collect();
                let up = random(2, shape.n_in() * width);
                let [gx, gup] = [&x, &up].map(|v| gpu.upload("x", v).unwrap());
                let y = poisoned(gpu, n * shape.n_out());
                run(gpu, &[low_rank(gpu, &shape, one, &gx, &gup, &y, &batch(gpu, n, 0)).unwrap()], n);
                let want = x.chunks(shape.n_in()).flat_map(|x| low_rank_twin(&shape, x, &up));
                let want: Vec<f32> = want.map(|y| y as f32).collect();
                let got: Vec<f32> = gpu.read(&y, want.len()).unwrap();
                let error = nmse(&got, &want);
                assert!(error < 1e-12, "{shape:?}, {n} tokens, one by one: {one}: {error:e}");
            }
        }
    }
}

#[test]
fn channel_gates_match_their_twin() {
    for gpu in variants() {
        for (n, n_tokens) in [(1, 1), (255, 3), (600, 2)] {
            for accumulate in [false, true] {
                let [gate, x, y] = [1, 2, 3].map(|seed| random(seed, n * n_tokens));
                let gate: Vec<f32> = gate.iter().map(|g| 100.0 * g * g * g).collect();
                let [ggate, gx, gy] = [&gate, &x, &y].map(|v| gpu.upload("x", v).unwrap());
                run(gpu, &[channel_gate(gpu, n, accumulate, &ggate, &gx, &gy).unwrap()], n_tokens);
                let each = gate.iter().zip(&x).zip(&y);
                let want: Vec<f32> = each.map(|((g, x), y)| channel_gate_twin(accumulate, *g, *x, *y)).collect();
                let got: Vec<f32> = gpu.read(&gy, want.len()).unwrap();
                let error = nmse(&got, &want);
                assert!(error < 1e-12, "{n} elements, accumulate: {accumulate}: {error:e}");
            }
        }
    }
}
