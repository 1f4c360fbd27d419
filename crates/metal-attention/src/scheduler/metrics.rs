//! Metrics of a scheduler: counters since its start, and its present state.

use crate::StateUse;

use super::{FinishReason, RequestError, StoreUse};

/// Upper bounds of the buckets of [`Metrics::batch_sizes`]; the last bucket has none.
pub const BATCH_SIZE_BUCKETS: [usize; 11] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];

/// Counters since the start, and gauges of the moment.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Metrics {
    /// Evaluated prompt tokens, those evaluated again after a preemption included.
    pub prompt_tokens: u64,
    /// Prompt tokens that were in the KV cache already.
    pub cached_tokens: u64,
    /// Generated tokens.
    pub generated_tokens: u64,
    /// Drafts that were evaluated ([`speculation`](crate::speculation)).
    pub drafted_tokens: u64,
    /// Drafts that held.
    pub accepted_tokens: u64,
    /// Tokens evaluated for embeddings.
    pub embedding_tokens: u64,
    /// Ended requests by their outcome.
    pub requests: Outcomes,
    /// Evaluated batches.
    pub steps: u64,
    /// Number of batches by size, in the buckets of [`BATCH_SIZE_BUCKETS`] and one for larger ones; not cumulative.
    pub batch_sizes: [u64; BATCH_SIZE_BUCKETS.len() + 1],
    /// Tokens of all batches.
    pub batch_tokens: u64,
    /// Preemptions, for another client or for want of KV pages.
    pub preemptions: u64,
    /// Running requests.
    pub running: usize,
    /// Waiting requests, preempted ones included.
    pub waiting: usize,
    /// KV pages in use, those of idle prefixes included.
    pub pages_used: usize,
    /// Free KV pages.
    pub pages_free: usize,
    /// KV pages of running requests, shared ones counted once. The other used pages hold idle prefixes, which are
    /// evicted on demand.
    pub pages_running: usize,
    /// Positions of a KV page.
    pub page_len: usize,
    /// Recurrent states in use and free; zeros if the model keeps none.
    pub states: StateUse,
    /// Progress of the running sequences, in the order of admission; embeddings not included.
    pub sequences: Vec<SequenceProgress>,
    /// The prefix store: sequences evicted from the KV cache.
    pub stored: StoreUse,
}

/// Progress of one running sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequenceProgress {
    /// Tokens of its prompt.
    pub n_prompt: usize,
    /// Prompt tokens that were in the KV cache already.
    pub n_cached: usize,
    /// Tokens that are in the KV cache now.
    pub n_evaluated: usize,
    /// Generated tokens.
    pub n_generated: usize,
    /// Maximum number of generated tokens; `None`: no limit.
    pub max_tokens: Option<usize>,
}

/// Number of ended requests by outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Outcomes {
    /// Ended by an end token or a complete constraint.
    pub end_of_text: u64,
    /// Reached the maximum number of tokens.
    pub length: u64,
    /// Ended by a stop string.
    pub stop_string: u64,
    /// The context was full.
    pub context_full: u64,
    /// The deadline passed.
    pub deadline: u64,
    /// The client disconnected, or the scheduler was shut down.
    pub cancelled: u64,
    /// Failed with an error.
    pub failed: u64,
    /// Refused at submission.
    pub refused: u64,
    /// Embeddings computed.
    pub embeddings: u64,
}

impl Outcomes {
    /// Counts an ended generation.
    pub(super) fn count(&mut self, outcome: &Result<FinishReason, RequestError>) {
        *match outcome {
            Ok(FinishReason::EndOfText) => &mut self.end_of_text,
            Ok(FinishReason::Length) => &mut self.length,
            Ok(FinishReason::StopString) => &mut self.stop_string,
            Ok(FinishReason::ContextFull) => &mut self.context_full,
            Ok(FinishReason::Deadline) => &mut self.deadline,
            Ok(FinishReason::Cancelled) => &mut self.cancelled,
            Err(_) => &mut self.failed,
        } += 1;
    }
}

impl Outcomes {
    fn add(&mut self, other: &Self) {
        let Self { end_of_text, length, stop_string, context_full, deadline, cancelled, failed, refused, embeddings } =
            other;
        self.end_of_text += end_of_text;
        self.length += length;
        self.stop_string += stop_string;
        self.context_full += context_full;
        self.deadline += deadline;
        self.cancelled += cancelled;
        self.failed += failed;
        self.refused += refused;
        self.embeddings += embeddings;
    }
}

impl Metrics {
    /// Adds the metrics of another scheduler of the same model.
    pub(super) fn add(&mut self, other: &Self) {
        let Self {
            prompt_tokens,
            cached_tokens,
            generated_tokens,
            drafted_tokens,
            accepted_tokens,
            embedding_tokens,
            requests,
            steps,
            batch_sizes,
            batch_tokens,
            preemptions,
            running,
            waiting,
            pages_used,
            pages_free,
            pages_running,
            page_len,
            states: StateUse { total, free, checkpoints },
            sequences,
            stored,
        } = other;
        self.prompt_tokens += prompt_tokens;
        self.cached_tokens += cached_tokens;
        self.generated_tokens += generated_tokens;
        self.drafted_tokens += drafted_tokens;
        self.accepted_tokens += accepted_tokens;
        self.embedding_tokens += embedding_tokens;
        self.requests.add(requests);
        self.steps += steps;
        self.batch_sizes.iter_mut().zip(batch_sizes).for_each(|(sum, n)| *sum += n);
        self.batch_tokens += batch_tokens;
        self.preemptions += preemptions;
        self.running += running;
        self.waiting += waiting;
        self.pages_used += pages_used;
        self.pages_free += pages_free;
        self.pages_running += pages_running;
        self.page_len = self.page_len.max(*page_len);
        self.states.total += total;
        self.states.free += free;
        self.states.checkpoints += checkpoints;
        self.sequences.extend(sequences);
        self.stored.add(stored);
    }

    /// Counts a batch of `n` tokens.
    pub(super) fn count_step(&mut self, n: usize) {
        self.steps += 1;
        self.batch_tokens += n as u64;
        self.batch_sizes
            [BATCH_SIZE_BUCKETS.iter().position(|&bound| n <= bound).unwrap_or(BATCH_SIZE_BUCKETS.len())] += 1;
    }
}
