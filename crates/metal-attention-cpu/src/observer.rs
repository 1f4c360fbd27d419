//! Who looks on while matrices are multiplied.

/// What a matrix is multiplied by.
#[derive(Debug, Clone, Copy)]
pub struct MatrixInput<'a> {
    /// Name of the matrix in the file, e.g. `blk.0.attn_q.weight`.
    pub matrix: &'a str,
    /// Which of so many matrices of experts, or of heads, where it holds several.
    pub sub_matrix: Option<(usize, usize)>,
    /// Activations before they are rounded in any way, `[n_tokens, n_in]`.
    pub x: &'a [f32],
    /// Columns of the matrix.
    pub n_in: usize,
}

/// Is shown the input of every matrix, in the order of the forward pass.
pub type Observer = Box<dyn FnMut(MatrixInput<'_>) + Send>;
