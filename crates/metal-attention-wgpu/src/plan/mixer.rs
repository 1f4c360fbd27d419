//! The mixer of a layer, from the residual stream (or its norm) to the input of the output matrix.
//!
//! Every function appends the dispatches of one step to `dispatches` and names the scratch buffers that these read and
//! write. The output matrix itself is not multiplied here: [`MixerResult`] records what it multiplies, and `layer.rs`
//! joins the product to the residual stream. Softmax attention has *fast* kernels for the common variants, which read
//! Q, K and V from the projected rows, and *general* ones for all others, which first write queries to a buffer; see
//! `parts.rs`.

use crate::kernels::{
    self, AttentionBuffers, AttentionInputsBuffers, AttentionInputsShape, AttentionShape, ColumnRange,
    GeneralAttention, GeneralAttentionBuffers, HeadRows, KvInputs, LatentInputsBuffers, LatentInputsShape,
    MatvecOutput, NormShape,
};
use crate::{Dispatch, WgpuError};
use metal_attention_model::{BatchKind, Mixer};
use wgpu::Buffer;

use super::{BlockInput, LinearProduct, PlanBuilder};
use crate::parts::{AttentionKernels, MixerKernels};
use crate::weights::{WgpuAttention, WgpuLinear, WgpuMixer, WgpuNorm};

/// The last product of a mixer, not appended yet: `out x`, or `out norm(x)`.
#[derive(Debug, Clone, Copy)]
pub(super) struct MixerResult<'a> {
    /// The output matrix.
    pub(super) out: &'a WgpuLinear,
    /// The scratch buffer that it multiplies.
    pub(super) x: &'a Buffer,
    /// The norm of `x` that the product computes in its prologue; only in plans for one token.
    pub(super) norm: Option<&'a WgpuNorm>,
}

impl<'a> MixerResult<'a> {
    /// The product `out x` without a norm.
    pub(super) fn new(out: &'a WgpuLinear, x: &'a Buffer) -> Self {
        Self { out, x, norm: None }
    }
}

impl PlanBuilder<'_> {
    /// Whether the norm before layer `i`'s mixer is written to `h` for several products. Otherwise the mixer has one
    /// product, which computes the norm in its prologue.
    pub(super) fn mixer_materialises_norm(&self, i: usize) -> bool {
        // LAuReL reads the normed input beside the mixer.
        if self.weights.layers[i].streams.is_some() {
            return true;
        }
        match self.mixers[i] {
            MixerKernels::Fast(_)
            | MixerKernels::General(..)
            | MixerKernels::ShortConv(_)
            | MixerKernels::Mamba(_)
            | MixerKernels::Mamba2(_)
            | MixerKernels::AttentionAndMamba2(..)
            | MixerKernels::None => false,
            MixerKernels::Latent(..) | MixerKernels::Rwkv6(_) | MixerKernels::Rwkv7(_) => true,
            // The kernels of one token compute the norm in the prologue: cheaper than a dispatch, even for two
            // products.
            MixerKernels::DeltaRule(_) => self.kind != BatchKind::One && self.delta_rule_gates_apart(i),
        }
    }

    /// Appends the mixer of layer `i` and returns its last products, whose sum is the mixer's result: two for attention
    /// beside Mamba-2, none for a layer without a mixer, else one. Reads `x`, or `h` where `input` is
    /// [`BlockInput::Ready`]. Writes `qkv`, the KV cache or recurrent states of the layer, and the buffers of the
    /// results.
    pub(super) fn mixer(
        &self,
        dispatches: &mut Vec<Dispatch>,
        i: usize,
        input: BlockInput<'_>,
    ) -> Result<Vec<MixerResult<'_>>, WgpuError> {
        let scratch = self.scratch;
        match (&self.weights.layers[i].mixer, &self.mixers[i]) {
            (WgpuMixer::Attention(w), MixerKernels::Fast(shape)) => {
                self.project(
                    dispatches,
                    input,
                    LinearProduct::new(&w.qkv, MatvecOutput::Store, &scratch.x, &scratch.qkv),
                )?;
                Ok(vec![self.softmax_attention(dispatches, i, &AttentionKernels::Fast(*shape), w)?])
            }
            (WgpuMixer::Attention(w), MixerKernels::General(inputs, attention)) => {
                self.project(
                    dispatches,
                    input,
                    LinearProduct::new(&w.qkv, MatvecOutput::Store, &scratch.x, &scratch.qkv),
                )?;
                Ok(vec![self.softmax_attention(dispatches, i, &AttentionKernels::General(*inputs, *attention), w)?])
            }
            (WgpuMixer::Mamba(w), MixerKernels::Mamba(spec)) => Ok(vec![self.mamba(dispatches, i, spec, w, input)?]),
            (WgpuMixer::Mamba2 { input: linear, mamba2 }, MixerKernels::Mamba2(spec)) => {
                self.project(
                    dispatches,
                    input,
                    LinearProduct::new(linear, MatvecOutput::Store, &scratch.x, &scratch.qkv),
                )?;
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
                self.project(
                    dispatches,
                    input,
                    LinearProduct::new(&w.qkv, MatvecOutput::Store, &scratch.x, &scratch.qkv),
                )?;
                let at = attention.qkv_len();
                let inputs = ColumnRange { stride: at + spec.input_width(), at };
                let beside = self.mamba2(dispatches, i, spec, mamba2, inputs, &scratch.mamba.beside)?;
                Ok(vec![self.softmax_attention(dispatches, i, attention, w)?, beside])
            }
            (WgpuMixer::None, MixerKernels::None) => Ok(Vec::new()),
            (WgpuMixer::Latent { out, .. }, MixerKernels::Latent(inputs, attention)) => {
                self.latent_attention(dispatches, i, input, inputs, attention)?;
                Ok(vec![MixerResult::new(out, &scratch.values)])
            }
            (WgpuMixer::ShortConv { input: linear, taps, out }, MixerKernels::ShortConv(spec)) => {
                self.short_conv(dispatches, i, *spec, linear, taps, input)?;
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

    /// Appends softmax attention of layer `i`. Reads `qkv`, which holds projected queries, keys and values; appends the
    /// keys and values to the KV cache; writes `mixer_out`, and with the general kernels `queries`.
    fn softmax_attention<'s>(
        &'s self,
        dispatches: &mut Vec<Dispatch>,
        i: usize,
        kernels: &AttentionKernels,
        w: &'s WgpuAttention,
    ) -> Result<MixerResult<'s>, WgpuError> {
        let WgpuAttention { qkv: _, qk_norm, head_params, out } = w;
        match kernels {
            AttentionKernels::Fast(shape) => {
                self.fast_attention(dispatches, i, shape, qk_norm.as_ref(), head_params.as_ref())?;
            }
            AttentionKernels::General(inputs, attention) => {
                self.attention_inputs(dispatches, i, inputs, qk_norm.as_ref())?;
                self.general_attention(dispatches, i, attention, head_params.as_ref())?;
            }
        }
        Ok(MixerResult::new(out, &self.scratch.mixer_out))
    }

    /// Appends attention by the fast kernels: RoPE, the append to the KV cache of layer `i`, and attention over it, in
    /// one kernel for a decode step and in two for other batches. Reads `qkv`, writes `mixer_out`; `partial` holds the
    /// results of splits.
    fn fast_attention(
        &self,
        dispatches: &mut Vec<Dispatch>,
        i: usize,
        shape: &AttentionShape,
        qk_norm: Option<&Buffer>,
        head_params: Option<&Buffer>,
    ) -> Result<(), WgpuError> {
        let gpu = self.gpu;
        let (keys, values) = self.cache.of_layer(i);
        let buffers = AttentionBuffers {
            qkv: &self.scratch.qkv,
            rope: &self.rope[i],
            qk_norm,
            head_params,
            keys,
            values,
            att: &self.scratch.mixer_out,
            partial: &self.scratch.partial,
            batch: self.batch,
        };
        if self.decodes() {
            dispatches.push(kernels::decode_attention(gpu, shape, &buffers)?);
            dispatches.push(kernels::decode_attention_merge(gpu, shape, &buffers)?);
        } else {
            dispatches.push(kernels::rope_append(gpu, shape, &buffers)?);
            let on_units = kernels::attends_on_units(gpu.features(), shape, self.exact);
            let attention = if on_units { kernels::prefill_attention_cooperative } else { kernels::prefill_attention };
            dispatches.push(attention(gpu, shape, &buffers)?);
        }
        Ok(())
    }

    /// Whether the plan is for decode steps: every token is the next one of its sequence.
    pub(super) fn decodes(&self) -> bool {
        match self.kind {
            BatchKind::One | BatchKind::Sequences => true,
            BatchKind::Few | BatchKind::Many => false,
        }
    }

    /// Appends the kernel that prepares general attention: norm and RoPE of the projected queries and keys, and the
    /// append of keys and values to the KV cache unless the layer reads another one's. Reads `qkv`, writes `queries`.
    fn attention_inputs(
        &self,
        dispatches: &mut Vec<Dispatch>,
        i: usize,
        shape: &AttentionInputsShape,
        qk_norm: Option<&Buffer>,
    ) -> Result<(), WgpuError> {
        let (scratch, (keys, values)) = (self.scratch, self.cache.of_layer(i));
        let buffers = AttentionInputsBuffers {
            qkv: &scratch.qkv,
            queries: &scratch.queries,
            rope: shape.rope.map(|_| &self.rope[i]),
            qk_norm,
            cache: if shape.kv == KvInputs::None { None } else { Some((keys, values)) },
            batch: self.batch,
        };
        dispatches.push(kernels::attention_inputs(self.gpu, shape, &buffers)?);
        Ok(())
    }

    /// Appends attention by the general kernels over the KV cache that layer `i` reads. Reads `queries`, writes
    /// `mixer_out`; for decode steps also the merge of splits, through `partial`.
    fn general_attention(
        &self,
        dispatches: &mut Vec<Dispatch>,
        i: usize,
        shape: &GeneralAttention,
        head_params: Option<&Buffer>,
    ) -> Result<(), WgpuError> {
        let (scratch, (keys, values)) = (self.scratch, self.cache.of_layer(i));
        let buffers = GeneralAttentionBuffers {
            queries: &scratch.queries,
            keys,
            values,
            head_params,
            att: &scratch.mixer_out,
            partial: &scratch.partial,
            batch: self.batch,
        };
        dispatches.push(kernels::general_attention(self.gpu, shape, self.decodes(), &buffers)?);
        if self.decodes() {
            dispatches.push(kernels::general_attention_merge(self.gpu, shape, &buffers)?);
        }
        Ok(())
    }

    /// Appends multi-head latent attention (`DeepSeek-V2`, arXiv 2405.04434, section 2.1). The KV cache holds one
    /// compressed row for each position, which is key and value of all heads. Queries are multiplied by the key
    /// expansion before attention, and the results by the value expansion after it, so that cached rows are never
    /// expanded.
    ///
    /// `q_a = norm(Wqa input)`, `qkv = Wqb q_a` (queries), `kv_a = Wkva input`, `queries = Kb qkv`, attention to
    /// `mixer_out`, `values = Vb mixer_out`.
    fn latent_attention(
        &self,
        dispatches: &mut Vec<Dispatch>,
        i: usize,
        input: BlockInput<'_>,
        inputs: &LatentInputsShape,
        attention: &GeneralAttention,
    ) -> Result<(), WgpuError> {
        let (gpu, scratch, (keys, values)) = (self.gpu, self.scratch, self.cache.of_layer(i));
        let (WgpuMixer::Latent { q_a, q, kv_a, kv_a_norm, k_b, v_b, out: _ }, Mixer::LatentAttention(spec)) =
            (&self.weights.layers[i].mixer, &self.spec.layers[i].mixer)
        else {
            panic!("the weights are those of the layers: both were made from one description")
        };
        match q_a {
            Some((q_a, norm)) => {
                self.project(
                    dispatches,
                    input,
                    LinearProduct::new(q_a, MatvecOutput::Store, &scratch.x, &scratch.q_a),
                )?;
                dispatches.push(self.norm(norm, NormShape::of_row(norm.n), None, &scratch.q_a)?);
                self.multiply(dispatches, LinearProduct::new(q, MatvecOutput::Store, &scratch.q_a, &scratch.qkv))?;
            }
            None => {
                self.project(dispatches, input, LinearProduct::new(q, MatvecOutput::Store, &scratch.x, &scratch.qkv))?;
            }
        }
        self.project(dispatches, input, LinearProduct::new(kv_a, MatvecOutput::Store, &scratch.x, &scratch.kv_a))?;
        let n_head = inputs.n_head;
        let rows = HeadRows { n_head, x_stride: spec.head_dim(), y_stride: attention.key_dim };
        dispatches.extend(kernels::head_products(gpu, k_b, rows, &scratch.qkv, &scratch.queries)?);
        let buffers = LatentInputsBuffers {
            q: &scratch.qkv,
            kv: &scratch.kv_a,
            norm: kv_a_norm,
            queries: &scratch.queries,
            keys,
            values,
            rope: &self.rope[i],
            batch: self.batch,
        };
        dispatches.push(kernels::latent_inputs(gpu, inputs, &buffers)?);
        self.general_attention(dispatches, i, attention, None)?;
        let rows = HeadRows { n_head, x_stride: attention.value_dim, y_stride: spec.value_dim };
        dispatches.extend(kernels::head_products(gpu, v_b, rows, &scratch.mixer_out, &scratch.values)?);
        Ok(())
    }
}
