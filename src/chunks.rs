//! Texts cut into chunks of tokens, as llama.cpp's tools do for perplexity and importance.

use metal_attention::tokenizer::{EncodeOptions, Tokenizer};

/// The ids of `text`, and the token to put first in every chunk where the model wants one.
pub fn tokenize(tokenizer: &Tokenizer, text: &str) -> (Vec<u32>, Option<u32>) {
    let encode = |text, add_special| tokenizer.encode(text, EncodeOptions { add_special, parse_special: false });
    let bos = encode("", true).first().copied().filter(|&id| Some(id) == tokenizer.bos());
    (bos.into_iter().chain(encode(text, false)).collect(), bos)
}
