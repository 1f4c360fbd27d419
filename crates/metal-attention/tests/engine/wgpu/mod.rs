//! Whole models through wgpu: against the references, against the CPU, and what only GPUs have.
#![cfg(feature = "wgpu")]

mod cancel;
mod correctness;
pub mod device;
mod hybrid;
mod layers_at_once;
mod pages;
mod parts;
mod scheduler;
mod shapes;
