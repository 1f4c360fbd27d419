//! The subcommands, one file or folder each: its flags (`Args`) and its function `run`.

pub mod bench;
pub mod chat;
pub mod compare;
pub mod completions;
pub mod detokenize;
pub mod devices;
pub mod doctor;
pub mod draft;
pub mod embed;
pub mod encode_image;
pub mod export_tokenizer;
pub mod imatrix;
pub mod info;
#[cfg_attr(not(feature = "wgpu"), path = "no_kernels.rs")]
pub mod kernels;
pub mod launch;
pub mod list;
pub mod logits;
pub mod mcp;
pub mod perplexity;
pub mod pull;
pub mod quantize;
pub mod rerank;
pub mod rm;
pub mod run;
pub mod serve;
pub mod synth;
pub mod tokenize;
pub mod update;
