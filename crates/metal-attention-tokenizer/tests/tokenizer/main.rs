//! Tokenizers over whole vocabularies, hostile ones and exported ones.

mod export;
mod hostile;
mod properties;
mod vocabularies;
