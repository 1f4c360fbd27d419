//! Pictures in messages. In the text of a message a marker stands for each, with its number; templates pass markers on like any
//! text, so that the places of the pictures are found in the rendered prompt.

use std::borrow::Cow;
use std::sync::Arc;

use crate::{Message, Prompt};

/// The characters around the number of a picture: of a private use area, which no template looks at.
const MARKS: [char; 2] = ['\u{f5ac}', '\u{f5ad}'];

/// Most digits of a number.
const MAX_DIGITS: usize = 10;

/// A picture of a message, as a client sent it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MessagePicture {
    /// Where its bytes are.
    pub source: PictureSource,
    /// Whether a copy with few pixels is enough (`"detail": "low"`).
    pub low_detail: bool,
}

impl MessagePicture {
    /// Bytes of its address or its Base64.
    pub fn bytes_sent(&self) -> usize {
        match &self.source {
            PictureSource::Url(text) | PictureSource::Base64(text) => text.len(),
        }
    }
}

/// Where the bytes of a picture are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PictureSource {
    /// An address, such as `data:image/png;base64,...` or `https://...`.
    Url(Arc<str>),
    /// The bytes of its file in Base64.
    Base64(Arc<str>),
}

/// A text with pictures. In it stand their markers, which number them from 0.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TextWithPictures {
    /// The text, with a marker for each picture.
    pub text: String,
    /// The pictures.
    pub pictures: Vec<MessagePicture>,
}

impl TextWithPictures {
    /// Appends a text. Markers in it are no pictures: their first character is replaced by U+FFFD.
    pub fn push_str(&mut self, text: &str) {
        self.text += &without_markers(text);
    }

    /// Appends a picture.
    pub fn push_picture(&mut self, picture: MessagePicture) {
        self.text += &picture_marker(self.pictures.len());
        self.pictures.push(picture);
    }

    /// Appends a text with pictures.
    pub fn append(&mut self, other: Self) {
        self.text += &renumbered(&other.text, other.pictures.len(), self.pictures.len());
        self.pictures.extend(other.pictures);
    }

    /// Bytes of the pictures as they were sent.
    pub fn picture_bytes(&self) -> usize {
        self.pictures.iter().map(MessagePicture::bytes_sent).sum()
    }

    /// Whether there is neither text nor picture.
    pub fn is_empty(&self) -> bool {
        self.text.is_empty()
    }

    /// Texts and pictures in their order.
    pub fn parts(&self) -> impl Iterator<Item = TextOrPicture<'_>> {
        split(&self.text, self.pictures.len()).into_iter().map(|piece| match piece {
            Piece::Text(text) => TextOrPicture::Text(text),
            Piece::Picture(number) => TextOrPicture::Picture(&self.pictures[number]),
        })
    }
}

impl From<String> for TextWithPictures {
    /// A text without pictures ([`push_str`](TextWithPictures::push_str)).
    fn from(text: String) -> Self {
        match without_markers(&text) {
            Cow::Borrowed(_) => Self { text, pictures: Vec::new() },
            Cow::Owned(text) => Self { text, pictures: Vec::new() },
        }
    }
}

impl From<&str> for TextWithPictures {
    fn from(text: &str) -> Self {
        text.to_owned().into()
    }
}

/// A part of a [`TextWithPictures`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TextOrPicture<'t> {
    /// A text without markers.
    Text(&'t str),
    /// A picture.
    Picture(&'t MessagePicture),
}

/// A part of a rendered prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PromptPart<'p> {
    /// A text, with the byte offsets in it that [`Prompt::literals`] has.
    Text(&'p str, Vec<usize>),
    /// The picture with this number.
    Picture(usize),
}

/// The text that stands for the picture with this number.
pub fn picture_marker(number: usize) -> String {
    format!("{}{number}{}", MARKS[0], MARKS[1])
}

/// The text with `place` instead of markers, as a person reads it.
pub fn without_picture_markers(text: &str, place: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for part in split(text, usize::MAX) {
        shown += match part {
            Piece::Text(text) => text,
            Piece::Picture(_) => place,
        };
    }
    shown
}

/// A text that somebody wrote, in which nothing is a marker. The characters have other uses, so that only whole markers are
/// changed.
fn without_markers(text: &str) -> Cow<'_, str> {
    if split(text, usize::MAX).iter().any(|piece| matches!(piece, Piece::Picture(_))) {
        Cow::Owned(text.replace(MARKS[0], "\u{fffd}"))
    } else {
        Cow::Borrowed(text)
    }
}

/// A part of a text with markers.
enum Piece<'t> {
    Text(&'t str),
    Picture(usize),
}

/// Splits a text at the markers of pictures with numbers below `n_pictures`. Other markers are text.
fn split(text: &str, n_pictures: usize) -> Vec<Piece<'_>> {
    let (mut pieces, mut start) = (Vec::new(), 0);
    for (at, mark) in text.match_indices(MARKS[0]) {
        let rest = &text[at + mark.len()..];
        let n_digits = rest.bytes().take(MAX_DIGITS).take_while(u8::is_ascii_digit).count();
        let (digits, behind) = rest.split_at(n_digits);
        let number = digits.parse().ok().filter(|&number: &usize| number < n_pictures && behind.starts_with(MARKS[1]));
        let Some(number) = number else { continue };
        if start < at {
            pieces.push(Piece::Text(&text[start..at]));
        }
        pieces.push(Piece::Picture(number));
        start = at + mark.len() + digits.len() + MARKS[1].len_utf8();
    }
    if start < text.len() {
        pieces.push(Piece::Text(&text[start..]));
    }
    pieces
}

/// The numbers of the pictures in a text, those below `n_pictures`.
pub(crate) fn pictures_in(text: &str, n_pictures: usize) -> impl Iterator<Item = usize> + '_ {
    split(text, n_pictures).into_iter().filter_map(|piece| match piece {
        Piece::Picture(number) => Some(number),
        Piece::Text(_) => None,
    })
}

/// `text`, whose markers of numbers below `n_pictures` have numbers higher by `offset`.
fn renumbered(text: &str, n_pictures: usize, offset: usize) -> String {
    let piece = |piece| match piece {
        Piece::Text(text) => text.to_owned(),
        Piece::Picture(number) => picture_marker(offset + number),
    };
    split(text, n_pictures).into_iter().map(piece).collect()
}

/// Takes the pictures out of messages. Their numbers in the messages' texts, which begin anew in each message, become those of the
/// returned list.
pub fn take_pictures(messages: &mut [Message]) -> Vec<MessagePicture> {
    let mut pictures = Vec::new();
    for message in messages.iter_mut().filter(|message| !message.pictures.is_empty()) {
        message.content = Some(renumbered(message.text(), message.pictures.len(), pictures.len()));
        pictures.append(&mut message.pictures);
    }
    pictures
}

impl Prompt {
    /// The prompt in parts: texts, and those of `n_pictures` pictures whose markers are in it. Each picture stands where its marker is
    /// first; further ones are left out.
    pub fn parts(&self, n_pictures: usize) -> Vec<PromptPart<'_>> {
        let mut is_placed = vec![false; n_pictures];
        let part = |piece| match piece {
            Piece::Picture(number) => {
                (!std::mem::replace(&mut is_placed[number], true)).then_some(PromptPart::Picture(number))
            }
            Piece::Text(text) => {
                // Both are parts of one allocation.
                let start = text.as_ptr() as usize - self.text.as_ptr() as usize;
                let at = |offset: usize| self.literals.partition_point(|&literal| literal < offset);
                let within = &self.literals[at(start)..at(start + text.len())];
                Some(PromptPart::Text(text, within.iter().map(|at| at - start).collect()))
            }
        };
        split(&self.text, n_pictures).into_iter().filter_map(part).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Role;

    fn picture(data: &str) -> MessagePicture {
        MessagePicture { source: PictureSource::Base64(data.into()), low_detail: false }
    }

    #[test]
    fn pictures_of_messages_get_numbers_of_the_conversation() {
        let mut first = TextWithPictures::from("Compare ");
        first.push_picture(picture("a"));
        first.push_str(" with ");
        first.append(TextWithPictures { text: picture_marker(0), pictures: vec![picture("b")] });
        let mut last = TextWithPictures::default();
        last.push_picture(picture("c"));
        let [text, a] = [TextOrPicture::Text("Compare "), TextOrPicture::Picture(&picture("a"))];
        assert_eq!(first.parts().take(2).collect::<Vec<_>>(), [text, a]);
        let [first, last] = [first, last].map(|text| Message::of(Role::User, text));
        let mut messages = [first, Message::assistant("They differ."), last];
        assert_eq!(take_pictures(&mut messages), ["a", "b", "c"].map(picture));
        let texts: Vec<_> = messages.iter().map(|message| message.text().to_owned()).collect();
        let [a, b, c] = [0, 1, 2].map(picture_marker);
        assert_eq!(texts, [format!("Compare {a} with {b}"), "They differ.".into(), c]);
        assert_eq!(without_picture_markers(&texts[0], "<image>"), "Compare <image> with <image>");
    }

    #[test]
    fn markers_that_somebody_wrote_are_text() {
        let marker = picture_marker(0);
        let mut text = TextWithPictures::from(marker.clone());
        text.push_picture(picture("a"));
        text.push_str(&marker);
        text.push_str("\u{f5ac} is an icon");
        let forged = marker.replace('\u{f5ac}', "\u{fffd}");
        assert_eq!(text.text, format!("{forged}{marker}{forged}\u{f5ac} is an icon"));
    }

    #[test]
    fn prompts_are_divided_at_their_pictures() {
        let [a, b, unknown] = [0, 12, 99].map(picture_marker);
        let text = format!("<s>{a}{b} x <s>{unknown}{}", MARKS[0]);
        let (second, end) = (text.rfind("<s>").unwrap(), text.find(" x").unwrap());
        let prompt = Prompt { literals: vec![0, second], text: text.clone() };
        let expected = [
            PromptPart::Text("<s>", vec![0]),
            PromptPart::Picture(0),
            PromptPart::Picture(12),
            PromptPart::Text(&text[end..], vec![second - end]),
        ];
        assert_eq!(prompt.parts(13), expected);
        assert_eq!(prompt.parts(0), [PromptPart::Text(&text, vec![0, second])]);
        assert_eq!(Prompt { text: String::new(), literals: vec![] }.parts(1), []);
        let twice = Prompt { text: a.repeat(2), literals: vec![] };
        assert_eq!(twice.parts(1), [PromptPart::Picture(0)]);
        // Many beginnings of markers are read once.
        let many = "\u{f5ac}".repeat(1 << 20) + "\u{f5ad}";
        assert_eq!(split(&many, 1).len(), 1);
        for odd in ["\u{f5ac}", "\u{f5ac}+1\u{f5ad}", "\u{f5ac}\u{f5ad}", "\u{f5ad}0\u{f5ac}"] {
            let prompt = Prompt { text: odd.to_owned(), literals: vec![] };
            assert_eq!(prompt.parts(5), [PromptPart::Text(odd, vec![])]);
        }
    }
}
