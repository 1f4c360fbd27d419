//! Batches: many sequences that are generated concurrently, by the scheduler's continuous batching.

use std::ffi::{CString, c_char, c_void};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::StreamExt;
use futures_util::future::{AbortHandle, Abortable};
use futures_util::stream::FuturesUnordered;
use metal_attention::PromptSpan;
use metal_attention::scheduler::{Event, Events, FinishReason, Scheduler, SchedulerOptions, SchedulerParts};
use metal_attention::speculation::SpeculativePass;

use crate::context::ContextOptions;
use crate::generate::{GenerateOptions, Generation, MA_NO_TOKEN, OnToken, Request, StopReason};
use crate::model::Model;
use crate::picture::Prompt;
use crate::pointers::{Out, free, reference, values};
use crate::sampling::SamplingOptions;
use crate::status::{Failure, Status, c_string, call};

/// A model that generates many sequences at once. Prompts with a common beginning share its KV cache.
pub struct Batch {
    /// The model.
    model: metal_attention::Model,
    /// The scheduler.
    scheduler: Scheduler,
    /// The sequences that the next ma_batch_run finishes.
    added: Mutex<Vec<BatchSequence>>,
    /// Ends the ma_batch_run that runs. `None`: none runs.
    running: Mutex<Option<AbortHandle>>,
    /// The error messages of the last ma_batch_run, one for each sequence.
    errors: Mutex<Vec<CString>>,
}

/// A sequence of a batch.
struct BatchSequence {
    /// The converted arguments, and the callback.
    request: Request,
    /// The scheduler's events. `None`: [`run`] has taken them.
    events: Option<Events>,
    /// The result so far.
    result: BatchResult,
    /// The error message. Empty: none.
    error: CString,
}

/// The result of one sequence of a batch.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct BatchResult {
    /// MA_STATUS_OK: it was generated. Otherwise ma_batch_error has a message, and `generation` is the state at the error.
    pub status: Status,
    /// The numbers of tokens, and the reason why it ended. `n_cached`, `n_drafted` and `n_accepted` are 0 if the callback ended it.
    pub generation: Generation,
}

/// Prepares a model to generate up to `n_parallel` sequences at once, and writes the batch to `batch`. Free it by ma_batch_free. Null
/// `options` stand for the defaults; their `n_ctx` is that of each sequence.
///
/// # Safety
/// Pointers are null or point to what is described here.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_batch_new(
    model: *const Model,
    options: *const ContextOptions,
    n_parallel: usize,
    batch: *mut *mut Batch,
) -> Status {
    call(|| {
        // SAFETY: as the caller promises.
        let (out, model) = unsafe { (Out::new(batch, "batch")?, reference(model, "model")?) };
        // SAFETY: as the caller promises.
        let (engine, drafts) = unsafe { (ContextOptions::engine_of(options)?, ContextOptions::drafts_of(options)?) };
        let model = model.inner.clone();
        // The queue is unlimited: sequences wait for a slot and are never refused.
        let draft_depth = drafts.speculation.depth;
        let options = SchedulerOptions { n_parallel, n_queue: usize::MAX, draft_depth, ..Default::default() };
        let engine = options.engine(&model, &engine);
        let SpeculativePass { pass, drafter } = drafts.pass(&model, &engine)?;
        let parts = SchedulerParts { drafter, ..Default::default() };
        let scheduler = Scheduler::start_with(pass, Arc::new(model.clone()), options, parts)?;
        out.set(Box::into_raw(Box::new(Batch {
            model,
            scheduler,
            added: Mutex::default(),
            running: Mutex::default(),
            errors: Mutex::default(),
        })));
        Ok(())
    })
}

/// Adds a sequence to the batch, which continues the tokens of `prompt`, with the arguments of ma_generate. Its index in the results of
/// the next ma_batch_run is written to `index`, unless that is null. `on_token` is called by ma_batch_run, in its thread.
///
/// # Safety
/// Pointers are null or point to what is described here; `prompt` to `n_prompt` ids. `on_token` is null or a function of its type, and
/// may be called with `user` in the thread of ma_batch_run, until that returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_batch_add(
    batch: *const Batch,
    prompt: *const u32,
    n_prompt: usize,
    sampling: *const SamplingOptions,
    options: *const GenerateOptions,
    on_token: OnToken,
    user: *mut c_void,
    index: *mut usize,
) -> Status {
    call(|| {
        // SAFETY: as the caller promises.
        let (batch, prompt) = unsafe { (reference(batch, "batch")?, values(prompt, n_prompt, "prompt")?) };
        // SAFETY: as the caller promises.
        let request = unsafe { Request::new(sampling, options, on_token, user) }?;
        // SAFETY: as the caller promises.
        unsafe { batch.add(request, prompt, &[], index) }
    })
}

/// Like ma_batch_add, with a prompt that may have pictures.
///
/// # Safety
/// Pointers are null or point to what is described here. `on_token` is null or a function of its type, and may be called with `user` in
/// the thread of ma_batch_run, until that returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_batch_add_prompt(
    batch: *const Batch,
    prompt: *const Prompt,
    sampling: *const SamplingOptions,
    options: *const GenerateOptions,
    on_token: OnToken,
    user: *mut c_void,
    index: *mut usize,
) -> Status {
    call(|| {
        // SAFETY: as the caller promises.
        let (batch, prompt) = unsafe { (reference(batch, "batch")?, reference(prompt, "prompt")?) };
        // SAFETY: as the caller promises.
        let request = unsafe { Request::new(sampling, options, on_token, user) }?;
        // SAFETY: as the caller promises.
        unsafe { batch.add(request, &prompt.ids, &prompt.spans, index) }
    })
}

impl Batch {
    /// Submits a sequence and adds it. Writes its index to `index`, if that is not null. `spans`: the pictures of the prompt.
    ///
    /// # Safety
    /// `index` is null or points to memory for it.
    unsafe fn add(
        &self,
        mut request: Request,
        prompt: &[u32],
        spans: &[PromptSpan],
        index: *mut usize,
    ) -> Result<(), Failure> {
        request.check(&self.model)?;
        let events = Some(self.scheduler.submit(request.queued(&self.model, prompt, spans))?);
        let n_prompt = prompt.len();
        let generation = Generation {
            n_prompt,
            n_cached: 0,
            n_generated: 0,
            n_drafted: 0,
            n_accepted: 0,
            stop_reason: StopReason::Callback,
        };
        let result = BatchResult { status: Status::Cancelled, generation };
        let mut added = lock(&self.added);
        if !index.is_null() {
            // SAFETY: as the caller promises.
            unsafe { Out::new(index, "index") }?.set(added.len());
        }
        added.push(BatchSequence { request, events, result, error: CANCELLED.into() });
        Ok(())
    }
}

/// The error of a sequence that ma_batch_cancel ended.
const CANCELLED: &std::ffi::CStr = c"the batch was cancelled";

/// Generates all sequences that were added, writes the result of each to `results`, in the order in which they were added, and their
/// number to `n`. The batch is then empty and can be filled again.
///
/// An error of one sequence does not affect the others; its result has the status. If there are more sequences than `capacity` (null
/// `results` have room for none), the call returns MA_STATUS_BUFFER_TOO_SMALL and the sequences remain. After ma_batch_cancel it
/// returns MA_STATUS_CANCELLED and `results` are written nevertheless. While another ma_batch_run runs, it returns MA_STATUS_BUSY.
///
/// # Safety
/// Pointers are null or point to what is described here; `results` to memory for `capacity` of them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_batch_run(
    batch: *const Batch,
    results: *mut BatchResult,
    capacity: usize,
    n: *mut usize,
) -> Status {
    call(|| {
        // SAFETY: as the caller promises.
        let (n, batch) = unsafe { (Out::new(n, "n")?, reference(batch, "batch")?) };
        let (handle, registration) = AbortHandle::new_pair();
        let mut sequences = {
            let mut running = lock(&batch.running);
            if running.is_some() {
                return Err(Failure::new(Status::Busy, "the batch is in use by another call"));
            }
            let mut added = lock(&batch.added);
            n.set(added.len());
            if added.len() > capacity || results.is_null() && !added.is_empty() {
                let message = format!("there are {} texts, and there is room for {capacity} results", added.len());
                return Err(Failure::new(Status::BufferTooSmall, message));
            }
            *running = Some(handle.clone());
            std::mem::take(&mut *added)
        };
        let finished = pollster::block_on(Abortable::new(run(&mut sequences, &handle), registration));
        *lock(&batch.running) = None;
        let all: Vec<_> = sequences.iter().map(|sequence| sequence.result).collect();
        *lock(&batch.errors) = sequences.into_iter().map(|sequence| sequence.error).collect();
        // SAFETY: as the caller promises; the capacity was checked above.
        unsafe { crate::pointers::fill(&all, results, capacity, &n) }?;
        match finished {
            Ok(true) => Ok(()),
            Ok(false) | Err(_) => Err(Failure::new(Status::Cancelled, "the batch was cancelled")),
        }
    })
}

/// Handles the events of all sequences until all are over, or `handle` is aborted. Returns whether all are over.
async fn run(sequences: &mut [BatchSequence], handle: &AbortHandle) -> bool {
    let next = |i: usize, mut events: Events| async move {
        let event = events.recv().await;
        (i, events, event)
    };
    let begun = sequences.iter_mut().enumerate().filter_map(|(i, sequence)| Some(next(i, sequence.events.take()?)));
    let mut waiting: FuturesUnordered<_> = begun.collect();
    while let Some((i, events, event)) = waiting.next().await {
        if event.is_some_and(|event| sequences[i].handle_event(event)) {
            waiting.push(next(i, events));
        }
        // Events that are there already are received without a pause in which the future could be aborted.
        if handle.is_aborted() {
            break;
        }
    }
    waiting.is_empty()
}

impl BatchSequence {
    /// Handles an event. Returns whether there are more.
    fn handle_event(&mut self, event: Event) -> bool {
        match event {
            Event::Prompt(_) => true,
            Event::Token { id, text, logprobs: _ } => {
                self.result.generation.n_generated += 1;
                let wants_more = self.request.on_token(id, text);
                if !wants_more {
                    self.end(Ok(StopReason::Callback));
                }
                wants_more
            }
            Event::Done { reason, text, usage, .. } => {
                if !text.is_empty() {
                    self.request.on_token(MA_NO_TOKEN, text);
                }
                self.result.generation.n_cached = usage.cached_tokens;
                self.result.generation.n_drafted = usage.drafted_tokens;
                self.result.generation.n_accepted = usage.accepted_tokens;
                self.end(stop_reason(reason));
                false
            }
            Event::Failed(why) => {
                self.end(Err(why.into()));
                false
            }
        }
    }

    /// Ends the sequence with a reason or an error.
    fn end(&mut self, outcome: Result<StopReason, Failure>) {
        match outcome {
            Ok(reason) => {
                self.request.finish(reason);
                self.result.status = Status::Ok;
                self.result.generation.stop_reason = reason;
                self.error = CString::default();
            }
            Err(failure) => {
                self.result.status = failure.status;
                self.error = c_string(&failure.message);
            }
        }
    }
}

/// The reason why a sequence ended, or an error if it was cancelled.
fn stop_reason(reason: FinishReason) -> Result<StopReason, Failure> {
    match reason {
        FinishReason::EndOfText => Ok(StopReason::EndOfGeneration),
        FinishReason::Length => Ok(StopReason::Length),
        FinishReason::StopString => Ok(StopReason::StopString),
        FinishReason::ContextFull => Ok(StopReason::ContextFull),
        FinishReason::Deadline | FinishReason::Cancelled => {
            Err(Failure::new(Status::Cancelled, "the text was cancelled"))
        }
    }
}

/// The error of the sequence `index` of the last ma_batch_run: one line of UTF-8, empty if it has none, or if there is no such
/// sequence. It is valid until the next ma_batch_run or ma_batch_free.
///
/// # Safety
/// `batch` is null or a batch.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_batch_error(batch: *const Batch, index: usize) -> *const c_char {
    // SAFETY: as the caller promises.
    let batch = unsafe { batch.as_ref() };
    batch.and_then(|batch| lock(&batch.errors).get(index).map(|error| error.as_ptr())).unwrap_or(c"".as_ptr())
}

/// Ends the ma_batch_run that runs, from another thread or from a callback: sequences that are not over are MA_STATUS_CANCELLED.
///
/// # Safety
/// `batch` is null or a batch.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_batch_cancel(batch: *const Batch) {
    // SAFETY: as the caller promises.
    if let Some(handle) = unsafe { batch.as_ref() }.and_then(|batch| lock(&batch.running).clone()) {
        handle.abort();
    }
}

/// Frees a batch and cancels its sequences. Null is allowed.
///
/// # Safety
/// `batch` is null or comes from ma_batch_new; no call uses it, now or after this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_batch_free(batch: *mut Batch) {
    // SAFETY: as the caller promises.
    unsafe { free(batch) }
}

/// Locks a mutex, even if it is poisoned: its value is only ever replaced as a whole, so a panic leaves it valid.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
