//! `launch`: starts a coding tool (Claude Code, Codex, ...) that uses a model of this machine.
//!
//! `server.rs` finds a server of this program or starts one, which ends with the tool. `tools.rs` lists the tools with the
//! variables and arguments that they get. This file starts the tool and waits for it.

mod server;
mod tools;

use std::io::Write;
use std::process::{Command, ExitStatus};

use crate::cli_error::CliError;
use crate::interrupt;
use crate::model_args::NamedModelArgs;
use server::{FoundServer, ServerRequirements};
use tools::{CodingTool, TOOLS, ToolCommand};

/// The smallest context for a coding tool, in tokens: its instructions alone take half of it.
const MIN_N_CTX: usize = 32768;

const AFTER_HELP: &str = "\
Tools: claude (Claude Code), codex, opencode, qwen (Qwen Code), goose, aider. They have to be installed. A tool gets the \
server's address and the model by variables and arguments; its own files are not changed.

The server is that of --server, else the one at http://127.0.0.1:8080 if it has the model, else one that is started here and \
ends with the tool. It needs a context of 32768 tokens at least.

Examples:
  metal-attention launch claude qwen3-coder:30b
  metal-attention launch codex -m model.gguf -- exec \"Explain this repository\"
  metal-attention launch opencode --server http://192.168.0.2:8080
  metal-attention launch claude --print";

const MODEL_HELP: &str = "\
The model: a name that the server or the configuration has for one, a GGUF file (any part of a split one), a well-known name \
such as llama3.2, or a name on the Hugging Face hub, OWNER/REPO[:TYPE|:FILE]. Default: the model that METAL_ATTENTION_MODEL \
names, else the only one of the server or the configuration";

/// Start a coding tool that uses a model of this machine
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP, mut_arg("model", |arg| arg.help(MODEL_HELP)))]
pub struct Args {
    /// The tool: claude, codex, opencode, qwen, goose or aider
    #[arg(value_name = "TOOL", value_parser = named_tool)]
    tool: &'static CodingTool,

    #[command(flatten)]
    model: NamedModelArgs,

    /// Address of the server to use
    #[arg(long, value_name = "URL")]
    server: Option<String>,

    /// Key of the server
    #[arg(long, value_name = "KEY", env = "METAL_ATTENTION_API_KEY", hide_env_values = true)]
    api_key: Option<String>,

    /// Length of the context of a server that is started here, in tokens
    #[arg(short = 'c', long, value_name = "N", default_value_t = MIN_N_CTX, value_parser = long_enough)]
    ctx_size: usize,

    /// Print the command with its variables, and start nothing
    #[arg(long)]
    print: bool,

    /// Arguments for the tool
    #[arg(last = true, value_name = "ARGUMENTS")]
    arguments: Vec<String>,
}

/// Runs the command. Ends the process with the tool's exit code.
pub fn run(args: &Args) -> Result<(), CliError> {
    let requirements = ServerRequirements {
        server: args.server.as_deref(),
        model: &args.model,
        key: args.api_key.as_deref().filter(|key| !key.is_empty()),
        n_ctx: args.ctx_size,
    };
    if args.print {
        return print(args, &requirements);
    }
    let program = which::which(args.tool.program).map_err(|_| {
        CliError::General(format!(
            "{} is not installed: there is no program {} in the folders of PATH; to install it: {}",
            args.tool.title, args.tool.program, args.tool.install
        ))
    })?;
    let (target, server) = match server::find(&requirements)? {
        FoundServer::Running(target) => (target, None),
        FoundServer::None => {
            let (target, server) = server::start(&requirements)?;
            (target, Some(server))
        }
    };
    let ToolCommand { variables, arguments, .. } = args.tool.command(&target, &args.arguments);
    // From here on Ctrl-C is for the tool, which gets the signal, too.
    interrupt::ignore_ctrl_c();
    let mut command = Command::new(&program);
    command.args(arguments).envs(variables);
    let status = run_tool(&mut command);
    drop(server);
    match status {
        Ok(status) => std::process::exit(exit_code(status)),
        Err(error) => Err(CliError::General(format!("cannot run {}: {error}", program.display()))),
    }
}

/// Prints the tool's command. If no server runs, the command that starts one comes first.
fn print(args: &Args, requirements: &ServerRequirements<'_>) -> Result<(), CliError> {
    let mut out = std::io::stdout();
    let target = match server::find(requirements)? {
        FoundServer::Running(target) => target,
        FoundServer::None => {
            let port = server::free_port()?;
            let start = requirements.start(port)?;
            let words: Vec<_> = start.arguments.iter().map(|word| quoted(&word.to_string_lossy())).collect();
            writeln!(out, "metal-attention {} &", words.join(" ")).map_err(CliError::stdout)?;
            requirements.target(format!("http://127.0.0.1:{port}"), start.model, requirements.n_ctx)
        }
    };
    let ToolCommand { variables, program, arguments } = args.tool.command(&target, &args.arguments);
    let mut words: Vec<_> = variables.iter().map(|(name, value)| format!("{name}={}", quoted(value))).collect();
    words.push(program.to_owned());
    words.extend(arguments.iter().map(|argument| quoted(argument)));
    writeln!(out, "{}", words.join(" ")).map_err(CliError::stdout)
}

/// A word, quoted for a shell if necessary.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=@%+,".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
}

/// Runs the tool to its end. SIGTERM is passed on to it.
#[cfg(unix)]
fn run_tool(command: &mut Command) -> std::io::Result<ExitStatus> {
    use nix::sys::signal::{Signal, kill};
    use nix::unistd::Pid;
    use tokio::signal::unix::{SignalKind, signal};

    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
        // Before the tool starts, so that no signal in between ends this process alone.
        let mut terminate = signal(SignalKind::terminate())?;
        let mut tool = command.spawn()?;
        let id = Pid::from_raw(tool.id() as i32);
        let mut end = tokio::task::spawn_blocking(move || tool.wait());
        loop {
            tokio::select! {
                ended = &mut end => return ended?,
                // The error is ignored: the tool may have ended just now.
                _ = terminate.recv() => drop(kill(id, Signal::SIGTERM)),
            }
        }
    })
}

/// Runs the tool to its end.
#[cfg(not(unix))]
fn run_tool(command: &mut Command) -> std::io::Result<ExitStatus> {
    command.status()
}

/// The exit code of a tool; 128 + signal if a signal ended it, as shells report it.
fn exit_code(status: ExitStatus) -> i32 {
    #[cfg(unix)]
    if let Some(signal) = std::os::unix::process::ExitStatusExt::signal(&status) {
        return 128 + signal;
    }
    status.code().unwrap_or(1)
}

/// Parses the name of a tool.
fn named_tool(name: &str) -> Result<&'static CodingTool, String> {
    tools::tool(name).ok_or_else(|| {
        let names: Vec<_> = TOOLS.iter().map(|tool| tool.name).collect();
        format!("the tools are {}", names.join(", "))
    })
}

/// Parses the length of a context.
fn long_enough(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if n >= MIN_N_CTX => Ok(n),
        Ok(_) => Err(format!("a coding tool needs {MIN_N_CTX} at least")),
        Err(_) => Err("expected a whole number".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_for_a_shell() {
        for (word, expected) in [
            ("http://127.0.0.1:8080/v1", "http://127.0.0.1:8080/v1"),
            ("", "''"),
            ("a b", "'a b'"),
            ("it's", "'it'\\''s'"),
        ] {
            assert_eq!(quoted(word), expected);
        }
    }

    #[test]
    fn the_help_names_every_tool() {
        for tool in TOOLS {
            assert!(AFTER_HELP.contains(tool.name), "{}", tool.name);
        }
        assert!(AFTER_HELP.contains(&MIN_N_CTX.to_string()));
    }
}
