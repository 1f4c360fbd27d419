//! Many texts side by side.

use std::ffi::{CString, c_char, c_void};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::StreamExt;
use futures_util::future::{AbortHandle, Abortable};
use futures_util::stream::FuturesUnordered;
use metal_attention::scheduler::{Event, Events, FinishReason, Scheduler, SchedulerOptions};

use crate::context::ContextOptions;
use crate::generate::{GenerateOptions, Generation, MA_NO_TOKEN, OnToken, Request, StopReason};
use crate::model::Model;
use crate::pointers::{Out, free, reference, values};
use crate::sampling::SamplingOptions;
use crate::status::{Failure, Status, c_string, call};

/// A model that is set up to run many texts side by side. Prompts that begin alike share what was computed for them.
pub struct Batch {
    model: metal_attention::Model,
    scheduler: Scheduler,
    /// Texts that the next ma_batch_run runs to their ends.
    added: Mutex<Vec<BatchSequence>>,
    /// Ends ma_batch_run.
    running: Mutex<Option<AbortHandle>>,
    /// Why texts of the last ma_batch_run failed.
    errors: Mutex<Vec<CString>>,
}

/// A text of a batch.
struct BatchSequence {
    request: Request,
    /// `None` once the text is over.
    events: Option<Events>,
    result: BatchResult,
    error: CString,
}

/// What came of a text of a batch.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct BatchResult {
    /// MA_STATUS_OK: it was generated. Else ma_batch_error says why not; `generation` then tells how far it came.
    pub status: Status,
    /// Its tokens, and why it ended. `n_cached` is 0 where the caller ended it.
    pub generation: Generation,
}

/// Sets a model up to run up to `n_parallel` texts at once, and writes the batch to `batch`. It is freed by ma_batch_free. Null
/// `options` are the defaults; `n_ctx` of them is for each text.
///
/// # Safety
/// Pointers are null or lead to what is said here.
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
        let engine = unsafe { ContextOptions::engine_of(options) }?;
        let model = model.inner.clone();
        // Texts wait for places, and are not refused.
        let options = SchedulerOptions { n_parallel, n_queue: usize::MAX, ..Default::default() };
        let pass = model.forward_pass(&options.engine(&model, &engine))?;
        let scheduler = Scheduler::start(pass, Arc::new(model.clone()), options)?;
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

/// Adds a text to the batch: it continues the tokens of `prompt`, as with ma_generate. Its number among those that the next
/// ma_batch_run runs is written to `index`, where that is not null. `on_token` is called by ma_batch_run, in its thread.
///
/// # Safety
/// Pointers are null or lead to what is said here; `prompt` to `n_prompt` ids. `on_token` is null or a function of its type, and may
/// be called with `user` in the thread of ma_batch_run, until that returns.
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
        let mut request = unsafe { Request::new(sampling, options, on_token, user) }?;
        request.check(&batch.model)?;
        let queued = request.queued(&batch.model, prompt);
        let events = Some(batch.scheduler.submit(queued)?);
        let generation = Generation { n_prompt, n_cached: 0, n_generated: 0, stop_reason: StopReason::Callback };
        let result = BatchResult { status: Status::Cancelled, generation };
        let mut added = lock(&batch.added);
        if !index.is_null() {
            // SAFETY: as the caller promises.
            unsafe { Out::new(index, "index") }?.set(added.len());
        }
        added.push(BatchSequence { request, events, result, error: CANCELLED.into() });
        Ok(())
    })
}

/// Why a text was not generated that ma_batch_cancel ended.
const CANCELLED: &std::ffi::CStr = c"the batch was cancelled";

/// Runs all texts that were added to their ends, and writes what came of each to `results`, in the order in which they were added,
/// and how many there are to `n`. The batch is then empty, and can be filled again.
///
/// A text that fails does not hold the others up: its result says so. Where `results` has room for too few (`capacity`; null has room
/// for none) the result is MA_STATUS_BUFFER_TOO_SMALL, and the texts stay. After ma_batch_cancel it is MA_STATUS_CANCELLED, and
/// `results` are written nevertheless. While another ma_batch_run goes on, it is MA_STATUS_BUSY.
///
/// # Safety
/// Pointers are null or lead to what is said here; `results` to room for `capacity` of them.
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
        let all_over = pollster::block_on(Abortable::new(run(&mut sequences, &handle), registration));
        *lock(&batch.running) = None;
        let all: Vec<_> = sequences.iter().map(|sequence| sequence.result).collect();
        *lock(&batch.errors) = sequences.into_iter().map(|sequence| sequence.error).collect();
        // SAFETY: as the caller promises; there is room, as was seen above.
        unsafe { crate::pointers::fill(&all, results, capacity, &n) }?;
        match all_over {
            Ok(true) => Ok(()),
            Ok(false) | Err(_) => Err(Failure::new(Status::Cancelled, "the batch was cancelled")),
        }
    })
}

/// Tells each text of its events, as they come, until all are over, or `handle` ends it; whether all are over.
async fn run(sequences: &mut [BatchSequence], handle: &AbortHandle) -> bool {
    let next = |i: usize, mut events: Events| async move {
        let event = events.recv().await;
        (i, events, event)
    };
    let begun = sequences.iter_mut().enumerate().filter_map(|(i, sequence)| Some(next(i, sequence.events.take()?)));
    let mut waiting: FuturesUnordered<_> = begun.collect();
    while let Some((i, events, event)) = waiting.next().await {
        if event.is_some_and(|event| sequences[i].take(event)) {
            waiting.push(next(i, events));
        }
        // Events that are there already come without a pause in which the future would be ended.
        if handle.is_aborted() {
            break;
        }
    }
    waiting.is_empty()
}

impl BatchSequence {
    /// Takes an event; whether there are more.
    fn take(&mut self, event: Event) -> bool {
        match event {
            Event::Prompt(_) => true,
            Event::Token { id, text, logprobs: _ } => {
                self.result.generation.n_generated += 1;
                let goes_on = self.request.on_token(id, text);
                if !goes_on {
                    self.end(Ok(StopReason::Callback));
                }
                goes_on
            }
            Event::Done { reason, text, usage, .. } => {
                if !text.is_empty() {
                    self.request.on_token(MA_NO_TOKEN, text);
                }
                self.result.generation.n_cached = usage.cached_tokens;
                self.end(stop_reason(reason));
                false
            }
            Event::Failed(why) => {
                self.end(Err(why.into()));
                false
            }
        }
    }

    /// The text is over.
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

/// Why text `index` of the last ma_batch_run failed: one line of UTF-8, empty where it did not, or where there was none. It stays as
/// it is until the next ma_batch_run or ma_batch_free.
///
/// # Safety
/// `batch` is null or a batch.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_batch_error(batch: *const Batch, index: usize) -> *const c_char {
    // SAFETY: as the caller promises.
    let batch = unsafe { batch.as_ref() };
    batch.and_then(|batch| lock(&batch.errors).get(index).map(|error| error.as_ptr())).unwrap_or(c"".as_ptr())
}

/// Ends the ma_batch_run that goes on, from another thread or from a callback: texts that are not over are MA_STATUS_CANCELLED.
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

/// Frees a batch, and cancels its texts. Null is nothing to free.
///
/// # Safety
/// `batch` is null or comes from ma_batch_new; no call uses it, now or after this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_batch_free(batch: *mut Batch) {
    // SAFETY: as the caller promises.
    unsafe { free(batch) }
}

/// What is behind a lock is replaced as a whole: a panic elsewhere leaves it as it was.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
