//! Replicas: several schedulers of one model, and the choice of one for each request.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::prompt::PrefixKey;
use crate::speculation::SpeculativePass;
use crate::{HostSnapshot, Model};

use super::queue::RequestedOutput;
use super::{
    BlockId, BlockSpan, CacheCapacity, CacheEvent, CacheObserver, Client, Events, Metrics, Request, Scheduler,
    SchedulerOptions, SchedulerParts, SequenceProgress, SlotError, StartError, SubmitError, VectorFuture,
};

/// Schedulers of one model, each with its own thread, forward pass, slots and KV cache.
///
/// A request goes to the replica whose KV cache holds the most whole pages of its prompt; among equals, to the one with
/// the least load. A replica with [`SchedulerOptions::n_parallel`] or more requests above the least loaded one is tried
/// last: evaluating its pages a second time elsewhere is faster than waiting. A replica whose engine has panicked gets
/// no more requests.
#[derive(Clone)]
pub struct Replicas {
    /// The replicas; at least one.
    all: Arc<[Replica]>,
    /// Slots of each replica.
    n_parallel: usize,
    /// Positions of a KV page.
    page_len: usize,
}

/// One replica.
struct Replica {
    /// Its scheduler.
    scheduler: Scheduler,
    /// The pages that its KV cache holds.
    held: Arc<Mutex<HeldPages>>,
}

/// The pages that a replica's KV cache holds, each by a hash of all tokens and spans up to its end.
#[derive(Debug, Default)]
struct HeldPages {
    /// The hash of each block.
    of_block: HashMap<BlockId, u64>,
    /// All hashes.
    hashes: HashSet<u64>,
}

/// The hash of a page with these tokens and parts of spans, after the pages with hash `before`.
fn page_hash(before: u64, tokens: &[u32], spans: impl Iterator<Item = BlockSpan>) -> u64 {
    let mut hasher = DefaultHasher::new();
    (before, tokens).hash(&mut hasher);
    spans.for_each(|span| span.hash(&mut hasher));
    hasher.finish()
}

/// The hashes of a prompt's whole pages. The last token is left out: it is always evaluated.
fn page_hashes(prompt: PrefixKey<'_>, page_len: usize) -> Vec<u64> {
    let (tokens, page_len) = (&prompt.ids[..prompt.len().saturating_sub(1)], page_len.max(1));
    let mut hash = 0;
    let up_to = tokens.chunks_exact(page_len).enumerate().map(|(i, page)| {
        let start = i * page_len;
        hash = page_hash(hash, page, BlockSpan::of_block(prompt.spans, start, start + page_len));
        hash
    });
    up_to.collect()
}

impl HeldPages {
    /// Applies a change of the KV cache.
    fn add(&mut self, event: CacheEvent) {
        match event {
            CacheEvent::Stored { parent, blocks, tokens, spans } => {
                let page_len = tokens.len() / blocks.len().max(1);
                let mut hash = parent.and_then(|parent| self.of_block.get(&parent).copied()).unwrap_or(0);
                for (block, page) in blocks.into_iter().zip(tokens.chunks_exact(page_len.max(1))) {
                    let in_block = spans.iter().filter(|(of, _)| *of == block).map(|(_, span)| *span);
                    hash = page_hash(hash, page, in_block);
                    self.of_block.insert(block, hash);
                    self.hashes.insert(hash);
                }
            }
            CacheEvent::Removed { blocks } => {
                for hash in blocks.iter().filter_map(|block| self.of_block.remove(block)) {
                    self.hashes.remove(&hash);
                }
            }
        }
    }

    /// Number of pages, from the prompt's start, that are held.
    fn n_common(&self, hashes: &[u64]) -> usize {
        hashes.iter().take_while(|hash| self.hashes.contains(hash)).count()
    }
}

impl Replica {
    /// Locks the held pages.
    fn held(&self) -> MutexGuard<'_, HeldPages> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The data by which replicas are ordered for a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ReplicaCandidate {
    /// Index of the replica.
    replica: usize,
    /// Whole pages of the prompt that it holds.
    n_held: usize,
    /// Its unfinished requests.
    load: usize,
}

/// Indices of the replicas in the order in which a request is offered to them.
fn by_preference(mut candidates: Vec<ReplicaCandidate>, n_parallel: usize) -> Vec<usize> {
    let least = candidates.iter().map(|c| c.load).min().unwrap_or(0);
    candidates.sort_by_key(|c| {
        let is_behind = c.load >= least.saturating_add(n_parallel);
        (is_behind, Reverse(if is_behind { 0 } else { c.n_held }), c.load, c.replica)
    });
    candidates.into_iter().map(|c| c.replica).collect()
}

impl Replicas {
    /// Starts a scheduler over each of `passes`, equal forward passes of `model` with equal drafters. An error if there are none, or a
    /// scheduler does not start. Only with several replicas are their KV caches observed.
    pub fn start(
        passes: Vec<SpeculativePass>,
        model: &Arc<Model>,
        options: &SchedulerOptions,
    ) -> Result<Self, StartError> {
        let Some(first) = passes.first() else {
            return Err(StartError::Option { option: "replicas", value: 0, allowed: "at least 1".into() });
        };
        let page_len = first.pass.cache_pages().page_len;
        let is_observed = passes.len() > 1;
        let start = |SpeculativePass { pass, drafter }: SpeculativePass| {
            let held = Arc::new(Mutex::new(HeldPages::default()));
            let observed = Arc::clone(&held);
            let (model, options) = (Arc::clone(model), options.clone());
            let observer: CacheObserver =
                Box::new(move |event| observed.lock().unwrap_or_else(PoisonError::into_inner).add(event));
            let parts = SchedulerParts { observer: is_observed.then_some(observer), drafter };
            Ok(Replica { scheduler: Scheduler::start_with(pass, model, options, parts)?, held })
        };
        let all = passes.into_iter().map(start).collect::<Result<Vec<_>, StartError>>()?;
        Ok(Self { all: all.into(), n_parallel: options.n_parallel, page_len })
    }

    /// Number of replicas.
    pub fn n_replicas(&self) -> usize {
        self.all.len()
    }

    /// Slots of all replicas together.
    pub fn n_slots(&self) -> usize {
        self.all.len().saturating_mul(self.n_parallel)
    }

    /// Number of replicas whose engine has panicked.
    pub fn n_failed(&self) -> usize {
        self.all.iter().filter(|replica| replica.scheduler.defect().is_some()).count()
    }

    /// An error if a request for `n_sequences` sequences exceeds the slots and queues of all replicas, so that it could
    /// never be run.
    pub fn check_n_sequences(&self, n_sequences: usize) -> Result<(), SubmitError> {
        let (mut n_queue, mut n_parallel) = (0usize, 0usize);
        for replica in &*self.all {
            let (queue, parallel) = replica.scheduler.queue_limits();
            n_queue = n_queue.saturating_add(queue);
            n_parallel = n_parallel.saturating_add(parallel);
        }
        let max = n_queue.saturating_add(n_parallel);
        if n_sequences <= max {
            return Ok(());
        }
        self.counted(Err(SubmitError::TooManySequences { n_sequences, max, n_parallel, n_queue }))
    }

    /// Whether a replica would accept a request of `client` now ([`Scheduler::check_capacity`]).
    pub fn check_capacity(&self, client: Client) -> Result<(), SubmitError> {
        self.counted(self.push_to_first(&[], |scheduler| scheduler.check_capacity(client)))
    }

    /// Submits a generation request ([`Scheduler::submit`]) to the best replica that accepts it.
    pub fn submit(&self, request: Request) -> Result<Events, SubmitError> {
        let prepared = self.counted(self.all[0].scheduler.prepare_generation(request))?;
        let (submission, events) = prepared;
        let hashes = if self.all.len() > 1 { page_hashes(submission.key(), self.page_len) } else { Vec::new() };
        let mut submission = Some(submission);
        self.counted(self.push_to_first(&hashes, |scheduler| scheduler.push_generation(&mut submission)))?;
        Ok(events)
    }

    /// Submits a sequence of `client` for its embedding or a reranker's scores ([`Scheduler::embed`]).
    pub fn embed(&self, client: Client, ids: Vec<u32>) -> Result<VectorFuture, SubmitError> {
        let prepared =
            self.counted(self.all[0].scheduler.prepare_embedding(client, ids, RequestedOutput::Embedding))?;
        let (request, vector) = prepared;
        let mut request = Some(request);
        self.counted(self.push_to_first(&[], |scheduler| scheduler.push_embedding(&mut request)))?;
        Ok(vector)
    }

    /// Offers a request to the replicas in order of preference until one accepts it. If none does, the error is that of
    /// the first.
    fn push_to_first(
        &self,
        hashes: &[u64],
        mut push: impl FnMut(&Scheduler) -> Result<(), SubmitError>,
    ) -> Result<(), SubmitError> {
        let alive = self.all.iter().enumerate().filter(|(_, r)| self.all.len() == 1 || r.scheduler.defect().is_none());
        let candidates = alive.map(|(replica, r)| ReplicaCandidate {
            replica,
            n_held: r.held().n_common(hashes),
            load: r.scheduler.n_unfinished(),
        });
        let mut refused = None;
        for replica in by_preference(candidates.collect(), self.n_parallel) {
            match push(&self.all[replica].scheduler) {
                Ok(()) => return Ok(()),
                Err(why) => refused = refused.or(Some(why)),
            }
        }
        Err(refused.unwrap_or(SubmitError::EngineFailed))
    }

    /// Counts a refused request once, however many replicas refused it.
    fn counted<T>(&self, outcome: Result<T, SubmitError>) -> Result<T, SubmitError> {
        self.all[0].scheduler.counted(outcome)
    }

    /// The name of their drafters ([`Scheduler::drafter`]).
    pub fn drafter(&self) -> Option<&'static str> {
        self.all[0].scheduler.drafter()
    }

    /// Announces a request to all replicas ([`Scheduler::announce`]).
    pub fn announce(&self) {
        for replica in &*self.all {
            replica.scheduler.announce();
        }
    }

    /// The sums of all replicas' metrics.
    pub fn metrics(&self) -> Metrics {
        let mut sum = Metrics::default();
        for replica in &*self.all {
            sum.add(&replica.scheduler.metrics());
        }
        sum
    }

    /// The progress in each slot, replica by replica; `None`: the slot is free.
    pub fn slots(&self) -> Vec<Option<SequenceProgress>> {
        let of_replica = |replica: &Replica| {
            let mut sequences: Vec<_> = replica.scheduler.metrics().sequences.into_iter().map(Some).collect();
            sequences.resize(self.n_parallel, None);
            sequences
        };
        self.all.iter().flat_map(of_replica).collect()
    }

    /// A snapshot of the sequence in a slot ([`Scheduler::save_slot`]).
    pub async fn save_slot(&self, slot: usize) -> Result<HostSnapshot, SlotError> {
        let (scheduler, slot) = self.slot(slot)?;
        scheduler.save_slot(slot).await
    }

    /// Restores a snapshot on the replica of a slot ([`Scheduler::restore_slot`]).
    pub async fn restore_slot(&self, slot: usize, client: Client, snapshot: HostSnapshot) -> Result<(), SlotError> {
        self.slot(slot)?.0.restore_slot(client, snapshot).await
    }

    /// Evicts the sequence in a slot ([`Scheduler::erase_slot`]).
    pub async fn erase_slot(&self, slot: usize) -> Result<usize, SlotError> {
        let (scheduler, slot) = self.slot(slot)?;
        scheduler.erase_slot(slot).await
    }

    /// The capacity of each replica's KV cache.
    pub fn cache_capacity(&self) -> CacheCapacity {
        self.all[0].scheduler.cache_capacity()
    }

    /// The scheduler of a slot, and the slot's number there.
    fn slot(&self, slot: usize) -> Result<(&Scheduler, usize), SlotError> {
        let replica = self.all.get(slot / self.n_parallel.max(1));
        let replica = replica.ok_or(SlotError::NoSuchSlot { slot, last: self.n_slots().saturating_sub(1) })?;
        Ok((&replica.scheduler, slot % self.n_parallel.max(1)))
    }

    /// Closes all queues and returns when all requests are finished; those that are not after `grace` are cancelled.
    pub async fn shut_down(&self, grace: Duration) {
        for replica in &*self.all {
            replica.scheduler.close(grace);
        }
        for replica in &*self.all {
            replica.scheduler.wait_for_end().await;
        }
    }

    /// The message of the first replica's panic, if all engines have panicked.
    pub fn defect(&self) -> Option<Arc<str>> {
        let defects: Option<Vec<_>> = self.all.iter().map(|replica| replica.scheduler.defect()).collect();
        defects?.into_iter().next()
    }

    /// Waits until all engines have panicked; never returns while one runs.
    pub async fn wait_for_defect(&self) -> Arc<str> {
        let mut why = None;
        for replica in &*self.all {
            let defect = replica.scheduler.wait_for_defect().await;
            why.get_or_insert(defect);
        }
        match why {
            Some(why) => why,
            None => std::future::pending().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ContentHash, SpanKey};

    #[test]
    fn pages_are_known_by_all_tokens_up_to_their_end() {
        let mut held = HeldPages::default();
        let stored = |parent: Option<u64>, blocks: &[u64], tokens: &[u32]| CacheEvent::Stored {
            parent: parent.map(BlockId),
            blocks: blocks.iter().map(|&id| BlockId(id)).collect(),
            tokens: tokens.to_vec(),
            spans: Vec::new(),
        };
        let page_hashes = |ids: &[u32], page_len| page_hashes(PrefixKey { ids, spans: &[] }, page_len);
        held.add(stored(None, &[0, 1], &[1, 2, 3, 4]));
        held.add(stored(Some(0), &[2], &[9, 9]));
        let n_common = |held: &HeldPages, prompt: &[u32]| held.n_common(&page_hashes(prompt, 2));
        assert_eq!(page_hashes(&[1, 2, 3, 4, 5], 2).len(), 2);
        assert_eq!(page_hashes(&[], 2), [] as [u64; 0]);
        assert_eq!(n_common(&held, &[1, 2, 3, 4, 5]), 2);
        // The last token is evaluated anew.
        assert_eq!(n_common(&held, &[1, 2, 3, 4]), 1);
        assert_eq!(n_common(&held, &[1, 2, 9, 9, 9]), 2);
        assert_eq!(n_common(&held, &[3, 4, 9, 9, 9]), 0);
        held.add(CacheEvent::Removed { blocks: vec![BlockId(1)] });
        assert_eq!((n_common(&held, &[1, 2, 3, 4, 5]), n_common(&held, &[1, 2, 9, 9, 9])), (1, 2));
        held.add(CacheEvent::Removed { blocks: vec![BlockId(2), BlockId(0)] });
        assert!(held.of_block.is_empty() && held.hashes.is_empty());
    }

    #[test]
    fn pages_with_spans_are_known_by_their_hashes_and_offsets() {
        let mut held = HeldPages::default();
        let span = |start, end, hash| SpanKey { start, end, hash: ContentHash([hash; 32]) };
        let ids = [1, 7, 7, 7, 2, 2, 3];
        let blocks: Vec<_> = [0, 1, 2].map(BlockId).into();
        let parts = |block: usize| BlockSpan::of_block(&[span(1, 4, 8)], 2 * block, 2 * block + 2).collect::<Vec<_>>();
        let spans = (0..3).flat_map(|i| parts(i).into_iter().map(move |part| (BlockId(i as u64), part))).collect();
        held.add(CacheEvent::Stored { parent: None, blocks, tokens: ids[..6].to_vec(), spans });
        let n_common = |spans: &[SpanKey]| held.n_common(&page_hashes(PrefixKey { ids: &ids, spans }, 2));
        assert_eq!(n_common(&[span(1, 4, 8)]), 3);
        assert_eq!((n_common(&[span(1, 4, 9)]), n_common(&[])), (0, 0));
        // The second page has two rows in each case, from the third of a span on, or from its first.
        assert_eq!((n_common(&[span(1, 2, 8), span(2, 4, 8)]), n_common(&[span(1, 4, 8), span(4, 6, 8)])), (1, 2));
    }

    #[test]
    fn pages_come_before_load_until_a_replica_falls_behind() {
        let order = |known: &[(usize, usize)]| {
            let candidate =
                |(replica, &(n_held, load)): (usize, &(usize, usize))| ReplicaCandidate { replica, n_held, load };
            by_preference(known.iter().enumerate().map(candidate).collect(), 4)
        };
        assert_eq!(order(&[(0, 0), (0, 0)]), [0, 1]);
        assert_eq!(order(&[(0, 1), (0, 0)]), [1, 0]);
        assert_eq!(order(&[(2, 3), (1, 0)]), [0, 1]);
        assert_eq!(order(&[(2, 4), (1, 0)]), [1, 0]);
        assert_eq!(order(&[(2, 9), (2, 6), (0, 6)]), [1, 0, 2]);
        assert_eq!(order(&[]), [] as [usize; 0]);
    }
}
