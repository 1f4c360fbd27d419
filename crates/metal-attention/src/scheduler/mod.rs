//! Continuous batching: runs the requests of many clients through one forward pass.
//!
//! One thread owns the forward pass. Each step evaluates one batch: the next token of every running sequence, and as
//! much of the prompts of new ones as fits. Ended sequences stay in the KV cache while there is capacity: a prompt that
//! begins like one of them, or like a running one, shares its pages (prefix cache).
//!
//! - `queue`, `client_queues`, `client_ring`: waiting requests, and the order in which clients are served
//! - `engine`, `admission`, `step`, `embedding`: the thread's loop, which request runs next, and what a step evaluates
//! - `scheduled_sequence`, `sequence_pool`: one request's sequence, and the use of the KV cache's sequences
//! - `replicas`: several schedulers of one model
//!
//! ```
//! use metal_attention::sampling::SamplerOptions;
//! use metal_attention::scheduler::{Request, Scheduler};
//! use metal_attention::tokenizer::EncodeOptions;
//! use metal_attention::{EngineOptions, Model};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let model = Model::built_in()?;
//! let scheduler = Scheduler::open(&model, &EngineOptions::default(), 4)?; // four sequences at once
//! let options = EncodeOptions { add_special: true, ..Default::default() };
//! let mut stories = Vec::new();
//! for text in ["Once upon a time", "Lily and Ben went to the park."] {
//!     let prompt = model.tokenizer()?.encode(text, options).into();
//!     let sampling = SamplerOptions::greedy();
//!     stories.push(scheduler.submit(Request { prompt, sampling, max_tokens: Some(8), ..Default::default() })?);
//! }
//! let stories: Vec<_> = stories.into_iter().map(|story| story.blocking_completion()).collect::<Result<_, _>>()?;
//! assert_eq!(stories[0].text, ", there was a little girl");
//! # Ok(())
//! # }
//! ```
//!
//! To receive tokens as they are sampled, read them from the [`Events`]. Dropping these cancels the request.

mod admission;
mod batch_sizer;
mod block_tree;
mod client_queues;
mod client_ring;
mod embedding;
mod engine;
mod error;
mod metrics;
mod queue;
mod replicas;
mod request;
mod scheduled_sequence;
mod sequence_pool;
mod slot_commands;
mod step;

use std::any::Any;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use crate::prompt::{PromptLimits, span_keys};
use crate::sampling::Sampler;
use crate::speculation::{DraftDepth, Drafter};
use crate::tokenizer::Tokenizer;
use crate::{EngineOptions, ForwardError, ForwardPass, Model};
use tokio::sync::{mpsc, oneshot, watch};

use engine::Engine;
use queue::{EmbeddingRequest, RequestedOutput, SharedQueue, Submission};

pub use crate::prefix_store::{CacheDisk, StoreUse};
pub use block_tree::{BlockId, BlockSpan, CacheEvent, CacheObserver};
pub use error::{RequestError, StartError, SubmitError};
pub use metrics::{BATCH_SIZE_BUCKETS, Metrics, Outcomes, SequenceProgress};
pub use replicas::Replicas;
pub use request::{Client, Completion, Event, Events, FinishReason, Request, RequestTimings, TokenLogprobs, Usage};
pub use slot_commands::{CacheCapacity, SlotError};

/// Sequences of the forward pass beyond `n_parallel`, which keep ended sequences for the prefix cache.
const KEPT_SEQUENCES: usize = 64;

/// Upper limit of [`SchedulerOptions::default_cache_ram`].
const MAX_DEFAULT_CACHE_RAM: u64 = 8 << 30;

/// Options of a [`Scheduler`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SchedulerOptions {
    /// Slots: sequences that run at once. At most `n_seq` of the forward pass; the others keep ended sequences.
    pub n_parallel: usize,
    /// Requests that may wait for a slot. If one client fills the queue, others may still submit their equal share of
    /// it, up to twice as many requests in total.
    pub n_queue: usize,
    /// Maximum number of tokens in a step, at least `n_parallel`. `None`: the larger of the forward pass's micro-batch
    /// and `n_parallel`. A longer prompt is evaluated in chunks of this size, or smaller ones while other sequences
    /// wait, which decode in between. A span of embedding rows is evaluated in one step, however long it is.
    pub n_batch: Option<usize>,
    /// Time slice: how long a sequence runs before it may be preempted for a client without a slot. Counted from its
    /// first new token.
    pub time_slice: Duration,
    /// How many drafts of a sequence a step may have, where there is a drafter ([`SchedulerParts::drafter`]).
    pub draft_depth: DraftDepth,
    /// Bytes of main memory for sequences evicted from the KV cache; a prompt that begins like one of them restores it.
    /// A client with a key finds only its own. 0: none. See [`default_cache_ram`](Self::default_cache_ram).
    pub cache_ram: u64,
    /// Disk space for sequences that main memory has no capacity for; `None`: they are dropped.
    pub cache_disk: Option<CacheDisk>,
}

impl Default for SchedulerOptions {
    fn default() -> Self {
        Self {
            n_parallel: 1,
            n_queue: 256,
            n_batch: None,
            time_slice: Duration::from_millis(250),
            draft_depth: DraftDepth::default(),
            cache_ram: 0,
            cache_disk: None,
        }
    }
}

/// Parts of a scheduler that its caller makes.
#[derive(Default)]
pub struct SchedulerParts {
    /// Is called when the pages change that the KV cache holds for later prompts.
    pub observer: Option<CacheObserver>,
    /// Proposes drafts; `None`: a step gives each sequence one token.
    pub drafter: Option<Box<dyn Drafter>>,
}

/// A handle of the thread that runs requests. Clones share the thread. It ends when the last handle is dropped, and
/// unfinished requests are cancelled.
#[derive(Clone)]
pub struct Scheduler {
    handle: Arc<Handle>,
}

/// State that all clones of a [`Scheduler`] share.
struct Handle {
    /// Queue to the engine's thread.
    shared: Arc<SharedQueue>,
    /// Tokenizer of the model.
    tokenizer: Arc<Tokenizer>,
    /// Requests that may wait.
    n_queue: usize,
    /// Slots.
    n_parallel: usize,
    /// What the forward pass allows of prompts. Their maximum number of tokens is that of the positions.
    limits: PromptLimits,
    /// Bytes of the KV cache, recurrent states included.
    cache_bytes: u64,
    /// The name of the drafter.
    drafter: Option<&'static str>,
    /// The message of the engine's panic, if it panicked. The channel closes when the thread has ended.
    defect: watch::Receiver<Option<Arc<str>>>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.shared.close(Instant::now());
    }
}

/// Closes the queue when the thread ends, in whatever way, so that no client waits for it for ever.
struct EndQueue(Arc<SharedQueue>);

impl Drop for EndQueue {
    fn drop(&mut self) {
        self.0.end(false);
    }
}

impl Scheduler {
    /// Sets up a forward pass of `model` and starts a thread that runs `n_parallel` sequences at once, each with a
    /// context of `n_ctx` tokens from `engine`. The other sizes follow from these ([`SchedulerOptions::engine`]).
    pub fn open(model: &Model, engine: &EngineOptions, n_parallel: usize) -> Result<Self, StartError> {
        let options = SchedulerOptions { n_parallel, ..Default::default() };
        let pass = model.forward_pass(&options.engine(model, engine))?;
        Self::start(pass, Arc::new(model.clone()), options)
    }

    /// Starts a thread that runs `pass`, a forward pass of `model`. An error if an option is out of range, or the model
    /// has no tokenizer.
    pub fn start(pass: Box<dyn ForwardPass>, model: Arc<Model>, options: SchedulerOptions) -> Result<Self, StartError> {
        Self::start_with(pass, model, options, SchedulerParts::default())
    }

    /// [`start`](Self::start) with parts of the caller's.
    pub fn start_with(
        pass: Box<dyn ForwardPass>,
        model: Arc<Model>,
        options: SchedulerOptions,
        parts: SchedulerParts,
    ) -> Result<Self, StartError> {
        options.check(&*pass)?;
        let tokenizer = model.tokenizer()?;
        let shared = Arc::new(SharedQueue::default());
        let (defect_sender, defect) = watch::channel(None);
        let handle = Handle {
            shared: Arc::clone(&shared),
            tokenizer: Arc::clone(&tokenizer),
            n_queue: options.n_queue,
            n_parallel: options.n_parallel,
            limits: PromptLimits::of(&*pass),
            cache_bytes: pass.kv_cache_bytes() as u64,
            drafter: parts.drafter.as_ref().map(|drafter| drafter.name()),
            defect,
        };
        let run = move || {
            let defect_sender = defect_sender;
            let _end = EndQueue(Arc::clone(&shared));
            let mut engine = Engine::new(pass, &model, &tokenizer, Arc::clone(&shared), options, parts);
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| engine.run())) {
                let why = panic_message(&*panic);
                tracing::error!("the engine met a defect and has ended: {why}");
                // The defect is set before clients see their requests fail, so that they can read it.
                defect_sender.send_replace(Some(why.into()));
                shared.end(true);
                engine.fail();
            }
        };
        std::thread::Builder::new().name("scheduler".into()).spawn(run)?;
        Ok(Self { handle: Arc::new(handle) })
    }

    /// Submits a generation request. An error, at once, if the request is invalid, the queue is full, or the scheduler
    /// is shutting down.
    pub fn submit(&self, request: Request) -> Result<Events, SubmitError> {
        self.counted(self.prepare_generation(request).and_then(|(submission, events)| {
            self.push_generation(&mut Some(submission))?;
            Ok(events)
        }))
    }

    /// Checks a request. Returns it with the receiver of its events; nothing is queued yet.
    fn prepare_generation(&self, mut request: Request) -> Result<(Submission, Events), SubmitError> {
        if !self.handle.limits.spec.generates_text() {
            return Err(SubmitError::NoText);
        }
        self.check_prompt(&request.prompt)?;
        if !request.spans.is_empty() && request.prompt_logprobs.is_some() {
            let why = "log probabilities of the prompt are requested, and rows have none";
            return Err(SubmitError::Span(ForwardError::BadSpan { why }));
        }
        let max_len = self.handle.limits.check(&request.prompt, &request.spans).map_err(SubmitError::Span)?;
        let mut sampling = std::mem::take(&mut request.sampling);
        sampling.logit_bias.append(&mut request.logit_bias);
        self.check_ids(sampling.logit_bias.iter().map(|(id, _)| id))?;
        self.check_ids(request.stop_ids.iter())?;
        self.check_ids(request.prediction.iter())?;
        let n_positions = self.handle.limits.n_positions;
        if request.prediction.len() > n_positions {
            request.prediction = request.prediction[..n_positions].into();
        }
        let tokenizer = &self.handle.tokenizer;
        let vocabulary = (0..tokenizer.n_vocab() as u32).map(|id| tokenizer.token_bytes(id));
        let sampler = Sampler::new(sampling)?.with_vocabulary(vocabulary);
        let (events, receiver) = mpsc::unbounded_channel();
        let (span_keys, submitted) = (span_keys(&request.spans), Instant::now());
        let submission = Submission { request, span_keys, max_len, sampler, events, submitted, ticket: None };
        Ok((submission, Events::new(receiver)))
    }

    /// Queues a request, taking it out of `submission`. On an error it stays there, so that another replica can be
    /// tried.
    fn push_generation(&self, submission: &mut Option<Submission>) -> Result<(), SubmitError> {
        let Some(client) = submission.as_ref().map(|submission| submission.request.client) else { return Ok(()) };
        let shared = &self.handle.shared;
        shared.push(self.queue_limits(), client, |queue| {
            if let Some(queued) = submission.take() {
                queue.generations.push(client, Submission { ticket: Some(shared.ticket()), ..queued });
            }
        })
    }

    /// Submits a sequence of `client` for its embedding, pooled as the model's file says and of length 1; for a
    /// reranker, for its scores (see [`Pooler`](crate::Pooler)). Errors are those of [`submit`](Self::submit).
    pub fn embed(&self, client: Client, ids: Vec<u32>) -> Result<VectorFuture, SubmitError> {
        self.counted(self.queue_embedding(client, ids, RequestedOutput::Embedding))
    }

    /// Submits a sequence of `client` for the logits after each of its tokens from position `from` on:
    /// `[n_tokens - from, n_vocab]`, row-major. Errors are those of [`submit`](Self::submit), and `NoLogits`.
    pub fn logits(&self, client: Client, ids: Vec<u32>, from: usize) -> Result<VectorFuture, SubmitError> {
        let has_logits =
            if self.handle.limits.spec.output.head.is_some() { Ok(()) } else { Err(SubmitError::NoLogits) };
        self.counted(has_logits.and_then(|()| self.queue_embedding(client, ids, RequestedOutput::Logits(from))))
    }

    /// Checks and queues a request for an embedding or logits.
    fn queue_embedding(
        &self,
        client: Client,
        ids: Vec<u32>,
        output: RequestedOutput,
    ) -> Result<VectorFuture, SubmitError> {
        let (request, vector) = self.prepare_embedding(client, ids, output)?;
        self.push_embedding(&mut Some(request))?;
        Ok(vector)
    }

    /// Checks a request. Returns it with the future of its result; nothing is queued yet.
    fn prepare_embedding(
        &self,
        client: Client,
        ids: Vec<u32>,
        output: RequestedOutput,
    ) -> Result<(EmbeddingRequest, VectorFuture), SubmitError> {
        self.check_prompt(&ids)?;
        let (answer, receiver) = oneshot::channel();
        Ok((EmbeddingRequest { client, ids, output, answer, ticket: None }, VectorFuture { receiver }))
    }

    /// Queues a request, taking it out of `request`. On an error it stays there, so that another replica can be tried.
    fn push_embedding(&self, request: &mut Option<EmbeddingRequest>) -> Result<(), SubmitError> {
        let Some(client) = request.as_ref().map(|request| request.client) else { return Ok(()) };
        let shared = &self.handle.shared;
        shared.push(self.queue_limits(), client, |queue| {
            if let Some(queued) = request.take() {
                queue.embeddings.push(client, EmbeddingRequest { ticket: Some(shared.ticket()), ..queued });
            }
        })
    }

    /// Whether a request of `client` would be accepted now, as far as the queue goes: for work that precedes the submission. Errors:
    /// a full queue, a shutdown, or a failed engine.
    pub fn check_capacity(&self, client: Client) -> Result<(), SubmitError> {
        self.handle.shared.check_capacity(self.queue_limits(), client)
    }

    /// Requests that may wait, and slots.
    fn queue_limits(&self) -> (usize, usize) {
        (self.handle.n_queue, self.handle.n_parallel)
    }

    /// Number of requests that wait or run.
    fn n_unfinished(&self) -> usize {
        self.handle.shared.n_unfinished()
    }

    /// The name of its drafter, such as `"ngram"`; `None`: each step gives a sequence one token.
    pub fn drafter(&self) -> Option<&'static str> {
        self.handle.drafter
    }

    /// Announces that a request may be about to come, for instance because a client has connected: an idle device is
    /// brought up to its clock meanwhile. Almost free while requests run.
    pub fn announce(&self) {
        self.handle.shared.announce();
    }

    /// Counters since the start, and the present state.
    pub fn metrics(&self) -> Metrics {
        let waiting = self.handle.shared.queue().len();
        let metrics = self.handle.shared.metrics();
        Metrics { waiting: metrics.waiting + waiting, ..metrics.clone() }
    }

    /// Closes the queue and returns when all requests are finished; those that are not after `grace` are cancelled.
    pub async fn shut_down(&self, grace: Duration) {
        self.close(grace);
        self.wait_for_end().await;
    }

    /// Closes the queue; requests that are unfinished after `grace` are cancelled.
    fn close(&self, grace: Duration) {
        let now = Instant::now();
        self.handle.shared.close(now.checked_add(grace).unwrap_or(now + Duration::from_secs(1 << 32)));
    }

    /// Waits until the thread has ended.
    async fn wait_for_end(&self) {
        let mut defect = self.handle.defect.clone();
        // An error here means that the sender was dropped: the thread has ended.
        while defect.changed().await.is_ok() {}
    }

    /// The message of the engine's panic, if it panicked: the thread has ended, and all requests fail.
    pub fn defect(&self) -> Option<Arc<str>> {
        self.handle.defect.borrow().clone()
    }

    /// Waits until the engine panics and returns the message; never returns otherwise.
    pub async fn wait_for_defect(&self) -> Arc<str> {
        let mut defect = self.handle.defect.clone();
        loop {
            if let Some(why) = defect.borrow_and_update().clone() {
                return why;
            }
            if defect.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }

    /// Counts a refused request.
    fn counted<T>(&self, outcome: Result<T, SubmitError>) -> Result<T, SubmitError> {
        if outcome.is_err() {
            self.handle.shared.metrics().requests.refused += 1;
        }
        outcome
    }

    /// Checks the length and the token ids of a prompt.
    fn check_prompt(&self, prompt: &[u32]) -> Result<(), SubmitError> {
        let PromptLimits { spec, n_positions: n_ctx, .. } = &self.handle.limits;
        let (n_ctx, n_ctx_train) = (*n_ctx, spec.n_ctx_train);
        match prompt.len() {
            0 => Err(SubmitError::EmptyPrompt),
            n_prompt if n_prompt > n_ctx => Err(SubmitError::PromptTooLong { n_prompt, n_ctx, n_ctx_train }),
            _ => self.check_ids(prompt.iter()),
        }
    }

    /// Checks that all ids are in the vocabulary.
    fn check_ids<'a>(&self, mut ids: impl Iterator<Item = &'a u32>) -> Result<(), SubmitError> {
        let n_vocab = self.handle.limits.spec.n_vocab;
        match ids.find(|&&id| id as usize >= n_vocab) {
            Some(&id) => Err(SubmitError::TokenOutOfRange { id, n_vocab }),
            None => Ok(()),
        }
    }
}

/// The message of a panic.
fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let message = panic.downcast_ref::<String>().map(String::as_str);
    message.or(panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without a message")
}

impl SchedulerOptions {
    /// The engine options for `n_parallel` slots, each with a full context, and 64 more sequences for
    /// the prefix cache. The latter use what the running ones leave of the KV cache.
    #[must_use]
    pub fn engine(&self, model: &Model, engine: &EngineOptions) -> EngineOptions {
        EngineOptions {
            n_seq: self.n_parallel.saturating_add(KEPT_SEQUENCES),
            // `n_parallel` 0 is reported by `check` when the scheduler starts.
            n_cache: Some(self.n_parallel.max(1).saturating_mul(engine.n_ctx_of(model))),
            // Windows for `n_parallel` running sequences and up to `n_parallel + 1` embeddings; idle sequences use
            // those that are left.
            n_windows: Some(self.n_parallel.saturating_mul(2).saturating_add(1)),
            ..engine.clone()
        }
    }

    /// The default of a server's [`cache_ram`](Self::cache_ram): 8 GiB, or a quarter of the available main memory if
    /// that is less.
    pub fn default_cache_ram() -> u64 {
        crate::available_memory().map_or(MAX_DEFAULT_CACHE_RAM, |free| (free / 4).min(MAX_DEFAULT_CACHE_RAM))
    }

    /// Checks the options against a forward pass.
    fn check(&self, pass: &dyn ForwardPass) -> Result<(), StartError> {
        let n_seq = pass.n_seq();
        let error = |option, value, allowed| Err(StartError::Option { option, value, allowed });
        if self.n_parallel == 0 || self.n_parallel > n_seq {
            let allowed = format!("from 1 to the {n_seq} sequences of the forward pass");
            return error("n_parallel", self.n_parallel, allowed);
        }
        if let Some(n_batch) = self.n_batch.filter(|&n_batch| n_batch < self.n_parallel) {
            return error("n_batch", n_batch, format!("at least n_parallel, {}", self.n_parallel));
        }
        if self.n_queue == 0 {
            return error("n_queue", 0, "at least 1".into());
        }
        if let Some(disk) = &self.cache_disk {
            let folder = disk.folder.clone();
            disk.file().map_err(|source| StartError::CacheDisk { folder, source })?;
        }
        Ok(())
    }
}

/// A future of an embedding, a reranker's scores, or logits. Dropping it cancels the request.
#[derive(Debug)]
pub struct VectorFuture {
    receiver: oneshot::Receiver<Result<Vec<f32>, RequestError>>,
}

impl VectorFuture {
    /// Blocks until the result is there. Panics inside an async runtime.
    pub fn blocking_wait(self) -> Result<Vec<f32>, RequestError> {
        self.receiver.blocking_recv().unwrap_or(Err(RequestError::EngineFailed))
    }
}

impl Future for VectorFuture {
    type Output = Result<Vec<f32>, RequestError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.receiver).poll(context).map(|answer| answer.unwrap_or(Err(RequestError::EngineFailed)))
    }
}
