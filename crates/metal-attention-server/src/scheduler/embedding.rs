//! Embeddings: a chunk of a text between the steps of the others.

use metal_attention::{BatchToken, ForwardError};

use super::engine::Engine;
use super::queue::EmbeddingRequest;

/// An embedding that is being made.
pub(super) struct EmbeddingRun {
    request: EmbeddingRequest,
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

    pub fn is_abandoned(&self) -> bool {
        self.request.answer.is_closed()
    }
}

impl Engine<'_> {
    /// Gives the next embedding that waits a sequence, where none is being made and there is room.
    pub(super) fn start_embedding(&mut self) {
        if self.embedding.is_some() {
            return;
        }
        let Some(request) = self.shared.queue().embeddings.pop_front() else { return };
        match self.fresh_sequence(request.ids.len()) {
            Some(seq) => {
                let sum = vec![0.0; self.pass.spec().n_embd];
                self.embedding = Some(EmbeddingRun { request, seq, sum });
            }
            None => self.shared.queue().embeddings.push_front(request),
        }
    }

    /// Evaluates the next chunk of the embedding that is being made.
    pub(super) fn embed(&mut self) {
        let most = self.pace.prompt_tokens(0, !self.running.is_empty());
        let Self { pass, model, embedding: Some(run), .. } = self else { return };
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
        match pass.forward_traced(&batch, Some(&mut add)) {
            Ok(_) => {
                self.count(|metrics| {
                    metrics.count_step(batch.len());
                    metrics.embedding_tokens += batch.len() as u64;
                });
                self.finish_embedding();
            }
            Err(ForwardError::OutOfPages { .. }) => match self.slots.oldest_idle(None) {
                Some(seq) => self.evict(seq),
                None => self.put_embedding_off(),
            },
            Err(why) => {
                if let Some(run) = self.drop_embedding() {
                    self.count(|metrics| metrics.requests.failed += 1);
                    let _ = run.request.answer.send(Err(why.into()));
                }
            }
        }
    }

    /// Answers the embedding, where all its tokens were evaluated.
    fn finish_embedding(&mut self) {
        let done = |run: &mut EmbeddingRun| self.pass.n_past(run.seq) == run.n_tokens();
        let Some(run) = self.embedding.take_if(done) else { return };
        self.evict(run.seq);
        self.count(|metrics| metrics.requests.embeddings += 1);
        let _ = run.request.answer.send(Ok(unit(&run.sum)));
    }

    /// Forgets the embedding, whose client is gone or will hear why.
    pub(super) fn drop_embedding(&mut self) -> Option<EmbeddingRun> {
        let run = self.embedding.take()?;
        self.evict(run.seq);
        Some(run)
    }

    /// Gives the embedding's pages up; it begins again when there is room.
    pub(super) fn put_embedding_off(&mut self) {
        if let Some(run) = self.drop_embedding() {
            self.shared.queue().embeddings.push_front(run.request);
        }
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
