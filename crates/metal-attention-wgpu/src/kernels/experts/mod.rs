//! Mixtures of experts. [`route`] chooses each token's experts, and the choice stays on the GPU. For a few tokens
//! [`experts_matvec`] (grouped GEMV) reads the experts of each token; for many [`experts_matmul`] (grouped GEMM) sorts
//! the tokens by expert, so that an expert is read once for all its tokens.
//!
//! A *visit* is one token at one of its experts: visit `token * n_used + i` is the token at the `i`-th of its experts.

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

/// The sizes and the activation of a layer's experts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertsShape {
    /// Elements of a token's input and result.
    pub n_embd: usize,
    /// Width of an expert's gate and up.
    pub n_ff: usize,
    /// Number of experts.
    pub n_expert: usize,
    /// Experts of each token.
    pub n_used: usize,
    /// Whether experts have a gate.
    pub gated: bool,
    /// Activation of the gate, or of up without a gate.
    pub activation: Activation,
    /// Whether the router's weight multiplies an expert's input instead of its result.
    pub weights_inputs: bool,
}

/// The matrices of all experts of a layer, one expert below the other, and their biases.
#[derive(Debug, Clone, Copy)]
pub struct ExpertsMatrices<'a> {
    /// `[n_expert * 2 n_ff, n_embd]` with gate and up rows interleaved ([`WgpuMatrix::interleave_all`]); without gates
    /// `[n_expert * n_ff, n_embd]` ([`WgpuMatrix::concat`]).
    pub up: &'a WgpuMatrix,
    /// Bias of `up`, one element for each row.
    pub up_bias: Option<&'a wgpu::Buffer>,
    /// `[n_expert * n_embd, n_ff]` ([`WgpuMatrix::concat`]).
    pub down: &'a WgpuMatrix,
    /// Bias of `down`, one element for each row.
    pub down_bias: Option<&'a wgpu::Buffer>,
}

impl ExpertsShape {
    /// The shape of `experts` with inputs of `n_embd` elements.
    pub fn new(experts: &Experts, n_embd: usize) -> Self {
        Self {
            n_embd,
            n_ff: experts.expert.n_ff,
            n_expert: experts.n_expert,
            n_used: experts.n_used,
            gated: experts.expert.gated,
            activation: experts.expert.activation,
            weights_inputs: experts.router.weights_inputs,
        }
    }

    /// Rows of `up` of one expert.
    fn up_rows(&self) -> usize {
        if self.gated { 2 * self.n_ff } else { self.n_ff }
    }

    /// An error if `matrices` do not have this shape, or the kernels do not support it.
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
            Activation::Silu
            | Activation::Gelu
            | Activation::ReluSquared
            | Activation::ClampedSwiglu { .. }
            | Activation::ClampedSilu { .. } => Ok(()),
            Activation::SparseGelu { .. } => Err(WgpuError::UnsupportedPart { part: "experts with a sparse GELU" }),
        }
    }

    /// The tiles of `tokens` visits each.
    fn tiles(&self, tokens: usize) -> ExpertTiles {
        ExpertTiles { n_expert: self.n_expert as u32, n_used: self.n_used as u32, tile_tokens: tokens as u32 }
    }

    /// The constants of `shaders/experts_activation.wgsl`.
    fn activation_constants(&self) -> [(&'static str, Constant); 3] {
        let (name, limit) = match self.activation {
            Activation::Silu => ("silu", 0.0),
            Activation::Gelu => ("gelu", 0.0),
            Activation::ReluSquared => ("relu_squared", 0.0),
            Activation::ClampedSwiglu { limit } => ("clamped_swiglu", limit),
            Activation::ClampedSilu { limit } => ("clamped_silu", limit),
            // `check` refuses it.
            Activation::SparseGelu { .. } => ("sparse_gelu", 0.0),
        };
        [("gated", self.gated.into()), ("activation", name.into()), ("limit", limit.into())]
    }
}

/// The buffers between the kernels of a layer's experts. All layers of a forward pass share them.
#[derive(Debug)]
pub struct ExpertsScratch {
    /// The experts of each token, best first, `[n_tokens, n_used]` u32.
    pub chosen: wgpu::Buffer,
    /// Their weights, `[n_tokens, n_used]`.
    pub weights: wgpu::Buffer,
    /// `activation(gate) * up` of each visit, `[n_tokens * n_used, n_ff]`.
    hidden: wgpu::Buffer,
    /// The buffers of [`experts_matmul`]; `None` for a few tokens.
    sorted: Option<SortedScratch>,
}

/// The additional buffers of [`experts_matmul`].
#[derive(Debug)]
struct SortedScratch {
    /// Visits sorted by expert, `[n_tokens * n_used]` u32.
    order: wgpu::Buffer,
    /// Tiles of that order, each of one expert: (expert, first visit, one past the last, 0) u32; unused tiles are zero.
    tiles: wgpu::Buffer,
    /// The results of all visits, `[n_tokens * n_used, n_embd]`.
    down: wgpu::Buffer,
    /// The tokens' input in the format of matrix units.
    input: MatmulScratch,
    /// `hidden` in the format of matrix units.
    units_hidden: MatmulScratch,
}

/// Most tokens for which [`experts_matvec`] is used; with more [`experts_matmul`] reads less.
pub const FEW_TOKENS: usize = 16;

/// Visits of the smallest tile.
const LEAST_TILE: u64 = 16;

impl ExpertsScratch {
    /// Makes the buffers for `n_tokens` tokens and experts of any of `shapes`. For up to [`FEW_TOKENS`] they suit
    /// [`experts_matvec`] only.
    pub fn new(gpu: &WgpuDevice, shapes: &[ExpertsShape], n_tokens: usize) -> Result<Self, WgpuError> {
        Self::of(gpu, unit_bytes(gpu.features()), shapes, n_tokens)
    }

    /// Like [`new`](Self::new), but for [`experts_matmul`] with any number of tokens, and on a device without matrix
    /// units for the plain loops that stand in for them in tests.
    pub fn for_loops(gpu: &WgpuDevice, shapes: &[ExpertsShape], n_tokens: usize) -> Result<Self, WgpuError> {
        let unit = unit_bytes(gpu.features()).max(size_of::<f32>());
        Self::of(gpu, unit, shapes, n_tokens.max(FEW_TOKENS + 1))
    }

    /// Bytes of the buffers of [`new`](Self::new) on a device with `features`.
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

/// Bytes of each buffer of an [`ExpertsScratch`], and the longest rows in the format of matrix units.
#[derive(Default)]
struct ScratchSizes {
    /// Bytes of [`ExpertsScratch::chosen`].
    chosen: u64,
    /// Bytes of [`ExpertsScratch::weights`].
    weights: u64,
    /// Bytes of the hidden values.
    hidden: u64,
    /// Bytes of the sorted visits.
    order: u64,
    /// Bytes of the tiles.
    tiles: u64,
    /// Bytes of the results of all visits.
    down: u64,
    /// Most experts of a token.
    most_used: usize,
    /// Longest input, in elements.
    most_embd: usize,
    /// Longest row of hidden values, in elements.
    most_ff: usize,
}

impl ScratchSizes {
    fn of(shapes: &[ExpertsShape], n_tokens: usize) -> Self {
        let mut sizes = Self::default();
        for shape in shapes {
            let visits = (n_tokens * shape.n_used) as u64;
            // Not less than `ExpertTiles::max_tiles` for any tile of at least that size.
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
    /// Like [`ExpertsMatrices::up`].
    pub up: &'a [f32],
    /// Like [`ExpertsMatrices::up_bias`].
    pub up_bias: Option<&'a [f32]>,
    /// Like [`ExpertsMatrices::down`].
    pub down: &'a [f32],
    /// Like [`ExpertsMatrices::down_bias`].
    pub down_bias: Option<&'a [f32]>,
}

/// The scalar twin of [`experts_matvec`] and [`experts_matmul`] for one token `x`, `[n_embd]`. `visits`: its experts
/// with their weights. Returns the weighted sum `[n_embd]`.
pub fn experts_twin(shape: &ExpertsShape, values: &ExpertsValues<'_>, x: &[f32], visits: &[(usize, f32)]) -> Vec<f32> {
    let product = |w: &[f32], bias: Option<&[f32]>, expert: usize, rows: usize, x: &[f64]| -> Vec<f64> {
        let w = &w[expert * rows * x.len()..][..rows * x.len()];
        let dot = |row: &[f32]| row.iter().zip(x).map(|(&w, x)| f64::from(w) * x).sum::<f64>();
        let bias = |i: usize| bias.map_or(0.0, |bias| f64::from(bias[expert * rows + i]));
        w.chunks_exact(x.len()).enumerate().map(|(i, row)| dot(row) + bias(i)).collect()
    };
    let mut sum = vec![0.0; shape.n_embd];
    for &(expert, weight) in visits {
        let (before, after) = if shape.weights_inputs { (f64::from(weight), 1.0) } else { (1.0, f64::from(weight)) };
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

/// `activation(gate) * up`, or the activation alone without up.
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
        Activation::ClampedSilu { limit } => {
            let limit = f64::from(limit);
            let gate = (gate * sigmoid(gate)).min(limit);
            up.map_or(gate, |up| gate * up.clamp(-limit, limit))
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
        weights_inputs: false,
    }
}

pub(super) fn catalogue() -> Vec<PipelineKey> {
    [route::catalogue(), matvec::catalogue(), matmul::catalogue()].concat()
}
