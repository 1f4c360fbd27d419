//! The program `metal-attention`: runs GGUF language models from the command line.
//!
//! It is a library with a `main` of one line (`main.rs`): a library is compiled while the server's machine code is generated.
//! [`main`] reads the command line (`usage.rs`), starts the log and the handler of Ctrl-C (`interrupt.rs`), and runs one
//! subcommand (`commands/`). An error of the subcommand is printed on stderr and becomes the exit code (`cli_error.rs`).
//! The other modules of this folder are shared by subcommands: groups of flags (`*_args.rs`), input, and output.

mod cache_args;
mod chunks;
mod cli_error;
mod commands;
mod completion;
mod config;
mod divergence;
mod download_progress;
mod embed_texts;
mod engine_args;
mod find_mmproj;
mod find_model;
mod first_model;
mod foreign_flags;
mod form_args;
mod interrupt;
mod log_likelihood;
mod logits_file;
mod map_gguf;
mod mcp_config;
mod mcp_consent;
mod metadata_text;
mod model_args;
mod model_summary;
mod npy;
mod output_file;
mod page_args;
mod picture_args;
mod profile_args;
mod progress;
mod random_weights;
mod replica_args;
mod run_output;
mod sampling_args;
mod sampling_options;
mod served;
mod speculation_args;
mod statistics;
mod template_file;
mod tensor_types;
mod terminal;
#[cfg(unix)]
mod termination;
mod text_input;
mod threads;
mod token_cycle;
mod token_ids;
mod token_input;
mod units;
mod usage;

use std::io::Write;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use metal_attention::gguf::exit_on_lost_pages;
use metal_attention_server::http::LOG_TARGET;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::cli_error::CliError;
use crate::commands::{
    bench, chat, compare, completions, detokenize, devices, doctor, draft, embed, encode_image, export_tokenizer,
    imatrix, info, kernels, launch, list, logits, mcp, perplexity, pull, quantize, rerank, rm, run, serve, synth,
    tokenize, update,
};

const AFTER_HELP: &str = "\
Examples:
  metal-attention run llama3.2 \"Why is the sky blue?\"
  metal-attention run hf.co/bartowski/SmolLM2-135M-Instruct-GGUF \"What is Rust?\"
  metal-attention run -p \"Once upon a time\"
  metal-attention run model.gguf -p \"There was a king who had\" -n 200
  metal-attention chat qwen3.5:4b
  metal-attention serve model.gguf
  metal-attention info model.gguf

Models are named by a GGUF file, a well-known name, OWNER/REPO on the Hugging Face hub, or its address there.

Environment:
  METAL_ATTENTION_MODEL    model to use where none is given
  METAL_ATTENTION_MODELS   folders with models, found by their names
  METAL_ATTENTION_API_KEY  key that clients of serve must send
  METAL_ATTENTION_CACHE    folder for compiled GPU pipelines; off: none
  HF_HOME, HF_TOKEN, ...   models from the Hugging Face hub: see pull --help
  RUST_LOG                 log filter, e.g. debug or metal_attention_cpu=trace
  METAL_ATTENTION_HISTORY  the file that keeps what was typed in chats; off: none
  NO_COLOR                 no colours in the output

Exit codes:
  0    success, also when the reader of the output went away
  1    any other failure
  2    wrong usage: flags or input that cannot work
  3    the model file is missing, damaged, not supported, or cut short while in use
  4    the device is not available
  5    out of memory
  130  interrupted with Ctrl-C";

/// Runs GGUF language models at the speed of the hardware under it.
///
/// Without a model, commands use a small story-telling model that is built into the program.
#[derive(Parser)]
#[command(name = "metal-attention", version, after_help = AFTER_HELP, arg_required_else_help = true)]
#[command(max_term_width = 120)]
struct Cli {
    #[command(subcommand)]
    command: Command,

    /// Show memory use, threads, SIMD level and seed on stderr
    #[arg(long, short = 'v', global = true)]
    verbose: bool,
}

#[derive(Subcommand)]
enum Command {
    Run(Box<run::Args>),
    Chat(Box<chat::Args>),
    #[command(alias = "server")]
    Serve(Box<serve::Args>),
    Launch(launch::Args),
    Mcp(mcp::Args),
    #[command(visible_alias = "show")]
    Info(info::Args),
    Tokenize(tokenize::Args),
    Detokenize(detokenize::Args),
    ExportTokenizer(export_tokenizer::Args),
    Logits(logits::Args),
    Draft(draft::Args),
    #[command(aliases = ["embedding", "embeddings"])]
    Embed(embed::Args),
    EncodeImage(encode_image::Args),
    Rerank(rerank::Args),
    Perplexity(perplexity::Args),
    Compare(compare::Args),
    Bench(bench::Args),
    Devices(devices::Args),
    Doctor(doctor::Args),
    #[command(aliases = ["get", "download"])]
    Pull(pull::Args),
    #[command(visible_alias = "ls")]
    List(list::Args),
    Rm(rm::Args),
    Synth(synth::Args),
    Quantize(quantize::Args),
    Imatrix(imatrix::Args),
    Kernels(kernels::Args),
    Completions(completions::Args),
    Update(update::Args),
}

/// Runs the program with the arguments of the process.
pub fn main() -> ExitCode {
    silence_device_selection();
    completion::answer_shell();
    let cli = usage::parse();
    start_log(cli.verbose, &cli.command);
    exit_on_lost_pages(3, "; put the whole file in its place, or use --no-mmap to read it into memory first");
    let result = interrupt::listen().and_then(|()| cli.command.run());
    let Err(error) = result else { return ExitCode::SUCCESS };
    if !error.is_quiet() {
        // If stderr is closed as well, the message is lost; the exit code remains.
        let _ = writeln!(std::io::stderr(), "error: {}", metadata_text::safe_lines(&error.to_string()));
    }
    ExitCode::from(error.exit_code())
}

impl Command {
    fn run(&self) -> Result<(), CliError> {
        match self {
            Self::Run(args) => run::run(args),
            Self::Chat(args) => chat::run(args),
            Self::Serve(args) => serve::run(args),
            Self::Launch(args) => launch::run(args),
            Self::Mcp(args) => mcp::run(args),
            Self::Info(args) => info::run(args),
            Self::Tokenize(args) => tokenize::run(args),
            Self::Detokenize(args) => detokenize::run(args),
            Self::ExportTokenizer(args) => export_tokenizer::run(args),
            Self::Logits(args) => logits::run(args),
            Self::Draft(args) => draft::run(args),
            Self::Embed(args) => embed::run(args),
            Self::EncodeImage(args) => encode_image::run(args),
            Self::Rerank(args) => rerank::run(args),
            Self::Perplexity(args) => perplexity::run(args),
            Self::Compare(args) => compare::run(args),
            Self::Bench(args) => bench::run(args),
            Self::Devices(args) => devices::run(args),
            Self::Doctor(args) => doctor::run(args),
            Self::Pull(args) => pull::run(args),
            Self::List(args) => list::run(args),
            Self::Rm(args) => rm::run(args),
            Self::Synth(args) => synth::run(args),
            Self::Quantize(args) => quantize::run(args),
            Self::Imatrix(args) => imatrix::run(args),
            Self::Kernels(args) => kernels::run(args),
            Self::Completions(args) => completions::run(args),
            Self::Update(args) => update::run(args),
        }
    }
}

/// Disables Mesa's Vulkan layer that selects the default GPU, unless there is a desktop session: without one it only
/// prints a complaint on stderr.
fn silence_device_selection() {
    let unset = |name| std::env::var_os(name).is_none();
    if cfg!(target_os = "linux") && unset("XDG_RUNTIME_DIR") && unset("MESA_VK_DEVICE_SELECT") {
        // SAFETY: the first statement of the program; no other thread exists yet.
        unsafe { std::env::set_var("NODEVICE_SELECT", "1") };
    }
}

/// Sends log events to stderr. `RUST_LOG` is the filter if it is set and valid. Otherwise the level is `info` with
/// `--verbose`, else `warn`; `serve` logs each request at `info` unless `--quiet` is given.
fn start_log(verbose: bool, command: &Command) {
    let default = if verbose { LevelFilter::INFO } else { LevelFilter::WARN };
    let asked = std::env::var("RUST_LOG").ok().filter(|filter| !filter.is_empty());
    let filter = asked.and_then(|filter| filter.parse().ok()).unwrap_or_else(|| {
        let filter = Targets::new().with_default(default);
        let Command::Serve(args) = command else { return filter };
        filter.with_target(LOG_TARGET, if args.quiet() { LevelFilter::WARN } else { LevelFilter::INFO })
    });
    let to_stderr = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).without_time().with_target(false);
    tracing_subscriber::registry().with(to_stderr.with_filter(filter)).init();
}
