//! Finds the function's name in the text before a call's arguments.

use super::held_back::MAX_BLANK;
use super::syntax::{ARGS, CALL_ID, DEEPSEEK_SEPARATOR};

/// The function's name in a call's header, which is `name`, `name[CALL_ID]id[ARGS]`, or `function`, a separator, the
/// name and the start of a code block.
pub(super) fn name_in(header: &str) -> &str {
    let (before, after) = header.split_once(DEEPSEEK_SEPARATOR).unwrap_or((header, ""));
    let after = after.trim().trim_end_matches("```json").trim_end();
    let name = if after.is_empty() { before } else { after.lines().next().unwrap_or_default() };
    let name = name.trim().strip_suffix(ARGS).unwrap_or(name);
    name.split(CALL_ID).next().unwrap_or_default().trim()
}

/// Whether `name`, found in `header`, is a function's name: a known one, or a word that the format's marks identify.
pub(super) fn is_name(name: &str, header: &str, names: &[String]) -> bool {
    let is_told = header.contains(ARGS) || header.contains(DEEPSEEK_SEPARATOR);
    let is_word = || !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || "_-.:/".contains(c));
    names.iter().any(|known| known == name) || (is_told && is_word())
}

/// Whether `text` may be a function's name, with marks after it, before an object that has not arrived yet.
pub(super) fn may_be_named(text: &str, names: &[String]) -> bool {
    let known = names.iter().any(|name| name.starts_with(text) || text.starts_with(name.as_str()));
    let (_, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
    let rest = rest.trim_start();
    known || rest.is_empty() || rest.starts_with(['[', '{'])
}

/// The result of looking for a function's name, a line break and an object at the start of a text.
pub(super) enum NamedCall {
    /// More text is needed.
    Incomplete,
    /// The name, and the offset of the object.
    Call(String, usize),
    /// The text is something else.
    No,
}

/// Looks for one of `names`, a line break and an object at the start of `text`.
pub(super) fn named_call(text: &str, names: &[String]) -> NamedCall {
    for name in names {
        if name.starts_with(text) {
            return NamedCall::Incomplete;
        }
        let Some(after) = text.strip_prefix(name.as_str()) else { continue };
        let arguments = after.trim_start();
        let blank = &after[..after.len() - arguments.len()];
        if arguments.is_empty() && blank.len() <= MAX_BLANK {
            return NamedCall::Incomplete;
        }
        if blank.contains('\n') && blank.len() <= MAX_BLANK && arguments.starts_with('{') {
            return NamedCall::Call(name.clone(), text.len() - arguments.len());
        }
    }
    NamedCall::No
}

#[cfg(test)]
mod tests {
    use super::name_in;

    #[test]
    fn names_are_found_in_headers() {
        for header in [
            "add",
            " add[ARGS]",
            "add[CALL_ID]abcdefghi[ARGS]",
            "add<｜tool▁sep｜>",
            "function<｜tool▁sep｜>add\n```json\n",
            "function<｜tool▁sep｜>add\n",
        ] {
            assert_eq!(name_in(header), "add", "{header}");
        }
        assert_eq!(name_in("\n"), "");
    }
}
