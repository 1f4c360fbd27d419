//! `decode_attention` and `prefill_attention` against their twin, and against each other.

use crate::support::{
    GROUP, batch_with_pages, nmse, poisoned, random, run_sized, shuffled_pages, takes_fewer_cases, variants,
};
use metal_attention_model::CacheType::{self, F16, F32};
use metal_attention_model::RopeLayout::{Halves, Interleaved};
use metal_attention_model::{BatchToken, Rope};
use metal_attention_wgpu::kernels::{
    AttentionBuffers, AttentionShape, AttentionTwin, decode_attention, decode_attention_merge, n_splits, partial_len,
    prefill_attention, prefill_attention_cooperative, rope_append,
};
use metal_attention_wgpu::{BatchDims, WgpuDevice, wgpu};

/// The largest NMSE. Sums of some hundred products in 32-bit floats, and `exp` to a few units in the last place, give
/// an error of some 1e-7 of the result, 1e-13 when squared. With an F16 cache the twin rounds keys and values as the
/// kernels do. But a rotated key so near the midpoint of two F16 numbers that 32 and 64 bits round it differently (1 in
/// 2000) has an error of 2^-10 of itself. Where few positions share the weight, the result then has an error of up to
/// 1e-4, 1e-8 when squared.
fn tolerance(cache: CacheType) -> f64 {
    match cache {
        F32 => 1e-11,
        F16 => 1e-8,
    }
}

/// The largest NMSE on 16-bit matrix units. Queries have uniform errors of up to 2^-12 of themselves: scores of about 3
/// have errors of 4e-4, and so have the weights and the result, 2e-7 when squared. Weights rounded to 11 bits add a
/// tenth of that.
const MATRIX_UNIT_TOLERANCE: f64 = 1e-6;

/// The first and the last variant: with and without subgroups. Decode attention does not use matrix units, so that the
/// variants between them would repeat the first.
fn gpus() -> impl Iterator<Item = &'static WgpuDevice> {
    let all = variants();
    all.iter().enumerate().filter(|(i, _)| *i == 0 || *i + 1 == all.len()).map(|(_, gpu)| gpu)
}

/// The cache types of a test on device `i` of [`gpus`]: both, or one where [`takes_fewer_cases`].
fn caches(gpu: &WgpuDevice, i: usize) -> Vec<CacheType> {
    if takes_fewer_cases(gpu) { vec![[F32, F16][i]] } else { vec![F32, F16] }
}

/// A KV cache on the GPU and the twin's.
struct Pair<'a> {
    gpu: &'a WgpuDevice,
    shape: AttentionShape,
    twin: AttentionTwin,
    rope: wgpu::Buffer,
    norm: wgpu::Buffer,
    sinks_and_slopes: wgpu::Buffer,
    keys: wgpu::Buffer,
    values: wgpu::Buffer,
    /// The KV pages of each sequence.
    pages: Vec<Vec<u32>>,
    seed: u64,
}

fn shape(n_head: usize, n_head_kv: usize, head_dim: usize) -> AttentionShape {
    AttentionShape {
        n_head,
        n_head_kv,
        head_dim,
        scale: 1.0 / (head_dim as f32).sqrt(),
        soft_cap: None,
        sinks: false,
        window: None,
        n_ctx: 1100,
        group: GROUP,
        n_rot: head_dim,
        rope_layout: Interleaved,
        qk_norm_eps: None,
        gated: false,
        cache: F32,
        n_trailing: 0,
    }
}

fn token(seq: usize, pos: usize) -> BatchToken {
    BatchToken { id: 0, seq, pos, output: true }
}

impl<'a> Pair<'a> {
    /// Creates caches for `n_seq` sequences.
    fn new(gpu: &'a WgpuDevice, shape: AttentionShape, n_seq: usize) -> Self {
        let rope = Rope::new(shape.n_rot, shape.rope_layout, 10_000.0);
        let table = rope.rotation(None).table(shape.n_ctx);
        let norm: Vec<f32> = random(5, 2 * shape.head_dim).iter().map(|v| 1.0 + v / 2.0).collect();
        // Scores are about 3. Some sinks take a part of the weight, others nearly all.
        let sinks_and_slopes: Vec<f32> = random(6, 2 * shape.n_head).iter().map(|v| 8.0 * v).collect();
        // Rows that were not written are NaN, so that a kernel that reads them fails the test.
        let pages = shuffled_pages(n_seq, shape.n_ctx);
        let cache = vec![u32::MAX; shape.cache_bytes(pages.concat().len()).div_ceil(4) as usize];
        Self {
            gpu,
            shape,
            twin: AttentionTwin::new(shape, n_seq, &table, &norm, &sinks_and_slopes),
            rope: gpu.upload("rope", &table).unwrap(),
            norm: gpu.upload("norm", &norm).unwrap(),
            sinks_and_slopes: gpu.upload("sinks", &sinks_and_slopes).unwrap(),
            keys: gpu.upload("keys", &cache).unwrap(),
            values: gpu.upload("values", &cache).unwrap(),
            pages,
            seed: 0,
        }
    }

    /// Random queries, keys and values of a batch, `[n_tokens, qkv_row]`.
    fn qkv(&mut self, n_tokens: usize) -> Vec<f32> {
        self.seed += 1;
        random(self.seed, n_tokens * self.shape.qkv_row()).iter().map(|v| 3.0 * v).collect()
    }

    /// Runs the kernels of `how` over a batch. Returns attention's result, `[n_tokens, att_len]`.
    fn run(&self, tokens: &[BatchToken], qkv: &[f32], how: How) -> Vec<f32> {
        self.run_ahead(tokens, qkv, &vec![0; tokens.len()], how)
    }

    /// [`run`](Self::run) with the last tokens that tokens attend to.
    fn run_ahead(&self, tokens: &[BatchToken], qkv: &[f32], last_seen: &[u32], how: How) -> Vec<f32> {
        let (gpu, shape) = (self.gpu, &self.shape);
        let n = tokens.len();
        let attention_out = poisoned(gpu, n * shape.att_len());
        let partial = poisoned(gpu, n * partial_len(shape));
        let qkv = gpu.upload("qkv", qkv).unwrap();
        let batch = batch_with_pages(gpu, tokens, shape.n_ctx, &self.pages);
        let buffers = AttentionBuffers {
            qkv: &qkv,
            rope: &self.rope,
            qk_norm: shape.qk_norm_eps.is_some().then_some(&self.norm),
            sinks_and_slopes: Some(&self.sinks_and_slopes),
            keys: &self.keys,
            values: &self.values,
            attention_out: &attention_out,
            partial: &partial,
            last_seen: &gpu.upload("last seen", last_seen).unwrap(),
            batch: batch.buffer(),
        };
        let n_splits = n_splits(tokens.iter().map(|t| t.pos).max().unwrap());
        let mut dispatches = Vec::new();
        match how {
            How::Append => dispatches.push(rope_append(gpu, shape, &buffers).unwrap()),
            How::Prefill => {
                dispatches.push(rope_append(gpu, shape, &buffers).unwrap());
                dispatches.push(prefill_attention(gpu, shape, &buffers).unwrap());
            }
            How::Cooperative => {
                dispatches.push(rope_append(gpu, shape, &buffers).unwrap());
                dispatches.push(prefill_attention_cooperative(gpu, shape, &buffers).unwrap());
            }
            How::Decode => {
                dispatches.push(decode_attention(gpu, shape, &buffers).unwrap());
                dispatches.push(decode_attention_merge(gpu, shape, &buffers).unwrap());
            }
        }
        run_sized(gpu, &dispatches, BatchDims { n_tokens: n as u32, n_outputs: n as u32, n_runs: 1, n_splits });
        gpu.read(&attention_out, n * shape.att_len()).unwrap()
    }

    /// Appends random keys and values at positions `from..to` of a sequence to both caches.
    fn fill(&mut self, seq: usize, from: usize, to: usize) {
        if from < to {
            let tokens: Vec<_> = (from..to).map(|pos| token(seq, pos)).collect();
            let qkv = self.qkv(to - from);
            self.run(&tokens, &qkv, How::Append);
            self.twin.append(&tokens, &qkv);
        }
    }

    /// Runs a batch of random tokens on the GPU and in the twin, and compares the results.
    fn check(&mut self, tokens: &[BatchToken], how: How) {
        self.check_ahead(tokens, &vec![0; tokens.len()], how);
    }

    /// [`check`](Self::check) with the last tokens that tokens attend to.
    fn check_ahead(&mut self, tokens: &[BatchToken], last_seen: &[u32], how: How) {
        let qkv = self.qkv(tokens.len());
        let got = self.run_ahead(tokens, &qkv, last_seen, how);
        let want = self.twin.step_ahead(tokens, &qkv, last_seen);
        let error = nmse(&got, &want);
        let tolerance = match how {
            How::Cooperative if self.gpu.features().cooperative_f16 => MATRIX_UNIT_TOLERANCE,
            _ => tolerance(self.shape.cache),
        };
        assert!(error < tolerance, "{:?}, {how:?} {tokens:?}: {error:e}", self.shape);
    }
}

/// The kernels that run.
#[derive(Debug, Clone, Copy, PartialEq)]
enum How {
    /// `rope_append`, which writes the KV cache only.
    Append,
    /// `decode_attention`, which also writes the KV cache, and its merge.
    Decode,
    /// `rope_append` and `prefill_attention`.
    Prefill,
    /// `rope_append` and `prefill_attention_cooperative`, on matrix units or, without them, in plain loops.
    Cooperative,
}

#[test]
fn decode_attention_matches_its_twin_on_both_sides_of_tile_boundaries() {
    for (i, gpu) in gpus().enumerate() {
        for cache in caches(gpu, i) {
            let mut pair = Pair::new(gpu, AttentionShape { cache, ..shape(9, 3, 64) }, 1);
            let mut next = 0;
            for pos in [0, 1, 2, 127, 128, 129, 254, 255, 256, 257, 511, 512, 1000] {
                pair.fill(0, next, pos);
                pair.check(&[token(0, pos)], How::Decode);
                next = pos + 1;
            }
        }
    }
}

#[test]
fn prefill_attention_matches_its_twin_for_batches_of_every_size() {
    for (i, gpu) in gpus().enumerate() {
        for cache in caches(gpu, i) {
            let mut pair = Pair::new(gpu, AttentionShape { cache, ..shape(9, 3, 64) }, 1);
            let mut pos = 0;
            for n in [1, 2, 3, 7, 8, 33, 150] {
                let tokens: Vec<_> = (pos..pos + n).map(|pos| token(0, pos)).collect();
                pair.check(&tokens, How::Prefill);
                pos += n;
            }
        }
    }
}

/// Head sizes, group sizes from 1 to 16, sliding windows, both RoPE layouts, norms, soft caps, sinks and gates.
fn shapes() -> Vec<AttentionShape> {
    let base = AttentionShape { n_ctx: 300, ..shape(1, 1, 2) };
    let with = |n_head, n_head_kv, head_dim, window, n_rot, rope_layout, qk_norm_eps, cache| AttentionShape {
        n_head,
        n_head_kv,
        head_dim,
        scale: 1.0 / (head_dim as f32).sqrt(),
        window,
        n_rot,
        rope_layout,
        qk_norm_eps,
        cache,
        ..base
    };
    vec![
        with(2, 2, 20, None, 20, Interleaved, None, F32),
        with(4, 2, 32, Some(1), 32, Halves, None, F32),
        with(3, 1, 48, Some(100), 24, Halves, None, F16),
        with(8, 2, 64, Some(256), 64, Interleaved, Some(1e-6), F32),
        with(7, 1, 80, None, 80, Interleaved, None, F32),
        with(2, 2, 96, Some(130), 96, Halves, None, F32),
        with(8, 1, 128, None, 128, Halves, Some(1e-5), F16),
        with(3, 1, 256, None, 128, Interleaved, None, F32),
        with(16, 1, 36, Some(33), 36, Interleaved, None, F16),
        with(2, 1, 31, None, 30, Halves, Some(1e-5), F32),
        with(2, 1, 124, None, 124, Halves, None, F16),
        AttentionShape { soft_cap: Some(2.0), ..with(4, 2, 256, Some(150), 256, Halves, None, F32) },
        AttentionShape { sinks: true, ..with(8, 1, 64, Some(128), 64, Halves, None, F16) },
        AttentionShape { n_trailing: 37, ..with(4, 2, 20, None, 20, Interleaved, Some(1e-6), F32) },
        AttentionShape { sinks: true, soft_cap: Some(5.0), ..with(5, 1, 20, None, 20, Interleaved, None, F32) },
        AttentionShape { gated: true, ..with(4, 2, 64, None, 16, Halves, Some(1e-6), F32) },
        AttentionShape { gated: true, ..with(6, 1, 256, Some(140), 64, Halves, Some(1e-6), F16) },
        AttentionShape { gated: true, sinks: true, ..with(3, 1, 31, None, 30, Interleaved, None, F32) },
        AttentionShape { soft_cap: Some(4.0), ..with(3, 3, 80, None, 80, Halves, Some(1e-6), F32) },
    ]
}

/// All shapes on both devices; where [`takes_fewer_cases`], those of one `half` of the shapes, each on one device.
fn gpus_and_shapes(half: usize) -> impl Iterator<Item = (&'static WgpuDevice, AttentionShape)> {
    gpus().enumerate().flat_map(move |(second, gpu)| {
        let taken = move |i: usize| !takes_fewer_cases(gpu) || (i % 2, i / 2 % 2) == (second, half);
        shapes().into_iter().enumerate().filter(move |(i, _)| taken(*i)).map(move |(_, shape)| (gpu, shape))
    })
}

#[test]
fn decode_attention_matches_its_twin_for_all_shapes() {
    for (gpu, shape) in gpus_and_shapes(0) {
        let mut pair = Pair::new(gpu, shape, 3);
        // Sequences at different positions, not in the order of their numbers.
        pair.check(&[token(2, 0), token(0, 0)], How::Decode);
        pair.fill(0, 1, 128);
        pair.fill(2, 1, 255);
        pair.check(&[token(1, 0), token(2, 255), token(0, 128)], How::Decode);
        pair.check(&[token(0, 129), token(1, 1), token(2, 256)], How::Decode);
        pair.fill(1, 2, 299);
        pair.check(&[token(1, 299)], How::Decode);
    }
}

#[test]
fn prefill_attention_matches_its_twin_for_all_shapes() {
    for (gpu, shape) in gpus_and_shapes(1) {
        let mut pair = Pair::new(gpu, shape, 3);
        pair.fill(1, 0, 127);
        // Three sequences in one tile of queries, one of them twice.
        let mut tokens: Vec<_> = (0..5).map(|pos| token(0, pos)).collect();
        tokens.extend((127..140).map(|pos| token(1, pos)));
        tokens.extend((0..20).map(|pos| token(2, pos)));
        tokens.extend((5..7).map(|pos| token(0, pos)));
        tokens.push(token(1, 140));
        pair.check(&tokens, How::Prefill);
        pair.fill(1, 141, 299);
        pair.check(&[token(1, 299)], How::Prefill);
    }
}

#[test]
fn attention_on_matrix_units_matches_its_twin() {
    for gpu in variants().iter().filter(|gpu| (8..=64).contains(&gpu.features().subgroup_size)) {
        let base = AttentionShape { cache: F16, n_ctx: 300, ..shape(3, 1, 64) };
        let window = |head_dim, window| AttentionShape {
            window: Some(window),
            ..AttentionShape { head_dim, n_rot: head_dim, ..base }
        };
        let sinks = AttentionShape { sinks: true, soft_cap: Some(3.0), ..window(32, 60) };
        let gated = AttentionShape { gated: true, ..window(32, 50) };
        let beside = AttentionShape { n_trailing: 20, ..window(32, 40) };
        let capless = AttentionShape { soft_cap: None, ..sinks };
        let shapes = [window(32, 40), base, sinks, window(96, 1), gated, capless, beside];
        for shape in shapes.into_iter().step_by(if takes_fewer_cases(gpu) { 2 } else { 1 }) {
            // Plain loops use 32-bit floats in place of 16-bit ones, which need twice the shared memory.
            if !gpu.features().cooperative_f16 && shape.head_dim == 64 {
                continue;
            }
            let mut pair = Pair::new(gpu, shape, 3);
            pair.check(&[token(0, 0)], How::Cooperative);
            pair.fill(1, 0, 127);
            // Three sequences in one tile of queries, one of them twice.
            let mut tokens: Vec<_> = (1..5).map(|pos| token(0, pos)).collect();
            tokens.extend((127..140).map(|pos| token(1, pos)));
            tokens.extend((0..20).map(|pos| token(2, pos)));
            tokens.extend((5..7).map(|pos| token(0, pos)));
            tokens.push(token(1, 140));
            pair.check(&tokens, How::Cooperative);
        }
    }
}

#[test]
fn whole_spans_are_seen_by_all_their_inputs() {
    for gpu in variants() {
        for how in [How::Prefill, How::Cooperative] {
            if how == How::Cooperative && !(8..=64).contains(&gpu.features().subgroup_size) {
                continue;
            }
            // Spans longer and shorter than the window, and one that begins within a tile of queries.
            for window in [None, Some(20), Some(90)] {
                let shape = AttentionShape { cache: F16, n_ctx: 300, window, ..shape(3, 1, 32) };
                let mut pair = Pair::new(gpu, shape, 2);
                pair.fill(0, 0, 50);
                let ends = [(1, 0, 20, 12), (0, 50, 150, 149), (0, 150, 160, 0), (1, 20, 30, 29)];
                let all =
                    || ends.into_iter().flat_map(|(seq, from, to, last)| (from..to).map(move |pos| (seq, pos, last)));
                let tokens: Vec<_> = all().map(|(seq, pos, _)| token(seq, pos)).collect();
                let last_seen: Vec<u32> = all().map(|(.., last)| last).collect();
                pair.check_ahead(&tokens, &last_seen, how);
            }
        }
    }
}

#[test]
fn prefill_and_decode_agree() {
    for (i, gpu) in gpus().enumerate() {
        for cache in caches(gpu, i) {
            let shape = AttentionShape { cache, n_ctx: 300, window: Some(200), ..shape(4, 2, 64) };
            let (mut prefill, decode) = (Pair::new(gpu, shape, 2), Pair::new(gpu, shape, 2));
            let n = 270;
            let tokens: Vec<_> = (0..n).map(|pos| token(1, pos)).collect();
            let qkv = prefill.qkv(n);
            let at_once = prefill.run(&tokens, &qkv, How::Prefill);
            let rows = tokens.chunks(1).zip(qkv.chunks(shape.qkv_len()));
            let one_by_one: Vec<f32> = rows.flat_map(|(t, row)| decode.run(t, row, How::Decode)).collect();
            let error = nmse(&at_once, &one_by_one);
            assert!(error < tolerance(cache), "{shape:?}: {error:e}");

            // The KV caches are equal: values in all bits, keys up to the last bit.
            let n_words = shape.cache_bytes(prefill.pages.concat().len()) as usize / 4;
            let read = |buffer| gpu.read::<u32>(buffer, n_words).unwrap();
            assert!(read(&prefill.values) == read(&decode.values));
            match cache {
                F32 => {}
                F16 => {
                    let halves = |buffer| -> Vec<u16> { bytemuck::cast_slice(&read(buffer)).to_vec() };
                    for (a, b) in halves(&prefill.keys).into_iter().zip(halves(&decode.keys)) {
                        assert!(a.abs_diff(b) <= 1, "{a:#x} {b:#x}");
                    }
                }
            }
        }
    }
}

#[test]
fn extreme_scores_stay_finite() {
    for gpu in gpus() {
        let shape = AttentionShape { n_ctx: 40, scale: 1e6, ..shape(2, 1, 20) };
        for how in [How::Prefill, How::Decode] {
            // Scores of about 1e7 of either sign, so that the softmax selects one position.
            let mut pair = Pair::new(gpu, shape, 1);
            pair.fill(0, 0, 33);
            pair.check(&[token(0, 33)], how);
        }
    }
}

#[test]
fn heads_too_large_for_the_kernels_are_refused() {
    for gpu in gpus() {
        let shape = AttentionShape { n_ctx: 4, ..shape(1, 1, 260) };
        let buffer = gpu.buffer("unused", 16).unwrap();
        let (b, qk_norm, sinks_and_slopes) = (&buffer, None, None);
        let buffers = AttentionBuffers {
            qkv: b,
            rope: b,
            qk_norm,
            sinks_and_slopes,
            keys: b,
            values: b,
            attention_out: b,
            partial: b,
            last_seen: b,
            batch: b,
        };
        for refused in [decode_attention(gpu, &shape, &buffers), prefill_attention(gpu, &shape, &buffers)] {
            let error = refused.unwrap_err().to_string();
            assert_eq!(
                error,
                "attention cannot be put together: heads have 260 elements, and the kernels hold 256; run on the CPU with --device cpu"
            );
        }
    }
}
