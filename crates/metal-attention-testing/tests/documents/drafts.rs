//! The table of speeds with drafts is that of the reports.

use std::fmt::Write;
use std::fs;

use serde::Deserialize;

use crate::root;

/// The line before the table, and that after it.
const MARKS: [&str; 2] = ["<!-- drafts: begin -->\n", "<!-- drafts: end -->"];

/// A report of `bench --text` or `--own-text`.
#[derive(Deserialize)]
struct Report {
    model: String,
    device: String,
    device_name: String,
    threads: usize,
    drafter: String,
    text: String,
    batch: usize,
    n_steps: usize,
    n_gen: usize,
    n_drafted: usize,
    n_accepted: usize,
    plain_tokens_per_second: f64,
    drafted_tokens_per_second: f64,
    ratio: f64,
}

/// The table of all reports, in the order of their files.
fn table() -> String {
    let folder = root().join("docs/performance/drafts");
    let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let mut table =
        "| device | model | drafter | text | sequences | tokens a step | held | tokens/s without | with | ratio |\n\
                     |---|---|---|---|---|---|---|---|---|---|\n"
            .to_owned();
    for path in files {
        let reports: Vec<Report> = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        for r in reports {
            let device =
                if r.device == "cpu" { format!("{}, {} threads", r.device_name, r.threads) } else { r.device_name };
            let a_step = (r.n_gen - 1) as f64 / r.n_steps.max(1) as f64;
            let held = (100 * r.n_accepted).checked_div(r.n_drafted).map_or("-".into(), |held| format!("{held} %"));
            let model = r.model.trim_end_matches(".gguf");
            writeln!(
                table,
                "| {device} | {model} | {} | {} | {} | {a_step:.1} | {held} | {:.0} | {:.0} | {:.2} |",
                r.drafter, r.text, r.batch, r.plain_tokens_per_second, r.drafted_tokens_per_second, r.ratio
            )
            .unwrap();
        }
    }
    table
}

#[test]
fn the_table_of_drafts_is_that_of_the_reports() {
    let path = root().join("docs/speculation.md");
    let page = fs::read_to_string(&path).unwrap();
    let (before, rest) = page.split_once(MARKS[0]).expect("the beginning of the table");
    let (written, after) = rest.split_once(MARKS[1]).expect("the end of the table");
    let table = table();
    if std::env::var_os("METAL_ATTENTION_WRITE_TABLES").is_some() {
        fs::write(&path, [before, MARKS[0], &table, MARKS[1], after].concat()).unwrap();
    } else {
        assert_eq!(written, table, "METAL_ATTENTION_WRITE_TABLES=1 writes it");
    }
}
