//! Breaks lines between words at the edge of a terminal.

use unicode_width::UnicodeWidthChar;

use super::{RESET, TextStyle};

/// The number of columns from one tab stop to the next.
const TAB: usize = 8;

/// Follows the cursor. A word is written while it arrives; if it reaches the edge it is erased and written again in the next
/// line.
pub struct Wrap {
    /// The columns that are used: all but the last one, in which terminals move the cursor differently.
    columns: usize,
    /// The column of the cursor.
    column: usize,
    /// The present style.
    style: TextStyle,
    /// The word before the cursor, with the sequences of its styles.
    word: String,
    /// The width of the word.
    word_columns: usize,
    /// Whether the word is longer than a line, so that it stays where it is.
    is_long: bool,
}

impl Wrap {
    /// A terminal with `columns` columns, the cursor at the beginning of a line.
    pub fn new(columns: usize) -> Self {
        Self {
            columns: columns.saturating_sub(1).max(1),
            column: 0,
            style: TextStyle::Plain,
            word: String::new(),
            word_columns: 0,
            is_long: false,
        }
    }

    /// Sets the style and returns the sequence for it. `None`: styles are not drawn.
    pub fn style(&mut self, style: Option<TextStyle>) -> String {
        let Some(style) = style.filter(|style| style.sequence() != self.style.sequence()) else {
            return String::new();
        };
        self.style = style;
        let sequence = format!("{RESET}{}", style.sequence());
        self.word += &sequence;
        sequence
    }

    /// Adds text and returns the bytes to write. `wraps`: lines are broken between words.
    pub fn push(&mut self, text: &str, wraps: bool) -> String {
        let mut out = String::new();
        for c in text.chars() {
            match c {
                '\n' => {
                    out.push(c);
                    self.column = 0;
                    self.end_word();
                }
                '\t' => {
                    out.push(c);
                    self.column = (self.column / TAB + 1) * TAB % self.columns;
                    self.end_word();
                }
                ' ' => {
                    out.push(c);
                    self.column += 1;
                    self.end_word();
                }
                c => self.put(c, wraps, &mut out),
            }
        }
        out
    }

    /// Adds a character that is no white space.
    fn put(&mut self, c: char, wraps: bool, out: &mut String) {
        let columns = c.width().unwrap_or(0);
        // Scripts with wide characters have no blanks between words, so a line may be broken at each of them.
        if columns > 1 {
            self.end_word();
        }
        if self.column + columns > self.columns {
            if wraps && !self.is_long && self.word_columns + columns <= self.columns {
                if self.word_columns > 0 {
                    let back = self.word_columns.min(self.column).to_string();
                    out.extend(["\u{1b}[", &back, "D\u{1b}[K"]);
                }
                out.extend(["\n", &self.word]);
                self.column = self.word_columns;
            } else {
                // The terminal continues in the next line by itself, so that copied text has no line break.
                self.is_long = true;
                self.column = self.column.saturating_sub(self.columns + 1);
            }
        }
        out.push(c);
        self.column += columns;
        self.word.push(c);
        self.word_columns += columns;
        if columns > 1 {
            self.end_word();
        }
    }

    /// Begins a new word.
    fn end_word(&mut self) {
        self.word.clear();
        if self.style.sequence() != "" {
            self.word = format!("{RESET}{}", self.style.sequence());
        }
        self.word_columns = 0;
        self.is_long = false;
    }
}
