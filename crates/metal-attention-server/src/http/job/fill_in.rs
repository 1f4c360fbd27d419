//! Fill in the middle: prompts for the text between a prefix and a suffix.

use metal_attention::tokenizer::{EncodeOptions, FillInTheMiddle};

use crate::http::ApiError;
use crate::http::models::LoadedModel;

/// Returns the model's special tokens for fill in the middle; an error if it has none.
pub fn tokens(model: &LoadedModel) -> Result<FillInTheMiddle, ApiError> {
    model.tokenizer.fill_in_the_middle().ok_or_else(|| {
        let message = "the model's vocabulary has no tokens for filling in the middle (prefix, suffix, middle): use a model \
                       that was trained for it, or put all that it needs into the prompt";
        ApiError::unsupported_by_model(message)
    })
}

/// Returns the token ids of a text. Special tokens in the text are not parsed: a document may contain their spelling.
/// `param`: the field's name, for errors.
pub fn encode(model: &LoadedModel, text: &str, param: &str) -> Result<Vec<u32>, ApiError> {
    model.check_length(text, param)?;
    Ok(model.tokenizer.encode(text, EncodeOptions { add_special: false, parse_special: false }))
}

/// Returns the prompt for the text between `prefix` and `suffix`: BOS, `context`, prefix token, `prefix`, suffix token,
/// `suffix`, middle token.
pub fn prompt(
    model: &LoadedModel,
    tokens: FillInTheMiddle,
    context: &[u32],
    prefix: &[u32],
    suffix: &[u32],
) -> Vec<u32> {
    let bos = model.tokenizer.bos().filter(|_| model.tokenizer.adds_bos());
    let prefix = prefix.strip_prefix(bos.as_slice()).unwrap_or(prefix);
    let mut ids: Vec<u32> = bos.into_iter().collect();
    ids.extend(context);
    ids.push(tokens.prefix);
    ids.extend(prefix);
    ids.push(tokens.suffix);
    ids.extend(suffix);
    ids.push(tokens.middle);
    ids
}

/// Cuts `prefix` and `suffix` to `room` tokens together. The tokens next to the gap remain; where both are long, `suffix`
/// has at most a quarter. Returns the number of unused tokens.
pub fn fit(prefix: &mut Vec<u32>, suffix: &mut Vec<u32>, room: usize) -> usize {
    let n_suffix = suffix.len().min(room.saturating_sub(prefix.len()).max(room / 4));
    let n_prefix = prefix.len().min(room - n_suffix);
    suffix.truncate(n_suffix);
    prefix.drain(..prefix.len() - n_prefix);
    room - n_prefix - n_suffix
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tokens_next_to_the_gap_remain() {
        let fit = |n_prefix: u32, n_suffix: u32, room| {
            let (mut prefix, mut suffix): (Vec<u32>, Vec<u32>) = ((0..n_prefix).collect(), (0..n_suffix).collect());
            let left = fit(&mut prefix, &mut suffix, room);
            (prefix, suffix, left)
        };
        assert_eq!(fit(3, 2, 8), (vec![0, 1, 2], vec![0, 1], 3));
        assert_eq!(fit(9, 9, 8), (vec![3, 4, 5, 6, 7, 8], vec![0, 1], 0));
        assert_eq!(fit(1, 9, 8), (vec![0], vec![0, 1, 2, 3, 4, 5, 6], 0));
        assert_eq!(fit(9, 1, 8), (vec![2, 3, 4, 5, 6, 7, 8], vec![0], 0));
        assert_eq!(fit(2, 2, 0), (vec![], vec![], 0));
    }
}
