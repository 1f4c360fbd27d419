//! Flags for drafts: several tokens in a step.

use metal_attention::speculation::{DraftDepth, DrafterKind, MAX_DRAFTS, Speculation};

/// Which drafter proposes tokens, and how many.
#[derive(clap::Args, Clone)]
#[command(next_help_heading = "Drafts")]
pub struct SpeculationArgs {
    /// Which drafter proposes tokens, so that a step may give several; the text is the same: off, ngram (what followed the last tokens
    /// earlier in the text), auto (the best that the model has)
    #[arg(long, value_name = "DRAFTER", default_value = "auto")]
    spec: DrafterKind,

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
    /// The options that the flags give.
    pub fn options(&self) -> Speculation {
        let drafter = if self.draft_max == 0 { DrafterKind::Off } else { self.spec };
        Speculation { drafter, depth: DraftDepth::Adaptive(self.draft_max) }
    }
}
