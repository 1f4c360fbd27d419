//! Tests of reading and writing GGUF files: block formats, valid files, damaged and hostile files, split models.

mod blocks;
mod hostile;
mod mutation;
mod roundtrip;
mod split;
mod support;
