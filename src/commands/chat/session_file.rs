//! The file of `--session`: the messages of a conversation and its KV cache.
//!
//! After each command only the messages are written, which are small, so that no end of the process loses them. The KV cache
//! may take gigabytes and is written once, when the conversation ends.

use std::path::{Path, PathBuf};

use metal_attention::{Generator, SessionError, SessionFile};
use metal_attention_chat::Message;

use super::history::ChatHistory;
use super::note;
use super::session::ChatSession;
use crate::cli_error::CliError;
use crate::metadata_text::safe;
use crate::picture_args::Pictures;
use crate::units;

/// The session file and the state of its contents.
pub struct ChatSessionFile {
    /// The path of the file.
    path: PathBuf,
    /// The messages in the file.
    written: ChatHistory,
    /// Whether the file has the KV cache of these messages.
    is_whole: bool,
}

impl ChatSessionFile {
    /// Opens the file at `path`, restores its KV cache to `generator`, and returns its messages. A file that does not exist is a
    /// new, empty session. The KV cache of another model or another setting is left out with a note.
    pub fn open(path: &Path, generator: &mut Generator) -> Result<(Self, ChatHistory), CliError> {
        let mut opened = Self { path: path.to_owned(), written: ChatHistory::default(), is_whole: false };
        if !path.try_exists().unwrap_or(true) {
            return Ok((opened, ChatHistory::default()));
        }
        let file = SessionFile::open(path).map_err(|error| opened.failed(&error))?;
        let messages: Vec<Message> = serde_json::from_slice(file.note())
            .map_err(|e| CliError::General(format!("{} has no conversation: {e}", opened.name())))?;
        opened.written = ChatHistory::from_messages(messages);
        let n_messages = units::count(opened.written.messages.len(), "message");
        match generator.restore(file) {
            Ok(n_tokens) => {
                opened.is_whole = n_tokens > 0;
                let n_tokens = units::count(n_tokens, "token");
                note(&format!("{}: {n_messages} and {n_tokens} in the KV cache are back", opened.name()));
            }
            Err(error) if error.is_of_other_cache() => {
                note(&format!("{}: {n_messages} are back, to be read anew: {error}", opened.name()));
            }
            Err(error) => return Err(opened.failed(&error)),
        }
        let conversation = opened.written.clone();
        Ok((opened, conversation))
    }

    /// Writes the messages without the KV cache, if they have changed.
    pub fn save_messages(&mut self, session: &ChatSession) -> Result<(), CliError> {
        if self.written == session.conversation {
            return Ok(());
        }
        let messages = json(&session.conversation)?;
        SessionFile::write(&self.path, session.model(), &messages, None).map_err(|error| self.failed(&error))?;
        self.written = session.conversation.clone();
        self.is_whole = false;
        Ok(())
    }

    /// Writes the messages and the KV cache, unless the file has both already.
    pub fn save_all(&mut self, session: &mut ChatSession) -> Result<(), CliError> {
        if self.is_whole && self.written == session.conversation {
            return Ok(());
        }
        let messages = json(&session.conversation)?;
        session.save(&self.path, &messages).map_err(|error| self.failed(&error))?;
        self.written = session.conversation.clone();
        self.is_whole = true;
        Ok(())
    }

    /// The name of the file for messages.
    fn name(&self) -> String {
        safe(&self.path.display().to_string())
    }

    /// An error of the file.
    fn failed(&self, error: &SessionError) -> CliError {
        CliError::General(format!("{}: {error}", self.name()))
    }
}

/// The messages as JSON, the note of the session file. Pictures are not kept.
fn json(conversation: &ChatHistory) -> Result<Vec<u8>, CliError> {
    let json = serde_json::to_string(&conversation.with_system());
    let json = json.map_err(|e| CliError::General(format!("cannot write JSON: {e}")))?;
    Ok(Pictures::shown(&json).into_bytes())
}
