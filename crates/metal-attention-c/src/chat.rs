//! Conversations, rendered as prompts by the chat template.

use std::ffi::c_char;
use std::sync::Arc;

use metal_attention::PICTURE_PLACE;
use metal_attention_chat::{
    ChatTemplate, Message, RenderRequest, TemplateError, Tool, take_pictures, without_picture_markers,
};
use metal_attention_grammar::RenderedConversation;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::model::{MA_NUL_TERMINATED, Model};
use crate::pointers::{Out, check_struct, fill, free, reference, text};
use crate::status::{Failure, Status, call};

/// A conversation, rendered by the model's chat template. Any number of threads may use it at once.
pub struct Chat {
    /// The prompt, and what its answer is read by.
    pub(crate) rendered: Arc<RenderedConversation>,
    /// The number of parts for pictures in the messages.
    pub(crate) n_pictures: usize,
}

/// The settings for rendering a conversation. ma_chat_options_default sets all members.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ChatOptions {
    /// The size of this struct in bytes.
    pub size: usize,
    /// The functions that the model may call: a JSON list of OpenAI's tools, with a NUL at its end. Null: none.
    pub tools: *const c_char,
    /// Variables of the template, such as {"enable_thinking": false}: a JSON object, with a NUL at its end. Null: none.
    pub variables: *const c_char,
    /// A template in Jinja that replaces the model's, with a NUL at its end. Null: the model's; for a model without one, lines that begin
    /// with "User:".
    pub chat_template: *const c_char,
    /// Not 0: the prompt ends with the beginning of an answer.
    pub add_generation_prompt: i32,
    /// Not 0: the answer continues the last message, which is the assistant's.
    pub continue_final_message: i32,
}

impl ChatOptions {
    /// The defaults.
    fn new() -> Self {
        Self {
            size: size_of::<Self>(),
            tools: std::ptr::null(),
            variables: std::ptr::null(),
            chat_template: std::ptr::null(),
            add_generation_prompt: 1,
            continue_final_message: 0,
        }
    }
}

/// Sets all members of `options`; `size` is sizeof(ma_chat_options).
///
/// # Safety
/// `options` is null or points to memory for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_chat_options_default(options: *mut ChatOptions, size: usize) -> Status {
    call(|| {
        // SAFETY: as the caller promises.
        let out = unsafe { Out::new(options, "options") }?;
        check_struct::<ChatOptions>(size, "chat_options")?;
        out.set(ChatOptions::new());
        Ok(())
    })
}

/// Renders a conversation by the model's chat template, and writes it to `chat`. Free it by ma_chat_free.
///
/// `messages` is a JSON list of OpenAI's messages, such as [{"role": "user", "content": "Hello!"}]; its `length` is in bytes, or
/// MA_NUL_TERMINATED. Null `options` stand for the defaults. Names of control tokens within messages remain text. If messages have
/// parts for pictures, ma_prompt_of_chat makes the prompt.
///
/// # Safety
/// Pointers are null or point to what is described here; `messages` to `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_chat_new(
    model: *const Model,
    messages: *const c_char,
    length: usize,
    options: *const ChatOptions,
    chat: *mut *mut Chat,
) -> Status {
    call(|| {
        // SAFETY: as the caller promises.
        let (out, model) = unsafe { (Out::new(chat, "chat")?, reference(model, "model")?) };
        // SAFETY: as the caller promises.
        let messages = unsafe { text(messages, length, "messages") }?;
        let defaults = ChatOptions::new();
        // SAFETY: as the caller promises.
        let options = unsafe { crate::pointers::options(options, "chat_options") }?.unwrap_or(&defaults);
        // SAFETY: as the caller promises.
        let rendered = unsafe { render(model, messages, options) }?;
        out.set(Box::into_raw(Box::new(rendered)));
        Ok(())
    })
}

/// Renders `messages`, a JSON list.
///
/// # Safety
/// The strings of `options` are null or end with a NUL.
unsafe fn render(model: &Model, messages: &str, options: &ChatOptions) -> Result<Chat, Failure> {
    let optional = |pointer: *const c_char, name| {
        if pointer.is_null() {
            return Ok(None);
        }
        // SAFETY: it ends with a NUL.
        unsafe { text(pointer, MA_NUL_TERMINATED, name) }.map(Some)
    };
    let mut messages: Vec<Message> = json(messages, "messages")?;
    let n_pictures = take_pictures(&mut messages).len();
    let tools: Vec<Tool> = json(optional(options.tools, "tools")?.unwrap_or("[]"), "tools")?;
    let variables: Map<String, Value> = json(optional(options.variables, "variables")?.unwrap_or("{}"), "variables")?;
    let tokenizer = model.inner.tokenizer()?;
    let template = match optional(options.chat_template, "chat_template")? {
        Some(source) => ChatTemplate::with_tokenizer(source, Some(Arc::clone(&tokenizer)))?,
        None => model.template()?.clone(),
    };
    let request = RenderRequest {
        messages: &messages,
        tools: &tools,
        add_generation_prompt: options.add_generation_prompt != 0,
        variables: Some(&variables),
        ..Default::default()
    };
    let continued = options.continue_final_message != 0;
    let conversation = RenderedConversation::render(template, &tokenizer, &request, continued)
        .map_err(|error| Failure::argument(error.to_string()))?;
    Ok(Chat { rendered: Arc::new(conversation), n_pictures })
}

/// Parses JSON; errors call it `name`.
pub fn json<T: DeserializeOwned>(json: &str, name: &str) -> Result<T, Failure> {
    serde_json::from_str(json).map_err(|error| Failure::argument(format!("{name}: {error}")))
}

impl From<TemplateError> for Failure {
    fn from(error: TemplateError) -> Self {
        Self::argument(error.to_string())
    }
}

/// Frees a conversation. Grammars and answers that were made of it can still be used. Null is allowed.
///
/// # Safety
/// `chat` is null or comes from ma_chat_new, and is not used after this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_chat_free(chat: *mut Chat) {
    // SAFETY: as the caller promises.
    unsafe { free(chat) }
}

/// Writes the text of the prompt to `text`, without a NUL at its end, and its length in bytes to `length`. `<image>` stands for a
/// picture.
///
/// If the text is longer than `capacity` (a null `text` has room for nothing), the result is MA_STATUS_BUFFER_TOO_SMALL and only
/// `length` is written. Generate from the tokens of ma_chat_tokens, not from this text: in them the names of control tokens within
/// messages are text.
///
/// # Safety
/// Pointers are null or point to what is described here; `text` to memory for `capacity` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_chat_prompt(
    chat: *const Chat,
    text: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> Status {
    call(|| {
        // SAFETY: as the caller promises.
        let (length, chat) = unsafe { (Out::new(length, "length")?, reference(chat, "chat")?) };
        let shown = without_picture_markers(chat.rendered.text(), PICTURE_PLACE);
        // SAFETY: as the caller promises.
        unsafe { fill(shown.as_bytes(), text.cast(), capacity, &length) }
    })
}

/// Writes the tokens of the prompt to `ids`, and their number to `n_ids`.
///
/// If there are more tokens than `capacity` (a null `ids` has room for none), the result is MA_STATUS_BUFFER_TOO_SMALL and only
/// `n_ids` is written. A conversation with pictures has no prompt of tokens only: MA_STATUS_INVALID_ARGUMENT.
///
/// # Safety
/// Pointers are null or point to what is described here; `ids` to memory for `capacity` ids.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_chat_tokens(
    chat: *const Chat,
    ids: *mut u32,
    capacity: usize,
    n_ids: *mut usize,
) -> Status {
    call(|| {
        // SAFETY: as the caller promises.
        let (n_ids, chat) = unsafe { (Out::new(n_ids, "n_ids")?, reference(chat, "chat")?) };
        if chat.n_pictures > 0 {
            return Err(Failure::argument("the messages have pictures: make the prompt with ma_prompt_of_chat"));
        }
        // SAFETY: as the caller promises.
        unsafe { fill(&chat.rendered.ids(), ids, capacity, &n_ids) }
    })
}
