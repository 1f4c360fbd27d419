//! Tests of each CUDA kernel alone, against a twin in plain Rust with F64 sums, over awkward shapes. Child of `runner`, since most
//! kernels are launched by the functions of [`ModelRunner`](super::ModelRunner), which choose the grid.
//!
//! They need a GPU, or the software CUDA device of `software/`. Inputs are random, from seeds; results begin as NaN, so that an
//! element that a kernel does not write is found. Each file states the error that the arithmetic of its kernels allows.

#![expect(clippy::struct_excessive_bools, reason = "a case of a test has independent properties")]

mod attention;
mod block_conv;
#[cfg(debug_assertions)]
mod bounds;
mod encoder;
mod exchange;
mod experts;
mod grouped;
mod products;
mod recurrent;
mod repack;
mod rows;
mod streams;

use std::sync::Arc;

use bytemuck::Pod;
use half::f16;
use metal_attention_gguf::blocks::random_blocks;
use metal_attention_gguf::{GgufFile, GgufWriter, Metadata, Tensor, TensorDecl, TensorType};
use metal_attention_model::{LoadedModel, SessionOptions, Watch};

use crate::bounds::KernelArgs;
use crate::device::{CudaBuffer, Readback};
use crate::kernels::EntryPoint;
use crate::launch::{LaunchGrid, LaunchOrder};
use crate::{CudaDevice, CudaExecutor, CudaTuning};

/// Flag in `n_token_tiles` for the packed layout that `matmul_wide` reads: `WIDE` of `kernels/common.cuh`.
const WIDE: u32 = 1 << 31;

/// The device under test. `None`, noted as skipped, if there is none, unless `METAL_ATTENTION_TEST_CUDA` demands one.
fn device() -> Option<Arc<CudaDevice>> {
    match CudaDevice::open(0, Watch::default()) {
        Ok(gpu) => Some(Arc::new(gpu)),
        Err(why) => {
            assert!(std::env::var_os("METAL_ATTENTION_TEST_CUDA").is_none(), "{why}");
            metal_attention_testing::skip("no CUDA device");
            None
        }
    }
}

/// A forward pass of the built-in model, whose runner launches the kernels under test. Its own weights are not used.
fn pass() -> Option<CudaExecutor> {
    let gpu = device()?;
    let file = GgufFile::read(metal_attention_testing::stories()).unwrap();
    let model = LoadedModel::load(&file).unwrap();
    let options = SessionOptions { n_ctx: 64, n_ubatch: 256, ..Default::default() };
    Some(CudaExecutor::new(gpu, &model, &options, &CudaTuning::default()).unwrap())
}

/// Random numbers in `-1..1`, from `SplitMix64`.
fn random(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0xd134_2543_de82_ef95);
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    };
    (0..n).map(|_| (next() >> 40) as f32 / (1 << 23) as f32 - 1.0).collect()
}

/// A matrix `[n_out, n_in]` of type `ty` with random elements in `-1..1`.
fn tensor(ty: TensorType, n_in: usize, n_out: usize, seed: u64) -> Tensor {
    let decl = TensorDecl { name: "w".into(), shape: vec![n_in, n_out], ty };
    let mut writer = GgufWriter::new(Vec::new(), 3, &Metadata::new(), &[decl]).unwrap();
    writer.write(&random_blocks(ty, n_in * n_out, seed, 1.0)).unwrap();
    GgufFile::from_bytes(&writer.finish().unwrap()).unwrap().tensors()[0].clone()
}

/// Launches a kernel after the previous one.
fn launch<A: KernelArgs>(gpu: &CudaDevice, entry: EntryPoint<A>, grid: LaunchGrid, args: &A) {
    let kernel = gpu.kernel(entry).unwrap();
    // SAFETY: tests make the addresses of buffers of the sizes that they state, and keep them until they have read the results.
    unsafe { gpu.launch(kernel, grid, args, LaunchOrder::AfterPrevious).unwrap() };
}

/// A buffer of `n` NaN.
fn poisoned(gpu: &Arc<CudaDevice>, n: usize) -> CudaBuffer {
    gpu.upload("results", &vec![f32::NAN; n]).unwrap()
}

/// The first `n` elements of `buffer`, after all launches so far.
fn read<T: Pod>(gpu: &Arc<CudaDevice>, buffer: &CudaBuffer, n: usize) -> Vec<T> {
    let bytes = (n * size_of::<T>()) as u64;
    let mut readback = Readback::new(gpu, bytes).unwrap();
    readback.copy(buffer, bytes).unwrap();
    bytemuck::pod_collect_to_vec(readback.read(bytes).unwrap())
}

/// `v` as the nearest F16.
fn rounded(v: f32) -> f32 {
    f16::from_f32(v).to_f32()
}

/// The index of element `k` of a token's row among packed rows: `packed_input` of `kernels/common.cuh`.
fn packed_index(token: usize, k: usize, order: u32) -> usize {
    let n_tiles = (order & !WIDE) as usize;
    let panel = k / 64;
    if order & WIDE != 0 {
        let in_16 = 8 * (k % 4 / 2) + k % 16 / 4 * 2 + k % 2;
        let piece = k % 64 / 16 * 2 + in_16 / 8;
        return (panel * n_tiles * 8 + token) * 64 + (piece ^ (token % 8)) * 8 + in_16 % 8;
    }
    let place = k % 16 / 4 * 8 + k % 32 / 16 * 4 + k % 4;
    let lane = token % 8 * 4 + place / 8;
    (((panel * n_tiles + token / 8) * 2 + k % 64 / 32) * 32 + lane) * 8 + place % 8
}

/// Elements of packed rows of `n_in` elements.
fn packed_len(n_in: usize, order: u32) -> usize {
    n_in.div_ceil(64) * 64 * 8 * (order & !WIDE) as usize
}

/// Rows of `n_in` elements as packed F16, padded with zeros.
fn packed(x: &[f32], n_in: usize, order: u32) -> Vec<u16> {
    let mut to = vec![0; packed_len(n_in, order)];
    for (token, row) in x.chunks(n_in).enumerate() {
        for (k, v) in row.iter().enumerate() {
            to[packed_index(token, k, order)] = f16::from_f32(*v).to_bits();
        }
    }
    to
}

/// The rows of packed F16 `from`, the inverse of [`packed`].
fn unpacked(from: &[u16], n_in: usize, n_rows: usize, order: u32) -> Vec<f32> {
    let at = |i: usize| f16::from_bits(from[packed_index(i / n_in, i % n_in, order)]).to_f32();
    (0..n_rows * n_in).map(at).collect()
}

/// A number of the twin, and the largest error that the kernel's arithmetic allows.
#[derive(Debug, Clone, Copy)]
struct Expected {
    value: f64,
    error: f64,
}

/// Asserts that each element is as expected. `n`: elements of a row, for the message.
fn assert_close(got: &[f32], expected: &[Expected], n: usize, what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (i, (got, Expected { value, error })) in got.iter().zip(expected).enumerate() {
        let off = (f64::from(*got) - value).abs();
        assert!(
            off <= *error,
            "{what}: row {}, element {}: {got}, not {value}: off by {off:e} > {error:e}",
            i / n,
            i % n
        );
    }
}

/// Asserts that the largest error is at most `limit` times the root mean square of all expected elements. `n`: elements
/// of a row, for the message.
fn assert_near(got: &[f32], expected: &[f64], n: usize, limit: f64, what: &str) {
    let square: f64 = expected.iter().map(|v| v * v).sum();
    let error = limit * (square / expected.len().max(1) as f64).sqrt();
    assert_close(got, &expected.iter().map(|&value| Expected { value, error }).collect::<Vec<_>>(), n, what);
}

/// `x` as F64.
fn to_f64(x: &[f32]) -> Vec<f64> {
    x.iter().map(|v| f64::from(*v)).collect()
}
