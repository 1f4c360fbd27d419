//! docs/new-backend.md names files that exist, and the methods of an executor.

use std::collections::BTreeSet;

/// The words in backquotes of `text`.
fn quoted(text: &str) -> Vec<&str> {
    text.split('`').skip(1).step_by(2).collect()
}

#[test]
fn the_page_on_new_backends_names_what_there_is() {
    let root = metal_attention_testing::root();
    let page = std::fs::read_to_string(root.join("docs/new-backend.md")).unwrap();
    let files: Vec<_> = quoted(&page).into_iter().filter(|word| word.starts_with("crates/")).collect();
    for file in &files {
        assert!(root.join(file).is_file(), "{file} does not exist");
    }
    // The table of five files, each with an example in its last column.
    let rows =
        page.lines().skip_while(|line| !line.starts_with("|---")).skip(1).take_while(|line| line.starts_with('|'));
    let examples: Vec<_> = rows.map(|row| *quoted(row).last().unwrap()).collect();
    assert_eq!(examples.len(), 5);
    assert!(examples.iter().all(|example| files.contains(example)), "{examples:?}");
    // All methods of an executor, and no others.
    let code = std::fs::read_to_string(root.join("crates/metal-attention-model/src/session/executor.rs")).unwrap();
    let of_trait = code.split("pub trait Executor").nth(1).unwrap();
    let methods: BTreeSet<&str> =
        of_trait.lines().filter_map(|line| line.strip_prefix("    fn ")?.split('(').next()).collect();
    let section = page.split("## The methods of `Executor`").nth(1).unwrap().split("\nRules of").next().unwrap();
    let in_table =
        section.lines().filter(|line| line.starts_with("| `")).flat_map(|row| quoted(row.split(" | ").next().unwrap()));
    let defaults = section.split("These have defaults").nth(1).unwrap();
    let with_default = quoted(defaults).into_iter().filter(|word| methods.contains(word));
    assert_eq!(in_table.chain(with_default).collect::<BTreeSet<_>>(), methods);
}
