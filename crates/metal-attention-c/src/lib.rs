#![doc = include_str!("../README.md")]
#![allow(clippy::doc_markdown, reason = "the documentation is that of a C header")]

mod answer;
mod batch;
mod chat;
mod context;
mod embed;
mod generate;
mod grammar;
mod model;
mod picture;
mod pointers;
mod sampling;
mod status;

pub use answer::{Answer, ma_answer_free, ma_answer_message, ma_answer_new};
pub use batch::{
    Batch, BatchResult, ma_batch_add, ma_batch_add_prompt, ma_batch_cancel, ma_batch_error, ma_batch_free,
    ma_batch_new, ma_batch_run,
};
pub use chat::{Chat, ChatOptions, ma_chat_free, ma_chat_new, ma_chat_options_default, ma_chat_prompt, ma_chat_tokens};
pub use context::{
    Context, ContextOptions, ma_context_cancel, ma_context_free, ma_context_n_ctx, ma_context_new,
    ma_context_options_default,
};
pub use embed::{ma_embed, ma_model_n_embedding};
pub use generate::{
    GenerateOptions, Generation, MA_NO_TOKEN, OnToken, StopReason, Token, ma_complete, ma_generate,
    ma_generate_options_default, ma_generate_prompt,
};
pub use grammar::{Grammar, ma_grammar_free, ma_grammar_left_out, ma_grammar_new};
pub use model::{
    MA_NUL_TERMINATED, Model, ma_detokenize, ma_model_built_in, ma_model_free, ma_model_n_ctx_train, ma_model_n_vocab,
    ma_model_open, ma_tokenize,
};
pub use picture::{
    Picture, PictureEncoder, PictureOptions, Prompt, ma_picture_encode, ma_picture_encoder_free,
    ma_picture_encoder_open, ma_picture_free, ma_picture_options_default, ma_prompt_free, ma_prompt_n_tokens,
    ma_prompt_new, ma_prompt_of_chat,
};
pub use sampling::{LogitBias, SamplingOptions, ma_sampling_options_default, ma_sampling_options_greedy};
pub use status::{MA_ABI_VERSION, Status, ma_abi_version, ma_last_error, ma_version};
