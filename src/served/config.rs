//! The models of the configuration file, for `serve`.
//!
//! ```toml
//! [defaults]
//! context = 16384
//! keep-alive = "10m"
//!
//! [models.coder]
//! model = "qwen3-coder:30b"
//! aliases = ["claude-*", "gpt-5-codex"]
//! system = "You are a careful programmer."
//! sampling = { temperature = 0.7, top_p = 0.8 }
//! ```

use std::path::PathBuf;

use metal_attention::sampling::NumberOption;
use metal_attention_server::http::{KeepAlive, ModelConfig, ModelDefaults, SamplingFields};
use serde::Deserialize;
use serde::de::{Deserializer, Error};

use super::{ServedModel, ServingSetup};
use crate::cli_error::CliError;
use crate::config::Config;
use crate::model_args::ModelArgs;

/// The values for models that do not set them: the section `[defaults]`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub struct Defaults {
    /// The length of the context in tokens.
    context: Option<usize>,
    /// The device, in the form of `--device`.
    device: Option<String>,
    /// How long a model stays loaded after a request.
    keep_alive: Option<KeepAlive>,
    /// The system prompt of conversations without one.
    system: Option<String>,
    /// Sampling options.
    sampling: Sampling,
    /// Strings that end an answer.
    stop: Vec<String>,
    /// The largest number of tokens of an answer.
    max_tokens: Option<usize>,
    /// Whether conversations that do not fit into the context lose their oldest turns.
    context_shift: Option<bool>,
}

/// One model: a section `[models.NAME]`. `None` stands for the value of [`Defaults`].
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct ModelSection {
    /// A file, a well-known name, or a name on the hub, in the form of `-m`.
    model: PathBuf,
    /// Further names; `*` matches any text.
    #[serde(default)]
    aliases: Vec<String>,
    /// Whether the model is loaded at the start of the server and stays loaded.
    #[serde(default)]
    resident: bool,
    /// A file with a chat template that replaces the model's.
    chat_template: Option<PathBuf>,
    /// The file that encodes pictures; else the one beside the model.
    mmproj: Option<PathBuf>,
    /// See [`Defaults`].
    context: Option<usize>,
    /// See [`Defaults`].
    device: Option<String>,
    /// See [`Defaults`].
    keep_alive: Option<KeepAlive>,
    /// See [`Defaults`].
    system: Option<String>,
    /// See [`Defaults`]. It replaces the defaults as a whole.
    sampling: Option<Sampling>,
    /// See [`Defaults`].
    stop: Option<Vec<String>>,
    /// See [`Defaults`].
    max_tokens: Option<usize>,
    /// See [`Defaults`].
    context_shift: Option<bool>,
}

/// Sampling options. Unknown ones are an error here, although a request may have them.
#[derive(Debug, Clone, Default)]
struct Sampling(SamplingFields);

impl<'de> Deserialize<'de> for Sampling {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let table = toml::Table::deserialize(deserializer)?;
        let is_known =
            |name: &str| NumberOption::find(name).is_some() || matches!(name, "samplers" | "dry_sequence_breakers");
        if let Some(name) = table.keys().find(|name| !is_known(name)) {
            return Err(D::Error::custom(format!("unknown option `{name}` of sampling")));
        }
        table.try_into().map(Self).map_err(D::Error::custom)
    }
}

impl Config {
    /// The number of models in the file.
    pub fn n_models(&self) -> usize {
        self.models.len()
    }

    /// The main names of the models.
    pub fn names(&self) -> Vec<&str> {
        self.models.keys().map(String::as_str).collect()
    }

    /// The models for the server. `args` say how files are read, `setup` how models run unless the file sets it.
    pub fn models(self, args: &ModelArgs, setup: &ServingSetup) -> Result<Vec<ModelConfig>, CliError> {
        let defaults = &self.defaults;
        let model = |(name, section): (String, ModelSection)| {
            let wrong = |why: String| CliError::Usage(format!("the model {name:?} of the configuration: {why}"));
            let n_ctx = section.context.or(defaults.context);
            let device = section.device.as_deref().or(defaults.device.as_deref());
            let engine = setup.engine.with(n_ctx, device).map_err(wrong)?;
            let chat_template = section.chat_template.or_else(|| setup.chat_template.clone());
            let mut setup = ServingSetup { engine, chat_template, ..setup.clone() };
            setup.pictures.encoder.mmproj = section.mmproj;
            let args = args.of_file(section.model);
            let source = if section.resident {
                ServedModel::resident(args, setup)?
            } else {
                ServedModel::on_demand(args, setup)
            };
            let keep_alive = section.keep_alive.or(defaults.keep_alive);
            Ok(ModelConfig {
                names: [name].into_iter().chain(section.aliases).collect(),
                source: Box::new(source),
                resident: section.resident,
                keep_alive,
                defaults: ModelDefaults {
                    system: section.system.or_else(|| defaults.system.clone()),
                    sampling: section.sampling.unwrap_or_else(|| defaults.sampling.clone()).0,
                    stop: section.stop.unwrap_or_else(|| defaults.stop.clone()),
                    max_tokens: section.max_tokens.or(defaults.max_tokens),
                    context_shift: section.context_shift.or(defaults.context_shift),
                },
            })
        };
        self.models.into_iter().map(model).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_the_wrong_field() {
        let read = |text: &str| toml::from_str::<Config>(text).map_err(|error| error.to_string());
        let good = "[defaults]\ncontext = 8192\ncontext-shift = true\nkeep-alive = \"1h\"\n[models.a]\nmodel = \"a.gguf\"\naliases = [\"b-*\"]\n\
                    sampling = { temperature = 0.5, top_k = 20 }\nkeep-alive = -1\n";
        let config = read(good).unwrap();
        assert_eq!(config.models["a"].keep_alive, Some(KeepAlive::Forever));
        assert!(config.models["a"].sampling.is_some() && config.defaults.context == Some(8192));
        assert_eq!((config.defaults.context_shift, config.models["a"].context_shift), (Some(true), None));
        for (text, why) in [
            ("[models.a]\n", "missing field `model`"),
            ("[models.a]\nmodel = \"a\"\ncontxt = 1\n", "unknown field `contxt`"),
            ("[defaults]\nkeep-alive = \"soon\"\n", "\"soon\" is no time"),
            ("[models.a]\nmodel = 1\n", "expected"),
            ("[default]\n", "unknown field `default`"),
            ("[defaults]\nsampling = { temprature = 1 }\n", "unknown option `temprature`"),
            ("[defaults]\nsampling = { temperature = \"hot\" }\n", "invalid type: string"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }
}
