//! What launches the kernels of attention for a micro-batch.

use bytemuck::Zeroable;
use metal_attention_model::{CacheType, GateActivation, GateWidth};

use super::{AttentionKernels, CudaAttention, CudaGate, gate_activation_code};
use crate::CudaError;
use crate::activations::{ATTENTION_BLOCKS, MAX_SPLITS, n_splits};
use crate::args::{AttentionArgs, AttentionInputsArgs, GateArgs, GeneralAttentionArgs, PrefillArgs};
use crate::inputs::{QueryTiles, TileKernel};
use crate::kernels::{self, EntryPoint, of_cache};
use crate::launch::LaunchGrid;
use crate::runner::layer::SublayerOutput;
use crate::runner::linear::{LinearInput, LinearOp};
use crate::runner::{MicroBatch, MicroBatchSize, ModelRunner};
use crate::slice::DevicePtr;
use crate::weights::ptr_or_null;

/// Query heads of a block of `verify_attention`.
pub(crate) const VERIFIED_HEADS: usize = 4;
/// Partial results of a head that a block of `verify_attention` merges in less time than it takes to compute them.
const VERIFY_MERGED_ROWS: usize = 128;

impl ModelRunner {
    /// Launches the attention of layer `i`, except its output product.
    pub(crate) fn attention<'w>(
        &mut self,
        batch: MicroBatch<'_>,
        i: usize,
        a: &'w CudaAttention,
        input: LinearInput,
    ) -> Result<SublayerOutput<'w>, CudaError> {
        self.project(batch, a, input)?;
        let gate = self.gate(batch, a, input)?;
        self.run_attention(batch, i, a, gate)?;
        let input = self.input(&self.buffers.att, &self.buffers.packed_att, batch.size.n_tokens);
        Ok(SublayerOutput::Product { label: "attention output", linear: &a.out, input })
    }

    /// Launches what stores the keys and values of the rows in `x`, context rows of a block drafter, for layer `i`. The queries are
    /// computed, too, and not used: keys and values alone would be other arguments.
    pub(crate) fn store_context(
        &mut self,
        batch: MicroBatch<'_>,
        i: usize,
        a: &CudaAttention,
    ) -> Result<(), CudaError> {
        let n = batch.size.n_tokens;
        let input = self.normed(None, batch.spec.n_embd, n)?;
        self.project(batch, a, input)?;
        self.run_attention(batch, i, a, GateArgs::zeroed())
    }

    /// Launches the products of queries, keys and values, to `qkv`.
    fn project(&mut self, batch: MicroBatch<'_>, a: &CudaAttention, input: LinearInput) -> Result<(), CudaError> {
        let (n, n_in) = (batch.size.n_tokens, a.qkv[0].n_in);
        let first_rows = a.qkv.iter().scan(0, |first, matrix| {
            *first += matrix.n_rows;
            Some(*first - matrix.n_rows)
        });
        let qkv = LinearOp {
            label: "qkv",
            matrices: a.qkv.iter().zip(first_rows).collect(),
            n_out: a.stride(),
            bias: ptr_or_null(a.qkv_bias.as_ref()),
            y: self.buffers.qkv.slice(),
            ..LinearOp::stored("", &a.qkv[0])
        };
        self.product(&qkv, input, n_in, n)
    }

    /// Launches the separate kernel that makes queries, keys and values from their projections, where the fused ones cannot. Returns
    /// the queries and the elements from one token's to the next one's; `None` if the attention kernel or `append_*` does it.
    fn separate_inputs(
        &mut self,
        batch: MicroBatch<'_>,
        i: usize,
        a: &CudaAttention,
    ) -> Result<Option<(DevicePtr<f32>, usize)>, CudaError> {
        let MicroBatch { cache, size, .. } = batch;
        let in_decode = size.query_tiles.count == 0 && batch.context.is_none();
        let Some(args) = a.separate_inputs.filter(|_| !in_decode || !a.fused_in_decode) else {
            return Ok(None);
        };
        let [k_cache, v_cache] = cache.layer_pages(i);
        let args = AttentionInputsArgs {
            tokens: self.buffers.tokens.ptr(),
            pages: cache.page_table_of_layer(i),
            k_cache,
            v_cache,
            qkv: self.buffers.qkv.ptr(),
            queries: self.buffers.queries.ptr(),
            ..args
        };
        let heads = a.n_head + if args.owns_cache == 1 { 2 * a.n_head_kv } else { 0 };
        let grid = LaunchGrid { blocks: [heads.div_ceil(4), size.n_tokens, 1], threads: 128, shared: 16 * a.head_dim };
        self.launch(of_cache(kernels::ATTENTION_INPUTS, cache.cache_type), "", grid, &args)?;
        Ok(Some((args.queries, a.n_head * a.head_dim)))
    }

    /// Launches the product of a gate that has a matrix of its own, to the scratch. Returns where attention finds its gates.
    fn gate(&mut self, batch: MicroBatch<'_>, a: &CudaAttention, input: LinearInput) -> Result<GateArgs, CudaError> {
        Ok(match &a.gate {
            None => GateArgs::zeroed(),
            Some(CudaGate::InQueries) => GateArgs {
                gates: self.buffers.qkv.slice().skip(a.head_dim).ptr(),
                stride: a.stride() as u32,
                head_step: 2 * a.head_dim as u32,
                element_step: 1,
                activation: gate_activation_code(GateActivation::Sigmoid),
            },
            Some(CudaGate::Matrix { linear, width, activation }) => {
                let n_rows = linear.weight.n_rows;
                let [gates] = self.scratch_rows(batch, [n_rows]);
                self.store("gates", linear, input, gates, batch.size.n_tokens)?;
                let (head_step, element_step) = match width {
                    GateWidth::Element => (a.head_dim as u32, 1),
                    GateWidth::Head => (1, 0),
                };
                let activation = gate_activation_code(*activation);
                GateArgs { gates: gates.ptr(), stride: n_rows as u32, head_step, element_step, activation }
            }
        })
    }

    /// Launches attention over the projections in `qkv`; the result goes to `att`, and packed to `packed_att` where the output
    /// product reads that. Of context rows keys and values are stored, and there is no result.
    fn run_attention(
        &mut self,
        batch: MicroBatch<'_>,
        i: usize,
        a: &CudaAttention,
        gate: GateArgs,
    ) -> Result<(), CudaError> {
        let MicroBatch { cache, size, .. } = batch;
        let n = size.n_tokens;
        let [k_cache, v_cache] = cache.layer_pages(i);
        let packed = if self.uses_f32_inputs(n) { DevicePtr::NULL } else { self.buffers.packed_att.ptr() };
        let token_tiles = self.packed_layout(n);
        let heads_per_kv = a.n_head / a.n_head_kv;
        let group = queries_per_block(n * a.n_head_kv, heads_per_kv);
        let n_chunks = heads_per_kv.div_ceil(group);
        let splits = n_splits(n, a.n_head_kv * n_chunks);
        let separate = self.separate_inputs(batch, i, a)?;
        let (qkv, stride) = separate.unwrap_or((self.buffers.qkv.ptr(), a.stride()));
        let follows_queries = matches!(a.gate, Some(CudaGate::InQueries));
        let args = AttentionArgs {
            inputs: a.inputs,
            tokens: self.buffers.tokens.ptr(),
            pages: cache.page_table_of_layer(i),
            k_cache,
            v_cache,
            qkv,
            out: self.buffers.att.ptr(),
            packed,
            partial: self.buffers.partial.ptr(),
            tickets: self.buffers.tickets.ptr(),
            sinks: ptr_or_null(a.sinks.as_ref()),
            n_head: a.n_head as u32,
            n_head_kv: a.n_head_kv as u32,
            head_dim: a.head_dim as u32,
            stride: stride as u32,
            n_splits: splits as u32,
            n_chunks: n_chunks as u32,
            n_token_tiles: token_tiles,
            mask: a.mask,
            reach: a.reach,
            soft_cap: a.soft_cap,
            gate,
            q_step: (a.head_dim * if follows_queries && separate.is_none() { 2 } else { 1 }) as u32,
            k_at: a.qkv[0].n_rows as u32,
            v_at: (a.qkv[0].n_rows + a.n_head_kv * a.head_dim) as u32,
            unused: 0,
        };
        // These kernels read all keys and values from the cache, so new ones have to be appended before.
        let (is_prefill, is_context) = (size.query_tiles.count > 0, batch.context.is_some());
        let appended = is_prefill || separate.is_some();
        if (is_prefill || is_context) && separate.is_none() {
            let heads = a.n_head + 2 * a.n_head_kv;
            let grid = LaunchGrid { blocks: [heads.div_ceil(4), n, 1], threads: 128, shared: 16 * a.head_dim };
            self.launch(of_cache(kernels::APPEND, cache.cache_type), "", grid, &args)?;
        }
        if is_context {
            return Ok(());
        }
        let on_tensor_cores = prefill_kernel(a.head_dim).is_some() && cache.cache_type == CacheType::F16;
        if is_prefill && on_tensor_cores && !packed.is_null() && a.slopes.is_none() {
            return self.attention_of_tiles(&args, a, size);
        }
        match a.kernels {
            AttentionKernels::Paged if on_tensor_cores && a.head_dim <= 128 => {
                let rows = 4 * 2 * 2 * 16 * (a.head_dim + 8) * 2;
                let shared = rows + 4 * (10 * a.head_dim + 8 * 32);
                let grid = LaunchGrid { blocks: [a.n_head_kv * n_chunks, splits, n], threads: 128, shared };
                let of_sizes =
                    if appended { kernels::ATTENTION_APPENDED_ON_UNITS } else { kernels::ATTENTION_ON_UNITS };
                self.launch(of_sizes[usize::from(a.head_dim > 64)], "", grid, &args)
            }
            AttentionKernels::Paged => {
                let page_row = a.head_dim + 32 / cache.cache_type.bytes();
                let pages = 2 * 64 * page_row * cache.cache_type.bytes();
                let shared = pages + 4 * ((group + 2) * a.head_dim + group * 67);
                let grid = LaunchGrid { blocks: [a.n_head_kv * n_chunks, splits, n], threads: 128, shared };
                let of_groups = match (cache.cache_type, appended) {
                    (CacheType::F16, false) => kernels::ATTENTION_F16,
                    (CacheType::F16, true) => kernels::ATTENTION_APPENDED_F16,
                    (CacheType::F32, false) => kernels::ATTENTION_F32,
                    (CacheType::F32, true) => kernels::ATTENTION_APPENDED_F32,
                };
                self.launch(of_groups[group.ilog2() as usize], "", grid, &args)
            }
            AttentionKernels::General => self.general_attention(&args, a, cache.cache_type, n),
        }
    }

    /// Launches the kernel for every kind of attention, with the addresses of `base`.
    fn general_attention(
        &mut self,
        base: &AttentionArgs,
        a: &CudaAttention,
        cache_type: CacheType,
        n_tokens: usize,
    ) -> Result<(), CudaError> {
        let splits = n_splits(n_tokens, a.n_head);
        let args = GeneralAttentionArgs {
            tokens: base.tokens,
            pages: base.pages,
            k_cache: base.k_cache,
            v_cache: base.v_cache,
            queries: base.qkv,
            out: base.out,
            packed: base.packed,
            partial: base.partial,
            tickets: base.tickets,
            sinks: base.sinks,
            slopes: ptr_or_null(a.slopes.as_ref()),
            n_head: base.n_head,
            n_head_kv: base.n_head_kv,
            key_dim: base.head_dim,
            value_dim: base.head_dim,
            n_splits: splits as u32,
            n_token_tiles: base.n_token_tiles,
            mask: base.mask,
            reach: base.reach,
            soft_cap: base.soft_cap,
            unused: 0,
            gate: base.gate,
        };
        let grid = LaunchGrid { blocks: [a.n_head, splits, n_tokens], threads: 128, shared: 4 * (a.head_dim + 128) };
        self.launch(of_cache(kernels::GENERAL_ATTENTION, cache_type), "", grid, &args)
    }

    /// Launches attention over the query tiles.
    fn attention_of_tiles(
        &mut self,
        base: &AttentionArgs,
        a: &CudaAttention,
        size: MicroBatchSize,
    ) -> Result<(), CudaError> {
        let QueryTiles { count, kernel } = size.query_tiles;
        let (entry, rows, n_splits) = match kernel {
            TileKernel::Prefill => (prefill_kernel(a.head_dim), a.n_head, 1),
            TileKernel::Verify => {
                let rows = a.n_head_kv * (a.n_head / a.n_head_kv).div_ceil(VERIFIED_HEADS);
                (verify_kernel(a.head_dim), rows, verify_splits(size.n_tokens, count, rows))
            }
        };
        let entry = entry.ok_or(CudaError::UnsupportedPart { part: "heads of that many elements" })?;
        let args = PrefillArgs {
            tiles: self.buffers.query_tiles.ptr(),
            pages: base.pages,
            k_cache: base.k_cache.cast(),
            v_cache: base.v_cache.cast(),
            qkv: base.qkv,
            packed: base.packed,
            sinks: base.sinks,
            n_head: base.n_head,
            n_head_kv: base.n_head_kv,
            stride: base.stride,
            n_token_tiles: base.n_token_tiles,
            mask: base.mask,
            reach: base.reach,
            soft_cap: base.soft_cap,
            n_splits: n_splits as u32,
            partial: base.partial,
            tickets: base.tickets,
            gate: base.gate,
        };
        let shared = 2 * 2 * 2 * 64 * (a.head_dim + 8);
        self.launch(entry, "", LaunchGrid { blocks: [count, rows, n_splits], threads: 128, shared }, &args)
    }
}

/// Query heads of one KV head that a block processes together: 8, or fewer where that leaves too few blocks even with all splits.
fn queries_per_block(n_head_kv: usize, heads_per_kv: usize) -> usize {
    let mut group = heads_per_kv.next_power_of_two().min(8);
    while group > 1 && n_head_kv * heads_per_kv.div_ceil(group / 2) * MAX_SPLITS <= ATTENTION_BLOCKS {
        group /= 2;
    }
    group
}

/// The kernel of prefill attention on tensor cores for heads of that many elements; `None`: there is none.
pub(crate) fn prefill_kernel(head_dim: usize) -> Option<EntryPoint<PrefillArgs>> {
    match head_dim {
        32 => Some(kernels::PREFILL_ATTENTION_32),
        64 => Some(kernels::PREFILL_ATTENTION_64),
        96 => Some(kernels::PREFILL_ATTENTION_96),
        128 => Some(kernels::PREFILL_ATTENTION_128),
        256 => Some(kernels::PREFILL_ATTENTION_256),
        _ => None,
    }
}

/// The same for micro-batches of a few tokens of each sequence.
pub(crate) fn verify_kernel(head_dim: usize) -> Option<EntryPoint<PrefillArgs>> {
    match head_dim {
        32 => Some(kernels::VERIFY_ATTENTION_32),
        64 => Some(kernels::VERIFY_ATTENTION_64),
        96 => Some(kernels::VERIFY_ATTENTION_96),
        128 => Some(kernels::VERIFY_ATTENTION_128),
        256 => Some(kernels::VERIFY_ATTENTION_256),
        _ => None,
    }
}

/// Blocks that share the pages of a query tile of `verify_attention`: `rows` of blocks, for each of `n_tiles` tiles with `n_tokens` tokens
/// in all. Few where blocks are many, and where tiles have many tokens, since one block merges the partial results of each.
fn verify_splits(n_tokens: usize, n_tiles: usize, rows: usize) -> usize {
    let for_merging = (VERIFY_MERGED_ROWS / n_tokens.div_ceil(n_tiles).max(1)).min(ATTENTION_BLOCKS / n_tokens.max(1));
    (ATTENTION_BLOCKS / (n_tiles * rows).max(1)).min(for_merging).clamp(1, MAX_SPLITS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_take_fewer_queries_where_there_are_few_blocks() {
        // One token of qwen3.5-0.8b, qwen3-30b-a3b, llama-3.2-1b and smollm-135m, and 16 tokens.
        let shapes = [(2, 4), (4, 8), (8, 4), (3, 3), (16 * 4, 8)];
        assert_eq!(shapes.map(|(n, heads_per_kv)| queries_per_block(n, heads_per_kv)), [1, 4, 4, 2, 8]);
        assert_eq!(queries_per_block(1, 1), 1);
    }
}
