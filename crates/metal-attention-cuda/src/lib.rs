//! Runs models on NVIDIA GPUs with CUDA kernels of its own, which are part of the program: only the driver is needed.
//!
//! The kernels lie in `kernels/`, and compiled in `prebuilt/` (`scripts/cuda-kernels`). [`CudaForwardPass::supports`] says
//! whether they know all parts of a model.

mod activations;
mod args;
mod cards;
mod ceilings;
mod codes;
mod decode;
mod device;
mod division;
mod error;
mod exchange;
mod forward_pass;
mod ids;
mod kv_cache;
mod launch;
mod lookahead;
mod matrix;
mod options;
mod parts;
mod profile;
mod snapshot;
mod stack;
mod state;
mod step;
mod weights;

pub use cards::CudaCards;
pub use ceilings::{CudaCeilings, CudaLaunchCosts};
pub use device::{CudaDevice, CudaSummary, cuda_summaries};
pub use error::CudaError;
pub use forward_pass::CudaForwardPass;
pub use options::CudaForwardPassOptions;
