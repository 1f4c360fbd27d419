//! `--chat-template`: a chat template in a file.

use std::path::Path;
use std::sync::Arc;

use metal_attention::tokenizer::Tokenizer;
use metal_attention_chat::ChatTemplate;

use crate::cli_error::CliError;

/// Reads the chat template in the file `path`, for the special tokens of `tokenizer`.
pub fn read(path: &Path, tokenizer: &Arc<Tokenizer>) -> Result<ChatTemplate, CliError> {
    let source = std::fs::read_to_string(path)
        .map_err(|e| CliError::Usage(format!("cannot read the chat template {}: {e}", path.display())))?;
    ChatTemplate::with_tokenizer(&source, Some(Arc::clone(tokenizer)))
        .map_err(|e| CliError::Usage(format!("{}: {e}", path.display())))
}
