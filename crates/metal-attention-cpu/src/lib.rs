//! CPU kernels and the CPU forward pass.
//!
//! [`CpuForwardPass`] runs a model on any CPU; the kernels are written once over
//! 16-lane vectors and compiled for AVX-512 with VNNI, AVX2, and plain Rust,
//! which is also the reference that the others are tested against. Quantised
//! matrices are repacked once at load and multiplied by activations quantised to
//! 8 bits; with [`CpuOptions::exact`] they stay in place and activations stay F32.

mod activations;
mod ceilings;
mod cores;
mod error;
mod forward;
mod forward_pass;
mod kernels;
mod kv_cache;
mod layers;
mod memory;
mod observer;
mod packed;
mod pool;
mod sequence_parallel;
mod shared;
mod simd;
mod state;
#[cfg(test)]
mod test_support;

pub use ceilings::CpuCeilings;
pub use cores::physical_cores;
pub use error::CpuError;
pub use forward_pass::{CpuForwardPass, CpuOptions};
pub use kv_cache::CacheType;
pub use observer::{MatrixInput, Observer};
pub use simd::Isa;

/// Name of the instruction set that kernels use on this machine, e.g.
/// `"avx512-vnni"`.
pub fn simd_name() -> &'static str {
    Isa::best().name()
}
