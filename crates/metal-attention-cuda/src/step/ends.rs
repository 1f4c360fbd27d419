//! What comes before the first layer and after the last: embeddings, the last norm, logits, the largest of them.

use std::sync::Arc;

use metal_attention_model::ModelSpec;

use super::product::{MATVEC_TOKENS, Product};
use super::{StepSize, Steps, Wanted};
use crate::CudaError;
use crate::activations::ARGMAX_BLOCKS;
use crate::args::{ArgmaxArgs, EmbeddingArgs, LogitsArgs, NormArgs, Output};
use crate::device::CudaBuffer;
use crate::launch::Grid;

impl Steps {
    pub(super) fn embedding(&mut self, spec: &ModelSpec, n_tokens: usize) -> Result<(), CudaError> {
        let args = EmbeddingArgs {
            table: self.weights.token_embd.args(0),
            tokens: self.s.tokens.ptr(),
            x: self.s.x.ptr(),
            scale: spec.embedding.scale,
            n_embd: spec.n_embd as u32,
        };
        let grid = Grid { blocks: [spec.n_embd.div_ceil(256), n_tokens, 1], threads: 256, shared: 0 };
        self.launch("embedding", "", grid, &args)
    }

    /// What comes of the wanted tokens.
    pub(super) fn results(&mut self, spec: &ModelSpec, size: StepSize) -> Result<(), CudaError> {
        let (n, n_embd) = (size.n_wanted, spec.n_embd);
        let (weight, eps) = self.weights.output_norm.as_ref().map_or((0, 0.0), |norm| (norm.weight.ptr(), norm.eps));
        let norm = NormArgs {
            x: self.s.x.ptr(),
            weight,
            packed: 0,
            out: 0,
            rows: self.s.wanted.ptr(),
            n_in: n_embd as u32,
            n_token_tiles: n.div_ceil(8) as u32,
            eps,
            unused: 0,
        };
        let advance = match size.wanted {
            Wanted::Hidden => return self.norm(NormArgs { out: self.s.hidden.ptr(), ..norm }, n),
            Wanted::Logits => None,
            Wanted::Id { advance } => Some(advance),
        };
        let Some((head, bias)) =
            self.weights.output.as_ref().map(|(head, bias)| (Arc::clone(head), bias.as_ref().map(CudaBuffer::ptr)))
        else {
            return Ok(());
        };
        let product = Product {
            what: "logits",
            parts: vec![(&*head, 0)],
            n_out: spec.n_vocab,
            output: Output::Store,
            activation: 0,
            scale: 1.0,
            bias: bias.unwrap_or(0),
            y: self.s.logits.ptr(),
            packed: 0,
        };
        if self.is_exact(n) {
            for first in (0..n).step_by(MATVEC_TOKENS) {
                let rows = self.s.wanted.ptr() + 4 * first as u64;
                let y = product.y + (4 * first * spec.n_vocab) as u64;
                let n = (n - first).min(MATVEC_TOKENS);
                self.matvec(&product, norm.x, norm.weight, eps, rows, y, n_embd, n)?;
            }
        } else {
            let packed = self.s.packed_x.ptr();
            self.norm(NormArgs { packed, ..norm }, n)?;
            self.matmul(&product, packed, n)?;
        }
        let (scale, soft_cap) = spec.output.head.map_or((1.0, None), |head| (head.scale, head.soft_cap));
        if scale != 1.0 || soft_cap.is_some() {
            let args = LogitsArgs {
                logits: self.s.logits.ptr(),
                n: (n * spec.n_vocab) as u32,
                scale,
                soft_cap: soft_cap.unwrap_or(0.0),
                unused: 0,
            };
            self.launch("scale_logits", "", Grid { blocks: [256, 1, 1], threads: 256, shared: 0 }, &args)?;
        }
        let Some(advance) = advance else { return Ok(()) };
        let args = ArgmaxArgs {
            logits: self.s.logits.ptr(),
            n_vocab: spec.n_vocab as u32,
            advance: u32::from(advance),
            best: self.s.best.ptr(),
            tickets: self.s.argmax_tickets.ptr(),
            ids: self.s.ids.ptr(),
            tokens: self.s.tokens.ptr(),
        };
        self.launch("argmax", "", Grid { blocks: [ARGMAX_BLOCKS, n, 1], threads: 256, shared: 0 }, &args)
    }
}
