//! The kernels of a forward pass, each written once over [`Simd`](crate::simd::Simd).

pub(crate) mod attention;
pub(crate) mod elementwise;
pub(crate) mod matmul;
mod matmul_packed;
mod matmul_plain;
#[cfg_attr(not(test), allow(dead_code, reason = "some are run by no model yet"))]
pub(crate) mod recurrent;
pub(crate) mod short_conv;
#[cfg(test)]
mod tests;
mod vectors;
