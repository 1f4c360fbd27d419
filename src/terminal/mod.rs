//! Formats an answer for a terminal: words are wrapped at the edge, Markdown gets styles, control characters are escaped.

mod markdown;
mod wrap;

use crate::metadata_text::safe_lines;
use markdown::Markdown;
use wrap::Wrap;

/// SGR sequences (ECMA-48, 8.3.117).
const RESET: &str = "\u{1b}[0m";
const BOLD: &str = "\u{1b}[1m";
const FAINT: &str = "\u{1b}[2m";
const CYAN: &str = "\u{1b}[36m";
const GREY: &str = "\u{1b}[90m";

/// The width of the terminal if it is not known.
const DEFAULT_COLUMNS: usize = 80;

/// The style of a piece of text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum TextStyle {
    /// The terminal's default style.
    #[default]
    Plain,
    /// Headings and strong emphasis.
    Bold,
    /// Code within a line.
    Code,
    /// The lines that begin and end a block of code.
    Fence,
    /// Text in a block of code, which is not wrapped.
    Block,
    /// A thought of the model.
    Thought,
}

impl TextStyle {
    /// The sequence that turns the style on after [`RESET`].
    fn sequence(self) -> &'static str {
        match self {
            Self::Plain | Self::Block => "",
            Self::Bold => BOLD,
            Self::Code => CYAN,
            Self::Fence => FAINT,
            Self::Thought => GREY,
        }
    }

    /// Whether lines are broken between words at the edge of the terminal.
    fn wraps(self) -> bool {
        match self {
            Self::Plain | Self::Bold | Self::Code | Self::Thought => true,
            Self::Fence | Self::Block => false,
        }
    }
}

/// Formats an answer that arrives in pieces. Each function returns the bytes to write to the terminal.
pub struct Screen {
    /// Breaks lines.
    wrap: Wrap,
    /// Finds Markdown.
    markdown: Markdown,
    /// Whether styles are drawn.
    colours: bool,
}

impl Screen {
    /// For the terminal that stdout is, with the cursor at the beginning of a line.
    pub fn stdout() -> Self {
        let columns = terminal_size::terminal_size().map_or(DEFAULT_COLUMNS, |(width, _)| width.0.into());
        Self::new(columns, !no_colour())
    }

    fn new(columns: usize, colours: bool) -> Self {
        Self { wrap: Wrap::new(columns), markdown: Markdown::default(), colours }
    }

    /// Adds text of the answer. It is held back while it may be the beginning of a mark of Markdown.
    pub fn text(&mut self, text: &str) -> String {
        let pieces = self.markdown.push(&safe_lines(text));
        self.draw(&pieces)
    }

    /// Adds text of the reasoning before the answer.
    pub fn thought(&mut self, text: &str) -> String {
        self.draw(&[(TextStyle::Thought, safe_lines(text))])
    }

    /// Ends the reasoning or the answer: returns the text that was held back, and resets the style.
    pub fn end(&mut self) -> String {
        let pieces = self.markdown.finish();
        self.draw(&pieces) + &self.wrap.style(if self.colours { Some(TextStyle::Plain) } else { None })
    }

    /// Draws pieces of text.
    fn draw(&mut self, pieces: &[(TextStyle, String)]) -> String {
        let mut out = String::new();
        for (style, text) in pieces {
            out += &self.wrap.style(self.colours.then_some(*style));
            out += &self.wrap.push(text, style.wraps());
        }
        out
    }
}

/// `text` in faint letters, unless the user wants no colours.
pub fn faint(text: &str) -> String {
    if no_colour() { text.to_owned() } else { format!("{FAINT}{text}{RESET}") }
}

/// Whether the user wants no colours (<https://no-color.org>).
pub fn no_colour() -> bool {
    std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rows that a terminal of `columns` columns shows after `bytes`. It knows the sequences that are used here.
    fn shown(bytes: &str, columns: usize) -> String {
        let (mut rows, mut column) = (vec![Vec::new()], 0);
        let mut chars = bytes.chars().peekable();
        while let Some(c) = chars.next() {
            if column == columns && c != '\n' && c != '\u{1b}' {
                rows.push(Vec::new());
                column = 0;
            }
            match c {
                '\n' => {
                    rows.push(Vec::new());
                    column = 0;
                }
                '\u{1b}' => {
                    assert_eq!(chars.next(), Some('['));
                    let mut number = String::new();
                    let end = loop {
                        match chars.next().unwrap() {
                            c if c.is_ascii_digit() => number.push(c),
                            c => break c,
                        }
                    };
                    match end {
                        'D' => column -= number.parse::<usize>().unwrap(),
                        'K' => rows.last_mut().unwrap().truncate(column),
                        'm' => {}
                        other => panic!("unknown sequence {other}"),
                    }
                }
                c => {
                    let row = rows.last_mut().unwrap();
                    row.truncate(column);
                    row.push(c);
                    column += 1;
                }
            }
        }
        rows.iter().map(|row| row.iter().collect::<String>()).collect::<Vec<_>>().join("\n")
    }

    fn drawn(text: &str, columns: usize, chunk: usize) -> String {
        let mut screen = Screen::new(columns, true);
        let chars: Vec<char> = text.chars().collect();
        let mut out: String = chars.chunks(chunk).map(|chunk| screen.text(&chunk.iter().collect::<String>())).collect();
        out += &screen.end();
        out
    }

    #[test]
    fn words_are_wrapped_at_the_edge_and_nothing_is_lost() {
        let text =
            "The **quick brown** fox `jumps` over\nthe lazy dog.\n\nhttps://example.org/a/very/long/address goes on";
        for chunk in [1, 2, 3, 7, 1000] {
            let got = shown(&drawn(text, 21, chunk), 21);
            assert_eq!(
                got,
                "The **quick brown** \nfox `jumps` over\nthe lazy dog.\n\nhttps://example.org/a\n/very/long/address \ngoes on",
                "pieces of {chunk}"
            );
        }
    }

    #[test]
    fn blocks_of_code_keep_their_lines() {
        let text = "```rust\nlet a_long_line = of(code, that is_longer);\n```\nafter it come words";
        for chunk in [1, 5, 1000] {
            let got = shown(&drawn(text, 20, chunk), 20);
            let want = "```rust\nlet a_long_line = of\n(code, that is_longe\nr);\n```\nafter it come words";
            assert_eq!(got, want, "pieces of {chunk}");
        }
    }

    #[test]
    fn control_characters_are_escaped() {
        let out = drawn("a\u{1b}]0;title\u{7}b\u{1b}[2Jc\u{9b}5m\r\n", 80, 1000);
        assert_eq!(out, "a\\u{1b}]0;title\\u{7}b\\u{1b}[2Jc\\u{9b}5m\\r\n");
    }

    #[test]
    fn styles_end_with_the_text() {
        assert_eq!(drawn("a **b** c", 80, 1), format!("a {RESET}{BOLD}**b**{RESET} c"));
        assert_eq!(drawn("`a` b", 80, 1), format!("{RESET}{CYAN}`a`{RESET} b"));
        assert_eq!(drawn("# A\nb", 80, 1), format!("{RESET}{BOLD}# A{RESET}\nb"));
        assert_eq!(drawn("**a", 80, 1), format!("{RESET}{BOLD}**a{RESET}"));
        let mut screen = Screen::new(80, true);
        assert_eq!(screen.thought("hm") + &screen.end(), format!("{RESET}{GREY}hm{RESET}"));
        let mut plain = Screen::new(80, false);
        assert_eq!(plain.text("a **b** `c`") + &plain.end(), "a **b** `c`");
    }
}
