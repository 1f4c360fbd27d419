//! Export of pre-tokenizers as regular expressions, in the notation of Oniguruma.
//!
//! Letter case and contractions are written out for ASCII, as in `rules.rs`. An expression with `(?i)` would also
//! match "ſ" as an "s".

use crate::classes;
use crate::rules::{CharSet, SplitPass, SplitRule};

/// `'s|'t|'re|'ve|'m|'ll|'d`
const CONTRACTION: &str = "'s|'t|'re|'ve|'m|'ll|'d";
/// The contractions in any case.
const CONTRACTION_ANY_CASE: &str = "'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]";

impl SplitPass {
    /// The expression of a pass: its matches, and the text between them, are the pieces.
    pub(crate) fn expression(self) -> String {
        match self {
            SplitPass::Rules(rules) => rules.iter().map(|rule| rule.expression()).collect::<Vec<_>>().join("|"),
            SplitPass::TrailingSpace => r"\s+\z".to_owned(),
            // The lookahead requires that the remaining digits of the number are groups of three.
            SplitPass::DigitGroups => r"[^\p{N}]*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))".to_owned(),
            // An empty match at each position where a piece ends.
            SplitPass::Thousands => "(?=(?:[0-9]{3})+(?![0-9]))".to_owned(),
        }
    }
}

impl SplitRule {
    fn expression(self) -> String {
        match self {
            SplitRule::Contraction { any_case: false } => CONTRACTION.to_owned(),
            SplitRule::Contraction { any_case: true } => CONTRACTION_ANY_CASE.to_owned(),
            SplitRule::Run { lead, body, max, tail, tail_max } => {
                optional(lead) + &repeated(body, 1, max) + &repeated(tail, 0, tail_max)
            }
            SplitRule::Exactly { count, set } => format!("{}{{{count}}}", set.expression()),
            SplitRule::Headed { head, body } => head.expression() + &repeated(body, 1, usize::MAX),
            SplitRule::CasedWord { lead, upper, lower, contraction } => {
                let end = if contraction { format!("(?:{CONTRACTION_ANY_CASE})?") } else { String::new() };
                let (lead, upper, lower) = (optional(lead), upper.expression(), lower.expression());
                format!("{lead}{upper}*{lower}+{end}|{lead}{upper}+{lower}*{end}")
            }
            SplitRule::LineBreaks => r"\s*[\r\n]+".to_owned(),
            SplitRule::Spaces => r"\s+(?!\S)|\s+".to_owned(),
            SplitRule::Special { expression, .. } => expression.to_owned(),
        }
    }
}

impl CharSet {
    fn expression(self) -> String {
        match (self.any, self.none) {
            (0, 0) => r"[\s\S]".to_owned(),
            (any, 0) => classes::set(any),
            (0, none) => format!("[^{}]", classes::members(none)),
            (any, none) => format!("[{}&&[^{}]]", classes::members(any), classes::members(none)),
        }
    }
}

/// `set?`
fn optional(set: CharSet) -> String {
    if set == CharSet::NOTHING { String::new() } else { set.expression() + "?" }
}

/// `set{min,max}`, in the shortest notation.
fn repeated(set: CharSet, min: usize, max: usize) -> String {
    if set == CharSet::NOTHING {
        return String::new();
    }
    let count = match (min, max) {
        (0, usize::MAX) => "*".to_owned(),
        (1, usize::MAX) => "+".to_owned(),
        (0, 1) => "?".to_owned(),
        (1, 1) => String::new(),
        (min, max) => format!("{{{min},{max}}}"),
    };
    set.expression() + &count
}

#[cfg(test)]
mod tests {
    use crate::pre::{PRE_TOKENIZERS, find};
    use crate::rules::SplitPass;

    fn expressions(name: &str) -> Vec<String> {
        find(name).expect("a pre-tokenizer").passes.iter().map(|pass| pass.expression()).collect()
    }

    #[test]
    fn the_expressions_are_those_of_the_papers_and_models() {
        assert_eq!(
            expressions("gpt-2"),
            [r"'s|'t|'re|'ve|'m|'ll|'d|[ ]?\p{L}+|[ ]?\p{N}+|[ ]?[^\p{L}\p{N}\s]+|\s+(?!\S)|\s+"]
        );
        assert_eq!(
            expressions("qwen35"),
            [concat!(
                r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|[^\p{L}\p{N}\r\n]?[\p{L}\p{M}]+|\p{N}|",
                r"[ ]?[^\p{L}\p{N}\p{M}\s]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            )]
        );
        assert_eq!(expressions("deepseek-v3")[0], r"\p{N}{1,3}");
        assert_eq!(expressions("falcon")[2], "[0-9]{3}");
        let kimi = expressions("kimi-k2").concat();
        assert!(kimi.contains(r"[^\p{L}\p{N}\r\n]?[\p{L}&&[^"), "{kimi}");
    }

    /// `regex-syntax`, whose notation the classes use, parses the expressions without lookaround. This checks sets and
    /// counts.
    #[test]
    fn the_expressions_are_well_formed() {
        for pre in PRE_TOKENIZERS {
            for pass in pre.passes {
                let expression = pass.expression();
                let plain = expression.replace(r"(?!\S)", "").replace(r"(?!\p{N})", "").replace("(?![0-9])", "");
                let plain = plain.replace("(?=", "(?:");
                let parsed = regex_syntax::parse(&plain);
                assert!(parsed.is_ok(), "{:?}: {expression}", pre.names);
                assert!(!expression.is_empty() || matches!(pass, SplitPass::Rules([])));
            }
        }
    }
}
