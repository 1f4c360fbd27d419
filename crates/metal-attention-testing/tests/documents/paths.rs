//! Paths in pages about the code.

use metal_attention_testing::root;

use super::{Page, expect_none};

/// The pages whose paths exist, with the folder in which they are looked for, in addition to the root folder.
const PAGES: [(&str, &str); 5] = [
    ("README.md", ""),
    ("CONTRIBUTING.md", ""),
    ("docs/cuda.md", "crates/metal-attention-cuda"),
    ("docs/how-to/README.md", "crates/metal-attention-chat/src/tool_calls"),
    ("docs/design/README.md", "docs/design"),
];

#[test]
fn paths_in_pages_exist() {
    let missing = PAGES.into_iter().flat_map(|(page, folder)| Page::read(page).missing_paths(&[&root().join(folder)]));
    // Builds and fuzzing make these folders; words in capitals stand for names.
    let is_absent =
        |error: &String| ["`target/", "`fuzz/corpus`", "NAME", "COLLECTION"].iter().any(|word| error.contains(word));
    expect_none(&missing.filter(|error| !is_absent(error)).collect::<Vec<_>>());
}
