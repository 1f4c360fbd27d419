//! The thread that owns the forward pass: its loop, and how texts begin and end on it.

use std::sync::Arc;
use std::time::Instant;

use metal_attention::tokenizer::Tokenizer;
use metal_attention::{ForwardPass, Model};

use super::embedding::EmbeddingRun;
use super::pace::Pace;
use super::queue::{Shared, Submission};
use super::slots::Slots;
use super::text::Text;
use super::{FinishReason, RequestError, SchedulerOptions};

/// A text with a place in the KV cache.
pub(super) struct Running<'t> {
    pub text: Text<'t>,
    /// Its sequence.
    pub seq: usize,
}

/// The forward pass and everything that runs on it.
pub(super) struct Engine<'t> {
    pub pass: Box<dyn ForwardPass>,
    pub model: Arc<Model>,
    pub tokenizer: &'t Tokenizer,
    pub shared: Arc<Shared>,
    pub options: SchedulerOptions,
    pub slots: Slots,
    /// In the order in which they got their places.
    pub running: Vec<Running<'t>>,
    /// Texts that had to give their places up, by number.
    pub preempted: Vec<Text<'t>>,
    pub embedding: Option<EmbeddingRun>,
    /// How large a step may be.
    pub pace: Pace,
    /// Texts that got a place so far, or ended without one.
    pub n_texts: u64,
}

impl<'t> Engine<'t> {
    pub fn new(
        pass: Box<dyn ForwardPass>,
        model: Arc<Model>,
        tokenizer: &'t Tokenizer,
        shared: Arc<Shared>,
        options: SchedulerOptions,
    ) -> Self {
        Self {
            slots: Slots::new(pass.n_seq()),
            pass,
            model,
            tokenizer,
            shared,
            pace: Pace::new(options.n_batch),
            options,
            running: Vec::new(),
            preempted: Vec::new(),
            embedding: None,
            n_texts: 0,
        }
    }

    /// Runs until the scheduler is closed and nothing is left to do.
    pub fn run(mut self) {
        loop {
            if self.is_idle() {
                self.publish();
                self.shared.sleep();
                if self.shared.queue().closing.is_some() && self.is_idle() {
                    return;
                }
            }
            self.drop_ended();
            self.start_embedding();
            self.admit();
            self.step();
            self.embed();
            self.publish();
        }
    }

    fn is_idle(&self) -> bool {
        self.running.is_empty()
            && self.preempted.is_empty()
            && self.embedding.is_none()
            && self.shared.queue().len() == 0
    }

    /// Ends the texts that nobody waits for any more, and those whose time is over.
    fn drop_ended(&mut self) {
        let now = Instant::now();
        let mut queue = self.shared.queue();
        let closed = queue.closing.is_some_and(|deadline| now >= deadline);
        let over = |abandoned: bool, deadline: Option<Instant>| {
            if abandoned || closed {
                Some(FinishReason::Cancelled)
            } else {
                deadline.filter(|&deadline| now >= deadline).map(|_| FinishReason::Deadline)
            }
        };
        let is_over = |s: &Submission| over(s.events.is_closed(), s.request.deadline);
        let mut ended = Vec::new();
        let mut next = 0;
        while let Some(submission) = queue.texts.get(next) {
            match is_over(submission) {
                Some(reason) => ended.extend(queue.texts.remove(next).map(|submission| (submission, reason))),
                None => next += 1,
            }
        }
        queue.embeddings.retain(|request| !closed && !request.answer.is_closed());
        drop(queue);
        for (submission, reason) in ended {
            let text = self.new_text(submission);
            self.answer(text, Ok(reason));
        }
        for i in (0..self.preempted.len()).rev() {
            if let Some(reason) = over(self.preempted[i].is_abandoned(), self.preempted[i].deadline) {
                let text = self.preempted.remove(i);
                self.answer(text, Ok(reason));
            }
        }
        for i in (0..self.running.len()).rev() {
            let text = &self.running[i].text;
            if let Some(reason) = over(text.is_abandoned(), text.deadline) {
                self.end(i, Ok(reason));
            }
        }
        if self.embedding.as_ref().is_some_and(|run| closed || run.is_abandoned()) {
            self.drop_embedding();
        }
    }

    /// The text of a request whose turn it is.
    pub fn new_text(&mut self, submission: Submission) -> Text<'t> {
        self.n_texts += 1;
        Text::new(submission, self.tokenizer, self.pass.spec().n_vocab, self.n_texts)
    }

    /// Ends the `i`-th running text. What the KV cache holds of it stays, for prompts that begin like it.
    pub fn end(&mut self, i: usize, outcome: Result<FinishReason, RequestError>) {
        let Running { text, seq } = self.running.remove(i);
        if matches!(outcome, Err(RequestError::Forward(_))) {
            self.evict(seq);
        } else {
            self.slots.keep(seq, text.ids[..self.pass.n_past(seq)].to_vec());
        }
        self.answer(text, outcome);
    }

    /// Tells a client how its text ended, and counts it.
    pub fn answer(&self, text: Text<'_>, outcome: Result<FinishReason, RequestError>) {
        self.shared.metrics().requests.count(&outcome);
        match outcome {
            Ok(reason) => text.finish(reason),
            Err(why) => text.fail(why),
        }
    }

    /// Empties a sequence, whose pages are free then unless others share them.
    pub fn evict(&mut self, seq: usize) {
        self.pass.truncate_seq(seq, 0);
        self.slots.clear(seq);
    }

    /// Tells the metrics what is going on.
    fn publish(&self) {
        let pages = self.pass.cache_pages();
        let mut metrics = self.shared.metrics();
        metrics.running = self.running.len() + usize::from(self.embedding.is_some());
        metrics.waiting = self.preempted.len();
        metrics.pages_used = pages.total - pages.free;
        metrics.pages_free = pages.free;
    }
}
