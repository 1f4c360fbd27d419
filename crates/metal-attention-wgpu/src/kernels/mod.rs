//! The kernels. There is a module for each family: its functions bind buffers to the pipeline of a shader in `shaders/`
//! and return the [`Dispatch`](crate::Dispatch); its *scalar twins* compute the same in plain Rust, usually in 64-bit
//! floats, for tests. Functions return an error where shapes and buffers do not match.
//!
//! Shapes are row-major, and all buffers are F32 unless noted. *Output tokens* are those with `BatchToken::output` set.

mod activation;
mod argmax;
mod attention;
mod attention_gate;
mod attention_inputs;
mod block_conv;
mod buffer_copy;
mod channel_gate;
mod decode_attention;
mod decode_layers;
mod elementwise;
mod embedding;
mod embedding_sum;
mod experts;
mod ffn_silu;
mod general_attention;
mod head_products;
mod kv_cache;
mod latent_inputs;
mod matmul;
mod matmul_split;
mod matvec;
mod norm;
mod place_columns;
mod prefill_attention;
mod rates;
mod recurrent;
mod residual_add;
mod rmsnorm;
mod rope;
mod rotate_pairs;
mod row_gate;
mod row_sums;
mod scale;
mod segment_attention;
mod short_conv;
mod streams;
mod top_k;

pub use activation::{Gating, activation, activation_twin};
pub use argmax::{argmax, argmax_scratch_bytes};
pub use attention::{AttentionBuffers, AttentionShape, AttentionTwin, MAX_FAST_HEAD_DIM};
pub use attention_gate::{AttentionGateShape, attention_gate, attention_gate_twin};
pub use attention_inputs::{
    AttentionInputsBuffers, AttentionInputsShape, KvInputs, attention_inputs, attention_inputs_twin, cached_row_twin,
};
pub use block_conv::{BlockConvBuffers, BlockConvShape, block_conv, block_conv_twin};
pub use buffer_copy::buffer_copy;
pub use channel_gate::{channel_gate, channel_gate_twin};
pub use decode_attention::{decode_attention, decode_attention_merge, n_splits, partial_len};
pub use decode_layers::{DecodeLayersBuffers, DecodeLayersShape, LayerMatrices, decode_layers};
pub use elementwise::{ElementOp, elementwise, encoder_activation_twin};
pub use embedding::{embedding, embedding_twin};
pub use embedding_sum::{embedding_sum, embedding_sum_twin};
pub use experts::{
    ExpertsMatrices, ExpertsScratch, ExpertsShape, ExpertsValues, FEW_TOKENS, MAX_EXPERTS, MAX_USED_EXPERTS,
    experts_matmul, experts_matmul_by, experts_matvec, experts_method, experts_twin, route,
};
pub use ffn_silu::{ffn_silu, ffn_silu_twin};
pub use general_attention::{
    GeneralAttention, GeneralAttentionBuffers, general_attention, general_attention_merge, general_attention_twin,
};
pub use head_products::{HeadRows, head_products, head_products_twin};
pub use kv_cache::{kv_cache_copy, kv_cache_copy_twin};
pub use latent_inputs::{LatentInputsBuffers, LatentInputsShape, latent_inputs, latent_inputs_twin};
pub use matmul::{
    CooperativeTile, MatmulMethod, MatmulScratch, all_on_units, leaves_idle_in_tiles, matmul, matmul_by, matmul_method,
};
pub use matmul_split::{SplitTile, split_matmul, split_tile};
pub use matvec::{
    MAX_INPUTS, MatvecInput, MatvecOptions, MatvecOutput, TOKEN_TILE, TokenRows, matvec, matvec_of_inputs, matvec_twin,
    multi_token_matvec,
};
pub use norm::{NormColumns, NormShape, norm, norm_twin};
pub use place_columns::{ColumnPlace, place_columns, place_columns_twin};
pub use prefill_attention::{prefill_attention, prefill_attention_cooperative, prefill_on_matrix_units};
pub use rates::{rate_floats, rate_floats_work, rate_matrix, rate_matrix_work, rate_read, rate_sums};
pub use recurrent::*;
pub use residual_add::{residual_add, residual_add_twin};
pub use rmsnorm::{RmsNormShape, rmsnorm, rmsnorm_twin};
pub use rope::{RopeShape, norm_rope_twin, rope_append, rope_apply, rope_apply_dual, rope_twin};
pub use rotate_pairs::{RotateShape, rotate_pairs, rotate_pairs_twin};
pub use row_gate::{row_gate, row_gate_twin};
pub use row_sums::{SummedRows, row_sums, row_sums_twin};
pub use scale::{ScaleShape, scale, scale_twin};
pub use segment_attention::{
    SegmentAttentionRows, SegmentAttentionShape, segment_attention, segment_attention_cooperative,
    segment_attention_twin, segments_on_matrix_units,
};
pub use short_conv::{MAX_TAPS, ShortConvBuffers, short_conv, short_conv_twin};
pub use streams::{
    StreamSlice, StreamsBuffers, add_to_idle_streams, add_to_idle_streams_twin, correct_streams, correct_streams_twin,
    predict_streams, predict_streams_twin, stretch, stretch_twin,
};
pub use top_k::{MAX_TOP_K, top_k, top_k_list, top_k_scratch_bytes};

use crate::pipelines::PipelineKey;

/// The keys of all kernels, each with the sizes of a small model: SmolLM-135M unless it lacks the kernel. For
/// translating and listing kernels.
pub fn catalogue() -> Vec<PipelineKey> {
    [
        crate::matrix::catalogue(),
        matmul::catalogue(),
        matmul_split::catalogue(),
        matvec::catalogue(),
        embedding::catalogue(),
        prefill_attention::catalogue(),
        decode_attention::catalogue(),
        decode_layers::catalogue(),
        kv_cache::catalogue(),
        buffer_copy::catalogue(),
        channel_gate::catalogue(),
        rope::catalogue(),
        top_k::catalogue(),
        rates::catalogue(),
        recurrent::catalogue(),
        residual_add::catalogue(),
        ffn_silu::catalogue(),
        experts::catalogue(),
        argmax::catalogue(),
        rmsnorm::catalogue(),
        norm::catalogue(),
        row_gate::catalogue(),
        scale::catalogue(),
        activation::catalogue(),
        embedding_sum::catalogue(),
        attention_gate::catalogue(),
        attention_inputs::catalogue(),
        general_attention::catalogue(),
        latent_inputs::catalogue(),
        head_products::catalogue(),
        streams::catalogue(),
        short_conv::catalogue(),
        block_conv::catalogue(),
        elementwise::catalogue(),
        row_sums::catalogue(),
        place_columns::catalogue(),
        rotate_pairs::catalogue(),
        segment_attention::catalogue(),
    ]
    .concat()
}
