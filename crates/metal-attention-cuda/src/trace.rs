//! [`TraceReader`]: copies rows of the residual stream before chosen layers from the device to a [`LayerTrace`].

use std::ops::Range;
use std::sync::Arc;

use metal_attention_model::{BatchToken, LayerTrace};

use crate::device::{CudaBuffer, Readback};
use crate::{CudaDevice, CudaError};

/// The most pinned memory for rows that have not been read, unless those of one layer are more.
const MAX_BYTES: u64 = 64 << 20;

/// Copies rows to pinned memory in the order of the stream, and waits for them when the memory is full or the step has been
/// launched: once for the few layers that a drafter reads.
pub(crate) struct TraceReader<'t> {
    trace: LayerTrace<'t>,
    readback: Readback,
    /// The bytes of the rows in the residual stream, `[n_tokens, n_embd]`.
    ranges: Vec<Range<u64>>,
    /// Bytes of the rows before one layer.
    bytes_of_layer: u64,
    /// The layers whose rows are being copied.
    pending: Vec<usize>,
}

impl<'t> TraceReader<'t> {
    /// A reader for a step with `tokens`. `None` if there is nothing to copy. `kept`: the memory of an earlier step, which is used
    /// again where it is large enough.
    pub(crate) fn new(
        gpu: &Arc<CudaDevice>,
        kept: &mut Option<Readback>,
        trace: LayerTrace<'t>,
        tokens: &[BatchToken],
        n_embd: usize,
    ) -> Result<Option<Self>, CudaError> {
        let bytes = |row: usize| 4 * (row * n_embd) as u64;
        let ranges = trace.tokens.rows(tokens).into_iter().map(|rows| bytes(rows.start)..bytes(rows.end));
        let ranges: Vec<_> = ranges.collect();
        let bytes_of_layer: u64 = ranges.iter().map(|range| range.end - range.start).sum();
        if bytes_of_layer == 0 || trace.before.is_empty() {
            return Ok(None);
        }
        let n_layers = (MAX_BYTES / bytes_of_layer).clamp(1, trace.before.len() as u64);
        let bytes = n_layers * bytes_of_layer;
        let readback = match kept.take() {
            Some(readback) if readback.bytes() >= bytes => readback,
            Some(_) | None => Readback::new(gpu, bytes)?,
        };
        Ok(Some(Self { trace, readback, ranges, bytes_of_layer, pending: Vec::new() }))
    }

    /// Copies the rows before `layer` if they are traced. `x`: the residual stream.
    pub(crate) fn before_layer(&mut self, layer: usize, x: &CudaBuffer) -> Result<(), CudaError> {
        if !self.trace.before.contains(&layer) {
            return Ok(());
        }
        let mut at = self.pending.len() as u64 * self.bytes_of_layer;
        if at + self.bytes_of_layer > self.readback.bytes() {
            self.pass_on()?;
            at = 0;
        }
        for range in &self.ranges {
            let bytes = range.end - range.start;
            self.readback.copy_part(x, range.start, bytes, at)?;
            at += bytes;
        }
        self.pending.push(layer);
        Ok(())
    }

    /// Passes on the rows that are left. Returns the memory.
    pub(crate) fn finish(mut self) -> Result<Readback, CudaError> {
        self.pass_on()?;
        Ok(self.readback)
    }

    /// Waits for the copies, and passes the rows on.
    fn pass_on(&mut self) -> Result<(), CudaError> {
        if self.pending.is_empty() {
            return Ok(());
        }
        self.readback.end_copies()?;
        let rows = self.readback.read(self.pending.len() as u64 * self.bytes_of_layer)?;
        let rows: Vec<f32> = bytemuck::pod_collect_to_vec(rows);
        for (layer, rows) in self.pending.drain(..).zip(rows.chunks_exact(self.bytes_of_layer as usize / 4)) {
            (self.trace.rows)(layer, rows);
        }
        Ok(())
    }
}
