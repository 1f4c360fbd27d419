//! The configuration file (TOML): named models, defaults for all of them, and MCP servers.
//!
//! `served/config.rs` turns its models into served models, `mcp_config.rs` its servers into MCP servers.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::cli_error::CliError;
use crate::mcp_config::McpSection;
use crate::served::config::{Defaults, ModelSection};

/// The contents of the configuration file.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub struct Config {
    /// The values for models that do not set them.
    pub defaults: Defaults,
    /// The models, by their main names.
    pub models: BTreeMap<String, ModelSection>,
    /// The MCP servers.
    pub mcp: McpSection,
    /// The path of the file. `None`: no file was read.
    #[serde(skip)]
    pub path: Option<PathBuf>,
}

impl Config {
    /// Reads the file at `path`. Without a path: the user's file if it exists, else an empty configuration.
    pub fn read(path: Option<&Path>) -> Result<Self, CliError> {
        let given = path.map(Path::to_owned);
        let Some(path) = given.or_else(|| user_file().filter(|path| path.is_file())) else {
            return Ok(Self::default());
        };
        let text = std::fs::read_to_string(&path)
            .map_err(|e| CliError::General(format!("cannot read the configuration {}: {e}", path.display())))?;
        let config: Self = toml::from_str(&text).map_err(|e| {
            CliError::Usage(format!("the configuration {}: {}", path.display(), e.to_string().trim_end()))
        })?;
        Ok(Self { path: Some(path), ..config })
    }
}

/// `metal-attention/config.toml` in the user's configuration folder (`$XDG_CONFIG_HOME`, else `~/.config`). `None`: the user
/// has no home.
fn user_file() -> Option<PathBuf> {
    let folder = std::env::var_os("XDG_CONFIG_HOME").filter(|folder| !folder.is_empty()).map(PathBuf::from);
    let folder = folder.or_else(|| Some(std::env::home_dir()?.join(".config")))?;
    Some(folder.join("metal-attention/config.toml"))
}
