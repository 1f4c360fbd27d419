//! Embeddings: a chunk of a text between the steps of the others.

use metal_attention::{BatchToken, ForwardError};

use super::engine::Engine;
use super::queue::EmbeddingRequest;
use super::{Client, RequestError};

/// An embedding that is being made.
pub(super) struct EmbeddingRun {
    request: EmbeddingRequest,
    /// Counts embeddings in the order in which they began.
    number: u64,
    /// Its sequence.
    pub seq: usize,
    /// Sum of the normed states so far, `[n_embd]`.
    sum: Vec<f64>,
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
    pub fn fail(self, why: RequestError) {
        let _ = self.request.answer.send(Err(why));
    }
}

impl Engine<'_> {
    /// Begins an embedding in a sequence of its own.
    pub(super) fn begin_embedding(&mut self, request: EmbeddingRequest, seq: usize) {
        let sum = vec![0.0; self.pass.spec().n_embd];
        self.n_begun += 1;
        self.embeddings.push_back(EmbeddingRun { request, number: self.n_begun, seq, sum });
    }

    /// Evaluates the next chunk of the embedding whose turn it is.
    pub(super) fn embed(&mut self) {
        let most = self.pace.prompt_tokens(0, !self.running.is_empty() || self.embeddings.len() > 1);
        let Self { pass, model, embeddings, .. } = self;
        let Some(run) = embeddings.front_mut() else { return };
        let start = pass.n_past(run.seq);
        let token = |(i, &id): (usize, &u32)| BatchToken { id, seq: run.seq, pos: start + i, logits: false };
        let rest = &run.request.ids[start..];
        let batch: Vec<_> = rest.iter().take(most).enumerate().map(token).collect();
        let (n_embd, last) = (pass.spec().n_embd, pass.spec().n_layer() - 1);
        let (weight, eps) = (&model.weights().output_norm, f64::from(pass.spec().norm_eps));
        let sum = &mut run.sum;
        let mut add = |layer: usize, states: &[f32]| {
            if layer == last {
                states.chunks_exact(n_embd).for_each(|state| add_normed(state, weight, eps, sum));
            }
        };
        let evaluated = pass.forward_traced(&batch, Some(&mut add)).map(|_| ());
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
            Err(ForwardError::OutOfPages { .. }) => match self.slots.oldest_idle(None) {
                Some(seq) => self.evict(seq),
                None => self.put_embedding_off(),
            },
            Err(why) => {
                self.count(|metrics| metrics.requests.failed += 1);
                self.drop_embedding(at, why.into());
            }
        }
    }

    /// Answers the `i`-th embedding, all of whose tokens were evaluated.
    fn finish_embedding(&mut self, i: usize) {
        let Some(run) = self.embeddings.remove(i) else { return };
        self.evict(run.seq);
        self.count(|metrics| metrics.requests.embeddings += 1);
        let _ = run.request.answer.send(Ok(unit(&run.sum)));
    }

    /// Gives the `i`-th embedding up.
    pub(super) fn drop_embedding(&mut self, i: usize, why: RequestError) {
        let Some(run) = self.embeddings.remove(i) else { return };
        self.evict(run.seq);
        run.fail(why);
    }

    /// Takes the pages of the embedding that began last; it begins again when there is room.
    pub(super) fn put_embedding_off(&mut self) {
        let last = self.embeddings.iter().enumerate().max_by_key(|(_, run)| run.number).map(|(i, _)| i);
        let Some(run) = last.and_then(|i| self.embeddings.remove(i)) else { return };
        self.evict(run.seq);
        self.shared.queue().embeddings.put_back(run.client(), 0, run.request);
    }
}

/// Adds RMSNorm(`state`) times `weight` to `sum`.
fn add_normed(state: &[f32], weight: &[f32], eps: f64, sum: &mut [f64]) {
    let mean = state.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / state.len() as f64;
    let factor = 1.0 / (mean + eps).sqrt();
    for ((sum, &x), &w) in sum.iter_mut().zip(state).zip(weight) {
        *sum += f64::from(x) * factor * f64::from(w);
    }
}

/// `sum` divided by its length; zeros stay zeros.
fn unit(sum: &[f64]) -> Vec<f32> {
    let length = sum.iter().map(|x| x * x).sum::<f64>().sqrt();
    sum.iter().map(|x| if length > 0.0 { (x / length) as f32 } else { 0.0 }).collect()
}
