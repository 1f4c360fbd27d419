//! `quantize`: the same model with its matrices in another type.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use metal_attention::Error;
use metal_attention::gguf::{GgufFile, GgufWriter, Tensor, TensorDecl, TensorType};

use crate::cli_error::CliError;
use crate::interrupt;
use crate::output_file::OutputFile;
use crate::progress::Progress;
use crate::tensor_types::{TensorTypes, TypeArgs};
use crate::units;

/// Elements that are converted at a time; a multiple of every block length.
const CHUNK: usize = 1 << 16;

const AFTER_HELP: &str = "\
Types: F32, F16, BF16, Q8_0, Q5_0, Q5_1, Q4_0, Q4_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS.

Rows that are not whole blocks of a type get the nearest type that takes them. Norms and biases stay as they are. \
Quantise from F32, F16 or BF16 where you can: what an earlier quantisation lost stays lost. With --verbose stderr \
shows every tensor's type and error.

Example:
  metal-attention quantize model-f16.gguf model-q4_0.gguf q4_0";

/// Store a model's matrices in another type
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Args {
    /// GGUF file to read (any part, where it is split)
    input: PathBuf,

    /// GGUF file to write
    output: PathBuf,

    /// Type of the matrices
    #[arg(value_name = "TYPE")]
    ty: TensorType,

    #[command(flatten)]
    types: TypeArgs,

    /// Read the input into memory instead of mapping it
    #[arg(long)]
    no_mmap: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<(), CliError> {
    let file = if args.no_mmap { GgufFile::read(&args.input) } else { GgufFile::open(&args.input) };
    let file = file.map_err(Error::from)?;
    refuse_overwriting(args, &file)?;
    if file.tensors().is_empty() {
        return Err(CliError::Usage(format!("{} has no tensors to quantise", args.input.display())));
    }
    let tied = file.tensor("output.weight").is_none();
    let types = TensorTypes { base: args.ty, args: &args.types, tied };
    let mut metadata = file.metadata().clone();
    for key in ["split.no", "split.count", "split.tensors.count"] {
        metadata.remove(key);
    }
    types.describe(&mut metadata);
    let declare = |tensor: &Tensor| {
        let ty = if is_matrix(tensor) { types.matrix(tensor.name(), tensor.row_len()) } else { tensor.ty() };
        TensorDecl { ty, ..TensorDecl::from(tensor) }
    };
    let tensors: Vec<_> = file.tensors().iter().map(declare).collect();

    // A half file does not stay.
    let _asked = interrupt::ask();
    let progress = Progress::steps("quantising", file.tensors().iter().map(|t| t.n_elements() as u64).sum());
    let mut writer = GgufWriter::new(OutputFile::create(&args.output)?, 3, &metadata, &tensors).map_err(Error::from)?;
    let mut done = 0;
    for (from, to) in file.tensors().iter().zip(&tensors) {
        let rmse = convert(from, to.ty, &mut writer, |n| progress.set(done + n as u64))?;
        from.release_pages();
        done += from.n_elements() as u64;
        let (name, shape, ty) = (from.name(), from.shape(), from.ty());
        if ty == to.ty {
            tracing::info!("{name:<26} {shape:?} {ty}, unchanged");
        } else {
            tracing::info!("{name:<26} {shape:?} {ty} -> {}, root-mean-square error {rmse:.3e}", to.ty);
        }
    }
    writer.finish().map_err(Error::from)?.commit()?;
    drop(progress);

    let sizes = |bytes: u64| {
        let n_bits = bytes as f64 * 8.0;
        format!("{} ({:.2} bits per weight)", units::bytes(bytes), n_bits / done as f64)
    };
    let written = tensors.iter().map(|t| t.ty.row_bytes(t.shape.iter().product()) as u64).sum();
    // Where stderr is closed the note is lost, and nothing else.
    let _ = writeln!(io::stderr(), "{} -> {}", sizes(file.tensor_bytes()), sizes(written));
    Ok(())
}

/// Whether a tensor's numbers may be quantised: weights with rows, but no norms.
fn is_matrix(tensor: &Tensor) -> bool {
    tensor.shape().len() > 1 && tensor.name().ends_with(".weight") && !tensor.name().ends_with("norm.weight")
}

fn refuse_overwriting(args: &Args, file: &GgufFile) -> Result<(), CliError> {
    let real = |path: &Path| fs::canonicalize(path).ok();
    let same = real(&args.input).is_some_and(|input| real(&args.output) == Some(input));
    let name = args.output.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    if same || (file.n_parts() > 1 && name.contains("-of-")) {
        let (input, output) = (args.input.display(), args.output.display());
        return Err(CliError::Usage(format!("{output} would overwrite {input}: give the output another name")));
    }
    Ok(())
}

/// Writes `tensor` as `ty` and returns the root-mean-square difference. `progress` gets the elements done so far.
fn convert(
    tensor: &Tensor,
    ty: TensorType,
    writer: &mut GgufWriter<OutputFile>,
    progress: impl Fn(usize),
) -> Result<f64, CliError> {
    let (mut values, mut back, mut blocks) = (vec![0.0; CHUNK], vec![0.0; CHUNK], Vec::new());
    let mut sum_of_squares = 0.0;
    let mut done = 0;
    for source in tensor.bytes().chunks(tensor.ty().row_bytes(CHUNK)) {
        if interrupt::requested() {
            return Err(CliError::Interrupted);
        }
        let n = (tensor.n_elements() - done).min(CHUNK);
        if ty == tensor.ty() {
            // Copied first: whether the file is still there is found out here, not by the system while it writes.
            blocks.clear();
            blocks.extend_from_slice(source);
            writer.write(&blocks).map_err(Error::from)?;
        } else {
            let (values, back) = (&mut values[..n], &mut back[..n]);
            tensor.ty().dequantize(source, values);
            if let Some(i) = values.iter().position(|v| !v.is_finite()) {
                let (name, value) = (tensor.name(), values[i]);
                return Err(CliError::General(format!("cannot quantise {name}: element {} is {value}", done + i)));
            }
            blocks.clear();
            ty.quantize(values, &mut blocks).map_err(Error::from)?;
            writer.write(&blocks).map_err(Error::from)?;
            ty.dequantize(&blocks, back);
            sum_of_squares += values.iter().zip(back).map(|(a, b)| f64::from(*a - *b).powi(2)).sum::<f64>();
        }
        done += n;
        progress(done);
    }
    Ok((sum_of_squares / tensor.n_elements() as f64).sqrt())
}
