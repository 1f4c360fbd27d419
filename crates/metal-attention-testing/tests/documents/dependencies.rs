//! Crates depend on those below them.

use metal_attention_testing::root;

use super::expect_none;

/// The crates without the common beginning of their names, from the bottom up, with those that they depend on.
const CRATES: [(&str, &[&str]); 15] = [
    ("-gguf", &[]),
    ("-hub", &[]),
    ("-mcp", &[]),
    ("-pictures", &[]),
    ("-tokenizer", &["-gguf"]),
    ("-model", &["-gguf", "-pictures"]),
    ("-testing", &["-gguf"]),
    ("-chat", &["-gguf", "-tokenizer"]),
    ("-cpu", &["-gguf", "-model"]),
    ("-wgpu", &["-gguf", "-model"]),
    ("-cuda", &["-gguf", "-model"]),
    ("", &["-gguf", "-model", "-pictures", "-tokenizer", "-cpu", "-cuda", "-wgpu"]),
    ("-grammar", &["", "-chat"]),
    ("-server", &["", "-chat", "-grammar", "-mcp"]),
    ("-c", &["", "-chat", "-grammar"]),
];

/// The crates of this workspace in the section `[dependencies]` of a manifest.
fn dependencies(manifest: &str) -> Vec<&str> {
    let (_, section) = manifest.split_once("\n[dependencies]\n").unwrap_or_default();
    let lines = section.lines().take_while(|line| !line.starts_with('['));
    let names = lines.filter_map(|line| line.split(['.', ' ', '=']).next());
    names.filter_map(|name| name.strip_prefix("metal-attention")).collect()
}

#[test]
fn crates_depend_on_those_below_them() {
    let mut errors = Vec::new();
    for (i, (name, below)) in CRATES.into_iter().enumerate() {
        let path = root().join(format!("crates/metal-attention{name}/Cargo.toml"));
        let manifest = std::fs::read_to_string(path).unwrap();
        let mut found = dependencies(&manifest);
        found.sort_unstable();
        let mut expected = below.to_vec();
        expected.sort_unstable();
        if found != expected {
            errors.push(format!("metal-attention{name} depends on {found:?}, expected {expected:?}"));
        }
        for of in below {
            assert!(CRATES[..i].iter().any(|(name, _)| name == of), "{of} is not below {name}");
        }
    }
    let n = std::fs::read_dir(root().join("crates")).unwrap().count();
    assert_eq!(n, CRATES.len(), "a crate is missing in the list");
    expect_none(&errors);
}
