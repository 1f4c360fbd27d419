//! A line on stderr that shows the progress of a long task.
//!
//! A task counts steps. In addition the forward pass and the loader count their work in the [watch](interrupt::watch), so that
//! the line moves within a step. A thread draws the line.

use std::io::IsTerminal;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use metal_attention::Watch;

use crate::interrupt;

/// Nothing is shown of tasks that are shorter than this.
const DELAY: Duration = Duration::from_millis(700);

/// The time between two drawings.
const TICK: Duration = Duration::from_millis(100);

/// The progress line of one task. It is drawn only on a terminal, and only after a delay; it is removed when this value is
/// dropped.
pub struct ProgressLine {
    /// The line.
    bar: ProgressBar,
    /// The progress of the task, shared with the thread that draws.
    state: Arc<Mutex<State>>,
    /// The thread that draws; it ends when the sender is dropped. `None`: nothing is drawn.
    drawing: Option<(Sender<()>, JoinHandle<()>)>,
}

/// The progress of a task.
struct State {
    /// The time at which the task began, and the steps that were done before.
    begun: (Instant, u64),
    /// The steps done at the last report, and the watch's count of work at that time.
    done: (u64, u64),
    /// The work in the watch's count that makes one step. `None`: the watch does not count this task's work.
    work_of_step: Option<f64>,
    /// The number of steps of the task.
    total: u64,
    /// The watch of the program.
    watch: Watch,
}

impl State {
    /// The steps done now, including those that the watch has counted since the last report.
    fn position(&self) -> u64 {
        let (done, work) = self.done;
        let since = self.work_of_step.map_or(0, |step| ((self.watch.done() - work) as f64 / step) as u64);
        done.saturating_add(since).min(self.total)
    }

    /// Reports `done` steps.
    fn set(&mut self, done: u64) {
        self.done = (done, self.watch.done());
    }

    /// The remaining time at the speed so far, as the end of the line. Empty if no step is done yet, or all are.
    fn time_left(&self) -> String {
        let (start, before) = self.begun;
        let position = self.position();
        let (now, left) = (position.saturating_sub(before) as f64, (self.total - position) as f64);
        if now > 0.0 && left > 0.0 {
            format!(", {:.0}s left", start.elapsed().as_secs_f64() * left / now)
        } else {
            String::new()
        }
    }
}

impl ProgressLine {
    /// Shows a task of unknown length.
    pub fn spinner(task: &'static str) -> Self {
        Self::start(task, "{spinner} {msg} {elapsed}", 0)
    }

    /// Shows a task of `total` steps.
    pub fn steps(task: &'static str, total: u64) -> Self {
        Self::start(task, "{msg} [{bar:30}] {pos}/{len} {elapsed}{prefix}", total)
    }

    /// Shows a task as a share, of a total that [`set_of`](Self::set_of) sets; the watch counts the work between.
    pub fn share(task: &'static str) -> Self {
        let line = Self::start(task, "{msg} [{bar:30}] {percent}% {elapsed}{prefix}", 1);
        line.state().work_of_step = Some(1.0);
        line
    }

    /// Lets the line move within a step: `work_of_step` is the work of one step in the count of the program's
    /// [watch](interrupt::watch), for example the number of layers if a step is a token.
    pub fn watched(self, work_of_step: usize) -> Self {
        self.state().work_of_step = Some(work_of_step.max(1) as f64);
        self
    }

    /// Shows the loading of `total` bytes of weights instead of steps; the watch counts the bytes.
    pub fn weigh(&self, total: u64) {
        self.bar.set_style(style("{msg} [{bar:30}] {binary_bytes}/{binary_total_bytes} {elapsed}{prefix}"));
        self.bar.set_length(total);
        let mut state = self.state();
        (state.total, state.work_of_step) = (total, Some(1.0));
        state.set(0);
    }

    /// Sets the steps that were done before the task began, such as cached tokens; they do not count for the speed.
    pub fn begin_at(&self, done: u64) {
        let mut state = self.state();
        state.begun = (Instant::now(), done);
        state.set(done);
    }

    /// Reports that `done` steps are done.
    pub fn set(&self, done: u64) {
        self.state().set(done);
    }

    /// Reports that `done` of `total` steps are done, where the total is known only now.
    pub fn set_of(&self, done: u64, total: u64) {
        self.bar.set_length(total);
        let mut state = self.state();
        state.total = total;
        state.set(done);
    }

    /// Names the part of the task that runs now.
    pub fn describe(&self, part: String) {
        self.bar.set_message(part);
    }

    /// Hides the line while `write` prints to the terminal.
    pub fn suspend<T>(&self, write: impl FnOnce() -> T) -> T {
        self.bar.suspend(write)
    }

    /// Shows a task and starts the thread that draws.
    fn start(task: &'static str, template: &str, total: u64) -> Self {
        let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::hidden());
        bar.set_style(style(template));
        bar.set_message(task);
        let watch = interrupt::watch();
        let state = State { begun: (Instant::now(), 0), done: (0, watch.done()), work_of_step: None, total, watch };
        let state = Arc::new(Mutex::new(state));
        let drawing = std::io::stderr().is_terminal().then_some(()).and_then(|()| {
            let (done, wait) = mpsc::channel();
            let (bar, state) = (bar.clone(), Arc::clone(&state));
            let draw = move || {
                let mut delay = DELAY;
                while wait.recv_timeout(delay) == Err(RecvTimeoutError::Timeout) {
                    if delay == DELAY {
                        bar.set_draw_target(ProgressDrawTarget::stderr());
                        delay = TICK;
                    }
                    let state = lock(&state);
                    // `set_position`, `set_prefix` and `tick` draw, which needs no lock.
                    let (position, time_left) = (state.position(), state.time_left());
                    drop(state);
                    bar.set_position(position);
                    bar.set_prefix(time_left);
                    bar.tick();
                }
            };
            // If the thread cannot start, nothing is drawn.
            Some((done, std::thread::Builder::new().spawn(draw).ok()?))
        });
        Self { bar, state, drawing }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).expect("the template is valid").progress_chars("=> ")
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for ProgressLine {
    fn drop(&mut self) {
        if let Some((done, thread)) = self.drawing.take() {
            drop(done);
            // The thread only draws; if it panicked, there is nothing to do.
            let _ = thread.join();
        }
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_position_includes_work_within_a_step() {
        let watch = Watch::default();
        watch.advance(1000);
        let begun = (Instant::now().checked_sub(Duration::from_secs(10)).unwrap(), 3);
        let mut state = State { begun, done: (3, 1000), work_of_step: Some(20.0), total: 103, watch: watch.clone() };
        assert_eq!((state.position(), state.time_left().as_str()), (3, ""));
        watch.advance(20 * 50 + 19);
        assert_eq!((state.position(), state.time_left().as_str()), (53, ", 10s left"));
        // The work that a batch did in vain does not count once the batch is reported.
        state.set(43);
        assert_eq!((state.position(), state.time_left().as_str()), (43, ", 15s left"));
        watch.advance(1_000_000);
        assert_eq!((state.position(), state.time_left().as_str()), (103, ""));
        state.work_of_step = None;
        assert_eq!(state.position(), 43);
    }
}
