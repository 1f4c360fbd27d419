//! Spans of embedding rows on the GPU: what a step with spans writes there beside its tokens and pages.
//!
//! ```text
//! rows        to the residual stream itself, whose given rows the embedding kernel leaves as they are
//! deepstack   a buffer for each of the first layers, which a dispatch after the layer adds to the residual stream
//! positions   a row of the RoPE tables for each input whose components differ
//! last seen   of each layer a list of the last input that each input attends to, which prefill attention reads
//! ```

use metal_attention_model::{ModelSpec, Position, Step};
use wgpu::Buffer;

use crate::activations::Activations;
use crate::arena::Slice;
use crate::batch::InputPlace;
use crate::kernels;
use crate::rope_tables::RopeTables;
use crate::{Dispatch, WgpuDevice, WgpuError};

/// Alignment of a layer's list, in words: what every device accepts as a binding's offset.
const LIST_ALIGNMENT: usize = 64;

/// The buffers of spans.
#[derive(Debug)]
pub(super) struct Spans {
    /// The RoPE tables.
    rope: RopeTables,
    /// The lists of [`LastSeen`](metal_attention_model::LastSeen) by layer, `[n_layer, list_words]`; zero unless `looks_ahead`.
    last_seen: Buffer,
    /// Words of a layer's list.
    list_words: usize,
    /// Whether `last_seen` has the lists of a step in which inputs attend to later ones.
    looks_ahead: bool,
    /// Rows that are added after each of the first layers, F32 `[n_tokens, n_embd]`. Made when first needed.
    deepstack: Vec<Buffer>,
    /// Adds them, in the same order.
    add: Vec<Dispatch>,
}

impl Spans {
    /// Makes the buffers for steps of at most `n_tokens`, without those of deepstack rows.
    pub(super) fn new(
        gpu: &WgpuDevice,
        spec: &ModelSpec,
        rope: RopeTables,
        n_tokens: usize,
    ) -> Result<Self, WgpuError> {
        let list_words = list_words(n_tokens);
        let last_seen = gpu.buffer("the last inputs that inputs attend to", last_seen_bytes(spec, n_tokens))?;
        Ok(Self { rope, last_seen, list_words, looks_ahead: false, deepstack: Vec::new(), add: Vec::new() })
    }

    /// The list of layer `i`, `[n_tokens]`: the index in its sequence of the last input that each input attends to, or 0.
    pub(super) fn last_seen(&self, i: usize) -> Slice {
        let bytes = 4 * self.list_words as u64;
        Slice::from(self.last_seen.clone()).part(i as u64 * bytes, bytes)
    }

    /// Bytes of the buffers that were made after loading.
    pub(super) fn bytes_of_deepstack(&self) -> u64 {
        self.deepstack.iter().map(Buffer::size).sum()
    }

    /// The dispatches that add the rows of the first `n` layers, which [`write`](Self::write) has written.
    pub(super) fn deepstack(&self, n: usize) -> &[Dispatch] {
        &self.add[..n]
    }

    /// What the kernels read of input `i` of `step`, beside its token.
    pub(super) fn place(&self, step: &Step, i: usize) -> InputPlace {
        let token = &step.tokens[i];
        let position = step.position(token);
        let has_row =
            step.context.is_some() || step.inputs.as_ref().is_some_and(|inputs| inputs.of_token(token).is_some());
        InputPlace { rope_row: self.rope.row(i, position), position: position.0[0], has_row }
    }

    /// Writes the spans of `step` for the next submission, which evaluates it. `scratch` has the residual stream.
    pub(super) fn write(
        &mut self,
        gpu: &WgpuDevice,
        spec: &ModelSpec,
        scratch: &Activations,
        step: &Step,
    ) -> Result<(), WgpuError> {
        self.write_last_seen(gpu, spec, step);
        if let Some(rows) = &step.context {
            gpu.write(&scratch.x, rows);
        }
        if step.inputs.is_none() {
            return Ok(());
        }
        let n_embd = spec.n_embd;
        let spans: Vec<_> = step.spans().collect();
        for (first, span) in &spans {
            gpu.write_at(&scratch.x, 4 * (first * n_embd) as u64, bytemuck::cast_slice(&span.rows));
        }
        let positions: Vec<Position> = step.tokens.iter().map(|token| step.position(token)).collect();
        self.rope.write_rows(gpu, &positions);
        for layer in 0..n_deepstack(step) {
            if layer == self.deepstack.len() {
                let rows = gpu.buffer("rows that are added after a layer", 4 * (scratch.n_tokens * n_embd) as u64)?;
                self.add.push(kernels::residual_add(gpu, n_embd, &scratch.x, &rows)?);
                self.deepstack.push(rows);
            }
            let mut rows = vec![0.0_f32; step.tokens.len() * n_embd];
            for (first, span) in &spans {
                if let Some(added) = span.deepstack.get(layer) {
                    rows[first * n_embd..][..added.len()].copy_from_slice(added);
                }
            }
            gpu.write(&self.deepstack[layer], &rows);
        }
        Ok(())
    }

    /// Writes the lists of the last inputs that inputs attend to, unless neither this step nor the one before has blocks or
    /// bidirectional spans.
    fn write_last_seen(&mut self, gpu: &WgpuDevice, spec: &ModelSpec, step: &Step) {
        let last_seen = (step.inputs.is_some() || step.has_blocks(spec)).then(|| step.last_seen(spec));
        let last_seen =
            last_seen.filter(|last_seen| (0..spec.n_layer()).any(|i| last_seen.looks_ahead(i, &step.tokens)));
        let looks_ahead = last_seen.is_some();
        if !(looks_ahead || self.looks_ahead) {
            return;
        }
        let mut words = vec![0; spec.n_layer() * self.list_words];
        if let Some(last_seen) = last_seen {
            for (layer, words) in words.chunks_exact_mut(self.list_words).enumerate() {
                let list = &last_seen.lists[last_seen.list_of(layer)];
                words[..list.len()].copy_from_slice(list);
            }
        }
        gpu.write(&self.last_seen, &words);
        self.looks_ahead = looks_ahead;
    }
}

/// Number of the first layers of `step` after which deepstack rows are added.
pub(super) fn n_deepstack(step: &Step) -> usize {
    let spans = step.inputs.iter().flat_map(|inputs| &inputs.spans);
    spans.map(|span| span.deepstack.len()).max().unwrap_or(0)
}

/// Words of a layer's list.
fn list_words(n_tokens: usize) -> usize {
    n_tokens.next_multiple_of(LIST_ALIGNMENT)
}

/// Bytes of the lists of all layers.
pub(super) fn last_seen_bytes(spec: &ModelSpec, n_tokens: usize) -> u64 {
    4 * spec.n_layer() as u64 * list_words(n_tokens) as u64
}
