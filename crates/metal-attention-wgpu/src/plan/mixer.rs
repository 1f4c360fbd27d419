//! The mixer of a layer: the dispatches from its input to the input of its output matrix.
//!
//! Each function appends dispatches to `dispatches` and binds them to the scratch buffers that it reads and writes.
//! The output matrix is not multiplied here: a [`MixerResult`] names the matrix and the buffer that it multiplies, and
//! `layer.rs` adds the product to the residual stream. This file has softmax attention and latent attention; the other
//! files of this folder have the recurrent mixers.
//!
//! A branch is what is added to the residual stream `x`: a mixer or a feed-forward. The input of a mixer is a
//! [`BranchInput`]: either a norm of `x` that each product computes for itself ([`BranchInput::PendingNorm`]), or the
//! rows of a buffer ([`BranchInput::Rows`]: `h` after a norm, `x` without one). `multiply_branch_input` appends a
//! product of either.
//!
//! A plan, that is, a list of dispatches, is built once for each [`BatchKind`] and recorded again for every
//! micro-batch. It does not depend on the micro-batch: grids grow with its numbers of tokens and splits (`GridExtent`),
//! and kernels read its tokens, positions and page tables from the buffer `batch`
//! ([`BatchBuffer`](crate::BatchBuffer)). The kinds are `One` token; `Sequences`, the next token of a few
//! sequences each; `Few` tokens or `Many` tokens otherwise (`few_limits` of `plan.rs` has the limits). The first two
//! have the kernels of decode steps, the others those of prefill; products choose theirs in `plan.rs`.
//!
//! # Scratch buffers
//!
//! They are allocated once, for the largest micro-batch and the widest layer
//! ([`Activations`](crate::activations::Activations)).
//!
//! ```text
//! buffer              shape, F32, row-major             contents: written by -> read by
//! x                   [n_tokens, n_embd]                residual stream: layer.rs -> first products (PendingNorm)
//! h                   [n_tokens, n_embd]                normed input: branch_input -> first products (Rows)
//! projected           [n_tokens, row], rows see below   input projection: first products -> kernels of the mixer
//! queries             [n_tokens, n_head, key_dim]       queries after norm and RoPE, general kernels only:
//!                                                       attention_inputs -> general_attention
//!                                                       latent: head_products, latent_inputs -> general_attention
//! q_compressed        [n_tokens, q_rank]                latent: compressed queries: first product -> query expansion
//! kv_compressed       [n_tokens, kv_rank + shared_dim]  latent: compressed row, key part of all heads:
//!                                                       first product -> latent_inputs
//! mixer_out           [n_tokens, n_head, value_dim]     result, times the gates of query heads, if any: attention or
//!                                                       recurrence -> output matrix
//!                     [n_tokens, n_head, kv_rank]       latent: general_attention -> head_products
//! head_outputs        [n_tokens, n_head, value_dim]     latent: result after the value expansion:
//!                                                       head_products -> output matrix
//! mamba.parallel_out  [n_tokens, width]                 Mamba-2 in parallel with attention: mamba2 -> its output matrix
//! partial             [n_splits * n_tokens * n_head *   split-KV: sums, maximum and weight of each split:
//!                       (value_dim + 2)]                decode attention -> its merge
//! ```
//!
//! The rows of `projected`, in elements:
//! - softmax attention: gates of the query heads (if any), `n_head` query heads, `n_head_kv` key heads and value
//!   heads (as far as the layer has its own), each of `head_dim`; then the inputs of a parallel Mamba-2, if there is
//!   one;
//! - latent attention: `n_head` query heads of `spec.head_dim()`, no keys and no values;
//! - recurrent mixers: see their files.
//!
//! # Kernels of softmax attention
//!
//! The *fast* kernels cover the common variants and read queries, keys and values from `projected`. The *general* ones
//! cover all others: a first kernel writes `queries` and appends keys and values to the KV cache. `parts.rs` chooses.

use crate::kernels::{
    self, AttentionBuffers, AttentionInputsBuffers, AttentionInputsShape, AttentionShape, ColumnRange,
    GeneralAttention, GeneralAttentionBuffers, HeadRows, KvInputs, LatentInputsBuffers, LatentInputsShape,
    MatvecOutput, NormShape,
};
use crate::{Dispatch, WgpuError};
use metal_attention_model::{BatchKind, Mixer};
use wgpu::Buffer;

use super::{BranchInput, LinearProduct, PlanBuilder};
use crate::parts::{AttentionKernels, MixerKernels};
use crate::weights::{WgpuAttention, WgpuLinear, WgpuMixer, WgpuNorm};

/// The last product of a mixer, `[n_tokens, n_embd]`, which is not appended yet: `out x`, or `out norm(x)`.
#[derive(Debug, Clone, Copy)]
pub(super) struct MixerResult<'a> {
    /// The output matrix, `[n_embd, n_in]`.
    pub(super) out: &'a WgpuLinear,
    /// The scratch buffer that it multiplies, `[n_tokens, n_in]`.
    pub(super) x: &'a Buffer,
    /// The norm of `x` that the product computes in its prologue; only of Mamba, in plans for one token. `None`: the
    /// product multiplies `x` itself.
    pub(super) norm: Option<&'a WgpuNorm>,
}

impl<'a> MixerResult<'a> {
    /// The product `out x` without a norm.
    pub(super) fn new(out: &'a WgpuLinear, x: &'a Buffer) -> Self {
        Self { out, x, norm: None }
    }
}

impl PlanBuilder<'_> {
    /// Whether the input norm of layer `i`'s mixer is written to `h` once, for all readers. Otherwise every product of
    /// the input computes the norm for itself, usually in its prologue.
    pub(super) fn mixer_materialises_norm(&self, i: usize) -> bool {
        // A model with several residual streams also has LAuReL, a low-rank branch in parallel with the mixer. It reads
        // `h`.
        if self.weights.layers[i].streams.is_some() {
            return true;
        }
        match self.mixers[i] {
            // One product reads the input.
            MixerKernels::FastAttention(_)
            | MixerKernels::GeneralAttention(..)
            | MixerKernels::ShortConv(_)
            | MixerKernels::Mamba(_)
            | MixerKernels::Mamba2(_)
            | MixerKernels::AttentionAndMamba2(..)
            | MixerKernels::None => false,
            // Several products, or a token shift, read the input.
            MixerKernels::Latent(..) | MixerKernels::Rwkv6(_) | MixerKernels::Rwkv7(_) => true,
            // Several products read the input where the gates have a matrix of their own. With one token, computing the
            // norm in each prologue is cheaper than a norm dispatch.
            MixerKernels::DeltaRule(_) => self.kind != BatchKind::One && self.delta_rule_gates_apart(i),
        }
    }

    /// Appends the mixer of layer `i`, up to the input of its output matrix. Updates the layer's KV cache or recurrent
    /// states.
    ///
    /// Returns the products that are left, whose sum is the mixer's result: none for a layer without a mixer, two for
    /// attention in parallel with Mamba-2, else one.
    ///
    /// # Panics
    ///
    /// If the weights of the layer are not those of its kernels.
    pub(super) fn mixer(
        &self,
        dispatches: &mut Vec<Dispatch>,
        i: usize,
        input: BranchInput<'_>,
    ) -> Result<Vec<MixerResult<'_>>, WgpuError> {
        let scratch = self.scratch;
        match (&self.weights.layers[i].mixer, &self.mixers[i]) {
            (WgpuMixer::Attention(w), MixerKernels::FastAttention(shape)) => {
                self.multiply_branch_input(dispatches, input, &w.qkv, MatvecOutput::Store, &scratch.projected)?;
                Ok(vec![self.softmax_attention(dispatches, i, &AttentionKernels::Fast(*shape), w)?])
            }
            (WgpuMixer::Attention(w), MixerKernels::GeneralAttention(inputs_shape, attention_shape)) => {
                self.multiply_branch_input(dispatches, input, &w.qkv, MatvecOutput::Store, &scratch.projected)?;
                let kernels = AttentionKernels::General(*inputs_shape, *attention_shape);
                Ok(vec![self.softmax_attention(dispatches, i, &kernels, w)?])
            }
            (WgpuMixer::Mamba(w), MixerKernels::Mamba(spec)) => Ok(vec![self.mamba(dispatches, i, spec, w, input)?]),
            (WgpuMixer::Mamba2 { input: input_matrix, mamba2 }, MixerKernels::Mamba2(spec)) => {
                self.multiply_branch_input(dispatches, input, input_matrix, MatvecOutput::Store, &scratch.projected)?;
                Ok(vec![self.mamba2(
                    dispatches,
                    i,
                    spec,
                    mamba2,
                    ColumnRange::whole(spec.input_width()),
                    &scratch.mixer_out,
                )?])
            }
            (
                WgpuMixer::AttentionAndMamba2 { attention: w, mamba2 },
                MixerKernels::AttentionAndMamba2(attention, spec),
            ) => {
                self.multiply_branch_input(dispatches, input, &w.qkv, MatvecOutput::Store, &scratch.projected)?;
                // In each row of `projected`, the inputs of Mamba-2 follow those of attention. Columns are elements.
                let first_column = attention.qkv_len();
                let mamba2_columns = ColumnRange { stride: first_column + spec.input_width(), at: first_column };
                let mamba2_result =
                    self.mamba2(dispatches, i, spec, mamba2, mamba2_columns, &scratch.mamba.parallel_out)?;
                Ok(vec![self.softmax_attention(dispatches, i, attention, w)?, mamba2_result])
            }
            (WgpuMixer::None, MixerKernels::None) => Ok(Vec::new()),
            (WgpuMixer::Latent { out, .. }, MixerKernels::Latent(inputs_shape, attention_shape)) => {
                self.latent_attention(dispatches, i, input, inputs_shape, attention_shape)?;
                Ok(vec![MixerResult::new(out, &scratch.head_outputs)])
            }
            (WgpuMixer::ShortConv { input: input_matrix, taps, out }, MixerKernels::ShortConv(spec)) => {
                self.short_conv(dispatches, i, *spec, input_matrix, taps, input)?;
                Ok(vec![MixerResult::new(out, &scratch.mixer_out)])
            }
            (WgpuMixer::DeltaRule(w), MixerKernels::DeltaRule(spec)) => {
                self.delta_rule(dispatches, i, spec, w, input)?;
                Ok(vec![MixerResult::new(&w.out, &scratch.mixer_out)])
            }
            (WgpuMixer::Rwkv6(w), MixerKernels::Rwkv6(spec)) => {
                self.rwkv6(dispatches, i, spec, w, input)?;
                Ok(vec![MixerResult::new(&w.out, &scratch.mixer_out)])
            }
            (WgpuMixer::Rwkv7(w), MixerKernels::Rwkv7(spec)) => {
                self.rwkv7(dispatches, i, spec, w, input)?;
                Ok(vec![MixerResult::new(&w.out, &scratch.mixer_out)])
            }
            (
                WgpuMixer::Attention(_)
                | WgpuMixer::Latent { .. }
                | WgpuMixer::ShortConv { .. }
                | WgpuMixer::DeltaRule(_)
                | WgpuMixer::Mamba(_)
                | WgpuMixer::Mamba2 { .. }
                | WgpuMixer::AttentionAndMamba2 { .. }
                | WgpuMixer::Rwkv6(_)
                | WgpuMixer::Rwkv7(_)
                | WgpuMixer::None,
                _,
            ) => {
                panic!("the weights are those of the layers: both were made from one description")
            }
        }
    }

    /// Appends softmax attention of layer `i` after its input projection: reads `projected`, appends the batch's keys
    /// and values to the KV cache, attends over the cache, and writes `mixer_out`.
    fn softmax_attention<'s>(
        &'s self,
        dispatches: &mut Vec<Dispatch>,
        i: usize,
        kernels: &AttentionKernels,
        w: &'s WgpuAttention,
    ) -> Result<MixerResult<'s>, WgpuError> {
        let WgpuAttention { qkv: _, qk_norm, sinks_and_slopes, out } = w;
        match kernels {
            AttentionKernels::Fast(shape) => {
                self.fast_attention(dispatches, i, shape, qk_norm.as_ref(), sinks_and_slopes.as_ref())?;
            }
            AttentionKernels::General(inputs_shape, attention_shape) => {
                self.attention_inputs(dispatches, i, inputs_shape, qk_norm.as_ref())?;
                self.general_attention(dispatches, i, attention_shape, sinks_and_slopes.as_ref())?;
            }
        }
        Ok(MixerResult::new(out, &self.scratch.mixer_out))
    }

    /// Appends attention of layer `i` by the fast kernels. Reads `projected`, writes `mixer_out`. The layer has a KV
    /// cache of its own (`parts.rs`). In both cases two dispatches:
    /// - decode step: `decode_attention` (norm and RoPE, append to the KV cache, attention of each split of the
    ///   positions to `partial`; a single split goes to `mixer_out` directly; each workgroup has the new key and value
    ///   in its own memory), then `decode_attention_merge` (no workgroups for a single split: the number of splits is
    ///   that of the micro-batch);
    /// - prefill: `rope_append` (norm and RoPE, of the queries in place in `projected`; append), then
    ///   `prefill_attention`, on matrix units if the GPU and the shape allow it.
    ///
    /// The attention kernels also multiply the results by the gates of the query heads.
    ///
    /// `qk_norm`: weights of the norms of query heads and key heads, `[2, head_dim]`.
    /// `sinks_and_slopes`: `[n_head, 2]`, of which only the sinks are read; the fast kernels do not cover `ALiBi`.
    fn fast_attention(
        &self,
        dispatches: &mut Vec<Dispatch>,
        i: usize,
        shape: &AttentionShape,
        qk_norm: Option<&Buffer>,
        sinks_and_slopes: Option<&Buffer>,
    ) -> Result<(), WgpuError> {
        let gpu = self.gpu;
        let (keys, values) = self.cache.of_layer(i);
        let buffers = AttentionBuffers {
            qkv: &self.scratch.projected,
            rope: &self.rope[i],
            qk_norm,
            sinks_and_slopes,
            keys,
            values,
            attention_out: &self.scratch.mixer_out,
            partial: &self.scratch.partial,
            batch: self.batch,
        };
        if self.is_decode() {
            dispatches.push(kernels::decode_attention(gpu, shape, &buffers)?);
            dispatches.push(kernels::decode_attention_merge(gpu, shape, &buffers)?);
        } else {
            dispatches.push(kernels::rope_append(gpu, shape, &buffers)?);
            // `exact` excludes matrix units that round to 16 bits.
            let on_matrix_units = kernels::prefill_on_matrix_units(gpu.features(), shape, self.exact);
            let attention =
                if on_matrix_units { kernels::prefill_attention_cooperative } else { kernels::prefill_attention };
            dispatches.push(attention(gpu, shape, &buffers)?);
        }
        Ok(())
    }

    /// Whether the plan is for decode steps: each token is the only one of its sequence in the micro-batch.
    pub(super) fn is_decode(&self) -> bool {
        match self.kind {
            BatchKind::One | BatchKind::Sequences => true,
            BatchKind::Few | BatchKind::Many => false,
        }
    }

    /// Appends the kernel before `general_attention`: norms and rotates the projected queries and keys, writes
    /// `queries`, and appends keys and values to the KV cache of layer `i`, unless the layer reads another layer's
    /// cache. Reads `projected`. `qk_norm`: weights of the norms of queries and keys, then their biases, as far as
    /// there are any.
    fn attention_inputs(
        &self,
        dispatches: &mut Vec<Dispatch>,
        i: usize,
        shape: &AttentionInputsShape,
        qk_norm: Option<&Buffer>,
    ) -> Result<(), WgpuError> {
        let (scratch, (keys, values)) = (self.scratch, self.cache.of_layer(i));
        let buffers = AttentionInputsBuffers {
            qkv: &scratch.projected,
            queries: &scratch.queries,
            rope: shape.rope.map(|_| &self.rope[i]),
            qk_norm,
            cache: if shape.kv == KvInputs::None { None } else { Some((keys, values)) },
            batch: self.batch,
        };
        dispatches.push(kernels::attention_inputs(self.gpu, shape, &buffers)?);
        Ok(())
    }

    /// Appends attention by the general kernels over the KV cache that layer `i` reads: from `queries` to `mixer_out`,
    /// `[n_tokens, n_head, value_dim]`. A decode step divides the positions into splits (split-KV) and appends a second
    /// dispatch, which merges their results from `partial` to `mixer_out`; it has no workgroups for a single split.
    ///
    /// `sinks_and_slopes`: the sink's score and the `ALiBi` slope of each head, `[n_head, 2]`; `None`: neither.
    fn general_attention(
        &self,
        dispatches: &mut Vec<Dispatch>,
        i: usize,
        shape: &GeneralAttention,
        sinks_and_slopes: Option<&Buffer>,
    ) -> Result<(), WgpuError> {
        let (scratch, (keys, values)) = (self.scratch, self.cache.of_layer(i));
        let buffers = GeneralAttentionBuffers {
            queries: &scratch.queries,
            keys,
            values,
            sinks_and_slopes,
            attention_out: &scratch.mixer_out,
            partial: &scratch.partial,
            batch: self.batch,
        };
        dispatches.push(kernels::general_attention(self.gpu, shape, self.is_decode(), &buffers)?);
        if self.is_decode() {
            dispatches.push(kernels::general_attention_merge(self.gpu, shape, &buffers)?);
        }
        Ok(())
    }

    /// Appends multi-head latent attention (`DeepSeek-V2`, arXiv 2405.04434, section 2.1) of layer `i`. The KV cache
    /// holds one row for each position, the same for all heads: the key is the normed compressed row `[kv_rank]`
    /// followed by the rotated shared key `[shared_dim]`, the value is the compressed row alone. Queries are multiplied
    /// by the key expansion `k_b` before attention, and the results by the value expansion `v_b` after it, so that
    /// cached rows are never expanded.
    ///
    /// In order, with shapes for each token:
    /// 1. `q_compressed = norm(q_a input)`, `[q_rank]`; `projected = q q_compressed`,
    ///    `[n_head, n_nope + shared_dim]`; `q` is `attn_q_b` of files. A layer without `q_a` has `projected = q input`.
    /// 2. `kv_compressed = kv_a input`, `[kv_rank + shared_dim]`.
    /// 3. `head_products`: the first `kv_rank` elements of each row of `queries`, `[n_head, kv_rank + shared_dim]`,
    ///    become `k_b` times the first `n_nope` elements of the projected query of that head.
    /// 4. `latent_inputs`: the last `shared_dim` elements become the rotated last `shared_dim` elements of the
    ///    projected query; `kv_compressed`, normed and rotated, is appended to the KV cache.
    /// 5. `general_attention`: `mixer_out`, `[n_head, kv_rank]`.
    /// 6. `head_products`: `head_outputs = v_b mixer_out`, `[n_head, value_dim]`.
    fn latent_attention(
        &self,
        dispatches: &mut Vec<Dispatch>,
        i: usize,
        input: BranchInput<'_>,
        inputs_shape: &LatentInputsShape,
        attention_shape: &GeneralAttention,
    ) -> Result<(), WgpuError> {
        let (gpu, scratch, (keys, values)) = (self.gpu, self.scratch, self.cache.of_layer(i));
        let (WgpuMixer::Latent { q_a, q, kv_a, kv_a_norm, k_b, v_b, out: _ }, Mixer::LatentAttention(spec)) =
            (&self.weights.layers[i].mixer, &self.spec.layers[i].mixer)
        else {
            panic!("the weights are those of the layers: both were made from one description")
        };
        match q_a {
            Some((q_a, norm)) => {
                self.multiply_branch_input(dispatches, input, q_a, MatvecOutput::Store, &scratch.q_compressed)?;
                // `None`: in place.
                dispatches.push(self.norm(norm, NormShape::of_row(norm.n), None, &scratch.q_compressed)?);
                self.multiply(
                    dispatches,
                    LinearProduct::new(q, MatvecOutput::Store, &scratch.q_compressed, &scratch.projected),
                )?;
            }
            None => {
                self.multiply_branch_input(dispatches, input, q, MatvecOutput::Store, &scratch.projected)?;
            }
        }
        self.multiply_branch_input(dispatches, input, kv_a, MatvecOutput::Store, &scratch.kv_compressed)?;
        let n_head = inputs_shape.n_head;
        // One dispatch for each part of the matrix that has a buffer of its own, for all tokens.
        let rows = HeadRows { n_head, x_stride: spec.head_dim(), y_stride: attention_shape.key_dim };
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
        dispatches.push(kernels::latent_inputs(gpu, inputs_shape, &buffers)?);
        self.general_attention(dispatches, i, attention_shape, None)?;
        let rows = HeadRows { n_head, x_stride: attention_shape.value_dim, y_stride: spec.value_dim };
        dispatches.extend(kernels::head_products(gpu, v_b, rows, &scratch.mixer_out, &scratch.head_outputs)?);
        Ok(())
    }
}
