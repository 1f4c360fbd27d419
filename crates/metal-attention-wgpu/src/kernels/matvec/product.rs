//! The division of a GEMV among workgroups and lanes, and the key of its kernel.
//!
//! A *unit* is 8 consecutive elements of a row of weights. A row is shared by some lanes of a workgroup, each of which
//! reads units at a fixed distance and adds up their products; then the lanes add their sums. There are two kernels:
//! one dequantises weights to floats; the *integer* one also quantises the input to bytes, once in each workgroup, and
//! uses integer dot products.

use metal_attention_gguf::TensorType;

use super::{MAX_INPUTS, MatvecInput, MatvecOptions, MatvecOutput, TokenRows};
use crate::matrix::{IntegerCodes, MatrixPart, WgpuMatrix, type_info, type_name};
use crate::pipelines::PipelineKey;
use crate::shader::ShaderFeatures;

/// The product with one part of a matrix, without its buffers.
#[derive(Debug, Clone, Copy)]
pub(super) struct MatvecOp {
    /// Tensor type of the part.
    ty: TensorType,
    /// Elements of a row.
    n_in: usize,
    /// Rows of the matrix.
    n_out: usize,
    /// Rows of the part.
    n_rows: usize,
    /// The matrix row that is the part's row 0.
    first_row: usize,
    /// Matrix rows from one row of the part to the next.
    row_step: usize,
    /// The prologue's name in the shader.
    input: &'static str,
    /// Epsilon of the norm, if the prologue is one.
    eps: f32,
    /// The epilogue.
    output: MatvecOutput,
    /// Which rows of the input are multiplied.
    rows: TokenRows,
    /// Whether a bias is added.
    bias: bool,
    /// Tokens that share each weight.
    token_tile: usize,
    /// The row at which each of several inputs ends; zeros behind the last, and for one input.
    row_ends: [usize; MAX_INPUTS],
}

/// The layout of a workgroup over the rows of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::kernels) struct MatvecTile {
    /// Lanes that share a row, a power of two.
    pub(in crate::kernels) lanes: usize,
    /// Rows that the same lanes compute together, with one read of the input.
    pub(in crate::kernels) rows: usize,
    /// Units of each row that a lane requests before it uses them.
    pub(in crate::kernels) unroll: usize,
    /// Lanes of a workgroup.
    pub(in crate::kernels) threads: usize,
    /// In the integer kernel how many sets of rows a workgroup computes one after the other; 0: the float kernel.
    rounds: usize,
    /// In the integer kernel the pieces that the input is quantised in, if workgroup memory cannot hold it whole.
    pieces: usize,
    /// Neighbouring lanes that can exchange values without a barrier.
    exchange_lanes: usize,
}

/// Lanes of a workgroup, unless a row has more. Few, so that the rows of a small matrix spread over many cores.
const THREADS: usize = 64;

/// Most lanes that share a row.
const WIDE_LANES: usize = 256;
/// Most lanes that a product occupies by sharing rows widely: about what a large GPU has.
const WIDE_LIMIT: usize = 1 << 19;

/// Rows from which on workgroups of the integer kernel compute several sets. This and the next three are measured on an
/// H100.
const MANY_ROWS: usize = 24_576;
/// Workgroups that a large GPU then has. Few, since each one quantises the whole input.
const GROUPS: usize = 256;
/// Rows from which on lanes of the integer kernel compute two rows together.
const PAIRED_ROWS: usize = 3072;
/// Blocks of 32 inputs from which on larger workgroups share the work of quantising.
const LONG_ROWS: usize = 128;

/// Weights from which on the integer kernel is used, if the epilogue only stores.
const INTEGER_WEIGHTS: usize = 1 << 22;
/// The number of weights for other epilogues and for products with a bias.
const INTEGER_WEIGHTS_OF_LAYERS: usize = 1 << 24;

/// Workgroup memory of a quantised block of 32 inputs.
const INPUT_BYTES_OF_BLOCK: usize = 116;
/// Workgroup memory for quantised inputs: of 32 KiB, which every suitable device has, sums of squares take some.
const INTEGER_BYTES: usize = (32 << 10) - 512;

impl MatvecTile {
    /// Whether this is the integer kernel's.
    pub(super) fn is_integer(self) -> bool {
        self.rounds > 0
    }

    /// Rows that a workgroup computes.
    pub(in crate::kernels) fn rows_of_a_group(self) -> usize {
        self.rounds.max(1) * self.threads / self.lanes * self.rows
    }
}

/// The float kernel's tile for one token and `n_rows` rows of `n_in` elements of `ty`. `pairs`: rows are gate and up
/// pairs.
pub(in crate::kernels) fn float_tile(
    ty: TensorType,
    n_in: usize,
    n_rows: usize,
    pairs: bool,
    features: ShaderFeatures,
) -> MatvecTile {
    let output = if pairs { MatvecOutput::Gated } else { MatvecOutput::Store };
    let product = MatvecOp { output, ..MatvecOp::plain(ty, n_in, n_rows) };
    product.tile(ShaderFeatures { integer_dot: false, ..features })
}

/// Most workgroups along an axis of a grid.
const MAX_GROUPS: usize = 65_535;

impl MatvecOp {
    /// The product of a one-part matrix with one token's vector, without prologue and epilogue.
    fn plain(ty: TensorType, n_in: usize, n_rows: usize) -> Self {
        Self {
            ty,
            n_in,
            n_out: n_rows,
            n_rows,
            first_row: 0,
            row_step: 1,
            input: "plain",
            eps: 0.0,
            output: MatvecOutput::Store,
            rows: TokenRows::Tokens,
            bias: false,
            token_tile: 1,
            row_ends: [0; MAX_INPUTS],
        }
    }

    pub(super) fn new(
        matrix: &WgpuMatrix,
        part: &MatrixPart,
        options: &MatvecOptions<'_>,
        token_tile: usize,
        row_ends: [usize; MAX_INPUTS],
    ) -> Self {
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
            row_ends,
        }
    }

    /// The tile for a large GPU; a small one runs the workgroups in more rounds.
    ///
    /// A small matrix is bound by latency: all its rows should be read at the same time, each by as many lanes as can
    /// add up without a barrier. With rows to spare a lane computes several of them and reads its part of `x` once, and
    /// the number of lanes is reduced to one that divides the row well. The words requested at once are limited by
    /// registers.
    pub(super) fn tile(&self, features: ShaderFeatures) -> MatvecTile {
        let units = self.n_in.div_ceil(8);
        let max_lanes = match features.neighbours as usize {
            0 => 32,
            size => size.min(32),
        };
        let mut lanes = units.next_power_of_two().min(max_lanes);
        // A lane's steps are sequential: where the GPU has lanes to spare, several subgroups share a row, at the price
        // of a barrier.
        let wide = units.next_power_of_two().min(WIDE_LANES);
        let integer = self.suits_integers(features);
        if self.token_tile == 1 && features.neighbours >= 8 && self.n_rows * wide <= WIDE_LIMIT && !integer {
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
        // Rows that are computed together must have the same input.
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
        let tile = MatvecTile {
            lanes,
            rows,
            unroll,
            threads: THREADS.max(lanes),
            rounds: 0,
            pieces: 1,
            exchange_lanes: max_lanes,
        };
        if integer { self.integer_tile(tile) } else { tile }
    }

    /// The integer kernel's tile, from the float kernel's `tile`. Lanes read blocks of four units.
    fn integer_tile(&self, tile: MatvecTile) -> MatvecTile {
        let blocks = self.n_in / 32;
        let pieces = (INPUT_BYTES_OF_BLOCK * blocks).div_ceil(INTEGER_BYTES);
        let lanes = tile.exchange_lanes;
        let many = self.n_rows >= MANY_ROWS;
        let threads = if many || blocks > LONG_ROWS { 512 } else { 256 };
        let rows = if self.n_rows >= PAIRED_ROWS || self.output == MatvecOutput::Gated { 2 } else { 1 };
        let tile = MatvecTile { lanes, rows, unroll: 1, threads, rounds: 1, pieces, ..tile };
        if !many {
            // There is about one workgroup for each core: each lane requests more at once, of types that take few
            // registers.
            let steps = blocks.div_ceil(pieces).div_ceil(lanes);
            let most = if self.has_vectors() { 4 / rows } else { 1 };
            return MatvecTile { unroll: steps.clamp(1, most), ..tile };
        }
        // Fewer lanes for each row, if some would be idle.
        let idle = |tile: &MatvecTile| blocks.next_multiple_of(tile.lanes) - blocks;
        let narrower = [lanes, lanes / 2, lanes / 4].into_iter().filter(|&lanes| lanes > 0);
        let tile = narrower.map(|lanes| MatvecTile { lanes, ..tile }).min_by_key(idle).unwrap_or(tile);
        let groups = self.n_rows / tile.rows_of_a_group();
        let rounds = ((groups + GROUPS / 2) / GROUPS).clamp(1, 4 * tile.lanes / lanes);
        MatvecTile { rounds: if pieces == 1 { rounds } else { 1 }, ..tile }
    }

    /// Whether the integer kernel reads whole quantisation blocks of the type as vectors of words.
    pub(super) fn has_vectors(&self) -> bool {
        type_info(self.ty).integer_codes == IntegerCodes::Vectors
    }

    /// Whether the integer kernel is used. Quantising the input pays off for many rows only.
    fn suits_integers(&self, features: ShaderFeatures) -> bool {
        let stored = self.output == MatvecOutput::Store && !self.bias;
        let least = if stored { INTEGER_WEIGHTS } else { INTEGER_WEIGHTS_OF_LAYERS };
        features.integer_dot
            && features.neighbours >= 4
            && type_info(self.ty).integer_codes != IntegerCodes::No
            && self.token_tile == 1
            && self.input != "silu"
            && self.n_inputs() == 1
            && self.n_rows * self.n_in >= least
    }

    fn n_inputs(&self) -> usize {
        self.row_ends.iter().filter(|&&end| end > 0).count().max(1)
    }

    /// Workgroups along x and z for all rows.
    pub(super) fn groups(&self, tile: MatvecTile) -> [u32; 2] {
        let groups = self.n_rows.div_ceil(tile.rows_of_a_group());
        [groups.min(MAX_GROUPS) as u32, groups.div_ceil(MAX_GROUPS) as u32]
    }

    pub(super) fn key(&self, tile: MatvecTile) -> PipelineKey {
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
            ("turns", tile.rounds.into()),
            ("pieces", tile.pieces.into()),
            ("together", tile.exchange_lanes.into()),
            ("in_blocks", (tile.is_integer()).into()),
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
        let shader = if tile.is_integer() { "matvec_integer" } else { "matvec" };
        let integer = if tile.is_integer() { "_integer" } else { "" };
        PipelineKey::new(shader, constants).named(format!("{input}{tokens}matvec_{ty}{suffix}{integer}"))
    }
}

/// The keys of all kernels, with the sizes of SmolLM-135M's feed-forward; for the integer kernel those of its output
/// head, or of Mistral-7B's down projection, whose input is quantised in pieces.
pub(crate) fn catalogue() -> Vec<PipelineKey> {
    let features =
        ShaderFeatures { subgroups: true, neighbours: 32, f16: true, integer_dot: true, ..Default::default() };
    let mut keys = Vec::new();
    for &ty in TensorType::ALL {
        // Rows are whole quantisation blocks.
        let n_in = 576_usize.next_multiple_of(ty.block_len());
        for token_tile in [1, 4] {
            for output in [MatvecOutput::Store, MatvecOutput::Accumulate, MatvecOutput::Gated] {
                for input in ["plain", "rmsnorm", "silu"] {
                    let product = MatvecOp { input, eps: 1e-5, output, token_tile, ..MatvecOp::plain(ty, n_in, 3072) };
                    keys.push(product.key(product.tile(features)));
                    let large = match output {
                        MatvecOutput::Store | MatvecOutput::Gated => {
                            MatvecOp { n_out: 49_152, n_rows: 49_152, ..product }
                        }
                        MatvecOutput::Accumulate => MatvecOp { n_in: 14_336, n_out: 4096, n_rows: 4096, ..product },
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

    fn product(n_out: usize, n_in: usize, output: MatvecOutput) -> MatvecOp {
        MatvecOp { output, ..MatvecOp::plain(TensorType::Q4_0, n_in, n_out) }
    }

    fn tile(n_out: usize, n_in: usize, output: MatvecOutput, neighbours: u32) -> (usize, usize, usize) {
        let features = ShaderFeatures { subgroups: true, neighbours, ..Default::default() };
        let tile = product(n_out, n_in, output).tile(features);
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
        // No more lanes than can exchange values without a barrier, and no more than a row has units.
        assert_eq!(tile(960, 576, store, 8), (128, 1, 1));
        assert_eq!(tile(960, 576, store, 0), (32, 1, 3));
        assert_eq!(tile(960, 32, store, 64), (4, 1, 1));
    }

    #[test]
    fn tiles_of_the_integer_kernel() {
        let (store, accumulate, gated) = (MatvecOutput::Store, MatvecOutput::Accumulate, MatvecOutput::Gated);
        for (n_out, n_in, output, expected) in [
            (28_672, 4096, gated, (32, 2, 1, 512, 4)),
            (128_256, 2048, store, (32, 2, 1, 512, 4)),
            (49_152, 576, store, (8, 2, 1, 512, 1)),
            (4096, 14_336, accumulate, (32, 2, 2, 512, 1)),
            (5120, 4096, store, (32, 2, 2, 256, 1)),
            (2048, 8192, accumulate, (32, 1, 4, 512, 1)),
            (1152, 6912, store, (32, 1, 4, 512, 1)),
            (2048, 2048, store, (32, 1, 2, 256, 1)),
            (1024, 16_384, gated, (32, 2, 2, 512, 1)),
        ] {
            let features = ShaderFeatures { subgroups: true, neighbours: 32, integer_dot: true, ..Default::default() };
            let tile = product(n_out, n_in, output).tile(features);
            let found = (tile.lanes, tile.rows, tile.unroll, tile.threads, tile.rounds);
            assert_eq!(found, expected, "{n_out} x {n_in}");
        }
    }
}
