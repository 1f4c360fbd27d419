//! Tests of the engine with whole models: every architecture, each GPU backend against the CPU, generation, the scheduler,
//! snapshots and session files, damaged model files.

mod architectures;
mod assistant;
mod beside;
mod block_drafters;
mod cuda;
mod draft_model;
mod drafters;
mod generator;
mod hidden_rows;
mod hostile_models;
mod hybrid;
mod long_delta_rule;
mod long_mamba;
mod new_backend;
mod pictures;
mod prediction_heads;
mod projection;
mod random_models;
mod rwkv;
mod scheduler;
mod session_file;
mod snapshots;
mod spans;
mod speculation;
mod speculation_on_gpus;
mod toys;
mod wgpu;
mod windows;
