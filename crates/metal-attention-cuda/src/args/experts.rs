//! Arguments of the kernels of mixtures of experts and of grouped products.

use bytemuck::{Pod, Zeroable};

use super::MatrixArgs;

/// Arguments of the grouped GEMV (`grouped_matvec.cu`).
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct GroupedMatvecArgs {
    pub(crate) matrices: [MatrixArgs; 2],
    pub(crate) tile_bytes: [u32; 2],
    pub(crate) groups: u64,
    pub(crate) n_groups: u32,
    pub(crate) n_in: u32,
    pub(crate) x: u64,
    pub(crate) items_a_row: u32,
    pub(crate) x_stride: u32,
    pub(crate) bias: [u64; 2],
    pub(crate) y: u64,
    pub(crate) y_stride: u32,
    pub(crate) first_item: u32,
    pub(crate) warps_per_tile: u32,
    pub(crate) output: u32,
    pub(crate) activation: u32,
    pub(crate) unused: u32,
}

/// Arguments of the router: `RouteArgs` of `routing.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct RouteArgs {
    pub(crate) products: u64,
    pub(crate) choice_bias: u64,
    pub(crate) expert_scale: u64,
    pub(crate) experts: u64,
    pub(crate) weights: u64,
    pub(crate) input_weights: u64,
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
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct FusedRouteArgs {
    pub(crate) route: RouteArgs,
    pub(crate) x: u64,
    pub(crate) norm: u64,
    pub(crate) h: u64,
    pub(crate) router: u64,
    pub(crate) bias: u64,
    pub(crate) tickets: u64,
    pub(crate) n_in: u32,
    pub(crate) eps: f32,
}

/// Arguments of the weighting of the experts' inputs (`experts.cu`).
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct WeighArgs {
    pub(crate) x: u64,
    pub(crate) weights: u64,
    pub(crate) out: u64,
    pub(crate) n: u32,
    pub(crate) n_used: u32,
}

/// Arguments of the experts' activation (`experts.cu`).
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct ExpertsActivationArgs {
    pub(crate) x: u64,
    pub(crate) out: u64,
    pub(crate) n: u32,
    pub(crate) gated: u32,
    pub(crate) activation: u32,
    pub(crate) limit: f32,
}

/// Arguments of the weighted sum over experts (`experts.cu`).
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct ExpertsSumArgs {
    pub(crate) y: u64,
    pub(crate) weights: u64,
    pub(crate) shared: u64,
    pub(crate) gate: u64,
    pub(crate) h: u64,
    pub(crate) out: u64,
    pub(crate) n: u32,
    pub(crate) n_used: u32,
    pub(crate) add: u32,
    pub(crate) scale: f32,
}

/// Arguments of the sort of items by group (`grouped_matmul.cu`).
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct SortArgs {
    pub(crate) groups: u64,
    pub(crate) n_items: u32,
    pub(crate) n_groups: u32,
    pub(crate) items: u64,
    pub(crate) work: u64,
    pub(crate) n_work: u64,
    pub(crate) n_slots: u32,
    pub(crate) tiles_of_work: u32,
}

/// Arguments of the packing of sorted items' rows (`grouped_matmul.cu`).
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct GatherArgs {
    pub(crate) x: u64,
    pub(crate) items: u64,
    pub(crate) packed: u64,
    pub(crate) items_a_row: u32,
    pub(crate) x_stride: u32,
    pub(crate) n_in: u32,
    pub(crate) n_slots: u32,
}

/// Arguments of the grouped GEMM (`grouped_matmul.cu`).
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct GroupedMatmulArgs {
    pub(crate) matrices: [MatrixArgs; 2],
    pub(crate) tile_bytes: [u32; 2],
    pub(crate) work: u64,
    pub(crate) n_work: u64,
    pub(crate) x: u64,
    pub(crate) bias: [u64; 2],
    pub(crate) items: u64,
    pub(crate) y: u64,
    pub(crate) packed: u64,
    pub(crate) n_slots: u32,
    pub(crate) n_out: u32,
    pub(crate) output: u32,
    pub(crate) activation: u32,
}
