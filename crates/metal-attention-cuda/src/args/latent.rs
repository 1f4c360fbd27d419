//! Arguments of the kernels of latent attention (`latent_attention.cu`).

use metal_attention_model::PAGE;

use super::{PagesArgs, TokenArgs, kernel_args};
use crate::bounds::{Bounds, KernelArgs, Launch};
use crate::slice::DevicePtr;

kernel_args! {
    /// Arguments of the kernel for queries and compressed rows (`latent_inputs_*`).
    pub(crate) struct LatentInputsArgs = "LatentInputsArgs" in "latent_attention.cu" {
        pub(crate) tokens: DevicePtr<TokenArgs>,
        pub(crate) pages: PagesArgs,
        pub(crate) cache: DevicePtr<u8>,
        pub(crate) q: DevicePtr<f32>,
        pub(crate) kv: DevicePtr<f32>,
        pub(crate) norm: DevicePtr<f32>,
        pub(crate) rope: DevicePtr<[f32; 2]>,
        pub(crate) queries: DevicePtr<f32>,
        pub(crate) n_head: u32,
        pub(crate) n_nope: u32,
        pub(crate) rank: u32,
        pub(crate) n_shared: u32,
        pub(crate) rotation: u32,
        pub(crate) eps: f32,
        pub(crate) scale: f32,
        pub(crate) temperature: f32,
        pub(crate) length: u32,
        pub(crate) offset: u32,
    }

    /// Arguments of attention over compressed rows (`latent_attention_*`, `latent_merge`).
    pub(crate) struct LatentAttentionArgs = "LatentAttentionArgs" in "latent_attention.cu" {
        pub(crate) tokens: DevicePtr<TokenArgs>,
        pub(crate) pages: PagesArgs,
        pub(crate) cache: DevicePtr<u8>,
        pub(crate) queries: DevicePtr<f32>,
        pub(crate) out: DevicePtr<f32>,
        pub(crate) partial: DevicePtr<f32>,
        pub(crate) n_head: u32,
        pub(crate) rank: u32,
        pub(crate) n_shared: u32,
        pub(crate) n_splits: u32,
    }
}

impl KernelArgs for LatentInputsArgs {
    fn bounds(&self, launch: &Launch, bounds: &mut Bounds) {
        let n = launch.grid.blocks[1];
        let [n_head, n_nope, rank, n_shared] = [self.n_head, self.n_nope, self.rank, self.n_shared].map(|n| n as usize);
        self.pages.bounds(bounds);
        bounds.array("tokens", self.tokens, n);
        bounds.array("cache", self.cache, PAGE * (rank + n_shared) * launch.cache_bytes());
        bounds.array("q", self.q, n * n_head * (n_nope + n_shared));
        bounds.array("kv", self.kv, n * (rank + n_shared));
        bounds.array("norm", self.norm, rank);
        bounds.array("rope", self.rope, n_shared / 2);
        bounds.array("queries", self.queries, n * n_head * (rank + n_shared));
    }
}

impl KernelArgs for LatentAttentionArgs {
    fn bounds(&self, launch: &Launch, bounds: &mut Bounds) {
        let n = launch.grid.blocks[if launch.kernel == "latent_merge" { 1 } else { 2 }];
        let [n_head, rank, n_shared, n_splits] =
            [self.n_head, self.rank, self.n_shared, self.n_splits].map(|n| n as usize);
        self.pages.bounds(bounds);
        bounds.array("tokens", self.tokens, n);
        bounds.array("cache", self.cache, PAGE * (rank + n_shared) * launch.cache_bytes());
        bounds.array("queries", self.queries, n * n_head * (rank + n_shared));
        bounds.array("out", self.out, n * n_head * rank);
        if n_splits > 1 {
            bounds.array("partial", self.partial, n * n_head * n_splits * (rank + 2));
        }
    }
}
