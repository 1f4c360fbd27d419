//! Running estimates of how likely drafts hold.

use super::MAX_DRAFTS;

/// The weight, in observations, of the probability that is assumed before any.
const PRIOR_WEIGHT: f32 = 4.0;

/// Observations fade: about this many of the latest count.
const MEMORY: f32 = 64.0;

/// The probability that is assumed of a model's drafts.
const ASSUMED: f32 = 0.7;

/// A running estimate of a probability.
#[derive(Debug, Clone, Copy)]
pub(super) struct Confidence {
    /// Weights of the observations in which the draft held, and of all.
    held: f32,
    all: f32,
}

impl Confidence {
    /// Before any observation: `p`.
    pub fn assumed(p: f32) -> Self {
        Self { held: p * PRIOR_WEIGHT, all: PRIOR_WEIGHT }
    }

    /// Adds an observation.
    pub fn observe(&mut self, held: bool) {
        let fade = 1.0 - 1.0 / MEMORY;
        self.held = self.held * fade + f32::from(u8::from(held));
        self.all = self.all * fade + 1.0;
    }

    /// The estimate.
    pub fn probability(self) -> f32 {
        self.held / self.all
    }
}

/// How often the drafts of one sequence held, by their place in the proposal; for drafters that do not estimate it themselves.
#[derive(Debug, Clone)]
pub(super) struct Acceptance {
    of_place: [Confidence; MAX_DRAFTS],
}

impl Default for Acceptance {
    fn default() -> Self {
        Self { of_place: [Confidence::assumed(ASSUMED); MAX_DRAFTS] }
    }
}

impl Acceptance {
    /// `n_held` of `n` drafts held. Those behind the first that did not show nothing.
    pub fn observe(&mut self, n: usize, n_held: usize) {
        for place in 0..n.min(n_held + 1).min(MAX_DRAFTS) {
            self.of_place[place].observe(place < n_held);
        }
    }

    /// The probabilities that each of `n` drafts holds if those before it do. A place is no likelier than the one before it: few
    /// observations reach the later ones.
    pub fn confidence(&self, n: usize) -> Vec<f32> {
        let falling = self.of_place.iter().take(n).scan(1.0f32, |least, place| {
            *least = least.min(place.probability());
            Some(*least)
        });
        falling.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn acceptance_follows_what_holds() {
        let mut acceptance = Acceptance::default();
        assert_eq!(acceptance.confidence(3), [ASSUMED; 3]);
        for _ in 0..200 {
            acceptance.observe(3, 1);
        }
        let confidence = acceptance.confidence(3);
        assert!(confidence[0] > 0.95 && confidence[1] < 0.05 && confidence[2] <= confidence[1], "{confidence:?}");
        for _ in 0..200 {
            acceptance.observe(1, 0);
        }
        assert!(acceptance.confidence(1)[0] < 0.05);
    }
}
