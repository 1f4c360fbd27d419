//! The pages of docs/how-to: the files that they list exist, and those of their examples mention the example.

use metal_attention_testing::root;

use super::{Page, expect_none, pages};

/// All pages that say how to add something.
fn how_to() -> Vec<Page> {
    let mut pages = pages();
    pages.retain(|page| page.name().starts_with("docs/how-to/") && !page.name().ends_with("README.md"));
    assert!(pages.len() >= 5, "only {} pages", pages.len());
    pages
}

/// The example of a page and its files: the comment `<!-- example: NAME`, with a path on each further line.
fn example(page: &Page) -> (&str, Vec<&str>) {
    let (_, rest) = page.text.split_once("<!-- example: ").unwrap_or_else(|| panic!("{}: no example", page.name()));
    let (comment, _) = rest.split_once("\n-->").expect("the end of the comment");
    let mut lines = comment.lines();
    (lines.next().unwrap(), lines.collect())
}

/// Letters and digits alone, in lower case: `top_n_sigma`, `TopNSigma` and `top-n-sigma` are the same.
fn folded(text: &str) -> String {
    text.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase()).collect()
}

#[test]
fn files_of_examples_mention_the_example_and_are_in_the_list() {
    let mut errors = Vec::new();
    for page in how_to() {
        let (name, files) = example(&page);
        assert!(files.len() >= 3, "{}: {files:?}", page.name());
        for file in files {
            match std::fs::read_to_string(root().join(file)) {
                Err(error) => errors.push(format!("{}: {file}: {error}", page.name())),
                Ok(text) if !folded(&text).contains(&folded(name)) => {
                    errors.push(format!("{}: {file} does not mention {name}", page.name()));
                }
                Ok(_) if !page.paths().any(|path| path == file) => {
                    errors.push(format!("{}: {file} is in the example only", page.name()));
                }
                Ok(_) => {}
            }
        }
    }
    expect_none(&errors);
}

#[test]
fn paths_in_how_to_pages_exist() {
    // The folders of the interfaces are named without the one that they are in.
    let http = root().join("crates/metal-attention-server/src/http");
    let errors: Vec<_> = how_to().iter().flat_map(|page| page.missing_paths(&[&http])).collect();
    expect_none(&errors);
}
