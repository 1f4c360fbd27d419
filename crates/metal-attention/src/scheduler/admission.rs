//! Admission: which waiting request runs next, and in which cache sequence.
//!
//! Clients are served in the order of [`ClientRing`](super::client_ring::ClientRing), those with the fewest running
//! sequences first. A new sequence shares the longest prefix that the KV cache or the prefix store has of it. Idle
//! cache sequences are evicted for it as far as needed; running sequences are preempted only for clients that have less
//! than their share.

use std::cmp::Reverse;

use metal_attention_model::SnapshotError;

use crate::ForwardError;
use crate::prompt::{PrefixKey, rewind};

use super::engine::{Engine, RunningSequence};
use super::scheduled_sequence::ScheduledSequence;
use super::sequence_pool::{CachedPrefix, longest_prefix};
use super::{Client, FinishReason, Metrics, Request};

/// A sequence waits for another one to evaluate a common prefix if that saves at least this many tokens.
const WORTH_WAITING: usize = 16;

/// Waiting requests of one client that are examined in search of one that need not wait for a common prefix.
const LOOK_AHEAD: usize = 32;

/// The cache sequence found for a sequence.
enum AdmissionPlacement {
    /// Index of the cache sequence, and how many of the tokens it holds already.
    InSequence(usize, usize),
    /// None for now: a running sequence is evaluating a common prefix, and sharing that is cheaper than evaluating it
    /// twice.
    AwaitPrefix,
    /// None: there are no free pages or cache sequences.
    NoCapacity,
}

/// The result of trying to admit a sequence of one client.
enum AdmissionOutcome {
    /// One was admitted, or ended without being evaluated.
    Admitted,
    /// Each examined one waits for a common prefix.
    AllAwaitPrefix,
    /// There is no capacity for the next one.
    NoCapacity,
}

/// Whether a snapshot was refused for want of free pages or recurrent states.
pub(super) fn is_capacity_error(error: &SnapshotError) -> bool {
    matches!(error, SnapshotError::Forward(ForwardError::OutOfPages { .. } | ForwardError::OutOfStates { .. }))
}

impl<'t> Engine<'t> {
    /// Admits waiting generations and embeddings as long as there is capacity. Whichever kind was not admitted last
    /// goes first: otherwise requests that need many pages would never be admitted while small ones keep coming.
    pub(super) fn admit(&mut self) {
        self.update_client_ring();
        if self.generations_first {
            if self.admit_generations() {
                self.admit_embeddings();
            }
        } else if self.admit_embeddings() {
            self.admit_generations();
        }
    }

    /// Sets the clients of the ring: those with a waiting or preempted request.
    fn update_client_ring(&mut self) {
        let queue = self.shared.queue();
        let preempted = self.preempted.iter().map(|sequence| sequence.client);
        let mut waiting: Vec<_> =
            queue.generations.clients().chain(queue.embeddings.clients()).chain(preempted).collect();
        drop(queue);
        waiting.sort_unstable();
        waiting.dedup();
        self.client_ring.update(&waiting);
    }

    /// Admits generations; preempted sequences of a client come before its new ones. False if the next one lacks
    /// capacity.
    fn admit_generations(&mut self) -> bool {
        let mut passed = Vec::new();
        while let Some(client) = self.next_client(&passed) {
            if self.running.len() == self.options.n_parallel && !self.preempt_for(client) {
                return true;
            }
            match self.admit_generation(client) {
                AdmissionOutcome::Admitted => {}
                AdmissionOutcome::AllAwaitPrefix => passed.push(client),
                AdmissionOutcome::NoCapacity if self.preempt_for(client) => {}
                AdmissionOutcome::NoCapacity => return false,
            }
        }
        true
    }

    /// The client to serve next among those with waiting generations, `passed` ones excluded.
    fn next_client(&self, passed: &[Client]) -> Option<Client> {
        let queue = self.shared.queue();
        let waiting = queue.generations.clients().chain(self.preempted.iter().map(|sequence| sequence.client));
        let waiting = waiting.filter(|client| !passed.contains(client));
        waiting.min_by_key(|&client| (self.n_running(client), self.client_ring.rank(client)))
    }

    /// Number of running sequences of `client`.
    pub(super) fn n_running(&self, client: Client) -> usize {
        self.running.iter().filter(|r| r.sequence.client == client).count()
    }

    /// Admits the first waiting sequence of `client` that need not wait for a common prefix.
    fn admit_generation(&mut self, client: Client) -> AdmissionOutcome {
        let mut at = 0;
        while let Some(sequence) = self.preempted.get(at) {
            if sequence.client != client {
                at += 1;
                continue;
            }
            let sequence = self.preempted.remove(at);
            match self.find_placement(
                client,
                sequence.key(),
                sequence.next_logprob_position().unwrap_or(sequence.ids.len() - 1),
            ) {
                AdmissionPlacement::InSequence(seq, n) => {
                    self.start(sequence, seq, n);
                    return AdmissionOutcome::Admitted;
                }
                AdmissionPlacement::AwaitPrefix => {
                    self.preempted.insert(at, sequence);
                    at += 1;
                }
                AdmissionPlacement::NoCapacity => {
                    self.preempted.insert(at, sequence);
                    return AdmissionOutcome::NoCapacity;
                }
            }
        }
        for at in 0..LOOK_AHEAD {
            let Some(submission) = self.shared.queue().generations.remove(client, at) else { break };
            let Request { prompt, max_tokens, prompt_logprobs, .. } = &submission.request;
            if *max_tokens == Some(0) && prompt_logprobs.is_none() {
                let sequence = self.new_sequence(submission);
                self.answer(sequence, Ok(FinishReason::Length));
                return AdmissionOutcome::Admitted;
            }
            let max_shared = if prompt_logprobs.is_some() { 0 } else { prompt.len() - 1 };
            match self.find_placement(client, submission.key(), max_shared) {
                AdmissionPlacement::InSequence(seq, n) => {
                    let sequence = self.new_sequence(submission);
                    self.start(sequence, seq, n);
                    return AdmissionOutcome::Admitted;
                }
                AdmissionPlacement::AwaitPrefix => self.shared.queue().generations.put_back(client, at, submission),
                AdmissionPlacement::NoCapacity => {
                    self.shared.queue().generations.put_back(client, at, submission);
                    return AdmissionOutcome::NoCapacity;
                }
            }
        }
        AdmissionOutcome::AllAwaitPrefix
    }

    /// Adds a sequence to the running ones, in cache sequence `seq`, which holds its first `n_cached` tokens.
    fn start(&mut self, mut sequence: ScheduledSequence<'t>, seq: usize, n_cached: usize) {
        if sequence.admit(n_cached) {
            self.update_metrics(|metrics| metrics.cached_tokens += n_cached as u64);
        }
        self.client_ring.served(sequence.client);
        self.generations_first = false;
        // Tokens that were in the cache are no progress of its own.
        sequence.furthest_evaluated = sequence.furthest_evaluated.max(n_cached);
        self.running.push(RunningSequence {
            sequence,
            cache_seq: seq,
            time_slice_start: None,
            prompt_end_is_kept: false,
        });
    }

    /// Starts embeddings, at most one of each client. False if the next one lacks capacity.
    fn admit_embeddings(&mut self) -> bool {
        // One more than there are slots, so that a single client never has them all.
        while self.embeddings.len() <= self.options.n_parallel {
            let queue = self.shared.queue();
            let busy = |client: &Client| self.embeddings.iter().any(|run| run.client() == *client);
            let waiting = queue.embeddings.clients().filter(|client| !busy(client));
            let next = waiting.min_by_key(|&client| self.client_ring.rank(client));
            drop(queue);
            let Some(client) = next else { return true };
            let Some(request) = self.shared.queue().embeddings.remove(client, 0) else { return true };
            let mut seq = self.fresh_sequence(request.ids.len());
            while seq.is_none() && self.preempt_for(client) {
                seq = self.fresh_sequence(request.ids.len());
            }
            let Some(seq) = seq else {
                self.shared.queue().embeddings.put_back(client, 0, request);
                return false;
            };
            self.start_embedding(request, seq);
            self.client_ring.served(client);
            self.generations_first = true;
        }
        true
    }

    /// Preempts a running sequence for `client`: one of a client that has at least two more running than `client`, or
    /// of any other client if `client` has none. Only sequences that have used up their time slice are preempted, so
    /// that each gets further. The preempted sequence's pages stay in the KV cache while there is capacity. False if no
    /// sequence qualifies.
    fn preempt_for(&mut self, client: Client) -> bool {
        let slice_is_over = |r: &RunningSequence<'_>| {
            r.time_slice_start.is_some_and(|since| since.elapsed() >= self.options.time_slice)
        };
        let others = self.running.iter().enumerate().filter(|(_, r)| r.sequence.client != client && slice_is_over(r));
        let candidate = others.max_by_key(|(_, r)| (self.n_running(r.sequence.client), Reverse(r.time_slice_start)));
        let n_own = self.n_running(client);
        let Some((i, _)) = candidate.filter(|(_, r)| n_own == 0 || self.n_running(r.sequence.client) >= n_own + 2)
        else {
            return false;
        };
        self.preempt(i);
        true
    }

    /// Preempts the running sequence with index `i`: it waits to be admitted again. Returns its cache sequence, now
    /// idle.
    pub(super) fn preempt(&mut self, i: usize) -> usize {
        let running = self.running.remove(i);
        let key = running.evaluated(&*self.pass).to_owned();
        let RunningSequence { mut sequence, cache_seq: seq, .. } = running;
        self.cache_sequences.keep(seq, sequence.client, key);
        tracing::debug!(
            "sequence {} gives its place up after {} tokens",
            sequence.admission_number,
            sequence.ids.len()
        );
        sequence.furthest_evaluated = sequence.furthest_evaluated.max(self.pass.n_past(seq));
        let at = self.preempted.partition_point(|earlier| earlier.admission_number < sequence.admission_number);
        self.preempted.insert(at, sequence);
        self.update_metrics(|metrics| metrics.preemptions += 1);
        seq
    }

    /// Updates the metrics under their lock.
    pub(super) fn update_metrics(&self, update: impl FnOnce(&mut Metrics)) {
        update(&mut self.shared.metrics());
    }

    /// Finds a cache sequence for a sequence of `client` with the key `key`, with as long a prefix of it as the KV
    /// cache or the store has, up to `max_shared` tokens; those after are evaluated in any case. At least the last
    /// token always is: its logits are sampled from.
    ///
    /// The result is the first of these that is possible:
    ///
    /// 1. wait for a running sequence that is evaluating a longer common prefix,
    /// 2. restore a prefix from the store that is at least a page longer than what the KV cache has,
    /// 3. continue an idle cache sequence whose tokens are all shared,
    /// 4. share the prefix's pages with a second cache sequence,
    /// 5. cut an idle cache sequence back to the common prefix, and continue that,
    /// 6. evaluate everything in an empty cache sequence.
    fn find_placement(&mut self, client: Client, key: PrefixKey<'_>, max_shared: usize) -> AdmissionPlacement {
        let n_tokens = key.len() + 1;
        let key = key.first(max_shared);
        let evaluated = self.running.iter().map(|r| (r.cache_seq, r.evaluated(&*self.pass)));
        let prefix =
            longest_prefix(key, evaluated.chain(self.cache_sequences.all_idle()), |seq, n| self.pass.reachable(seq, n));
        let cached = prefix.map_or(0, |prefix| prefix.n_tokens);
        let is_prompt = |r: &RunningSequence<'_>| r.sequence.ids.len() > self.pass.n_past(r.cache_seq) + 1;
        let is_coming = |(i, r): (usize, &RunningSequence<'_>)| {
            let n = key.n_common(r.sequence.key());
            // Waiting for a sequence of another client pays only if that gets all of its client's share of a step.
            let has_share = |r: &RunningSequence<'_>| {
                !self.running[..i].iter().any(|o| o.sequence.client == r.sequence.client && is_prompt(o))
            };
            n > self.pass.n_past(r.cache_seq)
                && n >= cached + WORTH_WAITING
                && (r.sequence.client == client || has_share(r))
        };
        if self.running.iter().enumerate().any(is_coming) {
            return AdmissionPlacement::AwaitPrefix;
        }
        let page_len = self.pass.cache_pages().page_len;
        if self.fits(n_tokens, None)
            && let Some(stored) = self.store.find(&mut *self.pass, client, key)
            && stored.n_tokens >= cached + page_len
        {
            // Marked as used, so that it is not evicted for its own restoration.
            self.store.touch(stored);
            if let Some(seq) = self.fresh_sequence(n_tokens) {
                let restored = self.restore(|engine| engine.store.restore(&mut *engine.pass, seq, stored));
                let is_there = restored.unwrap_or_else(|error| {
                    tracing::warn!("a prompt's beginning is evaluated again: {error}");
                    false
                });
                return AdmissionPlacement::InSequence(seq, if is_there { stored.n_tokens } else { 0 });
            }
        }
        // 3: all tokens of the idle cache sequence are shared.
        let continued =
            prefix.filter(|p| self.cache_sequences.idle(p.seq).is_some_and(|idle| idle.len() == p.n_tokens));
        if let Some(kept) = continued
            && self.free_pages_for(n_tokens.saturating_sub(kept.n_tokens), Some(kept))
        {
            self.cache_sequences.occupy(kept.seq);
            return AdmissionPlacement::InSequence(kept.seq, kept.n_tokens);
        }
        if let Some(prefix) = prefix.filter(|_| continued.is_none())
            // 4: a partly filled page is copied, so only whole pages save memory.
            && let Some(seq) = self.fresh_sequence_beside(n_tokens - prefix.n_tokens / page_len * page_len, prefix)
        {
            match self.pass.share_prefix(prefix.seq, seq, prefix.n_tokens) {
                Ok(n) => {
                    self.cache_sequences.touch(prefix.seq);
                    self.cache_sequences.occupy(seq);
                    return AdmissionPlacement::InSequence(seq, n);
                }
                Err(why) => tracing::warn!("a prompt's beginning is evaluated again: {why}"),
            }
        }
        // 5: the tokens after the common prefix go to the store.
        if let Some(prefix) = prefix
            && let Some(owner) = self.cache_sequences.owner(prefix.seq)
            && self.fits(n_tokens.saturating_sub(prefix.n_tokens), Some(prefix))
        {
            self.store_idle(prefix.seq);
            let n = rewind(&mut *self.pass, prefix.seq, key, prefix.n_tokens);
            self.cache_sequences.keep(prefix.seq, owner, key.first(n).to_owned());
            if self.free_pages_for(n_tokens.saturating_sub(n), Some(CachedPrefix { n_tokens: n, ..prefix })) {
                self.cache_sequences.occupy(prefix.seq);
                return AdmissionPlacement::InSequence(prefix.seq, n);
            }
        }
        match self.fresh_sequence(n_tokens) {
            Some(seq) => AdmissionPlacement::InSequence(seq, 0),
            None => AdmissionPlacement::NoCapacity,
        }
    }

    /// Empties a cache sequence and frees pages for `n_tokens` tokens. Returns its index, marked busy; `None`, with
    /// nothing evicted, if there is not enough capacity.
    pub(super) fn fresh_sequence(&mut self, n_tokens: usize) -> Option<usize> {
        let seq = self.cache_sequences.empty().or_else(|| self.cache_sequences.least_recently_used_idle(None))?;
        if !self.fits(n_tokens, None) {
            return None;
        }
        self.store_and_evict(seq);
        self.free_pages_for(n_tokens, None);
        self.cache_sequences.occupy(seq);
        Some(seq)
    }

    /// Runs `restore`, which puts a snapshot into a cache sequence. While windows or recurrent states are short, which
    /// [`fits`](Self::fits) does not count, it evicts an idle cache sequence and tries again.
    pub(super) fn restore<T>(
        &mut self,
        mut restore: impl FnMut(&mut Self) -> Result<T, SnapshotError>,
    ) -> Result<T, SnapshotError> {
        loop {
            let outcome = restore(self);
            let lacks_capacity = outcome.as_ref().is_err_and(is_capacity_error);
            match self.cache_sequences.least_recently_used_idle(None) {
                Some(seq) if lacks_capacity => self.store_and_evict(seq),
                Some(_) | None => return outcome,
            }
        }
    }

    /// Empties a cache sequence other than that of `prefix`, and frees pages for `n_tokens` tokens. `None`, with
    /// nothing evicted, if there is not enough capacity.
    fn fresh_sequence_beside(&mut self, n_tokens: usize, prefix: CachedPrefix) -> Option<usize> {
        let seq =
            self.cache_sequences.empty().or_else(|| self.cache_sequences.least_recently_used_idle(Some(prefix.seq)))?;
        let all_evaluated = CachedPrefix { n_tokens: self.pass.n_past(prefix.seq), ..prefix };
        if !self.fits(n_tokens, Some(all_evaluated)) {
            return None;
        }
        self.store_and_evict(seq);
        self.free_pages_for(n_tokens, Some(all_evaluated)).then_some(seq)
    }

    /// Pages for `n_tokens` tokens plus those that running sequences (one page more than they have tokens for) and
    /// embeddings (all tokens) still lack, so that a new sequence is not preempted again at once.
    fn pages_needed(&self, n_tokens: usize) -> usize {
        let page_len = self.pass.cache_pages().page_len;
        let pages_for = |n: usize| n.div_ceil(page_len);
        let soon = |n: usize| (n + page_len).min(self.pass.n_ctx());
        let running = self.running.iter().map(|r| (r.cache_seq, soon(r.sequence.ids.len())));
        let embeddings = self.embeddings.iter().map(|run| (run.cache_seq, run.n_tokens()));
        let missing =
            running.chain(embeddings).map(|(seq, n)| pages_for(n).saturating_sub(pages_for(self.pass.n_past(seq))));
        missing.sum::<usize>() + pages_for(n_tokens)
    }

    /// Whether `n_tokens` tokens fit once all idle cache sequences are evicted, except the prefix `kept` of one. Always
    /// true while nothing runs: then one sequence may fill the cache.
    fn fits(&self, n_tokens: usize, kept: Option<CachedPrefix>) -> bool {
        if self.running.is_empty() && self.embeddings.is_empty() {
            return true;
        }
        let sequences = self.running.iter().map(|r| r.cache_seq);
        let busy: Vec<_> = sequences.chain(self.embeddings.iter().map(|run| run.cache_seq)).collect();
        let n_busy = self.pass.pages_held(&busy);
        let pages = self.pass.cache_pages();
        let of_kept = kept.filter(|kept| !busy.contains(&kept.seq)).map_or(0, |CachedPrefix { seq, n_tokens: n }| {
            let both: Vec<_> = busy.iter().copied().chain([seq]).collect();
            // The pages that it shares with busy ones are its first.
            let n_pages = self.pass.pages_held(&both) - n_busy;
            n_pages.saturating_sub(self.pass.n_past(seq).div_ceil(pages.page_len) - n.div_ceil(pages.page_len))
        });
        pages.total - n_busy - of_kept >= self.pages_needed(n_tokens)
    }

    /// Evicts idle cache sequences, except that of `kept`, until `n_tokens` tokens fit. False, with nothing evicted, if
    /// evicting all of them would not be enough.
    fn free_pages_for(&mut self, n_tokens: usize, kept: Option<CachedPrefix>) -> bool {
        if !self.fits(n_tokens, kept) {
            return false;
        }
        while self.pass.cache_pages().free < self.pages_needed(n_tokens)
            && let Some(seq) = self.cache_sequences.least_recently_used_idle(kept.map(|kept| kept.seq))
        {
            self.store_and_evict(seq);
        }
        true
    }
}
