//! Ctrl-C: the first asks the running command to end, the second ends the process.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::cli_error::CliError;

static REQUESTED: AtomicBool = AtomicBool::new(false);

/// From now on Ctrl-C is a request that [`requested`] tells of.
pub fn listen() -> Result<(), CliError> {
    let handler = || {
        if REQUESTED.swap(true, Ordering::Relaxed) {
            std::process::exit(i32::from(CliError::Interrupted.exit_code()));
        }
    };
    ctrlc::set_handler(handler).map_err(|e| CliError::General(format!("cannot listen for Ctrl-C: {e}")))
}

/// Whether Ctrl-C was pressed.
pub fn requested() -> bool {
    REQUESTED.load(Ordering::Relaxed)
}
