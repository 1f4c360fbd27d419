//! How far a download is, on stderr: a bar in a terminal, else a line now and then.

use std::io::{IsTerminal, Write};
use std::time::Instant;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use metal_attention_hub::DownloadObserver;

use crate::interrupt::{self, Until};
use crate::metadata_text::safe;
use crate::units;

/// Where there is no terminal, a line tells of each so many percent.
const STEP: u64 = 10;

/// What Ctrl-C says.
const RESUMABLE: &str = "interrupted: what has arrived is kept, the same command goes on from there";

/// The progress of downloads, one file after the other.
pub struct DownloadProgress {
    /// A download may end anywhere, also while it waits for a silent server.
    _resumable: Until,
    /// In a terminal; hidden until a file begins.
    bar: Option<ProgressBar>,
    file: Option<FileProgress>,
}

struct FileProgress {
    name: String,
    bytes: u64,
    /// Bytes that were there before.
    before: u64,
    start: Instant,
    /// Percent that the last line told of.
    told: u64,
}

impl DownloadProgress {
    /// Shows nothing yet.
    pub fn new() -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let style = "[{bar:30}] {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec}, {eta} left";
            let style = ProgressStyle::with_template(style).expect("the template is valid").progress_chars("=> ");
            ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::hidden()).with_style(style)
        });
        Self { _resumable: interrupt::at_once(Some(RESUMABLE)), bar, file: None }
    }

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
            // What was there does not count for the speed.
            bar.reset_eta();
        }
        let told = done.saturating_mul(100).checked_div(bytes).unwrap_or(0) / STEP * STEP;
        self.file = Some(FileProgress { name: name.to_owned(), bytes, before: done, start: Instant::now(), told });
    }

    fn advance(&mut self, done: u64) {
        let Some(file) = &mut self.file else { return };
        if done < file.bytes {
            if let Some(bar) = &self.bar {
                return bar.set_position(done);
            }
            let percent = (done as f64 / file.bytes as f64 * 100.0) as u64;
            if percent >= file.told + STEP {
                file.told = percent / STEP * STEP;
                write_line(&format!("{} {}%", file.name, file.told));
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

/// Where stderr is closed the line is lost, and nothing else.
fn write_line(text: &str) {
    let _ = writeln!(std::io::stderr(), "{}", safe(text));
}
