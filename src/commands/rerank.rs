//! `rerank`: scores documents by how well they answer a query, with a reranker model.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use metal_attention::{Error, Model, Pooler, Reranker, best_first};
use serde_json::json;

use crate::cli_error::CliError;
use crate::commands::embed::EmbedArgs;
use crate::embed_texts::embed_texts;
use crate::engine_args::at_least_one;
use crate::metadata_text::safe;
use crate::model_args::ModelArgs;
use crate::progress::ProgressLine;
use crate::text_input::{read_file, read_stdin};
use crate::token_ids;

/// The largest number of characters of a document in the table.
const SHOWN: usize = 100;

const AFTER_HELP: &str = "\
The model must be a reranker, which reads query and document together and returns a score; higher is better. Scores are those \
of the model: those of most models can only be compared with each other, and are no probabilities. With --json stdout gets one object \
with query and results, best first; the index of a result counts the documents from 0, those of -d first.

Examples:
  metal-attention rerank -m bge-reranker-v2-m3.gguf -q \"How far is the moon?\" -d \"384 400 km\" -d \"It is white.\"
  metal-attention rerank -m qwen3-reranker.gguf -q \"what is a panda\" -f documents.txt --top-n 5 --json";

/// Sort documents by how well they answer a query
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,

    /// The query
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    query: String,

    /// A document; may be given several times
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    document: Vec<String>,

    /// Read documents from a file, one a line (empty lines are skipped), after those of -d; -: from stdin
    #[arg(short, long, value_name = "FILE")]
    file: Vec<PathBuf>,

    /// Print the best N only
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    top_n: Option<usize>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    engine: EmbedArgs,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<(), CliError> {
    let model = args.model.open()?;
    let reranker = Reranker::new(&model)?;
    let documents = documents(args)?;
    let texts = documents.iter().enumerate().map(|(i, document)| encode(&model, &reranker, &args.query, i, document));
    let texts = texts.collect::<Result<Vec<_>, _>>()?;
    let longest = texts.iter().map(Vec::len).max().unwrap_or(0);
    let loading = ProgressLine::spinner("loading the model");
    loading.weigh(model.gguf().tensor_bytes());
    let mut pass = model.forward_pass(&args.engine.options(longest, texts.len()))?;
    drop(loading);
    let mut scores = vec![0.0; texts.len()];
    embed_texts(&mut *pass, &Pooler::new(&model, None), &texts, |i, outputs| {
        scores[i] = reranker.score(&outputs);
        Ok(())
    })?;
    let best = best_first(&scores);
    let best = &best[..args.top_n.unwrap_or(best.len()).min(best.len())];
    let text = if args.json {
        let result = |&i: &usize| json!({ "index": i, "relevance_score": scores[i], "document": documents[i] });
        let results: Vec<_> = best.iter().map(result).collect();
        format!("{}\n", json!({ "query": args.query, "results": results }))
    } else {
        table(best, &scores, &documents)
    };
    std::io::stdout().write_all(text.as_bytes()).map_err(CliError::stdout)
}

/// The documents of the command line, then those of files. An error if there is none.
fn documents(args: &Args) -> Result<Vec<String>, CliError> {
    let mut documents = args.document.clone();
    for path in &args.file {
        let text = if path == Path::new("-") { read_stdin()? } else { read_file(path)? };
        documents.extend(text.lines().filter(|line| !line.trim().is_empty()).map(str::to_owned));
    }
    if documents.is_empty() {
        return Err(CliError::Usage("there are no documents: give -d TEXT, or -f FILE with one a line".into()));
    }
    Ok(documents)
}

/// The tokens of the query with the document at index `i`. An error if they do not fit into the trained context.
fn encode(model: &Model, reranker: &Reranker, query: &str, i: usize, document: &str) -> Result<Vec<u32>, CliError> {
    let ids = reranker.encode(query, document);
    if ids.is_empty() {
        return Err(Error::EmptyPrompt.into());
    }
    token_ids::check(&ids, model.spec().n_vocab)?;
    let n_ctx = model.spec().n_ctx_train;
    if ids.len() > n_ctx {
        return Err(CliError::Usage(format!(
            "document {} ({:?}) has {} tokens together with the query, but the context has room for {n_ctx}: shorten it",
            i + 1,
            shown(document, 40),
            ids.len()
        )));
    }
    Ok(ids)
}

/// The results as text, best first.
fn table(best: &[usize], scores: &[f32], documents: &[String]) -> String {
    let mut text = String::new();
    for (rank, &i) in best.iter().enumerate() {
        let _ = writeln!(text, "{:>4} {:>10.4}  {}", rank + 1, scores[i], shown(&documents[i], SHOWN));
    }
    text
}

/// The first `most` characters of a document, escaped for a terminal.
fn shown(document: &str, most: usize) -> String {
    safe(document).chars().take(most).collect()
}
