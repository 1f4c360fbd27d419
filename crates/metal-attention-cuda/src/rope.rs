//! [`RopeTables`]: the RoPE cos/sin tables of a model in device memory.

use std::sync::Arc;

use metal_attention_model::{ModelSpec, Position, Rope, Rotation, Weights};

use crate::CudaError;
use crate::device::{CudaBuffer, CudaDevice};
use crate::slice::DevicePtr;

/// The cos/sin tables, one for each different rotation of the model. A table has a row `[n_rot / 2, 2]` for each position of
/// text; in models with RoPE sections these are followed by a row for each input of the largest micro-batch, for positions whose
/// components differ.
#[derive(Debug)]
pub(crate) struct RopeTables {
    tables: Vec<(Rope, Rotation, CudaBuffer)>,
    n_positions: usize,
    n_extra: usize,
}

impl RopeTables {
    /// Computes and uploads the tables. `n_ctx`: the context length, on which some RoPE scalings depend; `n_positions`: the
    /// positions that a sequence can reach; `n_tokens`: the tokens of the largest micro-batch.
    pub(crate) fn new(
        gpu: &Arc<CudaDevice>,
        spec: &ModelSpec,
        weights: &Weights,
        [n_ctx, n_positions, n_tokens]: [usize; 3],
    ) -> Result<Self, CudaError> {
        let n_extra = n_extra(spec, n_tokens);
        let table = |rope: Rope| {
            let rotation = rope.rotation(weights.rope_factors(&rope, n_ctx));
            let mut table = rotation.table(n_positions);
            table.resize((n_positions + n_extra) * rope.n_rot, 0.0);
            Ok((rope, rotation, gpu.upload("the RoPE table", &table)?))
        };
        let tables = spec.ropes().into_iter().map(table).collect::<Result<_, CudaError>>()?;
        Ok(Self { tables, n_positions, n_extra })
    }

    /// Bytes of the tables.
    pub(crate) fn bytes(spec: &ModelSpec, n_positions: usize, n_tokens: usize) -> u64 {
        let of_row: u64 = spec.ropes().iter().map(|rope| 4 * rope.n_rot as u64).sum();
        of_row.saturating_mul((n_positions as u64).saturating_add(n_extra(spec, n_tokens) as u64))
    }

    /// The table of `rope`; null without RoPE.
    pub(crate) fn ptr(&self, rope: Option<&Rope>) -> DevicePtr<[f32; 2]> {
        let table = rope.and_then(|rope| self.tables.iter().find(|(known, ..)| known == rope));
        table.map_or(DevicePtr::NULL, |(_, _, table)| table.ptr())
    }

    /// The row for input `i` of a micro-batch, which has this position.
    pub(crate) fn row(&self, i: usize, position: Position) -> u32 {
        if self.has_own_row(position) { (self.n_positions + i) as u32 } else { position.0[0] }
    }

    /// Whether the input gets a row of its own, as the tables of text have none for its position.
    fn has_own_row(&self, position: Position) -> bool {
        self.n_extra > 0 && !position.is_of_text()
    }

    /// Writes the rows of those inputs of a micro-batch that get rows of their own, in the order of the stream. `positions`: of all
    /// inputs.
    pub(crate) fn write_rows(&self, positions: &[Position]) -> Result<(), CudaError> {
        let mut first = 0;
        for run in positions.chunk_by(|a, b| self.has_own_row(*a) == self.has_own_row(*b)) {
            if self.has_own_row(run[0]) {
                for (rope, rotation, table) in &self.tables {
                    let rows: Vec<[f32; 2]> = run.iter().flat_map(|position| rotation.cos_sin(*position)).collect();
                    table.write(4 * ((self.n_positions + first) * rope.n_rot) as u64, bytemuck::cast_slice(&rows))?;
                }
            }
            first += run.len();
        }
        Ok(())
    }
}

/// Rows for inputs of a micro-batch of `n_tokens`: only RoPE sections rotate by several components.
fn n_extra(spec: &ModelSpec, n_tokens: usize) -> usize {
    if spec.ropes().iter().any(|rope| rope.sections.is_some()) { n_tokens } else { 0 }
}
