//! Scratch memory of the forward pass: made once, used by every step.

use metal_attention_kernels::kernels::{
    AttentionShape, MAX_TOP_K, MatmulScratch, argmax_scratch_bytes, partial_bytes, top_k_scratch_bytes,
};
use metal_attention_kernels::wgpu::Buffer;
use metal_attention_kernels::{GpuDevice, GpuError};
use metal_attention_model::ModelSpec;

use super::parts::PlainLayer;

/// Widest rows of a model's activations.
#[derive(Debug, Clone, Copy)]
pub(super) struct Widths {
    pub(super) n_embd: usize,
    /// Queries, keys and values.
    pub(super) qkv: usize,
    /// Attention's result.
    pub(super) att: usize,
    pub(super) n_ff: usize,
    pub(super) n_vocab: usize,
}

impl Widths {
    pub(super) fn new(spec: &ModelSpec, layers: &[PlainLayer]) -> Self {
        let mut widths = Self { n_embd: spec.n_embd, qkv: 0, att: 0, n_ff: 0, n_vocab: spec.n_vocab };
        for layer in layers {
            widths.qkv = widths.qkv.max((layer.n_head + 2 * layer.n_head_kv) * layer.head_dim);
            widths.att = widths.att.max(layer.n_head * layer.head_dim);
            widths.n_ff = widths.n_ff.max(layer.n_ff);
        }
        widths
    }

    /// The widest input of a matrix product.
    pub(super) fn input(&self) -> usize {
        self.n_embd.max(self.att).max(self.n_ff)
    }

    /// The widest row of any buffer but the logits'.
    pub(super) fn widest(&self) -> usize {
        self.qkv.max(2 * self.n_ff).max(self.input())
    }
}

/// Activations of up to `n_tokens` tokens.
#[derive(Debug)]
pub(super) struct Activations {
    /// Residual stream, `[n_tokens, n_embd]`.
    pub(super) x: Buffer,
    /// Normalised input of a mixer, feed-forward or the head, `[n_tokens, n_embd]`.
    pub(super) h: Buffer,
    /// `[n_tokens, (n_head + 2 n_head_kv) * head_dim]`
    pub(super) qkv: Buffer,
    /// Attention's result, `[n_tokens, n_head * head_dim]`.
    pub(super) att: Buffer,
    /// `[n_tokens, 2 n_ff]`, gate and up of an element side by side.
    pub(super) gate_up: Buffer,
    /// `[n_tokens, n_ff]`
    pub(super) gated: Buffer,
    /// `[n_wanted, n_vocab]`
    pub(super) logits: Buffer,
    /// Stages of argmax.
    pub(super) argmax: Buffer,
    /// Stages of the search for the largest logits.
    pub(super) top_k: Buffer,
    /// Parts of decode attention over a long context.
    pub(super) partial: Buffer,
    /// Inputs of matrix units.
    pub(super) matmul: MatmulScratch,
    /// Tokens there is room for.
    pub(super) n_tokens: usize,
    /// Rows of logits there is room for.
    pub(super) n_wanted: usize,
}

/// Bytes of logits that are held at once, at most: larger batches are cut.
const LOGITS_BYTES: usize = 64 << 20;

impl Activations {
    /// Tokens and rows of logits that one run through the layers can have on this GPU, `n_ubatch` at most.
    pub(super) fn capacity(max_binding: u64, widths: &Widths, n_ubatch: usize) -> (usize, usize) {
        let binding = max_binding as usize;
        // An axis of a grid has 65,535 workgroups at most.
        let n_tokens = n_ubatch.min(65_535).min(binding / (4 * widths.widest())).max(1);
        let n_wanted = n_tokens.min(LOGITS_BYTES.min(binding) / (4 * widths.n_vocab)).max(1);
        (n_tokens, n_wanted)
    }

    /// Bytes of all buffers.
    pub(super) fn bytes(widths: &Widths, (n_tokens, n_wanted): (usize, usize)) -> u64 {
        let row = 2 * widths.n_embd + widths.qkv + widths.att + 3 * widths.n_ff;
        4 * (n_tokens as u64 * row as u64 + n_wanted as u64 * widths.n_vocab as u64)
    }

    /// `n_decoded`: sequences that are decoded side by side at most.
    pub(super) fn new(
        gpu: &GpuDevice,
        widths: &Widths,
        shapes: &[AttentionShape],
        (n_tokens, n_wanted): (usize, usize),
        n_decoded: usize,
    ) -> Result<Self, GpuError> {
        let rows = |width: usize| gpu.buffer("activations", 4 * n_tokens as u64 * width as u64);
        Ok(Self {
            x: rows(widths.n_embd)?,
            h: rows(widths.n_embd)?,
            qkv: rows(widths.qkv)?,
            att: rows(widths.att)?,
            gate_up: rows(2 * widths.n_ff)?,
            gated: rows(widths.n_ff)?,
            logits: gpu.buffer("the logits", 4 * n_wanted as u64 * widths.n_vocab as u64)?,
            argmax: gpu.buffer("the stages of argmax", argmax_scratch_bytes(widths.n_vocab, n_wanted))?,
            top_k: gpu.buffer("the stages of top-k", top_k_scratch_bytes(widths.n_vocab, MAX_TOP_K, n_wanted))?,
            partial: gpu
                .buffer("parts of attention", shapes.iter().map(|s| partial_bytes(s, n_decoded)).max().unwrap_or(0))?,
            matmul: MatmulScratch::new(gpu, n_tokens, widths.input())?,
            n_tokens,
            n_wanted,
        })
    }
}
