//! `imatrix`: measures the importance matrix: the mean square of each column's input of a model's matrices, over a text.

use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use metal_attention::gguf::Imatrix;
use metal_attention::{BatchToken, Device, EngineOptions, Error, ForwardError};

use crate::cli_error::CliError;
use crate::engine_args::SetupArgs;
use crate::interrupt;
use crate::model_args::ModelArgs;
use crate::output_file::OutputFile;
use crate::progress::ProgressLine;
use crate::text_input::TextArgs;
use crate::{chunks, token_ids, units};

/// The length of a chunk unless `-c` is given, in tokens.
const DEFAULT_N_CTX: usize = 512;

const AFTER_HELP: &str = "\
Errors in the columns of a matrix with large inputs count most: `quantize --imatrix` keeps these columns more exact. The file \
holds the sum of squares of every column's input, in llama.cpp's format. The text \
is cut into chunks of -c tokens (512 by default), each evaluated from an empty context on the CPU. Some \
hundred chunks of text similar to the model's later use are enough.

Examples:
  metal-attention imatrix -m model-f16.gguf -f text.txt -o model.imatrix.gguf
  metal-attention imatrix -m model-f16.gguf -f more.txt --add model.imatrix.gguf -o both.imatrix.gguf
  metal-attention quantize model-f16.gguf model-q4_k_m.gguf q4_k_m --imatrix both.imatrix.gguf";

/// Measure which columns of a model's matrices matter
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,

    #[command(flatten)]
    text: TextArgs,

    /// Where to write the file
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,

    /// Add the sums of this file, of the same model; may be given several times
    #[arg(long, value_name = "FILE")]
    add: Vec<PathBuf>,

    /// Chunks to evaluate [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    chunks: Option<u64>,

    /// Measure the output head's input, too
    #[arg(long)]
    output_head: bool,

    #[command(flatten)]
    setup: SetupArgs,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<(), CliError> {
    let loading = ProgressLine::spinner("loading the model");
    let mut total = Imatrix::default();
    for path in &args.add {
        total.merge(Imatrix::open(path).map_err(Error::from)?).map_err(Error::from)?;
    }
    let model = args.model.open()?;
    let mut options = EngineOptions { device: Device::Cpu, ..args.setup.options(&model) };
    let n_ctx = *options.n_ctx.get_or_insert(DEFAULT_N_CTX);
    let (ids, bos) = chunks::tokenize(&*args.model.tokenizer(&model)?, &args.text.read_or_stdin()?);
    if ids.len() < n_ctx {
        return Err(CliError::Usage(format!(
            "the text has {} tokens, but a chunk has {n_ctx}: give a longer text or a smaller -c",
            ids.len(),
        )));
    }
    token_ids::check(&ids, model.spec().n_vocab)?;
    loading.weigh(model.gguf().tensor_bytes());
    let mut backend = model.backend(&options)?;
    drop(loading);
    // After Ctrl-C no file is left behind.
    let _ctrl_c = interrupt::cancel_on_ctrl_c();

    let found = Arc::new(Mutex::new(Imatrix::default()));
    let pass = backend.cpu().expect("the device is the CPU");
    let (writer, output_head) = (Arc::clone(&found), args.output_head);
    pass.observe(Some(Box::new(move |input| {
        if input.matrix.starts_with("blk.") || output_head {
            let mut found = writer.lock().unwrap_or_else(PoisonError::into_inner);
            let (i, n) = input.sub_matrix.unwrap_or((0, 1));
            found.add(input.matrix, n, i, input.n_in, input.x);
        }
    })));
    let n_chunks = args.chunks.map_or(ids.len() / n_ctx, |n| n.min((ids.len() / n_ctx) as u64) as usize);
    let progress = ProgressLine::steps("evaluating chunks", n_chunks as u64).watched(model.spec().n_layer() * n_ctx);
    let pass = &mut *backend;
    // Logits are requested of all tokens: the last layer skips the tokens without, and their inputs would be missing.
    let n_batch = chunks::n_scored(model.spec().n_vocab, pass.n_ubatch());
    for (i, chunk) in ids.chunks_exact(n_ctx).take(n_chunks).enumerate() {
        pass.reset();
        let id = |pos: usize| bos.filter(|_| pos == 0).unwrap_or(chunk[pos]);
        let tokens: Vec<_> = (0..n_ctx).map(|pos| BatchToken { id: id(pos), seq: 0, pos, output: true }).collect();
        for batch in tokens.chunks(n_batch) {
            match pass.forward(batch) {
                Err(ForwardError::Cancelled) => return Err(CliError::Interrupted),
                logits => drop(logits.map_err(Error::from)?),
            }
        }
        progress.set(i as u64 + 1);
    }
    drop(progress);
    let mut found = std::mem::take(&mut *found.lock().unwrap_or_else(PoisonError::into_inner));
    (found.n_chunks, found.chunk_size) = (n_chunks, n_ctx);
    found.datasets.push(args.text.name());
    found.merge(total).map_err(Error::from)?;
    found.write(OutputFile::create(&args.output)?).map_err(Error::from)?.commit()?;
    let (n, tokens) = (found.names().len(), units::count(n_chunks * n_ctx, "token"));
    // Errors are ignored, because stderr may be closed.
    let _ = writeln!(io::stderr(), "wrote {}: inputs of {n} matrices over {tokens}", args.output.display());
    Ok(())
}
