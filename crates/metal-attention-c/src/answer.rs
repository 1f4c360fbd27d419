//! Answers to conversations, split into reasoning, text and tool calls while they are generated.

use std::ffi::c_char;
use std::sync::{Arc, Mutex, MutexGuard};

use metal_attention_chat::{AnswerEvent, Message, ToolCallParser};
use metal_attention_grammar::RenderedConversation;

use crate::chat::Chat;
use crate::pointers::{Out, fill, free, reference};
use crate::status::{Failure, Status, call};

/// The answer to a conversation, which the library splits into reasoning, text and tool calls while it is generated. Set it as the
/// member `answer` of ma_generate_options. An answer is for one generation.
pub struct Answer(pub(crate) Arc<Mutex<AnswerReader>>);

/// The reader of an answer.
pub struct AnswerReader {
    /// The conversation that is answered.
    conversation: Arc<RenderedConversation>,
    /// Splits the text. `None`: the answer does not belong to a generation yet.
    parser: Option<ToolCallParser>,
    /// Whether some of the text has been read.
    begun: bool,
    /// The parts so far.
    events: Vec<AnswerEvent>,
}

impl Answer {
    /// Locks the reader. An error after a panic.
    pub(crate) fn lock(&self) -> Result<MutexGuard<'_, AnswerReader>, Failure> {
        self.0.lock().map_err(|_| Failure::new(Status::Defect, "an earlier call met a defect: free the answer"))
    }

    /// Assigns the answer to a generation, and returns the strings that end its text. `has_form` tells whether a grammar gives the text
    /// a form that is no tool call. An error if it is assigned already.
    pub(crate) fn assign(&self, has_form: bool) -> Result<&'static [&'static str], Failure> {
        let mut reader = self.lock()?;
        if reader.parser.is_some() {
            return Err(Failure::argument("answer has been given a text already: make one for each text"));
        }
        reader.parser = Some(reader.conversation.parser(has_form));
        Ok(reader.conversation.stop_strings())
    }
}

impl AnswerReader {
    /// Reads the text of a token, or text without one.
    pub fn add(&mut self, id: Option<u32>, text: &str) {
        let Some(parser) = &mut self.parser else { return };
        self.begun = true;
        self.events.extend(match id {
            Some(id) => parser.push_token(self.conversation.tokenizer(), id, text),
            None => parser.push(text),
        });
    }

    /// Ends the text. `is_cut` tells whether it is incomplete.
    pub fn finish(&mut self, is_cut: bool) {
        let Some(parser) = &mut self.parser else { return };
        self.begun = true;
        self.events.extend(if is_cut { parser.cut_off() } else { parser.finish() });
    }

    /// Handles an error of the call. If none of the text has been read, the answer may be assigned to another generation.
    pub fn fail(&mut self) {
        if self.begun {
            self.finish(true);
        } else {
            self.parser = None;
        }
    }
}

/// Makes an empty answer to `chat`, which a call that generates fills, and writes it to `answer`. Free it by ma_answer_free.
///
/// # Safety
/// Pointers are null or point to what is described here.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_answer_new(chat: *const Chat, answer: *mut *mut Answer) -> Status {
    call(|| {
        // SAFETY: as the caller promises.
        let (out, chat) = unsafe { (Out::new(answer, "answer")?, reference(chat, "chat")?) };
        let reader =
            AnswerReader { conversation: Arc::clone(&chat.rendered), parser: None, begun: false, events: Vec::new() };
        out.set(Box::into_raw(Box::new(Answer(Arc::new(Mutex::new(reader))))));
        Ok(())
    })
}

/// Writes the answer, as far as it has been generated, to `message`, without a NUL at its end, and its length in bytes to `length`. It is
/// OpenAI's message in JSON, with `content`, `reasoning_content` and `tool_calls`, and can be added to the conversation. An incomplete
/// tool call is left out.
///
/// If the message is longer than `capacity` (a null `message` has room for nothing), the result is MA_STATUS_BUFFER_TOO_SMALL and only
/// `length` is written.
///
/// # Safety
/// Pointers are null or point to what is described here; `message` to memory for `capacity` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_answer_message(
    answer: *const Answer,
    message: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> Status {
    call(|| {
        // SAFETY: as the caller promises.
        let (length, answer) = unsafe { (Out::new(length, "length")?, reference(answer, "answer")?) };
        let parsed = Message::from_events(answer.lock()?.events.clone());
        let json = serde_json::to_vec(&parsed).map_err(|error| Failure::new(Status::Failed, error.to_string()))?;
        // SAFETY: as the caller promises.
        unsafe { fill(&json, message.cast(), capacity, &length) }
    })
}

/// Frees an answer. Null is allowed.
///
/// # Safety
/// `answer` is null or comes from ma_answer_new, and the caller does not use it after this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_answer_free(answer: *mut Answer) {
    // SAFETY: as the caller promises.
    unsafe { free(answer) }
}
