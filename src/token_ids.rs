//! Lists of token ids, as text.

use crate::cli_error::CliError;

/// Parses ids separated by commas or white space, or a JSON list. May be empty.
pub fn parse(text: &str) -> Result<Vec<u32>, CliError> {
    let text = text.trim();
    let text = text.strip_prefix('[').and_then(|t| t.strip_suffix(']')).unwrap_or(text);
    let words = text.split(|c: char| c == ',' || c.is_whitespace()).filter(|word| !word.is_empty());
    words.map(|word| word.parse().map_err(|e| CliError::Usage(format!("{word:?} is no token id: {e}")))).collect()
}

/// Checks that every id is below `n_vocab`.
pub fn check(ids: &[u32], n_vocab: usize) -> Result<(), CliError> {
    match ids.iter().find(|&&id| id as usize >= n_vocab) {
        Some(id) => Err(CliError::Usage(format!("token id {id} is outside the vocabulary of {n_vocab} tokens"))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_in_every_spelling() {
        for text in ["1,2,30", "1 2 30", "[1, 2, 30]\n", " 1,\n2\t30 ,"] {
            assert_eq!(parse(text).unwrap(), [1, 2, 30], "{text:?}");
        }
        assert_eq!(parse(" [] ").unwrap(), [0_u32; 0]);
        for text in ["x", "-1", "1.5", "4294967296", "[1", "1]"] {
            assert_eq!(parse(text).unwrap_err().exit_code(), 2, "{text:?}");
        }
    }
}
