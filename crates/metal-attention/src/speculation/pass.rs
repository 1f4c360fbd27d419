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
    /// As of [`Model::forward_pass`]. With [`DrafterKind::Mtp`]: the model has no prediction heads, or they cannot be set up;
    /// [`DrafterKind::Auto`] takes n-grams then.
    pub fn new(model: &Model, options: &EngineOptions, speculation: Speculation) -> Result<Self, Error> {
        let pass = model.backend(options)?;
        let heads = match speculation.drafter {
            DrafterKind::Off | DrafterKind::Ngram => None,
            DrafterKind::Mtp => Some(HeadDrafter::beside(model, &*pass, options)?.ok_or(Error::NoHeads)?),
            // Heads of a kind that is not supported, over tensor parallelism, or without room for them are no reason not to run.
            DrafterKind::Auto => HeadDrafter::beside(model, &*pass, options).unwrap_or_else(|why| {
                tracing::warn!("the model's prediction heads propose no tokens: {why}");
                None
            }),
        };
        let drafter: Option<Box<dyn Drafter>> = match (speculation.drafter, heads) {
            (DrafterKind::Off, _) => None,
            (DrafterKind::Ngram | DrafterKind::Mtp | DrafterKind::Auto, Some(heads)) => Some(Box::new(heads)),
            (DrafterKind::Ngram | DrafterKind::Mtp | DrafterKind::Auto, None) => Some(Box::<NgramDrafter>::default()),
        };
        Ok(Self { pass, drafter })
    }
}
