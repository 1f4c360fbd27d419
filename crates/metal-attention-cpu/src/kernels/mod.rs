//! The kernels of a forward pass, each written once over [`Simd`](crate::simd::Simd).

pub(crate) mod attention;
pub(crate) mod elementwise;
pub(crate) mod matmul;
mod matmul_packed;
mod matmul_plain;
pub(crate) mod recurrent;
#[cfg(test)]
mod tests;
mod vectors;
