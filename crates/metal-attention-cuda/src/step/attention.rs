//! Softmax attention, from its input to what its output matrix multiplies.

use metal_attention_model::CacheType;

use super::layer::Given;
use super::product::{Input, Product};
use super::{Step, StepSize, Steps};
use crate::CudaError;
use crate::activations::n_splits;
use crate::args::{AttentionArgs, Output, PrefillArgs};
use crate::device::CudaBuffer;
use crate::kv_cache::CudaKvCache;
use crate::launch::Grid;
use crate::weights::CudaAttention;

impl Steps {
    /// The attention of layer `i`.
    pub(super) fn attention<'w>(
        &mut self,
        step: Step<'_>,
        i: usize,
        a: &'w CudaAttention,
        input: Input,
    ) -> Result<Given<'w>, CudaError> {
        let (n, n_embd) = (step.size.n_tokens, step.spec.n_embd);
        let widths = [a.n_head, a.n_kv_head, a.n_kv_head].map(|n| n * a.head_dim);
        let first = [0, widths[0], widths[0] + widths[1]];
        let qkv = Product {
            what: "qkv",
            parts: a.qkv.iter().zip(first).collect(),
            n_out: a.stride(),
            output: Output::Store,
            activation: 0,
            scale: 1.0,
            bias: a.qkv_bias.as_ref().map_or(0, CudaBuffer::ptr),
            y: self.s.qkv.ptr(),
            packed: 0,
        };
        self.product(&qkv, input, n_embd, n)?;
        self.attend(step.cache, i, a, step.size)?;
        let input = self.input(&self.s.att, &self.s.packed_att, n);
        Ok(Given::Product { what: "attention output", linear: &a.out, input })
    }

    fn attend(&mut self, cache: &CudaKvCache, i: usize, a: &CudaAttention, size: StepSize) -> Result<(), CudaError> {
        let n = size.n_tokens;
        let [k_cache, v_cache] = cache.of_layer(i);
        let packed = if self.is_exact(n) { 0 } else { self.s.packed_att.ptr() };
        let token_tiles = n.div_ceil(8) as u32;
        let of_kv = a.n_head / a.n_kv_head;
        let group = of_kv.next_power_of_two().min(8);
        let n_chunks = of_kv.div_ceil(group);
        let splits = n_splits(n, a.n_kv_head * n_chunks);
        let args = AttentionArgs {
            inputs: a.inputs,
            tokens: self.s.tokens.ptr(),
            pages: cache.pages_of_layer(i),
            k_cache,
            v_cache,
            qkv: self.s.qkv.ptr(),
            out: self.s.att.ptr(),
            packed,
            partial: self.s.partial.ptr(),
            tickets: self.s.tickets.ptr(),
            sinks: a.sinks.as_ref().map_or(0, CudaBuffer::ptr),
            n_head: a.n_head as u32,
            n_kv_head: a.n_kv_head as u32,
            head_dim: a.head_dim as u32,
            stride: a.stride() as u32,
            n_splits: splits as u32,
            n_chunks: n_chunks as u32,
            n_token_tiles: token_tiles,
            mask: a.mask,
            reach: a.reach,
            soft_cap: a.soft_cap,
        };
        let ty = match cache.cache_type {
            CacheType::F16 => "f16",
            CacheType::F32 => "f32",
        };
        let together = size.n_query_tiles > 0;
        if together {
            let heads = a.n_head + 2 * a.n_kv_head;
            let grid = Grid { blocks: [heads.div_ceil(4), n, 1], threads: 128, shared: 16 * a.head_dim };
            self.launch(&format!("append_{ty}"), "", grid, &args)?;
        }
        let on_units = matches!(a.head_dim, 64 | 96 | 128) && cache.cache_type == CacheType::F16 && packed != 0;
        if together && on_units {
            return self.prefill_attention(&args, a, size);
        }
        let grid = Grid {
            blocks: [a.n_kv_head * n_chunks, splits, n],
            threads: 128,
            shared: {
                let page_row = a.head_dim + 32 / cache.cache_type.bytes();
                2 * 64 * page_row * cache.cache_type.bytes() + 4 * ((group + 2) * a.head_dim + group * 67 + 256)
            },
        };
        let name =
            if together { format!("attention_appended_{ty}_{group}") } else { format!("attention_{ty}_{group}") };
        self.launch(&name, "", grid, &args)
    }

    fn prefill_attention(&mut self, of: &AttentionArgs, a: &CudaAttention, size: StepSize) -> Result<(), CudaError> {
        let args = PrefillArgs {
            tiles: self.s.query_tiles.ptr(),
            pages: of.pages,
            k_cache: of.k_cache,
            v_cache: of.v_cache,
            qkv: of.qkv,
            packed: of.packed,
            sinks: of.sinks,
            n_head: of.n_head,
            n_kv_head: of.n_kv_head,
            stride: of.stride,
            n_token_tiles: of.n_token_tiles,
            mask: of.mask,
            reach: of.reach,
            soft_cap: of.soft_cap,
            unused: 0,
        };
        let shared = 2 * 2 * 2 * 64 * (a.head_dim + 8);
        let grid = Grid { blocks: [size.n_query_tiles, a.n_head, 1], threads: 128, shared };
        self.launch(&format!("prefill_attention_{}", a.head_dim), "", grid, &args)
    }
}
