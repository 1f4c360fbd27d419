//! What ends the server: Ctrl-C, SIGTERM, SIGHUP, or the end of stdin.

#[cfg(unix)]
use tokio::signal::unix::{Signal, SignalKind, signal};
#[cfg(windows)]
use tokio::signal::windows::{CtrlC, ctrl_c};
use tokio::sync::oneshot;

use crate::cli_error::CliError;
use crate::interrupt;
use crate::served::print_line;
#[cfg(unix)]
use crate::termination::Termination;

/// Waits for the first Ctrl-C, SIGTERM or SIGHUP, or the end of `stdin`. The next signal ends the process.
pub(super) async fn shutdown(mut signals: Signals, stdin: Option<oneshot::Receiver<()>>) {
    let stdin_closes = async {
        match stdin {
            Some(end) => drop(end.await),
            None => std::future::pending().await,
        }
    };
    let is_ctrl_c = tokio::select! {
        is_ctrl_c = signals.next() => is_ctrl_c,
        () = stdin_closes => true,
    };
    if interrupt::ignores_ctrl_c() {
        print_line("shutting down; again to end at once");
    } else if is_ctrl_c {
        // During the load of a resident model nothing has to be shut down: Ctrl-C ends the process at once.
        interrupt::exit();
    }
    tokio::spawn(async move {
        signals.next().await;
        interrupt::exit();
    });
}

/// Returns a channel that gets a message at the end of stdin. A thread reads stdin; it ends with the process.
pub(super) fn stdin_end() -> Result<oneshot::Receiver<()>, CliError> {
    let (sender, receiver) = oneshot::channel();
    let read = move || {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        let _ = sender.send(());
    };
    let thread = std::thread::Builder::new().name("stdin".into()).spawn(read);
    thread.map_err(|e| CliError::General(format!("cannot start a thread that reads stdin: {e}")))?;
    Ok(receiver)
}

/// Ctrl-C, SIGTERM and SIGHUP. Signals are caught from the creation of this value on.
#[cfg(unix)]
pub(super) struct Signals {
    /// Ctrl-C.
    interrupt: Signal,
    /// SIGTERM and SIGHUP.
    termination: Termination,
}

#[cfg(unix)]
impl Signals {
    pub(super) fn new() -> std::io::Result<Self> {
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, termination: Termination::new()? })
    }

    /// Waits for a signal. Returns whether it is Ctrl-C.
    pub(super) async fn next(&mut self) -> bool {
        tokio::select! {
            _ = self.interrupt.recv() => true,
            _ = self.termination.next() => false,
        }
    }
}

/// Ctrl-C. Signals are caught from the creation of this value on.
#[cfg(windows)]
pub(super) struct Signals(CtrlC);

#[cfg(windows)]
impl Signals {
    pub(super) fn new() -> std::io::Result<Self> {
        ctrl_c().map(Self)
    }

    /// Waits for Ctrl-C. Returns true.
    pub(super) async fn next(&mut self) -> bool {
        self.0.recv().await;
        true
    }
}
