//! The turns of steps and picture encoders on the cores.
//!
//! Both have threads for all cores. A region of a step ends when its last thread has, so that beside an encoder each of the hundred
//! regions of a decode step would wait for a time slice of the operating system. Therefore the threads of an encoder pause between
//! two tasks while a step of any forward pass of the process runs; after [`PAUSE`] they work for [`WORK`] all the same, so that
//! pictures are encoded beside streams that never end.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// The longest pause of an encoder.
const PAUSE: Duration = Duration::from_millis(20);
/// The time in which an encoder works after a pause, whether or not a step runs.
const WORK: Duration = Duration::from_millis(10);
/// The time between two looks of a thread that pauses.
const LOOK: Duration = Duration::from_micros(100);

/// Steps that run now.
static STEPS: AtomicUsize = AtomicUsize::new(0);

/// Held while a step runs.
pub(crate) struct StepTurn(());

impl StepTurn {
    /// A step begins.
    pub(crate) fn begin() -> Self {
        STEPS.fetch_add(1, Ordering::Relaxed);
        Self(())
    }
}

impl Drop for StepTurn {
    fn drop(&mut self) {
        STEPS.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The turns of an encoder's threads.
pub(crate) struct EncoderTurns {
    /// The time from which the others are counted.
    start: Instant,
    /// Steps that run now.
    steps: &'static AtomicUsize,
    /// The end of the time in which the threads work whether or not a step runs, in nanoseconds.
    work_until: AtomicU64,
}

impl EncoderTurns {
    pub(crate) fn new() -> Self {
        Self::beside(&STEPS)
    }

    /// Turns beside the steps that `steps` counts.
    fn beside(steps: &'static AtomicUsize) -> Self {
        Self { start: Instant::now(), steps, work_until: AtomicU64::new(0) }
    }

    /// Pauses while a step runs, but not in the time of work that a pause has earned. Returns early if `stop` returns true.
    pub(crate) fn pause(&self, stop: impl Fn() -> bool) {
        let now = || self.start.elapsed().as_nanos() as u64;
        let mut begun = None;
        while self.steps.load(Ordering::Relaxed) > 0 {
            let time = now();
            let begun = *begun.get_or_insert(time);
            if time < self.work_until.load(Ordering::Relaxed) || stop() {
                return;
            }
            if time - begun >= PAUSE.as_nanos() as u64 {
                self.work_until.fetch_max(time + WORK.as_nanos() as u64, Ordering::Relaxed);
                return;
            }
            thread::sleep(LOOK);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_encoder_works_beside_an_endless_step_after_a_pause() {
        static STEPS_OF_TEST: AtomicUsize = AtomicUsize::new(0);
        let turns = EncoderTurns::beside(&STEPS_OF_TEST);
        turns.pause(|| panic!("no step runs"));
        STEPS_OF_TEST.store(1, Ordering::Relaxed);
        let looks = AtomicUsize::new(0);
        let look = || {
            looks.fetch_add(1, Ordering::Relaxed);
            false
        };
        turns.pause(look);
        // It looked several times, and has earned a time of work.
        assert!(looks.load(Ordering::Relaxed) > 1 && turns.work_until.load(Ordering::Relaxed) > 0);
        // A thread that is told to stop does not pause.
        turns.work_until.store(0, Ordering::Relaxed);
        turns.pause(|| true);
        assert_eq!(turns.work_until.load(Ordering::Relaxed), 0);
    }
}
