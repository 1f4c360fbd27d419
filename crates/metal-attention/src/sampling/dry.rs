//! DRY, "don't repeat yourself": a penalty on the tokens that would continue a
//! sequence the text already contains, growing with the sequence's length.

use std::collections::{HashMap, HashSet, VecDeque};

use super::SamplerOptions;
use super::candidates::Candidates;

/// The strings that end a repetition by default, as in llama.cpp: what follows
/// them may start like earlier text (a list, a dialogue) and is not penalised.
pub const DRY_SEQUENCE_BREAKERS: [&str; 4] = ["\n", ":", "\"", "*"];

/// The DRY penalty of one sequence: its last tokens, and the options.
#[derive(Debug)]
pub(super) struct Dry {
    /// [`SamplerOptions::dry_multiplier`].
    multiplier: f32,
    /// [`SamplerOptions::dry_base`].
    base: f32,
    /// [`SamplerOptions::dry_allowed_length`].
    allowed_length: usize,
    /// [`SamplerOptions::dry_penalty_last_n`].
    last_n: usize,
    /// Tokens that end a repetition.
    breakers: HashSet<u32>,
    /// At most `last_n` tokens, the latest first.
    window: VecDeque<u32>,
    /// Scratch: for each position in the window, how many of the latest tokens are repeated there.
    repeats: Vec<usize>,
    /// Scratch: for each token that would continue a repetition, the longest.
    continued: HashMap<u32, usize>,
}

impl Dry {
    /// The penalty with an empty window and without breakers.
    pub fn new(options: &SamplerOptions) -> Self {
        Self {
            multiplier: options.dry_multiplier,
            base: options.dry_base,
            allowed_length: options.dry_allowed_length,
            last_n: options.dry_penalty_last_n,
            breakers: HashSet::new(),
            window: VecDeque::new(),
            repeats: Vec::new(),
            continued: HashMap::new(),
        }
    }

    /// Sets the tokens that end a repetition.
    pub fn set_breakers(&mut self, ids: impl Iterator<Item = u32>) {
        self.breakers = ids.collect();
    }

    /// Adds a token to the window.
    pub fn accept(&mut self, id: u32) {
        self.window.truncate(self.last_n.saturating_sub(1));
        self.window.push_front(id);
    }

    /// Empties the window.
    pub fn reset(&mut self) {
        self.window.clear();
    }

    /// Subtracts `multiplier * base^(length - allowed_length)` from the logit of each token that would continue a
    /// repetition of `length` tokens, if that is at least `allowed_length`.
    pub fn apply(&mut self, candidates: &mut Candidates) {
        let window: &[u32] = self.window.make_contiguous();
        // A repetition does not reach back beyond the latest breaker.
        let limit = window.iter().position(|id| self.breakers.contains(id)).unwrap_or(window.len());
        common_prefixes(window, &mut self.repeats);
        self.continued.clear();
        for (place, &repeat) in self.repeats.iter().enumerate().skip(1) {
            // The window is in reverse order: `window[place - 1]` came after `window[place]`.
            let (next, length) = (window[place - 1], repeat.min(limit));
            if length >= self.allowed_length && !self.breakers.contains(&next) {
                let longest = self.continued.entry(next).or_default();
                *longest = length.max(*longest);
            }
        }
        for (&id, &length) in &self.continued {
            let exponent = (length - self.allowed_length) as f64;
            let penalty = f64::from(self.multiplier) * f64::from(self.base).powf(exponent);
            candidates.adjust(id, |logit| logit - penalty);
        }
    }
}

/// For each position of `tokens`, the length of the common prefix of `tokens` from there and from the start: the Z
/// function, in linear time (Gusfield 1997, "Algorithms on Strings, Trees and Sequences", section 1.3).
fn common_prefixes(tokens: &[u32], lengths: &mut Vec<usize>) {
    lengths.clear();
    lengths.resize(tokens.len(), tokens.len());
    // The match found so far that reaches farthest: tokens[start..end].
    let (mut start, mut end) = (0, 0);
    for place in 1..tokens.len() {
        let mut length = if place < end { lengths[place - start].min(end - place) } else { 0 };
        while place + length < tokens.len() && tokens[length] == tokens[place + length] {
            length += 1;
        }
        if place + length > end {
            (start, end) = (place, place + length);
        }
        lengths[place] = length;
    }
}
