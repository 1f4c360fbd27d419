//! Flags for what `serve` shows at `/`.

use std::path::PathBuf;

use metal_attention_server::http::Page;

use crate::cli_error::CliError;

/// What is at `/`.
#[derive(clap::Args)]
pub struct PageArgs {
    /// Folder whose files are served at /, its index.html first, in the place of the built-in page
    #[arg(long, value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    page: Option<PathBuf>,

    /// Serve no page
    #[arg(long, conflicts_with = "page")]
    no_page: bool,
}

impl PageArgs {
    /// What is at `/`; an error if the folder has no `index.html`.
    pub fn page(&self) -> Result<Page, CliError> {
        match &self.page {
            None if self.no_page => Ok(Page::None),
            None => Ok(Page::BuiltIn),
            Some(folder) if folder.join("index.html").is_file() => Ok(Page::Folder(folder.clone())),
            Some(folder) => {
                Err(CliError::Usage(format!("--page {}: there is no index.html in this folder", folder.display())))
            }
        }
    }
}
