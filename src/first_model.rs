//! The choice of a model at a terminal where none is named: of those on this machine, else of three to download.

use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;

use metal_attention::available_memory;
use metal_attention::backends::{self, Gpu, GpuList};
use metal_attention_hub::{CachedModel, Environment, Hub};

use crate::cli_error::CliError;
use crate::find_model::is_usable;
use crate::metadata_text::safe;
use crate::units;

/// A model that is offered.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Offered {
    /// Its well-known name.
    name: &'static str,
    /// Bytes of its file, rounded; more are needed for its context.
    bytes: u64,
    /// What it is good for.
    purpose: &'static str,
}

/// What is offered where no model is on this machine, from small to large.
const OFFERED: [Offered; 5] = [
    Offered { name: "llama3.2:1b", bytes: 800_000_000, purpose: "quick, for simple questions" },
    Offered { name: "llama3.2", bytes: 2_000_000_000, purpose: "for a notebook without a GPU" },
    Offered { name: "qwen3:8b", bytes: 5_000_000_000, purpose: "thinks before it answers" },
    Offered { name: "gpt-oss", bytes: 12_100_000_000, purpose: "thinks, and uses tools" },
    Offered { name: "qwen3-coder", bytes: 18_600_000_000, purpose: "writes code" },
];

/// The number of models that are offered.
const N_OFFERED: usize = 3;

/// The largest number of models of this machine that are listed.
const MAX_LISTED: usize = 9;

/// Lets the user choose a model. `None`: the built-in one, also where stdin, stdout or stderr is no terminal.
pub fn choose() -> Result<Option<PathBuf>, CliError> {
    let is_terminal = io::stdin().is_terminal() && io::stdout().is_terminal() && io::stderr().is_terminal();
    if !is_terminal {
        return Ok(None);
    }
    let mut out = io::stderr().lock();
    // Errors of writing are ignored, because stderr may be closed.
    let here = list(&models_here());
    let (title, choices, others) = if here.is_empty() {
        let memory = memory();
        let title = "No model is named, and none is on this machine yet. These can be downloaded:";
        (title, offer(&offered(memory), memory), "Any other is named as in: metal-attention run gemma4")
    } else {
        ("No model is named. Those on this machine:", here, "metal-attention pull NAME gets others.")
    };
    let _ = writeln!(out, "{title}\n");
    for ((line, _), number) in choices.iter().zip(1..) {
        let _ = writeln!(out, "  {number}  {line}");
    }
    let _ = writeln!(out, "\n{others}");
    loop {
        let _ = write!(out, "Number of the model, or Enter for the small built-in story-teller: ")
            .and_then(|()| out.flush());
        let mut answer = String::new();
        let n = io::stdin().read_line(&mut answer);
        let n = n.map_err(|error| CliError::General(format!("cannot read the answer: {error}")))?;
        match (answer.trim(), answer.trim().parse::<usize>()) {
            ("", _) => {
                if n == 0 {
                    let _ = writeln!(out);
                }
                return Ok(None);
            }
            (_, Ok(number)) if (1..=choices.len()).contains(&number) => {
                return Ok(Some(choices[number - 1].1.clone().into()));
            }
            (given, _) => {
                let _ = writeln!(out, "{} is none of 1 to {}.", safe(given), choices.len());
            }
        }
    }
}

/// The models in the cache of the hub that can be used, by name.
pub fn models_here() -> Vec<CachedModel> {
    let models = Environment::read().and_then(|environment| Hub::new(environment).models());
    let mut models = models.unwrap_or_default();
    models.retain(is_usable);
    models
}

/// A line for each of the first models, and its name.
fn list(models: &[CachedModel]) -> Vec<(String, String)> {
    let line = |model: &CachedModel| {
        let name = model.name.to_string();
        (format!("{:<50} {:>10}", safe(&name), units::bytes(model.total_bytes())), name)
    };
    models.iter().take(MAX_LISTED).map(line).collect()
}

/// Bytes of memory for models: that of the GPU that `--device auto` takes, or the free main memory if that is larger.
fn memory() -> Option<u64> {
    let gpus = [backends::CUDA.gpus(), backends::WGPU.gpus()];
    automatic_gpu(&gpus.each_ref()).and_then(|gpu| gpu.memory).max(available_memory())
}

/// The GPU that `--device auto` takes: of the first backend in the lists that has one.
pub fn automatic_gpu<'a>(lists: &[&'a GpuList]) -> Option<&'a Gpu> {
    lists.iter().find_map(|list| list.auto.as_ref().ok().map(|&i| &list.gpus[i]))
}

/// Bytes of the largest model for `memory` bytes, of which its context needs some.
pub fn largest_model(memory: u64) -> u64 {
    memory / 10 * 8
}

/// Whether the model and a context fit in `memory` bytes; true where these are not known.
fn fits(model: Offered, memory: Option<u64>) -> bool {
    memory.is_none_or(|memory| model.bytes <= largest_model(memory))
}

/// The models to offer on a machine with `memory` bytes: the largest ones that fit, and smaller ones; the smallest ones if fewer fit.
fn offered(memory: Option<u64>) -> [Offered; N_OFFERED] {
    let n_fitting = OFFERED.iter().filter(|model| memory.is_some() && fits(**model, memory)).count();
    let first = n_fitting.saturating_sub(N_OFFERED);
    [OFFERED[first], OFFERED[first + 1], OFFERED[first + 2]]
}

/// A line for each of the models, and its name.
fn offer(models: &[Offered], memory: Option<u64>) -> Vec<(String, String)> {
    let line = |model: &Offered| {
        let Offered { name, bytes, purpose } = model;
        let memory = match (memory, fits(*model, memory)) {
            (None, _) => String::new(),
            (Some(_), true) => ", fits this machine".into(),
            (Some(memory), false) => format!(", too large for the {} here", units::bytes(memory)),
        };
        (format!("{name:<12} {:>4.1} GB  {purpose}{memory}", *bytes as f64 / 1e9), (*name).to_owned())
    };
    models.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use metal_attention_hub::known_model;

    use super::*;

    #[test]
    fn the_largest_models_that_fit_are_offered() {
        let names = |memory| offered(memory).map(|model| model.name);
        let small = ["llama3.2:1b", "llama3.2", "qwen3:8b"];
        assert_eq!(names(None), small);
        assert_eq!(names(Some(1 << 30)), small);
        assert_eq!(names(Some(8 << 30)), small);
        assert_eq!(names(Some(16 << 30)), ["llama3.2", "qwen3:8b", "gpt-oss"]);
        assert_eq!(names(Some(139 << 30)), ["qwen3:8b", "gpt-oss", "qwen3-coder"]);
        assert!(OFFERED.iter().all(|model| matches!(known_model(model.name), Some(Ok(_)))));
    }

    #[test]
    fn what_does_not_fit_says_so() {
        let memory = Some(2 << 30);
        let [(first, name), (second, _), _] = &offer(&offered(memory), memory)[..] else { panic!("three are offered") };
        assert_eq!(name, "llama3.2:1b");
        assert_eq!(first, "llama3.2:1b   0.8 GB  quick, for simple questions, fits this machine");
        assert!(second.ends_with(", too large for the 2.0 GiB here"), "{second}");
    }
}
