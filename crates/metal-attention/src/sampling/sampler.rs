//! The sampler of one sequence: the chain of samplers, and the draw at its end.
//!
//! Most choices depend only on the highest logits. These can be picked out of all logits at the speed of memory, so a
//! short list of them is tried first; where it does not determine the choice, the chain runs over all logits.

use metal_attention_model::{argmax, highest};

use super::candidates::Candidates;
use super::dry::Dry;
use super::penalties::Penalties;
use super::random::RandomNumbers;
use super::{SamplerKind, SamplerOptions, SamplingError, temperature, truncation};

/// Minimum length of the short list.
const SHORT_LIST: usize = 128;
/// Additional entries of the list if a sampler keeps a fixed number of the highest logits: some may not be allowed.
const SPARE: usize = 8;

/// Samples the tokens of one sequence, and records them for the penalties.
///
/// The random numbers of a choice depend on the seed and the position, which is the number of tokens
/// [accepted](Self::accept) so far. So a sequence can be continued elsewhere: a sampler with the same options and seed
/// that has accepted the same tokens chooses the same next one.
///
/// Its buffers are reused: after the first token it allocates only what the penalties' windows need.
#[derive(Debug)]
pub struct Sampler {
    /// The options.
    options: SamplerOptions,
    /// The samplers that have an effect, in order.
    chain: Vec<SamplerKind>,
    /// Random numbers of the current position.
    random: RandomNumbers,
    /// Repetition, frequency and presence penalties.
    penalties: Penalties,
    /// The DRY penalty.
    dry: Dry,
    /// Buffer for the candidates of a choice.
    candidates: Candidates,
}

impl Sampler {
    /// A sampler that has accepted no tokens. An error if an option is out of range.
    pub fn new(options: SamplerOptions) -> Result<Self, SamplingError> {
        options.validate()?;
        let seed = match options.seed {
            Some(seed) => seed,
            None => getrandom::u64().map_err(|e| SamplingError::NoSeed { reason: e.to_string() })?,
        };
        Ok(Self {
            chain: options.active_samplers(),
            random: RandomNumbers::new(seed),
            penalties: Penalties::new(&options),
            dry: Dry::new(&options),
            candidates: Candidates::default(),
            options,
        })
    }

    /// Sets the vocabulary for DRY: tokens whose bytes contain one of [`SamplerOptions::dry_sequence_breakers`] end a
    /// repetition. `vocabulary` yields the bytes of each token, from id 0 on. Without this call no token ends a
    /// repetition.
    #[must_use]
    pub fn with_vocabulary<'a>(mut self, vocabulary: impl Iterator<Item = &'a [u8]>) -> Self {
        if self.chain.contains(&SamplerKind::Dry) {
            let breakers = &self.options.dry_sequence_breakers;
            let breaks = |token: &[u8]| {
                breakers.iter().any(|b| !b.is_empty() && token.windows(b.len()).any(|part| part == b.as_bytes()))
            };
            self.dry.set_breakers(vocabulary.zip(0..).filter(|&(token, _)| breaks(token)).map(|(_, id)| id));
        }
        self
    }

    /// Chooses a token from `logits`, `[n_vocab]`.
    ///
    /// NaN and -inf are never chosen; if there are infinite logits, one of these is. If no token qualifies, the result
    /// is that of [`argmax`].
    pub fn sample(&mut self, logits: &[f32]) -> u32 {
        self.sample_allowed(logits, |_| true)
    }

    /// [`sample`](Self::sample) where the logits of tokens that are not `allowed` count as -inf.
    pub fn sample_allowed(&mut self, logits: &[f32], allowed: impl Fn(u32) -> bool) -> u32 {
        if self.is_greedy() {
            let best = argmax(logits);
            if allowed(best) {
                return best;
            }
        }
        // The length of the short list.
        let k = self.short_list().map(|needed| match self.needed() {
            Some(Needed::Highest(_)) if self.n_lowering() == 0 => needed.saturating_add(SPARE),
            _ => needed.saturating_mul(2).max(SHORT_LIST),
        });
        if let Some(k) = k.filter(|&k| k < logits.len())
            && let Some(id) = self.sample_short(&highest(logits, k), k, &allowed)
        {
            return id;
        }
        self.sample_from_all(logits, allowed)
    }

    /// [`sample_allowed`](Self::sample_allowed) without trying the short list first.
    pub(super) fn sample_from_all(&mut self, logits: &[f32], allowed: impl Fn(u32) -> bool) -> u32 {
        self.narrow(logits, &allowed);
        self.draw().unwrap_or_else(|| {
            let or_lowest = |(&logit, id)| if allowed(id) { logit } else { f32::NEG_INFINITY };
            argmax(&logits.iter().zip(0..).map(or_lowest).collect::<Vec<_>>())
        })
    }

    /// Minimum length of a list for [`sample_short`](Self::sample_short) that determines most choices; a longer one
    /// determines more. `None` if these options need all logits.
    pub fn short_list(&self) -> Option<usize> {
        self.needed().filter(|_| self.options.logit_bias.is_empty()).map(|needed| match needed {
            Needed::Highest(n) => n,
            // Any length may do; the longer the list, the lower its last logit.
            Needed::Above(_) => 1,
        })
    }

    /// Chooses one of the `allowed` tokens from `list`: the `k` highest logits, sorted from the highest, or all logits
    /// but NaN if there are no more than `k`. The choice equals that of [`sample_allowed`](Self::sample_allowed) with
    /// all logits. `None` if the list does not determine it; the sampler is then unchanged.
    pub fn sample_short(&mut self, list: &[(u32, f32)], k: usize, allowed: impl Fn(u32) -> bool) -> Option<u32> {
        let needed = self.needed().filter(|_| self.options.logit_bias.is_empty())?;
        self.candidates.fill_listed(list.iter().copied().filter(|&(id, _)| allowed(id)));
        let lowering = self.n_lowering();
        // Without a lowering sampler the list already has the order in which the highest are kept.
        if lowering > 0 || !matches!(needed, Needed::Highest(_)) {
            self.candidates.sort_by_id();
        }
        for sampler in 0..lowering {
            self.apply(self.chain[sampler]);
        }
        let best = self.candidates.best()?;
        if let Some(&(_, lowest)) = list.last().filter(|_| list.len() >= k) {
            // A token outside the list has at most the lowest listed logit.
            let enough = match needed {
                Needed::Highest(n) if lowering == 0 => self.candidates.as_slice().len() >= n,
                Needed::Highest(n) => self.candidates.as_slice().iter().filter(|c| c.logit > lowest).count() >= n,
                Needed::Above(below_best) => lowest < best.logit + below_best,
            };
            if !enough {
                return None;
            }
        }
        for sampler in lowering..self.chain.len() {
            self.apply(self.chain[sampler]);
        }
        self.draw()
    }

    /// Records a token of the sequence for the penalties and DRY, and moves the random numbers to the next position.
    /// Also for the tokens of the prompt.
    pub fn accept(&mut self, id: u32) {
        self.random.advance();
        for sampler in &self.chain {
            match sampler {
                SamplerKind::Penalties => self.penalties.accept(id),
                SamplerKind::Dry => self.dry.accept(id),
                _ => {}
            }
        }
    }

    /// Forgets all tokens and restarts the random numbers from [`Self::seed`].
    pub fn reset(&mut self) {
        self.penalties.reset();
        self.dry.reset();
        self.random = RandomNumbers::new(self.seed());
    }

    /// Whether every choice is the [`argmax`] of the logits: temperature 0, no logit bias, no penalties.
    pub fn is_greedy(&self) -> bool {
        self.options.temperature == 0.0 && self.chain.is_empty() && self.options.logit_bias.is_empty()
    }

    /// The seed: the given one, or the one drawn in its place.
    pub fn seed(&self) -> u64 {
        self.random.seed()
    }

    /// The options.
    pub fn options(&self) -> &SamplerOptions {
        &self.options
    }

    /// Fills the candidates from all logits and applies the chain to them.
    pub(super) fn narrow(&mut self, logits: &[f32], allowed: impl Fn(u32) -> bool) -> &Candidates {
        self.candidates.fill(logits, &self.options.logit_bias, allowed);
        for sampler in 0..self.chain.len() {
            self.apply(self.chain[sampler]);
        }
        &self.candidates
    }

    /// Applies one sampler to the candidates.
    fn apply(&mut self, sampler: SamplerKind) {
        let (options, candidates) = (&self.options, &mut self.candidates);
        match sampler {
            SamplerKind::Penalties => self.penalties.apply(candidates),
            SamplerKind::Dry => self.dry.apply(candidates),
            SamplerKind::TopNSigma => truncation::top_n_sigma(candidates, options.top_n_sigma),
            SamplerKind::TopK => candidates.keep_highest(options.top_k),
            SamplerKind::TypicalP => truncation::typical_p(candidates, options.typical_p, options.min_keep),
            SamplerKind::TopP => truncation::top_p(candidates, options.top_p, options.min_keep),
            SamplerKind::MinP => truncation::min_p(candidates, options.min_p, options.min_keep),
            SamplerKind::Xtc => {
                if self.random.uniform() < f64::from(options.xtc_probability) {
                    truncation::xtc(candidates, options.xtc_threshold, options.min_keep);
                }
            }
            SamplerKind::Temperature => temperature::temperature(
                candidates,
                options.temperature,
                options.dynatemp_range,
                options.dynatemp_exponent,
            ),
        }
    }

    /// Draws from the remaining candidates; at temperature 0, the best. `None` if there are none.
    fn draw(&mut self) -> Option<u32> {
        let chosen = if self.options.temperature == 0.0 {
            self.candidates.best()
        } else {
            self.candidates.at(self.random.uniform())
        };
        chosen.map(|candidate| candidate.id)
    }

    /// Number of samplers at the start of the chain that can only lower logits.
    fn n_lowering(&self) -> usize {
        let o = &self.options;
        let penalties_lower = o.repeat_penalty >= 1.0 && o.frequency_penalty >= 0.0 && o.presence_penalty >= 0.0;
        let lowers = |&&sampler: &&SamplerKind| match sampler {
            SamplerKind::Penalties => penalties_lower,
            SamplerKind::Dry => true,
            _ => false,
        };
        self.chain.iter().take_while(lowers).count()
    }

    /// The tokens that the first sampler after the lowering ones keeps, if that does not depend on all logits.
    fn needed(&self) -> Option<Needed> {
        match self.chain.get(self.n_lowering()) {
            None if self.options.temperature == 0.0 => Some(Needed::Highest(1)),
            Some(SamplerKind::TopK) => Some(Needed::Highest(self.options.top_k)),
            Some(SamplerKind::MinP) if self.options.min_keep <= 1 => Some(Needed::Above(self.options.min_p.ln())),
            _ => None,
        }
    }
}

/// The tokens that a choice depends on.
#[derive(Debug, Clone, Copy)]
enum Needed {
    /// This many of the highest logits.
    Highest(usize),
    /// The logits that are at least the highest plus this (negative) number.
    Above(f32),
}
