#![doc = include_str!("../README.md")]

mod activations;
mod args;
mod bounds;
mod ceilings;
mod codes;
mod decode;
mod decode_steps;
mod device;
mod error;
mod exchange;
mod executor;
mod ids;
mod kernels;
mod kv_cache;
mod launch;
mod lookahead;
mod matrix;
mod options;
mod parts;
mod profile;
mod recurrent_state;
mod runner;
mod sharding;
mod slice;
mod snapshot;
mod stack;
mod support;
mod tensor_parallel;
mod trace;
mod weights;

pub use ceilings::{CudaCeilings, CudaLaunchCosts};
pub use device::{CudaDevice, CudaSummary, cuda_summaries};
pub use error::CudaError;
pub use executor::{CudaExecutor, CudaForwardPass};
pub use options::CudaTuning;
pub use tensor_parallel::{TensorParallelExecutor, TensorParallelPass};
