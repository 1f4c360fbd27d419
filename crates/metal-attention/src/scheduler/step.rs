//! One step: a batch of the next tokens of all texts that run, and what follows for each of them.

use std::time::Instant;

use crate::choice::{self, Need, Scores};
use crate::{BatchToken, ForwardError};

use super::embedding::MAX_LOGITS_BYTES;
use super::engine::{Engine, Running};
use super::text::Progress;
use super::turns::share_out;
use super::{FinishReason, RequestError};

/// A batch, and whose logits it gives.
#[derive(Debug, Default)]
struct Batch {
    tokens: Vec<BatchToken>,
    /// For each token whose logits are wanted, what they are for.
    rows: Vec<Row>,
    /// Tokens that follow another one that was generated, one of a text.
    n_decode: usize,
}

/// What the logits of a token are for, and which of the running texts it belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Row {
    /// The next token is chosen.
    Choose(usize),
    /// The log probability of the prompt's next token.
    Score(usize),
}

/// How each text fared: which of the running ones, and what came of it.
type Results = Vec<(usize, Result<Progress, RequestError>)>;

impl Engine<'_> {
    /// Evaluates the next tokens of all texts that run.
    pub(super) fn step(&mut self) {
        loop {
            let batch = self.compose();
            if batch.tokens.is_empty() {
                return;
            }
            let n_generated = self.n_generated();
            let start = Instant::now();
            match self.evaluate(&batch) {
                Ok(mut results) => {
                    self.pace.took(batch.tokens.len(), start.elapsed());
                    self.note_progress();
                    self.keep_turns();
                    let n_new = self.n_generated() - n_generated;
                    self.count(|metrics| {
                        metrics.count_step(batch.tokens.len());
                        metrics.prompt_tokens += (batch.tokens.len() - batch.n_decode) as u64;
                        metrics.generated_tokens += n_new as u64;
                    });
                    // From the last on, so that the numbers of the others stay right.
                    results.sort_unstable_by_key(|(i, _)| std::cmp::Reverse(*i));
                    for (i, result) in results {
                        match result {
                            Ok(Progress::Finished(reason)) => self.end(i, Ok(reason)),
                            Ok(_) => {}
                            Err(why) => self.end(i, Err(why)),
                        }
                    }
                    return;
                }
                Err(ForwardError::OutOfPages { .. } | ForwardError::OutOfStates { .. }) => self.give_pages_up(),
                Err(why) => {
                    tracing::error!("a step over {} tokens failed: {why}", batch.tokens.len());
                    let failed = |seq| batch.tokens.iter().any(|token| token.seq == seq);
                    for i in (0..self.running.len()).rev() {
                        if failed(self.running[i].seq) {
                            self.end(i, Err(why.clone().into()));
                        }
                    }
                    return;
                }
            }
        }
    }

    /// The next token of each text that was evaluated up to there, then as much of the other texts as there is room for,
    /// shared out between their clients.
    fn compose(&self) -> Batch {
        let mut batch = Batch::default();
        let waiting = |i: usize| self.running[i].text.ids.len() - self.pass.n_past(self.running[i].seq);
        let (next, prompts): (Vec<_>, Vec<_>) = (0..self.running.len()).partition(|&i| waiting(i) == 1);
        let most = next.len() + self.pace.prompt_tokens(next.len(), self.running.len() > 1);
        let wanted: Vec<_> = prompts.iter().map(|&i| (self.running[i].text.client, waiting(i))).collect();
        let shares = share_out(&wanted, most - next.len());
        let next = next.into_iter().map(|i| (i, 1));
        // Logits that a step may give of prompts.
        let mut room = (MAX_LOGITS_BYTES / (4 * self.pass.spec().n_vocab)).max(1);
        for (i, n) in next.chain(prompts.into_iter().zip(shares)).filter(|&(_, n)| n > 0) {
            let (text, seq) = (&self.running[i].text, self.running[i].seq);
            let start = self.pass.n_past(seq);
            let last = text.ids.len() - 1;
            let scored = text.next_scored().map_or(last..last, |first| first.max(start)..last);
            // What there is no room for comes with the next step.
            let n = if scored.is_empty() { n } else { n.min(scored.start + room - start) };
            let token = |pos| BatchToken { id: text.ids[pos], seq, pos, logits: pos == last || scored.contains(&pos) };
            batch.tokens.extend((start..start + n).map(token));
            let n_scored = (start..start + n).filter(|pos| scored.contains(pos)).count();
            room -= n_scored;
            batch.rows.extend(std::iter::repeat_n(Row::Score(i), n_scored));
            if start + n == text.ids.len() {
                batch.rows.push(Row::Choose(i));
                batch.n_decode += usize::from(n == 1 && text.n_generated() > 0);
            }
        }
        batch
    }

    /// Tokens that the running texts have got so far.
    fn n_generated(&self) -> usize {
        self.running.iter().map(|r| r.text.n_generated()).sum()
    }

    /// Evaluates a batch, by the cheapest way that gives every text what it needs, and lets the texts choose.
    fn evaluate(&mut self, batch: &Batch) -> Result<Results, ForwardError> {
        let k = self.pass.max_top_k();
        let need_of = |row: &Row| match *row {
            Row::Choose(i) => self.running[i].text.need(k),
            Row::Score(_) => Need::Logits,
        };
        let need = batch.rows.iter().map(need_of).max().unwrap_or(Need::Logits);
        let Self { pass, running, .. } = self;
        let n_ctx = pass.n_ctx();
        let mut results: Results = Vec::new();
        let mut again = Vec::new();
        choice::evaluate(&mut **pass, &batch.tokens, need, |row, scores| match (batch.rows[row], scores) {
            // Nothing follows where a text has failed.
            (Row::Score(i) | Row::Choose(i), _) if results.iter().any(|(failed, _)| *failed == i) => {}
            (Row::Score(i), Scores::Logits(logits)) => {
                results.extend(running[i].text.score(logits).err().map(|why| (i, Err(why))));
            }
            (Row::Score(_), Scores::Id(_) | Scores::Short(..)) => {}
            (Row::Choose(i), scores) => match running[i].text.step(scores, n_ctx) {
                Ok(Progress::TooLittle) => again.push(i),
                result => results.push((i, result)),
            },
        })?;
        // Where that did not do, the last token is evaluated once more.
        let last_token = |&i: &usize| {
            let (ids, seq) = (&running[i].text.ids, running[i].seq);
            BatchToken { id: ids[ids.len() - 1], seq, pos: ids.len() - 1, logits: true }
        };
        let tokens: Vec<_> = again.iter().map(last_token).collect();
        let outcome = choice::evaluate_again(&mut **pass, &tokens, |row, scores| {
            let i = again[row];
            results.push((i, running[i].text.step(scores, n_ctx)));
        });
        if let Err(why) = outcome {
            results.extend(again.iter().map(|&i| (i, Err(why.clone().into()))));
        }
        Ok(results)
    }

    /// Notes which texts have got further than they ever were: from now on their turns count.
    fn note_progress(&mut self) {
        let now = Instant::now();
        for r in &mut self.running {
            if r.since.is_none() && self.pass.n_past(r.seq) > r.text.reached {
                r.since = Some(now);
            }
        }
    }

    /// Makes pages free for the texts that run: by giving up a finished text, else by putting off an embedding, else the
    /// youngest text of a client that has most, whose tokens are found again later, or evaluated.
    fn give_pages_up(&mut self) {
        let rank = |r: &Running<'_>| (self.n_running(r.text.client), r.text.number);
        let last = self.running.iter().enumerate().max_by_key(|(_, r)| rank(r)).map(|(i, _)| i);
        if let Some(seq) = self.slots.oldest_idle(None) {
            self.give_up(seq);
        } else if !self.embeddings.is_empty() {
            self.put_embedding_off();
        } else if let Some(i) = last.filter(|_| self.running.len() > 1) {
            let seq = self.put_off(i);
            self.give_up(seq);
        } else if let Some(i) = last {
            self.end(i, Ok(FinishReason::ContextFull));
        }
    }
}
