//! Answers to conversations, taken apart.

use std::ffi::c_char;
use std::sync::{Arc, Mutex, MutexGuard};

use metal_attention_chat::{AnswerEvent, Message, ToolCallParser};
use metal_attention_grammar::RenderedConversation;

use crate::chat::Chat;
use crate::pointers::{Out, fill, free, reference};
use crate::status::{Failure, Status, call};

/// The answer to a conversation, which the library takes apart into thoughts, text and tool calls while it is generated: as the
/// member `answer` of ma_generate_options. One answer is for one text.
pub struct Answer(pub(crate) Arc<Mutex<Reading>>);

/// An answer as it is read.
pub struct Reading {
    conversation: Arc<RenderedConversation>,
    /// `None`: the answer is not given to a text.
    parser: Option<ToolCallParser>,
    /// There is something of the text.
    begun: bool,
    events: Vec<AnswerEvent>,
}

impl Answer {
    pub(crate) fn lock(&self) -> Result<MutexGuard<'_, Reading>, Failure> {
        self.0.lock().map_err(|_| Failure::new(Status::Defect, "an earlier call met a defect: free the answer"))
    }

    /// Gives the answer to a text, and returns the strings that end it; `has_form`: the text has a form of its own. An error where
    /// it is given to another text.
    pub(crate) fn give(&self, has_form: bool) -> Result<&'static [&'static str], Failure> {
        let mut reading = self.lock()?;
        if reading.parser.is_some() {
            return Err(Failure::argument("answer has been given a text already: make one for each text"));
        }
        reading.parser = Some(reading.conversation.parser(has_form));
        Ok(reading.conversation.stop_strings())
    }
}

impl Reading {
    /// Takes a token, or a rest of text without one.
    pub fn add(&mut self, id: Option<u32>, text: &str) {
        let Some(parser) = &mut self.parser else { return };
        self.begun = true;
        self.events.extend(match id {
            Some(id) => parser.push_token(self.conversation.tokenizer(), id, text),
            None => parser.push(text),
        });
    }

    /// The text is over; `is_cut`: it was cut off.
    pub fn finish(&mut self, is_cut: bool) {
        let Some(parser) = &mut self.parser else { return };
        self.begun = true;
        self.events.extend(if is_cut { parser.cut_off() } else { parser.finish() });
    }

    /// The call failed. Where there is nothing of the text the answer may be given to another one.
    pub fn fail(&mut self) {
        if self.begun {
            self.finish(true);
        } else {
            self.parser = None;
        }
    }
}

/// Makes an answer to `chat`, to be filled by a call that generates, and writes it to `answer`. It is freed by ma_answer_free.
///
/// # Safety
/// Pointers are null or lead to what is said here.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_answer_new(chat: *const Chat, answer: *mut *mut Answer) -> Status {
    call(|| {
        // SAFETY: as the caller promises.
        let (out, chat) = unsafe { (Out::new(answer, "answer")?, reference(chat, "chat")?) };
        let reading = Reading { conversation: Arc::clone(&chat.0), parser: None, begun: false, events: Vec::new() };
        out.set(Box::into_raw(Box::new(Answer(Arc::new(Mutex::new(reading))))));
        Ok(())
    })
}

/// Writes the answer, so far as it was generated, to `message`, without a NUL behind it, and its bytes to `length`: OpenAI's message
/// in JSON, with `content`, `reasoning_content` and `tool_calls`, which can be the next one of the conversation. A call that is not
/// complete is left out.
///
/// Where `message` has room for too little (`capacity`; null has room for nothing) the result is MA_STATUS_BUFFER_TOO_SMALL, and
/// `length` what is needed.
///
/// # Safety
/// Pointers are null or lead to what is said here; `message` to room for `capacity` bytes.
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

/// Frees an answer. Null is nothing to free.
///
/// # Safety
/// `answer` is null or comes from ma_answer_new, and is not used after this by the caller.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_answer_free(answer: *mut Answer) {
    // SAFETY: as the caller promises.
    unsafe { free(answer) }
}
