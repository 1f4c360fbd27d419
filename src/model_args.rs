//! `-m`: which model a command works with.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use metal_attention::gguf::GgufFile;
use metal_attention::tokenizer::{Tokenizer, TokenizerOptions};
use metal_attention::{BUILT_IN_MODEL, Error, Model, ModelOptions};

use crate::cli_error::CliError;

/// The model files of a command that takes several.
#[derive(clap::Args)]
pub struct ModelsArgs {
    /// GGUF files (any part, where one is split); without them, the built-in model stories260K
    #[arg(short, long = "model", value_name = "FILE", num_args = 1.., env = "METAL_ATTENTION_MODEL")]
    models: Vec<PathBuf>,
}

impl ModelsArgs {
    /// Each of the models, or the built-in one.
    pub fn each(&self) -> Vec<ModelArgs> {
        let one = |model| ModelArgs { model, pre: None };
        match &self.models[..] {
            [] => vec![one(None)],
            models => models.iter().map(|model| one(Some(model.clone()))).collect(),
        }
    }
}

/// The model file and how to read it.
#[derive(clap::Args)]
pub struct ModelArgs {
    /// GGUF file (any part, where it is split); without it, the built-in model stories260K
    #[arg(short, long, value_name = "FILE", env = "METAL_ATTENTION_MODEL")]
    model: Option<PathBuf>,

    /// Pre-tokenizer to use instead of the one the file names
    #[arg(long, value_name = "NAME")]
    pre: Option<String>,
}

impl ModelArgs {
    /// Opens the whole model.
    pub fn open(&self) -> Result<Model, CliError> {
        let gguf = self.open_gguf()?;
        Model::from_gguf(gguf, &ModelOptions { pre: self.pre.clone() }).map_err(|e| self.in_file(e))
    }

    /// The tokenizer of a model that [`open`](Self::open) gave.
    pub fn tokenizer(&self, model: &Model) -> Result<Arc<Tokenizer>, CliError> {
        model.tokenizer().map_err(|e| self.in_file(e))
    }

    /// Opens the tokenizer alone; a vocabulary-only file will do.
    pub fn open_tokenizer(&self) -> Result<Tokenizer, CliError> {
        let options = TokenizerOptions { pre: self.pre.clone() };
        Tokenizer::from_metadata(self.open_gguf()?.metadata(), &options).map_err(|e| self.in_file(e.into()))
    }

    /// Opens the file. Says so on stderr where it is the built-in one.
    pub fn open_gguf(&self) -> Result<GgufFile, CliError> {
        if let Some(path) = self.path() {
            return Ok(GgufFile::open(path).map_err(Error::from)?);
        }
        // Where stderr is closed the note is lost, and nothing else.
        let _ = writeln!(std::io::stderr(), "note: no model given with -m: using the built-in model stories260K");
        Ok(GgufFile::from_bytes(BUILT_IN_MODEL).map_err(Error::from)?)
    }

    /// The file's name as given, or that of the built-in model.
    pub fn name(&self) -> String {
        self.path().map_or("stories260K (built in)".into(), |path| path.display().to_string())
    }

    /// An empty name, as an environment variable may have, is none.
    fn path(&self) -> Option<&Path> {
        self.model.as_deref().filter(|path| !path.as_os_str().is_empty())
    }

    /// `error`, with the file it is about.
    fn in_file(&self, error: Error) -> CliError {
        CliError::InFile { file: self.name(), error }
    }
}
