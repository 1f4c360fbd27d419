//! The summary of a model that `info` shows: tensor types, sizes, tokenizer and memory.

use std::collections::BTreeMap;

use metal_attention::EngineOptions;
use metal_attention::gguf::{GgufFile, Metadata, StringArray, TensorType};
use metal_attention::speculation::DrafterMemory;
use metal_attention_model::{
    AttentionSpec, CacheGroups, Capacity, DEFAULT_UBATCH, FeedForward, LatentAttentionSpec, Mask, Mixer, ModelSpec,
    Rope, RopeLayout, RopeScaling,
};
use serde::Serialize;

use crate::metadata_text::safe;

/// The tensors of a file, counted by type.
pub struct TensorCounts {
    /// The number of elements of all tensors.
    pub parameters: u64,
    /// The size of all tensors in bytes.
    bytes: u64,
    /// The types that occur, in order.
    pub types: Vec<TypeCount>,
}

/// The tensors of one type.
#[derive(Serialize)]
pub struct TypeCount {
    /// The type's name.
    #[serde(rename = "type")]
    pub ty: &'static str,
    /// The number of tensors.
    pub tensors: usize,
    /// Their size in bytes.
    pub bytes: u64,
}

impl TensorCounts {
    /// Counts the tensors of `file`.
    pub fn of(file: &GgufFile) -> Self {
        let mut types = BTreeMap::<TensorType, (usize, u64)>::new();
        for tensor in file.tensors() {
            let (tensors, bytes) = types.entry(tensor.ty()).or_default();
            *tensors += 1;
            *bytes += tensor.bytes().len() as u64;
        }
        let types = types.into_iter().map(|(ty, (tensors, bytes))| TypeCount { ty: ty.name(), tensors, bytes });
        Self {
            parameters: file.tensors().iter().map(|t| t.n_elements() as u64).sum(),
            bytes: file.tensor_bytes(),
            types: types.collect(),
        }
    }

    /// The mean number of bits of an element. `None`: there are no tensors.
    pub fn bits_per_weight(&self) -> Option<f64> {
        (self.parameters > 0).then(|| self.bytes as f64 * 8.0 / self.parameters as f64)
    }
}

/// A model's hyperparameters. If a value differs between layers, the largest one.
#[derive(Default, Serialize)]
pub struct ModelSizes {
    /// Layers.
    n_layer: Option<usize>,
    /// The width of the residual stream.
    n_embd: Option<usize>,
    /// Heads.
    n_head: Option<usize>,
    /// KV heads.
    n_head_kv: Option<usize>,
    /// The width of a head.
    head_dim: Option<usize>,
    /// The width of the feed-forward, or of one expert.
    n_ff: Option<usize>,
    /// Experts of a layer.
    n_expert: Option<usize>,
    /// Experts that a token uses.
    n_expert_used: Option<usize>,
    /// Tokens of the vocabulary.
    n_vocab: Option<usize>,
    /// The context of the training, in tokens.
    n_ctx_train: Option<usize>,
    /// The length of the sliding window, in tokens.
    sliding_window: Option<usize>,
    /// `interleaved` (NORM rotation) or `halves` (NeoX rotation).
    rope_layout: Option<&'static str>,
    /// The base of RoPE's frequencies.
    rope_freq_base: Option<f32>,
    /// The scaling of RoPE, as text.
    rope_scaling: Option<String>,
    /// Whether a tensor divides RoPE's frequencies, as in Llama 3.1 and later.
    rope_freqs: Option<bool>,
}

/// The heads of a layer's attention.
struct LayerHeads {
    /// Heads.
    n_head: usize,
    /// KV heads.
    n_head_kv: usize,
    /// The width of a head.
    head_dim: usize,
    /// The positions that a token attends to. `None`: all of them.
    window: Option<usize>,
    /// The rotation of queries and keys.
    rope: Option<Rope>,
}

impl LayerHeads {
    /// The heads of `mixer`. `None`: it has none.
    fn of(mixer: &Mixer) -> Option<Self> {
        let of_attention = |a: &AttentionSpec| Self {
            n_head: a.n_head,
            n_head_kv: a.n_head_kv,
            head_dim: a.head_dim,
            window: match a.mask {
                Mask::Causal | Mask::Full => None,
                Mask::Window(n) | Mask::Chunk(n) => Some(n),
                Mask::SymmetricWindow(distance) => Some(2 * distance + 1),
            },
            rope: a.rope().copied(),
        };
        let of_latent_attention = |a: &LatentAttentionSpec| Self {
            n_head: a.n_head,
            n_head_kv: 1,
            head_dim: a.head_dim(),
            window: None,
            rope: a.rope,
        };
        mixer.attention().map(of_attention).or_else(|| mixer.latent_attention().map(of_latent_attention))
    }
}

impl ModelSizes {
    /// The sizes of a model with a valid spec. `rope_freqs` tells whether the file has the tensor of that name.
    pub fn from_spec(spec: &ModelSpec, rope_freqs: bool) -> Self {
        let heads = || spec.layers.iter().filter_map(|layer| LayerHeads::of(&layer.mixer));
        let n_ff = spec.layers.iter().map(|layer| match &layer.feed_forward {
            FeedForward::Dense(dense) => dense.n_ff,
            FeedForward::Experts(experts) => experts.expert.n_ff,
            FeedForward::ChannelMix(mix) => mix.width,
            FeedForward::None => 0,
        });
        let experts = || {
            spec.layers.iter().filter_map(|layer| match &layer.feed_forward {
                FeedForward::Dense(_) | FeedForward::ChannelMix(_) | FeedForward::None => None,
                FeedForward::Experts(experts) => Some(experts),
            })
        };
        let rope = heads().find_map(|heads| heads.rope);
        Self {
            n_layer: Some(spec.n_layer()),
            n_embd: Some(spec.n_embd),
            n_head: heads().map(|heads| heads.n_head).max(),
            n_head_kv: heads().map(|heads| heads.n_head_kv).max(),
            head_dim: heads().map(|heads| heads.head_dim).max(),
            n_expert: experts().map(|experts| experts.n_expert).max(),
            n_expert_used: experts().map(|experts| experts.n_used).max(),
            n_ff: n_ff.max(),
            n_vocab: Some(spec.n_vocab),
            n_ctx_train: Some(spec.n_ctx_train),
            sliding_window: heads().filter_map(|heads| heads.window).max(),
            rope_layout: rope.map(|rope| match rope.layout {
                RopeLayout::Interleaved => "interleaved",
                RopeLayout::Halves => "halves",
            }),
            rope_freq_base: rope.map(|rope| rope.freq_base),
            rope_scaling: rope.map(|rope| match rope.scaling {
                RopeScaling::None => "none".into(),
                RopeScaling::Linear { factor } => format!("linear, factor {factor}"),
                RopeScaling::Yarn { factor, n_ctx_orig, .. } => format!("yarn, factor {factor} from {n_ctx_orig}"),
            }),
            rope_freqs: Some(rope_freqs),
        }
    }

    /// The sizes that the metadata of an unknown architecture give under the usual keys.
    pub fn from_metadata(metadata: &Metadata, architecture: Option<&str>) -> Self {
        let Some(architecture) = architecture else { return Self::default() };
        let key = |key: &str| format!("{architecture}.{key}");
        let size = |name: &str| metadata.usize(&key(name)).ok().flatten();
        let n_tokens = metadata.strings("tokenizer.ggml.tokens").ok().flatten().map(StringArray::len);
        Self {
            n_layer: size("block_count"),
            n_embd: size("embedding_length"),
            n_head: size("attention.head_count"),
            n_head_kv: size("attention.head_count_kv"),
            head_dim: size("attention.key_length"),
            n_ff: size("feed_forward_length"),
            n_expert: size("expert_count"),
            n_expert_used: size("expert_used_count"),
            n_vocab: n_tokens.or_else(|| size("vocab_size")),
            n_ctx_train: size("context_length"),
            sliding_window: size("attention.sliding_window"),
            rope_layout: None,
            rope_freq_base: metadata.f32(&key("rope.freq_base")).ok().flatten(),
            rope_scaling: metadata.str(&key("rope.scaling.type")).ok().flatten().map(str::to_owned),
            rope_freqs: None,
        }
    }

    /// The known sizes, each as a name and a text.
    pub fn lines(&self) -> Vec<(&'static str, String)> {
        let mut lines = Vec::new();
        let numbers = [
            ("layers", self.n_layer),
            ("embedding", self.n_embd),
            ("heads", self.n_head),
            ("KV heads", self.n_head_kv),
            ("head length", self.head_dim),
            ("feed-forward", self.n_ff),
            ("experts", self.n_expert),
            ("experts used", self.n_expert_used),
            ("vocabulary", self.n_vocab),
            ("context", self.n_ctx_train),
            ("sliding window", self.sliding_window),
        ];
        lines.extend(numbers.into_iter().filter_map(|(what, n)| Some((what, n?.to_string()))));
        let base = self.rope_freq_base.map(|base| format!("base {base}"));
        let scaling = self.rope_scaling.as_ref().map(|scaling| format!("scaling {}", safe(scaling)));
        let freqs =
            self.rope_freqs.filter(|&there| there).map(|_| "frequencies divided by rope_freqs.weight".to_owned());
        let layout = self.rope_layout.map(str::to_owned);
        let rope: Vec<_> = [layout, base, scaling, freqs].into_iter().flatten().collect();
        if !rope.is_empty() {
            lines.push(("RoPE", rope.join(", ")));
        }
        lines
    }
}

/// The tokenizer as the metadata describe it.
#[derive(Serialize)]
pub struct TokenizerSummary {
    /// The kind of the tokenizer.
    model: Option<String>,
    /// The name of the pre-tokenizer.
    pre: Option<String>,
    /// The size of the vocabulary.
    n_tokens: usize,
    /// Tokens with a special meaning.
    special_tokens: Vec<SpecialTokenSummary>,
    /// Whether a BOS token begins a text.
    add_bos: Option<bool>,
    /// Whether an EOS token ends a text.
    add_eos: Option<bool>,
    /// Whether the file has a chat template.
    chat_template: bool,
}

/// A token with a special meaning.
#[derive(Serialize)]
struct SpecialTokenSummary {
    /// The meaning: `bos` for the key `tokenizer.ggml.bos_token_id`, and so on.
    role: String,
    /// The token's id.
    id: u32,
    /// The token's text. `None`: the vocabulary has no such token.
    text: Option<String>,
}

impl TokenizerSummary {
    /// The summary of a file's tokenizer. `None`: the file has no vocabulary.
    pub fn of(metadata: &Metadata) -> Option<Self> {
        let tokens = metadata.strings("tokenizer.ggml.tokens").ok()??;
        let text = |key: &str| metadata.str(key).ok().flatten().map(str::to_owned);
        let flag = |key: &str| metadata.bool(key).ok().flatten();
        let special = |(key, _)| {
            let role: &str = key;
            let role = role.strip_prefix("tokenizer.ggml.")?.strip_suffix("_token_id")?;
            let id = metadata.u32(key).ok()??;
            Some(SpecialTokenSummary { role: role.to_owned(), id, text: tokens.get(id as usize).map(str::to_owned) })
        };
        Some(Self {
            model: text("tokenizer.ggml.model"),
            pre: text("tokenizer.ggml.pre"),
            n_tokens: tokens.len(),
            special_tokens: metadata.iter().filter_map(special).collect(),
            add_bos: flag("tokenizer.ggml.add_bos_token"),
            add_eos: flag("tokenizer.ggml.add_eos_token"),
            chat_template: metadata.get("tokenizer.chat_template").is_some(),
        })
    }

    /// The summary as lines, each a name and a text.
    pub fn lines(&self) -> Vec<(&'static str, String)> {
        let pre = self.pre.as_ref().map_or(String::new(), |pre| format!(", pre-tokenizer {}", safe(pre)));
        let model = self.model.as_deref().map_or("of unknown kind".into(), safe);
        let mut lines = vec![("tokenizer", format!("{model}{pre}, {} tokens", self.n_tokens))];
        let token = |t: &SpecialTokenSummary| {
            let text = t.text.as_deref().map_or("not in the vocabulary".into(), safe);
            format!("{} {} ({text})", safe(&t.role), t.id)
        };
        let special: Vec<_> = self.special_tokens.iter().map(token).collect();
        if !special.is_empty() {
            lines.push(("special tokens", special.join(", ")));
        }
        lines.push(("chat template", if self.chat_template { "yes" } else { "no" }.into()));
        lines
    }
}

/// The memory of a model with one sequence of `n_ctx` tokens and an F16 KV cache, without scratch buffers. Sizes are in bytes.
#[derive(Serialize)]
pub struct MemorySummary {
    /// The length of the context in tokens.
    pub n_ctx: usize,
    /// The weights.
    pub weights_bytes: u64,
    /// The KV cache.
    pub kv_cache_bytes: u64,
    /// Recurrent states, including their snapshots.
    pub state_bytes: u64,
    /// The drafter: its weights, if they are in a file of their own, and its KV caches.
    pub drafter_bytes: u64,
    /// The sum of all.
    pub total_bytes: u64,
}

impl MemorySummary {
    /// The memory at contexts of 512 to 8192 tokens and at the context of the training, with a drafter.
    pub fn at_several_contexts(file: &GgufFile, spec: &ModelSpec, drafter: &DrafterMemory) -> Vec<Self> {
        let mut contexts: Vec<_> = [512, 2048, 4096, 8192].into_iter().filter(|&n| n < spec.n_ctx_train).collect();
        contexts.push(spec.n_ctx_train);
        let options = EngineOptions { drafter: drafter.clone(), ..Default::default() };
        let at = |n_ctx: usize| {
            let weights_bytes = file.tensor_bytes();
            let room = Capacity {
                n_ctx,
                n_seq: 1,
                n_cache: None,
                n_windows: None,
                state_cache: options.state_cache,
                n_ubatch: DEFAULT_UBATCH,
            };
            let groups = CacheGroups::new(spec, room);
            let kv_cache_bytes = groups.n_elements(spec).saturating_mul(2);
            let state_bytes = groups.states().map_or(0, |states| states.bytes());
            let drafter_bytes = options.drafter_bytes(n_ctx, Some(n_ctx));
            let parts = [weights_bytes, kv_cache_bytes, state_bytes, drafter_bytes];
            let total_bytes = parts.into_iter().fold(0, u64::saturating_add);
            Self { n_ctx, weights_bytes, kv_cache_bytes, state_bytes, drafter_bytes, total_bytes }
        };
        contexts.into_iter().map(at).collect()
    }
}
