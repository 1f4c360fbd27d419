//! Products of each head's row with a matrix of its own: the expansions of latent attention.

use crate::arena::Bind;
use crate::device::WgpuDevice;
use crate::dispatch::{AccessRange, Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::matrix::{WgpuMatrix, type_name};
use crate::pipelines::PipelineKey;

const THREADS: usize = 64;

/// The layout of the rows in [`head_products`].
#[derive(Debug, Clone, Copy)]
pub struct HeadRows {
    /// Heads.
    pub n_head: usize,
    /// Elements from one head's row of `x` to the next; the matrices multiply its first elements.
    pub in_head_stride: usize,
    /// Elements from one head's row of `y` to the next.
    pub out_head_stride: usize,
}

/// `y[t][h] = W[h] x[t][h]` for each token and head. `matrices` holds those of all heads, stacked,
/// `[n_head, n_out, n_in]`; `x` is `[n_tokens, n_head, in_head_stride]`; `y` is `[n_tokens, n_head, out_head_stride]`,
/// of which the first `n_out` are written.
pub fn head_products(
    gpu: &WgpuDevice,
    matrices: &WgpuMatrix,
    shape: HeadRows,
    x: &wgpu::Buffer,
    y: &wgpu::Buffer,
) -> Result<Vec<Dispatch>, WgpuError> {
    let (n_in, n_out) = (matrices.n_in(), matrices.n_out() / shape.n_head.max(1));
    let uneven =
        !matrices.n_out().is_multiple_of(shape.n_head.max(1)) || matrices.parts().iter().any(|p| p.row_step != 1);
    if uneven || n_in > shape.in_head_stride || n_out > shape.out_head_stride {
        let why = format!("[{}, {n_in}] do not suit {shape:?}", matrices.n_out());
        return Err(WgpuError::Mismatch { what: "the matrices of heads".into(), why });
    }
    let row = |stride: usize| AccessRange::Tokens(4 * (shape.n_head * stride) as u64);
    let parts = matrices.parts().iter();
    parts
        .map(|part| {
            let key = key(type_name(part.ty), n_in, n_out, part.n_rows, part.first_row, shape);
            let buffers: [(&dyn Bind, AccessRange); 3] = [
                (&part.buffer, AccessRange::Fixed(part.bytes(n_in))),
                (x, row(shape.in_head_stride)),
                (y, row(shape.out_head_stride)),
            ];
            let groups = part.n_rows.div_ceil(THREADS) as u32;
            Dispatch::new(gpu, &key, &buffers, [GridExtent::Fixed(groups), GridExtent::Tokens(1), GridExtent::Fixed(1)])
        })
        .collect()
}

fn key(ty: &'static str, n_in: usize, n_out: usize, n_rows: usize, first_row: usize, shape: HeadRows) -> PipelineKey {
    let constants = [
        ("type", ty.into()),
        ("n_in", n_in.into()),
        ("n_out", n_out.into()),
        ("n_rows", n_rows.into()),
        ("first_row", first_row.into()),
        ("n_head", shape.n_head.into()),
        ("x_stride", shape.in_head_stride.into()),
        ("y_stride", shape.out_head_stride.into()),
        ("threads", THREADS.into()),
    ];
    PipelineKey::new("head_products", constants).named(format!("head_products_{ty}"))
}

/// The scalar twin for one row and its `matrix`, `[n_out, n_in]`.
pub fn head_products_twin(matrix: &[f32], x: &[f32]) -> Vec<f32> {
    let product = |row: &[f32]| row.iter().zip(x).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum::<f64>() as f32;
    matrix.chunks_exact(x.len()).map(product).collect()
}

/// The keys of all kernels, with the sizes of a small model.
pub(crate) fn catalogue() -> Vec<PipelineKey> {
    let shape = HeadRows { n_head: 16, in_head_stride: 512, out_head_stride: 192 };
    let types = metal_attention_gguf::TensorType::ALL.iter();
    types.map(|&ty| key(type_name(ty), 512.max(ty.block_len()), 128, 2048, 0, shape)).collect()
}
