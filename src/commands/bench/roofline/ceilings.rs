//! Measures the ceilings of a device: its rates of reading, copying, multiplying and launching, each alone.

use metal_attention::backends::{BackendPass, Launches};
use metal_attention::gguf::Tensor;
use metal_attention::{DeviceInfo, EngineOptions, Model};
use serde::Serialize;

use super::MeasurementEffort;
use crate::cli_error::CliError;

/// The numbers of tokens with which products are measured.
const BATCHES: [usize; 5] = [1, 2, 4, 8, 16];
/// Bytes of the matrices of one measurement, at most: more than any cache holds, so that weights are read from memory.
const MATRIX_BYTES: usize = 1 << 30;

/// The device that was measured.
#[derive(Serialize)]
pub struct DeviceName {
    /// `cpu`, `cuda` or `gpu`.
    pub kind: &'static str,
    /// The CPU's instruction set, or the GPU's name.
    pub name: String,
    /// The number of threads on the CPU; `None` for a GPU.
    pub threads: Option<usize>,
    /// The GPU's driver; `None` for a CPU.
    pub driver: Option<String>,
}

/// The largest rates of a device, per second. A multiplication includes an addition.
#[derive(Serialize)]
pub struct Ceilings {
    /// Bytes read.
    pub read_bytes: f64,
    /// Bytes read and written by a copy.
    pub copy_bytes: f64,
    /// Multiplications of the fast kind for matrices (int8 or half). `None`: the device has 32-bit floats only.
    pub matrix: Option<f64>,
    /// The type that `matrix` multiplies: `int8` or `half`.
    pub matrix_type: Option<&'static str>,
    /// Multiplications of 32-bit floats.
    pub f32: f64,
    /// The costs of launches.
    pub launches: Launches,
}

/// The cost of multiplying several tokens with a matrix at once.
#[derive(Serialize)]
pub struct BatchScaling {
    /// The name of the largest matrix of the first layer. The matrices of the same shape in other layers are multiplied, too, one
    /// after the other.
    pub matrix: String,
    /// Its tensor type.
    #[serde(rename = "type")]
    pub ty: &'static str,
    /// Its rows.
    pub n_out: usize,
    /// Its columns.
    pub n_in: usize,
    /// The number of layers whose matrices were multiplied.
    pub layers: usize,
    /// The measurements, by number of tokens.
    pub batches: Vec<BatchTiming>,
}

/// The measurement of one number of tokens.
#[derive(Serialize)]
pub struct BatchTiming {
    /// The number of tokens that are multiplied at once.
    pub n_tokens: usize,
    /// Microseconds of one matrix and one token.
    pub us_per_token: f64,
    /// The speed per token, relative to that of a single token.
    pub speedup: f64,
}

impl DeviceName {
    /// The device that `pass` runs on.
    pub fn of(pass: &dyn BackendPass) -> Self {
        let DeviceInfo { kind, name, driver: _, n_threads } = pass.device();
        Self { kind, name, threads: (kind == "cpu").then_some(n_threads), driver: pass.driver() }
    }
}

/// Measures the device that `pass` runs on. `step` is called after each of five parts. An error for several GPUs.
pub fn measure(
    pass: &mut dyn BackendPass,
    model: &Model,
    options: &EngineOptions,
    effort: MeasurementEffort,
    step: &mut dyn FnMut(),
) -> Result<(Ceilings, BatchScaling), CliError> {
    let Some(mut device) = pass.ceilings(effort.ceilings, options.exact)? else {
        let message = "the ceilings of several cards together are not measured: leave --tensor-parallel out";
        return Err(CliError::General(message.into()));
    };
    let read_bytes = device.read_bandwidth()?;
    step();
    let copy_bytes = device.copy_bandwidth()?;
    step();
    let (matrix, f32) = (device.matrix_rate()?, device.f32_rate()?);
    step();
    let launches = device.launches()?;
    step();
    let tensors = largest_of_layers(model);
    let seconds = device.products(&tensors, &BATCHES)?;
    step();
    let (matrix, matrix_type) = matrix.unzip();
    let found = Ceilings { read_bytes, copy_bytes, matrix, matrix_type, f32, launches };
    Ok((found, BatchScaling::new(&tensors, &seconds)))
}

/// The largest matrix of the first layer, and those of the same shape in the next layers, up to [`MATRIX_BYTES`].
fn largest_of_layers(model: &Model) -> Vec<&Tensor> {
    let of_layer = |i: usize| model.weights().layers[i].linears().into_iter().map(|linear| &linear.weight);
    // `max_by_key` returns the last of equal ones; in reverse order that is the first.
    let first: Vec<_> = of_layer(0).collect();
    let Some(largest) = first.iter().rev().max_by_key(|tensor| tensor.bytes().len()) else { return Vec::new() };
    let n = (MATRIX_BYTES / largest.bytes().len().max(1)).clamp(1, model.spec().n_layer());
    let like = |tensor: &&Tensor| tensor.shape() == largest.shape();
    (0..n).filter_map(|i| of_layer(i).find(like)).collect()
}

impl BatchScaling {
    /// `seconds[i]` is the time that all `tensors` took with `BATCHES[i]` tokens. `tensors` is not empty.
    fn new(tensors: &[&Tensor], seconds: &[f64]) -> Self {
        let first = tensors[0];
        let batches = BATCHES.iter().zip(seconds).map(|(&n_tokens, &s)| {
            let per_token = s / n_tokens as f64;
            BatchTiming {
                n_tokens,
                us_per_token: 1e6 * per_token / tensors.len() as f64,
                speedup: seconds[0] / per_token,
            }
        });
        Self {
            matrix: first.name().to_owned(),
            ty: first.ty().name(),
            n_out: first.n_rows(),
            n_in: first.row_len(),
            layers: tensors.len(),
            batches: batches.collect(),
        }
    }
}
