//! Signatures of thoughts. Anthropic's clients send thoughts back unchanged, with their signature. The server does not
//! verify them: a signature only matters where the response leaves out the thoughts, which it then encodes.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

/// The prefix of signatures.
const MARK: &[u8] = b"metal-attention ";

/// The signature of `thoughts`. `omitted`: it encodes them.
pub fn of(thoughts: &str, omitted: bool) -> String {
    let held = if omitted { thoughts.as_bytes() } else { &[] };
    STANDARD.encode([MARK, held].concat())
}

/// The thoughts that a signature of this server encodes; `None` for other signatures.
pub fn thoughts(signature: &str) -> Option<String> {
    let bytes = STANDARD.decode(signature).ok()?;
    String::from_utf8(bytes.strip_prefix(MARK)?.to_vec()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signatures_encode_thoughts_that_are_left_out() {
        assert_eq!(of("Hm.", false), "bWV0YWwtYXR0ZW50aW9uIA==");
        assert_eq!(thoughts(&of("Hm.", false)).as_deref(), Some(""));
        assert_eq!(thoughts(&of("Hé.", true)).as_deref(), Some("Hé."));
        assert_eq!(thoughts("EqoB"), None);
        assert_eq!(thoughts("no base64"), None);
    }
}
