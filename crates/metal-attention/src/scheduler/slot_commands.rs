//! Slots that are saved, restored and erased.
//!
//! A slot is a text in the KV cache by its number: first those that run, in the order in which they got their places, then those
//! that have ended, the last one first.

use metal_attention_model::SnapshotError;
use tokio::sync::oneshot;

use crate::HostSnapshot;

use super::admission::is_capacity_error;
use super::engine::Engine;
use super::{Client, Scheduler, SubmitError};

/// Why a slot could not be saved, restored or erased.
#[derive(Debug, thiserror::Error)]
pub enum SlotError {
    /// There are fewer slots.
    #[error("there is no slot {slot}: the slots are 0 to {last}")]
    NoSuchSlot {
        /// The number that was given.
        slot: usize,
        /// The last slot.
        last: usize,
    },
    /// The KV cache has no such text.
    #[error("slot {slot} is empty: the KV cache has no text that ran there")]
    Empty {
        /// The slot.
        slot: usize,
    },
    /// A text is generated there.
    #[error("slot {slot} generates a text: try again when that has ended")]
    Busy {
        /// The slot.
        slot: usize,
    },
    /// The texts that run leave no room.
    #[error("the texts that run leave the KV cache no room for {n_tokens} tokens: try again later")]
    NoRoom {
        /// Tokens of the text.
        n_tokens: usize,
    },
    /// The KV cache did not give or take the text.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// The scheduler takes nothing any more.
    #[error(transparent)]
    Submit(#[from] SubmitError),
}

/// What is to be done with a slot. It sends its outcome itself.
pub(super) type SlotCommand = Box<dyn FnOnce(&mut Engine<'_>) + Send>;

/// What a KV cache has room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheCapacity {
    /// Tokens of one text.
    pub n_tokens: usize,
    /// Bytes of all texts, recurrent states included.
    pub bytes: u64,
}

impl Scheduler {
    /// A copy of the text of a slot: of one that runs, as far as it is evaluated.
    pub async fn save_slot(&self, slot: usize) -> Result<HostSnapshot, SlotError> {
        self.command(move |engine| engine.save_slot(slot)).await
    }

    /// Puts a text into the KV cache, where it is the one of `client` that ended last: a prompt that begins like it goes on from it.
    pub async fn restore_slot(&self, client: Client, snapshot: HostSnapshot) -> Result<(), SlotError> {
        self.command(move |engine| engine.restore_slot(client, &snapshot)).await
    }

    /// Has the KV cache forget the text of a slot. Returns its number of tokens.
    pub async fn erase_slot(&self, slot: usize) -> Result<usize, SlotError> {
        self.command(move |engine| engine.erase_slot(slot)).await
    }

    /// What `run` comes to between two steps of the texts that run. It is left out where nobody waits for it any more.
    async fn command<T: Send + 'static>(
        &self,
        run: impl FnOnce(&mut Engine<'_>) -> Result<T, SlotError> + Send + 'static,
    ) -> Result<T, SlotError> {
        let (answer, outcome) = oneshot::channel();
        self.handle.shared.push_slot_command(Box::new(move |engine| {
            if !answer.is_closed() {
                let _ = answer.send(run(engine));
            }
        }))?;
        outcome.await.unwrap_or(Err(SlotError::Submit(SubmitError::EngineFailed)))
    }

    /// What the KV cache has room for.
    pub fn cache_capacity(&self) -> CacheCapacity {
        CacheCapacity { n_tokens: self.handle.n_ctx, bytes: self.handle.cache_bytes }
    }
}

impl Engine<'_> {
    /// Carries out the first command that waits: texts that run go on between two of them.
    pub(super) fn run_slot_command(&mut self) {
        let command = self.shared.queue().slot_commands.pop_front();
        if let Some(command) = command {
            command(self);
        }
    }

    fn save_slot(&mut self, slot: usize) -> Result<HostSnapshot, SlotError> {
        let (seq, ids) = match self.running.get(slot) {
            Some(running) => (running.seq, &running.sequence.ids[..self.pass.n_past(running.seq)]),
            None => self.ended(slot)?,
        };
        if ids.is_empty() {
            return Err(SlotError::Empty { slot });
        }
        let ids = ids.to_vec();
        Ok(HostSnapshot::copy(&mut *self.pass, seq, ids)?)
    }

    fn restore_slot(&mut self, client: Client, snapshot: &HostSnapshot) -> Result<(), SlotError> {
        let n_tokens = snapshot.ids().len();
        let seq = self.fresh_sequence(n_tokens).ok_or(SlotError::NoRoom { n_tokens })?;
        if let Err(error) = self.restore(|engine| snapshot.restore(&mut *engine.pass, seq)) {
            self.evict(seq);
            return Err(if is_capacity_error(&error) { SlotError::NoRoom { n_tokens } } else { error.into() });
        }
        self.sequences.keep(seq, client, snapshot.ids().to_vec());
        Ok(())
    }

    fn erase_slot(&mut self, slot: usize) -> Result<usize, SlotError> {
        if slot < self.running.len() {
            return Err(SlotError::Busy { slot });
        }
        let (seq, ids) = self.ended(slot)?;
        let ids = ids.to_vec();
        if let Some(client) = self.sequences.owner(seq) {
            self.store.forget(client, &ids);
        }
        self.evict(seq);
        Ok(ids.len())
    }

    /// The sequence and the tokens of a slot whose text has ended.
    fn ended(&self, slot: usize) -> Result<(usize, &[u32]), SlotError> {
        let seq = slot.checked_sub(self.running.len()).and_then(|i| self.sequences.idle_by_end().get(i).copied());
        let text = seq.and_then(|seq| Some((seq, self.sequences.idle(seq)?)));
        text.ok_or(SlotError::Empty { slot })
    }
}
