//! Recurrences: mixers that keep a state of fixed size instead of keys and values.
//!
//! All but Mamba-1 keep a matrix for each head, `[key_dim, value_dim]`, a row for each element of the key (Mamba: of B and
//! C), whose columns do not touch each other. A kernel goes through the runs of a batch in parallel, and through the tokens
//! of a run in order, its state in registers; `segments.wgsl` says which states it reads and writes ([`segment_words`]).
//!
//! States are F32, `[n_slots, elements]`: slot 0 is the empty text's, zeros that nobody writes. What a kernel keeps of a
//! layer begins at an element of every slot ([`StatesAt`]).

mod bindings;
mod convolution;
mod delta_rule;
mod heads;
mod segments;

pub use bindings::{RowsAt, StatesAt};
pub use convolution::{ConvolutionBuffers, ConvolutionShape, convolution, convolution_twin};
pub use delta_rule::{
    Decay, DeltaRuleBuffers, DeltaRuleShape, DeltaRuleStep, DeltaRuleStepBuffers, DeltaRuleToken, KeyHeads, OutputGate,
    delta_rule, delta_rule_step, delta_rule_twin,
};
pub use segments::segment_words;

use crate::pso::PsoKey;

/// Every kernel once, with the sizes of a small model.
pub(crate) fn catalogue() -> Vec<PsoKey> {
    [convolution::catalogue(), delta_rule::catalogue()].concat()
}
