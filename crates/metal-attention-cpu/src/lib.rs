//! CPU kernels and the CPU forward pass.
//!
//! [`CpuForwardPass`] runs a model on any CPU. Each kernel is written once over vectors of 16 lanes and compiled for AVX-512
//! with VNNI, AVX2, Arm NEON, and plain Rust, which is the reference that the others are tested against. Quantised matrices are
//! repacked once when they are loaded, and multiplied by activations quantised to 8 bits; with [`exact`](metal_attention_model::SessionOptions::exact) they stay
//! in the mapped file and activations stay F32.
//!
//! The path of a step: `executor` (set-up, memory), `forward` (the order of a micro-batch and of a layer), `parts` (a file for
//! each part of a model), `kernels` (products, attention,
//! recurrences, elementwise steps) on `simd` (vectors), spread over the threads of `pool`.

mod activations;
mod ceilings;
mod cores;
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

pub use ceilings::CpuCeilings;
pub use cores::physical_cores;
pub use error::CpuError;
pub use executor::{CpuExecutor, CpuForwardPass, CpuOptions};
pub use kv_cache::CacheType;
pub use observer::{MatrixInput, Observer};
pub use simd::Isa;

/// The name of the instruction set that kernels use on this machine by default, e.g. `"avx512-vnni"`.
pub fn simd_name() -> &'static str {
    Isa::best().name()
}
