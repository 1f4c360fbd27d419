//! Holds documents to what they describe: links, paths, the READMEs of the crates, tables, the tests that ARCHITECTURE.md names, records
//! of decisions, pages that say how to add something. Also the order of the crates, which the pages draw.

mod architecture;
mod dependencies;
mod design;
mod drafts;
mod how_to;
mod links;
mod paths;
mod performance;
mod readmes;

use std::path::{Path, PathBuf};

use metal_attention_testing::root;

/// A Markdown file.
struct Page {
    /// Its path.
    path: PathBuf,
    /// Its text.
    text: String,
}

impl Page {
    /// Reads a page. `path` is relative to the root folder.
    fn read(path: &str) -> Self {
        let path = root().join(path);
        let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        Self { path, text }
    }

    /// Its path in the repository.
    fn name(&self) -> String {
        self.path.strip_prefix(root()).unwrap().to_string_lossy().replace('\\', "/")
    }

    /// Its lines outside fenced code blocks.
    fn prose(&self) -> impl Iterator<Item = &str> {
        let mut in_code = false;
        self.text.lines().filter(move |line| {
            let is_fence = line.trim_start().starts_with("```");
            in_code ^= is_fence;
            !in_code && !is_fence
        })
    }

    /// The texts in backticks in its prose.
    fn code_spans(&self) -> impl Iterator<Item = &str> {
        self.prose().flat_map(|line| line.split('`').skip(1).step_by(2))
    }

    /// The paths of files and folders in backticks in its prose: words with a slash, or with the ending of a source file.
    fn paths(&self) -> impl Iterator<Item = &str> {
        const ENDINGS: [&str; 12] =
            [".rs", ".md", ".cu", ".cuh", ".wgsl", ".py", ".json", ".h", ".toml", ".txt", ".xz", ".yml"];
        let is_word = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        self.code_spans().filter(move |span| {
            let is_file = ENDINGS.iter().any(|ending| span.ends_with(ending));
            let mut parts = span.strip_suffix('/').unwrap_or(span).split('/');
            (is_file || span.contains('/'))
                && parts.all(|part| !part.is_empty() && part.chars().all(is_word) && !part.starts_with('-'))
        })
    }

    /// An error for each path that exists neither in the root folder of the repository nor in one of `bases`.
    fn missing_paths(&self, bases: &[&Path]) -> Vec<String> {
        let missing = |path: &&str| !root().join(path).exists() && !bases.iter().any(|base| base.join(path).exists());
        self.paths().filter(missing).map(|path| format!("{}: `{path}` does not exist", self.name())).collect()
    }
}

/// All Markdown files of the repository. Folders that hold build outputs or begin with a dot are left out.
fn pages() -> Vec<Page> {
    let (mut folders, mut pages) = (vec![root()], Vec::new());
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap().map(Result::unwrap) {
            let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
            if entry.file_type().unwrap().is_dir() {
                if !name.starts_with('.') && !["target", "node_modules", "corpus"].contains(&&*name) {
                    folders.push(path);
                }
            } else if path.extension() == Some("md".as_ref()) {
                let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
                pages.push(Page { path, text });
            }
        }
    }
    assert!(pages.len() > 30, "only {} pages found", pages.len());
    pages
}

/// Fails with all errors at once.
fn expect_none(errors: &[String]) {
    assert!(errors.is_empty(), "{} errors:\n{}", errors.len(), errors.join("\n"));
}

#[test]
fn paths_are_words_with_a_slash_or_an_ending() {
    let text = "`src/a.rs`, `b.json`, `src/kernels/`, `Model::open`, `a / b`, `/v1/models`, `--flag`, `-x/y`\n```\n`in/code.rs`\n```\n";
    let page = Page { path: root().join("x.md"), text: text.into() };
    assert_eq!(page.paths().collect::<Vec<_>>(), ["src/a.rs", "b.json", "src/kernels/"]);
}
