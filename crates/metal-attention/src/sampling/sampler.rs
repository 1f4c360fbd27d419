//! The chain of samplers and the draw at its end.

use metal_attention_model::{argmax, highest};
use rand_chacha::rand_core::{OsRng, TryRngCore};

use super::candidates::Candidates;
use super::dry::Dry;
use super::penalties::Penalties;
use super::random::RandomNumbers;
use super::{SamplerKind, SamplerOptions, SamplingError, temperature, truncation};

/// Logits that are looked at before all others: more than most choices hang on.
const SHORT_LIST: usize = 128;
/// The same besides the highest that a sampler keeps, where nothing else decides: some may not be allowed.
const SPARE: usize = 8;

/// Chooses tokens for one text, and remembers what was chosen.
///
/// The random numbers of a choice are those of the seed and the position, the number of tokens [accepted](Self::accept) so
/// far. So a text can be continued elsewhere: a sampler of the same options and seed that has accepted the text so far
/// chooses what this one would have chosen.
///
/// Its buffers are reused: after the first token of a text it allocates no more
/// than its memory of the text needs.
#[derive(Debug)]
pub struct Sampler {
    options: SamplerOptions,
    /// The samplers that have an effect, in order.
    chain: Vec<SamplerKind>,
    random: RandomNumbers,
    penalties: Penalties,
    dry: Dry,
    candidates: Candidates,
}

impl Sampler {
    /// A sampler with no memory of any text. Fails on options out of range.
    pub fn new(options: SamplerOptions) -> Result<Self, SamplingError> {
        options.validate()?;
        let seed = match options.seed {
            Some(seed) => seed,
            None => OsRng.try_next_u64().map_err(|e| SamplingError::NoSeed { reason: e.to_string() })?,
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

    /// Tells DRY the vocabulary: the tokens whose bytes contain one of [`SamplerOptions::dry_sequence_breakers`] end a
    /// repetition. `vocabulary` yields the bytes of each token, from id 0 on. Nothing ends one until this is called.
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

    /// Chooses a token, given the logit of every token of the vocabulary.
    ///
    /// NaN and -inf are never chosen; where there are infinite logits, one of
    /// these is. When no token qualifies the result is that of [`argmax`].
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
        // The highest logits can be picked out of all at the speed of memory; everything else cannot.
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

    /// [`sample_allowed`](Self::sample_allowed) without a look at the highest logits first.
    pub(super) fn sample_from_all(&mut self, logits: &[f32], allowed: impl Fn(u32) -> bool) -> u32 {
        self.narrow(logits, &allowed);
        self.draw().unwrap_or_else(|| {
            let or_lowest = |(&logit, id)| if allowed(id) { logit } else { f32::NEG_INFINITY };
            argmax(&logits.iter().zip(0..).map(or_lowest).collect::<Vec<_>>())
        })
    }

    /// How many of the highest logits decide most choices, where a short list of them does at all; for
    /// [`sample_short`](Self::sample_short), whose list may be longer.
    pub fn short_list(&self) -> Option<usize> {
        self.needed().filter(|_| self.options.logit_bias.is_empty()).map(|needed| match needed {
            Needed::Highest(n) => n,
            // The longer the list the lower it reaches.
            Needed::Above(_) => 1,
        })
    }

    /// Chooses one of the `allowed` tokens from the `k` highest logits, sorted from the highest, or from all that are not
    /// NaN where there are no more than `k`. The choice is that of [`sample`](Self::sample) given all logits, those of
    /// other tokens set to -inf; `None` where the list is too short to tell, and the sampler is then as it was.
    pub fn sample_short(&mut self, list: &[(u32, f32)], k: usize, allowed: impl Fn(u32) -> bool) -> Option<u32> {
        let needed = self.needed().filter(|_| self.options.logit_bias.is_empty())?;
        self.candidates.fill_listed(list.iter().copied().filter(|&(id, _)| allowed(id)));
        let lowering = self.n_lowering();
        // The list is in the order that the highest are in.
        if lowering > 0 || !matches!(needed, Needed::Highest(_)) {
            self.candidates.sort_by_id();
        }
        for sampler in 0..lowering {
            self.apply(self.chain[sampler]);
        }
        let best = self.candidates.best()?;
        if let Some(&(_, lowest)) = list.last().filter(|_| list.len() >= k) {
            // No token that is not listed has a logit above the lowest one.
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

    /// Remembers a token of the text, for the penalties, DRY and the random numbers, which are those of the next position
    /// from now on. Call it with the tokens of the prompt as well.
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

    /// Forgets the text and starts the random numbers again from [`Self::seed`].
    pub fn reset(&mut self) {
        self.penalties.reset();
        self.dry.reset();
        self.random = RandomNumbers::new(self.seed());
    }

    /// Whether every choice is the plain [`argmax`] of the logits: temperature 0,
    /// no logit bias, no penalties.
    pub fn is_greedy(&self) -> bool {
        self.options.temperature == 0.0 && self.chain.is_empty() && self.options.logit_bias.is_empty()
    }

    /// The seed in use: the one given, or the one drawn in its place.
    pub fn seed(&self) -> u64 {
        self.random.seed()
    }

    /// The options in use.
    pub fn options(&self) -> &SamplerOptions {
        &self.options
    }

    /// Fills the candidates and applies the chain to them.
    pub(super) fn narrow(&mut self, logits: &[f32], allowed: impl Fn(u32) -> bool) -> &Candidates {
        self.candidates.fill(logits, &self.options.logit_bias, allowed);
        for sampler in 0..self.chain.len() {
            self.apply(self.chain[sampler]);
        }
        &self.candidates
    }

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

    /// The choice among the candidates that are left.
    fn draw(&mut self) -> Option<u32> {
        let chosen = if self.options.temperature == 0.0 {
            self.candidates.best()
        } else {
            self.candidates.at(self.random.uniform())
        };
        chosen.map(|candidate| candidate.id)
    }

    /// How many samplers at the start of the chain do nothing but lower logits.
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

    /// Which tokens the samplers after those leave, where that does not hang on the logits of all tokens.
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
    /// So many of the highest logits.
    Highest(usize),
    /// Those with at least the highest logit plus this.
    Above(f32),
}
