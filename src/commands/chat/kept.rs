//! The file of `--session`: the conversation, and what the KV cache has of it.
//!
//! After each answer the messages alone are written, which are small: whatever ends the process, nothing that was said is
//! lost. The KV cache, which may be gigabytes, is written once, as the conversation ends.

use std::path::{Path, PathBuf};

use metal_attention::{Generator, SessionError, SessionFile};
use metal_attention_chat::Message;

use super::conversation::Conversation;
use super::note;
use super::session::Session;
use crate::cli_error::CliError;
use crate::metadata_text::safe;
use crate::units;

/// The file and what is in it.
pub struct KeptSession {
    path: PathBuf,
    /// The conversation in the file.
    written: Conversation,
    /// The file has what the KV cache has of it, too.
    is_whole: bool,
}

impl KeptSession {
    /// The session in the file at `path`, whose text `generator` goes on with, and its conversation; a new one where there is no
    /// such file.
    pub fn open(path: &Path, generator: &mut Generator) -> Result<(Self, Conversation), CliError> {
        let mut kept = Self { path: path.to_owned(), written: Conversation::default(), is_whole: false };
        if !path.try_exists().unwrap_or(true) {
            return Ok((kept, Conversation::default()));
        }
        let file = SessionFile::open(path).map_err(|error| kept.failed(&error))?;
        let messages: Vec<Message> = serde_json::from_slice(file.note())
            .map_err(|e| CliError::General(format!("{} has no conversation: {e}", kept.name())))?;
        kept.written = Conversation::from_messages(messages);
        let n_messages = units::count(kept.written.messages.len(), "message");
        match generator.restore(file) {
            Ok(n_tokens) => {
                kept.is_whole = n_tokens > 0;
                let n_tokens = units::count(n_tokens, "token");
                note(&format!("{}: {n_messages} and {n_tokens} in the KV cache are back", kept.name()));
            }
            Err(error) if error.is_of_other_cache() => {
                note(&format!("{}: {n_messages} are back, to be read anew: {error}", kept.name()));
            }
            Err(error) => return Err(kept.failed(&error)),
        }
        let conversation = kept.written.clone();
        Ok((kept, conversation))
    }

    /// Writes the messages where they have changed.
    pub fn keep_messages(&mut self, session: &Session) -> Result<(), CliError> {
        if self.written == session.conversation {
            return Ok(());
        }
        let messages = json(&session.conversation)?;
        SessionFile::write(&self.path, session.model(), &messages, None).map_err(|error| self.failed(&error))?;
        self.written = session.conversation.clone();
        self.is_whole = false;
        Ok(())
    }

    /// Writes everything, where it is not there.
    pub fn keep_all(&mut self, session: &mut Session) -> Result<(), CliError> {
        if self.is_whole && self.written == session.conversation {
            return Ok(());
        }
        let messages = json(&session.conversation)?;
        session.save(&self.path, &messages).map_err(|error| self.failed(&error))?;
        self.written = session.conversation.clone();
        self.is_whole = true;
        Ok(())
    }

    fn name(&self) -> String {
        safe(&self.path.display().to_string())
    }

    fn failed(&self, error: &SessionError) -> CliError {
        CliError::General(format!("{}: {error}", self.name()))
    }
}

fn json(conversation: &Conversation) -> Result<Vec<u8>, CliError> {
    serde_json::to_vec(&conversation.with_system()).map_err(|e| CliError::General(format!("cannot write JSON: {e}")))
}
