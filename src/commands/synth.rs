//! `synth`: writes a model file with random weights, to measure speed without a download.

use std::collections::HashSet;
use std::io::{self, Write};
use std::num::NonZero;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::thread;

use metal_attention::gguf::{
    Array, GgufError, GgufFile, GgufWriter, Metadata, StringArray, TensorDecl, TensorType, Value,
};
use metal_attention::{Error, Recipe};
use metal_attention_model::vision::PictureShape;
use metal_attention_model::{ModelShape, ModelSpec, TensorSpec};
use serde_json::Value as Json;

use crate::cli_error::CliError;
use crate::interrupt;
use crate::map_gguf::map_gguf;
use crate::output_file::OutputFile;
use crate::progress::ProgressLine;
use crate::random_weights::RandomWeights;
use crate::tensor_types::{self, TypeArgs};
use crate::threads::map_on_threads;
use crate::token_cycle::{self, TOKEN_NORMAL, TokenCycle, TokenRows};
use crate::units;

/// The number of elements that a thread quantises at a time; a multiple of every block length.
const CHUNK: usize = 1 << 16;

/// The largest number of unused tokens that are added to a vocabulary.
const MAX_FILL: usize = 1 << 24;

/// The value of `tokenizer.ggml.token_type` of special tokens.
const TOKEN_CONTROL: i32 = 3;

/// The value of `tokenizer.ggml.token_type` of tokens that are always found in texts.
const TOKEN_USER_DEFINED: i32 = 4;

/// The value of `tokenizer.ggml.token_type` of tokens that occur in no text.
const TOKEN_UNUSED: i32 = 5;

/// The score of unused tokens, below every score of a real vocabulary.
const UNUSED_SCORE: f32 = -1e9;

const AFTER_HELP: &str = "\
The file loads and runs like a trained one, at the same speed; its output makes no sense. Sizes given by flags \
replace those of the named shape; if the width or the number of heads changes, --head-dim is the width divided by the \
number of heads unless given. The vocabulary is that of the built-in model, or of --vocab, filled up with unused tokens.

--mmproj adds the file with which the model sees pictures, in F16 as converters write it; the model then has the special tokens and \
a chat template of its family. Shapes with an encoder: smolvlm-500m, qwen3-vl-4b, gemma-3-4b, gemma-4-e4b.

Examples:
  metal-attention synth smollm-135m --type q4_0 -o smollm.gguf
  metal-attention synth llama-3.2-1b --type q4_k_m -o llama.gguf
  metal-attention synth smolvlm-500m -o smolvlm.gguf --mmproj mmproj-smolvlm.gguf
  metal-attention synth llama-3.1-8b --mtp-agree 1 -o target.gguf
  metal-attention synth llama-3.2-1b --mtp-agree 0.7 -o draft.gguf
  metal-attention synth custom --arch qwen35 --mtp-heads 1 --mtp-agree 0.7 -o heads.gguf
  metal-attention synth custom --arch gemma3 --set attention.sliding_window=64 -o windows.gguf
  metal-attention synth custom --arch qwen3 --n-layer 8 --n-embd 1024 --n-head 16 --n-ff 3072 -o small.gguf";

/// Write a GGUF file with random weights in the shape of a known model
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Args {
    /// Model whose sizes to use; custom is a small model for which flags give sizes
    #[arg(value_parser = shape_names())]
    shape: String,

    /// Where to write the file
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,

    /// Where to write the file of the picture encoder (mmproj) of the shape
    #[arg(long, value_name = "FILE")]
    mmproj: Option<PathBuf>,

    /// Type of the matrices, or recipe for their types, e.g. `q4_k_m`: see quantize --help
    #[arg(long = "type", value_name = "TYPE", default_value = "Q4_0", value_parser = tensor_types::recipe)]
    recipe: &'static Recipe,

    #[command(flatten)]
    types: TypeArgs,

    /// GGUF file to take the vocabulary from (needs no weights)
    #[arg(long, value_name = "FILE")]
    vocab: Option<PathBuf>,

    /// Seed of the random weights
    #[arg(short, long, value_name = "N", default_value_t = 0)]
    seed: u64,

    /// Key of the architecture in place of the shape's; the value is parsed as JSON: a number, true or false, or a list of
    /// these; anything else is a string
    #[arg(long, value_name = "KEY=VALUE", value_parser = key_and_value)]
    set: Vec<(String, Value)>,

    /// Weights with which the next token is known: after each ordinary token of the vocabulary comes the next one, after the last
    /// one the first. P, from 0 to 1, is the part of the tokens after which the model follows this order. A model with 1 and one of
    /// the same vocabulary with less are a target and a draft model, of which the part P of the drafts holds. A model with --mtp-heads
    /// always follows the order, and P is for its heads, which get embedding tables of their own. The output matrix is a tensor
    /// of its own
    #[arg(long, value_name = "P", value_parser = part, conflicts_with = "tied")]
    mtp_agree: Option<f64>,

    /// Prediction heads (multi-token prediction) behind the last layer, in architectures that have them, e.g. qwen35
    #[arg(long, value_name = "N", default_value_t = 0)]
    mtp_heads: u8,

    #[command(flatten)]
    sizes: SizeArgs,
}

/// The flags that replace sizes of the named shape.
#[derive(clap::Args)]
#[command(next_help_heading = "Sizes")]
struct SizeArgs {
    /// Architecture
    #[arg(long, value_name = "NAME", value_parser = architecture_names())]
    arch: Option<String>,
    /// Layers
    #[arg(long, value_name = "N")]
    n_layer: Option<usize>,
    /// Width of the residual stream
    #[arg(long, value_name = "N")]
    n_embd: Option<usize>,
    /// Query heads
    #[arg(long, value_name = "N")]
    n_head: Option<usize>,
    /// Key and value heads
    #[arg(long, value_name = "N")]
    n_head_kv: Option<usize>,
    /// Width of a head
    #[arg(long, value_name = "N")]
    head_dim: Option<usize>,
    /// Width of the feed-forward
    #[arg(long, value_name = "N")]
    n_ff: Option<usize>,
    /// Tokens in the vocabulary
    #[arg(long, value_name = "N")]
    n_vocab: Option<usize>,
    /// Context length of the training
    #[arg(long, value_name = "N")]
    n_ctx: Option<usize>,
    /// Base of the RoPE frequencies
    #[arg(long, value_name = "X")]
    rope_freq_base: Option<f32>,
    /// Blocks of the picture encoder
    #[arg(long, value_name = "N", requires = "mmproj")]
    mmproj_layers: Option<usize>,
    /// Whether embedding and output head are one table
    #[arg(long, value_name = "BOOL")]
    tied: Option<bool>,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<(), CliError> {
    let mut shape = shape(&args.shape, &args.sizes);
    shape.tied &= args.mtp_agree.is_none();
    let pictures = args.mmproj.as_deref().map(|file| Ok::<_, CliError>((file, picture_shape(args)?))).transpose()?;
    let mut metadata = shape.metadata();
    if args.mtp_heads > 0 {
        add_heads(&mut metadata, &shape, args.mtp_heads);
    }
    for (key, value) in &args.set {
        metadata.set(format!("{}.{key}", shape.architecture), value.clone());
    }
    let n_vocab = add_vocabulary(&mut metadata, args, shape.n_vocab, pictures.as_ref().map(|(_, pictures)| pictures))?;
    metadata.set(format!("{}.vocab_size", shape.architecture), u32::try_from(n_vocab).unwrap_or(u32::MAX));
    let no_model = |e| CliError::Usage(format!("these sizes make no model: {e}"));
    let spec = ModelSpec::from_metadata(&metadata).map_err(no_model)?;

    let mut specs = shape.tensors(&spec);
    for head in ModelSpec::heads_from_metadata(&metadata).map_err(no_model)? {
        let block = format!("blk.{}.", head.first_block);
        specs.extend(shape.tensors(&head).into_iter().filter(|tensor| tensor.name.starts_with(&block)));
        if args.mtp_agree.is_some() {
            let name = format!("{block}nextn.embed_tokens.weight");
            specs.push(TensorSpec { name, shape: vec![head.n_embd, n_vocab], required: false });
        }
    }
    let declare = |tensor: &TensorSpec| TensorDecl {
        name: tensor.name.clone(),
        shape: tensor.shape.clone(),
        ty: TensorType::F32,
    };
    let mut tensors: Vec<_> = specs.iter().map(declare).collect();
    args.types.apply(args.recipe, false, &mut metadata, &mut tensors);

    let cycle = args.mtp_agree.map(|agree| cycle(&metadata, &tensors, agree, args.mtp_heads > 0)).transpose()?;
    let total = tensors.iter().try_fold(0usize, |total, tensor| total.checked_add(n_elements(tensor)));
    let too_many = || CliError::Usage("these sizes make no model: it has more parameters than can be counted".into());
    total.ok_or_else(too_many)?;
    // After Ctrl-C no file is left behind.
    let _ctrl_c = interrupt::cancel_on_ctrl_c();
    write_file(&args.output, &metadata, &tensors, args.seed, |tensor| {
        if let Some(cycle) = &cycle {
            if let Some(rows) = TokenRows::of(cycle, &tensor.name, tensor.shape[0], args.seed) {
                return Elements::Rows(rows);
            }
            if token_cycle::adds_to_residual_stream(&tensor.name) {
                let (mean, std) = distribution(tensor);
                return Elements::Random((mean * token_cycle::OF_LAYERS, std * token_cycle::OF_LAYERS));
            }
        }
        match (tensor.name.as_str(), shape.rope_factors) {
            ("rope_freqs.weight", Some(factors)) => {
                Elements::Given(factors.divisors(2 * n_elements(tensor), shape.rope_freq_base))
            }
            _ => Elements::Random(distribution(tensor)),
        }
    })?;
    if let Some((file, pictures)) = pictures {
        let (metadata, tensors) = (pictures.metadata(shape.n_embd), pictures.tensors(shape.n_embd));
        write_file(file, &metadata, &tensors, args.seed, |tensor| Elements::Random(of_pictures(tensor)))?;
    }
    Ok(())
}

/// Adds the blocks of `n` prediction heads to the metadata of `shape`. Lists with a number for each layer get the largest for them,
/// so that a head has each of the parts.
fn add_heads(metadata: &mut Metadata, shape: &ModelShape, n: u8) {
    let by_layer = |(key, value): (&str, &Value)| match value {
        Value::Array(Array::U32(list)) if list.len() == shape.n_layer => Some((key.to_owned(), list.clone())),
        _ => None,
    };
    for (key, mut list) in metadata.iter().filter_map(by_layer).collect::<Vec<_>>() {
        let largest = list.iter().max().copied().unwrap_or(0);
        list.resize(shape.n_layer + usize::from(n), largest);
        metadata.set(key, list);
    }
    let n_block = shape.n_layer.saturating_add(n.into());
    metadata.set(format!("{}.block_count", shape.architecture), u32::try_from(n_block).unwrap_or(u32::MAX));
    metadata.set(format!("{}.nextn_predict_layers", shape.architecture), u32::from(n));
}

/// The order of tokens of [`Args::mtp_agree`]. An error if the model has no output matrix of its own.
fn cycle(metadata: &Metadata, tensors: &[TensorDecl], agree: f64, heads: bool) -> Result<TokenCycle, CliError> {
    if !tensors.iter().any(|tensor| tensor.name == "output.weight") {
        return Err(CliError::Usage(
            "--mtp-agree needs an output matrix of its own, and this architecture has none: use another shape".into(),
        ));
    }
    TokenCycle::new(metadata, agree, heads)
}

/// The elements of a tensor.
enum Elements<'a> {
    /// Random ones of this mean and standard deviation.
    Random((f32, f32)),
    /// These.
    Given(Vec<f32>),
    /// The vectors of tokens.
    Rows(TokenRows<'a>),
}

/// Writes a GGUF file with the elements that `elements` returns for each tensor. Random ones depend on the seed and the tensor's index.
fn write_file<'a>(
    path: &Path,
    metadata: &Metadata,
    tensors: &[TensorDecl],
    seed: u64,
    elements: impl Fn(&TensorDecl) -> Elements<'a>,
) -> Result<(), CliError> {
    let total: usize = tensors.iter().map(n_elements).sum();
    let progress = ProgressLine::steps("writing random weights", total as u64);
    let mut writer = GgufWriter::new(OutputFile::create(path)?, 3, metadata, tensors).map_err(Error::from)?;
    let mut done = 0;
    let n_threads = thread::available_parallelism().map_or(1, NonZero::get);
    for (i, tensor) in tensors.iter().enumerate() {
        let values = match elements(tensor) {
            Elements::Random(distribution) => {
                RandomValues::Random { generator: RandomWeights::new(seed, i), distribution }
            }
            Elements::Rows(rows) => RandomValues::Rows(rows),
            Elements::Given(values) => {
                let mut blocks = Vec::new();
                tensor.ty.quantize(&values, &mut blocks).map_err(Error::from)?;
                writer.write(&blocks).map_err(Error::from)?;
                continue;
            }
        };
        let random = RandomTensor { values, ty: tensor.ty };
        let n = n_elements(tensor);
        for start in (0..n).step_by(n_threads * CHUNK) {
            if interrupt::requested() {
                return Err(CliError::Interrupted);
            }
            let end = n.min(start + n_threads * CHUNK);
            for blocks in random.blocks(start..end) {
                writer.write(&blocks.map_err(Error::from)?).map_err(Error::from)?;
            }
            done += end - start;
            progress.set(done as u64);
        }
    }
    writer.finish().map_err(Error::from)?.commit()?;
    drop(progress);
    let bytes: usize = tensors.iter().map(|t| t.ty.row_bytes(n_elements(t))).sum();
    let (size, file) = (units::bytes(bytes as u64), path.display());
    // Errors are ignored, because stderr may be closed.
    let _ = writeln!(io::stderr(), "wrote {file}: {total} parameters in {size}");
    Ok(())
}

/// The picture encoder of the named shape, with the blocks of the flags.
fn picture_shape(args: &Args) -> Result<PictureShape, CliError> {
    let shape = PictureShape::of(&args.shape).ok_or_else(|| {
        let known: Vec<_> = PictureShape::all().iter().map(|shape| shape.text).collect();
        CliError::Usage(format!(
            "no picture encoder of {} is known; --mmproj works with {}",
            args.shape,
            known.join(", ")
        ))
    })?;
    Ok(PictureShape { n_block: args.sizes.mmproj_layers.unwrap_or(shape.n_block).min(shape.n_block), ..shape.clone() })
}

/// Random elements, which can be made in parts.
enum RandomValues<'a> {
    /// Of this mean and standard deviation.
    Random { generator: RandomWeights, distribution: (f32, f32) },
    /// The vectors of tokens.
    Rows(TokenRows<'a>),
}

/// A tensor with random elements.
struct RandomTensor<'a> {
    /// The elements.
    values: RandomValues<'a>,
    /// The tensor type.
    ty: TensorType,
}

impl RandomTensor<'_> {
    /// The blocks of a range of elements, in parts of [`CHUNK`] elements, each made by a thread.
    fn blocks(&self, elements: Range<usize>) -> Vec<Result<Vec<u8>, GgufError>> {
        let part = |from: usize| {
            let mut values = vec![0.0; CHUNK.min(elements.end - from)];
            match &self.values {
                RandomValues::Random { generator, distribution: (mean, std) } => {
                    generator.clone().skip(from).fill(&mut values, *mean, *std);
                }
                RandomValues::Rows(rows) => rows.fill(from, &mut values),
            }
            let mut blocks = Vec::new();
            self.ty.quantize(&values, &mut blocks).map(|()| blocks)
        };
        map_on_threads(elements.clone().step_by(CHUNK), part)
    }
}

/// The number of elements of a tensor.
fn n_elements(tensor: &TensorDecl) -> usize {
    tensor.shape.iter().product()
}

/// The mean and the standard deviation of a tensor's elements. They are chosen such that matrices keep the length of vectors
/// and norms are near 1.
fn distribution(tensor: &TensorDecl) -> (f32, f32) {
    match tensor.name.rsplit_once('.') {
        // Mamba's decays: a state has lost half of itself after about ten tokens.
        Some((_, "ssm_a")) => (-2.0, 0.4),
        Some((role, "bias")) if role.ends_with("ssm_dt") => (-3.5, 0.4),
        Some((_, "bias")) => (0.0, 0.02),
        // Factors of norms, of layers and their parts.
        Some((_, "scale" | "ssm_d")) => (1.0, 0.05),
        Some((_, role)) if role.contains("norm") => (1.0, 0.05),
        Some((role, _)) if role.contains("norm") || role.ends_with("_scale") => (1.0, 0.05),
        Some((role, _)) if role.contains("rope_factors") => (1.5, 0.1),
        Some((role, _)) if role.contains("time_mix") || role.contains("channel_mix") => of_rwkv(role, tensor),
        _ => (0.0, 1.0 / (tensor.shape[0] as f32).sqrt()),
    }
}

/// The same for the tensors of a picture encoder. Its clamps change few values.
fn of_pictures(tensor: &TensorDecl) -> (f32, f32) {
    let (name, part) = tensor.name.rsplit_once('.').unwrap_or_default();
    let is_norm = name.ends_with("norm") || name.rsplit('.').next().is_some_and(|role| role.contains("ln"));
    match part {
        "bias" => (0.0, 0.02),
        "input_min" | "output_min" => (-100.0, 0.0),
        "input_max" | "output_max" => (100.0, 0.0),
        _ if is_norm || name.ends_with("out_scale") => (1.0, 0.05),
        // Kernels of patches: all dimensions but the last are summed.
        _ if tensor.name.starts_with("v.patch_embd") => {
            let n_out = tensor.shape.last().copied().unwrap_or(1).max(1);
            (0.0, 1.0 / ((n_elements(tensor) / n_out) as f32).sqrt())
        }
        _ => (0.0, 1.0 / (tensor.shape[0] as f32).sqrt()),
    }
}

/// The same for RWKV's vectors: shifts between two tokens, and decays over some dozens of tokens.
fn of_rwkv(role: &str, tensor: &TensorDecl) -> (f32, f32) {
    const VECTORS: &[(&str, (f32, f32))] = &[
        ("_ln", (1.0, 0.05)),
        ("_first", (0.5, 0.2)),
        ("time_mix_decay", (-3.0, 1.0)),
        ("_w0", (-3.0, 1.0)),
        ("_k_k", (0.9, 0.1)),
        ("_k_a", (1.0, 0.1)),
        ("_r_k", (0.0, 0.1)),
    ];
    let vector = VECTORS.iter().find(|(part, _)| role.ends_with(part)).map(|(_, distribution)| *distribution);
    let lerp = role.contains("_lerp_").then_some((0.5, 0.2));
    vector.or(lerp).unwrap_or((0.0, 1.0 / (tensor.shape[0] as f32).sqrt()))
}

/// The names of all shapes.
fn shape_names() -> clap::builder::PossibleValuesParser {
    ModelShape::all().iter().map(|shape| shape.name).collect::<Vec<_>>().into()
}

/// The names of all architectures.
fn architecture_names() -> clap::builder::PossibleValuesParser {
    ModelShape::architectures().into()
}

/// Parses a number from 0 to 1.
fn part(text: &str) -> Result<f64, String> {
    let number: f64 = text.parse().map_err(|_| "must be a number from 0 to 1")?;
    if (0.0..=1.0).contains(&number) { Ok(number) } else { Err("must be from 0 to 1".into()) }
}

/// Parses `KEY=VALUE`, the value as JSON if it is JSON.
fn key_and_value(text: &str) -> Result<(String, Value), String> {
    let (key, value) = text.split_once('=').ok_or("write KEY=VALUE, e.g. attention.sliding_window=64")?;
    let whole = |number: &Json| number.as_u64().and_then(|n| u32::try_from(n).ok());
    let value = match serde_json::from_str::<Json>(value) {
        Ok(Json::Bool(flag)) => flag.into(),
        Ok(Json::Number(number)) => match whole(&number.clone().into()) {
            Some(n) => n.into(),
            None => (number.as_f64().unwrap_or(f64::NAN) as f32).into(),
        },
        Ok(Json::Array(list)) => {
            let numbers: Option<Vec<u32>> = list.iter().map(whole).collect();
            let flags: Option<Vec<bool>> = list.iter().map(Json::as_bool).collect();
            let array = numbers.map(Value::from).or(flags.map(Value::from));
            array.ok_or("a list must be of whole numbers, or of true and false")?
        }
        Ok(Json::String(text)) => text.into(),
        Ok(Json::Null | Json::Object(_)) | Err(_) => value.into(),
    };
    Ok((key.to_owned(), value))
}

/// The shape called `name` with `sizes` in place of its own. If heads change and their width is not given, they divide
/// `n_embd` equally; if query heads change and KV heads are not given, there are as many.
fn shape(name: &str, sizes: &SizeArgs) -> ModelShape {
    let mut s = ModelShape::named(name).expect("clap accepts names of shapes only").clone();
    if let Some(other) = sizes.arch.as_deref().filter(|arch| *arch != s.architecture).and_then(ModelShape::custom) {
        (s.architecture, s.keys, s.biases) = (other.architecture, other.keys, other.biases);
    }
    let set = |size: &mut usize, given: Option<usize>| *size = given.unwrap_or(*size);
    set(&mut s.n_layer, sizes.n_layer);
    set(&mut s.n_embd, sizes.n_embd);
    set(&mut s.n_head, sizes.n_head);
    set(&mut s.n_head_kv, sizes.n_head_kv.or(sizes.n_head));
    let shared_out = (sizes.n_embd.is_some() || sizes.n_head.is_some()).then(|| s.n_embd / s.n_head.max(1));
    set(&mut s.head_dim, sizes.head_dim.or(shared_out));
    set(&mut s.n_ff, sizes.n_ff);
    set(&mut s.n_vocab, sizes.n_vocab);
    set(&mut s.n_ctx_train, sizes.n_ctx);
    s.rope_freq_base = sizes.rope_freq_base.unwrap_or(s.rope_freq_base);
    s.tied = sizes.tied.unwrap_or(s.tied);
    s
}

/// Copies the tokenizer of `--vocab` or the built-in model into `metadata`, adds the tokens and the chat template that a model with
/// `pictures` needs, and adds unused tokens up to `n_vocab`. Returns the number of tokens: more than `n_vocab` if the vocabulary
/// is larger and no size is given.
fn add_vocabulary(
    metadata: &mut Metadata,
    args: &Args,
    n_vocab: usize,
    pictures: Option<&PictureShape>,
) -> Result<usize, CliError> {
    let source = match &args.vocab {
        Some(path) => map_gguf(path),
        None => GgufFile::from_bytes(metal_attention::BUILT_IN_MODEL),
    };
    let source = source.map_err(Error::from)?;
    let source = source.metadata();
    let missing = || CliError::Usage("the file given with --vocab has no vocabulary (tokenizer.ggml.tokens)".into());
    let tokens = source.strings("tokenizer.ggml.tokens").map_err(Error::from)?.ok_or_else(missing)?;
    let mut added: Vec<(String, i32)> = Vec::new();
    if let Some(pictures) = pictures {
        added.extend(pictures.special_tokens().into_iter().map(|token| (token, TOKEN_CONTROL)));
        added.extend(pictures.other_tokens().iter().map(|&token| (token.to_owned(), TOKEN_USER_DEFINED)));
        let known: HashSet<&str> = tokens.iter().collect();
        added.retain(|(token, _)| !known.contains(token.as_str()));
    }
    let n_used = tokens.len() + added.len();
    if args.sizes.n_vocab.is_some_and(|n| n < n_used) {
        return Err(CliError::Usage(format!("--n-vocab {n_vocab} is too small: the vocabulary has {n_used} tokens")));
    }
    let n_fill = n_vocab.saturating_sub(n_used);
    if n_fill > MAX_FILL {
        return Err(CliError::Usage(format!(
            "--n-vocab {n_vocab} is too large: at most {MAX_FILL} tokens are filled up"
        )));
    }
    for (key, value) in source.iter().filter(|(key, _)| key.starts_with("tokenizer.")) {
        metadata.set(key, value.clone());
    }
    if let Some(pictures) = pictures {
        metadata.set("tokenizer.chat_template", pictures.chat_template());
    }
    added.extend((n_used..n_vocab).map(|id| (format!("<unused_{id}>"), TOKEN_UNUSED)));
    if added.is_empty() {
        return Ok(tokens.len());
    }
    let n_vocab = tokens.len() + added.len();
    let filled: StringArray =
        tokens.iter().chain(added.iter().map(|(token, _)| token.as_str())).map(str::to_owned).collect();
    metadata.set("tokenizer.ggml.tokens", filled);
    let mut types = source.i32s("tokenizer.ggml.token_type").map_err(Error::from)?.unwrap_or_default();
    types.resize(tokens.len(), TOKEN_NORMAL);
    types.extend(added.iter().map(|(_, ty)| ty));
    metadata.set("tokenizer.ggml.token_type", types);
    if let Some(mut scores) = source.f32s("tokenizer.ggml.scores").map_err(Error::from)? {
        scores.resize(n_vocab, UNUSED_SCORE);
        metadata.set("tokenizer.ggml.scores", Value::Array(Array::F32(scores)));
    }
    Ok(n_vocab)
}
