//! OpenAI's interface: chat completions, completions, embeddings and models, with the fields that vLLM, llama.cpp and
//! others add; and reranking, as Jina and Cohere define it.

pub mod chat;
pub mod completions;
pub mod embeddings;
pub mod fields;
pub mod logprobs;
pub mod models;
pub mod reasoning;
pub mod rerank;
pub mod unsupported;
mod usage;
