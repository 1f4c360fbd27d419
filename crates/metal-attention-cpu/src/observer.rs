//! Observation of the inputs of matrix products, from which importance matrices are computed.

/// The input of one product: a matrix's name and the activations that it is multiplied by.
#[derive(Debug, Clone, Copy)]
pub struct MatrixInput<'a> {
    /// Name of the matrix in the file, e.g. `blk.0.attn_q.weight`.
    pub matrix: &'a str,
    /// For a tensor that contains several matrices, of experts or of heads: the index of this one and their number. `None` for
    /// an ordinary matrix.
    pub sub_matrix: Option<(usize, usize)>,
    /// The activations in F32, before any quantisation, `[n_tokens, n_in]`.
    pub x: &'a [f32],
    /// Columns of the matrix.
    pub n_in: usize,
}

/// A function that is called with the input of every matrix, in the order of the forward pass.
pub type Observer = Box<dyn FnMut(MatrixInput<'_>) + Send>;
