//! Arrays of strings, such as vocabularies and merge tables.

use std::borrow::Cow;
use std::fmt::Write;

/// An array of strings in one allocation; a vocabulary has 150 000 of them.
///
/// ```
/// use metal_attention_gguf::StringArray;
/// let words: StringArray = ["once", "upon", "a", "time"].into_iter().collect();
/// assert_eq!(words.len(), 4);
/// assert_eq!(words.get(1), Some("upon"));
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StringArray {
    /// The concatenation of all strings.
    text: String,
    /// The end of each string in `text`, in bytes.
    ends: Vec<usize>,
}

impl StringArray {
    /// The number of strings.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// True when there are no strings.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// String `i`, `None` when out of range.
    pub fn get(&self, i: usize) -> Option<&str> {
        let end = *self.ends.get(i)?;
        let start = if i == 0 { 0 } else { self.ends[i - 1] };
        Some(&self.text[start..end])
    }

    /// The strings in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &str> + '_ {
        let mut start = 0;
        self.ends.iter().map(move |&end| {
            let string = &self.text[start..end];
            start = end;
            string
        })
    }

    /// The array of strings whose bytes are concatenated in `bytes` and end at `ends`. Bytes that are not UTF-8 are escaped.
    pub(crate) fn from_bytes(bytes: Vec<u8>, ends: Vec<usize>) -> Self {
        let bytes = match String::from_utf8(bytes) {
            Ok(text) if ends.iter().all(|&end| text.is_char_boundary(end)) => return Self { text, ends },
            Ok(text) => text.into_bytes(),
            Err(error) => error.into_bytes(),
        };
        let mut start = 0;
        let strings = ends.iter().map(|&end| escaped(&bytes[std::mem::replace(&mut start, end)..end]));
        strings.collect()
    }
}

/// `bytes` as a string, with `\xNN` in place of each byte that is not UTF-8.
pub(crate) fn escaped(bytes: &[u8]) -> Cow<'_, str> {
    if let Ok(text) = std::str::from_utf8(bytes) {
        return text.into();
    }
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        text += chunk.valid();
        for byte in chunk.invalid() {
            // Writing to a string cannot fail.
            let _ = write!(text, "\\x{byte:02x}");
        }
    }
    text.into()
}

impl<S: AsRef<str>> FromIterator<S> for StringArray {
    fn from_iter<I: IntoIterator<Item = S>>(strings: I) -> Self {
        let mut array = Self::default();
        for string in strings {
            array.text.push_str(string.as_ref());
            array.ends.push(array.text.len());
        }
        array
    }
}
