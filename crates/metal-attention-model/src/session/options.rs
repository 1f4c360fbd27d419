//! The options of a session, which are the same for all backends.

use crate::{CacheType, Capacity, DEFAULT_UBATCH, ModelSpec};

/// The options of a [`Session`](crate::Session) that every backend takes. What only one backend has (threads, an adapter)
/// is in options of its own. [`capacity`](Self::capacity) takes the sizes among them, limited to those of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SessionOptions {
    /// Maximum tokens of a sequence.
    pub n_ctx: usize,
    /// Number of sequences in the KV cache.
    pub n_seq: usize,
    /// Positions of the KV cache, all sequences together, rounded up to whole pages. `None`: `n_ctx` for each sequence.
    pub n_cache: Option<usize>,
    /// Sequences whose sliding windows fit, in layers that keep only a window; a batch that needs another window is refused.
    /// `None`: all.
    pub n_windows: Option<usize>,
    /// Bytes for checkpoints of recurrent states, in addition to the states that sequences continue from.
    pub state_cache: usize,
    /// Maximum tokens of a micro-batch.
    pub n_ubatch: usize,
    /// Element type of the KV cache.
    pub cache_type: CacheType,
    /// Compute as exactly as the backend can: in F32, with quantised weights dequantised. Slower. Otherwise inputs of
    /// products are quantised to 8 bits (CPU) or may be rounded to 16 bits (GPU).
    pub exact: bool,
}

impl Default for SessionOptions {
    fn default() -> Self {
        Self {
            n_ctx: 4096,
            n_seq: 1,
            n_cache: None,
            n_windows: None,
            state_cache: 256 << 20,
            n_ubatch: DEFAULT_UBATCH,
            cache_type: CacheType::default(),
            exact: false,
        }
    }
}

impl SessionOptions {
    /// The sizes among them, for a model of `spec`: `n_ctx` is at most the length of its table of learned positions.
    pub fn capacity(&self, spec: &ModelSpec) -> Capacity {
        let Self { n_ctx, n_seq, n_cache, n_windows, state_cache, n_ubatch, cache_type: _, exact: _ } = *self;
        Capacity { n_ctx: Capacity::n_ctx_of(spec, n_ctx), n_seq, n_cache, n_windows, state_cache, n_ubatch }
    }
}
