//! Commands that save, restore and erase slots (llama.cpp's `/slots` actions).
//!
//! Here a slot is a sequence in the KV cache by its number: first the running ones in the order of their admission,
//! then the idle cache sequences, the one that ended last first. Commands run on the engine's thread, one between two
//! steps.

use metal_attention_model::SnapshotError;
use tokio::sync::oneshot;

use crate::HostSnapshot;
use crate::prompt::PrefixKey;

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
    /// The slot holds no tokens.
    #[error("slot {slot} is empty: the KV cache has no text that ran there")]
    Empty {
        /// The slot.
        slot: usize,
    },
    /// A sequence is running in the slot.
    #[error("slot {slot} generates a text: try again when that has ended")]
    Busy {
        /// The slot.
        slot: usize,
    },
    /// The running sequences leave too few free pages.
    #[error("the texts that run leave the KV cache no room for {n_tokens} tokens: try again later")]
    NoRoom {
        /// Tokens to be restored.
        n_tokens: usize,
    },
    /// The KV cache could not be read or written.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// The scheduler accepts no requests.
    #[error(transparent)]
    Submit(#[from] SubmitError),
}

/// A command, run once with the engine. It sends its result itself.
pub(super) type SlotCommand = Box<dyn FnOnce(&mut Engine<'_>) + Send>;

/// The capacity of a KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheCapacity {
    /// Maximum tokens of one sequence.
    pub n_tokens: usize,
    /// Bytes for all sequences, recurrent states included.
    pub bytes: u64,
}

impl Scheduler {
    /// A snapshot of the sequence in a slot; of a running one, of the tokens evaluated so far.
    pub async fn save_slot(&self, slot: usize) -> Result<HostSnapshot, SlotError> {
        self.command(move |engine| engine.save_slot(slot)).await
    }

    /// Puts a snapshot into an idle cache sequence of `client`, as the one that ended last. A prompt that begins like
    /// it continues it.
    pub async fn restore_slot(&self, client: Client, snapshot: HostSnapshot) -> Result<(), SlotError> {
        self.command(move |engine| engine.restore_slot(client, &snapshot)).await
    }

    /// Evicts the sequence in a slot, from the prefix store as well. Returns its number of tokens. A running one is
    /// `Busy`.
    pub async fn erase_slot(&self, slot: usize) -> Result<usize, SlotError> {
        self.command(move |engine| engine.erase_slot(slot)).await
    }

    /// The result of `run`, which is called on the engine's thread between two steps; skipped if this future was
    /// dropped before.
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

    /// The capacity of the KV cache.
    pub fn cache_capacity(&self) -> CacheCapacity {
        CacheCapacity { n_tokens: self.handle.limits.n_positions, bytes: self.handle.cache_bytes }
    }
}

impl Engine<'_> {
    /// Runs the first waiting command; only one between two steps, so that sequences keep running.
    pub(super) fn run_slot_command(&mut self) {
        let command = self.shared.queue().slot_commands.pop_front();
        if let Some(command) = command {
            command(self);
        }
    }

    /// [`Scheduler::save_slot`] on the engine's thread.
    fn save_slot(&mut self, slot: usize) -> Result<HostSnapshot, SlotError> {
        let (seq, key) = match self.running.get(slot) {
            Some(running) => (running.cache_seq, running.evaluated(&*self.pass)),
            None => self.ended_slot(slot)?,
        };
        if key.ids.is_empty() {
            return Err(SlotError::Empty { slot });
        }
        let key = key.to_owned();
        Ok(HostSnapshot::copy(&mut *self.pass, seq, key)?)
    }

    /// [`Scheduler::restore_slot`] on the engine's thread.
    fn restore_slot(&mut self, client: Client, snapshot: &HostSnapshot) -> Result<(), SlotError> {
        let n_tokens = snapshot.ids().len();
        let seq = self.fresh_sequence(n_tokens).ok_or(SlotError::NoRoom { n_tokens })?;
        if let Err(error) = self.restore(|engine| snapshot.restore(&mut *engine.pass, seq)) {
            self.evict(seq);
            return Err(if is_capacity_error(&error) { SlotError::NoRoom { n_tokens } } else { error.into() });
        }
        self.cache_sequences.keep(seq, client, snapshot.key.clone());
        Ok(())
    }

    /// [`Scheduler::erase_slot`] on the engine's thread.
    fn erase_slot(&mut self, slot: usize) -> Result<usize, SlotError> {
        if slot < self.running.len() {
            return Err(SlotError::Busy { slot });
        }
        let (seq, key) = self.ended_slot(slot)?;
        let key = key.to_owned();
        if let Some(client) = self.cache_sequences.owner(seq) {
            self.store.forget(client, key.as_prefix());
        }
        self.evict(seq);
        Ok(key.ids.len())
    }

    /// The cache sequence and the key of a slot that is not running.
    fn ended_slot(&self, slot: usize) -> Result<(usize, PrefixKey<'_>), SlotError> {
        let seq = slot.checked_sub(self.running.len()).and_then(|i| self.cache_sequences.idle_by_end().get(i).copied());
        let ended = seq.and_then(|seq| Some((seq, self.cache_sequences.idle(seq)?)));
        ended.ok_or(SlotError::Empty { slot })
    }
}
