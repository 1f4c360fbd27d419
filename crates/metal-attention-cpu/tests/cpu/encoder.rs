//! Picture encoders against a plain twin: the same stages, with every operation in F64 loops.

use metal_attention_cpu::{CpuEncoder, CpuOptions};
use metal_attention_gguf::{GgufFile, Tensor};
use metal_attention_model::NormKind;
use metal_attention_model::vision::{
    AttentionSegment, EncodedPicture, EncoderActivation, EncoderLinear, EncoderNorm, EncoderOps, FileWeights, KeptRows,
    NO_ROW, Pixels, VisionModel,
};
use metal_attention_pictures::{Limits, Picture};
use metal_attention_testing::{mmproj, reference};

/// Rows of F64.
#[derive(Clone)]
struct Rows {
    values: Vec<f64>,
    width: usize,
}

impl Rows {
    fn row(&self, i: usize) -> &[f64] {
        &self.values[i * self.width..][..self.width]
    }

    fn n_rows(&self) -> usize {
        self.values.len() / self.width
    }
}

/// The twin.
struct Plain;

fn activation(x: f64, activation: EncoderActivation) -> f64 {
    match activation {
        EncoderActivation::Gelu => {
            0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh())
        }
        EncoderActivation::GeluErf => 0.5 * x * (1.0 + erf(x / std::f64::consts::SQRT_2)),
        EncoderActivation::QuickGelu => x / (1.0 + (-1.702 * x).exp()),
        EncoderActivation::Silu => x / (1.0 + (-x).exp()),
        EncoderActivation::SquaredRelu => x.max(0.0).powi(2),
    }
}

/// The error function by its power series.
fn erf(x: f64) -> f64 {
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        term *= -x * x / f64::from(n);
        sum += term / f64::from(2 * n + 1);
    }
    2.0 / std::f64::consts::PI.sqrt() * sum
}

fn weights(tensor: &Tensor) -> Vec<f64> {
    tensor.to_f32().into_iter().map(f64::from).collect()
}

impl EncoderOps for Plain {
    type Types = FileWeights;
    type Rows = Rows;
    type Error = String;

    fn upload(&mut self, [_, width]: [usize; 2], values: impl FnOnce() -> Vec<f32>) -> Result<Rows, String> {
        Ok(Rows { values: values().iter().map(|v| f64::from(*v)).collect(), width })
    }

    fn read(&mut self, rows: &Rows, columns: usize) -> Result<Vec<Vec<f32>>, String> {
        let part = |i: usize| rows.values.chunks(rows.width).flat_map(move |row| &row[i * columns..][..columns]);
        Ok((0..rows.width / columns).map(|i| part(i).map(|v| *v as f32).collect()).collect())
    }

    fn width(&self, rows: &Rows) -> usize {
        rows.width
    }

    fn reshape(&mut self, rows: Rows, width: usize) -> Rows {
        Rows { width, ..rows }
    }

    fn copy(&mut self, rows: &Rows) -> Result<Rows, String> {
        Ok(rows.clone())
    }

    fn linear(&mut self, x: &Rows, linear: &EncoderLinear<FileWeights>) -> Result<Rows, String> {
        let matrix = weights(&linear.matrix);
        let clamp = |v: f64, range: Option<[f32; 2]>| range.map_or(v, |[a, b]| v.max(f64::from(a)).min(f64::from(b)));
        let mut values = Vec::new();
        for i in 0..x.n_rows() {
            for (o, row) in matrix.chunks_exact(x.width).enumerate() {
                let inputs = x.row(i).iter().map(|v| clamp(*v, linear.clamp.map(|clamp| clamp.input)));
                let sum: f64 = inputs.zip(row).map(|(v, w)| v * w).sum();
                let bias = linear.bias.as_ref().map_or(0.0, |bias| f64::from(bias[o]));
                values.push(clamp(sum + bias, linear.clamp.map(|clamp| clamp.output)));
            }
        }
        Ok(Rows { values, width: linear.n_out })
    }

    fn norm(&mut self, x: &Rows, norm: &EncoderNorm<FileWeights>) -> Result<Rows, String> {
        let n = norm.width as f64;
        let values = x.values.chunks_exact(norm.width).flat_map(|row| {
            let mean = match norm.kind {
                NormKind::Rms => 0.0,
                NormKind::Layer => row.iter().sum::<f64>() / n,
            };
            let variance = row.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n;
            let factor = 1.0 / (variance + f64::from(norm.eps)).sqrt();
            let of = move |(i, v): (usize, &f64)| {
                let bias = norm.bias.as_ref().map_or(0.0, |bias| f64::from(bias[i]));
                (v - mean) * factor * f64::from(norm.weight[i]) + bias
            };
            row.iter().enumerate().map(of).collect::<Vec<_>>()
        });
        Ok(Rows { values: values.collect(), width: x.width })
    }

    fn activate(&mut self, x: &mut Rows, kind: EncoderActivation) -> Result<(), String> {
        x.values.iter_mut().for_each(|v| *v = activation(*v, kind));
        Ok(())
    }

    fn activate_gated(&mut self, x: &mut Rows, kind: EncoderActivation, y: &Rows) -> Result<(), String> {
        x.values.iter_mut().zip(&y.values).for_each(|(v, y)| *v = activation(*v, kind) * y);
        Ok(())
    }

    fn add(&mut self, x: &mut Rows, y: &Rows) -> Result<(), String> {
        x.values.iter_mut().zip(&y.values).for_each(|(v, y)| *v += y);
        Ok(())
    }

    fn add_row(&mut self, x: &mut Rows, row: &Vec<f32>) -> Result<(), String> {
        let width = x.width;
        x.values.iter_mut().enumerate().for_each(|(i, v)| *v += f64::from(row[i % width]));
        Ok(())
    }

    fn scale(&mut self, x: &mut Rows, factor: f32) -> Result<(), String> {
        x.values.iter_mut().for_each(|v| *v *= f64::from(factor));
        Ok(())
    }

    fn scale_columns(&mut self, x: &mut Rows, factors: &Vec<f32>) -> Result<(), String> {
        let width = x.width;
        x.values.iter_mut().enumerate().for_each(|(i, v)| *v *= f64::from(factors[i % width]));
        Ok(())
    }

    fn gather(&mut self, x: &Rows, rows: &[u32]) -> Result<Rows, String> {
        let of = |&row: &u32| if row == NO_ROW { vec![0.0; x.width] } else { x.row(row as usize).to_vec() };
        Ok(Rows { values: rows.iter().flat_map(of).collect(), width: x.width })
    }

    fn join_rows(&mut self, x: &Rows, y: &Rows) -> Result<Rows, String> {
        Ok(Rows { values: [&x.values[..], &y.values].concat(), width: x.width })
    }

    fn join_columns(&mut self, parts: &[&Rows]) -> Result<Rows, String> {
        let row = |i: usize| parts.iter().flat_map(move |part| part.row(i).to_vec());
        let values = (0..parts[0].n_rows()).flat_map(row).collect();
        Ok(Rows { values, width: parts.iter().map(|part| part.width).sum() })
    }

    fn mean(&mut self, x: &Rows, n: usize) -> Result<Rows, String> {
        let mean = |i: usize| (0..n).map(|j| x.row(i / x.width * n + j)[i % x.width]).sum::<f64>() / n as f64;
        Ok(Rows { values: (0..x.values.len() / n).map(mean).collect(), width: x.width })
    }

    fn weighted_sum(&mut self, x: &Rows, rows: &[u32], n: usize, weights: &Vec<f32>) -> Result<Rows, String> {
        let width = x.width;
        let of = |i: usize| {
            let window = rows[i / width * n..][..n].iter().enumerate().filter(|(_, row)| **row != NO_ROW);
            window.map(|(j, &row)| x.row(row as usize)[i % width] * f64::from(weights[j * width + i % width])).sum()
        };
        Ok(Rows { values: (0..rows.len() / n * width).map(of).collect(), width })
    }

    fn interleave(&mut self, x: &Rows, n: usize) -> Result<Rows, String> {
        let inner = x.width / n;
        let of = |i: usize| x.row(i / x.width)[i % x.width % n * inner + i % x.width / n];
        Ok(Rows { values: (0..x.values.len()).map(of).collect(), width: x.width })
    }

    fn rotate(&mut self, x: &mut Rows, table: &Rows, head_dim: usize, block: usize) -> Result<(), String> {
        for i in 0..x.values.len() {
            let (row, e) = (i / x.width, i % x.width % head_dim);
            if e % block >= block / 2 {
                continue;
            }
            let pair = e / block * (block / 2) + e % block;
            let (cos, sin) = (table.row(row)[2 * pair], table.row(row)[2 * pair + 1]);
            let (a, b) = (x.values[i], x.values[i + block / 2]);
            (x.values[i], x.values[i + block / 2]) = (a * cos - b * sin, a * sin + b * cos);
        }
        Ok(())
    }

    fn attention(
        &mut self,
        q: &Rows,
        k: &Rows,
        v: &Rows,
        head_dim: usize,
        scale: f32,
        segments: &[AttentionSegment],
    ) -> Result<Rows, String> {
        let mut out = Rows { values: vec![0.0; q.values.len()], width: q.width };
        for segment in segments {
            for (row, head) in
                segment.queries.clone().flat_map(|row| (0..q.width / head_dim).map(move |head| (row, head)))
            {
                let shared = head * (k.width / head_dim) / (q.width / head_dim);
                let query = &q.row(row)[head * head_dim..][..head_dim];
                let of = |x: &Rows, key: usize| x.row(key)[shared * head_dim..][..head_dim].to_vec();
                let dot = |key: usize| query.iter().zip(of(k, key)).map(|(a, b)| a * b).sum::<f64>() * f64::from(scale);
                let scores: Vec<f64> = segment.keys.clone().map(dot).collect();
                let largest = scores.iter().copied().fold(f64::MIN, f64::max);
                let total: f64 = scores.iter().map(|score| (score - largest).exp()).sum();
                for (key, score) in segment.keys.clone().zip(&scores) {
                    let weight = (score - largest).exp() / total;
                    let to = &mut out.values[row * q.width + head * head_dim..][..head_dim];
                    to.iter_mut().zip(of(v, key)).for_each(|(to, v)| *to += weight * v);
                }
            }
        }
        Ok(out)
    }
}

fn random(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

fn random_bytes(seed: u64, n: usize) -> Vec<u8> {
    random(seed, n).into_iter().map(|v| (127.5 * v + 127.5) as u8).collect()
}

fn nmse(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let error: f64 = got.iter().zip(want).map(|(a, b)| f64::from(a - b).powi(2)).sum();
    error / want.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>()
}

/// All values of a picture, row by row: the embedding, then what is added after the first layers.
fn joined(picture: &EncodedPicture) -> Vec<f32> {
    let n_rows = picture.nx * picture.ny;
    let n_rows = if n_rows > 0 && picture.rows.len().is_multiple_of(n_rows) { n_rows } else { 1 };
    let width = picture.rows.len() / n_rows;
    let row = |i: usize| {
        let parts = std::iter::once(&picture.rows).chain(&picture.deepstack);
        parts.flat_map(move |part| &part[i * width..][..width])
    };
    (0..n_rows).flat_map(row).copied().collect()
}

fn encode(file: &[u8], sizes: &[[usize; 2]], n_threads: usize) -> (Vec<EncodedPicture>, Vec<EncodedPicture>) {
    let file = GgufFile::from_bytes(file).unwrap();
    let read = || VisionModel::from_gguf(&file).unwrap().encoder;
    let bytes: Vec<_> =
        (1..).zip(sizes).map(|(seed, [width, height])| random_bytes(seed, 3 * width * height)).collect();
    let pixels = bytes.iter().zip(sizes).map(|(rgb, &[width, height])| Pixels { rgb, width, height });
    let pixels: Vec<_> = pixels.collect();
    let cpu = CpuOptions { n_threads, ..Default::default() };
    let mut encoder = CpuEncoder::new(&cpu, read(), true).unwrap();
    (encoder.encode(&pixels).unwrap(), read().run(&mut Plain, &mut KeptRows::default(), &pixels).unwrap())
}

#[test]
fn encoders_match_their_twin() {
    let patch = mmproj::PATCH;
    let square = [6 * patch; 2];
    let kept = [[2, 2], [4, 4], [10, 2], [2, 14], [6, 8]].map(|sides| sides.map(|n| n * patch));
    let cases = [(mmproj::gemma3(32), &[square, square][..], [2, 2]), (mmproj::qwen3vl(32), &kept[..], [1, 1])];
    for (file, sizes, first_grid) in cases {
        let (got, want) = encode(&file, sizes, 3);
        assert_eq!([got[0].nx, got[0].ny], first_grid);
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            assert_eq!((got.nx, got.ny), (want.nx, want.ny));
            let error = nmse(&joined(got), &joined(want));
            assert!(error < 1e-11, "picture {i}: NMSE {error:e}");
        }
    }
}

#[test]
fn pictures_that_are_encoded_together_have_the_rows_that_they_have_alone() {
    let sizes = [[16, 8], [8, 40], [24, 24]];
    let (together, _) = encode(&mmproj::qwen3vl(32), &sizes, 2);
    let bytes = (1..).zip(sizes).map(|(seed, [width, height])| random_bytes(seed, 3 * width * height));
    for ((rgb, [width, height]), together) in bytes.zip(sizes).zip(&together) {
        let file = GgufFile::from_bytes(&mmproj::qwen3vl(32)).unwrap();
        let cpu = CpuOptions { n_threads: 1, ..Default::default() };
        let mut encoder = CpuEncoder::new(&cpu, VisionModel::from_gguf(&file).unwrap().encoder, true).unwrap();
        let alone = encoder.encode(&[Pixels { rgb: &rgb, width, height }]).unwrap();
        assert_eq!(alone[0], *together, "{width} x {height}");
    }
}

#[test]
fn every_operation_matches_its_twin() {
    // Operations that the encoders above lack, through the stages of their own.
    use metal_attention_model::vision::{Colours, Encoder, MergeOrder, PatchOrder, PatchSpec, RowOrder, Stage};
    let stages = || {
        vec![
            Stage::Unfold { side: 3, stride: 2, centred: false },
            Stage::Depthwise { side: 3, stride: 1, kernel: random(5, 9 * 27) },
            Stage::Activation(EncoderActivation::GeluErf),
            Stage::Reorder(RowOrder::Windows { window: 4, block: 2 }),
            Stage::ScaleColumns(random(6, 27)),
            Stage::AddRow(random(7, 27)),
            Stage::Feature(vec![Stage::Pool { side: 2 }, Stage::Enlarge { factor: 2 }]),
            Stage::Reorder(RowOrder::RowMajor),
            Stage::Activation(EncoderActivation::QuickGelu),
            Stage::JoinFeatures { with_rows: true },
            Stage::Others { before: Vec::new(), after: random(8, 54) },
            Stage::Scale(0.7),
            Stage::DropOthers,
            Stage::Merge { side: 2, order: MergeOrder::ValueFirst },
            Stage::Sum([vec![Stage::Scale(-2.0)], vec![Stage::Activation(EncoderActivation::Silu)]]),
            Stage::RowBreaks { row: random(9, 216), after_last: false },
        ]
    };
    let encoder = || Encoder {
        colours: Colours { mean: [0.5, 0.4, 0.3], std: [0.5, 0.6, 0.7] },
        patch: PatchSpec { side: 1, order: PatchOrder::PixelFirst },
        stages: stages(),
        n_embd: 216,
        n_deepstack: 0,
    };
    let sizes = [[8, 16], [16, 8], [24, 24]];
    let bytes: Vec<_> =
        (1..).zip(sizes).map(|(seed, [width, height])| random_bytes(seed, 3 * width * height)).collect();
    let pixels = bytes.iter().zip(sizes).map(|(rgb, [width, height])| Pixels { rgb, width, height });
    let pixels: Vec<_> = pixels.collect();
    let cpu = CpuOptions { n_threads: 2, ..Default::default() };
    let got = CpuEncoder::new(&cpu, encoder(), false).unwrap().encode(&pixels).unwrap();
    let want = encoder().run(&mut Plain, &mut KeptRows::default(), &pixels).unwrap();
    for (got, want) in got.iter().zip(&want) {
        assert_eq!(got.rows.len(), 216 * (got.nx * got.ny + got.ny - 1));
        let error = nmse(&joined(got), &joined(want));
        assert!(error < 1e-12, "NMSE {error:e}");
    }
}

/// A part of a picture in `pictures.json`.
#[derive(serde::Deserialize)]
struct Part {
    /// Rows of embeddings.
    rows: usize,
    /// Every how many rows one is kept.
    step: usize,
    /// 16-bit floats in hexadecimal digits.
    values: String,
}

impl Part {
    fn values(&self) -> Vec<f32> {
        let bits = self.values.as_bytes().chunks_exact(4).map(|digits| {
            let digits = std::str::from_utf8(digits).unwrap();
            u16::from_str_radix(digits, 16).unwrap().swap_bytes()
        });
        bits.map(|bits| half::f16::from_bits(bits).to_f32()).collect()
    }
}

/// llama.cpp rounds GELU to a table of 16-bit floats, and in convolutions pixels and kernels: NMSE of up to 4e-7; the reference itself
/// is in 16-bit floats, 2e-8.
#[test]
fn encoders_match_llama_cpp() {
    #[derive(serde::Deserialize)]
    struct References {
        models: std::collections::BTreeMap<String, Vec<Vec<Part>>>,
    }
    let references: References = reference::read("pictures");
    let families = mmproj::families();
    assert!(families.len() == references.models.len(), "tools/reference-pictures writes the file");
    let mut wrong = Vec::new();
    for family in families {
        let file = GgufFile::from_bytes(&family.bytes).unwrap();
        let model = VisionModel::from_gguf(&file).unwrap();
        let preprocessing = model.preprocessing;
        let cpu = CpuOptions { n_threads: 2, ..Default::default() };
        let mut encoder = CpuEncoder::new(&cpu, model.encoder, true).unwrap();
        for (&[width, height, seed], parts) in family.pictures.iter().zip(&references.models[family.name]) {
            let name = format!("{} {width} x {height}", family.name);
            let picture = Picture::decode(&mmproj::bmp(width, height, seed), &Limits::default()).unwrap();
            let entries = preprocessing.apply(&picture).unwrap().entries;
            let pixels = entries.iter().map(|entry| Pixels {
                rgb: entry.picture.rgb(),
                width: entry.picture.width(),
                height: entry.picture.height(),
            });
            let got = encoder.encode(&pixels.collect::<Vec<_>>()).unwrap();
            assert_eq!(got.len(), parts.len(), "{name}: parts");
            let n_compared = parts.len() - usize::from(family.tiles_only);
            for (i, (got, part)) in got.iter().zip(parts).take(n_compared).enumerate() {
                let want = part.values();
                let width = want.len() / part.rows.div_ceil(part.step);
                let rows = joined(got);
                assert_eq!(rows.len(), part.rows * width, "{name}, part {i}: values");
                let kept: Vec<f32> = rows.chunks_exact(width).step_by(part.step).flatten().copied().collect();
                let error = nmse(&kept, &want);
                println!("{name}, part {i}: NMSE {error:.1e}");
                if error >= 1e-6 {
                    wrong.push(format!("{name}, part {i}: NMSE {error:.1e}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
