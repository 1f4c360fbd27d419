//! A layer's mixer, from its input to what its output matrix is multiplied by.

use crate::kernels::{
    self, AttentionBuffers, AttentionShape, GeneralAttention, GeneralBuffers, HeadRows, InputsBuffers, InputsShape,
    KvInputs, LatentBuffers, LatentShape, MatvecOutput, NormShape, RowsAt,
};
use crate::{Dispatch, WgpuError};
use metal_attention_model::{BatchKind, Mixer};
use wgpu::Buffer;

use super::{Input, PlanBuilder, Product};
use crate::parts::{AttentionKernels, MixerKernels};
use crate::weights::{WgpuAttention, WgpuLinear, WgpuMixer, WgpuNorm};

/// What a mixer gives: an output matrix and what it multiplies.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mixed<'a> {
    pub(super) out: &'a WgpuLinear,
    pub(super) x: &'a Buffer,
    /// A norm of `x` that is still to be taken, where there is one token.
    pub(super) norm: Option<&'a WgpuNorm>,
}

impl<'a> Mixed<'a> {
    pub(super) fn of(out: &'a WgpuLinear, x: &'a Buffer) -> Self {
        Self { out, x, norm: None }
    }
}

impl PlanBuilder<'_> {
    /// Whether several matrices read the input of layer `i`'s mixer.
    pub(super) fn mixer_shares_input(&self, i: usize) -> bool {
        // LAuReL does, too.
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
            // The kernels of one token take the norm on the way.
            MixerKernels::DeltaRule(_) => self.kind != BatchKind::One && self.delta_rule_gates_apart(i),
        }
    }

    /// The mixer of layer `i`: what its result is the sum of.
    pub(super) fn mixer(&self, d: &mut Vec<Dispatch>, i: usize, input: Input<'_>) -> Result<Vec<Mixed<'_>>, WgpuError> {
        let s = self.s;
        match (&self.weights.layers[i].mixer, &self.mixers[i]) {
            (WgpuMixer::Attention(w), MixerKernels::Fast(shape)) => {
                self.product_of(d, input, Product::new(&w.qkv, MatvecOutput::Store, &s.x, &s.qkv))?;
                Ok(vec![self.softmax_attention(d, i, &AttentionKernels::Fast(*shape), w)?])
            }
            (WgpuMixer::Attention(w), MixerKernels::General(inputs, attention)) => {
                self.product_of(d, input, Product::new(&w.qkv, MatvecOutput::Store, &s.x, &s.qkv))?;
                Ok(vec![self.softmax_attention(d, i, &AttentionKernels::General(*inputs, *attention), w)?])
            }
            (WgpuMixer::Mamba(w), MixerKernels::Mamba(of)) => Ok(vec![self.mamba(d, i, of, w, input)?]),
            (WgpuMixer::Mamba2 { input: linear, mamba2 }, MixerKernels::Mamba2(of)) => {
                self.product_of(d, input, Product::new(linear, MatvecOutput::Store, &s.x, &s.qkv))?;
                Ok(vec![self.mamba2(d, i, of, mamba2, RowsAt::whole(of.input_width()), &s.att)?])
            }
            (
                WgpuMixer::AttentionAndMamba2 { attention: w, mamba2 },
                MixerKernels::AttentionAndMamba2(attention, of),
            ) => {
                self.product_of(d, input, Product::new(&w.qkv, MatvecOutput::Store, &s.x, &s.qkv))?;
                let at = attention.qkv_len();
                let inputs = RowsAt { stride: at + of.input_width(), at };
                let beside = self.mamba2(d, i, of, mamba2, inputs, &s.mamba.beside)?;
                Ok(vec![self.softmax_attention(d, i, attention, w)?, beside])
            }
            (WgpuMixer::None, MixerKernels::None) => Ok(Vec::new()),
            (WgpuMixer::Latent { out, .. }, MixerKernels::Latent(inputs, attention)) => {
                self.latent_attention(d, i, input, inputs, attention)?;
                Ok(vec![Mixed::of(out, &s.values)])
            }
            (WgpuMixer::ShortConv { input: linear, taps, out }, MixerKernels::ShortConv(of)) => {
                self.short_conv(d, i, *of, linear, taps, input)?;
                Ok(vec![Mixed::of(out, &s.att)])
            }
            (WgpuMixer::DeltaRule(w), MixerKernels::DeltaRule(of)) => {
                self.delta_rule(d, i, of, w, input)?;
                Ok(vec![Mixed::of(&w.out, &s.att)])
            }
            (WgpuMixer::Rwkv6(w), MixerKernels::Rwkv6(of)) => {
                self.rwkv6(d, i, of, w, input)?;
                Ok(vec![Mixed::of(&w.out, &s.att)])
            }
            (WgpuMixer::Rwkv7(w), MixerKernels::Rwkv7(of)) => {
                self.rwkv7(d, i, of, w, input)?;
                Ok(vec![Mixed::of(&w.out, &s.att)])
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

    /// Attention of layer `i`, of its queries, keys and values.
    fn softmax_attention<'s>(
        &'s self,
        d: &mut Vec<Dispatch>,
        i: usize,
        of: &AttentionKernels,
        w: &'s WgpuAttention,
    ) -> Result<Mixed<'s>, WgpuError> {
        let WgpuAttention { qkv: _, qk_norm, of_heads, out } = w;
        match of {
            AttentionKernels::Fast(shape) => {
                self.fast_attention(d, i, shape, qk_norm.as_ref(), of_heads.as_ref())?;
            }
            AttentionKernels::General(inputs, attention) => {
                self.attention_inputs(d, i, inputs, qk_norm.as_ref())?;
                self.general_attention(d, i, attention, of_heads.as_ref())?;
            }
        }
        Ok(Mixed::of(out, &self.s.att))
    }

    /// Attention over the cache of layer `i`, after its newest keys and values were appended.
    fn fast_attention(
        &self,
        d: &mut Vec<Dispatch>,
        i: usize,
        shape: &AttentionShape,
        qk_norm: Option<&Buffer>,
        of_heads: Option<&Buffer>,
    ) -> Result<(), WgpuError> {
        let gpu = self.gpu;
        let (keys, values) = self.cache.of_layer(i);
        let buffers = AttentionBuffers {
            qkv: &self.s.qkv,
            rope: &self.rope[i],
            qk_norm,
            of_heads,
            keys,
            values,
            att: &self.s.att,
            partial: &self.s.partial,
            batch: self.batch,
        };
        if self.decodes() {
            d.push(kernels::decode_attention(gpu, shape, &buffers)?);
            d.push(kernels::decode_attention_merge(gpu, shape, &buffers)?);
        } else {
            d.push(kernels::rope_append(gpu, shape, &buffers)?);
            let on_units = kernels::attends_on_units(gpu.features(), shape, self.exact);
            let attention = if on_units { kernels::prefill_attention_cooperative } else { kernels::prefill_attention };
            d.push(attention(gpu, shape, &buffers)?);
        }
        Ok(())
    }

    /// Whether every token is the next one of its sequence.
    pub(super) fn decodes(&self) -> bool {
        match self.kind {
            BatchKind::One | BatchKind::Sequences => true,
            BatchKind::Few | BatchKind::Many => false,
        }
    }

    /// Queries as attention takes them, and the way of keys and values into the cache, from their projections.
    fn attention_inputs(
        &self,
        d: &mut Vec<Dispatch>,
        i: usize,
        of: &InputsShape,
        qk_norm: Option<&Buffer>,
    ) -> Result<(), WgpuError> {
        let (s, (keys, values)) = (self.s, self.cache.of_layer(i));
        let buffers = InputsBuffers {
            qkv: &s.qkv,
            queries: &s.queries,
            rope: of.rope.map(|_| &self.rope[i]),
            qk_norm,
            cache: if of.kv == KvInputs::None { None } else { Some((keys, values)) },
            batch: self.batch,
        };
        d.push(kernels::attention_inputs(self.gpu, of, &buffers)?);
        Ok(())
    }

    /// Attention of any kind over the cache that layer `i` reads.
    fn general_attention(
        &self,
        d: &mut Vec<Dispatch>,
        i: usize,
        of: &GeneralAttention,
        of_heads: Option<&Buffer>,
    ) -> Result<(), WgpuError> {
        let (s, (keys, values)) = (self.s, self.cache.of_layer(i));
        let buffers = GeneralBuffers {
            queries: &s.queries,
            keys,
            values,
            of_heads,
            att: &s.att,
            partial: &s.partial,
            batch: self.batch,
        };
        d.push(kernels::general_attention(self.gpu, of, self.decodes(), &buffers)?);
        if self.decodes() {
            d.push(kernels::general_attention_merge(self.gpu, of, &buffers)?);
        }
        Ok(())
    }

    /// Multi-head latent attention (`DeepSeek-V2`, arXiv 2405.04434, section 2.1): the cache holds one compressed row a token,
    /// which is key and value of all heads; the keys' expansion is taken into the query, that of the values follows attention.
    fn latent_attention(
        &self,
        d: &mut Vec<Dispatch>,
        i: usize,
        input: Input<'_>,
        inputs: &LatentShape,
        attention: &GeneralAttention,
    ) -> Result<(), WgpuError> {
        let (gpu, s, (keys, values)) = (self.gpu, self.s, self.cache.of_layer(i));
        let (WgpuMixer::Latent { q_a, q, kv_a, kv_a_norm, k_b, v_b, out: _ }, Mixer::LatentAttention(spec)) =
            (&self.weights.layers[i].mixer, &self.spec.layers[i].mixer)
        else {
            panic!("the weights are those of the layers: both were made from one description")
        };
        match q_a {
            Some((q_a, norm)) => {
                self.product_of(d, input, Product::new(q_a, MatvecOutput::Store, &s.x, &s.q_a))?;
                d.push(self.norm(norm, NormShape::of_row(norm.n), None, &s.q_a)?);
                self.multiply(d, Product::new(q, MatvecOutput::Store, &s.q_a, &s.qkv))?;
            }
            None => self.product_of(d, input, Product::new(q, MatvecOutput::Store, &s.x, &s.qkv))?,
        }
        self.product_of(d, input, Product::new(kv_a, MatvecOutput::Store, &s.x, &s.kv_a))?;
        let n_head = inputs.n_head;
        let rows = HeadRows { n_head, x_stride: spec.head_dim(), y_stride: attention.key_dim };
        d.extend(kernels::head_products(gpu, k_b, rows, &s.qkv, &s.queries)?);
        let buffers = LatentBuffers {
            q: &s.qkv,
            kv: &s.kv_a,
            norm: kv_a_norm,
            queries: &s.queries,
            keys,
            values,
            rope: &self.rope[i],
            batch: self.batch,
        };
        d.push(kernels::latent_inputs(gpu, inputs, &buffers)?);
        self.general_attention(d, i, attention, None)?;
        let rows = HeadRows { n_head, x_stride: attention.value_dim, y_stride: spec.value_dim };
        d.extend(kernels::head_products(gpu, v_b, rows, &s.att, &s.values)?);
        Ok(())
    }
}
