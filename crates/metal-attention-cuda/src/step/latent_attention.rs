//! Multi-head latent attention: the cache holds one compressed row a token, which is key and value of all heads; the keys'
//! expansion is taken into the query, that of the values follows attention.

use metal_attention_model::{CacheType, LatentAttentionSpec, RopeLayout};

use super::grouped::{Grouped, Sorted, packed_elements, sorted_elements};
use super::layer::Given;
use super::product::Input;
use super::{Step, Steps};
use crate::CudaError;
use crate::activations::n_splits;
use crate::args::{LatentAttentionArgs, LatentInputsArgs, Output};
use crate::launch::Grid;
use crate::stack::CudaStack;
use crate::weights::CudaLatentAttention;

/// Heads of a block of attention, and positions that it takes at once: `HEADS` and `POSITIONS` of `latent_attention.cu`.
const HEADS: usize = 8;
const POSITIONS: usize = 32;

/// Elements, for `n` tokens, of compressed queries; queries; the compressed row and the shared key; queries over compressed rows;
/// attention's result, values; items sorted by head, two of these, and their rows as products take them.
pub(super) fn elements(of: &LatentAttentionSpec, n: usize) -> [usize; 9] {
    let (n_head, key_dim) = (of.n_head, of.kv_rank + of.shared_dim);
    let n_items = n.saturating_mul(n_head);
    let [items, work] = sorted_elements(n_items, n_head);
    [
        n * of.q_rank.unwrap_or(0),
        n_items * of.head_dim(),
        n * key_dim,
        n_items * key_dim,
        n_items * of.kv_rank,
        n_items * of.value_dim,
        items,
        work,
        packed_elements(n_items, n_head, of.n_nope.max(of.kv_rank)),
    ]
}

impl Steps {
    /// The latent attention of layer `i`.
    pub(super) fn latent_attention<'w>(
        &mut self,
        step: Step<'_>,
        i: usize,
        w: &'w CudaLatentAttention,
        input: Input,
    ) -> Result<Given<'w>, CudaError> {
        let of = &w.spec;
        let (n_head, rank, key_dim) = (of.n_head, of.kv_rank, of.kv_rank + of.shared_dim);
        let n = step.size.n_tokens;
        let [q_a, q, kv, queries, att, values, items, work, packed] = self.places(elements(of, n));
        self.store_all(step, "compressed rows", [&w.kv_a], input, kv)?;
        match &w.q_a {
            Some((linear, norm)) => {
                self.store_all(step, "compressed queries", [linear], input, q_a)?;
                let input = self.rows_input(step, q_a, linear.weight.n_rows, Some(norm))?;
                self.store_all(step, "queries", [&w.q], input, q)?;
            }
            None => self.store_all(step, "queries", [&w.q], input, q)?,
        }
        let sorted = if self.sorts(n, n * n_head, n_head) {
            Some((self.sort(0, n * n_head, n_head, [items, work])?, packed))
        } else {
            None
        };
        self.of_heads(step, "keys' expansion", &w.k_b, sorted, (q, of.head_dim()), (queries, key_dim))?;
        self.latent_inputs(step, i, w, [q, kv, queries])?;
        self.attend_latent(step, i, w, [queries, att])?;
        self.of_heads(step, "values' expansion", &w.v_b, sorted, (att, rank), (values, of.value_dim))?;
        let input = self.rows_input(step, values, n_head * of.value_dim, None)?;
        Ok(Given::Product { what: "attention output", linear: &w.out, input })
    }

    /// The product of each head's part of rows and its own matrix.
    fn of_heads(
        &mut self,
        step: Step<'_>,
        what: &'static str,
        stack: &CudaStack,
        sorted: Option<(Sorted, u64)>,
        (x, x_stride): (u64, usize),
        (y, y_stride): (u64, usize),
    ) -> Result<(), CudaError> {
        let product = Grouped {
            what,
            first: stack,
            second: None,
            output: Output::Store,
            activation: 0,
            groups: 0,
            x,
            items_a_row: 1,
            x_stride,
            y,
            y_stride,
        };
        let Some((sorted, packed)) = sorted else { return self.grouped(&product, stack.n * step.size.n_tokens) };
        self.gather(&sorted, (x, 1, x_stride), stack.n_in(), packed)?;
        self.sorted_product(&Grouped { x: packed, ..product }, &sorted)
    }

    /// Queries as attention takes them, and the way of compressed rows into the cache.
    fn latent_inputs(
        &mut self,
        step: Step<'_>,
        i: usize,
        w: &CudaLatentAttention,
        [q, kv, queries]: [u64; 3],
    ) -> Result<(), CudaError> {
        let of = &w.spec;
        let [cache, _] = step.cache.of_layer(i);
        let args = LatentInputsArgs {
            tokens: self.s.tokens.ptr(),
            pages: step.cache.pages_of_layer(i),
            cache,
            q,
            kv,
            norm: w.kv_a_norm.ptr(),
            rope: w.rope,
            queries,
            n_head: of.n_head as u32,
            n_nope: of.n_nope as u32,
            rank: of.kv_rank as u32,
            n_shared: of.shared_dim as u32,
            rotation: match of.rope.map(|rope| rope.layout) {
                None => 0,
                Some(RopeLayout::Interleaved) => 1,
                Some(RopeLayout::Halves) => 2,
            },
            eps: of.eps,
            scale: of.scale,
            temperature: of.temperature.map_or(0.0, |temperature| temperature.scale),
            length: of.temperature.map_or(1, |temperature| temperature.length as u32),
            offset: of.temperature.map_or(0, |temperature| temperature.offset as u32),
        };
        let grid = Grid { blocks: [1 + of.n_head, step.size.n_tokens, 1], threads: 128, shared: 0 };
        self.launch(&format!("latent_inputs_{}", element(step)), "", grid, &args)
    }

    /// Attention of all tokens' queries over the compressed rows.
    fn attend_latent(
        &mut self,
        step: Step<'_>,
        i: usize,
        w: &CudaLatentAttention,
        [queries, out]: [u64; 2],
    ) -> Result<(), CudaError> {
        let (of, n) = (&w.spec, step.size.n_tokens);
        let [cache, _] = step.cache.of_layer(i);
        let of_heads = of.n_head.div_ceil(HEADS);
        let splits = n_splits(n, of_heads);
        let args = LatentAttentionArgs {
            tokens: self.s.tokens.ptr(),
            pages: step.cache.pages_of_layer(i),
            cache,
            queries,
            out,
            partial: self.s.partial.ptr(),
            n_head: of.n_head as u32,
            rank: of.kv_rank as u32,
            n_shared: of.shared_dim as u32,
            n_splits: splits as u32,
        };
        let bytes = step.cache.cache_type.bytes();
        let vectors = ((of.kv_rank + of.shared_dim) * bytes).div_ceil(16);
        let shared = POSITIONS * (vectors | 1) * 16 + 4 * HEADS * vectors * (16 / bytes);
        let grid = Grid { blocks: [of_heads, splits, n], threads: 32 * HEADS, shared };
        self.launch(&format!("latent_attention_{}", element(step)), "", grid, &args)?;
        if splits > 1 {
            let grid = Grid { blocks: [of.n_head, n, 1], threads: 128, shared: 0 };
            self.launch("latent_merge", "", grid, &args)?;
        }
        Ok(())
    }
}

/// As the cache's type is in the names of kernels.
fn element(step: Step<'_>) -> &'static str {
    match step.cache.cache_type {
        CacheType::F16 => "f16",
        CacheType::F32 => "f32",
    }
}
