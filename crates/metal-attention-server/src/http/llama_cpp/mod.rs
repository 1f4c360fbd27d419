//! llama.cpp's own interface.

pub mod infill;
pub mod tokens;
