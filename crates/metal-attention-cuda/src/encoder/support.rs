//! Which encoders have kernels for all of their parts.

use metal_attention_model::vision::{EncoderTypes, Stage};

use super::attention::AttentionPlan;
use crate::CudaError;

/// An error if `stages` have attention without kernels: heads of an odd number of elements, or of more than 256.
pub(super) fn check<T: EncoderTypes>(stages: &[Stage<T>]) -> Result<(), CudaError> {
    let check_heads = |head_dim: usize| AttentionPlan::new(head_dim, true, false, &[]).map(|_| ());
    stages.iter().try_for_each(|stage| match stage {
        Stage::Block(block) => check_heads(block.attention.longest_head()),
        Stage::Attention(attention) => check_heads(attention.longest_head()),
        Stage::Resampler(resampler) => check_heads(resampler.head_dim),
        Stage::QueryAttention(attention) => {
            check_heads(attention.head_dim)?;
            check(&attention.k)?;
            check(&attention.v)
        }
        Stage::Sum(lists) => lists.iter().try_for_each(|stages| check(stages)),
        Stage::Feature(stages) | Stage::Windows { stages, .. } | Stage::Squares(stages) => check(stages),
        Stage::Linear(_)
        | Stage::Norm(_)
        | Stage::Activation(_)
        | Stage::Scale(_)
        | Stage::ScaleColumns(_)
        | Stage::AddRow(_)
        | Stage::Positions(_)
        | Stage::Others { .. }
        | Stage::DropOthers
        | Stage::Queries(_)
        | Stage::KeepQueries
        | Stage::Reorder(_)
        | Stage::Merge { .. }
        | Stage::Pool { .. }
        | Stage::Unfold { .. }
        | Stage::Depthwise { .. }
        | Stage::Enlarge { .. }
        | Stage::FeedForward(_)
        | Stage::JoinFeatures { .. }
        | Stage::Separator { .. }
        | Stage::RowBreaks { .. } => Ok(()),
    })
}
