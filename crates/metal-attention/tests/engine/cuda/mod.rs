//! Whole models through CUDA, on an NVIDIA GPU or on the software CUDA device.
#![cfg(feature = "cuda")]

mod mixers;
mod models;

pub(crate) use models::ranks::has_ranks;
pub(crate) use models::{has_cuda, windowed_model};

/// Whether tests run a part of their cases: on the software device, on which a comparison of a model takes seconds.
pub(crate) fn takes_fewer_cases() -> bool {
    let software = metal_attention::cuda_summaries()
        .is_ok_and(|found| found.first().is_some_and(|device| device.name.starts_with("software")));
    metal_attention_testing::takes_fewer_cases(software)
}
