//! Logits processors: rules of the caller between the model's logits and the sampler.

use std::fmt;

use crate::choice::{AllowedTokens, Scores, choose};
use crate::sampling::Sampler;

/// Changes logits before the sampler uses them. A processor that leaves a single logit above -inf chooses the token
/// itself.
///
/// Functions of this signature implement it:
///
/// ```
/// use metal_attention::sampling::SamplerOptions;
/// use metal_attention::{EngineOptions, GenerateOptions, Generator, LogitsProcessor, Model};
///
/// # fn main() -> Result<(), metal_attention::Error> {
/// let model = Model::built_in()?;
/// let ids = model.tokenizer()?.encode(",", Default::default());
/// let comma = ids[ids.len() - 1]; // the first may be the blank before a word
/// let mut generator = Generator::new(&model, &EngineOptions::default(), SamplerOptions::greedy())?;
/// generator.set_logits_processor(Some(Box::new(move |_ids: &[u32], logits: &mut [f32]| {
///     logits[comma as usize] = f32::NEG_INFINITY;
///     Ok(())
/// })));
/// let options = GenerateOptions { n_predict: Some(12), ..Default::default() };
/// let text: String = generator.complete("Once upon a time", options)?.map(|token| token.unwrap().text).collect();
/// assert!(!text.contains(','));
/// # Ok(())
/// # }
/// ```
pub trait LogitsProcessor: Send {
    /// Changes `logits`, `[n_vocab]`, of the token that follows `ids` (the prompt and the generated tokens). They come
    /// from the model, before every other rule; -inf forbids a token. An error ends the generation.
    fn process(&mut self, ids: &[u32], logits: &mut [f32]) -> Result<(), String>;
}

impl<F: FnMut(&[u32], &mut [f32]) -> Result<(), String> + Send> LogitsProcessor for F {
    fn process(&mut self, ids: &[u32], logits: &mut [f32]) -> Result<(), String> {
        self(ids, logits)
    }
}

/// A processor in use, with a buffer for the logits.
pub(crate) struct ActiveProcessor {
    /// The processor.
    processor: Box<dyn LogitsProcessor>,
    /// Copy of the logits that the processor changes.
    logits: Vec<f32>,
}

impl fmt::Debug for ActiveProcessor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ActiveProcessor").finish_non_exhaustive()
    }
}

impl ActiveProcessor {
    pub fn new(processor: Box<dyn LogitsProcessor>) -> Self {
        Self { processor, logits: Vec::new() }
    }

    /// Samples the token that follows `ids`. `None` if `scores` are not all logits, which the processor needs.
    pub fn choose(
        &mut self,
        sampler: &mut Sampler,
        ids: &[u32],
        allowed: AllowedTokens<'_>,
        scores: Scores<'_>,
    ) -> Result<Option<u32>, String> {
        let Scores::Logits(logits) = scores else { return Ok(None) };
        self.logits.clear();
        self.logits.extend_from_slice(logits);
        self.processor.process(ids, &mut self.logits)?;
        let mut left = self.logits.iter().zip(0..).filter(|&(&logit, _)| logit > f32::NEG_INFINITY);
        if !left.any(|(_, id)| allowed.has(id)) {
            return Err("it leaves no token to choose".into());
        }
        Ok(choose(sampler, allowed, Scores::Logits(&self.logits)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampling::SamplerOptions;

    #[test]
    fn the_sampler_sees_what_the_processor_leaves() {
        let mut sampler = Sampler::new(SamplerOptions::greedy()).unwrap();
        let mut choose = |processor: fn(&[u32], &mut [f32]) -> Result<(), String>, forbidden: &[u32], scores| {
            let allowed = AllowedTokens { forbidden, mask: None };
            ActiveProcessor::new(Box::new(processor)).choose(&mut sampler, &[7, 8], allowed, scores)
        };
        let logits = Scores::Logits(&[0.0, 3.0, 2.0, 1.0]);
        assert_eq!(choose(|_, _| Ok(()), &[], logits), Ok(Some(1)));
        assert_eq!(choose(|_, _| Ok(()), &[], Scores::Argmax(1)), Ok(None));
        let last = |ids: &[u32], logits: &mut [f32]| {
            assert_eq!(ids, [7, 8]);
            logits[..3].fill(f32::NEG_INFINITY);
            Ok(())
        };
        assert_eq!(choose(last, &[], logits), Ok(Some(3)));
        assert_eq!(choose(last, &[3], logits), Err("it leaves no token to choose".into()));
        assert_eq!(choose(|_, _| Err("no".into()), &[], logits), Err("no".into()));
    }
}
