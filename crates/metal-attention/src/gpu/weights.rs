//! A model's weights in the GPU's memory.

use metal_attention_kernels::wgpu::Buffer;
use metal_attention_kernels::{Arena, GpuDevice, GpuError, GpuMatrix};
use metal_attention_model::{LayerWeights, Linear, Weights};

/// `y = W x + b`, of one or several matrices of the file that share their input.
#[derive(Debug)]
pub(super) struct GpuLinear {
    pub(super) weight: GpuMatrix,
    pub(super) bias: Option<Buffer>,
}

/// One layer's weights.
#[derive(Debug)]
pub(super) struct GpuLayer {
    pub(super) mixer_norm: Buffer,
    /// Queries, keys and values, one after the other.
    pub(super) qkv: GpuLinear,
    /// RMSNorm weights of query and key heads, `[2, head_dim]`.
    pub(super) qk_norm: Option<Buffer>,
    pub(super) out: GpuLinear,
    pub(super) feed_forward_norm: Buffer,
    /// Rows of gate and up by turns.
    pub(super) gate_up: GpuLinear,
    pub(super) down: GpuLinear,
}

/// The whole model's weights.
#[derive(Debug)]
pub(super) struct GpuWeights {
    pub(super) token_embd: GpuMatrix,
    pub(super) layers: Vec<GpuLayer>,
    pub(super) output_norm: Buffer,
    /// The output head where it is not the embedding table.
    output: Option<GpuMatrix>,
}

impl GpuWeights {
    /// Uploads every weight. A matrix is one or more buffers; the file's pages are released as they are read.
    /// Layers whose matrices one binding reaches, at most `layers_in_a_buffer`, share a buffer.
    pub(super) fn new(gpu: &GpuDevice, weights: &Weights, layers_in_a_buffer: usize) -> Result<Self, GpuError> {
        let tied = std::ptr::eq(weights.output.bytes(), weights.token_embd.bytes());
        let output = if tied {
            None
        } else {
            Some(GpuMatrix::concat(gpu, "the output head", &[&weights.output], &mut Arena::default())?)
        };
        let token_embd = GpuMatrix::concat(gpu, "the embedding table", &[&weights.token_embd], &mut Arena::default())?;
        // As few buffers for the matrices of all layers as can be: one kernel runs through those of a buffer.
        let bytes: Vec<_> = weights.layers.iter().map(layer_bytes).collect();
        let mut layers = Vec::new();
        for (n, mut arena) in Arena::in_runs(gpu, "the layers' weights", &bytes, layers_in_a_buffer)? {
            for layer in &weights.layers[layers.len()..][..n] {
                layers.push(GpuLayer::new(gpu, layer, &mut arena)?);
            }
        }
        Ok(Self { token_embd, layers, output_norm: gpu.upload("the output norm", &weights.output_norm)?, output })
    }

    /// The output head.
    pub(super) fn output(&self) -> &GpuMatrix {
        self.output.as_ref().unwrap_or(&self.token_embd)
    }
}

impl GpuLayer {
    fn new(gpu: &GpuDevice, w: &LayerWeights, arena: &mut Arena) -> Result<Self, GpuError> {
        let (a, f) = (&w.attention, &w.feed_forward);
        let qk_norm = match (&a.q_norm, &a.k_norm) {
            (Some(q), Some(k)) => Some(gpu.upload("the norms of Q and K", &[q.as_slice(), k].concat())?),
            _ => None,
        };
        Ok(Self {
            mixer_norm: gpu.upload("a norm", &w.mixer_norm)?,
            qkv: concat(gpu, "Q, K and V", &[&a.q, &a.k, &a.v], arena)?,
            qk_norm,
            out: concat(gpu, "the attention's output matrix", &[&a.out], arena)?,
            feed_forward_norm: gpu.upload("a norm", &w.feed_forward_norm)?,
            gate_up: interleave(gpu, "gate and up", &f.gate, &f.up, arena)?,
            down: concat(gpu, "the down projection", &[&f.down], arena)?,
        })
    }
}

/// Bytes of a layer's matrices in an [`Arena`].
fn layer_bytes(w: &LayerWeights) -> u64 {
    let (a, f) = (&w.attention, &w.feed_forward);
    let bytes = |l: &Linear| GpuMatrix::bytes_of(l.weight.ty(), l.weight.row_len(), l.weight.n_rows());
    let together = |linears: &[&Linear]| {
        let runs = linears.chunk_by(|x, y| x.weight.ty() == y.weight.ty());
        runs.map(|run| Arena::padded(run.iter().map(|l| bytes(l)).fold(0, u64::saturating_add))).sum::<u64>()
    };
    together(&[&a.q, &a.k, &a.v]) + together(&[&a.out]) + together(&[&f.gate, &f.up]) + together(&[&f.down])
}

/// The matrices one below the other.
fn concat(gpu: &GpuDevice, what: &str, linears: &[&Linear], arena: &mut Arena) -> Result<GpuLinear, GpuError> {
    let weights: Vec<_> = linears.iter().map(|l| &l.weight).collect();
    let bias =
        linears.iter().any(|l| l.bias.is_some()).then(|| linears.iter().flat_map(|l| bias(l)).collect::<Vec<_>>());
    Ok(GpuLinear {
        weight: GpuMatrix::concat(gpu, what, &weights, arena)?,
        bias: bias.map(|b| gpu.upload("a bias", &b)).transpose()?,
    })
}

/// The rows of two matrices by turns.
fn interleave(
    gpu: &GpuDevice,
    what: &str,
    even: &Linear,
    odd: &Linear,
    arena: &mut Arena,
) -> Result<GpuLinear, GpuError> {
    let has_bias = even.bias.is_some() || odd.bias.is_some();
    let bias = has_bias.then(|| bias(even).into_iter().zip(bias(odd)).flat_map(|(e, o)| [e, o]).collect::<Vec<_>>());
    Ok(GpuLinear {
        weight: GpuMatrix::interleave(gpu, what, &even.weight, &odd.weight, arena)?,
        bias: bias.map(|b| gpu.upload("a bias", &b)).transpose()?,
    })
}

/// Norms and biases of all layers, one layer after the other, as `decode_layers` reads them; and which of Q, K and V,
/// attention's output, gate and up, and down have a bias in any layer.
pub(super) fn layer_params(weights: &Weights) -> (Vec<f32>, [bool; 4]) {
    let mut biases = [false; 4];
    for w in &weights.layers {
        let (a, f) = (&w.attention, &w.feed_forward);
        let groups: [&[&Linear]; 4] = [&[&a.q, &a.k, &a.v], &[&a.out], &[&f.gate, &f.up], &[&f.down]];
        for (has, group) in biases.iter_mut().zip(groups) {
            *has |= group.iter().any(|l| l.bias.is_some());
        }
    }
    let mut params = Vec::new();
    for w in &weights.layers {
        let (a, f) = (&w.attention, &w.feed_forward);
        params.extend([w.mixer_norm.as_slice(), &w.feed_forward_norm].concat());
        if biases[0] {
            params.extend([&a.q, &a.k, &a.v].into_iter().flat_map(bias));
        }
        if biases[1] {
            params.extend(bias(&a.out));
        }
        if biases[2] {
            params.extend(bias(&f.gate).into_iter().zip(bias(&f.up)).flat_map(|(gate, up)| [gate, up]));
        }
        if biases[3] {
            params.extend(bias(&f.down));
        }
        params.extend([&a.q_norm, &a.k_norm].into_iter().flatten().flatten());
    }
    (params, biases)
}

/// The bias, zeros where there is none.
fn bias(linear: &Linear) -> Vec<f32> {
    linear.bias.clone().unwrap_or_else(|| vec![0.0; linear.weight.n_rows()])
}
