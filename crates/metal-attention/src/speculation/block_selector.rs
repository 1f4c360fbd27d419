//! [`BlockSelector`]: chooses a path through the candidates of a block's places (DFlash-2).

use metal_attention_model::{SelectorWeights, TopK};

/// Chooses the drafts of a block: of each place the candidate that fits best behind the one chosen before. It works on the host,
/// since a choice is `top_k` products of `rank` elements.
pub(super) struct BlockSelector {
    weights: SelectorWeights,
    /// From a row to factors, `[rank, n_embd]`.
    hidden: Vec<f32>,
}

impl BlockSelector {
    /// The selector with these weights.
    pub(super) fn new(weights: &SelectorWeights) -> Self {
        Self { weights: weights.clone(), hidden: weights.hidden.to_f32() }
    }

    /// Number of candidates of a place.
    pub(super) fn top_k(&self) -> usize {
        self.weights.top_k
    }

    /// The drafts that follow `ids`, of which there is at least one. Of each place: `candidates`, the likeliest tokens with their
    /// logits, and its row after the output norm in `rows`, `[n_places, n_embd]`. Ends at a place without candidates.
    pub(super) fn choose(&self, ids: &[u32], candidates: &[TopK], rows: &[f32]) -> Vec<u32> {
        let SelectorWeights { hidden, predecessor, successor, .. } = &self.weights;
        let n_embd = hidden.row_len();
        let mut before = ids.last().copied().unwrap_or_default();
        let mut drafts = Vec::with_capacity(candidates.len());
        for (candidates, row) in candidates.iter().zip(rows.chunks_exact(n_embd)) {
            let factors: Vec<f32> = {
                let of_before = row_of(predecessor, before);
                let products = self.hidden.chunks_exact(n_embd).map(|weights| dot(weights, row));
                products.zip(of_before).map(|(product, of_before)| product * of_before).collect()
            };
            let score = |&(id, logit): &(u32, f32)| (id, logit + dot(&row_of(successor, id), &factors));
            // The first of the best: candidates are in the order of their logits.
            let better = |best: (u32, f32), next: (u32, f32)| if next.1 > best.1 { next } else { best };
            let Some((best, _)) = candidates.iter().map(score).reduce(better) else { break };
            drafts.push(best);
            before = best;
        }
        drafts
    }

    /// Bytes that it holds beside the file.
    pub(super) fn bytes(&self) -> usize {
        size_of::<f32>() * self.hidden.len()
    }
}

/// Row `id` of a table.
fn row_of(table: &metal_attention_gguf::Tensor, id: u32) -> Vec<f32> {
    let id = id as usize;
    table.rows(id..id + 1).to_f32()
}

/// The dot product, with eight sums.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let ((a, rest_a), (b, rest_b)) = (a.as_chunks::<8>(), b.as_chunks::<8>());
    let mut sums = [0.0; 8];
    for (a, b) in a.iter().zip(b) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    sums.iter().sum::<f32>() + rest_a.iter().zip(rest_b).map(|(a, b)| a * b).sum::<f32>()
}
