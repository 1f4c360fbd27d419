//! Kernels against float64 formulas.

mod elementwise;
mod packed;
mod plain;
mod recurrent;
mod short_conv;
