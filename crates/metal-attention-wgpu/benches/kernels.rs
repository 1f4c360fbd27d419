//! Benchmark of single kernels on a GPU, matrix products and attention, as many repetitions in one submission: `cargo bench -p
//! metal-attention-wgpu --bench kernels`. Those of the CPU are in `benches/` of the root folder.

#[path = "../tests/kernels/support/mod.rs"]
mod support;

use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput};
use metal_attention_gguf::{Tensor, TensorType};
use metal_attention_model::{BatchToken, CacheType, PAGE, Rope, RopeLayout};
use metal_attention_wgpu::kernels::{
    AttentionBuffers, AttentionShape, MatmulScratch, MatvecOptions, decode_attention, decode_attention_merge, matmul,
    matvec, n_splits, partial_len, prefill_attention,
};
use metal_attention_wgpu::wgpu::ComputePassDescriptor;
use metal_attention_wgpu::{
    Arena, BatchBuffer, BatchDims, Dispatch, WgpuDevice, WgpuError, WgpuMatrix, WgpuOptions, batch_words,
};
use support::matrices::repeated;

/// The tensor types of the weights.
const TYPES: [TensorType; 4] = [TensorType::Q4_0, TensorType::Q8_0, TensorType::Q4_K, TensorType::Q6_K];

/// The input and output widths of the matrix, those of Llama-3.2-1B's down projection.
const DOWN: [usize; 2] = [8192, 2048];

/// Repetitions in one submission to the GPU.
const CHUNK: u64 = 64;

fn main() {
    // `cargo test --benches` runs this program, too, and should not take minutes.
    if !std::env::args().any(|arg| arg == "--bench") {
        return;
    }
    let mut criterion = Criterion::default().sample_size(20).configure_from_args();
    let gpu = match WgpuDevice::open(&WgpuOptions::default()) {
        Ok(gpu) => gpu,
        Err(why) => return eprintln!("there is no GPU to measure: {why}"),
    };
    eprintln!("GPU kernels on {}", gpu.summary().name);
    for ty in TYPES {
        let weights = repeated(ty, DOWN[0], DOWN[1], 64, 1);
        products(&mut criterion, &gpu, &ty.to_string().to_lowercase(), &weights).expect("the kernels run");
    }
    attention(&mut criterion, &gpu).expect("the kernels run");
    criterion.final_summary();
}

/// The tokens at positions `from..from + n`, with logits requested.
fn requested(from: usize, n: usize) -> Vec<BatchToken> {
    (from..from + n).map(|pos| BatchToken { id: 1, seq: 0, pos, output: true }).collect()
}

/// `times` repetitions of `dispatches`, queued without a wait in between.
fn time(gpu: &WgpuDevice, dispatches: &[Dispatch], size: BatchDims, times: u64) -> Duration {
    let start = Instant::now();
    let mut left = times;
    let mut submission = None;
    while left > 0 {
        let mut encoder = gpu.encoder();
        {
            let mut pass = encoder.begin_compute_pass(&ComputePassDescriptor::default());
            for dispatch in (0..left.min(CHUNK)).flat_map(|_| dispatches) {
                dispatch.record(gpu, &mut pass, size);
            }
        }
        submission = Some(gpu.submit(encoder));
        left = left.saturating_sub(CHUNK);
    }
    gpu.wait(submission).expect("the GPU finishes");
    start.elapsed()
}

/// Measures products of one token (GEMV) and of many (GEMM) with `weights`.
fn products(criterion: &mut Criterion, gpu: &WgpuDevice, ty: &str, weights: &Tensor) -> Result<(), WgpuError> {
    let (n_in, n_out) = (weights.shape()[0], weights.shape()[1]);
    let max_tokens = if gpu.summary().is_software() { 32 } else { 512 };
    let matrix = WgpuMatrix::concat(gpu, "w", &[weights], &mut Arena::default())?;
    let x = gpu.upload("x", &vec![0.5f32; n_in * max_tokens])?;
    let y = gpu.buffer("y", (4 * n_out * max_tokens) as u64)?;
    let options = MatvecOptions::default();

    let one = gpu.upload("batch", &batch_words(&requested(0, 1)))?;
    let dispatches = matvec(gpu, &matrix, options, &x, &y, &one)?;
    let mut group = criterion.benchmark_group("gpu matvec");
    group.throughput(Throughput::Bytes(matrix.bytes()));
    group.bench_function(BenchmarkId::from_parameter(ty), |bencher| {
        bencher.iter_custom(|times| time(gpu, &dispatches, size(1, 0), times));
    });
    group.finish();

    let all = gpu.upload("batch", &batch_words(&requested(0, max_tokens)))?;
    let scratch = MatmulScratch::new(gpu, max_tokens, n_in)?;
    let dispatches = matmul(gpu, &matrix, options, max_tokens, false, &x, &y, &scratch, &all)?;
    let mut group = criterion.benchmark_group("gpu matmul");
    group.throughput(Throughput::Elements(max_tokens as u64));
    group.bench_function(BenchmarkId::new(ty, max_tokens), |bencher| {
        bencher.iter_custom(|times| time(gpu, &dispatches, size(max_tokens, 0), times));
    });
    Ok(())
}

/// Measures attention with the heads of Llama-3.2-1B: decode at several depths, and prefill.
fn attention(criterion: &mut Criterion, gpu: &WgpuDevice) -> Result<(), WgpuError> {
    let shape = AttentionShape {
        n_head: 32,
        n_head_kv: 8,
        head_dim: 64,
        scale: 0.125,
        soft_cap: None,
        sinks: false,
        window: None,
        n_ctx: 8192,
        group: 0,
        n_rot: 64,
        rope_layout: RopeLayout::Interleaved,
        qk_norm_eps: None,
        cache: CacheType::F16,
        gated: false,
        n_trailing: 0,
    };
    let max_tokens = if gpu.summary().is_software() { 64 } else { 512 };
    let rope = Rope::new(shape.n_rot, shape.rope_layout, 10_000.0);
    let rope = gpu.upload("rope", &rope.rotation(None).table(shape.n_ctx))?;
    let qkv = gpu.buffer("qkv", (max_tokens * shape.qkv_len() * 4) as u64)?;
    let pages: Vec<u32> = (0..(shape.n_ctx / PAGE) as u32).collect();
    let keys = gpu.buffer("keys", shape.cache_bytes(pages.len()))?;
    let values = gpu.buffer("values", shape.cache_bytes(pages.len()))?;
    let attention_out = gpu.buffer("attention_out", (max_tokens * shape.att_len() * 4) as u64)?;
    let partial = gpu.buffer("partial", 4 * partial_len(&shape) as u64)?;
    let last_seen = gpu.buffer("last seen", 4 * max_tokens as u64)?;
    let mut batch = BatchBuffer::new(gpu, max_tokens, 1, shape.n_ctx, &[pages.len()])?;
    batch.write_pages(gpu, 0, 0, &pages);
    let buffers = AttentionBuffers {
        qkv: &qkv,
        rope: &rope,
        qk_norm: None,
        sinks_and_slopes: None,
        keys: &keys,
        values: &values,
        attention_out: &attention_out,
        partial: &partial,
        last_seen: &last_seen,
        batch: batch.buffer(),
    };
    let mut group = criterion.benchmark_group("gpu attention");
    let decode = [decode_attention(gpu, &shape, &buffers)?, decode_attention_merge(gpu, &shape, &buffers)?];
    for depth in [512, 2048, 8191] {
        batch.write_tokens(gpu, &requested(depth, 1));
        group.throughput(Throughput::Elements(depth as u64));
        group.bench_function(BenchmarkId::new("decode", depth), |bencher| {
            bencher.iter_custom(|times| time(gpu, &decode, size(1, depth), times));
        });
    }
    let prefill = [prefill_attention(gpu, &shape, &buffers)?];
    batch.write_tokens(gpu, &requested(0, max_tokens));
    group.throughput(Throughput::Elements(max_tokens as u64));
    group.bench_function(BenchmarkId::new("prefill", max_tokens), |bencher| {
        bencher.iter_custom(|times| time(gpu, &prefill, size(max_tokens, 0), times));
    });
    Ok(())
}

/// The dimensions of a batch of `n_tokens` tokens, the last of them at `pos`.
fn size(n_tokens: usize, pos: usize) -> BatchDims {
    BatchDims { n_tokens: n_tokens as u32, n_outputs: n_tokens as u32, n_runs: 1, n_splits: n_splits(pos) }
}
