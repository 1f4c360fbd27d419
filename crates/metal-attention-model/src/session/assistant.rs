//! Drafts of an assistant: a second executor, which attends to the keys and values of the session's own one.
//!
//! The session plans the steps of both on one page table. A step of the assistant appends nothing: it reads the pages of its
//! sequences as they are. So it needs no pages, no room and no retraction.

use std::sync::Arc;

use super::{Executor, LayerTrace, Session, Step, StepResults, TracedTokens};
use crate::{BatchToken, ForwardError, Phase, argmax};

/// A token after which an assistant drafts: the one that follows a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AssistantToken {
    /// Token id, `0..n_vocab`.
    pub id: u32,
    /// Index of the sequence. It has at least one token, and room for another.
    pub seq: usize,
}

/// What an assistant drafts after each of some tokens.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct AssistantDrafts {
    /// The argmax of each token's logits, `[n_tokens]`.
    pub ids: Vec<u32>,
    /// The logits, row-major `[n_tokens, n_vocab]`; empty unless they were requested.
    pub logits: Vec<f32>,
    /// The states for the next drafts, row-major `[n_tokens, n_embd]`, with the width of the target.
    pub states: Vec<f32>,
}

impl<E: Executor> Session<E> {
    /// Attaches an assistant: an executor that was set up to read the KV cache of this session's executor. It replaces one that is
    /// attached.
    pub fn attach_assistant(&mut self, assistant: E) {
        self.assistant = Some(assistant);
    }

    /// The executor of the assistant that is attached.
    pub fn assistant(&self) -> Option<&E> {
        self.assistant.as_ref()
    }

    /// [`ForwardPass::forward_assistant`](crate::ForwardPass::forward_assistant).
    pub(super) fn draft(
        &mut self,
        tokens: &[AssistantToken],
        states: &[f32],
        with_logits: bool,
    ) -> Result<AssistantDrafts, ForwardError> {
        // Then what the assistant reads is not written to, and what is submitted later is run later.
        self.discard_lookahead();
        let batch = self.assistant_batch(tokens)?;
        let Some(assistant) = &mut self.assistant else {
            return Err(ForwardError::NoAssistantDraft { why: "none is attached to the model" });
        };
        let (width, n_vocab, n_layer) =
            (self.executor.spec().n_embd, assistant.spec().n_vocab, assistant.spec().n_layer());
        let expected = batch.len() * width;
        if states.len() != expected {
            return Err(ForwardError::WrongStates { found: states.len(), expected });
        }
        assistant.begin_batch()?;
        let limits = assistant.limits();
        let n_at_once = limits.n_tokens.min(limits.n_outputs).max(1);
        let mut drafts = AssistantDrafts::default();
        for (tokens, states) in batch.chunks(n_at_once).zip(states.chunks(n_at_once * width)) {
            let step = Step {
                tokens: tokens.into(),
                pages: Arc::clone(&self.pages),
                phase: Phase::Decode,
                inputs: None,
                states: Some(states.into()),
                is_of_assistant: true,
                context: None,
            };
            let before = [n_layer + 2];
            let mut keep = |_layer: usize, rows: &[f32]| drafts.states.extend_from_slice(rows);
            let trace = LayerTrace { before: &before, tokens: TracedTokens::All, rows: &mut keep };
            if limits.chooses_ids && !with_logits {
                let mut ids = vec![0; tokens.len()];
                assistant.run(&step, StepResults::Ids(&mut ids), Some(trace), None)?;
                drafts.ids.extend(ids);
            } else {
                let mut logits = vec![0.0; tokens.len() * n_vocab];
                assistant.run(&step, StepResults::Logits(&mut logits), Some(trace), None)?;
                drafts.ids.extend(logits.chunks_exact(n_vocab).map(argmax));
                if with_logits {
                    drafts.logits.extend(logits);
                }
            }
        }
        Ok(drafts)
    }

    /// The tokens of the assistant's step: each with the index of the last token of its sequence.
    fn assistant_batch(&self, tokens: &[AssistantToken]) -> Result<Vec<BatchToken>, ForwardError> {
        let (n_vocab, n_seq) = (self.executor.spec().n_vocab, self.pages.n_seq());
        let capacity = self.executor.cache_groups().capacity();
        let n_ctx = capacity.n_ctx;
        let mut batch: Vec<BatchToken> = Vec::with_capacity(tokens.len());
        for &AssistantToken { id, seq } in tokens {
            if id as usize >= n_vocab {
                return Err(ForwardError::TokenOutOfRange { id, n_vocab });
            }
            if seq >= n_seq {
                return Err(ForwardError::SequenceOutOfRange { seq, n_seq });
            }
            if batch.iter().any(|other| other.seq == seq) {
                return Err(ForwardError::NoAssistantDraft { why: "a sequence is there twice" });
            }
            let n_past = self.pages.n_past(seq);
            let Some(pos) = n_past.checked_sub(1) else {
                return Err(ForwardError::NoAssistantDraft { why: "the model has evaluated nothing of the sequence" });
            };
            if n_past >= n_ctx {
                return Err(ForwardError::ContextFull { seq, n_past, n_new: 1, n_ctx });
            }
            let [position, ..] = self.pages.text_position(&BatchToken { id, seq, pos: n_past, output: true }).0;
            if position as usize >= capacity.n_positions() {
                return Err(ForwardError::PositionOutOfRange { position, n_ctx: capacity.n_positions() });
            }
            batch.push(BatchToken { id, seq, pos, output: true });
        }
        Ok(batch)
    }
}
