//! Multi-head latent attention (MLA, as in DeepSeek-V2): the KV cache holds one compressed row of each position, `[kv_rank +
//! shared_dim]`, which is key and value of all heads.
//!
//! In the absorbed form: each head's query is multiplied by its key expansion before attention, so that it can be compared with
//! compressed rows directly, and attention's result by its value expansion afterwards.

use metal_attention_model::{LatentAttentionSpec, LatentAttentionWeights};

use super::attention::rotation_code;
use crate::CudaError;
use crate::activations::{Widths, n_splits, widen};
use crate::args::{Epilogue, LatentAttentionArgs, LatentInputsArgs};
use crate::kernels::{self, of_cache};
use crate::launch::LaunchGrid;
use crate::runner::grouped::{GroupedLinearOp, SortedItems, packed_elements, sorted_elements};
use crate::runner::layer::SublayerOutput;
use crate::runner::linear::LinearInput;
use crate::runner::{MicroBatch, ModelRunner};
use crate::slice::{DevicePtr, DeviceSlice};
use crate::stack::CudaStack;
use crate::weights::{CudaLinear, CudaNorm, CudaVector, Loader};

/// Heads of an attention block: `HEADS` of `latent_attention.cu`.
const HEADS: usize = 8;
/// Positions that a block processes at a time: `POSITIONS` of `latent_attention.cu`.
const POSITIONS: usize = 32;

/// Most elements of the value part of a compressed row: `PAIRS` of `latent_attention.cu` for each lane.
const MAX_LATENT: usize = 512;

/// The weights of a layer's latent attention.
#[derive(Debug)]
pub(crate) struct CudaLatentAttention {
    /// Sizes and constants.
    spec: LatentAttentionSpec,
    /// The product to compressed queries, `[q_rank, n_embd]`, and their norm; `None` if queries are not compressed.
    q_a: Option<(CudaLinear, CudaNorm)>,
    /// Queries, `[n_head * head_dim, q_rank or n_embd]`.
    q: CudaLinear,
    /// Compressed rows and the shared part of the keys, `[kv_rank + shared_dim, n_embd]`.
    kv_a: CudaLinear,
    /// Weights of the norm of compressed rows, `[kv_rank]`.
    kv_a_norm: CudaVector,
    /// The key expansion of each head, transposed, `[n_head, kv_rank, n_nope]`.
    k_b: CudaStack,
    /// The value expansion of each head, `[n_head, value_dim, kv_rank]`.
    v_b: CudaStack,
    /// Output, `[n_embd, n_head * value_dim]`.
    out: CudaLinear,
    /// The RoPE cos/sin table, or null.
    rope: DevicePtr<[f32; 2]>,
}

impl CudaLatentAttention {
    /// Uploads the weights.
    pub(super) fn new(loader: &mut Loader<'_>, w: &LatentAttentionWeights) -> Result<Self, CudaError> {
        let of = &w.spec;
        let q_a = match &w.q_a {
            Some((linear, norm)) => Some((loader.linear(linear)?, CudaNorm::new(loader, norm)?)),
            None => None,
        };
        Ok(Self {
            spec: of.clone(),
            q_a,
            q: loader.linear(&w.q)?,
            kv_a: loader.linear(&w.kv_a)?,
            kv_a_norm: loader.vector(&w.kv_a_norm.weight)?,
            k_b: loader.stack(&w.k_b.iter().collect::<Vec<_>>())?,
            v_b: loader.stack(&w.v_b.iter().collect::<Vec<_>>())?,
            out: loader.linear(&w.out)?,
            rope: loader.rope(of.rope.as_ref()),
        })
    }
}

/// Checks that there are kernels for latent attention; the error is the part without one.
pub(crate) fn supports(a: &LatentAttentionSpec) -> Result<(), &'static str> {
    // Grouped products read four elements at a time.
    let unaligned = [a.kv_rank, a.n_nope, a.head_dim()].iter().any(|n| n % 4 != 0);
    if a.kv_rank > MAX_LATENT || !a.shared_dim.is_multiple_of(2) || unaligned {
        return Err("latent attention over rows of that many elements");
    }
    Ok(())
}

/// Widens the buffers of intermediate results.
pub(super) fn widen_for_latent_attention(widths: &mut Widths, a: &LatentAttentionSpec) {
    widen(&mut widths.n_head, a.n_head);
    widen(&mut widths.partial, a.kv_rank + 2);
    widths.widen_scratch(|n| elements(a, n));
}

/// Scratch elements for `n` tokens: compressed queries; queries; compressed rows with the shared part of the keys; queries
/// expanded to compressed rows; results of attention; values; and for grouped products over heads, the sorted items, the work
/// list and the packed rows.
fn elements(spec: &LatentAttentionSpec, n: usize) -> [usize; 9] {
    let (n_head, key_dim) = (spec.n_head, spec.kv_rank + spec.shared_dim);
    let n_items = n.saturating_mul(n_head);
    let [items, work] = sorted_elements(n_items, n_head);
    [
        n * spec.q_rank.unwrap_or(0),
        n_items * spec.head_dim(),
        n * key_dim,
        n_items * key_dim,
        n_items * spec.kv_rank,
        n_items * spec.value_dim,
        items,
        work,
        packed_elements(n_items, n_head, spec.n_nope.max(spec.kv_rank)),
    ]
}

impl ModelRunner {
    /// Launches the latent attention of layer `i`, except its output product.
    pub(crate) fn latent_attention<'w>(
        &mut self,
        batch: MicroBatch<'_>,
        i: usize,
        w: &'w CudaLatentAttention,
        input: LinearInput,
    ) -> Result<SublayerOutput<'w>, CudaError> {
        let spec = &w.spec;
        let (n_head, rank, key_dim) = (spec.n_head, spec.kv_rank, spec.kv_rank + spec.shared_dim);
        let n = batch.size.n_tokens;
        let [q_a, q, kv, queries, att, values, items, work, packed] = self.scratch(elements(spec, n));
        self.store_all(batch, "compressed rows", [&w.kv_a], input, kv)?;
        match &w.q_a {
            Some((linear, norm)) => {
                self.store_all(batch, "compressed queries", [linear], input, q_a)?;
                let input = self.rows_input(batch, q_a, linear.weight.n_rows, Some(norm))?;
                self.store_all(batch, "queries", [&w.q], input, q)?;
            }
            None => self.store_all(batch, "queries", [&w.q], input, q)?,
        }
        let sorted = if self.uses_grouped_gemm(n, n * n_head, n_head) {
            Some((self.sort_by_group(DevicePtr::NULL, n * n_head, n_head, [items, work])?, packed))
        } else {
            None
        };
        self.head_products(batch, "keys' expansion", &w.k_b, sorted, (q, spec.head_dim()), (queries, key_dim))?;
        self.latent_inputs(batch, i, w, [q, kv, queries])?;
        self.run_latent_attention(batch, i, w, [queries, att])?;
        self.head_products(batch, "values' expansion", &w.v_b, sorted, (att, rank), (values, spec.value_dim))?;
        let input = self.rows_input(batch, values, n_head * spec.value_dim, None)?;
        Ok(SublayerOutput::Product { label: "attention output", linear: &w.out, input })
    }

    /// Launches the product of each head's part of the rows `x` with the head's own matrix. `sorted`: the items sorted by
    /// head and scratch for packed rows, to use a grouped GEMM.
    fn head_products(
        &mut self,
        batch: MicroBatch<'_>,
        label: &'static str,
        stack: &CudaStack,
        sorted: Option<(SortedItems, DeviceSlice<f32>)>,
        (x, x_stride): (DeviceSlice<f32>, usize),
        (y, y_stride): (DeviceSlice<f32>, usize),
    ) -> Result<(), CudaError> {
        let product = GroupedLinearOp {
            label,
            first: stack,
            second: None,
            epilogue: Epilogue::Store,
            activation: 0,
            groups: DevicePtr::NULL,
            x,
            items_a_row: 1,
            x_stride,
            y,
            y_stride,
        };
        let Some((sorted, packed)) = sorted else { return self.grouped_gemv(&product, stack.n * batch.size.n_tokens) };
        self.gather_rows(&sorted, (x, 1, x_stride), stack.n_in(), packed)?;
        self.grouped_gemm(&GroupedLinearOp { x: packed, ..product }, &sorted)
    }

    /// Launches the kernel that applies norm and RoPE to queries and compressed rows, and appends the compressed rows to the KV
    /// cache.
    fn latent_inputs(
        &mut self,
        batch: MicroBatch<'_>,
        i: usize,
        w: &CudaLatentAttention,
        [q, kv, queries]: [DeviceSlice<f32>; 3],
    ) -> Result<(), CudaError> {
        let spec = &w.spec;
        let [cache, _] = batch.cache.layer_pages(i);
        let args = LatentInputsArgs {
            tokens: self.buffers.tokens.ptr(),
            pages: batch.cache.page_table_of_layer(i),
            cache,
            q: q.ptr(),
            kv: kv.ptr(),
            norm: w.kv_a_norm.ptr(),
            rope: w.rope,
            queries: queries.ptr(),
            n_head: spec.n_head as u32,
            n_nope: spec.n_nope as u32,
            rank: spec.kv_rank as u32,
            n_shared: spec.shared_dim as u32,
            rotation: rotation_code(spec.rope.as_ref()),
            eps: spec.eps,
            scale: spec.scale,
            temperature: spec.temperature.map_or(0.0, |temperature| temperature.scale),
            length: spec.temperature.map_or(1, |temperature| temperature.length as u32),
            offset: spec.temperature.map_or(0, |temperature| temperature.offset as u32),
        };
        let grid = LaunchGrid { blocks: [1 + spec.n_head, batch.size.n_tokens, 1], threads: 128, shared: 0 };
        self.launch(of_cache(kernels::LATENT_INPUTS, batch.cache.cache_type), "", grid, &args)
    }

    /// Launches attention over the compressed rows, and the merge of its split-KV results.
    fn run_latent_attention(
        &mut self,
        batch: MicroBatch<'_>,
        i: usize,
        w: &CudaLatentAttention,
        [queries, out]: [DeviceSlice<f32>; 2],
    ) -> Result<(), CudaError> {
        let (spec, n) = (&w.spec, batch.size.n_tokens);
        let [cache, _] = batch.cache.layer_pages(i);
        let head_blocks = spec.n_head.div_ceil(HEADS);
        let splits = n_splits(n, head_blocks);
        let args = LatentAttentionArgs {
            tokens: self.buffers.tokens.ptr(),
            pages: batch.cache.page_table_of_layer(i),
            cache,
            queries: queries.ptr(),
            out: out.ptr(),
            partial: self.buffers.partial.ptr(),
            n_head: spec.n_head as u32,
            rank: spec.kv_rank as u32,
            n_shared: spec.shared_dim as u32,
            n_splits: splits as u32,
        };
        let bytes = batch.cache.cache_type.bytes();
        let vectors = ((spec.kv_rank + spec.shared_dim) * bytes).div_ceil(16);
        let shared = POSITIONS * (vectors | 1) * 16 + 4 * HEADS * vectors * (16 / bytes);
        let grid = LaunchGrid { blocks: [head_blocks, splits, n], threads: 32 * HEADS, shared };
        self.launch(of_cache(kernels::LATENT_ATTENTION, batch.cache.cache_type), "", grid, &args)?;
        if splits > 1 {
            let grid = LaunchGrid { blocks: [spec.n_head, n, 1], threads: 128, shared: 0 };
            self.launch(kernels::LATENT_MERGE, "", grid, &args)?;
        }
        Ok(())
    }
}
