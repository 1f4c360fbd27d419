//! Times the matrix products of a layer of SmolLM-135M and of Llama-3.2-1B on the GPU: the GEMM of 512 tokens by every
//! method, the GEMV of one token by `matvec`. Each time is the mean of many dispatches in one submission.
//!
//! Run with `cargo run --release -p metal-attention-wgpu --example matmul`. `*` marks the method that a forward pass would
//! use.
#[path = "../tests/kernels/support/mod.rs"]
mod support;

use std::time::Instant;

use metal_attention_gguf::TensorType;
use metal_attention_wgpu::kernels::{
    CooperativeTile, MatmulMethod, MatmulScratch, MatvecOptions, MatvecOutput, matmul_by, matmul_method, matvec,
};
use metal_attention_wgpu::{Arena, Dispatch, WgpuDevice, WgpuError, WgpuMatrix, WgpuOptions};
use support::matrices::repeated;
use support::{batch, random, run};

/// Microseconds of one run of `dispatches`, the mean of about 20 ms of runs.
fn time(gpu: &WgpuDevice, dispatches: &[Dispatch], n_tokens: usize) -> f64 {
    let mean = |repetitions: usize| {
        let all: Vec<_> = (0..repetitions).flat_map(|_| dispatches.iter().cloned()).collect();
        let start = Instant::now();
        run(gpu, &all, n_tokens);
        start.elapsed().as_secs_f64() * 1e6 / repetitions as f64
    };
    let first = mean(3).min(mean(3));
    mean((20_000.0 / first) as usize + 1)
}

/// Tiles to compare: (rows, tokens, depth, subgroups along rows, subgroups along tokens, pipeline stages).
const TILES: [(usize, usize, usize, usize, usize, usize); 10] = [
    (32, 32, 64, 2, 2, 2),
    (32, 64, 64, 2, 2, 1),
    (32, 64, 64, 2, 2, 2),
    (32, 64, 64, 2, 2, 3),
    (64, 32, 64, 2, 2, 2),
    (64, 64, 64, 2, 2, 1),
    (64, 64, 64, 2, 2, 2),
    (64, 64, 32, 2, 2, 2),
    (128, 64, 32, 4, 2, 2),
    (128, 128, 32, 4, 2, 2),
];

fn main() -> Result<(), WgpuError> {
    let gpu = WgpuDevice::open(&WgpuOptions { checked: false, ..Default::default() })?;
    let software = gpu.summary().is_software();
    let n_tokens = if software { 32 } else { 512 };
    println!("{}, {:?}", gpu.summary().name, gpu.features());
    let store = MatvecOutput::Store;
    let (accumulate, gated) = (MatvecOutput::Accumulate, MatvecOutput::Gated);
    let products = [
        ("SmolLM qkv", 576, 960, store),
        ("SmolLM o", 576, 576, accumulate),
        ("SmolLM gate_up", 576, 3072, gated),
        ("SmolLM down", 1536, 576, accumulate),
        ("Llama qkv", 2048, 3072, store),
        ("Llama o", 2048, 2048, accumulate),
        ("Llama gate_up", 2048, 16_384, gated),
        ("Llama down", 8192, 2048, accumulate),
    ];
    for (name, n_in, n_out, output) in products.into_iter().take(if software { 4 } else { 8 }) {
        let ty = TensorType::Q4_0;
        let w = repeated(ty, n_in, n_out, 64, 1);
        let matrix = WgpuMatrix::concat(&gpu, "w", &[&w], &mut Arena::default())?;
        let x = gpu.upload("x", &random(2, n_in * n_tokens))?;
        let y = gpu.buffer("y", (4 * n_out * n_tokens) as u64)?;
        let scratch = MatmulScratch::new(&gpu, n_tokens, n_in)?;
        let options = MatvecOptions { output, ..Default::default() };

        let one = batch(&gpu, 1, 0);
        let us = time(&gpu, &matvec(&gpu, &matrix, options, &x, &y, &one)?, 1);
        let gigabytes = matrix.bytes() as f64 / us / 1e3;
        println!("\n{name}: {ty} [{n_out}, {n_in}]\n  1 token, matvec: {us:.1} us, {gigabytes:.0} GB/s of weights");

        let all = batch(&gpu, n_tokens, 0);
        let default = matmul_method(gpu.features(), ty, n_out, n_tokens, false);
        let mut methods = vec![MatmulMethod::Tiled];
        if gpu.features().cooperative_f16 {
            methods.extend(TILES.map(|(rows, tokens, depth, subgroups_rows, subgroups_tokens, stages)| {
                let tile = CooperativeTile { rows, tokens, depth, subgroups_rows, subgroups_tokens, stages };
                MatmulMethod::Cooperative(tile)
            }));
        }
        if !methods.contains(&default) {
            methods.push(default);
        }
        let mut input = None;
        for method in methods {
            let mark = if method == default { "*" } else { " " };
            let label = match method {
                MatmulMethod::Tiled => "tiled".to_owned(),
                MatmulMethod::Cooperative(t) => {
                    let subgroups = format!("{}x{}", t.subgroups_rows, t.subgroups_tokens);
                    format!("{:>3}x{:<3} {:>2} {subgroups} {}", t.rows, t.tokens, t.depth, t.stages)
                }
            };
            match matmul_by(&gpu, &matrix, options, |_| method, &x, &y, &scratch, &all) {
                Ok(dispatches) => {
                    let (product, before) = dispatches.split_last().expect("a product has a dispatch");
                    if !before.is_empty() && input.is_none() {
                        let us = time(&gpu, before, n_tokens);
                        println!("  {n_tokens} tokens, {}: {us:.1} us", before[0].kernel());
                        input = Some(us);
                    }
                    let us = time(&gpu, std::slice::from_ref(product), n_tokens);
                    let teraflops = 2.0 * (n_in * n_out * n_tokens) as f64 / us / 1e6;
                    println!("{mark} {n_tokens} tokens, {label:<16} {us:>9.1} us {teraflops:>7.2} TFLOP/s");
                }
                Err(e) => println!("{mark} {n_tokens} tokens, {label:<16} {e}"),
            }
        }
    }
    Ok(())
}
