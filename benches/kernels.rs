//! Benchmark of single kernels of the CPU, matrix products and attention: `cargo bench --bench kernels`. Each is measured in a
//! model of one layer that spends almost all its time in the kernel. `tensor_types` measures every tensor type. The benchmark of
//! a GPU's kernels is in `crates/metal-attention-wgpu/benches/`.

mod support;

use std::path::Path;

use criterion::{BenchmarkId, Criterion, Throughput};
use metal_attention::{BatchToken, Device, EngineOptions, Model};

/// The tensor types of the weights.
const TYPES: [&str; 4] = ["q4_0", "q8_0", "q4_k", "q6_k"];

fn main() {
    let Some(mut criterion) = support::criterion() else { return };
    let folder = tempfile::tempdir().expect("a folder for temporary files");
    cpu_products(&mut criterion, folder.path());
    cpu_attention(&mut criterion, folder.path());
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
