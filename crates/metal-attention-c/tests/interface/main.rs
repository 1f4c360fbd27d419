//! Tests of the C interface: its functions called from Rust, the example programs compiled by a C compiler, and the header.

mod chat;
mod drafts;
mod example;
mod header;
mod misuse;
mod picture;
