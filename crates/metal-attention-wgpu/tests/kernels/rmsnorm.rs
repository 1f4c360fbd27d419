//! `rmsnorm` against its twin.

use crate::support::{batch, nmse, poisoned, random, run, variants};
use metal_attention_wgpu::kernels::{RmsNormShape, rmsnorm, rmsnorm_twin};

#[test]
fn rmsnorm_matches_its_twin() {
    for gpu in variants() {
        for (n, n_tokens) in [(1, 1), (31, 2), (32, 3), (33, 7), (576, 8), (2048, 33), (49_152, 1)] {
            let (x, weight) = (random(1, n * n_tokens), random(2, n));
            let (gx, gw) = (gpu.upload("x", &x).unwrap(), gpu.upload("weight", &weight).unwrap());
            let y = poisoned(gpu, n * n_tokens);
            let batch = batch(gpu, n_tokens, 0);
            let shape = RmsNormShape { n, eps: 1e-5, outputs_only: false };
            run(gpu, &[rmsnorm(gpu, shape, &gx, &gw, &y, &batch).unwrap()], n_tokens);
            let got: Vec<f32> = gpu.read(&y, n * n_tokens).unwrap();
            let want: Vec<f32> = x.chunks(n).flat_map(|row| rmsnorm_twin(row, &weight, 1e-5)).collect();
            // The sum of squares in f32 has at worst n roundings of 2^-24, far fewer when summed as a tree.
            let error = nmse(&got, &want);
            assert!(error < 1e-12, "n {n}, {n_tokens} tokens: {error:e}");
        }
    }
}
