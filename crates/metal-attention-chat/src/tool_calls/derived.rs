//! Formats of tool calls that `probe.rs` derived from a chat template, as data.

use std::sync::Mutex;

use super::call_derived::is_blank_mark;
use super::syntax::{PYTHON_TAG, Syntax};

/// The maximum number of derived formats per process. They are never freed; a process has about one per loaded model.
const MAX_FORMATS: usize = 256;

/// A placeholder for a number within a mark.
pub(super) const NUMBER: char = '\u{1}';

/// A format of tool calls that was derived from a chat template.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct DerivedFormat {
    pub(super) marks: DerivedMarks,
    pub(super) syntax: Syntax,
}

/// The marks of a format, as the template writes them. A model may write different white space beside and within them.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct DerivedMarks {
    /// The marks around all calls.
    pub section: (String, String),
    /// Whether the calls are items of a JSON list.
    pub list: bool,
    /// The marks around each call.
    pub call: (String, String),
    /// The text between calls.
    pub separator: String,
    /// The position of the call's id.
    pub id: CallId,
    /// The mark between the name (and id) and the arguments.
    pub between: String,
    /// The notation of the arguments.
    pub arguments: DerivedArguments,
    /// Whether the model may write Python code after `<|python_tag|>`.
    pub python: bool,
}

/// The position of a call's id.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum CallId {
    /// There is no id.
    None,
    /// Before the name, with this mark between them.
    Before(String),
    /// After the name, with this mark between them.
    After(String),
    /// The id contains the name: `functions.name:0`.
    Named,
}

/// The notation of arguments.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum DerivedArguments {
    /// A JSON object.
    Json,
    /// The call is a JSON object with name and arguments: `{"name": ..., "arguments": ...}`. The string is the key of
    /// the arguments.
    Object(String),
    /// Each argument is in tags.
    Tags(DerivedTags),
}

/// The tags of an argument.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct DerivedTags {
    /// The mark before the key.
    pub before_key: String,
    /// The mark between the key and the value, or between the key and the flag.
    pub after_key: String,
    /// The flag that states the type of the value, if there is one.
    pub flag: Option<ValueKindFlag>,
    /// The mark after the value.
    pub after_value: String,
    /// Whether a string may be in `<![CDATA[` and `]]>`.
    pub cdata: bool,
}

/// A word before a value that states whether it is a string.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct ValueKindFlag {
    /// The word for a string.
    pub text: String,
    /// The word for other values.
    pub other: String,
    /// The mark between the word and the value.
    pub after: String,
}

impl DerivedMarks {
    /// The format with these marks, stored for the rest of the process; `None` if there are too many.
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

    /// `<function=name>{...}</function>`: the format of Functionary 3.1, whose template may describe it only in prose.
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

    /// The text of a call of the function `name` from the name up to the arguments.
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

    /// Whether the mark that begins a call identifies it: it does not occur in ordinary text or JSON.
    pub fn call_is_announced(&self) -> bool {
        let start = self.call.0.trim();
        !start.is_empty() && !is_blank_mark(start)
    }

    /// Whether the marks that begin calls are so specific that a call of an unknown function is recognised, too.
    pub fn is_announced(&self) -> bool {
        !self.section.0.trim().is_empty() || self.call.0.contains('|')
    }

    /// Whether a call is an object with the name as its key: `{"name": {...}}`.
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

/// The non-empty texts, without white space at their ends.
fn texts<'t>(texts: impl IntoIterator<Item = Option<&'t str>>) -> &'static [&'static str] {
    let texts = texts.into_iter().flatten().map(str::trim).filter(|text| !text.is_empty());
    let texts = texts.map(|text| &*Box::leak(Box::<str>::from(text)));
    Box::leak(texts.collect::<Box<[&'static str]>>())
}
