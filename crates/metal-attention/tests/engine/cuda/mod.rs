//! Whole models through CUDA, on an NVIDIA GPU or on the software CUDA device.
#![cfg(feature = "cuda")]

mod mixers;
mod models;

/// Whether CUDA's first device is the software device, on which a comparison of a model takes seconds.
pub(crate) fn is_software() -> bool {
    metal_attention::cuda_summaries()
        .is_ok_and(|found| found.first().is_some_and(|device| device.name.starts_with("software")))
}
