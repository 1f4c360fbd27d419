//! Flags and commands of other programs (llama.cpp, ollama, vLLM), and their equivalents in this program.
//!
//! [`FOREIGN_FLAGS`] is a table with one entry for a group of flags. `usage.rs` rewrites the command line by it before clap
//! reads it, because clap has no flags of several letters with one dash (`-ngl`).

use metal_attention::CacheType;

/// A flag of another program.
pub struct ForeignFlag {
    /// Its spellings.
    pub flags: &'static [&'static str],
    /// Whether a value follows it.
    pub value: FlagValue,
    /// Its equivalent in this program.
    pub meaning: FlagMeaning,
    /// The commands that the entry is for. Empty: all commands that no other entry of the flag names.
    pub commands: &'static [&'static str],
}

/// Whether a value follows a flag as the next argument.
#[derive(Clone, Copy)]
pub enum FlagValue {
    /// No value.
    Nothing,
    /// Always a value.
    Value,
    /// A value only if the next argument is one of these.
    Maybe(&'static [&'static str]),
}

/// The equivalent of a foreign flag.
#[derive(Clone, Copy)]
pub enum FlagMeaning {
    /// A flag of this program, with the same value.
    Flag(&'static str),
    /// The flag is ignored: it describes what the program does anyway, or has no effect. The text is the reason.
    Nothing(&'static str),
    /// The flag is an error. The text is a tip for the user.
    Refused(&'static str),
    /// The function returns the equivalent of the value.
    ByValue(fn(&str) -> ValueMeaning),
    /// Part of the value of `-m`.
    Model(ModelPart),
    /// Part of the value of `--cache-type`.
    Cache,
}

/// The equivalent of one value of a foreign flag.
#[derive(Debug, PartialEq)]
pub enum ValueMeaning {
    /// Arguments of this program.
    Args(Vec<String>),
    /// The flag is ignored, with the reason.
    Nothing(String),
    /// An error, with a tip for the user.
    Refused(String),
}

/// The part of a model's name that a flag gives.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum ModelPart {
    /// `OWNER/REPO[:QUANT]`.
    Repo,
    /// The file in the repository.
    File,
}

/// The entry of a flag in a command. An entry that names the command goes before one for all commands.
pub fn find_flag(command: &str, flag: &str) -> Option<&'static ForeignFlag> {
    let entries = || FOREIGN_FLAGS.iter().filter(|entry| entry.flags.contains(&flag));
    entries()
        .find(|entry| entry.commands.contains(&command))
        .or_else(|| entries().find(|entry| entry.commands.is_empty()))
}

/// The tip for a command that only other programs have.
pub fn foreign_command(name: &str) -> Option<&'static str> {
    COMMANDS.iter().find(|(names, _)| names.contains(&name)).map(|(_, tip)| *tip)
}

/// An entry for all commands.
const fn all(flags: &'static [&'static str], value: FlagValue, meaning: FlagMeaning) -> ForeignFlag {
    ForeignFlag { flags, value, meaning, commands: &[] }
}

/// An entry for some commands.
const fn on(
    commands: &'static [&'static str],
    flags: &'static [&'static str],
    value: FlagValue,
    meaning: FlagMeaning,
) -> ForeignFlag {
    ForeignFlag { flags, value, meaning, commands }
}

use FlagMeaning::{ByValue, Cache, Flag, Nothing, Refused};
use FlagValue::{Maybe, Value};

/// The values of a switch that may have one.
const SWITCH: FlagValue = Maybe(&["on", "off", "auto", "0", "1", "true", "false", "enabled", "disabled"]);

/// The tip for flags that distribute layers or tensors over devices.
const NO_PARTS: &str = "a model runs on a device as a whole: --gpu or --device with a name from `metal-attention devices`, or \
                        --device cpu; --tensor-parallel shares it out among NVIDIA GPUs";
const NO_IMAGES: &str = "pictures are read by run (--image), chat (/image), serve and encode-image, with --mmproj FILE; other \
                         commands, addresses and sound are not supported yet: leave the flag out";
const NO_ADAPTERS: &str = "adapters cannot be applied yet: use a GGUF file that they are merged into";
const NO_DRAFTS: &str = "`run`, `chat`, `serve` and `bench` have draft models (--model-draft); leave the flag out";
/// The commands with draft models.
const DRAFTING: &[&str] = &["run", "chat", "serve", "bench"];
const NO_GRAMMAR: &str =
    "`run` and `chat` have it, and each request to `metal-attention serve` (response_format); leave the flag out";
const FROM_FILE: &str =
    "the model's file says how positions are rotated: leave the flag out, or change the file's metadata";
const IN_REQUESTS: &str =
    "each request says how its tokens are chosen (temperature, top_p, seed, max_tokens, ...); leave the flag out";
const NO_TLS: &str = "the server speaks plain HTTP: put a proxy with TLS before it";
const CONVERSATION: &str = "a conversation is what `chat` has";

/// The table. Flags that the command itself has are not searched here.
pub const FOREIGN_FLAGS: &[ForeignFlag] = &[
    // The model.
    all(&["-hf", "-hfr", "--hf-repo"], Value, FlagMeaning::Model(ModelPart::Repo)),
    all(&["-hff", "--hf-file"], Value, FlagMeaning::Model(ModelPart::File)),
    all(&["-hft", "--hf-token"], Value, Refused("set the variable HF_TOKEN to the token")),
    all(&["-mu", "--model-url"], Value, Flag("--model")),
    all(&["--offline"], FlagValue::Nothing, Refused("set the variable HF_HUB_OFFLINE to 1")),
    on(&["run", "chat", "serve", "encode-image"], &["-mm"], Value, Flag("--mmproj")),
    all(&["-mm", "--mmproj", "-mmu", "--mmproj-url", "--image", "--audio"], Value, Refused(NO_IMAGES)),
    all(&["--mmproj-offload"], FlagValue::Nothing, Refused(NO_IMAGES)),
    all(
        &["--no-mmproj", "--no-mmproj-offload"],
        FlagValue::Nothing,
        Nothing("the encoder is loaded for pictures only"),
    ),
    all(
        &["--lora", "--lora-scaled", "--lora-base", "--control-vector", "--control-vector-scaled"],
        Value,
        Refused(NO_ADAPTERS),
    ),
    on(DRAFTING, &["-md", "-hfd", "-hfrd", "--hf-repo-draft"], Value, Flag("--model-draft")),
    on(DRAFTING, &["-devd"], Value, Flag("--device-draft")),
    all(
        &["-md", "--model-draft", "-hfd", "-hfrd", "--hf-repo-draft", "--draft", "--draft-max", "--draft-n"],
        Value,
        Refused(NO_DRAFTS),
    ),
    all(&["--draft-min", "--draft-n-min", "--draft-p-min"], Value, Nothing("as many drafts as pay are evaluated")),
    all(&["--spec-default"], FlagValue::Nothing, Nothing("drafts are the default: --spec auto")),
    all(&["-cd", "--ctx-size-draft"], Value, Nothing("the draft model has the context of the model")),
    all(&["-devd", "--device-draft"], Value, Refused(NO_DRAFTS)),
    all(
        &["-ngld", "--gpu-layers-draft", "--n-gpu-layers-draft"],
        Value,
        Refused("--device-draft says where the draft model runs, as a whole"),
    ),
    all(&["--override-kv"], Value, Refused("a model's metadata is taken as it is in its file")),
    all(
        &["--mlock"],
        FlagValue::Nothing,
        Nothing("the system keeps in memory what is used; --no-mmap reads the whole file into it"),
    ),
    all(&["--mmap"], FlagValue::Nothing, Nothing("files are mapped unless --no-mmap says otherwise")),
    on(&["bench"], &["-mmp", "--mmap"], Value, ByValue(mmap)),
    all(&["--check-tensors", "--repack", "-nr", "--no-repack"], FlagValue::Nothing, Nothing("it changes nothing here")),
    // The device.
    all(&["-ngl", "--n-gpu-layers", "--gpu-layers"], Value, ByValue(gpu_layers)),
    all(&["-dev"], Value, ByValue(device)),
    all(&["--list-devices"], FlagValue::Nothing, Refused("`metal-attention devices` lists them")),
    all(&["-sm", "--split-mode"], Value, ByValue(split_mode)),
    all(&["-ts", "--tensor-split", "-ot", "--override-tensor"], Value, Refused(NO_PARTS)),
    all(&["-mg", "--main-gpu"], Value, Refused("--device cuda:N or gpu:N names the device")),
    all(&["-cmoe", "--cpu-moe", "-nkvo", "--no-kv-offload"], FlagValue::Nothing, Refused(NO_PARTS)),
    all(&["-ncmoe", "--n-cpu-moe"], Value, Refused(NO_PARTS)),
    all(&["-kvo", "--kv-offload"], FlagValue::Nothing, Nothing("the KV cache is where the model is")),
    all(&["-fit", "--fit"], SWITCH, Nothing("--device auto takes a GPU where the model fits")),
    all(&["--numa"], Value, Nothing("threads run where the system puts them; numactl says otherwise")),
    all(
        &["-tb", "--threads-batch", "-C", "--cpu-mask", "-Cr", "--cpu-range", "--cpu-strict", "--prio", "--poll"],
        Value,
        Nothing("--threads says how many threads compute, prompts as well"),
    ),
    // Evaluation.
    on(&["bench"], &["-fa", "--flash-attn"], Value, Nothing("attention never makes the whole matrix")),
    all(&["-fa", "--flash-attn"], SWITCH, Nothing("attention never makes the whole matrix")),
    all(&["-ctk", "--cache-type-k", "-ctv", "--cache-type-v"], Value, Cache),
    all(
        &["-b", "--batch-size"],
        Value,
        Nothing("--ubatch-size (-ub) says how many tokens go through the layers at once"),
    ),
    all(&["-ub"], Value, Flag("--ubatch-size")),
    on(&["serve"], &["-np", "--n-parallel", "--max-num-seqs"], Value, Flag("--parallel")),
    all(&["-np", "--n-parallel", "--parallel", "--max-num-seqs"], Value, ByValue(sequences)),
    all(&["-cb", "--cont-batching"], FlagValue::Nothing, Nothing("requests share the steps of the model anyway")),
    all(
        &["-nocb", "--no-cont-batching"],
        FlagValue::Nothing,
        Refused("`metal-attention serve --parallel 1` runs one request at a time"),
    ),
    on(&["bench"], &["--no-warmup"], FlagValue::Nothing, ByValue(no_warmup)),
    all(&["--warmup", "--no-warmup"], FlagValue::Nothing, Nothing("nothing runs before the first text")),
    all(
        &["-kvu", "--kv-unified", "--swa-full", "--no-perf", "--perf"],
        FlagValue::Nothing,
        Nothing("it changes nothing here"),
    ),
    all(&["--no-context-shift"], FlagValue::Nothing, Nothing("a full context ends the text")),
    all(
        &["--context-shift"],
        FlagValue::Nothing,
        Refused("a full context ends the text: --ctx-size makes it larger; serve has --context-shift for chats"),
    ),
    all(&["--cache-prompt"], FlagValue::Nothing, Nothing("prompts that begin alike share what was computed for them")),
    on(&["serve"], &["-cram"], Value, Flag("--cache-ram")),
    all(
        &[
            "--keep",
            "-dt",
            "--defrag-thold",
            "--cache-reuse",
            "-cram",
            "--cache-ram",
            "-sps",
            "--slot-prompt-similarity",
        ],
        Value,
        Nothing("the cache is kept in pages, which are shared where texts begin alike"),
    ),
    all(&["--max-model-len"], Value, Flag("--ctx-size")),
    all(
        &[
            "--rope-scaling",
            "--rope-scale",
            "--rope-freq-base",
            "--rope-freq-scale",
            "--yarn-orig-ctx",
            "--yarn-ext-factor",
        ],
        Value,
        Refused(FROM_FILE),
    ),
    all(&["--yarn-attn-factor", "--yarn-beta-slow", "--yarn-beta-fast"], Value, Refused(FROM_FILE)),
    // Prompts and conversations.
    on(&["run"], &["-cnv", "--conversation", "-st", "--single-turn"], FlagValue::Nothing, Flag("--chat")),
    on(&["run"], &["-i", "--interactive", "-if", "--interactive-first"], FlagValue::Nothing, Flag("--chat")),
    on(&["run"], &["-no-cnv", "--no-conversation"], FlagValue::Nothing, Flag("--raw")),
    on(
        &["chat"],
        &["-cnv", "--conversation", "-i", "--interactive", "-if", "--interactive-first"],
        FlagValue::Nothing,
        Nothing(CONVERSATION),
    ),
    on(
        &["chat"],
        &["-st", "--single-turn"],
        FlagValue::Nothing,
        Refused("`metal-attention run MODEL TEXT` answers one message"),
    ),
    on(
        &["chat"],
        &["-no-cnv", "--no-conversation"],
        FlagValue::Nothing,
        Refused("`metal-attention run --raw` continues a text"),
    ),
    all(&["-sys"], Value, Flag("--system")),
    all(
        &["-sysf", "--system-prompt-file"],
        Value,
        Refused("--system \"$(cat FILE)\" takes the instructions from a file"),
    ),
    all(&["--jinja"], FlagValue::Nothing, Nothing("chat templates run as Jinja anyway")),
    all(&["--no-jinja"], FlagValue::Nothing, Refused("chat templates are Jinja; `run --raw` goes without one")),
    all(&["--chat-template-file"], Value, Flag("--chat-template")),
    all(
        &["--chat-template-kwargs"],
        Value,
        Refused("a request to `metal-attention serve` can have chat_template_kwargs"),
    ),
    all(
        &["--reasoning-format", "--reasoning-parser"],
        Value,
        Nothing("the chat template tells how reasoning is marked"),
    ),
    on(&["run", "chat"], &["--reasoning-budget"], Value, ByValue(reasoning_budget)),
    all(
        &["--reasoning-budget"],
        Value,
        Refused("a request to `metal-attention serve` can have reasoning_effort or thinking_budget_tokens"),
    ),
    on(
        &["run", "chat"],
        &["--think"],
        Maybe(&["true", "false", "none", "minimal", "low", "medium", "high", "xhigh", "max"]),
        ByValue(think),
    ),
    on(&["run", "chat"], &["-rea", "--reasoning"], SWITCH, ByValue(think)),
    all(&["--hidethinking"], FlagValue::Nothing, Nothing("reasoning is shown at a terminal only, in grey")),
    all(&["-bf", "--binary-file"], Value, Flag("--file")),
    all(
        &["-e", "--escape", "--escapes"],
        FlagValue::Nothing,
        Refused("texts are taken as they are: a shell's $'a\\nb' has a line break"),
    ),
    all(&["--no-escape"], FlagValue::Nothing, Nothing("texts are taken as they are")),
    all(&["--display-prompt"], FlagValue::Nothing, Flag("--echo")),
    all(
        &[
            "--no-display-prompt",
            "--simple-io",
            "-co",
            "--show-timings",
            "--no-show-timings",
            "--verbose-prompt",
            "--nowordwrap",
        ],
        FlagValue::Nothing,
        Nothing("stdout has the text alone, and stderr the measurements"),
    ),
    all(&["--color", "--colors"], SWITCH, Nothing("a terminal has colours unless NO_COLOR is set")),
    all(
        &["-mli", "--multiline-input"],
        FlagValue::Nothing,
        Nothing("\"\"\" begins and ends a message of several lines"),
    ),
    all(
        &["--in-prefix", "--in-suffix"],
        Value,
        Refused("there is no such thing here: the chat template has the text around a message"),
    ),
    on(&["chat"], &["--prompt-cache"], Value, Flag("--session")),
    on(&["run"], &["--prompt-cache"], Value, Refused("chat --session FILE keeps a conversation")),
    on(&["run", "chat"], &["-r", "--reverse-prompt"], Value, Flag("--stop")),
    on(&["run", "chat"], &["--format"], Value, ByValue(format)),
    on(&["run", "chat"], &["-jf"], Value, Flag("--json-schema-file")),
    all(
        &["-j", "--json-schema", "-jf", "--json-schema-file", "--grammar", "--grammar-file"],
        Value,
        Refused(NO_GRAMMAR),
    ),
    all(&["--top-n-sigma"], Value, Flag("--top-nsigma")),
    all(&["--sampling-seq", "--sampler-seq"], Value, Refused("--samplers names the samplers in their order")),
    all(&["--mirostat"], Value, ByValue(mirostat)),
    all(
        &["--mirostat-lr", "--mirostat-ent", "--mirostat-eta", "--mirostat-tau"],
        Value,
        Nothing("it is for mirostat alone"),
    ),
    // The log.
    all(
        &["--log-disable", "--log-prefix", "--log-timestamps"],
        FlagValue::Nothing,
        Nothing("RUST_LOG says what is logged"),
    ),
    all(&["--log-colors"], SWITCH, Nothing("NO_COLOR turns colours off")),
    all(&["-lv", "--verbosity", "--log-verbosity"], Value, Nothing("RUST_LOG says what is logged")),
    all(&["--log-file"], Value, Refused("the log goes to stderr: 2> FILE")),
    // Servers.
    on(&["serve"], &["-a", "--served-model-name"], Value, Flag("--alias")),
    on(&["serve"], &["-to"], Value, Flag("--timeout")),
    on(&["serve"], &["--threads-http"], Value, Nothing("requests need no threads of their own")),
    on(
        &["serve"],
        &["--metrics", "--slots", "--no-slots", "--props", "--webui", "--ui"],
        FlagValue::Nothing,
        Nothing("the page and /metrics are always there"),
    ),
    on(
        &["serve"],
        &["--embedding", "--embeddings", "--rerank", "--reranking"],
        FlagValue::Nothing,
        Nothing("the kind of the model decides which requests it can answer"),
    ),
    on(&["serve"], &["--pooling"], Value, Refused("the model's file says how its states become a vector")),
    on(&["serve"], &["--ssl-key-file", "--ssl-cert-file"], Value, Refused(NO_TLS)),
    on(&["serve"], &["--no-webui", "--no-ui"], FlagValue::Nothing, Flag("--no-page")),
    on(&["serve"], &["--path"], Value, Flag("--page")),
    on(&["serve"], &["--api-prefix"], Value, Refused("a proxy can have the server at another path")),
    on(&["serve"], &["--models-preset"], Value, Refused("--config names a file with models, their names and settings")),
    on(
        &["serve"],
        &["--models-max"],
        Value,
        Refused("--models-memory says how much memory the loaded models take together, however many they are"),
    ),
    on(&["serve"], &["--models-autoload"], FlagValue::Nothing, Nothing("a request loads the model that it names")),
    on(
        &["serve"],
        &["--no-models-autoload"],
        FlagValue::Nothing,
        Refused("a request loads the model that it names: leave out of --models-dir what must not be loaded"),
    ),
    on(&["serve"], &["--sleep-idle-seconds", "--keepalive"], Value, Flag("--keep-alive")),
    on(
        &["serve"],
        &["-s", "--seed", "--temp", "--temperature", "--top-k", "--top-p", "--min-p", "--typical", "--repeat-penalty"],
        Value,
        Refused(IN_REQUESTS),
    ),
    on(
        &["serve"],
        &[
            "-n",
            "--predict",
            "--n-predict",
            "--presence-penalty",
            "--frequency-penalty",
            "--samplers",
            "--repeat-last-n",
        ],
        Value,
        Refused(IN_REQUESTS),
    ),
    on(
        &["serve"],
        &["--enable-auto-tool-choice", "--enable-prefix-caching", "--enable-chunked-prefill", "--enforce-eager"],
        FlagValue::Nothing,
        Nothing("it is so anyway"),
    ),
    all(&["--trust-remote-code"], FlagValue::Nothing, Nothing("no code comes with a model")),
    on(&["serve"], &["--tool-call-parser"], Value, Nothing("the chat template tells how the model writes calls")),
    on(
        &["serve"],
        &["--dtype", "--quantization", "--load-format"],
        Value,
        Nothing("the model's file says what its types are"),
    ),
    on(
        &["serve"],
        &["--gpu-memory-utilization"],
        Value,
        Refused("--ctx-size and --parallel say how much memory the KV cache takes"),
    ),
    // ollama.
    all(&["--keepalive"], Value, Nothing("a model is in memory while the command runs")),
    all(&["--insecure"], FlagValue::Nothing, Nothing("HF_ENDPOINT may begin with http://")),
    // llama-bench.
    on(&["bench"], &["-p", "--n-prompt"], Value, Flag("--seq-lengths")),
    on(&["bench"], &["-n", "--n-gen"], Value, Flag("--gen-length")),
    on(&["bench"], &["-d", "--n-depth"], Value, Flag("--depth")),
    on(&["bench"], &["-r", "--repetitions"], Value, Flag("--iterations")),
    on(
        &["bench"],
        &["-pg"],
        Value,
        Refused("prefill and decode are measured apart: -p and -n, and -d for a decode after a prompt"),
    ),
    on(&["bench"], &["-o", "--output"], Value, ByValue(bench_output)),
    on(
        &["bench"],
        &["-oe", "--output-err", "--delay"],
        Value,
        Nothing("stdout has the results, and stderr the progress"),
    ),
    on(&["bench"], &["--progress"], FlagValue::Nothing, Nothing("a terminal shows the progress")),
    // llama-embedding, llama-quantize.
    on(&["embed"], &["--embd-normalize"], Value, ByValue(normalize)),
    on(&["embed"], &["--embd-output-format"], Value, ByValue(embeddings)),
    on(&["quantize"], &["--allow-requantize"], FlagValue::Nothing, Nothing("quantised files are taken, too")),
];

/// Commands of other programs: their names, and a tip.
const COMMANDS: &[(&[&str], &str)] = &[
    (
        &["ps"],
        "no model stays in memory by itself: `run`, `chat` and `serve` hold models while they run, and a server names its own at \
         /v1/models. `metal-attention list` shows the models that are here",
    ),
    (
        &["stop", "unload"],
        "a model is in memory while a command runs: Ctrl-C ends `serve`, whose --keep-alive says when it unloads models",
    ),
    (&["load"], "`metal-attention serve MODEL` or `metal-attention chat MODEL` loads a model"),
    (
        &["create"],
        "there are no Modelfiles: `chat` takes --system, --chat-template and the sampling flags, and the configuration of `serve` \
         gives them to models by name; `quantize` makes other types",
    ),
    (
        &["cp", "push", "signin", "signout", "import"],
        "models are plain GGUF files: any path works in the place of a name",
    ),
    (
        &["cli", "generate", "complete"],
        "`metal-attention run` continues a text, `metal-attention chat` talks with a model",
    ),
];

/// The number of layers from which on `-ngl` of other programs means all of them.
const ALL_LAYERS: i64 = 99;

/// Arguments of this program.
fn args(args: &[&str]) -> ValueMeaning {
    ValueMeaning::Args(args.iter().map(|&arg| arg.to_owned()).collect())
}

/// llama.cpp's `-ngl`: the number of layers on the GPU.
fn gpu_layers(value: &str) -> ValueMeaning {
    match (value, value.parse::<i64>()) {
        (_, Ok(0)) => args(&["--device", "cpu"]),
        ("all" | "auto" | "max", _) => {
            ValueMeaning::Nothing("a model goes to a GPU as a whole where it has room".into())
        }
        (_, Ok(n)) if !(0..ALL_LAYERS).contains(&n) => {
            ValueMeaning::Nothing("a model goes to a GPU as a whole where it has room".into())
        }
        _ => ValueMeaning::Refused(format!("{NO_PARTS}; -ngl 0 is the CPU, -ngl all a GPU")),
    }
}

/// llama.cpp's `-dev`: `CUDA0`, `Vulkan0`, `none`.
fn device(value: &str) -> ValueMeaning {
    let number = |prefix| value.strip_prefix(prefix).filter(|rest: &&str| rest.bytes().all(|b| b.is_ascii_digit()));
    let name = |kind: &str, number: &str| if number.is_empty() { kind.to_owned() } else { format!("{kind}:{number}") };
    let own = if value == "none" {
        "cpu".to_owned()
    } else if let Some(card) = number("CUDA") {
        name("cuda", card)
    } else if let Some(card) = number("Vulkan").or_else(|| number("Metal")).or_else(|| number("MTL")) {
        name("gpu", card)
    } else {
        value.to_owned()
    };
    ValueMeaning::Args(vec!["--device".to_owned(), own])
}

/// llama.cpp's `-sm`: how a model is distributed over GPUs.
fn split_mode(value: &str) -> ValueMeaning {
    if value == "none" {
        ValueMeaning::Nothing("a model is on one device".into())
    } else {
        ValueMeaning::Refused(NO_PARTS.into())
    }
}

/// llama-bench's `-mmp`: 0 or 1.
fn mmap(value: &str) -> ValueMeaning {
    if value == "0" {
        args(&["--no-mmap"])
    } else {
        ValueMeaning::Nothing("files are mapped unless --no-mmap says otherwise".into())
    }
}

/// llama-bench's `--no-warmup`.
fn no_warmup(_: &str) -> ValueMeaning {
    args(&["--warmup", "0"])
}

/// The number of sequences, for commands that run one.
fn sequences(value: &str) -> ValueMeaning {
    if value == "1" {
        ValueMeaning::Nothing("there is one text".into())
    } else {
        ValueMeaning::Refused("`metal-attention serve --parallel N` answers several requests at once".into())
    }
}

/// Whether the model thinks: ollama's `--think`, llama.cpp's `--reasoning`.
fn think(value: &str) -> ValueMeaning {
    match value {
        "auto" => ValueMeaning::Nothing("a model thinks where its chat template has it think".into()),
        "" | "1" | "enabled" => args(&["--thinking", "true"]),
        "0" | "disabled" => args(&["--thinking", "false"]),
        how => args(&["--thinking", how]),
    }
}

/// llama.cpp's `--reasoning-budget`: 0, -1 or a number of tokens.
fn reasoning_budget(value: &str) -> ValueMeaning {
    match value {
        "0" => args(&["--thinking", "false"]),
        "-1" => ValueMeaning::Nothing("reasoning may have any length".into()),
        _ => ValueMeaning::Refused(
            "--thinking false leaves reasoning out; a request to `metal-attention serve` can have thinking_budget_tokens"
                .into(),
        ),
    }
}

/// ollama's `--format`: `json` or a JSON schema.
fn format(value: &str) -> ValueMeaning {
    match value {
        "" => ValueMeaning::Nothing("an answer has any form unless a flag says otherwise".into()),
        "json" => args(&["--json-schema", "{\"type\":\"object\"}"]),
        schema => args(&["--json-schema", schema]),
    }
}

/// llama.cpp's `--mirostat`: 0, 1 or 2.
fn mirostat(value: &str) -> ValueMeaning {
    if value == "0" {
        ValueMeaning::Nothing("there is no mirostat".into())
    } else {
        ValueMeaning::Refused(
            "there is no mirostat: --top-p, --min-p, --typical or --dynatemp-range choose tokens by their probability"
                .into(),
        )
    }
}

/// llama-bench's `-o`: the output format.
fn bench_output(value: &str) -> ValueMeaning {
    match value {
        "json" | "jsonl" => args(&["--json"]),
        "csv" => args(&["--csv"]),
        "md" => args(&["--markdown"]),
        _ => ValueMeaning::Refused("--json, --csv and --markdown are the formats".into()),
    }
}

/// llama-embedding's `--embd-normalize`: the norm of the vectors.
fn normalize(value: &str) -> ValueMeaning {
    if value == "2" {
        ValueMeaning::Nothing("the vectors have length 1".into())
    } else {
        ValueMeaning::Refused("the vectors have length 1, which is 2 there".into())
    }
}

/// llama-embedding's `--embd-output-format`.
fn embeddings(value: &str) -> ValueMeaning {
    match value {
        "json" | "json+" | "array" => args(&["--json"]),
        "" | "raw" => ValueMeaning::Nothing("a single vector is printed a number a line".into()),
        _ => ValueMeaning::Refused("--json prints an object for each text".into()),
    }
}

/// The value of `--cache-type` that those of `--cache-type-k` and `--cache-type-v` become. The program has one type for
/// both.
pub fn cache_type(given: &[String]) -> ValueMeaning {
    let Some(first) = given.first() else { return ValueMeaning::Args(Vec::new()) };
    let own = first.to_ascii_lowercase();
    if given.iter().any(|other| !other.eq_ignore_ascii_case(first)) {
        ValueMeaning::Refused("keys and values are kept in one format: --cache-type f16 or f32".into())
    } else if own.parse::<CacheType>().is_err() {
        ValueMeaning::Refused(format!(
            "keys and values cannot be kept as {first} yet: --cache-type f16 or f32, or leave the flags out"
        ))
    } else if given.len() == 1 && own != "f16" {
        // In llama.cpp the other one of keys and values stays F16.
        ValueMeaning::Refused(format!("keys and values are kept in one format: --cache-type {own}"))
    } else {
        ValueMeaning::Args(vec!["--cache-type".to_owned(), own])
    }
}
