//! The handler of Ctrl-C. It ends the process at once (for example while a model loads), unless a command has results to
//! keep: after [`cancel_on_ctrl_c`] the first Ctrl-C cancels the command's work, so that it can write them, and the second
//! one ends the process.

use std::io::{IsTerminal, Write};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use metal_attention::Watch;

use crate::cli_error::CliError;

/// The effect of the next Ctrl-C.
#[derive(Clone, Copy)]
enum Reaction {
    /// End the process, after printing this line on stderr, if there is one.
    Exit(Option<&'static str>),
    /// Cancel [`WATCH`]; if it is cancelled already, end the process.
    Cancel,
    /// Do nothing: the server or another process handles the signal itself.
    Ignore,
}

/// The present reaction.
static REACTION: Mutex<Reaction> = Mutex::new(Reaction::Exit(None));

/// The watch that [`Reaction::Cancel`] cancels.
static WATCH: LazyLock<Watch> = LazyLock::new(Watch::default);

/// Installs the handler: Ctrl-C ends the process with exit code 130 until one of the functions below changes that. Call once.
pub fn listen() -> Result<(), CliError> {
    let handler = || {
        let reaction = *reaction();
        match reaction {
            Reaction::Cancel if !requested() => WATCH.cancel(),
            Reaction::Cancel => exit(),
            Reaction::Ignore => {}
            Reaction::Exit(line) => {
                let mut out = std::io::stderr();
                // The terminal shows ^C, perhaps behind a line of progress.
                let new_line = if out.is_terminal() { "\n" } else { "" };
                let line = line.map(|line| format!("{line}\n")).unwrap_or_default();
                // An error means that stderr is closed; then nothing can be shown.
                let _ = write!(out, "{new_line}{line}");
                exit();
            }
        }
    };
    ctrlc::set_handler(handler).map_err(|e| CliError::General(format!("cannot listen for Ctrl-C: {e}")))
}

/// Restores the previous reaction to Ctrl-C when it is dropped.
#[must_use]
pub struct CtrlCGuard(Reaction);

impl Drop for CtrlCGuard {
    fn drop(&mut self) {
        *reaction() = self.0;
    }
}

/// The first Ctrl-C cancels the [`watch`], after which [`requested`] is true; the next one ends the process.
pub fn cancel_on_ctrl_c() -> CtrlCGuard {
    WATCH.resume();
    CtrlCGuard(std::mem::replace(&mut reaction(), Reaction::Cancel))
}

/// Ctrl-C ends the process, after printing `line` on stderr, if there is one.
pub fn exit_on_ctrl_c(line: Option<&'static str>) -> CtrlCGuard {
    CtrlCGuard(std::mem::replace(&mut reaction(), Reaction::Exit(line)))
}

/// Ctrl-C has no effect here; the caller waits for the signal itself. There is no way back.
pub fn ignore_ctrl_c() {
    *reaction() = Reaction::Ignore;
}

/// Whether [`ignore_ctrl_c`] was called.
pub fn ignores_ctrl_c() -> bool {
    matches!(*reaction(), Reaction::Ignore)
}

/// The watch that Ctrl-C cancels after [`cancel_on_ctrl_c`]; commands pass it to the forward pass.
pub fn watch() -> Watch {
    WATCH.clone()
}

/// Whether Ctrl-C was pressed since the last [`cancel_on_ctrl_c`].
pub fn requested() -> bool {
    WATCH.is_cancelled()
}

/// Ends the process with the exit code of Ctrl-C. Kills the MCP servers; does not wait for work on a GPU. Output must be
/// flushed before.
pub fn exit() -> ! {
    metal_attention_mcp::kill_servers();
    exit_at_once(i32::from(CliError::Interrupted.exit_code()))
}

/// Ends the process while other threads work. The destructors of C++ libraries do not run: those of a Vulkan driver abort
/// the process where another thread loads the driver at the same time.
pub fn exit_at_once(code: i32) -> ! {
    // SAFETY: `_exit` takes any number and does not return.
    #[cfg(unix)]
    unsafe {
        nix::libc::_exit(code)
    }
    // Windows ends all other threads first.
    #[cfg(not(unix))]
    std::process::exit(code)
}

/// Locks the present reaction.
fn reaction() -> MutexGuard<'static, Reaction> {
    REACTION.lock().unwrap_or_else(PoisonError::into_inner)
}
