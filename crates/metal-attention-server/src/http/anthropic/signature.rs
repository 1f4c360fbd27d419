//! Signatures of thoughts. Anthropic's clients give thoughts back as they came, with their signature. The server trusts any
//! thoughts: a signature matters only where the thoughts themselves are left out of the answer, which it then holds.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

/// What signatures begin with.
const MARK: &[u8] = b"metal-attention ";

/// The signature of `thoughts`. `omitted`: it holds them.
pub fn of(thoughts: &str, omitted: bool) -> String {
    let held = if omitted { thoughts.as_bytes() } else { &[] };
    STANDARD.encode([MARK, held].concat())
}

/// The thoughts that a signature of this server holds.
pub fn thoughts(signature: &str) -> Option<String> {
    let bytes = STANDARD.decode(signature).ok()?;
    String::from_utf8(bytes.strip_prefix(MARK)?.to_vec()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signatures_hold_what_is_left_out() {
        assert_eq!(of("Hm.", false), "bWV0YWwtYXR0ZW50aW9uIA==");
        assert_eq!(thoughts(&of("Hm.", false)).as_deref(), Some(""));
        assert_eq!(thoughts(&of("Hé.", true)).as_deref(), Some("Hé."));
        assert_eq!(thoughts("EqoB"), None);
        assert_eq!(thoughts("no base64"), None);
    }
}
