//! `quantize`: writes a copy of a model with its matrices in other tensor types.
//!
//! A recipe chooses the type of each tensor (`tensor_types.rs`). Each tensor that changes is dequantised to F32 and quantised
//! again, in chunks of rows on several threads; the others are copied. `report.rs` prints the losses.

mod report;

use std::fs;
use std::io::{self, Write};
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::thread;

use metal_attention::gguf::{GgufFile, GgufWriter, Imatrix, Metadata, Tensor, TensorDecl, TensorType};
use metal_attention::{Error, Recipe};

use self::report::TensorReport;
use crate::cli_error::CliError;
use crate::find_model::find;
use crate::interrupt;
use crate::map_gguf::map_gguf;
use crate::output_file::OutputFile;
use crate::progress::ProgressLine;
use crate::tensor_types::{self, TypeArgs};
use crate::threads::map_on_threads;
use crate::units;

/// The largest absolute value that an NVFP4 block holds: its largest scale times its largest element.
const NVFP4_LARGEST: f32 = 448.0 * 6.0;
/// The number of elements that a thread converts at a time, about.
const CHUNK: usize = 1 << 16;

const AFTER_HELP: &str = "\
Recipes choose a type for each matrix, following llama.cpp's of the same name: Q8_0, Q6_K, Q5_K_M, Q5_K_S, Q5_1, Q5_0, \
Q4_K_M, Q4_K_S, Q4_1, Q4_0, IQ4_NL, IQ4_XS, Q3_K_L, Q3_K_M, Q3_K_S, IQ3_M, IQ3_S, IQ3_XS, IQ3_XXS, Q2_K, Q2_K_S, IQ2_M, \
IQ2_S, IQ2_XS, IQ2_XXS, IQ1_M, IQ1_S, TQ2_0, TQ1_0, Q2_0, Q1_0, MXFP4_MOE, F32, F16, BF16. Types for all matrices but the \
head: Q5_K, Q4_K, Q3_K, MXFP4, NVFP4. See docs/gguf.md for what they cost and keep.

Matrices whose rows are not whole blocks of a type get the nearest type that fits. Norms, biases and routers are not \
changed. Quantise from F32, F16 or BF16 if you can: what an earlier quantisation lost stays lost. --imatrix improves \
every recipe below 6 bits, and recipes below 3 bits need it. With --verbose stderr shows every \
tensor's type and error.

Examples:
  metal-attention quantize model-f16.gguf model-q4_k_m.gguf q4_k_m
  metal-attention quantize model-f16.gguf model-q4_k_m.gguf q4_k_m --report text.txt
  metal-attention imatrix -m model-f16.gguf -f text.txt -o model.imatrix.gguf
  metal-attention quantize model-f16.gguf model-iq2_m.gguf iq2_m --imatrix model.imatrix.gguf";

/// Store a model's matrices in other types
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Args {
    /// GGUF file to read (any part of a split one), or a model's name in the form of -m of other commands
    input: PathBuf,

    /// GGUF file to write
    output: PathBuf,

    /// Recipe for the types of the matrices, or one type
    #[arg(value_name = "RECIPE", value_parser = tensor_types::recipe)]
    recipe: &'static Recipe,

    #[command(flatten)]
    types: TypeArgs,

    /// Importance of the matrices' columns, from imatrix or llama.cpp's llama-imatrix
    #[arg(long, value_name = "FILE")]
    imatrix: Option<PathBuf>,

    /// Show the error of every tensor, and the perplexity of TEXT before and after
    #[arg(long, value_name = "TEXT", num_args = 0..=1, default_missing_value = "")]
    report: Option<PathBuf>,

    /// Threads that quantise [default: one for each core]
    #[arg(short, long, value_name = "N")]
    threads: Option<NonZero<usize>>,

    /// Read the input into memory instead of mapping it
    #[arg(long)]
    no_mmap: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<(), CliError> {
    let input = find(&args.input)?;
    let file = if args.no_mmap { GgufFile::read(input) } else { map_gguf(input) };
    let file = file.map_err(Error::from)?;
    refuse_overwriting(args, &file)?;
    if file.tensors().is_empty() {
        return Err(CliError::Usage(format!("{} has no tensors to quantise", args.input.display())));
    }
    let imatrix = args.imatrix.as_ref().map(Imatrix::open).transpose().map_err(Error::from)?;
    let mut metadata = file.metadata().clone();
    for key in ["split.no", "split.count", "split.tensors.count"] {
        metadata.remove(key);
    }
    let mut tensors: Vec<_> = file.tensors().iter().map(TensorDecl::from).collect();
    args.types.apply(args.recipe, imatrix.is_some(), &mut metadata, &mut tensors);
    warn_of_larger_types(file.tensors(), &tensors);
    let importance: Vec<_> = tensors.iter().map(|t| importance(t, imatrix.as_ref())).collect::<Result<_, _>>()?;
    for ((from, to), importance) in file.tensors().iter().zip(&tensors).zip(&importance) {
        if importance.is_none() && from.ty() != to.ty && args.recipe.needs_importance(&to.name, to.ty) {
            return Err(needs_importance(args, imatrix.is_some(), to));
        }
    }
    if let (Some(imatrix), Some(path)) = (&imatrix, &args.imatrix) {
        describe_importance(imatrix, path, &mut metadata);
    }

    // After Ctrl-C no file is left behind.
    let _ctrl_c = interrupt::cancel_on_ctrl_c();
    let progress = ProgressLine::steps("quantising", file.tensors().iter().map(|t| t.n_elements() as u64).sum());
    let mut writer = GgufWriter::new(OutputFile::create(&args.output)?, 3, &metadata, &tensors).map_err(Error::from)?;
    let n_threads = args.threads.or_else(|| thread::available_parallelism().ok()).map_or(1, NonZero::get);
    let mut report = args.report.as_deref().map(TensorReport::new);
    let mut done = 0;
    for ((from, to), importance) in file.tensors().iter().zip(&tensors).zip(importance) {
        let conversion = TensorConversion { from, to: to.ty, importance: importance.as_deref(), n_threads };
        let error = conversion.run(&mut writer, |n| progress.set(done + n as u64))?;
        from.release_pages();
        done += from.n_elements() as u64;
        let (name, shape, ty) = (from.name(), from.shape(), from.ty());
        if ty == to.ty {
            tracing::info!("{name:<26} {shape:?} {ty}, unchanged");
        } else {
            let rmse = error.root_mean_square();
            tracing::info!("{name:<26} {shape:?} {ty} -> {}, root-mean-square error {rmse:.3e}", to.ty);
        }
        if let Some(report) = &mut report {
            report.add(from, to, &error);
        }
    }
    writer.finish().map_err(Error::from)?.commit()?;
    drop(progress);

    let sizes = |bytes: u64| {
        let n_bits = bytes as f64 * 8.0;
        format!("{} ({:.2} bits per weight)", units::bytes(bytes), n_bits / done as f64)
    };
    let written = tensors.iter().map(|t| t.ty.row_bytes(t.shape.iter().product()) as u64).sum();
    let sizes = [sizes(file.tensor_bytes()), sizes(written)];
    if let Some(report) = report {
        return report.print(&args.input, &args.output, &sizes);
    }
    // Errors are ignored, because stderr may be closed.
    let _ = writeln!(io::stderr(), "{} -> {}", sizes[0], sizes[1]);
    Ok(())
}

/// The importance of the columns of `tensor`, `[n_matrices, n_in]`. `None`: the file has none for it. An error if it has
/// another number of columns.
fn importance(tensor: &TensorDecl, imatrix: Option<&Imatrix>) -> Result<Option<Vec<f32>>, CliError> {
    let Some(columns) = imatrix.and_then(|imatrix| imatrix.mean_squares(&tensor.name)) else { return Ok(None) };
    let expected = tensor.shape[0] * tensor.shape.get(2).copied().unwrap_or(1);
    if columns.len() == expected {
        return Ok(Some(columns));
    }
    // Rows of the embedding table are looked up, not multiplied: it is stored without importance.
    if tensor.name == "token_embd.weight" {
        return Ok(None);
    }
    Err(CliError::Usage(format!(
        "the importance file is of another model: {} has {} columns there and {expected} here",
        tensor.name,
        columns.len(),
    )))
}

/// The error for a tensor whose type needs importance that is missing.
fn needs_importance(args: &Args, given: bool, tensor: &TensorDecl) -> CliError {
    let (input, recipe, name, ty) = (args.input.display(), args.recipe.name(), &tensor.name, tensor.ty);
    let advice = if given {
        "the importance file says nothing about it: make one of this model".to_owned()
    } else {
        format!("make a file with `metal-attention imatrix -m {input} -f TEXT -o FILE` and give it with --imatrix FILE")
    };
    CliError::Usage(format!(
        "{recipe} stores {name} in {ty}, which is of no use without the importance of columns: {advice}"
    ))
}

/// Records the origin of the importance in the metadata, under llama.cpp's keys.
fn describe_importance(imatrix: &Imatrix, path: &Path, metadata: &mut Metadata) {
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    metadata.set("quantize.imatrix.file", path.display().to_string());
    if let Some(dataset) = imatrix.datasets.first() {
        metadata.set("quantize.imatrix.dataset", dataset.as_str());
    }
    metadata.set("quantize.imatrix.entries_count", count(imatrix.names().len()));
    if imatrix.n_chunks > 0 {
        metadata.set("quantize.imatrix.chunks_count", count(imatrix.n_chunks));
    }
}

/// An error if the output file is the input file, or might be one of its parts.
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

/// Warns if quantised matrices get types of as many bits or more: the file grows and the errors add up.
fn warn_of_larger_types(from: &[Tensor], to: &[TensorDecl]) {
    let is_float = |ty: TensorType| matches!(ty, TensorType::F32 | TensorType::F16 | TensorType::BF16);
    let mut larger: Vec<(TensorType, TensorType, usize)> = Vec::new();
    for (from, to) in from.iter().zip(to) {
        let (from, to, n) = (from.ty(), to.ty, from.n_elements());
        if from == to || is_float(from) || is_float(to) || to.row_bytes(n) < from.row_bytes(n) {
            continue;
        }
        match larger.iter_mut().find(|(a, b, _)| (*a, *b) == (from, to)) {
            Some((_, _, count)) => *count += 1,
            None => larger.push((from, to, 1)),
        }
    }
    for (from, to, n) in larger {
        tracing::warn!(
            "{n} of the matrices go from {from} to {to}: the file gets larger and worse, since what {from} lost stays lost \
             and {to} loses more; quantise from F32, F16 or BF16"
        );
    }
}

/// The error of a tensor's conversion, as sums over its elements.
#[derive(Default)]
struct QuantizationError {
    /// The number of elements.
    n: usize,
    /// The sum of the squares of the differences.
    squares: f64,
    /// The sum of the squares of the original elements.
    squares_of_original: f64,
}

impl QuantizationError {
    /// The root-mean-square error.
    fn root_mean_square(&self) -> f64 {
        (self.squares / self.n as f64).sqrt()
    }

    /// The error relative to the original elements: 0 is exact.
    fn relative(&self) -> f64 {
        if self.squares_of_original == 0.0 { 0.0 } else { (self.squares / self.squares_of_original).sqrt() }
    }
}

/// The conversion of one tensor.
struct TensorConversion<'a> {
    /// The original tensor.
    from: &'a Tensor,
    /// The type it gets.
    to: TensorType,
    /// The importance of the columns, `[n_matrices, row_len]`.
    importance: Option<&'a [f32]>,
    /// The number of threads.
    n_threads: usize,
}

impl TensorConversion<'_> {
    /// Converts and writes the tensor. Returns its error. `progress` gets the number of elements done so far.
    fn run(
        &self,
        writer: &mut GgufWriter<OutputFile>,
        progress: impl Fn(usize),
    ) -> Result<QuantizationError, CliError> {
        let tensor = self.from;
        // A chunk has whole rows of one matrix, so that one row of importance is for all of it.
        let n_rows = (CHUNK / tensor.row_len()).clamp(1, tensor.shape().get(1).copied().unwrap_or(1));
        let row_bytes = tensor.ty().row_bytes(tensor.row_len());
        let rows_of_matrix = tensor.shape().get(1).copied().unwrap_or(1);
        let mut chunks = Vec::new();
        for matrix in 0..tensor.n_rows() / rows_of_matrix {
            chunks.extend((0..rows_of_matrix).step_by(n_rows).map(|row| (matrix, row)));
        }
        let mut total = QuantizationError::default();
        for part in chunks.chunks(self.n_threads) {
            if interrupt::requested() {
                return Err(CliError::Interrupted);
            }
            let source = |&(matrix, row): &(usize, usize)| {
                let rows = n_rows.min(rows_of_matrix - row);
                &tensor.bytes()[(matrix * rows_of_matrix + row) * row_bytes..][..rows * row_bytes]
            };
            let results = map_on_threads(part, |chunk| self.convert(source(chunk), chunk.0));
            for (result, chunk) in results.into_iter().zip(part) {
                let (blocks, error) = result?;
                writer.write(&blocks).map_err(Error::from)?;
                total.squares += error.squares;
                total.squares_of_original += error.squares_of_original;
                total.n += source(chunk).len() / row_bytes * tensor.row_len();
            }
            progress(total.n);
        }
        Ok(total)
    }

    /// Converts some rows of the matrix number `matrix`. Returns their blocks and the error.
    fn convert(&self, source: &[u8], matrix: usize) -> Result<(Vec<u8>, QuantizationError), CliError> {
        if self.to == self.from.ty() {
            // Copied here, so that a file that was cut short is reported now and not as a signal during the write.
            return Ok((source.to_vec(), QuantizationError::default()));
        }
        let row_len = self.from.row_len();
        let n = source.len() / self.from.ty().row_bytes(row_len) * row_len;
        let (mut values, mut back, mut blocks) = (vec![0.0; n], vec![0.0; n], Vec::new());
        self.from.ty().dequantize(source, &mut values);
        if let Some(value) = values.iter().find(|v| !v.is_finite()) {
            return Err(CliError::General(format!("cannot quantise {}: an element is {value}", self.from.name())));
        }
        let importance = self.importance.map(|columns| &columns[matrix * row_len..][..row_len]);
        self.to.quantize_rows(&values, importance, &mut blocks).map_err(Error::from)?;
        self.to.dequantize(&blocks, &mut back);
        self.check_range(&values, &back)?;
        let squares = values.iter().zip(&back).map(|(a, b)| f64::from(a - b).powi(2)).sum();
        let squares_of_original = values.iter().map(|&x| f64::from(x).powi(2)).sum();
        Ok((blocks, QuantizationError { n, squares, squares_of_original }))
    }

    /// Refuses elements beyond the range of the type. `back` are `values` after quantisation and dequantisation.
    fn check_range(&self, values: &[f32], back: &[f32]) -> Result<(), CliError> {
        let largest = values.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
        // Its largest scale is 448 and its largest element 6; larger values would be clipped without becoming infinite.
        let is_cut = self.to == TensorType::NVFP4 && largest > NVFP4_LARGEST;
        if !is_cut && back.iter().all(|value| value.is_finite()) {
            return Ok(());
        }
        Err(CliError::General(format!(
            "cannot store {} in {}: its elements go up to {largest:e}, which is beyond what {} holds; choose another \
             recipe, BF16 or F32 for one",
            self.from.name(),
            self.to,
            self.to
        )))
    }
}
