//! `segment_attention` against its twin, in plain loops and on matrix units.

use std::ops::Range;

use crate::support::{Elements, nmse, on_variants, random, run, variants};
use metal_attention_model::vision::AttentionSegment;
use metal_attention_wgpu::WgpuError;
use metal_attention_wgpu::kernels::{
    SegmentAttentionRows, SegmentAttentionShape, segment_attention, segment_attention_cooperative,
    segment_attention_twin,
};

fn shape(n_head: usize, n_head_kv: usize, head_dim: usize) -> SegmentAttentionShape {
    SegmentAttentionShape { n_head, n_head_kv, head_dim, scale: 3.0 / (head_dim as f32).sqrt() }
}

fn segment(queries: Range<usize>, keys: Range<usize>) -> AttentionSegment {
    AttentionSegment { queries, keys }
}

/// The head `head` of `rows` of `width` elements.
fn head(x: &[f32], width: usize, rows: &Range<usize>, head: usize, head_dim: usize) -> Vec<f32> {
    rows.clone().flat_map(|row| x[row * width + head * head_dim..][..head_dim].to_vec()).collect()
}

#[test]
fn attention_of_segments_matches_its_twin() {
    let windows = |n: usize, each: usize| -> Vec<AttentionSegment> {
        (0..n).step_by(each).map(|first| first..n.min(first + each)).map(|rows| segment(rows.clone(), rows)).collect()
    };
    let cases = [
        (shape(1, 1, 1), windows(1, 1)),
        (shape(3, 1, 6), windows(37, 16)),
        (shape(2, 2, 32), windows(70, 70)),
        (shape(4, 2, 36), windows(33, 7)),
        (shape(4, 4, 64), windows(100, 90)),
        (shape(3, 1, 20), vec![segment(3..40, 5..90), segment(40..41, 0..1)]),
        (shape(16, 16, 72), windows(150, 100)),
        (shape(2, 1, 80), vec![segment(0..5, 10..131), segment(5..40, 0..10)]),
        (shape(1, 1, 128), windows(65, 65)),
        (shape(2, 1, 250), windows(40, 40)),
        (shape(1, 1, 256), vec![segment(2..20, 0..9)]),
    ];
    let numbers: Vec<usize> = (0..cases.len()).collect();
    for (gpu, i) in on_variants(&numbers) {
        let (shape, segments) = &cases[i];
        let &SegmentAttentionShape { n_head, n_head_kv, head_dim, scale } = shape;
        let end = |rows: fn(&AttentionSegment) -> &Range<usize>| segments.iter().map(|s| rows(s).end).max().unwrap();
        let (n_queries, n_keys) = (end(|s| &s.queries), end(|s| &s.keys));
        let (width, kv_width) = (n_head * head_dim, n_head_kv * head_dim);
        let (q, k, v) = (random(1, n_queries * width), random(2, n_keys * kv_width), random(3, n_keys * kv_width));
        let [gq, gk, gv] = [&q, &k, &v].map(|v| Elements::new(gpu, v));
        let mut want = vec![0.0; n_queries * width];
        for (AttentionSegment { queries, keys }, h) in segments.iter().flat_map(|s| (0..n_head).map(move |h| (s, h))) {
            let kv_head = h * n_head_kv / n_head;
            let q = head(&q, width, queries, h, head_dim);
            let [k, v] = [&k, &v].map(|x| head(x, kv_width, keys, kv_head, head_dim));
            let rows = segment_attention_twin(head_dim, scale, &q, &k, &v);
            for (row, result) in queries.clone().zip(rows.chunks_exact(head_dim)) {
                want[row * width + h * head_dim..][..head_dim].copy_from_slice(result);
            }
        }
        for on_units in [false, true] {
            // The kernel on matrix units takes heads of whole vectors, and subgroups of one size. Plain loops in their place need twice
            // the workgroup memory.
            let features = gpu.features();
            let longest = if features.cooperative_f16 { 128 } else { 64 };
            if on_units && (head_dim % 4 != 0 || head_dim > longest || !(8..=64).contains(&features.subgroup_size)) {
                continue;
            }
            let result = Elements::new(gpu, &vec![0.0; n_queries * width]);
            let rows = SegmentAttentionRows { q: &gq, k: &gk, v: &gv, result: &result };
            let kernel = if on_units { segment_attention_cooperative } else { segment_attention };
            run(gpu, &[kernel(gpu, *shape, segments, rows).unwrap()], 1);
            let error = nmse(&result.read(gpu), &want);
            // As prefill attention with an F32 cache. On matrix units queries, keys, values and weights have errors of up to 2^-12
            // of themselves.
            let most = if on_units && gpu.features().cooperative_f16 { 1e-6 } else { 1e-11 };
            assert!(error < most, "{shape:?}, {segments:?}, on units {on_units}: {error:e}");
        }
    }
}

#[test]
fn large_scores_do_not_overflow() {
    let gpu = &variants()[0];
    let shape = SegmentAttentionShape { scale: 1e3, ..shape(1, 1, 4) };
    let (q, v) = (vec![1.0; 4], random(3, 4 * 40));
    let mut k = vec![-1.0; 4 * 40];
    k[4 * 23..][..4].fill(1.0);
    let [gq, gk, gv] = [&q, &k, &v].map(|v| Elements::new(gpu, v));
    let result = Elements::poisoned(gpu, 4);
    let rows = SegmentAttentionRows { q: &gq, k: &gk, v: &gv, result: &result };
    run(gpu, &[segment_attention(gpu, shape, &[segment(0..1, 0..40)], rows).unwrap()], 1);
    assert_eq!(result.read(gpu), v[4 * 23..][..4]);
}

#[test]
fn segments_outside_the_rows_and_unknown_heads_are_refused() {
    let gpu = &variants()[0];
    let x = Elements::new(gpu, &[0.0; 4 * 600]);
    let rows = SegmentAttentionRows { q: &x, k: &x, v: &x, result: &x };
    let error = |shape, segment: AttentionSegment| {
        for kernel in [segment_attention, segment_attention_cooperative] {
            let error = kernel(gpu, shape, std::slice::from_ref(&segment), rows).unwrap_err();
            assert!(matches!(error, WgpuError::Mismatch { .. }), "{shape:?}: {error}");
        }
    };
    error(shape(1, 1, 4), segment(0..601, 0..600));
    error(shape(1, 1, 4), segment(0..600, 0..601));
    error(shape(1, 1, 4), segment(0..1, 5..5));
    error(shape(3, 2, 4), segment(0..1, 0..1));
    error(shape(1, 0, 4), segment(0..1, 0..1));
    error(shape(1, 1, 0), segment(0..1, 0..1));
    error(shape(1, 1, 260), segment(0..1, 0..1));
}
