//! Ctrl-C: the first asks the running command to end, the second ends the process. A [`Resumable`] task is ended by the
//! first.

use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::cli_error::CliError;

static REQUESTED: AtomicBool = AtomicBool::new(false);
static RESUMABLE: AtomicBool = AtomicBool::new(false);

/// From now on Ctrl-C is a request that [`requested`] tells of.
pub fn listen() -> Result<(), CliError> {
    let handler = || {
        if RESUMABLE.load(Ordering::Relaxed) {
            let mut out = std::io::stderr();
            let new_line = if out.is_terminal() { "\n" } else { "" };
            // Where stderr is closed there is nobody left to tell.
            let _ =
                writeln!(out, "{new_line}interrupted: what has arrived is kept, the same command goes on from there");
            std::process::exit(i32::from(CliError::Interrupted.exit_code()));
        }
        if REQUESTED.swap(true, Ordering::Relaxed) {
            std::process::exit(i32::from(CliError::Interrupted.exit_code()));
        }
    };
    ctrlc::set_handler(handler).map_err(|e| CliError::General(format!("cannot listen for Ctrl-C: {e}")))
}

/// Forgets a Ctrl-C that was answered to; the next one is the first again.
pub fn forget() {
    REQUESTED.store(false, Ordering::Relaxed);
}

/// Whether Ctrl-C was pressed.
pub fn requested() -> bool {
    REQUESTED.load(Ordering::Relaxed)
}

/// While there is one, a task is under way that may end anywhere and goes on from there when it is started again, as a
/// download that waits for a silent server: Ctrl-C ends the process at once.
pub struct Resumable(());

impl Resumable {
    /// The task begins.
    pub fn begin() -> Self {
        RESUMABLE.store(true, Ordering::Relaxed);
        Self(())
    }
}

impl Drop for Resumable {
    fn drop(&mut self) {
        RESUMABLE.store(false, Ordering::Relaxed);
    }
}
