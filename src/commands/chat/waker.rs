//! Has a device that was idle come up to its speed while somebody types.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Instant;

use metal_attention::ASLEEP_AFTER;

use super::input::Input;
use super::session::Session;
use crate::cli_error::CliError;

/// The next message or command; `None` where there are no more. At the first key the device wakes, and again where the message
/// takes longer than it stays awake.
pub fn read_awake(input: &mut Input, session: &mut Session) -> Result<Option<String>, CliError> {
    let (sender, keys) = channel();
    if !input.tell_keys(&sender) {
        return input.read();
    }
    let read = &AtomicBool::new(false);
    thread::scope(|scope| {
        // Without a thread the device wakes with the message.
        let _ = thread::Builder::new().spawn_scoped(scope, move || wake_at_keys(session, &keys, read));
        // Drops before the thread is waited for, also where reading panics.
        let _end = End { read, keys: sender };
        input.read()
    })
}

/// Ends [`wake_at_keys`].
struct End<'a> {
    read: &'a AtomicBool,
    keys: Sender<()>,
}

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.read.store(true, Ordering::Relaxed);
        let _ = self.keys.send(());
    }
}

/// Wakes the device at keys, until the message is `read`.
fn wake_at_keys(session: &mut Session, keys: &Receiver<()>, read: &AtomicBool) {
    let is_read = || read.load(Ordering::Relaxed);
    let mut awake = Instant::now();
    while keys.recv().is_ok() && !is_read() {
        if awake.elapsed() >= ASLEEP_AFTER {
            session.wake(is_read);
            awake = Instant::now();
        }
    }
}
