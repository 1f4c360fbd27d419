//! Embeddings, and logits of whole texts: a chunk of a text between the steps of the others.

use crate::{BatchToken, ForwardError, Pooled};

use super::engine::Engine;
use super::queue::{EmbeddingRequest, RequestedOutput};
use super::{Client, RequestError};

/// Most bytes of logits that one chunk gives.
pub(super) const MAX_LOGITS_BYTES: usize = 64 << 20;

/// An embedding that is being made.
pub(super) struct EmbeddingRun {
    request: EmbeddingRequest,
    /// Counts embeddings in the order in which they began.
    number: u64,
    /// Its sequence.
    pub seq: usize,
    output: PartialOutput,
}

/// What there is of the answer so far.
enum PartialOutput {
    /// What the states give.
    Pooled(Pooled),
    /// Logits, `[n_tokens, n_vocab]`.
    Logits(Vec<f32>),
}

impl EmbeddingRun {
    /// Tokens of the text.
    pub fn n_tokens(&self) -> usize {
        self.request.ids.len()
    }

    /// Who asked for it.
    pub fn client(&self) -> Client {
        self.request.client
    }

    pub fn is_abandoned(&self) -> bool {
        self.request.answer.is_closed()
    }

    /// Tells the client that it cannot be made.
    pub fn fail(mut self, why: RequestError) {
        drop(self.request.ticket.take());
        let _ = self.request.answer.send(Err(why));
    }
}

impl Engine<'_> {
    /// Begins an embedding in a sequence of its own.
    pub(super) fn start_embedding(&mut self, request: EmbeddingRequest, seq: usize) {
        let output = match request.output {
            RequestedOutput::Embedding => PartialOutput::Pooled(self.pooler.begin()),
            RequestedOutput::Logits(_) => PartialOutput::Logits(Vec::new()),
        };
        self.n_started += 1;
        self.embeddings.push_back(EmbeddingRun { request, number: self.n_started, seq, output });
    }

    /// Evaluates the next chunk of the embedding whose turn it is.
    pub(super) fn embed(&mut self) {
        let most = self.batch_sizer.prompt_tokens(0, !self.running.is_empty() || self.embeddings.len() > 1);
        let Self { pass, pooler, embeddings, .. } = self;
        let Some(run) = embeddings.front_mut() else { return };
        let start = pass.n_past(run.seq);
        let n_tokens = run.n_tokens();
        let token = |(i, &id): (usize, &u32)| {
            let pos = start + i;
            let logits = match run.request.output {
                RequestedOutput::Embedding => pooler.needs(pos, n_tokens),
                RequestedOutput::Logits(from) => pos >= from,
            };
            BatchToken { id, seq: run.seq, pos, logits }
        };
        let rest = &run.request.ids[start..];
        let most = match run.request.output {
            // Where a token sees those after it a text is one piece.
            _ if !pass.spec().is_causal() => rest.len(),
            RequestedOutput::Embedding => most,
            RequestedOutput::Logits(_) => most.min(MAX_LOGITS_BYTES / (4 * pass.spec().n_vocab)).max(1),
        };
        let batch: Vec<_> = rest.iter().take(most).enumerate().map(token).collect();
        let evaluated = match &mut run.output {
            PartialOutput::Pooled(pooled) => pass.forward_hidden(&batch).map(|states| pooled.add(&states)),
            PartialOutput::Logits(rows) => {
                pass.forward(&batch).map(|new| (0..new.n_rows()).for_each(|i| rows.extend_from_slice(new.row(i))))
            }
        };
        let is_done = pass.n_past(run.seq) == run.n_tokens();
        self.embeddings.rotate_left(1);
        let at = self.embeddings.len() - 1;
        match evaluated {
            Ok(()) => {
                self.count(|metrics| {
                    metrics.count_step(batch.len());
                    metrics.embedding_tokens += batch.len() as u64;
                });
                if is_done {
                    self.finish_embedding(at);
                }
            }
            Err(ForwardError::OutOfPages { .. } | ForwardError::OutOfStates { .. }) => {
                match self.sequences.oldest_idle(None) {
                    Some(seq) => self.store_and_evict(seq),
                    None => self.preempt_embedding(),
                }
            }
            Err(why) => {
                self.count(|metrics| metrics.requests.failed += 1);
                self.drop_embedding(at, why.into());
            }
        }
    }

    /// Answers the `i`-th embedding, all of whose tokens were evaluated.
    fn finish_embedding(&mut self, i: usize) {
        let Some(mut run) = self.embeddings.remove(i) else { return };
        self.evict(run.seq);
        drop(run.request.ticket.take());
        let n_vocab = self.pass.spec().n_vocab;
        let (vector, is_number) = match run.output {
            PartialOutput::Pooled(pooled) => {
                let vector = self.pooler.finish(pooled);
                let is_number = vector.iter().all(|x| x.is_finite());
                (vector, is_number)
            }
            PartialOutput::Logits(rows) => {
                let is_number = rows.chunks(n_vocab.max(1)).all(|row| row.iter().any(|logit| logit.is_finite()));
                (rows, is_number)
            }
        };
        let answer = if is_number { Ok(vector) } else { Err(RequestError::NoNumbers) };
        self.count(|metrics| match &answer {
            Ok(_) => metrics.requests.embeddings += 1,
            Err(_) => metrics.requests.failed += 1,
        });
        let _ = run.request.answer.send(answer);
    }

    /// Gives the `i`-th embedding up.
    pub(super) fn drop_embedding(&mut self, i: usize, why: RequestError) {
        let Some(run) = self.embeddings.remove(i) else { return };
        self.evict(run.seq);
        run.fail(why);
    }

    /// Takes the pages of the embedding that began last; it begins again when there is room.
    pub(super) fn preempt_embedding(&mut self) {
        let last = self.embeddings.iter().enumerate().max_by_key(|(_, run)| run.number).map(|(i, _)| i);
        let Some(run) = last.and_then(|i| self.embeddings.remove(i)) else { return };
        self.evict(run.seq);
        self.shared.queue().embeddings.put_back(run.client(), 0, run.request);
    }
}
