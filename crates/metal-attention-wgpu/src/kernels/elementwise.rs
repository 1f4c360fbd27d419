//! Operations on each element, in place: activations, sums, factors and ranges. Their grid depends on the number of elements alone.

use metal_attention_model::vision::EncoderActivation;

use crate::arena::Bind;
use crate::device::WgpuDevice;
use crate::dispatch::{AccessRange, Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::pipelines::PipelineKey;

/// Invocations of a workgroup, each with an element of its own.
const THREADS: usize = 256;
/// Workgroups of a row of a grid.
const GRID_ROW: usize = 1 << 15;

/// The grid of a kernel with an invocation for each of `n` elements, as `shaders/element.wgsl` counts them.
pub(super) fn element_grid(n: usize) -> [GridExtent; 3] {
    let groups = n.div_ceil(THREADS);
    let row = groups.clamp(1, GRID_ROW);
    [row, groups.div_ceil(row), 1].map(|n| GridExtent::Fixed(n as u32))
}

/// The range of a whole buffer of whole elements.
pub(super) fn all(x: &dyn Bind) -> (&dyn Bind, AccessRange) {
    (x, AccessRange::Fixed(x.bytes()))
}

/// The number of elements of a buffer.
pub(super) fn n_elements(x: &dyn Bind) -> usize {
    (x.bytes() / size_of::<f32>() as u64) as usize
}

/// What becomes of each element `x`.
#[derive(Debug, Clone, Copy)]
pub enum ElementOp<'a> {
    /// `activation(x)`
    Activate(EncoderActivation),
    /// `activation(x) * y`, with as many elements `y`.
    ActivateGated(EncoderActivation, &'a dyn Bind),
    /// `x + y`, with as many elements `y`.
    Add(&'a dyn Bind),
    /// `x + y`, with a row `y` of so many elements for each row.
    AddRow(&'a dyn Bind, usize),
    /// `x * y`, with a row `y` of so many elements for each row; of one element for a common factor.
    MultiplyRow(&'a dyn Bind, usize),
    /// `x`, but at least `y[0]` and at most `y[1]`.
    Clamp(&'a dyn Bind),
}

/// The constants of the shader: the name of the activation, that of the operand, the operator and the operand's period.
type Formula = (&'static str, &'static str, &'static str, usize);

fn activation_name(activation: EncoderActivation) -> &'static str {
    match activation {
        EncoderActivation::Gelu => "gelu",
        EncoderActivation::GeluErf => "gelu_erf",
        EncoderActivation::QuickGelu => "quick_gelu",
        EncoderActivation::Silu => "silu",
        EncoderActivation::SquaredRelu => "squared_relu",
    }
}

fn key((activation, operand, operator, period): Formula) -> PipelineKey {
    let constants = [
        ("activation", activation.into()),
        ("operand", operand.into()),
        ("operator", operator.into()),
        ("period", period.into()),
    ];
    let operator = match operator {
        "+" => "_sum",
        "*" => "_product",
        _ => "",
    };
    PipelineKey::new("elementwise", constants).named(format!("elementwise_{activation}_{operand}{operator}"))
}

impl<'a> ElementOp<'a> {
    fn formula(self) -> Formula {
        match self {
            Self::Activate(activation) => (activation_name(activation), "none", "", 0),
            Self::ActivateGated(activation, _) => (activation_name(activation), "elements", "*", 0),
            Self::Add(_) => ("none", "elements", "+", 0),
            Self::AddRow(_, n) => ("none", "row", "+", n),
            Self::MultiplyRow(_, n) => ("none", "row", "*", n),
            Self::Clamp(_) => ("none", "range", "", 0),
        }
    }

    /// `y` with its number of elements, for `n` elements `x`.
    fn operand(self, n: usize) -> Option<(&'a dyn Bind, AccessRange)> {
        match self {
            Self::Activate(_) => None,
            Self::ActivateGated(_, y) | Self::Add(y) => Some((y, AccessRange::floats(n))),
            Self::AddRow(y, n) | Self::MultiplyRow(y, n) => Some((y, AccessRange::floats(n))),
            Self::Clamp(y) => Some((y, AccessRange::floats(2))),
        }
    }
}

/// `x = op(x)` for each element of `x`, a buffer of whole elements.
pub fn elementwise(gpu: &WgpuDevice, op: ElementOp<'_>, x: &dyn Bind) -> Result<Dispatch, WgpuError> {
    let n = n_elements(x);
    let buffers: Vec<_> = [all(x)].into_iter().chain(op.operand(n)).collect();
    Dispatch::new(gpu, &key(op.formula()), &buffers, element_grid(n))
}

/// The scalar twin of an activation.
pub fn encoder_activation_twin(activation: EncoderActivation, x: f32) -> f32 {
    let x = f64::from(x);
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    (x * match activation {
        EncoderActivation::Gelu => sigmoid(2.0 * (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))),
        EncoderActivation::GeluErf => normal_distribution(x),
        EncoderActivation::QuickGelu => sigmoid(1.702 * x),
        EncoderActivation::Silu => sigmoid(x),
        EncoderActivation::SquaredRelu => x.max(0.0),
    }) as f32
}

/// The distribution function of the normal distribution, by its series around 0 (Abramowitz and Stegun, 26.2.11).
fn normal_distribution(x: f64) -> f64 {
    let (mut term, mut sum, mut n) = (x, x, 1.0);
    while term.abs() > 1e-18 * sum.abs() {
        n += 2.0;
        term *= x * x / n;
        sum += term;
    }
    0.5 + sum * (-x * x / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt()
}

pub(crate) fn catalogue() -> Vec<PipelineKey> {
    let activations = [
        EncoderActivation::Gelu,
        EncoderActivation::GeluErf,
        EncoderActivation::QuickGelu,
        EncoderActivation::Silu,
        EncoderActivation::SquaredRelu,
    ];
    let plain = activations.map(|activation| (activation_name(activation), "none", "", 0));
    let gated = activations.map(|activation| (activation_name(activation), "elements", "*", 0));
    let others = [("elements", "+", 0), ("row", "+", 576), ("row", "*", 576), ("range", "", 0)]
        .map(|(operand, operator, period)| ("none", operand, operator, period));
    plain.into_iter().chain(gated).chain(others).map(key).collect()
}
