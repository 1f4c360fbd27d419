//! Speculation: several tokens a step.
//!
//! A [`Drafter`] proposes tokens that may follow a sequence, its *drafts*. The target model evaluates the last token of the
//! sequence and the drafts in one batch. From the scores of each of these tokens the next one is sampled as it would be
//! without drafts; a draft *holds* where it equals that token. What follows the first draft that does not hold is cut back.
//! So the text does not depend on the drafts, only the number of steps does.
//!
//! A drafter is a part of this library ([`NgramDrafter`]), is in the model's own file ([`HeadDrafter`]), or has a file of its own
//! ([`DraftFile`]).
//!
//! How many drafts a sequence gets depends on how likely they hold and on what steps of several rows cost, both measured
//! while the text is generated. Where drafts do not pay there are none.

mod assistant;
mod block_selector;
mod confidence;
mod costs;
mod dflash;
mod draft_file;
mod draft_model;
mod drafter;
mod head_sequence;
mod heads;
mod memory;
mod ngram;
mod options;
mod pass;
mod projection;
mod scores_ahead;
mod speculator;
mod token_map;

pub use assistant::AssistantDrafter;
use costs::StepCosts;
pub use dflash::DflashDrafter;
pub use draft_file::{DraftFile, DraftFileError};
pub use draft_model::{DraftModel, DraftModelError, DraftModelOptions};
pub use drafter::{Draft, DraftLogits, DraftRequest, Drafter, Evaluated};
pub use heads::{DraftTokens, HeadDrafter};
pub use memory::DrafterMemory;
pub use ngram::NgramDrafter;
pub use options::{DraftDepth, DrafterKind, MAX_DRAFTS, Speculation, UnknownDrafter};
pub use pass::SpeculativePass;
pub use projection::StateProjection;
pub(crate) use scores_ahead::ScoresAhead;
pub use speculator::{Speculator, max_drafts_of_step};
