//! Texts, token by token.

use std::ffi::{c_char, c_void};
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, PoisonError};

use metal_attention::tokenizer::EncodeOptions;
use metal_attention::{Constraint, Generator};

use crate::answer::{Answer, AnswerReader};
use crate::context::Context;
use crate::grammar::Grammar;
use crate::model::check_ids;
use crate::pointers::{Out, check_struct, options, reference, text, texts, values};
use crate::sampling::SamplingOptions;
use crate::status::{Failure, Status, call};

/// In the place of a token's id: the rest of a text, which was held back, without a token of its own.
pub const MA_NO_TOKEN: u32 = u32::MAX;

/// When a text ends, and what it must look like. ma_generate_options_default sets all members.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct GenerateOptions {
    /// Bytes of this struct.
    pub size: usize,
    /// Most tokens; SIZE_MAX: until the model ends the text, or the context is full.
    pub max_tokens: usize,
    /// Strings that end the text, each of which ends with a NUL; they are not part of it.
    pub stop: *const *const c_char,
    /// How many.
    pub n_stop: usize,
    /// Tokens that end the text besides those of the vocabulary; they are not part of it.
    pub stop_ids: *const u32,
    /// How many.
    pub n_stop_ids: usize,
    /// The least number of tokens before one that ends the text may be chosen.
    pub min_tokens: usize,
    /// Not 0: never choose a token with which the vocabulary ends a text.
    pub ignore_eos: i32,
    /// What the text must look like; null: nothing in particular.
    pub grammar: *const Grammar,
    /// Is given the text, which answers its conversation, and takes it apart; null: nothing does. It need not outlive the call.
    pub answer: *const Answer,
}

impl GenerateOptions {
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
        }
    }

    /// # Safety
    /// `stop` is null or leads to `n_stop` strings, each of which is null or ends with a NUL; `stop_ids` is null or leads to `n_stop_ids` ids.
    unsafe fn options(&self) -> Result<metal_attention::GenerateOptions, Failure> {
        // SAFETY: there are so many.
        let stop_ids = unsafe { values(self.stop_ids, self.n_stop_ids, "stop_ids") }?;
        // SAFETY: there are so many, and each ends with a NUL.
        let stop = unsafe { texts(self.stop, self.n_stop, "stop") }?;
        Ok(metal_attention::GenerateOptions {
            n_predict: Some(self.max_tokens).filter(|&n| n < usize::MAX),
            stop,
            stop_ids: stop_ids.to_vec(),
            min_tokens: self.min_tokens,
            ignore_eos: self.ignore_eos != 0,
        })
    }
}

/// A token that was generated. It is there for as long as the function that is told of it runs.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Token {
    /// Its number in the vocabulary, or MA_NO_TOKEN.
    pub id: u32,
    /// What can be shown of the text now, in UTF-8, with a NUL behind it: whole characters, and nothing that may turn out to
    /// be the start of a stop string. May be empty.
    pub text: *const c_char,
    /// Its bytes, without the NUL behind it.
    pub length: usize,
}

/// Is told of each token, with what the caller gave as `user`. Where it returns anything but 0 the text ends. It must not
/// leave by an exception or longjmp.
pub type OnToken = Option<unsafe extern "C" fn(token: *const Token, user: *mut c_void) -> i32>;

/// Why a text ended.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// The model ended it.
    EndOfGeneration = 0,
    /// As many tokens as were asked for.
    Length = 1,
    /// One of the stop strings.
    StopString = 2,
    /// No room in the context.
    ContextFull = 3,
    /// The function that is told of tokens wanted no more.
    Callback = 4,
}

impl StopReason {
    /// Whether the text was cut off.
    fn is_cut(self) -> bool {
        match self {
            Self::EndOfGeneration | Self::StopString => false,
            Self::Length | Self::ContextFull | Self::Callback => true,
        }
    }
}

/// What came of a call that generates.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Generation {
    /// Tokens of the prompt.
    pub n_prompt: usize,
    /// Those of them that the context still held, and that were not computed again.
    pub n_cached: usize,
    /// Tokens that were generated.
    pub n_generated: usize,
    /// Why the text ended.
    pub stop_reason: StopReason,
}

/// Sets all members of `options`; `size` is sizeof(ma_generate_options).
///
/// # Safety
/// `options` is null or leads to room for `size` bytes.
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

/// Continues the tokens of `prompt`, those that the model wants around a text included (see ma_tokenize), and tells `on_token`
/// of each new one. What the context still holds of the prompt is not computed again.
///
/// Null `sampling` is what the model's file recommends, null `options` the defaults; null `on_token` tells nobody, null
/// `generation` is not written to. A call that fails on its way has told of the tokens before.
///
/// # Safety
/// Pointers are null or lead to what is said here; `prompt` to `n_prompt` ids. `on_token` is null or a function of its type.
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
        let done = request.run(&mut generator, prompt)?;
        // SAFETY: as the caller promises.
        unsafe { tell(done, generation) }
    })
}

/// As ma_generate, of a text: its `length` is in bytes, or MA_NUL_TERMINATED. The tokens that the model wants around a text are
/// added.
///
/// # Safety
/// Pointers are null or lead to what is said here; `prompt` to `length` bytes. `on_token` is null or a function of its type.
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
        let done = request.run(&mut generator, &ids)?;
        // SAFETY: as the caller promises.
        unsafe { tell(done, generation) }
    })
}

/// Writes what came of a call to where the caller wants it, if anywhere.
///
/// # Safety
/// `to` is null or leads to room for it.
unsafe fn tell(done: Generation, to: *mut Generation) -> Result<(), Failure> {
    if !to.is_null() {
        // SAFETY: as the caller promises.
        unsafe { Out::new(to, "generation") }?.set(done);
    }
    Ok(())
}

/// What a call asks for.
pub struct Request {
    /// `None`: as the model's file recommends.
    sampling: Option<metal_attention::sampling::SamplerOptions>,
    options: metal_attention::GenerateOptions,
    constraint: Option<Box<dyn Constraint>>,
    /// Tokens of the vocabulary that the constraint is for.
    n_vocab: Option<usize>,
    /// What reads the text as the answer to a conversation, until the text is over.
    answer: Option<Arc<Mutex<AnswerReader>>>,
    on_token: OnToken,
    user: *mut c_void,
}

// SAFETY: ma_batch_add is promised that `on_token` may be called with `user` in the thread of ma_batch_run; elsewhere a request
// stays in its thread.
unsafe impl Send for Request {}

impl Request {
    /// # Safety
    /// Pointers are null or lead to what they are said to. `on_token` may be called with `user`.
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
                .extend(answer.give(grammar.is_some_and(|grammar| grammar.is_form))?.iter().map(ToString::to_string));
        }
        let (constraint, n_vocab) = (grammar.and_then(Grammar::constraint), grammar.map(|grammar| grammar.n_vocab));
        let answer = answer.map(|answer| Arc::clone(&answer.0));
        Ok(Self { sampling, options, constraint, n_vocab, answer, on_token, user })
    }

    /// An error where it cannot be one of `model`.
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

    /// The request for a scheduler, of a prompt for `model`.
    pub fn queued(&mut self, model: &metal_attention::Model, prompt: &[u32]) -> metal_attention::scheduler::Request {
        let options = std::mem::take(&mut self.options);
        metal_attention::scheduler::Request {
            prompt: prompt.into(),
            sampling: self.sampling.take().unwrap_or_else(|| model.sampling()),
            max_tokens: options.n_predict,
            stop: options.stop.into(),
            stop_ids: options.stop_ids.into(),
            ignore_eos: options.ignore_eos,
            min_tokens: options.min_tokens,
            constraint: self.constraint.take(),
            ..Default::default()
        }
    }

    /// Has the answer read a token, or a rest of text without one.
    fn read(&self, id: u32, text: &str) {
        if let Some(answer) = &self.answer {
            let id = (id != MA_NO_TOKEN).then_some(id);
            answer.lock().unwrap_or_else(PoisonError::into_inner).add(id, text);
        }
    }

    /// The text is over.
    pub fn finish(&mut self, reason: StopReason) {
        if let Some(answer) = self.answer.take() {
            answer.lock().unwrap_or_else(PoisonError::into_inner).finish(reason.is_cut());
        }
    }

    /// Tells the caller of a token; whether it wants more.
    pub fn on_token(&self, id: u32, text: String) -> bool {
        self.read(id, &text);
        let Some(on_token) = self.on_token else { return true };
        let length = text.len();
        // A text may have a NUL in it, which is why its length is told, too.
        let mut bytes = text.into_bytes();
        bytes.push(0);
        let token = Token { id, text: bytes.as_ptr().cast(), length };
        // SAFETY: `new` was promised that it may be called, and the token lives until it returns.
        unsafe { on_token(&raw const token, self.user) == 0 }
    }

    fn run(&mut self, generator: &mut Generator, prompt: &[u32]) -> Result<Generation, Failure> {
        self.check(generator.model())?;
        if generator.model().spec().output.head.is_none() {
            return Err(Failure::new(Status::Unsupported, "the model writes no text: it makes embeddings, or ranks"));
        }
        let sampling = self.sampling.clone().unwrap_or_else(|| generator.model().sampling());
        generator.set_sampling(sampling)?;
        generator.set_constraint(self.constraint.take());
        generator.prompt(prompt, |_, _| ControlFlow::Continue(()))?;
        let mut generation = generator.generate(self.options.clone());
        let mut n_generated = 0;
        let mut stopped = false;
        let mut failure = None;
        for token in generation.by_ref() {
            match token {
                Ok(token) => {
                    n_generated += 1;
                    stopped = !self.on_token(token.id, token.text);
                }
                Err(error) => failure = Some(error),
            }
            if stopped {
                break;
            }
        }
        let reason = generation.stop_reason();
        let n_cached = generation.timings().cached_tokens;
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
            // The library may have more reasons one day.
            Some(_) | None => StopReason::Length,
        };
        self.finish(stop_reason);
        Ok(Generation { n_prompt: prompt.len(), n_cached, n_generated, stop_reason })
    }
}

impl Drop for Request {
    /// A call that fails leaves the answer as it is then. After a defect nothing is known of it.
    fn drop(&mut self) {
        if let Some(Ok(mut answer)) = self.answer.as_ref().map(|answer| answer.lock()) {
            answer.fail();
        }
    }
}
