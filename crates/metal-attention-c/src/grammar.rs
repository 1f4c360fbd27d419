//! Grammars: forms that constrain the generated text.

use std::ffi::c_char;
use std::sync::Arc;

use metal_attention::Constraint;
use metal_attention_grammar::{ConversationError, RenderedConversation, ResponseFormat};

use crate::chat::{Chat, json};
use crate::model::{MA_NUL_TERMINATED, Model};
use crate::pointers::{Out, fill, free, reference, text};
use crate::status::{Failure, Status, call};

/// A grammar that constrains generated text: the member `grammar` of ma_generate_options. Any number of generations may use it at
/// once; each begins at its start.
pub struct Grammar {
    /// The compiled grammar, at its start.
    rules: metal_attention_grammar::Grammar,
    /// The size of the vocabulary that it is compiled for.
    pub(crate) n_vocab: usize,
    /// The conversation that is answered. `None`: the text is no answer.
    conversation: Option<Arc<RenderedConversation>>,
    /// Whether the text has a form and is no tool call.
    pub(crate) is_form: bool,
    /// Parts of a JSON schema that are not enforced.
    left_out: Vec<String>,
}

impl Grammar {
    /// The constraint for one generation. In an answer it begins after the reasoning.
    pub(crate) fn constraint(&self) -> Option<Box<dyn Constraint>> {
        let rules = self.rules.clone();
        match &self.conversation {
            Some(conversation) => conversation.constraint(rules, self.is_form),
            None => Some(Box::new(rules)),
        }
    }
}

/// The source of a grammar.
enum GrammarSource {
    /// A form of the text.
    Form(ResponseFormat),
    /// Tool calls.
    Calls {
        /// Whether there may be several.
        parallel: bool,
    },
}

/// The values of `kind`, for errors.
const KINDS: &str =
    "\"json_schema\", \"json_object\", \"grammar\", \"regex\", \"choice\", \"tool_call\" and \"tool_calls\"";

/// Compiles a grammar of `form`, and writes it to `grammar`. Free it by ma_grammar_free.
///
/// `kind`, with a NUL at its end, is the kind of `form`, whose `length` is in bytes, or MA_NUL_TERMINATED:
/// "json_schema", a JSON schema; "json_object", any JSON object; "grammar", llama.cpp's GBNF or llguidance's Lark; "regex", a regular
/// expression that matches the whole text; "choice", a JSON list of strings of which the text is one; "tool_call" and "tool_calls", one
/// call, or one or more, of the tools of `chat`. `form` may be null for the kinds that need none.
///
/// `chat` is null, or the conversation that the text answers: then the model's reasoning, which comes first, is not constrained.
///
/// # Safety
/// Pointers are null or point to what is described here; `form` to `length` bytes.
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
        let source = match kind {
            "json_schema" => {
                GrammarSource::Form(ResponseFormat::JsonSchema { schema: json(form, "form")?, strict: None })
            }
            "json_object" => GrammarSource::Form(ResponseFormat::JsonObject),
            "grammar" => GrammarSource::Form(ResponseFormat::grammar(form.to_owned())),
            "regex" => GrammarSource::Form(ResponseFormat::Regex(form.to_owned())),
            "choice" => GrammarSource::Form(ResponseFormat::Choice(json(form, "form")?)),
            "tool_call" => GrammarSource::Calls { parallel: false },
            "tool_calls" => GrammarSource::Calls { parallel: true },
            other => return Err(Failure::argument(format!("kind is {other:?}, but it must be one of {KINDS}"))),
        };
        let is_form = matches!(source, GrammarSource::Form(_));
        let mut left_out = Vec::new();
        let grammars = model.grammars()?;
        let place = if is_form { "form".to_owned() } else { format!("kind {kind:?}") };
        let refused = |error: ConversationError| Failure::argument(format!("{place} {error}"));
        let rules = match (source, chat) {
            (GrammarSource::Form(form), None) => {
                grammars.raw(&form, &mut left_out).map_err(|error| refused(error.into()))?
            }
            (GrammarSource::Form(form), Some(chat)) => {
                chat.rendered.response_format(grammars, &form, &mut left_out).map_err(refused)?
            }
            (GrammarSource::Calls { parallel }, Some(chat)) => {
                chat.rendered.calls(grammars, parallel, &mut left_out).map_err(refused)?
            }
            (GrammarSource::Calls { .. }, None) => return Err(refused(ConversationError::NoTools)),
        };
        let n_vocab = model.inner.spec().n_vocab;
        let conversation = chat.map(|chat| Arc::clone(&chat.rendered));
        out.set(Box::into_raw(Box::new(Grammar { rules, n_vocab, conversation, is_form, left_out })));
        Ok(())
    })
}

/// Writes the parts of a JSON schema that the grammar does not enforce to `places`, without a NUL at its end, and its length in bytes to
/// `length`: a JSON list of strings, which is mostly empty.
///
/// If the list is longer than `capacity` (a null `places` has room for nothing), the result is MA_STATUS_BUFFER_TOO_SMALL and only
/// `length` is written.
///
/// # Safety
/// Pointers are null or point to what is described here; `places` to memory for `capacity` bytes.
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

/// Frees a grammar. Generations that use it continue. Null is allowed.
///
/// # Safety
/// `grammar` is null or comes from ma_grammar_new, and is not used after this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_grammar_free(grammar: *mut Grammar) {
    // SAFETY: as the caller promises.
    unsafe { free(grammar) }
}
