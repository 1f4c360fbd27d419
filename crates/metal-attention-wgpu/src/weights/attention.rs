//! The weights of softmax attention on the GPU.

use metal_attention_model::{AttentionSpec, AttentionWeights, Linear, Positions};
use wgpu::Buffer;

use super::{Uploads, WgpuLinear, concat};
use crate::{WgpuDevice, WgpuError};

/// The weights of softmax attention.
#[derive(Debug)]
pub(crate) struct WgpuAttention {
    /// The projections to gates of heads (if any), queries, keys and values (if the layer has its own), stacked.
    pub(crate) qkv: WgpuLinear,
    /// Weights of the norms of queries and of keys, then their biases, as far as there are any.
    pub(crate) qk_norm: Option<Buffer>,
    /// Score of the sink and slope of `ALiBi` for each head, `[n_head, 2]`.
    pub(crate) sinks_and_slopes: Option<Buffer>,
    /// The output projection.
    pub(crate) out: WgpuLinear,
}

impl WgpuAttention {
    /// Uploads the weights. `parallel`: a matrix of the same input, the input projection of a parallel Mamba-2, that is
    /// stacked below queries, keys and values.
    pub(super) fn new(
        gpu: &WgpuDevice,
        spec: &AttentionSpec,
        a: &AttentionWeights,
        parallel: Option<&Linear>,
        uploads: &mut Uploads,
    ) -> Result<Self, WgpuError> {
        let norms: Vec<_> = [&a.q_norm, &a.k_norm].into_iter().flatten().collect();
        let biases = norms.iter().flat_map(|norm| norm.bias.iter().flatten());
        let qk_norm: Vec<f32> = norms.iter().flat_map(|norm| &norm.weight).chain(biases).copied().collect();
        let slopes = match spec.positions {
            Positions::Alibi { max_bias } => Some(metal_attention_model::alibi_slopes(spec.n_head, max_bias)),
            Positions::None | Positions::Rope(_) => None,
        };
        let of_head = |h: usize| [&a.sinks, &slopes].map(|all| all.as_ref().map_or(0.0, |all| all[h]));
        let sinks_and_slopes: Vec<_> = (0..spec.n_head).flat_map(of_head).collect();
        let has_some = a.sinks.is_some() || slopes.is_some();
        let of_queries = if spec.output_gate { gates_and_queries(spec, &a.q) } else { vec![a.q.clone()] };
        let qkv: Vec<_> = of_queries.iter().chain(&a.k).chain(&a.v).chain(parallel).collect();
        Ok(Self {
            qkv: concat(gpu, "Q, K and V", &qkv, uploads)?,
            qk_norm: (!norms.is_empty()).then(|| gpu.upload("the norms of Q and K", &qk_norm)).transpose()?,
            sinks_and_slopes: has_some.then(|| gpu.upload("sinks and slopes", &sinks_and_slopes)).transpose()?,
            out: concat(gpu, "the attention's output matrix", &[&a.out], uploads)?,
        })
    }
}

/// The gates of all heads, then the queries of all heads, from a matrix in which each head's gate follows its query.
fn gates_and_queries(a: &AttentionSpec, q: &Linear) -> Vec<Linear> {
    let rows = |first: usize| Linear {
        weight: q.weight.rows(first..first + a.head_dim),
        bias: q.bias.as_ref().map(|bias| bias[first..first + a.head_dim].to_vec()),
    };
    let heads = |start: usize| (0..a.n_head).map(move |head| rows(2 * head * a.head_dim + start));
    heads(a.head_dim).chain(heads(0)).collect()
}
