//! Profiles: the time of each kernel of a forward pass.

use std::borrow::Cow;
use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::BatchToken;

/// The phase of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Phase {
    /// Tokens of a prompt.
    Prefill,
    /// One token of each sequence, whether or not it is an output token.
    Decode,
}

impl Phase {
    /// The phase of a step over `batch`: decode if no sequence has two tokens in it. A prompt of a single token counts
    /// as decode.
    pub fn of(batch: &[BatchToken]) -> Self {
        let alone = |(i, t): (usize, &BatchToken)| batch[..i].iter().all(|u| u.seq != t.seq);
        if batch.iter().enumerate().all(alone) { Self::Decode } else { Self::Prefill }
    }

    /// Its name: `"prefill"` or `"decode"`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// The steps of a forward pass since [`ForwardPass::start_profile`](crate::ForwardPass::start_profile), in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Profile {
    /// Name of the device, for display.
    pub device: String,
    /// The way in which untimed steps run differently, for display; `None` if they do not.
    pub note: Option<&'static str>,
    /// The steps; a batch of several micro-batches is several steps.
    pub steps: Vec<ProfiledStep>,
}

/// One micro-batch through all layers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProfiledStep {
    /// Its phase.
    pub phase: Phase,
    /// Its tokens.
    pub n_tokens: usize,
    /// Its start, from the start of the profile.
    pub start: Duration,
    /// Its duration without timers between kernels, if the backend can measure that; otherwise its duration.
    pub time: Duration,
    /// Its kernels in the order of their runs, part by part.
    pub kernels: Vec<KernelTime>,
}

/// One run of a kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelTime {
    /// The kernel's name.
    pub kernel: Cow<'static, str>,
    /// Its start, from the start of the profile.
    pub start: Duration,
    /// Its duration.
    pub time: Duration,
    /// Index of the concurrent part of the step that it belongs to. Kernels of one part follow each other.
    pub part: usize,
}

/// All runs of a kernel in one phase.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelTotal {
    /// The kernel's name.
    pub kernel: Cow<'static, str>,
    /// Number of runs.
    pub calls: usize,
    /// Total duration.
    pub time: Duration,
}

impl Profile {
    /// The steps of one phase.
    pub fn of_phase(&self, phase: Phase) -> impl Iterator<Item = &ProfiledStep> {
        self.steps.iter().filter(move |step| step.phase == phase)
    }

    /// Maximum number of concurrent parts in a step of one phase; 1 if none was divided.
    pub fn parts(&self, phase: Phase) -> usize {
        self.of_phase(phase).flat_map(|step| &step.kernels).map(|run| run.part + 1).max().unwrap_or(1)
    }

    /// The kernels of one phase, longest total first.
    pub fn totals(&self, phase: Phase) -> Vec<KernelTotal> {
        let mut totals: Vec<KernelTotal> = Vec::new();
        let mut places = HashMap::new();
        for run in self.of_phase(phase).flat_map(|step| &step.kernels) {
            let place = *places.entry(&run.kernel).or_insert_with(|| {
                totals.push(KernelTotal { kernel: run.kernel.clone(), calls: 0, time: Duration::ZERO });
                totals.len() - 1
            });
            totals[place].calls += 1;
            totals[place].time += run.time;
        }
        totals.sort_by_key(|total| std::cmp::Reverse(total.time));
        totals
    }
}

/// Collects a [`Profile`] on the thread that runs the steps.
#[derive(Debug)]
pub struct Profiler {
    /// Start of the profile.
    started: Instant,
    /// Start of the running kernel.
    mark: Instant,
    /// The steps so far.
    profile: Profile,
}

impl Profiler {
    /// A profile that starts now; `device` is the name of the device.
    pub fn new(device: String) -> Self {
        let now = Instant::now();
        Self { started: now, mark: now, profile: Profile { device, ..Profile::default() } }
    }

    /// Adds a [`note`](Profile::note).
    #[must_use]
    pub fn with_note(mut self, note: &'static str) -> Self {
        self.profile.note = Some(note);
        self
    }

    /// Starts a step.
    pub fn begin_step(&mut self, phase: Phase, n_tokens: usize) {
        self.mark = Instant::now();
        let start = self.mark - self.started;
        self.profile.steps.push(ProfiledStep { phase, n_tokens, start, time: Duration::ZERO, kernels: Vec::new() });
    }

    /// Records that `kernel` has run since the last lap, or since the step's start.
    pub fn lap(&mut self, kernel: &'static str) {
        let now = Instant::now();
        let Some(step) = self.profile.steps.last_mut() else { return };
        let time = now - self.mark;
        step.kernels.push(KernelTime { kernel: kernel.into(), start: self.mark - self.started, time, part: 0 });
        step.time += time;
        self.mark = now;
    }

    /// A profiler for a concurrent part of the present step, which starts now; see [`join`](Self::join).
    #[must_use]
    pub fn part(&self) -> Self {
        let steps = self.profile.steps.last().map(|step| ProfiledStep { kernels: Vec::new(), ..step.clone() });
        let profile = Profile { steps: steps.into_iter().collect(), ..Profile::default() };
        Self { started: self.started, mark: Instant::now(), profile }
    }

    /// Ends the concurrent parts of the step and adds their kernels to it.
    pub fn join(&mut self, parts: impl IntoIterator<Item = Self>) {
        self.mark = Instant::now();
        let Some(step) = self.profile.steps.last_mut() else { return };
        for (part, profiler) in parts.into_iter().enumerate() {
            let kernels = profiler.profile.steps.into_iter().flat_map(|step| step.kernels);
            step.kernels.extend(kernels.map(|run| KernelTime { part, ..run }));
        }
        step.time = (self.mark - self.started).saturating_sub(step.start);
    }

    /// Adds a step that was timed elsewhere; its times count from `begin`.
    pub fn add_step(&mut self, begin: Instant, mut step: ProfiledStep) {
        let begin = begin.saturating_duration_since(self.started);
        step.start += begin;
        for run in &mut step.kernels {
            run.start += begin;
        }
        self.profile.steps.push(step);
    }

    /// The profile.
    pub fn finish(self) -> Profile {
        self.profile
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(seq: usize, pos: usize) -> BatchToken {
        BatchToken { id: 0, seq, pos, output: true }
    }

    #[test]
    fn a_step_with_one_token_of_each_sequence_is_decode() {
        assert_eq!(Phase::of(&[token(0, 9)]), Phase::Decode);
        assert_eq!(Phase::of(&[token(0, 9), token(2, 4), token(1, 0)]), Phase::Decode);
        assert_eq!(Phase::of(&[token(0, 9), token(1, 4), token(0, 10)]), Phase::Prefill);
    }

    #[test]
    fn parts_of_a_step_are_timed_side_by_side() {
        let mut profiler = Profiler::new("CPU".into());
        profiler.begin_step(Phase::Prefill, 3);
        profiler.lap("alone");
        profiler.begin_step(Phase::Decode, 2);
        let mut parts = [profiler.part(), profiler.part()];
        for kernel in ["a", "b"] {
            for part in &mut parts {
                part.lap(kernel);
            }
        }
        profiler.join(parts);
        let profile = profiler.finish();
        assert_eq!([Phase::Prefill, Phase::Decode].map(|phase| profile.parts(phase)), [1, 2]);
        let step = &profile.steps[1];
        let found: Vec<_> = step.kernels.iter().map(|run| (&*run.kernel, run.part)).collect();
        assert_eq!(found, [("a", 0), ("b", 0), ("a", 1), ("b", 1)]);
        for pair in step.kernels.chunks(2) {
            assert!(step.start <= pair[0].start && pair[0].start + pair[0].time == pair[1].start);
            assert!(pair[1].start + pair[1].time <= step.start + step.time);
        }
        assert_eq!(profile.totals(Phase::Decode).iter().map(|total| total.calls).sum::<usize>(), 4);
    }

    #[test]
    fn laps_follow_one_another_and_add_up_to_the_step() {
        let mut profiler = Profiler::new("CPU".into());
        profiler.lap("before any step");
        for (phase, n_tokens) in [(Phase::Prefill, 7), (Phase::Decode, 1), (Phase::Decode, 1)] {
            profiler.begin_step(phase, n_tokens);
            for kernel in ["a", "b", "a"] {
                profiler.lap(kernel);
            }
        }
        let profile = profiler.finish();
        assert_eq!(profile.steps.len(), 3);
        for step in &profile.steps {
            assert_eq!(step.kernels.len(), 3);
            assert_eq!(step.start, step.kernels[0].start);
            assert_eq!(step.time, step.kernels.iter().map(|k| k.time).sum());
            for pair in step.kernels.windows(2) {
                assert_eq!(pair[0].start + pair[0].time, pair[1].start);
            }
        }
        let calls = |phase| {
            let mut calls: Vec<_> = profile.totals(phase).iter().map(|t| (t.kernel.to_string(), t.calls)).collect();
            calls.sort();
            calls
        };
        assert_eq!(calls(Phase::Prefill), [("a".into(), 2), ("b".into(), 1)]);
        assert_eq!(calls(Phase::Decode), [("a".into(), 4), ("b".into(), 2)]);
        let total: Duration = profile.totals(Phase::Decode).iter().map(|t| t.time).sum();
        assert_eq!(total, profile.of_phase(Phase::Decode).map(|step| step.time).sum());
    }
}
