//! Which drafter is used, and how many drafts a step may have.

use std::fmt;
use std::str::FromStr;

/// Maximum number of drafts of a sequence in one step.
pub const MAX_DRAFTS: usize = 64;

/// Options of speculation. The default is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Speculation {
    /// Which drafter proposes tokens.
    pub drafter: DrafterKind,
    /// How many drafts of a sequence are evaluated in a step.
    pub depth: DraftDepth,
}

/// How many drafts of a sequence are evaluated in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DraftDepth {
    /// As many as pay by the measured costs of steps, at most this many.
    Adaptive(usize),
    /// As many as the drafter proposes, at most this many; for tests and measurements.
    Fixed(usize),
}

impl Default for DraftDepth {
    fn default() -> Self {
        Self::Adaptive(16)
    }
}

impl DraftDepth {
    /// The most drafts of a sequence in a step.
    pub fn max(self) -> usize {
        match self {
            Self::Adaptive(max) | Self::Fixed(max) => max.min(MAX_DRAFTS),
        }
    }
}

/// A kind of drafter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DrafterKind {
    /// None: one token a step.
    #[default]
    Off,
    /// N-grams of the sequence itself.
    Ngram,
    /// The prediction heads (multi-token prediction) in the model's file.
    Mtp,
    /// Another model, in a draft file.
    Draft,
    /// EAGLE-3, in a draft file.
    Eagle3,
    /// `DFlash`, in a draft file.
    DFlash,
    /// The drafter of Gemma 4, in a draft file.
    Gemma4Assistant,
    /// That of the draft file, if there is one; else the best that the model has: its prediction heads, or else n-grams.
    Auto,
}

impl DrafterKind {
    /// All kinds.
    pub const ALL: [Self; 8] =
        [Self::Off, Self::Ngram, Self::Mtp, Self::Draft, Self::Eagle3, Self::DFlash, Self::Gemma4Assistant, Self::Auto];

    /// Its name, as in `--spec ngram`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Ngram => "ngram",
            Self::Mtp => "mtp",
            Self::Draft => "draft",
            Self::Eagle3 => "eagle3",
            Self::DFlash => "dflash",
            Self::Gemma4Assistant => "gemma4-assistant",
            Self::Auto => "auto",
        }
    }
}

/// A name that is none of [`DrafterKind::ALL`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnknownDrafter(String);

impl fmt::Display for UnknownDrafter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = DrafterKind::ALL.map(DrafterKind::name).join(", ");
        write!(f, "there is no drafter {:?}; choose one of {names}", self.0)
    }
}

impl std::error::Error for UnknownDrafter {}

impl FromStr for DrafterKind {
    type Err = UnknownDrafter;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|kind| kind.name() == name).ok_or_else(|| UnknownDrafter(name.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drafters_have_names() {
        for kind in DrafterKind::ALL {
            assert_eq!(kind.name().parse(), Ok(kind));
        }
        let error = "mtb".parse::<DrafterKind>().unwrap_err().to_string();
        assert_eq!(
            error,
            "there is no drafter \"mtb\"; choose one of off, ngram, mtp, draft, eagle3, dflash, \
             gemma4-assistant, auto"
        );
    }
}
