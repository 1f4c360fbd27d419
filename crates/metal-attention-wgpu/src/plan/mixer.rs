//! The mixer of a layer: the dispatches from its input to the input of its output projection.
//!
//! Each function appends dispatches to `dispatches` and binds them to the scratch buffers that it reads and writes.
//! WebGPU orders dispatches: each sees what those before it have written. The output projection is not multiplied here:
//! a [`MixerResult`] names its matrix and the buffer that it multiplies, and `layer.rs` adds the product to the residual
//! stream `x`. This file has softmax attention and latent attention (MLA); the recurrent mixers are in `mamba.rs`,
//! `delta_rule.rs`, `rwkv.rs` and `short_conv.rs`.
//!
//! The input of a mixer is a [`BranchInput`]: either a norm of `x` that each product computes for itself
//! ([`BranchInput::PendingNorm`]), or the rows of a buffer ([`BranchInput::Rows`]: `normed` after a norm, `x` without
//! one). `multiply_branch_input` appends a product of either, an *input product*.
//!
//! A plan, that is, a list of dispatches, is built once for each [`BatchKind`] and recorded into a command encoder for
//! every micro-batch. It is the same for all micro-batches of its kind: grid sizes are computed from the numbers of
//! tokens and splits when it is recorded ([`GridExtent`](crate::dispatch::GridExtent)), and kernels read tokens,
//! positions and page tables from the buffer `batch` ([`BatchBuffer`](crate::BatchBuffer)). The kinds, with the limits
//! that `few_limits` of `plan.rs` returns:
//!
//! ```text
//! One         one token                                          kernels of decode steps
//! Sequences   one token each of 2 to `sequences` sequences       kernels of decode steps
//! Few         any other micro-batch of at most `tokens` tokens   kernels of prefill
//! Many        all others                                         kernels of prefill
//! ```
//!
//! Products choose their kernels in `plan.rs`, by kind and matrix.
//!
//! # Errors
//!
//! Of all functions: a kernel does not support a shape, or the driver cannot make a pipeline. They occur when the plan
//! is built, not when it is recorded.
//!
//! # Scratch buffers
//!
//! They are allocated once, for the largest micro-batch and the widest layer
//! ([`Activations`](crate::activations::Activations)).
//!
//! ```text
//! buffer              shape, F32, row-major             contents: written by -> read by
//! x                   [n_tokens, n_embd]                residual stream: layer.rs -> input products (PendingNorm, or
//!                                                       Rows without a norm)
//! normed              [n_tokens, n_embd]                normed input: branch_input -> input products, RWKV's token
//!                                                       shifts, LAuReL (Rows); or, before a product whose kernel has no
//!                                                       prologue: a norm dispatch -> this product (PendingNorm)
//! projected           [n_tokens, row], rows see below   input products (latent: q_b) -> kernels of the mixer;
//!                                                       rope_append changes the queries in place
//! queries             [n_tokens, n_head, key_dim]       queries after norm and RoPE, general kernels only:
//!                                                       attention_inputs -> general_attention
//!                                                       latent: head_products, latent_inputs -> general_attention
//! q_compressed        [n_tokens, q_rank]                latent: q_a, then its norm in place -> q_b
//! kv_compressed       [n_tokens, kv_rank + shared_dim]  latent: compressed row, then the shared key, neither normed nor
//!                                                       rotated yet: kv_a -> latent_inputs
//! mixer_out           [n_tokens, n_head, value_dim]     result of attention, times the gates -> output projection
//!                     [n_tokens, width]                 result of a recurrent mixer -> output projection
//!                     [n_tokens, n_head, kv_rank]       latent: general_attention -> head_products of v_b
//! head_outputs        [n_tokens, n_head, value_dim]     latent: head_products of v_b -> output projection
//! mamba.parallel_out  [n_tokens, Mamba-2's width]       Mamba-2 in parallel with attention -> its output projection
//! partial             [n_splits, n_tokens, n_head,      split-KV, of each split: weighted sum of the values, highest
//!                       value_dim + 2]                  score, sum of the weights: decode attention -> its merge
//!                                                       (latent: kv_rank + 2)
//! ```
//!
//! The delta rule also uses some of these buffers for other values (`activations.rs`). The rows of `projected`:
//! - softmax attention: `n_head` gates (if there are any; raw, their sigmoid is applied later), `n_head` query heads,
//!   `n_head_kv` key heads, `n_head_kv` value heads, each of `head_dim` elements (`weights/attention.rs` stacks the
//!   matrices in this order); then the inputs of a parallel Mamba-2, if there is one. Keys and values are missing in a
//!   layer that reads another layer's cache, values in a layer whose values are its keys;
//! - latent attention: `n_head` query heads of `n_nope + shared_dim` elements
//!   ([`LatentAttentionSpec::head_dim`](metal_attention_model::LatentAttentionSpec::head_dim)); no keys and no values.
//!
//! # Kernels of softmax attention
//!
//! The *fast* kernels cover the common variants and read queries, keys and values from `projected`. The *general* ones
//! cover others, none of which has gates: a first kernel writes `queries` and stores keys and values in the KV cache.
//! `parts.rs` chooses, and refuses what neither set covers.

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

/// The last product of a mixer, `[n_tokens, n_embd]`, without a dispatch as yet: `out * input`, or `out * norm(input)`.
#[derive(Debug, Clone, Copy)]
pub(super) struct MixerResult<'a> {
    /// The output projection, `[n_embd, n_in]`.
    pub(super) out: &'a WgpuLinear,
    /// The scratch buffer that it multiplies, `[n_tokens, n_in]`.
    pub(super) input: &'a Buffer,
    /// The norm of `input` that the product computes in its prologue; only of Mamba-2, in plans for one token. `None`:
    /// the product multiplies `input` itself.
    pub(super) norm: Option<&'a WgpuNorm>,
}

impl<'a> MixerResult<'a> {
    /// The product `out * input` without a norm.
    pub(super) fn new(out: &'a WgpuLinear, input: &'a Buffer) -> Self {
        Self { out, input, norm: None }
    }
}

impl PlanBuilder<'_> {
    /// Whether the input norm of layer `i`'s mixer is written to `normed` once, for all readers
    /// ([`BranchInput::Rows`]). Otherwise every product of the input computes the norm for itself
    /// ([`BranchInput::PendingNorm`]): in its prologue, or, if its kernel has none, by a norm dispatch before it.
    pub(super) fn mixer_materialises_norm(&self, i: usize) -> bool {
        // A model with several residual streams also has LAuReL, a low-rank branch in parallel with the mixer. It reads
        // `normed`.
        if self.weights.layers[i].streams.is_some() {
            return true;
        }
        match self.mixers[i] {
            // At most one product reads the input.
            MixerKernels::Attention(_)
            | MixerKernels::ShortConv(_)
            | MixerKernels::Mamba(_)
            | MixerKernels::Mamba2(_)
            | MixerKernels::AttentionAndMamba2(..)
            | MixerKernels::None => false,
            // Several products read the input, or RWKV's token shift, which mixes each row with the previous token's.
            MixerKernels::Latent(..) | MixerKernels::Rwkv6(_) | MixerKernels::Rwkv7(_) => true,
            // Several products read the input where the gates have a matrix of their own. With one token, computing the
            // norm in each prologue is cheaper than a norm dispatch.
            MixerKernels::DeltaRule(_) => self.kind != BatchKind::One && self.delta_rule_has_gate_product(i),
        }
    }

    /// Appends the mixer of layer `i`, up to the input of its output projection. Updates the layer's KV cache or
    /// recurrent states.
    ///
    /// Returns the products that are left, whose sum is the mixer's result: none for a layer without a mixer, two for
    /// attention in parallel with Mamba-2, else one.
    ///
    /// Precondition: `input` comes from `branch_input`, which has written the norm to `normed` if
    /// [`mixer_materialises_norm`](Self::mixer_materialises_norm) is true.
    ///
    /// # Panics
    ///
    /// If the weights of the layer are not those of its kernels.
    pub(super) fn append_mixer(
        &self,
        dispatches: &mut Vec<Dispatch>,
        i: usize,
        input: BranchInput<'_>,
    ) -> Result<Vec<MixerResult<'_>>, WgpuError> {
        let scratch = self.scratch;
        // `softmax_attention` and `mamba2` begin after the input product, since in parallel they share one. The other
        // functions contain it. Those without a result value leave the input of the output projection in `mixer_out`,
        // `latent_attention` in `head_outputs`.
        match (&self.weights.layers[i].mixer, &self.mixers[i]) {
            (WgpuMixer::Attention(w), MixerKernels::Attention(kernels)) => {
                self.multiply_branch_input(dispatches, input, &w.qkv, MatvecOutput::Store, &scratch.projected)?;
                Ok(vec![self.softmax_attention(dispatches, i, kernels, w)?])
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
                // In each row of `projected`, the inputs of Mamba-2 follow those of attention. The two mixers access
                // different columns, so that their order does not matter.
                let first_column = attention.qkv_len();
                let mamba2_columns = ColumnRange { stride: first_column + spec.input_width(), first: first_column };
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
                panic!("the weights of layer {i} are not those of its kernels")
            }
        }
    }

    /// Appends softmax attention of layer `i` after its input product: reads `projected`, stores the batch's keys and
    /// values in the KV cache, attends over the cache, and writes `mixer_out`.
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

    /// Appends attention of layer `i` by the fast kernels. Reads `projected`, writes `mixer_out`. `parts.rs` chooses
    /// these kernels only for layers with a KV cache of their own. There are two dispatches. In a decode step:
    ///
    /// 1. `decode_attention`, with a workgroup for each token, split, and group of query heads that share a KV head:
    ///    norm and RoPE, and attention over the split, to `partial`, or to `mixer_out` if there is only one split. For
    ///    each KV head, one workgroup of the split that contains the token's own position also stores the new key and
    ///    value in the KV cache. Every workgroup attends to its own copy of them, since what another one stores is not
    ///    visible within the dispatch.
    /// 2. `decode_attention_merge`: the results of all splits, from `partial` to `mixer_out`. The number of splits is
    ///    that of the micro-batch; with one split this dispatch has no workgroups.
    ///
    /// In prefill:
    ///
    /// 1. `rope_append`: norm and RoPE, of the queries in place in `projected`; stores keys and values in the KV cache.
    /// 2. `prefill_attention`, on matrix units if the GPU and the shape allow it.
    ///
    /// The kernel that writes `mixer_out` also multiplies each head's result by the sigmoid of its gate, if the layer
    /// has gates.
    ///
    /// `qk_norm`: the weight of the norm of query heads, then that of key heads, `[2, head_dim]`.
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
        let (keys, values) = self.cache.read_by_layer(i);
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
        if self.uses_decode_kernels() {
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

    /// Whether the plan uses the kernels of decode steps: each token is the only one of its sequence in the micro-batch.
    pub(super) fn uses_decode_kernels(&self) -> bool {
        match self.kind {
            BatchKind::One | BatchKind::Sequences => true,
            BatchKind::Few | BatchKind::Many => false,
        }
    }

    /// Appends the kernel before `general_attention`: norms and rotates the projected queries and keys, writes
    /// `queries`, and stores keys and values in the KV cache of layer `i`, unless the layer reads another layer's
    /// cache. Reads `projected`.
    ///
    /// `qk_norm`, concatenated: query weight, key weight, query bias, key bias. Absent ones are left out; `shape` says
    /// which are present. Each covers one head or all heads, as `shape.qk_norm` says.
    fn attention_inputs(
        &self,
        dispatches: &mut Vec<Dispatch>,
        i: usize,
        shape: &AttentionInputsShape,
        qk_norm: Option<&Buffer>,
    ) -> Result<(), WgpuError> {
        let (scratch, (keys, values)) = (self.scratch, self.cache.read_by_layer(i));
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

    /// Appends attention by the general kernels over the KV cache that layer `i` reads (its own, or that of the layer
    /// whose keys and values it shares): from `queries` to `mixer_out`, `[n_tokens, n_head, value_dim]`. A decode step
    /// divides the positions into splits (split-KV) and has a second dispatch, which merges their results from
    /// `partial` to `mixer_out`; it has no workgroups for a single split.
    ///
    /// `sinks_and_slopes`: the sink's score and the `ALiBi` slope of each head, `[n_head, 2]`; `None`: neither.
    fn general_attention(
        &self,
        dispatches: &mut Vec<Dispatch>,
        i: usize,
        shape: &GeneralAttention,
        sinks_and_slopes: Option<&Buffer>,
    ) -> Result<(), WgpuError> {
        let (scratch, (keys, values)) = (self.scratch, self.cache.read_by_layer(i));
        let buffers = GeneralAttentionBuffers {
            queries: &scratch.queries,
            keys,
            values,
            sinks_and_slopes,
            attention_out: &scratch.mixer_out,
            partial: &scratch.partial,
            batch: self.batch,
        };
        let split_kv = self.uses_decode_kernels();
        dispatches.push(kernels::general_attention(self.gpu, shape, split_kv, &buffers)?);
        if split_kv {
            dispatches.push(kernels::general_attention_merge(self.gpu, shape, &buffers)?);
        }
        Ok(())
    }

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
    ///
    /// # Panics
    ///
    /// If the weights or the spec of layer `i` have another mixer.
    fn latent_attention(
        &self,
        dispatches: &mut Vec<Dispatch>,
        i: usize,
        input: BranchInput<'_>,
        inputs_shape: &LatentInputsShape,
        attention_shape: &GeneralAttention,
    ) -> Result<(), WgpuError> {
        let (gpu, scratch, (keys, values)) = (self.gpu, self.scratch, self.cache.read_by_layer(i));
        let (WgpuMixer::Latent { q_a, q_b, kv_a, kv_a_norm, k_b, v_b, out: _ }, Mixer::LatentAttention(spec)) =
            (&self.weights.layers[i].mixer, &self.spec.layers[i].mixer)
        else {
            panic!("layer {i} has another mixer than latent attention")
        };
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
        let n_head = inputs_shape.n_head;
        // Strides from head to head, in elements.
        let rows = HeadRows { n_head, in_head_stride: spec.head_dim(), out_head_stride: attention_shape.key_dim };
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
        dispatches.push(kernels::latent_inputs(gpu, inputs_shape, &buffers)?);
        self.general_attention(dispatches, i, attention_shape, None)?;
        // `attention_shape.value_dim` is `kv_rank`: attention returns sums of compressed rows.
        let rows = HeadRows { n_head, in_head_stride: attention_shape.value_dim, out_head_stride: spec.value_dim };
        dispatches.extend(kernels::head_products(gpu, v_b, rows, &scratch.mixer_out, &scratch.head_outputs)?);
        Ok(())
    }
}
