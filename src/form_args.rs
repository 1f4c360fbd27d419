//! Flags that constrain the form of the generated text: a grammar, a JSON schema, or a regular expression. They have
//! llama.cpp's names.

use std::path::PathBuf;

use metal_attention::{Constraint, Generator};
use metal_attention_chat::ChatTemplate;
use metal_attention_grammar::{GrammarCompiler, ResponseFormat};

use crate::cli_error::CliError;
use crate::text_input::read_file;

/// The form of the generated text; at most one of the flags may be given.
#[derive(clap::Args)]
#[command(next_help_heading = "Form of the text")]
pub struct FormArgs {
    /// A grammar that the text follows: GBNF, whose rules have ::=, or Lark
    #[arg(long, value_name = "GRAMMAR", group = "form", allow_hyphen_values = true)]
    grammar: Option<String>,

    /// Read the grammar from a file
    #[arg(long, value_name = "FILE", group = "form")]
    grammar_file: Option<PathBuf>,

    /// A JSON schema that the text follows; @FILE: the schema in a file
    #[arg(short, long, value_name = "SCHEMA", group = "form")]
    json_schema: Option<String>,

    /// Read the JSON schema from a file
    #[arg(long, value_name = "FILE", group = "form")]
    json_schema_file: Option<PathBuf>,

    /// A regular expression that matches the whole text
    #[arg(long, value_name = "REGEX", group = "form", allow_hyphen_values = true)]
    regex: Option<String>,
}

impl FormArgs {
    /// The form that the flags give. `None`: no flag is given.
    pub fn form(&self) -> Result<Option<ResponseFormat>, CliError> {
        if let Some(text) = &self.grammar {
            return Ok(Some(ResponseFormat::grammar(text.clone())));
        }
        if let Some(path) = &self.grammar_file {
            return Ok(Some(ResponseFormat::grammar(read_file(path)?)));
        }
        if let Some(pattern) = &self.regex {
            return Ok(Some(ResponseFormat::Regex(pattern.clone())));
        }
        let text = match (&self.json_schema, &self.json_schema_file) {
            (Some(text), _) => match text.strip_prefix('@') {
                Some(path) => read_file(path.as_ref())?,
                None => text.clone(),
            },
            (None, Some(path)) => read_file(path)?,
            (None, None) => return Ok(None),
        };
        match serde_json::from_str(&text) {
            Ok(schema) => Ok(Some(ResponseFormat::JsonSchema { schema, strict: None })),
            Err(error) => Err(CliError::Usage(format!("the JSON schema is no JSON: {error}"))),
        }
    }
}

/// Constrains what `generator` generates next to `form`. `rendered` is the chat template and the prompt that it rendered, if
/// the text is an answer; `None` if it continues plain text. Parts of a JSON schema that are not enforced are logged.
pub fn constrain(
    generator: &mut Generator,
    grammars: &GrammarCompiler,
    form: &ResponseFormat,
    rendered: Option<(&ChatTemplate, &str)>,
) -> Result<(), CliError> {
    let mut left_out = Vec::new();
    let grammar = match rendered {
        Some((template, prompt)) => grammars.response_format(template, prompt, form, &mut left_out),
        None => grammars.raw(form, &mut left_out),
    };
    let grammar = grammar.map_err(|error| match form {
        ResponseFormat::JsonObject | ResponseFormat::JsonSchema { .. } => {
            CliError::Usage(format!("the JSON schema: {error}"))
        }
        ResponseFormat::Gbnf(_) | ResponseFormat::Lark(_) | ResponseFormat::Regex(_) | ResponseFormat::Choice(_) => {
            CliError::Usage(error.to_string())
        }
    })?;
    if !left_out.is_empty() {
        tracing::warn!("the JSON schema has what is not enforced: {}", left_out.join(", "));
    }
    generator.set_constraint(Some(Box::new(grammar) as Box<dyn Constraint>));
    Ok(())
}
