//! A line on stderr that shows how far a long task is.

use std::io::IsTerminal;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Tasks shorter than this show nothing.
const DELAY: Duration = Duration::from_millis(700);

/// The progress of one task. Nothing is drawn in the task's first moments, nor where stderr is no terminal; the line
/// goes away when this is dropped.
pub struct Progress {
    bar: ProgressBar,
    /// The thread that makes the bar visible; it ends when the sender is gone.
    delay: Option<(Sender<()>, JoinHandle<()>)>,
}

impl Progress {
    /// A task of unknown length.
    pub fn spinner(task: &'static str) -> Self {
        let style = ProgressStyle::with_template("{spinner} {msg} {elapsed}").expect("the template is valid");
        Self::start(ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden()), style, task)
    }

    /// A task of `total` steps.
    pub fn steps(task: &'static str, total: u64) -> Self {
        let style = ProgressStyle::with_template("{msg} [{bar:30}] {pos}/{len} {elapsed}, {eta} left")
            .expect("the template is valid")
            .progress_chars("=> ");
        Self::start(ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::hidden()), style, task)
    }

    /// `done` steps are done.
    pub fn set(&self, done: u64) {
        self.bar.set_position(done);
    }

    /// Names the part of the task that is under way.
    pub fn describe(&self, part: String) {
        self.bar.set_message(part);
    }

    fn start(bar: ProgressBar, style: ProgressStyle, task: &'static str) -> Self {
        bar.set_style(style);
        bar.set_message(task);
        let delay = std::io::stderr().is_terminal().then(|| {
            let (done, wait) = mpsc::channel();
            let bar = bar.clone();
            let show = move || {
                if wait.recv_timeout(DELAY) == Err(RecvTimeoutError::Timeout) {
                    bar.set_draw_target(ProgressDrawTarget::stderr());
                    bar.enable_steady_tick(Duration::from_millis(100));
                }
            };
            (done, std::thread::spawn(show))
        });
        Self { bar, delay }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some((done, thread)) = self.delay.take() {
            drop(done);
            // The thread only draws; if it failed, there is a line less to clear.
            let _ = thread.join();
        }
        self.bar.finish_and_clear();
    }
}
