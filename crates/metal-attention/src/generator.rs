//! Continues texts with a model, one after the other.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use metal_attention_model::{ForwardPass, Profile};
use metal_attention_tokenizer::{EncodeOptions, Tokenizer};

use crate::sampling::{Sampler, SamplerOptions};
use crate::sequence::Sequence;
use crate::{
    Constraint, EngineOptions, Error, GenerateOptions, Generation, LogitsProcessor, Model, Pooler, SessionError,
    SessionFile, Timings,
};

/// A model, its KV cache and a sampler.
///
/// Give it a prompt, then read the continuation:
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
    model: Model,
    tokenizer: Arc<Tokenizer>,
    sequence: Sequence,
}

impl Generator {
    /// Sets `model` up to run.
    pub fn new(model: &Model, options: &EngineOptions, sampling: SamplerOptions) -> Result<Self, Error> {
        let tokenizer = model.tokenizer()?;
        let sampler = sampler(&tokenizer, sampling)?;
        let pass = model.forward_pass(options)?;
        Ok(Self { model: model.clone(), tokenizer, sequence: Sequence::new(pass, sampler) })
    }

    /// The model that runs.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The forward pass with its KV cache.
    pub fn forward_pass(&self) -> &dyn ForwardPass {
        self.sequence.pass()
    }

    /// Brings a device that was idle up to its speed, which takes it a fifth of a second, or until `enough` says that there is
    /// work. For those who hear that a prompt is about to come.
    pub fn wake(&mut self, enough: impl FnMut() -> bool) {
        metal_attention_model::wake(self.sequence.pass_mut(), enough);
    }

    /// The sampler that chooses tokens.
    pub fn sampler(&self) -> &Sampler {
        self.sequence.sampler()
    }

    /// Chooses tokens in another way from the next prompt on.
    pub fn set_sampling(&mut self, sampling: SamplerOptions) -> Result<(), Error> {
        self.sequence.set_sampler(sampler(&self.tokenizer, sampling)?);
        Ok(())
    }

    /// Lets `processor` change the logits from the next token on; `None`: nobody does. All logits are then read from the
    /// device for each token.
    pub fn set_logits_processor(&mut self, processor: Option<Box<dyn LogitsProcessor>>) {
        self.sequence.set_processor(processor);
    }

    /// Lets `constraint` say which tokens may come from the next one on, to the end of the text that it describes; `None`: all may.
    /// One constraint is for one text.
    pub fn set_constraint(&mut self, constraint: Option<Box<dyn Constraint>>) {
        self.sequence.set_constraint(constraint);
    }

    /// Tokens of the text so far: the prompt and what was generated.
    pub fn ids(&self) -> &[u32] {
        self.sequence.ids()
    }

    /// Starts a text with the tokens `ids` (with BOS, where the model wants one), and starts the sampler's random
    /// numbers again from its seed.
    ///
    /// What the KV cache already holds of `ids` is kept. The rest is evaluated in micro-batches, the last of them
    /// together with the first token of [`generate`](Self::generate). Before each of them `progress` hears how many of
    /// how many tokens are done; where it breaks, the result is [`Error::Interrupted`]. Within a micro-batch the
    /// [watch](EngineOptions::watch) tells how far it is, and ends it.
    ///
    /// More tokens than the context holds are [`Error::PromptTooLong`], none at all [`Error::EmptyPrompt`]; the text is
    /// then as it was.
    pub fn prompt(&mut self, ids: &[u32], progress: impl FnMut(usize, usize) -> ControlFlow<()>) -> Result<(), Error> {
        self.sequence.start(ids, progress)
    }

    /// Continues the text, token by token.
    pub fn generate(&mut self, options: GenerateOptions) -> Generation<'_> {
        Generation::new(&self.tokenizer, &mut self.sequence, options)
    }

    /// Starts a text with `text`, special tokens added as the model wants them, and continues it.
    pub fn complete(&mut self, text: &str, options: GenerateOptions) -> Result<Generation<'_>, Error> {
        let ids = self.tokenizer.encode(text, EncodeOptions { add_special: true, parse_special: false });
        self.prompt(&ids, |_, _| ControlFlow::Continue(()))?;
        Ok(self.generate(options))
    }

    /// The embedding of the tokens `ids`, or a reranker's scores, as `pooler` makes them of the model's states. The text so
    /// far is forgotten. Errors are those of [`prompt`](Self::prompt).
    pub fn embed(&mut self, pooler: &Pooler, ids: &[u32]) -> Result<Vec<f32>, Error> {
        self.sequence.embed(pooler, ids)
    }

    /// For conversations: keeps the places where answers begin in so many bytes of main memory, where layers with windows would lose
    /// them. A prompt that goes back there, as where a template drops the thoughts of earlier answers, is not evaluated anew.
    pub fn keep_prompt_ends(&mut self, bytes: u64) {
        self.sequence.keep_prompt_ends(bytes);
    }

    /// Writes a [session file](SessionFile) with `note` and the text so far, which [`restore`](Self::restore) brings back without
    /// evaluating it.
    pub fn save(&mut self, path: &Path, note: &[u8]) -> Result<(), SessionError> {
        self.sequence.save(path, &self.model, note)
    }

    /// Replaces the text by that of a session file; returns how many tokens that has. On an error the text is empty, or as it
    /// was.
    pub fn restore(&mut self, session: SessionFile) -> Result<usize, SessionError> {
        self.sequence.restore(session, &self.model)?;
        Ok(self.sequence.ids().len())
    }

    /// Times every kernel from now on. An error where the device has no clock for it.
    pub fn start_profile(&mut self) -> Result<(), Error> {
        Ok(self.sequence.pass_mut().start_profile()?)
    }

    /// Stops timing kernels and gives what was collected; `None` where there was no profile.
    pub fn take_profile(&mut self) -> Option<Profile> {
        self.sequence.pass_mut().take_profile()
    }

    /// What the last prompt and its continuation cost.
    pub fn timings(&self) -> Timings {
        self.sequence.timings
    }
}

/// A sampler for the vocabulary of `tokenizer`.
fn sampler(tokenizer: &Tokenizer, sampling: SamplerOptions) -> Result<Sampler, Error> {
    let vocabulary = (0..tokenizer.n_vocab() as u32).map(|id| tokenizer.token_bytes(id));
    Ok(Sampler::new(sampling)?.with_vocabulary(vocabulary))
}
