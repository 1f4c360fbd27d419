//! Mixtures of experts. [`route`] chooses each token's experts, and the choice stays on the device: few tokens go through
//! [`experts_matvec`], in which each reads the experts it goes to, and many through [`experts_matmul`], for which
//! they are sorted by expert, so that an expert is read once for all of its tokens.
//!
//! A *visit* is a token at one of its experts: visit `token * n_used + i` is the token at the `i`-th expert of its choice.

mod matmul;
mod matvec;
mod route;

use metal_attention_model::{Activation, Experts};

use crate::device::WgpuDevice;
use crate::dispatch::ExpertTiles;
use crate::error::WgpuError;
use crate::kernels::matmul::{MatmulScratch, unit_bytes};
use crate::matrix::WgpuMatrix;
use crate::pipelines::PipelineKey;
use crate::shader::{Constant, ShaderFeatures};

pub use matmul::{experts_matmul, experts_matmul_by, experts_method};
pub use matvec::experts_matvec;
pub use route::{MAX_EXPERTS, MAX_USED_EXPERTS, route};

/// Sizes of a layer's experts, and what they compute.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertsShape {
    /// Width of input and result.
    pub n_embd: usize,
    /// Width of gate and up of an expert.
    pub n_ff: usize,
    /// Experts.
    pub n_expert: usize,
    /// Experts that a token goes to.
    pub n_used: usize,
    /// Whether there are gates.
    pub gated: bool,
    /// Activation of the gate, of up where there is none.
    pub activation: Activation,
    /// Whether a weight multiplies an expert's input instead of its result.
    pub weight_input: bool,
}

/// The matrices of all experts of a layer, one expert below the other, and what is added to their products.
#[derive(Debug, Clone, Copy)]
pub struct ExpertsMatrices<'a> {
    /// `[n_expert * 2 n_ff, n_embd]`, rows of gate and up by turns ([`WgpuMatrix::interleave_all`]); without gates
    /// `[n_expert * n_ff, n_embd]` ([`WgpuMatrix::concat`]).
    pub up: &'a WgpuMatrix,
    /// A number for each row of `up`.
    pub up_bias: Option<&'a wgpu::Buffer>,
    /// `[n_expert * n_embd, n_ff]` ([`WgpuMatrix::concat`]).
    pub down: &'a WgpuMatrix,
    /// A number for each row of `down`.
    pub down_bias: Option<&'a wgpu::Buffer>,
}

impl ExpertsShape {
    /// The shape of `experts` between rows of `n_embd` elements.
    pub fn new(experts: &Experts, n_embd: usize) -> Self {
        Self {
            n_embd,
            n_ff: experts.expert.n_ff,
            n_expert: experts.n_expert,
            n_used: experts.n_used,
            gated: experts.expert.gated,
            activation: experts.expert.activation,
            weight_input: experts.router.weight_input,
        }
    }

    /// Rows of `up` that an expert has.
    fn up_rows(&self) -> usize {
        if self.gated { 2 * self.n_ff } else { self.n_ff }
    }

    /// Whether `matrices` are of this shape, and the kernels can do what they are for.
    fn check(&self, matrices: &ExpertsMatrices<'_>) -> Result<(), WgpuError> {
        let mismatch = |why: String| Err(WgpuError::Mismatch { what: "the experts' matrices".to_owned(), why });
        for (name, matrix, rows, n_in) in
            [("up", matrices.up, self.up_rows(), self.n_embd), ("down", matrices.down, self.n_embd, self.n_ff)]
        {
            let (n_out, have) = (self.n_expert * rows, [matrix.n_out(), matrix.n_in()]);
            if have != [n_out, n_in] {
                return mismatch(format!("{name} is {} x {}, and {self:?} takes {n_out} x {n_in}", have[0], have[1]));
            }
        }
        if self.gated && !matrices.up.has_pairs() {
            return mismatch("gate and up rows lie in different parts".to_owned());
        }
        if matrices.up.parts().iter().chain(matrices.down.parts()).any(|part| part.row_step != 1) {
            return mismatch("the rows of a part are no neighbours".to_owned());
        }
        match self.activation {
            Activation::Silu | Activation::Gelu | Activation::ReluSquared | Activation::ClampedSwiglu { .. } => Ok(()),
            Activation::SparseGelu { .. } => Err(WgpuError::UnsupportedPart { part: "experts with a sparse GELU" }),
        }
    }

    /// The tiles of `tokens` tokens that visits are sorted into.
    fn tiles(&self, tokens: usize) -> ExpertTiles {
        ExpertTiles { n_expert: self.n_expert as u32, n_used: self.n_used as u32, tile_tokens: tokens as u32 }
    }

    /// What `shaders/experts_activation.wgsl` takes.
    fn activation_constants(&self) -> [(&'static str, Constant); 3] {
        let (name, limit) = match self.activation {
            Activation::Silu => ("silu", 0.0),
            Activation::Gelu => ("gelu", 0.0),
            Activation::ReluSquared => ("relu_squared", 0.0),
            Activation::ClampedSwiglu { limit } => ("clamped_swiglu", limit),
            // Refused by `check`.
            Activation::SparseGelu { .. } => ("sparse_gelu", 0.0),
        };
        [("gated", self.gated.into()), ("activation", name.into()), ("limit", limit.into())]
    }
}

/// What lies between the kernels of a layer's experts. The layers of a forward pass share one.
#[derive(Debug)]
pub struct ExpertsScratch {
    /// Experts of each token, best first, `[n_tokens, n_used]` u32.
    pub chosen: wgpu::Buffer,
    /// Their weights, `[n_tokens, n_used]`.
    pub weights: wgpu::Buffer,
    /// `activation(gate) * up` of each visit, `[n_tokens * n_used, n_ff]`.
    hidden: wgpu::Buffer,
    /// What many tokens need besides.
    sorted: Option<SortedScratch>,
}

/// What lies between the kernels of [`experts_matmul`].
#[derive(Debug)]
struct SortedScratch {
    /// Visits in the order of their experts, `[n_tokens * n_used]` u32.
    order: wgpu::Buffer,
    /// Tiles of that order, each of one expert: (expert, first, one past the last, 0) u32; (0, 0, 0, 0) where there is none.
    tiles: wgpu::Buffer,
    /// The experts' results, `[n_tokens * n_used, n_embd]`.
    down: wgpu::Buffer,
    /// The input as matrix units take it.
    input: MatmulScratch,
    /// `hidden` as matrix units take it.
    units_hidden: MatmulScratch,
}

/// Tokens that [`experts_matvec`] is made for; beyond, [`experts_matmul`] reads less.
pub const FEW_TOKENS: usize = 16;

/// Tokens of the smallest tile.
const LEAST_TILE: u64 = 16;

impl ExpertsScratch {
    /// Room for `n_tokens` tokens at experts of any of these `shapes`. Up to [`FEW_TOKENS`] it is for [`experts_matvec`] alone.
    pub fn new(gpu: &WgpuDevice, shapes: &[ExpertsShape], n_tokens: usize) -> Result<Self, WgpuError> {
        Self::of(gpu, unit_bytes(gpu.features()), shapes, n_tokens)
    }

    /// As [`new`](Self::new) for [`experts_matmul`] with any number of tokens, and on a device without matrix units for loops that
    /// stand in for them.
    pub fn for_loops(gpu: &WgpuDevice, shapes: &[ExpertsShape], n_tokens: usize) -> Result<Self, WgpuError> {
        let unit = unit_bytes(gpu.features()).max(size_of::<f32>());
        Self::of(gpu, unit, shapes, n_tokens.max(FEW_TOKENS + 1))
    }

    /// Bytes of [`new`](Self::new) on a device with `features`.
    pub fn bytes(features: ShaderFeatures, shapes: &[ExpertsShape], n_tokens: usize) -> u64 {
        let unit = unit_bytes(features);
        let sizes = ScratchSizes::of(shapes, n_tokens);
        let mut bytes = sizes.chosen + sizes.weights + sizes.hidden;
        if n_tokens > FEW_TOKENS {
            bytes += sizes.order + sizes.tiles + sizes.down;
            bytes += MatmulScratch::bytes_of(unit, n_tokens, sizes.most_embd).iter().sum::<u64>();
            bytes += MatmulScratch::bytes_of(unit, sizes.most_used * n_tokens, sizes.most_ff).iter().sum::<u64>();
        }
        bytes
    }

    fn of(gpu: &WgpuDevice, unit: usize, shapes: &[ExpertsShape], n_tokens: usize) -> Result<Self, WgpuError> {
        let sizes = ScratchSizes::of(shapes, n_tokens);
        let sorted = if n_tokens > FEW_TOKENS {
            Some(SortedScratch {
                order: gpu.buffer("tokens in the order of their experts", sizes.order)?,
                tiles: gpu.buffer("tiles of experts", sizes.tiles)?,
                down: gpu.buffer("what experts give", sizes.down)?,
                input: MatmulScratch::of(gpu, unit, n_tokens, sizes.most_embd)?,
                units_hidden: MatmulScratch::of(gpu, unit, sizes.most_used * n_tokens, sizes.most_ff)?,
            })
        } else {
            None
        };
        Ok(Self {
            chosen: gpu.buffer("the chosen experts", sizes.chosen)?,
            weights: gpu.buffer("the weights of experts", sizes.weights)?,
            hidden: gpu.buffer("what is inside experts", sizes.hidden)?,
            sorted,
        })
    }
}

/// Bytes of the buffers of an [`ExpertsScratch`], and the most elements of the rows that matrix units take.
#[derive(Default)]
struct ScratchSizes {
    chosen: u64,
    weights: u64,
    hidden: u64,
    order: u64,
    tiles: u64,
    down: u64,
    most_used: usize,
    most_embd: usize,
    most_ff: usize,
}

impl ScratchSizes {
    fn of(shapes: &[ExpertsShape], n_tokens: usize) -> Self {
        let mut sizes = Self::default();
        for shape in shapes {
            let visits = (n_tokens * shape.n_used) as u64;
            // No fewer than `ExpertTiles::most` of any tile that is as long at least.
            let tiles = visits.min(visits / LEAST_TILE + shape.n_expert as u64);
            sizes.chosen = sizes.chosen.max(4 * visits);
            sizes.weights = sizes.weights.max(4 * visits);
            sizes.hidden = sizes.hidden.max(4 * visits * shape.n_ff as u64);
            sizes.order = sizes.order.max(4 * visits);
            sizes.tiles = sizes.tiles.max(16 * tiles);
            sizes.down = sizes.down.max(4 * visits * shape.n_embd as u64);
            sizes.most_used = sizes.most_used.max(shape.n_used);
            sizes.most_embd = sizes.most_embd.max(shape.n_embd);
            sizes.most_ff = sizes.most_ff.max(shape.n_ff);
        }
        sizes
    }
}

/// The weights of all experts, dequantised, for the [twin](experts_twin).
#[derive(Debug, Clone, Copy)]
pub struct ExpertsValues<'a> {
    /// As [`ExpertsMatrices::up`].
    pub up: &'a [f32],
    /// As [`ExpertsMatrices::up_bias`].
    pub up_bias: Option<&'a [f32]>,
    /// As [`ExpertsMatrices::down`].
    pub down: &'a [f32],
    /// As [`ExpertsMatrices::down_bias`].
    pub down_bias: Option<&'a [f32]>,
}

/// The scalar twin of [`experts_matvec`] and [`experts_matmul`] for one token `x`, `[n_embd]`, that goes to `visits`, pairs of
/// expert and weight: the sum of what they give.
pub fn experts_twin(shape: &ExpertsShape, values: &ExpertsValues<'_>, x: &[f32], visits: &[(usize, f32)]) -> Vec<f32> {
    let product = |w: &[f32], bias: Option<&[f32]>, expert: usize, rows: usize, x: &[f64]| -> Vec<f64> {
        let w = &w[expert * rows * x.len()..][..rows * x.len()];
        let dot = |row: &[f32]| row.iter().zip(x).map(|(&w, x)| f64::from(w) * x).sum::<f64>();
        let bias = |i: usize| bias.map_or(0.0, |bias| f64::from(bias[expert * rows + i]));
        w.chunks_exact(x.len()).enumerate().map(|(i, row)| dot(row) + bias(i)).collect()
    };
    let mut sum = vec![0.0; shape.n_embd];
    for &(expert, weight) in visits {
        let (before, after) = if shape.weight_input { (f64::from(weight), 1.0) } else { (1.0, f64::from(weight)) };
        let x: Vec<f64> = x.iter().map(|&x| before * f64::from(x)).collect();
        let up = product(values.up, values.up_bias, expert, shape.up_rows(), &x);
        let hidden: Vec<f64> = if shape.gated {
            up.as_chunks::<2>().0.iter().map(|&[gate, up]| activated(shape.activation, gate, Some(up))).collect()
        } else {
            up.iter().map(|&up| activated(shape.activation, up, None)).collect()
        };
        let down = product(values.down, values.down_bias, expert, shape.n_embd, &hidden);
        sum.iter_mut().zip(down).for_each(|(sum, down)| *sum += after * down);
    }
    sum.into_iter().map(|v| v as f32).collect()
}

/// `activation(gate) * up`, or the activation alone.
fn activated(activation: Activation, gate: f64, up: Option<f64>) -> f64 {
    let sigmoid = |v: f64| 1.0 / (1.0 + (-v).exp());
    let times = |v: f64| up.map_or(v, |up| v * up);
    match activation {
        Activation::Silu => times(gate * sigmoid(gate)),
        Activation::Gelu => {
            let z = (2.0 / std::f64::consts::PI).sqrt() * (gate + 0.044_715 * gate.powi(3));
            times(gate / 2.0 * (1.0 + z.tanh()))
        }
        Activation::ReluSquared => times(gate.max(0.0).powi(2)),
        Activation::ClampedSwiglu { limit } => {
            let limit = f64::from(limit);
            let gate = gate.min(limit);
            let gate = gate * sigmoid(1.702 * gate);
            up.map_or(gate, |up| gate * (1.0 + up.clamp(-limit, limit)))
        }
        Activation::SparseGelu { .. } => unreachable!("it takes a whole row, and experts have none"),
    }
}

/// The experts of Qwen3-30B-A3B, for the catalogue.
fn catalogue_shape() -> ExpertsShape {
    ExpertsShape {
        n_embd: 2048,
        n_ff: 768,
        n_expert: 128,
        n_used: 8,
        gated: true,
        activation: Activation::Silu,
        weight_input: false,
    }
}

pub(super) fn catalogue() -> Vec<PipelineKey> {
    [route::catalogue(), matvec::catalogue(), matmul::catalogue()].concat()
}
