//! `logits`: evaluates a text and writes the logits after each token.

use std::io::{self, BufWriter, Seek, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use metal_attention::{BatchToken, Error, ForwardPass};

use crate::cli_error::CliError;
use crate::engine_args::EngineArgs;
use crate::interrupt;
use crate::model_args::ModelArgs;
use crate::npy;
use crate::output_file::OutputFile;
use crate::progress::ProgressLine;
use crate::token_input::{TokensArgs, fit_context};

/// The largest size of the logits of one batch, in bytes.
const MAX_LOGITS_BYTES: usize = 64 << 20;

const AFTER_HELP: &str = "\
Row i holds the logits of the token that follows token i. Without -o stdout has a JSON object with \
tokens (the ids) and logits (a list of rows). Without -c the context is as long as the tokens.

Examples:
  metal-attention logits -p \"Once upon a time\" -o logits.npy
  metal-attention logits -m model.gguf --tokens 1,403,407 --last
  python3 -c 'import numpy; print(numpy.load(\"logits.npy\").argmax(-1))'";

/// Write the logits after every token of a text
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,

    #[command(flatten)]
    tokens: TokensArgs,

    /// Write a float32 .npy file of shape [tokens, vocabulary]; -: to stdout
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,

    /// Only the last token's logits
    #[arg(long)]
    last: bool,

    #[command(flatten)]
    engine: EngineArgs,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<(), CliError> {
    let model = args.model.open()?;
    let ids = args.tokens.read(&args.model, &model)?;
    let loading = ProgressLine::spinner("loading the model");
    let mut options = args.engine.options(&model);
    fit_context(&mut options, &ids, &model)?;
    loading.weigh(model.gguf().tensor_bytes());
    let mut pass = model.forward_pass(&options)?;
    drop(loading);
    // After Ctrl-C the file has the rows so far.
    let _ctrl_c = interrupt::cancel_on_ctrl_c();

    let positions = if args.last { ids.len() - 1..ids.len() } else { 0..ids.len() };
    let outcome = match &args.output {
        None => {
            let out = io::stdout().lock();
            write_json(&mut *pass, &ids, positions, out, &CliError::stdout)
        }
        Some(path) if path == Path::new("-") => {
            let out = io::stdout().lock();
            write_npy(&mut *pass, &ids, positions, out, &CliError::stdout).1
        }
        Some(path) => {
            let failed = |source| CliError::Write { to: path.display().to_string(), source };
            let mut out = OutputFile::create(path)?;
            let (n_rows, outcome) = write_npy(&mut *pass, &ids, positions, &mut out, &failed);
            match outcome {
                Ok(()) => out.commit(),
                Err(CliError::Interrupted) => {
                    // A pipe keeps the header that it has.
                    if out.rewind().is_ok() {
                        npy::write_header(&mut out, n_rows, pass.spec().n_vocab).map_err(failed)?;
                    }
                    out.commit().and(outcome)
                }
                Err(_) => outcome,
            }
        }
    };
    if matches!(outcome, Err(CliError::Interrupted)) {
        interrupt::exit();
    }
    outcome
}

/// Converts an error of writing the output.
type WriteFailed<'a> = &'a dyn Fn(io::Error) -> CliError;

/// Writes the logits of the positions `positions` as a `.npy` file, `[positions.len(), n_vocab]`. Returns the number of rows written,
/// and the outcome. After Ctrl-C the header still has the full number of rows.
fn write_npy(
    pass: &mut dyn ForwardPass,
    ids: &[u32],
    positions: Range<usize>,
    out: impl Write,
    failed: WriteFailed,
) -> (usize, Result<(), CliError>) {
    let mut out = BufWriter::new(out);
    let mut n_rows = 0;
    let write = || {
        npy::write_header(&mut out, positions.len(), pass.spec().n_vocab).map_err(failed)?;
        let outcome = for_each_row(pass, ids, positions, |row| {
            npy::write_numbers(&mut out, row).map_err(failed)?;
            n_rows += 1;
            Ok(())
        });
        out.flush().map_err(failed)?;
        outcome
    };
    let outcome = write();
    (n_rows, outcome)
}

/// Writes the tokens and the logits of the positions `positions` as JSON, which is whole after Ctrl-C, too.
fn write_json(
    pass: &mut dyn ForwardPass,
    ids: &[u32],
    positions: Range<usize>,
    out: impl Write,
    failed: WriteFailed,
) -> Result<(), CliError> {
    let mut out = BufWriter::new(out);
    write!(out, "{{\"tokens\":{ids:?},\"logits\":[").map_err(failed)?;
    let mut separator = "";
    let outcome = for_each_row(pass, ids, positions, |row| {
        out.write_all(separator.as_bytes()).map_err(failed)?;
        separator = ",";
        serde_json::to_writer(&mut out, row).map_err(|e| failed(e.into()))
    });
    if matches!(outcome, Ok(()) | Err(CliError::Interrupted)) {
        out.write_all(b"]}\n").and_then(|()| out.flush()).map_err(failed)?;
    }
    outcome
}

/// Evaluates `ids` in batches and calls `write` with the logits of each position in `positions`, `[n_vocab]`, in order.
fn for_each_row(
    pass: &mut dyn ForwardPass,
    ids: &[u32],
    positions: Range<usize>,
    mut write: impl FnMut(&[f32]) -> Result<(), CliError>,
) -> Result<(), CliError> {
    let n_batch = (MAX_LOGITS_BYTES / (4 * pass.spec().n_vocab)).clamp(1, pass.n_ubatch());
    let tokens = |positions: Range<usize>| -> Vec<_> {
        let token = |(pos, &id)| BatchToken { id, seq: 0, pos, output: positions.contains(&pos) };
        ids.iter().enumerate().map(token).collect()
    };
    let batches: Vec<Vec<BatchToken>> = if pass.spec().is_causal() {
        tokens(positions).chunks(n_batch).map(<[_]>::to_vec).collect()
    } else {
        // Tokens attend to later ones, so all are in one batch. It is evaluated again for each part of the rows that fits into
        // memory.
        let parts = positions.clone().step_by(n_batch).map(|from| from..positions.end.min(from + n_batch));
        parts.map(tokens).collect()
    };
    let progress = ProgressLine::steps("evaluating", ids.len() as u64).watched(pass.spec().n_layer());
    for batch in batches {
        if batch.first().is_some_and(|token| token.pos == 0) {
            pass.reset();
        }
        let logits = pass.forward(&batch).map_err(Error::from)?;
        for i in 0..logits.n_rows() {
            let row = logits.row(i);
            if !row.iter().any(|logit| logit.is_finite()) {
                return Err(Error::NoNumbers.into());
            }
            write(row)?;
        }
        progress.set(pass.position() as u64);
    }
    Ok(())
}
