//! Arguments of the kernels of latent attention (`latent_attention.cu`).

use bytemuck::{Pod, Zeroable};

use super::PagesArgs;

/// Arguments of the kernel for queries and compressed rows (`latent_inputs_*`).
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct LatentInputsArgs {
    pub(crate) tokens: u64,
    pub(crate) pages: PagesArgs,
    pub(crate) cache: u64,
    pub(crate) q: u64,
    pub(crate) kv: u64,
    pub(crate) norm: u64,
    pub(crate) rope: u64,
    pub(crate) queries: u64,
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
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(crate) struct LatentAttentionArgs {
    pub(crate) tokens: u64,
    pub(crate) pages: PagesArgs,
    pub(crate) cache: u64,
    pub(crate) queries: u64,
    pub(crate) out: u64,
    pub(crate) partial: u64,
    pub(crate) n_head: u32,
    pub(crate) rank: u32,
    pub(crate) n_shared: u32,
    pub(crate) n_splits: u32,
}
