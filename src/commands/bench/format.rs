//! The formats of the report: a table for people, JSON, CSV and Markdown.

use metal_attention::Phase;
use serde::Serialize;

use super::report::{BenchReport, BenchResult, PhaseName, ResultComparison};
use crate::cli_error::CliError;
use crate::units;

/// The report as one JSON object.
pub fn json(report: &BenchReport) -> Result<String, CliError> {
    let json = serde_json::to_string_pretty(report);
    Ok(json.map_err(|e| CliError::General(format!("cannot write JSON: {e}")))? + "\n")
}

/// One line of `--csv`: a result, with the names of docs/benchmark.md. `None` is an empty cell.
#[derive(Serialize)]
struct CsvRow<'a> {
    engine: &'a str,
    version: &'a str,
    commit: Option<&'a str>,
    model: &'a str,
    model_sha256: &'a str,
    device: &'a str,
    device_name: &'a str,
    driver: Option<&'a str>,
    threads: usize,
    #[serde(with = "PhaseName")]
    phase: Phase,
    n_prompt: usize,
    n_gen: usize,
    depth: usize,
    batch: usize,
    mean: f64,
    median: f64,
    stddev: f64,
    best: f64,
    /// The samples in tokens per second, separated by spaces.
    samples: String,
    earlier_median: Option<f64>,
    ratio: Option<f64>,
    noise: Option<f64>,
    moved: Option<bool>,
}

/// The report as comma-separated values, with a line of names first; empty without results.
pub fn csv(report: &BenchReport) -> Result<String, CliError> {
    let failed = |e: &dyn std::fmt::Display| CliError::General(format!("cannot write CSV: {e}"));
    let mut writer = csv::Writer::from_writer(Vec::new());
    for r in &report.results {
        let (rates, comparison) = (&r.tokens_per_second, r.comparison.as_ref());
        let row = CsvRow {
            engine: &report.engine.name,
            version: &report.engine.version,
            commit: report.engine.commit.as_deref(),
            model: &r.model,
            model_sha256: &r.model_sha256,
            device: &r.device,
            device_name: &r.device_name,
            driver: r.driver.as_deref(),
            threads: r.threads,
            phase: r.phase,
            n_prompt: r.n_prompt,
            n_gen: r.n_gen,
            depth: r.depth,
            batch: r.batch,
            mean: rates.mean,
            median: rates.median,
            stddev: rates.stddev,
            best: rates.best,
            samples: rates.samples.iter().map(f64::to_string).collect::<Vec<_>>().join(" "),
            earlier_median: comparison.map(|c| c.earlier_median),
            ratio: comparison.map(|c| c.ratio),
            noise: comparison.and_then(|c| c.noise),
            moved: comparison.map(|c| c.moved),
        };
        writer.serialize(row).map_err(|e| failed(&e))?;
    }
    let bytes = writer.into_inner().map_err(|e| failed(&e))?;
    String::from_utf8(bytes).map_err(|e| failed(&e))
}

/// A Markdown table between a line on the engine and lines on models and devices.
pub fn markdown(report: &BenchReport) -> String {
    let cells = Table::new(report);
    let escaped = |cell: &String| cell.replace('|', "\\|");
    let line = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
    let mut text = heading(report) + "\n\n";
    text += &line(cells.names.iter().map(|name| (*name).to_owned()).collect());
    text += &line((0..cells.names.len()).map(|i| if Table::is_text(i) { "---" } else { "---:" }.into()).collect());
    for row in &cells.rows {
        text += &line(row.iter().map(escaped).collect());
    }
    text + "\n" + &footer(report).iter().map(|line| format!("- {line}\n")).collect::<Vec<_>>().concat()
}

/// A table with aligned columns between a line on the engine and lines on models and devices.
pub fn text(report: &BenchReport) -> String {
    let table = Table::new(report);
    let names = table.names.iter().map(|name| (*name).to_owned()).collect();
    let lines: Vec<Vec<String>> = std::iter::once(names).chain(table.rows).collect();
    let width = |i: usize| lines.iter().map(|row| row[i].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..table.names.len()).map(width).collect();
    let mut text = heading(report) + "\n\n";
    for row in &lines {
        let cells = row.iter().zip(&widths).enumerate().map(|(i, (cell, &width))| {
            if Table::is_text(i) { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
        });
        text += cells.collect::<Vec<_>>().join("  ").trim_end();
        text += "\n";
    }
    text + "\n" + &footer(report).iter().map(|line| format!("{line}\n")).collect::<Vec<_>>().concat()
}

/// The name of the engine, and the unit of the numbers.
fn heading(report: &BenchReport) -> String {
    let engine = &report.engine;
    let commit = engine.commit.as_ref().map_or(String::new(), |commit| format!(" ({commit})"));
    let iterations = units::count(report.settings.iterations, "iteration");
    format!("{} {}{commit}, tokens per second over {iterations}", engine.name, engine.version)
}

/// Lines on models, devices and skipped tests; each once.
fn footer(report: &BenchReport) -> Vec<String> {
    let mut lines = Vec::new();
    let mut add = |line: String| {
        if !lines.contains(&line) {
            lines.push(line);
        }
    };
    for r in &report.results {
        add(format!("{}: sha256 {}", r.model, r.model_sha256));
    }
    for r in &report.results {
        let driver = r.driver.as_ref().map_or(String::new(), |driver| format!(", driver {driver}"));
        add(format!("{}: {}{driver}", r.device, r.device_name));
    }
    for skipped in &report.skipped {
        add(format!("skipped: {}: {}", skipped.model, skipped.reason));
    }
    if report.interrupted {
        add("interrupted: not all was measured".into());
    }
    lines
}

/// The cells of a table.
struct Table {
    /// The names of the columns.
    names: Vec<&'static str>,
    /// The rows, each with a cell for each column.
    rows: Vec<Vec<String>>,
}

impl Table {
    /// The columns of all tables.
    const NAMES: [&'static str; 11] =
        ["model", "device", "phase", "tokens", "depth", "batch", "threads", "mean", "median", "stddev", "best"];
    /// The columns that follow if there is an earlier report.
    const COMPARISON: [&'static str; 4] = ["earlier", "ratio", "noise", "moved"];

    /// The table of a report, with columns for a comparison if there is one.
    fn new(report: &BenchReport) -> Self {
        let compared = report.results.iter().any(|r| r.comparison.is_some());
        let mut names = Self::NAMES.to_vec();
        if compared {
            names.extend(Self::COMPARISON);
        }
        let row = |r: &BenchResult| {
            let rates = &r.tokens_per_second;
            let mut row = vec![r.model.clone(), r.device.clone(), r.phase.name().to_owned()];
            // One of n_prompt and n_gen is 0.
            row.extend([r.n_prompt + r.n_gen, r.depth, r.batch, r.threads].map(|n| n.to_string()));
            row.extend([rates.mean, rates.median, rates.stddev, rates.best].map(rate));
            if compared {
                row.extend(r.comparison.as_ref().map_or_else(Default::default, comparison_cells));
            }
            row
        };
        Self { names, rows: report.results.iter().map(row).collect() }
    }

    /// Whether column `i` has text, which is aligned to the left; other columns have numbers.
    fn is_text(i: usize) -> bool {
        i < 3
    }
}

/// The cells of [`Table::COMPARISON`]'s columns.
fn comparison_cells(c: &ResultComparison) -> [String; 4] {
    let moved = match c.moved {
        true if c.ratio > 1.0 => "faster",
        true => "slower",
        false => "",
    };
    let noise = c.noise.map_or("-".into(), |noise| format!("{:.1} %", 100.0 * noise));
    [rate(c.earlier_median), format!("{:.3}", c.ratio), noise, moved.into()]
}

/// Formats tokens per second with about four digits.
fn rate(x: f64) -> String {
    match x {
        x if x < 10.0 => format!("{x:.3}"),
        x if x < 100.0 => format!("{x:.2}"),
        x if x < 1000.0 => format!("{x:.1}"),
        x => format!("{x:.0}"),
    }
}

#[cfg(test)]
mod tests;
