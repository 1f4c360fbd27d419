//! Speculation: several tokens a step.
//!
//! A [`Drafter`] proposes tokens that may follow a sequence, its *drafts*. The target model evaluates the last token of the
//! sequence and the drafts in one batch. From the scores of each of these tokens the next one is sampled as it would be
//! without drafts; a draft *holds* where it equals that token. What follows the first draft that does not hold is cut back.
//! So the text does not depend on the drafts, only the number of steps does.

mod draft_model;
mod drafter;
mod head_sequence;
mod heads;
mod token_map;

pub use draft_model::{DraftModel, DraftModelError, DraftModelOptions};
pub use drafter::{DraftRequest, Drafter, Evaluated};
pub use heads::{DraftLogits, HeadDrafter};
