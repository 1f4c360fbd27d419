//! What a scheduler has done so far, and what it is at.

use crate::StateUse;

use super::{FinishReason, RequestError, StoreUse};

/// Upper bounds of the buckets of [`Metrics::batch_sizes`]; the last bucket has none.
pub const BATCH_SIZE_BUCKETS: [usize; 11] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];

/// A snapshot: counters since the start, and gauges of this moment.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Metrics {
    /// Tokens of prompts that were evaluated, those computed again after a preemption included.
    pub prompt_tokens: u64,
    /// Tokens of prompts that were in the KV cache already.
    pub cached_tokens: u64,
    /// Tokens that were generated.
    pub generated_tokens: u64,
    /// Tokens that were evaluated for embeddings.
    pub embedding_tokens: u64,
    /// Requests by how they ended.
    pub requests: Outcomes,
    /// Steps of the forward pass.
    pub steps: u64,
    /// Tokens a step, how many steps had so many: one more bucket than [`BATCH_SIZE_BUCKETS`], not cumulated.
    pub batch_sizes: [u64; BATCH_SIZE_BUCKETS.len() + 1],
    /// Tokens of all steps.
    pub batch_tokens: u64,
    /// Times that a running request had to give up its place for a while: to another client, or because pages of the KV
    /// cache ran out.
    pub preemptions: u64,
    /// Requests that are running now.
    pub running: usize,
    /// Requests that wait now.
    pub waiting: usize,
    /// Pages of the KV cache that hold something now, idle prefixes included.
    pub pages_used: usize,
    /// Pages of the KV cache that are free now.
    pub pages_free: usize,
    /// Pages of the KV cache that running requests hold now: without them the cache would hold idle prefixes alone. Pages
    /// that several share count once.
    pub pages_running: usize,
    /// Positions of a page.
    pub page_len: usize,
    /// Recurrent states of texts there are now, and room for; none where no layer keeps one.
    pub states: StateUse,
    /// The texts that run now, in the order in which they got their places. Embeddings are not among them.
    pub sequences: Vec<SequenceProgress>,
    /// Texts that gave their places in the KV cache up.
    pub stored: StoreUse,
}

/// How far a text is that runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequenceProgress {
    /// Tokens of its prompt.
    pub n_prompt: usize,
    /// Those of them that were in the KV cache already.
    pub n_cached: usize,
    /// Tokens of it that are in the KV cache now.
    pub n_evaluated: usize,
    /// Tokens that were generated.
    pub n_generated: usize,
    /// Most tokens to generate.
    pub max_tokens: Option<usize>,
}

/// Requests by how they ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Outcomes {
    /// The model ended the text.
    pub end_of_text: u64,
    /// As many tokens as were asked for.
    pub length: u64,
    /// A stop string.
    pub stop_string: u64,
    /// No room in the context.
    pub context_full: u64,
    /// The deadline.
    pub deadline: u64,
    /// The client went away, or the scheduler shut down.
    pub cancelled: u64,
    /// An error.
    pub failed: u64,
    /// Refused at submission.
    pub refused: u64,
    /// Embeddings made.
    pub embeddings: u64,
}

impl Outcomes {
    /// Counts a text that ended.
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
    /// Adds what another scheduler of the same model has done, and is at.
    pub(super) fn add(&mut self, other: &Self) {
        let Self {
            prompt_tokens,
            cached_tokens,
            generated_tokens,
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

    /// Counts a step over `n` tokens.
    pub(super) fn count_step(&mut self, n: usize) {
        self.steps += 1;
        self.batch_tokens += n as u64;
        self.batch_sizes[BATCH_SIZE_BUCKETS.iter().position(|&most| n <= most).unwrap_or(BATCH_SIZE_BUCKETS.len())] +=
            1;
    }
}
