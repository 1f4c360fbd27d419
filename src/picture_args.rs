//! Flags for pictures, and the prompts that have them.

use std::io::Read;
use std::path::{Path, PathBuf};

use metal_attention::picture_files::{Limits, Picture};
use metal_attention::tokenizer::Tokenizer;
use metal_attention::{
    EngineOptions, Error, Model, PICTURE_PLACE, PictureEncoder, PicturePrompt, PromptSpan, TokenLimits,
};
use metal_attention_chat::{Prompt, picture_marker, without_picture_markers};
use metal_attention_grammar::prompt_with_pictures;

use crate::cli_error::CliError;
use crate::find_mmproj::{find_mmproj, no_mmproj};
use crate::map_gguf::map_gguf;
use crate::model_args::ModelArgs;
use crate::progress::ProgressLine;

/// Pictures for the prompt, and the file that encodes them.
#[derive(clap::Args)]
#[command(next_help_heading = "Pictures")]
pub struct PictureArgs {
    /// A picture for the prompt: JPEG, PNG, WebP, BMP or GIF; -: from stdin (repeatable). It stands where the text has <image>,
    /// else before the text
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    image: Vec<PathBuf>,

    #[command(flatten)]
    encoder: MmprojArgs,
}

/// The file that encodes pictures.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Pictures")]
pub struct MmprojArgs {
    /// The model's mmproj file, which encodes pictures [default: the file with mmproj in its name that fits the model, beside it or in its repository]
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pub mmproj: Option<PathBuf>,

    /// Fewest tokens of a picture, in models that keep its size
    #[arg(long, value_name = "N")]
    image_min_tokens: Option<usize>,

    /// Most tokens of a picture, in models that keep its size
    #[arg(long, value_name = "N")]
    image_max_tokens: Option<usize>,
}

/// The pictures of a prompt or a conversation, encoded. In texts their markers stand for them.
pub struct Pictures {
    encoder: PictureEncoder,
    encoded: Vec<PicturePrompt>,
}

impl PictureArgs {
    /// Whether there are any.
    pub fn are_given(&self) -> bool {
        !self.image.is_empty()
    }

    /// The flags of the encoder.
    pub fn mmproj(&self) -> &MmprojArgs {
        &self.encoder
    }

    /// The text with the markers of the pictures, and the pictures; `None` without any.
    pub fn read(
        &self,
        text: String,
        args: &ModelArgs,
        model: &Model,
        tokenizer: &Tokenizer,
        options: &EngineOptions,
    ) -> Result<(String, Option<Pictures>), CliError> {
        if self.image.is_empty() {
            return Ok((text, None));
        }
        let (places, n) = (text.matches(PICTURE_PLACE).count(), self.image.len());
        if places > n {
            let message =
                format!("the text has {places} places for pictures ({PICTURE_PLACE}), and there are {n} (--image)");
            return Err(CliError::Usage(message));
        }
        let files = self.image.iter().map(|path| read_picture(path)).collect::<Result<Vec<_>, _>>()?;
        let mut pictures = self.encoder.open(args, model, options)?;
        let markers = files.iter().map(|file| pictures.add(file, tokenizer)).collect::<Result<Vec<_>, _>>()?;
        let (before, within) = markers.split_at(n - places);
        let marked =
            within.iter().fold(before.concat() + &text, |text, marker| text.replacen(PICTURE_PLACE, marker, 1));
        Ok((marked, Some(pictures)))
    }
}

impl MmprojArgs {
    /// Sets up the encoder, without pictures so far.
    pub fn open(&self, args: &ModelArgs, model: &Model, options: &EngineOptions) -> Result<Pictures, CliError> {
        Ok(Pictures { encoder: self.encoder(args, model, options)?, encoded: Vec::new() })
    }

    /// Sets up the encoder.
    pub fn encoder(
        &self,
        args: &ModelArgs,
        model: &Model,
        options: &EngineOptions,
    ) -> Result<PictureEncoder, CliError> {
        let Some(path) = self.file(args)? else {
            return Err(no_mmproj(args.named().unwrap_or(Path::new("")), args.path()?.as_deref()));
        };
        let in_file = |error: Error| CliError::InFile { file: path.display().to_string(), error };
        let loading = ProgressLine::spinner("loading the picture encoder");
        let file = map_gguf(&path).map_err(|error| in_file(error.into()))?;
        loading.weigh(file.tensor_bytes());
        PictureEncoder::new(&file, model.spec(), options, self.token_limits()).map_err(in_file)
    }

    /// The file: the named one, else the one beside the model. `None`: there is none.
    pub fn file(&self, args: &ModelArgs) -> Result<Option<PathBuf>, CliError> {
        match &self.mmproj {
            Some(path) => Ok(Some(path.clone())),
            None => match args.path()? {
                Some(model) => find_mmproj(&model),
                None => Ok(None),
            },
        }
    }

    /// The limits of a picture in tokens.
    pub fn token_limits(&self) -> TokenLimits {
        TokenLimits { min: self.image_min_tokens, max: self.image_max_tokens }
    }
}

impl Pictures {
    /// Encodes a picture. Returns its marker.
    pub fn add(&mut self, picture: &Picture, tokenizer: &Tokenizer) -> Result<String, CliError> {
        self.encoded.push(encode_one(&mut self.encoder, picture, tokenizer)?);
        Ok(picture_marker(self.encoded.len() - 1))
    }

    /// The rows of each picture.
    pub fn n_rows(&self) -> Vec<usize> {
        self.encoded.iter().map(PicturePrompt::n_rows).collect()
    }

    /// The ids and spans of a rendered prompt, in which markers stand for pictures.
    pub fn prompt(&self, prompt: &Prompt, tokenizer: &Tokenizer) -> (Vec<u32>, Vec<PromptSpan>) {
        prompt_with_pictures(prompt, &self.encoded, tokenizer)
    }

    /// A text with `<image>` in the place of markers, as it is shown to the user.
    pub fn shown(text: &str) -> String {
        without_picture_markers(text, PICTURE_PLACE)
    }
}

/// Encodes a picture, and shows the progress.
pub fn encode_one(
    encoder: &mut PictureEncoder,
    picture: &Picture,
    tokenizer: &Tokenizer,
) -> Result<PicturePrompt, CliError> {
    let progress = ProgressLine::share("reading the picture");
    let divided = encoder.divider().divide(picture)?;
    Ok(encoder.encode(&[divided], tokenizer, |done, total| progress.set_of(done, total))?.remove(0))
}

/// Reads and decodes a picture.
pub fn read_picture(path: &Path) -> Result<Picture, CliError> {
    let limits = Limits::default();
    let failed = |why: &dyn std::fmt::Display| CliError::Usage(format!("cannot read {}: {why}", path.display()));
    let mut bytes = Vec::new();
    let most = limits.max_bytes as u64 + 1;
    let read = if path == Path::new("-") {
        std::io::stdin().lock().take(most).read_to_end(&mut bytes)
    } else {
        std::fs::File::open(path).and_then(|file| file.take(most).read_to_end(&mut bytes))
    };
    read.map_err(|why| failed(&why))?;
    Picture::decode(&bytes, &limits).map_err(|why| failed(&why))
}
