//! [`WgpuEncoder`] against the encoder of the CPU, over all stages.

use std::sync::{Arc, Mutex, PoisonError};

use crate::support::{nmse, open, random};
use metal_attention_cpu::{CpuEncoder, CpuOptions};
use metal_attention_gguf::{Tensor, TensorType};
use metal_attention_model::vision::{
    Angles, Axis, Block, Clamp, Colours, EncodedPicture, Encoder, EncoderActivation, EncoderAttention,
    EncoderFeedForward, EncoderLinear, EncoderNorm, FileWeights, Interpolation, MergeOrder, PatchOrder, PatchSpec,
    Pixels, PositionTable, QueryAttention, RelativeScores, Resampler, RowOrder, Stage,
};
use metal_attention_model::{NormKind, Watch};
use metal_attention_wgpu::{WgpuDevice, WgpuEncoder, WgpuError, WgpuOptions};

type Stages = Vec<Stage<FileWeights>>;

/// Makes random weights, different ones each time.
struct Weights {
    ty: TensorType,
    seed: u64,
}

impl Weights {
    fn new(ty: TensorType) -> Self {
        Self { ty, seed: 100 }
    }

    /// Numbers in `-size..size`.
    fn numbers(&mut self, n: usize, size: f32) -> Vec<f32> {
        self.seed += 1;
        random(self.seed, n).iter().map(|v| v * size).collect()
    }

    fn linear_of(&mut self, ty: TensorType, n_in: usize, n_out: usize) -> EncoderLinear<FileWeights> {
        let values = self.numbers(n_in * n_out, 2.0 / (n_in as f32).sqrt());
        let mut bytes = Vec::new();
        ty.quantize(&values, &mut bytes).unwrap();
        let matrix = Tensor::in_memory("w", [n_in, n_out], ty, &bytes);
        EncoderLinear { matrix, bias: Some(self.numbers(n_out, 0.3)), clamp: None, n_out }
    }

    fn linear(&mut self, n_in: usize, n_out: usize) -> EncoderLinear<FileWeights> {
        self.linear_of(self.ty, n_in, n_out)
    }

    fn norm(&mut self, kind: NormKind, width: usize, bias: bool) -> EncoderNorm<FileWeights> {
        let weight = self.numbers(width, 0.5).iter().map(|v| 1.0 + v).collect();
        EncoderNorm { kind, eps: 1e-5, width, weight, bias: bias.then(|| self.numbers(width, 0.2)) }
    }

    /// Attention of rows of `width` elements, with as many KV heads as heads or with `n_head_kv`.
    fn attention(&mut self, width: usize, head_dim: usize, n_head_kv: usize) -> EncoderAttention<FileWeights> {
        EncoderAttention {
            q: self.linear(width, width),
            k: self.linear(width, n_head_kv * head_dim),
            v: self.linear(width, n_head_kv * head_dim),
            q_norm: None,
            k_norm: None,
            v_norm: None,
            n_head: width / head_dim,
            head_dim,
            scale: 1.0 / (head_dim as f32).sqrt(),
            rope: None,
            window: None,
            causal_others: false,
            relative: Vec::new(),
            out: self.linear(width, width),
        }
    }

    fn block(&mut self, width: usize, head_dim: usize) -> Block<FileWeights> {
        Block {
            attention_norm: self.norm(NormKind::Layer, width, true),
            attention: self.attention(width, head_dim, width / head_dim),
            attention_post_norm: None,
            attention_scale: None,
            feed_forward_norm: self.norm(NormKind::Layer, width, true),
            feed_forward: EncoderFeedForward::Plain {
                up: self.linear(width, 96),
                activation: EncoderActivation::Gelu,
                down: self.linear(96, width),
            },
            feed_forward_post_norm: None,
            feed_forward_scale: None,
            output_scale: 1.0,
        }
    }

    /// The parts that only some families have.
    fn rich_block(&mut self, width: usize, head_dim: usize) -> Block<FileWeights> {
        let mut attention = self.attention(width, head_dim, 1);
        attention.q_norm = Some(self.norm(NormKind::Rms, head_dim, false));
        attention.k_norm = Some(self.norm(NormKind::Rms, head_dim, false));
        attention.v_norm = Some(self.norm(NormKind::Rms, head_dim, true));
        attention.rope = Some(Angles::of_halves(head_dim));
        let clamp = Clamp { input: [-0.8, f32::INFINITY], output: [-1.5, 0.9] };
        attention.q.clamp = Some(clamp);
        attention.out.clamp = Some(Clamp { input: [f32::NEG_INFINITY, f32::INFINITY], ..clamp });
        Block {
            attention_norm: self.norm(NormKind::Rms, width, false),
            attention,
            attention_post_norm: Some(self.norm(NormKind::Rms, width, false)),
            attention_scale: Some(self.numbers(width, 1.0)),
            feed_forward_norm: self.norm(NormKind::Rms, width, false),
            feed_forward: EncoderFeedForward::Gated {
                gate: self.linear(width, 64),
                up: self.linear(width, 64),
                activation: EncoderActivation::Silu,
                down: self.linear(64, width),
            },
            feed_forward_post_norm: Some(self.norm(NormKind::Rms, width, false)),
            feed_forward_scale: Some(self.numbers(width, 1.0)),
            output_scale: 0.7,
        }
    }

    fn positions(&mut self, width: usize) -> Stage<FileWeights> {
        let rows = self.numbers(5 * 5 * width, 0.5);
        Stage::positions(PositionTable { rows, width, size: [5, 5], interpolation: Interpolation::Cubic })
    }
}

fn boxed(block: Block<FileWeights>) -> Stage<FileWeights> {
    Stage::Block(Box::new(block))
}

fn encoder(side: usize, order: PatchOrder, stages: Stages, n_embd: usize, n_deepstack: usize) -> Encoder<FileWeights> {
    let colours = Colours { mean: [0.5, 0.4, 0.6], std: [0.5, 0.3, 0.25] };
    Encoder { colours, patch: PatchSpec { side, order }, stages, n_embd, n_deepstack }
}

/// A transformer with a class token, the results of two blocks beside each other, and a projector.
fn with_class_token(ty: TensorType) -> Encoder<FileWeights> {
    let mut w = Weights::new(ty);
    let row = w.numbers(64, 1.0);
    let first = w.block(64, 32);
    let mut second = w.block(64, 16);
    second.feed_forward = EncoderFeedForward::Plain {
        up: w.linear(64, 32),
        activation: EncoderActivation::QuickGelu,
        down: w.linear(32, 64),
    };
    let feature = vec![Stage::Norm(w.norm(NormKind::Layer, 64, false)), Stage::Activation(EncoderActivation::GeluErf)];
    let feed_forward = EncoderFeedForward::Plain {
        up: w.linear(4 * 128, 96),
        activation: EncoderActivation::GeluErf,
        down: w.linear(96, 40),
    };
    let patches = w.linear_of(TensorType::F32, 48, 64);
    let stages = vec![
        Stage::Linear(patches),
        w.positions(64),
        Stage::Others { before: row, after: Vec::new() },
        boxed(first),
        Stage::Feature(feature),
        boxed(second),
        Stage::JoinFeatures { with_rows: true },
        Stage::DropOthers,
        Stage::Merge { side: 2, order: MergeOrder::ValueFirst },
        Stage::FeedForward(feed_forward),
        Stage::RowBreaks { row: w.numbers(40, 1.0), after_last: false },
    ];
    encoder(4, PatchOrder::ColourFirst, stages, 40, 0)
}

/// A transformer with windows, rotation, and deepstack rows.
fn with_windows(ty: TensorType) -> Encoder<FileWeights> {
    let mut w = Weights::new(ty);
    let mut near = w.rich_block(32, 16);
    near.attention.window = Some(4);
    let mut far = w.rich_block(32, 8);
    far.attention.rope = Some(Angles::of_neighbours(8, [Axis::X, Axis::Y], [0.0, 2.0]));
    let deep = vec![
        Stage::Merge { side: 2, order: MergeOrder::PatchFirst },
        Stage::Norm(w.norm(NormKind::Layer, 128, true)),
        Stage::Linear(w.linear(128, 24)),
    ];
    let stages = vec![
        Stage::Linear(w.linear_of(TensorType::F32, 12, 32)),
        Stage::Reorder(RowOrder::Windows { window: 4, block: 2 }),
        boxed(near),
        Stage::Feature(deep),
        boxed(far),
        Stage::Reorder(RowOrder::RowMajor),
        Stage::Merge { side: 2, order: MergeOrder::PatchFirst },
        Stage::Linear(w.linear(128, 24)),
        Stage::JoinFeatures { with_rows: true },
    ];
    encoder(2, PatchOrder::PixelFirst, stages, 24, 1)
}

/// Pooled rows that learned queries attend to.
fn with_resampler(ty: TensorType) -> Encoder<FileWeights> {
    let mut w = Weights::new(ty);
    let resampler = Resampler {
        queries: w.numbers(5 * 32, 1.0),
        input: w.linear(32, 32),
        input_norm: w.norm(NormKind::Layer, 32, true),
        q: w.linear(32, 32),
        k: w.linear(32, 32),
        v: w.linear(32, 32),
        n_head: 2,
        head_dim: 16,
        out: w.linear(32, 32),
    };
    let stages = vec![
        Stage::Linear(w.linear_of(TensorType::F32, 12, 32)),
        Stage::Attention(Box::new(w.attention(32, 32, 1))),
        Stage::Pool { side: 2 },
        Stage::Resampler(Box::new(resampler)),
        Stage::Scale(1.5),
    ];
    encoder(2, PatchOrder::ColourFirst, stages, 32, 0)
}

/// Convolutions, a residual sum, and attention to a coarser grid.
fn with_convolutions(ty: TensorType) -> Encoder<FileWeights> {
    let mut w = Weights::new(ty);
    let reduced = |w: &mut Weights| -> Stages {
        let kernel = w.numbers(9 * 32, 0.5);
        vec![Stage::Depthwise { side: 3, stride: 2, kernel }, Stage::Linear(w.linear(32, 16))]
    };
    let (k, v) = (reduced(&mut w), reduced(&mut w));
    let attention = QueryAttention { q: w.linear(32, 64), k, v, head_dim: 16, out: w.linear(64, 32) };
    let residual = vec![
        Stage::Depthwise { side: 5, stride: 1, kernel: w.numbers(25 * 32, 0.5) },
        Stage::Norm(w.norm(NormKind::Rms, 32, true)),
        Stage::QueryAttention(Box::new(attention)),
        Stage::ScaleColumns(w.numbers(32, 1.0)),
    ];
    let coarse = vec![
        Stage::Unfold { side: 3, stride: 2, centred: false },
        Stage::Linear(w.linear(9 * 32, 32)),
        Stage::Enlarge { factor: 2 },
    ];
    let stages = vec![
        // Three values of a pixel, with zeros where a convolution reads beyond the picture.
        Stage::Unfold { side: 3, stride: 2, centred: false },
        Stage::Linear(w.linear_of(TensorType::F32, 27, 32)),
        Stage::AddRow(w.numbers(32, 0.5)),
        Stage::Sum([Vec::new(), residual]),
        Stage::Feature(coarse),
        Stage::JoinFeatures { with_rows: true },
        Stage::Linear(w.linear(64, 8)),
    ];
    encoder(1, PatchOrder::PixelFirst, stages, 8, 0)
}

/// Squares below each other, windows that are filled up, scores by distance, and rows around those of patches.
fn with_distances(ty: TensorType) -> Encoder<FileWeights> {
    let mut w = Weights::new(ty);
    let mut attention = |sides: &[usize]| {
        let scores = |side: &usize| RelativeScores { side: *side, matrix: w.linear(8, 2 * (2 * side - 1)) };
        let relative = sides.iter().map(scores).collect();
        Stage::Attention(Box::new(EncoderAttention { relative, ..w.attention(32, 8, 4) }))
    };
    let near = Stage::Windows { side: 3, stages: vec![attention(&[3])] };
    let far = attention(&[4, 8]);
    let squares = vec![
        Stage::Linear(w.linear_of(TensorType::F32, 12, 32)),
        Stage::Sum([Vec::new(), vec![Stage::Norm(w.norm(NormKind::Layer, 32, true)), near]]),
        Stage::Sum([Vec::new(), vec![Stage::Norm(w.norm(NormKind::Layer, 32, true)), far]]),
        Stage::Unfold { side: 3, stride: 2, centred: true },
        Stage::Linear(w.linear(9 * 32, 24)),
        Stage::Activation(EncoderActivation::SquaredRelu),
    ];
    let stages = vec![
        Stage::Squares(squares),
        Stage::RowBreaks { row: w.numbers(24, 1.0), after_last: true },
        Stage::Separator { row: w.numbers(24, 1.0), ny: 4 },
        Stage::Others { before: w.numbers(3 * 24, 1.0), after: w.numbers(24, 1.0) },
        Stage::Linear(w.linear(24, 16)),
    ];
    encoder(2, PatchOrder::ColourFirst, stages, 16, 0)
}

/// The devices of this file's tests that none of them uses: with all features, and without subgroups and 16-bit floats. Compiled
/// pipelines stay with them.
static FREE: Mutex<Vec<[Arc<WgpuDevice>; 2]>> = Mutex::new(Vec::new());

/// Calls `test` with the devices.
fn with_devices(test: impl Fn(&Arc<WgpuDevice>)) {
    let free = FREE.lock().unwrap_or_else(PoisonError::into_inner).pop();
    let all = WgpuOptions { checked: true, ..Default::default() };
    let plain = WgpuOptions { subgroups: false, f16: false, ..all.clone() };
    let opened = || Some([Arc::new(open(&all)?), Arc::new(open(&plain)?)]);
    let Some(devices) = free.or_else(opened) else { return };
    devices.iter().for_each(test);
    FREE.lock().unwrap_or_else(PoisonError::into_inner).push(devices);
}

/// Encodes random pictures of these sizes.
fn encode<E: std::fmt::Debug>(
    sizes: &[(usize, usize)],
    encode: impl FnOnce(&[Pixels<'_>]) -> Result<Vec<EncodedPicture>, E>,
) -> Vec<EncodedPicture> {
    let byte = |v: f32| (128.0 + 100.0 * v) as u8;
    let bytes = |(seed, (width, height)): (u64, &(usize, usize))| -> Vec<u8> {
        random(seed, 3 * width * height).into_iter().map(byte).collect()
    };
    let bytes: Vec<_> = (7..).zip(sizes).map(bytes).collect();
    let pictures = bytes.iter().zip(sizes).map(|(rgb, &(width, height))| Pixels { rgb, width, height });
    encode(&pictures.collect::<Vec<_>>()).unwrap()
}

/// All values of a picture.
fn all(picture: &EncodedPicture) -> Vec<f32> {
    [&picture.rows[..], &picture.deepstack.concat()].concat()
}

/// Compares the pictures' rows with those of the CPU.
fn compare(what: &str, make: impl Fn() -> Encoder<FileWeights>, all_sizes: &[&[(usize, usize)]]) {
    let options = CpuOptions { n_threads: 1, ..Default::default() };
    let mut cpu = CpuEncoder::new(&options, make(), true).unwrap();
    let want: Vec<_> = all_sizes.iter().map(|sizes| encode(sizes, |pictures| cpu.encode(pictures))).collect();
    with_devices(|gpu| {
        // Sums of 32-bit floats in another order, of which norms and softmax enlarge the errors; 16-bit floats on matrix units,
        // with an error of up to 2^-11 of each weight and input.
        for (exact, most) in [(true, 1e-10), (false, 1e-6)] {
            let mut encoder = WgpuEncoder::new(Arc::clone(gpu), make(), exact).unwrap();
            for (sizes, want) in all_sizes.iter().zip(&want) {
                let got = encode(sizes, |pictures| encoder.encode(pictures));
                for (got, want) in got.iter().zip(want) {
                    assert_eq!((got.nx, got.ny), (want.nx, want.ny), "{what}");
                    let error = nmse(&all(got), &all(want));
                    assert!(error < most, "{what}, {sizes:?}, exact {exact}: {error:e}");
                }
                assert_eq!(got.len(), want.len(), "{what}");
            }
        }
    });
}

#[test]
fn transformers_with_a_class_token_agree_with_the_cpu() {
    for ty in [TensorType::F32, TensorType::Q8_0] {
        compare(&format!("{ty}"), || with_class_token(ty), &[&[(24, 16)], &[(16, 16), (40, 24), (8, 56)]]);
    }
}

#[test]
fn transformers_with_windows_agree_with_the_cpu() {
    for ty in [TensorType::F16, TensorType::BF16] {
        compare(&format!("{ty}"), || with_windows(ty), &[&[(20, 12), (12, 32)], &[(8, 8)]]);
    }
}

#[test]
fn resamplers_agree_with_the_cpu() {
    compare("a resampler", || with_resampler(TensorType::F32), &[&[(16, 12), (8, 24)], &[(4, 4)]]);
}

#[test]
fn convolutions_agree_with_the_cpu() {
    compare("convolutions", || with_convolutions(TensorType::F32), &[&[(24, 16)], &[(16, 8), (12, 20)]]);
}

#[test]
fn scores_by_distance_agree_with_the_cpu() {
    compare("scores by distance", || with_distances(TensorType::F32), &[&[(8, 16), (8, 24), (16, 16)], &[(8, 8)]]);
}

#[test]
fn there_may_be_more_rows_than_workgroups_along_an_axis() {
    let make = || {
        let mut w = Weights::new(TensorType::F32);
        let stages = vec![
            Stage::Linear(w.linear(3, 5)),
            Stage::Norm(w.norm(NormKind::Layer, 5, true)),
            Stage::Activation(EncoderActivation::Gelu),
            Stage::Pool { side: 2 },
        ];
        encoder(1, PatchOrder::PixelFirst, stages, 5, 0)
    };
    compare("many rows", make, &[&[(600, 120)]]);
}

#[test]
fn no_picture_and_pictures_without_groups_have_no_rows() {
    compare("no rows", || with_resampler(TensorType::F32), &[&[]]);
    let make = || {
        let mut w = Weights::new(TensorType::F32);
        let stages = vec![Stage::Pool { side: 2 }, Stage::Linear(w.linear(3, 5)), Stage::Scale(2.0)];
        encoder(1, PatchOrder::PixelFirst, stages, 5, 0)
    };
    with_devices(|gpu| {
        let mut encoder = WgpuEncoder::new(Arc::clone(gpu), make(), true).unwrap();
        let got = encode(&[(1, 4)], |pictures| encoder.encode(pictures));
        assert_eq!(got, [EncodedPicture { rows: Vec::new(), deepstack: Vec::new(), nx: 0, ny: 2 }]);
    });
}

#[test]
fn weights_of_other_sizes_are_refused() {
    let pictures = [Pixels { rgb: &[200; 12], width: 2, height: 2 }];
    with_devices(|gpu| {
        let mut w = Weights::new(TensorType::F32);
        let table = PositionTable { rows: vec![0.0; 8], width: 2, size: [2, 2], interpolation: Interpolation::None };
        let stages = [
            Stage::Norm(w.norm(NormKind::Rms, 2, false)),
            Stage::Linear(w.linear(4, 5)),
            Stage::Linear(EncoderLinear { bias: Some(vec![0.0; 4]), ..w.linear(3, 5) }),
            Stage::positions(table),
            Stage::ScaleColumns(w.numbers(2, 1.0)),
            Stage::AddRow(w.numbers(4, 1.0)),
            Stage::Attention(Box::new(w.attention(3, 3, 0))),
        ];
        for (i, stage) in stages.into_iter().enumerate() {
            let encoder = encoder(1, PatchOrder::PixelFirst, vec![stage], 3, 0);
            let encoder = WgpuEncoder::new(Arc::clone(gpu), encoder, true);
            let result = encoder.and_then(|mut encoder| encoder.encode(&pictures));
            assert!(matches!(result, Err(WgpuError::Mismatch { .. })), "stage {i}: {result:?}");
        }
    });
}

#[test]
fn a_cancelled_watch_ends_encoding() {
    let watch = Watch::default();
    let Some(gpu) = open(&WgpuOptions { checked: true, watch: watch.clone(), ..Default::default() }) else { return };
    let mut encoder = WgpuEncoder::new(Arc::new(gpu), with_resampler(TensorType::F32), true).unwrap();
    watch.cancel();
    let pictures = [Pixels { rgb: &[200; 48], width: 4, height: 4 }];
    assert!(matches!(encoder.encode(&pictures), Err(WgpuError::Cancelled)));
}
