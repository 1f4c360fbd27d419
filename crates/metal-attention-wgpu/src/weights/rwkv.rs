//! The weights of RWKV's time mixes and channel mix on the GPU.

use metal_attention_model::{ChannelMixWeights, Linear, Rwkv6Weights, Rwkv7Spec, Rwkv7Weights};
use wgpu::Buffer;

use super::{Uploads, WgpuLinear, concat};
use crate::{WgpuDevice, WgpuError};

/// The weights of RWKV-6's time mix. `width` is the number of channels of all heads.
#[derive(Debug)]
pub(crate) struct WgpuRwkv6 {
    /// Factors of the first token shift, whose result the other factors depend on, `[width]`.
    pub(crate) lerp_x: Buffer,
    /// Factors of the second token shift for decay, key, value, receptance and gate, `[5, width]`.
    pub(crate) lerps: Buffer,
    /// First matrices of the low-rank products that add to `lerps`, stacked, `[5 * mix_rank, width]`.
    pub(crate) mix_down: WgpuLinear,
    /// Second matrices of the same, transposed, `[5, mix_rank, width]`.
    pub(crate) mix_up: Buffer,
    /// First matrix of the decay, `[decay_rank, width]`.
    pub(crate) decay_down: WgpuLinear,
    /// Second matrix of the decay, transposed, `[decay_rank, width]`.
    pub(crate) decay_up: Buffer,
    /// Bias of the decay, `[width]`.
    pub(crate) decay_bias: Buffer,
    /// Factor on the present token's own key and value, `[width]`.
    pub(crate) bonus: Option<Buffer>,
    /// Receptance, the query of RWKV.
    pub(crate) receptance: WgpuLinear,
    /// Key.
    pub(crate) key: WgpuLinear,
    /// Value.
    pub(crate) value: WgpuLinear,
    /// Gate.
    pub(crate) gate: WgpuLinear,
    /// Weight and bias of the norm of each head's result, `[width]` each.
    pub(crate) norm: Option<[Buffer; 2]>,
    /// The output projection.
    pub(crate) out: WgpuLinear,
}

/// The weights of RWKV-7's time mix.
#[derive(Debug)]
pub(crate) struct WgpuRwkv7 {
    /// Factors of the token shift, `[n_mix, width]`.
    pub(crate) lerps: Buffer,
    /// Receptance, the query of RWKV.
    pub(crate) receptance: WgpuLinear,
    /// Key.
    pub(crate) key: WgpuLinear,
    /// Value.
    pub(crate) value: WgpuLinear,
    /// First matrices of the low-rank products of decay, learning rate, share of the first layer's values, and gate, as
    /// far as the model has them, stacked.
    pub(crate) down: WgpuLinear,
    /// Second matrices of the same, transposed, one after the other, `[sum of ranks, width]`.
    pub(crate) up: Buffer,
    /// Parameters of each channel, `[8, width]`, in the order of [`Rwkv7MixBuffers`](crate::kernels::Rwkv7MixBuffers).
    pub(crate) channel_params: Buffer,
    /// The output projection.
    pub(crate) out: WgpuLinear,
}

/// The weights of a channel mix.
#[derive(Debug)]
pub(crate) struct WgpuChannelMix {
    /// Factors of the token shift, `[n_mix, n_embd]`.
    pub(crate) lerps: Buffer,
    /// The matrix before the activation.
    pub(crate) key: WgpuLinear,
    /// The matrix after the activation.
    pub(crate) value: WgpuLinear,
    /// The projection to the gate of the result, if there is one.
    pub(crate) receptance: Option<WgpuLinear>,
}

impl WgpuRwkv6 {
    pub(super) fn new(gpu: &WgpuDevice, w: &Rwkv6Weights, uploads: &mut Uploads) -> Result<Self, WgpuError> {
        let vector = |values: &[f32]| gpu.upload("weights of channels", values);
        let mut matrix = |linear: &Linear| concat(gpu, "a matrix of a time mix", &[linear], uploads);
        Ok(Self {
            lerp_x: vector(&w.lerp_x)?,
            lerps: vector(&w.lerps)?,
            mix_down: matrix(&w.mix_down)?,
            mix_up: vector(&transposed(&w.mix_up.iter().collect::<Vec<_>>()))?,
            decay_down: matrix(&w.decay.down)?,
            decay_up: vector(&transposed(&[&w.decay.up]))?,
            decay_bias: vector(&w.decay_bias)?,
            bonus: w.bonus.as_deref().map(vector).transpose()?,
            receptance: matrix(&w.receptance)?,
            key: matrix(&w.key)?,
            value: matrix(&w.value)?,
            gate: matrix(&w.gate)?,
            norm: match &w.norm {
                Some([weight, bias]) => Some([vector(weight)?, vector(bias)?]),
                None => None,
            },
            out: matrix(&w.out)?,
        })
    }
}

impl WgpuRwkv7 {
    pub(super) fn new(
        gpu: &WgpuDevice,
        spec: &Rwkv7Spec,
        w: &Rwkv7Weights,
        uploads: &mut Uploads,
    ) -> Result<Self, WgpuError> {
        let first_value = w.first_value.as_ref().map(|(low_rank, _)| low_rank);
        let low_rank: Vec<_> =
            [Some(&w.decay), Some(&w.rate), first_value, w.gate.as_ref()].into_iter().flatten().collect();
        let downs: Vec<_> = low_rank.iter().map(|low_rank| &low_rank.down).collect();
        let ups: Vec<_> = low_rank.iter().map(|low_rank| &low_rank.up).collect();
        let none = vec![0.0; spec.width];
        let first_bias = w.first_value.as_ref().map_or(&none, |(_, bias)| bias);
        let [norm_weight, norm_bias] = w.norm.as_ref().map_or([&none, &none], |[weight, bias]| [weight, bias]);
        let channel_params =
            [&w.decay_bias, &w.rate_bias, first_bias, &w.removed, &w.kept, &w.bonus, norm_weight, norm_bias];
        Ok(Self {
            lerps: gpu.upload("weights of channels", &w.lerps)?,
            receptance: concat(gpu, "the receptances", &[&w.receptance], uploads)?,
            key: concat(gpu, "the keys", &[&w.key], uploads)?,
            value: concat(gpu, "the values", &[&w.value], uploads)?,
            down: concat(gpu, "the low-rank matrices", &downs, uploads)?,
            up: gpu.upload("the low-rank matrices", &transposed(&ups))?,
            channel_params: gpu.upload("weights of channels", &channel_params.map(Vec::as_slice).concat())?,
            out: concat(gpu, "the time mix's output matrix", &[&w.out], uploads)?,
        })
    }
}

impl WgpuChannelMix {
    pub(super) fn new(gpu: &WgpuDevice, w: &ChannelMixWeights, uploads: &mut Uploads) -> Result<Self, WgpuError> {
        let mut matrix = |linear: &Linear| concat(gpu, "a matrix of a channel mix", &[linear], uploads);
        Ok(Self {
            key: matrix(&w.key)?,
            value: matrix(&w.value)?,
            receptance: w.receptance.as_ref().map(matrix).transpose()?,
            lerps: gpu.upload("weights of channels", &w.lerps)?,
        })
    }
}

/// The matrices transposed, `[n_in, n_out]` each, one after the other.
pub(super) fn transposed(matrices: &[&Linear]) -> Vec<f32> {
    let mut rows = Vec::new();
    for linear in matrices {
        let (n_in, values) = (linear.weight.row_len(), linear.weight.to_f32());
        rows.extend((0..n_in).flat_map(|i| values.iter().skip(i).step_by(n_in).copied()));
    }
    rows
}
