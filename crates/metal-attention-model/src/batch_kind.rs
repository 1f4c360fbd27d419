//! Kinds of batches, for which backends have different plans.

use crate::{BatchToken, Phase};

/// The kinds of batches, from those bound by reading weights to those bound by arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BatchKind {
    /// One token.
    One,
    /// The next tokens of a few sequences, one each.
    Sequences,
    /// Other batches of a few tokens.
    Few,
    /// Many tokens.
    Many,
}

/// The limits of small batches on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FewLimits {
    /// Sequences that are decoded side by side.
    pub sequences: usize,
    /// Tokens of other small batches.
    pub tokens: usize,
}

impl BatchKind {
    /// The kind of `batch`.
    pub fn of(batch: &[BatchToken], few: FewLimits) -> Self {
        let n = batch.len();
        let sequences = n > 1 && n <= few.sequences && Phase::of(batch) == Phase::Decode;
        if sequences { Self::Sequences } else { Self::of_n_tokens(n, few) }
    }

    /// The kind of a batch of `n_tokens` tokens of one sequence.
    pub fn of_n_tokens(n_tokens: usize, few: FewLimits) -> Self {
        match n_tokens {
            1 => Self::One,
            n if n <= few.tokens => Self::Few,
            _ => Self::Many,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decoding_of_several_sequences_is_distinguished_from_prefill() {
        let few = FewLimits { sequences: 2, tokens: 4 };
        let batch = |seqs: &[usize]| {
            let token = |(i, &seq)| BatchToken { id: 0, seq, pos: i, output: true };
            BatchKind::of(&seqs.iter().enumerate().map(token).collect::<Vec<_>>(), few)
        };
        assert_eq!(batch(&[3]), BatchKind::One);
        assert_eq!(batch(&[0, 1]), BatchKind::Sequences);
        assert_eq!(batch(&[0, 0]), BatchKind::Few);
        assert_eq!(batch(&[0, 1, 2]), BatchKind::Few, "more sequences than go side by side");
        assert_eq!(batch(&[0; 5]), BatchKind::Many);
    }
}
