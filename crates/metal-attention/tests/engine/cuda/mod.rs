//! Whole models through CUDA, on a GPU or on the software device.
#![cfg(feature = "cuda")]

mod mixers;
mod models;
