//! The input of commands that evaluate tokens: a text, or token ids.

use metal_attention::{EngineOptions, Error, Model};

use crate::cli_error::CliError;
use crate::model_args::ModelArgs;
use crate::text_input::{EncodingArgs, TextArgs};
use crate::token_ids;

/// A text or token ids; one of them must be given.
#[derive(clap::Args)]
pub struct TokensArgs {
    #[command(flatten)]
    text: TextArgs,

    /// Token ids instead of a text, separated by commas; nothing is added to them
    #[arg(long, value_name = "IDS", conflicts_with_all = ["prompt", "file", "stdin"])]
    tokens: Option<String>,

    #[command(flatten)]
    encoding: EncodingArgs,
}

impl TokensArgs {
    /// The tokens: at least one, all of them in the vocabulary of `model`, which `source` opened.
    pub fn read(&self, source: &ModelArgs, model: &Model) -> Result<Vec<u32>, CliError> {
        let ids = if let Some(tokens) = &self.tokens {
            token_ids::parse(tokens)?
        } else {
            let text = self.text.read()?.ok_or_else(|| {
                CliError::Usage("there is nothing to evaluate: give --tokens IDS, -p TEXT, -f FILE, or -".into())
            })?;
            source.tokenizer(model)?.encode(&text, self.encoding.options())
        };
        if ids.is_empty() {
            return Err(Error::EmptyPrompt.into());
        }
        token_ids::check(&ids, model.spec().n_vocab)?;
        Ok(ids)
    }
}

/// Makes the context `ids.len()` tokens long unless `options` set its length. An error if `ids` do not fit.
pub fn fit_context(options: &mut EngineOptions, ids: &[u32], model: &Model) -> Result<(), CliError> {
    let n_ctx = *options.n_ctx.get_or_insert(ids.len());
    if ids.len() > n_ctx {
        let n_ctx_train = model.spec().n_ctx_train;
        return Err(Error::PromptTooLong { n_prompt: ids.len(), n_ctx, n_ctx_train }.into());
    }
    Ok(())
}
