//! The progress of downloads on stderr: a bar in a terminal, otherwise a line for each tenth of a file.

use std::io::{IsTerminal, Write};
use std::time::Instant;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use metal_attention_hub::DownloadObserver;

use crate::interrupt::{self, CtrlCGuard};
use crate::metadata_text::safe;
use crate::units;

/// Without a terminal, a line is printed each time that this many percent have arrived.
const STEP: u64 = 10;

/// The message of Ctrl-C.
const RESUMABLE: &str = "interrupted: what has arrived is kept, the same command goes on from there";

/// Shows the progress of downloads, one file after the other.
pub struct DownloadProgress {
    /// Ctrl-C ends the process at any time, even while it waits for a silent server: a partial file is kept.
    _resumable: CtrlCGuard,
    /// The bar. It is hidden until a file begins. `None`: stderr is no terminal.
    bar: Option<ProgressBar>,
    /// The present file.
    file: Option<DownloadedFile>,
}

/// The progress of one file.
struct DownloadedFile {
    /// The file's name.
    name: String,
    /// The file's size in bytes.
    bytes: u64,
    /// Bytes that an earlier download left.
    before: u64,
    /// The time at which the download began.
    start: Instant,
    /// The percentage in the last printed line.
    reported: u64,
}

impl DownloadProgress {
    /// Shows nothing until a file begins.
    pub fn new() -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let style = "[{bar:30}] {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec}, {eta} left";
            let style = ProgressStyle::with_template(style).expect("the template is valid").progress_chars("=> ");
            ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::hidden()).with_style(style)
        });
        Self { _resumable: interrupt::exit_on_ctrl_c(Some(RESUMABLE)), bar, file: None }
    }

    /// Prints a line, above the bar if there is one.
    fn line(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| write_line(text)),
            None => write_line(text),
        }
    }
}

impl DownloadObserver for DownloadProgress {
    fn file(&mut self, name: &str, done: u64, bytes: u64) {
        let resumed = if done > 0 { format!(", {} are there already", units::bytes(done)) } else { String::new() };
        self.line(&format!("downloading {name}, {}{resumed}", units::bytes(bytes)));
        if let Some(bar) = &self.bar {
            bar.set_draw_target(ProgressDrawTarget::stderr());
            bar.reset();
            bar.set_length(bytes);
            bar.set_position(done);
            // Bytes of an earlier download do not count for the speed.
            bar.reset_eta();
        }
        let reported = done.saturating_mul(100).checked_div(bytes).unwrap_or(0) / STEP * STEP;
        self.file =
            Some(DownloadedFile { name: name.to_owned(), bytes, before: done, start: Instant::now(), reported });
    }

    fn advance(&mut self, done: u64) {
        let Some(file) = &mut self.file else { return };
        if done < file.bytes {
            if let Some(bar) = &self.bar {
                return bar.set_position(done);
            }
            let percent = (done as f64 / file.bytes as f64 * 100.0) as u64;
            if percent >= file.reported + STEP {
                file.reported = percent / STEP * STEP;
                write_line(&format!("{} {}%", file.name, file.reported));
            }
        } else if let Some(file) = self.file.take() {
            if let Some(bar) = &self.bar {
                bar.finish_and_clear();
            }
            let time = file.start.elapsed();
            let arrived = file.bytes.saturating_sub(file.before);
            let rate = units::bytes((arrived as f64 / time.as_secs_f64().max(1e-3)) as u64);
            write_line(&format!(
                "downloaded {} of {} in {}, {rate}/s",
                units::bytes(arrived),
                file.name,
                units::time(time)
            ));
        }
    }

    fn note(&mut self, text: &str) {
        self.line(&format!("note: {text}"));
    }

    fn stop(&self) -> bool {
        interrupt::requested()
    }
}

impl Drop for DownloadProgress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Prints a line on stderr. Errors are ignored, because stderr may be closed.
fn write_line(text: &str) {
    let _ = writeln!(std::io::stderr(), "{}", safe(text));
}
