//! The flags that name a model (`-m`, or the positional argument) and say how its file is read.
//!
//! [`ModelArgs`] is for commands with one model, [`ModelsArgs`] for several. They open the file (`find_model.rs` finds it)
//! and add its name to errors.

use std::ffi::OsString;
use std::io::Write;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use clap::{ArgMatches, Args, Command, FromArgMatches};
use metal_attention::gguf::GgufFile;
use metal_attention::speculation::DraftFile;
use metal_attention::tokenizer::{Tokenizer, TokenizerOptions};
use metal_attention::{BUILT_IN_MODEL, Error, Model, ModelOptions};

use crate::cli_error::CliError;
use crate::completion;
use crate::find_model::{find, names_model, without_ending};
use crate::first_model;
use crate::map_gguf::map_gguf;
use crate::metadata_text::safe;

/// The environment variable with the model for commands that are given none.
const VARIABLE: &str = "METAL_ATTENTION_MODEL";

/// The models of a command that takes several.
#[derive(Args)]
pub struct ModelsArgs {
    /// The same as -m
    #[arg(value_name = "MODEL", conflicts_with = "models", add = completion::models::usable())]
    named_models: Vec<PathBuf>,

    /// GGUF files (any part of a split one), well-known names such as llama3.2, or names on the Hugging Face hub as OWNER/REPO.
    /// Default: the model that METAL_ATTENTION_MODEL names, else the built-in stories260K
    #[arg(short, long = "model", value_name = "MODEL", num_args = 1.., add = completion::models::usable())]
    models: Vec<PathBuf>,

    /// Read the models' files into memory instead of mapping them
    #[arg(long)]
    no_mmap: bool,
}

impl ModelsArgs {
    /// Whether `name` is given as a positional argument, and no file has this name.
    pub fn has(&self, name: &str) -> bool {
        self.named_models.iter().any(|model| model.as_os_str() == name && !model.exists())
    }

    /// The models, each with these flags. Without one: the model of the environment or the built-in one.
    pub fn each(&self) -> Vec<ModelArgs> {
        let one = |model| ModelArgs { model, pre: None, no_mmap: self.no_mmap };
        match [&self.named_models[..], &self.models].concat() {
            models if models.is_empty() => vec![one(None)],
            models => models.into_iter().map(|model| one(Some(model))).collect(),
        }
    }
}

/// [`ModelArgs`] for a command whose only positional argument is the model.
pub struct NamedModelArgs(ModelArgs);

/// The flags of [`NamedModelArgs`] as clap reads them.
#[derive(Args)]
struct NamedModelFlags {
    /// The same as -m
    #[arg(value_name = "MODEL", conflicts_with = "model", add = completion::models::usable())]
    named_model: Option<PathBuf>,

    #[command(flatten)]
    flags: ModelArgs,
}

impl FromArgMatches for NamedModelArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let NamedModelFlags { named_model, flags } = NamedModelFlags::from_arg_matches(matches)?;
        Ok(Self(ModelArgs { model: flags.model.or(named_model), ..flags }))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        Self::from_arg_matches(matches).map(|new| *self = new)
    }
}

impl Args for NamedModelArgs {
    fn augment_args(command: Command) -> Command {
        NamedModelFlags::augment_args(command)
    }

    fn augment_args_for_update(command: Command) -> Command {
        NamedModelFlags::augment_args_for_update(command)
    }
}

impl Deref for NamedModelArgs {
    type Target = ModelArgs;

    fn deref(&self) -> &ModelArgs {
        &self.0
    }
}

/// The model of a command, and how its file is read.
#[derive(Args, Clone)]
pub struct ModelArgs {
    /// GGUF file (any part of a split one), a well-known name such as llama3.2, or a name on the Hugging Face hub,
    /// OWNER/REPO[:TYPE|:FILE]. Default: the model that METAL_ATTENTION_MODEL names, else the built-in stories260K
    #[arg(short, long, value_name = "MODEL", add = completion::models::usable())]
    model: Option<PathBuf>,

    /// Read the model's file into memory instead of mapping it: takes more memory, but the file may change meanwhile
    #[arg(long)]
    no_mmap: bool,

    /// Pre-tokenizer to use instead of the one the file names
    #[arg(long, value_name = "NAME")]
    pre: Option<String>,
}

impl ModelArgs {
    /// The flags without a model; [`of_file`](Self::of_file) adds one. Until then they stand for the model of the environment.
    pub fn unnamed(no_mmap: bool, pre: Option<String>) -> Self {
        Self { model: None, no_mmap, pre }
    }

    /// The same flags for the model in `file`.
    pub fn of_file(&self, file: PathBuf) -> Self {
        Self { model: Some(file), ..self.clone() }
    }

    /// The same flags with the file mapped, for reading metadata without the tensors.
    pub fn mapped(&self) -> Self {
        Self { no_mmap: false, ..self.clone() }
    }

    /// Whether the file is mapped.
    pub fn is_mapped(&self) -> bool {
        !self.no_mmap
    }

    /// Opens the model: its file, its hyperparameters and its tensors.
    pub fn open(&self) -> Result<Model, CliError> {
        Model::from_gguf(self.open_gguf()?, &self.options()).map_err(|e| self.in_file(e))
    }

    /// Opens the drafter in the file: a model, or what needs its target.
    pub fn open_draft(&self) -> Result<DraftFile, CliError> {
        DraftFile::from_gguf(self.open_gguf()?, &self.options()).map_err(|e| self.in_file(e))
    }

    /// The options of opening a model.
    fn options(&self) -> ModelOptions {
        ModelOptions { pre: self.pre.clone(), in_memory: self.no_mmap }
    }

    /// The tokenizer of `model`, which [`open`](Self::open) returned.
    pub fn tokenizer(&self, model: &Model) -> Result<Arc<Tokenizer>, CliError> {
        model.tokenizer().map_err(|e| self.in_file(e))
    }

    /// Opens the tokenizer alone; the file needs no tensors.
    pub fn open_tokenizer(&self) -> Result<Tokenizer, CliError> {
        let file = self.open_gguf()?;
        Tokenizer::from_metadata(file.metadata(), &self.tokenizer_options()).map_err(|e| self.in_file(e.into()))
    }

    /// The options of the tokenizer.
    pub fn tokenizer_options(&self) -> TokenizerOptions {
        TokenizerOptions { pre: self.pre.clone() }
    }

    /// Opens the file without reading the model. Prints a note on stderr if it is the built-in one.
    pub fn open_gguf(&self) -> Result<GgufFile, CliError> {
        if let Some(file) = self.file()? {
            let gguf = if self.no_mmap { GgufFile::read(file) } else { map_gguf(file) };
            return gguf.map_err(|e| self.with_source(Error::from(e).into()));
        }
        // An error means that stderr is closed; the note is lost then.
        let _ = writeln!(std::io::stderr(), "note: no model given with -m: using the built-in model stories260K");
        Ok(GgufFile::from_bytes(BUILT_IN_MODEL).map_err(Error::from)?)
    }

    /// Downloads the model if it is named and not in the cache. Opening it does the same; a command calls this first so that the
    /// download is not shown in the middle of its own progress.
    pub fn fetch(&self) -> Result<(), CliError> {
        self.file().map(drop)
    }

    /// If `-m` names no model and the first of `words` names one: these flags with that model, and the other words. Otherwise the
    /// flags and words as they are.
    pub fn with_words<'a>(&self, words: &'a [String]) -> (Self, &'a [String]) {
        match words {
            [word, rest @ ..] if self.model.is_none() && word != "-" && names_model(word) => {
                (Self { model: Some(word.into()), ..self.clone() }, rest)
            }
            words => (self.clone(), words),
        }
    }

    /// These flags, with the model that the user chooses at a terminal if none is named.
    pub fn or_chosen(&self) -> Result<Self, CliError> {
        let chosen = if self.is_named() { None } else { first_model::choose()? };
        Ok(Self { model: chosen.or(self.model.clone()), ..self.clone() })
    }

    /// Whether a model is named, on the command line or in the environment.
    pub fn is_named(&self) -> bool {
        self.named().is_some()
    }

    /// Whether a model is named on the command line.
    pub fn is_given(&self) -> bool {
        self.model.is_some()
    }

    /// These flags as arguments for another process of this program. A model of the environment is named by `-m`.
    pub fn flags(&self) -> Vec<OsString> {
        let mut flags = Vec::new();
        if let Some(model) = self.named() {
            flags.extend([OsString::from("-m"), model.into()]);
        }
        if self.no_mmap {
            flags.push("--no-mmap".into());
        }
        if let Some(pre) = &self.pre {
            flags.extend([OsString::from("--pre"), pre.into()]);
        }
        flags
    }

    /// The path of the file to open. `None`: the built-in model.
    fn file(&self) -> Result<Option<PathBuf>, CliError> {
        self.named().map(|path| find(path).map_err(|error| self.with_source(error))).transpose()
    }

    /// The path of the model's file, downloaded if it is not on this machine. `None`: the built-in model.
    pub fn path(&self) -> Result<Option<PathBuf>, CliError> {
        self.file()
    }

    /// The model's name as given, or that of the built-in model.
    pub fn name(&self) -> String {
        self.named().map_or("stories260K (built in)".into(), |path| safe(&path.display().to_string()))
    }

    /// The model's name without folder and `.gguf`, or that of the built-in model.
    pub fn stem(&self) -> String {
        let name = self.named().and_then(Path::file_name);
        name.map_or("stories260K".into(), |name| without_ending(&name.to_string_lossy()).to_owned())
    }

    /// The name of the model, from the command line or the environment. An empty name counts as `None`.
    pub fn named(&self) -> Option<&Path> {
        self.model.as_deref().filter(|path| !path.as_os_str().is_empty()).or_else(|| variable())
    }

    /// An error that names this model's file.
    pub fn in_file(&self, error: Error) -> CliError {
        self.with_source(CliError::InFile { file: self.name(), error })
    }

    /// Adds to `error` that the model is that of the environment, if it is.
    fn with_source(&self, error: CliError) -> CliError {
        if self.model.is_none() && variable().is_some() { CliError::InEnvironment(Box::new(error)) } else { error }
    }
}

/// The model that the environment names. An empty variable counts as `None`.
fn variable() -> Option<&'static Path> {
    static MODEL: OnceLock<Option<PathBuf>> = OnceLock::new();
    let read = || std::env::var_os(VARIABLE).filter(|model| !model.is_empty()).map(PathBuf::from);
    MODEL.get_or_init(read).as_deref()
}
