//! The capacity of a forward pass, and the memory that it takes.

use std::ops::AddAssign;

use crate::{MAX_SEQUENCES, ModelSpec, PAGE};

/// Default maximum of tokens in a micro-batch, for devices without their own.
pub const DEFAULT_UBATCH: usize = 512;

/// Capacity of a forward pass of one model in positions, sequences and tokens: what cache groups and the page table are made
/// for. [`SessionOptions::capacity`](crate::SessionOptions::capacity) makes it from the options that a caller chooses, which
/// have the same sizes before a model limits them, and further options.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// Maximum tokens of a sequence.
    pub n_ctx: usize,
    /// Number of sequences in the KV cache.
    pub n_seq: usize,
    /// Positions of the KV cache, all sequences together, rounded up to whole pages. `None`: `n_ctx` for each sequence.
    pub n_cache: Option<usize>,
    /// Sequences whose sliding windows fit, in layers that keep only a window; a batch may be refused for want of a
    /// window. `None`: all.
    pub n_windows: Option<usize>,
    /// Bytes for checkpoints of recurrent states, in addition to the states that sequences continue from.
    pub state_cache: usize,
    /// Maximum tokens of a micro-batch.
    pub n_ubatch: usize,
}

impl Capacity {
    /// The first number that is out of range, by its name, with the largest allowed one.
    pub fn out_of_range(&self) -> Option<(&'static str, usize)> {
        [
            ("the context length", self.n_ctx, usize::MAX),
            ("the number of sequences", self.n_seq, MAX_SEQUENCES),
            ("the size of the KV cache", self.n_cache.unwrap_or(1), usize::MAX),
            ("the number of windows", self.n_windows.unwrap_or(1), usize::MAX),
            ("the ubatch size", self.n_ubatch, usize::MAX),
        ]
        .into_iter()
        .find_map(|(name, n, max)| (n == 0 || n > max).then_some((name, max)))
    }

    /// The maximum tokens of a sequence of `spec`, when `n_ctx` are wanted: learned positions end with their table.
    pub fn n_ctx_of(spec: &ModelSpec, n_ctx: usize) -> usize {
        spec.embedding.n_positions.map_or(n_ctx, |n| n.min(n_ctx))
    }

    /// Number of KV pages; `usize::MAX` if it overflows.
    pub fn n_pages(&self) -> usize {
        match self.n_cache {
            Some(positions) => positions.div_ceil(PAGE),
            None => self.n_ctx.div_ceil(PAGE).saturating_mul(self.n_seq),
        }
    }

    /// Maximum tokens that a sequence can reach: `n_ctx`, or fewer if there are not enough pages.
    pub fn n_positions(&self) -> usize {
        self.n_ctx.min(self.n_pages().saturating_mul(PAGE))
    }

    /// Maximum tokens of a micro-batch of `spec`: no more than all sequences can hold, and without a causal mask no
    /// fewer than a whole sequence.
    pub fn n_tokens(&self, spec: &ModelSpec) -> usize {
        let positions = self.n_ctx.saturating_mul(self.n_seq);
        let wanted = if spec.is_causal() { self.n_ubatch } else { self.n_ubatch.max(self.n_positions()) };
        wanted.min(positions).min(self.n_pages().saturating_mul(PAGE))
    }

    /// Maximum tokens of a sequence that are appended at once and can be taken back. At least a page, for the lookahead
    /// steps of small micro-batches.
    pub(crate) fn step(&self) -> usize {
        self.n_ubatch.max(PAGE)
    }
}

/// Bytes that a forward pass holds, or will hold, in the memory of its device, for the CPU in main memory; mapped files are not
/// included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MemoryUse {
    /// Weights in the kernels' layouts, and tables derived from them.
    pub weights: u64,
    /// KV cache and recurrent states of all sequences.
    pub kv_cache: u64,
    /// Activations, logits and other buffers of a step.
    pub scratch: u64,
}

impl MemoryUse {
    /// The sum.
    pub fn total(&self) -> u64 {
        self.weights.saturating_add(self.kv_cache).saturating_add(self.scratch)
    }
}

impl AddAssign for MemoryUse {
    fn add_assign(&mut self, other: Self) {
        self.weights += other.weights;
        self.kv_cache += other.kv_cache;
        self.scratch += other.scratch;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ModelShape;

    const SOME: Capacity =
        Capacity { n_ctx: 1000, n_seq: 4, n_cache: None, n_windows: None, state_cache: 0, n_ubatch: 512 };

    fn spec(architecture: &str) -> ModelSpec {
        ModelSpec::from_metadata(&ModelShape::custom(architecture).unwrap().metadata()).unwrap()
    }

    #[test]
    fn numbers_out_of_range_are_named() {
        assert_eq!(SOME.out_of_range(), None);
        for (wrong, name) in [
            (Capacity { n_ctx: 0, ..SOME }, "the context length"),
            (Capacity { n_seq: MAX_SEQUENCES + 1, ..SOME }, "the number of sequences"),
            (Capacity { n_cache: Some(0), ..SOME }, "the size of the KV cache"),
            (Capacity { n_windows: Some(0), ..SOME }, "the number of windows"),
            (Capacity { n_ubatch: 0, ..SOME }, "the ubatch size"),
        ] {
            assert_eq!(wrong.out_of_range().unwrap().0, name);
        }
    }

    #[test]
    fn pages_bound_positions_and_tokens() {
        assert_eq!((SOME.n_pages(), SOME.n_positions()), (4 * 16, 1000));
        let small = Capacity { n_cache: Some(PAGE + 1), ..SOME };
        assert_eq!((small.n_pages(), small.n_positions()), (2, 2 * PAGE));
        let spec = spec("llama");
        assert_eq!((SOME.n_tokens(&spec), small.n_tokens(&spec)), (512, 2 * PAGE));
        assert_eq!(Capacity { n_ctx: 5, n_seq: 2, ..SOME }.n_tokens(&spec), 10);
        let huge = Capacity { n_ctx: usize::MAX, n_seq: 1000, ..SOME };
        assert_eq!((huge.n_pages(), huge.n_tokens(&spec)), (usize::MAX, 512));
    }

    #[test]
    fn sequences_without_a_causal_mask_are_one_micro_batch() {
        assert_eq!(SOME.n_tokens(&spec("bert")), 1000);
    }

    #[test]
    fn learned_positions_bound_the_context() {
        let bert = spec("bert");
        let n = bert.embedding.n_positions.unwrap();
        assert_eq!((Capacity::n_ctx_of(&bert, n + 1), Capacity::n_ctx_of(&bert, n - 1)), (n, n - 1));
        assert_eq!(Capacity::n_ctx_of(&spec("llama"), n + 1), n + 1);
    }
}
