//! Tests of every kernel against its scalar twin, and of what the kernels rely on: device, weights, bounds, pipelines. The
//! twin of a kernel is an implementation on the CPU, one element after the other, which the crate exports as `KERNEL_twin`.
//! All tests are in one program, so that they share devices and pipelines. Without a GPU (a software one will do) they are
//! skipped; in CI that is a failure.

mod argmax;
mod attention;
mod block_conv;
mod bounds;
mod device;
mod elementwise;
mod embedding;
mod encoder;
mod encoder_rows;
mod experts;
mod general_attention;
mod kv_cache;
mod matmul;
mod matmul_split;
mod matrix_units;
mod matvec;
mod pipeline_cache;
mod rates;
mod recurrent;
mod rmsnorm;
mod rope;
mod rows;
mod segment_attention;
mod short_conv;
mod streams;
mod support;
mod top_k;
mod weights;
