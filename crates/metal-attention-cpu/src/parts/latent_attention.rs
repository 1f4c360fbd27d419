//! Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): from `normed` to `mixer_out`,
//! `[n_tokens, n_head * value_dim]`.
//!
//! The KV cache contains one compressed row per token, `[kv_rank + n_rot]`, the key of all heads; its first `kv_rank` elements
//! are their value. The up projection of the keys (`k_b`) is applied to the queries instead, that of the values (`v_b`) to the
//! result of attention, so the cache is never expanded. `n_rot` is the number of rotated elements, `n_nope` of those that are
//! not rotated.

use metal_attention_model::{BatchToken, LatentAttentionWeights, Mask};

use super::attention::AttentionParams;
use crate::forward::{MicroBatchRun, ProductInput, normalize, normalize_row, resize, scale_by};
use crate::kernels::elementwise::rope_apply;
use crate::kernels::matmul::{MatmulOp, matmul};
use crate::kv_cache::{CacheElement, SharedKvCache, StoreKeyValue};
use crate::layers::PreparedLinear;
use crate::observer::MatrixInput;

/// Buffers of latent attention.
#[derive(Default)]
pub(crate) struct LatentScratch {
    /// Compressed queries, `[n_tokens, q_rank]`.
    q_a: Vec<f32>,
    /// Compressed queries after their norm, `[n_tokens, q_rank]`.
    q_a_normed: Vec<f32>,
    /// Queries, `[n_tokens, n_head, n_nope + n_rot]`.
    q: Vec<f32>,
    /// The input of the per-head products, head by head: the queries' elements that are not rotated,
    /// `[n_head, n_tokens, n_nope]`, then the result of attention, `[n_head, n_tokens, kv_rank]`.
    by_head: Vec<f32>,
    /// The result of the per-head products: `[n_head, n_tokens, kv_rank]`, then `[n_head, n_tokens, value_dim]`.
    expanded: Vec<f32>,
}

impl LatentScratch {
    /// Bytes of all buffers.
    pub(crate) fn bytes(&self) -> usize {
        let all = [&self.q_a, &self.q_a_normed, &self.q, &self.by_head, &self.expanded];
        all.iter().map(|v| 4 * v.capacity()).sum()
    }
}

impl MicroBatchRun<'_> {
    /// Computes the queries of all tokens to `q`, `[n_tokens, n_head, kv_rank + n_rot]`, and stores their compressed rows in
    /// `cache`.
    pub(crate) fn compress_and_cache<E: CacheElement>(
        &mut self,
        layer: usize,
        w: &LatentAttentionWeights<PreparedLinear>,
        cache: &SharedKvCache<'_, E>,
        tokens: &[BatchToken],
    ) {
        let (a, n_tokens) = (&w.spec, tokens.len());
        let (n_head, n_nope, n_rot, rank) = (a.n_head, a.n_nope, a.shared_dim, a.kv_rank);
        let (head_dim, key_dim) = (a.head_dim(), rank + n_rot);
        let all = || 0..n_tokens;
        let first = w.q_a.as_ref().map_or(&w.q, |(linear, _)| linear);
        self.observe(&[first, &w.kv_a], ProductInput::Normed);
        let s = &mut *self.scratch;
        resize(&mut s.latent.q, n_tokens * n_head * head_dim);
        resize(&mut s.k, n_tokens * key_dim);
        let y = match a.q_rank {
            Some(q_rank) => {
                resize(&mut s.latent.q_a, n_tokens * q_rank);
                &mut s.latent.q_a
            }
            None => &mut s.latent.q,
        };
        let mut products = [
            MatmulOp { matrix: &first.weight, rows: all(), y, accumulate: false },
            MatmulOp { matrix: &w.kv_a.weight, rows: all(), y: &mut s.k, accumulate: false },
        ];
        matmul(self.pool, self.isa, &s.normed, &mut s.q8, &mut products);
        if let Some((_, norm)) = &w.q_a {
            resize(&mut s.latent.q_a_normed, s.latent.q_a.len());
            normalize(self.pool, self.isa, norm, &s.latent.q_a, &mut s.latent.q_a_normed);
            if let Some(observer) = &mut self.observer {
                let (x, n_in) = (&s.latent.q_a_normed, norm.weight.len());
                observer(MatrixInput { matrix: &w.q.name, sub_matrix: None, x, n_in });
            }
            let mut products = [MatmulOp { matrix: &w.q.weight, rows: all(), y: &mut s.latent.q, accumulate: false }];
            matmul(self.pool, self.isa, &s.latent.q_a_normed, &mut s.q8, &mut products);
        }
        self.record_time("matmul_qkv");

        // The elements that are not rotated, all tokens of a head together, for the products with each head's matrix.
        let s = &mut *self.scratch;
        resize(&mut s.latent.by_head, n_head * n_tokens * n_nope);
        for (h, rows) in s.latent.by_head.chunks_exact_mut(n_tokens * n_nope).enumerate() {
            for (t, row) in rows.chunks_exact_mut(n_nope).enumerate() {
                row.copy_from_slice(&s.latent.q[(t * n_head + h) * head_dim..][..n_nope]);
            }
        }
        self.by_heads(&w.k_b, n_tokens, rank);
        let positions: Vec<usize> = tokens.iter().map(|token| self.position(token).0[0] as usize).collect();
        let s = &mut *self.scratch;
        resize(&mut s.q, n_tokens * n_head * key_dim);
        let rope_table = self.weights.rotation_of[layer].map(|i| &s.rope_tables[i]);
        let rotate = |t: usize, head: &mut [f32]| {
            if let (Some(rope), Some(rope_table)) = (&a.rope, rope_table) {
                let half = n_rot / 2;
                rope_apply(rope.layout, head, &rope_table.cos[t * half..][..half], &rope_table.sin[t * half..][..half]);
            }
        };
        for (t, token) in tokens.iter().enumerate() {
            let scale = a.scale * a.temperature.map_or(1.0, |temperature| temperature.factor(positions[t]));
            for h in 0..n_head {
                let q = &mut s.q[(t * n_head + h) * key_dim..][..key_dim];
                q[..rank].copy_from_slice(&s.latent.expanded[(h * n_tokens + t) * rank..][..rank]);
                q[rank..].copy_from_slice(&s.latent.q[(t * n_head + h) * head_dim + n_nope..][..n_rot]);
                rotate(t, &mut q[rank..]);
                scale_by(q, scale);
            }
            let k = &mut s.k[t * key_dim..][..key_dim];
            let compressed = k[..rank].to_vec();
            normalize_row(self.isa, &w.kv_a_norm, &compressed, &mut k[..rank]);
            rotate(t, &mut k[rank..]);
            let page = self.pages.page(cache.group, token.seq, token.pos);
            // SAFETY: each token owns its lane of the cached keys and its row of the cached values.
            self.isa.run(unsafe { StoreKeyValue::new(cache, page, 0, token.pos, k, &k[..rank]) });
        }
        self.record_time("rope_kv_append");
    }

    /// Attention of the queries `q` over the compressed rows, and the up projection of its result, to `mixer_out`,
    /// `[n_tokens, n_head, value_dim]`.
    pub(crate) fn attend_latent<E: CacheElement>(
        &mut self,
        layer: usize,
        w: &LatentAttentionWeights<PreparedLinear>,
        cache: &SharedKvCache<'_, E>,
        tokens: &[BatchToken],
    ) {
        let a = &w.spec;
        let (n_head, rank, n_tokens) = (a.n_head, a.kv_rank, tokens.len());
        let params = AttentionParams {
            n_head,
            n_head_kv: 1,
            key_dim: rank + a.shared_dim,
            value_dim: rank,
            mask: Mask::Causal,
            soft_cap: None,
            slopes: Vec::new(),
            sinks: None,
        };
        self.attend(layer, &params, cache, tokens);
        let s = &mut *self.scratch;
        resize(&mut s.latent.by_head, n_head * n_tokens * rank);
        for (h, rows) in s.latent.by_head.chunks_exact_mut(n_tokens * rank).enumerate() {
            for (t, row) in rows.chunks_exact_mut(rank).enumerate() {
                row.copy_from_slice(&s.mixer_out[(t * n_head + h) * rank..][..rank]);
            }
        }
        self.by_heads(&w.v_b, n_tokens, a.value_dim);
        let s = &mut *self.scratch;
        resize(&mut s.mixer_out, n_tokens * n_head * a.value_dim);
        for (t, row) in s.mixer_out.chunks_exact_mut(n_head * a.value_dim).enumerate() {
            for (h, value) in row.chunks_exact_mut(a.value_dim).enumerate() {
                value.copy_from_slice(&s.latent.expanded[(h * n_tokens + t) * a.value_dim..][..a.value_dim]);
            }
        }
        self.record_time("matmul_values");
    }

    /// Multiplies each head's rows of `latent.by_head`, `[n_head, n_tokens, n_in]`, by the head's matrix, to
    /// `latent.expanded`, `[n_head, n_tokens, n_out]`.
    fn by_heads(&mut self, matrices: &[PreparedLinear], n_tokens: usize, n_out: usize) {
        let s = &mut *self.scratch;
        resize(&mut s.latent.expanded, matrices.len() * n_tokens * n_out);
        if let Some(observer) = &mut self.observer {
            for (h, linear) in matrices.iter().enumerate() {
                let n_in = linear.weight.n_in();
                let x = &s.latent.by_head[h * n_tokens * n_in..][..n_tokens * n_in];
                observer(MatrixInput { matrix: &linear.name, sub_matrix: Some((h, matrices.len())), x, n_in });
            }
        }
        let rows = s.latent.expanded.chunks_exact_mut(n_tokens * n_out);
        let mut products: Vec<_> = matrices
            .iter()
            .zip(rows)
            .enumerate()
            .map(|(h, (linear, y))| {
                let rows = h * n_tokens..(h + 1) * n_tokens;
                MatmulOp { matrix: &linear.weight, rows, y, accumulate: false }
            })
            .collect();
        matmul(self.pool, self.isa, &s.latent.by_head, &mut s.q8, &mut products);
        self.record_time("matmul_heads");
    }
}
