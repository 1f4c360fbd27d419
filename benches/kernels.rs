//! Benchmark of single kernels, matrix products and attention: `cargo bench --bench kernels`. On the CPU each is measured in a
//! model of one layer that spends almost all its time in the kernel; on a GPU, where there is one, as many repetitions in one
//! submission. `cargo bench --bench kernels -- types` prints a table of all tensor types instead.

mod support;
#[path = "kernels/types.rs"]
mod types;

use std::path::Path;

use criterion::{BenchmarkId, Criterion, Throughput};
use metal_attention::{BatchToken, Device, EngineOptions, Model};

/// The tensor types of the weights.
const TYPES: [&str; 4] = ["q4_0", "q8_0", "q4_k", "q6_k"];

fn main() {
    if support::is_benchmark_run() && std::env::args().any(|arg| arg == "types") {
        return types::table();
    }
    let Some(mut criterion) = support::criterion() else { return };
    let folder = tempfile::tempdir().expect("a folder for temporary files");
    cpu_products(&mut criterion, folder.path());
    cpu_attention(&mut criterion, folder.path());
    #[cfg(feature = "wgpu")]
    gpu::all(&mut criterion, folder.path());
    criterion.final_summary();
}

/// A model of one layer with the widths of Llama-3.2-1B, which spends almost all its time in matrix products.
fn wide_model(folder: &Path, ty: &str) -> Model {
    let sizes = ["--n-layer", "1", "--n-embd", "2048", "--n-head", "32", "--n-head-kv", "8", "--n-ff", "8192"];
    support::synthetic_model(folder, &[&["custom", "--type", ty][..], &sizes].concat())
}

/// A model of one layer with few weights, which at a long context spends most of its time in attention.
fn narrow_model(folder: &Path) -> Model {
    let sizes = ["--n-layer", "1", "--n-embd", "512", "--n-head", "8", "--n-head-kv", "2", "--n-ff", "64"];
    support::synthetic_model(folder, &[&["custom", "--n-ctx", "8192"][..], &sizes].concat())
}

/// The tokens at positions `from..from + n`, without output.
fn tokens(from: usize, n: usize) -> Vec<BatchToken> {
    (from..from + n).map(|pos| BatchToken { id: 1, seq: 0, pos, output: false }).collect()
}

/// The tokens at positions `from..from + n`, with logits requested.
fn requested(from: usize, n: usize) -> Vec<BatchToken> {
    tokens(from, n).into_iter().map(|token| BatchToken { output: true, ..token }).collect()
}

/// Measures products of one token (GEMV) and of 64 (GEMM) on the CPU.
fn cpu_products(criterion: &mut Criterion, folder: &Path) {
    for ty in TYPES {
        let model = wide_model(folder, ty);
        let weights: u64 =
            model.gguf().tensors().iter().filter(|t| is_layer_matrix(t)).map(|t| t.bytes().len() as u64).sum();
        let options = EngineOptions { device: Device::Cpu, n_ctx: Some(512), ..Default::default() };
        let mut pass = model.forward_pass(&options).expect("the model fits");
        for (name, n_tokens) in [("cpu matvec", 1), ("cpu matmul", 64)] {
            let mut group = criterion.benchmark_group(name);
            // The speed with one token is limited by reading weights, with many by multiplications.
            group.throughput(if n_tokens == 1 { Throughput::Bytes(weights) } else { Throughput::Elements(n_tokens) });
            // Logits of all tokens are requested, because the last layer drops the rows of the others before its feed-forward.
            let batch = requested(0, n_tokens as usize);
            group.bench_function(BenchmarkId::from_parameter(ty), |bencher| {
                bencher.iter(|| {
                    pass.reset();
                    pass.forward(&batch).expect("the tokens fit").n_rows()
                });
            });
        }
    }
}

/// Whether the tensor is a matrix of a layer.
fn is_layer_matrix(tensor: &metal_attention::gguf::Tensor) -> bool {
    tensor.name().starts_with("blk.") && tensor.shape().len() > 1
}

/// Measures attention on the CPU: decode at several depths, and prefill.
fn cpu_attention(criterion: &mut Criterion, folder: &Path) {
    let model = narrow_model(folder);
    let options = EngineOptions { device: Device::Cpu, n_ctx: Some(8192), ..Default::default() };
    let mut pass = model.forward_pass(&options).expect("the model fits");
    let mut group = criterion.benchmark_group("cpu attention");
    for depth in [512, 2048, 8191] {
        while pass.position() < depth {
            let n_past = pass.position();
            pass.forward(&tokens(n_past, 512.min(depth - n_past))).expect("the tokens fit");
        }
        group.throughput(Throughput::Elements(depth as u64));
        let batch = requested(depth, 1);
        group.bench_function(BenchmarkId::new("decode", depth), |bencher| {
            bencher.iter(|| {
                pass.truncate(depth);
                pass.forward_greedy(&batch).expect("the token fits")
            });
        });
    }
    let batch = tokens(0, 512);
    group.throughput(Throughput::Elements(512));
    group.bench_function(BenchmarkId::new("prefill", 512), |bencher| {
        bencher.iter(|| {
            pass.reset();
            pass.forward_prompt(&batch.iter().map(|token| token.id).collect::<Vec<_>>()).expect("the tokens fit")
        });
    });
}

#[cfg(feature = "wgpu")]
mod gpu {
    use std::time::{Duration, Instant};

    use metal_attention::gguf::Tensor;
    use metal_attention::kernels::kernels::{
        AttentionBuffers, AttentionShape, MatmulScratch, MatvecOptions, decode_attention, decode_attention_merge,
        matmul, matvec, n_splits, partial_bytes, prefill_attention, rope_table,
    };
    use metal_attention::kernels::wgpu::ComputePassDescriptor;
    use metal_attention::kernels::{
        Arena, BatchBuffer, BatchDims, Dispatch, WgpuDevice, WgpuError, WgpuMatrix, WgpuOptions, batch_words,
    };
    use metal_attention_model::{CacheType, PAGE, Rope, RopeLayout};

    use super::{BenchmarkId, Criterion, Path, TYPES, Throughput, requested, wide_model};

    /// Repetitions in one submission to the GPU.
    const CHUNK: u64 = 64;

    pub fn all(criterion: &mut Criterion, folder: &Path) {
        let gpu = match WgpuDevice::open(&WgpuOptions::default()) {
            Ok(gpu) => gpu,
            Err(why) => return eprintln!("GPU kernels are left out: {why}"),
        };
        eprintln!("GPU kernels on {}", gpu.summary().name);
        for ty in TYPES {
            let model = wide_model(folder, ty);
            let down = model.gguf().tensor("blk.0.ffn_down.weight").expect("every layer has one");
            products(criterion, &gpu, ty, down).expect("the kernels run");
        }
        attention(criterion, &gpu).expect("the kernels run");
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
        let rope = gpu.upload("rope", &rope_table(&rope, None, shape.n_ctx))?;
        let qkv = gpu.buffer("qkv", (max_tokens * shape.qkv_len() * 4) as u64)?;
        let pages: Vec<u32> = (0..(shape.n_ctx / PAGE) as u32).collect();
        let keys = gpu.buffer("keys", shape.cache_bytes(pages.len()))?;
        let values = gpu.buffer("values", shape.cache_bytes(pages.len()))?;
        let attention_out = gpu.buffer("attention_out", (max_tokens * shape.att_len() * 4) as u64)?;
        let partial = gpu.buffer("partial", partial_bytes(&shape, 1))?;
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

    fn size(n_tokens: usize, pos: usize) -> BatchDims {
        BatchDims { n_tokens: n_tokens as u32, n_outputs: n_tokens as u32, n_runs: 1, n_splits: n_splits(pos) }
    }
}
