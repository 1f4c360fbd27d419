//! Random numbers that belong to the positions of a text.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// Words of 32 bits that belong to a position: a block of `ChaCha`. A choice takes no more than four.
const WORDS_OF_A_POSITION: u128 = 16;

/// Random numbers that depend on the seed and the position alone, whatever was drawn for those before.
#[derive(Debug)]
pub(super) struct RandomNumbers {
    seed: u64,
    rng: ChaCha8Rng,
    position: u64,
    /// Whether `rng` is still in an earlier position.
    behind: bool,
}

impl RandomNumbers {
    /// Those of the first position.
    pub(super) fn new(seed: u64) -> Self {
        // The key is the seed, padded with zeros.
        let mut key = [0; 32];
        key[..8].copy_from_slice(&seed.to_le_bytes());
        Self { seed, rng: ChaCha8Rng::from_seed(key), position: 0, behind: false }
    }

    pub(super) fn seed(&self) -> u64 {
        self.seed
    }

    /// Goes on to the next position.
    pub(super) fn advance(&mut self) {
        self.position += 1;
        self.behind = true;
    }

    /// The next number of the position, from 0 up to but not including 1, made of 53 random bits.
    pub(super) fn uniform(&mut self) -> f64 {
        if std::mem::take(&mut self.behind) {
            self.rng.set_word_pos(WORDS_OF_A_POSITION * u128::from(self.position));
        }
        (self.rng.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }
}
