//! Encoders of pictures (`encoder.cu`, `encoder_attention.cu`): patches, functions of elements, sums and orders of rows, the rotation of
//! heads, and attention.

use metal_attention_model::vision::{AttentionSegment, Colours, NO_ROW, PatchOrder, PatchSpec, Pixels};

use super::products::sum_error;
use super::rows::check_packed;
use super::{WIDE, assert_near, device, launch, packed_len, poisoned, random, read, to_f64};
use crate::args::{
    ElementsArgs, ElementsFunction, EncoderAttentionArgs, EncoderHeadsArgs, EncoderUnitsArgs, InterleaveArgs,
    PatchesArgs, RotateArgs, SumRowsArgs,
};
use crate::encoder::{AttentionPlan, IN_F32, f32_grid, row_grid};
use crate::kernels;
use crate::slice::DevicePtr;

/// The largest error relative to the root mean square: sums of some products in F32, and the functions of the device.
const ERROR: f64 = 3e-6;
/// The same where inputs are rounded to F16, 2^-11 of each.
const F16_ERROR: f64 = 4e-3;

/// Rows and elements of a row.
const SHAPES: [(usize, usize); 5] = [(1, 1), (3, 33), (70, 64), (7, 257), (2, 577)];

/// A number of multiprocessors with which a thread takes several rows.
const N_SM: usize = 1;

/// The error function, by its series.
fn erf(v: f64) -> f64 {
    if v.abs() > 5.0 {
        return v.signum();
    }
    let mut term = v;
    let mut sum = v;
    for n in 1..200 {
        term *= -v * v / f64::from(n);
        sum += term / f64::from(2 * n + 1);
    }
    sum * std::f64::consts::FRAC_2_SQRT_PI
}

/// The function of elements in F64.
pub(super) fn function(function: ElementsFunction, x: f64, y: f64, [a, b]: [f64; 2]) -> f64 {
    match function {
        ElementsFunction::Gelu => 0.5 * x * (1.0 + (0.797_884_560_802_865_4 * (x + 0.044_715 * x.powi(3))).tanh()) * y,
        ElementsFunction::GeluErf => 0.5 * x * (1.0 + erf(x * std::f64::consts::FRAC_1_SQRT_2)) * y,
        ElementsFunction::QuickGelu => x / (1.0 + (-1.702 * x).exp()) * y,
        ElementsFunction::Silu => x / (1.0 + (-x).exp()) * y,
        ElementsFunction::SquaredRelu => x.max(0.0).powi(2) * y,
        ElementsFunction::Add => x + y,
        ElementsFunction::Multiply => x * y,
        ElementsFunction::Scale => x * a,
        ElementsFunction::Clamp => x.max(a).min(b),
    }
}

#[test]
fn functions_of_elements_of_pictures() {
    let Some(gpu) = device() else { return };
    let functions = [
        ElementsFunction::Gelu,
        ElementsFunction::GeluErf,
        ElementsFunction::QuickGelu,
        ElementsFunction::Silu,
        ElementsFunction::SquaredRelu,
        ElementsFunction::Add,
        ElementsFunction::Multiply,
        ElementsFunction::Scale,
        ElementsFunction::Clamp,
    ];
    for (n_rows, width) in SHAPES {
        let x: Vec<f32> = random(1, n_rows * width).iter().map(|v| 6.0 * v).collect();
        let y = random(2, n_rows * width);
        let (x_buffer, y_buffer) = (gpu.upload("x", &x).unwrap(), gpu.upload("y", &y).unwrap());
        for of in functions {
            // Without a second operand, with a row for each row, and with one row for all. Only activations may have none.
            let without = match of {
                ElementsFunction::Add | ElementsFunction::Multiply => false,
                ElementsFunction::Gelu
                | ElementsFunction::GeluErf
                | ElementsFunction::QuickGelu
                | ElementsFunction::Silu
                | ElementsFunction::SquaredRelu
                | ElementsFunction::Scale
                | ElementsFunction::Clamp => true,
            };
            for stride in [None, Some(width), Some(0)].into_iter().filter(|stride| stride.is_some() || without) {
                let order = n_rows.div_ceil(8) as u32 | WIDE;
                let packed = poisoned(&gpu, packed_len(width, order) / 2);
                let out = poisoned(&gpu, n_rows * width);
                let args = ElementsArgs {
                    x: x_buffer.ptr(),
                    y: stride.map_or(DevicePtr::NULL, |_| y_buffer.ptr()),
                    out: out.ptr(),
                    packed: packed.ptr(),
                    n_rows: n_rows as u32,
                    width: width as u32,
                    y_stride: stride.unwrap_or(0) as u32,
                    function: of as u32,
                    a: -0.75,
                    b: 2.5,
                    n_token_tiles: order,
                    unused: 0,
                };
                let columns = width.next_multiple_of(64);
                launch(&gpu, kernels::ENCODER_ELEMENTS, row_grid(N_SM, n_rows, columns), &args);
                let at = |i: usize| {
                    let y = stride.map_or(1.0, |stride| f64::from(y[i / width * stride + i % width]));
                    function(of, f64::from(x[i]), y, [-0.75, 2.5])
                };
                let expected: Vec<f64> = (0..n_rows * width).map(at).collect();
                let got = read::<f32>(&gpu, &out, n_rows * width);
                let what = format!("{of:?} of {n_rows} rows, {width}, {stride:?}");
                assert_near(&got, &expected, width, ERROR, &what);
                check_packed(&read(&gpu, &packed, packed_len(width, order)), &got, width, order, &what);
            }
        }
    }
}

#[test]
fn patches_of_pictures() {
    let Some(gpu) = device() else { return };
    let colours = Colours { mean: [0.5, 0.25, 0.4], std: [0.5, 0.3, 0.2] };
    for (width, height, side) in [(1, 1, 1), (28, 14, 14), (33, 50, 16), (97, 8, 8)] {
        let rgb: Vec<u8> = random(1, 3 * width * height).iter().map(|v| (127.5 * v + 127.5) as u8).collect();
        for order in [PatchOrder::PixelFirst, PatchOrder::ColourFirst] {
            let pixels = Pixels { rgb: &rgb, width, height };
            let expected = PatchSpec { side, order }.cut(colours, &[pixels]);
            let (rgb, out) = (gpu.upload("pixels", &rgb).unwrap(), poisoned(&gpu, expected.len()));
            let args = PatchesArgs {
                rgb: rgb.ptr(),
                out: out.ptr(),
                width: width as u32,
                height: height as u32,
                side: side as u32,
                pixel_first: u32::from(order == PatchOrder::PixelFirst),
                mean: colours.mean,
                std: colours.std,
            };
            let n = 3 * side * side;
            launch(&gpu, kernels::ENCODER_PATCHES, row_grid(N_SM, expected.len() / n, n), &args);
            // The same bits: a value is computed with the same three operations.
            assert_eq!(read::<f32>(&gpu, &out, expected.len()), expected, "{width} x {height}, {side}, {order:?}");
        }
    }
}

#[test]
fn sums_of_rows_of_pictures() {
    let Some(gpu) = device() else { return };
    for (n_rows, width) in SHAPES {
        for n in [1, 4, 9] {
            let n_x = n_rows * n;
            let (x, weights) = (random(1, n_x * width), random(2, n * width));
            let rows: Vec<u32> = (0..n_x).map(|i| if i % 5 == 3 { NO_ROW } else { (i * 7 % n_x) as u32 }).collect();
            let (x_buffer, weights_buffer) = (gpu.upload("x", &x).unwrap(), gpu.upload("weights", &weights).unwrap());
            let rows_buffer = gpu.upload("rows", &rows).unwrap();
            for (ordered, weighted, divisor) in [(true, false, n as f32), (false, false, 1.0), (false, true, 1.0)] {
                // Columns beside others, which stay as they are.
                let stride = width + 3;
                let out = poisoned(&gpu, n_rows * stride);
                let args = SumRowsArgs {
                    x: x_buffer.ptr(),
                    rows: if ordered { DevicePtr::NULL } else { rows_buffer.ptr() },
                    weights: if weighted { weights_buffer.ptr() } else { DevicePtr::NULL },
                    out: out.slice().skip(2).ptr(),
                    n_rows: n_rows as u32,
                    width: width as u32,
                    n: n as u32,
                    out_stride: stride as u32,
                    divisor,
                    unused: 0,
                };
                launch(&gpu, kernels::ENCODER_SUM_ROWS, row_grid(N_SM, n_rows, width), &args);
                let at = |i: usize| -> f64 {
                    let terms = (0..n).map(|j| {
                        let row = if ordered { (i / width * n + j) as u32 } else { rows[i / width * n + j] };
                        let v = if row == NO_ROW { 0.0 } else { f64::from(x[row as usize * width + i % width]) };
                        if weighted { v * f64::from(weights[j * width + i % width]) } else { v }
                    });
                    terms.sum::<f64>() / f64::from(divisor)
                };
                let expected: Vec<f64> = (0..n_rows * width).map(at).collect();
                let all = read::<f32>(&gpu, &out, n_rows * stride);
                let got: Vec<f32> = all.chunks(stride).flat_map(|row| &row[2..2 + width]).copied().collect();
                let what = format!("{n_rows} sums of {n} rows of {width}, {ordered} {weighted}");
                assert_near(&got, &expected, width, ERROR, &what);
                let beside = all.chunks(stride).flat_map(|row| row[..2].iter().chain(&row[2 + width..]));
                assert!(beside.into_iter().all(|v| v.is_nan()), "{what}: other columns");
            }
        }
    }
}

#[test]
fn interleaved_rows_of_pictures() {
    let Some(gpu) = device() else { return };
    for (n_rows, n, part) in [(1, 1, 1), (3, 4, 5), (2, 9, 33), (5, 4, 80)] {
        let width = n * part;
        let x = random(1, n_rows * width);
        let (x_buffer, out) = (gpu.upload("x", &x).unwrap(), poisoned(&gpu, n_rows * width));
        let (n_rows32, width32) = (n_rows as u32, width as u32);
        let args = InterleaveArgs {
            x: x_buffer.ptr(),
            out: out.ptr(),
            n_rows: n_rows32,
            width: width32,
            n: n as u32,
            unused: 0,
        };
        launch(&gpu, kernels::ENCODER_INTERLEAVE, row_grid(N_SM, n_rows, width), &args);
        let at = |i: usize| x[i / width * width + i % n * part + i % width / n];
        let expected: Vec<f32> = (0..n_rows * width).map(at).collect();
        assert_eq!(read::<f32>(&gpu, &out, n_rows * width), expected, "{n_rows} rows of {n} times {part}");
    }
}

#[test]
fn rotated_heads_of_pictures() {
    let Some(gpu) = device() else { return };
    // Rows, heads, elements of a head, and of a block of pairs.
    for (n_rows, n_head, head_dim, block) in
        [(1, 1, 2, 2), (5, 3, 72, 72), (7, 2, 80, 40), (3, 4, 6, 2), (40, 5, 64, 64)]
    {
        let width = n_head * head_dim;
        let (x, table) = (random(1, n_rows * width), random(2, n_rows * head_dim));
        let (x_buffer, table_buffer) = (gpu.upload("x", &x).unwrap(), gpu.upload("table", &table).unwrap());
        let args = RotateArgs {
            x: x_buffer.ptr(),
            table: table_buffer.ptr(),
            n_rows: n_rows as u32,
            width: width as u32,
            head_dim: head_dim as u32,
            block: block as u32,
        };
        launch(&gpu, kernels::ENCODER_ROTATE, row_grid(N_SM, n_rows, width / 2), &args);
        let mut expected = to_f64(&x);
        for (row, x) in expected.chunks_mut(width).enumerate() {
            let angles = to_f64(&table[row * head_dim..][..head_dim]);
            for (head, i) in (0..n_head).flat_map(|head| (0..head_dim / 2).map(move |i| (head, i))) {
                let (of, in_half) = (i / (block / 2) * block, i % (block / 2));
                let (first, second) = (head * head_dim + of + in_half, head * head_dim + of + in_half + block / 2);
                let (cosine, sine) = (angles[of + 2 * in_half], angles[of + 2 * in_half + 1]);
                (x[first], x[second]) = (x[first] * cosine - x[second] * sine, x[first] * sine + x[second] * cosine);
            }
        }
        let what = format!("{n_rows} rows of {n_head} heads of {head_dim}, blocks of {block}");
        assert_near(&read::<f32>(&gpu, &x_buffer, n_rows * width), &expected, width, ERROR, &what);
    }
}

#[test]
fn attention_of_pictures() {
    let Some(gpu) = device() else { return };
    let segment = |queries: std::ops::Range<usize>, keys: std::ops::Range<usize>| AttentionSegment { queries, keys };
    // Segments of other lengths than tiles, next to each other; fewer keys than queries, and more; several stages of a ring.
    let of_pictures = [segment(0..1, 0..1), segment(1..66, 1..66), segment(66..150, 66..150)];
    let of_others = [segment(0..33, 3..40), segment(33..40, 40..41), segment(40..104, 41..170)];
    let of_many = [segment(0..200, 3..700), segment(200..201, 130..900), segment(201..210, 433..1100)];
    // Heads of queries, heads of keys, elements of a head.
    for (n_head, n_head_kv, head_dim) in
        [(2, 2, 2), (3, 1, 18), (4, 2, 64), (2, 2, 72), (2, 1, 80), (1, 1, 96), (2, 2, 128), (2, 1, 130), (1, 1, 256)]
    {
        for segments in [&of_pictures, &of_others, &of_many] {
            let (n_queries, n_keys) = (segments[2].queries.end, segments[2].keys.end);
            let (width, kv_width) = (n_head * head_dim, n_head_kv * head_dim);
            let q: Vec<f32> = random(1, n_queries * width).iter().map(|v| 3.0 * v).collect();
            let (k, v) = (random(2, n_keys * kv_width), random(3, n_keys * kv_width));
            let scale = 1.0 / (head_dim as f32).sqrt();
            let mut expected = vec![0.0; n_queries * width];
            for AttentionSegment { queries, keys } in segments {
                for (query, head) in queries.clone().flat_map(|query| (0..n_head).map(move |head| (query, head))) {
                    let of_kv = head / (n_head / n_head_kv) * head_dim;
                    let row =
                        |x: &[f32], i: usize, width: usize, first: usize| to_f64(&x[i * width + first..][..head_dim]);
                    let q = row(&q, query, width, head * head_dim);
                    let score = |key: usize| {
                        let k = row(&k, key, kv_width, of_kv);
                        (f64::from(scale) * q.iter().zip(&k).map(|(q, k)| q * k).sum::<f64>()).exp()
                    };
                    let weights: Vec<f64> = keys.clone().map(score).collect();
                    let sum: f64 = weights.iter().sum();
                    let out = &mut expected[query * width + head * head_dim..][..head_dim];
                    for (key, weight) in keys.clone().zip(&weights) {
                        let v = row(&v, key, kv_width, of_kv);
                        out.iter_mut().zip(&v).for_each(|(out, v)| *out += weight / sum * v);
                    }
                }
            }
            let upload = |values: &Vec<f32>| gpu.upload("rows", values).unwrap();
            let [q, k, v] = [&q, &k, &v].map(upload);
            // With warpgroup instructions where there are kernels for them; a tile is then longer than a segment.
            let many = [segment(0..128, 0..128)];
            let wide = gpu.summary().has_wgmma().then(|| AttentionPlan::new(head_dim, false, true, &many).unwrap());
            let others = [true, false].map(|exact| AttentionPlan::new(head_dim, exact, false, &[]).unwrap());
            for plan in others.into_iter().chain(wide) {
                let tiles = plan.tiles(segments);
                let tiles_buffer = gpu.upload("tiles", &tiles).unwrap();
                let out = poisoned(&gpu, n_queries * width);
                let what = format!("{n_head} heads of {head_dim}, {n_head_kv} of keys, {n_queries} queries, {plan:?}");
                let near = |got: &[f32], limit| assert_near(got, &expected, width, limit, &what);
                let plan = match plan {
                    AttentionPlan::OnUnits(plan) => plan,
                    AttentionPlan::F32 { head_dim } => {
                        let args = EncoderAttentionArgs {
                            q: q.ptr(),
                            k: k.ptr(),
                            v: v.ptr(),
                            out: out.ptr(),
                            tiles: tiles_buffer.ptr(),
                            n_queries: n_queries as u32,
                            n_keys: n_keys as u32,
                            width: width as u32,
                            kv_width: kv_width as u32,
                            head_dim: head_dim as u32,
                            scale,
                        };
                        launch(&gpu, IN_F32, f32_grid(head_dim, tiles.len(), n_head), &args);
                        // Sums over many keys round as often, and scores are sums as well.
                        let longest = segments.iter().map(|segment| segment.keys.len()).max().unwrap_or(0);
                        let limit = if longest > 256 { sum_error(longest) + sum_error(head_dim) } else { ERROR };
                        near(&read::<f32>(&gpu, &out, n_queries * width), limit);
                        continue;
                    }
                };
                let [k_heads, v_heads] = plan.heads_len(n_keys, n_head_kv).map(|n| poisoned(&gpu, n.div_ceil(2)));
                let args = EncoderHeadsArgs {
                    k: k.ptr(),
                    v: v.ptr(),
                    k_heads: k_heads.ptr(),
                    v_heads: v_heads.ptr(),
                    n_keys: n_keys as u32,
                    width: kv_width as u32,
                    head_dim: head_dim as u32,
                    padded: plan.padded as u32,
                };
                launch(&gpu, plan.heads, plan.heads_grid(N_SM, n_keys, n_head_kv), &args);
                let order = n_queries.div_ceil(8) as u32 | WIDE;
                let packed = poisoned(&gpu, packed_len(width, order) / 2);
                let args = EncoderUnitsArgs {
                    q: q.ptr(),
                    k_heads: k_heads.ptr(),
                    v_heads: v_heads.ptr(),
                    out: out.ptr(),
                    packed: packed.ptr(),
                    tiles: tiles_buffer.ptr(),
                    n_queries: n_queries as u32,
                    n_keys: n_keys as u32,
                    width: width as u32,
                    kv_width: kv_width as u32,
                    head_dim: head_dim as u32,
                    n_token_tiles: order,
                    scale,
                    unused: 0,
                };
                launch(&gpu, plan.entry, plan.grid(tiles.len(), n_head), &args);
                let got = read::<f32>(&gpu, &out, n_queries * width);
                near(&got, F16_ERROR);
                check_packed(&read(&gpu, &packed, packed_len(width, order)), &got, width, order, &what);
            }
        }
    }
}

#[test]
fn heads_of_pictures_without_kernels_are_refused() {
    for (head_dim, exact) in [(0, true), (63, false), (257, true), (258, false)] {
        assert!(AttentionPlan::new(head_dim, exact, true, &[]).is_err(), "{head_dim}");
    }
}
