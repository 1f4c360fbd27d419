//! `embed`: prints embeddings of texts, or the cosines between them.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;

use metal_attention::{CacheType, Device, EngineOptions, Error, Model, Pooler, Pooling};
use serde_json::json;

use crate::cli_error::CliError;
use crate::embed_texts::embed_texts;
use crate::engine_args::at_least_one;
use crate::interrupt;
use crate::metadata_text::safe;
use crate::model_args::ModelArgs;
use crate::progress::ProgressLine;
use crate::text_input::{EncodingArgs, read_file};
use crate::token_ids;

const AFTER_HELP: &str = "\
The vectors have length 1. The file says how the hidden states of a text's tokens become one vector (their mean, the first or \
the last token); the default is the mean. For two texts or more a table has the cosine of each pair: 1 is \
the same direction. With --json stdout gets an object with embedding and tokens (their number), one line for \
each text.

Without -m the first word is the model, if it names one; every other word is a text.

Examples:
  metal-attention embed -m bge-small.gguf \"How far is the moon?\" --json
  metal-attention embed nomic-embed-text \"a cat\" \"a kitten\" \"a bus\"
  metal-attention embed -m nomic-embed-text.gguf -f chapter1.txt -f chapter2.txt";

/// Make embeddings of texts
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Args {
    /// The texts, one each; without -m, the model comes first
    #[arg(value_name = "TEXT")]
    words: Vec<String>,

    #[command(flatten)]
    model: ModelArgs,

    /// A text; may be given several times
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Vec<String>,

    /// Read a text from a file; may be given several times, and comes after those of -p
    #[arg(short, long, value_name = "FILE")]
    file: Vec<PathBuf>,

    /// Token ids instead of texts, separated by commas; nothing is added to them
    #[arg(long, value_name = "IDS", conflicts_with_all = ["prompt", "file"])]
    tokens: Option<String>,

    /// How hidden states become one vector: mean, first or last, instead of the file's way
    #[arg(long, value_name = "POOLING", value_parser = pooling)]
    pooling: Option<Pooling>,

    /// Print a JSON object for each text
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    encoding: EncodingArgs,

    #[command(flatten)]
    engine: EmbedArgs,
}

/// Device and precision for commands that embed or rerank.
#[derive(clap::Args)]
#[command(next_help_heading = "Engine")]
pub struct EmbedArgs {
    /// The device of the model: auto (a GPU in which it fits, preferably through CUDA, else the CPU), cpu,
    /// cuda, cuda:1, wgpu, wgpu:1 (by index), wgpu:NAME
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    device: Device,

    /// Threads that compute on the CPU [default: one for each physical core]
    #[arg(short = 't', long, value_name = "N", value_parser = at_least_one)]
    threads: Option<usize>,

    /// Compute in F32 instead of quantising activations to 8 bits: slower, more exact
    #[arg(long)]
    exact: bool,

    /// Tokens that go through the layers at once; raised to the length of the longest text
    #[arg(long, value_name = "N", default_value = "512", value_parser = at_least_one)]
    ubatch_size: usize,
}

impl EmbedArgs {
    /// The options of a forward pass for `n_texts` texts of at most `longest` tokens. Nothing is kept between batches, so the
    /// context and the number of sequences are those of one batch.
    pub fn options(&self, longest: usize, n_texts: usize) -> EngineOptions {
        let n_ubatch = self.ubatch_size.max(longest);
        EngineOptions {
            device: self.device.clone(),
            n_ctx: Some(longest),
            n_seq: n_texts.min((n_ubatch / longest.max(1)).max(1)).min(256),
            n_threads: self.threads,
            cache_type: CacheType::F32,
            exact: self.exact,
            n_ubatch: Some(n_ubatch),
            watch: interrupt::watch(),
            ..Default::default()
        }
    }
}

/// Parses the value of `--pooling`.
fn pooling(name: &str) -> Result<Pooling, String> {
    match name {
        "mean" => Ok(Pooling::Mean),
        "first" | "cls" => Ok(Pooling::First),
        "last" => Ok(Pooling::Last),
        other => Err(format!("there is no pooling {other:?}: mean, first or last")),
    }
}

/// Runs the command.
pub fn run(args: &Args) -> Result<(), CliError> {
    let (source, words) = args.model.with_words(&args.words);
    let model = source.open()?;
    let (names, texts) = read_texts(args, words, &source, &model)?;
    let pooler = Pooler::new(&model, args.pooling);
    if pooler.is_ranker() {
        let why = "the model is a reranker, which scores documents for a query: use rerank, or --pooling".into();
        return Err(CliError::Usage(why));
    }
    let longest = texts.iter().map(Vec::len).max().unwrap_or(0);
    let loading = ProgressLine::spinner("loading the model");
    loading.weigh(model.gguf().tensor_bytes());
    let mut pass = model.forward_pass(&args.engine.options(longest, texts.len()))?;
    drop(loading);
    let mut out = std::io::stdout().lock();
    let mut embeddings = Vec::with_capacity(texts.len());
    embed_texts(&mut *pass, &pooler, &texts, |i, embedding| {
        if args.json {
            let line = json!({ "embedding": embedding, "tokens": texts[i].len() });
            writeln!(out, "{line}").map_err(CliError::stdout)?;
        }
        embeddings.push(embedding);
        Ok(())
    })?;
    if !args.json {
        out.write_all(table(&names, &embeddings).as_bytes()).map_err(CliError::stdout)?;
    }
    Ok(())
}

/// The names and the tokens of all texts. Each text has at least one token and fits into the trained context.
fn read_texts(
    args: &Args,
    words: &[String],
    source: &ModelArgs,
    model: &Model,
) -> Result<(Vec<String>, Vec<Vec<u32>>), CliError> {
    let n_vocab = model.spec().n_vocab;
    if let Some(tokens) = &args.tokens {
        if let Some(word) = words.first() {
            return Err(CliError::Usage(format!("--tokens is given in the place of texts, as {:?} is", safe(word))));
        }
        let ids = token_ids::parse(tokens)?;
        if ids.is_empty() {
            return Err(Error::EmptyPrompt.into());
        }
        token_ids::check(&ids, n_vocab)?;
        return Ok((vec!["tokens".into()], vec![ids]));
    }
    let tokenizer = source.tokenizer(model)?;
    let mut texts = [words, &args.prompt].concat();
    let mut names = texts.clone();
    for path in &args.file {
        names.push(path.display().to_string());
        texts.push(read_file(path)?);
    }
    if texts.is_empty() {
        return Err(CliError::Usage(
            "there is nothing to embed: give a TEXT, -p TEXT, -f FILE, or --tokens IDS".into(),
        ));
    }
    let n_ctx_train = model.spec().n_ctx_train;
    let mut all = Vec::with_capacity(texts.len());
    for text in &texts {
        let ids = tokenizer.encode(text, args.encoding.options());
        if ids.is_empty() {
            return Err(Error::EmptyPrompt.into());
        }
        token_ids::check(&ids, n_vocab)?;
        if ids.len() > n_ctx_train {
            return Err(Error::PromptTooLong { n_prompt: ids.len(), n_ctx: n_ctx_train, n_ctx_train }.into());
        }
        all.push(ids);
    }
    Ok((names, all))
}

/// The text output: the numbers of a single vector, or a table of the cosines between several.
fn table(names: &[String], embeddings: &[Vec<f32>]) -> String {
    let mut text = String::new();
    if let [one] = embeddings {
        for x in one {
            let _ = writeln!(text, "{x}");
        }
        return text;
    }
    for (i, (name, a)) in names.iter().zip(embeddings).enumerate() {
        let cosine = |b: &Vec<f32>| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
        let _ = write!(text, "{:>3} ", i + 1);
        for b in embeddings {
            let _ = write!(text, "{:>8.4}", cosine(b));
        }
        let name: String = safe(name).chars().take(40).collect();
        let _ = writeln!(text, "  {name}");
    }
    text
}
