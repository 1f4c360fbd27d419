//! The thread that owns the forward pass: its loop, and how sequences end on it.
//!
//! Each iteration of the loop ([`Engine::run`]) drops sequences that are abandoned or past their deadline, runs one
//! slot command, admits waiting requests (admission.rs), evaluates one batch (step.rs) and one chunk of an embedding
//! (embedding.rs), and publishes metrics.
//!
//! The KV cache of the forward pass holds `n_seq` sequences, which `seq` numbers. Such a *cache sequence* is empty,
//! busy with a running sequence, or idle: it keeps the tokens of an ended or preempted one for prompts that begin like
//! it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use metal_attention_model::{ASLEEP_AFTER, wake};

use crate::prefix_store::PrefixStore;
use crate::prompt::PrefixKey;
use crate::speculation::Speculator;
use crate::tokenizer::Tokenizer;
use crate::{ForwardPass, Model, Pooler, StateUse};

use super::batch_sizer::BatchSizer;
use super::block_tree::{BlockTree, EvaluatedSequence};
use super::client_ring::ClientRing;
use super::embedding::EmbeddingRun;
use super::queue::{SharedQueue, Submission};
use super::scheduled_sequence::ScheduledSequence;
use super::sequence_pool::SequencePool;
use super::{FinishReason, RequestError, SchedulerOptions, SchedulerParts};

/// Minimum time between two wake-ups of the device without work: monitoring opens connections all the time.
const WAKE_AGAIN_AFTER: Duration = Duration::from_secs(60);

/// A sequence that runs: each step evaluates some of its tokens.
pub(super) struct RunningSequence<'t> {
    /// Its tokens and sampling state.
    pub sequence: ScheduledSequence<'t>,
    /// Index of its cache sequence.
    pub cache_seq: usize,
    /// Start of its time slice: when it first evaluated a token beyond those of before its last preemption. `None`
    /// until then.
    pub time_slice_start: Option<Instant>,
    /// Whether a snapshot of the end of its prompt is in the prefix store, or is not needed.
    pub prompt_end_is_kept: bool,
}

impl RunningSequence<'_> {
    /// The key of its tokens in the KV cache of `pass`.
    pub fn evaluated(&self, pass: &dyn ForwardPass) -> PrefixKey<'_> {
        self.sequence.key().first(pass.n_past(self.cache_seq))
    }
}

/// The forward pass and all that the scheduler's thread keeps about requests.
pub(super) struct Engine<'t> {
    /// The forward pass.
    pub pass: Box<dyn ForwardPass>,
    /// Makes embeddings and scores of hidden states.
    pub pooler: Pooler,
    /// Tokenizer of the model.
    pub tokenizer: &'t Tokenizer,
    /// The queue that the callers' threads write to.
    pub shared: Arc<SharedQueue>,
    /// Options of the scheduler.
    pub options: SchedulerOptions,
    /// Use of each cache sequence.
    pub cache_sequences: SequencePool,
    /// Snapshots of sequences that were evicted from the KV cache.
    pub store: PrefixStore,
    /// The KV pages that are reported to an observer, if there is one.
    block_tree: Option<BlockTree>,
    /// The running sequences, in the order of their admission.
    pub running: Vec<RunningSequence<'t>>,
    /// The preempted sequences, oldest first (by number).
    pub preempted: Vec<ScheduledSequence<'t>>,
    /// The embeddings in progress, next one first; at most one of each client.
    pub embeddings: VecDeque<EmbeddingRun>,
    /// The order in which clients are served.
    pub client_ring: ClientRing,
    /// Whether generations are admitted before embeddings: an embedding was admitted last.
    pub generations_first: bool,
    /// Limits the tokens of a step.
    pub batch_sizer: BatchSizer,
    /// Proposes drafts; `None`: each step gives one token.
    pub speculator: Option<Speculator>,
    /// Number of sequences and embeddings started so far, those that ended without running included.
    pub n_started: u64,
    /// Time at which the engine last became idle.
    worked: Option<Instant>,
    /// Time of the last wake-up for an announced request.
    woken: Option<Instant>,
}

impl<'t> Engine<'t> {
    /// An engine over `pass`, a forward pass of `model`.
    pub fn new(
        pass: Box<dyn ForwardPass>,
        model: &Model,
        tokenizer: &'t Tokenizer,
        shared: Arc<SharedQueue>,
        options: SchedulerOptions,
        SchedulerParts { observer, drafter }: SchedulerParts,
    ) -> Self {
        let n_batch = options.n_batch.unwrap_or(pass.n_ubatch().max(options.n_parallel));
        Self {
            block_tree: observer.map(|observer| BlockTree::new(pass.cache_pages().page_len, pass.n_seq(), observer)),
            cache_sequences: SequencePool::new(pass.n_seq()),
            store: PrefixStore::new(options.cache_ram, options.cache_disk.clone()),
            pass,
            pooler: Pooler::new(model, None),
            tokenizer,
            shared,
            batch_sizer: BatchSizer::new(n_batch),
            speculator: drafter.map(|drafter| Speculator::new(drafter, options.speculation.depth)),
            options,
            running: Vec::new(),
            preempted: Vec::new(),
            embeddings: VecDeque::new(),
            client_ring: ClientRing::default(),
            generations_first: false,
            n_started: 0,
            worked: None,
            woken: None,
        }
    }

    /// Runs until the scheduler is closed and nothing is left to do.
    pub fn run(&mut self) {
        loop {
            if self.is_idle() {
                self.publish();
                self.worked = Some(Instant::now());
                while !self.shared.sleep() {
                    self.wake();
                }
                if self.shared.queue().closing.is_some() && self.is_idle() {
                    return;
                }
            }
            self.drop_ended();
            self.run_slot_command();
            self.admit();
            self.step();
            self.embed();
            self.publish();
        }
    }

    /// Brings an idle device up to its clock for an announced request, until that arrives. Announcements without
    /// requests wake the device once a minute at most.
    fn wake(&mut self) {
        let elapsed = |then: Option<Instant>| then.map_or(Duration::MAX, |then| then.elapsed());
        if elapsed(self.worked) >= ASLEEP_AFTER && elapsed(self.woken) >= WAKE_AGAIN_AFTER {
            let shared = Arc::clone(&self.shared);
            wake(&mut *self.pass, || !shared.queue().is_idle());
            self.woken = Some(Instant::now());
        }
    }

    /// Whether there is nothing to do.
    fn is_idle(&self) -> bool {
        let queue = self.shared.queue();
        self.running.is_empty()
            && self.preempted.is_empty()
            && self.embeddings.is_empty()
            && queue.len() == 0
            && queue.slot_commands.is_empty()
    }

    /// Ends the sequences whose client has gone, whose deadline has passed, or all of them once the shutdown's deadline
    /// has passed.
    fn drop_ended(&mut self) {
        let now = Instant::now();
        let mut queue = self.shared.queue();
        let closed = queue.closing.is_some_and(|deadline| now >= deadline);
        let end_reason = |abandoned: bool, deadline: Option<Instant>| {
            if abandoned || closed {
                Some(FinishReason::Cancelled)
            } else {
                deadline.filter(|&deadline| now >= deadline).map(|_| FinishReason::Deadline)
            }
        };
        let ended = queue.generations.extract(|s: &Submission| end_reason(s.events.is_closed(), s.request.deadline));
        let embeddings = queue.embeddings.extract(|request| end_reason(request.answer.is_closed(), None));
        drop(queue);
        for (submission, reason) in ended {
            let sequence = self.new_sequence(submission);
            self.answer(sequence, Ok(reason));
        }
        for (request, _) in embeddings {
            let _ = request.answer.send(Err(RequestError::ShutDown));
        }
        for i in (0..self.preempted.len()).rev() {
            if let Some(reason) = end_reason(self.preempted[i].is_abandoned(), self.preempted[i].deadline) {
                let sequence = self.preempted.remove(i);
                self.answer(sequence, Ok(reason));
            }
        }
        for i in (0..self.running.len()).rev() {
            let sequence = &self.running[i].sequence;
            if let Some(reason) = end_reason(sequence.is_abandoned(), sequence.deadline) {
                self.end(i, Ok(reason));
            }
        }
        for i in (0..self.embeddings.len()).rev() {
            if end_reason(self.embeddings[i].is_abandoned(), None).is_some() {
                self.drop_embedding(i, RequestError::ShutDown);
            }
        }
    }

    /// The sequence of a request that leaves the queue.
    pub fn new_sequence(&mut self, submission: Submission) -> ScheduledSequence<'t> {
        self.n_started += 1;
        ScheduledSequence::new(submission, self.tokenizer, self.pass.spec().n_vocab, self.n_started)
    }

    /// Ends the running sequence with index `i`. Its cache sequence becomes idle, so that later prompts can share its
    /// pages.
    pub fn end(&mut self, i: usize, outcome: Result<FinishReason, RequestError>) {
        let running = self.running.remove(i);
        let seq = running.cache_seq;
        // The pages may hold NaN, which a prompt that shares them would meet again.
        if matches!(outcome, Err(RequestError::Forward(_) | RequestError::NoNumbers)) {
            self.evict(seq);
        } else {
            self.cache_sequences.keep(seq, running.sequence.client, running.evaluated(&*self.pass).to_owned());
        }
        self.answer(running.sequence, outcome);
    }

    /// Sends the last event to the client, and counts the request.
    pub fn answer(&self, sequence: ScheduledSequence<'_>, outcome: Result<FinishReason, RequestError>) {
        self.shared.metrics().requests.count(&outcome);
        match outcome {
            Ok(reason) => sequence.finish(reason),
            Err(why) => sequence.fail(why),
        }
    }

    /// Fails all running and preempted sequences and embeddings, after a panic. Nothing else of the engine's state can
    /// be trusted then.
    pub fn fail(mut self) {
        let sequences = self.running.drain(..).map(|r| r.sequence).chain(self.preempted.drain(..));
        let sequences: Vec<_> = sequences.collect();
        for sequence in sequences {
            self.answer(sequence, Err(RequestError::EngineFailed));
        }
        let n_embeddings = self.embeddings.len() as u64;
        for run in self.embeddings.drain(..) {
            run.fail(RequestError::EngineFailed);
        }
        let mut metrics = self.shared.metrics();
        metrics.requests.failed += n_embeddings;
        (metrics.running, metrics.waiting, metrics.pages_running) = (0, 0, 0);
        metrics.sequences.clear();
        // The KV cache and the store are lost with the thread.
        (metrics.pages_used, metrics.pages_free, metrics.states) = (0, 0, StateUse::default());
        (metrics.stored.ram_sequences, metrics.stored.ram_bytes) = (0, 0);
        (metrics.stored.disk_sequences, metrics.stored.disk_bytes) = (0, 0);
    }

    /// Empties a cache sequence. Its pages become free unless other sequences share them.
    pub fn evict(&mut self, seq: usize) {
        self.pass.rewind(seq, 0);
        self.cache_sequences.clear(seq);
    }

    /// Empties an idle cache sequence; its tokens' pages go to the prefix store, if there is room.
    pub fn store_and_evict(&mut self, seq: usize) {
        self.store_idle(seq);
        self.evict(seq);
    }

    /// Copies an idle cache sequence to the prefix store, unless another cache sequence can be cut back to the same
    /// tokens.
    pub fn store_idle(&mut self, seq: usize) {
        let Self { pass, cache_sequences, store, running, embeddings, .. } = self;
        let others_wait = !running.is_empty() || !embeddings.is_empty();
        let (Some(key), Some(client)) = (cache_sequences.idle(seq), cache_sequences.owner(seq)) else { return };
        let running = running.iter().map(|r| (r.cache_seq, r.evaluated(&**pass)));
        let mut others = running.chain(cache_sequences.all_idle()).filter(|(other, _)| *other != seq);
        if !others.any(|(other, of_other)| of_other.starts_with(key) && pass.reachable(other, key.len()) == key.len()) {
            store.keep(&mut **pass, seq, client, key, others_wait);
        }
    }

    /// Copies the prompt ends of running sequences to the prefix store, before layers with a sliding window lose them.
    pub fn keep_prompt_ends(&mut self) {
        let others_wait = self.running.len() > 1 || !self.embeddings.is_empty();
        let Self { pass, store, running, .. } = self;
        for RunningSequence { sequence, cache_seq, prompt_end_is_kept, .. } in
            running.iter_mut().filter(|r| !r.prompt_end_is_kept)
        {
            let prompt = sequence.key().first(sequence.n_prompt);
            *prompt_end_is_kept = store.keep_prompt_end(&mut **pass, *cache_seq, sequence.client, prompt, others_wait);
        }
    }

    /// Updates the metrics, and reports changed pages to the observer.
    fn publish(&mut self) {
        let Self { pass, cache_sequences, running, block_tree, .. } = self;
        if let Some(block_tree) = block_tree {
            let held = |(seq, key)| EvaluatedSequence { seq, use_number: cache_sequences.use_number(seq), key };
            let running = running.iter().map(|r| (r.cache_seq, r.evaluated(&**pass)));
            block_tree.update(running.chain(cache_sequences.all_idle()).map(held));
        }
        let pages = self.pass.cache_pages();
        let sequences = self.running.iter().map(|running| running.cache_seq);
        let sequences: Vec<usize> = sequences.chain(self.embeddings.iter().map(|run| run.cache_seq)).collect();
        let pages_running = self.pass.pages_held(&sequences);
        let stored = self.store.usage();
        let mut metrics = self.shared.metrics();
        metrics.running = self.running.len() + self.embeddings.len();
        metrics.waiting = self.preempted.len();
        metrics.pages_used = pages.total - pages.free;
        metrics.pages_free = pages.free;
        metrics.pages_running = pages_running;
        metrics.page_len = pages.page_len;
        metrics.states = pages.states;
        metrics.sequences.clear();
        metrics.sequences.extend(self.running.iter().map(|r| r.sequence.progress(self.pass.n_past(r.cache_seq))));
        metrics.stored = stored;
    }
}
