//! [`CpuEncoder`]: an encoder of pictures on the CPU, whose operations are the kernels of the forward pass.

mod attention;
mod buffers;

use std::time::Duration;

use metal_attention_gguf::Tensor;
use metal_attention_model::vision::{
    AttentionSegment, EncodedPicture, Encoder, EncoderActivation, EncoderLinear, EncoderNorm, EncoderOps, EncoderTypes,
    EncoderWork, FileWeights, KeptRows, NO_ROW, Pixels, PrepareEncoder, split_columns,
};
use metal_attention_model::{Activation, DeviceInfo, NormKind};

use self::buffers::{Buffers, Rows};
use crate::activations::Q8Activations;
use crate::error::CpuError;
use crate::executor::CpuOptions;
use crate::kernels::elementwise::{Activate, LayerNorm, RmsNorm};
use crate::kernels::matmul::{MatmulOp, WeightMatrix, matmul_with_bias};
use crate::memory::PackedMemory;
use crate::pool::ThreadPool;
use crate::shared::SharedMut;
use crate::simd::Isa;

/// Elements of a task of an elementwise operation: some microseconds.
const CHUNK: usize = 1 << 14;
/// The factor of the sigmoid of quick GELU.
const QUICK: f32 = 1.702;

/// The CPU's forms of weights.
#[derive(Debug, Clone, Copy)]
pub struct CpuEncoderTypes;

impl EncoderTypes for CpuEncoderTypes {
    type Matrix = CpuEncoderMatrix;
    type Vector = Vec<f32>;
}

/// A repacked matrix.
#[derive(Debug)]
pub struct CpuEncoderMatrix(WeightMatrix);

/// An encoder of pictures on the CPU.
pub struct CpuEncoder {
    encoder: Encoder<CpuEncoderTypes>,
    kept: KeptRows<Rows>,
    ops: CpuEncoderOps,
}

/// Threads and buffers.
struct CpuEncoderOps {
    pool: ThreadPool,
    buffers: Buffers,
    isa: Isa,
    q8: Q8Activations,
}

impl CpuEncoder {
    /// Starts the threads and repacks the weights. `exact`: quantised weights are dequantised in each product, as in
    /// [`CpuExecutor`](crate::CpuExecutor).
    ///
    /// # Errors
    ///
    /// Threads or memory that the system refuses, or a cancelled `watch`.
    pub fn new(cpu: &CpuOptions, encoder: Encoder<FileWeights>, exact: bool) -> Result<Self, CpuError> {
        let n_threads = cpu.n_threads;
        let pool = ThreadPool::new(n_threads).map_err(|source| CpuError::Threads { n_threads, source })?;
        let pool = pool.watched(cpu.watch.clone()).of_encoder();
        let mut prepare = Prepare { pool: &pool, memory: PackedMemory::default(), exact };
        let encoder = encoder.prepare(&mut prepare)?;
        if pool.is_cancelled() {
            return Err(CpuError::Cancelled);
        }
        let isa = cpu.isa.unwrap_or_else(Isa::best);
        Ok(Self {
            encoder,
            kept: KeptRows::default(),
            ops: CpuEncoderOps { pool, buffers: Buffers::default(), isa, q8: Q8Activations::default() },
        })
    }

    /// Encodes pictures, all together. The memory for their rows is given back at the end.
    ///
    /// # Errors
    ///
    /// The watch was cancelled.
    pub fn encode(&mut self, pictures: &[Pixels<'_>]) -> Result<Vec<EncodedPicture>, CpuError> {
        self.ops.pool.begin();
        let encoded = self.encoder.run(&mut self.ops, &mut self.kept, pictures);
        self.ops.buffers.clear();
        encoded
    }

    /// The operations of [`encode`](Self::encode) for pictures of these sizes ([`Encoder::work`]).
    pub fn work(&self, pictures: &[[usize; 2]]) -> EncoderWork {
        self.encoder.work(pictures)
    }

    /// The time of the matrix products alone ([`Encoder::time_products`]).
    ///
    /// # Errors
    ///
    /// The watch was cancelled.
    pub fn time_products(&mut self, pictures: &[[usize; 2]]) -> Result<Duration, CpuError> {
        self.ops.pool.begin();
        let time = self.encoder.time_products(&mut self.ops, pictures);
        self.ops.buffers.clear();
        time
    }

    /// The instruction set of the kernels, and the threads.
    pub fn device(&self) -> DeviceInfo {
        let (name, n_threads) = (self.ops.isa.name().to_owned(), self.ops.pool.n_threads());
        DeviceInfo { kind: "cpu", name, driver: None, n_threads }
    }
}

/// Repacks weights.
struct Prepare<'a> {
    pool: &'a ThreadPool,
    memory: PackedMemory,
    exact: bool,
}

impl PrepareEncoder for Prepare<'_> {
    type Types = CpuEncoderTypes;
    type Error = CpuError;

    fn matrix(&mut self, tensor: &Tensor) -> Result<CpuEncoderMatrix, CpuError> {
        let bytes = tensor.bytes().len() as u64;
        let matrix = WeightMatrix::new(self.pool, &mut self.memory, tensor, self.exact);
        matrix.map(CpuEncoderMatrix).ok_or(CpuError::OutOfMemory { what: "the picture encoder", bytes })
    }

    fn vector(&mut self, values: Vec<f32>) -> Result<Vec<f32>, CpuError> {
        Ok(values)
    }
}

impl CpuEncoderOps {
    /// Calls `task` for parts of `x` of about [`CHUNK`] elements, each whole rows of `width`, with the index of the first element.
    fn for_parts(&self, x: &mut [f32], width: usize, task: impl Fn(usize, &mut [f32]) + Sync) {
        let chunk = (CHUNK / width).max(1) * width;
        let (n, shared) = (x.len(), SharedMut::new(x));
        self.pool.for_each(n.div_ceil(chunk), &|i| {
            let start = i * chunk;
            // SAFETY: each task has its own part.
            task(start, unsafe { shared.slice(start, chunk.min(n - start)) });
        });
    }

    /// `x = activation(x)`, times `y` where there is one.
    fn activation(&self, x: &mut Rows, activation: EncoderActivation, y: Option<&Rows>) {
        let isa = self.isa;
        self.for_parts(&mut x.values, 1, |start, x| {
            let up = y.map(|y| &y.values[start..][..x.len()]);
            match activation {
                EncoderActivation::Gelu => isa.run(Activate { activation: Activation::Gelu, gate: x, up }),
                EncoderActivation::Silu => isa.run(Activate { activation: Activation::Silu, gate: x, up }),
                EncoderActivation::QuickGelu => {
                    for v in &mut *x {
                        *v *= QUICK;
                    }
                    isa.run(Activate { activation: Activation::Silu, gate: &mut *x, up });
                    for v in x {
                        *v /= QUICK;
                    }
                }
                EncoderActivation::SquaredRelu => {
                    for v in &mut *x {
                        *v *= v.max(0.0);
                    }
                    if let Some(up) = up {
                        x.iter_mut().zip(up).for_each(|(v, up)| *v *= up);
                    }
                }
                EncoderActivation::GeluErf => {
                    for v in &mut *x {
                        *v *= 0.5 * (1.0 + libm::erff(*v * std::f32::consts::FRAC_1_SQRT_2));
                    }
                    if let Some(up) = up {
                        x.iter_mut().zip(up).for_each(|(v, up)| *v *= up);
                    }
                }
            }
        });
    }
}

/// The values within a range.
fn clamped(x: &[f32], [least, greatest]: [f32; 2]) -> Vec<f32> {
    x.iter().map(|v| v.max(least).min(greatest)).collect()
}

impl EncoderOps for CpuEncoderOps {
    type Types = CpuEncoderTypes;
    type Rows = Rows;
    type Error = CpuError;

    fn upload(&mut self, [_, width]: [usize; 2], values: impl FnOnce() -> Vec<f32>) -> Result<Rows, CpuError> {
        Ok(Rows::of(&self.buffers, &values(), width))
    }

    fn read(&mut self, rows: &Rows, columns: usize) -> Result<Vec<Vec<f32>>, CpuError> {
        let split = || split_columns(&rows.values, rows.width, columns);
        if self.pool.is_cancelled() { Err(CpuError::Cancelled) } else { Ok(split()) }
    }

    fn width(&self, rows: &Rows) -> usize {
        rows.width
    }

    fn reshape(&mut self, mut rows: Rows, width: usize) -> Rows {
        rows.width = width;
        rows
    }

    fn copy(&mut self, rows: &Rows) -> Result<Rows, CpuError> {
        Ok(Rows::of(&self.buffers, &rows.values, rows.width))
    }

    fn linear(&mut self, x: &Rows, linear: &EncoderLinear<CpuEncoderTypes>) -> Result<Rows, CpuError> {
        if self.pool.is_cancelled() {
            return Err(CpuError::Cancelled);
        }
        let (n_rows, n_out) = (x.n_rows(), linear.n_out);
        let mut y = Rows::new(&self.buffers, n_rows, n_out);
        let within = linear.clamp.map(|clamp| clamped(&x.values, clamp.input));
        let product = MatmulOp { matrix: &linear.matrix.0, rows: 0..n_rows, y: &mut y.values, accumulate: false };
        let (x, bias) = (within.as_ref().unwrap_or(&x.values), linear.bias.as_deref());
        let n_in = x.len() / n_rows.max(1);
        matmul_with_bias(&self.pool, self.isa, x, &mut self.q8, &mut [product], bias);
        self.pool.watch().advance(2 * n_rows as u64 * n_in as u64 * n_out as u64);
        if let Some(clamp) = linear.clamp {
            y.values = clamped(&y.values, clamp.output);
        }
        Ok(y)
    }

    fn norm(&mut self, x: &Rows, norm: &EncoderNorm<CpuEncoderTypes>) -> Result<Rows, CpuError> {
        let (width, eps, isa) = (norm.width, norm.eps, self.isa);
        let (weight, bias) = (&norm.weight[..], norm.bias.as_deref());
        let mut out = Rows::new(&self.buffers, x.n_rows(), x.width);
        self.for_parts(&mut out.values, width, |start, out| {
            let rows = x.values[start..][..out.len()].chunks_exact(width);
            for (x, out) in rows.zip(out.chunks_exact_mut(width)) {
                match norm.kind {
                    NormKind::Layer => isa.run(LayerNorm { x, weight, bias, eps, out }),
                    NormKind::Rms => {
                        isa.run(RmsNorm { x, weight, eps, out });
                        if let Some(bias) = bias {
                            out.iter_mut().zip(bias).for_each(|(v, bias)| *v += bias);
                        }
                    }
                }
            }
        });
        Ok(out)
    }

    fn activate(&mut self, x: &mut Rows, activation: EncoderActivation) -> Result<(), CpuError> {
        self.activation(x, activation, None);
        Ok(())
    }

    fn activate_gated(&mut self, x: &mut Rows, activation: EncoderActivation, y: &Rows) -> Result<(), CpuError> {
        self.activation(x, activation, Some(y));
        Ok(())
    }

    fn add(&mut self, x: &mut Rows, y: &Rows) -> Result<(), CpuError> {
        self.for_parts(&mut x.values, 1, |start, x| {
            x.iter_mut().zip(&y.values[start..]).for_each(|(x, y)| *x += y);
        });
        Ok(())
    }

    fn add_row(&mut self, x: &mut Rows, row: &Vec<f32>) -> Result<(), CpuError> {
        self.for_parts(&mut x.values, row.len(), |_, x| {
            x.chunks_exact_mut(row.len()).for_each(|x| x.iter_mut().zip(row).for_each(|(x, y)| *x += y));
        });
        Ok(())
    }

    fn scale(&mut self, x: &mut Rows, factor: f32) -> Result<(), CpuError> {
        self.for_parts(&mut x.values, 1, |_, x| x.iter_mut().for_each(|x| *x *= factor));
        Ok(())
    }

    fn scale_columns(&mut self, x: &mut Rows, factors: &Vec<f32>) -> Result<(), CpuError> {
        self.for_parts(&mut x.values, factors.len(), |_, x| {
            x.chunks_exact_mut(factors.len()).for_each(|x| x.iter_mut().zip(factors).for_each(|(x, y)| *x *= y));
        });
        Ok(())
    }

    fn gather(&mut self, x: &Rows, rows: &[u32]) -> Result<Rows, CpuError> {
        let width = x.width;
        let mut y = Rows::new(&self.buffers, rows.len(), width);
        self.for_parts(&mut y.values, width, |start, out| {
            for (out, &row) in out.chunks_exact_mut(width).zip(&rows[start / width..]) {
                if row == NO_ROW {
                    out.fill(0.0);
                } else {
                    out.copy_from_slice(&x.values[row as usize * width..][..width]);
                }
            }
        });
        Ok(y)
    }

    fn join_rows(&mut self, x: &Rows, y: &Rows) -> Result<Rows, CpuError> {
        let mut both = Rows::new(&self.buffers, x.n_rows() + y.n_rows(), x.width);
        let (first, second) = both.values.split_at_mut(x.values.len());
        first.copy_from_slice(&x.values);
        second.copy_from_slice(&y.values);
        Ok(both)
    }

    fn join_columns(&mut self, parts: &[&Rows]) -> Result<Rows, CpuError> {
        let n_rows = parts.first().map_or(0, |part| part.n_rows());
        let width = parts.iter().map(|part| part.width).sum();
        let mut y = Rows::new(&self.buffers, n_rows, width);
        self.for_parts(&mut y.values, width, |start, out| {
            for (i, mut out) in out.chunks_exact_mut(width).enumerate() {
                for part in parts {
                    let (own, rest) = out.split_at_mut(part.width);
                    own.copy_from_slice(&part.values[(start / width + i) * part.width..][..part.width]);
                    out = rest;
                }
            }
        });
        Ok(y)
    }

    fn mean(&mut self, x: &Rows, n: usize) -> Result<Rows, CpuError> {
        let width = x.width;
        let mut y = Rows::new(&self.buffers, x.n_rows() / n, width);
        self.for_parts(&mut y.values, width, |start, out| {
            let rows = x.values[start * n..].chunks_exact(n * width);
            for (rows, out) in rows.zip(out.chunks_exact_mut(width)) {
                for (i, out) in out.iter_mut().enumerate() {
                    *out = rows.iter().skip(i).step_by(width).sum::<f32>() / n as f32;
                }
            }
        });
        Ok(y)
    }

    fn weighted_sum(&mut self, x: &Rows, rows: &[u32], n: usize, weights: &Vec<f32>) -> Result<Rows, CpuError> {
        let width = x.width;
        let mut y = Rows::new(&self.buffers, rows.len() / n, width);
        self.for_parts(&mut y.values, width, |start, out| {
            out.fill(0.0);
            for (out, rows) in out.chunks_exact_mut(width).zip(rows[start / width * n..].chunks_exact(n)) {
                for (&row, weights) in rows.iter().zip(weights.chunks_exact(width)).filter(|(row, _)| **row != NO_ROW) {
                    let row = &x.values[row as usize * width..][..width];
                    out.iter_mut().zip(row).zip(weights).for_each(|((out, v), w)| *out += v * w);
                }
            }
        });
        Ok(y)
    }

    fn interleave(&mut self, x: &Rows, n: usize) -> Result<Rows, CpuError> {
        let width = x.width / n;
        let mut y = Rows::new(&self.buffers, x.n_rows(), x.width);
        self.for_parts(&mut y.values, x.width, |start, out| {
            let rows = x.values[start..][..out.len()].chunks_exact(x.width);
            for (x, out) in rows.zip(out.chunks_exact_mut(x.width)) {
                for (i, out) in out.iter_mut().enumerate() {
                    *out = x[i % n * width + i / n];
                }
            }
        });
        Ok(y)
    }

    fn rotate(&mut self, x: &mut Rows, table: &Rows, head_dim: usize, block: usize) -> Result<(), CpuError> {
        let (width, half) = (x.width, block / 2);
        self.for_parts(&mut x.values, width, |start, x| {
            for (i, row) in x.chunks_exact_mut(width).enumerate() {
                let angles = &table.values[(start / width + i) * head_dim..][..head_dim];
                for head in row.chunks_exact_mut(head_dim) {
                    let blocks = head.chunks_exact_mut(block).zip(angles.chunks_exact(block));
                    for (elements, angles) in blocks {
                        let (first, second) = elements.split_at_mut(half);
                        for ((a, b), angle) in first.iter_mut().zip(second).zip(angles.chunks_exact(2)) {
                            (*a, *b) = (*a * angle[0] - *b * angle[1], *a * angle[1] + *b * angle[0]);
                        }
                    }
                }
            }
        });
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
    ) -> Result<Rows, CpuError> {
        let mut out = Rows::new(&self.buffers, q.n_rows(), q.width);
        for segment in segments {
            if self.pool.is_cancelled() {
                return Err(CpuError::Cancelled);
            }
            let rows = |x: &Rows, rows: &std::ops::Range<usize>| rows.start * x.width..rows.end * x.width;
            let heads = attention::Heads {
                q: &q.values[rows(q, &segment.queries)],
                k: &k.values[rows(k, &segment.keys)],
                v: &v.values[rows(v, &segment.keys)],
                width: q.width,
                kv_width: k.width,
                head_dim,
                scale,
            };
            heads.attend(&self.pool, self.isa, &self.buffers, &mut out.values[rows(q, &segment.queries)]);
        }
        Ok(out)
    }
}
