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
    /// Elements of a position's rows together.
    width: usize,
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
        Self { pass, reads, parts, width }
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
        let mut rows = Vec::new();
        self.join(n, hidden, &mut rows)?;
        self.project_joined(&rows)
    }

    /// Appends the rows of `n` positions to `rows`, `[n, width]`: those of all layers one after the other.
    ///
    /// # Errors
    /// They are not as many or as wide as the projection reads.
    pub fn join(&self, n: usize, hidden: &[&[f32]], rows: &mut Vec<f32>) -> Result<(), ForwardError> {
        let part_width = self.width / self.parts.len();
        let expected = n.saturating_mul(part_width);
        if hidden.len() != self.reads.len() || hidden.iter().any(|rows| rows.len() != expected) {
            let found = hidden.iter().map(|rows| rows.len()).sum();
            return Err(ForwardError::WrongStates { found, expected: expected.saturating_mul(self.reads.len()) });
        }
        rows.reserve(n * self.width);
        for position in 0..n {
            for &part in &self.parts {
                rows.extend_from_slice(&hidden[part][position * part_width..][..part_width]);
            }
        }
        Ok(())
    }

    /// The states, `[n, n_embd]`, of [joined](Self::join) rows, `[n, width]`.
    ///
    /// # Errors
    /// The device failed.
    pub fn project_joined(&mut self, rows: &[f32]) -> Result<Vec<f32>, ForwardError> {
        let mut projected = Vec::with_capacity(rows.len() / self.width * self.n_embd());
        for chunk in rows.chunks(self.width * self.n_chunk()) {
            // There are no layers, so that positions do not matter.
            self.pass.rewind(0, 0);
            let n_rows = chunk.len() / self.width;
            let tokens: Vec<_> = (0..n_rows).map(|pos| BatchToken { id: 0, seq: 0, pos, output: true }).collect();
            let batch = Batch { states: chunk, ..Batch::from(&tokens[..]) };
            match self.pass.forward_outputs(batch, OutputKind::Hidden, &[])?.0 {
                Outputs::Hidden(rows) => projected.extend_from_slice(rows),
                // Not requested.
                Outputs::Logits(_) | Outputs::Ids(_) | Outputs::TopK(_) => {}
            }
        }
        Ok(projected)
    }

    /// Positions of one product.
    pub fn n_chunk(&self) -> usize {
        self.pass.n_ubatch().min(self.pass.n_ctx()).max(1)
    }

    /// Elements of a position's joined rows.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Bytes that it holds.
    pub fn memory_use(&self) -> MemoryUse {
        self.pass.memory_use()
    }
}
