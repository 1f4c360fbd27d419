//! `perplexity`: how well a model predicts a text.

use std::io::Write;

use metal_attention::tokenizer::{EncodeOptions, Tokenizer};
use metal_attention::{BatchToken, Error, ForwardPass};
use serde_json::json;

use crate::cli_error::CliError;
use crate::engine_args::{EngineArgs, log_memory};
use crate::interrupt;
use crate::log_likelihood::LogLikelihood;
use crate::model_args::ModelArgs;
use crate::progress::Progress;
use crate::text_input::TextArgs;
use crate::token_ids;

/// Context where `-c` is not given.
const DEFAULT_N_CTX: usize = 512;

/// Most bytes of logits that are in memory at once.
const MAX_LOGITS_BYTES: usize = 64 << 20;

const AFTER_HELP: &str = "\
The text is cut into chunks of -c tokens (512 where it is not given), each evaluated from an empty context, with the
token that begins a text in the first place where the model has one. The tokens of the second half of each chunk are
scored, as llama.cpp does, so the figures compare. stdout gets the estimate and its standard error after every chunk;
with --json one object at the end: perplexity, error, tokens (scored), n_ctx, chunks (the estimates after each).

Example:
  metal-attention perplexity -m model.gguf -f text.txt -c 512";

/// Measure how well a model predicts a text
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,

    #[command(flatten)]
    text: TextArgs,

    /// Chunks to evaluate [default: all]
    #[arg(long, value_name = "N")]
    chunks: Option<usize>,

    /// Write one JSON object
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    engine: EngineArgs,
}

/// Runs the command.
pub fn run(args: Args) -> Result<(), CliError> {
    interrupt::listen()?;
    let loading = Progress::spinner("loading the model");
    let model = args.model.open()?;
    let mut options = args.engine.options(&model)?;
    let n_ctx = *options.n_ctx.get_or_insert(DEFAULT_N_CTX);
    if n_ctx < 4 {
        return Err(CliError::Usage(format!("-c {n_ctx} leaves nothing to score: it must be at least 4")));
    }
    let (ids, bos) = tokenize(model.tokenizer(), &args.text.read_or_stdin()?);
    if ids.len() < 2 * n_ctx {
        return Err(CliError::Usage(format!(
            "the text has {} tokens, but chunks of {n_ctx} need at least {}: give a longer text or a smaller -c",
            ids.len(),
            2 * n_ctx
        )));
    }
    token_ids::check(&ids, model.spec().n_vocab)?;
    let mut pass = model.forward_pass(&options)?;
    log_memory(&model, &*pass);
    drop(loading);

    let mut chunks: Vec<Vec<u32>> = ids.chunks_exact(n_ctx).map(<[u32]>::to_vec).collect();
    chunks.truncate(args.chunks.unwrap_or(usize::MAX));
    let progress = args.json.then(|| Progress::steps("evaluating chunks", chunks.len() as u64));
    let mut total = LogLikelihood::default();
    let mut estimates = Vec::new();
    let mut interrupted = false;
    for (i, chunk) in chunks.iter_mut().enumerate() {
        if let Some(bos) = bos {
            chunk[0] = bos;
        }
        interrupted = score(&mut *pass, chunk, options.n_ubatch, &mut total)? == Ended::Interrupted;
        if interrupted {
            break;
        }
        let (perplexity, error) = (total.perplexity(), total.standard_error());
        estimates.push(perplexity);
        match &progress {
            Some(progress) => progress.set(i as u64 + 1),
            None => print(&format!("chunk {:>4} of {}: {perplexity:.4} +/- {error:.4}\n", i + 1, n_chunks(&ids, &args, n_ctx)))?,
        }
    }
    drop(progress);
    if args.json {
        let (perplexity, error) = (total.perplexity(), total.standard_error());
        let result = json!({
            "perplexity": perplexity, "error": error, "tokens": total.count(), "n_ctx": n_ctx, "chunks": estimates,
        });
        print(&format!("{result}\n"))?;
    } else if total.count() > 0 {
        let (perplexity, error) = (total.perplexity(), total.standard_error());
        print(&format!("perplexity {perplexity:.4} +/- {error:.4} over {} tokens\n", total.count()))?;
    }
    if interrupted { Err(CliError::Interrupted) } else { Ok(()) }
}
