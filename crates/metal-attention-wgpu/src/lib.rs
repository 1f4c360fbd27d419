#![doc = include_str!("../README.md")]

mod activations;
mod adapter;
mod arena;
mod batch;
mod ceilings;
mod device;
mod disk_cache;
mod dispatch;
mod emit;
mod encoder;
mod error;
mod executor;
#[cfg(feature = "internal-kernels")]
pub mod kernels;
#[cfg(not(feature = "internal-kernels"))]
#[expect(dead_code, unused_imports, reason = "scalar twins and single kernels are for the tests of this crate")]
mod kernels;
mod kv_cache;
mod lookahead;
mod matrix;
mod options;
mod parts;
mod persistent_layers;
mod pipelines;
mod plan;
mod profile;
mod readback;
mod rope_tables;
mod segments;
mod shader;
mod spans;
mod state;
mod waker;
mod weights;

pub use adapter::{AdapterChoice, AdapterSummary, adapter_summaries, no_hardware};
pub use arena::{Arena, Bind, Slice};
pub use batch::{BatchBuffer, InputPlace, batch_words, batch_words_at};
pub use ceilings::{LaunchCosts, WgpuCeilings};
pub use device::{WgpuDevice, WgpuOptions};
pub use dispatch::{AccessRange, BatchDims, Dispatch, ExpertTiles, GridExtent};
pub use emit::{EmitError, ShaderLanguage, emit};
pub use encoder::WgpuEncoder;
pub use error::WgpuError;
pub use executor::{WgpuExecutor, WgpuForwardPass};
pub use kernels::catalogue;
pub use kv_cache::WgpuKvCache;
pub use matrix::{MatrixPart, WgpuMatrix};
pub use options::WgpuTuning;
pub use pipelines::{PipelineCache, PipelineKey};
pub use readback::Readback;
pub use shader::{Constant, ShaderFeatures, wgsl};
pub use wgpu;
