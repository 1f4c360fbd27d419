//! Links between the pages of the repository.

use std::collections::HashSet;

use metal_attention_testing::root;

use super::{Page, expect_none, pages};

/// `line` without the texts in backticks, in which brackets are code.
fn without_code(line: &str) -> String {
    line.split('`').step_by(2).collect::<Vec<_>>().join("code")
}

/// The targets of the links in a page, such as `docs/server.md#replicas`.
fn targets(page: &Page) -> Vec<String> {
    let mut targets = Vec::new();
    // Links may be wrapped: their texts and targets are looked for in the whole page.
    let text = page.prose().map(without_code).collect::<Vec<_>>().join("\n");
    for (at, _) in text.match_indices("](") {
        let rest = &text[at + 2..];
        targets.extend(rest.find(')').map(|end| rest[..end].trim().to_owned()));
    }
    targets
}

/// The names by which the headings of a page are linked to, as GitHub makes them: lower case, words joined by hyphens,
/// without punctuation. A repeated heading gets a number.
fn anchors(page: &Page) -> HashSet<String> {
    let mut anchors = HashSet::new();
    for line in page.prose().filter(|line| line.starts_with('#')) {
        let title = line.trim_start_matches('#').trim().to_lowercase();
        let name: String = title
            .chars()
            .filter(|&c| c.is_alphanumeric() || " -_".contains(c))
            .map(|c| if c == ' ' { '-' } else { c })
            .collect();
        let numbered = (1..).map(|n| format!("{name}-{n}"));
        let name = std::iter::once(name.clone()).chain(numbered).find(|name| !anchors.contains(name));
        anchors.extend(name);
    }
    anchors
}

/// What is wrong with a link; `None` if it resolves. Addresses on other hosts are not looked up.
fn defect(page: &Page, target: &str) -> Option<String> {
    let is_address = target.contains("://") || target.starts_with("mailto:");
    // Links of rustdoc to items, in pages that are the documentation of a crate.
    let is_item = target.contains("::") && page.name().starts_with("crates/");
    if is_address || is_item {
        return None;
    }
    let (path, anchor) = target.split_once('#').map_or((target, None), |(path, anchor)| (path, Some(anchor)));
    let file = if path.is_empty() { page.path.clone() } else { page.path.parent().unwrap().join(path) };
    if !file.exists() {
        return Some(format!("{}: {target} does not exist", page.name()));
    }
    let anchor = anchor.filter(|_| file.extension() == Some("md".as_ref()))?;
    let file = file.canonicalize().unwrap();
    let linked = Page::read(file.strip_prefix(root().canonicalize().unwrap()).unwrap().to_str().unwrap());
    (!anchors(&linked).contains(anchor)).then(|| format!("{}: {target} has no such heading", page.name()))
}

#[test]
fn links_between_pages_resolve() {
    let mut errors = Vec::new();
    let mut n_links = 0;
    for page in pages() {
        for target in targets(&page) {
            n_links += 1;
            errors.extend(defect(&page, &target));
        }
    }
    expect_none(&errors);
    assert!(n_links > 150, "only {n_links} links found");
}

#[test]
fn broken_links_are_found() {
    let text =
        "# A title: of `code`\n[x](README.md) [y](nothing.md)\n`[z](code.md)` [w](#a-title-of-code) [v](#other)\n";
    let page = Page { path: root().join("x.md"), text: text.into() };
    assert_eq!(targets(&page), ["README.md", "nothing.md", "#a-title-of-code", "#other"]);
    assert_eq!(defect(&page, "README.md"), None);
    assert_eq!(defect(&page, "https://example.org/nothing"), None);
    assert_eq!(defect(&page, "nothing.md").unwrap(), "x.md: nothing.md does not exist");
    assert!(anchors(&page).contains("a-title-of-code"));
    assert!(!anchors(&page).contains("other"));
}
