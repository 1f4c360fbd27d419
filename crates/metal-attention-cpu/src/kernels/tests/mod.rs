//! Kernels against float64 formulas.

mod elementwise;
mod packed;
mod plain;
mod short_conv;
