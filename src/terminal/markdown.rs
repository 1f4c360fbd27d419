//! Finds Markdown in a text that arrives in pieces. The marks stay in the text; what they enclose gets a style.

use super::TextStyle;

/// The beginning of a block of code. It ends with at least as many marks of the same kind.
struct Fence {
    /// The mark: a backtick or a tilde.
    mark: char,
    /// The number of marks.
    length: usize,
}

/// The parser. It knows headings, strong emphasis, code, and blocks of code (CommonMark, 4.2, 4.5, 6.1, 6.2), no other marks.
#[derive(Default)]
pub struct Markdown {
    /// The beginning of the line, held back while it may become a mark of the line: blanks and `#`, backticks or tildes.
    start: String,
    /// Whether the beginning of the line has been handled.
    in_line: bool,
    /// The block of code that is open.
    fence: Option<Fence>,
    /// Whether the line is a heading.
    heading: bool,
    /// Whether strong emphasis is open.
    bold: bool,
    /// The number of backticks that began the code that is open, and that will end it.
    code: Option<usize>,
    /// A run of asterisks or backticks, held back until its end.
    run: String,
    /// The last character before the run, in the same line.
    before: Option<char>,
    /// The pieces that are complete, not yet returned.
    pieces: Vec<(TextStyle, String)>,
}

impl Markdown {
    /// Adds text. Returns the pieces that it completes, each with its style.
    pub fn push(&mut self, text: &str) -> Vec<(TextStyle, String)> {
        for c in text.chars() {
            self.take(c);
        }
        std::mem::take(&mut self.pieces)
    }

    /// Ends the text. Returns the pieces that were held back, and resets the parser.
    pub fn finish(&mut self) -> Vec<(TextStyle, String)> {
        self.begin_line(None);
        self.end_run(None);
        *self = Self { pieces: std::mem::take(&mut self.pieces), ..Self::default() };
        std::mem::take(&mut self.pieces)
    }

    /// Adds a character.
    fn take(&mut self, c: char) {
        if !self.in_line {
            let mark = self.start.trim_start().chars().next();
            let may_be_mark = match c {
                ' ' => mark.is_none(),
                '#' | '`' | '~' => mark.is_none_or(|mark| mark == c),
                _ => false,
            };
            if may_be_mark {
                self.start.push(c);
                return;
            }
            self.begin_line(Some(c));
        }
        match c {
            '\n' => {
                self.end_run(None);
                // Emphasis and code end with the line, so that a stray mark spoils one line at most.
                (self.heading, self.bold, self.code, self.before) = (false, false, None, None);
                self.in_line = false;
                let style = if self.fence.is_some() { TextStyle::Block } else { TextStyle::Plain };
                self.put(style, "\n");
            }
            '*' | '`' if self.fence.is_none() && (self.run.is_empty() || self.run.starts_with(c)) => self.run.push(c),
            c => {
                self.end_run(Some(c));
                if matches!(c, '*' | '`') && self.fence.is_none() {
                    self.run.push(c);
                } else {
                    let style = self.style();
                    self.put(style, c.encode_utf8(&mut [0; 4]));
                    self.before = Some(c);
                }
            }
        }
    }

    /// Handles the beginning of a line, which is complete; `next` is the character after it.
    fn begin_line(&mut self, next: Option<char>) {
        self.in_line = true;
        let start = std::mem::take(&mut self.start);
        if start.is_empty() {
            return;
        }
        let marks = start.trim_start();
        let (mark, length) = (marks.chars().next(), marks.chars().count());
        let indented = start.len() - marks.len() > 3;
        let is_fence = !indented && length >= 3 && matches!(mark, Some('`' | '~'));
        match (&self.fence, mark) {
            (Some(fence), Some(mark)) if is_fence && mark == fence.mark && length >= fence.length => {
                self.put(TextStyle::Fence, &start);
                self.fence = None;
            }
            (Some(_), _) => self.put(TextStyle::Block, &start),
            (None, Some(mark)) if is_fence => {
                self.put(TextStyle::Fence, &start);
                self.fence = Some(Fence { mark, length });
            }
            (None, Some('#')) if !indented && length <= 6 && matches!(next, Some(' ')) => {
                self.heading = true;
                self.put(TextStyle::Bold, &start);
            }
            (None, Some('`')) => {
                self.put(TextStyle::Plain, &start[..start.len() - marks.len()]);
                marks.clone_into(&mut self.run);
            }
            (None, _) => self.put(TextStyle::Plain, &start),
        }
    }

    /// Handles a run of marks, which is complete; `next` is the character after it.
    fn end_run(&mut self, next: Option<char>) {
        let run = std::mem::take(&mut self.run);
        if run.is_empty() {
            return;
        }
        let opens = next.is_some_and(|c| !c.is_whitespace());
        let closes = self.before.is_some_and(|c| !c.is_whitespace());
        let (inside, was_code, was_bold) = (self.style(), self.code.is_some(), self.bold);
        if run.starts_with('`') {
            match self.code {
                Some(length) if length == run.len() => self.code = None,
                None if next.is_some() => self.code = Some(run.len()),
                Some(_) | None => {}
            }
        } else if self.code.is_none() && run.len() == 2 {
            if self.bold && closes {
                self.bold = false;
            } else if !self.bold && opens {
                self.bold = true;
            }
        }
        // A mark that opens something has the new style, a mark that closes something the style it closes.
        let ends = (was_code && self.code.is_none()) || (was_bold && !self.bold);
        let style = if ends { inside } else { self.style() };
        self.put(style, &run);
        self.before = run.chars().last();
    }

    /// The style of text at this point.
    fn style(&self) -> TextStyle {
        if self.fence.is_some() {
            TextStyle::Block
        } else if self.code.is_some() {
            TextStyle::Code
        } else if self.bold || self.heading {
            TextStyle::Bold
        } else {
            TextStyle::Plain
        }
    }

    /// Adds text to the pieces; neighbours of one style are joined.
    fn put(&mut self, style: TextStyle, text: &str) {
        match self.pieces.last_mut() {
            Some((last, so_far)) if *last == style => *so_far += text,
            _ if text.is_empty() => {}
            _ => self.pieces.push((style, text.to_owned())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The pieces of a text that arrives character by character, with neighbours of one style joined.
    fn pieces(text: &str) -> Vec<(TextStyle, String)> {
        let mut markdown = Markdown::default();
        let mut all: Vec<(TextStyle, String)> = Vec::new();
        let mut parts: Vec<_> = text.chars().flat_map(|c| markdown.push(&c.to_string())).collect();
        parts.extend(markdown.finish());
        for (style, text) in parts {
            match all.last_mut() {
                Some((last, so_far)) if *last == style => *so_far += &text,
                _ => all.push((style, text)),
            }
        }
        all
    }

    #[test]
    fn enclosed_text_gets_the_style_of_its_marks() {
        use TextStyle::{Block, Bold, Code, Fence, Plain};
        let cases: &[(&str, &[(TextStyle, &str)])] = &[
            ("a **b c** d", &[(Plain, "a "), (Bold, "**b c**"), (Plain, " d")]),
            ("2 ** 3 ** 4, 2*3*4", &[(Plain, "2 ** 3 ** 4, 2*3*4")]),
            ("a `b **c` d", &[(Plain, "a "), (Code, "`b **c`"), (Plain, " d")]),
            ("``a ` b``", &[(Code, "``a ` b``")]),
            ("## A `b`\nc", &[(Bold, "## A "), (Code, "`b`"), (Plain, "\nc")]),
            ("**a `b`** c", &[(Bold, "**a "), (Code, "`b`"), (Bold, "**"), (Plain, " c")]),
            ("#no\n# ", &[(Plain, "#no\n"), (Bold, "# ")]),
            ("**a\nb**", &[(Bold, "**a"), (Plain, "\nb**")]),
            (
                "  ```sh\n# a **b**\n````\nc",
                &[(Fence, "  ```"), (Block, "sh\n# a **b**\n"), (Fence, "````"), (Plain, "\nc")],
            ),
            ("~~~\n```\n~~~", &[(Fence, "~~~"), (Block, "\n```\n"), (Fence, "~~~")]),
            ("$a_*b*_c$ \\(x^*\\)", &[(Plain, "$a_*b*_c$ \\(x^*\\)")]),
        ];
        for (text, want) in cases {
            let want: Vec<_> = want.iter().map(|&(style, text)| (style, text.to_owned())).collect();
            assert_eq!(pieces(text), want, "{text:?}");
        }
    }

    #[test]
    fn the_text_is_unchanged() {
        let marks = ['a', ' ', '*', '`', '#', '~', '\n'];
        let mut state = 1_u32;
        for _ in 0..3000 {
            let text: String = (0..24)
                .map(|_| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    marks[(state >> 16) as usize % marks.len()]
                })
                .collect();
            assert_eq!(pieces(&text).iter().map(|(_, text)| text.as_str()).collect::<String>(), text);
        }
    }
}
