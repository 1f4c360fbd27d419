//! Ctrl-C. It ends the process at once, as while a model loads, unless something would be lost: a command that has
//! something to keep [asks](ask) to be told, ends its work and keeps it; the second Ctrl-C then ends the process.

use std::io::{IsTerminal, Write};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use metal_attention::Watch;

use crate::cli_error::CliError;

/// What Ctrl-C does at this moment.
#[derive(Clone, Copy)]
enum Reaction {
    /// The process ends, with a last line on stderr where there is one.
    End(Option<&'static str>),
    /// The command is told.
    Tell,
    /// Somebody else hears of it.
    Leave,
}

static REACTION: Mutex<Reaction> = Mutex::new(Reaction::End(None));

/// Cancelled by a Ctrl-C that the command is told of.
static WATCH: LazyLock<Watch> = LazyLock::new(Watch::default);

/// From now on Ctrl-C ends the process with exit code 130, or what [`ask`] and [`at_once`] make of it.
pub fn listen() -> Result<(), CliError> {
    let handler = || {
        let reaction = *reaction();
        match reaction {
            Reaction::Tell if !requested() => WATCH.cancel(),
            Reaction::Tell => end(),
            Reaction::Leave => {}
            Reaction::End(line) => {
                let mut out = std::io::stderr();
                // The terminal shows ^C, and maybe the progress of something.
                let new_line = if out.is_terminal() { "\n" } else { "" };
                let line = line.map(|line| format!("{line}\n")).unwrap_or_default();
                // Where stderr is closed there is nobody left to tell.
                let _ = write!(out, "{new_line}{line}");
                end();
            }
        }
    };
    ctrlc::set_handler(handler).map_err(|e| CliError::General(format!("cannot listen for Ctrl-C: {e}")))
}

/// While there is one Ctrl-C does something else than before and after.
#[must_use]
pub struct Until(Reaction);

impl Drop for Until {
    fn drop(&mut self) {
        *reaction() = self.0;
    }
}

/// From now on the first Ctrl-C cancels the [`watch`], and [`requested`] is true; the next one ends the process.
pub fn ask() -> Until {
    WATCH.resume();
    Until(std::mem::replace(&mut reaction(), Reaction::Tell))
}

/// From now on Ctrl-C ends the process, with a last line on stderr where there is one.
pub fn at_once(line: Option<&'static str>) -> Until {
    Until(std::mem::replace(&mut reaction(), Reaction::End(line)))
}

/// From now on Ctrl-C is the business of those who listen to the signal themselves.
pub fn leave() {
    *reaction() = Reaction::Leave;
}

/// Whether Ctrl-C [is left](leave) to others.
pub fn is_left() -> bool {
    matches!(*reaction(), Reaction::Leave)
}

/// What Ctrl-C cancels where the command [asks](ask) to be told.
pub fn watch() -> Watch {
    WATCH.clone()
}

/// Whether Ctrl-C was pressed since the last [`ask`].
pub fn requested() -> bool {
    WATCH.is_cancelled()
}

/// Ends the process as Ctrl-C does. What a GPU is still busy with is not waited for. MCP servers end with the process.
pub fn end() -> ! {
    metal_attention_mcp::kill_servers();
    std::process::exit(i32::from(CliError::Interrupted.exit_code()));
}

fn reaction() -> MutexGuard<'static, Reaction> {
    REACTION.lock().unwrap_or_else(PoisonError::into_inner)
}
