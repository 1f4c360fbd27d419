//! Structured outputs: the form that a text must have.

use std::ffi::c_char;
use std::sync::Arc;

use metal_attention::Constraint;
use metal_attention_grammar::{AnswerForm, ConversationError, RenderedConversation};

use crate::chat::{Chat, json};
use crate::model::{MA_NUL_TERMINATED, Model};
use crate::pointers::{Out, fill, free, reference, text};
use crate::status::{Failure, Status, call};

/// A grammar that texts follow, each from its beginning: the member `grammar` of ma_generate_options. Any number of texts may follow
/// one at once.
pub struct Grammar {
    rules: metal_attention_grammar::Grammar,
    /// Tokens of the vocabulary that it is for.
    pub(crate) n_vocab: usize,
    /// The conversation that texts answer.
    conversation: Option<Arc<RenderedConversation>>,
    /// The text has a form of its own, and is no tool call.
    pub(crate) is_form: bool,
    /// Places of a JSON schema that are not enforced.
    left_out: Vec<String>,
}

impl Grammar {
    /// Restricts one text, where it is an answer after its thoughts.
    pub(crate) fn constraint(&self) -> Option<Box<dyn Constraint>> {
        let rules = self.rules.clone();
        match &self.conversation {
            Some(conversation) => conversation.constraint(rules, self.is_form),
            None => Some(Box::new(rules)),
        }
    }
}

/// What a text must be.
enum Wanted {
    Form(AnswerForm),
    /// Tool calls, several where `parallel`.
    Calls {
        parallel: bool,
    },
}

/// What `kind` may be, in errors.
const KINDS: &str =
    "\"json_schema\", \"json_object\", \"grammar\", \"regex\", \"choice\", \"tool_call\" and \"tool_calls\"";

/// Makes a grammar of `form`, and writes it to `grammar`. It is freed by ma_grammar_free.
///
/// `kind`, with a NUL at the end, says what `form` is; its `length` is in bytes, or MA_NUL_TERMINATED:
/// "json_schema", a JSON schema; "json_object", any JSON object; "grammar", llama.cpp's GBNF or llguidance's Lark; "regex", a regular
/// expression that matches the whole text; "choice", a JSON list of strings of which the text is one; "tool_call" and "tool_calls", one
/// call, or one and more, of the tools of `chat`. `form` may be null where `kind` says all.
///
/// `chat` is null, or the conversation that the text answers: what the model thinks first then has no form.
///
/// # Safety
/// Pointers are null or lead to what is said here; `form` to `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_grammar_new(
    model: *const Model,
    kind: *const c_char,
    form: *const c_char,
    length: usize,
    chat: *const Chat,
    grammar: *mut *mut Grammar,
) -> Status {
    call(|| {
        // SAFETY: as the caller promises.
        let (out, model) = unsafe { (Out::new(grammar, "grammar")?, reference(model, "model")?) };
        // SAFETY: as the caller promises.
        let kind = unsafe { text(kind, MA_NUL_TERMINATED, "kind") }?;
        let form = if form.is_null() {
            ""
        } else {
            // SAFETY: as the caller promises.
            unsafe { text(form, length, "form") }?
        };
        // SAFETY: as the caller promises.
        let chat = unsafe { chat.as_ref() };
        let wanted = match kind {
            "json_schema" => Wanted::Form(AnswerForm::JsonSchema { schema: json(form, "form")?, strict: None }),
            "json_object" => Wanted::Form(AnswerForm::JsonObject),
            "grammar" => Wanted::Form(AnswerForm::grammar(form.to_owned())),
            "regex" => Wanted::Form(AnswerForm::Regex(form.to_owned())),
            "choice" => Wanted::Form(AnswerForm::Choice(json(form, "form")?)),
            "tool_call" => Wanted::Calls { parallel: false },
            "tool_calls" => Wanted::Calls { parallel: true },
            other => return Err(Failure::argument(format!("kind is {other:?}, but it must be one of {KINDS}"))),
        };
        let is_form = matches!(wanted, Wanted::Form(_));
        let mut left_out = Vec::new();
        let grammars = model.grammars()?;
        let place = if is_form { "form".to_owned() } else { format!("kind {kind:?}") };
        let refused = |error: ConversationError| Failure::argument(format!("{place} {error}"));
        let rules = match (wanted, chat) {
            (Wanted::Form(form), None) => grammars.raw(&form, &mut left_out).map_err(|error| refused(error.into()))?,
            (Wanted::Form(form), Some(chat)) => chat.0.form(grammars, &form, &mut left_out).map_err(refused)?,
            (Wanted::Calls { parallel }, Some(chat)) => {
                chat.0.calls(grammars, parallel, &mut left_out).map_err(refused)?
            }
            (Wanted::Calls { .. }, None) => return Err(refused(ConversationError::NoTools)),
        };
        let n_vocab = model.inner.spec().n_vocab;
        let conversation = chat.map(|chat| Arc::clone(&chat.0));
        out.set(Box::into_raw(Box::new(Grammar { rules, n_vocab, conversation, is_form, left_out })));
        Ok(())
    })
}

/// Writes the places of a JSON schema that the grammar does not enforce to `places`, without a NUL behind it, and its bytes to
/// `length`: a JSON list of strings, mostly empty.
///
/// Where `places` has room for too little (`capacity`; null has room for nothing) the result is MA_STATUS_BUFFER_TOO_SMALL, and
/// `length` what is needed.
///
/// # Safety
/// Pointers are null or lead to what is said here; `places` to room for `capacity` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_grammar_left_out(
    grammar: *const Grammar,
    places: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> Status {
    call(|| {
        // SAFETY: as the caller promises.
        let (length, grammar) = unsafe { (Out::new(length, "length")?, reference(grammar, "grammar")?) };
        let list = serde_json::to_vec(&grammar.left_out).map_err(|e| Failure::new(Status::Failed, e.to_string()))?;
        // SAFETY: as the caller promises.
        unsafe { fill(&list, places.cast(), capacity, &length) }
    })
}

/// Frees a grammar. Texts that follow it go on. Null is nothing to free.
///
/// # Safety
/// `grammar` is null or comes from ma_grammar_new, and is not used after this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_grammar_free(grammar: *mut Grammar) {
    // SAFETY: as the caller promises.
    unsafe { free(grammar) }
}
