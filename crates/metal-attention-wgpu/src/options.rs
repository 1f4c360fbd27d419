//! How a model is set up on a GPU, and the memory that takes.

use metal_attention_model::{CacheType, ModelSpec, PAGE, PageTable, Rope, Weights};

use super::activations::{Activations, Widths, experts_bytes};
use super::kv_cache::{cache_bytes, copy_bytes};
use super::parts::{MixerKernels, UNTURNED, rope_of};
use super::weights::own_head;

/// How a [`GpuForwardPass`](super::GpuForwardPass) is set up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuForwardPassOptions {
    /// Positions each sequence has room for.
    pub n_ctx: usize,
    /// Sequences the KV cache holds.
    pub n_seq: usize,
    /// Positions that the KV cache has room for, all sequences together, rounded up to whole pages. `None`: `n_ctx` for
    /// each sequence.
    pub n_cache: Option<usize>,
    /// Tokens that go through the layers at once; longer batches are cut.
    pub n_ubatch: usize,
    /// Element type of the KV cache.
    pub cache_type: CacheType,
    /// Multiply in 32-bit floats throughout, where matrix units would round to 16 bits.
    pub exact: bool,
    /// Workgroups of the kernel that runs all layers of a token in one dispatch, all of which the GPU has to run side
    /// by side; 0: the layers are dispatched kernel by kernel. `None`: what suits the GPU.
    pub layers_at_once: Option<usize>,
    /// Most layers whose weights share a buffer, and with it that kernel. A buffer is at most as large as a binding, some 4 GiB,
    /// whatever this says.
    pub layers_in_a_buffer: usize,
}

impl Default for GpuForwardPassOptions {
    fn default() -> Self {
        Self {
            n_ctx: 4096,
            n_seq: 1,
            n_cache: None,
            n_ubatch: 512,
            cache_type: CacheType::default(),
            exact: false,
            layers_at_once: None,
            layers_in_a_buffer: usize::MAX,
        }
    }
}

impl GpuForwardPassOptions {
    /// Tokens that go through the layers of `spec` at once: no more than all sequences have room for, and no fewer than a text
    /// may have where tokens see those after them.
    pub(super) fn n_ubatch(&self, spec: &ModelSpec) -> usize {
        let positions = self.n_ctx.saturating_mul(self.n_seq);
        let wanted = if spec.is_causal() { self.n_ubatch } else { self.n_ubatch.max(self.n_positions()) };
        wanted.min(positions).min(self.n_pages().saturating_mul(PAGE))
    }

    /// Pages of the KV cache.
    pub(super) fn n_pages(&self) -> usize {
        PageTable::n_pages(self.n_cache, self.n_ctx, self.n_seq).unwrap_or(usize::MAX)
    }

    /// Positions that a sequence can come to: `n_ctx`, or as many as there are pages for.
    pub(super) fn n_positions(&self) -> usize {
        self.n_ctx.min(self.n_pages().saturating_mul(PAGE))
    }
}

/// Bytes that a [`GpuForwardPass`](super::GpuForwardPass) holds on the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuMemory {
    /// Weights in the layout of the kernels, and tables of RoPE's angles.
    pub weights: u64,
    /// KV cache of all sequences.
    pub kv_cache: u64,
    /// Activations and logits, and a page of the KV cache to copy.
    pub scratch: u64,
}

impl GpuMemory {
    /// What `spec` will take on a GPU whose largest binding is `max_binding` bytes, to a few percent.
    pub fn needed(spec: &ModelSpec, weights: &Weights, options: &GpuForwardPassOptions, max_binding: u64) -> Self {
        let mut linears = vec![&weights.token_embd];
        if let Some(p) = &weights.per_layer {
            linears.extend([&p.token_embd, &p.model_proj]);
        }
        if let Some(s) = &weights.streams {
            linears.extend(s.proj.iter().chain(&s.unembd_proj));
        }
        for layer in &weights.layers {
            linears.extend(layer.linears());
        }
        let mut tensors: Vec<_> = linears.into_iter().map(|linear| &linear.weight).collect();
        tensors.extend(own_head(weights));
        let positions = weights.positions.as_ref().map_or(0, |table| 4 * table.weight.n_elements());
        let mixers = MixerKernels::of_layers(spec, weights, options);
        let widths = Widths::new(spec, &mixers);
        let capacity = Activations::capacity(max_binding, &widths, options.n_ubatch(spec));
        let n_rot = |rope: &Option<Rope>| rope.map_or(UNTURNED, |rope| rope.n_rot);
        let rope = distinct_ropes(spec).iter().map(|rope| 4 * n_rot(rope) as u64).sum::<u64>();
        Self {
            weights: tensors
                .iter()
                .map(|t| t.bytes().len() as u64)
                .fold(rope.saturating_mul(options.n_positions() as u64), u64::saturating_add)
                .saturating_add(positions as u64),
            kv_cache: cache_bytes(&mixers, options.n_pages()),
            scratch: Activations::bytes(&widths, capacity)
                + experts_bytes(spec, capacity.0)
                + copy_bytes(&mixers, options.n_seq),
        }
    }

    /// All of it.
    pub fn total(&self) -> u64 {
        self.weights.saturating_add(self.kv_cache).saturating_add(self.scratch)
    }
}

/// The rotations of the layers, without repetitions; `None` where layers have none.
pub(super) fn distinct_ropes(spec: &ModelSpec) -> Vec<Option<Rope>> {
    let mut ropes = Vec::new();
    for layer in &spec.layers {
        let rope = rope_of(&layer.mixer);
        if !ropes.contains(&rope) {
            ropes.push(rope);
        }
    }
    ropes
}
