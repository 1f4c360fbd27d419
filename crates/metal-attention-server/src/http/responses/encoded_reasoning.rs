//! The field `encrypted_content` of reasoning items: reasoning in a form that clients send back without reading it.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

/// The prefix of contents of this server. They are not encrypted, since the client has the reasoning anyway.
const PREFIX: &str = "metal-attention-1:";

/// The content that encodes `reasoning`.
pub fn encode(reasoning: &str) -> String {
    format!("{PREFIX}{}", STANDARD.encode(reasoning))
}

/// The reasoning in a content; `None` if another server wrote it.
pub fn decode(content: &str) -> Option<String> {
    let bytes = STANDARD.decode(content.strip_prefix(PREFIX)?).ok()?;
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasoning_is_decoded() {
        for reasoning in ["", "Hm.\n\u{1f642}"] {
            assert_eq!(decode(&encode(reasoning)).as_deref(), Some(reasoning));
        }
        assert_eq!(encode("Hm."), "metal-attention-1:SG0u");
        for foreign in ["", "gAAAA", "metal-attention-2:SG0u", "metal-attention-1:%", "metal-attention-1:/w=="] {
            assert_eq!(decode(foreign), None, "{foreign}");
        }
    }
}
