//! The CUDA backend: runs models on NVIDIA GPUs, on one ([`CudaForwardPass`]) or on several by tensor parallelism
//! ([`TensorParallelPass`]). They are [`Executor`](metal_attention_model::Executor)s of the model crate.
//!
//! The kernels are written in CUDA C++ in `kernels/`, compiled by `scripts/cuda-kernels` to `prebuilt/`, and included in the program;
//! a machine needs the NVIDIA driver only. [`CudaExecutor::supports`] checks whether there are kernels for all parts of a model.
//!
//! Where to find what: `executor.rs` evaluates steps; `runner.rs` and `runner/` launch the kernels of a micro-batch; `decode.rs`
//! launches the persistent kernel for single decode tokens; `decode_steps.rs` chooses how a decode step is launched, and
//! `lookahead.rs` launches greedy ones ahead of the host; `weights.rs`, `matrix.rs` and `codes.rs` upload and repack weights;
//! `kv_cache.rs`, `recurrent_state.rs` and `snapshot.rs` hold the memory of sequences; `sharding.rs`, `exchange.rs` and
//! `tensor_parallel.rs` are tensor parallelism; `args.rs` declares the kernels' arguments; `device.rs` and `launch.rs` wrap the
//! driver; `ceilings.rs` measures what the device can do at best.

mod activations;
mod args;
mod ceilings;
mod codes;
mod decode;
mod decode_steps;
mod device;
mod error;
mod exchange;
mod executor;
mod ids;
mod kv_cache;
mod launch;
mod lookahead;
mod matrix;
mod options;
mod profile;
mod recurrent_state;
mod runner;
mod sharding;
mod snapshot;
mod stack;
mod support;
mod tensor_parallel;
mod weights;

pub use ceilings::{CudaCeilings, CudaLaunchCosts};
pub use device::{CudaDevice, CudaSummary, cuda_summaries};
pub use error::CudaError;
pub use executor::{CudaExecutor, CudaForwardPass};
pub use options::CudaTuning;
pub use tensor_parallel::{TensorParallelExecutor, TensorParallelPass};
