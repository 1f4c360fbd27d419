//! Whole models through wgpu: against reference values, against the CPU, and features that only the GPU backend has.
#![cfg(feature = "wgpu")]

mod cancel;
mod correctness;
pub mod device;
mod hybrid;
mod layer_kinds;
mod layers_at_once;
mod pages;
mod scheduler;
mod shapes;
