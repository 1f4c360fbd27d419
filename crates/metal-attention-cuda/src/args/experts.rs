//! Arguments of the kernels of mixtures of experts and of grouped products.

use super::{MatrixArgs, columns, kernel_args};
use crate::args::Epilogue;
use crate::bounds::{Bounds, KernelArgs, Launch};
use crate::matrix::{PANEL, TILE};
use crate::slice::{DevicePtr, F16};

kernel_args! {
    /// Arguments of the grouped GEMV (`grouped_matvec.cu`).
    pub(crate) struct GroupedMatvecArgs = "GroupedMatvecArgs" in "grouped_matvec.cu" {
        pub(crate) matrices: [MatrixArgs; 2],
        pub(crate) tile_bytes: [u32; 2],
        pub(crate) groups: DevicePtr<u32>,
        pub(crate) n_groups: u32,
        pub(crate) n_in: u32,
        pub(crate) x: DevicePtr<f32>,
        pub(crate) items_a_row: u32,
        pub(crate) x_stride: u32,
        pub(crate) bias: [DevicePtr<f32>; 2],
        pub(crate) y: DevicePtr<f32>,
        pub(crate) y_stride: u32,
        pub(crate) first_item: u32,
        pub(crate) warps_per_tile: u32,
        pub(crate) output: u32,
        pub(crate) activation: u32,
        pub(crate) unused: u32,
    }

    /// Arguments of the router: `RouteArgs` of `routing.cuh`.
    pub(crate) struct RouteArgs = "RouteArgs" in "routing.cuh" {
        pub(crate) products: DevicePtr<f32>,
        pub(crate) choice_bias: DevicePtr<f32>,
        pub(crate) expert_scale: DevicePtr<f32>,
        pub(crate) experts: DevicePtr<u32>,
        pub(crate) weights: DevicePtr<f32>,
        pub(crate) input_weights: DevicePtr<f32>,
        pub(crate) n_expert: u32,
        pub(crate) n_used: u32,
        pub(crate) score: u32,
        pub(crate) renormalize: u32,
        pub(crate) n_group: u32,
        pub(crate) n_group_used: u32,
        pub(crate) scale: f32,
        pub(crate) unused: u32,
    }

    /// Arguments of norm, router product and router in one launch (`route_alone` of `experts.cu`).
    pub(crate) struct FusedRouteArgs = "FusedRouteArgs" in "experts.cu" {
        pub(crate) route: RouteArgs,
        pub(crate) x: DevicePtr<f32>,
        pub(crate) norm: DevicePtr<f32>,
        pub(crate) h: DevicePtr<f32>,
        pub(crate) router: DevicePtr<f32>,
        pub(crate) bias: DevicePtr<f32>,
        pub(crate) tickets: DevicePtr<u32>,
        pub(crate) n_in: u32,
        pub(crate) eps: f32,
    }

    /// Arguments of the weighting of the experts' inputs (`experts.cu`).
    pub(crate) struct WeighArgs = "WeighArgs" in "experts.cu" {
        pub(crate) x: DevicePtr<f32>,
        pub(crate) weights: DevicePtr<f32>,
        pub(crate) out: DevicePtr<f32>,
        pub(crate) n: u32,
        pub(crate) n_used: u32,
    }

    /// Arguments of the experts' activation (`experts.cu`).
    pub(crate) struct ExpertsActivationArgs = "ExpertsActivationArgs" in "experts.cu" {
        pub(crate) x: DevicePtr<f32>,
        pub(crate) out: DevicePtr<f32>,
        pub(crate) n: u32,
        pub(crate) gated: u32,
        pub(crate) activation: u32,
        pub(crate) limit: f32,
    }

    /// Arguments of the weighted sum over experts (`experts.cu`).
    pub(crate) struct ExpertsSumArgs = "ExpertsSumArgs" in "experts.cu" {
        pub(crate) y: DevicePtr<f32>,
        pub(crate) weights: DevicePtr<f32>,
        pub(crate) shared: DevicePtr<f32>,
        pub(crate) gate: DevicePtr<f32>,
        pub(crate) h: DevicePtr<f32>,
        pub(crate) out: DevicePtr<f32>,
        pub(crate) n: u32,
        pub(crate) n_used: u32,
        pub(crate) add: u32,
        pub(crate) scale: f32,
    }

    /// Arguments of the sort of items by group (`grouped_matmul.cu`).
    pub(crate) struct SortArgs = "SortArgs" in "grouped_matmul.cu" {
        pub(crate) groups: DevicePtr<u32>,
        pub(crate) n_items: u32,
        pub(crate) n_groups: u32,
        pub(crate) items: DevicePtr<u32>,
        pub(crate) work: DevicePtr<[u32; 4]>,
        pub(crate) n_work: DevicePtr<u32>,
        pub(crate) n_slots: u32,
        pub(crate) tiles_of_work: u32,
    }

    /// Arguments of the packing of sorted items' rows (`grouped_matmul.cu`).
    pub(crate) struct GatherArgs = "GatherArgs" in "grouped_matmul.cu" {
        pub(crate) x: DevicePtr<f32>,
        pub(crate) items: DevicePtr<u32>,
        pub(crate) packed: DevicePtr<F16>,
        pub(crate) items_a_row: u32,
        pub(crate) x_stride: u32,
        pub(crate) n_in: u32,
        pub(crate) n_slots: u32,
    }

    /// Arguments of the grouped GEMM (`grouped_matmul.cu`).
    pub(crate) struct GroupedMatmulArgs = "GroupedMatmulArgs" in "grouped_matmul.cu" {
        pub(crate) matrices: [MatrixArgs; 2],
        pub(crate) tile_bytes: [u32; 2],
        pub(crate) work: DevicePtr<[u32; 4]>,
        pub(crate) n_work: DevicePtr<u32>,
        pub(crate) x: DevicePtr<F16>,
        pub(crate) bias: [DevicePtr<f32>; 2],
        pub(crate) items: DevicePtr<u32>,
        pub(crate) y: DevicePtr<f32>,
        pub(crate) packed: DevicePtr<F16>,
        pub(crate) n_slots: u32,
        pub(crate) n_out: u32,
        pub(crate) output: u32,
        pub(crate) activation: u32,
    }
}

impl KernelArgs for GroupedMatvecArgs {
    fn bounds(&self, launch: &Launch, bounds: &mut Bounds) {
        let [_, n, parts] = launch.grid.blocks;
        let (n_items, gated) = (self.first_item as usize + n, self.output == Epilogue::Gated as u32);
        let matrices = &self.matrices[..if gated { 2 } else { parts.min(2) }];
        let mut width = 0;
        for ((matrix, bias), tile_bytes) in matrices.iter().zip(self.bias).zip(self.tile_bytes) {
            let tiles = (matrix.n_rows as usize).div_ceil(TILE);
            bounds.array("matrices", matrix.records, self.n_groups as usize * tiles * tile_bytes as usize);
            bounds.array("bias", bias, self.n_groups as usize * matrix.n_rows as usize);
            width = if gated { matrix.n_rows as usize } else { width + matrix.n_rows as usize };
        }
        bounds.array("groups", self.groups, n_items);
        bounds.rows("x", self.x, n_items.div_ceil(self.items_a_row as usize), self.x_stride, self.n_in as usize);
        bounds.rows("y", self.y, n_items, self.y_stride, width);
    }
}

impl RouteArgs {
    /// States the addresses for `n` tokens.
    pub(super) fn bounds_of_tokens(&self, n: usize, bounds: &mut Bounds) {
        let (n_expert, n_items) = (self.n_expert as usize, n * self.n_used as usize);
        bounds.array("products", self.products, n * n_expert);
        bounds.array("choice_bias", self.choice_bias, n_expert);
        bounds.array("expert_scale", self.expert_scale, n_expert);
        bounds.array("experts", self.experts, n_items);
        bounds.array("weights", self.weights, n_items);
        bounds.array("input_weights", self.input_weights, n_items);
    }
}

impl KernelArgs for RouteArgs {
    fn bounds(&self, launch: &Launch, bounds: &mut Bounds) {
        self.bounds_of_tokens(launch.grid.blocks[0], bounds);
    }
}

impl KernelArgs for FusedRouteArgs {
    fn bounds(&self, launch: &Launch, bounds: &mut Bounds) {
        let (n, n_in, n_expert) = (launch.grid.blocks[1], self.n_in as usize, self.route.n_expert as usize);
        self.route.bounds_of_tokens(n, bounds);
        bounds.array("x", self.x, n * n_in);
        bounds.array("norm", self.norm, n_in);
        bounds.array("h", self.h, n * n_in);
        bounds.array("router", self.router, n_expert * n_in);
        bounds.array("bias", self.bias, n_expert);
        bounds.array("tickets", self.tickets, n);
    }
}

impl KernelArgs for WeighArgs {
    fn bounds(&self, launch: &Launch, bounds: &mut Bounds) {
        let (n_items, n) = (launch.grid.blocks[0], self.n as usize);
        bounds.array("x", self.x, n_items.div_ceil(self.n_used as usize) * n);
        bounds.array("weights", self.weights, n_items);
        bounds.array("out", self.out, n_items * n);
    }
}

impl KernelArgs for ExpertsActivationArgs {
    fn bounds(&self, launch: &Launch, bounds: &mut Bounds) {
        let (n_items, n) = (launch.grid.blocks[0], self.n as usize);
        bounds.array("x", self.x, n_items * n * if self.gated == 1 { 2 } else { 1 });
        bounds.array("out", self.out, n_items * n);
    }
}

impl KernelArgs for ExpertsSumArgs {
    fn bounds(&self, launch: &Launch, bounds: &mut Bounds) {
        let (n_tokens, n) = (launch.grid.blocks[1], self.n as usize);
        let n_items = n_tokens * self.n_used as usize;
        bounds.array("y", self.y, n_items * n);
        bounds.array("weights", self.weights, n_items);
        bounds.array("shared", self.shared, n_tokens * n);
        if !self.gate.is_null() {
            bounds.array("gate", self.gate, n);
            bounds.array("h", self.h, n_tokens * n);
        }
        bounds.array("out", self.out, n_tokens * n);
    }
}

impl KernelArgs for SortArgs {
    fn bounds(&self, _: &Launch, bounds: &mut Bounds) {
        bounds.array("groups", self.groups, self.n_items as usize);
        bounds.array("items", self.items, self.n_slots as usize);
        // An entry has at least one tile of 8 slots.
        bounds.array("work", self.work, self.n_slots as usize / 8);
        bounds.array("n_work", self.n_work, 1);
    }
}

impl KernelArgs for GatherArgs {
    fn bounds(&self, _: &Launch, bounds: &mut Bounds) {
        // How many items there are is not among the arguments.
        bounds.array("x", self.x, self.n_in as usize);
        bounds.array("items", self.items, self.n_slots as usize);
        bounds.packed("packed", self.packed, self.n_slots / 8, self.n_in as usize);
    }
}

impl KernelArgs for GroupedMatmulArgs {
    fn bounds(&self, launch: &Launch, bounds: &mut Bounds) {
        let gated = self.output == Epilogue::Gated as u32;
        let matrices = &self.matrices[..if gated { 2 } else { launch.grid.blocks[2].min(2) }];
        for (matrix, bias) in matrices.iter().zip(self.bias) {
            // How many groups there are is not among the arguments.
            bounds.matrices("matrices", matrix, 1);
            bounds.array("bias", bias, matrix.n_rows as usize);
        }
        bounds.array("work", self.work, 1);
        bounds.array("n_work", self.n_work, 1);
        bounds.packed("x", self.x, self.n_slots / 8, PANEL * self.matrices[0].n_panels as usize);
        bounds.array("items", self.items, self.n_slots as usize);
        bounds.array("y", self.y, columns(matrices));
        bounds.packed("packed", self.packed, self.n_slots / 8, self.matrices[0].n_rows as usize);
    }
}
