#![doc = include_str!("../README.md")]

mod activations;
mod ceilings;
mod cores;
mod encoder;
mod error;
mod executor;
mod forward;
mod kernels;
mod kv_cache;
mod layers;
mod memory;
mod observer;
mod packed;
mod parts;
mod pool;
mod sequence_parallel;
mod shared;
mod simd;
mod state;
#[cfg(test)]
mod test_support;
mod turns;

pub use ceilings::CpuCeilings;
pub use cores::physical_cores;
pub use encoder::{CpuEncoder, CpuEncoderMatrix, CpuEncoderTypes};
pub use error::CpuError;
pub use executor::{CpuExecutor, CpuForwardPass, CpuOptions};
pub use kv_cache::CacheType;
pub use observer::{MatrixInput, Observer};
pub use simd::Isa;

/// The name of the instruction set that kernels use on this machine by default, e.g. `"avx512-vnni"`.
pub fn simd_name() -> &'static str {
    Isa::best().name()
}
