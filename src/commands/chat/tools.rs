//! The tools of MCP servers in a conversation: starting servers, offering tools to the model, consent, and calls.

use std::path::Path;

use metal_attention_chat::{ChatTemplate, Tool};
use metal_attention_mcp::{Consent, McpError, OfferedTool, ServerReport, Toolbox};
use serde_json::{Map, Value};

use super::input::UserInput;
use super::note;
use crate::cli_error::CliError;
use crate::config::Config;
use crate::interrupt;
use crate::mcp_consent::{NO_TERMINAL, read_consent, shown};
use crate::metadata_text::{safe, safe_lines};
use crate::progress::ProgressLine;
#[cfg(unix)]
use crate::termination;
use crate::{terminal, units};

/// The number of lines of a result that are shown.
const SHOWN_LINES: usize = 8;

/// The flags that choose servers whose tools the model may call.
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
    /// The servers that the flags name. `None`: the model gets no tools.
    pub fn servers(&self) -> Option<ToolServers<'_>> {
        Some(ToolServers { servers: self.tools.as_ref()?, config: self.config.as_deref() })
    }
}

/// The servers whose tools the model may call.
#[derive(Clone, Copy)]
pub struct ToolServers<'a> {
    /// The names of the servers. Empty: all servers of the configuration.
    servers: &'a [String],
    /// The path of the configuration file. `None`: the user's.
    config: Option<&'a Path>,
}

/// The tools that the model may call.
pub struct McpTools {
    /// The connections to the servers.
    toolbox: Toolbox,
    /// The tools, with the names that the model calls them by.
    offered: Vec<OfferedTool>,
}

impl McpTools {
    /// Starts the servers and lists their tools. Servers that fail are reported in a note. An error if the chat template has no
    /// tools, or no tool is left.
    pub fn start(servers: ToolServers<'_>, template: &ChatTemplate) -> Result<Self, CliError> {
        if !template.knows_tools() {
            let message = "--tools: the model's chat template knows no tools, so it was not trained to call any; choose another \
                           model, or --chat-template with one that does";
            return Err(CliError::Usage(message.into()));
        }
        let toolbox = Config::read(servers.config)?.toolbox(servers.servers)?;
        let _ctrl_c = interrupt::cancel_on_ctrl_c();
        #[cfg(unix)]
        termination::end_servers()?;
        let starting = ProgressLine::spinner("starting MCP servers");
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

    /// The tools in the form of chat templates.
    pub fn functions(&self) -> Vec<Tool> {
        // Conversion fails for a schema that is no object and for an empty name, which the MCP client has refused already.
        self.offered.iter().filter_map(|tool| Tool::try_from(tool.function()).ok()).collect()
    }

    /// The tools as `SERVER.TOOL`, separated by commas.
    pub fn names(&self) -> String {
        let names = self.offered.iter().map(|tool| format!("{}.{}", tool.server, tool.tool.name));
        names.collect::<Vec<_>>().join(", ")
    }

    /// Calls a tool if it is allowed or the user consents. Returns the text for the model: the result, or why there is none.
    pub fn call(&self, name: &str, arguments: &str, input: &mut UserInput) -> Result<String, CliError> {
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
        let calling = ProgressLine::spinner("calling the tool");
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

/// Asks the user for consent to a call. `None`: the user refuses, or there is no terminal.
fn ask_consent(input: &mut UserInput) -> Result<Option<Consent>, CliError> {
    if !input.is_terminal() {
        note(NO_TERMINAL);
        return Ok(None);
    }
    // Ctrl-C and Ctrl-D count as a refusal.
    read_consent(|question| Ok(input.ask(question)?.unwrap_or_default()))
}

/// Parses the arguments of a call. A model may write nothing if a tool has no arguments.
fn object(arguments: &str) -> Option<Map<String, Value>> {
    if arguments.trim().is_empty() { Some(Map::new()) } else { serde_json::from_str(arguments).ok() }
}

/// Prints the first lines of a result; without a terminal only that the call failed.
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
