//! Random numbers by position: those of a choice depend on the seed and the position in the sequence only.

use chacha20::ChaCha8Rng;
use chacha20::rand_core::{Rng, SeedableRng};

/// 32-bit words reserved for each position: one block of `ChaCha`. A choice uses at most four.
const WORDS_OF_A_POSITION: u128 = 16;

/// A random number generator whose numbers depend only on the seed and the position, not on how many were drawn before.
#[derive(Debug)]
pub(super) struct RandomNumbers {
    /// The seed.
    seed: u64,
    /// Generator of the numbers.
    rng: ChaCha8Rng,
    /// The current position.
    position: u64,
    /// Whether `rng` still has to be moved to `position`.
    behind: bool,
}

impl RandomNumbers {
    /// The generator at position 0.
    pub(super) fn new(seed: u64) -> Self {
        // The key is the seed, padded with zeros.
        let mut key = [0; 32];
        key[..8].copy_from_slice(&seed.to_le_bytes());
        Self { seed, rng: ChaCha8Rng::from_seed(key), position: 0, behind: false }
    }

    /// The seed.
    pub(super) fn seed(&self) -> u64 {
        self.seed
    }

    /// Moves to the next position.
    pub(super) fn advance(&mut self) {
        self.position += 1;
        self.behind = true;
    }

    /// The next number of this position, from 0 to below 1, with 53 random bits.
    pub(super) fn uniform(&mut self) -> f64 {
        if std::mem::take(&mut self.behind) {
            self.rng.set_word_pos(WORDS_OF_A_POSITION * u128::from(self.position));
        }
        (self.rng.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }
}
