//! The transport "stdio": the server is a child process, and each message is a line of its stdin or stdout.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio as Stream};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::McpError;
use crate::connection::{ServerEvent, spawn};
use crate::limits::{MAX_MESSAGE, MAX_QUOTED, MAX_UNSENT};
use crate::message;
use crate::process_groups;
use crate::sse::{StreamEnd, read_line};
use crate::text::excerpt;

/// Environment variables that a server inherits. Keys and tokens are not among them.
const INHERITED: [&str; 22] = [
    "APPDATA",
    "HOME",
    "HOMEDRIVE",
    "HOMEPATH",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "LOCALAPPDATA",
    "LOGNAME",
    "PATH",
    "PROCESSOR_ARCHITECTURE",
    "SHELL",
    "SYSTEMDRIVE",
    "SYSTEMROOT",
    "TEMP",
    "TERM",
    "TMPDIR",
    "USER",
    "USERNAME",
    "USERPROFILE",
    "XDG_CACHE_HOME",
    "XDG_RUNTIME_DIR",
];

/// The time for a server to exit after its stdin is closed, and again after SIGTERM.
const EXIT_GRACE: Duration = Duration::from_secs(1);
/// The time to wait for the exit status and the last line of stderr after stdout has ended.
const STATUS_WAIT: Duration = Duration::from_millis(200);
/// The interval at which the exit is polled.
const POLL: Duration = Duration::from_millis(5);
/// Maximum bytes of a logged line of stderr.
const MAX_LOG_LINE: usize = 4 << 10;

/// The child process of a server.
pub struct Stdio {
    /// The process.
    child: Child,
    /// Lines for stdin; `None`: stdin is closed.
    stdin: Option<SyncSender<String>>,
    /// The thread that reads stderr; `None` after its end.
    stderr: Option<JoinHandle<()>>,
    /// The last line of stderr.
    last_line: Arc<Mutex<String>>,
    /// Whether its exit was observed.
    has_exited: bool,
}

impl Stdio {
    /// Starts the process of the server `name`. Messages from its stdout are sent to `events`.
    pub fn start(
        name: &str,
        command: &str,
        args: &[String],
        env: &BTreeMap<String, String>,
        cwd: Option<&Path>,
        events: SyncSender<ServerEvent>,
    ) -> Result<Self, McpError> {
        let mut program = Command::new(command);
        let inherited = INHERITED.iter().filter_map(|name| Some((name, std::env::var_os(name)?)));
        program.args(args).env_clear().envs(inherited).envs(env);
        program.stdin(Stream::piped()).stdout(Stream::piped()).stderr(Stream::piped());
        if let Some(cwd) = cwd {
            program.current_dir(cwd);
        }
        let started = process_groups::start(&mut program);
        let mut child = started.map_err(|source| McpError::Start { command: command.to_owned(), source })?;
        let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (sender, lines) = sync_channel(MAX_UNSENT);
        let mut stdio = Self { child, stdin: Some(sender), stderr: None, last_line: Arc::default(), has_exited: false };
        let started = (|| {
            if let Some(stdin) = stdin {
                spawn(move || write_lines(stdin, &lines))?;
            }
            if let Some(stdout) = stdout {
                spawn(move || read_messages(stdout, &events))?;
            }
            if let Some(stderr) = stderr {
                let (name, last_line) = (name.to_owned(), Arc::clone(&stdio.last_line));
                stdio.stderr = Some(spawn(move || log_lines(&name, stderr, &last_line))?);
            }
            Ok(())
        })();
        started.inspect_err(|_| stdio.close()).map(|()| stdio)
    }

    /// Queues a message for stdin.
    pub fn send(&self, message: String) -> Result<(), McpError> {
        let Some(stdin) = &self.stdin else { return Err(ended()) };
        stdin.try_send(message).map_err(|error| match error {
            TrySendError::Full(_) => McpError::NotReading,
            TrySendError::Disconnected(_) => ended(),
        })
    }

    /// The error of a process that has exited or is about to, with its exit status and the last line of its stderr.
    pub fn exit_error(&mut self) -> McpError {
        let deadline = Instant::now() + STATUS_WAIT;
        let has_exited = self.wait_until(deadline);
        while self.stderr.as_ref().is_some_and(|thread| !thread.is_finished()) && Instant::now() < deadline {
            thread::sleep(POLL);
        }
        let status = has_exited.then(|| self.child.try_wait().ok().flatten()).flatten();
        let last_line = self.last_line.lock().unwrap_or_else(PoisonError::into_inner).clone();
        McpError::Ended { status: status.map(|status| status.to_string()), last_line }
    }

    /// Ends the process and its child processes: closes its stdin, then sends SIGTERM, then SIGKILL.
    pub fn close(&mut self) {
        self.stdin = None;
        if self.wait_until(Instant::now() + EXIT_GRACE) {
            return;
        }
        process_groups::terminate(self.child.id());
        if self.wait_until(Instant::now() + EXIT_GRACE) {
            return;
        }
        process_groups::kill(self.child.id());
        // For systems without process groups. A process that cannot be killed has exited.
        let _ = self.child.kill();
        let _ = self.child.wait();
        process_groups::remove(self.child.id());
        self.has_exited = true;
    }

    /// Kills the child processes of a server that has exited.
    pub fn reap(&mut self) {
        self.wait_until(Instant::now());
    }

    /// Waits for the process's exit until `deadline`. Returns whether it has exited.
    fn wait_until(&mut self, deadline: Instant) -> bool {
        while !self.has_exited {
            match self.child.try_wait() {
                Ok(None) if Instant::now() < deadline => thread::sleep(POLL),
                Ok(None) => return false,
                Ok(Some(_)) | Err(_) => {
                    // Its child processes must not outlive it.
                    process_groups::kill(self.child.id());
                    process_groups::remove(self.child.id());
                    self.has_exited = true;
                }
            }
        }
        true
    }
}

/// The error of a process whose exit status is unknown.
fn ended() -> McpError {
    McpError::Ended { status: None, last_line: String::new() }
}

/// Writes messages until the connection is closed or the process no longer reads.
fn write_lines(mut stdin: impl Write, lines: &Receiver<String>) {
    for mut line in lines {
        line.push('\n');
        if stdin.write_all(line.as_bytes()).and_then(|()| stdin.flush()).is_err() {
            return;
        }
    }
}

/// Reads messages until stdout ends or the connection is closed.
fn read_messages(stdout: impl Read, events: &SyncSender<ServerEvent>) {
    let mut stdout = BufReader::new(stdout);
    loop {
        let sent = match read_line(&mut stdout, MAX_MESSAGE) {
            Ok(line) if line.trim_ascii().is_empty() => Ok(()),
            Ok(line) => match message::parse(&line) {
                Some(messages) => {
                    messages.into_iter().try_for_each(|message| events.send(ServerEvent::Message(message)))
                }
                None => events.send(ServerEvent::Invalid(excerpt(&line, MAX_QUOTED))),
            },
            Err(end) => {
                let error = match end {
                    StreamEnd::Ended => ended(),
                    StreamEnd::TooLong => McpError::MessageTooLong,
                };
                // Without a receiver, the connection is closed.
                let _ = events.send(ServerEvent::Failed(None, error));
                return;
            }
        };
        if sent.is_err() {
            return;
        }
    }
}

/// Reads stderr, so that its pipe never fills. Logs the lines and keeps the last one.
fn log_lines(name: &str, stderr: impl Read, last_line: &Mutex<String>) {
    let mut stderr = BufReader::new(stderr);
    let mut bytes = Vec::new();
    loop {
        bytes.clear();
        // A longer line is read in parts.
        let part = (&mut stderr).take(MAX_LOG_LINE as u64).read_until(b'\n', &mut bytes);
        if part.is_err() || bytes.is_empty() {
            return;
        }
        let line = excerpt(&bytes, MAX_LOG_LINE);
        if line.is_empty() {
            continue;
        }
        tracing::debug!("MCP server {name}: {line}");
        *last_line.lock().unwrap_or_else(PoisonError::into_inner) = excerpt(line.as_bytes(), MAX_QUOTED);
    }
}
