//! The parser of GBNF and EBNF text.

use std::collections::HashMap;

use metal_attention::tokenizer::{EncodeOptions, Tokenizer};
use regex_syntax::hir::{ClassUnicode, ClassUnicodeRange};

use super::GbnfError;

/// The maximum size of a grammar in bytes.
const MAX_BYTES: usize = 256 << 10;
/// The maximum number of rules.
const MAX_RULES: usize = 4096;
/// The maximum number of parts in all rules together.
const MAX_PARTS: usize = 100_000;
/// The maximum nesting of groups.
const MAX_DEPTH: usize = 100;
/// The maximum count of a repetition.
const MAX_REPETITIONS: u32 = 10_000;

/// An expression: a rule's body or a part of it.
#[derive(Debug, Clone, PartialEq)]
pub enum Expr {
    /// One character of a class.
    Chars(ClassUnicode),
    /// A literal text.
    Text(String),
    /// The rule with this number.
    Rule(usize),
    /// One of these tokens of the vocabulary; if `negated`, any other token.
    Token { ids: Vec<u32>, negated: bool },
    /// The parts in order.
    Sequence(Vec<Expr>),
    /// One of the parts.
    Choice(Vec<Expr>),
    /// `min` to `max` repetitions of `item`; without `max`: any number from `min`.
    Repeat { item: Box<Expr>, min: u32, max: Option<u32> },
}

impl Expr {
    /// The expression that matches only the empty text.
    pub fn empty() -> Self {
        Self::Sequence(Vec::new())
    }

    /// The parts in order. A single part is that part.
    pub fn sequence(mut parts: Vec<Self>) -> Self {
        if parts.len() == 1 { parts.remove(0) } else { Self::Sequence(parts) }
    }

    /// One of the parts. A single part is that part.
    pub fn choice(mut parts: Vec<Self>) -> Self {
        if parts.len() == 1 { parts.remove(0) } else { Self::Choice(parts) }
    }
}

/// A rule of a grammar.
#[derive(Debug)]
pub struct GbnfRule {
    /// The name of the rule.
    pub name: String,
    /// The line of its definition, from 1.
    pub line: usize,
    /// The expression that it is defined as.
    pub body: Expr,
}

/// Parses the rules of `text`, with tokens of `tokenizer`. Returns the number of the rule `root` and all rules.
pub fn read(text: &str, tokenizer: &Tokenizer) -> Result<(usize, Vec<GbnfRule>), GbnfError> {
    if text.len() > MAX_BYTES {
        let (bytes, most) = (text.len(), MAX_BYTES >> 10);
        return Err(GbnfError::TooLarge(format!("it has {bytes} bytes; at most {most} KiB are allowed")));
    }
    let mut reader =
        GbnfReader { text, at: 0, counted: (0, 1), tokenizer, numbers: HashMap::new(), rules: Vec::new(), n_parts: 0 };
    reader.skip(true);
    while reader.peek().is_some() {
        reader.rule()?;
        reader.skip(true);
    }
    let Some(&root) = reader.numbers.get("root").filter(|&&number| reader.rules[number].body.is_some()) else {
        return Err(GbnfError::NoRoot);
    };
    let rules = reader.rules.into_iter().map(|rule| match rule.body {
        Some(body) => Ok(GbnfRule { name: rule.name, line: rule.line, body }),
        None => Err(GbnfError::at(rule.line, format!("the rule {:?} is not defined", rule.name))),
    });
    Ok((root, rules.collect::<Result<_, _>>()?))
}

/// A rule that has been referred to, and perhaps defined.
struct DeclaredRule {
    name: String,
    /// The line that defines it; before that, the first line that refers to it.
    line: usize,
    body: Option<Expr>,
}

struct GbnfReader<'a> {
    text: &'a str,
    /// The byte offset of the next character.
    at: usize,
    /// A byte offset and its line, from which lines are counted on.
    counted: (usize, usize),
    tokenizer: &'a Tokenizer,
    numbers: HashMap<String, usize>,
    rules: Vec<DeclaredRule>,
    n_parts: usize,
}

impl<'a> GbnfReader<'a> {
    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    /// Consumes `expected` if it comes next. Returns whether it did.
    fn take(&mut self, expected: &str) -> bool {
        let comes = self.rest().starts_with(expected);
        if comes {
            self.at += expected.len();
        }
        comes
    }

    /// The line of the next character.
    fn line(&mut self) -> usize {
        let (from, line) = if self.counted.0 <= self.at { self.counted } else { (0, 1) };
        let line = line + self.text[from..self.at].bytes().filter(|&byte| byte == b'\n').count();
        self.counted = (self.at, line);
        line
    }

    fn error<T>(&mut self, problem: impl Into<String>) -> Result<T, GbnfError> {
        Err(GbnfError::at(self.line(), problem))
    }

    /// A description of what comes next, for error messages.
    fn next_words(&self) -> String {
        match self.peek() {
            None => "the grammar ends".into(),
            Some('\n' | '\r') => "the line ends".into(),
            Some(_) => {
                let line = self.rest().lines().next().unwrap_or_default();
                format!("{:?} comes", line.chars().take(20).collect::<String>())
            }
        }
    }

    fn expected<T>(&mut self, what: &str) -> Result<T, GbnfError> {
        let next = self.next_words();
        self.error(format!("{what} is expected where {next}"))
    }

    /// Skips blanks, tabs and comments, and with `lines` also line ends.
    fn skip_blanks(&mut self, lines: bool) {
        while let Some(c) = self.peek() {
            match c {
                ' ' | '\t' => self.at += 1,
                '\r' | '\n' if lines => self.at += 1,
                '#' => self.at += self.rest().find(['\r', '\n']).unwrap_or(self.rest().len()),
                _ => return,
            }
        }
    }

    /// Skips blanks and comments. Outside of groups a line end ends the rule if another rule, or nothing, follows; it
    /// is not skipped then.
    fn skip(&mut self, in_group: bool) {
        self.skip_blanks(in_group);
        if !in_group && matches!(self.peek(), Some('\r' | '\n')) {
            let end = self.at;
            self.skip_blanks(true);
            if self.peek().is_none() || self.begins_rule() {
                self.at = end;
            }
        }
    }

    /// Whether a rule definition comes next.
    fn begins_rule(&self) -> bool {
        let name = self.rest().trim_start_matches(is_name);
        name.len() < self.rest().len() && name.trim_start_matches([' ', '\t']).starts_with("::=")
    }

    fn name(&mut self) -> Result<&'a str, GbnfError> {
        let rest = self.rest();
        let name = &rest[..rest.find(|c| !is_name(c)).unwrap_or(rest.len())];
        if name.is_empty() {
            return self.expected("the name of a rule");
        }
        self.at += name.len();
        Ok(name)
    }

    /// The number of the rule `name`, which is new if it was not mentioned before.
    fn number(&mut self, name: &str) -> Result<usize, GbnfError> {
        if let Some(&number) = self.numbers.get(name) {
            return Ok(number);
        }
        let number = self.rules.len();
        if number == MAX_RULES {
            return self.error(format!("it has more than {MAX_RULES} rules"));
        }
        let line = self.line();
        self.rules.push(DeclaredRule { name: name.to_owned(), line, body: None });
        self.numbers.insert(name.to_owned(), number);
        Ok(number)
    }

    fn rule(&mut self) -> Result<(), GbnfError> {
        let name = self.name()?;
        let number = self.number(name)?;
        let line = self.line();
        self.skip_blanks(false);
        if !self.take("::=") {
            return self.expected(&format!("::= after the name {name:?}"));
        }
        self.skip_blanks(true);
        let body = self.choice(0)?;
        match self.peek() {
            None | Some('\r' | '\n') => {}
            Some(')') => return self.error("a ) has no ("),
            Some(_) => return self.expected("a part of a rule, or the end of the line,"),
        }
        let rule = &mut self.rules[number];
        if rule.body.is_some() {
            let first = rule.line;
            return Err(GbnfError::at(line, format!("the rule {name:?} is defined on line {first} already")));
        }
        (rule.line, rule.body) = (line, Some(body));
        Ok(())
    }

    fn choice(&mut self, depth: usize) -> Result<Expr, GbnfError> {
        let mut alternatives = vec![self.sequence(depth)?];
        while self.take("|") {
            self.skip_blanks(true);
            alternatives.push(self.sequence(depth)?);
        }
        Ok(Expr::choice(alternatives))
    }

    fn sequence(&mut self, depth: usize) -> Result<Expr, GbnfError> {
        let mut parts = Vec::new();
        while let Some(part) = self.part(depth)? {
            self.n_parts += 1;
            if self.n_parts > MAX_PARTS {
                return self.error(format!("its rules have more than {MAX_PARTS} parts"));
            }
            self.skip(depth > 0);
            let part = self.repeated(part, depth > 0)?;
            parts.push(part);
        }
        Ok(Expr::sequence(parts))
    }

    fn part(&mut self, depth: usize) -> Result<Option<Expr>, GbnfError> {
        let Some(c) = self.peek() else { return Ok(None) };
        Ok(Some(match c {
            '"' => Expr::Text(self.text_literal()?),
            '[' => Expr::Chars(self.class()?),
            '.' => {
                self.at += 1;
                Expr::Chars(ClassUnicode::new([ClassUnicodeRange::new('\0', char::MAX)]))
            }
            '<' | '!' => self.token()?,
            '(' => {
                if self.rest().starts_with("(=") {
                    return self.error("look-aheads, (=...), cannot be followed");
                }
                if depth == MAX_DEPTH {
                    return self.error(format!("more than {MAX_DEPTH} groups are inside each other"));
                }
                let opened = self.line();
                self.at += 1;
                self.skip_blanks(true);
                let inner = self.choice(depth + 1)?;
                if !self.take(")") {
                    return self.expected(&format!("a ) for the ( of line {opened}"));
                }
                inner
            }
            '*' | '+' | '?' | '{' => return self.error(format!("{c} has nothing before it that it could repeat")),
            c if is_name(c) => {
                let name = self.name()?;
                Expr::Rule(self.number(name)?)
            }
            _ => return Ok(None),
        }))
    }

    /// `part` with the repetition signs after it.
    fn repeated(&mut self, mut part: Expr, in_group: bool) -> Result<Expr, GbnfError> {
        // Each sign adds a level of nesting, over which other functions recurse.
        for _ in 0..MAX_DEPTH {
            let (min, max) = if self.take("*") {
                (0, None)
            } else if self.take("+") {
                (1, None)
            } else if self.take("?") {
                (0, Some(1))
            } else if self.take("{") {
                self.bounds()?
            } else {
                return Ok(part);
            };
            self.skip(in_group);
            part = Expr::Repeat { item: Box::new(part), min, max };
        }
        self.error(format!("a part is repeated by more than {MAX_DEPTH} signs"))
    }

    /// The bounds of a repetition, after the opening brace.
    fn bounds(&mut self) -> Result<(u32, Option<u32>), GbnfError> {
        self.skip_blanks(false);
        let min = if self.rest().starts_with(',') { 0 } else { self.times()? };
        self.skip_blanks(false);
        let max = if self.take(",") {
            self.skip_blanks(false);
            if self.rest().starts_with('}') { None } else { Some(self.times()?) }
        } else {
            Some(min)
        };
        self.skip_blanks(false);
        if !self.take("}") {
            return self.expected("a } after the bounds of a repetition");
        }
        match max {
            Some(max) if max < min => self.error(format!("a repetition of {min} to {max} times is none")),
            max => Ok((min, max)),
        }
    }

    fn times(&mut self) -> Result<u32, GbnfError> {
        let rest = self.rest();
        let digits = &rest[..rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len())];
        if digits.is_empty() {
            return self.expected("a number of repetitions");
        }
        self.at += digits.len();
        match digits.parse() {
            Ok(times) if times <= MAX_REPETITIONS => Ok(times),
            _ => self.error(format!("{digits} repetitions are too many; at most {MAX_REPETITIONS} are allowed")),
        }
    }

    fn text_literal(&mut self) -> Result<String, GbnfError> {
        let opened = self.line();
        self.at += 1;
        let mut text = String::new();
        while !self.take("\"") {
            match self.character()? {
                Some(c) => text.push(c),
                None => return Err(GbnfError::at(opened, "a text in quotes does not end")),
            }
        }
        Ok(text)
    }

    fn class(&mut self) -> Result<ClassUnicode, GbnfError> {
        let opened = self.line();
        let unended = || GbnfError::at(opened, "a class of characters, [...], does not end");
        self.at += 1;
        let negated = self.take("^");
        let mut ranges = Vec::new();
        while !self.take("]") {
            let first = self.character()?.ok_or_else(unended)?;
            let is_range = self.rest().starts_with('-') && !self.rest().starts_with("-]");
            let last = if is_range {
                self.at += 1;
                self.character()?.ok_or_else(unended)?
            } else {
                first
            };
            if last < first {
                return self.error(format!("the range from {first:?} to {last:?} runs backwards"));
            }
            ranges.push(ClassUnicodeRange::new(first, last));
        }
        let mut class = ClassUnicode::new(ranges);
        if negated {
            class.negate();
        }
        if class.ranges().is_empty() {
            return self.error("a class of characters has none");
        }
        Ok(class)
    }

    /// The next character of a literal or a class, escapes resolved; `None` at the end of the grammar.
    fn character(&mut self) -> Result<Option<char>, GbnfError> {
        let Some(c) = self.peek() else { return Ok(None) };
        self.at += c.len_utf8();
        if c != '\\' {
            return Ok(Some(c));
        }
        let Some(escaped) = self.peek() else { return Ok(None) };
        self.at += escaped.len_utf8();
        Ok(Some(match escaped {
            'n' => '\n',
            'r' => '\r',
            't' => '\t',
            'x' => self.by_number(2)?,
            'u' => self.by_number(4)?,
            'U' => self.by_number(8)?,
            c if c.is_ascii_punctuation() => c,
            c => return self.error(format!("\\{c} stands for no character")),
        }))
    }

    /// The character with the number that the next `n_digits` hexadecimal digits give.
    fn by_number(&mut self, n_digits: usize) -> Result<char, GbnfError> {
        let digits = self.rest().get(..n_digits).filter(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()));
        let Some(digits) = digits else {
            return self.error(format!("an escape has fewer than {n_digits} hexadecimal digits"));
        };
        self.at += n_digits;
        match u32::from_str_radix(digits, 16).ok().and_then(char::from_u32) {
            Some(c) => Ok(c),
            None => self.error(format!("{digits} is the number of no character")),
        }
    }

    /// A token: `<[1000]>` or `<think>`, or either of them negated by `!`.
    fn token(&mut self) -> Result<Expr, GbnfError> {
        let negated = self.take("!");
        let Some(end) = self.rest().find('>').filter(|_| self.rest().starts_with('<')) else {
            return self.expected("a token, as in <[1000]> or <think>,");
        };
        let written = &self.rest()[..=end];
        let n_vocab = self.tokenizer.n_vocab();
        let by_number = written.strip_prefix("<[").and_then(|rest| rest.strip_suffix("]>"));
        let id = if let Some(number) = by_number {
            number.parse().ok().filter(|&id| (id as usize) < n_vocab)
        } else {
            let options = EncodeOptions { add_special: false, parse_special: true };
            match self.tokenizer.encode(written, options).as_slice() {
                &[id] if written.len() > 2 => Some(id),
                _ => None,
            }
        };
        let Some(id) = id else {
            return self.error(format!("{written} is no token of the vocabulary, which has {n_vocab}"));
        };
        self.at += written.len();
        // A negated token does not match the tokens that end a generation.
        let ends = self.tokenizer.end_of_generation().iter().filter(|_| negated);
        Ok(Expr::Token { ids: [id].iter().chain(ends).copied().collect(), negated })
    }
}

/// Whether a character may be in the name of a rule.
fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '-' | '_')
}
