//! Tests of the CPU backend: attention, batches, cancellation, hostile files, and whole models against reference values.

mod attention;
mod cancel;
mod encoder;
mod forward;
mod hostile;
mod reference;
mod spans;
mod support;
