//! The C interface, called from Rust and from C.

mod chat;
mod example;
mod header;
mod misuse;
