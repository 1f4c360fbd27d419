//! Arguments of the kernels of mixtures of experts and of grouped products.

use super::{MatrixArgs, columns, kernel_args};
use crate::args::Epilogue;
use crate::matrix::{PANEL, TILE};
use crate::reach::{KernelArgs, Launch, Reach};
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
    fn reach(&self, launch: &Launch, reach: &mut Reach) {
        let [_, n, parts] = launch.grid.blocks;
        let (n_items, gated) = (self.first_item as usize + n, self.output == Epilogue::Gated as u32);
        let matrices = &self.matrices[..if gated { 2 } else { parts.min(2) }];
        let mut width = 0;
        for ((matrix, bias), tile_bytes) in matrices.iter().zip(self.bias).zip(self.tile_bytes) {
            let tiles = (matrix.n_rows as usize).div_ceil(TILE);
            reach.array("matrices", matrix.records, self.n_groups as usize * tiles * tile_bytes as usize);
            reach.array("bias", bias, self.n_groups as usize * matrix.n_rows as usize);
            width = if gated { matrix.n_rows as usize } else { width + matrix.n_rows as usize };
        }
        reach.array("groups", self.groups, n_items);
        reach.rows("x", self.x, n_items.div_ceil(self.items_a_row as usize), self.x_stride, self.n_in as usize);
        reach.rows("y", self.y, n_items, self.y_stride, width);
    }
}

impl RouteArgs {
    /// States the addresses for `n` tokens.
    pub(super) fn reach_of_tokens(&self, n: usize, reach: &mut Reach) {
        let (n_expert, n_items) = (self.n_expert as usize, n * self.n_used as usize);
        reach.array("products", self.products, n * n_expert);
        reach.array("choice_bias", self.choice_bias, n_expert);
        reach.array("expert_scale", self.expert_scale, n_expert);
        reach.array("experts", self.experts, n_items);
        reach.array("weights", self.weights, n_items);
        reach.array("input_weights", self.input_weights, n_items);
    }
}

impl KernelArgs for RouteArgs {
    fn reach(&self, launch: &Launch, reach: &mut Reach) {
        self.reach_of_tokens(launch.grid.blocks[0], reach);
    }
}

impl KernelArgs for FusedRouteArgs {
    fn reach(&self, launch: &Launch, reach: &mut Reach) {
        let (n, n_in, n_expert) = (launch.grid.blocks[1], self.n_in as usize, self.route.n_expert as usize);
        self.route.reach_of_tokens(n, reach);
        reach.array("x", self.x, n * n_in);
        reach.array("norm", self.norm, n_in);
        reach.array("h", self.h, n * n_in);
        reach.array("router", self.router, n_expert * n_in);
        reach.array("bias", self.bias, n_expert);
        reach.array("tickets", self.tickets, n);
    }
}

impl KernelArgs for WeighArgs {
    fn reach(&self, launch: &Launch, reach: &mut Reach) {
        let (n_items, n) = (launch.grid.blocks[0], self.n as usize);
        reach.array("x", self.x, n_items.div_ceil(self.n_used as usize) * n);
        reach.array("weights", self.weights, n_items);
        reach.array("out", self.out, n_items * n);
    }
}

impl KernelArgs for ExpertsActivationArgs {
    fn reach(&self, launch: &Launch, reach: &mut Reach) {
        let (n_items, n) = (launch.grid.blocks[0], self.n as usize);
        reach.array("x", self.x, n_items * n * if self.gated == 1 { 2 } else { 1 });
        reach.array("out", self.out, n_items * n);
    }
}

impl KernelArgs for ExpertsSumArgs {
    fn reach(&self, launch: &Launch, reach: &mut Reach) {
        let (n_tokens, n) = (launch.grid.blocks[1], self.n as usize);
        let n_items = n_tokens * self.n_used as usize;
        reach.array("y", self.y, n_items * n);
        reach.array("weights", self.weights, n_items);
        reach.array("shared", self.shared, n_tokens * n);
        if !self.gate.is_null() {
            reach.array("gate", self.gate, n);
            reach.array("h", self.h, n_tokens * n);
        }
        reach.array("out", self.out, n_tokens * n);
    }
}

impl KernelArgs for SortArgs {
    fn reach(&self, _: &Launch, reach: &mut Reach) {
        reach.array("groups", self.groups, self.n_items as usize);
        reach.array("items", self.items, self.n_slots as usize);
        // An entry has at least one tile of 8 slots.
        reach.array("work", self.work, self.n_slots as usize / 8);
        reach.array("n_work", self.n_work, 1);
    }
}

impl KernelArgs for GatherArgs {
    fn reach(&self, _: &Launch, reach: &mut Reach) {
        // How many items there are is not among the arguments.
        reach.array("x", self.x, self.n_in as usize);
        reach.array("items", self.items, self.n_slots as usize);
        reach.packed("packed", self.packed, self.n_slots / 8, self.n_in as usize);
    }
}

impl KernelArgs for GroupedMatmulArgs {
    fn reach(&self, launch: &Launch, reach: &mut Reach) {
        let gated = self.output == Epilogue::Gated as u32;
        let matrices = &self.matrices[..if gated { 2 } else { launch.grid.blocks[2].min(2) }];
        for (matrix, bias) in matrices.iter().zip(self.bias) {
            // How many groups there are is not among the arguments.
            reach.matrices("matrices", matrix, 1);
            reach.array("bias", bias, matrix.n_rows as usize);
        }
        reach.array("work", self.work, 1);
        reach.array("n_work", self.n_work, 1);
        reach.packed("x", self.x, self.n_slots / 8, PANEL * self.matrices[0].n_panels as usize);
        reach.array("items", self.items, self.n_slots as usize);
        reach.array("y", self.y, columns(matrices));
        reach.packed("packed", self.packed, self.n_slots / 8, self.matrices[0].n_rows as usize);
    }
}
