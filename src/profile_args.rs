//! `--profile`: prints the time of each kernel as a table, and writes a trace file.

use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use metal_attention::{Phase, Profile};
use serde::Serialize;

use crate::cli_error::CliError;
use crate::output_file::OutputFile;
use crate::units;

/// Whether kernels are timed, and the file of the trace.
#[derive(clap::Args)]
pub struct ProfileArgs {
    /// Time every kernel and print a table to stderr; with FILE, also write a trace for Chrome's tracing or Perfetto
    #[arg(long, value_name = "FILE", num_args = 0..=1, value_parser = trace_file)]
    #[allow(clippy::option_option)] // no flag, a flag, a flag with a file
    profile: Option<Option<PathBuf>>,
}

/// Parses the name of the trace file. `-` is refused: it is most likely meant as the text of stdin.
fn trace_file(name: &str) -> Result<PathBuf, String> {
    match name {
        "-" => Err("the trace goes to a file; where the prompt is to come from stdin, put - before --profile".into()),
        name => Ok(name.into()),
    }
}

impl ProfileArgs {
    /// Whether kernels are timed.
    pub fn is_set(&self) -> bool {
        self.profile.is_some()
    }

    /// Prints the tables of `profiles` on stderr, and writes the trace file if the flag names one.
    pub fn report(&self, profiles: &[Profile]) -> Result<(), CliError> {
        // Errors are ignored, because stderr may be closed.
        let _ = std::io::stderr().lock().write_all(profiles.iter().map(table).collect::<String>().as_bytes());
        match &self.profile {
            Some(Some(path)) => write_trace(path, profiles),
            _ => Ok(()),
        }
    }
}

/// The table of a profile: the device, then for prefill and decode the steps and the kernels, in order of falling time.
pub fn table(profile: &Profile) -> String {
    let mut text = vec![format!("{}\n", profile.device)];
    text.extend(profile.note.map(|note| format!("{note}\n")));
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
        let side_by_side = match profile.parts(phase) {
            1 => String::new(),
            n => format!(", in {n} parts side by side, whose times are added up"),
        };
        text.push(format!(
            "{}: {}, {}, {:.3} ms{side_by_side}\n",
            phase.name(),
            units::count(steps, "step"),
            units::count(n_tokens, "token"),
            ms(whole)
        ));
        text.push(format!(
            "  {:<width$}  {:>8}  {:>11}  {:>6}  {:>11}\n",
            "kernel", "calls", "total ms", "%", "mean us"
        ));
        let mut line = |kernel: &str, calls: usize, time: Duration| {
            let share = if kernels.is_zero() { 0.0 } else { 100.0 * time.as_secs_f64() / kernels.as_secs_f64() };
            let mean = 1e3 * ms(time) / calls.max(1) as f64;
            text.push(format!("  {kernel:<width$}  {calls:>8}  {:>11.3}  {share:>6.1}  {mean:>11.2}\n", ms(time)));
        };
        for total in &totals {
            line(&total.kernel, total.calls, total.time);
        }
        line("all kernels", totals.iter().map(|t| t.calls).sum(), kernels);
    }
    text.concat()
}

/// A time in milliseconds.
fn ms(time: Duration) -> f64 {
    1e3 * time.as_secs_f64()
}

/// A trace in the format of Chrome's tracing: a process for each profile, with a row of steps, and a row of kernels for each
/// part that runs concurrently with others (such as a rank).
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ChromeTrace<'a> {
    /// The unit that viewers show.
    display_time_unit: &'static str,
    /// The events, in any order.
    trace_events: Vec<TraceEvent<'a>>,
}

/// One event: a time span (`ph` X), or the name of a process or a row (`ph` M). The fields' names are those of the format.
#[derive(Serialize)]
struct TraceEvent<'a> {
    name: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    cat: Option<&'static str>,
    ph: &'static str,
    /// The start, in microseconds since the start of the profile.
    ts: f64,
    /// The duration in microseconds.
    dur: f64,
    pid: u32,
    tid: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    args: Option<TraceEventArgs<'a>>,
}

/// Further values of an event that a viewer shows.
#[derive(Serialize)]
#[serde(untagged)]
enum TraceEventArgs<'a> {
    /// The name of a process or row.
    Name { name: &'a str },
    /// A label beside a process's name.
    Labels { labels: &'a str },
    /// The tokens of a step, and its time in microseconds.
    Step { n_tokens: usize, us: f64 },
}

/// The trace's row of steps.
const STEPS: u32 = 1;
/// The trace's first row of kernels; further parts have the following rows.
const KERNELS: u32 = 2;

impl<'a> ChromeTrace<'a> {
    /// The trace of `profiles`.
    fn new(profiles: &'a [Profile]) -> Self {
        let mut trace_events = Vec::new();
        for (profile, pid) in profiles.iter().zip(1..) {
            add_events(&mut trace_events, profile, pid);
        }
        Self { display_time_unit: "ms", trace_events }
    }
}

/// Adds the events of `profile` as those of process `pid`.
fn add_events<'a>(events: &mut Vec<TraceEvent<'a>>, profile: &'a Profile, pid: u32) {
    let us = |time: Duration| 1e6 * time.as_secs_f64();
    let about =
        |name, tid, args| TraceEvent { name, cat: None, ph: "M", ts: 0.0, dur: 0.0, pid, tid, args: Some(args) };
    let named = |name, tid, value| about(name, tid, TraceEventArgs::Name { name: value });
    events.extend([named("process_name", STEPS, &profile.device), named("thread_name", STEPS, "steps")]);
    events.extend(profile.note.map(|labels| about("process_labels", STEPS, TraceEventArgs::Labels { labels })));
    let parts = [Phase::Prefill, Phase::Decode].map(|phase| profile.parts(phase)).into_iter().max().unwrap_or(1);
    events.extend((0..parts).map(|part| named("thread_name", KERNELS + part as u32, "kernels")));
    for step in &profile.steps {
        let cat = Some(step.phase.name());
        let end = step.kernels.iter().map(|k| k.start + k.time).max().unwrap_or(step.start + step.time);
        events.push(TraceEvent {
            name: step.phase.name(),
            cat,
            ph: "X",
            ts: us(step.start),
            dur: us(end.saturating_sub(step.start)),
            pid,
            tid: STEPS,
            args: Some(TraceEventArgs::Step { n_tokens: step.n_tokens, us: us(step.time) }),
        });
        events.extend(step.kernels.iter().map(|run| TraceEvent {
            name: &run.kernel,
            cat,
            ph: "X",
            ts: us(run.start),
            dur: us(run.time),
            pid,
            tid: KERNELS + run.part as u32,
            args: None,
        }));
    }
}

/// Writes the trace file.
fn write_trace(path: &Path, profiles: &[Profile]) -> Result<(), CliError> {
    let mut file = OutputFile::create(path)?;
    let mut out = BufWriter::new(&mut file);
    serde_json::to_writer(&mut out, &ChromeTrace::new(profiles))
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
            KernelTime { kernel: kernel.into(), start, time: Duration::from_micros(us), part: 0 }
        };
        let kernels: Vec<_> = kernels.iter().map(run).collect();
        let time = kernels.iter().map(|k| k.time).sum();
        ProfiledStep { phase, n_tokens, start: Duration::from_micros(start), time, kernels }
    }

    fn profile() -> Profile {
        Profile {
            device: "CPU".into(),
            note: None,
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
CPU
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
    }

    #[test]
    fn the_trace_has_an_event_for_each_step_and_kernel() {
        let profiles = [profile(), Profile { device: "GPU".into(), note: Some("alone"), steps: Vec::new() }];
        let json = serde_json::to_value(ChromeTrace::new(&profiles)).unwrap();
        let events = json["traceEvents"].as_array().unwrap();
        assert_eq!(events.len(), 3 + 3 + 9 + 4);
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
        assert_eq!((&events[15]["pid"], &events[15]["args"]["name"]), (&2.into(), &"GPU".into()));
        assert_eq!((&events[17]["name"], &events[17]["args"]["labels"]), (&"process_labels".into(), &"alone".into()));
    }

    #[test]
    fn each_part_has_a_row() {
        let mut profile = profile();
        profile.note = Some("as it runs");
        let kernels = &mut profile.steps[1].kernels;
        kernels.extend(kernels.clone().into_iter().map(|run| KernelTime { part: 1, ..run }));
        let table = table(&profile);
        assert!(table.starts_with("CPU\nas it runs\nprefill: 1 step, 5 tokens, 1.200 ms\n"), "{table}");
        let decode = "decode: 2 steps, 2 tokens, 0.220 ms, in 2 parts side by side, whose times are added up\n";
        assert!(table.contains(decode), "{table}");
        let profiles = [profile];
        let json = serde_json::to_value(ChromeTrace::new(&profiles)).unwrap();
        let events = json["traceEvents"].as_array().unwrap();
        let in_row = |tid: u32| events.iter().filter(|e| e["ph"] == "X" && e["tid"] == tid).count();
        assert_eq!([1, 2, 3, 4].map(in_row), [3, 9, 3, 0]);
        assert_eq!(events.iter().filter(|e| e["args"]["name"] == "kernels").count(), 2);
    }
}
