//! `mcp`: lists the MCP servers of the configuration, and calls their tools by hand.

use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;

use metal_attention_mcp::{Consent, OfferedTool, ServerReport, Toolbox};
use serde_json::{Map, Value, json};

use crate::cli_error::CliError;
use crate::config::Config;
use crate::interrupt;
use crate::mcp_consent::{NO_TERMINAL, read_consent, shown};
use crate::metadata_text::{safe, safe_json, safe_lines};
#[cfg(unix)]
use crate::termination;

const AFTER_HELP: &str = "\
The servers are those of [mcp.servers.NAME] in the configuration file; docs/mcp.md describes it. Nothing is called \
without consent: `chat --tools` and `mcp test` ask before each call.

Examples:
  metal-attention mcp list
  metal-attention mcp test files
  metal-attention mcp test files read_file --arguments '{\"path\": \"notes.txt\"}'";

/// Show and try the MCP servers whose tools models may call
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP, arg_required_else_help = true)]
pub struct Args {
    #[command(subcommand)]
    action: McpCommand,

    /// File that names the servers [default: metal-attention/config.toml in ~/.config]
    #[arg(long, value_name = "FILE", global = true, value_hint = clap::ValueHint::FilePath)]
    config: Option<PathBuf>,
}

// The subcommands of `mcp`.
#[derive(clap::Subcommand)]
enum McpCommand {
    /// Start all servers, and list their tools
    List {
        /// Write one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Start a server, list its tools, and call one
    Test {
        /// The server's name in the configuration
        #[arg(value_name = "SERVER")]
        server: String,
        /// The tool to call
        #[arg(value_name = "TOOL")]
        tool: Option<String>,
        /// The tool's arguments, a JSON object
        #[arg(long, value_name = "JSON", requires = "tool", default_value = "{}")]
        arguments: String,
    },
}

/// Runs the command.
pub fn run(args: &Args) -> Result<(), CliError> {
    let config = Config::read(args.config.as_deref())?;
    let _ctrl_c = interrupt::cancel_on_ctrl_c();
    #[cfg(unix)]
    termination::end_servers()?;
    match &args.action {
        McpCommand::List { json } => list(&config.toolbox(&[])?, *json),
        McpCommand::Test { server, tool: None, .. } => test(&config.toolbox(std::slice::from_ref(server))?).map(drop),
        McpCommand::Test { server, tool: Some(tool), arguments } => {
            let arguments: Map<String, Value> = serde_json::from_str(arguments)
                .map_err(|e| CliError::Usage(format!("--arguments takes a JSON object: {e}")))?;
            let toolbox = config.toolbox(std::slice::from_ref(server))?;
            let tools = test(&toolbox)?;
            let found = tools.iter().find(|offered| offered.tool.name == *tool);
            let found =
                found.ok_or_else(|| CliError::Usage(format!("the MCP server {server} has no tool {tool:?}")))?;
            call(&toolbox, found, &arguments)
        }
    }
}

/// Starts the servers. After Ctrl-C returns an error.
fn connect(toolbox: &Toolbox) -> Result<Vec<ServerReport>, CliError> {
    let reports = toolbox.connect(&interrupt::requested);
    if interrupt::requested() { Err(CliError::Interrupted) } else { Ok(reports) }
}

/// `mcp list`.
fn list(toolbox: &Toolbox, json: bool) -> Result<(), CliError> {
    let reports = connect(toolbox)?;
    let mut out = io::stdout().lock();
    let written = if json {
        let servers: Vec<_> = reports.iter().map(|report| server_json(toolbox, report)).collect();
        writeln!(out, "{}", safe_json(&json!({"servers": servers})))
    } else {
        reports.iter().try_for_each(|report| write_server(toolbox, report, &mut out))
    };
    written.and_then(|()| out.flush()).map_err(CliError::stdout)
}

/// Starts the only server and prints its description and tools. Returns its tools.
fn test(toolbox: &Toolbox) -> Result<Vec<OfferedTool>, CliError> {
    let reports = connect(toolbox)?;
    let mut out = io::stdout().lock();
    for report in &reports {
        if let Err(error) = &report.outcome {
            return Err(CliError::General(format!("the MCP server {}: {error}", report.name)));
        }
        write_server(toolbox, report, &mut out).and_then(|()| out.flush()).map_err(CliError::stdout)?;
    }
    Ok(ServerReport::offered(&reports))
}

/// Calls a tool if the user consents, and prints its result.
fn call(toolbox: &Toolbox, tool: &OfferedTool, arguments: &Map<String, Value>) -> Result<(), CliError> {
    let (server, name) = (&tool.server, &tool.tool.name);
    // An error is ignored: if stderr is closed, the question that follows gets no answer either.
    let _ = writeln!(io::stderr(), "{}", shown(tool, arguments));
    let consent = if toolbox.allows(server, name) { None } else { Some(ask_consent()?) };
    let result = toolbox.call(server, name, arguments, consent, &interrupt::requested);
    if interrupt::requested() {
        return Err(CliError::Interrupted);
    }
    let result = result.map_err(|error| CliError::General(format!("the MCP server {server}: {error}")))?;
    if result.is_error {
        return Err(CliError::General(format!("the tool {name} failed: {}", result.text)));
    }
    writeln!(io::stdout(), "{}", safe_lines(&result.text)).map_err(CliError::stdout)
}

/// Asks for consent on stderr, and reads the answer from the terminal. Ctrl-C ends the process, because reading a line cannot
/// be cancelled.
fn ask_consent() -> Result<Consent, CliError> {
    if !io::stdin().is_terminal() {
        return Err(CliError::Usage(NO_TERMINAL.into()));
    }
    let _at_once = interrupt::exit_on_ctrl_c(None);
    let consent = read_consent(|question| {
        // Stderr is not locked, because the handler of Ctrl-C writes to it.
        let _ = write!(io::stderr(), "{question}");
        let mut answer = String::new();
        io::stdin().read_line(&mut answer).map_err(|e| CliError::General(format!("cannot read the answer: {e}")))?;
        Ok(answer)
    })?;
    consent.ok_or_else(|| CliError::General("not called".into()))
}

/// Writes a server's state and tools as text.
fn write_server(toolbox: &Toolbox, report: &ServerReport, out: &mut impl Write) -> io::Result<()> {
    writeln!(out, "{}  {}", safe(&report.name), safe(&report.target))?;
    let (info, list) = match &report.outcome {
        Ok(outcome) => outcome,
        Err(error) => return writeln!(out, "  failed: {}", safe(&error.to_string())),
    };
    let names = [&info.name, &info.version].map(|name| safe(name)).join(" ");
    writeln!(out, "  ready: {}, protocol {}", names.trim(), info.protocol)?;
    let width = list.tools.iter().map(|tool| safe(&tool.name).len()).max().unwrap_or(0);
    for tool in &list.tools {
        let first = safe(tool.description.lines().next().unwrap_or_default());
        let allowed = if toolbox.allows(&report.name, &tool.name) { " (allowed)" } else { "" };
        let line = format!("  {:width$}  {first}{allowed}", safe(&tool.name));
        writeln!(out, "{}", line.trim_end())?;
    }
    list.problems.iter().try_for_each(|problem| writeln!(out, "  note: {}", safe(problem)))
}

/// A server's state and tools as JSON.
fn server_json(toolbox: &Toolbox, report: &ServerReport) -> Value {
    let mut server = json!({"name": report.name, "target": report.target});
    match &report.outcome {
        Err(error) => {
            server["state"] = "failed".into();
            server["error"] = error.to_string().into();
        }
        Ok((info, list)) => {
            let tools = list.tools.iter().map(|tool| {
                json!({
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.parameters,
                    "allowed": toolbox.allows(&report.name, &tool.name),
                })
            });
            server["state"] = "ready".into();
            server["server"] = json!({"name": info.name, "version": info.version});
            server["protocol"] = info.protocol.into();
            server["tools"] = tools.collect();
            server["problems"] = json!(list.problems);
        }
    }
    server
}
