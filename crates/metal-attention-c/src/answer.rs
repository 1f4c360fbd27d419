//! Answers to conversations, taken apart.

use std::ffi::c_char;
use std::sync::{Arc, Mutex, MutexGuard};

use metal_attention::tokenizer::Tokenizer;
use metal_attention_chat::{AnswerEvent, Message, ToolCallParser};

use crate::chat::Chat;
use crate::pointers::{Out, fill, reference};
use crate::status::{Failure, Status, call};

/// The answer to a conversation, which the library takes apart into thoughts, text and tool calls while it is generated: as the
/// member `answer` of ma_generate_options. One answer is for one text.
pub struct Answer(pub(crate) Arc<Mutex<Reading>>);

/// An answer as it is read.
pub struct Reading {
    tokenizer: Arc<Tokenizer>,
    parser: ToolCallParser,
    /// In the place of `parser` where the text has a form of its own: then nothing in it is a call.
    parser_of_form: ToolCallParser,
    /// Strings that end an answer where the model has no token for it.
    stop: &'static [&'static str],
    events: Vec<AnswerEvent>,
    begun: bool,
}

impl Answer {
    pub(crate) fn lock(&self) -> Result<MutexGuard<'_, Reading>, Failure> {
        self.0.lock().map_err(|_| Failure::new(Status::Defect, "an earlier call met a defect: free the answer"))
    }

    /// The answer for a text that begins, and the strings that end it; `has_form`: the text has a form of its own. An error where there
    /// was another text.
    pub(crate) fn begin(&self, has_form: bool) -> Result<&'static [&'static str], Failure> {
        let mut reading = self.lock()?;
        if std::mem::replace(&mut reading.begun, true) {
            return Err(Failure::argument("answer has been given a text already: make one for each text"));
        }
        if has_form {
            let Reading { parser, parser_of_form, .. } = &mut *reading;
            std::mem::swap(parser, parser_of_form);
        }
        Ok(reading.stop)
    }
}

impl Reading {
    /// Takes a token, or a rest of text without one.
    pub fn add(&mut self, id: Option<u32>, text: &str) {
        let events = match id {
            Some(id) => self.parser.push_token(&self.tokenizer, id, text),
            None => self.parser.push(text),
        };
        self.events.extend(events);
    }

    /// The text is over.
    pub fn finish(&mut self) {
        self.events.extend(self.parser.finish());
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
        let reading = Reading {
            tokenizer: Arc::clone(chat.0.tokenizer()),
            parser: chat.0.parser(false),
            parser_of_form: chat.0.parser(true),
            stop: chat.0.stop_strings(),
            events: Vec::new(),
            begun: false,
        };
        out.set(Box::into_raw(Box::new(Answer(Arc::new(Mutex::new(reading))))));
        Ok(())
    })
}

/// Writes the answer, so far as it was generated, to `message`, without a NUL behind it, and its bytes to `length`: OpenAI's message
/// in JSON, with `content`, `reasoning_content` and `tool_calls`, which can be the next one of the conversation.
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
    if !answer.is_null() {
        // SAFETY: it comes from `Box::into_raw`, and nobody has it any more.
        let answer = unsafe { Box::from_raw(answer) };
        call(|| {
            drop(answer);
            Ok(())
        });
    }
}
