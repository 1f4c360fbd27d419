//! Products of matrices with the rows of tokens, and the norms before them.

use super::ModelRunner;
use crate::CudaError;
use crate::args::{Epilogue, MAX_PARTS, MatmulArgs, MatrixArgs, MatvecArgs, NormArgs, OddRowsArgs};
use crate::device::CudaBuffer;
use crate::launch::LaunchGrid;
use crate::matrix::{CudaMatrix, PANEL, TILE, WeightLayout};
use crate::support::norm_kind;
use crate::weights::{CudaLinear, CudaNorm};

/// Tokens that a product takes as exactly as F32, and in one go.
pub(super) const GEMV_TOKENS: usize = 4;
/// Warps of a block of products.
pub(super) const WARPS: usize = 8;
/// Warps that keep the memory busy.
pub(super) const BUSY_WARPS: usize = 2112;
/// Elements of a matrix from which on two blocks a multiprocessor are better than one even where they have no room together.
const LARGE: usize = 8 << 20;
/// Workgroup memory that a block takes besides what it asks for.
const SYSTEM_SHARED: usize = 1 << 10;
/// Blocks of products of up to some tokens that run together on a multiprocessor.
pub(super) const BLOCKS_PER_SM: usize = 2;
/// Panels that a warp asks for at once.
pub(super) const PANELS_AHEAD: usize = 4;

/// The input of a product.
#[derive(Clone, Copy)]
pub(super) enum LinearInput {
    /// F32 rows, which may go through a norm on the way: address of the rows, weight of the norm or 0, its epsilon.
    Rows { x: u64, norm: u64, eps: f32 },
    /// Packed F16.
    Packed(u64),
}

/// A product over all tokens.
pub(super) struct LinearOp<'a> {
    /// What it is, for a profile.
    pub(super) what: &'static str,
    /// One matrix below the other; GATED: those of the gate, then those of up.
    pub(super) matrices: Vec<(&'a CudaMatrix, usize)>,
    pub(super) n_out: usize,
    pub(super) epilogue: Epilogue,
    pub(super) activation: u32,
    pub(super) scale: f32,
    pub(super) bias: u64,
    /// F32 rows, and where GATED over many tokens packed F16.
    pub(super) y: u64,
    pub(super) packed: u64,
}

impl<'a> LinearOp<'a> {
    /// That of one matrix, but for where it goes.
    pub(super) fn stored(what: &'static str, matrix: &'a CudaMatrix) -> Self {
        Self {
            what,
            matrices: vec![(matrix, 0)],
            n_out: matrix.n_rows,
            epilogue: Epilogue::Store,
            activation: 0,
            scale: 1.0,
            bias: 0,
            y: 0,
            packed: 0,
        }
    }

    /// What products of one to four tokens with some of its matrices take, but for how they are shared out and their input.
    fn matvec_args(&self, matrices: &[(&CudaMatrix, usize)], n_in: usize) -> MatvecArgs {
        MatvecArgs {
            parts: matrix_args(matrices),
            n_parts: matrices.len() as u32,
            n_in: n_in as u32,
            n_out: self.n_out as u32,
            output: self.epilogue as u32,
            activation: self.activation,
            scale: self.scale,
            bias: self.bias,
            y: self.y,
            ..bytemuck::Zeroable::zeroed()
        }
    }

    /// The matrices of each launch of kernels that take several; GATED: the gate and up.
    fn launches(&self) -> std::slice::Chunks<'_, (&'a CudaMatrix, usize)> {
        self.matrices.chunks(MAX_PARTS)
    }

    /// How many blocks of `n_tiles` tiles of rows a launch has, GATED of the gate's, and with which each of its matrices ends.
    pub(super) fn blocks_of(&self, matrices: &[(&CudaMatrix, usize)], n_tiles: usize) -> ([u32; MAX_PARTS], usize) {
        let mut ends = [0; MAX_PARTS];
        let mut n_blocks = 0;
        for (end, (matrix, _)) in ends.iter_mut().zip(self.stacked_matrices(matrices)) {
            n_blocks += matrix.n_tiles().div_ceil(n_tiles);
            *end = n_blocks as u32;
        }
        (ends, n_blocks)
    }

    /// Those of a launch's matrices that lie one below the other; GATED: the gate alone, up lies beside it.
    pub(super) fn stacked_matrices<'b, 'm>(
        &self,
        matrices: &'b [(&'m CudaMatrix, usize)],
    ) -> &'b [(&'m CudaMatrix, usize)] {
        if self.epilogue == Epilogue::Gated { &matrices[..1] } else { matrices }
    }

    /// Its matrices one by one, each beside itself; GATED: the gate beside up.
    fn products(&self) -> Vec<[(&'a CudaMatrix, usize); 2]> {
        match (&self.matrices[..], self.epilogue) {
            ([gate, up], Epilogue::Gated) => vec![[*gate, *up]],
            (parts, Epilogue::Store | Epilogue::Add | Epilogue::Gated) => {
                parts.iter().map(|part| [*part, *part]).collect()
            }
        }
    }
}

/// Up to [`MAX_PARTS`] matrices, with the rows that come before each.
pub(super) fn matrix_args(matrices: &[(&CudaMatrix, usize)]) -> [MatrixArgs; MAX_PARTS] {
    let mut parts = [MatrixArgs { ..bytemuck::Zeroable::zeroed() }; MAX_PARTS];
    for (to, (matrix, first)) in parts.iter_mut().zip(matrices) {
        *to = matrix.args(*first);
    }
    parts
}

/// The norm of rows of `n_in` elements at `x`, or the rows as they are, but for where they go.
pub(super) fn norm_args(norm: Option<&CudaNorm>, x: u64, n_in: usize) -> NormArgs {
    NormArgs {
        x,
        weight: norm.map_or(0, |norm| norm.weight.ptr()),
        bias: norm.and_then(|norm| norm.bias.as_ref()).map_or(0, CudaBuffer::ptr),
        packed: 0,
        out: 0,
        rows: 0,
        n_in: n_in as u32,
        n_token_tiles: 0,
        kind: norm.map_or(0, |norm| norm_kind(norm.kind)),
        eps: norm.map_or(0.0, |norm| norm.eps),
        scale: 1.0,
        accumulate: 0,
    }
}

/// The power of two that is `n` or less.
pub(super) fn previous_power_of_two(n: usize) -> usize {
    if n.is_power_of_two() { n } else { n.next_power_of_two() / 2 }
}

/// Workgroup memory of `matvec_part` over matrices of these formats: records on their way, zeros, squares, sums that meet, and the inputs.
pub(super) fn gemv_shared_bytes(
    formats: impl Iterator<Item = WeightLayout>,
    n_panels: usize,
    n_tokens: usize,
) -> usize {
    let (ring, of_panel) = formats.fold((7168, 216), |(ring, of_panel), format| {
        (if format == WeightLayout::F32 { 8192 } else { ring }, if format.has_codes() { of_panel } else { 264 })
    });
    let of_token = 4 * (WARPS + 4 * WARPS * TILE) + (n_panels * of_panel).next_multiple_of(16);
    WARPS * (ring + 16) + n_tokens * of_token
}

impl ModelRunner {
    /// How many tokens go through products of the first kind; of longer steps inputs are packed.
    pub(super) fn uses_f32_inputs(&self, n_tokens: usize) -> bool {
        self.exact || n_tokens <= GEMV_TOKENS
    }

    /// Rows that a product takes as they are.
    pub(super) fn input(&self, rows: &CudaBuffer, packed: &CudaBuffer, n_tokens: usize) -> LinearInput {
        if self.uses_f32_inputs(n_tokens) {
            LinearInput::Rows { x: rows.ptr(), norm: 0, eps: 0.0 }
        } else {
            LinearInput::Packed(packed.ptr())
        }
    }

    /// Rows of the residual stream that products take through a norm: on their way, or made before.
    pub(super) fn normed(
        &mut self,
        norm: Option<&CudaNorm>,
        n_embd: usize,
        n_tokens: usize,
    ) -> Result<LinearInput, CudaError> {
        let (x, h, packed) = (self.buffers.x.ptr(), self.buffers.h.ptr(), self.buffers.packed_x.ptr());
        if !self.uses_f32_inputs(n_tokens) {
            self.norm(NormArgs { packed, ..norm_args(norm, x, n_embd) }, n_tokens)?;
            return Ok(LinearInput::Packed(packed));
        }
        match norm {
            None => Ok(LinearInput::Rows { x, norm: 0, eps: 0.0 }),
            Some(norm) if norm.fuses_with_product() => {
                Ok(LinearInput::Rows { x, norm: norm.weight.ptr(), eps: norm.eps })
            }
            Some(_) => {
                self.norm(NormArgs { out: h, ..norm_args(norm, x, n_embd) }, n_tokens)?;
                Ok(LinearInput::Rows { x: h, norm: 0, eps: 0.0 })
            }
        }
    }

    /// The same, in `h`, too, as F32 rows.
    pub(super) fn normed_with_f32(
        &mut self,
        norm: Option<&CudaNorm>,
        n_embd: usize,
        n_tokens: usize,
    ) -> Result<LinearInput, CudaError> {
        let (x, h, packed) = (self.buffers.x.ptr(), self.buffers.h.ptr(), self.buffers.packed_x.ptr());
        let args = NormArgs { out: h, ..norm_args(norm, x, n_embd) };
        if self.uses_f32_inputs(n_tokens) {
            self.norm(args, n_tokens)?;
            return Ok(LinearInput::Rows { x: h, norm: 0, eps: 0.0 });
        }
        self.norm(NormArgs { packed, ..args }, n_tokens)?;
        Ok(LinearInput::Packed(packed))
    }

    /// Rows of `n_in` elements, as wide as the residual stream at most, that products take as they are.
    pub(super) fn rows(&mut self, x: u64, n_in: usize, n_tokens: usize) -> Result<LinearInput, CudaError> {
        if self.uses_f32_inputs(n_tokens) {
            return Ok(LinearInput::Rows { x, norm: 0, eps: 0.0 });
        }
        let packed = self.buffers.packed_rows.ptr();
        self.norm(NormArgs { packed, ..norm_args(None, x, n_in) }, n_tokens)?;
        Ok(LinearInput::Packed(packed))
    }

    /// Norms of `n_rows` rows.
    pub(super) fn norm(&mut self, args: NormArgs, n_rows: usize) -> Result<(), CudaError> {
        let n_token_tiles = self.packed_layout(n_rows);
        let grid = LaunchGrid { blocks: [n_rows, 1, 1], threads: 256, shared: 0 };
        self.launch("norm_rows", "", grid, &NormArgs { n_token_tiles, ..args })
    }

    /// The product of one matrix, stored as rows at `y`.
    pub(super) fn store(
        &mut self,
        what: &'static str,
        linear: &CudaLinear,
        input: LinearInput,
        y: u64,
        n_tokens: usize,
    ) -> Result<(), CudaError> {
        let product = LinearOp { y, bias: linear.bias(), ..LinearOp::stored(what, &linear.weight) };
        self.product(&product, input, linear.weight.n_in, n_tokens)
    }

    /// Tokens whose inputs a block has room for.
    pub(super) fn gemv_tokens(&self, formats: &(impl Iterator<Item = WeightLayout> + Clone), n_in: usize) -> usize {
        let room = self.gpu.summary().max_shared;
        let fits = |n: &usize| gemv_shared_bytes(formats.clone(), n_in.div_ceil(PANEL), *n) <= room;
        (2..=GEMV_TOKENS).rev().find(fits).unwrap_or(1)
    }

    /// `y = W x` of all tokens.
    pub(super) fn product(
        &mut self,
        p: &LinearOp<'_>,
        input: LinearInput,
        n_in: usize,
        n_tokens: usize,
    ) -> Result<(), CudaError> {
        match input {
            LinearInput::Rows { x, norm, eps } => {
                let at = |rows: u64, token: usize, width: usize| rows + (4 * token * width) as u64;
                let most = self.gemv_tokens(&p.matrices.iter().map(|(matrix, _)| matrix.format), n_in);
                let together = if n_in.is_multiple_of(4) && most == GEMV_TOKENS { n_tokens / most } else { 0 };
                let first = if together > 1 { together * GEMV_TOKENS } else { 0 };
                if together > 1 {
                    self.gemv_token_groups(p, (x, norm, eps), n_in, together)?;
                }
                for token in (first..n_tokens).step_by(most) {
                    let n = (n_tokens - token).min(most);
                    self.matvec(p, at(x, token, n_in), norm, eps, 0, at(p.y, token, p.n_out), n_in, n)?;
                }
                Ok(())
            }
            LinearInput::Packed(x) => self.matmul(p, x, n_tokens),
        }
    }

    #[expect(clippy::too_many_arguments, reason = "the addresses of a product")]
    pub(super) fn matvec(
        &mut self,
        p: &LinearOp<'_>,
        x: u64,
        norm: u64,
        eps: f32,
        rows: u64,
        y: u64,
        n_in: usize,
        n_tokens: usize,
    ) -> Result<(), CudaError> {
        if !n_in.is_multiple_of(4) {
            return self.odd_rows(p, x, rows, y, n_in, n_tokens);
        }
        let gated = p.epilogue == Epilogue::Gated;
        let n_stacked = if gated { 1 } else { p.matrices.len() };
        let tiles: Vec<usize> = p.matrices[..n_stacked].iter().map(|(matrix, _)| matrix.n_tiles()).collect();
        let n_tiles: usize = tiles.iter().sum();
        let n_panels = n_in.div_ceil(PANEL);
        // As few warps a tile as keep the memory busy, and as leave each enough to ask for.
        let most = (n_panels / PANELS_AHEAD).clamp(1, WARPS);
        let warps_a_tile = BUSY_WARPS.div_ceil(n_tiles).clamp(1, most).next_power_of_two();
        let warps_a_tile = if warps_a_tile > most { warps_a_tile / 2 } else { warps_a_tile };
        let shared = gemv_shared_bytes(p.matrices.iter().map(|(matrix, _)| matrix.format), n_panels, n_tokens);
        let summary = self.gpu.summary();
        let fit = BLOCKS_PER_SM * (shared + SYSTEM_SHARED) <= summary.max_shared;
        let most_blocks = summary.n_sm * if fit || n_tiles * TILE * n_in > LARGE { BLOCKS_PER_SM } else { 1 };
        let groups = tiles.iter().map(|tiles| tiles.div_ceil(WARPS / warps_a_tile));
        let n_groups: usize = groups.clone().sum();
        let share = |groups: usize| {
            if n_groups <= most_blocks { groups } else { (most_blocks * groups / n_groups).max(1) }
        };
        let mut blocks = [0; MAX_PARTS];
        let mut n_blocks = 0;
        for (end, groups) in blocks.iter_mut().zip(groups) {
            n_blocks += share(groups);
            *end = n_blocks as u32;
        }
        let warps_a_tile = warps_a_tile as u32;
        let args = MatvecArgs { blocks, warps_a_tile, eps, x, norm, y, rows, ..p.matvec_args(&p.matrices, n_in) };
        let grid = LaunchGrid { blocks: [n_blocks, 1, 1], threads: 32 * WARPS, shared };
        self.launch(["matvec_1", "matvec_2", "matvec_3", "matvec_4"][n_tokens - 1], p.what, grid, &args)
    }

    /// The product of so many times [`GEMV_TOKENS`] rows.
    fn gemv_token_groups(
        &mut self,
        p: &LinearOp<'_>,
        (x, norm, eps): (u64, u64, f32),
        n_in: usize,
        groups: usize,
    ) -> Result<(), CudaError> {
        let whole = [p.matrices.as_slice()];
        let products: Vec<_> = match p.epilogue {
            Epilogue::Gated => whole.to_vec(),
            Epilogue::Store | Epilogue::Add => p.matrices.chunks(1).collect(),
        };
        for matrices in products {
            let (n_tiles, n_panels) = (matrices[0].0.n_tiles(), n_in.div_ceil(PANEL));
            let most = (n_panels / PANELS_AHEAD).clamp(1, WARPS);
            let warps_a_tile = previous_power_of_two(BUSY_WARPS.div_ceil(n_tiles * groups).clamp(1, most));
            let tile_groups = n_tiles.div_ceil(WARPS / warps_a_tile);
            // A block makes its input once, however many tiles it goes through.
            let blocks = (BLOCKS_PER_SM * self.gpu.summary().n_sm).div_ceil(groups).clamp(1, tile_groups);
            let (blocks_of, warps_a_tile) = ([blocks as u32; MAX_PARTS], warps_a_tile as u32);
            let args = MatvecArgs { blocks: blocks_of, warps_a_tile, eps, x, norm, ..p.matvec_args(matrices, n_in) };
            let shared = gemv_shared_bytes(matrices.iter().map(|(matrix, _)| matrix.format), n_panels, GEMV_TOKENS);
            let grid = LaunchGrid { blocks: [blocks, groups, 1], threads: 32 * WARPS, shared };
            self.launch("matvec_rows", p.what, grid, &args)?;
        }
        Ok(())
    }

    /// Products with rows that no four elements lie together of.
    fn odd_rows(
        &mut self,
        p: &LinearOp<'_>,
        x: u64,
        rows: u64,
        y: u64,
        n_in: usize,
        n_tokens: usize,
    ) -> Result<(), CudaError> {
        for [(a, first), (b, _)] in p.products() {
            let args = OddRowsArgs {
                a: a.args(first),
                b: b.args(first),
                x,
                bias: p.bias,
                y,
                rows,
                n_in: n_in as u32,
                n_out: p.n_out as u32,
                output: p.epilogue as u32,
                activation: p.activation,
                scale: p.scale,
                unused: 0,
            };
            let grid = LaunchGrid { blocks: [a.n_rows.div_ceil(128), n_tokens, 1], threads: 128, shared: 0 };
            self.launch("odd_rows", p.what, grid, &args)?;
        }
        Ok(())
    }

    pub(super) fn matmul(&mut self, p: &LinearOp<'_>, x: u64, n_tokens: usize) -> Result<(), CudaError> {
        // Kernels of the other kind have one format for gate and up.
        let unlike =
            p.epilogue == Epilogue::Gated && p.matrices.iter().any(|(part, _)| part.format != p.matrices[0].0.format);
        let has_wgmma = self.gpu.summary().has_wgmma();
        if n_tokens <= self.few_tokens || unlike && !has_wgmma {
            return p.launches().try_for_each(|matrices| self.matmul_few(p, matrices, x, n_tokens));
        }
        if has_wgmma {
            return p.launches().try_for_each(|matrices| self.matmul_wide(p, matrices, x, n_tokens));
        }
        let token_tiles = n_tokens.div_ceil(8);
        let gated = p.epilogue == Epilogue::Gated;
        for [(a, first), (b, _)] in p.products() {
            let args = MatmulArgs {
                a: a.args(first),
                b: b.args(first),
                x,
                n_tokens: n_tokens as u32,
                n_token_tiles: token_tiles as u32,
                n_out: p.n_out as u32,
                output: p.epilogue as u32,
                activation: p.activation,
                scale: p.scale,
                bias: p.bias,
                y: p.y,
                packed: p.packed,
                y_token_tiles: token_tiles as u32,
                unused: 0,
            };
            let rows = a.n_tiles().div_ceil(if gated { 4 } else { 8 });
            let grid =
                LaunchGrid { blocks: [token_tiles.div_ceil(16), rows, 1], threads: 32 * WARPS, shared: 4 * 16 * 1024 };
            self.launch(&format!("matmul_{}", WeightLayout::name(a.format)), p.what, grid, &args)?;
        }
        Ok(())
    }
}
