//! Whole models through CUDA, on an NVIDIA GPU or on the software CUDA device.
#![cfg(feature = "cuda")]

mod mixers;
mod models;
