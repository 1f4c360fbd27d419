//! Time and memory of a run: as lines on stderr and as JSON.

use std::io::Write;
use std::time::Duration;

use metal_attention::Timings;
use serde::Serialize;

use crate::units;

/// Time and memory of a run.
pub struct RunStatistics {
    /// The time to open the model and to build its forward pass.
    pub load: Duration,
    /// The times of prefill and decode.
    pub timings: Timings,
}

impl RunStatistics {
    /// Writes five lines to stderr, four if the peak memory is not known, and one more if there were drafts.
    pub fn print(&self) {
        let t = &self.timings;
        let rate = |rate: Option<f64>| rate.map_or(String::new(), |r| format!(", {r:.1} tok/s"));
        let cached =
            if t.cached_tokens > 0 { format!(" ({} more were cached)", t.cached_tokens) } else { String::new() };
        let prefill = rate(t.prefill_tokens_per_second());
        let mut lines = vec![
            ("load time", units::time(self.load)),
            ("prompt", units::count(t.prompt_tokens, "token") + &prefill + &cached),
            ("generated", units::count(t.generated, "token") + &rate(t.decode_tokens_per_second())),
            ("drafts", format!("{} of {} held", t.accepted, t.drafted)),
            ("time to first token", t.first_token.map_or("-".into(), units::time)),
        ];
        if t.drafted == 0 {
            lines.retain(|(what, _)| *what != "drafts");
        }
        lines.extend(peak_memory().map(|n| ("peak memory", units::bytes(n))));
        let mut stderr = std::io::stderr().lock();
        for (what, value) in lines {
            // Errors are ignored, because stderr may be closed.
            let _ = writeln!(stderr, "{what:<19}  {value}");
        }
    }

    /// The object `timings` of `--json`.
    pub fn to_json(&self) -> TimingsJson {
        let t = &self.timings;
        let ms = |d: Duration| d.as_secs_f64() * 1e3;
        TimingsJson {
            load_ms: ms(self.load),
            prompt_tokens: t.prompt_tokens,
            cached_tokens: t.cached_tokens,
            prefill_ms: ms(t.prefill),
            prefill_tokens_per_second: t.prefill_tokens_per_second(),
            generated_tokens: t.generated,
            drafted_tokens: t.drafted,
            accepted_tokens: t.accepted,
            decode_ms: ms(t.decode),
            decode_tokens_per_second: t.decode_tokens_per_second(),
            first_token_ms: t.first_token.map(ms),
            peak_memory_bytes: peak_memory(),
        }
    }
}

/// The object `timings` of `--json`. `null` stands for values that were not measured.
#[derive(Serialize)]
pub struct TimingsJson {
    /// The time of loading the model.
    load_ms: f64,
    /// Tokens of the prompt that were evaluated.
    prompt_tokens: usize,
    /// Tokens of the prompt that were in the KV cache already.
    cached_tokens: usize,
    /// The time of prefill.
    prefill_ms: f64,
    /// The rate of prefill.
    prefill_tokens_per_second: Option<f64>,
    /// Generated tokens.
    generated_tokens: usize,
    /// Drafts that were evaluated.
    drafted_tokens: usize,
    /// Drafts that held, and are among the generated tokens.
    accepted_tokens: usize,
    /// The time of decode.
    decode_ms: f64,
    /// The rate of decode.
    decode_tokens_per_second: Option<f64>,
    /// The time from the start of prefill to the first token.
    first_token_ms: Option<f64>,
    /// The largest resident memory of the process.
    peak_memory_bytes: Option<u64>,
}

/// The largest resident memory of this process so far, in bytes. `None`: not known (Linux only).
pub fn peak_memory() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let kib = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(kib.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    #[test]
    fn peak_memory_is_plausible() {
        let n = super::peak_memory().unwrap();
        assert!((100 << 10..100 << 30).contains(&n), "{n} bytes");
    }
}
