//! Measures the ceilings of a device: its rates of reading, copying, multiplying and launching, each alone.

use metal_attention::gguf::Tensor;
use metal_attention::{Backend, CpuCeilings, CpuForwardPass, EngineOptions, Error, Model};
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

/// The costs in microseconds of launches that do no work.
#[derive(Serialize, Clone, Copy)]
#[serde(untagged)]
pub enum Launches {
    /// The CPU's thread pool.
    Cpu {
        /// A parallel region of all threads.
        region_us: f64,
    },
    /// A GPU through wgpu.
    #[cfg_attr(not(feature = "wgpu"), allow(dead_code))]
    Wgpu {
        /// A dispatch that depends on the one before it, within a submission.
        dispatch_us: f64,
        /// The same if submissions are queued ahead.
        dispatch_queued_us: f64,
        /// A submission until its result is read back.
        submission_us: f64,
        /// The same if submissions are queued ahead and no result is read.
        submission_queued_us: f64,
    },
    /// A GPU through CUDA.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    Cuda {
        /// A kernel that depends on the one before it, in a CUDA graph.
        kernel_in_graph_us: f64,
        /// The same if each kernel is launched alone.
        kernel_us: f64,
        /// A kernel until its result is read back.
        round_trip_us: f64,
        /// A CUDA graph of one kernel, if many are queued.
        graph_us: f64,
    },
}

impl Launches {
    /// The cost in microseconds of one launch of those that [`super::floors::WorkCounts`] counts.
    pub fn each_us(self) -> f64 {
        match self {
            Self::Cpu { region_us } => region_us,
            Self::Wgpu { dispatch_us, .. } => dispatch_us,
            Self::Cuda { kernel_in_graph_us, .. } => kernel_in_graph_us,
        }
    }
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
    /// The device that `backend` runs on.
    pub fn of(backend: &Backend) -> Self {
        match backend {
            Backend::Cpu(pass) => {
                Self { kind: "cpu", name: pass.isa().name().to_owned(), threads: Some(pass.n_threads()), driver: None }
            }
            #[cfg(feature = "cuda")]
            Backend::Cuda(pass) => Self::of_pass(pass),
            #[cfg(feature = "cuda")]
            Backend::TensorParallel(pass) => Self::of_pass(pass),
            #[cfg(feature = "wgpu")]
            Backend::Wgpu(pass) => {
                let gpu = pass.gpu().summary();
                let driver = Some(format!("{}, {}", gpu.backend, gpu.driver));
                Self { kind: "gpu", name: gpu.name.clone(), threads: None, driver }
            }
        }
    }

    /// The device of a forward pass.
    #[cfg(feature = "cuda")]
    fn of_pass(pass: &dyn metal_attention::ForwardPass) -> Self {
        let metal_attention::DeviceInfo { kind, name, driver, n_threads: _ } = pass.device();
        Self { kind, name, threads: None, driver }
    }
}

/// Measures the device that `backend` runs on. `step` is called after each of five parts. An error for several GPUs.
pub fn measure(
    backend: &mut Backend,
    model: &Model,
    options: &EngineOptions,
    effort: MeasurementEffort,
    step: &mut dyn FnMut(),
) -> Result<(Ceilings, BatchScaling), CliError> {
    match backend {
        Backend::Cpu(pass) => cpu(pass, model, options.exact, effort, step),
        #[cfg(feature = "cuda")]
        Backend::Cuda(pass) => cuda(pass, model, effort, step),
        #[cfg(feature = "cuda")]
        Backend::TensorParallel(_) => {
            let message = "the ceilings of several cards together are not measured: leave --tensor-parallel out";
            Err(CliError::General(message.into()))
        }
        #[cfg(feature = "wgpu")]
        Backend::Wgpu(pass) => gpu(pass, model, effort, step),
    }
}

/// Measures the CPU.
fn cpu(
    pass: &CpuForwardPass,
    model: &Model,
    exact: bool,
    effort: MeasurementEffort,
    step: &mut dyn FnMut(),
) -> Result<(Ceilings, BatchScaling), CliError> {
    let ceilings = CpuCeilings::new(pass.n_threads()).map_err(Error::from)?;
    let read_bytes = ceilings.read_bandwidth(effort.cpu_bytes, effort.time).map_err(Error::from)?;
    step();
    let copy_bytes = ceilings.copy_bandwidth(effort.cpu_bytes, effort.time).map_err(Error::from)?;
    step();
    let (matrix, f32) = (ceilings.int8_rate(effort.time), ceilings.f32_rate(effort.time));
    step();
    let launches = Launches::Cpu { region_us: 1e6 * ceilings.region(effort.time) };
    step();
    let tensors = largest_of_layers(model);
    let seconds = ceilings.products(&tensors, &BATCHES, exact, effort.time).map_err(Error::from)?;
    step();
    let matrix = Some(matrix);
    let found = Ceilings { read_bytes, copy_bytes, matrix, matrix_type: Some("int8"), f32, launches };
    Ok((found, BatchScaling::new(&tensors, &seconds)))
}

/// Measures a GPU through wgpu.
#[cfg(feature = "wgpu")]
fn gpu(
    pass: &metal_attention::WgpuForwardPass,
    model: &Model,
    effort: MeasurementEffort,
    step: &mut dyn FnMut(),
) -> Result<(Ceilings, BatchScaling), CliError> {
    let gpu = pass.gpu();
    let ceilings = metal_attention::kernels::WgpuCeilings::new(gpu, effort.time);
    let bytes = if gpu.summary().is_software() { effort.software_bytes } else { effort.gpu_bytes };
    let read_bytes = ceilings.read_bandwidth(bytes).map_err(Error::from)?;
    step();
    let copy_bytes = ceilings.copy_bandwidth(bytes).map_err(Error::from)?;
    step();
    let (matrix, f32) = (ceilings.matrix_rate().map_err(Error::from)?, ceilings.f32_rate().map_err(Error::from)?);
    step();
    let costs = ceilings.launch_costs().map_err(Error::from)?;
    step();
    let launches = Launches::Wgpu {
        dispatch_us: 1e6 * costs.dispatch,
        dispatch_queued_us: 1e6 * costs.dispatch_queued,
        submission_us: 1e6 * costs.submission,
        submission_queued_us: 1e6 * costs.submission_queued,
    };
    let tensors = largest_of_layers(model);
    let seconds = ceilings.products(&tensors, &BATCHES).map_err(Error::from)?;
    step();
    let matrix_type = matrix.map(|_| "half");
    let found = Ceilings { read_bytes, copy_bytes, matrix, matrix_type, f32, launches };
    Ok((found, BatchScaling::new(&tensors, &seconds)))
}

/// Measures a GPU through CUDA.
#[cfg(feature = "cuda")]
fn cuda(
    pass: &mut metal_attention::CudaForwardPass,
    model: &Model,
    effort: MeasurementEffort,
    step: &mut dyn FnMut(),
) -> Result<(Ceilings, BatchScaling), CliError> {
    let ceilings = metal_attention::CudaCeilings::new(pass.gpu(), effort.time);
    let read_bytes = ceilings.read_bandwidth(effort.gpu_bytes).map_err(Error::from)?;
    step();
    let copy_bytes = ceilings.copy_bandwidth(effort.gpu_bytes).map_err(Error::from)?;
    step();
    let (matrix, f32) = (ceilings.matrix_rate().map_err(Error::from)?, ceilings.f32_rate().map_err(Error::from)?);
    step();
    let costs = ceilings.launch_costs().map_err(Error::from)?;
    step();
    let launches = Launches::Cuda {
        kernel_in_graph_us: 1e6 * costs.in_graph,
        kernel_us: 1e6 * costs.without_graph,
        round_trip_us: 1e6 * costs.round_trip,
        graph_us: 1e6 * costs.graph,
    };
    let tensors = largest_of_layers(model);
    let seconds = ceilings.products(pass, &tensors, &BATCHES).map_err(Error::from)?;
    step();
    let matrix = Some(matrix);
    let found = Ceilings { read_bytes, copy_bytes, matrix, matrix_type: Some("half"), f32, launches };
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
