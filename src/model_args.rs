//! `-m`: which model a command works with.

use std::borrow::Cow;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use metal_attention::gguf::GgufFile;
use metal_attention::tokenizer::{Tokenizer, TokenizerOptions};
use metal_attention::{BUILT_IN_MODEL, Error, Model, ModelOptions};
use metal_attention_hub::{Environment, Hub, ModelName, PREFIX};

use crate::cli_error::CliError;
use crate::download_progress::DownloadProgress;
use crate::metadata_text::safe;

/// The model where -m is not given.
const VARIABLE: &str = "METAL_ATTENTION_MODEL";

/// The model files of a command that takes several.
#[derive(clap::Args)]
pub struct ModelsArgs {
    /// GGUF files (any part, where one is split) or names on the Hugging Face hub as in hf:OWNER/REPO; without them, the
    /// built-in model stories260K
    #[arg(short, long = "model", value_name = "FILE|hf:NAME", num_args = 1.., env = VARIABLE)]
    models: Vec<PathBuf>,

    /// Read the models' files into memory instead of mapping them
    #[arg(long)]
    no_mmap: bool,
}

impl ModelsArgs {
    /// Each of the models, or the built-in one.
    pub fn each(&self) -> Vec<ModelArgs> {
        let one = |model| ModelArgs { model, pre: None, no_mmap: self.no_mmap };
        match &self.models[..] {
            [] => vec![one(None)],
            models => models.iter().map(|model| one(Some(model.clone()))).collect(),
        }
    }
}

/// The model and how to read it.
#[derive(clap::Args)]
pub struct ModelArgs {
    /// GGUF file (any part, where it is split) or a name on the Hugging Face hub, hf:OWNER/REPO[:TYPE|:FILE]; without it,
    /// the built-in model stories260K
    #[arg(short, long, value_name = "FILE|hf:NAME", env = VARIABLE)]
    model: Option<PathBuf>,

    /// Read the model's file into memory instead of mapping it: it takes more memory, and the file may change meanwhile
    #[arg(long)]
    no_mmap: bool,

    /// Pre-tokenizer to use instead of the one the file names
    #[arg(long, value_name = "NAME")]
    pre: Option<String>,
}

impl ModelArgs {
    /// Opens the whole model.
    pub fn open(&self) -> Result<Model, CliError> {
        let gguf = self.open_gguf()?;
        let options = ModelOptions { pre: self.pre.clone(), in_memory: self.no_mmap };
        Model::from_gguf(gguf, &options).map_err(|e| self.in_file(e))
    }

    /// The tokenizer of a model that [`open`](Self::open) gave.
    pub fn tokenizer(&self, model: &Model) -> Result<Arc<Tokenizer>, CliError> {
        model.tokenizer().map_err(|e| self.in_file(e))
    }

    /// Opens the tokenizer alone; a vocabulary-only file will do.
    pub fn open_tokenizer(&self) -> Result<Tokenizer, CliError> {
        let file = self.open_gguf()?;
        Tokenizer::from_metadata(file.metadata(), &self.tokenizer_options()).map_err(|e| self.in_file(e.into()))
    }

    /// How its tokenizer is built.
    pub fn tokenizer_options(&self) -> TokenizerOptions {
        TokenizerOptions { pre: self.pre.clone() }
    }

    /// Opens the file. Says so on stderr where it is the built-in one.
    pub fn open_gguf(&self) -> Result<GgufFile, CliError> {
        if let Some(file) = self.file()? {
            let gguf = if self.no_mmap { GgufFile::read(file) } else { GgufFile::open(file) };
            return gguf.map_err(|e| self.named(Error::from(e).into()));
        }
        // Where stderr is closed the note is lost, and nothing else.
        let _ = writeln!(std::io::stderr(), "note: no model given with -m: using the built-in model stories260K");
        Ok(GgufFile::from_bytes(BUILT_IN_MODEL).map_err(Error::from)?)
    }

    /// Downloads a model that is named and not in the cache. Opening does so, too; this is for before the progress of
    /// something else is shown.
    pub fn fetch(&self) -> Result<(), CliError> {
        self.file().map(drop)
    }

    /// The file to open; `None`: the built-in model.
    fn file(&self) -> Result<Option<Cow<'_, Path>>, CliError> {
        let Some(path) = self.path() else { return Ok(None) };
        let Some(name) = path.to_str().filter(|name| name.starts_with(PREFIX)) else {
            return Ok(Some(Cow::Borrowed(path)));
        };
        let get = |name: ModelName| Hub::new(Environment::read()?).get(&name, &mut DownloadProgress::new());
        let mut model = name.parse().and_then(get).map_err(|e| self.named(e.into()))?;
        Ok(Some(Cow::Owned(model.files.swap_remove(0))))
    }

    /// The file's name as given, or that of the built-in model.
    pub fn name(&self) -> String {
        self.path().map_or("stories260K (built in)".into(), |path| safe(&path.display().to_string()))
    }

    /// The file's name without folder and ending, or that of the built-in model.
    pub fn stem(&self) -> String {
        let stem = self.path().and_then(Path::file_stem);
        stem.map_or("stories260K".into(), |stem| stem.to_string_lossy().into_owned())
    }

    /// What was given. An empty name, as an environment variable may have, is none.
    fn path(&self) -> Option<&Path> {
        self.model.as_deref().filter(|path| !path.as_os_str().is_empty())
    }

    /// `error`, with the file it is about.
    pub fn in_file(&self, error: Error) -> CliError {
        self.named(CliError::InFile { file: self.name(), error })
    }

    /// `error`, with where the model's name comes from if that is not the command line.
    fn named(&self, error: CliError) -> CliError {
        let variable = std::env::var_os(VARIABLE);
        if self.path().is_some_and(|path| variable.is_some_and(|model| model == path)) {
            CliError::InEnvironment(Box::new(error))
        } else {
            error
        }
    }
}
