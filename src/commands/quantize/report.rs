//! `--report`: prints the type, size and error of each tensor, and the perplexity before and after.

use std::fmt::Write as _;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use metal_attention::gguf::{Tensor, TensorDecl};
use metal_attention::{EngineOptions, Model, ModelOptions};

use super::QuantizationError;
use crate::cli_error::CliError;
use crate::divergence::{Divergence, log_softmax};
use crate::log_likelihood::LogLikelihood;
use crate::progress::ProgressLine;
use crate::{chunks, interrupt, text_input, token_ids};

/// The length of a chunk in tokens, unless the model was trained with a shorter context.
const N_CTX: usize = 512;

/// The report of a quantisation, filled while tensors are written.
pub struct TensorReport {
    /// The file with the text to predict. `None`: perplexity is not measured.
    text: Option<PathBuf>,
    /// The cells of the table, the names of columns first.
    lines: Vec<[String; 6]>,
}

impl TensorReport {
    /// An empty report. If `text` is not empty, it names the text to predict.
    pub fn new(text: &Path) -> Self {
        let head = ["tensor", "shape", "from", "to", "bits", "error"].map(str::to_owned);
        Self { text: (!text.as_os_str().is_empty()).then(|| text.to_owned()), lines: vec![head] }
    }

    /// Adds the tensor `from`, which was written as `to`.
    pub fn add(&mut self, from: &Tensor, to: &TensorDecl, conversion_error: &QuantizationError) {
        let error =
            if from.ty() == to.ty { "-".into() } else { format!("{:.3} %", 100.0 * conversion_error.relative()) };
        self.lines.push([
            from.name().to_owned(),
            format!("{:?}", from.shape()),
            from.ty().to_string(),
            to.ty.to_string(),
            format!("{:.2}", to.ty.bits_per_weight()),
            error,
        ]);
    }

    /// Prints the table, `sizes` (before and after), and how well the models `input` and `output` predict the text.
    pub fn print(&self, input: &Path, output: &Path, sizes: &[String; 2]) -> Result<(), CliError> {
        let widths: [usize; 6] =
            std::array::from_fn(|i| self.lines.iter().map(|line| line[i].len()).max().unwrap_or(0));
        let mut text = String::new();
        for [name, shape, from, to, bits, error] in &self.lines {
            let [a, b, c, d, e, f] = widths;
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{name:<a$}  {shape:<b$}  {from:<c$}  {to:<d$}  {bits:>e$}  {error:>f$}");
        }
        let _ = writeln!(text, "\nsize {} -> {}", sizes[0], sizes[1]);
        text += &match &self.text {
            Some(path) => predictions(path, input, output)?,
            None => "perplexity: not measured; --report TEXT names a text to predict\n".into(),
        };
        io::stdout().lock().write_all(text.as_bytes()).map_err(CliError::stdout)
    }
}

/// The perplexity of both models on a text, and the divergence of the second from the first.
fn predictions(text: &Path, before: &Path, after: &Path) -> Result<String, CliError> {
    let open = |path| Model::open_with(path, &ModelOptions::default());
    let (before, after) = (open(before)?, open(after)?);
    let text = text_input::read_file(text)?;
    let n_ctx = before.spec().n_ctx_train.min(N_CTX);
    let (ids, bos) = chunks::tokenize(&*before.tokenizer()?, &text);
    chunks::check_length(ids.len(), n_ctx)?;
    token_ids::check(&ids, before.spec().n_vocab)?;
    let options = EngineOptions { n_ctx: Some(n_ctx), watch: interrupt::watch(), ..Default::default() };
    let (mut from, mut to) = (before.forward_pass(&options)?, after.forward_pass(&options)?);
    let (n_chunks, n_ubatch) = (ids.len() / n_ctx, from.n_ubatch());
    let progress =
        ProgressLine::steps("predicting the text", n_chunks as u64).watched(2 * before.spec().n_layer() * n_ctx);
    let (mut one, mut other, mut divergence) = <(LogLikelihood, LogLikelihood, Divergence)>::default();
    for (i, chunk) in ids.chunks_exact(n_ctx).enumerate() {
        let done = chunks::evaluate(&mut [&mut *from, &mut *to], chunk, bos, n_ubatch, |logits, next| {
            one.add(&logits[0], next);
            other.add(&logits[1], next);
            divergence.add(&logits[1], |i| log_softmax(logits[0].row(i)), next);
            Ok(())
        })?;
        if !done {
            return Err(CliError::Interrupted);
        }
        progress.set(i as u64 + 1);
    }
    let estimate = |total: &LogLikelihood| format!("{:.4} +/- {:.4}", total.perplexity(), total.standard_error());
    let change = 100.0 * (other.perplexity() / one.perplexity() - 1.0);
    let n = one.count();
    let lines = divergence.lines();
    let divergence = lines.split_once('\n').map_or("", |(_, rest)| rest);
    Ok(format!("perplexity {} -> {} ({change:+.2} %) over {n} tokens\n{divergence}", estimate(&one), estimate(&other)))
}
