//! Multi-head latent attention (MLA): the general attention kernel over compressed rows.
//!
//! The rows of the scratch buffer `projected` are `n_head` query heads of `n_nope + shared_dim` elements
//! ([`LatentAttentionSpec::head_dim`]); there are no keys and no values in them.

use metal_attention_model::{LatentAttentionSpec, LatentAttentionWeights, Linear, Mask};
use wgpu::Buffer;

use super::LayerPages;
use super::attention::widen_for_general_attention;
use crate::activations::{ActivationWidths, widen};
use crate::kernels::{
    self, GeneralAttention, HeadRows, LatentInputsBuffers, LatentInputsShape, MatvecOutput, NormShape,
};
use crate::plan::{BranchInput, LastProduct, LinearProduct, PlanBuilder};
use crate::weights::{Uploads, WgpuLinear, WgpuNorm, concat};
use crate::{Dispatch, WgpuDevice, WgpuError, WgpuMatrix};

/// Latent attention with its weights.
#[derive(Debug)]
pub(crate) struct WgpuLatentAttention {
    /// Its sizes.
    spec: LatentAttentionSpec,
    /// Sizes of the kernel that makes queries and keys.
    inputs: LatentInputsShape,
    /// Sizes of attention over compressed rows.
    attention: GeneralAttention,
    /// The compression of queries and the norm of the compressed ones. `None`: queries are not compressed.
    q_a: Option<(WgpuLinear, WgpuNorm)>,
    /// The projection to queries (`attn_q_b`), from compressed ones where there are some.
    q_b: WgpuLinear,
    /// The projection to the compressed row and the key that heads share.
    kv_a: WgpuLinear,
    /// Weight of the compressed row's norm, `[kv_rank]`.
    kv_a_norm: Buffer,
    /// The matrices that take each head's query to the compressed row, stacked.
    k_b: WgpuMatrix,
    /// The matrices that take the compressed row to each head's value, stacked.
    v_b: WgpuMatrix,
    /// The output projection.
    out: WgpuLinear,
}

/// The sizes of the kernels, with keys and values in `pages`.
fn shapes(a: &LatentAttentionSpec, pages: LayerPages) -> (LatentInputsShape, GeneralAttention) {
    let LatentAttentionSpec {
        n_head,
        q_rank: _,
        kv_rank,
        n_nope,
        value_dim: _,
        shared_dim,
        rope,
        scale,
        eps,
        temperature,
        fused_expansions: _,
    } = *a;
    let LayerPages { n_ctx, group, cache } = pages;
    let inputs = LatentInputsShape {
        n_head,
        n_nope,
        shared_dim,
        layout: rope.map(|rope| rope.layout),
        rank: kv_rank,
        eps,
        n_ctx,
        group,
        cache,
    };
    let attention = GeneralAttention {
        n_head,
        n_head_kv: 1,
        key_dim: kv_rank + shared_dim,
        value_dim: kv_rank,
        scale,
        mask: Mask::Causal,
        soft_cap: None,
        sinks: false,
        slopes: false,
        temperature,
        n_ctx,
        group,
        cache,
    };
    (inputs, attention)
}

/// Bytes of a page of the layer's keys, and of its values.
pub(super) fn page_bytes(spec: &LatentAttentionSpec, pages: LayerPages) -> [u64; 2] {
    shapes(spec, pages).1.page_bytes()
}

/// Widens the scratch buffers.
pub(super) fn widen_for_latent_attention(widths: &mut ActivationWidths, spec: &LatentAttentionSpec, pages: LayerPages) {
    widen_for_general_attention(widths, &shapes(spec, pages).1);
    widen(&mut widths.projected, spec.n_head * spec.head_dim());
    widen(&mut widths.q_compressed, spec.q_rank.unwrap_or(0));
    widen(&mut widths.kv_compressed, spec.kv_rank + spec.shared_dim);
    widen(&mut widths.head_outputs, spec.n_head * spec.value_dim);
}

impl WgpuLatentAttention {
    /// Uploads the weights.
    pub(super) fn new(
        gpu: &WgpuDevice,
        w: &LatentAttentionWeights,
        pages: LayerPages,
        uploads: &mut Uploads,
    ) -> Result<Self, WgpuError> {
        let (inputs, attention) = shapes(&w.spec, pages);
        let q_a = match &w.q_a {
            Some((linear, norm)) => {
                Some((concat(gpu, "the queries' compression", &[linear], uploads)?, WgpuNorm::new(gpu, norm)?))
            }
            None => None,
        };
        let mut heads = |what: &str, matrices: &[Linear]| {
            let weights: Vec<_> = matrices.iter().map(|l| &l.weight).collect();
            uploads.concat(gpu, what, &weights)
        };
        let k_b = heads("the keys' expansions", &w.k_b)?;
        let v_b = heads("the values' expansions", &w.v_b)?;
        Ok(Self {
            spec: w.spec.clone(),
            inputs,
            attention,
            q_a,
            q_b: concat(gpu, "the queries", &[&w.q], uploads)?,
            kv_a: concat(gpu, "the compression of keys and values", &[&w.kv_a], uploads)?,
            kv_a_norm: gpu.upload("a norm", &w.kv_a_norm.weight)?,
            k_b,
            v_b,
            out: concat(gpu, "the attention's output matrix", &[&w.out], uploads)?,
        })
    }
}

impl<'a> PlanBuilder<'a> {
    /// Appends multi-head latent attention (`DeepSeek-V2`, arXiv 2405.04434, section 2.1) of layer `i`. The KV cache
    /// holds one key and one value for each position, shared by all heads: the key is the normed compressed row
    /// `[kv_rank]` followed by the rotated shared key `[shared_dim]`, the value is the same compressed row, stored a
    /// second time. Queries are multiplied by the key expansion `k_b`, `[n_head, kv_rank, n_nope]`, before attention,
    /// and the results by the value expansion `v_b`, `[n_head, value_dim, kv_rank]`, after it, so that cached rows are
    /// never expanded.
    ///
    /// In DeepSeek's configuration files, `n_nope` is `qk_nope_head_dim`, `shared_dim` is `qk_rope_head_dim`, and the
    /// ranks are `q_lora_rank` and `kv_lora_rank`. In order, for each token (and each `head`):
    ///
    /// 1. `q_compressed = norm(q_a * input)`, `[q_rank]`;
    ///    `projected = q_b * q_compressed`, `[n_head, n_nope + shared_dim]`.
    ///    A layer without `q_a` has `projected = q_b * input`.
    /// 2. `kv_compressed = kv_a * input`, `[kv_rank + shared_dim]`.
    /// 3. `head_products`: `queries[head][..kv_rank] = k_b[head] * projected[head][..n_nope]`,
    ///    where `queries` is `[n_head, kv_rank + shared_dim]`.
    /// 4. `latent_inputs`: `queries[head][kv_rank..] = rope(projected[head][n_nope..])`; stores `kv_compressed`, its
    ///    first `kv_rank` elements normed and the others rotated, in the KV cache.
    /// 5. `general_attention`: `mixer_out`, `[n_head, kv_rank]`.
    /// 6. `head_products`: `head_outputs[head] = v_b[head] * mixer_out[head]`, `[n_head, value_dim]`.
    pub(crate) fn latent_attention(
        &self,
        dispatches: &mut Vec<Dispatch>,
        i: usize,
        w: &'a WgpuLatentAttention,
        input: BranchInput<'a>,
    ) -> Result<LastProduct<'a>, WgpuError> {
        let (gpu, scratch, (keys, values)) = (self.gpu, self.scratch, self.cache.read_by_layer(i));
        let WgpuLatentAttention { spec, inputs, attention, q_a, q_b, kv_a, kv_a_norm, k_b, v_b, out } = w;
        // Two products read the input.
        let input = BranchInput::Rows(self.rows_of(dispatches, input)?);
        match q_a {
            Some((q_a, norm)) => {
                self.multiply_branch_input(dispatches, input, q_a, MatvecOutput::Store, &scratch.q_compressed)?;
                // Without an input buffer the norm is computed in place.
                let in_place = None;
                dispatches.push(self.norm(norm, NormShape::of_row(norm.n), in_place, &scratch.q_compressed)?);
                self.multiply(
                    dispatches,
                    LinearProduct::new(q_b, MatvecOutput::Store, &scratch.q_compressed, &scratch.projected),
                )?;
            }
            None => {
                self.multiply_branch_input(dispatches, input, q_b, MatvecOutput::Store, &scratch.projected)?;
            }
        }
        self.multiply_branch_input(dispatches, input, kv_a, MatvecOutput::Store, &scratch.kv_compressed)?;
        let n_head = inputs.n_head;
        // Strides from head to head, in elements.
        let rows = HeadRows { n_head, in_head_stride: spec.head_dim(), out_head_stride: attention.key_dim };
        // A matrix above the limit of a binding is divided between several buffers, with a dispatch for each.
        dispatches.extend(kernels::head_products(gpu, k_b, rows, &scratch.projected, &scratch.queries)?);
        let buffers = LatentInputsBuffers {
            q: &scratch.projected,
            kv: &scratch.kv_compressed,
            norm: kv_a_norm,
            queries: &scratch.queries,
            keys,
            values,
            rope: &self.rope[i],
            batch: self.batch,
        };
        dispatches.push(kernels::latent_inputs(gpu, inputs, &buffers)?);
        self.general_attention(dispatches, i, attention, None)?;
        // `attention.value_dim` is `kv_rank`: attention returns sums of compressed rows.
        let rows = HeadRows { n_head, in_head_stride: attention.value_dim, out_head_stride: spec.value_dim };
        dispatches.extend(kernels::head_products(gpu, v_b, rows, &scratch.mixer_out, &scratch.head_outputs)?);
        Ok(LastProduct::new(out, &scratch.head_outputs))
    }
}
