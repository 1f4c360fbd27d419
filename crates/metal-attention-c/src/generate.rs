//! Generation: continues a prompt token by token.

use std::ffi::{c_char, c_void};
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, PoisonError};

use metal_attention::tokenizer::EncodeOptions;
use metal_attention::{Constraint, ForwardError, Generator, PromptSpan};

use crate::answer::{Answer, AnswerReader};
use crate::context::Context;
use crate::grammar::Grammar;
use crate::model::check_ids;
use crate::picture::Prompt;
use crate::pointers::{Out, check_struct, options, reference, strings, text, values};
use crate::sampling::SamplingOptions;
use crate::status::{Failure, Status, call};

/// The id of text without a token: the rest of a text, which was held back until its end.
pub const MA_NO_TOKEN: u32 = u32::MAX;

/// The end and the form of the generated text. ma_generate_options_default sets all members.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct GenerateOptions {
    /// The size of this struct in bytes.
    pub size: usize,
    /// The largest number of tokens to generate; SIZE_MAX: until the model ends the text, or the context is full.
    pub max_tokens: usize,
    /// Strings that end the text; each ends with a NUL. They are not part of the text.
    pub stop: *const *const c_char,
    /// The number of these strings.
    pub n_stop: usize,
    /// Ids of tokens that end the text, in addition to those of the vocabulary. They are not part of the text.
    pub stop_ids: *const u32,
    /// The number of these ids.
    pub n_stop_ids: usize,
    /// The number of tokens before which no token that ends the text is chosen.
    pub min_tokens: usize,
    /// Not 0: never choose a token by which the vocabulary ends a text.
    pub ignore_eos: i32,
    /// The grammar that the text follows. Null: the text is not constrained.
    pub grammar: *const Grammar,
    /// The answer that reads the text, which answers its conversation. Null: none. It may be freed before the call is over.
    pub answer: *const Answer,
    /// The largest number of drafts in a step; 0: none, each step gives one token; SIZE_MAX: as many as pay. The text does not depend
    /// on it.
    pub max_drafts: usize,
    /// Ids of a text that the generation is likely to repeat, such as the text that it edits: drafts are taken from it, too. The text
    /// does not depend on it. Null: none.
    pub prediction: *const u32,
    /// The number of these ids.
    pub n_prediction: usize,
}

impl GenerateOptions {
    /// The defaults.
    fn new() -> Self {
        let size = size_of::<Self>();
        Self {
            size,
            max_tokens: usize::MAX,
            stop: std::ptr::null(),
            n_stop: 0,
            stop_ids: std::ptr::null(),
            n_stop_ids: 0,
            min_tokens: 0,
            ignore_eos: 0,
            grammar: std::ptr::null(),
            answer: std::ptr::null(),
            max_drafts: usize::MAX,
            prediction: std::ptr::null(),
            n_prediction: 0,
        }
    }

    /// The options of the library.
    ///
    /// # Safety
    /// `stop` is null or points to `n_stop` strings, each of which is null or ends with a NUL; `stop_ids` is null or points to
    /// `n_stop_ids` ids, and `prediction` to `n_prediction` ids.
    unsafe fn options(&self) -> Result<metal_attention::GenerateOptions, Failure> {
        // SAFETY: as the caller promises.
        let stop_ids = unsafe { values(self.stop_ids, self.n_stop_ids, "stop_ids") }?;
        // SAFETY: as the caller promises.
        let stop = unsafe { strings(self.stop, self.n_stop, "stop") }?;
        // SAFETY: as the caller promises.
        let prediction = unsafe { values(self.prediction, self.n_prediction, "prediction") }?;
        Ok(metal_attention::GenerateOptions {
            n_predict: Some(self.max_tokens).filter(|&n| n < usize::MAX),
            stop,
            stop_ids: stop_ids.to_vec(),
            min_tokens: self.min_tokens,
            ignore_eos: self.ignore_eos != 0,
            max_drafts: Some(self.max_drafts).filter(|&n| n < usize::MAX),
            prediction: prediction.to_vec(),
        })
    }
}

/// A generated token. It is valid until the callback returns.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Token {
    /// The token's id, or MA_NO_TOKEN.
    pub id: u32,
    /// The text that became final by this token, in UTF-8, with a NUL at its end: whole characters, and nothing that may be the
    /// beginning of a stop string. May be empty.
    pub text: *const c_char,
    /// Its length in bytes, without the NUL.
    pub length: usize,
}

/// The callback for each token; `user` is the caller's argument. Any result but 0 ends the text. It must not leave by an
/// exception or longjmp.
pub type OnToken = Option<unsafe extern "C" fn(token: *const Token, user: *mut c_void) -> i32>;

/// The reason why a text ended.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// The model ended it.
    EndOfGeneration = 0,
    /// max_tokens were generated.
    Length = 1,
    /// A stop string was generated.
    StopString = 2,
    /// The context is full.
    ContextFull = 3,
    /// The callback ended it.
    Callback = 4,
}

impl StopReason {
    /// Whether the text is incomplete.
    fn is_cut(self) -> bool {
        match self {
            Self::EndOfGeneration | Self::StopString => false,
            Self::Length | Self::ContextFull | Self::Callback => true,
        }
    }
}

/// The result of a generation.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Generation {
    /// The number of tokens of the prompt.
    pub n_prompt: usize,
    /// The number of those that were still in the KV cache and were not evaluated again.
    pub n_cached: usize,
    /// The number of generated tokens.
    pub n_generated: usize,
    /// The number of drafts that were evaluated: tokens that a drafter proposed.
    pub n_drafted: usize,
    /// The number of drafts that were accepted. They are among the generated tokens.
    pub n_accepted: usize,
    /// The reason why the text ended.
    pub stop_reason: StopReason,
}

/// Sets all members of `options`; `size` is sizeof(ma_generate_options).
///
/// # Safety
/// `options` is null or points to memory for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_generate_options_default(options: *mut GenerateOptions, size: usize) -> Status {
    call(|| {
        // SAFETY: as the caller promises.
        let out = unsafe { Out::new(options, "options") }?;
        check_struct::<GenerateOptions>(size, "generate_options")?;
        out.set(GenerateOptions::new());
        Ok(())
    })
}

/// Continues the tokens of `prompt`, which include those that the model expects around a text (see ma_tokenize), and calls `on_token`
/// for each new one. Tokens of the prompt that are still in the KV cache are not evaluated again.
///
/// Null `sampling` stands for the values that the model's file recommends, null `options` for the defaults; `on_token` and
/// `generation` may be null. Before a call fails, `on_token` may have been called for some tokens.
///
/// # Safety
/// Pointers are null or point to what is described here; `prompt` to `n_prompt` ids. `on_token` is null or a function of its type.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_generate(
    context: *const Context,
    prompt: *const u32,
    n_prompt: usize,
    sampling: *const SamplingOptions,
    options: *const GenerateOptions,
    on_token: OnToken,
    user: *mut c_void,
    generation: *mut Generation,
) -> Status {
    call(|| {
        // SAFETY: as the caller promises.
        let (context, prompt) = unsafe { (reference(context, "context")?, values(prompt, n_prompt, "prompt")?) };
        // SAFETY: as the caller promises.
        let mut request = unsafe { Request::new(sampling, options, on_token, user) }?;
        let mut generator = context.lock()?;
        let done = request.run(context, &mut generator, prompt, &[])?;
        // SAFETY: as the caller promises.
        unsafe { write_generation(done, generation) }
    })
}

/// Like ma_generate, with a text as prompt: its `length` is in bytes, or MA_NUL_TERMINATED. The tokens that the model expects around
/// a text are added.
///
/// # Safety
/// Pointers are null or point to what is described here; `prompt` to `length` bytes. `on_token` is null or a function of its type.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_complete(
    context: *const Context,
    prompt: *const c_char,
    length: usize,
    sampling: *const SamplingOptions,
    options: *const GenerateOptions,
    on_token: OnToken,
    user: *mut c_void,
    generation: *mut Generation,
) -> Status {
    call(|| {
        // SAFETY: as the caller promises.
        let (context, prompt) = unsafe { (reference(context, "context")?, text(prompt, length, "prompt")?) };
        // SAFETY: as the caller promises.
        let mut request = unsafe { Request::new(sampling, options, on_token, user) }?;
        let mut generator = context.lock()?;
        let tokenizer = generator.model().tokenizer()?;
        let ids = tokenizer.encode(prompt, EncodeOptions { add_special: true, parse_special: false });
        let done = request.run(context, &mut generator, &ids, &[])?;
        // SAFETY: as the caller promises.
        unsafe { write_generation(done, generation) }
    })
}

/// Like ma_generate, with a prompt that may have pictures. Those at the prompt's beginning that are still in the KV cache are not
/// evaluated again.
///
/// # Safety
/// Pointers are null or point to what is described here. `on_token` is null or a function of its type.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_generate_prompt(
    context: *const Context,
    prompt: *const Prompt,
    sampling: *const SamplingOptions,
    options: *const GenerateOptions,
    on_token: OnToken,
    user: *mut c_void,
    generation: *mut Generation,
) -> Status {
    call(|| {
        // SAFETY: as the caller promises.
        let (context, prompt) = unsafe { (reference(context, "context")?, reference(prompt, "prompt")?) };
        // SAFETY: as the caller promises.
        let mut request = unsafe { Request::new(sampling, options, on_token, user) }?;
        let mut generator = context.lock()?;
        let done = request.run(context, &mut generator, &prompt.ids, &prompt.spans)?;
        // SAFETY: as the caller promises.
        unsafe { write_generation(done, generation) }
    })
}

/// Writes the result of a call to `to`, if it is not null.
///
/// # Safety
/// `to` is null or points to memory for it.
unsafe fn write_generation(done: Generation, to: *mut Generation) -> Result<(), Failure> {
    if !to.is_null() {
        // SAFETY: as the caller promises.
        unsafe { Out::new(to, "generation") }?.set(done);
    }
    Ok(())
}

/// The arguments of one generation, converted.
pub struct Request {
    /// The sampler's options. `None`: those that the model's file recommends.
    sampling: Option<metal_attention::sampling::SamplerOptions>,
    /// The options of the generation.
    options: metal_attention::GenerateOptions,
    /// The constraint of the grammar.
    constraint: Option<Box<dyn Constraint>>,
    /// The size of the vocabulary that the grammar is compiled for.
    n_vocab: Option<usize>,
    /// The reader of the answer, until the text is over.
    answer: Option<Arc<Mutex<AnswerReader>>>,
    /// The caller's callback.
    on_token: OnToken,
    /// The argument of the callback.
    user: *mut c_void,
}

// SAFETY: ma_batch_add is promised that `on_token` may be called with `user` in the thread of ma_batch_run; other requests stay
// in their thread.
unsafe impl Send for Request {}

impl Request {
    /// Converts the arguments. Assigns the answer, if there is one, to this generation.
    ///
    /// # Safety
    /// Pointers are null or point to what their types say. `on_token` may be called with `user`.
    pub unsafe fn new(
        sampling: *const SamplingOptions,
        options: *const GenerateOptions,
        on_token: OnToken,
        user: *mut c_void,
    ) -> Result<Self, Failure> {
        // SAFETY: as the caller promises.
        let sampling = match unsafe { crate::generate::options(sampling, "sampling_options") }? {
            // SAFETY: as the caller promises.
            Some(sampling) => Some(unsafe { sampling.sampler() }?),
            None => None,
        };
        let defaults = GenerateOptions::new();
        // SAFETY: as the caller promises.
        let given = unsafe { crate::generate::options(options, "generate_options") }?.unwrap_or(&defaults);
        // SAFETY: as the caller promises.
        let mut options = unsafe { given.options() }?;
        // SAFETY: as the caller promises.
        let (grammar, answer) = unsafe { (given.grammar.as_ref(), given.answer.as_ref()) };
        if let Some(answer) = answer {
            options
                .stop
                .extend(answer.assign(grammar.is_some_and(|grammar| grammar.is_form))?.iter().map(ToString::to_string));
        }
        let (constraint, n_vocab) = (grammar.and_then(Grammar::constraint), grammar.map(|grammar| grammar.n_vocab));
        let answer = answer.map(|answer| Arc::clone(&answer.0));
        Ok(Self { sampling, options, constraint, n_vocab, answer, on_token, user })
    }

    /// An error if a stop token or the grammar does not fit the vocabulary of `model`.
    pub fn check(&self, model: &metal_attention::Model) -> Result<(), Failure> {
        check_ids(model, &self.options.stop_ids)?;
        let n_vocab = model.spec().n_vocab;
        match self.n_vocab.filter(|&n| n != n_vocab) {
            Some(n) => Err(Failure::argument(format!(
                "grammar is for a vocabulary of {n} tokens, but the model has {n_vocab}: make one for this model"
            ))),
            None => Ok(()),
        }
    }

    /// The request for a scheduler, which continues `prompt` with `model`; `spans` are its pictures. Takes the options and the
    /// constraint out of this value.
    pub fn queued(
        &mut self,
        model: &metal_attention::Model,
        prompt: &[u32],
        spans: &[PromptSpan],
    ) -> metal_attention::scheduler::Request {
        let options = std::mem::take(&mut self.options);
        metal_attention::scheduler::Request {
            prompt: prompt.into(),
            spans: spans.into(),
            sampling: self.sampling.take().unwrap_or_else(|| model.sampling()),
            max_tokens: options.n_predict,
            stop: options.stop.into(),
            stop_ids: options.stop_ids.into(),
            ignore_eos: options.ignore_eos,
            min_tokens: options.min_tokens,
            max_drafts: options.max_drafts,
            prediction: options.prediction.into(),
            constraint: self.constraint.take(),
            ..Default::default()
        }
    }

    /// Passes text to the reader of the answer.
    fn read(&self, id: u32, text: &str) {
        if let Some(answer) = &self.answer {
            let id = (id != MA_NO_TOKEN).then_some(id);
            answer.lock().unwrap_or_else(PoisonError::into_inner).add(id, text);
        }
    }

    /// Ends the text.
    pub fn finish(&mut self, reason: StopReason) {
        if let Some(answer) = self.answer.take() {
            answer.lock().unwrap_or_else(PoisonError::into_inner).finish(reason.is_cut());
        }
    }

    /// Passes a token to the reader of the answer and to the callback. Returns whether the caller wants more.
    pub fn on_token(&self, id: u32, text: String) -> bool {
        self.read(id, &text);
        let Some(on_token) = self.on_token else { return true };
        let length = text.len();
        // The text may contain a NUL, so its length is passed, too.
        let mut bytes = text.into_bytes();
        bytes.push(0);
        let token = Token { id, text: bytes.as_ptr().cast(), length };
        // SAFETY: `new` was promised that it may be called, and the token lives until it returns.
        unsafe { on_token(&raw const token, self.user) == 0 }
    }

    /// Runs the generation on the generator of `context`. `spans`: the pictures of the prompt.
    fn run(
        &mut self,
        context: &Context,
        generator: &mut Generator,
        prompt: &[u32],
        spans: &[PromptSpan],
    ) -> Result<Generation, Failure> {
        self.check(generator.model())?;
        if generator.model().spec().output.head.is_none() {
            return Err(Failure::new(Status::Unsupported, "the model writes no text: it makes embeddings, or ranks"));
        }
        let sampling = self.sampling.clone().unwrap_or_else(|| generator.model().sampling());
        generator.set_sampling(sampling)?;
        generator.set_constraint(self.constraint.take());
        generator.prompt_with_spans(prompt, spans, |_, _| ControlFlow::Continue(()))?;
        let mut generation = generator.generate(self.options.clone());
        let mut n_generated = 0;
        let mut stopped = false;
        let mut failure = None;
        while !stopped && failure.is_none() {
            match generation.next() {
                Some(Ok(token)) => {
                    n_generated += 1;
                    stopped = !self.on_token(token.id, token.text);
                }
                Some(Err(error)) => failure = Some(error),
                None => break,
            }
            // Tokens after accepted drafts are chosen without an evaluation, which would meet the cancellation.
            if !stopped && failure.is_none() && context.is_cancelled() && generation.stop_reason().is_none() {
                failure = Some(ForwardError::Cancelled.into());
            }
        }
        let reason = generation.stop_reason();
        let timings = generation.timings();
        let rest = generation.finish();
        if !rest.is_empty() {
            if stopped || failure.is_some() {
                self.read(MA_NO_TOKEN, &rest);
            } else {
                self.on_token(MA_NO_TOKEN, rest);
            }
        }
        if let Some(error) = failure {
            return Err(error.into());
        }
        let stop_reason = match reason {
            _ if stopped => StopReason::Callback,
            Some(metal_attention::StopReason::EndOfGeneration) => StopReason::EndOfGeneration,
            Some(metal_attention::StopReason::StopString) => StopReason::StopString,
            Some(metal_attention::StopReason::ContextFull) => StopReason::ContextFull,
            // The library may add reasons later.
            Some(_) | None => StopReason::Length,
        };
        self.finish(stop_reason);
        Ok(Generation {
            n_prompt: prompt.len(),
            n_cached: timings.cached_tokens,
            n_generated,
            n_drafted: timings.drafted,
            n_accepted: timings.accepted,
            stop_reason,
        })
    }
}

impl Drop for Request {
    /// Tells the reader of the answer that the call failed, if the text is not over. A poisoned reader is left alone.
    fn drop(&mut self) {
        if let Some(Ok(mut answer)) = self.answer.as_ref().map(|answer| answer.lock()) {
            answer.fail();
        }
    }
}
