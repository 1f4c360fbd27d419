//! Tests of tokenizers: recorded cases of published vocabularies, properties of random texts, hostile metadata, export.

mod export;
mod hostile;
mod properties;
mod vocabularies;
