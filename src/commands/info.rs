//! `info`: shows the contents of a model file: metadata, tensors, sizes, tokenizer and memory.

use std::borrow::Cow;
use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;

use metal_attention::gguf::{GgufFile, Tensor};
use metal_attention::speculation::{DraftFile, DrafterKind, DrafterMemory};
use metal_attention::tokenizer::{Tokenizer, TokenizerOptions};
use metal_attention::{Device, Error};
use metal_attention_model::{LoadedModel, ModelSpec};
use serde_json::json;

use crate::cli_error::CliError;
use crate::completion;
use crate::metadata_text::{self, safe_lines};
use crate::model_args::NamedModelArgs;
use crate::model_summary::{MemorySummary, ModelSizes, TensorCounts, TokenizerSummary};
use crate::units;

const AFTER_HELP: &str = "\
With --json stdout gets one object with the keys
  file, file_bytes, gguf_version, parts, architecture, name, runnable, problem (why it cannot be run, or null), \
  parameters, tensor_bytes, bits_per_weight, tensor_types (list of type, tensors, bytes), sizes (n_layer, n_embd, \
  n_head, n_head_kv, head_dim, n_ff, n_expert, n_expert_used, n_vocab, n_ctx_train, sliding_window, rope_layout, rope_freq_base, \
  rope_scaling, rope_freqs), tokenizer (model, pre, n_tokens, special_tokens, add_bos, add_eos, chat_template), memory (list of \
  n_ctx, weights_bytes, kv_cache_bytes, state_bytes, drafter_bytes, total_bytes; the KV cache in F16; the drafter is that of \
  --model-draft, or the prediction heads in the file)
and, if requested, metadata and tensors. Values that the file does not have are null.

Examples:
  metal-attention info model.gguf
  metal-attention info llama3.2 --json --tensors
  metal-attention info big.gguf --model-draft small.gguf
  metal-attention info -m model.gguf --chat-template > template.jinja";

/// Show what is in a model file
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
#[allow(clippy::struct_excessive_bools)] // each is a separate flag
pub struct Args {
    #[command(flatten)]
    model: NamedModelArgs,

    /// Count the memory of this drafter, too: the file or name, as of -m, of a smaller model, or of a drafter made for the model
    #[arg(long, alias = "draft", value_name = "MODEL", add = completion::models::usable())]
    model_draft: Option<PathBuf>,

    /// Show all metadata (long values shortened)
    #[arg(long)]
    metadata: bool,

    /// Show every tensor
    #[arg(long)]
    tensors: bool,

    /// Print the chat template, whole and nothing else
    #[arg(long, conflicts_with_all = ["metadata", "tensors", "json"])]
    chat_template: bool,

    /// Write one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<(), CliError> {
    let file = args.model.open_gguf()?;
    let mut out = io::stdout().lock();
    if args.chat_template {
        let template = file.metadata().str("tokenizer.chat_template").map_err(Error::from)?;
        let none = || CliError::General(format!("{} has no chat template", args.model.name()));
        let template = template.ok_or_else(none)?;
        // In a file or pipe the template is unchanged.
        let shown = if out.is_terminal() { Cow::Owned(safe_lines(template)) } else { Cow::Borrowed(template) };
        return writeln!(out, "{shown}").map_err(CliError::stdout);
    }
    let draft = args.model_draft.clone().map(|path| args.model.of_file(path).open_draft()).transpose()?;
    let info = Info::of(&file, draft.as_ref())?;
    let done = if args.json { info.write_json(args, &mut out) } else { info.write_text(args, &mut out) };
    done.and_then(|()| out.flush()).map_err(CliError::stdout)
}

/// The description of a model file.
struct Info<'a> {
    /// The file.
    file: &'a GgufFile,
    /// The architecture that the metadata name.
    architecture: Option<&'a str>,
    /// The model's name in the metadata.
    name: Option<&'a str>,
    /// The reason why the model cannot be run. `None`: it can.
    problem: Option<String>,
    /// The tensors, counted by type.
    counts: TensorCounts,
    /// The hyperparameters.
    sizes: ModelSizes,
    /// The tokenizer. `None`: the file has no vocabulary.
    tokenizer: Option<TokenizerSummary>,
    /// The memory at several lengths of the context. Empty if the model cannot be run.
    memory: Vec<MemorySummary>,
}

impl<'a> Info<'a> {
    /// Describes `file`, with the drafter of `draft`. An error if that is made for another model.
    fn of(file: &'a GgufFile, draft: Option<&DraftFile>) -> Result<Self, Error> {
        let metadata = file.metadata();
        let spec = ModelSpec::from_gguf(file);
        let problem = match &spec {
            _ if file.tensors().is_empty() => Some("it has a vocabulary, but no weights".into()),
            Ok(spec) => unusable(file, spec),
            Err(e) => Some(e.to_string()),
        };
        let text = |key| metadata.str(key).ok().flatten();
        let architecture = text("general.architecture");
        let memory = match &spec {
            Ok(spec) if !file.tensors().is_empty() => {
                let drafter = DrafterMemory::of(DrafterKind::Auto, (file, spec), draft, &Device::Auto, None)?;
                MemorySummary::at_several_contexts(file, spec, &drafter)
            }
            _ => Vec::new(),
        };
        Ok(Self {
            file,
            architecture,
            name: text("general.name"),
            problem,
            counts: TensorCounts::of(file),
            sizes: match &spec {
                Ok(spec) => ModelSizes::from_spec(spec, file.tensor("rope_freqs.weight").is_some()),
                Err(_) => ModelSizes::from_metadata(metadata, architecture),
            },
            tokenizer: TokenizerSummary::of(metadata),
            memory,
        })
    }

    /// Writes the JSON object of `--json`.
    fn write_json(&self, args: &Args, out: &mut impl Write) -> io::Result<()> {
        let mut info = json!({
            "file": args.model.name(),
            "file_bytes": self.file.file_size(),
            "gguf_version": self.file.version(),
            "parts": self.file.n_parts(),
            "architecture": self.architecture,
            "name": self.name,
            "runnable": self.problem.is_none(),
            "problem": self.problem,
            "parameters": self.counts.parameters,
            "tensor_bytes": self.file.tensor_bytes(),
            "bits_per_weight": self.counts.bits_per_weight(),
            "tensor_types": self.counts.types,
            "sizes": self.sizes,
            "tokenizer": self.tokenizer,
            "memory": self.memory,
        });
        if args.metadata {
            let pairs = self.file.metadata().iter();
            info["metadata"] = pairs.map(|(key, value)| (key.to_owned(), metadata_text::json(value))).collect();
        }
        if args.tensors {
            let tensor = |t: &Tensor| json!({"name": t.name(), "type": t.ty().name(), "shape": t.shape(), "bytes": t.bytes().len()});
            info["tensors"] = self.file.tensors().iter().map(tensor).collect();
        }
        writeln!(out, "{}", metadata_text::safe_json(&info))
    }

    /// Writes the description as text.
    fn write_text(&self, args: &Args, out: &mut impl Write) -> io::Result<()> {
        let mut line = |what: &str, value: String| writeln!(out, "{what:<18}  {value}");
        let parts = if self.file.n_parts() > 1 { format!(" in {} parts", self.file.n_parts()) } else { String::new() };
        let size = units::bytes(self.file.file_size());
        line("file", format!("{}, {size}{parts}, GGUF version {}", args.model.name(), self.file.version()))?;
        line("architecture", self.architecture.map_or("not given".into(), metadata_text::safe))?;
        if let Some(name) = self.name {
            line("name", metadata_text::safe(name))?;
        }
        line(
            "runs here",
            self.problem.as_ref().map_or("yes".into(), |why| format!("no: {}", metadata_text::safe(why))),
        )?;
        if let Some(bits) = self.counts.bits_per_weight() {
            let (n, bytes) = (self.counts.parameters, units::bytes(self.file.tensor_bytes()));
            line("parameters", format!("{}, {bytes}, {bits:.2} bits per weight", grouped(n)))?;
        }
        for t in &self.counts.types {
            line("", format!("{:<7} {:>12} {:>10}", t.ty, units::count(t.tensors, "tensor"), units::bytes(t.bytes)))?;
        }
        for (what, value) in self.sizes.lines() {
            line(what, value)?;
        }
        for (what, value) in self.tokenizer.iter().flat_map(TokenizerSummary::lines) {
            line(what, value)?;
        }
        for (i, m) in self.memory.iter().enumerate() {
            let (total, weights) = (units::bytes(m.total_bytes), units::bytes(m.weights_bytes));
            let kv_cache = units::bytes(m.kv_cache_bytes);
            let states = match m.state_bytes {
                0 => String::new(),
                bytes => format!(" + recurrent states {}", units::bytes(bytes)),
            };
            let drafter = match m.drafter_bytes {
                0 => String::new(),
                bytes => format!(" + drafter {}", units::bytes(bytes)),
            };
            let text = format!(
                "{total:>10} at -c {:<6}  weights {weights} + KV cache {kv_cache} (F16){states}{drafter}",
                m.n_ctx
            );
            line(if i == 0 { "memory" } else { "" }, text)?;
        }
        if args.metadata {
            writeln!(out, "\nmetadata")?;
            for (key, value) in self.file.metadata().iter() {
                writeln!(out, "  {:<42} {}", metadata_text::safe(key), metadata_text::text(value))?;
            }
        }
        if args.tensors {
            writeln!(out, "\ntensors (row length first)")?;
            for t in self.file.tensors() {
                let (name, shape) = (metadata_text::safe(t.name()), format!("{:?}", t.shape()));
                writeln!(out, "  {name:<32} {:<7} {shape:<18} {:>10}", t.ty(), units::bytes(t.bytes().len() as u64))?;
            }
        }
        Ok(())
    }
}

/// The reason why a model with a valid spec cannot be run: its weights or its tokenizer. `None`: it can.
fn unusable(file: &GgufFile, spec: &ModelSpec) -> Option<String> {
    let weights = LoadedModel::with_spec(file, spec.clone()).map_err(|e| e.to_string());
    let tokenizer = Tokenizer::from_metadata(file.metadata(), &TokenizerOptions::default());
    weights.map(drop).and(tokenizer.map(drop).map_err(|e| e.to_string())).err()
}

/// A number with blanks between thousands: `"134 515 008"`.
fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let groups: Vec<_> = digits.as_bytes().rchunks(3).rev().map(String::from_utf8_lossy).collect();
    groups.join(" ")
}

#[cfg(test)]
mod tests {
    #[test]
    fn thousands_are_separated() {
        for (n, text) in [(0, "0"), (999, "999"), (1000, "1 000"), (134_515_008, "134 515 008")] {
            assert_eq!(super::grouped(n), text);
        }
    }
}
