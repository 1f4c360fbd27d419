//! ARCHITECTURE.md is short, and the files and tests that it names exist.

use std::path::PathBuf;

use metal_attention_testing::root;

use super::{Page, expect_none};

/// The file or folder that the page names by `path`: in the root folder, in `crates/`, there without the name's common
/// beginning, such as `model/src/pages.rs`, or among the tests of the library, such as `engine/snapshots.rs`.
fn file(path: &str) -> Option<PathBuf> {
    let names = [
        path.to_owned(),
        format!("crates/{path}"),
        format!("crates/metal-attention-{path}"),
        format!("crates/metal-attention/tests/{path}"),
    ];
    names.iter().map(|name| root().join(name)).find(|file| file.exists())
}

#[test]
fn the_architecture_is_short() {
    let n = Page::read("ARCHITECTURE.md").text.len();
    assert!(n <= 8192, "{n} bytes");
}

#[test]
fn files_that_the_architecture_names_exist() {
    // Files of the library, and folders of the CUDA crate, may be named without their crate.
    let page = Page::read("ARCHITECTURE.md");
    let library = root().join("crates/metal-attention/src");
    let cuda = root().join("crates/metal-attention-cuda");
    let is_missing =
        |path: &&str| file(path).is_none() && ![&library, &cuda].iter().any(|base| base.join(path).exists());
    assert!(page.paths().count() > 30);
    expect_none(&page.paths().filter(is_missing).map(|path| format!("there is no {path}")).collect::<Vec<_>>());
}

#[test]
fn tests_that_the_architecture_names_exist() {
    let page = Page::read("ARCHITECTURE.md");
    let mut errors = Vec::new();
    let mut n_tests = 0;
    for (path, test) in page.code_spans().filter_map(|span| span.split_once(".rs::")) {
        n_tests += 1;
        let text = file(&format!("{path}.rs")).map(|file| std::fs::read_to_string(file).unwrap());
        if !text.is_some_and(|text| text.contains(&format!("fn {test}("))) {
            errors.push(format!("there is no {path}.rs::{test}"));
        }
    }
    expect_none(&errors);
    assert!(n_tests >= 20, "only {n_tests} tests are named");
}
