//! Recurrences: mixers that keep a state of fixed size instead of keys and values.
//!
//! All but Mamba-1 keep a matrix for each head, `[key_dim, value_dim]`, with a row for each element of the key (for
//! Mamba-2 of B and C). Its columns are independent of each other. A kernel processes the runs of a batch (the tokens
//! of one sequence) in parallel, and the tokens of a run in order, with the state in registers. Which states it reads
//! and writes is given by segments ([`segment_words`], `segments.wgsl`).
//!
//! States are F32, `[n_slots, elements]`. Slot 0 is the state before the first token: zeros, never written. A kernel's
//! part of a layer's state begins at the same element of every slot ([`StateRange`]).

mod bindings;
mod convolution;
mod delta_rule;
mod group_norm;
mod heads;
mod low_rank;
mod mamba;
mod mamba2;
mod rwkv6;
mod rwkv7;
mod segments;
mod token_shift;

pub use bindings::{ColumnRange, StateRange};
pub use convolution::{ConvolutionBuffers, ConvolutionShape, convolution, convolution_twin};
pub use delta_rule::{
    DecayGranularity, DeltaRuleBuffers, DeltaRuleShape, DeltaRuleStep, DeltaRuleStepBuffers, DeltaRuleToken,
    GateActivation, KeyHeads, delta_rule, delta_rule_step, delta_rule_twin,
};
pub use group_norm::{GroupNormBuffers, GroupNormShape, group_norm, group_norm_twin};
pub use low_rank::{LowRankActivation, LowRankShape, MAX_LOW_RANK_PARTS, low_rank, low_rank_twin};
pub use mamba::{MambaBuffers, MambaShape, MambaToken, mamba, mamba_twin};
pub use mamba2::{
    Mamba2Buffers, Mamba2HeadWeights, Mamba2Shape, Mamba2Step, Mamba2StepBuffers, mamba2, mamba2_step, mamba2_twin,
};
pub use rwkv6::{
    Rwkv6Buffers, Rwkv6Mix, Rwkv6MixBuffers, Rwkv6Output, Rwkv6Shape, Rwkv6Token, rwkv6, rwkv6_mix, rwkv6_twin,
};
pub use rwkv7::{Rwkv7Buffers, Rwkv7Mix, Rwkv7MixBuffers, Rwkv7Shape, Rwkv7Token, rwkv7, rwkv7_mix, rwkv7_twin};
pub use segments::segment_words;
pub use token_shift::{TokenShiftBuffers, TokenShiftShape, token_shift, token_shift_twin};

use crate::pipelines::PipelineKey;

/// The keys of all kernels, with the sizes of a small model.
pub(crate) fn catalogue() -> Vec<PipelineKey> {
    [
        convolution::catalogue(),
        delta_rule::catalogue(),
        group_norm::catalogue(),
        low_rank::catalogue(),
        mamba::catalogue(),
        mamba2::catalogue(),
        rwkv6::catalogue(),
        rwkv7::catalogue(),
        token_shift::catalogue(),
    ]
    .concat()
}
