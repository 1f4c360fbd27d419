//! The generator: one model, one sequence at a time.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use metal_attention_model::{ForwardPass, Profile};
use metal_attention_tokenizer::{EncodeOptions, Tokenizer};

use crate::sampling::{Sampler, SamplerOptions};
use crate::sequence::Sequence;
use crate::speculation::{DraftDepth, Drafter, Speculation, SpeculativePass};
use crate::{
    Constraint, EngineOptions, Error, GenerateOptions, Generation, LogitsProcessor, Model, Pooler, PromptSpan,
    SessionError, SessionFile, Timings,
};

/// A model with a forward pass, one sequence and a sampler.
///
/// Evaluate a prompt, then read the tokens that continue it:
///
/// ```
/// use std::ops::ControlFlow;
///
/// use metal_attention::sampling::SamplerOptions;
/// use metal_attention::tokenizer::EncodeOptions;
/// use metal_attention::{EngineOptions, GenerateOptions, Generator, Model};
///
/// # fn main() -> Result<(), metal_attention::Error> {
/// let model = Model::built_in()?;
/// let mut generator = Generator::new(&model, &EngineOptions::default(), SamplerOptions::greedy())?;
/// let ids = model.tokenizer()?.encode("Once upon a time", EncodeOptions { add_special: true, ..Default::default() });
/// assert_eq!(ids, [1, 403, 407, 261, 378]);
///
/// generator.prompt(&ids, |_done, _total| ControlFlow::Continue(()))?;
/// let mut generation = generator.generate(GenerateOptions { n_predict: Some(4), ..Default::default() });
/// let tokens = generation.by_ref().collect::<Result<Vec<_>, _>>()?;
/// assert_eq!(tokens.iter().map(|t| t.id).collect::<Vec<_>>(), [432, 383, 286, 261]);
/// println!("{:.0} tokens per second", generation.timings().decode_tokens_per_second().unwrap());
/// # Ok(())
/// # }
/// ```
pub struct Generator {
    /// The model.
    model: Model,
    /// Its tokenizer.
    tokenizer: Arc<Tokenizer>,
    /// The sequence with its forward pass and sampler.
    sequence: Sequence,
}

impl Generator {
    /// Sets up a forward pass of `model` and a sampler.
    pub fn new(model: &Model, options: &EngineOptions, sampling: SamplerOptions) -> Result<Self, Error> {
        Self::with_pass(model, model.forward_pass(options)?, sampling)
    }

    /// [`new`](Self::new), with a drafter, so that a step may give several tokens. The text does not depend on it.
    pub fn with_speculation(
        model: &Model,
        options: &EngineOptions,
        sampling: SamplerOptions,
        speculation: Speculation,
    ) -> Result<Self, Error> {
        let SpeculativePass { pass, drafter } = SpeculativePass::new(model, options, speculation)?;
        let mut generator = Self::with_pass(model, pass, sampling)?;
        generator.set_drafter(drafter, speculation.depth);
        Ok(generator)
    }

    /// A generator with the vocabulary of `model` and a forward pass of the caller's.
    pub fn with_pass(model: &Model, pass: Box<dyn ForwardPass>, sampling: SamplerOptions) -> Result<Self, Error> {
        let tokenizer = model.tokenizer()?;
        let sampler = sampler(&tokenizer, sampling)?;
        Ok(Self { model: model.clone(), tokenizer, sequence: Sequence::new(pass, sampler) })
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The forward pass and its KV cache.
    pub fn forward_pass(&self) -> &dyn ForwardPass {
        self.sequence.pass()
    }

    /// Brings an idle device up to its clock, which takes a fifth of a second, or until `enough` returns true. For
    /// callers that expect a prompt.
    pub fn wake(&mut self, enough: impl FnMut() -> bool) {
        metal_attention_model::wake(self.sequence.pass_mut(), enough);
    }

    /// The sampler.
    pub fn sampler(&self) -> &Sampler {
        self.sequence.sampler()
    }

    /// Replaces the sampler. The new one applies from the next prompt on.
    pub fn set_sampling(&mut self, sampling: SamplerOptions) -> Result<(), Error> {
        self.sequence.set_sampler(sampler(&self.tokenizer, sampling)?);
        Ok(())
    }

    /// Sets the logits processor, from the next token on; `None` removes it. With a processor, all logits are read from
    /// the device for each token.
    pub fn set_logits_processor(&mut self, processor: Option<Box<dyn LogitsProcessor>>) {
        self.sequence.set_processor(processor);
    }

    /// Sets the constraint on tokens, from the next token on; `None` removes it. A constraint is for one generation.
    pub fn set_constraint(&mut self, constraint: Option<Box<dyn Constraint>>) {
        self.sequence.set_constraint(constraint);
    }

    /// Sets the drafter, which proposes tokens so that a step may give several ([`speculation`](crate::speculation)); `None`
    /// removes it. The text does not depend on it.
    pub fn set_drafter(&mut self, drafter: Option<Box<dyn Drafter>>, depth: DraftDepth) {
        self.sequence.set_drafter(drafter, depth);
    }

    /// The drafter.
    pub fn drafter(&self) -> Option<&dyn Drafter> {
        self.sequence.drafter()
    }

    /// The tokens of the sequence: the prompt and the generated ones.
    pub fn ids(&self) -> &[u32] {
        self.sequence.ids()
    }

    /// Starts a sequence with the tokens `ids` (with BOS, if the model wants one) and restarts the sampler's random
    /// numbers from its seed.
    ///
    /// The prefix of `ids` that is in the KV cache is kept. The rest is evaluated in micro-batches, except the last
    /// one, which [`generate`](Self::generate) evaluates with its first token. Before each micro-batch `progress` is
    /// called with the number of tokens done and in total; if it returns `Break`, the result is [`Error::Interrupted`].
    /// Within a micro-batch the [watch](EngineOptions::watch) reports progress and cancels.
    ///
    /// More tokens than the context are [`Error::PromptTooLong`], none [`Error::EmptyPrompt`]; the sequence is then
    /// unchanged.
    pub fn prompt(&mut self, ids: &[u32], progress: impl FnMut(usize, usize) -> ControlFlow<()>) -> Result<(), Error> {
        self.sequence.start(ids, &[], progress)
    }

    /// [`prompt`](Self::prompt) with rows of embeddings in the place of some of `ids`. Spans are kept and evaluated
    /// whole: the prefix of the prompt that is in the KV cache ends within none. Spans that the model or the device
    /// cannot evaluate are [`Error::Forward`]; the sequence is then unchanged.
    pub fn prompt_with_spans(
        &mut self,
        ids: &[u32],
        spans: &[PromptSpan],
        progress: impl FnMut(usize, usize) -> ControlFlow<()>,
    ) -> Result<(), Error> {
        self.sequence.start(ids, spans, progress)
    }

    /// Continues the sequence token by token.
    pub fn generate(&mut self, options: GenerateOptions) -> Generation<'_> {
        Generation::new(&self.tokenizer, &mut self.sequence, options)
    }

    /// Starts a sequence with the tokens of `text`, with the special tokens that the model wants, and continues it.
    pub fn complete(&mut self, text: &str, options: GenerateOptions) -> Result<Generation<'_>, Error> {
        let ids = self.tokenizer.encode(text, EncodeOptions { add_special: true, parse_special: false });
        self.prompt(&ids, |_, _| ControlFlow::Continue(()))?;
        Ok(self.generate(options))
    }

    /// The embedding of the tokens `ids`, or a reranker's scores, from the model's hidden states by `pooler`. The
    /// present sequence is dropped. Errors are those of [`prompt`](Self::prompt).
    pub fn embed(&mut self, pooler: &Pooler, ids: &[u32]) -> Result<Vec<f32>, Error> {
        self.sequence.embed(pooler, ids)
    }

    /// For conversations: keeps snapshots of prompt ends in up to `bytes` bytes of main memory, in models whose sliding
    /// windows would lose them. A prompt that returns to one, because the template drops the reasoning of earlier
    /// answers, is not evaluated again from its start.
    pub fn keep_prompt_ends(&mut self, bytes: u64) {
        self.sequence.keep_prompt_ends(bytes);
    }

    /// Writes a [session file](SessionFile) with `note` and a snapshot of the sequence. [`restore`](Self::restore)
    /// reads it back.
    pub fn save(&mut self, path: &Path, note: &[u8]) -> Result<(), SessionError> {
        self.sequence.save(path, &self.model, note)
    }

    /// Replaces the sequence by that of a session file, and returns its number of tokens. After an error the sequence
    /// is empty or unchanged.
    pub fn restore(&mut self, session: SessionFile) -> Result<usize, SessionError> {
        self.sequence.restore(session, &self.model)?;
        Ok(self.sequence.ids().len())
    }

    /// Times every kernel from now on. An error if the backend has no timer.
    pub fn start_profile(&mut self) -> Result<(), Error> {
        Ok(self.sequence.pass_mut().start_profile()?)
    }

    /// Stops timing kernels and returns the profile; `None` if none was started.
    pub fn take_profile(&mut self) -> Option<Profile> {
        self.sequence.pass_mut().take_profile()
    }

    /// Token counts and durations of the last prompt and its continuation.
    pub fn timings(&self) -> Timings {
        self.sequence.timings
    }
}

/// A sampler for the vocabulary of `tokenizer`.
fn sampler(tokenizer: &Tokenizer, sampling: SamplerOptions) -> Result<Sampler, Error> {
    let vocabulary = (0..tokenizer.n_vocab() as u32).map(|id| tokenizer.token_bytes(id));
    Ok(Sampler::new(sampling)?.with_vocabulary(vocabulary))
}
