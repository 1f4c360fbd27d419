//! Reading and writing GGUF files, sound and damaged ones.

mod blocks;
mod hostile;
mod mutation;
mod roundtrip;
mod split;
mod support;
