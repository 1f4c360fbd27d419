//! `perplexity`: how well a model predicts a text.

use std::io::Write;

use metal_attention::{BatchToken, Error, ForwardError, ForwardPass};
use serde_json::json;

use crate::cli_error::CliError;
use crate::engine_args::EngineArgs;
use crate::interrupt;
use crate::log_likelihood::LogLikelihood;
use crate::model_args::ModelArgs;
use crate::progress::Progress;
use crate::text_input::TextArgs;
use crate::{chunks, token_ids};

/// Context where `-c` is not given.
const DEFAULT_N_CTX: usize = 512;

/// Most bytes of logits that are in memory at once.
const MAX_LOGITS_BYTES: usize = 64 << 20;

const AFTER_HELP: &str = "\
The text is cut into chunks of -c tokens (512 where it is not given), each evaluated from an empty context, with the \
token that begins a text in the first place where the model has one. The tokens of the second half of each chunk are \
scored, as llama.cpp does, so the figures compare. stdout gets the estimate and its standard error after every chunk; \
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
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    chunks: Option<u64>,

    /// Write one JSON object
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    engine: EngineArgs,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<(), CliError> {
    let loading = Progress::spinner("loading the model");
    let model = args.model.open()?;
    let mut options = args.engine.options(&model);
    let n_ctx = *options.n_ctx.get_or_insert(DEFAULT_N_CTX);
    if n_ctx < 4 {
        return Err(CliError::Usage(format!("-c {n_ctx} leaves nothing to score: it must be at least 4")));
    }
    let (ids, bos) = chunks::tokenize(&*args.model.tokenizer(&model)?, &args.text.read_or_stdin()?);
    let needed = n_ctx.saturating_mul(2);
    if ids.len() < needed {
        return Err(CliError::Usage(format!(
            "the text has {} tokens, but chunks of {n_ctx} need at least {needed}: give a longer text or a smaller -c",
            ids.len(),
        )));
    }
    token_ids::check(&ids, model.spec().n_vocab)?;
    loading.weigh(model.gguf().tensor_bytes());
    let mut pass = model.forward_pass(&options)?;
    drop(loading);
    // The estimates so far are kept.
    let _asked = interrupt::ask();

    let n_chunks = args.chunks.map_or(ids.len() / n_ctx, |n| n.min((ids.len() / n_ctx) as u64) as usize);
    let work_of_chunk = model.spec().n_layer() * n_ctx;
    let progress = Progress::steps("evaluating chunks", n_chunks as u64).watched(work_of_chunk);
    let mut total = LogLikelihood::default();
    let mut estimates = Vec::new();
    for chunk in ids.chunks_exact(n_ctx).take(n_chunks) {
        if !score(&mut *pass, chunk, bos, options.n_ubatch, &mut total)? {
            break;
        }
        estimates.push(total.perplexity());
        progress.set(estimates.len() as u64);
        if !args.json {
            progress.suspend(|| print(&format!("{:>4}/{n_chunks}  {}\n", estimates.len(), estimate(&total))))?;
        }
    }
    drop(progress);
    if args.json {
        let result = json!({
            "perplexity": total.perplexity(),
            "error": total.standard_error(),
            "tokens": total.count(),
            "n_ctx": n_ctx,
            "chunks": estimates,
        });
        print(&format!("{result}\n"))?;
    } else if total.count() > 0 {
        print(&format!("perplexity {} over {} tokens\n", estimate(&total), total.count()))?;
    }
    if interrupt::requested() {
        interrupt::end();
    }
    Ok(())
}

/// Evaluates a chunk from an empty context, `bos` in the place of its first token, and adds the scores of its second
/// half. False when Ctrl-C ended it.
fn score(
    pass: &mut dyn ForwardPass,
    chunk: &[u32],
    bos: Option<u32>,
    n_ubatch: usize,
    total: &mut LogLikelihood,
) -> Result<bool, CliError> {
    // The last token is only ever predicted, and the first half only read.
    let (first, last) = (chunk.len() / 2, chunk.len() - 1);
    let token = |pos: usize| {
        let id = bos.filter(|_| pos == 0).unwrap_or(chunk[pos]);
        BatchToken { id, seq: 0, pos, logits: pos >= first }
    };
    let n_read = n_ubatch.min(chunk.len());
    let n_scored = (MAX_LOGITS_BYTES / (4 * pass.spec().n_vocab)).clamp(1, n_read);
    pass.reset();
    let mut pos = 0;
    while pos < last {
        let end = if pos < first { first.min(pos + n_read) } else { last.min(pos + n_scored) };
        let batch: Vec<_> = (pos..end).map(token).collect();
        let logits = match pass.forward(&batch) {
            Err(ForwardError::Cancelled) => return Ok(false),
            logits => logits.map_err(Error::from)?,
        };
        if pos >= first {
            total.add(&logits, &chunk[pos + 1..=end]);
        }
        pos = end;
    }
    Ok(true)
}

fn estimate(total: &LogLikelihood) -> String {
    format!("{:.4} +/- {:.4}", total.perplexity(), total.standard_error())
}

fn print(text: &str) -> Result<(), CliError> {
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).map_err(CliError::stdout)
}
