//! Repetition, frequency and presence penalties on recent tokens.

use std::collections::{HashMap, VecDeque};

use super::SamplerOptions;
use super::candidates::Candidates;

/// The penalties of one sequence: its last tokens, and the options.
#[derive(Debug)]
pub(super) struct Penalties {
    /// [`SamplerOptions::penalty_last_n`].
    last_n: usize,
    /// [`SamplerOptions::repeat_penalty`].
    repeat: f32,
    /// [`SamplerOptions::frequency_penalty`].
    frequency: f32,
    /// [`SamplerOptions::presence_penalty`].
    presence: f32,
    /// At most `last_n` tokens, the oldest first.
    window: VecDeque<u32>,
    /// Occurrences of each token in the window.
    counts: HashMap<u32, u32>,
}

impl Penalties {
    /// The penalties with an empty window.
    pub fn new(options: &SamplerOptions) -> Self {
        Self {
            last_n: options.penalty_last_n,
            repeat: options.repeat_penalty,
            frequency: options.frequency_penalty,
            presence: options.presence_penalty,
            window: VecDeque::new(),
            counts: HashMap::new(),
        }
    }

    /// Adds a token to the window, which drops its oldest one when it is full.
    pub fn accept(&mut self, id: u32) {
        if self.window.len() == self.last_n
            && let Some(oldest) = self.window.pop_front()
            && let Some(count) = self.counts.get_mut(&oldest)
        {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&oldest);
            }
        }
        self.window.push_back(id);
        *self.counts.entry(id).or_default() += 1;
    }

    /// Empties the window.
    pub fn reset(&mut self) {
        self.window.clear();
        self.counts.clear();
    }

    /// Repetition penalty (Keskar et al. 2019, arXiv 1909.05858, with the logits
    /// that are not positive multiplied instead, since dividing would favour
    /// them), then the frequency and presence penalties.
    pub fn apply(&self, candidates: &mut Candidates) {
        let (repeat, frequency, presence) =
            (f64::from(self.repeat), f64::from(self.frequency), f64::from(self.presence));
        for (&id, &count) in &self.counts {
            candidates.adjust(id, |logit| {
                let repeated = if logit > 0.0 { logit / repeat } else { logit * repeat };
                repeated - f64::from(count) * frequency - presence
            });
        }
    }
}
