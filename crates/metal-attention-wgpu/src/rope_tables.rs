//! The RoPE cos/sin tables of a model on the GPU.
//!
//! A table has a row for each position of text. In models whose rotations have sections, rows for the inputs of a step
//! follow, which a step with positions of different components fills ([`RopeTables::write_rows`]); all tables have them then,
//! as an input has the same row in each.

use metal_attention_model::{Capacity, ModelSpec, Position, Rope, RopeRows, Rotation, Weights};
use wgpu::Buffer;

use crate::parts::UNROTATED_ELEMENTS;
use crate::{WgpuDevice, WgpuError};

/// The tables of the different rotations of a model.
#[derive(Debug)]
pub(super) struct RopeTables {
    /// The rotations with their tables, F32 `[n_positions + input rows, n_rot / 2, 2]`. A layer without RoPE has a table of
    /// angles 0, as the fast attention kernels always rotate.
    tables: Vec<(Option<Rope>, Option<Rotation>, Buffer)>,
    /// Their rows.
    rows: RopeRows,
}

impl RopeTables {
    /// Computes the tables for the positions of `capacity`, with room for `n_tokens` inputs, the most of a step.
    pub(super) fn new(
        gpu: &WgpuDevice,
        spec: &ModelSpec,
        weights: &Weights,
        capacity: Capacity,
        n_tokens: usize,
    ) -> Result<Self, WgpuError> {
        let rows = RopeRows::new(spec, capacity.n_positions(), n_tokens);
        let table = |rope: Option<Rope>| {
            let rotation = rope.map(|rope| rope.rotation(weights.rope_factors(&rope, capacity.n_ctx)));
            let mut table = match &rotation {
                Some(rotation) => rotation.table(rows.n_positions),
                None => [1.0, 0.0].repeat(rows.n_positions * UNROTATED_ELEMENTS / 2),
            };
            table.extend([1.0, 0.0].repeat(rows.n_inputs * n_rot(rope.as_ref()) / 2));
            Ok((rope, rotation, gpu.upload("the RoPE table", &table)?))
        };
        let tables = distinct_ropes(spec).into_iter().map(table).collect::<Result<_, WgpuError>>()?;
        Ok(Self { tables, rows })
    }

    /// Bytes of the tables.
    pub(super) fn bytes(spec: &ModelSpec, capacity: Capacity, n_tokens: usize) -> u64 {
        let n_rows = RopeRows::new(spec, capacity.n_positions(), n_tokens).n_rows() as u64;
        let row = distinct_ropes(spec).iter().map(|rope| 4 * n_rot(rope.as_ref()) as u64).sum::<u64>();
        row.saturating_mul(n_rows)
    }

    /// The table of each layer. Layers with equal RoPE share a buffer.
    pub(super) fn of_layers(&self, spec: &ModelSpec) -> Vec<Buffer> {
        let table = |rope: Option<&Rope>| self.tables.iter().find(|(of, ..)| of.as_ref() == rope).map(|t| t.2.clone());
        spec.layers.iter().filter_map(|layer| table(layer.mixer.rope())).collect()
    }

    /// The row of the tables that rotates input `i` of a step, which is at `position`.
    pub(super) fn row(&self, i: usize, position: Position) -> u32 {
        self.rows.row(i, position)
    }

    /// Writes the rows of the inputs whose positions have different components. `positions`: those of all inputs of the next
    /// step.
    pub(super) fn write_rows(&self, gpu: &WgpuDevice, positions: &[Position]) {
        let inputs = self.rows.inputs_to_write(positions);
        if inputs.is_empty() {
            return;
        }
        let first_row = (self.rows.n_positions + inputs.start) as u64;
        for (_, rotation, table) in &self.tables {
            let Some(rotation) = rotation else { continue };
            let rows = positions[inputs.clone()].iter().flat_map(|&position| rotation.cos_sin(position));
            let rows: Vec<f32> = rows.flatten().collect();
            let row_bytes = 8 * rotation.frequencies.len() as u64;
            gpu.write_at(table, first_row * row_bytes, bytemuck::cast_slice(&rows));
        }
    }
}

/// Elements of a row of the table of a rotation.
fn n_rot(rope: Option<&Rope>) -> usize {
    rope.map_or(UNROTATED_ELEMENTS, |rope| rope.n_rot)
}

/// The different rotations (RoPE) of the layers; `None` stands for layers without RoPE.
fn distinct_ropes(spec: &ModelSpec) -> Vec<Option<Rope>> {
    let mut ropes = Vec::new();
    for layer in &spec.layers {
        let rope = layer.mixer.rope().copied();
        if !ropes.contains(&rope) {
            ropes.push(rope);
        }
    }
    ropes
}
