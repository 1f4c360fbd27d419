//! Grouped products: the GEMV of items (`grouped_matvec.cu`); the sort of items by group, the packing of their rows and the grouped
//! GEMM (`grouped_matmul.cu`). Items are spread over the groups unevenly: some groups have none, one has most.
//!
//! Bounds are those of `products.rs`: relative to `sqrt(sum (w x)^2)`.

use std::sync::Arc;

use metal_attention_gguf::{Tensor, TensorType};

use super::super::grouped::{GroupedLinearOp, packed_elements, sorted_elements};
use super::products::{activate, dot, layout_error, odd_width, sum_error};
use super::{Expected, assert_close, packed_len, pass, poisoned, random, read, rounded, tensor, unpacked};
use crate::CudaExecutor;
use crate::args::Epilogue;
use crate::matrix::WeightLayout;
use crate::slice::DevicePtr;
use crate::stack::CudaStack;

/// A grouped product.
#[derive(Debug, Clone, Copy)]
struct Case {
    /// The type of the first and of the second matrices; `None`: there is no second.
    types: (TensorType, Option<TensorType>),
    n_in: usize,
    n_rows: usize,
    n_groups: usize,
    n_items: usize,
    items_a_row: usize,
    bias: bool,
    gated: bool,
    /// Whether groups follow from the items' order, as the heads of latent attention do.
    implicit: bool,
    gemm: bool,
}

const PLAIN: Case = Case {
    types: (TensorType::Q8_0, None),
    n_in: 96,
    n_rows: 33,
    n_groups: 5,
    n_items: 7,
    items_a_row: 1,
    bias: false,
    gated: false,
    implicit: false,
    gemm: false,
};

/// The group of each item: most in group 1 where there is one, and none in the last group of several.
fn groups(case: &Case) -> Vec<u32> {
    let n = case.n_groups;
    let one = |(i, v): (usize, &f32)| {
        if case.implicit {
            return (i % n) as u32;
        }
        let group = if *v < 0.0 { 1 } else { (*v * (n - 1) as f32) as usize };
        group.min(n.saturating_sub(2)) as u32
    };
    random(50, case.n_items).iter().enumerate().map(one).collect()
}

/// Checks the list of places: each group's items once, from a multiple of 8 on.
fn check_sorted(items: &[u32], work: &[[u32; 4]], groups: &[u32], n_groups: usize, what: &str) {
    let mut place = 0;
    let mut expected_tiles = Vec::new();
    for group in 0..n_groups as u32 {
        let members: Vec<u32> = (0..groups.len() as u32).filter(|i| groups[*i as usize] == group).collect();
        let mut found = items[place..][..members.len()].to_vec();
        found.sort_unstable();
        assert_eq!(found, members, "{what}: group {group}");
        let end = (place + members.len()).next_multiple_of(8);
        assert!(items[place + members.len()..end].iter().all(|item| *item == u32::MAX), "{what}: group {group}");
        expected_tiles.extend((place / 8..end / 8).map(|tile| (group, tile as u32)));
        place = end;
    }
    assert!(items[place..].iter().all(|item| *item == u32::MAX), "{what}: places at the end");
    let tiles: Vec<_> =
        work.iter().flat_map(|[group, first, end, _]| (*first..*end).map(|tile| (*group, tile))).collect();
    assert_eq!(tiles, expected_tiles, "{what}: the list of work");
}

fn check(pass: &mut CudaExecutor, case: Case) {
    let what = format!("{case:?}");
    let Case { n_in, n_rows, n_groups, n_items, items_a_row, gated, .. } = case;
    let runner = &mut pass.runner;
    let gpu = Arc::clone(&runner.gpu);
    let types: Vec<TensorType> = [Some(case.types.0), case.types.1].into_iter().flatten().collect();
    let tensors: Vec<Vec<Tensor>> = types
        .iter()
        .enumerate()
        .map(|(which, &ty)| (0..n_groups).map(|i| tensor(ty, n_in, n_rows, (60 + 100 * which + i) as u64)).collect())
        .collect();
    let biases: Vec<Vec<f32>> = (0..types.len()).map(|i| random(70 + i as u64, n_groups * n_rows)).collect();
    let stacks: Vec<CudaStack> = tensors
        .iter()
        .zip(&biases)
        .map(|(tensors, bias)| {
            let tensors: Vec<_> = tensors.iter().collect();
            CudaStack::new(&gpu, &mut runner.kernels, &tensors, case.bias.then_some(&bias[..])).unwrap()
        })
        .collect();
    let groups = groups(&case);
    let group_buffer = gpu.upload("groups", &groups).unwrap();
    // Rows lie further apart than they are long, by a multiple of four elements.
    let x_stride = n_in.next_multiple_of(4) + 8;
    let x = random(80, n_items.div_ceil(items_a_row) * x_stride);
    let x_buffer = gpu.upload("x", &x).unwrap();
    let width = n_rows * if gated { 1 } else { types.len() };
    let y_stride = width + if gated { 0 } else { 3 };
    let y = poisoned(&gpu, n_items * y_stride);
    let mut op = GroupedLinearOp {
        label: "test",
        first: &stacks[0],
        second: stacks.get(1),
        epilogue: if gated { Epilogue::Gated } else { Epilogue::Store },
        activation: 0,
        groups: if case.implicit { DevicePtr::NULL } else { group_buffer.ptr() },
        x: x_buffer.slice(),
        items_a_row,
        x_stride,
        y: y.slice(),
        y_stride,
    };
    let got: Vec<f32> = if case.gemm {
        let [n_places, n_work] = sorted_elements(n_items, n_groups);
        let (items, work) = (poisoned(&gpu, n_places), poisoned(&gpu, n_work));
        let sorted = runner.sort_by_group(op.groups, n_items, n_groups, [items.slice(), work.slice()]).unwrap();
        let places: Vec<u32> = read(&gpu, &items, n_places);
        let words: Vec<u32> = read(&gpu, &work, n_work);
        let entries: Vec<[u32; 4]> =
            words[4..].chunks(4).take(words[0] as usize).map(|v| [v[0], v[1], v[2], v[3]]).collect();
        check_sorted(&places, &entries, &groups, n_groups, &what);
        let packed = poisoned(&gpu, packed_elements(n_items, n_groups, n_in));
        runner.gather_rows(&sorted, (op.x, items_a_row, x_stride), n_in, packed.slice()).unwrap();
        let order = (n_places / 8) as u32;
        let padded = n_in.next_multiple_of(64);
        let rows = unpacked(&read(&gpu, &packed, packed_len(n_in, order)), padded, n_places, order);
        for (place, (item, row)) in places.iter().zip(rows.chunks(padded)).enumerate() {
            let from = x.get(*item as usize / items_a_row * x_stride..).filter(|_| *item != u32::MAX);
            for (k, v) in row.iter().enumerate() {
                let expected = from.filter(|_| k < n_in).map_or(0.0, |from| rounded(from[k]));
                assert_eq!(*v, expected, "{what}: place {place}, element {k}");
            }
        }
        let packed_y = poisoned(&gpu, packed_elements(n_items, n_groups, n_rows));
        op.x = packed.slice();
        op.y = if gated { packed_y.slice() } else { y.slice() };
        runner.grouped_gemm(&op, &sorted).unwrap();
        if gated {
            let by_place = unpacked(&read(&gpu, &packed_y, packed_len(n_rows, order)), n_rows, n_places, order);
            let place_of = |item: usize| places.iter().position(|found| *found == item as u32).unwrap();
            (0..n_items).flat_map(|item| by_place[place_of(item) * n_rows..][..n_rows].to_vec()).collect()
        } else {
            read(&gpu, &y, n_items * y_stride)
        }
    } else {
        runner.grouped_gemv(&op, n_items).unwrap();
        read(&gpu, &y, n_items * y_stride)
    };

    let values: Vec<Vec<Vec<f32>>> = tensors
        .iter()
        .map(|tensors| {
            let round = case.gemm && rounds(tensors[0].ty());
            let value = |v: &f32| if round { rounded(*v) } else { *v };
            tensors.iter().map(|tensor| tensor.to_f32().iter().map(value).collect()).collect()
        })
        .collect();
    let mut expected = Vec::new();
    let mut results = Vec::new();
    for (item, group) in groups.iter().enumerate() {
        let row = &x[item / items_a_row * x_stride..][..n_in];
        let row: Vec<f64> = row.iter().map(|v| f64::from(if case.gemm { rounded(*v) } else { *v })).collect();
        let product = |which: usize, out: usize| {
            let (value, size) = dot(&values[which][*group as usize][out * n_in..][..n_in], &row);
            let bias = if case.bias { f64::from(biases[which][*group as usize * n_rows + out]) } else { 0.0 };
            let of_layout = if case.gemm { layout_error(types[which]) } else { 0.0 };
            Expected { value: value + bias, error: (sum_error(n_in) + of_layout) * size + 1e-6 * bias.abs() }
        };
        for at in 0..width {
            expected.push(if gated {
                let (gate, up) = (product(0, at), product(1, at));
                let value = activate(0, gate.value) * up.value;
                let error = 1.2 * gate.error * (up.value.abs() + up.error) + activate(0, gate.value).abs() * up.error;
                let of_result = if case.gemm { 1.0 / 2048.0 } else { 1e-6 };
                Expected { value, error: error + of_result * value.abs() + 1e-7 * up.value.abs() }
            } else {
                product(at / n_rows, at % n_rows)
            });
        }
        results.extend_from_slice(&got[item * y_stride..][..width]);
        assert!(got[item * y_stride..][width..y_stride].iter().all(|v| v.is_nan()), "{what}: past row {item}");
    }
    assert_close(&results, &expected, width, &what);
}

/// Whether the twin knows the F16 weights of the GEMM.
fn rounds(ty: TensorType) -> bool {
    match WeightLayout::of(ty) {
        WeightLayout::Q4K | WeightLayout::Q5K | WeightLayout::Q6K => false,
        WeightLayout::F16
        | WeightLayout::F32
        | WeightLayout::Q8_0
        | WeightLayout::Q4_0
        | WeightLayout::Codes
        | WeightLayout::CodesAndMins => true,
    }
}

fn check_all(gemm: bool, items: &[usize]) {
    use TensorType::{F16, F32, Q4_0, Q4_K, Q5_1, Q6_K, Q8_0};
    let Some(mut pass) = pass() else { return };
    let pass = &mut pass;
    let plain = Case { gemm, ..PLAIN };
    for (i, &ty) in TensorType::ALL.iter().enumerate() {
        let n_items = items[i % items.len()];
        check(pass, Case { types: (ty, None), n_in: odd_width(ty), n_items, bias: i.is_multiple_of(2), ..plain });
    }
    for &n_items in items {
        check(pass, Case { n_items, n_groups: 1, n_rows: 1, ..plain });
        check(pass, Case { n_items, n_groups: 3, n_rows: 130, items_a_row: 3, n_in: 544, ..plain });
        check(pass, Case { n_items, n_groups: 8, implicit: true, n_rows: 20, types: (F16, None), n_in: 20, ..plain });
        check(pass, Case { n_items, n_groups: 60, types: (F32, None), n_in: 68, ..plain });
    }
    for (i, ty) in [F32, F16, Q8_0, Q4_0, Q4_K, Q6_K, Q5_1].into_iter().enumerate() {
        let case = Case { types: (ty, Some(ty)), n_in: odd_width(ty), n_items: items[i % items.len()], ..plain };
        check(pass, Case { bias: true, ..case });
        check(pass, Case { gated: true, n_rows: [64, 65, 130, 17][i % 4], ..case });
    }
    // Two layouts.
    check(pass, Case { types: (Q4_K, Some(Q6_K)), n_in: 256, bias: true, ..plain });
}

#[test]
fn grouped_gemv() {
    check_all(false, &[1, 2, 7, 20]);
}

#[test]
fn grouped_gemm() {
    use TensorType::{F16, F32, Q4_0, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0};
    check_all(true, &[1, 8, 15, 17, 64, 130]);
    // Many items of each group: blocks of 16 tiles, for every layout.
    let Some(mut pass) = pass() else { return };
    for ty in [Q4_0, Q5_0, Q6_K] {
        let case = Case { types: (ty, Some(ty)), n_in: odd_width(ty), gemm: true, n_groups: 3, n_items: 400, ..PLAIN };
        check(&mut pass, case);
        check(&mut pass, Case { gated: true, n_rows: 67, ..case });
    }
    for ty in [F16, F32, Q8_0, Q4_K, Q5_K, Q5_1] {
        let case = Case { types: (ty, None), n_in: odd_width(ty), gemm: true, n_groups: 3, n_items: 400, ..PLAIN };
        check(&mut pass, Case { n_rows: 17, ..case });
    }
}
