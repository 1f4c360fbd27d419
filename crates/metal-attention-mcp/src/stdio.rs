//! A server that is a program: a message is a line of its standard input and output.

use std::collections::BTreeMap;
use std::io::{BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio as Stream};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::McpError;
use crate::connection::{Event, spawn};
use crate::event_stream::{StreamEnd, read_line};
use crate::limits::{MAX_MESSAGE, MAX_QUOTED, MAX_UNSENT};
use crate::message;
use crate::text::excerpt;

/// Variables that a server's program gets of this process's environment: no keys and tokens are among them.
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

/// How long a program may take to end once its input is closed, and again once it is told to.
const ENDING: Duration = Duration::from_secs(1);
/// How often it is looked at whether it has ended.
const LOOK: Duration = Duration::from_millis(5);
/// Bytes of a line of stderr.
const MAX_LOG_LINE: usize = 4 << 10;

/// A server's program.
pub struct Stdio {
    child: Child,
    /// Lines for its input; `None`: that is closed.
    input: Option<SyncSender<String>>,
    /// The last line of its stderr.
    last_words: Arc<Mutex<String>>,
}

impl Stdio {
    /// Starts the program of the server `name`; what it writes becomes `events`.
    pub fn start(
        name: &str,
        command: &str,
        args: &[String],
        env: &BTreeMap<String, String>,
        cwd: Option<&Path>,
        events: SyncSender<Event>,
    ) -> Result<Self, McpError> {
        let mut program = Command::new(command);
        let inherited = INHERITED.iter().filter_map(|name| Some((name, std::env::var_os(name)?)));
        program.args(args).env_clear().envs(inherited).envs(env);
        program.stdin(Stream::piped()).stdout(Stream::piped()).stderr(Stream::piped());
        if let Some(cwd) = cwd {
            program.current_dir(cwd);
        }
        // Ctrl-C in a terminal ends a call, and not the server.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut program, 0);
        let mut child = program.spawn().map_err(|source| McpError::Start { command: command.to_owned(), source })?;
        let (input, output, errors) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (sender, lines) = sync_channel(MAX_UNSENT);
        let mut stdio = Self { child, input: Some(sender), last_words: Arc::default() };
        let started = (|| {
            if let Some(input) = input {
                spawn(move || write_lines(input, &lines))?;
            }
            if let Some(output) = output {
                spawn(move || read_messages(output, &events))?;
            }
            if let Some(errors) = errors {
                let (name, last_words) = (name.to_owned(), Arc::clone(&stdio.last_words));
                spawn(move || log(&name, errors, &last_words))?;
            }
            Ok(())
        })();
        started.inspect_err(|_| stdio.close()).map(|()| stdio)
    }

    /// Sends a message.
    pub fn send(&self, message: String) -> Result<(), McpError> {
        let Some(input) = &self.input else { return Err(ended_somehow()) };
        input.try_send(message).map_err(|error| match error {
            TrySendError::Full(_) => McpError::Deaf,
            TrySendError::Disconnected(_) => ended_somehow(),
        })
    }

    /// The error of a program that has ended, or is about to.
    pub fn ended(&mut self) -> McpError {
        let status = self.wait(Duration::from_millis(200)).then(|| self.child.try_wait().ok().flatten()).flatten();
        let last_words = self.last_words.lock().unwrap_or_else(PoisonError::into_inner).clone();
        McpError::Ended { status: status.map(|status| status.to_string()), last_words }
    }

    /// Ends the program: by the end of its input, else by signals.
    pub fn close(&mut self) {
        self.input = None;
        if self.wait(ENDING) {
            return;
        }
        #[cfg(unix)]
        {
            self.signal(nix::sys::signal::Signal::SIGTERM);
            if self.wait(ENDING) {
                return;
            }
            self.signal(nix::sys::signal::Signal::SIGKILL);
        }
        // A process that cannot be killed is gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Sends a signal to the program and those that it has started.
    #[cfg(unix)]
    fn signal(&self, signal: nix::sys::signal::Signal) {
        let group = nix::unistd::Pid::from_raw(self.child.id() as i32);
        // A process that is gone takes none.
        let _ = nix::sys::signal::killpg(group, signal);
    }

    /// Waits for the program's end. False: it has not ended by then.
    fn wait(&mut self, longest: Duration) -> bool {
        let start = Instant::now();
        loop {
            match self.child.try_wait() {
                Ok(None) if start.elapsed() < longest => thread::sleep(LOOK),
                Ok(None) => return false,
                Ok(Some(_)) | Err(_) => return true,
            }
        }
    }
}

/// The error of a program of whose end nothing is known yet.
fn ended_somehow() -> McpError {
    McpError::Ended { status: None, last_words: String::new() }
}

/// Writes messages until there are none any more, or nobody reads them.
fn write_lines(mut input: impl Write, lines: &Receiver<String>) {
    for mut line in lines {
        line.push('\n');
        if input.write_all(line.as_bytes()).and_then(|()| input.flush()).is_err() {
            return;
        }
    }
}

/// Reads messages until the program's output ends, or nobody wants them.
fn read_messages(output: impl Read, events: &SyncSender<Event>) {
    let mut output = BufReader::new(output);
    loop {
        let sent = match read_line(&mut output, MAX_MESSAGE) {
            Ok(line) if line.trim_ascii().is_empty() => Ok(()),
            Ok(line) => match message::parse(&line) {
                Some(messages) => messages.into_iter().try_for_each(|message| events.send(Event::Message(message))),
                None => events.send(Event::Junk(excerpt(&line, MAX_QUOTED))),
            },
            Err(end) => {
                let error = match end {
                    StreamEnd::Ended => ended_somehow(),
                    StreamEnd::TooLong => McpError::MessageTooLong,
                };
                // Where nobody listens any more the connection has ended anyway.
                let _ = events.send(Event::Failed(None, error));
                return;
            }
        };
        if sent.is_err() {
            return;
        }
    }
}

/// Logs what a server writes to stderr, and keeps the last line.
fn log(name: &str, errors: impl Read, last_words: &Mutex<String>) {
    let mut errors = BufReader::new(errors);
    let mut bytes = Vec::new();
    loop {
        bytes.clear();
        // A line that is longer comes in parts.
        let part = std::io::BufRead::read_until(&mut (&mut errors).take(MAX_LOG_LINE as u64), b'\n', &mut bytes);
        if part.is_err() || bytes.is_empty() {
            return;
        }
        let line = excerpt(&bytes, MAX_LOG_LINE);
        if line.is_empty() {
            continue;
        }
        tracing::debug!("MCP server {name}: {line}");
        *last_words.lock().unwrap_or_else(PoisonError::into_inner) = excerpt(line.as_bytes(), MAX_QUOTED);
    }
}
