//! Which of the texts that wait get a place in the KV cache, and where.

use super::engine::{Engine, Running};
use super::slots::{Prefix, longest_prefix, n_common};
use super::text::Text;
use super::{FinishReason, Metrics};

/// Tokens that a text waits for while another one evaluates them.
const WORTH_WAITING: usize = 16;

/// Where a text can run.
enum Place {
    /// In this sequence, which holds so many of its tokens already.
    At(usize, usize),
    /// Later: a text that begins alike is being evaluated, and sharing is cheaper than evaluating twice.
    Later,
    /// There is no room now.
    Full,
}

impl<'t> Engine<'t> {
    /// Gives places to texts as long as there is room, to those that lost theirs first.
    pub(super) fn admit(&mut self) {
        while self.has_place() && !self.preempted.is_empty() {
            let text = self.preempted.remove(0);
            match self.place(&text.ids) {
                Place::At(seq, n) => self.start(text, seq, n),
                Place::Later | Place::Full => {
                    self.preempted.insert(0, text);
                    return;
                }
            }
        }
        let mut next = 0;
        while self.has_place() {
            let Some(submission) = self.shared.queue().texts.remove(next) else { return };
            if submission.request.max_tokens == Some(0) {
                let text = self.new_text(submission);
                self.answer(text, Ok(FinishReason::Length));
                continue;
            }
            match self.place(&submission.request.prompt) {
                Place::At(seq, n) => {
                    let text = self.new_text(submission);
                    self.start(text, seq, n);
                }
                Place::Later => {
                    self.shared.queue().texts.insert(next, submission);
                    next += 1;
                }
                Place::Full => {
                    self.shared.queue().texts.insert(next, submission);
                    return;
                }
            }
        }
    }

    fn has_place(&self) -> bool {
        self.running.len() < self.options.n_parallel
    }

    fn start(&mut self, mut text: Text<'t>, seq: usize, n_cached: usize) {
        if text.admit(n_cached) {
            self.count(|metrics| metrics.cached_tokens += n_cached as u64);
        }
        self.running.push(Running { text, seq });
    }

    pub(super) fn count(&self, count: impl FnOnce(&mut Metrics)) {
        count(&mut self.shared.metrics());
    }

    /// Finds a sequence for a text, with as much of it as the KV cache holds anywhere.
    fn place(&mut self, ids: &[u32]) -> Place {
        // The last token is evaluated in any case: its logits choose the next one.
        let ids = &ids[..ids.len() - 1];
        let evaluated = self.running.iter().map(|r| (r.seq, &r.text.ids[..self.pass.n_past(r.seq)]));
        let prefix = [longest_prefix(ids, evaluated), self.slots.longest_prefix(ids)];
        let prefix = prefix.into_iter().flatten().max_by_key(|prefix| prefix.n);
        let page_len = self.pass.cache_pages().page_len;
        let cached = prefix.map_or(0, |prefix| prefix.n);
        let comes = |r: &Running<'_>| {
            let n = n_common(ids, &r.text.ids);
            n > self.pass.n_past(r.seq) && n >= cached + WORTH_WAITING
        };
        if self.running.iter().any(comes) {
            return Place::Later;
        }
        let n_tokens = ids.len() + 2;
        // A finished text that the new one continues goes on where it is. Others stay as they are, if they can.
        let continued = prefix.filter(|p| self.slots.idle(p.seq).is_some_and(|idle| idle.len() == p.n));
        if let Some(Prefix { seq, n }) = continued
            && self.make_room(n_tokens.saturating_sub(n), Some(seq))
        {
            self.slots.occupy(seq);
            return Place::At(seq, n);
        }
        if let Some(prefix) = prefix.filter(|_| continued.is_none())
            && let Some(seq) = self.slots.empty().or_else(|| self.slots.oldest_idle(Some(prefix.seq)))
        {
            self.evict(seq);
            // Only whole pages are shared for good.
            if self.make_room(n_tokens - prefix.n / page_len * page_len, Some(prefix.seq)) {
                match self.pass.share_prefix(prefix.seq, seq, prefix.n) {
                    Ok(()) => {
                        self.slots.touch(prefix.seq);
                        self.slots.occupy(seq);
                        return Place::At(seq, prefix.n);
                    }
                    Err(why) => tracing::warn!("a prompt's beginning is evaluated again: {why}"),
                }
            }
        }
        // What the text shares with a finished one is kept, and the rest of that is given up.
        if let Some(Prefix { seq, n }) = prefix.filter(|p| self.slots.idle(p.seq).is_some()) {
            self.pass.truncate_seq(seq, n);
            self.slots.keep(seq, ids[..n].to_vec());
            if self.make_room(n_tokens.saturating_sub(n), Some(seq)) {
                self.slots.occupy(seq);
                return Place::At(seq, n);
            }
        }
        match self.fresh_sequence(n_tokens) {
            Some(seq) => Place::At(seq, 0),
            None => Place::Full,
        }
    }

    /// An empty sequence and pages for `n_tokens` tokens; `None` where there is no room now.
    pub(super) fn fresh_sequence(&mut self, n_tokens: usize) -> Option<usize> {
        let seq = self.slots.empty().or_else(|| self.slots.oldest_idle(None))?;
        self.evict(seq);
        if !self.make_room(n_tokens, None) {
            return None;
        }
        self.slots.occupy(seq);
        Some(seq)
    }

    /// Gives idle sequences up, `except` one, until there are pages for `n_tokens` tokens besides those that what runs
    /// will need soon, so that a newcomer does not lose its place again at once. False where that is not enough; where
    /// nothing runs it is.
    fn make_room(&mut self, n_tokens: usize, except: Option<usize>) -> bool {
        loop {
            let pages = self.pass.cache_pages();
            let of = |n: usize| n.div_ceil(pages.page_len);
            let soon = |n: usize| (n + pages.page_len).min(self.pass.n_ctx());
            let running = self.running.iter().map(|r| (r.seq, soon(r.text.ids.len())));
            let embedding = self.embedding.iter().map(|run| (run.seq, run.n_tokens()));
            let missing = running.chain(embedding).map(|(seq, n)| of(n).saturating_sub(of(self.pass.n_past(seq))));
            if pages.free >= missing.sum::<usize>() + of(n_tokens) {
                return true;
            }
            let Some(seq) = self.slots.oldest_idle(except) else {
                return self.running.is_empty() && self.embedding.is_none();
            };
            self.evict(seq);
        }
    }
}
