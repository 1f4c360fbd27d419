//! Parallelism over sequences, for small models: each thread evaluates some of the sequences of a micro-batch through all
//! layers.
//!
//! Otherwise every kernel is spread over the threads, which then synchronise several times per layer. A small model's layer
//! takes hardly longer than that. Its weights fit the cache of every core, so it costs little that each thread reads all of
//! them.

use std::ops::Range;

use metal_attention_model::{BatchToken, Profiler};

use crate::forward::{MicroBatchOutput, MicroBatchRun, Scratch};
use crate::kv_cache::{CacheElement, SharedKvCache};
use crate::layers::PreparedHead;
use crate::pool::ThreadPool;
use crate::shared::SharedMut;

/// The most bytes of weights of a small model.
const SMALL_MODEL: usize = 4 << 20;

/// The buffers for evaluating sequences in parallel.
pub(crate) struct SequenceParallel {
    /// The scratch buffers of each thread.
    scratch: Vec<Scratch>,
    /// A pool without workers: within its part of the micro-batch each thread works alone.
    alone: ThreadPool,
}

impl SequenceParallel {
    /// `None` where the model, of `weight_bytes`, is not small, or `pool` has one thread.
    ///
    /// # Errors
    ///
    /// See [`ThreadPool::new`].
    pub(crate) fn new(weight_bytes: usize, pool: &ThreadPool) -> std::io::Result<Option<Self>> {
        let n_threads = pool.n_threads();
        if weight_bytes > SMALL_MODEL || n_threads == 1 {
            return Ok(None);
        }
        let scratch = std::iter::repeat_with(Scratch::default).take(n_threads).collect();
        Ok(Some(Self { scratch, alone: ThreadPool::new(1)?.watched(pool.watch().clone()) }))
    }

    /// Bytes of all scratch buffers.
    pub(crate) fn bytes(&self) -> usize {
        self.scratch.iter().map(Scratch::bytes).sum()
    }

    /// Does what `run.forward` would do with `tokens` and `logits`, `[n_outputs, n_vocab]`, of `head`, but with a part of the sequences
    /// on each thread of the run's pool. Returns false, and does nothing, where the tokens cannot be divided evenly. After a
    /// cancellation the run's pool is cancelled, too.
    pub(crate) fn forward<E: CacheElement>(
        &mut self,
        run: &mut MicroBatchRun<'_>,
        caches: &[Option<&SharedKvCache<'_, E>>],
        tokens: &[BatchToken],
        head: &PreparedHead,
        mut logits: &mut [f32],
    ) -> bool {
        let Some(parts) = split_by_sequence(tokens, run.pool.n_threads()) else { return false };
        let (alone, clock) = (&self.alone, run.profiler.as_deref());
        alone.begin();
        let mut parts: Vec<_> = parts
            .into_iter()
            .zip(&mut self.scratch)
            .map(|(part, scratch)| {
                let rows = part.start * run.spec.n_embd..part.end * run.spec.n_embd;
                let (tokens, token_states) = (&tokens[part], run.token_states.get(rows).unwrap_or_default());
                let n = tokens.iter().filter(|t| t.output).count() * run.spec.n_vocab;
                let mine = logits.split_off_mut(..n).unwrap_or_default();
                (
                    Some((
                        MicroBatchRun { pool: alone, scratch, token_states, profiler: None, observer: None, ..*run },
                        tokens,
                        mine,
                    )),
                    None,
                )
            })
            .collect();
        let n = parts.len();
        let shared = SharedMut::new(&mut parts);
        run.pool.for_each(n, &|i| {
            // SAFETY: each part is accessed by one task.
            let (work, profiler) = unsafe { &mut shared.slice(i, 1)[0] };
            if let Some((run, tokens, logits)) = work.take() {
                *profiler = clock.map(Profiler::part);
                MicroBatchRun { profiler: profiler.as_mut(), ..run }.forward(
                    caches,
                    tokens,
                    MicroBatchOutput::Logits { head, logits },
                    None,
                );
            }
        });
        let profilers: Vec<_> = parts.into_iter().filter_map(|(_, profiler)| profiler).collect();
        if let Some(profiler) = &mut run.profiler {
            profiler.join(profilers);
        }
        if alone.is_cancelled() {
            run.pool.cancel();
        }
        true
    }
}

/// Divides a micro-batch into consecutive parts, one for each thread at most, with all tokens of a sequence in one part. `None`
/// where a sequence comes in two places, there would be one part, or the largest part would be more than 1.5 times the mean.
fn split_by_sequence(tokens: &[BatchToken], n_threads: usize) -> Option<Vec<Range<usize>>> {
    let mut parts = Vec::with_capacity(n_threads);
    let mut seen = Vec::new();
    let mut start = 0;
    let mut end = 0;
    for run in tokens.chunk_by(|t, u| t.seq == u.seq) {
        if seen.contains(&run[0].seq) {
            return None;
        }
        seen.push(run[0].seq);
        end += run.len();
        if (end - start) * (n_threads - parts.len()) >= tokens.len() - start {
            parts.push(start..end);
            start = end;
        }
    }
    let largest = parts.iter().map(Range::len).max()?;
    (parts.len() > 1 && 2 * largest * parts.len() <= 3 * tokens.len()).then_some(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(seqs: &[usize], n_threads: usize) -> Option<Vec<usize>> {
        let token = |&seq| BatchToken { id: 0, seq, pos: 0, output: true };
        let tokens: Vec<_> = seqs.iter().map(token).collect();
        let parts = split_by_sequence(&tokens, n_threads)?;
        let mut next = 0;
        for part in &parts {
            assert_eq!(part.start, next);
            next = part.end;
        }
        assert_eq!(next, tokens.len(), "every token is in a part");
        Some(parts.iter().map(Range::len).collect())
    }

    #[test]
    fn sequences_are_divided_evenly_among_threads() {
        let all: Vec<usize> = (0..16).rev().collect();
        assert_eq!(cut(&all, 2), Some(vec![8, 8]));
        assert_eq!(cut(&all, 3), Some(vec![6, 5, 5]));
        assert_eq!(cut(&all, 16), Some(vec![1; 16]));
        assert_eq!(cut(&all[..2], 2), Some(vec![1, 1]));
        assert_eq!(cut(&all[..3], 2), Some(vec![2, 1]));
        assert_eq!(cut(&all[..3], 8), Some(vec![1, 1, 1]));
        assert_eq!(cut(&[4, 4, 4, 7, 9, 9], 2), Some(vec![3, 3]));
    }

    #[test]
    fn a_batch_that_cannot_be_divided_evenly_stays_whole() {
        assert_eq!(cut(&[], 2), None);
        assert_eq!(cut(&[3], 2), None);
        assert_eq!(cut(&[3, 3, 3, 3], 2), None, "one sequence");
        assert_eq!(cut(&[1, 2, 1], 2), None, "a sequence comes back");
        assert_eq!(cut(&[0, 1, 2, 3, 3, 3, 3, 3, 3, 3, 3, 3], 2), None, "most of it is one prompt");
        assert_eq!(cut(&[0, 1, 2], 1), None, "one thread");
    }
}
