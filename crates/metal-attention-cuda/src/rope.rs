//! [`RopeTables`]: the RoPE cos/sin tables of a model in device memory.

use std::sync::Arc;

use metal_attention_model::{ModelSpec, Position, Rope, RopeRows, Rotation, Weights};

use crate::CudaError;
use crate::device::{CudaBuffer, CudaDevice};
use crate::slice::DevicePtr;

/// The cos/sin tables, one for each different rotation of the model. A row of a table is `[n_rot / 2, 2]`.
#[derive(Debug)]
pub(crate) struct RopeTables {
    tables: Vec<(Rope, Rotation, CudaBuffer)>,
    rows: RopeRows,
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
        let rows = RopeRows::new(spec, n_positions, n_tokens);
        let table = |rope: Rope| {
            let rotation = rope.rotation(weights.rope_factors(&rope, n_ctx));
            let mut table = rotation.table(n_positions);
            table.resize(rows.n_rows() * rope.n_rot, 0.0);
            Ok((rope, rotation, gpu.upload("the RoPE table", &table)?))
        };
        let tables = spec.ropes().into_iter().map(table).collect::<Result<_, CudaError>>()?;
        Ok(Self { tables, rows })
    }

    /// Bytes of the tables.
    pub(crate) fn bytes(spec: &ModelSpec, n_positions: usize, n_tokens: usize) -> u64 {
        let of_row: u64 = spec.ropes().iter().map(|rope| 4 * rope.n_rot as u64).sum();
        of_row.saturating_mul(RopeRows::new(spec, n_positions, n_tokens).n_rows() as u64)
    }

    /// The table of `rope`; null without RoPE.
    pub(crate) fn ptr(&self, rope: Option<&Rope>) -> DevicePtr<[f32; 2]> {
        let table = rope.and_then(|rope| self.tables.iter().find(|(known, ..)| known == rope));
        table.map_or(DevicePtr::NULL, |(_, _, table)| table.ptr())
    }

    /// The row for input `i` of a micro-batch, which has this position.
    pub(crate) fn row(&self, i: usize, position: Position) -> u32 {
        self.rows.row(i, position)
    }

    /// Writes the rows of those inputs of a micro-batch that have rows of their own, in the order of the stream. `positions`: of all
    /// inputs.
    pub(crate) fn write_rows(&self, positions: &[Position]) -> Result<(), CudaError> {
        let inputs = self.rows.inputs_to_write(positions);
        if inputs.is_empty() {
            return Ok(());
        }
        let first_row = self.rows.n_positions + inputs.start;
        for (rope, rotation, table) in &self.tables {
            let rows = positions[inputs.clone()].iter().flat_map(|position| rotation.cos_sin(*position));
            let rows: Vec<[f32; 2]> = rows.collect();
            table.write(4 * (first_row * rope.n_rot) as u64, bytemuck::cast_slice(&rows))?;
        }
        Ok(())
    }
}
