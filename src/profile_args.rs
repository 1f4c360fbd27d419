//! `--profile`: where the time goes, kernel by kernel, as a table and as a trace file.

use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use metal_attention::{Phase, Profile};
use serde::Serialize;

use crate::cli_error::CliError;
use crate::output_file::OutputFile;
use crate::units;

/// Whether kernels are timed, and where the trace goes.
#[derive(clap::Args)]
pub struct ProfileArgs {
    /// Time every kernel and print a table to stderr; with FILE, also write a trace for chrome://tracing or Perfetto
    #[arg(long, value_name = "FILE", num_args = 0..=1, value_parser = trace_file)]
    profile: Option<Option<PathBuf>>,
}

fn trace_file(name: &str) -> Result<PathBuf, String> {
    match name {
        "-" => Err("the trace goes to a file; where the prompt is to come from stdin, put - before --profile".into()),
        name => Ok(name.into()),
    }
}

impl ProfileArgs {
    /// Whether kernels are to be timed.
    pub fn wanted(&self) -> bool {
        self.profile.is_some()
    }

    /// Prints the table of `profile` to stderr and writes the trace file, where there is to be one.
    pub fn report(&self, profile: &Profile) -> Result<(), CliError> {
        // Where stderr is closed nobody reads the table.
        let _ = std::io::stderr().lock().write_all(table(profile).as_bytes());
        match &self.profile {
            Some(Some(path)) => write_trace(path, profile),
            _ => Ok(()),
        }
    }
}

/// The kernels of prefill and of decode, those that took longest first.
pub fn table(profile: &Profile) -> String {
    let mut text = String::new();
    for phase in [Phase::Prefill, Phase::Decode] {
        let steps = profile.of_phase(phase).count();
        if steps == 0 {
            continue;
        }
        let n_tokens: usize = profile.of_phase(phase).map(|step| step.n_tokens).sum();
        let whole: Duration = profile.of_phase(phase).map(|step| step.time).sum();
        let totals = profile.totals(phase);
        let kernels: Duration = totals.iter().map(|t| t.time).sum();
        let width = totals.iter().map(|t| t.kernel.len()).max().unwrap_or(0).max("all kernels".len());
        text += &format!(
            "{}: {}, {}, {:.3} ms\n",
            phase.name(),
            units::count(steps, "step"),
            units::count(n_tokens, "token"),
            ms(whole)
        );
        text += &format!("  {:<width$}  {:>8}  {:>11}  {:>6}  {:>11}\n", "kernel", "calls", "total ms", "%", "mean us");
        let mut line = |kernel: &str, calls: usize, time: Duration| {
            let share = if kernels.is_zero() { 0.0 } else { 100.0 * time.as_secs_f64() / kernels.as_secs_f64() };
            let mean = 1e3 * ms(time) / calls.max(1) as f64;
            text += &format!("  {kernel:<width$}  {calls:>8}  {:>11.3}  {share:>6.1}  {mean:>11.2}\n", ms(time));
        };
        for total in &totals {
            line(&total.kernel, total.calls, total.time);
        }
        line("all kernels", totals.iter().map(|t| t.calls).sum(), kernels);
    }
    text
}

fn ms(time: Duration) -> f64 {
    1e3 * time.as_secs_f64()
}

/// A trace in the format of Chrome's tracing: one row of steps, one of kernels.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Trace<'a> {
    display_time_unit: &'static str,
    trace_events: Vec<Event<'a>>,
}

/// Something that took time (`ph` X), or the name of a process or a row (`ph` M).
#[derive(Serialize)]
struct Event<'a> {
    name: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    cat: Option<&'static str>,
    ph: &'static str,
    /// Microseconds since the start of the profile.
    ts: f64,
    /// Microseconds.
    dur: f64,
    pid: u32,
    tid: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    args: Option<Args<'a>>,
}

/// What a viewer shows of an event besides.
#[derive(Serialize)]
#[serde(untagged)]
enum Args<'a> {
    Name { name: &'a str },
    Step { n_tokens: usize, us: f64 },
}

/// Rows of the trace.
const STEPS: u32 = 1;
const KERNELS: u32 = 2;

impl<'a> Trace<'a> {
    fn new(profile: &'a Profile) -> Self {
        let us = |time: Duration| 1e6 * time.as_secs_f64();
        let named = |name, tid, value| Event {
            name,
            cat: None,
            ph: "M",
            ts: 0.0,
            dur: 0.0,
            pid: 1,
            tid,
            args: Some(Args::Name { name: value }),
        };
        let mut trace_events = vec![
            named("process_name", STEPS, &profile.device),
            named("thread_name", STEPS, "steps"),
            named("thread_name", KERNELS, "kernels"),
        ];
        for step in &profile.steps {
            let cat = Some(step.phase.name());
            let end = step.kernels.iter().map(|k| k.start + k.time).max().unwrap_or(step.start + step.time);
            trace_events.push(Event {
                name: step.phase.name(),
                cat,
                ph: "X",
                ts: us(step.start),
                dur: us(end - step.start),
                pid: 1,
                tid: STEPS,
                args: Some(Args::Step { n_tokens: step.n_tokens, us: us(step.time) }),
            });
            trace_events.extend(step.kernels.iter().map(|run| Event {
                name: &run.kernel,
                cat,
                ph: "X",
                ts: us(run.start),
                dur: us(run.time),
                pid: 1,
                tid: KERNELS,
                args: None,
            }));
        }
        Self { display_time_unit: "ms", trace_events }
    }
}

fn write_trace(path: &Path, profile: &Profile) -> Result<(), CliError> {
    let mut file = OutputFile::create(path)?;
    let mut out = BufWriter::new(&mut file);
    serde_json::to_writer(&mut out, &Trace::new(profile))
        .map_err(std::io::Error::from)
        .and_then(|()| out.flush())
        .map_err(|source| CliError::Write { to: path.display().to_string(), source })?;
    drop(out);
    file.commit()
}

#[cfg(test)]
mod tests {
    use metal_attention::{KernelTime, ProfiledStep};

    use super::*;

    fn step(phase: Phase, n_tokens: usize, start: u64, kernels: &[(&'static str, u64)]) -> ProfiledStep {
        let mut at = start;
        let run = |&(kernel, us): &(&'static str, u64)| {
            let start = Duration::from_micros(at);
            at += us;
            KernelTime { kernel: kernel.into(), start, time: Duration::from_micros(us) }
        };
        let kernels: Vec<_> = kernels.iter().map(run).collect();
        let time = kernels.iter().map(|k| k.time).sum();
        ProfiledStep { phase, n_tokens, start: Duration::from_micros(start), time, kernels }
    }

    fn profile() -> Profile {
        Profile {
            device: "CPU".into(),
            steps: vec![
                step(Phase::Prefill, 5, 10, &[("embedding", 40), ("rmsnorm", 10), ("multi_token_matvec_q4_0", 1150)]),
                step(Phase::Decode, 1, 2000, &[("embedding", 3), ("rmsnorm", 7), ("matvec_q4_0", 90)]),
                step(Phase::Decode, 1, 2200, &[("embedding", 2), ("rmsnorm", 8), ("matvec_q4_0", 110)]),
            ],
        }
    }

    #[test]
    fn the_table_has_each_phase_and_kernel() {
        let expected = "\
prefill: 1 step, 5 tokens, 1.200 ms
  kernel                      calls     total ms       %      mean us
  multi_token_matvec_q4_0         1        1.150    95.8      1150.00
  embedding                       1        0.040     3.3        40.00
  rmsnorm                         1        0.010     0.8        10.00
  all kernels                     3        1.200   100.0       400.00
decode: 2 steps, 2 tokens, 0.220 ms
  kernel          calls     total ms       %      mean us
  matvec_q4_0         2        0.200    90.9       100.00
  rmsnorm             2        0.015     6.8         7.50
  embedding           2        0.005     2.3         2.50
  all kernels         6        0.220   100.0        36.67
";
        assert_eq!(table(&profile()), expected);
        assert_eq!(table(&Profile::default()), "");
    }

    #[test]
    fn the_trace_has_an_event_for_each_step_and_kernel() {
        let profile = profile();
        let json = serde_json::to_value(Trace::new(&profile)).unwrap();
        let events = json["traceEvents"].as_array().unwrap();
        assert_eq!(events.len(), 3 + 3 + 9);
        let row = serde_json::json!({
            "name": "process_name", "ph": "M", "ts": 0.0, "dur": 0.0, "pid": 1, "tid": 1, "args": { "name": "CPU" }
        });
        assert_eq!(events[0], row);
        let step = serde_json::json!({
            "name": "prefill", "cat": "prefill", "ph": "X", "ts": 10.0, "dur": 1200.0, "pid": 1, "tid": 1,
            "args": { "n_tokens": 5, "us": 1200.0 }
        });
        assert_eq!(events[3], step);
        let kernel = serde_json::json!({
            "name": "rmsnorm", "cat": "prefill", "ph": "X", "ts": 50.0, "dur": 10.0, "pid": 1, "tid": 2
        });
        assert_eq!(events[5], kernel);
    }
}
