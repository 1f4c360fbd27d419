//! The records of docs/design: each is dated, listed, and names files and tests that exist.

use metal_attention_testing::root;

use super::{Page, expect_none, pages};

/// All records.
fn records() -> Vec<Page> {
    let mut pages = pages();
    pages.retain(|page| page.name().starts_with("docs/design/") && !page.name().ends_with("README.md"));
    assert!(pages.len() >= 10, "only {} records", pages.len());
    pages
}

/// The first date in `text`, such as `2026-11-21`.
fn date(text: &str) -> Option<&str> {
    let is_date = |word: &&str| {
        word.len() == 10
            && word.chars().enumerate().all(|(i, c)| if i == 4 || i == 7 { c == '-' } else { c.is_ascii_digit() })
    };
    text.split(|c: char| !c.is_ascii_digit() && c != '-').find(is_date)
}

#[test]
fn records_have_a_date_and_are_listed() {
    let list = Page::read("docs/design/README.md");
    let mut errors = Vec::new();
    for record in records() {
        let title = record.text.lines().next().unwrap();
        let name = record.path.file_name().unwrap().to_str().unwrap();
        let row = list.text.lines().find(|line| line.contains(&format!("]({name})")));
        match (date(title), row) {
            (None, _) => errors.push(format!("{name}: no date in its title")),
            (_, None) => errors.push(format!("{name} is not in the list")),
            (Some(_), Some(row)) => {
                // A decision of several steps is listed by the day of one of them.
                let day = date(row).unwrap();
                if !title.contains(day) {
                    errors.push(format!("{name}: listed by {day}, which its title does not have"));
                }
            }
        }
    }
    expect_none(&errors);
}

#[test]
fn paths_in_records_exist() {
    // Records about the CUDA backend name its files without their folders.
    let cuda = root().join("crates/metal-attention-cuda");
    let (src, kernels) = (cuda.join("src"), cuda.join("kernels"));
    let errors: Vec<_> = records().iter().flat_map(|record| record.missing_paths(&[&cuda, &src, &kernels])).collect();
    expect_none(&errors);
}

#[test]
fn tests_that_records_name_exist() {
    // In the section "Tests" words in backticks with an underscore are names of tests.
    let mut sources = String::new();
    let mut folders = vec![root().join("crates"), root().join("tests")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
            let path = entry.path();
            if entry.file_type().unwrap().is_dir() {
                folders.push(path);
            } else if path.extension() == Some("rs".as_ref()) {
                sources += &std::fs::read_to_string(path).unwrap();
            }
        }
    }
    let mut errors = Vec::new();
    for record in records() {
        let Some((_, tests)) = record.text.split_once("\n## Tests\n") else { continue };
        for span in tests.split('`').skip(1).step_by(2) {
            let name = span.rsplit("::").next().unwrap();
            let is_name =
                name.contains('_') && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
            if is_name && !sources.contains(&format!("fn {name}(")) {
                errors.push(format!("{}: there is no test {span}", record.name()));
            }
        }
    }
    expect_none(&errors);
}
