//! ARCHITECTURE.md: the tests that it names, by file and function, exist.

use std::path::PathBuf;

use metal_attention_testing::root;

use super::{Page, expect_none};

/// The file that a page names by `path`: in the root folder, or in `crates/` without the name's common beginning, such as
/// `model/src/pages.rs`.
fn file(path: &str) -> Option<PathBuf> {
    let names = [path.to_owned(), format!("crates/{path}"), format!("crates/metal-attention-{path}")];
    names.iter().map(|name| root().join(name)).find(|file| file.exists())
}

#[test]
fn tests_that_the_architecture_names_exist() {
    let page = Page::read("ARCHITECTURE.md");
    let mut errors = Vec::new();
    for (path, test) in page.code_spans().filter_map(|span| span.split_once(".rs::")) {
        let text = file(&format!("{path}.rs")).map(|file| std::fs::read_to_string(file).unwrap());
        if !text.is_some_and(|text| text.contains(&format!("fn {test}("))) {
            errors.push(format!("there is no {path}.rs::{test}"));
        }
    }
    expect_none(&errors);
}
