//! Arguments of attention, of its inputs, and of the append to the KV cache.

use metal_attention_model::PAGE;

use super::kernel_args;
use crate::bounds::{Bounds, KernelArgs, Launch};
use crate::slice::{DevicePtr, F16};

kernel_args! {
    /// A token of a micro-batch, or a row of embeddings in its place: `Token` of `heads.cuh`.
    #[derive(PartialEq, Eq)]
    pub(crate) struct TokenArgs = "Token" in "heads.cuh" {
        /// Its id in the vocabulary.
        pub(crate) id: u32,
        /// The index of its sequence.
        pub(crate) seq: u32,
        /// Its index in the sequence.
        pub(crate) pos: u32,
        /// The last index that it sees ([`LastSeen`](metal_attention_model::LastSeen)); at most `pos` where it sees no later ones.
        pub(crate) last: u32,
        /// The first component of its position.
        pub(crate) position: u32,
        /// The row of the RoPE cos/sin tables for its position.
        pub(crate) rope_row: u32,
    }

    /// Up to 64 consecutive tokens of one sequence, which all see up to the same one, or each up to itself: `QueryTile`
    /// of `prefill_attention.cu`.
    #[derive(PartialEq, Eq)]
    pub(crate) struct QueryTileArgs = "QueryTile" in "prefill_attention.cu" {
        /// The index of the first token in the micro-batch.
        pub(crate) token: u32,
        /// Tokens.
        pub(crate) n: u32,
        /// The index of the sequence.
        pub(crate) seq: u32,
        /// The index of the first token in its sequence.
        pub(crate) pos: u32,
        /// `TokenArgs::last` of all, or at most `pos` where they see no later tokens.
        pub(crate) last: u32,
    }

    /// Norm and RoPE of queries and keys: `HeadInputs` of `heads.cuh`.
    pub(crate) struct HeadArgs = "HeadInputs" in "heads.cuh" {
        pub(crate) q_norm: DevicePtr<f32>,
        pub(crate) k_norm: DevicePtr<f32>,
        pub(crate) rope: DevicePtr<[f32; 2]>,
        pub(crate) norm: u32,
        pub(crate) norm_after_rope: u32,
        pub(crate) rotation: u32,
        pub(crate) n_rot: u32,
        pub(crate) eps: f32,
        pub(crate) scale: f32,
    }

    /// A gate of attention's result: `ResultGate` of `heads.cuh`.
    pub(crate) struct GateArgs = "ResultGate" in "heads.cuh" {
        pub(crate) gates: DevicePtr<f32>,
        pub(crate) stride: u32,
        pub(crate) head_step: u32,
        pub(crate) element_step: u32,
        pub(crate) activation: u32,
    }

    /// The page tables of a cache group: `Pages` of `heads.cuh`.
    pub(crate) struct PagesArgs = "Pages" in "heads.cuh" {
        pub(crate) pages: DevicePtr<u32>,
        pub(crate) n_pages: u32,
        pub(crate) unused: u32,
    }

    /// Arguments of attention over whole KV pages, and of the append to the cache (`attention.cu`, `attention_on_units.cu`).
    pub(crate) struct AttentionArgs = "AttentionArgs" in "attention.cu" {
        pub(crate) inputs: HeadArgs,
        pub(crate) tokens: DevicePtr<TokenArgs>,
        pub(crate) pages: PagesArgs,
        pub(crate) k_cache: DevicePtr<u8>,
        pub(crate) v_cache: DevicePtr<u8>,
        pub(crate) qkv: DevicePtr<f32>,
        pub(crate) out: DevicePtr<f32>,
        pub(crate) packed: DevicePtr<F16>,
        pub(crate) partial: DevicePtr<f32>,
        pub(crate) tickets: DevicePtr<u32>,
        pub(crate) sinks: DevicePtr<f32>,
        pub(crate) n_head: u32,
        pub(crate) n_head_kv: u32,
        pub(crate) head_dim: u32,
        pub(crate) stride: u32,
        pub(crate) n_splits: u32,
        pub(crate) n_chunks: u32,
        pub(crate) n_token_tiles: u32,
        pub(crate) mask: u32,
        pub(crate) reach: u32,
        pub(crate) soft_cap: f32,
        pub(crate) q_step: u32,
        pub(crate) k_at: u32,
        pub(crate) v_at: u32,
        pub(crate) unused: u32,
        pub(crate) gate: GateArgs,
    }

    /// Arguments of the separate kernel for queries, keys and values (`attention_inputs.cu`).
    pub(crate) struct AttentionInputsArgs = "AttentionInputsArgs" in "attention_inputs.cu" {
        pub(crate) inputs: HeadArgs,
        pub(crate) q_bias: DevicePtr<f32>,
        pub(crate) k_bias: DevicePtr<f32>,
        pub(crate) tokens: DevicePtr<TokenArgs>,
        pub(crate) pages: PagesArgs,
        pub(crate) k_cache: DevicePtr<u8>,
        pub(crate) v_cache: DevicePtr<u8>,
        pub(crate) qkv: DevicePtr<f32>,
        pub(crate) queries: DevicePtr<f32>,
        pub(crate) n_head: u32,
        pub(crate) n_head_kv: u32,
        pub(crate) head_dim: u32,
        pub(crate) stride: u32,
        pub(crate) q_step: u32,
        pub(crate) k_at: u32,
        pub(crate) v_at: u32,
        pub(crate) owns_cache: u32,
        pub(crate) kind: u32,
        pub(crate) clamp: f32,
        pub(crate) value_eps: f32,
        pub(crate) growth: f32,
        pub(crate) growth_length: u32,
        pub(crate) growth_offset: u32,
    }

    /// Arguments of the attention for every mask and head size (`general_attention.cu`).
    pub(crate) struct GeneralAttentionArgs = "GeneralAttentionArgs" in "general_attention.cu" {
        pub(crate) tokens: DevicePtr<TokenArgs>,
        pub(crate) pages: PagesArgs,
        pub(crate) k_cache: DevicePtr<u8>,
        pub(crate) v_cache: DevicePtr<u8>,
        pub(crate) queries: DevicePtr<f32>,
        pub(crate) out: DevicePtr<f32>,
        pub(crate) packed: DevicePtr<F16>,
        pub(crate) partial: DevicePtr<f32>,
        pub(crate) tickets: DevicePtr<u32>,
        pub(crate) sinks: DevicePtr<f32>,
        pub(crate) slopes: DevicePtr<f32>,
        pub(crate) n_head: u32,
        pub(crate) n_head_kv: u32,
        pub(crate) key_dim: u32,
        pub(crate) value_dim: u32,
        pub(crate) n_splits: u32,
        pub(crate) n_token_tiles: u32,
        pub(crate) mask: u32,
        pub(crate) reach: u32,
        pub(crate) soft_cap: f32,
        pub(crate) unused: u32,
        pub(crate) gate: GateArgs,
    }

    /// Arguments of attention over query tiles (`prefill_attention.cu`), with and without split-KV.
    pub(crate) struct PrefillArgs = "PrefillArgs" in "prefill_attention.cu" {
        pub(crate) tiles: DevicePtr<QueryTileArgs>,
        pub(crate) pages: PagesArgs,
        pub(crate) k_cache: DevicePtr<F16>,
        pub(crate) v_cache: DevicePtr<F16>,
        pub(crate) qkv: DevicePtr<f32>,
        pub(crate) packed: DevicePtr<F16>,
        pub(crate) sinks: DevicePtr<f32>,
        pub(crate) n_head: u32,
        pub(crate) n_head_kv: u32,
        pub(crate) stride: u32,
        pub(crate) n_token_tiles: u32,
        pub(crate) mask: u32,
        pub(crate) reach: u32,
        pub(crate) soft_cap: f32,
        pub(crate) n_splits: u32,
        pub(crate) partial: DevicePtr<f32>,
        pub(crate) tickets: DevicePtr<u32>,
        pub(crate) gate: GateArgs,
    }
}

/// `HeadNorm` of `heads.cuh` with a weight for each head, and `NORM_OF_ROW` of `attention_inputs.cu`.
const NORMS_WITH_WEIGHTS_OF_HEADS: [u32; 2] = [2, 4];

impl HeadArgs {
    /// Heads that have weights of their own in a norm, of `n_head`.
    fn heads_with_weights(&self, n_head: u32) -> usize {
        if NORMS_WITH_WEIGHTS_OF_HEADS.contains(&self.norm) { n_head as usize } else { 1 }
    }

    /// States the weights of the norms, and one position of the RoPE table.
    fn bounds(&self, n_head: u32, n_head_kv: u32, head_dim: u32, bounds: &mut Bounds) {
        bounds.array("inputs.q_norm", self.q_norm, self.heads_with_weights(n_head) * head_dim as usize);
        bounds.array("inputs.k_norm", self.k_norm, self.heads_with_weights(n_head_kv) * head_dim as usize);
        bounds.array("inputs.rope", self.rope, self.n_rot as usize / 2);
    }
}

impl PagesArgs {
    /// States the page table of one sequence.
    pub(super) fn bounds(&self, bounds: &mut Bounds) {
        bounds.array("pages", self.pages, self.n_pages as usize);
    }
}

/// States one page of keys or values.
fn page_of(field: &'static str, cache: DevicePtr<u8>, launch: &Launch, n_head_kv: u32, dim: u32, bounds: &mut Bounds) {
    bounds.array(field, cache, PAGE * n_head_kv as usize * dim as usize * launch.cache_bytes());
}

impl GateArgs {
    /// States the gates of `n` tokens.
    fn bounds(&self, n: usize, n_head: u32, dim: u32, bounds: &mut Bounds) {
        let last = (n_head as usize - 1) * self.head_step as usize + (dim as usize - 1) * self.element_step as usize;
        bounds.rows("gates", self.gates, n, self.stride, last + 1);
    }
}

impl KernelArgs for AttentionArgs {
    fn bounds(&self, launch: &Launch, bounds: &mut Bounds) {
        let Self { n_head, n_head_kv, head_dim, .. } = *self;
        let appends = launch.kernel.starts_with("append_");
        let n = launch.grid.blocks[if appends { 1 } else { 2 }];
        let (heads, dim) = (n_head as usize, head_dim as usize);
        self.inputs.bounds(n_head, n_head_kv, head_dim, bounds);
        self.pages.bounds(bounds);
        bounds.array("tokens", self.tokens, n);
        page_of("k_cache", self.k_cache, launch, n_head_kv, head_dim, bounds);
        page_of("v_cache", self.v_cache, launch, n_head_kv, head_dim, bounds);
        let queries = (heads - 1) * self.q_step as usize + dim;
        let values = self.v_at as usize + n_head_kv as usize * dim;
        // Where keys and values are in the cache, only queries are read.
        let row = if launch.kernel.starts_with("attention_appended") { queries } else { queries.max(values) };
        bounds.rows("qkv", self.qkv, n, self.stride, row);
        if appends {
            return;
        }
        bounds.array("out", self.out, n * heads * dim);
        bounds.packed("packed", self.packed, self.n_token_tiles, heads * dim);
        if self.n_splits > 1 {
            bounds.array("partial", self.partial, n * heads * self.n_splits as usize * (dim + 2));
            bounds.array("tickets", self.tickets, n * (n_head_kv * self.n_chunks) as usize);
        }
        bounds.array("sinks", self.sinks, heads);
        self.gate.bounds(n, n_head, head_dim, bounds);
    }
}

impl KernelArgs for AttentionInputsArgs {
    fn bounds(&self, launch: &Launch, bounds: &mut Bounds) {
        let Self { inputs, n_head, n_head_kv, head_dim, .. } = *self;
        let (n, heads, dim) = (launch.grid.blocks[1], n_head as usize, head_dim as usize);
        inputs.bounds(n_head, n_head_kv, head_dim, bounds);
        self.pages.bounds(bounds);
        bounds.array("q_bias", self.q_bias, inputs.heads_with_weights(n_head) * dim);
        bounds.array("k_bias", self.k_bias, inputs.heads_with_weights(n_head_kv) * dim);
        bounds.array("tokens", self.tokens, n);
        let mut row = (heads - 1) * self.q_step as usize + dim;
        if self.owns_cache == 1 {
            row = row.max(self.k_at.max(self.v_at) as usize + n_head_kv as usize * dim);
            page_of("k_cache", self.k_cache, launch, n_head_kv, head_dim, bounds);
            page_of("v_cache", self.v_cache, launch, n_head_kv, head_dim, bounds);
        }
        bounds.rows("qkv", self.qkv, n, self.stride, row);
        bounds.array("queries", self.queries, n * heads * dim);
    }
}

impl KernelArgs for GeneralAttentionArgs {
    fn bounds(&self, launch: &Launch, bounds: &mut Bounds) {
        let Self { n_head, n_head_kv, key_dim, value_dim, .. } = *self;
        let (n, heads) = (launch.grid.blocks[2], n_head as usize);
        self.pages.bounds(bounds);
        bounds.array("tokens", self.tokens, n);
        page_of("k_cache", self.k_cache, launch, n_head_kv, key_dim, bounds);
        page_of("v_cache", self.v_cache, launch, n_head_kv, value_dim, bounds);
        bounds.array("queries", self.queries, n * heads * key_dim as usize);
        bounds.array("out", self.out, n * heads * value_dim as usize);
        bounds.packed("packed", self.packed, self.n_token_tiles, heads * value_dim as usize);
        if self.n_splits > 1 {
            bounds.array("partial", self.partial, n * heads * self.n_splits as usize * (value_dim as usize + 2));
            bounds.array("tickets", self.tickets, n * heads);
        }
        bounds.array("sinks", self.sinks, heads);
        bounds.array("slopes", self.slopes, heads);
        self.gate.bounds(n, n_head, value_dim, bounds);
    }
}

impl KernelArgs for PrefillArgs {
    fn bounds(&self, launch: &Launch, bounds: &mut Bounds) {
        // The elements of a head are the number in the kernel's name; which tokens a tile has is in device memory.
        let (heads, dim) = (self.n_head as usize, launch.number().unwrap_or(0));
        self.pages.bounds(bounds);
        bounds.array("tiles", self.tiles, launch.grid.blocks[0]);
        page_of("k_cache", self.k_cache.cast(), launch, self.n_head_kv, dim as u32, bounds);
        page_of("v_cache", self.v_cache.cast(), launch, self.n_head_kv, dim as u32, bounds);
        bounds.array("qkv", self.qkv, dim);
        bounds.packed("packed", self.packed, self.n_token_tiles, heads * dim);
        if self.n_splits > 1 {
            bounds.array("partial", self.partial, launch.grid.blocks[0] * heads * self.n_splits as usize * (dim + 2));
            bounds.array("tickets", self.tickets, launch.grid.blocks[0] * launch.grid.blocks[1]);
        }
        bounds.array("sinks", self.sinks, heads);
        self.gate.bounds(1, self.n_head, dim as u32, bounds);
    }
}
