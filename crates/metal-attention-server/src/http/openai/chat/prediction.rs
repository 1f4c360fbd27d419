//! The field `prediction`: a text that the answer is likely to repeat.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, SeqAccess, Visitor};
use serde::{Deserialize as DeriveDeserialize, Serialize};
use utoipa::ToSchema;

/// A text that the answer is likely to repeat, such as the file that it edits: drafts are taken from it. The answer does not
/// depend on it.
#[derive(Debug, Clone, PartialEq, DeriveDeserialize, ToSchema)]
#[serde(expecting = "an object with type and content")]
pub struct Prediction {
    /// `content`.
    #[serde(rename = "type")]
    #[allow(dead_code, reason = "read for its errors")]
    kind: PredictionKind,
    /// The text: a string, or a list of parts of the type `text`.
    #[schema(value_type = PredictedContent)]
    content: PredictedText,
}

impl Prediction {
    /// The text.
    pub fn into_text(self) -> String {
        self.content.0
    }
}

/// The kind of a prediction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, DeriveDeserialize, ToSchema)]
enum PredictionKind {
    /// A text.
    #[serde(rename = "content")]
    Content,
}

/// The text of a prediction; that of parts is joined.
#[derive(Debug, Clone, PartialEq)]
struct PredictedText(String);

/// The schema of [`PredictedText`].
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "describes only")]
enum PredictedContent {
    /// A string.
    Text(String),
    /// A list of parts.
    Parts(Vec<PredictedPart>),
}

/// A part of the text.
#[derive(Serialize, DeriveDeserialize, ToSchema)]
#[serde(expecting = "a part with type and text")]
struct PredictedPart {
    /// `text`.
    #[serde(rename = "type")]
    kind: PartKind,
    /// The text.
    text: String,
}

/// The kind of a part.
#[derive(Serialize, DeriveDeserialize, ToSchema)]
enum PartKind {
    /// A text.
    #[serde(rename = "text")]
    Text,
}

impl<'de> Deserialize<'de> for PredictedText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PredictedTextVisitor)
    }
}

struct PredictedTextVisitor;

impl<'de> Visitor<'de> for PredictedTextVisitor {
    type Value = PredictedText;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string or a list of text parts")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<PredictedText, E> {
        Ok(PredictedText(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<PredictedText, A::Error> {
        let mut all = String::new();
        while let Some(PredictedPart { kind: PartKind::Text, text }) = list.next_element()? {
            all += &text;
        }
        Ok(PredictedText(all))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(prediction: &Value) -> Result<String, String> {
        let read = serde_json::from_str(&prediction.to_string()).map(Prediction::into_text);
        read.map_err(|error| error.to_string())
    }

    #[test]
    fn predictions_are_strings_or_parts() {
        let part = |text: &str| json!({"type": "text", "text": text});
        assert_eq!(read(&json!({"type": "content", "content": "a\nb"})), Ok("a\nb".into()));
        assert_eq!(read(&json!({"type": "content", "content": [part("a"), part("\nb")]})), Ok("a\nb".into()));
        assert_eq!(read(&json!({"type": "content", "content": []})), Ok(String::new()));
        for (wrong, why) in [
            (json!("a"), "expected an object with type and content"),
            (json!({"content": "a"}), "missing field `type`"),
            (json!({"type": "content"}), "missing field `content`"),
            (json!({"type": "tokens", "content": "a"}), "unknown variant `tokens`, expected `content`"),
            (json!({"type": "content", "content": 7}), "expected a string or a list of text parts"),
            (json!({"type": "content", "content": ["a"]}), "expected a part with type and text"),
            (
                json!({"type": "content", "content": [{"type": "image_url", "text": "a"}]}),
                "unknown variant `image_url`, expected `text`",
            ),
        ] {
            let error = read(&wrong).unwrap_err();
            assert!(error.contains(why), "{wrong}: {error}");
        }
    }
}
