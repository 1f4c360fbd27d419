//! The products of a time mix: low-rank products, and several products of a single token in one launch (`side_products` of
//! `rwkv.cu`).

use bytemuck::Zeroable;
use metal_attention_model::LowRankWeights;

use crate::CudaError;
use crate::args::{ElementwiseFunction, InputFunction, MAX_SIDE_PRODUCTS, SideProductArgs, SideProductsArgs};
use crate::kernels;
use crate::launch::LaunchGrid;
use crate::matrix::PANEL;
use crate::runner::linear::{PREFETCHED_PANELS, WARPS, WARPS_IN_FLIGHT, gemv_shared_bytes, previous_power_of_two};
use crate::runner::{MicroBatch, ModelRunner};
use crate::slice::DeviceSlice;
use crate::weights::{CudaLinear, Loader};

/// Most elements of an input to which `side_products` applies a function: `MAX_CHANGED` of `rwkv.cu`.
const MAX_CHANGED: usize = 1024;

/// A low-rank product, `up(down(x))`.
#[derive(Debug)]
pub(crate) struct CudaLowRank {
    /// `[rank, n_in]`.
    pub(super) down: CudaLinear,
    /// `[n_out, rank]`.
    pub(super) up: CudaLinear,
}

impl CudaLowRank {
    /// Uploads the two matrices.
    pub(super) fn new(loader: &mut Loader<'_>, w: &LowRankWeights) -> Result<Self, CudaError> {
        Ok(Self { down: loader.linear(&w.down)?, up: loader.linear(&w.up)? })
    }
}

/// One of several independent products of a single token in one launch.
pub(super) struct SideProduct<'w> {
    /// The matrix and its bias.
    pub(super) linear: &'w CudaLinear,
    /// The input row.
    pub(super) x: DeviceSlice<f32>,
    /// The result.
    pub(super) y: DeviceSlice<f32>,
    /// The function on the input.
    pub(super) function: InputFunction,
}

/// A low-rank product `up(function(down(x)))`.
pub(super) struct LowRank<'w> {
    /// The two matrices.
    pub(super) weights: &'w CudaLowRank,
    /// The function on the inner row.
    pub(super) function: InputFunction,
    /// The input rows.
    pub(super) x: DeviceSlice<f32>,
    /// The inner rows.
    pub(super) middle: DeviceSlice<f32>,
    /// The result.
    pub(super) y: DeviceSlice<f32>,
}

impl<'w> LowRank<'w> {
    /// The first of its two products.
    pub(super) fn first(&self) -> SideProduct<'w> {
        SideProduct { linear: &self.weights.down, x: self.x, y: self.middle, function: InputFunction::AsItLies }
    }

    /// The second, which applies the function to its input.
    pub(super) fn second(&self) -> SideProduct<'w> {
        SideProduct { linear: &self.weights.up, x: self.middle, y: self.y, function: self.function }
    }
}

impl SideProduct<'_> {
    /// Whether `side_products` can compute it: no bias, and vector loads.
    pub(super) fn can_run_beside(&self) -> bool {
        let n_in = self.linear.weight.n_in;
        let changes = self.function != InputFunction::AsItLies;
        self.linear.bias.is_none() && n_in.is_multiple_of(4) && (n_in <= MAX_CHANGED || !changes)
    }
}

impl ModelRunner {
    /// Launches independent products of a single token together, so that small matrices, too, occupy the device.
    pub(super) fn side_products(&mut self, label: &'static str, products: &[SideProduct<'_>]) -> Result<(), CudaError> {
        let n_tiles: usize = products.iter().map(|product| product.linear.weight.n_tiles()).sum();
        let n_sm = self.gpu.summary().n_sm;
        // Warps that share a tile; groups of tiles that a block processes in turn; and a measure of the work, by which blocks are
        // divided among the products.
        let shares = products.iter().map(|product| {
            let matrix = &product.linear.weight;
            let n_panels = matrix.n_in.div_ceil(PANEL);
            let max_warps = (n_panels / PREFETCHED_PANELS).clamp(1, WARPS);
            let warps_per_tile = previous_power_of_two(
                WARPS_IN_FLIGHT.div_ceil(n_tiles).clamp(1, max_warps).next_power_of_two().min(max_warps),
            );
            let groups = matrix.n_tiles().div_ceil(WARPS / warps_per_tile);
            (warps_per_tile, groups, groups * n_panels.div_ceil(warps_per_tile))
        });
        let shares: Vec<_> = shares.collect();
        let work: usize = shares.iter().map(|(_, _, work)| work).sum();
        let mut args = SideProductsArgs::zeroed();
        let (mut n_blocks, mut shared) = (0, 0);
        for ((to, product), (warps_per_tile, groups, panels)) in args.products.iter_mut().zip(products).zip(shares) {
            let matrix = &product.linear.weight;
            n_blocks += (n_sm * panels).div_ceil(work).clamp(1, groups);
            shared = shared.max(gemv_shared_bytes([matrix.layout].into_iter(), matrix.n_in.div_ceil(PANEL), 1));
            *to = SideProductArgs {
                matrix: matrix.args(0),
                x: product.x.ptr(),
                y: product.y.ptr(),
                n_in: matrix.n_in as u32,
                end: n_blocks as u32,
                warps_per_tile: warps_per_tile as u32,
                function: product.function as u32,
            };
        }
        assert!(products.len() <= MAX_SIDE_PRODUCTS, "{} products", products.len());
        let grid = LaunchGrid { blocks: [n_blocks, 1, 1], threads: 32 * WARPS, shared };
        self.launch(kernels::SIDE_PRODUCTS, label, grid, &args)
    }

    /// Launches `y = up(function(down(x)))`, with the inner rows `middle`.
    pub(super) fn low_rank(
        &mut self,
        batch: MicroBatch<'_>,
        w: &CudaLowRank,
        function: InputFunction,
        [x, middle, y]: [DeviceSlice<f32>; 3],
    ) -> Result<(), CudaError> {
        self.store_rows(batch, "low rank", &w.down, x, middle)?;
        let function = match function {
            InputFunction::AsItLies => None,
            InputFunction::Tanh => Some(ElementwiseFunction::Tanh),
            InputFunction::Sigmoid => Some(ElementwiseFunction::Sigmoid),
        };
        if let Some(function) = function {
            self.elementwise(batch, function, middle, DeviceSlice::NONE, w.down.weight.n_rows)?;
        }
        self.store_rows(batch, "low rank", &w.up, middle, y)
    }
}
