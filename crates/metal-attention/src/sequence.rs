//! The sequence of a [`Generator`](crate::Generator): its tokens, its part of the KV cache, and the state that samples
//! its next token.
//!
//! It uses sequence 0 of its own forward pass. (The scheduler's counterpart, for many sequences, is
//! `ScheduledSequence`.)

use std::ops::ControlFlow;
use std::path::Path;
use std::time::{Duration, Instant};

use metal_attention_model::{Batch, BatchToken, ForwardError, ForwardPass, HiddenRows};

use crate::choice::{
    AllowedTokens, RequiredScores, Scores, choose, evaluate, evaluate_again, is_number, required_scores,
};
use crate::constraint::ActiveConstraint;
use crate::logits_processor::ActiveProcessor;
use crate::prefix_store::PrefixStore;
use crate::prompt::{BatchSpan, PrefixKey, PromptLimits, rewind, span_keys, with_batch};
use crate::sampling::Sampler;
use crate::scheduler::Client;
use crate::speculation::{DraftDepth, DraftRequest, Drafter, ScoresAhead, Speculator, max_drafts_of_step};
use crate::{
    Constraint, Error, LogitsProcessor, Model, Pooler, PromptSpan, SavedSequence, SessionError, SessionFile, SpanKey,
    Timings,
};

/// One sequence, with its forward pass and sampler.
pub(crate) struct Sequence {
    /// The forward pass; only its sequence 0 is used.
    pass: Box<dyn ForwardPass>,
    /// The sampler, which has accepted all of `ids` since the last prompt.
    sampler: Sampler,
    /// Logits processor of the caller.
    processing: Option<ActiveProcessor>,
    /// Constraint on the tokens.
    constraint: Option<ActiveConstraint>,
    /// Snapshots of prompt ends, which layers with a sliding window have lost since.
    prompt_ends: PrefixStore,
    /// Tokens of the last prompt, until its end is in `prompt_ends`; `None` if it is, or need not be.
    n_prompt: Option<usize>,
    /// Prompt and generated tokens. The first [`ForwardPass::position`] of them are in the KV cache; the others are
    /// evaluated by the next [`step`](Self::step). Behind them the cache may have drafts that were evaluated.
    ids: Vec<u32>,
    /// Proposes drafts; `None`: each step gives one token.
    speculator: Option<Speculator>,
    /// The scores of the drafts that were evaluated last.
    ahead: ScoresAhead,
    /// What was evaluated last, if the drafter does not know yet which of it holds.
    evaluated: Option<LastEvaluated>,
    /// The keys of the spans among them.
    span_keys: Vec<SpanKey>,
    /// The spans with their rows; empty after a restored session.
    spans: Vec<PromptSpan>,
    /// Start of the last prompt.
    started: Instant,
    /// Token counts and durations since the last prompt.
    pub timings: Timings,
}

/// The last tokens that were evaluated, drafts among them.
struct LastEvaluated {
    /// The index of the first one in the sequence.
    first: usize,
    /// The tokens.
    ids: Vec<u32>,
    /// How many of them, at the end, are drafts.
    n_drafts: usize,
    /// Their hidden rows for the drafter.
    hidden: HiddenRows,
}

impl Sequence {
    /// An empty sequence.
    pub fn new(pass: Box<dyn ForwardPass>, sampler: Sampler) -> Self {
        let timings = Timings::default();
        Self {
            pass,
            sampler,
            processing: None,
            constraint: None,
            prompt_ends: PrefixStore::new(0, None),
            n_prompt: None,
            ids: Vec::new(),
            speculator: None,
            ahead: ScoresAhead::default(),
            evaluated: None,
            span_keys: Vec::new(),
            spans: Vec::new(),
            started: Instant::now(),
            timings,
        }
    }

    /// The forward pass.
    pub fn pass(&self) -> &dyn ForwardPass {
        &*self.pass
    }

    /// The forward pass, mutable.
    pub fn pass_mut(&mut self) -> &mut dyn ForwardPass {
        &mut *self.pass
    }

    /// The sampler.
    pub fn sampler(&self) -> &Sampler {
        &self.sampler
    }

    /// Replaces the sampler. The new one accepts the tokens at the next [`start`](Self::start).
    pub fn set_sampler(&mut self, sampler: Sampler) {
        self.drop_drafts();
        self.sampler = sampler;
    }

    /// Sets or removes the drafter, from the next token on.
    pub fn set_drafter(&mut self, drafter: Option<Box<dyn Drafter>>, depth: DraftDepth) {
        self.evaluated = None;
        self.speculator = drafter.map(|drafter| Speculator::new(drafter, depth));
        if let Some(speculator) = &mut self.speculator
            && self.ids.is_empty()
        {
            speculator.time_plain_steps(&mut *self.pass, 1);
        }
    }

    /// The drafter.
    pub fn drafter(&self) -> Option<&dyn Drafter> {
        self.speculator.as_ref().map(Speculator::drafter)
    }

    /// Cuts drafts back whose tokens were not sampled.
    fn drop_drafts(&mut self) {
        self.settle();
        self.ahead.clear();
        if self.pass.position() > self.ids.len() {
            let key = PrefixKey { ids: &self.ids, spans: &self.span_keys };
            rewind(&mut *self.pass, 0, key, key.len());
        }
    }

    /// Sets or removes the logits processor, from the next token on.
    pub fn set_processor(&mut self, processor: Option<Box<dyn LogitsProcessor>>) {
        self.drop_drafts();
        self.processing = processor.map(ActiveProcessor::new);
    }

    /// Sets or removes the constraint, from the next token on.
    pub fn set_constraint(&mut self, constraint: Option<Box<dyn Constraint>>) {
        self.constraint = constraint.map(ActiveConstraint::new);
    }

    /// Whether the constraint allows nothing but the end.
    pub fn is_complete(&self) -> bool {
        self.constraint.as_ref().is_some_and(ActiveConstraint::is_complete)
    }

    /// From now on keeps snapshots of prompt ends in up to `bytes` bytes, if sliding windows would lose them.
    pub fn keep_prompt_ends(&mut self, bytes: u64) {
        self.prompt_ends = PrefixStore::new(bytes, None);
    }

    /// The tokens: the prompt and the generated ones.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// What the sequence is known by.
    fn key(&self) -> PrefixKey<'_> {
        PrefixKey { ids: &self.ids, spans: &self.span_keys }
    }

    /// Replaces the sequence by `prompt` with `spans`. Keeps the prefix that is in the KV cache, and evaluates the rest in
    /// micro-batches except the last, which the next [`step`](Self::step) evaluates. `progress` is called before each
    /// one.
    ///
    /// After a refused prompt the sequence is unchanged; after an interruption the evaluated micro-batches are kept.
    pub fn start(
        &mut self,
        prompt: &[u32],
        spans: &[PromptSpan],
        mut progress: impl FnMut(usize, usize) -> ControlFlow<()>,
    ) -> Result<(), Error> {
        if !self.pass.spec().generates_text() {
            return Err(Error::NoText);
        }
        self.check_prompt(prompt)?;
        if !spans.is_empty() {
            PromptLimits::of(&*self.pass).check(prompt, spans)?;
        }
        self.started = Instant::now();
        self.drop_drafts();
        let span_keys = span_keys(spans);
        // The last token is always evaluated: its logits are sampled from.
        let key = PrefixKey { ids: prompt, spans: &span_keys }.first(prompt.len() - 1);
        let cached = key.n_common(self.key().first(self.pass.position()));
        let cached = self.go_back(key, cached);
        self.n_prompt = Some(prompt.len());
        self.ids.clear();
        self.ids.extend_from_slice(prompt);
        self.span_keys = span_keys;
        self.spans = spans.to_vec();
        self.sampler.reset();
        for &id in prompt {
            self.sampler.accept(id);
        }
        self.timings = Timings { cached_tokens: cached, ..Default::default() };
        let n_ubatch = self.pass.n_ubatch();
        loop {
            let done = self.pass.position();
            if progress(done, prompt.len()).is_break() {
                return Err(Error::Interrupted { done, total: prompt.len() });
            }
            if prompt.len() - done <= n_ubatch {
                return Ok(());
            }
            let (tokens, spans) = self.unevaluated(self.key().chunk(done, n_ubatch), false)?;
            let before =
                self.speculator.as_ref().map_or(&[][..], |speculator| speculator.reads_hidden(/* prompt */ true));
            // No token of the chunk has an output.
            let forward =
                |batch: Batch<'_>| evaluate(&mut *self.pass, batch, RequiredScores::Logits, before, |_, _| {});
            let hidden = with_batch(&tokens, &spans, &[], forward).map_err(|e| match e {
                ForwardError::Cancelled => Error::Interrupted { done, total: prompt.len() },
                e => e.into(),
            })?;
            let ids = tokens.iter().map(|token| token.id).collect();
            self.evaluated = Some(LastEvaluated { first: done, ids, n_drafts: 0, hidden });
            self.settle();
            self.timings.prompt_tokens += tokens.len();
            self.timings.prefill = self.started.elapsed();
        }
    }

    /// Cuts the KV cache back to the first `n` inputs of a sequence with the key `key`, restoring a snapshot of a prompt
    /// end if that reaches further. Returns how many inputs are left.
    fn go_back(&mut self, key: PrefixKey<'_>, n: usize) -> usize {
        let pass = &mut *self.pass;
        let reachable = key.reachable(n, |n| pass.reachable(0, n));
        let kept = self.prompt_ends.find(pass, Client::Unknown, key).filter(|kept| kept.n_tokens > reachable);
        match kept.map(|kept| (kept.n_tokens, self.prompt_ends.restore(pass, 0, kept))) {
            Some((n, Ok(true))) => return n,
            Some((_, Err(error))) => tracing::warn!("a prompt's beginning is evaluated again: {error}"),
            Some((_, Ok(false))) | None => {}
        }
        rewind(pass, 0, key, n)
    }

    /// Writes a session file with `note` and a snapshot of the evaluated tokens.
    pub fn save(&mut self, path: &Path, model: &Model, note: &[u8]) -> Result<(), SessionError> {
        self.drop_drafts();
        let key = PrefixKey { ids: &self.ids, spans: &self.span_keys };
        let n = rewind(&mut *self.pass, 0, key, key.len());
        let PrefixKey { ids, spans } = key.first(n);
        SessionFile::write(path, model, note, Some(SavedSequence { pass: &mut *self.pass, seq: 0, ids, spans }))
    }

    /// Replaces the sequence by that of a session file. After an error it is empty or unchanged.
    pub fn restore(&mut self, session: SessionFile, model: &Model) -> Result<(), SessionError> {
        self.n_prompt = None;
        self.evaluated = None;
        self.ahead.clear();
        let span_keys = session.spans().to_vec();
        let restored = session.restore(model, &mut *self.pass, 0);
        self.ids.truncate(self.pass.position());
        self.span_keys.retain(|span| span.end <= self.ids.len());
        self.ids = restored?;
        (self.span_keys, self.spans) = (span_keys, Vec::new());
        Ok(())
    }

    /// Whether the unevaluated tokens fit in the context, so that [`step`](Self::step) can run.
    pub fn can_step(&self) -> bool {
        self.ids.len() <= self.pass.n_ctx()
    }

    /// Samples the next token, never one of `forbidden`. The token is appended by [`push`](Self::push).
    ///
    /// Evaluates the tokens that are not in the KV cache yet, and with a drafter at most `max_drafts` drafts behind them, which may
    /// be taken from `prediction`. Nothing is evaluated if the last token is a draft that was evaluated before.
    pub fn step(&mut self, forbidden: &[u32], max_drafts: usize, prediction: &[u32]) -> Result<u32, Error> {
        let start = Instant::now();
        let last = self.ids.len().checked_sub(1).ok_or(Error::EmptyPrompt)?;
        let ahead = self.ahead.after(&self.ids).is_some();
        let (mut tokens, mut spans, mut drafts) = (Vec::new(), Vec::new(), Vec::new());
        if !ahead {
            self.settle();
            self.ahead.clear();
            // After a sampled end token all tokens are evaluated: the last one is evaluated again for its logits.
            let key = PrefixKey { ids: &self.ids, spans: &self.span_keys };
            rewind(&mut *self.pass, 0, key, last);
            (tokens, spans) = self.unevaluated(self.ids.len(), true)?;
            if tokens.len() == 1 {
                drafts = self.propose(max_drafts, prediction);
            }
        }
        let Self { pass, sampler, processing, constraint, ids, .. } = self;
        let n_vocab = pass.spec().n_vocab;
        let mask = constraint.as_mut().map(|constraint| constraint.mask(n_vocab, forbidden));
        let allowed = AllowedTokens { forbidden, mask: mask.transpose().map_err(Error::Constraint)? };
        let need = match processing {
            Some(_) => RequiredScores::Logits,
            None => required_scores(sampler, forbidden.len(), allowed.mask.is_some(), pass.max_top_k()),
        };
        let mut choose = |scores: Scores<'_>| {
            let chosen = match processing {
                Some(processing) => processing.choose(sampler, ids, allowed, scores).map_err(Error::LogitsProcessor)?,
                None => choose(sampler, allowed, scores),
            };
            match chosen {
                Some(id) if !is_number(scores, id) => Err(Error::NoNumbers),
                chosen => Ok(chosen),
            }
        };
        let mut chosen = Ok(None);
        let begun = Instant::now();
        let mut reads_hidden = false;
        if let Some(scores) = self.ahead.after(ids) {
            chosen = choose(scores);
        } else {
            let rows_ahead = &mut self.ahead;
            let is_prompt = self.timings.first_token.is_none();
            let before = self.speculator.as_ref().map_or(&[][..], |speculator| speculator.reads_hidden(is_prompt));
            reads_hidden = !before.is_empty();
            let mut evaluate = |drafts: &[u32]| {
                rows_ahead.begin(ids.len(), drafts.to_vec());
                let drafted = |(&id, pos): (&u32, usize)| BatchToken { id, seq: 0, pos, output: true };
                let batch: Vec<_> = tokens.iter().copied().chain(drafts.iter().zip(ids.len()..).map(drafted)).collect();
                let seq: &[usize] = if drafts.is_empty() { &[] } else { &[0] };
                with_batch(&batch, &spans, seq, |batch| {
                    evaluate(&mut **pass, batch, need, before, |row, scores| match row {
                        0 => chosen = choose(scores),
                        _ => rows_ahead.push(scores),
                    })
                })
            };
            let hidden = match evaluate(&drafts) {
                // There is room for the token without drafts.
                Err(ForwardError::OutOfPages { .. } | ForwardError::OutOfStates { .. }) if !drafts.is_empty() => {
                    drafts.clear();
                    evaluate(&[])?
                }
                outcome => outcome?,
            };
            let evaluated = tokens.iter().map(|token| token.id).chain(drafts.iter().copied()).collect();
            let first = ids.len() - tokens.len();
            self.evaluated = Some(LastEvaluated { first, ids: evaluated, n_drafts: drafts.len(), hidden });
        }
        let evaluation = begun.elapsed();
        if matches!(chosen, Ok(None)) {
            self.ahead.clear();
            let last = [BatchToken { id: ids[last], seq: 0, pos: last, output: true }];
            evaluate_again(&mut **pass, &last, |_, scores| chosen = choose(scores))?;
        }
        let chosen = chosen?;
        let time = start.elapsed();
        if ahead {
            self.timings.accepted += 1;
        } else if tokens.len() == 1
            && let Some(speculator) = &mut self.speculator
        {
            speculator.record_step(1, drafts.len(), reads_hidden, evaluation);
        }
        self.timings.drafted += drafts.len();
        self.count(tokens.len(), time);
        if let Some(n) = self.n_prompt {
            let prompt = PrefixKey { ids: &self.ids, spans: &self.span_keys }.first(n);
            if self.prompt_ends.keep_prompt_end(&mut *self.pass, 0, Client::Unknown, prompt, false) {
                self.n_prompt = None;
            }
        }
        Ok(chosen.expect("all logits are enough to choose from"))
    }

    /// Passes on to the drafter what was evaluated last, as far as it holds.
    fn settle(&mut self) {
        let (Some(last), Some(speculator)) = (self.evaluated.take(), &mut self.speculator) else { return };
        let LastEvaluated { first, ids, n_drafts, hidden } = last;
        let held = self.ids.get(first..).unwrap_or_default();
        let n = ids.iter().zip(held).take_while(|(a, b)| a == b).count();
        if n_drafts > 0 {
            speculator.record_verified(0, n_drafts, n.saturating_sub(ids.len() - n_drafts));
        }
        speculator.observe(&hidden, 0, 0, first, &ids[..n]);
    }

    /// At most `max` drafts for the next step: the last token is not evaluated yet.
    fn propose(&mut self, max: usize, prediction: &[u32]) -> Vec<u32> {
        let Some(speculator) = &mut self.speculator else { return Vec::new() };
        let room = self.pass.n_ctx().saturating_sub(self.ids.len()).min(max);
        let n = room.min(speculator.max_depth()).min(max_drafts_of_step(&*self.pass, 1));
        if n == 0 {
            return Vec::new();
        }
        let request = DraftRequest { seq: 0, ids: &self.ids, prediction, n };
        let forced = self.constraint.as_mut().map(ActiveConstraint::forced).unwrap_or_default();
        let mut ids = speculator.propose(&mut *self.pass, 1, n, &[request], &[forced]);
        let mut ids = ids.pop().map_or(Vec::new(), |draft| draft.ids);
        if let Some(constraint) = &mut self.constraint {
            ids.truncate(constraint.n_allowed(&ids));
        }
        ids
    }

    /// Appends a token. An error if the constraint fails; the sequence is then unchanged.
    pub fn push(&mut self, id: u32) -> Result<(), Error> {
        if let Some(constraint) = &mut self.constraint {
            constraint.accept(id).map_err(Error::Constraint)?;
        }
        self.ids.push(id);
        self.sampler.accept(id);
        self.timings.generated += 1;
        Ok(())
    }

    /// The embedding of `ids`, or a reranker's scores. The sequence is empty afterwards.
    pub fn embed(&mut self, pooler: &Pooler, ids: &[u32]) -> Result<Vec<f32>, Error> {
        self.check_prompt(ids)?;
        self.evaluated = None;
        self.ahead.clear();
        self.ids.clear();
        self.span_keys.clear();
        self.spans.clear();
        self.n_prompt = None;
        self.pass.truncate(0);
        let states = self.pass.forward_hidden(&pooler.batch(ids, 0))?;
        self.pass.truncate(0);
        let mut pooled = pooler.begin();
        pooled.add(&states);
        let vector = pooler.finish(pooled);
        if vector.iter().all(|x| x.is_finite()) { Ok(vector) } else { Err(Error::NoNumbers) }
    }

    /// Checks the length and the token ids of a prompt.
    fn check_prompt(&self, prompt: &[u32]) -> Result<(), Error> {
        let spec = self.pass.spec();
        if prompt.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        if prompt.len() > self.pass.n_ctx() {
            let (n_ctx, n_ctx_train) = (self.pass.n_ctx(), spec.n_ctx_train);
            return Err(Error::PromptTooLong { n_prompt: prompt.len(), n_ctx, n_ctx_train });
        }
        match prompt.iter().find(|&&id| id as usize >= spec.n_vocab) {
            Some(&id) => Err(ForwardError::TokenOutOfRange { id, n_vocab: spec.n_vocab }.into()),
            None => Ok(()),
        }
    }

    /// The first `n` of the unevaluated inputs: the tokens and the spans of a batch. `logits`: whether the logits of the
    /// last one are wanted. An error if the rows of a span among them are not there.
    fn unevaluated(&self, n: usize, logits: bool) -> Result<(Vec<BatchToken>, Vec<BatchSpan>), ForwardError> {
        let position = self.pass.position();
        let ids = &self.ids[position..];
        let n = n.min(ids.len());
        let token =
            |(i, &id): (usize, &u32)| BatchToken { id, seq: 0, pos: position + i, output: logits && i + 1 == n };
        let tokens = ids[..n].iter().enumerate().map(token).collect();
        if self.spans.is_empty() && self.span_keys.last().is_some_and(|span| span.end > position) {
            return Err(ForwardError::BadSpan { why: "a session has no rows; give the prompt again" });
        }
        Ok((tokens, BatchSpan::within(&self.spans, position..position + n, 0).collect()))
    }

    /// Adds a step over `n` tokens to the timings: the first one after a prompt ends the prefill.
    fn count(&mut self, n: usize, time: Duration) {
        if self.timings.first_token.is_none() {
            self.timings.prompt_tokens += n;
            self.timings.prefill += time;
            self.timings.first_token = Some(self.started.elapsed());
        } else {
            self.timings.decode += time;
            self.timings.decode_steps += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use metal_attention_cpu::{CpuExecutor, CpuOptions};
    use metal_attention_model::{DEFAULT_UBATCH, HookedExecutor, Hooks, Session, SessionOptions, StepLimits};

    use super::*;
    use crate::sampling::SamplerOptions;
    use crate::{Device, EngineOptions};

    /// The built-in model with micro-batches of `n_ubatch` tokens, which finds top-k lists of at most `max_top_k`.
    fn short_lists(n_ubatch: usize, max_top_k: usize) -> Box<dyn ForwardPass> {
        struct ShortLists(usize);
        impl Hooks for ShortLists {
            fn limits(&self, limits: StepLimits) -> StepLimits {
                StepLimits { max_top_k: self.0, ..limits }
            }
        }
        let model = Model::built_in().unwrap();
        let options = SessionOptions { n_ctx: 512, n_ubatch, ..Default::default() };
        let cpu = CpuOptions::default();
        let inner = CpuExecutor::new(&cpu, model.loaded(), &options).unwrap();
        Box::new(Session::new(HookedExecutor::new(inner, ShortLists(max_top_k))))
    }

    #[test]
    fn a_sampled_sequence_continues_the_same_from_any_cut() {
        let model = Model::built_in().unwrap();
        let options = EngineOptions { device: Device::Cpu, n_ubatch: Some(8), ..Default::default() };
        let sampling = SamplerOptions { seed: Some(9), repeat_penalty: 1.1, ..Default::default() };
        let new = || Sequence::new(model.forward_pass(&options).unwrap(), Sampler::new(sampling.clone()).unwrap());
        let continue_to = |sequence: &mut Sequence, start: &[u32], n: usize| {
            sequence.start(start, &[], |_, _| ControlFlow::Continue(())).unwrap();
            while sequence.ids().len() < n {
                let id = sequence.step(&[], usize::MAX, &[]).unwrap();
                sequence.push(id).unwrap();
            }
            sequence.ids().to_vec()
        };
        let prompt = [1, 403, 407, 261, 378];
        let whole = continue_to(&mut new(), &prompt, 40);
        for cut in prompt.len()..whole.len() {
            assert_eq!(continue_to(&mut new(), &whole[..cut], whole.len()), whole, "cut at {cut}");
        }
    }

    /// Forty tokens after a prompt.
    fn forty_tokens(pass: Box<dyn ForwardPass>, sampling: &SamplerOptions, forbidden: &[u32]) -> Vec<u32> {
        let mut sequence = Sequence::new(pass, Sampler::new(sampling.clone()).unwrap());
        sequence.start(&[1, 403, 407, 261, 378], &[], |_, _| ControlFlow::Continue(())).unwrap();
        for _ in 0..40 {
            let id = sequence.step(forbidden, usize::MAX, &[]).unwrap();
            sequence.push(id).unwrap();
        }
        sequence.ids().to_vec()
    }

    #[test]
    fn short_lists_and_all_logits_give_the_same_tokens() {
        let model = Model::built_in().unwrap();
        let options = EngineOptions { device: Device::Cpu, n_ubatch: Some(2), ..Default::default() };
        let defaults = SamplerOptions { seed: Some(3), ..Default::default() };
        for sampling in [
            SamplerOptions { temperature: 0.0, ..defaults.clone() },
            SamplerOptions { top_k: 5, temperature: 1.5, ..defaults.clone() },
            SamplerOptions { repeat_penalty: 1.5, ..defaults.clone() },
            // Sometimes the list is too short.
            SamplerOptions { top_k: 0, top_p: 1.0, min_p: 0.02, ..defaults.clone() },
            SamplerOptions { top_k: 0, ..defaults.clone() },
            defaults,
        ] {
            for forbidden in [&[][..], &[2, 286]] {
                let pass = || model.forward_pass(&options).unwrap();
                let expected = forty_tokens(pass(), &sampling, forbidden);
                for k in [8, 128] {
                    let lists = short_lists(2, k);
                    assert_eq!(forty_tokens(lists, &sampling, forbidden), expected, "{sampling:?} from {k}");
                }
            }
        }
    }

    /// Allows one token after another.
    struct Only(Vec<u32>);

    impl Constraint for Only {
        fn allowed(&mut self, mask: &mut [u32]) -> Result<(), String> {
            let id = *self.0.first().ok_or("the text has ended")?;
            mask[id as usize / 32] |= 1 << (id % 32);
            Ok(())
        }
        fn accept(&mut self, id: u32) -> Result<(), String> {
            assert_eq!(id, self.0.remove(0));
            Ok(())
        }
        fn is_complete(&self) -> bool {
            self.0.is_empty()
        }
    }

    #[test]
    fn a_constraint_chooses() {
        for k in [0, 16] {
            let pass = short_lists(DEFAULT_UBATCH, k);
            let mut sequence = Sequence::new(pass, Sampler::new(SamplerOptions::greedy()).unwrap());
            sequence.start(&[1, 403], &[], |_, _| ControlFlow::Continue(())).unwrap();
            sequence.set_constraint(Some(Box::new(Only(vec![300, 7]))));
            for id in [300, 7] {
                assert!(!sequence.is_complete());
                assert_eq!(sequence.step(&[], usize::MAX, &[]).unwrap(), id);
                sequence.push(id).unwrap();
            }
            assert!(sequence.is_complete());
            let error = sequence.step(&[], usize::MAX, &[]).unwrap_err();
            assert_eq!(error.to_string(), "the constraint on the text failed: the text has ended");
            sequence.set_constraint(Some(Box::new(Only(vec![300]))));
            let error = sequence.step(&[300], usize::MAX, &[]).unwrap_err();
            assert_eq!(error.to_string(), "the constraint on the text failed: no token may come next");
            assert_eq!(sequence.ids(), [1, 403, 300, 7]);
        }
    }
}
