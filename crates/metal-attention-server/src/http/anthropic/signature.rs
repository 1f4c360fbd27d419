//! Signatures of reasoning. Anthropic's clients send reasoning back unchanged, with their signature. The server does not
//! verify them: a signature only matters where the response leaves out the reasoning, which it then encodes.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

/// The prefix of signatures.
const MARK: &[u8] = b"metal-attention ";

/// The signature of `reasoning`. `omitted`: it encodes the text.
pub fn of(reasoning: &str, omitted: bool) -> String {
    let held = if omitted { reasoning.as_bytes() } else { &[] };
    STANDARD.encode([MARK, held].concat())
}

/// The reasoning that a signature of this server encodes; `None` for other signatures.
pub fn reasoning(signature: &str) -> Option<String> {
    let bytes = STANDARD.decode(signature).ok()?;
    String::from_utf8(bytes.strip_prefix(MARK)?.to_vec()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signatures_encode_reasoning_that_is_left_out() {
        assert_eq!(of("Hm.", false), "bWV0YWwtYXR0ZW50aW9uIA==");
        assert_eq!(reasoning(&of("Hm.", false)).as_deref(), Some(""));
        assert_eq!(reasoning(&of("Hé.", true)).as_deref(), Some("Hé."));
        assert_eq!(reasoning("EqoB"), None);
        assert_eq!(reasoning("no base64"), None);
    }
}
