//! Attention over runs of tokens: the append to the cache (`attention.cu`), `prefill_attention.cu` and
//! `general_attention.cu`.

use std::sync::Arc;

use half::f16;

use super::super::{Expected, WIDE, assert_close, device, launch, packed_len, poisoned, read, unpacked};
use super::{CHUNK, F32_ERROR, FULL, Gate, NEAR, Setup, Shape, WINDOW, assert_packed, shape};
use crate::CudaDevice;
use crate::args::{GeneralAttentionArgs, PrefillArgs, QueryTileArgs};
use crate::kernels;
use crate::launch::LaunchGrid;
use crate::parts::attention::launch::{VERIFIED_HEADS, prefill_kernel, verify_kernel};
use crate::slice::DevicePtr;

/// In prefill, weights and results are rounded to F16 (2^-11 each).
const PREFILL_ERROR: f64 = 1e-3;

/// Runs of tokens of several sequences: prefills of new and of long sequences, single tokens, and tiles that end within
/// a page.
const PREFILL: &[(usize, usize, usize)] =
    &[(1, 0, 17), (3, 70, 1), (0, 100, 15), (4, 60, 16), (2, 0, 63), (6, 5, 64), (5, 1, 65)];

#[test]
fn append() {
    let Some(gpu) = device() else { return };
    for (dim, n_head, n_head_kv) in [(32, 3, 1), (64, 4, 2), (80, 6, 3), (256, 5, 5)] {
        for (norm, rotation, f16) in [(0, 1, true), (1, 2, false), (2, 1, true), (3, 2, false)] {
            let shape = Shape { norm, rotation, f16, norm_after_rope: norm == 2, ..shape(n_head, n_head_kv, dim) };
            let what = format!("append of {shape:?}");
            let mut setup = Setup::new(&gpu, shape, PREFILL, false, f32::NAN);
            let n = setup.tokens.len();
            let qkv = gpu.upload("qkv", &setup.qkv).unwrap();
            let args = setup.args(&qkv, DevicePtr::NULL, DevicePtr::NULL, 0);
            let before = [setup.read_cache(0), setup.read_cache(1)];
            let heads = n_head + 2 * n_head_kv;
            let grid = LaunchGrid { blocks: [heads.div_ceil(4), n, 1], threads: 128, shared: 16 * dim };
            let kernel = kernels::APPEND[usize::from(!shape.f16)];
            launch(&gpu, kernel, grid, &args);
            setup.check_appended(&before, &what, Setup::appended);
            let rows: Vec<f32> = read(&gpu, &qkv, n * shape.stride());
            for (token, row) in rows.chunks(shape.stride()).enumerate() {
                for head in 0..n_head {
                    let pos = setup.tokens[token].pos as usize;
                    let twin = setup.made(&setup.raw_query(token, head), 0, head, pos, shape.scale());
                    let twin: Vec<_> = twin.iter().map(|v| Expected { value: *v, error: 4e-6 }).collect();
                    assert_close(&row[head * dim..][..dim], &twin, dim, &format!("{what}, token {token}, head {head}"));
                }
            }
        }
    }
}

/// Runs of a few tokens after contexts of up to five pages.
const VERIFY: &[(usize, usize, usize)] = &[(1, 0, 5), (3, 70, 1), (0, 256, 16), (4, 126, 2), (2, 300, 7), (6, 5, 15)];

/// Launches prefill attention, or with `n_splits` attention with split-KV, and compares the packed result.
fn check_tiles(
    gpu: &Arc<CudaDevice>,
    shape: Shape,
    runs: &[(usize, usize, usize)],
    wide: bool,
    n_splits: Option<usize>,
) {
    let what = format!("attention of {shape:?} {runs:?}, splits {n_splits:?}");
    let setup = Setup::new(gpu, shape, runs, true, 1e3);
    let (n, width) = (setup.tokens.len(), shape.n_head * shape.dim);
    let order = n.div_ceil(8) as u32 | if wide { WIDE } else { 0 };
    let packed = gpu.upload("packed", &vec![0xffff_u16; packed_len(width, order)]).unwrap();
    let query_buffer = gpu.upload("queries", &setup.ready_queries()).unwrap();
    let qkv = gpu.upload("qkv", &setup.qkv).unwrap();
    let mut tiles = Vec::new();
    let mut token = 0;
    for &(seq, pos, n) in runs {
        for first in (0..n).step_by(64) {
            let [n, seq, pos] = [(n - first).min(64), seq, pos + first].map(|v| v as u32);
            let last = setup.tokens[token as usize].last;
            tiles.push(QueryTileArgs { token, n, seq, pos, last });
            token += n;
        }
    }
    let tile_buffer = gpu.upload("tiles", &tiles).unwrap();
    let base = setup.args(&qkv, DevicePtr::NULL, packed.ptr(), order);
    let groups = shape.n_head_kv * (shape.n_head / shape.n_head_kv).div_ceil(VERIFIED_HEADS);
    let partial = poisoned(gpu, n * shape.n_head * n_splits.unwrap_or(1) * (shape.dim + 2));
    let tickets = gpu.zeros("tickets", 4 * (tiles.len() * groups) as u64).unwrap();
    let args = PrefillArgs {
        tiles: tile_buffer.ptr(),
        pages: base.pages,
        k_cache: base.k_cache.cast(),
        v_cache: base.v_cache.cast(),
        qkv: query_buffer.ptr(),
        packed: base.packed,
        sinks: base.sinks,
        n_head: base.n_head,
        n_head_kv: base.n_head_kv,
        stride: width as u32,
        n_token_tiles: order,
        mask: base.mask,
        reach: base.reach,
        soft_cap: base.soft_cap,
        n_splits: n_splits.unwrap_or(1) as u32,
        partial: partial.ptr(),
        tickets: tickets.ptr(),
        gate: base.gate,
    };
    let shared = 2 * 2 * 2 * 64 * (shape.dim + 8);
    let (kernel, blocks) = match n_splits {
        None => (prefill_kernel(shape.dim), [tiles.len(), shape.n_head, 1]),
        Some(n_splits) => (verify_kernel(shape.dim), [tiles.len(), groups, n_splits]),
    };
    launch(gpu, kernel.unwrap(), LaunchGrid { blocks, threads: 128, shared }, &args);
    assert_eq!(read::<u32>(gpu, &tickets, tiles.len() * groups), vec![0; tiles.len() * groups], "{what}: tickets");
    let got = unpacked(&read(gpu, &packed, packed_len(width, order)), width, n, order);
    let query = |token: usize, head: usize| {
        let rounded = |v: &f64| f64::from(f16::from_f64(*v).to_f32());
        setup.raw_query(token, head).iter().map(rounded).collect::<Vec<_>>()
    };
    assert_close(&got, &setup.expected(query, None, PREFILL_ERROR / 3.0), width, &what);
}

#[test]
fn prefill_attention_of_every_head_size() {
    let Some(gpu) = device() else { return };
    for (dim, n_head, n_head_kv) in [(32, 4, 4), (64, 3, 1), (96, 4, 2), (128, 5, 1), (256, 2, 2)] {
        check_tiles(&gpu, shape(n_head, n_head_kv, dim), PREFILL, dim.is_multiple_of(64), None);
    }
    for (dim, n_head, n_head_kv) in [(32, 4, 4), (64, 3, 1), (96, 12, 2), (128, 5, 1), (256, 2, 2)] {
        for n_splits in [1, 2, 3, 32] {
            check_tiles(&gpu, shape(n_head, n_head_kv, dim), VERIFY, false, Some(n_splits));
        }
    }
}

#[test]
fn prefill_attention_with_masks_caps_sinks_and_gates() {
    let Some(gpu) = device() else { return };
    let plain = shape(2, 1, 32);
    for (i, shape) in [
        Shape { soft_cap: 2.5, ..plain },
        Shape { sinks: true, ..plain },
        Shape { gate: Gate::InQueries, ..plain },
        Shape { mask: WINDOW, reach: 1, ..plain },
        Shape { mask: WINDOW, reach: 17, sinks: true, ..plain },
        Shape { mask: WINDOW, reach: 65, ..plain },
        Shape { mask: WINDOW, reach: 128, gate: Gate::InQueries, ..plain },
        Shape { gate: Gate::Elements { softplus: false }, sinks: true, ..plain },
        Shape { gate: Gate::Elements { softplus: true }, ..plain },
        Shape { gate: Gate::Heads { softplus: false }, mask: WINDOW, reach: 17, ..plain },
        Shape { gate: Gate::Heads { softplus: true }, ..plain },
        Shape { mask: CHUNK, reach: 50, ..plain },
        Shape { mask: CHUNK, reach: 64, ..plain },
        Shape { mask: FULL, ..plain },
        Shape { mask: NEAR, reach: 9, ..plain },
        Shape { mask: NEAR, reach: 70, ..plain },
        Shape { bidirectional: true, ..plain },
        Shape { bidirectional: true, mask: WINDOW, reach: 17, ..plain },
        Shape { bidirectional: true, mask: WINDOW, reach: 70, sinks: true, ..plain },
        Shape { bidirectional: true, mask: CHUNK, reach: 50, ..plain },
    ]
    .into_iter()
    .enumerate()
    {
        check_tiles(&gpu, shape, PREFILL, i.is_multiple_of(2), None);
        check_tiles(&gpu, shape, &[(0, 130, 130)], i % 2 == 1, None);
        check_tiles(&gpu, shape, VERIFY, i.is_multiple_of(2), Some(2 + i % 4));
    }
}

/// Launches the general kernel and compares results. `alibi`: with slopes.
fn check_general(gpu: &Arc<CudaDevice>, shape: Shape, runs: &[(usize, usize, usize)], n_splits: usize, alibi: bool) {
    let what = format!("general {shape:?} {runs:?} {n_splits} splits, ALiBi {alibi}");
    let setup = Setup::new(gpu, shape, runs, true, f32::NAN);
    let (n, width) = (setup.tokens.len(), shape.n_head * shape.dim);
    let order = n.div_ceil(8) as u32;
    let query_buffer = gpu.upload("queries", &setup.ready_queries()).unwrap();
    let qkv = gpu.upload("qkv", &setup.qkv).unwrap();
    let out = poisoned(gpu, n * width);
    let packed = gpu.upload("packed", &vec![0xffff_u16; packed_len(width, order)]).unwrap();
    let partial = poisoned(gpu, n * shape.n_head * n_splits * (shape.dim + 2));
    let tickets = gpu.zeros("tickets", 4 * (n * shape.n_head) as u64).unwrap();
    let slopes: Vec<f32> = (0..shape.n_head).map(|head| 0.25 / (1.0 + head as f32)).collect();
    let slope_buffer = gpu.upload("slopes", &slopes).unwrap();
    let base = setup.args(&qkv, out.ptr(), packed.ptr(), order);
    let args = GeneralAttentionArgs {
        tokens: base.tokens,
        pages: base.pages,
        k_cache: base.k_cache,
        v_cache: base.v_cache,
        queries: query_buffer.ptr(),
        out: base.out,
        packed: base.packed,
        partial: partial.ptr(),
        tickets: tickets.ptr(),
        sinks: base.sinks,
        slopes: if alibi { slope_buffer.ptr() } else { DevicePtr::NULL },
        n_head: base.n_head,
        n_head_kv: base.n_head_kv,
        key_dim: base.head_dim,
        value_dim: base.head_dim,
        n_splits: n_splits as u32,
        n_token_tiles: order,
        mask: base.mask,
        reach: base.reach,
        soft_cap: base.soft_cap,
        unused: 0,
        gate: base.gate,
    };
    let grid = LaunchGrid { blocks: [shape.n_head, n_splits, n], threads: 128, shared: 4 * (shape.dim + 128) };
    let kernel = kernels::GENERAL_ATTENTION[usize::from(!shape.f16)];
    launch(gpu, kernel, grid, &args);
    let got: Vec<f32> = read(gpu, &out, n * width);
    let expected = setup.expected(|token, head| setup.raw_query(token, head), alibi.then_some(&slopes), F32_ERROR);
    assert_close(&got, &expected, width, &what);
    let halves = unpacked(&read(gpu, &packed, packed_len(width, order)), width, n, order);
    assert_packed(&halves, &got, &what);
    assert_eq!(read::<u32>(gpu, &tickets, n * shape.n_head), vec![0; n * shape.n_head], "{what}: tickets");
}

#[test]
fn general_attention() {
    let Some(gpu) = device() else { return };
    let plain = shape(4, 2, 20);
    // Two short runs, a single token, and one with more than two tiles of positions.
    let runs = &[(2, 0, 3), (0, 127, 2), (3, 128, 1), (1, 300, 2)];
    for (i, shape) in [
        shape(1, 1, 1),
        shape(3, 1, 33),
        shape(6, 2, 80),
        shape(2, 1, 256),
        shape(2, 2, 512),
        Shape { soft_cap: 2.5, ..plain },
        Shape { sinks: true, ..plain },
        Shape { gate: Gate::InQueries, ..plain },
        Shape { gate: Gate::Elements { softplus: true }, ..plain },
        Shape { gate: Gate::Heads { softplus: false }, ..plain },
        Shape { mask: WINDOW, reach: 17, sinks: true, ..plain },
        Shape { mask: WINDOW, reach: 129, ..plain },
        Shape { mask: CHUNK, reach: 50, ..plain },
        Shape { mask: FULL, ..plain },
        Shape { mask: NEAR, reach: 1, ..plain },
        Shape { mask: NEAR, reach: 140, ..plain },
        Shape { bidirectional: true, ..plain },
        Shape { bidirectional: true, mask: WINDOW, reach: 17, ..plain },
        Shape { bidirectional: true, mask: CHUNK, reach: 50, ..plain },
    ]
    .into_iter()
    .enumerate()
    {
        // Heads of an odd number of elements are not rotated.
        let shape = Shape { rotation: 0, n_rot: 0, f16: i.is_multiple_of(2), ..shape };
        for (n_splits, alibi) in [(1, false), (2, true), (32, false)] {
            check_general(&gpu, shape, runs, n_splits, alibi);
        }
    }
}
