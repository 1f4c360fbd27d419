//! SIGTERM, as when a service is stopped, and SIGHUP, as when a terminal is closed.

use std::io;
use std::mem::MaybeUninit;
use std::ptr;

use nix::libc;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::cli_error::CliError;

/// Both signals. None is lost from the moment this is made.
pub struct Termination {
    terminate: Signal,
    /// `None`: SIGHUP is ignored, as with nohup, and stays so.
    hang_up: Option<Signal>,
}

impl Termination {
    /// Within a runtime.
    pub fn new() -> io::Result<Self> {
        let hang_up = if ignores_hang_up() { None } else { Some(signal(SignalKind::hangup())?) };
        Ok(Self { terminate: signal(SignalKind::terminate())?, hang_up })
    }

    /// Waits for one of them.
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

/// From now on both signals end the MCP servers together with the process, whose exit code is that of shells for the signal.
pub fn end_servers() -> Result<(), CliError> {
    let listen = || -> io::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let mut termination = runtime.block_on(async { Termination::new() })?;
        let wait = move || {
            let signal = runtime.block_on(termination.next());
            metal_attention_mcp::kill_servers();
            std::process::exit(128 + signal.as_raw_value());
        };
        std::thread::Builder::new().name("signals".into()).spawn(wait)?;
        Ok(())
    };
    listen().map_err(|e| CliError::General(format!("cannot wait for signals: {e}")))
}

/// Whether this process was started with SIGHUP ignored, as nohup does.
fn ignores_hang_up() -> bool {
    let mut action = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: there is no new action, and the system writes the present one to where there is room for it.
    let is_known = unsafe { libc::sigaction(libc::SIGHUP, ptr::null(), action.as_mut_ptr()) } == 0;
    // SAFETY: the system has written it.
    is_known && unsafe { action.assume_init() }.sa_sigaction == libc::SIG_IGN
}
