//! The ceilings of a device.

use metal_attention::gguf::Tensor;
use metal_attention::{Backend, CpuCeilings, CpuForwardPass, EngineOptions, Error, Model};
use serde::Serialize;

use super::Effort;
use crate::cli_error::CliError;

/// Numbers of tokens that are multiplied with a matrix at once.
const BATCHES: [usize; 5] = [1, 2, 4, 8, 16];
/// Bytes of matrices that are multiplied in turn, at most: more than any cache.
const MATRIX_BYTES: usize = 1 << 30;

/// What was measured.
#[derive(Serialize)]
pub struct DeviceName {
    /// `cpu`, `cuda` or `gpu`.
    pub kind: &'static str,
    /// The CPU's instruction set, or the GPU's name.
    pub name: String,
    /// Threads on the CPU.
    pub threads: Option<usize>,
    /// The GPU's driver.
    pub driver: Option<String>,
}

/// What a device does at best; rates are per second, a multiplication includes an addition.
#[derive(Serialize)]
pub struct Ceilings {
    /// Bytes read.
    pub read_bytes: f64,
    /// Bytes read and written by a copy.
    pub copy_bytes: f64,
    /// Multiplications of the fast way to multiply matrices; `None` where floats are all there is.
    pub matrix: Option<f64>,
    /// What these multiply: `int8` or `half`.
    pub matrix_type: Option<&'static str>,
    /// Multiplications of 32-bit floats.
    pub f32: f64,
    /// What launches cost.
    pub launches: Launches,
}

/// Microseconds of a launch with nothing to do.
#[derive(Serialize, Clone, Copy)]
#[serde(untagged)]
pub enum Launches {
    /// On the CPU.
    Cpu {
        /// A parallel region of the thread pool.
        region_us: f64,
    },
    /// On a GPU.
    #[cfg_attr(not(feature = "wgpu"), allow(dead_code))]
    Wgpu {
        /// A dispatch that depends on the one before, inside a submission.
        dispatch_us: f64,
        /// The same where submissions are queued ahead.
        dispatch_queued_us: f64,
        /// A submission until its result has come back.
        submission_us: f64,
        /// The same where submissions are queued ahead.
        submission_queued_us: f64,
    },
    /// Through CUDA.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    Cuda {
        /// A kernel that depends on the one before, in a graph.
        kernel_in_graph_us: f64,
        /// The same where each is launched by itself.
        kernel_us: f64,
        /// A kernel until its result has come back.
        round_trip_us: f64,
        /// A graph of one kernel, of many that are queued.
        graph_us: f64,
    },
}

impl Launches {
    /// Microseconds of the launches that a forward pass counts.
    pub fn each_us(self) -> f64 {
        match self {
            Self::Cpu { region_us } => region_us,
            Self::Wgpu { dispatch_us, .. } => dispatch_us,
            Self::Cuda { kernel_in_graph_us, .. } => kernel_in_graph_us,
        }
    }
}

/// What several tokens cost that are multiplied with a matrix at once.
#[derive(Serialize)]
pub struct BatchScaling {
    /// The largest matrix of a layer; those of all layers were multiplied in turn.
    pub matrix: String,
    /// Its type.
    #[serde(rename = "type")]
    pub ty: &'static str,
    /// Its rows.
    pub n_out: usize,
    /// Its columns.
    pub n_in: usize,
    /// How many there were.
    pub layers: usize,
    /// By number of tokens.
    pub batches: Vec<Batch>,
}

/// Some tokens multiplied with a matrix at once.
#[derive(Serialize)]
pub struct Batch {
    /// How many.
    pub n_tokens: usize,
    /// Microseconds of one matrix and one token.
    pub us_per_token: f64,
    /// Times as fast, by token, as one token alone.
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

    #[cfg(feature = "cuda")]
    fn of_pass(pass: &dyn metal_attention::ForwardPass) -> Self {
        let metal_attention::DeviceInfo { kind, name, driver, n_threads: _ } = pass.device();
        Self { kind, name, threads: None, driver }
    }
}

/// Measures the device that `backend` runs on; `step` hears of every part that is done.
pub fn measure(
    backend: &mut Backend,
    model: &Model,
    options: &EngineOptions,
    effort: Effort,
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

fn cpu(
    pass: &CpuForwardPass,
    model: &Model,
    exact: bool,
    effort: Effort,
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

#[cfg(feature = "wgpu")]
fn gpu(
    pass: &metal_attention::WgpuForwardPass,
    model: &Model,
    effort: Effort,
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

#[cfg(feature = "cuda")]
fn cuda(
    pass: &mut metal_attention::CudaForwardPass,
    model: &Model,
    effort: Effort,
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

/// The largest matrix of the first layer, and its like in the others.
fn largest_of_layers(model: &Model) -> Vec<&Tensor> {
    let of_layer = |i: usize| model.weights().layers[i].linears().into_iter().map(|linear| &linear.weight);
    // The first of several.
    let first: Vec<_> = of_layer(0).collect();
    let Some(largest) = first.iter().rev().max_by_key(|tensor| tensor.bytes().len()) else { return Vec::new() };
    let n = (MATRIX_BYTES / largest.bytes().len().max(1)).clamp(1, model.spec().n_layer());
    let like = |tensor: &&Tensor| tensor.shape() == largest.shape();
    (0..n).filter_map(|i| of_layer(i).find(like)).collect()
}

impl BatchScaling {
    /// From the seconds that all `tensors` took with each of [`BATCHES`].
    fn new(tensors: &[&Tensor], seconds: &[f64]) -> Self {
        let first = tensors[0];
        let batches = BATCHES.iter().zip(seconds).map(|(&n_tokens, &s)| {
            let per_token = s / n_tokens as f64;
            Batch { n_tokens, us_per_token: 1e6 * per_token / tensors.len() as f64, speedup: seconds[0] / per_token }
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
