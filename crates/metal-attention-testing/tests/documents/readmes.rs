//! The READMEs of the crates, which are the crates' documentation as well.

use std::path::PathBuf;

use metal_attention_testing::root;

use super::{Page, expect_none};

/// The folder of each crate, such as `crates/metal-attention-gguf`.
fn crates() -> Vec<PathBuf> {
    let folders = std::fs::read_dir(root().join("crates")).unwrap().map(|entry| entry.unwrap().path());
    let crates: Vec<_> = folders.filter(|folder| folder.join("Cargo.toml").exists()).collect();
    assert!(crates.len() >= 14, "{crates:?}");
    crates
}

/// The README of the crate in `folder`.
fn readme(folder: &std::path::Path) -> Page {
    Page::read(folder.join("README.md").strip_prefix(root()).unwrap().to_str().unwrap())
}

#[test]
fn each_crate_has_a_readme_of_two_to_five_kilobytes() {
    let sizes = crates().into_iter().map(|folder| readme(&folder));
    let wrong = sizes.filter(|page| !(2000..=5120).contains(&page.text.len()));
    expect_none(&wrong.map(|page| format!("{} has {} bytes", page.name(), page.text.len())).collect::<Vec<_>>());
}

#[test]
fn readmes_are_the_documentation_of_their_crates() {
    for folder in crates() {
        let lib = std::fs::read_to_string(folder.join("src/lib.rs")).unwrap();
        assert!(lib.contains("#![doc = include_str!(\"../README.md\")]"), "{}", folder.display());
    }
}

#[test]
fn paths_in_readmes_exist() {
    let missing = crates().into_iter().flat_map(|folder| readme(&folder).missing_paths(&[&folder]));
    expect_none(&missing.collect::<Vec<_>>());
}
