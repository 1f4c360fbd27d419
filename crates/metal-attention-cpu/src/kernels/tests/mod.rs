//! Tests of the kernels against formulas in float64.

mod elementwise;
mod packed;
mod plain;
mod recurrent;
mod short_conv;
