//! A forward pass together with its drafter.

use super::{Drafter, DrafterKind, HeadDrafter, NgramDrafter, Speculation};
use crate::{EngineOptions, Error, ForwardPass, Model};

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
    /// As of [`Model::forward_pass`]; the drafter does not fit in memory; the model has no prediction heads and
    /// [`DrafterKind::Mtp`] needs them.
    pub fn new(model: &Model, options: &EngineOptions, speculation: Speculation) -> Result<Self, Error> {
        let pass = model.backend(options)?;
        let heads = match speculation.drafter {
            DrafterKind::Off | DrafterKind::Ngram => None,
            DrafterKind::Mtp => Some(HeadDrafter::beside(model, &*pass, options)?.ok_or(Error::NoHeads)?),
            DrafterKind::Auto => HeadDrafter::beside(model, &*pass, options)?,
        };
        let drafter: Option<Box<dyn Drafter>> = match (speculation.drafter, heads) {
            (DrafterKind::Off, _) => None,
            (DrafterKind::Ngram | DrafterKind::Mtp | DrafterKind::Auto, Some(heads)) => Some(Box::new(heads)),
            (DrafterKind::Ngram | DrafterKind::Mtp | DrafterKind::Auto, None) => Some(Box::<NgramDrafter>::default()),
        };
        Ok(Self { pass, drafter })
    }
}
