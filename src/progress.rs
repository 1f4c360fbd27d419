//! A line on stderr that shows how far a long task is.

use std::io::IsTerminal;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use metal_attention::Watch;

use crate::interrupt;

/// Tasks shorter than this show nothing.
const DELAY: Duration = Duration::from_millis(700);

/// How often the line is drawn.
const TICK: Duration = Duration::from_millis(100);

/// The progress of one task. Nothing is drawn in the task's first moments, nor where stderr is no terminal; the line
/// goes away when this is dropped.
pub struct Progress {
    bar: ProgressBar,
    state: Arc<Mutex<State>>,
    /// The thread that draws; it ends when the sender is gone.
    drawing: Option<(Sender<()>, JoinHandle<()>)>,
}

/// How far the task is.
struct State {
    /// When its first step began, and the steps that were done before.
    begun: (Instant, u64),
    /// Steps that are known to be done, and the work of the watch at that moment.
    done: (u64, u64),
    /// The watch's work that makes a step, where it tells how far the step under way is.
    work_of_step: Option<f64>,
    total: u64,
    watch: Watch,
}

impl State {
    /// Steps done by now.
    fn position(&self) -> u64 {
        let (done, work) = self.done;
        let since = self.work_of_step.map_or(0, |step| ((self.watch.done() - work) as f64 / step) as u64);
        done.saturating_add(since).min(self.total)
    }

    /// Goes on from `done` steps.
    fn set(&mut self, done: u64) {
        self.done = (done, self.watch.done());
    }

    /// What is left at the speed so far, as the end of the line; nothing where there is no speed yet, or only what no step
    /// counts.
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

impl Progress {
    /// A task of unknown length.
    pub fn spinner(task: &'static str) -> Self {
        Self::start(task, "{spinner} {msg} {elapsed}", 0)
    }

    /// A task of `total` steps.
    pub fn steps(task: &'static str, total: u64) -> Self {
        Self::start(task, "{msg} [{bar:30}] {pos}/{len} {elapsed}{prefix}", total)
    }

    /// The same task, with the part of a step that is under way: what makes a step is so much work of the program's
    /// [watch](interrupt::watch).
    pub fn watched(self, work_of_step: usize) -> Self {
        self.state().work_of_step = Some(work_of_step.max(1) as f64);
        self
    }

    /// The task turns out to be `total` bytes of weights to set up, which the watch counts.
    pub fn weigh(&self, total: u64) {
        self.bar.set_style(style("{msg} [{bar:30}] {binary_bytes}/{binary_total_bytes} {elapsed}{prefix}"));
        self.bar.set_length(total);
        let mut state = self.state();
        (state.total, state.work_of_step) = (total, Some(1.0));
        state.set(0);
    }

    /// `done` steps were done before this task, and take no time.
    pub fn begin_at(&self, done: u64) {
        let mut state = self.state();
        state.begun = (Instant::now(), done);
        state.set(done);
    }

    /// `done` steps are done.
    pub fn set(&self, done: u64) {
        self.state().set(done);
    }

    /// Names the part of the task that is under way.
    pub fn describe(&self, part: String) {
        self.bar.set_message(part);
    }

    /// Takes the line away while `write` writes others.
    pub fn suspend<T>(&self, write: impl FnOnce() -> T) -> T {
        self.bar.suspend(write)
    }

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
                    // Each of these draws.
                    let (position, time_left) = (state.position(), state.time_left());
                    drop(state);
                    bar.set_position(position);
                    bar.set_prefix(time_left);
                    bar.tick();
                }
            };
            // Without a thread there is no line.
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

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some((done, thread)) = self.drawing.take() {
            drop(done);
            // The thread only draws; if it failed, there is a line less to clear.
            let _ = thread.join();
        }
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_under_way_counts_as_far_as_it_is() {
        let watch = Watch::default();
        watch.advance(1000);
        let begun = (Instant::now().checked_sub(Duration::from_secs(10)).unwrap(), 3);
        let mut state = State { begun, done: (3, 1000), work_of_step: Some(20.0), total: 103, watch: watch.clone() };
        assert_eq!((state.position(), state.time_left().as_str()), (3, ""));
        watch.advance(20 * 50 + 19);
        assert_eq!((state.position(), state.time_left().as_str()), (53, ", 10s left"));
        // What a batch made in vain does not count once it is over.
        state.set(43);
        assert_eq!((state.position(), state.time_left().as_str()), (43, ", 15s left"));
        watch.advance(1_000_000);
        assert_eq!((state.position(), state.time_left().as_str()), (103, ""));
        state.work_of_step = None;
        assert_eq!(state.position(), 43);
    }
}
