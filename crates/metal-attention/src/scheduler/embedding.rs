//! Embeddings, reranker scores and logits of whole sequences: each step of the engine evaluates one chunk of one of
//! them.
//!
//! All three are called embeddings in the scheduler: their result is one vector, and nothing is sampled.

use crate::{BatchToken, ForwardError, Pooled};

use super::batch_sizer::MAX_LOGITS_BYTES;
use super::engine::Engine;
use super::queue::{EmbeddingRequest, RequestedOutput};
use super::{Client, RequestError};

/// An embedding in progress.
pub(super) struct EmbeddingRun {
    /// The request.
    request: EmbeddingRequest,
    /// Number in the order of admission; larger is younger.
    admission_number: u64,
    /// Index of its cache sequence.
    pub cache_seq: usize,
    /// The result so far.
    output: PartialOutput,
}

/// The result of an embedding, as far as it was evaluated.
enum PartialOutput {
    /// The sum of hidden states, of an embedding or a reranker's scores.
    Pooled(Pooled),
    /// Logits, `[n_tokens, n_vocab]`.
    Logits(Vec<f32>),
}

impl EmbeddingRun {
    /// Tokens of the whole sequence.
    pub fn n_tokens(&self) -> usize {
        self.request.ids.len()
    }

    /// Owner of the request.
    pub fn client(&self) -> Client {
        self.request.client
    }

    /// Whether the client has dropped its future.
    pub fn is_abandoned(&self) -> bool {
        self.request.answer.is_closed()
    }

    /// Sends an error to the client.
    pub fn fail(mut self, why: RequestError) {
        drop(self.request.ticket.take());
        let _ = self.request.answer.send(Err(why));
    }
}

impl Engine<'_> {
    /// Starts an embedding in the busy, empty cache sequence `seq`.
    pub(super) fn start_embedding(&mut self, request: EmbeddingRequest, seq: usize) {
        let output = match request.output {
            RequestedOutput::Embedding => PartialOutput::Pooled(self.pooler.begin()),
            RequestedOutput::Logits(_) => PartialOutput::Logits(Vec::new()),
        };
        self.n_started += 1;
        self.embeddings.push_back(EmbeddingRun { request, admission_number: self.n_started, cache_seq: seq, output });
    }

    /// Evaluates one chunk of the next embedding, and moves that to the end of the list. If pages run out, it evicts an
    /// idle cache sequence or preempts an embedding; the chunk is tried again later. Another error fails the embedding.
    pub(super) fn embed(&mut self) {
        // A step is kept short if other embeddings, or sequences, which are evaluated after it, wait for its end.
        let max_tokens = self.batch_sizer.max_prefill_tokens(0, !self.running.is_empty() || self.embeddings.len() > 1);
        let Self { pass, pooler, embeddings, .. } = self;
        let Some(run) = embeddings.front_mut() else { return };
        let start = pass.n_past(run.cache_seq);
        let n_tokens = run.n_tokens();
        let token = |(i, &id): (usize, &u32)| {
            let pos = start + i;
            let logits = match run.request.output {
                RequestedOutput::Embedding => pooler.needs(pos, n_tokens),
                RequestedOutput::Logits(from) => pos >= from,
            };
            BatchToken { id, seq: run.cache_seq, pos, output: logits }
        };
        let rest = &run.request.ids[start..];
        let max_tokens = match run.request.output {
            // Without a causal mask, every token attends to all others: the sequence is evaluated in one batch.
            _ if !pass.spec().is_causal() => rest.len(),
            RequestedOutput::Embedding => max_tokens,
            RequestedOutput::Logits(_) => max_tokens.min(MAX_LOGITS_BYTES / (4 * pass.spec().n_vocab)).max(1),
        };
        let batch: Vec<_> = rest.iter().take(max_tokens).enumerate().map(token).collect();
        let evaluated = match &mut run.output {
            PartialOutput::Pooled(pooled) => pass.forward_hidden(&batch).map(|states| pooled.add(&states)),
            PartialOutput::Logits(rows) => {
                pass.forward(&batch).map(|new| (0..new.n_rows()).for_each(|i| rows.extend_from_slice(new.row(i))))
            }
        };
        let is_done = pass.n_past(run.cache_seq) == run.n_tokens();
        self.embeddings.rotate_left(1);
        let at = self.embeddings.len() - 1;
        match evaluated {
            Ok(()) => {
                self.update_metrics(|metrics| {
                    metrics.count_step(batch.len());
                    metrics.embedding_tokens += batch.len() as u64;
                });
                if is_done {
                    self.finish_embedding(at);
                }
            }
            Err(ForwardError::OutOfPages { .. } | ForwardError::OutOfStates { .. }) => {
                match self.cache_sequences.least_recently_used_idle(None) {
                    Some(seq) => self.store_and_evict(seq),
                    None => self.preempt_embedding(),
                }
            }
            Err(why) => {
                self.update_metrics(|metrics| metrics.requests.failed += 1);
                self.drop_embedding(at, why.into());
            }
        }
    }

    /// Sends the result of the embedding with index `i`, all of whose tokens are evaluated. NaN or infinite results are
    /// an error; in logits, rows without any finite number.
    fn finish_embedding(&mut self, i: usize) {
        let Some(mut run) = self.embeddings.remove(i) else { return };
        self.evict(run.cache_seq);
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
        self.update_metrics(|metrics| match &answer {
            Ok(_) => metrics.requests.embeddings += 1,
            Err(_) => metrics.requests.failed += 1,
        });
        let _ = run.request.answer.send(answer);
    }

    /// Fails the embedding with index `i`.
    pub(super) fn drop_embedding(&mut self, i: usize, why: RequestError) {
        let Some(run) = self.embeddings.remove(i) else { return };
        self.evict(run.cache_seq);
        run.fail(why);
    }

    /// Preempts the embedding that was started last: its request returns to the front of its client's queue and starts
    /// from nothing.
    pub(super) fn preempt_embedding(&mut self) {
        let last = self.embeddings.iter().enumerate().max_by_key(|(_, run)| run.admission_number).map(|(i, _)| i);
        let Some(run) = last.and_then(|i| self.embeddings.remove(i)) else { return };
        self.evict(run.cache_seq);
        self.shared.queue().embeddings.put_back(run.client(), 0, run.request);
    }
}
