//! Dense feed-forwards: `down(activation(gate(x)) * up(x))`, or `down(activation(up(x)))` without a gate.

use metal_attention_model::{Activation, Dense, DenseWeights};

use crate::CudaError;
use crate::activations::{Widths, widen};
use crate::args::{ActivationArgs, Epilogue};
use crate::kernels;
use crate::launch::LaunchGrid;
use crate::matrix::{CudaMatrix, WeightLayout};
use crate::runner::layer::SublayerOutput;
use crate::runner::linear::{LinearInput, LinearOp};
use crate::runner::{MicroBatch, ModelRunner};
use crate::slice::{DevicePtr, DeviceSlice};
use crate::weights::{CudaLinear, CudaVector, Loader, ptr_or_null};

/// Elements of a row that a block of the activation kernel processes.
const ELEMENTS_OF_A_BLOCK: usize = 2048;

/// A dense feed-forward, of a layer or of shared experts.
#[derive(Debug)]
pub(crate) struct CudaDense {
    /// The gate, `[n_ff, n_in]`, where there is one.
    pub(crate) gate: Option<CudaMatrix>,
    /// Up, `[n_ff, n_in]`.
    pub(crate) up: CudaMatrix,
    /// The biases of gate and up, one after the other.
    pub(crate) bias: Option<CudaVector>,
    /// Down, `[n_in, n_ff]`.
    pub(crate) down: CudaLinear,
    /// The activation, by its number in the kernels, and its parameter.
    pub(crate) activation: (u32, f32),
    /// Whether the epilogue of the product of gate and up applies the activation.
    pub(crate) fuses_activation: bool,
}

impl CudaDense {
    /// Uploads the weights.
    pub(super) fn new(loader: &mut Loader<'_>, w: &DenseWeights) -> Result<Self, CudaError> {
        let DenseWeights { spec, gate, up, down } = w;
        let linears: Vec<_> = gate.iter().chain([up]).collect();
        let bias = loader.biases(&linears)?;
        Ok(Self {
            fuses_activation: fuses_activation(w),
            gate: gate.as_ref().map(|gate| loader.matrix(gate)).transpose()?,
            up: loader.matrix(up)?,
            bias,
            down: loader.linear(down)?,
            activation: activation_code(spec.activation),
        })
    }
}

/// Widens the buffers of intermediate results.
pub(super) fn widen_for_dense(widths: &mut Widths, spec: &Dense) {
    widen(&mut widths.n_ff, spec.n_ff);
    widen(&mut widths.gate_up, 2 * spec.n_ff);
}

/// The activation's number in the kernels (`Activation` of `common.cuh`; `SPARSE_GELU` only in `activation.cu`), and its
/// parameter.
pub(super) fn activation_code(activation: Activation) -> (u32, f32) {
    match activation {
        Activation::Silu => (0, 0.0),
        Activation::Gelu => (1, 0.0),
        Activation::ReluSquared => (2, 0.0),
        Activation::ClampedSwiglu { limit } => (3, limit),
        Activation::SparseGelu { n_std } => (4, n_std),
        Activation::ClampedSilu { limit } => (5, limit),
    }
}

/// Whether the epilogue of a product of gate and up can apply the activation.
pub(super) fn epilogue_applies(activation: Activation) -> bool {
    match activation {
        Activation::Silu | Activation::Gelu | Activation::ReluSquared => true,
        Activation::ClampedSwiglu { limit: _ }
        | Activation::ClampedSilu { limit: _ }
        | Activation::SparseGelu { n_std: _ } => false,
    }
}

/// Whether each element of the activation depends on one of the gate alone, and not on the whole row.
pub(crate) fn is_elementwise(activation: Activation) -> bool {
    match activation {
        Activation::Silu
        | Activation::Gelu
        | Activation::ReluSquared
        | Activation::ClampedSwiglu { limit: _ }
        | Activation::ClampedSilu { limit: _ } => true,
        Activation::SparseGelu { n_std: _ } => false,
    }
}

/// Whether the epilogue of the product of gate and up applies the activation of `weights`: if it can, and gate and up
/// have equal weight layouts and no biases.
fn fuses_activation(weights: &DenseWeights) -> bool {
    let DenseWeights { spec, gate, up, down: _ } = weights;
    epilogue_applies(spec.activation)
        && gate.as_ref().is_some_and(|gate| {
            let alike = WeightLayout::of(gate.weight.ty()) == WeightLayout::of(up.weight.ty());
            alike && gate.bias.is_none() && up.bias.is_none()
        })
}

impl ModelRunner {
    /// Launches a dense feed-forward, except its last product, which is returned with its input. Gate and up are one gated
    /// product where that can apply the activation (`fuses_activation`), else a product and an activation kernel.
    pub(crate) fn dense<'w>(
        &mut self,
        batch: MicroBatch<'_>,
        w: &'w CudaDense,
        input: LinearInput,
    ) -> Result<SublayerOutput<'w>, CudaError> {
        let (n, n_ff, n_in) = (batch.size.n_tokens, w.up.n_rows, w.up.n_in);
        let (activation, parameter) = w.activation;
        let (gated, packed) = (self.buffers.gated.slice(), self.buffers.packed_gated.ptr());
        match &w.gate {
            Some(gate) if w.fuses_activation => {
                let product = LinearOp {
                    matrices: vec![(gate, 0), (&w.up, 0)],
                    epilogue: Epilogue::Gated,
                    activation,
                    y: gated,
                    packed,
                    ..LinearOp::stored("gate and up", gate)
                };
                self.product(&product, input, n_in, n)?;
            }
            Some(_) | None => {
                let gate_up = self.buffers.gate_up.slice();
                let parts: Vec<_> = w.gate.iter().chain([&w.up]).zip([0, n_ff]).collect();
                let stride = parts.len() * n_ff;
                let up = if w.gate.is_some() { gate_up.skip(n_ff) } else { DeviceSlice::NONE };
                let product = LinearOp {
                    label: "gate and up",
                    n_out: stride,
                    matrices: parts,
                    bias: ptr_or_null(w.bias.as_ref()),
                    y: gate_up,
                    ..LinearOp::stored("", &w.up)
                };
                self.product(&product, input, n_in, n)?;
                let args = ActivationArgs {
                    gate: gate_up.ptr(),
                    up: up.ptr(),
                    out: gated.ptr(),
                    packed,
                    gate_stride: stride as u32,
                    up_stride: stride as u32,
                    n_ff: n_ff as u32,
                    n_token_tiles: 0,
                    activation,
                    parameter,
                };
                self.activate(args, n)?;
            }
        }
        let input = self.input(&self.buffers.gated, &self.buffers.packed_gated, n);
        Ok(SublayerOutput::Product { label: "down", linear: &w.down, input })
    }

    /// Launches the activation kernel for `n_tokens` rows. The result is packed as well, where the product that follows reads
    /// packed rows.
    pub(crate) fn activate(&mut self, args: ActivationArgs, n_tokens: usize) -> Result<(), CudaError> {
        let packed = if self.uses_f32_inputs(n_tokens) { DevicePtr::NULL } else { args.packed };
        let args = ActivationArgs { packed, n_token_tiles: self.packed_layout(n_tokens), ..args };
        let blocks = (args.n_ff as usize).div_ceil(ELEMENTS_OF_A_BLOCK);
        self.launch(
            kernels::ACTIVATION,
            "",
            LaunchGrid { blocks: [blocks, n_tokens, 1], threads: 256, shared: 0 },
            &args,
        )
    }
}
