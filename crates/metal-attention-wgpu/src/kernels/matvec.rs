//! Products of a matrix with one token's vector, or with the vectors of a few tokens.

use metal_attention_gguf::TensorType;

use crate::arena::Bind;
use crate::device::GpuDevice;
use crate::dispatch::{Dispatch, Extent, Reach};
use crate::error::GpuError;
use crate::matrix::{GpuMatrix, MatrixPart, Whole, type_info, type_name};
use crate::pso::PsoKey;
use crate::shader::ShaderFeatures;

/// Tokens that share a weight once it is read, in a batch of a few.
pub const TOKEN_TILE: usize = 4;

/// What the matrix is multiplied with.
#[derive(Debug, Clone, Copy)]
pub enum MatvecInput<'a> {
    /// `x`, `[n_rows, n_in]`.
    Plain,
    /// The root-mean-square norm of `x`, `[n_rows, n_in]`: `rmsnorm_matvec_*`.
    RmsNorm {
        /// Weight of the norm, `[n_in]`.
        weight: &'a wgpu::Buffer,
        /// Added to the mean of the squares.
        eps: f32,
    },
    /// `silu(x[2 i]) * x[2 i + 1]`, where `x` is `[n_rows, 2 n_in]`, gate and up in turn: `silu_matvec_*`.
    Silu,
}

/// What becomes of the product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MatvecOutput {
    /// `y = W x`, `[n_rows, n_out]`.
    Store,
    /// `y += W x`: `*_accumulate`.
    Accumulate,
    /// `y[i] = silu((W x)[2 i]) * (W x)[2 i + 1]`, `[n_rows, n_out / 2]`: `*_gated`. For matrices that
    /// [have pairs](GpuMatrix::has_pairs).
    Gated,
}

/// Which rows of `x` there are products for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rows {
    /// All: one a token.
    Tokens,
    /// Those of the tokens whose logits are wanted; the products lie next to one another.
    Wanted,
    /// All: one for each token whose logits are wanted.
    Gathered,
}

impl MatvecOutput {
    /// The name in the shader, and what it adds to a kernel's name.
    pub(super) fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Store => ("store", ""),
            Self::Accumulate => ("accumulate", "_accumulate"),
            Self::Gated => ("gated", "_gated"),
        }
    }
}

impl Rows {
    /// The name in the shader.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Tokens => "tokens",
            Self::Wanted => "wanted",
            Self::Gathered => "gathered",
        }
    }

    /// How much of a buffer is reached that has `bytes` for each result.
    pub(super) fn result_reach(self, bytes: usize) -> Reach {
        match self {
            Self::Tokens => Reach::Tokens(bytes as u64),
            Self::Wanted | Self::Gathered => Reach::Wanted(bytes as u64),
        }
    }

    /// Workgroups for all of them, each of which takes so many.
    pub(super) fn extent(self, per_group: usize) -> Extent {
        match self {
            Self::Tokens => Extent::Tokens(per_group as u32),
            Self::Wanted | Self::Gathered => Extent::Wanted(per_group as u32),
        }
    }
}

/// A product with its surroundings.
#[derive(Debug, Clone, Copy)]
pub struct MatvecOptions<'a> {
    /// What the matrix is multiplied with.
    pub input: MatvecInput<'a>,
    /// What becomes of the product.
    pub output: MatvecOutput,
    /// Which rows of `x` there are products for.
    pub rows: Rows,
    /// Added to the product (before a gate), `[n_out]`.
    pub bias: Option<&'a wgpu::Buffer>,
}

impl Default for MatvecOptions<'_> {
    /// `y = W x` for all tokens.
    fn default() -> Self {
        Self { input: MatvecInput::Plain, output: MatvecOutput::Store, rows: Rows::Tokens, bias: None }
    }
}

impl<'a> MatvecOptions<'a> {
    /// How much of `x` a product with `matrix` reaches.
    pub(super) fn input_reach(&self, matrix: &GpuMatrix) -> Reach {
        let width = if matches!(self.input, MatvecInput::Silu) { 2 * matrix.n_in() } else { matrix.n_in() };
        match self.rows {
            Rows::Tokens | Rows::Wanted => Reach::Tokens(4 * width as u64),
            Rows::Gathered => Reach::Wanted(4 * width as u64),
        }
    }

    /// How much of `y`.
    pub(super) fn output_reach(&self, matrix: &GpuMatrix) -> Reach {
        let n_out = matrix.n_out();
        self.rows.result_reach(4 * if self.output == MatvecOutput::Gated { n_out / 2 } else { n_out })
    }

    /// The weights of the norm and the bias, where there are any.
    pub(super) fn norm_and_bias(&self, matrix: &GpuMatrix) -> impl Iterator<Item = (&'a dyn Bind, Reach)> + use<'a> {
        let norm = match self.input {
            MatvecInput::RmsNorm { weight, .. } => Some((weight as &dyn Bind, Reach::floats(matrix.n_in()))),
            MatvecInput::Plain | MatvecInput::Silu => None,
        };
        let n_out = matrix.n_out();
        norm.into_iter().chain(self.bias.map(|bias| (bias as &dyn Bind, Reach::floats(n_out))))
    }
}

/// `y = W x` with `options`, one dispatch a part of the matrix. Made for one token: more tokens are right, but each
/// reads the whole matrix.
pub fn matvec(
    gpu: &GpuDevice,
    matrix: &GpuMatrix,
    options: MatvecOptions<'_>,
    x: &wgpu::Buffer,
    y: &wgpu::Buffer,
    batch: &wgpu::Buffer,
) -> Result<Vec<Dispatch>, GpuError> {
    multi_token_matvec(gpu, matrix, options, 1, x, y, batch)
}

/// As [`matvec`] for a few tokens: each weight is read and dequantised once for `token_tile` (1, 2, 4 or 8) of them.
pub fn multi_token_matvec(
    gpu: &GpuDevice,
    matrix: &GpuMatrix,
    options: MatvecOptions<'_>,
    token_tile: usize,
    x: &wgpu::Buffer,
    y: &wgpu::Buffer,
    batch: &wgpu::Buffer,
) -> Result<Vec<Dispatch>, GpuError> {
    let token_tile = token_tile.clamp(1, 8);
    if options.output == MatvecOutput::Gated && !matrix.has_pairs() {
        let why = "its gate and up rows lie in different parts".to_owned();
        return Err(GpuError::Mismatch { what: "the gated product of a matrix".to_owned(), why });
    }
    let parts = matrix.parts().iter();
    parts
        .map(|part| {
            let product = Product::new(matrix, part, &options, token_tile);
            let tile = product.tile(gpu.features());
            let groups = product.groups(tile);
            let mut buffers: Vec<(&dyn Bind, Reach)> = vec![
                (&part.buffer, Reach::Fixed(part.bytes(matrix.n_in()))),
                (x, options.input_reach(matrix)),
                (y, options.output_reach(matrix)),
            ];
            buffers.extend(options.norm_and_bias(matrix));
            if token_tile > 1 || options.rows == Rows::Wanted {
                buffers.push((batch, Reach::Batch));
            }
            if tile.turns > 0 && product.has_vectors() {
                buffers.push((&part.buffer, Reach::Fixed(part.bytes(matrix.n_in()))));
            }
            let grid = [Extent::Fixed(groups[0]), options.rows.extent(token_tile), Extent::Fixed(groups[1])];
            Dispatch::new(gpu, &product.key(tile), &buffers, grid)
        })
        .collect()
}

/// Most inputs of [`matvec_of_inputs`].
pub const MAX_INPUTS: usize = 6;

/// As [`multi_token_matvec`] for all tokens, where rows of the matrix have different inputs: the first rows the first of
/// `inputs`, as many as are said with it, and so on; each is `[n_tokens, n_in]`.
pub fn matvec_of_inputs(
    gpu: &GpuDevice,
    matrix: &GpuMatrix,
    inputs: &[(usize, &wgpu::Buffer)],
    token_tile: usize,
    y: &wgpu::Buffer,
    batch: &wgpu::Buffer,
) -> Result<Vec<Dispatch>, GpuError> {
    let n_rows: usize = inputs.iter().map(|(rows, _)| rows).sum();
    if n_rows != matrix.n_out() || !(1..=MAX_INPUTS).contains(&inputs.len()) {
        let why = format!("{} inputs of {n_rows} rows, of {}", inputs.len(), matrix.n_out());
        return Err(GpuError::Mismatch { what: "the inputs of a matrix".to_owned(), why });
    }
    let mut row_ends = [0; MAX_INPUTS];
    let mut end = 0;
    for (row_end, (rows, _)) in row_ends.iter_mut().zip(inputs) {
        end += rows;
        *row_end = end;
    }
    let token_tile = token_tile.clamp(1, 8);
    let options = MatvecOptions::default();
    let parts = matrix.parts().iter();
    parts
        .map(|part| {
            let product = Product { row_ends, ..Product::new(matrix, part, &options, token_tile) };
            let tile = product.tile(gpu.features());
            let groups = product.groups(tile);
            let x = Reach::Tokens(4 * matrix.n_in() as u64);
            let mut buffers: Vec<(&dyn Bind, Reach)> = vec![
                (&part.buffer, Reach::Fixed(part.bytes(matrix.n_in()))),
                (inputs[0].1, x),
                (y, options.output_reach(matrix)),
            ];
            if token_tile > 1 {
                buffers.push((batch, Reach::Batch));
            }
            buffers.extend(inputs[1..].iter().map(|(_, input)| (*input as &dyn Bind, x)));
            let grid = [Extent::Fixed(groups[0]), Extent::Tokens(token_tile as u32), Extent::Fixed(groups[1])];
            Dispatch::new(gpu, &product.key(tile), &buffers, grid)
        })
        .collect()
}

/// The product with one part of a matrix, without its buffers.
#[derive(Debug, Clone, Copy)]
struct Product {
    ty: TensorType,
    n_in: usize,
    n_out: usize,
    n_rows: usize,
    first_row: usize,
    row_step: usize,
    input: &'static str,
    eps: f32,
    output: MatvecOutput,
    rows: Rows,
    bias: bool,
    token_tile: usize,
    /// Where the rows of each input end, where there are several; zeros behind them.
    row_ends: [usize; MAX_INPUTS],
}

/// How a workgroup is laid over a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tile {
    /// Lanes that share rows, a power of two.
    pub(super) lanes: usize,
    /// Rows that they share.
    pub(super) rows: usize,
    /// Units of a row that a lane asks for at once.
    pub(super) unroll: usize,
    /// Lanes of a workgroup.
    pub(super) threads: usize,
    /// How often a workgroup takes rows, with inputs as whole numbers; 0 with floats.
    turns: usize,
    /// Pieces that inputs as whole numbers come in.
    pieces: usize,
    /// Lanes of a subgroup.
    subgroup: usize,
}

/// Lanes of a workgroup, where the lanes of a row are not more. Small, so that the rows of a small matrix spread over
/// many cores.
const THREADS: usize = 64;

/// Most lanes that share a row, and lanes that a large GPU has at most.
const WIDE_LANES: usize = 256;
const WIDE_LIMIT: usize = 1 << 19;

/// Lanes of a workgroup, rows that lanes share, and workgroups that a large GPU is busy with, where inputs are whole numbers.
/// Each workgroup turns its input into bytes, so it takes more rows. Measured on an H100.
const INTEGER_THREADS: usize = 512;
const INTEGER_ROWS: usize = 2;
const INTEGER_GROUPS: usize = 512;

/// Weights from which on inputs become whole numbers: of a product that is stored, and of one with more to it.
const INTEGER_WEIGHTS: usize = 1 << 22;
const INTEGER_WEIGHTS_OF_LAYERS: usize = 1 << 24;

/// Workgroup memory of 32 inputs as whole numbers, and most of all of them: devices have 32 KiB and more, of which sums of
/// squares take some.
const INPUT_BYTES_OF_BLOCK: usize = 116;
const INTEGER_BYTES: usize = (32 << 10) - 512;

impl Tile {
    /// Rows of a workgroup.
    pub(super) fn rows_of_a_group(self) -> usize {
        self.turns.max(1) * self.threads / self.lanes * self.rows
    }
}

/// The tile for a product of one token with `n_rows` rows of `n_in` elements of `ty`, which come in pairs or not, with inputs
/// as floats.
pub(super) fn float_tile(ty: TensorType, n_in: usize, n_rows: usize, pairs: bool, features: ShaderFeatures) -> Tile {
    let output = if pairs { MatvecOutput::Gated } else { MatvecOutput::Store };
    let product = Product {
        ty,
        n_in,
        n_out: n_rows,
        n_rows,
        first_row: 0,
        row_step: 1,
        input: "plain",
        eps: 0.0,
        output,
        rows: Rows::Tokens,
        bias: false,
        token_tile: 1,
        row_ends: [0; MAX_INPUTS],
    };
    product.tile(ShaderFeatures { integer_dot: false, ..features })
}

/// Largest extent of a grid's axis.
const MAX_GROUPS: usize = 65_535;

impl Product {
    fn new(matrix: &GpuMatrix, part: &MatrixPart, options: &MatvecOptions<'_>, token_tile: usize) -> Self {
        let (input, eps) = match options.input {
            MatvecInput::Plain => ("plain", 0.0),
            MatvecInput::RmsNorm { eps, .. } => ("rmsnorm", eps),
            MatvecInput::Silu => ("silu", 0.0),
        };
        Self {
            ty: part.ty,
            n_in: matrix.n_in(),
            n_out: matrix.n_out(),
            n_rows: part.n_rows,
            first_row: part.first_row,
            row_step: part.row_step,
            input,
            eps,
            output: options.output,
            rows: options.rows,
            bias: options.bias.is_some(),
            token_tile,
            row_ends: [0; MAX_INPUTS],
        }
    }

    /// Lanes, rows and units for a GPU of the largest kind; a small one only has more turns to take.
    ///
    /// A small matrix is bound by latency: all its rows should be on their way at once, each cut among as many lanes as
    /// can sum up without a barrier. With rows to spare, a lane takes several of them and reads its part of `x` once,
    /// and the lanes are cut down to a number that divides the row well. Words asked for at once are bounded by the
    /// registers that receive them.
    fn tile(&self, features: ShaderFeatures) -> Tile {
        let units = self.n_in.div_ceil(8);
        let max_lanes = match features.subgroup_size as usize {
            0 => 32,
            size => size.min(32),
        };
        let mut lanes = units.next_power_of_two().min(max_lanes);
        // What one lane does it does one step after the other: where the GPU has lanes to spare, several subgroups
        // share a row, for one barrier more.
        let wide = units.next_power_of_two().min(WIDE_LANES);
        let integer = self.suits_integers(features);
        if self.token_tile == 1 && features.subgroup_size >= 8 && self.n_rows * wide <= WIDE_LIMIT && !integer {
            lanes = wide;
        }
        if lanes <= 32 && self.n_rows * lanes >= 1 << 18 {
            let idle = |lanes: usize| units.next_multiple_of(lanes) - units;
            let narrower = [lanes, lanes / 2, lanes / 4].into_iter().filter(|&l| l > 0 && units.div_ceil(l) <= 9);
            lanes = narrower.min_by_key(|&l| idle(l)).unwrap_or(lanes);
        }
        let mut rows = match self.n_rows * lanes {
            _ if lanes > 32 => 1,
            n if n >= 1 << 18 => 4,
            n if n >= 1 << 17 => 2,
            _ => 1,
        };
        if self.output == MatvecOutput::Gated {
            rows = rows.max(2);
        }
        // Rows of a tile share their input.
        let starts_inside = |rows: usize| {
            self.row_ends.iter().any(|&end| end > self.first_row && !(end - self.first_row).is_multiple_of(rows))
        };
        while starts_inside(rows) {
            rows /= 2;
        }
        let words = type_info(self.ty).words;
        let registers = if self.token_tile == 1 { 40 } else { 16 };
        let most = (registers / (rows * words)).clamp(1, 9);
        let steps = units.div_ceil(lanes);
        let most = most.min(steps);
        let unroll = (most.div_ceil(2)..=most).rev().min_by_key(|&n| steps.next_multiple_of(n)).unwrap_or(1);
        let tile = Tile {
            lanes,
            rows,
            unroll,
            threads: THREADS.max(lanes),
            turns: 0,
            pieces: 1,
            subgroup: features.subgroup_size as usize,
        };
        if integer { self.integer_tile(tile) } else { tile }
    }

    /// The tile with inputs as whole numbers, `tile` being that with floats: lanes take blocks of four units.
    fn integer_tile(&self, tile: Tile) -> Tile {
        let blocks = self.n_in / 32;
        let most = tile.subgroup.min(32);
        let idle = |lanes: usize| blocks.next_multiple_of(lanes) - blocks;
        let lanes = [most, most / 2, most / 4].into_iter().filter(|&lanes| lanes > 0).min_by_key(|&lanes| idle(lanes));
        let pieces = (INPUT_BYTES_OF_BLOCK * blocks).div_ceil(INTEGER_BYTES);
        let (rows, threads) = (INTEGER_ROWS, INTEGER_THREADS);
        let tile = Tile { lanes: lanes.unwrap_or(1), rows, unroll: 1, threads, turns: 1, pieces, ..tile };
        let groups = self.n_rows.div_ceil(tile.rows_of_a_group());
        let turns = ((groups + INTEGER_GROUPS / 2) / INTEGER_GROUPS).clamp(1, 8);
        Tile { turns: if pieces == 1 { turns } else { 1 }, ..tile }
    }

    /// Whether the kernel for inputs as whole numbers reads vectors of words.
    fn has_vectors(&self) -> bool {
        type_info(self.ty).whole == Whole::Vectors
    }

    /// Whether inputs become whole numbers, which is worth it for many rows only.
    fn suits_integers(&self, features: ShaderFeatures) -> bool {
        let stored = self.output == MatvecOutput::Store && !self.bias;
        let least = if stored { INTEGER_WEIGHTS } else { INTEGER_WEIGHTS_OF_LAYERS };
        features.integer_dot
            && (4..=32).contains(&features.subgroup_size)
            && type_info(self.ty).whole != Whole::No
            && self.token_tile == 1
            && self.input != "silu"
            && self.n_inputs() == 1
            && self.n_rows * self.n_in >= least
    }

    fn n_inputs(&self) -> usize {
        self.row_ends.iter().filter(|&&end| end > 0).count().max(1)
    }

    /// Workgroups, in axes x and z, for all rows.
    fn groups(&self, tile: Tile) -> [u32; 2] {
        let groups = self.n_rows.div_ceil(tile.rows_of_a_group());
        [groups.min(MAX_GROUPS) as u32, groups.div_ceil(MAX_GROUPS) as u32]
    }

    fn key(&self, tile: Tile) -> PsoKey {
        let (output, suffix) = self.output.names();
        let ty = type_name(self.ty);
        let constants = [
            ("type", ty.into()),
            ("n_in", self.n_in.into()),
            ("n_out", self.n_out.into()),
            ("n_rows", self.n_rows.into()),
            ("first_row", self.first_row.into()),
            ("row_step", self.row_step.into()),
            ("input", self.input.into()),
            ("eps", self.eps.into()),
            ("output", output.into()),
            ("rows", self.rows.name().into()),
            ("bias", self.bias.into()),
            ("token_tile", self.token_tile.into()),
            ("lanes", tile.lanes.into()),
            ("row_tile", tile.rows.into()),
            ("unroll", tile.unroll.into()),
            ("groups_x", self.groups(tile)[0].into()),
            ("threads", tile.threads.into()),
            ("turns", tile.turns.into()),
            ("subgroup", tile.subgroup.into()),
            ("pieces", tile.pieces.into()),
            ("in_blocks", (tile.turns > 0).into()),
            ("vectors", self.has_vectors().into()),
            ("n_inputs", self.n_inputs().into()),
            ("end_0", self.row_ends[0].into()),
            ("end_1", self.row_ends[1].into()),
            ("end_2", self.row_ends[2].into()),
            ("end_3", self.row_ends[3].into()),
            ("end_4", self.row_ends[4].into()),
        ];
        let input = if self.input == "plain" { String::new() } else { format!("{}_", self.input) };
        let tokens = if self.token_tile > 1 { "multi_token_" } else { "" };
        let suffix = if self.n_inputs() > 1 { "_of_inputs" } else { suffix };
        let shader = if tile.turns > 0 { "matvec_integer" } else { "matvec" };
        let integer = if tile.turns > 0 { "_integer" } else { "" };
        PsoKey::new(shader, constants).named(format!("{input}{tokens}matvec_{ty}{suffix}{integer}"))
    }
}

/// The scalar twin: `W x` for one token, `w` `[n_out, n_in]` dequantised.
pub fn matvec_twin(w: &[f32], x: &[f32]) -> Vec<f32> {
    let dot = |row: &[f32]| row.iter().zip(x).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum::<f64>();
    w.chunks_exact(x.len()).map(|row| dot(row) as f32).collect()
}

/// Every named kernel once, with the sizes of SmolLM-135M's feed-forward or, for whole numbers, of its head or of Mistral-7B's down
/// projection, whose inputs come in pieces.
pub(crate) fn catalogue() -> Vec<PsoKey> {
    let features =
        ShaderFeatures { subgroups: true, subgroup_size: 32, f16: true, integer_dot: true, ..Default::default() };
    let mut keys = Vec::new();
    for &ty in TensorType::ALL {
        // Rows are whole blocks.
        let n_in = 576_usize.next_multiple_of(ty.block_len());
        for token_tile in [1, 4] {
            for output in [MatvecOutput::Store, MatvecOutput::Accumulate, MatvecOutput::Gated] {
                for input in ["plain", "rmsnorm", "silu"] {
                    let product = Product {
                        ty,
                        n_in,
                        n_out: 3072,
                        n_rows: 3072,
                        first_row: 0,
                        row_step: 1,
                        input,
                        eps: 1e-5,
                        output,
                        rows: Rows::Tokens,
                        bias: false,
                        token_tile,
                        row_ends: [0; MAX_INPUTS],
                    };
                    keys.push(product.key(product.tile(features)));
                    let large = match output {
                        MatvecOutput::Store | MatvecOutput::Gated => {
                            Product { n_out: 49_152, n_rows: 49_152, ..product }
                        }
                        MatvecOutput::Accumulate => Product { n_in: 14_336, n_out: 4096, n_rows: 4096, ..product },
                    };
                    if large.suits_integers(features) {
                        keys.push(large.key(large.tile(features)));
                    }
                }
            }
        }
    }
    keys
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tile(n_out: usize, n_in: usize, output: MatvecOutput, subgroup_size: u32) -> (usize, usize, usize) {
        let product = Product {
            ty: TensorType::Q4_0,
            n_in,
            n_out,
            n_rows: n_out,
            first_row: 0,
            row_step: 1,
            input: "plain",
            eps: 0.0,
            output,
            rows: Rows::Tokens,
            bias: false,
            token_tile: 1,
            row_ends: [0; MAX_INPUTS],
        };
        let tile = product.tile(ShaderFeatures { subgroups: true, subgroup_size, ..Default::default() });
        (tile.lanes, tile.rows, tile.unroll)
    }

    #[test]
    fn small_matrices_get_many_lanes_and_large_ones_many_rows() {
        let store = MatvecOutput::Store;
        assert_eq!(tile(960, 576, store, 32), (128, 1, 1));
        assert_eq!(tile(576, 1536, store, 32), (256, 1, 1));
        assert_eq!(tile(3072, 576, MatvecOutput::Gated, 32), (128, 2, 1));
        assert_eq!(tile(16_384, 2048, MatvecOutput::Gated, 32), (32, 4, 4));
        assert_eq!(tile(49_152, 576, store, 32), (8, 4, 3));
        assert_eq!(tile(128_256, 2048, store, 32), (32, 4, 4));
        // No more lanes than exchange values at once, nor than a row has units.
        assert_eq!(tile(960, 576, store, 8), (128, 1, 1));
        assert_eq!(tile(960, 576, store, 0), (32, 1, 3));
        assert_eq!(tile(960, 32, store, 64), (4, 1, 1));
    }
}
