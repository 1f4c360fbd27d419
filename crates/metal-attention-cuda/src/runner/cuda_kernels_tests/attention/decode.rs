//! Decode attention with and without norm, RoPE and append (`attention.cu`, `attention_on_units.cu`).

use std::sync::Arc;

use super::super::{WIDE, assert_close, device, launch, packed_len, poisoned, read, unpacked};
use super::{CHUNK, F32_ERROR, Gate, Setup, Shape, WINDOW, assert_packed, shape};
use crate::CudaDevice;
use crate::args::AttentionArgs;
use crate::kernels;
use crate::launch::LaunchGrid;

/// A decode kernel, and how the positions and heads are divided.
#[derive(Debug, Clone, Copy)]
struct Division {
    on_units: bool,
    /// Query heads of a block.
    group: usize,
    n_splits: usize,
}

/// Launches a decode kernel for tokens of `runs` and compares results and cache. `appended`: the variant that reads all
/// keys and values from the cache.
fn check_decode(gpu: &Arc<CudaDevice>, shape: Shape, runs: &[(usize, usize, usize)], appended: bool, by: Division) {
    let what = format!("{shape:?} {runs:?} appended {appended} {by:?}");
    let mut setup = Setup::new(gpu, shape, runs, appended, f32::NAN);
    let (n, heads_per_kv, dim) = (setup.tokens.len(), shape.n_head / shape.n_head_kv, shape.dim);
    let n_chunks = heads_per_kv.div_ceil(by.group);
    let width = shape.n_head * dim;
    let order = n.div_ceil(8) as u32 | if n.is_multiple_of(2) { WIDE } else { 0 };
    let qkv = gpu.upload("qkv", &setup.qkv).unwrap();
    let out = poisoned(gpu, n * width);
    let packed = gpu.upload("packed", &vec![0xffff_u16; packed_len(width, order)]).unwrap();
    let partial = poisoned(gpu, n * shape.n_head * by.n_splits * (dim + 2));
    let n_tickets = n * shape.n_head_kv * n_chunks;
    let tickets = gpu.zeros("tickets", 4 * n_tickets as u64).unwrap();
    let args = AttentionArgs {
        partial: partial.ptr(),
        tickets: tickets.ptr(),
        n_splits: by.n_splits as u32,
        n_chunks: n_chunks as u32,
        ..setup.args(&qkv, out.ptr(), packed.ptr(), order)
    };
    let bytes = if shape.f16 { 2 } else { 4 };
    let (entry, shared) = if by.on_units {
        let shared = 4 * 2 * 2 * 16 * (dim + 8) * 2 + 4 * (10 * dim + 8 * 32);
        let of_sizes = if appended { kernels::ATTENTION_APPENDED_ON_UNITS } else { kernels::ATTENTION_ON_UNITS };
        (of_sizes[usize::from(dim > 64)], shared)
    } else {
        let shared = 2 * 64 * (dim * bytes + 32) + 4 * ((by.group + 2) * dim + by.group * 67);
        let of_groups = match (shape.f16, appended) {
            (true, false) => kernels::ATTENTION_F16,
            (true, true) => kernels::ATTENTION_APPENDED_F16,
            (false, false) => kernels::ATTENTION_F32,
            (false, true) => kernels::ATTENTION_APPENDED_F32,
        };
        (of_groups[by.group.ilog2() as usize], shared)
    };
    let before = [setup.read_cache(0), setup.read_cache(1)];
    let grid = LaunchGrid { blocks: [shape.n_head_kv * n_chunks, by.n_splits, n], threads: 128, shared };
    launch(gpu, entry, grid, &args);
    let got: Vec<f32> = read(gpu, &out, n * width);
    let halves = unpacked(&read(gpu, &packed, packed_len(width, order)), width, n, order);
    if !appended {
        setup.check_appended(&before, &what, Setup::appended);
    }
    let query = |token: usize, head: usize| {
        let q = setup.raw_query(token, head);
        if appended { q } else { setup.made(&q, 0, head, setup.tokens[token].pos as usize, shape.scale()) }
    };
    assert_close(&got, &setup.expected(query, None, F32_ERROR), width, &what);
    assert_packed(&halves, &got, &what);
    assert_eq!(read::<u32>(gpu, &tickets, n_tickets), vec![0; n_tickets], "{what}: tickets");
}

/// One token of each of several sequences, in no order.
const DECODE: &[(usize, usize, usize)] = &[(2, 0, 1), (0, 63, 1), (4, 64, 1), (1, 130, 1), (3, 200, 1)];

#[test]
fn decode_attention_of_every_head_size() {
    let Some(gpu) = device() else { return };
    for dim in [8, 32, 40, 64, 96, 128, 192, 256] {
        for f16 in [true, false] {
            let shape = Shape { f16, rotation: 1 + u32::from(f16), ..shape(6, 2, dim) };
            for (group, n_splits) in [(1, 1), (2, 3), (4, 32), (8, 2)] {
                check_decode(&gpu, shape, DECODE, false, Division { on_units: false, group, n_splits });
            }
            check_decode(&gpu, shape, DECODE, true, Division { on_units: false, group: 4, n_splits: 2 });
            for group in if dim == 40 { vec![1, 2, 8] } else { vec![] } {
                check_decode(&gpu, shape, DECODE, true, Division { on_units: false, group, n_splits: 3 });
            }
        }
    }
}

#[test]
fn decode_attention_on_units_of_every_head_size() {
    let Some(gpu) = device() else { return };
    for dim in [32, 64, 96, 128] {
        for (n_head, n_head_kv, group) in [(6, 2, 4), (8, 1, 8), (16, 2, 4), (3, 3, 1), (7, 1, 8), (12, 1, 8)] {
            for (n_splits, appended) in [(1, false), (3, true), (32, false)] {
                let by = Division { on_units: true, group, n_splits };
                check_decode(&gpu, shape(n_head, n_head_kv, dim), DECODE, appended, by);
            }
        }
    }
}

#[test]
fn decode_attention_with_norms_ropes_masks_and_gates() {
    let Some(gpu) = device() else { return };
    let plain = shape(4, 2, 64);
    for (i, shape) in [
        Shape { norm: 1, ..plain },
        Shape { norm: 2, rotation: 2, ..plain },
        Shape { norm: 3, norm_after_rope: true, ..plain },
        Shape { norm: 1, norm_after_rope: true, n_rot: 24, rotation: 2, ..plain },
        Shape { rotation: 0, n_rot: 0, soft_cap: 2.5, ..plain },
        Shape { n_rot: 30, sinks: true, ..plain },
        Shape { gate: Gate::InQueries, norm: 1, ..plain },
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
    ]
    .into_iter()
    .enumerate()
    {
        for n_splits in [1, 2 + i % 3] {
            check_decode(&gpu, shape, DECODE, i % 2 == 1, Division { on_units: true, group: 2, n_splits });
            check_decode(&gpu, shape, DECODE, false, Division { on_units: true, group: 2, n_splits });
            check_decode(&gpu, shape, DECODE, i.is_multiple_of(2), Division { on_units: false, group: 2, n_splits });
            let shape = Shape { f16: false, ..shape };
            check_decode(&gpu, shape, DECODE, false, Division { on_units: false, group: 1, n_splits });
        }
    }
}

#[test]
fn decode_attention_in_bidirectional_spans() {
    let Some(gpu) = device() else { return };
    let plain = Shape { bidirectional: true, ..shape(4, 2, 64) };
    let runs = &[(1, 60, 9), (0, 0, 3), (2, 127, 1)];
    for shape in
        [plain, Shape { mask: WINDOW, reach: 5, sinks: true, ..plain }, Shape { mask: CHUNK, reach: 64, ..plain }]
    {
        for n_splits in [1, 3] {
            check_decode(&gpu, shape, runs, true, Division { on_units: true, group: 2, n_splits });
            check_decode(&gpu, shape, runs, true, Division { on_units: false, group: 2, n_splits });
            let shape = Shape { f16: false, ..shape };
            check_decode(&gpu, shape, runs, true, Division { on_units: false, group: 2, n_splits });
        }
    }
}
