//! The CPU backend: attention, batches, hostile input, and whole models against the references.

mod attention;
mod cancel;
mod forward;
mod hostile;
mod reference;
mod support;
