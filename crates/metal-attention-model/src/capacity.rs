//! How much a forward pass has room for, and the memory that takes.

use crate::{MAX_SEQUENCES, ModelSpec, PAGE};

/// Tokens that go through the layers at once where nobody says otherwise, and the device has no number of its own.
pub const DEFAULT_UBATCH: usize = 512;

/// How many positions, sequences and tokens a forward pass has room for, as the options of every backend say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// Positions each sequence has room for.
    pub n_ctx: usize,
    /// Sequences that the KV cache holds.
    pub n_seq: usize,
    /// Positions that the KV cache has room for, all sequences together, rounded up to whole pages. `None`: `n_ctx` for each sequence.
    pub n_cache: Option<usize>,
    /// Sequences whose windows there is room for, in layers that keep no more of them; a batch may be refused for want of a
    /// window. `None`: all.
    pub n_windows: Option<usize>,
    /// Bytes for recurrent states that texts can be cut back to, besides those that they go on from.
    pub state_cache: usize,
    /// Tokens that go through the layers at once.
    pub n_ubatch: usize,
}

impl Capacity {
    /// The first number that cannot work, by its name, with the largest that can.
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

    /// Positions that `spec` has for a sequence of at most `n_ctx`: there are no learned ones beyond those of the table.
    pub fn n_ctx_of(spec: &ModelSpec, n_ctx: usize) -> usize {
        spec.embedding.positions.map_or(n_ctx, |n| n.min(n_ctx))
    }

    /// Pages for all positions; `usize::MAX` where nobody could count them.
    pub fn n_pages(&self) -> usize {
        match self.n_cache {
            Some(positions) => positions.div_ceil(PAGE),
            None => self.n_ctx.div_ceil(PAGE).saturating_mul(self.n_seq),
        }
    }

    /// Positions that a sequence can come to: `n_ctx`, or as many as there are pages for.
    pub fn n_positions(&self) -> usize {
        self.n_ctx.min(self.n_pages().saturating_mul(PAGE))
    }

    /// Tokens that go through the layers of `spec` at once: no more than all sequences have room for, and no fewer than a text
    /// may have where tokens see those after them.
    pub fn n_tokens(&self, spec: &ModelSpec) -> usize {
        let positions = self.n_ctx.saturating_mul(self.n_seq);
        let wanted = if spec.is_causal() { self.n_ubatch } else { self.n_ubatch.max(self.n_positions()) };
        wanted.min(positions).min(self.n_pages().saturating_mul(PAGE))
    }

    /// Tokens of a sequence that are appended at once at most, and can be taken back. A page full of them, where
    /// `n_ubatch` is less: steps that run ahead of their tokens need a few.
    pub(crate) fn step(&self) -> usize {
        self.n_ubatch.max(PAGE)
    }
}

/// Bytes that a forward pass holds on its device, or will; mapped files are not among them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryUse {
    /// Weights as the kernels read them, and tables made for them.
    pub weights: u64,
    /// KV cache and recurrent states of all sequences.
    pub kv_cache: u64,
    /// Activations, logits and what else steps work with.
    pub scratch: u64,
}

impl MemoryUse {
    /// All of it.
    pub fn total(&self) -> u64 {
        self.weights.saturating_add(self.kv_cache).saturating_add(self.scratch)
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
    fn numbers_that_cannot_work_are_named() {
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
    fn texts_that_are_seen_whole_go_through_the_layers_whole() {
        assert_eq!(SOME.n_tokens(&spec("bert")), 1000);
    }

    #[test]
    fn learned_positions_bound_the_context() {
        let bert = spec("bert");
        let n = bert.embedding.positions.unwrap();
        assert_eq!((Capacity::n_ctx_of(&bert, n + 1), Capacity::n_ctx_of(&bert, n - 1)), (n, n - 1));
        assert_eq!(Capacity::n_ctx_of(&spec("llama"), n + 1), n + 1);
    }
}
