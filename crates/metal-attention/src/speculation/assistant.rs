//! [`AssistantDrafter`]: drafts of an assistant, which attends to the keys and values of the target model.
//!
//! An assistant is evaluated by the target's own session ([`ForwardPass::forward_assistant`]), to which [`attach`] attaches it. All
//! drafts of a sequence have the same position, that behind the last token that the target has evaluated: only the token and the
//! state change from one to the next. So nothing has to be kept, but for the target's state of the last position.
//!
//! [`attach`]: AssistantDrafter::attach

use metal_attention_gguf::GgufFile;
use metal_attention_model::{AssistantToken, ForwardError, ForwardPass, LoadedModel, MemoryUse};

use super::{Draft, DraftLogits, DraftRequest, Drafter, Evaluated};
use crate::backends::BackendPass;
use crate::{EngineOptions, Error, Model};

/// Proposes drafts with the assistant that is attached to the target.
pub struct AssistantDrafter {
    /// The hidden rows of the target that are the first states: those after the output norm.
    reads: [usize; 1],
    /// Width of a state.
    n_embd: usize,
    /// What is known of each sequence of the target; `None`: nothing.
    last: Vec<Option<LastState>>,
}

/// The target's state of the last position of a sequence that it has evaluated.
struct LastState {
    /// Tokens of the sequence up to it.
    n: usize,
    /// The last one.
    id: u32,
    /// `[n_embd]`.
    state: Vec<f32>,
}

impl AssistantDrafter {
    /// Loads the assistant in `file` beside `model` and attaches it to `target`, a forward pass of that model. The embedding table is
    /// shared with it.
    ///
    /// # Errors
    /// The file is no assistant for this model, or damaged; it does not fit in memory; several devices share `target`.
    pub fn attach(
        model: &Model,
        file: &GgufFile,
        target: &mut dyn BackendPass,
        options: &EngineOptions,
    ) -> Result<Self, Error> {
        target.attach_assistant(&LoadedModel::load_assistant(file, model.loaded())?, options)?;
        Ok(Self::new(target))
    }

    /// A drafter for `target`, to which an assistant is attached.
    pub fn new(target: &dyn ForwardPass) -> Self {
        let spec = target.spec();
        let last = (0..target.n_seq()).map(|_| None).collect();
        Self { reads: [spec.n_layer() + 1], n_embd: spec.n_embd, last }
    }

    /// The last token of a request, and the target's state before it. `None`: nothing is to be proposed, the state is not known, or
    /// the sequence has no room.
    fn first_input(
        &self,
        target: &dyn ForwardPass,
        request: &DraftRequest<'_>,
    ) -> Result<Option<(u32, &[f32])>, ForwardError> {
        let &DraftRequest { seq, ids, prediction: _, n } = request;
        let last = self.last.get(seq).ok_or(ForwardError::SequenceOutOfRange { seq, n_seq: self.last.len() })?;
        let (Some(last), [evaluated @ .., id]) = (last, ids) else { return Ok(None) };
        let n_past = evaluated.len();
        let is_known = last.n == n_past && evaluated.last() == Some(&last.id) && target.n_past(seq) == n_past;
        Ok((n > 0 && is_known && n_past < target.n_ctx()).then_some((*id, &last.state[..])))
    }
}

impl Drafter for AssistantDrafter {
    fn name(&self) -> &'static str {
        "gemma4-assistant"
    }

    fn reads_hidden(&self) -> &[usize] {
        &self.reads
    }

    fn observe(&mut self, evaluated: Evaluated<'_>) -> Result<(), ForwardError> {
        let Evaluated { seq, first, ids, hidden } = evaluated;
        let n_seq = self.last.len();
        let last = self.last.get_mut(seq).ok_or(ForwardError::SequenceOutOfRange { seq, n_seq })?;
        let states = hidden.first().copied().unwrap_or_default();
        let expected = ids.len() * self.n_embd;
        if states.len() != expected {
            return Err(ForwardError::WrongStates { found: states.len(), expected });
        }
        if let Some(&id) = ids.last() {
            let state = states[expected - self.n_embd..].to_vec();
            *last = Some(LastState { n: first + ids.len(), id, state });
        }
        Ok(())
    }

    fn forget(&mut self, seq: usize) {
        if let Some(last) = self.last.get_mut(seq) {
            *last = None;
        }
    }

    fn propose(&mut self, _: &[DraftRequest<'_>]) -> Result<Vec<Draft>, ForwardError> {
        Err(ForwardError::NoAssistantDraft {
            why: "it attends to the keys and values of its target, which is not given",
        })
    }

    fn propose_beside(
        &mut self,
        target: &mut dyn ForwardPass,
        requests: &[DraftRequest<'_>],
        mut logits: Option<DraftLogits<'_>>,
    ) -> Result<Vec<Draft>, ForwardError> {
        let mut drafts = vec![Draft::default(); requests.len()];
        // The requests whose drafts go on, with the token after each and its state.
        let (mut open, mut tokens, mut states) = (Vec::new(), Vec::new(), Vec::new());
        for (r, request) in requests.iter().enumerate() {
            if let Some((id, state)) = self.first_input(target, request)? {
                open.push(r);
                tokens.push(AssistantToken { id, seq: request.seq });
                states.extend_from_slice(state);
            }
        }
        while !open.is_empty() {
            let found = target.forward_assistant(&tokens, &states, logits.is_some())?;
            if let Some(pass_on) = &mut logits {
                let rows = found.logits.chunks_exact(target.spec().n_vocab);
                open.iter().zip(rows).for_each(|(&r, row)| pass_on(r, drafts[r].ids.len(), row));
            }
            let (ended, rows) = (std::mem::take(&mut open), found.states.chunks_exact(self.n_embd));
            tokens.clear();
            states.clear();
            for ((r, id), state) in ended.into_iter().zip(found.ids).zip(rows) {
                drafts[r].ids.push(id);
                if drafts[r].ids.len() < requests[r].n {
                    open.push(r);
                    tokens.push(AssistantToken { id, seq: requests[r].seq });
                    states.extend_from_slice(state);
                }
            }
        }
        Ok(drafts)
    }

    /// The states alone: the assistant is counted with the target, to which it is attached.
    fn memory_use(&self) -> MemoryUse {
        let bytes = self.last.iter().flatten().map(|last| size_of::<f32>() * last.state.capacity()).sum::<usize>();
        MemoryUse { scratch: bytes as u64, ..MemoryUse::default() }
    }
}
