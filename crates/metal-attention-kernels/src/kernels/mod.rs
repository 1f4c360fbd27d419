//! One module per family of kernels: each function binds buffers to a pipeline; its scalar twin is
//! beside it.

mod argmax;
mod attention;
mod buffer_copy;
mod decode_attention;
mod decode_layers;
mod embedding;
mod experts;
mod ffn_silu;
mod kv_cache;
mod matmul;
mod matmul_split;
mod matvec;
mod prefill_attention;
mod rates;
mod residual_add;
mod rmsnorm;
mod rope;
mod top_k;

pub use argmax::{argmax, argmax_scratch_bytes};
pub use attention::{AttentionBuffers, AttentionShape, AttentionTwin};
pub use buffer_copy::buffer_copy;
pub use decode_attention::{decode_attention, decode_attention_merge, n_splits, partial_bytes};
pub use decode_layers::{LayerMatrices, LayersBuffers, LayersShape, decode_layers};
pub use embedding::{embedding, embedding_twin};
pub use experts::{
    ExpertsMatrices, ExpertsScratch, ExpertsShape, ExpertsValues, FEW_TOKENS, MAX_USED_EXPERTS, experts_matmul,
    experts_matmul_by, experts_matvec, experts_method, experts_twin, route,
};
pub use ffn_silu::{ffn_silu, ffn_silu_twin};
pub use kv_cache::{kv_cache_copy, kv_cache_copy_twin};
pub use matmul::{CooperativeTile, MatmulMethod, MatmulScratch, all_on_units, matmul, matmul_by, matmul_method};
pub use matmul_split::{SplitTile, split_matmul, split_tile};
pub use matvec::{MatvecInput, MatvecOptions, MatvecOutput, Rows, TOKEN_TILE, matvec, matvec_twin, multi_token_matvec};
pub use prefill_attention::{attends_on_units, prefill_attention, prefill_attention_cooperative};
pub use rates::{rate_floats, rate_floats_work, rate_matrix, rate_matrix_work, rate_read, rate_sums};
pub use residual_add::{residual_add, residual_add_twin};
pub use rmsnorm::{RmsNorm, rmsnorm, rmsnorm_twin};
pub use rope::{RopeShape, norm_rope_twin, rope_append, rope_apply, rope_apply_dual, rope_table, rope_twin};
pub use top_k::{MAX_TOP_K, top_k, top_k_list, top_k_scratch_bytes};

use crate::pso::PsoKey;

/// Every kernel by its name, with the constants of a small model: SmolLM-135M where there is a choice.
pub fn catalogue() -> Vec<PsoKey> {
    [
        matmul::catalogue(),
        matmul_split::catalogue(),
        matvec::catalogue(),
        embedding::catalogue(),
        prefill_attention::catalogue(),
        decode_attention::catalogue(),
        decode_layers::catalogue(),
        kv_cache::catalogue(),
        buffer_copy::catalogue(),
        rope::catalogue(),
        top_k::catalogue(),
        rates::catalogue(),
        residual_add::catalogue(),
        ffn_silu::catalogue(),
        experts::catalogue(),
        argmax::catalogue(),
        rmsnorm::catalogue(),
    ]
    .concat()
}
