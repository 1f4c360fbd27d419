//! The interface of drafters.

use crate::{ForwardError, MemoryUse};

/// A sequence for which a drafter proposes tokens.
#[derive(Debug, Clone, Copy)]
pub struct DraftRequest<'a> {
    /// The index of the sequence in the target's KV cache.
    pub seq: usize,
    /// All of its tokens, at least one. The target has evaluated all but the last one.
    pub ids: &'a [u32],
    /// Tokens of a text that is likely to be repeated behind the prompt, at most as many as a context has; usually empty.
    pub prediction: &'a [u32],
    /// The maximum number of tokens to propose.
    pub n: usize,
}

/// Tokens that may follow a sequence, one after another.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Draft {
    /// Their ids.
    pub ids: Vec<u32>,
    /// For each of them the estimated probability that it holds if those before it do, 0 to 1.
    pub confidence: Vec<f32>,
}

impl Draft {
    /// Keeps the first `n` tokens.
    pub fn truncate(&mut self, n: usize) {
        self.ids.truncate(n);
        self.confidence.truncate(n);
    }
}

/// Proposes tokens that may follow sequences.
///
/// A drafter compares the ids of a request with those of the last request for the same sequence, and drops what it keeps
/// beyond their common prefix: a sequence may have been cut back, or replaced by another one.
pub trait Drafter: Send {
    /// Its name in metrics and messages, such as `"ngram"`.
    fn name(&self) -> &'static str;

    /// Proposes up to [`n`](DraftRequest::n) tokens for each request, in order: those that are likeliest to follow the last
    /// token. The drafts may be shorter, also empty.
    ///
    /// # Errors
    /// The drafter's model failed. The sequences go on without drafts.
    fn propose(&mut self, requests: &[DraftRequest<'_>]) -> Result<Vec<Draft>, ForwardError>;

    /// Bytes that it holds.
    fn memory_use(&self) -> MemoryUse;
}
