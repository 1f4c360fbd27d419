//! `draft`: the tokens that a drafter proposes after a text.

use std::io::{self, Write};
use std::path::PathBuf;

use metal_attention::backends::BackendPass;
use metal_attention::speculation::{
    Draft, DraftFile, DraftLogits, DraftModel, DraftModelOptions, DraftRequest, Drafter, Evaluated, HeadDrafter,
};
use metal_attention::{BatchToken, EngineOptions, Error, ForwardError, HiddenRequest, Model, OutputKind, TracedTokens};

use crate::cli_error::CliError;
use crate::completion;
use crate::engine_args::{EngineArgs, at_least_one};
use crate::interrupt;
use crate::model_args::ModelArgs;
use crate::npy;
use crate::output_file::OutputFile;
use crate::progress::ProgressLine;
use crate::token_input::TokensArgs;

const AFTER_HELP: &str = "\
The model evaluates all tokens but the last one. Then the drafter proposes the tokens that follow the last one, each the \
likeliest by its own logits; what the model itself would choose does not matter. The drafter is that of --draft, or else the \
prediction head (multi-token prediction, MTP) in the model's file. Fewer tokens than -n are proposed if the drafter has a limit.

Examples:
  metal-attention draft -m model.gguf -p \"Once upon a time\" -n 3
  metal-attention draft -m model.gguf --draft small.gguf -p \"Once upon a time\" -n 3
  metal-attention draft -m model.gguf --tokens 1,403,407 -n 4 --json
  metal-attention draft -m model.gguf --tokens 1,403,407 -n 4 -o logits.npy";

/// Show the tokens that a model's drafter proposes after a text
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,

    /// The file or name, as of -m, of a smaller model that proposes the tokens, or of a drafter made for the model (EAGLE-3, DFlash, Gemma 4's
    /// assistant). A smaller model may have another vocabulary; tokens then correspond by their texts. Logits of tokens that it lacks are -inf
    #[arg(long, value_name = "MODEL", add = completion::models::usable())]
    draft: Option<PathBuf>,

    #[command(flatten)]
    tokens: TokensArgs,

    /// Number of tokens to propose
    #[arg(short, long = "n-draft", value_name = "N", default_value_t = 4, value_parser = at_least_one)]
    n: usize,

    /// Print a JSON object with drafts (the ids) instead of the ids alone
    #[arg(long)]
    json: bool,

    /// Write the drafter's logits, from which each draft is taken, as a float32 .npy file of shape [drafts, vocabulary]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,

    #[command(flatten)]
    engine: EngineArgs,
}

/// What a drafter proposes.
struct Proposal {
    /// The drafts.
    ids: Vec<u32>,
    /// The logits from which they are taken, `[drafts, n_vocab]`.
    logits: Vec<f32>,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<(), CliError> {
    let model = args.model.open()?;
    let ids = args.tokens.read(&args.model, &model)?;
    let draft = args.draft.as_ref().map(|draft| args.model.of_file(draft.clone()).open_draft()).transpose()?;
    let proposal = match &draft {
        Some(DraftFile::Model(draft)) => of_draft_model(args, &model, draft, &ids)?,
        Some(file) => beside(args, &model, &ids, |pass, options| file.drafter(&model, pass, options, None))?,
        None if model.prediction_heads()?.is_empty() => {
            let why = "the file has no prediction head (multi-token prediction) that could propose tokens: use a model with one, or \
                       name a drafter (--draft)";
            return Err(CliError::Usage(why.into()));
        }
        None => beside(args, &model, &ids, |pass, options| {
            Ok(Box::new(HeadDrafter::beside(&model, pass, options)?.ok_or(Error::NoHeads)?))
        })?,
    };
    if let Some(path) = &args.output {
        let failed = |source| CliError::Write { to: path.display().to_string(), source };
        let mut out = OutputFile::create(path)?;
        npy::write_header(&mut out, proposal.ids.len(), model.spec().n_vocab).map_err(failed)?;
        npy::write_numbers(&mut out, &proposal.logits).map_err(failed)?;
        out.commit()?;
    }
    print(&proposal.ids, args.json).map_err(CliError::stdout)
}

/// What a drafter proposes that `new` sets up beside the model.
fn beside(
    args: &Args,
    model: &Model,
    ids: &[u32],
    new: impl FnOnce(&mut dyn BackendPass, &EngineOptions) -> Result<Box<dyn Drafter>, Error>,
) -> Result<Proposal, CliError> {
    let loading = ProgressLine::spinner("loading the model");
    let mut options = args.engine.options(model);
    options.n_ctx.get_or_insert(ids.len() + args.n);
    loading.weigh(model.gguf().tensor_bytes());
    let mut pass = model.backend(&options)?;
    let mut drafter = new(&mut *pass, &options)?;
    drop(loading);
    let _ctrl_c = interrupt::cancel_on_ctrl_c();
    observe(model, &mut *pass, &mut *drafter, ids)?;
    let proposal = propose(ids, args.n, |requests, logits| drafter.propose_beside(&mut *pass, requests, Some(logits)))?;
    if !proposal.ids.is_empty() && !proposal.logits.iter().any(|logit| logit.is_finite()) {
        return Err(Error::NoNumbers.into());
    }
    Ok(proposal)
}

/// What a draft model proposes. The model itself evaluates nothing, as a draft model reads tokens alone.
fn of_draft_model(args: &Args, model: &Model, draft: &Model, ids: &[u32]) -> Result<Proposal, CliError> {
    let loading = ProgressLine::spinner("loading the draft model");
    let mut options = args.engine.options(draft);
    // A token of the model may be several of the draft model.
    options.n_ctx.get_or_insert(draft.spec().n_ctx_train.min(8 * ids.len() + args.n));
    loading.weigh(draft.gguf().tensor_bytes());
    let mut drafter = DraftModel::new(model, draft, &options, DraftModelOptions::default())?;
    drop(loading);
    let _ctrl_c = interrupt::cancel_on_ctrl_c();
    propose(ids, args.n, |requests, logits| drafter.propose_with_logits(requests, logits))
}

/// Evaluates all of `ids` but the last one with the model, and lets the drafter observe them.
fn observe(model: &Model, pass: &mut dyn BackendPass, drafter: &mut dyn Drafter, ids: &[u32]) -> Result<(), CliError> {
    let evaluated = &ids[..ids.len() - 1];
    let progress = ProgressLine::steps("evaluating", evaluated.len() as u64).watched(model.spec().n_layer());
    let before = drafter.reads_hidden().to_vec();
    let request = HiddenRequest { before: &before, tokens: TracedTokens::All };
    for chunk in evaluated.chunks(pass.n_ubatch()) {
        let first = pass.position();
        let token = |(i, &id)| BatchToken { id, seq: 0, pos: first + i, output: false };
        let tokens: Vec<_> = chunk.iter().enumerate().map(token).collect();
        let (_, rows) =
            pass.forward_with_hidden(tokens[..].into(), OutputKind::Hidden, request).map_err(Error::from)?;
        let hidden: Vec<_> = (0..before.len()).map(|i| rows.of_layer(i)).collect();
        drafter.observe(Evaluated { seq: 0, first, ids: chunk, hidden: &hidden }).map_err(Error::from)?;
        progress.set(pass.position() as u64);
    }
    Ok(())
}

/// The `n` tokens that a drafter proposes after `ids`, by `propose`.
fn propose(
    ids: &[u32],
    n: usize,
    propose: impl FnOnce(&[DraftRequest<'_>], DraftLogits<'_>) -> Result<Vec<Draft>, ForwardError>,
) -> Result<Proposal, CliError> {
    let mut logits = Vec::new();
    let mut keep = |_request: usize, _draft: usize, row: &[f32]| logits.extend_from_slice(row);
    let request = DraftRequest { seq: 0, ids, prediction: &[], n };
    let drafts = propose(&[request], &mut keep).map_err(Error::from)?;
    Ok(Proposal { ids: drafts.into_iter().flat_map(|draft| draft.ids).collect(), logits })
}

/// Prints the drafts.
fn print(ids: &[u32], json: bool) -> io::Result<()> {
    let mut out = io::stdout().lock();
    if json {
        writeln!(out, "{{\"drafts\":{ids:?}}}")
    } else {
        let ids: Vec<_> = ids.iter().map(u32::to_string).collect();
        writeln!(out, "{}", ids.join(","))
    }
}
