//! The kernels of a forward pass: matrix products, attention, recurrences, norms and activations. Each is written once over
//! [`Simd`](crate::simd::Simd) and compiled for every instruction set.

pub(crate) mod attention;
pub(crate) mod elementwise;
pub(crate) mod matmul;
mod matmul_packed;
mod matmul_plain;
pub(crate) mod recurrent;
#[cfg(test)]
mod tests;
mod vectors;
