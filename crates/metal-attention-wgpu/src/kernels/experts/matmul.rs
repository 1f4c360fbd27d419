//! Grouped GEMM over experts, for many tokens: visits are sorted by expert, and each expert is multiplied by all its
//! tokens.

use metal_attention_gguf::TensorType;

use super::{ExpertsMatrices, ExpertsScratch, ExpertsShape, SortedScratch};
use crate::arena::Bind;
use crate::device::WgpuDevice;
use crate::dispatch::{AccessRange, Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::kernels::matmul::{
    CooperativeTile, INPUT, MAX_DEPTH, MatmulMethod, MatmulScratch, TILE, input_key, unit_bytes,
};
use crate::kernels::matvec::{MatvecInput, TokenRows};
use crate::matrix::{MatrixPart, type_info, type_name};
use crate::pipelines::PipelineKey;
use crate::shader::ShaderFeatures;

/// The method of [`experts_matmul`]: matrix units if the device has them and all weights are within their range, unless
/// `exact`. Tiles hold about one expert's share of `n_tokens` tokens.
pub fn experts_method(
    features: ShaderFeatures,
    shape: &ExpertsShape,
    matrices: &ExpertsMatrices<'_>,
    n_tokens: usize,
    exact: bool,
) -> MatmulMethod {
    let tile = |rows, tokens, depth, subgroups_rows, subgroups_tokens, stages| {
        MatmulMethod::Cooperative(CooperativeTile { rows, tokens, depth, subgroups_rows, subgroups_tokens, stages })
    };
    let wide = matrices.up.parts().iter().chain(matrices.down.parts()).any(|part| type_info(part.ty).wide);
    match unit_bytes(features) {
        2 if !exact && !wide => match n_tokens * shape.n_used / shape.n_expert {
            0..=12 => tile(64, 16, 64, 4, 1, 2),
            13..=28 => tile(64, 32, 64, 4, 1, 2),
            _ => tile(64, 64, 64, 2, 2, 2),
        },
        4 => tile(64, 64, 32, 2, 2, 1),
        _ => MatmulMethod::Tiled,
    }
}

/// Like [`experts_matvec`](super::experts_matvec) for more than a few tokens, up to `n_tokens`: each expert is read
/// once for each tile of its visits. `input` may be a [norm](MatvecInput::RmsNorm) only if [the method](experts_method)
/// uses matrix units. These may round weights and inputs to 16-bit floats, the inputs relative to the largest of their
/// row.
pub fn experts_matmul(
    gpu: &WgpuDevice,
    shape: &ExpertsShape,
    matrices: &ExpertsMatrices<'_>,
    input: MatvecInput<'_>,
    n_tokens: usize,
    exact: bool,
    x: &wgpu::Buffer,
    y: &wgpu::Buffer,
    accumulate: bool,
    scratch: &ExpertsScratch,
    batch: &wgpu::Buffer,
) -> Result<Vec<Dispatch>, WgpuError> {
    let method = experts_method(gpu.features(), shape, matrices, n_tokens, exact);
    experts_matmul_by(gpu, shape, matrices, input, method, x, y, accumulate, scratch, batch)
}

/// [`experts_matmul`] with a given method, to compare methods. On a device without matrix units plain loops stand in
/// for them; `scratch` is then [for loops](ExpertsScratch::for_loops).
pub fn experts_matmul_by(
    gpu: &WgpuDevice,
    shape: &ExpertsShape,
    matrices: &ExpertsMatrices<'_>,
    input: MatvecInput<'_>,
    method: MatmulMethod,
    x: &wgpu::Buffer,
    y: &wgpu::Buffer,
    accumulate: bool,
    scratch: &ExpertsScratch,
    batch: &wgpu::Buffer,
) -> Result<Vec<Dispatch>, WgpuError> {
    shape.check(matrices)?;
    let mismatch = |why: &str| WgpuError::Mismatch { what: "a product with experts".to_owned(), why: why.to_owned() };
    let norm = match (input, method) {
        (MatvecInput::Plain, _) => None,
        (MatvecInput::RmsNorm { weight, eps }, MatmulMethod::Cooperative(_)) => Some((weight, eps)),
        (MatvecInput::RmsNorm { .. }, MatmulMethod::Tiled) => return Err(mismatch("only matrix units take a norm")),
        (MatvecInput::Silu, _) => return Err(mismatch("the input is not plain")),
    };
    let sorted = scratch.sorted.as_ref().ok_or_else(|| mismatch("the scratch memory is for a few tokens"))?;
    let products = ExpertsMatmul { gpu, shape, method, scratch, sorted };
    let mut dispatches = vec![products.sort(batch)?];
    if let MatmulMethod::Cooperative(_) = method {
        let mut buffers: Vec<(&dyn Bind, AccessRange)> = vec![(x, AccessRange::Tokens(4 * shape.n_embd as u64))];
        buffers.extend(padded(gpu, &sorted.input, shape.n_embd, 1));
        buffers.push((batch, AccessRange::Batch));
        buffers.extend(norm.map(|(weight, _)| (weight as &dyn Bind, AccessRange::floats(shape.n_embd))));
        let key = input_key(shape.n_embd, TokenRows::Tokens, norm.map(|(_, eps)| eps));
        dispatches.push(Dispatch::new(
            gpu,
            &key,
            &buffers,
            [GridExtent::Tokens(1), GridExtent::Fixed(1), GridExtent::Fixed(1)],
        )?);
    }
    for part in matrices.up.parts() {
        dispatches.push(products.up(part, matrices.up_bias, x)?);
    }
    if let MatmulMethod::Cooperative(_) = method {
        let mut buffers: Vec<(&dyn Bind, AccessRange)> = vec![(&scratch.hidden, products.visits(shape.n_ff))];
        buffers.extend(padded(gpu, &sorted.units_hidden, shape.n_ff, shape.n_used));
        let grid = [GridExtent::Tokens(1), GridExtent::Fixed(shape.n_used as u32), GridExtent::Fixed(1)];
        dispatches.push(Dispatch::new(gpu, &hidden_key(shape), &buffers, grid)?);
    }
    for part in matrices.down.parts() {
        dispatches.push(products.down(part)?);
    }
    dispatches.push(products.sum(matrices.down_bias, y, accumulate)?);
    Ok(dispatches)
}

/// The two buffers of a converted input with `rows` rows of `n_in` elements for each token, in the format that
/// `shaders/matmul_input.wgsl` writes, with their ranges.
fn padded<'a>(
    gpu: &WgpuDevice,
    scratch: &'a MatmulScratch,
    n_in: usize,
    rows: usize,
) -> [(&'a dyn Bind, AccessRange); 2] {
    let bytes = if gpu.features().cooperative_f16 { 2 } else { 4 };
    let row = (bytes * n_in.next_multiple_of(MAX_DEPTH)) as u64;
    [(&scratch.padded, AccessRange::Tokens(row * rows as u64)), (&scratch.scales, AccessRange::Tokens(4 * rows as u64))]
}

/// The grouped GEMM of one layer, with its buffers.
#[derive(Clone, Copy)]
struct ExpertsMatmul<'a> {
    /// The GPU.
    gpu: &'a WgpuDevice,
    /// Sizes of the experts.
    shape: &'a ExpertsShape,
    /// Matrix units or plain loops.
    method: MatmulMethod,
    /// Buffers between all kernels of experts.
    scratch: &'a ExpertsScratch,
    /// Buffers between the kernels of the grouped GEMM.
    sorted: &'a SortedScratch,
}

impl ExpertsMatmul<'_> {
    /// The range of a buffer with `row` words for each visit.
    fn visits(&self, row: usize) -> AccessRange {
        AccessRange::Tokens(4 * (self.shape.n_used * row) as u64)
    }

    fn sort(&self, batch: &wgpu::Buffer) -> Result<Dispatch, WgpuError> {
        let tokens = tile_tokens(self.method);
        let buffers: [(&dyn Bind, AccessRange); 4] = [
            (&self.scratch.chosen, self.visits(1)),
            (&self.sorted.order, self.visits(1)),
            (&self.sorted.tiles, AccessRange::ExpertTiles(self.shape.tiles(tokens), 16)),
            (batch, AccessRange::Batch),
        ];
        let threads = self.gpu.wgpu().limits().max_compute_invocations_per_workgroup.min(1024);
        Dispatch::new(self.gpu, &sort_key(self.shape, tokens, threads), &buffers, [GridExtent::Fixed(1); 3])
    }

    fn up(&self, part: &MatrixPart, bias: Option<&wgpu::Buffer>, x: &wgpu::Buffer) -> Result<Dispatch, WgpuError> {
        let shape = self.shape;
        let product = ExpertsMatmulOp::new(shape, part, true, bias.is_some());
        let x = (x as &dyn Bind, AccessRange::Tokens(4 * shape.n_embd as u64));
        let from = match self.method {
            MatmulMethod::Tiled => vec![x],
            MatmulMethod::Cooperative(_) => padded(self.gpu, &self.sorted.input, shape.n_embd, 1).to_vec(),
        };
        let to = (&self.scratch.hidden as &dyn Bind, self.visits(shape.n_ff));
        let mut more = Vec::new();
        more.extend(shape.weights_inputs.then_some((&self.scratch.weights as &dyn Bind, self.visits(1))));
        more.extend(bias.map(|bias| (bias as &dyn Bind, AccessRange::floats(shape.n_expert * product.rows))));
        self.dispatch(&product, part, from, to, more)
    }

    fn down(&self, part: &MatrixPart) -> Result<Dispatch, WgpuError> {
        let shape = self.shape;
        let from = match self.method {
            MatmulMethod::Tiled => vec![(&self.scratch.hidden as &dyn Bind, self.visits(shape.n_ff))],
            MatmulMethod::Cooperative(_) => {
                padded(self.gpu, &self.sorted.units_hidden, shape.n_ff, shape.n_used).to_vec()
            }
        };
        let to = (&self.sorted.down as &dyn Bind, self.visits(shape.n_embd));
        self.dispatch(&ExpertsMatmulOp::new(shape, part, false, false), part, from, to, Vec::new())
    }

    fn dispatch(
        &self,
        product: &ExpertsMatmulOp<'_>,
        part: &MatrixPart,
        from: Vec<(&dyn Bind, AccessRange)>,
        to: (&dyn Bind, AccessRange),
        more: Vec<(&dyn Bind, AccessRange)>,
    ) -> Result<Dispatch, WgpuError> {
        let tiles = self.shape.tiles(tile_tokens(self.method));
        let mut buffers: Vec<(&dyn Bind, AccessRange)> =
            vec![(&part.buffer, AccessRange::Fixed(part.bytes(product.n_in)))];
        buffers.extend(from);
        buffers.extend([
            to,
            (&self.sorted.order, self.visits(1)),
            (&self.sorted.tiles, AccessRange::ExpertTiles(tiles, 16)),
        ]);
        buffers.extend(more);
        let tile_rows = match self.method {
            MatmulMethod::Tiled => TILE,
            MatmulMethod::Cooperative(tile) => tile.rows,
        };
        let rows = GridExtent::Fixed(product.rows.div_ceil(tile_rows) as u32);
        let grid = [rows, GridExtent::ExpertTiles(tiles), GridExtent::Fixed(1)];
        Dispatch::new(self.gpu, &product.key(self.method), &buffers, grid)
    }

    fn sum(&self, bias: Option<&wgpu::Buffer>, y: &wgpu::Buffer, accumulate: bool) -> Result<Dispatch, WgpuError> {
        let shape = self.shape;
        let mut buffers: Vec<(&dyn Bind, AccessRange)> =
            vec![(&self.sorted.down, self.visits(shape.n_embd)), (y, AccessRange::Tokens(4 * shape.n_embd as u64))];
        buffers.extend((!shape.weights_inputs).then_some((&self.scratch.weights as &dyn Bind, self.visits(1))));
        if let Some(bias) = bias {
            let all = AccessRange::floats(shape.n_expert * shape.n_embd);
            buffers.extend([(&self.scratch.chosen as &dyn Bind, self.visits(1)), (bias, all)]);
        }
        let columns = GridExtent::Fixed(shape.n_embd.div_ceil(256) as u32);
        let key = sum_key(shape, bias.is_some(), accumulate);
        Dispatch::new(self.gpu, &key, &buffers, [columns, GridExtent::Tokens(1), GridExtent::Fixed(1)])
    }
}

/// Visits of a tile.
fn tile_tokens(method: MatmulMethod) -> usize {
    match method {
        MatmulMethod::Tiled => TILE,
        MatmulMethod::Cooperative(tile) => tile.tokens,
    }
}

fn sort_key(shape: &ExpertsShape, tokens: usize, threads: u32) -> PipelineKey {
    let constants = [
        ("n_expert", shape.n_expert.into()),
        ("n_used", shape.n_used.into()),
        ("tokens", tokens.into()),
        ("threads", threads.into()),
    ];
    PipelineKey::new("experts_sort", constants)
}

fn hidden_key(shape: &ExpertsShape) -> PipelineKey {
    let constants = [
        ("n_in", shape.n_ff.into()),
        ("padded", shape.n_ff.next_multiple_of(MAX_DEPTH).into()),
        ("rows", "visits".into()),
        ("n_used", shape.n_used.into()),
        ("norm", false.into()),
    ];
    PipelineKey::new(INPUT, constants).named("experts_matmul_input")
}

fn sum_key(shape: &ExpertsShape, bias: bool, accumulate: bool) -> PipelineKey {
    let constants = [
        ("n", shape.n_embd.into()),
        ("n_expert", shape.n_expert.into()),
        ("n_used", shape.n_used.into()),
        ("weights_inputs", shape.weights_inputs.into()),
        ("bias", bias.into()),
        ("accumulate", accumulate.into()),
    ];
    PipelineKey::new("experts_sum", constants).named(if accumulate { "experts_sum_accumulate" } else { "experts_sum" })
}

/// The product with one part of a matrix, without its buffers.
#[derive(Debug, Clone, Copy)]
struct ExpertsMatmulOp<'a> {
    /// Sizes of the experts.
    shape: &'a ExpertsShape,
    /// Tensor type of the part.
    ty: TensorType,
    /// Elements of a row.
    n_in: usize,
    /// Rows of the matrix of one expert.
    rows: usize,
    /// The matrix row that is the part's row 0.
    first_row: usize,
    /// Rows of the part.
    n_rows: usize,
    /// Whether it is the product with gate and up; else with down.
    up: bool,
    /// Whether a bias is added.
    bias: bool,
}

impl<'a> ExpertsMatmulOp<'a> {
    fn new(shape: &'a ExpertsShape, part: &MatrixPart, up: bool, bias: bool) -> Self {
        let (n_in, rows) = if up { (shape.n_embd, shape.up_rows()) } else { (shape.n_ff, shape.n_embd) };
        let MatrixPart { ty, first_row, n_rows, .. } = *part;
        Self { shape, ty, n_in, rows, first_row, n_rows, up, bias }
    }

    fn key(&self, method: MatmulMethod) -> PipelineKey {
        let shape = self.shape;
        let ty = type_name(self.ty);
        let mut constants = vec![
            ("type", ty.into()),
            ("n_in", self.n_in.into()),
            ("expert_rows", self.rows.into()),
            ("first_row", self.first_row.into()),
            ("n_rows", self.n_rows.into()),
            ("whole", (self.n_rows == shape.n_expert * self.rows).into()),
            ("n_used", shape.n_used.into()),
            ("rows", "experts".into()),
            ("output", if self.up { "activated" } else { "store" }.into()),
            ("weights_inputs", (self.up && shape.weights_inputs).into()),
            ("bias", self.bias.into()),
            ("cooperative", (method != MatmulMethod::Tiled).into()),
        ];
        constants.extend(shape.activation_constants());
        let form = match method {
            MatmulMethod::Tiled => "tiled",
            MatmulMethod::Cooperative(tile) => {
                constants.extend(tile.constants(self.n_in));
                "cooperative"
            }
        };
        let output = if self.up { "_activated" } else { "" };
        PipelineKey { name: format!("experts_matmul_{ty}{output}_{form}"), file: "matmul", constants }
    }
}

/// The keys of all kernels, with the sizes of Qwen3-30B-A3B.
pub(super) fn catalogue() -> Vec<PipelineKey> {
    let shape = super::catalogue_shape();
    let tile = CooperativeTile { rows: 64, tokens: 32, depth: 64, subgroups_rows: 4, subgroups_tokens: 1, stages: 2 };
    let mut keys = vec![sort_key(&shape, tile.tokens, 256), hidden_key(&shape)];
    keys.extend([false, true].map(|accumulate| sum_key(&shape, false, accumulate)));
    for &ty in TensorType::ALL {
        for up in [true, false] {
            let (n_in, rows) = if up { (shape.n_embd, shape.up_rows()) } else { (shape.n_ff, shape.n_embd) };
            let n_rows = shape.n_expert * rows;
            let product = ExpertsMatmulOp { shape: &shape, ty, n_in, rows, first_row: 0, n_rows, up, bias: false };
            keys.push(product.key(MatmulMethod::Tiled));
            if !type_info(ty).wide {
                keys.push(product.key(MatmulMethod::Cooperative(tile)));
            }
        }
    }
    keys
}
