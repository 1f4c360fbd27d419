//! Which of the texts that wait get a place in the KV cache, and where.

use std::cmp::Reverse;

use metal_attention_model::SnapshotError;

use crate::ForwardError;
use crate::prefix_store::n_common;

use super::engine::{Engine, Running};
use super::slots::{Prefix, longest_prefix};
use super::text::Text;
use super::{Client, FinishReason, Metrics, Request};

/// Tokens that a text waits for while another one evaluates them.
const WORTH_WAITING: usize = 16;

/// Texts of one client that are looked at for one that need not wait for another.
const LOOK_AHEAD: usize = 32;

/// Where a text can run.
enum Place {
    /// In this sequence, which holds so many of its tokens already.
    At(usize, usize),
    /// Later: a text that begins alike is being evaluated, and sharing is cheaper than evaluating twice.
    Later,
    /// There is no room now.
    Full,
}

/// What came of looking for a text of a client that can have a place.
enum Admission {
    /// One has a place, or ended without needing one.
    Done,
    /// Each of its texts had better wait for another one.
    Later,
    /// There is no room now for the one whose turn it is.
    Full,
}

/// Whether the KV cache refused a text because others take the pages or the recurrent states that it needs.
pub(super) fn is_no_room(error: &SnapshotError) -> bool {
    matches!(error, SnapshotError::Forward(ForwardError::OutOfPages { .. } | ForwardError::OutOfStates { .. }))
}

impl<'t> Engine<'t> {
    /// Gives places to texts and embeddings as long as there is room. Clients take turns: who runs least comes first. Of
    /// texts and embeddings those come first that did not have the last room: what needs much would never find it, if
    /// what needs little always came before.
    pub(super) fn admit(&mut self) {
        self.update_turns();
        if self.texts_first {
            if self.admit_texts() {
                self.admit_embeddings();
            }
        } else if self.admit_embeddings() {
            self.admit_texts();
        }
    }

    fn update_turns(&mut self) {
        let queue = self.shared.queue();
        let preempted = self.preempted.iter().map(|text| text.client);
        let mut waiting: Vec<_> = queue.texts.clients().chain(queue.embeddings.clients()).chain(preempted).collect();
        drop(queue);
        waiting.sort_unstable();
        waiting.dedup();
        self.turns.update(&waiting);
    }

    /// Gives places to texts, to those of a client that lost theirs first. False where one waits for room in the cache.
    fn admit_texts(&mut self) -> bool {
        let mut passed = Vec::new();
        while let Some(client) = self.next_client(&passed) {
            if self.running.len() == self.options.n_parallel && !self.make_way(client) {
                return true;
            }
            match self.admit_text(client) {
                Admission::Done => {}
                Admission::Later => passed.push(client),
                Admission::Full if self.make_way(client) => {}
                Admission::Full => return false,
            }
        }
        true
    }

    /// The client whose turn it is among those with texts that wait, without those that were `passed` over.
    fn next_client(&self, passed: &[Client]) -> Option<Client> {
        let queue = self.shared.queue();
        let waiting = queue.texts.clients().chain(self.preempted.iter().map(|text| text.client));
        let waiting = waiting.filter(|client| !passed.contains(client));
        waiting.min_by_key(|&client| (self.n_running(client), self.turns.of(client)))
    }

    /// Texts of `client` that run.
    pub(super) fn n_running(&self, client: Client) -> usize {
        self.running.iter().filter(|r| r.text.client == client).count()
    }

    /// Gives a place to the first text of `client` that need not wait for another one.
    fn admit_text(&mut self, client: Client) -> Admission {
        let mut at = 0;
        while let Some(text) = self.preempted.get(at) {
            if text.client != client {
                at += 1;
                continue;
            }
            let text = self.preempted.remove(at);
            match self.place(client, &text.ids, text.next_scored().unwrap_or(text.ids.len() - 1)) {
                Place::At(seq, n) => {
                    self.start(text, seq, n);
                    return Admission::Done;
                }
                Place::Later => {
                    self.preempted.insert(at, text);
                    at += 1;
                }
                Place::Full => {
                    self.preempted.insert(at, text);
                    return Admission::Full;
                }
            }
        }
        for at in 0..LOOK_AHEAD {
            let Some(submission) = self.shared.queue().texts.take(client, at) else { break };
            let Request { prompt, max_tokens, prompt_logprobs, .. } = &submission.request;
            if *max_tokens == Some(0) && prompt_logprobs.is_none() {
                let text = self.new_text(submission);
                self.answer(text, Ok(FinishReason::Length));
                return Admission::Done;
            }
            match self.place(client, prompt, if prompt_logprobs.is_some() { 0 } else { prompt.len() - 1 }) {
                Place::At(seq, n) => {
                    let text = self.new_text(submission);
                    self.start(text, seq, n);
                    return Admission::Done;
                }
                Place::Later => self.shared.queue().texts.put_back(client, at, submission),
                Place::Full => {
                    self.shared.queue().texts.put_back(client, at, submission);
                    return Admission::Full;
                }
            }
        }
        Admission::Later
    }

    fn start(&mut self, mut text: Text<'t>, seq: usize, n_cached: usize) {
        if text.admit(n_cached) {
            self.count(|metrics| metrics.cached_tokens += n_cached as u64);
        }
        self.turns.served(text.client);
        self.texts_first = false;
        // What it finds in the cache is no progress of its own.
        text.reached = text.reached.max(n_cached);
        self.running.push(Running { text, seq, since: None, turn_is_kept: false });
    }

    /// Begins embeddings, one for each client at a time. False where one waits for room in the cache.
    fn admit_embeddings(&mut self) -> bool {
        // One more than texts, so that a single client never has them all.
        while self.embeddings.len() <= self.options.n_parallel {
            let queue = self.shared.queue();
            let busy = |client: &Client| self.embeddings.iter().any(|run| run.client() == *client);
            let waiting = queue.embeddings.clients().filter(|client| !busy(client));
            let next = waiting.min_by_key(|&client| self.turns.of(client));
            drop(queue);
            let Some(client) = next else { return true };
            let Some(request) = self.shared.queue().embeddings.take(client, 0) else { return true };
            let mut seq = self.fresh_sequence(request.ids.len());
            while seq.is_none() && self.make_way(client) {
                seq = self.fresh_sequence(request.ids.len());
            }
            let Some(seq) = seq else {
                self.shared.queue().embeddings.put_back(client, 0, request);
                return false;
            };
            self.begin_embedding(request, seq);
            self.turns.served(client);
            self.texts_first = true;
        }
        true
    }

    /// Puts a text off for `client`: one of a client that has two places more, or any, where `client` has none. Only who
    /// has had its turn gives way, so that everybody gets on. What the KV cache holds of the text stays as long as there
    /// is room. False where nobody has to give way.
    fn make_way(&mut self, client: Client) -> bool {
        let had_turn = |r: &Running<'_>| r.since.is_some_and(|since| since.elapsed() >= self.options.turn);
        let others = self.running.iter().enumerate().filter(|(_, r)| r.text.client != client && had_turn(r));
        let longest = others.max_by_key(|(_, r)| (self.n_running(r.text.client), Reverse(r.since)));
        let own = self.n_running(client);
        let Some((i, _)) = longest.filter(|(_, r)| own == 0 || self.n_running(r.text.client) >= own + 2) else {
            return false;
        };
        self.put_off(i);
        true
    }

    /// Takes the `i`-th text's place: it waits for another one. Returns its sequence, which keeps the text as a finished one.
    pub(super) fn put_off(&mut self, i: usize) -> usize {
        let Running { mut text, seq, .. } = self.running.remove(i);
        self.slots.keep(seq, text.client, text.ids[..self.pass.n_past(seq)].to_vec());
        tracing::debug!("text {} gives its place up after {} tokens", text.number, text.ids.len());
        text.reached = text.reached.max(self.pass.n_past(seq));
        let at = self.preempted.partition_point(|earlier| earlier.number < text.number);
        self.preempted.insert(at, text);
        self.count(|metrics| metrics.preemptions += 1);
        seq
    }

    pub(super) fn count(&self, count: impl FnOnce(&mut Metrics)) {
        count(&mut self.shared.metrics());
    }

    /// Finds a sequence for a text of `client`, with as much of it as the KV cache holds anywhere, `most` tokens at most: what
    /// is after them is evaluated in any case. The logits of the last token, at least, choose the next one.
    fn place(&mut self, client: Client, ids: &[u32], most: usize) -> Place {
        let n_tokens = ids.len() + 1;
        let ids = &ids[..most];
        let evaluated = self.running.iter().map(|r| (r.seq, &r.text.ids[..self.pass.n_past(r.seq)]));
        let prefix = longest_prefix(ids, evaluated.chain(self.slots.all_idle()), |seq, n| self.pass.reachable(seq, n));
        let cached = prefix.map_or(0, |prefix| prefix.n);
        let is_prompt = |r: &Running<'_>| r.text.ids.len() > self.pass.n_past(r.seq) + 1;
        let comes = |(i, r): (usize, &Running<'_>)| {
            let n = n_common(ids, &r.text.ids);
            // A text that has all of its client's share of a step is as fast as this one would be.
            let has_share =
                |r: &Running<'_>| !self.running[..i].iter().any(|o| o.text.client == r.text.client && is_prompt(o));
            n > self.pass.n_past(r.seq) && n >= cached + WORTH_WAITING && (r.text.client == client || has_share(r))
        };
        if self.running.iter().enumerate().any(comes) {
            return Place::Later;
        }
        let page_len = self.pass.cache_pages().page_len;
        if self.fits(n_tokens, None)
            && let Some(stored) = self.store.find(&mut *self.pass, client, ids)
            && stored.n >= cached + page_len
        {
            // What goes to make room for it does not take its place.
            self.store.touch(stored);
            if let Some(seq) = self.fresh_sequence(n_tokens) {
                let restored = self.restore(|engine| engine.store.restore(&mut *engine.pass, seq, stored));
                let is_there = restored.unwrap_or_else(|error| {
                    tracing::warn!("a prompt's beginning is evaluated again: {error}");
                    false
                });
                return Place::At(seq, if is_there { stored.n } else { 0 });
            }
        }
        // A finished text that the new one continues goes on where it is. Others stay as they are, if they can.
        let continued = prefix.filter(|p| self.slots.idle(p.seq).is_some_and(|idle| idle.len() == p.n));
        if let Some(kept) = continued
            && self.make_room(n_tokens.saturating_sub(kept.n), Some(kept))
        {
            self.slots.occupy(kept.seq);
            return Place::At(kept.seq, kept.n);
        }
        if let Some(prefix) = prefix.filter(|_| continued.is_none())
            // Only whole pages are shared for good.
            && let Some(seq) = self.room_beside(n_tokens - prefix.n / page_len * page_len, prefix)
        {
            match self.pass.share_prefix(prefix.seq, seq, prefix.n) {
                Ok(n) => {
                    self.slots.touch(prefix.seq);
                    self.slots.occupy(seq);
                    return Place::At(seq, n);
                }
                Err(why) => tracing::warn!("a prompt's beginning is evaluated again: {why}"),
            }
        }
        // What the text shares with a finished one is kept, and the rest of that is given up.
        if let Some(prefix) = prefix
            && let Some(owner) = self.slots.owner(prefix.seq)
            && self.fits(n_tokens.saturating_sub(prefix.n), Some(prefix))
        {
            self.store_idle(prefix.seq);
            let n = self.pass.rewind(prefix.seq, prefix.n);
            self.slots.keep(prefix.seq, owner, ids[..n].to_vec());
            if self.make_room(n_tokens.saturating_sub(n), Some(Prefix { n, ..prefix })) {
                self.slots.occupy(prefix.seq);
                return Place::At(prefix.seq, n);
            }
        }
        match self.fresh_sequence(n_tokens) {
            Some(seq) => Place::At(seq, 0),
            None => Place::Full,
        }
    }

    /// An empty sequence and pages for `n_tokens` tokens; `None`, and nothing is given up, where there is no room now.
    pub(super) fn fresh_sequence(&mut self, n_tokens: usize) -> Option<usize> {
        let seq = self.slots.empty().or_else(|| self.slots.oldest_idle(None))?;
        if !self.fits(n_tokens, None) {
            return None;
        }
        self.give_up(seq);
        self.make_room(n_tokens, None);
        self.slots.occupy(seq);
        Some(seq)
    }

    /// What `restore` comes to, which puts a text into a sequence. Where windows or recurrent states have no room for it, whose use
    /// [`fits`](Self::fits) does not know, idle sequences are given up until they have.
    pub(super) fn restore<T>(
        &mut self,
        mut restore: impl FnMut(&mut Self) -> Result<T, SnapshotError>,
    ) -> Result<T, SnapshotError> {
        loop {
            let outcome = restore(self);
            let has_no_room = outcome.as_ref().is_err_and(is_no_room);
            match self.slots.oldest_idle(None) {
                Some(seq) if has_no_room => self.give_up(seq),
                Some(_) | None => return outcome,
            }
        }
    }

    /// An empty sequence beside that of `prefix`, and pages for `n_tokens` tokens; `None`, and nothing is given up, where there
    /// is no room now.
    fn room_beside(&mut self, n_tokens: usize, prefix: Prefix) -> Option<usize> {
        let seq = self.slots.empty().or_else(|| self.slots.oldest_idle(Some(prefix.seq)))?;
        let whole = Prefix { n: self.pass.n_past(prefix.seq), ..prefix };
        if !self.fits(n_tokens, Some(whole)) {
            return None;
        }
        self.give_up(seq);
        self.make_room(n_tokens, Some(whole)).then_some(seq)
    }

    /// Pages that `n_tokens` tokens take besides those that what runs will need soon, so that a newcomer does not lose its place
    /// again at once.
    fn pages_needed(&self, n_tokens: usize) -> usize {
        let page_len = self.pass.cache_pages().page_len;
        let of = |n: usize| n.div_ceil(page_len);
        let soon = |n: usize| (n + page_len).min(self.pass.n_ctx());
        let running = self.running.iter().map(|r| (r.seq, soon(r.text.ids.len())));
        let embeddings = self.embeddings.iter().map(|run| (run.seq, run.n_tokens()));
        let missing = running.chain(embeddings).map(|(seq, n)| of(n).saturating_sub(of(self.pass.n_past(seq))));
        missing.sum::<usize>() + of(n_tokens)
    }

    /// Whether there are pages for `n_tokens` tokens once all idle sequences are given up but the beginning `kept` of one. Where
    /// nothing runs there are.
    fn fits(&self, n_tokens: usize, kept: Option<Prefix>) -> bool {
        if self.running.is_empty() && self.embeddings.is_empty() {
            return true;
        }
        let texts = self.running.iter().map(|r| r.seq);
        let busy: Vec<_> = texts.chain(self.embeddings.iter().map(|run| run.seq)).collect();
        let n_busy = self.pass.pages_held(&busy);
        let pages = self.pass.cache_pages();
        let of_kept = kept.filter(|kept| !busy.contains(&kept.seq)).map_or(0, |Prefix { seq, n }| {
            let both: Vec<_> = busy.iter().copied().chain([seq]).collect();
            // Those that it shares with what runs are its first.
            let own = self.pass.pages_held(&both) - n_busy;
            own.saturating_sub(self.pass.n_past(seq).div_ceil(pages.page_len) - n.div_ceil(pages.page_len))
        });
        pages.total - n_busy - of_kept >= self.pages_needed(n_tokens)
    }

    /// Gives idle sequences up, but the one of which `kept` is the beginning, until there are pages for `n_tokens` tokens. False, and
    /// nothing is given up, where that is not enough; where nothing runs it is.
    fn make_room(&mut self, n_tokens: usize, kept: Option<Prefix>) -> bool {
        if !self.fits(n_tokens, kept) {
            return false;
        }
        while self.pass.cache_pages().free < self.pages_needed(n_tokens)
            && let Some(seq) = self.slots.oldest_idle(kept.map(|kept| kept.seq))
        {
            self.give_up(seq);
        }
        true
    }
}
