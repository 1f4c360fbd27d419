//! Flags for drafts: several tokens in a step.

use std::path::PathBuf;

use metal_attention::speculation::{
    DraftDepth, DraftFile, DrafterKind, DrafterMemory, MAX_DRAFTS, Speculation, SpeculativePass,
};
use metal_attention::{Device, EngineOptions, Error, Model};

use crate::cli_error::CliError;
use crate::completion;
use crate::model_args::ModelArgs;

/// Which drafter proposes tokens, and how many.
#[derive(clap::Args, Clone)]
#[command(next_help_heading = "Drafts")]
pub struct SpeculationArgs {
    /// Which drafter proposes tokens, so that a step may give several; the text is the same: off, ngram (what followed the last tokens
    /// earlier in the text), mtp (the prediction heads in the model's file), draft, eagle3, dflash or gemma4-assistant (what the file
    /// of --model-draft has), auto (that of --model-draft; without one mtp if the file has heads, else ngram)
    #[arg(long, value_name = "DRAFTER", default_value = "auto")]
    spec: DrafterKind,

    /// The file or name, as of -m, of a smaller model that proposes the tokens, or of a drafter made for the model (EAGLE-3, DFlash, Gemma 4's assistant)
    #[arg(long, alias = "draft", value_name = "MODEL", add = completion::models::usable())]
    model_draft: Option<PathBuf>,

    /// The device of the smaller model [default: that of the model]
    #[arg(long, value_name = "DEVICE", requires = "model_draft")]
    device_draft: Option<Device>,

    /// Most drafts of a text in a step; as many as pay are taken
    #[arg(long, aliases = ["draft-n", "spec-draft-n-max"], value_name = "N", default_value_t = DraftDepth::default().max())]
    #[arg(value_parser = at_most)]
    draft_max: usize,
}

/// Parses the largest number of drafts.
fn at_most(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if n <= MAX_DRAFTS => Ok(n),
        _ => Err(format!("it is a number from 0 to {MAX_DRAFTS}")),
    }
}

impl SpeculationArgs {
    /// How many drafts a step may have.
    pub fn depth(&self) -> DraftDepth {
        DraftDepth::Adaptive(self.draft_max)
    }

    /// Opens the draft file, if one is named. `args`: the flags for reading files.
    pub fn draft_file(&self, args: &ModelArgs) -> Result<Option<DraftFile>, CliError> {
        let file = self.model_draft.as_ref().filter(|_| self.draft_max > 0 && self.spec != DrafterKind::Off);
        file.map(|file| args.of_file(file.clone()).open_draft()).transpose()
    }

    /// The kind of drafter.
    fn kind(&self) -> DrafterKind {
        if self.draft_max == 0 { DrafterKind::Off } else { self.spec }
    }

    /// The memory that the drafter takes on the device of `engine`, beside `model`.
    pub fn memory(
        &self,
        model: &Model,
        draft: Option<&DraftFile>,
        engine: &EngineOptions,
    ) -> Result<DrafterMemory, Error> {
        let target = (model.gguf(), model.spec());
        DrafterMemory::of(self.kind(), target, draft, &engine.device, self.device_draft.as_ref())
    }

    /// The device of a draft model; `None`: the model's.
    pub fn draft_device(&self) -> Option<&Device> {
        self.device_draft.as_ref()
    }

    /// Sets up a forward pass of `model`, and its drafter: that of `draft`, if a file is given.
    pub fn open(
        &self,
        model: &Model,
        draft: Option<&DraftFile>,
        engine: &EngineOptions,
    ) -> Result<SpeculativePass, Error> {
        let speculation = Speculation { drafter: self.kind(), depth: self.depth() };
        match draft {
            None => SpeculativePass::new(model, engine, speculation),
            Some(draft) => {
                SpeculativePass::with_draft_file(model, draft, engine, speculation, self.device_draft.as_ref())
            }
        }
    }
}
