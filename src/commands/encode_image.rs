//! `encode-image`: the rows of embeddings that a model reads of a picture.

use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use metal_attention::{PicturePrompt, PromptBuilder};
use serde::Serialize;

use crate::cli_error::CliError;
use crate::engine_args::EngineArgs;
use crate::interrupt;
use crate::model_args::ModelArgs;
use crate::npy;
use crate::output_file::OutputFile;
use crate::picture_args::{MmprojArgs, encode_one, read_picture};

const AFTER_HELP: &str = "\
The rows of all parts of the picture (tiles, the whole) follow each other; rows that are added after the first layers (Qwen3-VL) \
are beside each row. With --json stdout has the chunks of a prompt that is only the picture.

Examples:
  metal-attention encode-image -m model.gguf --mmproj mmproj.gguf --image photo.jpg -o rows.npy
  metal-attention encode-image -m model.gguf --image photo.jpg --json";

/// Write the embeddings of a picture
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,

    #[command(flatten)]
    encoder: MmprojArgs,

    /// The picture; -: from stdin
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    image: PathBuf,

    /// Write a float32 .npy file of shape [tokens, width]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,

    /// Print a JSON object with the chunks
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    engine: EngineArgs,
}

/// A part of the prompt.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "lowercase")]
enum Chunk {
    /// Tokens.
    Text { ids: Vec<u32> },
    /// Rows, of a grid with `nx` columns and `ny` rows.
    Image { tokens: usize, nx: usize, ny: usize },
}

/// What `--json` prints.
#[derive(Serialize)]
struct Chunks {
    chunks: Vec<Chunk>,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<(), CliError> {
    let model = args.model.open()?;
    let tokenizer = args.model.tokenizer(&model)?;
    let picture = read_picture(&args.image)?;
    let options = args.engine.options(&model);
    let mut encoder = args.encoder.encoder(&args.model, &model, &options)?;
    let _ctrl_c = interrupt::cancel_on_ctrl_c();
    let encoded = encode_one(&mut encoder, &picture, &tokenizer)?;
    if let Some(path) = &args.output {
        write_rows(path, &encoded, model.spec().n_embd, encoder.row_width())?;
    }
    let mut builder = PromptBuilder::new(&tokenizer);
    builder.picture(&encoded);
    let (ids, spans) = builder.finish();
    let mut chunks = Vec::new();
    let mut start = 0;
    for (span, rows) in spans.iter().zip(encoded.rows()) {
        chunks.push(Chunk::Text { ids: ids[start..span.inputs.start].to_vec() });
        chunks.push(Chunk::Image { tokens: rows.n_rows, nx: rows.nx, ny: rows.ny });
        start = span.inputs.end;
    }
    chunks.push(Chunk::Text { ids: ids[start..].to_vec() });
    chunks.retain(|chunk| !matches!(chunk, Chunk::Text { ids } if ids.is_empty()));
    let mut out = io::stdout().lock();
    let written = if args.json {
        serde_json::to_writer(&mut out, &Chunks { chunks }).map_err(io::Error::from).and_then(|()| writeln!(out))
    } else {
        let n: usize = spans.iter().map(|span| span.inputs.len()).sum();
        writeln!(out, "{} x {} pixels: {n} rows in {} part(s)", picture.width(), picture.height(), spans.len())
    };
    written.map_err(CliError::stdout)
}

/// Writes the rows of a picture as an array `[n_rows, width]`: each row's embedding, then what is added to it after the first
/// layers.
fn write_rows(path: &Path, picture: &PicturePrompt, n_embd: usize, width: usize) -> Result<(), CliError> {
    let failed = |source| CliError::Write { to: path.display().to_string(), source };
    let mut file = OutputFile::create(path)?;
    let mut out = BufWriter::new(&mut file);
    npy::write_header(&mut out, picture.n_rows(), width).map_err(failed)?;
    for rows in picture.rows() {
        let content = &rows.content;
        for i in 0..rows.n_rows {
            for of_layer in std::iter::once(&content.rows).chain(&content.deepstack) {
                npy::write_numbers(&mut out, &of_layer[i * n_embd..][..n_embd]).map_err(failed)?;
            }
        }
    }
    out.flush().map_err(failed)?;
    drop(out);
    file.commit()
}
