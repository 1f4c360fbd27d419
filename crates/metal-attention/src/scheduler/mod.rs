//! Runs the requests of many clients through one forward pass.
//!
//! One thread owns the forward pass. Each of its steps evaluates one batch: the next token of every text that runs, and
//! as much of the prompts of newcomers as fits. Texts that are finished stay in the KV cache as long as there is room:
//! a prompt that begins like one of them, or like one that runs, shares its pages.
//!
//! ```
//! use metal_attention::sampling::SamplerOptions;
//! use metal_attention::scheduler::{Request, Scheduler};
//! use metal_attention::tokenizer::EncodeOptions;
//! use metal_attention::{EngineOptions, Model};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let model = Model::built_in()?;
//! let scheduler = Scheduler::open(&model, &EngineOptions::default(), 4)?; // four texts side by side
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
//! Whoever wants tokens as they come reads them from the [`Events`]. Dropping these cancels the request.

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

use crate::sampling::Sampler;
use crate::tokenizer::Tokenizer;
use crate::{EngineOptions, ForwardPass, Model};
use tokio::sync::{mpsc, oneshot, watch};

use engine::Engine;
use queue::{EmbeddingRequest, RequestedOutput, SharedQueue, Submission};

pub use crate::prefix_store::{CacheDisk, StoreUse};
pub use block_tree::{BlockId, CacheEvent, CacheObserver};
pub use error::{RequestError, StartError, SubmitError};
pub use metrics::{BATCH_SIZE_BUCKETS, Metrics, Outcomes, SequenceProgress};
pub use replicas::Replicas;
pub use request::{Client, Completion, Event, Events, FinishReason, Request, RequestTimings, TokenLogprobs, Usage};
pub use slot_commands::{CacheCapacity, SlotError};

/// Finished texts that are kept, as far as the KV cache has room.
const KEPT_SEQUENCES: usize = 64;

/// Bytes of main memory that finished texts have where nobody says otherwise, at most.
const MAX_DEFAULT_CACHE_RAM: u64 = 8 << 30;

/// How a [`Scheduler`] shares its forward pass out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SchedulerOptions {
    /// Texts that run at once; at most the sequences of the forward pass. Those beyond keep more finished texts.
    pub n_parallel: usize,
    /// Requests that may wait for a place. Where a client has so many waiting, others find room for their share beyond
    /// that, for twice as many at most.
    pub n_queue: usize,
    /// Most tokens of a step; at least `n_parallel`. `None`: as many as the forward pass takes at once, but no fewer. A long prompt is evaluated in steps of so many, or of fewer where
    /// others wait, so that their texts go on in between.
    pub n_batch: Option<usize>,
    /// How long a text keeps its place while another client waits for one. After that it may have to wait in its turn.
    pub turn: Duration,
    /// Bytes of main memory for finished texts that gave their places in the KV cache up: a prompt that begins like one of them
    /// takes it from there. Whoever has a key finds its own alone. See [`default_cache_ram`](Self::default_cache_ram).
    pub cache_ram: u64,
    /// Where they go that main memory has no room for.
    pub cache_disk: Option<CacheDisk>,
}

impl Default for SchedulerOptions {
    fn default() -> Self {
        Self {
            n_parallel: 1,
            n_queue: 256,
            n_batch: None,
            turn: Duration::from_millis(250),
            cache_ram: 0,
            cache_disk: None,
        }
    }
}

/// Hands requests to the thread that runs them. Clones are handles of the same thread, which ends with the last of
/// them: what is not finished then is cancelled.
#[derive(Clone)]
pub struct Scheduler {
    handle: Arc<Handle>,
}

struct Handle {
    shared: Arc<SharedQueue>,
    tokenizer: Arc<Tokenizer>,
    n_queue: usize,
    n_parallel: usize,
    n_vocab: usize,
    /// Whether the model has an output head.
    has_logits: bool,
    /// Whether the model can continue a text.
    writes_text: bool,
    /// Tokens of the longest prompt.
    n_ctx: usize,
    /// Bytes of the KV cache, recurrent states included.
    cache_bytes: u64,
    /// Context length of the training.
    n_ctx_train: usize,
    /// The engine's defect, where it met one. Fails once the thread has ended.
    defect: watch::Receiver<Option<Arc<str>>>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.shared.close(Instant::now());
    }
}

/// Ends the queue however the thread ends, so that nobody waits for it in vain.
struct EndQueue(Arc<SharedQueue>);

impl Drop for EndQueue {
    fn drop(&mut self) {
        self.0.end(false);
    }
}

impl Scheduler {
    /// Sets `model` up and starts a thread that runs `n_parallel` texts at once, with `n_ctx` tokens for each as `engine`
    /// says; its other numbers of sequences and tokens follow from these ([`SchedulerOptions::engine`]).
    pub fn open(model: &Model, engine: &EngineOptions, n_parallel: usize) -> Result<Self, StartError> {
        let options = SchedulerOptions { n_parallel, ..Default::default() };
        let pass = model.forward_pass(&options.engine(model, engine))?;
        Self::start(pass, Arc::new(model.clone()), options)
    }

    /// Starts a thread that runs `pass`, a forward pass of `model`. An error on options that cannot work, and where the
    /// model has no tokenizer.
    pub fn start(pass: Box<dyn ForwardPass>, model: Arc<Model>, options: SchedulerOptions) -> Result<Self, StartError> {
        Self::start_with(pass, model, options, None)
    }

    /// [`start`](Self::start), with an observer that hears what the KV cache holds for prompts to come.
    pub fn start_observed(
        pass: Box<dyn ForwardPass>,
        model: Arc<Model>,
        options: SchedulerOptions,
        observer: CacheObserver,
    ) -> Result<Self, StartError> {
        Self::start_with(pass, model, options, Some(observer))
    }

    fn start_with(
        pass: Box<dyn ForwardPass>,
        model: Arc<Model>,
        options: SchedulerOptions,
        observer: Option<CacheObserver>,
    ) -> Result<Self, StartError> {
        options.check(&*pass)?;
        let tokenizer = model.tokenizer()?;
        let shared = Arc::new(SharedQueue::default());
        let (told, defect) = watch::channel(None);
        let pages = pass.cache_pages();
        let handle = Handle {
            shared: Arc::clone(&shared),
            tokenizer: Arc::clone(&tokenizer),
            n_queue: options.n_queue,
            n_parallel: options.n_parallel,
            n_vocab: pass.spec().n_vocab,
            has_logits: pass.spec().output.head.is_some(),
            writes_text: pass.spec().writes_text(),
            n_ctx_train: pass.spec().n_ctx_train,
            n_ctx: pass.n_ctx().min(pages.total * pages.page_len),
            cache_bytes: pass.kv_cache_bytes() as u64,
            defect,
        };
        let run = move || {
            let told = told;
            let _end = EndQueue(Arc::clone(&shared));
            let mut engine = Engine::new(pass, &model, &tokenizer, Arc::clone(&shared), options, observer);
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| engine.run())) {
                let why = panic_message(&*panic);
                tracing::error!("the engine met a defect and has ended: {why}");
                // Whoever hears of it can ask why.
                told.send_replace(Some(why.into()));
                shared.end(true);
                engine.fail();
            }
        };
        std::thread::Builder::new().name("scheduler".into()).spawn(run)?;
        Ok(Self { handle: Arc::new(handle) })
    }

    /// Queues a request. Fails at once when it cannot work, when the queue is full, or while shutting down.
    pub fn submit(&self, request: Request) -> Result<Events, SubmitError> {
        self.counted(self.prepare_generation(request).and_then(|(submission, events)| {
            self.push_generation(&mut Some(submission))?;
            Ok(events)
        }))
    }

    /// A request that can work, and what its client hears.
    fn prepare_generation(&self, mut request: Request) -> Result<(Submission, Events), SubmitError> {
        if !self.handle.writes_text {
            return Err(SubmitError::NoText);
        }
        self.check_prompt(&request.prompt)?;
        let mut sampling = std::mem::take(&mut request.sampling);
        sampling.logit_bias.append(&mut request.logit_bias);
        self.check_ids(sampling.logit_bias.iter().map(|(id, _)| id))?;
        self.check_ids(request.stop_ids.iter())?;
        let tokenizer = &self.handle.tokenizer;
        let vocabulary = (0..tokenizer.n_vocab() as u32).map(|id| tokenizer.token_bytes(id));
        let sampler = Sampler::new(sampling)?.with_vocabulary(vocabulary);
        let (events, receiver) = mpsc::unbounded_channel();
        let submission = Submission { request, sampler, events, submitted: Instant::now(), ticket: None };
        Ok((submission, Events::new(receiver)))
    }

    /// Queues a request, which is left where it is refused.
    fn push_generation(&self, submission: &mut Option<Submission>) -> Result<(), SubmitError> {
        let Some(client) = submission.as_ref().map(|submission| submission.request.client) else { return Ok(()) };
        let shared = &self.handle.shared;
        shared.push(self.queue_limits(), client, |queue| {
            if let Some(queued) = submission.take() {
                queue.generations.push(client, Submission { ticket: Some(shared.ticket()), ..queued });
            }
        })
    }

    /// Queues a text of `client` for its embedding, made as the model's file says and of length 1; of a reranker for its
    /// scores (see [`Pooler`](crate::Pooler)). Fails like [`submit`](Self::submit).
    pub fn embed(&self, client: Client, ids: Vec<u32>) -> Result<VectorFuture, SubmitError> {
        self.counted(self.queue_embedding(client, ids, RequestedOutput::Embedding))
    }

    /// Queues a text of `client` for the logits after each of its tokens from position `from` on: `[n_tokens - from,
    /// n_vocab]`, row by row. Fails like [`submit`](Self::submit).
    pub fn logits(&self, client: Client, ids: Vec<u32>, from: usize) -> Result<VectorFuture, SubmitError> {
        let has_logits = if self.handle.has_logits { Ok(()) } else { Err(SubmitError::NoLogits) };
        self.counted(has_logits.and_then(|()| self.queue_embedding(client, ids, RequestedOutput::Logits(from))))
    }

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

    /// A request that can work, and what its client gets.
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

    /// Queues a request, which is left where it is refused.
    fn push_embedding(&self, request: &mut Option<EmbeddingRequest>) -> Result<(), SubmitError> {
        let Some(client) = request.as_ref().map(|request| request.client) else { return Ok(()) };
        let shared = &self.handle.shared;
        shared.push(self.queue_limits(), client, |queue| {
            if let Some(queued) = request.take() {
                queue.embeddings.push(client, EmbeddingRequest { ticket: Some(shared.ticket()), ..queued });
            }
        })
    }

    /// Requests that may wait, and that run at once.
    fn queue_limits(&self) -> (usize, usize) {
        (self.handle.n_queue, self.handle.n_parallel)
    }

    /// Requests that wait or run.
    fn n_unfinished(&self) -> usize {
        self.handle.shared.n_unfinished()
    }

    /// Says that somebody may be about to send a request, as whoever opens a connection is: a device that was idle comes up to
    /// its speed meanwhile. Costs next to nothing while requests run.
    pub fn announce(&self) {
        self.handle.shared.announce();
    }

    /// What was done so far, and what is going on.
    pub fn metrics(&self) -> Metrics {
        let waiting = self.handle.shared.queue().len();
        let metrics = self.handle.shared.metrics();
        Metrics { waiting: metrics.waiting + waiting, ..metrics.clone() }
    }

    /// Takes no more requests, and returns when all are finished; those that are not after `grace` are cancelled.
    pub async fn shut_down(&self, grace: Duration) {
        self.close(grace);
        self.wait_for_end().await;
    }

    /// Takes no more requests, and cancels after `grace` those that are not finished.
    fn close(&self, grace: Duration) {
        let now = Instant::now();
        self.handle.shared.close(now.checked_add(grace).unwrap_or(now + Duration::from_secs(1 << 32)));
    }

    /// Returns when the thread has ended.
    async fn wait_for_end(&self) {
        let mut defect = self.handle.defect.clone();
        // The wait ends when the thread does.
        while defect.changed().await.is_ok() {}
    }

    /// The engine's defect, where it met one: it has ended, and every request is or will be told so.
    pub fn defect(&self) -> Option<Arc<str>> {
        self.handle.defect.borrow().clone()
    }

    /// Waits for the engine to meet a defect; for ever, where it does not.
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

    fn counted<T>(&self, outcome: Result<T, SubmitError>) -> Result<T, SubmitError> {
        if outcome.is_err() {
            self.handle.shared.metrics().requests.refused += 1;
        }
        outcome
    }

    fn check_prompt(&self, prompt: &[u32]) -> Result<(), SubmitError> {
        let (n_ctx, n_ctx_train) = (self.handle.n_ctx, self.handle.n_ctx_train);
        match prompt.len() {
            0 => Err(SubmitError::EmptyPrompt),
            n_prompt if n_prompt > n_ctx => Err(SubmitError::PromptTooLong { n_prompt, n_ctx, n_ctx_train }),
            _ => self.check_ids(prompt.iter()),
        }
    }

    fn check_ids<'a>(&self, mut ids: impl Iterator<Item = &'a u32>) -> Result<(), SubmitError> {
        let n_vocab = self.handle.n_vocab;
        match ids.find(|&&id| id as usize >= n_vocab) {
            Some(&id) => Err(SubmitError::TokenOutOfRange { id, n_vocab }),
            None => Ok(()),
        }
    }
}

/// What a panic says.
fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let message = panic.downcast_ref::<String>().map(String::as_str);
    message.or(panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without a message")
}

impl SchedulerOptions {
    /// How `model` is set up to run so many texts, each with room for all of its context, and to keep finished ones for
    /// prompts that begin like them, as far as that memory has room.
    #[must_use]
    pub fn engine(&self, model: &Model, engine: &EngineOptions) -> EngineOptions {
        EngineOptions {
            n_seq: self.n_parallel.saturating_add(KEPT_SEQUENCES),
            // None at once is refused by its own name, when the scheduler starts.
            n_cache: Some(self.n_parallel.max(1).saturating_mul(engine.n_ctx_of(model))),
            // Of texts, and of embeddings, of which there may be one more: finished texts have what these leave.
            n_windows: Some(self.n_parallel.saturating_mul(2).saturating_add(1)),
            ..engine.clone()
        }
    }

    /// What [`cache_ram`](Self::cache_ram) a server has where nobody says: 8 GiB, or a quarter of the main memory that is free, where
    /// that is less.
    pub fn default_cache_ram() -> u64 {
        crate::available_memory().map_or(MAX_DEFAULT_CACHE_RAM, |free| (free / 4).min(MAX_DEFAULT_CACHE_RAM))
    }

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

/// An embedding, or the logits of a text, to come: a future. Dropping it cancels the request.
#[derive(Debug)]
pub struct VectorFuture {
    receiver: oneshot::Receiver<Result<Vec<f32>, RequestError>>,
}

impl VectorFuture {
    /// Waits for it; for threads that may block, panics inside an async runtime.
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
