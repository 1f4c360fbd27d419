//! The subcommands, one file each: what it takes (`Args`) and what it does (`run`).

pub mod completions;
pub mod detokenize;
pub mod info;
pub mod logits;
pub mod perplexity;
pub mod quantize;
pub mod run;
pub mod synth;
pub mod tokenize;
