//! [`EncoderOps`]: the operations that encoders are made of, which each backend has.

use std::ops::Range;

use metal_attention_gguf::Tensor;

use super::run::Pixels;
use super::stages::{
    Colours, EncoderActivation, EncoderFeedForward, EncoderLinear, EncoderNorm, EncoderTypes, PatchSpec,
};

/// Prepares the weights of an encoder for a backend.
pub trait PrepareEncoder {
    /// The backend's types.
    type Types: EncoderTypes;
    /// Why a weight was refused.
    type Error;

    /// A matrix, `[n_out, n_in]`.
    ///
    /// # Errors
    ///
    /// There is not enough memory.
    fn matrix(&mut self, tensor: &Tensor) -> Result<<Self::Types as EncoderTypes>::Matrix, Self::Error>;

    /// A vector.
    ///
    /// # Errors
    ///
    /// There is not enough memory.
    fn vector(&mut self, values: Vec<f32>) -> Result<<Self::Types as EncoderTypes>::Vector, Self::Error>;
}

/// Rows that attend to rows: each of the queries to all of the keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttentionSegment {
    /// Rows of queries.
    pub queries: Range<usize>,
    /// Rows of keys and values.
    pub keys: Range<usize>,
}

/// Operations over rows, F32 `[n_rows, width]` row-major, on a device. They may be carried out later than they are called, in
/// their order; [`read`](Self::read) waits for them.
pub trait EncoderOps {
    /// The types of weights.
    type Types: EncoderTypes;
    /// Rows on the device.
    type Rows;
    /// Why an operation failed.
    type Error;

    /// Copies rows of this shape, `[n_rows, width]`, to the device, which `values` returns.
    fn upload(&mut self, shape: [usize; 2], values: impl FnOnce() -> Vec<f32>) -> Result<Self::Rows, Self::Error>;

    /// The patches of pictures ([`PatchSpec::cut`]).
    fn patches(
        &mut self,
        patch: PatchSpec,
        colours: Colours,
        pictures: &[Pixels<'_>],
    ) -> Result<Self::Rows, Self::Error> {
        let width = 3 * patch.side * patch.side;
        let patches = patch.cut(colours, pictures);
        self.upload([patches.len() / width, width], || patches)
    }

    /// Copies rows from the device, in parts of `columns` columns each, `[n_rows, columns]`.
    fn read(&mut self, rows: &Self::Rows, columns: usize) -> Result<Vec<Vec<f32>>, Self::Error>;

    /// Values of a row.
    fn width(&self, rows: &Self::Rows) -> usize;

    /// The rows with another width, of the same values in the same order.
    fn reshape(&mut self, rows: Self::Rows, width: usize) -> Self::Rows;

    /// A copy.
    fn copy(&mut self, rows: &Self::Rows) -> Result<Self::Rows, Self::Error>;

    /// `y = W clamp(x) + b`, clamped.
    fn linear(&mut self, x: &Self::Rows, linear: &EncoderLinear<Self::Types>) -> Result<Self::Rows, Self::Error>;

    /// [`linear`](Self::linear) of the same rows three times: queries, keys and values.
    fn projections(
        &mut self,
        x: &Self::Rows,
        [q, k, v]: [&EncoderLinear<Self::Types>; 3],
    ) -> Result<[Self::Rows; 3], Self::Error> {
        Ok([self.linear(x, q)?, self.linear(x, k)?, self.linear(x, v)?])
    }

    /// `y += linear(x)`
    fn add_linear(
        &mut self,
        y: &mut Self::Rows,
        x: &Self::Rows,
        linear: &EncoderLinear<Self::Types>,
    ) -> Result<(), Self::Error> {
        let x = self.linear(x, linear)?;
        self.add(y, &x)
    }

    /// A feed-forward.
    fn feed_forward(
        &mut self,
        x: &Self::Rows,
        feed_forward: &EncoderFeedForward<Self::Types>,
    ) -> Result<Self::Rows, Self::Error> {
        let hidden = hidden(self, x, feed_forward)?;
        self.linear(&hidden, feed_forward.down())
    }

    /// `y += feed_forward(x)`
    fn add_feed_forward(
        &mut self,
        y: &mut Self::Rows,
        x: &Self::Rows,
        feed_forward: &EncoderFeedForward<Self::Types>,
    ) -> Result<(), Self::Error> {
        let hidden = hidden(self, x, feed_forward)?;
        self.add_linear(y, &hidden, feed_forward.down())
    }

    /// The norm of each `norm.width` elements.
    fn norm(&mut self, x: &Self::Rows, norm: &EncoderNorm<Self::Types>) -> Result<Self::Rows, Self::Error>;

    /// `x = activation(x)`
    fn activate(&mut self, x: &mut Self::Rows, activation: EncoderActivation) -> Result<(), Self::Error>;

    /// `x = activation(x) * y`
    fn activate_gated(
        &mut self,
        x: &mut Self::Rows,
        activation: EncoderActivation,
        y: &Self::Rows,
    ) -> Result<(), Self::Error>;

    /// `x += y`
    fn add(&mut self, x: &mut Self::Rows, y: &Self::Rows) -> Result<(), Self::Error>;

    /// `x += row`, to each row.
    fn add_row(&mut self, x: &mut Self::Rows, row: &Vector<Self>) -> Result<(), Self::Error>;

    /// `x *= factor`
    fn scale(&mut self, x: &mut Self::Rows, factor: f32) -> Result<(), Self::Error>;

    /// `x *= factors`, each column by its own.
    fn scale_columns(&mut self, x: &mut Self::Rows, factors: &Vector<Self>) -> Result<(), Self::Error>;

    /// The rows of `x` with these indices; zeros for [`NO_ROW`](super::NO_ROW).
    fn gather(&mut self, x: &Self::Rows, rows: &[u32]) -> Result<Self::Rows, Self::Error>;

    /// The rows of `x`, then those of `y`.
    fn join_rows(&mut self, x: &Self::Rows, y: &Self::Rows) -> Result<Self::Rows, Self::Error>;

    /// The columns of all `parts` beside each other, in their order.
    fn join_columns(&mut self, parts: &[&Self::Rows]) -> Result<Self::Rows, Self::Error>;

    /// The mean of each `n` rows that follow each other.
    fn mean(&mut self, x: &Self::Rows, n: usize) -> Result<Self::Rows, Self::Error>;

    /// The sum of each `n` rows with the indices `rows` that follow each other, each times its row of `weights`, `[n, width]`, element
    /// by element. [`NO_ROW`](super::NO_ROW) counts as zeros.
    fn weighted_sum(
        &mut self,
        x: &Self::Rows,
        rows: &[u32],
        n: usize,
        weights: &Vector<Self>,
    ) -> Result<Self::Rows, Self::Error>;

    /// Rows of `n` vectors each, `[n, width]`, as `[width, n]`.
    fn interleave(&mut self, x: &Self::Rows, n: usize) -> Result<Self::Rows, Self::Error>;

    /// Rotates the pairs of each head. `table`: `[n_rows, head_dim / 2, 2]` of (cos, sin). In each `block` elements of a head
    /// element `i` and element `i + block / 2` are a pair.
    fn rotate(
        &mut self,
        x: &mut Self::Rows,
        table: &Self::Rows,
        head_dim: usize,
        block: usize,
    ) -> Result<(), Self::Error>;

    /// Attention of heads of `head_dim` elements: `softmax(scale * q k^T) v`. Where there are fewer heads of keys and values than of
    /// queries, neighbouring heads of queries share one. Rows of no segment are undefined.
    fn attention(
        &mut self,
        q: &Self::Rows,
        k: &Self::Rows,
        v: &Self::Rows,
        head_dim: usize,
        scale: f32,
        segments: &[AttentionSegment],
    ) -> Result<Self::Rows, Self::Error>;
}

/// Rows of `width` values in parts of `columns` columns each, `[n_rows, columns]`, without columns that make no whole part.
pub fn split_columns(values: &[f32], width: usize, columns: usize) -> Vec<Vec<f32>> {
    let (width, columns) = (width.max(1), columns.max(1));
    let part = |i: usize| {
        let mut part = Vec::with_capacity(values.len() / width * columns);
        values.chunks_exact(width).for_each(|row| part.extend_from_slice(&row[i * columns..][..columns]));
        part
    };
    (0..width / columns).map(part).collect()
}

/// The input of the last product of a feed-forward, of operations for its parts.
///
/// # Errors
///
/// Those of `ops`.
pub fn hidden<O: EncoderOps + ?Sized>(
    ops: &mut O,
    x: &O::Rows,
    feed_forward: &EncoderFeedForward<O::Types>,
) -> Result<O::Rows, O::Error> {
    match feed_forward {
        EncoderFeedForward::Plain { up, activation, .. } => {
            let mut up = ops.linear(x, up)?;
            ops.activate(&mut up, *activation)?;
            Ok(up)
        }
        EncoderFeedForward::Gated { gate, up, activation, .. } => {
            let mut gate = ops.linear(x, gate)?;
            let up = ops.linear(x, up)?;
            ops.activate_gated(&mut gate, *activation, &up)?;
            Ok(gate)
        }
    }
}

/// The vectors of a backend.
type Vector<O> = <<O as EncoderOps>::Types as EncoderTypes>::Vector;
