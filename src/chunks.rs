//! Evaluates a text in chunks of tokens and yields the logits of their second halves, the method of llama.cpp's perplexity.

use metal_attention::tokenizer::{EncodeOptions, Tokenizer};
use metal_attention::{BatchToken, Error, ForwardError, ForwardPass, Logits};

use crate::cli_error::CliError;

/// The largest size of the logits of one batch, in bytes.
const MAX_LOGITS_BYTES: usize = 64 << 20;

/// The tokens of `text`, and the token to put first in every chunk (BOS) if the model has one.
pub fn tokenize(tokenizer: &Tokenizer, text: &str) -> (Vec<u32>, Option<u32>) {
    (begin(tokenizer).into_iter().chain(encode(tokenizer, text, false)).collect(), begin(tokenizer))
}

/// The BOS token, if the model puts one before a text.
pub fn begin(tokenizer: &Tokenizer) -> Option<u32> {
    encode(tokenizer, "", true).first().copied().filter(|&id| Some(id) == tokenizer.bos())
}

/// The tokens of `text`, without names of control tokens.
fn encode(tokenizer: &Tokenizer, text: &str, add_special: bool) -> Vec<u32> {
    tokenizer.encode(text, EncodeOptions { add_special, parse_special: false })
}

/// The first position of a chunk of `n_ctx` tokens whose logits are scored. The last one is `n_ctx - 2`.
pub fn first_scored(n_ctx: usize) -> usize {
    n_ctx / 2
}

/// Checks that a text of `n_tokens` tokens has at least two chunks of `n_ctx` tokens, and that these have scored tokens.
pub fn check_length(n_tokens: usize, n_ctx: usize) -> Result<(), CliError> {
    if n_ctx < 4 {
        return Err(CliError::Usage(format!("-c {n_ctx} leaves nothing to score: it must be at least 4")));
    }
    let needed = n_ctx.saturating_mul(2);
    if n_tokens < needed {
        return Err(CliError::Usage(format!(
            "the text has {n_tokens} tokens, but chunks of {n_ctx} need at least {needed}: give a longer text or a smaller -c"
        )));
    }
    Ok(())
}

/// The number of tokens with logits in a batch of at most `n_ubatch` tokens, limited by [`MAX_LOGITS_BYTES`].
pub fn n_scored(n_vocab: usize, n_ubatch: usize) -> usize {
    (MAX_LOGITS_BYTES / (4 * n_vocab)).clamp(1, n_ubatch)
}

/// Evaluates a chunk from an empty context with each of `passes`; `bos` replaces its first token. `visit` is called with the
/// logits of the second half, a batch of rows at a time: those of each forward pass, and the token that follows each row.
/// Returns false if Ctrl-C ended the evaluation.
pub fn evaluate(
    passes: &mut [&mut dyn ForwardPass],
    chunk: &[u32],
    bos: Option<u32>,
    n_ubatch: usize,
    mut visit: impl FnMut(&[Logits], &[u32]) -> Result<(), CliError>,
) -> Result<bool, CliError> {
    // The last token is only predicted, never evaluated; the first half is evaluated without logits.
    let (first, last) = (first_scored(chunk.len()), chunk.len() - 1);
    let token = |pos: usize| {
        let id = bos.filter(|_| pos == 0).unwrap_or(chunk[pos]);
        BatchToken { id, seq: 0, pos, output: pos >= first }
    };
    let n_read = n_ubatch.min(chunk.len());
    let n_vocab = passes.iter().map(|pass| pass.spec().n_vocab).max().unwrap_or(1);
    let n_scored = n_scored(n_vocab, n_read);
    for pass in passes.iter_mut() {
        pass.reset();
    }
    let mut pos = 0;
    while pos < last {
        let end = if pos < first { first.min(pos + n_read) } else { last.min(pos + n_scored) };
        let batch: Vec<_> = (pos..end).map(token).collect();
        let mut logits = Vec::new();
        for pass in passes.iter_mut() {
            match pass.forward(&batch) {
                Err(ForwardError::Cancelled) => return Ok(false),
                found => logits.push(found.map_err(Error::from)?),
            }
        }
        if pos >= first {
            visit(&logits, &chunk[pos + 1..=end])?;
        }
        pos = end;
    }
    Ok(true)
}
