//! Wakes a device that was idle while the user types, so that its clocks are up when the message is sent.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Instant;

use metal_attention::ASLEEP_AFTER;

use super::input::UserInput;
use super::session::ChatSession;
use crate::cli_error::CliError;

/// Reads the next message or command; `None` at the end of the input. The first key wakes the device; if typing takes longer
/// than the device stays awake, a later key wakes it again.
pub fn read_awake(input: &mut UserInput, session: &mut ChatSession) -> Result<Option<String>, CliError> {
    let (sender, keys) = channel();
    if !input.report_keys(&sender) {
        return input.read();
    }
    let read = &AtomicBool::new(false);
    thread::scope(|scope| {
        // If the thread cannot start, the device wakes with the message.
        let _ = thread::Builder::new().spawn_scoped(scope, move || wake_at_keys(session, &keys, read));
        // Dropped before the scope waits for the thread, also when reading panics.
        let _end = WakeGuard { read, keys: sender };
        input.read()
    })
}

/// Ends [`wake_at_keys`] when it is dropped.
struct WakeGuard<'a> {
    /// Set to true: the message is read.
    read: &'a AtomicBool,
    /// Wakes the thread once more, so that it sees `read`.
    keys: Sender<()>,
}

impl Drop for WakeGuard<'_> {
    fn drop(&mut self) {
        self.read.store(true, Ordering::Relaxed);
        let _ = self.keys.send(());
    }
}

/// Wakes the device at each key, at most once in [`ASLEEP_AFTER`], until `read` is true.
fn wake_at_keys(session: &mut ChatSession, keys: &Receiver<()>, read: &AtomicBool) {
    let is_read = || read.load(Ordering::Relaxed);
    let mut awake = Instant::now();
    while keys.recv().is_ok() && !is_read() {
        if awake.elapsed() >= ASLEEP_AFTER {
            session.wake(is_read);
            awake = Instant::now();
        }
    }
}
