//! The engine over whole models: every architecture, each backend against the CPU, generation, snapshots, hostile files.

mod architectures;
mod cuda;
mod generator;
mod hostile_models;
mod hybrid;
mod long_delta_rule;
mod long_mamba;
mod random_models;
mod rwkv;
mod scheduler;
mod session_file;
mod snapshots;
mod toys;
mod wgpu;
mod windows;
