//! Formats of tool calls that were read off a chat template.

use std::sync::Mutex;

use super::call_derived::is_blank_mark;
use super::syntax::{PYTHON_TAG, Syntax};

/// Formats that are kept. They are never dropped: a process sees as many as it loads models.
const MAX_FORMATS: usize = 256;

/// Stands for a number within a mark.
pub(super) const NUMBER: char = '\u{1}';

/// How a model writes tool calls whose format was derived from its chat template.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct DerivedFormat {
    pub(super) marks: DerivedMarks,
    pub(super) syntax: Syntax,
}

/// The texts of a format, as the template writes them. White space beside and within them may differ in what a model
/// writes.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct DerivedMarks {
    /// Around all calls.
    pub section: (String, String),
    /// The calls are a JSON list.
    pub list: bool,
    /// Around a call.
    pub call: (String, String),
    /// Between calls.
    pub separator: String,
    pub id: CallId,
    /// Between the name, or what stands for it, and the arguments.
    pub between: String,
    pub arguments: DerivedArguments,
    /// The model may write code after `<|python_tag|>`.
    pub python: bool,
}

/// Where the id of a call stands.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum CallId {
    /// Nowhere.
    None,
    /// Before the name, with this between them.
    Before(String),
    /// After the name, with this between them.
    After(String),
    /// It has the name: `functions.name:0`.
    Named,
}

/// How arguments are written.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum DerivedArguments {
    /// A JSON object.
    Json,
    /// A JSON object that has the name as well: `{"name": ..., "arguments": ...}`. The key of the arguments.
    Object(String),
    /// Each in tags.
    Tags(DerivedTags),
}

/// The tags of a parameter.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct DerivedTags {
    pub before_key: String,
    /// Between a key and its value; with a flag, between a key and that.
    pub after_key: String,
    pub flag: Option<ValueKindFlag>,
    pub after_value: String,
    /// A text may stand in `<![CDATA[` and `]]>`.
    pub cdata: bool,
}

/// A word that tells the kind of a value.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct ValueKindFlag {
    /// Of a text.
    pub text: String,
    /// Of other values.
    pub other: String,
    /// Between the word and the value.
    pub after: String,
}

impl DerivedMarks {
    /// The format with these marks; `None`: there are too many.
    pub fn format(self) -> Option<&'static DerivedFormat> {
        static FORMATS: Mutex<Vec<&'static DerivedFormat>> = Mutex::new(Vec::new());
        let mut formats = FORMATS.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(format) = formats.iter().find(|format| format.marks == self) {
            return Some(format);
        }
        if formats.len() >= MAX_FORMATS {
            return None;
        }
        let syntax = self.syntax();
        let format: &'static DerivedFormat = Box::leak(Box::new(DerivedFormat { marks: self, syntax }));
        formats.push(format);
        Some(format)
    }

    /// `<function=name>{...}</function>`: Functionary 3.1, whose template may tell so in plain words alone.
    pub fn functionary() -> Self {
        Self {
            section: (String::new(), String::new()),
            list: false,
            call: ("<function=".into(), "</function>".into()),
            separator: String::new(),
            id: CallId::None,
            between: ">".into(),
            arguments: DerivedArguments::Json,
            python: true,
        }
    }

    /// What stands before the arguments of the function `name`, from its name on.
    pub fn header(&self, name: &str) -> String {
        let between = &self.between;
        let id = "call00000";
        match &self.id {
            CallId::None => format!("{name}{between}"),
            CallId::Before(mark) => format!("{id}{mark}{name}{between}"),
            CallId::After(mark) => format!("{name}{mark}{id}{between}"),
            CallId::Named => format!("functions.{name}:0{between}"),
        }
    }

    /// Whether what begins a call is nothing that occurs in other text.
    pub fn call_is_announced(&self) -> bool {
        let start = self.call.0.trim();
        !start.is_empty() && !is_blank_mark(start)
    }

    /// Whether what begins calls occurs in no other text, so that a function that is not known is called there, too.
    pub fn is_announced(&self) -> bool {
        !self.section.0.trim().is_empty() || self.call.0.contains('|')
    }

    /// Whether a call begins with a brace that its name follows: `{"name": {...}}`.
    pub fn is_in_braces(&self) -> bool {
        self.call.0.trim_start().starts_with('{')
    }

    fn syntax(&self) -> Syntax {
        let start = Some(self.call.0.as_str()).filter(|_| self.call_is_announced());
        let python = self.python.then_some(PYTHON_TAG);
        let openings = texts([Some(self.section.0.as_str()), start, python]);
        let end = Some(self.call.1.as_str()).filter(|end| !is_blank_mark(end));
        let closings = texts([end, Some(self.section.1.as_str())]);
        let id = match &self.id {
            CallId::Before(mark) | CallId::After(mark) => Some(mark.as_str()),
            CallId::None | CallId::Named => None,
        };
        let inner = match &self.arguments {
            DerivedArguments::Json | DerivedArguments::Object(_) => texts([id, Some(&*self.between)]),
            DerivedArguments::Tags(DerivedTags { before_key, after_key, flag, after_value, cdata: _ }) => {
                let flag = flag.as_ref().map(|flag| &*flag.after);
                texts([id, Some(&*self.between), Some(&**before_key), Some(&**after_key), flag, Some(&**after_value)])
            }
        };
        Syntax { openings, closings, inner, bare: false }
    }
}

/// The texts that are there, without white space around them.
fn texts<'t>(texts: impl IntoIterator<Item = Option<&'t str>>) -> &'static [&'static str] {
    let texts = texts.into_iter().flatten().map(str::trim).filter(|text| !text.is_empty());
    let texts = texts.map(|text| &*Box::leak(Box::<str>::from(text)));
    Box::leak(texts.collect::<Box<[&'static str]>>())
}
