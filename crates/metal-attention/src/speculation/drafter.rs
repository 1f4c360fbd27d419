//! The interface of drafters.

use crate::{ForwardError, ForwardPass, MemoryUse};

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
    /// For each of them the estimated probability that it holds if those before it do, 0 to 1; empty: the drafter does not
    /// [estimate](Drafter::estimates) it.
    pub confidence: Vec<f32>,
}

impl Draft {
    /// Keeps the first `n` tokens.
    pub fn truncate(&mut self, n: usize) {
        self.ids.truncate(n);
        self.confidence.truncate(n);
    }
}

/// Inputs of one sequence that the target has evaluated.
#[derive(Debug, Clone, Copy)]
pub struct Evaluated<'a> {
    /// The index of the sequence in the target's KV cache.
    pub seq: usize,
    /// The index of the first input in the sequence.
    pub first: usize,
    /// The token ids. What the sequence had from `first` on before does not hold any more.
    pub ids: &'a [u32],
    /// The target's hidden rows of these inputs: for each of [`reads_hidden`](Drafter::reads_hidden), row-major
    /// `[ids.len(), n_embd]`.
    pub hidden: &'a [&'a [f32]],
}

/// Receives the logits from which a draft is taken: the index of the request, the index of the draft, and the row, `[n_vocab]` of the
/// target.
pub type DraftLogits<'a> = &'a mut dyn FnMut(usize, usize, &[f32]);

/// Proposes tokens that may follow sequences.
///
/// A drafter compares the ids of a request with those of the last request for the same sequence, and drops what it keeps
/// beyond their common prefix: a sequence may have been cut back, or replaced by another one.
pub trait Drafter: Send {
    /// Its name in metrics and messages, such as `"ngram"`.
    fn name(&self) -> &'static str;

    /// Whether it estimates how likely its drafts hold, and proposes at no cost: then it is always requested to propose, and only
    /// likely drafts are evaluated. Otherwise what held before decides how many drafts are requested.
    fn estimates(&self) -> bool {
        false
    }

    /// The hidden rows of the target that it reads, as for [`HiddenRequest::before`](crate::HiddenRequest::before). Empty: none.
    fn reads_hidden(&self) -> &[usize] {
        &[]
    }

    /// Tells a drafter that [reads hidden rows](Self::reads_hidden) of inputs that the target has evaluated: the prompt's, and
    /// after each step at least those that hold.
    ///
    /// # Errors
    /// The drafter's model failed. The sequences go on without drafts.
    fn observe(&mut self, evaluated: Evaluated<'_>) -> Result<(), ForwardError> {
        let _ = evaluated;
        Ok(())
    }

    /// A sequence of the target has ended: what is kept of it is not needed any more.
    fn forget(&mut self, seq: usize) {
        let _ = seq;
    }

    /// Proposes up to [`n`](DraftRequest::n) tokens for each request, in order: those that are likeliest to follow the last
    /// token. The drafts may be shorter, also empty.
    ///
    /// # Errors
    /// The drafter's model failed. The sequences go on without drafts.
    fn propose(&mut self, requests: &[DraftRequest<'_>]) -> Result<Vec<Draft>, ForwardError>;

    /// [`propose`](Self::propose), which also passes on the logits from which each draft is taken, negative infinity for tokens of the
    /// target that the drafter lacks. A drafter without logits passes on none.
    ///
    /// # Errors
    /// As of [`propose`](Self::propose).
    fn propose_with_logits(
        &mut self,
        requests: &[DraftRequest<'_>],
        logits: DraftLogits<'_>,
    ) -> Result<Vec<Draft>, ForwardError> {
        let _ = logits;
        self.propose(requests)
    }

    /// [`propose`](Self::propose), or with `logits` [`propose_with_logits`](Self::propose_with_logits), beside the target's forward pass,
    /// none of whose sequences changes. What generates text calls this. A drafter that attends to the target's keys and values can
    /// propose here alone.
    ///
    /// # Errors
    /// As of [`propose`](Self::propose).
    fn propose_beside(
        &mut self,
        target: &mut dyn ForwardPass,
        requests: &[DraftRequest<'_>],
        logits: Option<DraftLogits<'_>>,
    ) -> Result<Vec<Draft>, ForwardError> {
        let _ = target;
        match logits {
            None => self.propose(requests),
            Some(logits) => self.propose_with_logits(requests, logits),
        }
    }

    /// Bytes that it holds.
    fn memory_use(&self) -> MemoryUse;
}
