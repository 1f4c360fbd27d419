//! Which of the sequences that wait get a place in the KV cache, and where.

use std::cmp::Reverse;

use metal_attention_model::SnapshotError;

use crate::ForwardError;
use crate::prefix_store::n_common;

use super::engine::{Engine, RunningSequence};
use super::scheduled_sequence::ScheduledSequence;
use super::sequence_pool::{CachedPrefix, longest_prefix};
use super::{Client, FinishReason, Metrics, Request};

/// Tokens that a sequence waits for while another one evaluates them.
const WORTH_WAITING: usize = 16;

/// Texts of one client that are looked at for one that need not wait for another.
const LOOK_AHEAD: usize = 32;

/// Where a sequence can run.
enum Placement {
    /// In this sequence, which holds so many of its tokens already.
    InSequence(usize, usize),
    /// Later: a sequence that begins alike is being evaluated, and sharing is cheaper than evaluating twice.
    AwaitPrefix,
    /// There is no room now.
    NoCapacity,
}

/// What came of looking for a sequence of a client that can have a place.
enum AdmissionOutcome {
    /// One has a place, or ended without needing one.
    Admitted,
    /// Each of its sequences had better wait for another one.
    AllAwaitPrefix,
    /// There is no room now for the one whose turn it is.
    NoCapacity,
}

/// Whether the KV cache refused a sequence because others take the pages or the recurrent states that it needs.
pub(super) fn is_capacity_error(error: &SnapshotError) -> bool {
    matches!(error, SnapshotError::Forward(ForwardError::OutOfPages { .. } | ForwardError::OutOfStates { .. }))
}

impl<'t> Engine<'t> {
    /// Gives places to sequences and embeddings as long as there is room. Clients take turns: who runs least comes first. Of
    /// sequences and embeddings those come first that did not have the last room: what needs much would never find it, if
    /// what needs little always came before.
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

    /// Gives places to sequences, to those of a client that lost theirs first. False where one waits for room in the cache.
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

    /// The client whose turn it is among those with sequences that wait, without those that were `passed` over.
    fn next_client(&self, passed: &[Client]) -> Option<Client> {
        let queue = self.shared.queue();
        let waiting = queue.generations.clients().chain(self.preempted.iter().map(|sequence| sequence.client));
        let waiting = waiting.filter(|client| !passed.contains(client));
        waiting.min_by_key(|&client| (self.n_running(client), self.client_ring.rank(client)))
    }

    /// Texts of `client` that run.
    pub(super) fn n_running(&self, client: Client) -> usize {
        self.running.iter().filter(|r| r.sequence.client == client).count()
    }

    /// Gives a place to the first sequence of `client` that need not wait for another one.
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
                &sequence.ids,
                sequence.next_prompt_logprob().unwrap_or(sequence.ids.len() - 1),
            ) {
                Placement::InSequence(seq, n) => {
                    self.start(sequence, seq, n);
                    return AdmissionOutcome::Admitted;
                }
                Placement::AwaitPrefix => {
                    self.preempted.insert(at, sequence);
                    at += 1;
                }
                Placement::NoCapacity => {
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
            match self.find_placement(client, prompt, if prompt_logprobs.is_some() { 0 } else { prompt.len() - 1 }) {
                Placement::InSequence(seq, n) => {
                    let sequence = self.new_sequence(submission);
                    self.start(sequence, seq, n);
                    return AdmissionOutcome::Admitted;
                }
                Placement::AwaitPrefix => self.shared.queue().generations.put_back(client, at, submission),
                Placement::NoCapacity => {
                    self.shared.queue().generations.put_back(client, at, submission);
                    return AdmissionOutcome::NoCapacity;
                }
            }
        }
        AdmissionOutcome::AllAwaitPrefix
    }

    fn start(&mut self, mut sequence: ScheduledSequence<'t>, seq: usize, n_cached: usize) {
        if sequence.admit(n_cached) {
            self.count(|metrics| metrics.cached_tokens += n_cached as u64);
        }
        self.client_ring.served(sequence.client);
        self.generations_first = false;
        // What it finds in the cache is no progress of its own.
        sequence.max_evaluated = sequence.max_evaluated.max(n_cached);
        self.running.push(RunningSequence { sequence, seq, progressed_at: None, prompt_end_is_kept: false });
    }

    /// Begins embeddings, one for each client at a time. False where one waits for room in the cache.
    fn admit_embeddings(&mut self) -> bool {
        // One more than sequences, so that a single client never has them all.
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

    /// Puts a sequence off for `client`: one of a client that has two places more, or any, where `client` has none. Only who
    /// has had its turn gives way, so that everybody gets on. What the KV cache holds of the sequence stays as long as there
    /// is room. False where nobody has to give way.
    fn preempt_for(&mut self, client: Client) -> bool {
        let had_turn =
            |r: &RunningSequence<'_>| r.progressed_at.is_some_and(|since| since.elapsed() >= self.options.turn);
        let others = self.running.iter().enumerate().filter(|(_, r)| r.sequence.client != client && had_turn(r));
        let longest = others.max_by_key(|(_, r)| (self.n_running(r.sequence.client), Reverse(r.progressed_at)));
        let own = self.n_running(client);
        let Some((i, _)) = longest.filter(|(_, r)| own == 0 || self.n_running(r.sequence.client) >= own + 2) else {
            return false;
        };
        self.preempt(i);
        true
    }

    /// Takes the `i`-th sequence's place: it waits for another one. Returns its sequence, which keeps the sequence as a finished one.
    pub(super) fn preempt(&mut self, i: usize) -> usize {
        let RunningSequence { mut sequence, seq, .. } = self.running.remove(i);
        self.sequences.keep(seq, sequence.client, sequence.ids[..self.pass.n_past(seq)].to_vec());
        tracing::debug!("sequence {} gives its place up after {} tokens", sequence.number, sequence.ids.len());
        sequence.max_evaluated = sequence.max_evaluated.max(self.pass.n_past(seq));
        let at = self.preempted.partition_point(|earlier| earlier.number < sequence.number);
        self.preempted.insert(at, sequence);
        self.count(|metrics| metrics.preemptions += 1);
        seq
    }

    pub(super) fn count(&self, count: impl FnOnce(&mut Metrics)) {
        count(&mut self.shared.metrics());
    }

    /// Finds a sequence for a sequence of `client`, with as much of it as the KV cache holds anywhere, `most` tokens at most: what
    /// is after them is evaluated in any case. The logits of the last token, at least, choose the next one.
    fn find_placement(&mut self, client: Client, ids: &[u32], most: usize) -> Placement {
        let n_tokens = ids.len() + 1;
        let ids = &ids[..most];
        let evaluated = self.running.iter().map(|r| (r.seq, &r.sequence.ids[..self.pass.n_past(r.seq)]));
        let prefix =
            longest_prefix(ids, evaluated.chain(self.sequences.all_idle()), |seq, n| self.pass.reachable(seq, n));
        let cached = prefix.map_or(0, |prefix| prefix.n_tokens);
        let is_prompt = |r: &RunningSequence<'_>| r.sequence.ids.len() > self.pass.n_past(r.seq) + 1;
        let comes = |(i, r): (usize, &RunningSequence<'_>)| {
            let n = n_common(ids, &r.sequence.ids);
            // A sequence that has all of its client's share of a step is as fast as this one would be.
            let has_share = |r: &RunningSequence<'_>| {
                !self.running[..i].iter().any(|o| o.sequence.client == r.sequence.client && is_prompt(o))
            };
            n > self.pass.n_past(r.seq) && n >= cached + WORTH_WAITING && (r.sequence.client == client || has_share(r))
        };
        if self.running.iter().enumerate().any(comes) {
            return Placement::AwaitPrefix;
        }
        let page_len = self.pass.cache_pages().page_len;
        if self.fits(n_tokens, None)
            && let Some(stored) = self.store.find(&mut *self.pass, client, ids)
            && stored.n_tokens >= cached + page_len
        {
            // What goes to make room for it does not take its place.
            self.store.touch(stored);
            if let Some(seq) = self.fresh_sequence(n_tokens) {
                let restored = self.restore(|engine| engine.store.restore(&mut *engine.pass, seq, stored));
                let is_there = restored.unwrap_or_else(|error| {
                    tracing::warn!("a prompt's beginning is evaluated again: {error}");
                    false
                });
                return Placement::InSequence(seq, if is_there { stored.n_tokens } else { 0 });
            }
        }
        // A finished sequence that the new one continues goes on where it is. Others stay as they are, if they can.
        let continued = prefix.filter(|p| self.sequences.idle(p.seq).is_some_and(|idle| idle.len() == p.n_tokens));
        if let Some(kept) = continued
            && self.free_pages_for(n_tokens.saturating_sub(kept.n_tokens), Some(kept))
        {
            self.sequences.occupy(kept.seq);
            return Placement::InSequence(kept.seq, kept.n_tokens);
        }
        if let Some(prefix) = prefix.filter(|_| continued.is_none())
            // Only whole pages are shared for good.
            && let Some(seq) = self.fresh_sequence_beside(n_tokens - prefix.n_tokens / page_len * page_len, prefix)
        {
            match self.pass.share_prefix(prefix.seq, seq, prefix.n_tokens) {
                Ok(n) => {
                    self.sequences.touch(prefix.seq);
                    self.sequences.occupy(seq);
                    return Placement::InSequence(seq, n);
                }
                Err(why) => tracing::warn!("a prompt's beginning is evaluated again: {why}"),
            }
        }
        // What the sequence shares with a finished one is kept, and the rest of that is given up.
        if let Some(prefix) = prefix
            && let Some(owner) = self.sequences.owner(prefix.seq)
            && self.fits(n_tokens.saturating_sub(prefix.n_tokens), Some(prefix))
        {
            self.store_idle(prefix.seq);
            let n = self.pass.rewind(prefix.seq, prefix.n_tokens);
            self.sequences.keep(prefix.seq, owner, ids[..n].to_vec());
            if self.free_pages_for(n_tokens.saturating_sub(n), Some(CachedPrefix { n_tokens: n, ..prefix })) {
                self.sequences.occupy(prefix.seq);
                return Placement::InSequence(prefix.seq, n);
            }
        }
        match self.fresh_sequence(n_tokens) {
            Some(seq) => Placement::InSequence(seq, 0),
            None => Placement::NoCapacity,
        }
    }

    /// An empty sequence and pages for `n_tokens` tokens; `None`, and nothing is given up, where there is no room now.
    pub(super) fn fresh_sequence(&mut self, n_tokens: usize) -> Option<usize> {
        let seq = self.sequences.empty().or_else(|| self.sequences.oldest_idle(None))?;
        if !self.fits(n_tokens, None) {
            return None;
        }
        self.store_and_evict(seq);
        self.free_pages_for(n_tokens, None);
        self.sequences.occupy(seq);
        Some(seq)
    }

    /// What `restore` comes to, which puts a sequence into a sequence. Where windows or recurrent states have no room for it, whose use
    /// [`fits`](Self::fits) does not know, idle sequences are given up until they have.
    pub(super) fn restore<T>(
        &mut self,
        mut restore: impl FnMut(&mut Self) -> Result<T, SnapshotError>,
    ) -> Result<T, SnapshotError> {
        loop {
            let outcome = restore(self);
            let has_no_room = outcome.as_ref().is_err_and(is_capacity_error);
            match self.sequences.oldest_idle(None) {
                Some(seq) if has_no_room => self.store_and_evict(seq),
                Some(_) | None => return outcome,
            }
        }
    }

    /// An empty sequence beside that of `prefix`, and pages for `n_tokens` tokens; `None`, and nothing is given up, where there
    /// is no room now.
    fn fresh_sequence_beside(&mut self, n_tokens: usize, prefix: CachedPrefix) -> Option<usize> {
        let seq = self.sequences.empty().or_else(|| self.sequences.oldest_idle(Some(prefix.seq)))?;
        let whole = CachedPrefix { n_tokens: self.pass.n_past(prefix.seq), ..prefix };
        if !self.fits(n_tokens, Some(whole)) {
            return None;
        }
        self.store_and_evict(seq);
        self.free_pages_for(n_tokens, Some(whole)).then_some(seq)
    }

    /// Pages that `n_tokens` tokens take besides those that what runs will need soon, so that a newcomer does not lose its place
    /// again at once.
    fn pages_needed(&self, n_tokens: usize) -> usize {
        let page_len = self.pass.cache_pages().page_len;
        let of = |n: usize| n.div_ceil(page_len);
        let soon = |n: usize| (n + page_len).min(self.pass.n_ctx());
        let running = self.running.iter().map(|r| (r.seq, soon(r.sequence.ids.len())));
        let embeddings = self.embeddings.iter().map(|run| (run.seq, run.n_tokens()));
        let missing = running.chain(embeddings).map(|(seq, n)| of(n).saturating_sub(of(self.pass.n_past(seq))));
        missing.sum::<usize>() + of(n_tokens)
    }

    /// Whether there are pages for `n_tokens` tokens once all idle sequences are given up but the beginning `kept` of one. Where
    /// nothing runs there are.
    fn fits(&self, n_tokens: usize, kept: Option<CachedPrefix>) -> bool {
        if self.running.is_empty() && self.embeddings.is_empty() {
            return true;
        }
        let sequences = self.running.iter().map(|r| r.seq);
        let busy: Vec<_> = sequences.chain(self.embeddings.iter().map(|run| run.seq)).collect();
        let n_busy = self.pass.pages_held(&busy);
        let pages = self.pass.cache_pages();
        let of_kept = kept.filter(|kept| !busy.contains(&kept.seq)).map_or(0, |CachedPrefix { seq, n_tokens: n }| {
            let both: Vec<_> = busy.iter().copied().chain([seq]).collect();
            // Those that it shares with what runs are its first.
            let own = self.pass.pages_held(&both) - n_busy;
            own.saturating_sub(self.pass.n_past(seq).div_ceil(pages.page_len) - n.div_ceil(pages.page_len))
        });
        pages.total - n_busy - of_kept >= self.pages_needed(n_tokens)
    }

    /// Gives idle sequences up, but the one of which `kept` is the beginning, until there are pages for `n_tokens` tokens. False, and
    /// nothing is given up, where that is not enough; where nothing runs it is.
    fn free_pages_for(&mut self, n_tokens: usize, kept: Option<CachedPrefix>) -> bool {
        if !self.fits(n_tokens, kept) {
            return false;
        }
        while self.pass.cache_pages().free < self.pages_needed(n_tokens)
            && let Some(seq) = self.sequences.oldest_idle(kept.map(|kept| kept.seq))
        {
            self.store_and_evict(seq);
        }
        true
    }
}
