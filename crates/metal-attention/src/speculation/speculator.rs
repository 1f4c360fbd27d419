//! The decision how many drafts each sequence gets.

use std::time::{Duration, Instant};

use super::confidence::Acceptance;
use super::{Draft, DraftDepth, DraftRequest, Drafter, Evaluated, StepCosts};
use crate::{BatchToken, ForwardError, ForwardPass, HiddenRows};

/// The probability that a token holds which a constraint forces: the model may spell the text otherwise.
const FORCED_CONFIDENCE: f32 = 0.9;

/// Steps of a trial: of a new drafter, or of one that was paused.
const TRIAL: usize = 8;

/// A trial has the drafts that hold, with those before them, with this probability, and at least one. More than one shows what a draft
/// costs: the first of a proposal may cost more, since the drafter then reads the last tokens.
const TRIAL_CONFIDENCE: f32 = 0.3;

/// Steps of the first pause, and of the longest; each is twice as long as the one before.
const PAUSES: [usize; 2] = [256, 4096];

/// Decode steps of which the second half is timed.
const PLAIN_STEPS: usize = 12;

/// Weight of the latest proposal in the average of what one costs.
const LATEST: f64 = 0.2;

/// A drafter, and how many of its drafts pay. [`Generator`](crate::Generator) and [`Scheduler`](crate::scheduler::Scheduler) have
/// one; a caller that evaluates batches itself makes its own.
///
/// A drafter that [estimates](Drafter::estimates) how likely its drafts hold is always requested to propose, and the likely
/// drafts are taken. Of another one what held before decides how many drafts are requested. If none pay, it pauses: no step
/// returns hidden rows for it, so that steps run ahead as without a drafter. After a pause it is tried again.
pub struct Speculator {
    drafter: Box<dyn Drafter>,
    depth: DraftDepth,
    costs: StepCosts,
    /// How often drafts of each sequence held, by its index in the KV cache.
    acceptance: Vec<Acceptance>,
    /// Seconds that one draft of a proposal takes; `None` before the second proposal.
    draft_seconds: Option<f64>,
    /// Whether a proposal was timed since the start or the last pause. The first one reads the text so far, so that it does not count.
    has_proposed: bool,
    /// Whether steps that return hidden rows cost no more than others, which run ahead on GPUs alone.
    hidden_is_free: bool,
    /// Time that the drafter took since the last step was recorded.
    drafting: Duration,
    pause: Pause,
}

/// Whether a drafter is tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pause {
    /// It proposes. For this many steps it does so although no drafts seem to pay.
    Active { trial: usize, next_pause: usize },
    /// It does not, for this many steps.
    Paused { left: usize, next_pause: usize },
}

impl Speculator {
    /// Speculation with this drafter, before any step was timed.
    pub fn new(drafter: Box<dyn Drafter>, depth: DraftDepth) -> Self {
        Self {
            drafter,
            depth,
            costs: StepCosts::default(),
            acceptance: Vec::new(),
            draft_seconds: None,
            has_proposed: false,
            hidden_is_free: false,
            drafting: Duration::ZERO,
            pause: Pause::Active { trial: TRIAL, next_pause: PAUSES[0] },
        }
    }

    /// Times decode steps without drafts over 1, 2, 4, ... up to `n_seq` sequences of `pass`, which are empty, if the drafter reads
    /// hidden rows: steps that return such rows do not run ahead, so that without this it would not be known what steps cost
    /// without a drafter. Takes a few steps; none on a CPU, where no step runs ahead.
    pub fn time_plain_steps(&mut self, pass: &mut dyn ForwardPass, n_seq: usize) {
        self.hidden_is_free = pass.device().kind == "cpu";
        if self.hidden_is_free || self.drafter.reads_hidden().is_empty() || !pass.spec().generates_text() {
            return;
        }
        let n_seq = n_seq.min(pass.n_seq());
        for size in (0..).map(|i| 1 << i).take_while(|&size| size < n_seq).chain([n_seq]) {
            if let Err(why) = self.time_steps(pass, size) {
                tracing::debug!("decode steps of {size} sequences were not timed: {why}");
            }
            for seq in 0..size {
                pass.rewind(seq, 0);
            }
        }
    }

    fn time_steps(&mut self, pass: &mut dyn ForwardPass, n_seq: usize) -> Result<(), ForwardError> {
        let mut ids = vec![0; n_seq];
        for pos in 0..PLAIN_STEPS.min(pass.n_ctx()) {
            let token = |(seq, &id): (usize, &u32)| BatchToken { id, seq, pos, output: true };
            let batch: Vec<_> = ids.iter().enumerate().map(token).collect();
            let start = Instant::now();
            ids = pass.forward_greedy(&batch)?;
            // The first steps are not submitted ahead.
            if pos >= PLAIN_STEPS / 2 {
                self.costs.record(n_seq, 0, start.elapsed());
            }
        }
        Ok(())
    }

    /// The most drafts of a sequence in a step.
    pub fn max_depth(&self) -> usize {
        self.depth.max()
    }

    /// The drafter.
    pub fn drafter(&self) -> &dyn Drafter {
        &*self.drafter
    }

    /// The hidden rows of all tokens that the next evaluation returns for the drafter ([`Drafter::reads_hidden`]). `prompt`: whether
    /// it has tokens of prompts.
    pub fn reads_hidden(&self, prompt: bool) -> &[usize] {
        match self.pause {
            Pause::Paused { .. } if !prompt => &[],
            Pause::Paused { .. } | Pause::Active { .. } => self.drafter.reads_hidden(),
        }
    }

    /// Passes on that the target has evaluated the inputs `ids` of sequence `seq`, from position `first` on, whose hidden rows are
    /// those of `hidden` from `row` on. No effect if `hidden` has no rows.
    pub fn observe(&mut self, hidden: &HiddenRows, row: usize, seq: usize, first: usize, ids: &[u32]) {
        let rows: Vec<&[f32]> = (0..hidden.n_layers()).map(|i| hidden.rows_of_layer(i, row..row + ids.len())).collect();
        if rows.is_empty() || ids.is_empty() {
            return;
        }
        let evaluated = Evaluated { seq, first, ids, hidden: &rows };
        let start = Instant::now();
        if let Err(why) = self.drafter.observe(evaluated) {
            tracing::warn!("the {} drafter failed: {why}", self.drafter.name());
        }
        self.drafting += start.elapsed();
    }

    /// A sequence has ended ([`Drafter::forget`]).
    pub fn forget(&mut self, seq: usize) {
        self.drafter.forget(seq);
    }

    /// The drafts of each request for a step over `n_seq` sequences, those of the requests included: as many as give the
    /// most tokens a second, and at most `max_rows` in all. Where a constraint forces tokens (`forced`, one list for each request,
    /// empty: none), these are the drafts. `target`: the forward pass whose sequences they are; none of them changes.
    pub fn propose(
        &mut self,
        target: &mut dyn ForwardPass,
        n_seq: usize,
        max_rows: usize,
        requests: &[DraftRequest<'_>],
        forced: &[Vec<u32>],
    ) -> Vec<Draft> {
        if requests.is_empty() || max_rows == 0 {
            return vec![Draft::default(); requests.len()];
        }
        let mut drafts = if self.drafter.estimates() {
            self.drafts_of(target, requests)
        } else {
            self.drafts_by_acceptance(target, n_seq, max_rows, requests)
        };
        for ((draft, ids), request) in drafts.iter_mut().zip(forced).zip(requests) {
            if !ids.is_empty() {
                *draft = Draft { ids: ids.clone(), confidence: vec![FORCED_CONFIDENCE; ids.len()] };
                draft.truncate(request.n);
            }
        }
        let confidence: Vec<_> = drafts.iter().map(|draft| &draft.confidence[..]).collect();
        let likeliest = likeliest_first(&confidence, max_rows);
        let n = match self.depth {
            DraftDepth::Adaptive(_) if self.drafter.estimates() => self.costs.best_depth(n_seq, &likeliest, 0.0).0,
            // The others were requested by what they cost.
            DraftDepth::Adaptive(_) | DraftDepth::Fixed(_) => likeliest.len(),
        };
        let lengths = lengths_of(&confidence, &likeliest[..n]);
        for (draft, n) in drafts.iter_mut().zip(lengths) {
            draft.truncate(n);
        }
        drafts
    }

    /// What the drafter proposes.
    fn drafts_of(&mut self, target: &mut dyn ForwardPass, requests: &[DraftRequest<'_>]) -> Vec<Draft> {
        self.drafter.propose_beside(target, requests, None).unwrap_or_else(|why| {
            tracing::warn!("the {} drafter failed: {why}", self.drafter.name());
            vec![Draft::default(); requests.len()]
        })
    }

    /// The drafts of a drafter that does not estimate how likely they hold.
    fn drafts_by_acceptance(
        &mut self,
        target: &mut dyn ForwardPass,
        n_seq: usize,
        max_rows: usize,
        requests: &[DraftRequest<'_>],
    ) -> Vec<Draft> {
        let lengths = match self.depth {
            DraftDepth::Fixed(_) => requests.iter().map(|request| request.n).collect(),
            DraftDepth::Adaptive(_) => self.lengths_by_acceptance(n_seq, max_rows, requests),
        };
        let longest = lengths.iter().copied().max().unwrap_or(0);
        if longest == 0 {
            return vec![Draft::default(); requests.len()];
        }
        let shorter: Vec<_> =
            requests.iter().zip(&lengths).map(|(request, &n)| DraftRequest { n, ..*request }).collect();
        let start = Instant::now();
        let mut drafts = self.drafts_of(target, &shorter);
        self.drafting += start.elapsed();
        for (draft, request) in drafts.iter_mut().zip(requests) {
            draft.confidence = self.acceptance(request.seq).confidence(draft.ids.len());
        }
        drafts
    }

    /// How many drafts to request for each sequence, by what held before and by what steps and proposals cost.
    fn lengths_by_acceptance(&mut self, n_seq: usize, max_rows: usize, requests: &[DraftRequest<'_>]) -> Vec<usize> {
        let none = vec![0; requests.len()];
        let (trial, next_pause) = match &mut self.pause {
            Pause::Paused { left, next_pause } => {
                *left -= 1;
                if *left == 0 {
                    // The next step returns hidden rows again.
                    self.pause = Pause::Active { trial: TRIAL, next_pause: *next_pause };
                }
                return none;
            }
            Pause::Active { trial, next_pause } => (*trial, *next_pause),
        };
        let confidence: Vec<Vec<f32>> =
            requests.iter().map(|request| self.acceptance(request.seq).confidence(request.n)).collect();
        if !self.costs.is_known(n_seq) {
            return none;
        }
        if let Some(of_one) = self.draft_seconds {
            let best = self.best_lengths(n_seq, max_rows, &confidence, of_one);
            if best.iter().any(|&n| n > 0) {
                self.pause = Pause::Active { trial: TRIAL, next_pause: PAUSES[0] };
                return best;
            }
        }
        // No drafts pay, by what is known, or it is not known yet what one costs.
        let Some(trial) = trial.checked_sub(1) else {
            self.pause = Pause::Paused { left: next_pause, next_pause: (2 * next_pause).min(PAUSES[1]) };
            // The first proposal after the pause reads the text since.
            self.has_proposed = false;
            return none;
        };
        self.pause = Pause::Active { trial, next_pause };
        let likely = |of: &Vec<f32>| cumulative(of).take_while(|&p| p >= TRIAL_CONFIDENCE).count();
        let wanted: Vec<_> = confidence.iter().map(|of| likely(of).max(1).min(of.len())).collect();
        let up_to: Vec<_> = confidence.iter().zip(wanted).map(|(of, n)| &of[..n]).collect();
        lengths_of(&up_to, &likeliest_first(&up_to, max_rows))
    }

    /// The numbers of drafts that give the most tokens a second. `confidence`: the probabilities that drafts hold, of each sequence;
    /// `draft_seconds`: what one draft of a proposal costs.
    fn best_lengths(&self, n_seq: usize, max_rows: usize, confidence: &[Vec<f32>], draft_seconds: f64) -> Vec<usize> {
        let longest = confidence.iter().map(Vec::len).max().unwrap_or(0);
        let (mut best, mut best_rate) = (vec![0; confidence.len()], 0.0);
        for depth in 0..=longest {
            let up_to: Vec<_> = confidence.iter().map(|of| &of[..depth.min(of.len())]).collect();
            let likeliest = likeliest_first(&up_to, max_rows);
            let (n, rate) = self.costs.best_depth(n_seq, &likeliest, draft_seconds * depth as f64);
            if rate > best_rate {
                (best, best_rate) = (lengths_of(&up_to, &likeliest[..n]), rate);
            }
        }
        best
    }

    /// How often drafts of a sequence held.
    fn acceptance(&mut self, seq: usize) -> &mut Acceptance {
        if self.acceptance.len() <= seq {
            self.acceptance.resize_with(seq + 1, Acceptance::default);
        }
        &mut self.acceptance[seq]
    }

    /// Records that `n_held` of `n` drafts of a sequence held.
    pub fn record_verified(&mut self, seq: usize, n: usize, n_held: usize) {
        self.acceptance(seq).observe(n, n_held);
    }

    /// Records that the evaluation of a decode step over `n_seq` sequences, with `n_drafts` drafts in all, took `time`.
    /// `read_hidden`: whether it returned hidden rows; without drafts it is then no measure of a step without a drafter, unless
    /// such rows cost nothing.
    pub fn record_step(&mut self, n_seq: usize, n_drafts: usize, read_hidden: bool, time: Duration) {
        if n_drafts == 0 && read_hidden && !self.hidden_is_free {
            return;
        }
        self.costs.record(n_seq, n_drafts, time);
        let drafting = std::mem::take(&mut self.drafting);
        tracing::trace!("a step of {n_seq} sequences and {n_drafts} drafts took {time:?}, the drafter {drafting:?}");
        if n_drafts == 0 {
            return;
        }
        let of_one = drafting.as_secs_f64() / n_drafts.div_ceil(n_seq) as f64;
        if std::mem::replace(&mut self.has_proposed, true) {
            self.draft_seconds = Some(match self.draft_seconds {
                None => of_one,
                Some(average) => average + LATEST * (of_one.min(3.0 * average) - average),
            });
        }
    }
}

/// The most drafts of a step of `pass` over `n_seq` sequences: all fit one micro-batch, and in models with recurrent layers their
/// states take at most half of the slots that are free or have checkpoints, so that prefixes can still be reused.
pub fn max_drafts_of_step(pass: &dyn ForwardPass, n_seq: usize) -> usize {
    let states = pass.cache_pages().states;
    let usable = states.free + states.checkpoints;
    let of_states = if states.total == 0 { usize::MAX } else { (usable / 2).saturating_sub(n_seq) };
    pass.n_ubatch().saturating_sub(n_seq).min(of_states)
}

/// The probability of each draft that it holds with all before it.
fn cumulative(confidence: &[f32]) -> impl Iterator<Item = f32> {
    confidence.iter().scan(1.0, |all, p| {
        *all *= p;
        Some(*all)
    })
}

/// The probabilities that drafts of all sequences hold with all before them, the highest ones first, at most `max_rows`.
fn likeliest_first(confidence: &[&[f32]], max_rows: usize) -> Vec<f32> {
    let mut of_all: Vec<f32> = confidence.iter().flat_map(|of| cumulative(of)).collect();
    of_all.sort_unstable_by(|a, b| b.total_cmp(a));
    of_all.truncate(max_rows);
    of_all
}

/// The numbers of drafts of each sequence that are among `chosen`, the first of [`likeliest_first`]. The probabilities fall within
/// a sequence, so that these are the first ones of each.
fn lengths_of(confidence: &[&[f32]], chosen: &[f32]) -> Vec<usize> {
    let Some(&least) = chosen.last() else { return vec![0; confidence.len()] };
    let mut left = chosen.len();
    let mut length = |of: &&[f32]| {
        let n = cumulative(of).take_while(|&p| p >= least).count().min(left);
        left -= n;
        n
    };
    confidence.iter().map(&mut length).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MemoryUse, Model};
    use metal_attention_model::{NullExecutor, Session, SessionOptions, Watch};

    /// A forward pass that the drafter does not read.
    fn target() -> Session<NullExecutor> {
        let spec = Model::built_in().unwrap().spec().clone();
        Session::new(NullExecutor::new(spec, &SessionOptions::default(), Watch::default()))
    }

    /// Proposes the ids 1, 2, ... with a confidence for each sequence, if it has one.
    struct Confident(Vec<f32>);

    impl Drafter for Confident {
        fn name(&self) -> &'static str {
            "confident"
        }

        fn estimates(&self) -> bool {
            !self.0.is_empty()
        }

        fn propose(&mut self, requests: &[DraftRequest<'_>]) -> Result<Vec<Draft>, ForwardError> {
            let of = |request: &DraftRequest<'_>| Draft {
                ids: (1..=request.n as u32).collect(),
                confidence: self.0.get(request.seq).map_or(Vec::new(), |&p| vec![p; request.n]),
            };
            Ok(requests.iter().map(of).collect())
        }

        fn memory_use(&self) -> MemoryUse {
            MemoryUse::default()
        }
    }

    fn requests() -> Vec<DraftRequest<'static>> {
        (0..3).map(|seq| DraftRequest { seq, ids: &[7], prediction: &[], n: 8 }).collect()
    }

    fn lengths(speculator: &mut Speculator, max_rows: usize) -> Vec<usize> {
        speculator.propose(&mut target(), 3, max_rows, &requests(), &[]).iter().map(|draft| draft.ids.len()).collect()
    }

    /// A speculator that knows what steps cost.
    fn timed(confidence: Vec<f32>) -> Speculator {
        let mut speculator = Speculator::new(Box::new(Confident(confidence)), DraftDepth::default());
        for (n_rows, micros) in [(3, 100), (6, 115), (12, 150), (27, 400)] {
            for _ in 0..2 {
                speculator.record_step(3, n_rows - 3, false, Duration::from_micros(micros));
            }
        }
        speculator
    }

    #[test]
    fn likely_sequences_get_more_drafts() {
        let confidence = vec![0.9, 0.2, 0.6];
        let mut speculator = Speculator::new(Box::new(Confident(confidence.clone())), DraftDepth::default());
        assert_eq!(lengths(&mut speculator, 99), [0, 0, 0]);
        let mut speculator = timed(confidence.clone());
        assert_eq!(lengths(&mut speculator, 99), [8, 0, 1]);
        assert_eq!(lengths(&mut speculator, 6), [5, 0, 1]);
        assert_eq!(lengths(&mut speculator, 0), [0, 0, 0]);
        let forced = [vec![], vec![5, 6], vec![]];
        let drafts = speculator.propose(&mut target(), 3, 99, &requests(), &forced);
        assert_eq!(drafts[1].ids, [5, 6]);
        let mut speculator = Speculator::new(Box::new(Confident(confidence)), DraftDepth::Fixed(8));
        assert_eq!(lengths(&mut speculator, 20).iter().sum::<usize>(), 20);
    }

    #[test]
    fn what_held_decides_how_many_drafts_are_requested() {
        let mut speculator = timed(Vec::new());
        assert!(lengths(&mut speculator, 99).iter().all(|&n| n > 1), "what is assumed pays");
        for _ in 0..100 {
            speculator.record_verified(0, 4, 4);
            speculator.record_verified(1, 4, 0);
            speculator.record_verified(2, 4, 1);
        }
        let of = lengths(&mut speculator, 99);
        assert!(of[0] >= 4 && of[1] == 0 && of[2] == 1, "{of:?}");
    }

    #[test]
    fn a_drafter_that_gains_nothing_pauses() {
        let mut speculator = timed(Vec::new());
        for seq in 0..3 {
            for _ in 0..200 {
                speculator.record_verified(seq, 1, 0);
            }
        }
        let steps = |speculator: &mut Speculator, n: usize| -> usize {
            (0..n).filter(|_| lengths(speculator, 99).iter().any(|&n| n > 0)).count()
        };
        assert_eq!(steps(&mut speculator, TRIAL + 1), TRIAL);
        assert_eq!(steps(&mut speculator, PAUSES[0]), 0);
        assert_eq!(steps(&mut speculator, TRIAL + 1), TRIAL);
        assert_eq!(steps(&mut speculator, 2 * PAUSES[0]), 0);
        // In the trial after that they hold.
        for seq in 0..3 {
            for _ in 0..200 {
                speculator.record_verified(seq, 1, 1);
            }
        }
        assert_eq!(steps(&mut speculator, 100), 100);
    }
}
