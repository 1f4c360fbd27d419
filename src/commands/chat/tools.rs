//! The tools of MCP servers in a conversation.

use std::path::Path;

use metal_attention_chat::{ChatTemplate, Tool};
use metal_attention_mcp::{Consent, McpError, OfferedTool, ServerReport, Toolbox};
use serde_json::{Map, Value};

use super::input::Input;
use super::note;
use crate::cli_error::CliError;
use crate::config::Config;
use crate::interrupt;
use crate::mcp_consent::{NO_TERMINAL, read_consent, shown};
use crate::metadata_text::{safe, safe_lines};
use crate::progress::Progress;
#[cfg(unix)]
use crate::termination;
use crate::{terminal, units};

/// Lines of a result that are shown.
const SHOWN_LINES: usize = 8;

/// Which servers' tools are offered to the model.
#[derive(clap::Args)]
pub struct ToolsArgs {
    /// Offer the model the tools of the configuration's MCP servers, or of those named; each call waits for consent
    #[arg(long, value_name = "SERVER", num_args = 0..=1, value_delimiter = ',')]
    tools: Option<Vec<String>>,

    /// File that names the MCP servers [default: metal-attention/config.toml in ~/.config]
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    config: Option<std::path::PathBuf>,
}

impl ToolsArgs {
    /// The names of the servers, and the configuration's file; `None`: no tools.
    pub fn wanted(&self) -> Option<Wanted<'_>> {
        Some(Wanted { servers: self.tools.as_ref()?, config: self.config.as_deref() })
    }
}

/// The servers whose tools are offered.
#[derive(Clone, Copy)]
pub struct Wanted<'a> {
    /// Their names; none: all.
    servers: &'a [String],
    /// The configuration's file.
    config: Option<&'a Path>,
}

/// The tools that a model may call.
pub struct Tools {
    toolbox: Toolbox,
    offered: Vec<OfferedTool>,
}

impl Tools {
    /// Starts the servers. Those that fail are reported, and the others are used.
    pub fn start(wanted: Wanted<'_>, template: &ChatTemplate) -> Result<Self, CliError> {
        if !template.knows_tools() {
            let message = "--tools: the model's chat template knows no tools, so it was not trained to call any; choose another \
                           model, or --chat-template with one that does";
            return Err(CliError::Usage(message.into()));
        }
        let toolbox = Config::read(wanted.config)?.toolbox(wanted.servers)?;
        let _asked = interrupt::ask();
        #[cfg(unix)]
        termination::end_servers()?;
        let starting = Progress::spinner("starting MCP servers");
        let reports = toolbox.connect(&interrupt::requested);
        drop(starting);
        if interrupt::requested() {
            return Err(CliError::Interrupted);
        }
        for report in &reports {
            match &report.outcome {
                Err(error) => note(&safe(&format!("note: the MCP server {}: {error}", report.name))),
                Ok((_, list)) => {
                    for problem in &list.problems {
                        note(&safe(&format!("note: the MCP server {}: {problem}", report.name)));
                    }
                }
            }
        }
        let mut tools = Self { toolbox, offered: ServerReport::offered(&reports) };
        while let Err(error) = template.tool_format().check_tools(&tools.functions()) {
            let left_out = tools.offered.remove(error.tool);
            note(&safe(&format!("note: the tool {}.{} is left out: {error}", left_out.server, left_out.tool.name)));
        }
        if tools.offered.is_empty() {
            return Err(CliError::General("--tools: no MCP server has a tool that the model can call".into()));
        }
        Ok(tools)
    }

    /// The tools as chat templates take them.
    pub fn functions(&self) -> Vec<Tool> {
        // A schema is an object, and a name is not empty.
        self.offered.iter().filter_map(|tool| Tool::try_from(tool.function()).ok()).collect()
    }

    /// The tools, as calls of them are shown.
    pub fn names(&self) -> String {
        let names = self.offered.iter().map(|tool| format!("{}.{}", tool.server, tool.tool.name));
        names.collect::<Vec<_>>().join(", ")
    }

    /// Calls a tool where the user consents. Returns the text of the message to the model.
    pub fn call(&self, name: &str, arguments: &str, input: &mut Input) -> Result<String, CliError> {
        let Some(tool) = self.offered.iter().find(|tool| tool.name == name) else {
            note(&safe(&format!("note: the model calls {name}, which is none of its tools")));
            return Ok(format!("There is no tool {name}."));
        };
        let Some(arguments) = object(arguments) else {
            let what = format!("note: the model calls {}.{} without a JSON object", tool.server, tool.tool.name);
            note(&safe(&what));
            return Ok("The tool was not called: its arguments are no JSON object.".into());
        };
        note(&shown(tool, &arguments));
        let is_allowed = self.toolbox.allows(&tool.server, &tool.tool.name);
        let consent = if is_allowed || interrupt::requested() { None } else { ask_consent(input)? };
        if interrupt::requested() || !(is_allowed || consent.is_some()) {
            note("not called");
            return Ok("The user does not want this call. Do not repeat it.".into());
        }
        let calling = Progress::spinner("calling the tool");
        let result = self.toolbox.call(&tool.server, &tool.tool.name, &arguments, consent, &interrupt::requested);
        drop(calling);
        Ok(match result {
            Ok(result) => {
                show(&result.text, result.is_error, input.is_terminal());
                result.for_model()
            }
            Err(McpError::Cancelled { .. }) => {
                note("the call was stopped");
                "The user stopped the call.".into()
            }
            Err(error) => {
                note(&safe_lines(&format!("the call failed: {error}")));
                format!("The call failed: {error}")
            }
        })
    }
}

/// Asks for consent to a call; `None`: the user refuses, or stdin and stdout are no terminal.
fn ask_consent(input: &mut Input) -> Result<Option<Consent>, CliError> {
    if !input.is_terminal() {
        note(NO_TERMINAL);
        return Ok(None);
    }
    // Ctrl-C and Ctrl-D are no consent.
    read_consent(|question| Ok(input.ask(question)?.unwrap_or_default()))
}

/// The arguments of a call; a model may write nothing where there are none.
fn object(arguments: &str) -> Option<Map<String, Value>> {
    if arguments.trim().is_empty() { Some(Map::new()) } else { serde_json::from_str(arguments).ok() }
}

/// Shows the beginning of a result; in a script only that it failed.
fn show(text: &str, is_error: bool, interactive: bool) {
    if is_error {
        note("the tool failed");
    }
    if !interactive {
        return;
    }
    let mut lines: Vec<_> = text.lines().take(SHOWN_LINES).map(|line| terminal::faint(&safe(line))).collect();
    if text.lines().nth(SHOWN_LINES).is_some() {
        lines.push(terminal::faint(&format!("... ({})", units::bytes(text.len() as u64))));
    }
    note(&lines.join("\n"));
}
