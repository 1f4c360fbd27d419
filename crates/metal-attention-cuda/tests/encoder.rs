//! Encoders of pictures on the GPU agree with those of the CPU: small ones with random weights, which have every stage and every kind
//! of weights among them. Without a GPU, or the software CUDA device of `software/`, the test is skipped.

use std::sync::Arc;

use metal_attention_cpu::{CpuEncoder, CpuOptions};
use metal_attention_cuda::{CudaDevice, CudaEncoder, CudaError};
use metal_attention_gguf::blocks::random_blocks;
use metal_attention_gguf::{Tensor, TensorType};
use metal_attention_model::vision::{
    Angles, Axis, Block, Clamp, Colours, EncodedPicture, Encoder, EncoderActivation, EncoderAttention,
    EncoderFeedForward, EncoderLinear, EncoderNorm, FileWeights, Interpolation, MergeOrder, PatchOrder, PatchSpec,
    Pixels, PositionTable, QueryAttention, RelativeScores, Resampler, RowOrder, Stage,
};
use metal_attention_model::{NormKind, Watch};

/// Largest normalised mean square error with F32 inputs, of a dozen products behind each other.
const EXACT: f64 = 1e-12;
/// The same with inputs that are rounded to F16 (a relative error of 2^-11 at most).
const ROUNDED: f64 = 1e-6;

/// The colours of all encoders.
const COLOURS: Colours = Colours { mean: [0.5, 0.4, 0.6], std: [0.2, 0.3, 0.25] };

/// Makes random weights, each from the next seed.
struct Random(u64);

impl Random {
    fn numbers(&mut self, n: usize, size: f32) -> Vec<f32> {
        self.0 += 1;
        bytemuck::pod_collect_to_vec(&random_blocks(TensorType::F32, n, self.0, size))
    }

    /// Factors around 1.
    fn factors(&mut self, n: usize) -> Vec<f32> {
        self.numbers(n, 0.3).iter().map(|v| 1.0 + v).collect()
    }

    fn linear(&mut self, ty: TensorType, n_in: usize, n_out: usize) -> EncoderLinear<FileWeights> {
        self.0 += 1;
        let bytes = random_blocks(ty, n_in * n_out, self.0, 1.7 / (n_in as f32).sqrt());
        let matrix = Tensor::in_memory("w", [n_in, n_out], ty, &bytes);
        let bias = (!self.0.is_multiple_of(3)).then(|| self.numbers(n_out, 0.2));
        EncoderLinear { matrix, bias, clamp: None, n_out }
    }

    fn norm(&mut self, kind: NormKind, width: usize) -> EncoderNorm<FileWeights> {
        let bias = self.0.is_multiple_of(2).then(|| self.numbers(width, 0.2));
        EncoderNorm { kind, eps: 1e-6, width, weight: self.factors(width), bias }
    }

    /// Attention of `n_head` heads of queries and `n_head_kv` of keys, with norms of heads where there is a rotation.
    fn attention(
        &mut self,
        ty: TensorType,
        [width, n_head, n_head_kv, head_dim]: [usize; 4],
        rope: Option<Angles>,
        window: Option<usize>,
    ) -> EncoderAttention<FileWeights> {
        let with_norms = rope.is_some();
        let mut norm = || with_norms.then(|| self.norm(NormKind::Rms, head_dim));
        let [q_norm, k_norm, v_norm] = [norm(), norm(), norm()];
        EncoderAttention {
            q: self.linear(ty, width, n_head * head_dim),
            k: self.linear(ty, width, n_head_kv * head_dim),
            v: self.linear(ty, width, n_head_kv * head_dim),
            q_norm,
            k_norm,
            v_norm,
            n_head,
            head_dim,
            scale: 1.0 / (head_dim as f32).sqrt(),
            rope,
            window,
            causal_others: false,
            relative: Vec::new(),
            out: self.linear(ty, n_head * head_dim, width),
        }
    }

    fn plain(
        &mut self,
        ty: TensorType,
        width: usize,
        activation: EncoderActivation,
    ) -> EncoderFeedForward<FileWeights> {
        let (up, down) = (self.linear(ty, width, 2 * width), self.linear(ty, 2 * width, width));
        EncoderFeedForward::Plain { up, activation, down }
    }

    fn gated(
        &mut self,
        ty: TensorType,
        width: usize,
        activation: EncoderActivation,
    ) -> EncoderFeedForward<FileWeights> {
        let (gate, up) = (self.linear(ty, width, 2 * width), self.linear(ty, width, 2 * width));
        EncoderFeedForward::Gated { gate, up, activation, down: self.linear(ty, 2 * width, width) }
    }

    /// A block, with norms after attention and the feed-forward if `all`, else with factors on their columns.
    fn block(
        &mut self,
        kind: NormKind,
        width: usize,
        attention: EncoderAttention<FileWeights>,
        feed_forward: EncoderFeedForward<FileWeights>,
        all: bool,
    ) -> Stage<FileWeights> {
        Stage::Block(Box::new(Block {
            attention_norm: self.norm(kind, width),
            attention,
            attention_post_norm: all.then(|| self.norm(kind, width)),
            attention_scale: (!all).then(|| self.factors(width)),
            feed_forward_norm: self.norm(kind, width),
            feed_forward,
            feed_forward_post_norm: all.then(|| self.norm(kind, width)),
            feed_forward_scale: (!all).then(|| self.factors(width)),
            output_scale: if all { 0.75 } else { 1.0 },
        }))
    }

    fn positions(&mut self, width: usize, size: [usize; 2], interpolation: Interpolation) -> Stage<FileWeights> {
        let rows = self.numbers(size[0] * size[1] * width, 0.5);
        Stage::positions(PositionTable { rows, width, size, interpolation })
    }
}

/// Heads of 72 elements, a class token, and rows of several layers (CLIP, SigLIP).
fn with_class_token() -> Encoder<FileWeights> {
    let (r, width) = (&mut Random(100), 144);
    let clamp = Some(Clamp { input: [-0.8, 0.9], output: [-1.1, 1.0] });
    let quick = EncoderActivation::QuickGelu;
    let heads = [width, 2, 2, 72];
    let mut stages = vec![Stage::Linear(r.linear(TensorType::F16, 3 * 14 * 14, width))];
    stages.push(Stage::Others { before: r.numbers(width, 1.0), after: Vec::new() });
    stages.push(r.positions(width, [5, 4], Interpolation::Cubic));
    stages.push(Stage::Norm(r.norm(NormKind::Layer, width)));
    let (attention, feed_forward) =
        (r.attention(TensorType::F16, heads, None, None), r.plain(TensorType::BF16, width, quick));
    stages.push(r.block(NormKind::Layer, width, attention, feed_forward, false));
    let kept = vec![Stage::Norm(r.norm(NormKind::Layer, width)), Stage::Linear(r.linear(TensorType::F32, width, 50))];
    stages.push(Stage::Feature(kept));
    let feed_forward = r.plain(TensorType::F32, width, EncoderActivation::Gelu);
    let attention = r.attention(TensorType::F32, heads, None, None);
    stages.push(r.block(NormKind::Layer, width, attention, feed_forward, true));
    stages.extend([Stage::JoinFeatures { with_rows: true }, Stage::DropOthers, Stage::Pool { side: 2 }]);
    stages.push(Stage::Linear(EncoderLinear { clamp, ..r.linear(TensorType::F32, width + 50, 77) }));
    stages.extend([Stage::Activation(EncoderActivation::GeluErf), Stage::Scale(1.5)]);
    stages.extend([Stage::ScaleColumns(r.factors(77)), Stage::AddRow(r.numbers(77, 1.0))]);
    let patch = PatchSpec { side: 14, order: PatchOrder::ColourFirst };
    Encoder { colours: COLOURS, patch, stages, n_embd: 77, n_deepstack: 0 }
}

/// Windows, rotations, norms of heads and fewer heads of keys, with quantised weights (Qwen2.5-VL, Pixtral).
fn with_windows() -> Encoder<FileWeights> {
    let (r, width, silu) = (&mut Random(200), 64, EncoderActivation::Silu);
    let mut stages = vec![Stage::Linear(r.linear(TensorType::F32, 3 * 4 * 4, width))];
    stages.push(r.positions(width, [2, 16], Interpolation::Axes));
    stages.push(Stage::Reorder(RowOrder::Windows { window: 4, block: 2 }));
    let angles = [
        Angles::of_halves(16),
        Angles::of_neighbours(16, [Axis::X, Axis::Y], [0.0, 2.0]),
        Angles::within_halves(16, 100.0),
    ];
    for (i, rope) in angles.into_iter().enumerate() {
        let window = [Some(4), None, Some(3)][i];
        let attention = r.attention(TensorType::Q8_0, [width, 4, 2, 16], Some(rope), window);
        let feed_forward = r.gated(TensorType::Q5_0, width, silu);
        stages.push(r.block(NormKind::Rms, width, attention, feed_forward, i == 1));
    }
    stages.extend([
        Stage::Reorder(RowOrder::RowMajor),
        Stage::RowBreaks { row: r.numbers(width, 1.0), after_last: false },
        Stage::DropOthers,
    ]);
    stages.push(Stage::Merge { side: 2, order: MergeOrder::ValueFirst });
    stages.push(Stage::Norm(r.norm(NormKind::Rms, 4 * width)));
    stages.push(Stage::Linear(r.linear(TensorType::Q8_0, 4 * width, 96)));
    let feed_forward = r.plain(TensorType::Q4_0, 96, EncoderActivation::Gelu);
    stages.push(Stage::Sum([vec![Stage::FeedForward(feed_forward)], Vec::new()]));
    stages.push(Stage::Attention(Box::new(r.attention(TensorType::F16, [96, 3, 3, 130], None, None))));
    stages.push(Stage::RowBreaks { row: r.numbers(96, 1.0), after_last: false });
    let patch = PatchSpec { side: 4, order: PatchOrder::PixelFirst };
    Encoder { colours: COLOURS, patch, stages, n_embd: 96, n_deepstack: 0 }
}

/// Convolutions, attention to a coarser grid, and learned queries (MobileNet V5, MiniCPM-V).
fn with_convolutions() -> Encoder<FileWeights> {
    let (r, width, ty) = (&mut Random(300), 36, TensorType::F32);
    let mut stages = vec![Stage::Unfold { side: 3, stride: 2, centred: false }, Stage::Linear(r.linear(ty, 27, width))];
    stages.push(Stage::Activation(EncoderActivation::GeluErf));
    stages.push(Stage::Depthwise { side: 5, stride: 1, kernel: r.numbers(25 * width, 0.4) });
    stages.push(Stage::Norm(r.norm(NormKind::Rms, width)));
    let mut coarser = || {
        let kernel = r.numbers(9 * width, 0.6);
        vec![Stage::Depthwise { side: 3, stride: 2, kernel }, Stage::Linear(r.linear(ty, width, 32))]
    };
    let (k, v) = (coarser(), coarser());
    let (q, out) = (r.linear(ty, width, 3 * 32), r.linear(ty, 3 * 32, width));
    let attention = QueryAttention { q, k, v, head_dim: 32, out };
    stages.push(Stage::Sum([vec![Stage::QueryAttention(Box::new(attention))], Vec::new()]));
    stages.extend([Stage::Enlarge { factor: 2 }, Stage::Merge { side: 4, order: MergeOrder::Transposed }]);
    stages.push(Stage::Others { before: Vec::new(), after: r.numbers(16 * width, 1.0) });
    stages.push(Stage::DropOthers);
    let width = 16 * width;
    stages.push(Stage::Resampler(Box::new(Resampler {
        queries: r.numbers(7 * 64, 1.0),
        input: r.linear(ty, width, 64),
        input_norm: r.norm(NormKind::Layer, 64),
        q: r.linear(ty, 64, 64),
        k: r.linear(ty, 64, 64),
        v: r.linear(ty, 64, 64),
        n_head: 2,
        head_dim: 32,
        out: r.linear(ty, 64, 40),
    })));
    let patch = PatchSpec { side: 1, order: PatchOrder::ColourFirst };
    Encoder { colours: COLOURS, patch, stages, n_embd: 40, n_deepstack: 0 }
}

/// Squares below each other, windows that are filled up, scores by distance, and rows around those of patches (SAM).
fn with_distances() -> Encoder<FileWeights> {
    let (r, ty, width) = (&mut Random(500), TensorType::F16, 64);
    let attention = |r: &mut Random, sides: &[usize]| {
        let relative = sides.iter().map(|&side| RelativeScores { side, matrix: r.linear(ty, 32, 2 * (2 * side - 1)) });
        let relative = relative.collect();
        let attention = EncoderAttention { relative, ..r.attention(ty, [width, 2, 2, 32], None, None) };
        Stage::Attention(Box::new(attention))
    };
    let near = Stage::Windows { side: 3, stages: vec![attention(r, &[3])] };
    let far = attention(r, &[4, 8]);
    let squares = vec![
        Stage::Linear(r.linear(ty, 12, width)),
        Stage::Sum([Vec::new(), vec![Stage::Norm(r.norm(NormKind::Layer, width)), near]]),
        Stage::Sum([Vec::new(), vec![Stage::Norm(r.norm(NormKind::Layer, width)), far]]),
        Stage::Unfold { side: 3, stride: 2, centred: true },
        Stage::Linear(r.linear(ty, 9 * width, 32)),
        Stage::Activation(EncoderActivation::SquaredRelu),
    ];
    let stages = vec![
        Stage::Squares(squares),
        Stage::RowBreaks { row: r.numbers(32, 1.0), after_last: true },
        Stage::Separator { row: r.numbers(32, 1.0), ny: 4 },
        Stage::Others { before: r.numbers(3 * 32, 1.0), after: r.numbers(32, 1.0) },
        Stage::Linear(r.linear(ty, 32, 40)),
    ];
    let patch = PatchSpec { side: 2, order: PatchOrder::ColourFirst };
    Encoder { colours: COLOURS, patch, stages, n_embd: 40, n_deepstack: 0 }
}

/// The normalised mean square error of all rows.
fn error(got: &[EncodedPicture], expected: &[EncodedPicture]) -> f64 {
    let (mut errors, mut squares) = (0.0, 0.0);
    assert_eq!(got.len(), expected.len());
    for (got, expected) in got.iter().zip(expected) {
        assert_eq!(
            (got.nx, got.ny, got.rows.len(), got.deepstack.len()),
            (expected.nx, expected.ny, expected.rows.len(), expected.deepstack.len())
        );
        let all = |picture: &EncodedPicture| [&picture.rows[..], &picture.deepstack.concat()].concat();
        for (got, expected) in all(got).iter().zip(&all(expected)) {
            errors += (f64::from(*got) - f64::from(*expected)).powi(2);
            squares += f64::from(*expected).powi(2);
        }
    }
    errors / squares
}

/// A name, an encoder, and the patches of two pictures: columns and rows.
type Case = (&'static str, fn() -> Encoder<FileWeights>, [[usize; 2]; 2]);

/// The device under test, if there is one.
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

#[test]
fn cuda_encoders_refuse_heads_without_kernels() {
    let Some(gpu) = device() else { return };
    for head_dim in [33, 258] {
        let r = &mut Random(1);
        let attention = Stage::Attention(Box::new(r.attention(TensorType::F32, [32, 1, 1, head_dim], None, None)));
        let stages = vec![Stage::Linear(r.linear(TensorType::F32, 3, 32)), Stage::Sum([vec![attention], Vec::new()])];
        let patch = PatchSpec { side: 1, order: PatchOrder::PixelFirst };
        let encoder = Encoder { colours: COLOURS, patch, stages, n_embd: 32, n_deepstack: 0 };
        let why = CudaEncoder::new(Arc::clone(&gpu), encoder, false).map(|_| ()).unwrap_err();
        assert!(matches!(why, CudaError::UnsupportedPart { .. }), "{why}");
    }
}

#[test]
fn cuda_encoders_agree_with_those_of_the_cpu() {
    let Some(gpu) = device() else { return };
    let cpu = CpuOptions { n_threads: 2, ..Default::default() };
    let cases: [Case; 4] = [
        ("with a class token", with_class_token, [[4, 6], [10, 8]]),
        ("with windows", with_windows, [[8, 6], [12, 14]]),
        ("with convolutions", with_convolutions, [[16, 12], [24, 28]]),
        ("with distances", with_distances, [[4, 12], [8, 8]]),
    ];
    for (name, encoder, sizes) in cases {
        let side = encoder().patch.side;
        let sizes = sizes.map(|size| size.map(|n| n * side));
        let bytes = sizes.map(|[width, height]| {
            Random(width as u64)
                .numbers(3 * width * height, 1.0)
                .into_iter()
                .map(|v| (128.0 + 60.0 * v) as u8)
                .collect::<Vec<_>>()
        });
        let pictures: Vec<_> =
            sizes.iter().zip(&bytes).map(|(&[width, height], rgb)| Pixels { rgb, width, height }).collect();
        let expected = CpuEncoder::new(&cpu, encoder(), true).unwrap().encode(&pictures).unwrap();
        for (exact, limit) in [(true, EXACT), (false, ROUNDED)] {
            let mut on_gpu = CudaEncoder::new(Arc::clone(&gpu), encoder(), exact).unwrap();
            let got = on_gpu.encode(&pictures).unwrap();
            let off = error(&got, &expected);
            assert!(off <= limit, "{name}, exact {exact}: NMSE {off:e}");
            assert!(on_gpu.encode(&[]).unwrap().is_empty(), "no pictures");
            // A picture by itself gives the same rows, and again.
            let again = on_gpu.encode(&pictures[1..]).unwrap();
            let off = error(&again, &expected[1..]);
            assert!(off <= limit, "{name}, exact {exact}, alone: NMSE {off:e}");
        }
    }
}
