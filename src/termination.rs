//! SIGTERM (a service is stopped) and SIGHUP (a terminal is closed), on Unix.

use std::io;
use std::mem::MaybeUninit;
use std::ptr;

use nix::libc;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::cli_error::CliError;

/// Waits for both signals. Signals are caught from the creation of this value on.
pub struct Termination {
    /// SIGTERM.
    terminate: Signal,
    /// `None`: the process was started with SIGHUP ignored (nohup), which stays so.
    hang_up: Option<Signal>,
}

impl Termination {
    /// Installs the handlers. Must be called within a tokio runtime.
    pub fn new() -> io::Result<Self> {
        let hang_up = if ignores_hang_up() { None } else { Some(signal(SignalKind::hangup())?) };
        Ok(Self { terminate: signal(SignalKind::terminate())?, hang_up })
    }

    /// Waits for one of the signals and returns it.
    pub async fn next(&mut self) -> SignalKind {
        let Self { terminate, hang_up } = self;
        let hung_up = async {
            match hang_up {
                Some(hang_up) => hang_up.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = terminate.recv() => SignalKind::terminate(),
            _ = hung_up => SignalKind::hangup(),
        }
    }
}

/// From this call on, both signals kill the MCP servers and end the process with the exit code 128 + signal, as shells use it.
pub fn end_servers() -> Result<(), CliError> {
    let listen = || -> io::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let mut termination = runtime.block_on(async { Termination::new() })?;
        let wait = move || {
            let signal = runtime.block_on(termination.next());
            metal_attention_mcp::kill_servers();
            crate::interrupt::exit_at_once(128 + signal.as_raw_value());
        };
        std::thread::Builder::new().name("signals".into()).spawn(wait)?;
        Ok(())
    };
    listen().map_err(|e| CliError::General(format!("cannot wait for signals: {e}")))
}

/// Whether this process was started with SIGHUP ignored, as by nohup.
fn ignores_hang_up() -> bool {
    let mut action = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: no new action is set, and `action` has the size that the system writes.
    let is_known = unsafe { libc::sigaction(libc::SIGHUP, ptr::null(), action.as_mut_ptr()) } == 0;
    // SAFETY: `sigaction` returned 0, so it has written `action`.
    is_known && unsafe { action.assume_init() }.sa_sigaction == libc::SIG_IGN
}
