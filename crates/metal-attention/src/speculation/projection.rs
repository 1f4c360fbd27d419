//! [`StateProjection`]: from hidden rows of several layers of the target to the states of a drafter.

use metal_attention_model::{
    Batch, BatchToken, ForwardError, ForwardPass, LoadedModel, MemoryUse, OutputKind, Outputs, StateInput,
};

use crate::backends::BackendPass;
use crate::{EngineOptions, Error};

/// Projects hidden rows of several layers of the target to the width of a drafter, on the target's device.
///
/// The projection is a model without layers ([`ProjectedState`](metal_attention_model::ProjectedState)): its state at a position are
/// the rows of the target's layers there, one after the other, and its hidden row is the drafter's state.
pub struct StateProjection {
    pass: Box<dyn ForwardPass>,
    /// The rows of the target that are read, ascending and all different.
    reads: Vec<usize>,
    /// For each part of a state the index in `reads`.
    parts: Vec<usize>,
    /// Elements of a state.
    width: usize,
    /// States of a chunk, `[n, width]`.
    states: Vec<f32>,
}

impl StateProjection {
    /// Sets up `projection` on the device of `target`. `layers`: the rows that make up a state, in order, as the indices of
    /// [`HiddenRequest::before`](crate::HiddenRequest::before).
    ///
    /// # Errors
    /// It does not fit in memory, or several devices share the target.
    pub fn beside(
        projection: &LoadedModel,
        layers: &[usize],
        target: &dyn BackendPass,
        options: &EngineOptions,
    ) -> Result<Self, Error> {
        Ok(Self::new(target.beside(projection, options)?, layers))
    }

    /// A projection over a forward pass of its model.
    ///
    /// # Panics
    /// If the model of `pass` has another [`StateInput`] than [`Projected`](StateInput::Projected), or there are no layers.
    pub fn new(pass: Box<dyn ForwardPass>, layers: &[usize]) -> Self {
        let spec = pass.spec();
        let is_projection = matches!(spec.embedding.state, Some(StateInput::Projected(_)));
        assert!(is_projection && !layers.is_empty(), "a model that projects states");
        let width = spec.state_width();
        let mut reads = layers.to_vec();
        reads.sort_unstable();
        reads.dedup();
        let part = |layer| reads.iter().position(|read| read == layer).unwrap_or(0);
        let parts = layers.iter().map(part).collect();
        Self { pass, reads, parts, width, states: Vec::new() }
    }

    /// The hidden rows of the target that are read, ascending and all different.
    pub fn reads(&self) -> &[usize] {
        &self.reads
    }

    /// Elements of a drafter's state.
    pub fn n_embd(&self) -> usize {
        self.pass.spec().n_embd
    }

    /// The states of `n` positions, `[n, n_embd]`. `hidden`: for each of [`reads`](Self::reads) the rows of these positions, row-major.
    ///
    /// # Errors
    /// The rows are not as many or as wide as the projection reads, or the device failed.
    pub fn project(&mut self, n: usize, hidden: &[&[f32]]) -> Result<Vec<f32>, ForwardError> {
        let part_width = self.width / self.parts.len();
        let expected = n.saturating_mul(part_width);
        if hidden.len() != self.reads.len() || hidden.iter().any(|rows| rows.len() != expected) {
            let found = hidden.iter().map(|rows| rows.len()).sum();
            return Err(ForwardError::WrongStates { found, expected: expected.saturating_mul(self.reads.len()) });
        }
        let n_chunk = self.pass.n_ubatch().min(self.pass.n_ctx()).max(1);
        let mut projected = Vec::with_capacity(n * self.n_embd());
        for first in (0..n).step_by(n_chunk) {
            let n_rows = n_chunk.min(n - first);
            self.states.clear();
            for position in first..first + n_rows {
                for &part in &self.parts {
                    self.states.extend_from_slice(&hidden[part][position * part_width..][..part_width]);
                }
            }
            // There are no layers, so that positions do not matter.
            self.pass.rewind(0, 0);
            let tokens: Vec<_> = (0..n_rows).map(|pos| BatchToken { id: 0, seq: 0, pos, output: true }).collect();
            let batch = Batch { states: &self.states, ..Batch::from(&tokens[..]) };
            match self.pass.forward_outputs(batch, OutputKind::Hidden, &[])?.0 {
                Outputs::Hidden(rows) => projected.extend_from_slice(rows),
                // Not requested.
                Outputs::Logits(_) | Outputs::Ids(_) | Outputs::TopK(_) => {}
            }
        }
        Ok(projected)
    }

    /// Bytes that it holds.
    pub fn memory_use(&self) -> MemoryUse {
        let memory = self.pass.memory_use();
        MemoryUse { scratch: memory.scratch + (size_of::<f32>() * self.states.capacity()) as u64, ..memory }
    }
}
