//! A model's weights in the GPU's memory.

use metal_attention_gguf::Tensor;
use metal_attention_kernels::wgpu::Buffer;
use metal_attention_kernels::{Arena, GpuDevice, GpuError, GpuMatrix};
use metal_attention_model::{Linear, Weights};

use super::parts::{PlainWeights, plain_weights};

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
        let output = match own_head(weights) {
            None => None,
            Some(head) => Some(GpuMatrix::concat(gpu, "the output head", &[head], &mut Arena::default())?),
        };
        let table = &weights.token_embd.weight;
        let token_embd = GpuMatrix::concat(gpu, "the embedding table", &[table], &mut Arena::default())?;
        let of_layers = plain_weights(weights);
        // As few buffers for the matrices of all layers as can be: one kernel runs through those of a buffer.
        let bytes: Vec<_> = of_layers.iter().map(layer_bytes).collect();
        let mut layers = Vec::new();
        for (n, mut arena) in Arena::in_runs(gpu, "the layers' weights", &bytes, layers_in_a_buffer)? {
            for layer in &of_layers[layers.len()..][..n] {
                layers.push(GpuLayer::new(gpu, layer, &mut arena)?);
            }
        }
        let output_norm = weights.output_norm.as_ref().map_or(&[][..], |norm| &norm.weight);
        Ok(Self { token_embd, layers, output_norm: gpu.upload("the output norm", output_norm)?, output })
    }

    /// The output head.
    pub(super) fn output(&self) -> &GpuMatrix {
        self.output.as_ref().unwrap_or(&self.token_embd)
    }
}

impl GpuLayer {
    fn new(gpu: &GpuDevice, w: &PlainWeights<'_>, arena: &mut Arena) -> Result<Self, GpuError> {
        let a = w.attention;
        let qk_norm = match (&a.q_norm, &a.k_norm) {
            (Some(q), Some(k)) => Some(gpu.upload("the norms of Q and K", &[&*q.weight, &k.weight].concat())?),
            _ => None,
        };
        Ok(Self {
            mixer_norm: gpu.upload("a norm", w.mixer_norm)?,
            qkv: concat(gpu, "Q, K and V", &[&a.q, w.k, w.v], arena)?,
            qk_norm,
            out: concat(gpu, "the attention's output matrix", &[&a.out], arena)?,
            feed_forward_norm: gpu.upload("a norm", w.feed_forward_norm)?,
            gate_up: interleave(gpu, "gate and up", w.gate, w.up, arena)?,
            down: concat(gpu, "the down projection", &[w.down], arena)?,
        })
    }
}

/// The output head where it is not the embedding table.
pub(super) fn own_head(weights: &Weights) -> Option<&Tensor> {
    let head = weights.output.as_ref().map(|linear| &linear.weight)?;
    (!std::ptr::eq(head.bytes(), weights.token_embd.weight.bytes())).then_some(head)
}

/// Bytes of a layer's matrices in an [`Arena`].
fn layer_bytes(w: &PlainWeights<'_>) -> u64 {
    let a = w.attention;
    let bytes = |l: &Linear| GpuMatrix::bytes_of(l.weight.ty(), l.weight.row_len(), l.weight.n_rows());
    let together = |linears: &[&Linear]| {
        let runs = linears.chunk_by(|x, y| x.weight.ty() == y.weight.ty());
        runs.map(|run| Arena::padded(run.iter().map(|l| bytes(l)).fold(0, u64::saturating_add))).sum::<u64>()
    };
    together(&[&a.q, w.k, w.v]) + together(&[&a.out]) + together(&[w.gate, w.up]) + together(&[w.down])
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
    let layers = plain_weights(weights);
    for w in &layers {
        let a = w.attention;
        let groups: [&[&Linear]; 4] = [&[&a.q, w.k, w.v], &[&a.out], &[w.gate, w.up], &[w.down]];
        for (has, group) in biases.iter_mut().zip(groups) {
            *has |= group.iter().any(|l| l.bias.is_some());
        }
    }
    let mut params = Vec::new();
    for w in &layers {
        let a = w.attention;
        params.extend([w.mixer_norm, w.feed_forward_norm].concat());
        if biases[0] {
            params.extend([&a.q, w.k, w.v].into_iter().flat_map(bias));
        }
        if biases[1] {
            params.extend(bias(&a.out));
        }
        if biases[2] {
            params.extend(bias(w.gate).into_iter().zip(bias(w.up)).flat_map(|(gate, up)| [gate, up]));
        }
        if biases[3] {
            params.extend(bias(w.down));
        }
        params.extend([&a.q_norm, &a.k_norm].into_iter().flatten().flat_map(|norm| &norm.weight));
    }
    (params, biases)
}

/// The bias, zeros where there is none.
fn bias(linear: &Linear) -> Vec<f32> {
    linear.bias.clone().unwrap_or_else(|| vec![0.0; linear.weight.n_rows()])
}
