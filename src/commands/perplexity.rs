//! `perplexity`: measures how well a model predicts a text, and compares its predictions with a reference model's.

use std::io::Write;
use std::path::PathBuf;

use metal_attention::{Error, ForwardPass, Model, ModelOptions};
use serde_json::{Value, json};

use crate::chunks;
use crate::cli_error::CliError;
use crate::divergence::{Divergence, log_softmax};
use crate::engine_args::EngineArgs;
use crate::interrupt;
use crate::log_likelihood::LogLikelihood;
use crate::logits_file::{LogitsReader, LogitsWriter};
use crate::model_args::ModelArgs;
use crate::progress::ProgressLine;
use crate::text_input::TextArgs;
use crate::token_ids;

/// The length of a chunk unless `-c` is given, in tokens.
const DEFAULT_N_CTX: usize = 512;

const AFTER_HELP: &str = "\
The text is cut into chunks of -c tokens (512 by default), each evaluated from an empty context, with the \
BOS token in the first place if the model has one. The tokens of the second half of each chunk are \
scored, as llama.cpp does, so that the numbers are comparable. stdout gets the estimate and its standard error after every chunk; \
with --json one object at the end: perplexity, error, tokens (scored), n_ctx, chunks (the estimates after each).

To find how much a quantised model has lost, compare its predictions with those of the model that it was made from: \
--reference runs both. If they do not fit into memory together, --kl-divergence-base writes the predictions of one to a file, \
and with --kl-divergence the other one is compared with the file (llama.cpp reads and writes the same format). Then \
stdout also gets the reference's perplexity, the Kullback-Leibler divergence by token in nats (mean, median and \
percentiles), and how often both have the same likeliest token; --json: reference_perplexity, ln_ratio, \
kl_divergence, same_top (a share), rms_delta_p.

Examples:
  metal-attention perplexity -m model.gguf -f text.txt -c 512
  metal-attention perplexity -m model-q4_k_m.gguf --reference model-f16.gguf -f text.txt
  metal-attention perplexity -m model-f16.gguf -f text.txt --kl-divergence-base model.logits
  metal-attention perplexity -m model-q4_k_m.gguf --kl-divergence-base model.logits --kl-divergence";

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

    /// Model to compare the predictions with; it must have the same vocabulary
    #[arg(long, value_name = "FILE", conflicts_with = "kl_divergence")]
    reference: Option<PathBuf>,

    /// Write the predictions to this file; with --kl-divergence read them, and the text, from it
    #[arg(long, aliases = ["save-all-logits"], value_name = "FILE")]
    kl_divergence_base: Option<PathBuf>,

    /// Compare the predictions with those of --kl-divergence-base
    #[arg(long, requires = "kl_divergence_base")]
    kl_divergence: bool,

    /// Write one JSON object
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    engine: EngineArgs,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<(), CliError> {
    let loading = ProgressLine::spinner("loading the model");
    let model = args.model.open()?;
    let reference = args.reference.as_ref().map(|path| Model::open_with(path, &ModelOptions::default())).transpose()?;
    let mut options = args.engine.options(&model);
    let tokenizer = args.model.tokenizer(&model)?;
    let base = args.kl_divergence_base.as_ref().filter(|_| args.kl_divergence);
    let mut base = base.map(|path| LogitsReader::open(path)).transpose()?;
    let (ids, bos, n_ctx) = if let Some(base) = &mut base {
        (std::mem::take(&mut base.ids), chunks::begin(&tokenizer), base.n_ctx)
    } else {
        let n_ctx = options.n_ctx.unwrap_or(DEFAULT_N_CTX);
        let (ids, bos) = chunks::tokenize(&tokenizer, &args.text.read_or_stdin()?);
        chunks::check_length(ids.len(), n_ctx)?;
        (ids, bos, n_ctx)
    };
    options.n_ctx = Some(n_ctx);
    let n_vocab = model.spec().n_vocab;
    token_ids::check(&ids, n_vocab)?;
    same_vocabulary(n_vocab, base.as_ref().map(|base| base.n_vocab))?;
    same_vocabulary(n_vocab, reference.as_ref().map(|model| model.spec().n_vocab))?;
    loading.weigh(model.gguf().tensor_bytes());
    let mut pass = model.forward_pass(&options)?;
    let mut reference_pass = reference.as_ref().map(|model| model.forward_pass(&options)).transpose()?;
    drop(loading);
    // After Ctrl-C the estimates so far are printed.
    let _ctrl_c = interrupt::cancel_on_ctrl_c();

    let n_ubatch = pass.n_ubatch();
    let n_chunks = args.chunks.map_or(ids.len() / n_ctx, |n| n.min((ids.len() / n_ctx) as u64) as usize);
    let write = args.kl_divergence_base.as_ref().filter(|_| !args.kl_divergence);
    let mut base_writer = write.map(|path| LogitsWriter::create(path, &ids, n_ctx, n_vocab, n_chunks)).transpose()?;
    let work_of_chunk = model.spec().n_layer() * n_ctx * (1 + usize::from(reference.is_some()));
    let progress = ProgressLine::steps("evaluating chunks", n_chunks as u64).watched(work_of_chunk);
    let mut passes: Vec<&mut dyn ForwardPass> = vec![&mut *pass];
    passes.extend(reference_pass.iter_mut().map(|pass| &mut **pass as &mut dyn ForwardPass));
    let compares = base.is_some() || reference.is_some();
    let (mut total, mut divergence) = (LogLikelihood::default(), Divergence::default());
    let mut estimates = Vec::new();
    for chunk in ids.chunks_exact(n_ctx).take(n_chunks) {
        let done = chunks::evaluate(&mut passes, chunk, bos, n_ubatch, |logits, next| {
            total.add(&logits[0], next);
            if let Some(base_writer) = &mut base_writer {
                (0..next.len()).try_for_each(|i| base_writer.row(logits[0].row(i)))?;
            }
            if let Some(base) = &mut base {
                let rows = base.rows(next.len())?;
                divergence.add(&logits[0], |i| rows.log_probabilities(i), next);
            }
            if let Some(reference) = logits.get(1) {
                divergence.add(&logits[0], |i| log_softmax(reference.row(i)), next);
            }
            Ok(())
        })?;
        if !done {
            break;
        }
        if total.perplexity().is_nan() {
            return Err(Error::NoNumbers.into());
        }
        estimates.push(total.perplexity());
        progress.set(estimates.len() as u64);
        if !args.json {
            let mut line = format!("{:>4}/{n_chunks}  {}", estimates.len(), estimate(&total));
            if compares {
                let (mean, same) = (divergence.mean(), 100.0 * divergence.same_top());
                line = format!("{line}  KL {mean:.6}, same top {same:.3} %");
            }
            progress.suspend(|| print(&format!("{line}\n")))?;
        }
    }
    drop(progress);
    if estimates.len() == n_chunks {
        base_writer.map_or(Ok(()), LogitsWriter::finish)?;
    }
    if args.json {
        let mut result = json!({
            "perplexity": total.perplexity(),
            "error": total.standard_error(),
            "tokens": total.count(),
            "n_ctx": n_ctx,
            "chunks": estimates,
        });
        if let (true, Value::Object(result), Value::Object(more)) = (compares, &mut result, divergence.json()) {
            result.extend(more);
        }
        print(&format!("{result}\n"))?;
    } else if total.count() > 0 {
        print(&format!("perplexity {} over {} tokens\n", estimate(&total), total.count()))?;
        if compares {
            print(&divergence.lines())?;
        }
    }
    if interrupt::requested() {
        interrupt::exit();
    }
    Ok(())
}

/// Refuses a reference with another vocabulary, whose predictions cannot be compared.
fn same_vocabulary(n_vocab: usize, reference: Option<usize>) -> Result<(), CliError> {
    match reference {
        Some(n) if n != n_vocab => Err(CliError::Usage(format!(
            "the reference has a vocabulary of {n} tokens and the model one of {n_vocab}: their predictions do not compare"
        ))),
        _ => Ok(()),
    }
}

/// The perplexity and its standard error as text.
fn estimate(total: &LogLikelihood) -> String {
    format!("{:.4} +/- {:.4}", total.perplexity(), total.standard_error())
}

/// Writes to stdout.
fn print(text: &str) -> Result<(), CliError> {
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).map_err(CliError::stdout)
}
