//! Arrays of strings, which is what vocabularies and merge tables are.

/// Many strings in one allocation: a vocabulary has 150 000 of them.
///
/// ```
/// use metal_attention_gguf::StringArray;
/// let words: StringArray = ["once", "upon", "a", "time"].into_iter().collect();
/// assert_eq!(words.len(), 4);
/// assert_eq!(words.get(1), Some("upon"));
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StringArray {
    /// All strings, one after the other.
    text: String,
    /// Where each string ends in `text`.
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

    /// Builds the array from the strings' bytes and their ends; the error is the index of the
    /// first string that is not UTF-8, and where it starts in `bytes`.
    pub(crate) fn from_utf8(bytes: Vec<u8>, ends: Vec<usize>) -> Result<Self, (usize, usize)> {
        let valid = |text: &String| ends.iter().all(|&end| text.is_char_boundary(end));
        match String::from_utf8(bytes) {
            Ok(text) if valid(&text) => Ok(Self { text, ends }),
            Ok(text) => Err(first_invalid(text.as_bytes(), &ends)),
            Err(error) => Err(first_invalid(error.as_bytes(), &ends)),
        }
    }
}

/// Index and start of the first string that is not UTF-8 by itself.
fn first_invalid(bytes: &[u8], ends: &[usize]) -> (usize, usize) {
    let mut start = 0;
    for (i, &end) in ends.iter().enumerate() {
        if std::str::from_utf8(&bytes[start..end]).is_err() {
            return (i, start);
        }
        start = end;
    }
    (ends.len(), start)
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
