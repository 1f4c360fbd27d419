//! A forward pass together with its drafter.

use super::{DraftFile, DraftFileError, Drafter, DrafterKind, DrafterMemory, HeadDrafter, NgramDrafter, Speculation};
use crate::{Device, EngineOptions, Error, ForwardPass, Model};

/// A forward pass, and what proposes drafts for it.
pub struct SpeculativePass {
    /// The forward pass.
    pub pass: Box<dyn ForwardPass>,
    /// The drafter; `None`: one token a step.
    pub drafter: Option<Box<dyn Drafter>>,
}

impl From<Box<dyn ForwardPass>> for SpeculativePass {
    fn from(pass: Box<dyn ForwardPass>) -> Self {
        Self { pass, drafter: None }
    }
}

impl SpeculativePass {
    /// Sets up a forward pass of `model`, and the drafter of `speculation`.
    ///
    /// # Errors
    /// As of [`Model::forward_pass`]. With [`DrafterKind::Mtp`]: the model has no prediction heads, or they cannot be set up;
    /// [`DrafterKind::Auto`] takes n-grams then. A kind that is in a file of its own.
    pub fn new(model: &Model, options: &EngineOptions, speculation: Speculation) -> Result<Self, Error> {
        let memory = DrafterMemory::of(speculation.drafter, (model.gguf(), model.spec()), None, &options.device, None)?;
        let options = &EngineOptions { drafter: memory, ..options.clone() };
        let pass = model.backend(options)?;
        let heads = || HeadDrafter::beside(model, &*pass, options);
        let drafter: Option<Box<dyn Drafter>> = match speculation.drafter {
            DrafterKind::Off => None,
            DrafterKind::Ngram => Some(Box::<NgramDrafter>::default()),
            DrafterKind::Mtp => Some(Box::new(heads()?.ok_or(Error::NoHeads)?)),
            kind @ (DrafterKind::Draft | DrafterKind::Eagle3 | DrafterKind::DFlash | DrafterKind::Gemma4Assistant) => {
                return Err(DraftFileError::NoFile { kind }.into());
            }
            // Heads of a kind that is not supported, over tensor parallelism, or without room for them are no reason not to run.
            DrafterKind::Auto => match heads() {
                Ok(Some(heads)) => Some(Box::new(heads)),
                Ok(None) => Some(Box::<NgramDrafter>::default()),
                Err(why) => {
                    tracing::warn!("the model's prediction heads propose no tokens: {why}");
                    Some(Box::<NgramDrafter>::default())
                }
            },
        };
        Ok(Self { pass, drafter })
    }

    /// Sets up a forward pass of `model`, with the drafter of a file; without one if [`DrafterKind::Off`] is requested. `device`: that
    /// of a [`DraftModel`](super::DraftModel), `None`: the model's.
    ///
    /// # Errors
    /// As of [`Model::forward_pass`] and [`DraftFile::drafter`]; another kind of drafter is requested than the file has.
    pub fn with_draft_file(
        model: &Model,
        draft: &DraftFile,
        options: &EngineOptions,
        speculation: Speculation,
        device: Option<&Device>,
    ) -> Result<Self, Error> {
        let found = draft.kind();
        match speculation.drafter {
            DrafterKind::Off => return Ok(model.forward_pass(options)?.into()),
            DrafterKind::Auto => {}
            // An assistant is Gemma 4's multi-token prediction.
            DrafterKind::Mtp if found == DrafterKind::Gemma4Assistant => {}
            requested if requested == found => {}
            requested => return Err(DraftFileError::OtherKind { requested, found }.into()),
        }
        let memory =
            DrafterMemory::of(speculation.drafter, (model.gguf(), model.spec()), Some(draft), &options.device, device)?;
        let options = &EngineOptions { drafter: memory, ..options.clone() };
        let mut pass = model.backend(options)?;
        let drafter = draft.drafter(model, &mut *pass, options, device)?;
        Ok(Self { pass, drafter: Some(drafter) })
    }
}
