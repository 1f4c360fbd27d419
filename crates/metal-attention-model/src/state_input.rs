//! The input of drafters that read hidden rows ("states") of their target: prediction heads, EAGLE-3, DFlash and assistants.

use crate::spec::Norm;

/// How a drafter reads the states of another model: a row for each input, which comes with the batch
/// ([`Batch::states`](crate::Batch::states)). In the formulas `e` is the token's [`InputEmbedding`](crate::InputEmbedding) after its scale and norm, `state`
/// the row, and `x` the input of the first layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum StateInput {
    /// One product of the token and a state makes `x` (prediction heads).
    Joined(JoinedState),
    /// The first layer's attention reads the token beside a state, which is the residual stream (EAGLE-3).
    Attended(AttendedState),
    /// States alone are read, and no tokens: hidden rows of another model are projected to a drafter's width (EAGLE-3, `DFlash`).
    Projected(ProjectedState),
}

/// What a prediction head (multi-token prediction) reads, `state` of `[n_embd]`:
///
/// `x = proj * [embedding_norm(e) | state_norm(state)]`,
///
/// with the matrix `proj`, `[n_embd, 2 * n_embd]`. The input at position `p` is the token there with the state of position
/// `p - 1`; at position 0 the state is a zero vector.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct JoinedState {
    /// Norm of the token's embedding.
    pub embedding_norm: Norm,
    /// Norm of the state.
    pub state_norm: Norm,
    /// How the heads of a file propose drafts together.
    pub heads: HeadUse,
}

/// What EAGLE-3 reads, `state` of `[n_embd]`: `x = state`, or `state_norm(state)` with `norms_residual`, and queries, keys and
/// values of the only layer are products of
///
/// `[embedding_norm(e) | state_norm(state)]`, `[2 * n_embd]`,
///
/// in the place of the mixer's normed input. The input for position `p` is the state of position `p` with the token at `p + 1`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttendedState {
    /// Norm of the token's embedding.
    pub embedding_norm: Norm,
    /// Norm of the state.
    pub state_norm: Norm,
    /// Whether the residual stream begins as the normed state.
    pub norms_residual: bool,
}

/// What a projection of states reads, `state` of `[width]`: `x = fc * norm(state)`, with the matrix `fc`, `[n_embd, width]`; without a
/// norm `x = fc * state`. The model has no layers, no embedding table and no head: its results are hidden rows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ProjectedState {
    /// Elements of a state: hidden rows of several layers, one after the other.
    pub width: usize,
    /// Norm of the whole state.
    pub norm: Option<Norm>,
}

impl StateInput {
    /// Elements of a state, for a model with a residual stream of `n_embd`.
    pub fn width(&self, n_embd: usize) -> usize {
        match self {
            Self::Joined(_) | Self::Attended(_) => n_embd,
            Self::Projected(projected) => projected.width,
        }
    }

    /// How drafts are proposed with these states; `None` where none are.
    pub fn heads(&self) -> Option<HeadUse> {
        match self {
            Self::Joined(joined) => Some(joined.heads),
            Self::Attended(_) => Some(HeadUse::Eagle),
            Self::Projected(_) => None,
        }
    }
}

/// How drafters that read states propose drafts. In all cases each has gone over the prompt with states of the target model, with
/// keys and values of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadUse {
    /// One head proposes all drafts. States are rows after the output norm; from the second draft on the head's own state takes
    /// the place of the target's.
    Repeated,
    /// Head `k` proposes draft `k`, so that there are no more drafts than heads. States are rows before the output norm. For
    /// draft `k`, head `k` reads the last token and the drafts before it, with the target's state and those that the heads before
    /// it gave for their last position.
    Chained,
    /// One drafter proposes all drafts (EAGLE-3). The target's states are [projected](ProjectedState) rows; from the second draft
    /// on the drafter's own row before the output norm takes their place. A token without a state before it, the first one of a
    /// sequence, is not read.
    Eagle,
}

impl HeadUse {
    /// The rows of a head with `n_layer` layers that are states, as the index for
    /// [`HiddenRequest::before`](crate::HiddenRequest::before); but for [`Eagle`](Self::Eagle) also those of the target model.
    pub fn state_before(self, n_layer: usize) -> usize {
        match self {
            Self::Repeated => n_layer + 1,
            Self::Chained | Self::Eagle => n_layer,
        }
    }
}
