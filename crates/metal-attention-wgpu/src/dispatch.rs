//! [`Dispatch`]: a kernel bound to its buffers, with a grid that depends on the batch.
//!
//! A dispatch is made once, when a model is loaded, and recorded for every batch. Its grid and the part of each buffer
//! that it accesses are therefore given as functions of the batch's dimensions: [`GridExtent`] and [`AccessRange`] of
//! [`BatchDims`]. Shaders do not check their accesses in release builds; the ranges are what makes that safe.
//!
//! An *output token* is one with `BatchToken::output` set. A *run* is the tokens of one sequence in a batch, in models
//! with recurrent states. A *split* is one of the parts that split-KV attention divides the positions into.

use std::sync::{Arc, OnceLock};

use crate::arena::Bind;
use crate::device::WgpuDevice;
use crate::error::WgpuError;
use crate::pipelines::PipelineKey;

/// The number of workgroups along one axis of a grid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GridExtent {
    /// This number, for every batch.
    Fixed(u32),
    /// One for each group of this many tokens, the last group perhaps smaller.
    Tokens(u32),
    /// One for each group of this many output tokens.
    Outputs(u32),
    /// One for each run.
    Runs,
    /// One for each split.
    Splits,
    /// This number if there are several splits, else none: for kernels that merge them.
    WhenSplit(u32),
    /// One for each tile of experts, at most.
    ExpertTiles(ExpertTiles),
}

/// The tiles of a grouped GEMM over experts. The unit of work is a *visit*: one token at one of its experts. A tile
/// holds visits of one expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertTiles {
    /// Number of experts.
    pub n_expert: u32,
    /// Experts of each token.
    pub n_used: u32,
    /// Visits of a tile.
    pub tile_tokens: u32,
}

impl ExpertTiles {
    /// The most tiles that `n_tokens` tokens need, whichever experts they are routed to: the last tile of each expert
    /// may hold a single visit.
    pub fn max_tiles(self, n_tokens: u32) -> u32 {
        let visits = u64::from(n_tokens) * u64::from(self.n_used);
        let tiles = (visits + u64::from(self.n_expert) * u64::from(self.tile_tokens - 1)) / u64::from(self.tile_tokens);
        u32::try_from(tiles.min(visits)).unwrap_or(u32::MAX)
    }

    /// The most tokens for which `tiles` tiles are enough.
    fn max_tokens(self, tiles: u64) -> u64 {
        let ends = u64::from(self.n_expert) * u64::from(self.tile_tokens - 1);
        let visits = ((tiles + 1).saturating_mul(u64::from(self.tile_tokens)) - 1).saturating_sub(ends);
        visits.max(tiles) / u64::from(self.n_used)
    }
}

/// The dimensions of a batch that grids depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchDims {
    /// Tokens.
    pub n_tokens: u32,
    /// Output tokens.
    pub n_outputs: u32,
    /// Runs, in models with recurrent states.
    pub n_runs: u32,
    /// Splits of the positions in decode attention.
    pub n_splits: u32,
}

impl GridExtent {
    /// The number of workgroups for a batch of these dimensions.
    fn workgroups(self, size: BatchDims) -> u32 {
        match self {
            Self::Fixed(n) => n,
            Self::Tokens(per) => size.n_tokens.div_ceil(per),
            Self::Outputs(per) => size.n_outputs.div_ceil(per),
            Self::Runs => size.n_runs,
            Self::Splits => size.n_splits,
            Self::WhenSplit(n) => {
                if size.n_splits > 1 {
                    n
                } else {
                    0
                }
            }
            Self::ExpertTiles(tiles) => tiles.max_tiles(size.n_tokens),
        }
    }
}

/// The bytes at the start of a buffer that a kernel may access, as a function of the batch. The shader's comments
/// derive its bounds from them; [`Dispatch::new`] refuses a shorter buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AccessRange {
    /// This number, for every batch.
    Fixed(u64),
    /// This number for each token.
    Tokens(u64),
    /// This number for each output token.
    Outputs(u64),
    /// This number for each token and split, if there are several splits.
    Splits(u64),
    /// This number for each tile of experts.
    ExpertTiles(ExpertTiles, u64),
    /// The tokens of a batch, as [`batch_words_at`](crate::batch_words_at) writes them.
    Batch,
    /// Runs and segments, as `kernels::segment_words` writes them; at most one run for each
    /// token.
    Segments,
}

impl AccessRange {
    /// The first `n` floats.
    pub(crate) fn floats(n: usize) -> Self {
        Self::Fixed(4 * n as u64)
    }
}

/// The largest batch for which the buffers of a dispatch are long enough.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct BufferCapacity {
    /// Tokens.
    tokens: u64,
    /// Output tokens.
    outputs: u64,
    /// Tokens times splits.
    parts: u64,
}

impl BufferCapacity {
    /// The capacity of `buffers`; `None` if one is too short for any batch.
    fn of(buffers: &[(&dyn Bind, AccessRange)]) -> Option<Self> {
        let mut capacity = Self { tokens: u64::MAX, outputs: u64::MAX, parts: u64::MAX };
        for (buffer, range) in buffers {
            let bytes = buffer.bytes();
            match *range {
                AccessRange::Fixed(needed) if needed > bytes => return None,
                AccessRange::Fixed(_) => {}
                AccessRange::Tokens(each) => capacity.tokens = capacity.tokens.min(bytes / each.max(1)),
                AccessRange::Outputs(each) => capacity.outputs = capacity.outputs.min(bytes / each.max(1)),
                AccessRange::Splits(each) => capacity.parts = capacity.parts.min(bytes / each.max(1)),
                AccessRange::ExpertTiles(tiles, each) => {
                    capacity.tokens = capacity.tokens.min(tiles.max_tokens(bytes / each.max(1)));
                }
                // After a first vector of four words, two for each token: of the batch, or at most a run and a segment.
                AccessRange::Batch | AccessRange::Segments => {
                    capacity.tokens = capacity.tokens.min((bytes / 16).checked_sub(1)? / 2);
                }
            }
        }
        Some(capacity)
    }

    /// Whether a batch of these dimensions fits.
    fn fits(self, size: BatchDims) -> bool {
        let n_tokens = u64::from(size.n_tokens);
        n_tokens <= self.tokens
            && u64::from(size.n_outputs) <= self.outputs
            && (size.n_splits <= 1 || n_tokens * u64::from(size.n_splits) <= self.parts)
    }
}

/// A pipeline, the buffers that it is bound to, and its grid. Cloning shares the bind group.
#[derive(Debug, Clone)]
pub struct Dispatch {
    /// The pipeline and its buffers.
    kernel: Arc<BoundKernel>,
    /// Workgroups along x, y, z.
    grid: [GridExtent; 3],
    /// The largest batch that fits the buffers.
    capacity: BufferCapacity,
}

/// A pipeline and its buffers, combined into a bind group at first use.
#[derive(Debug)]
struct BoundKernel {
    /// Which pipeline.
    key: PipelineKey,
    /// The bound ranges, in the order of the shader's bindings.
    ranges: Vec<BoundRange>,
    /// The compiled pipeline and the bind group, once made.
    ready: OnceLock<(wgpu::ComputePipeline, wgpu::BindGroup)>,
}

/// The range of a buffer that is bound.
#[derive(Debug)]
struct BoundRange {
    /// The buffer.
    buffer: wgpu::Buffer,
    /// Its first byte.
    offset: u64,
    /// Bytes; `None`: to the end of the buffer.
    size: Option<wgpu::BufferSize>,
}

impl From<wgpu::BufferBinding<'_>> for BoundRange {
    fn from(binding: wgpu::BufferBinding<'_>) -> Self {
        Self { buffer: binding.buffer.clone(), offset: binding.offset, size: binding.size }
    }
}

impl BoundKernel {
    /// Compiles the pipeline if necessary, and makes the bind group.
    fn ready(&self, gpu: &WgpuDevice) -> Result<&(wgpu::ComputePipeline, wgpu::BindGroup), WgpuError> {
        if let Some(ready) = self.ready.get() {
            return Ok(ready);
        }
        let pipeline = gpu.pipelines().get(gpu, &self.key)?;
        let entries = (0..).zip(&self.ranges).map(|(binding, range)| wgpu::BindGroupEntry {
            binding,
            resource: wgpu::BindingResource::Buffer(wgpu::BufferBinding {
                buffer: &range.buffer,
                offset: range.offset,
                size: range.size,
            }),
        });
        let entries: Vec<_> = entries.collect();
        let scope = gpu.wgpu().push_error_scope(wgpu::ErrorFilter::Validation);
        let bind_group = gpu.wgpu().create_bind_group(&wgpu::BindGroupDescriptor {
            label: Some(&self.key.name),
            layout: &pipeline.get_bind_group_layout(0),
            entries: &entries,
        });
        if let Some(e) = pollster::block_on(scope.pop()) {
            return Err(WgpuError::Rejected { what: format!("the buffers of {}", self.key.name), why: e.to_string() });
        }
        Ok(self.ready.get_or_init(|| (pipeline, bind_group)))
    }
}

impl Dispatch {
    /// Binds `buffers`, in the order of the shader's bindings, to the pipeline of `key`. Errors: a buffer is shorter
    /// than its range needs for any batch, or a fixed extent is larger than the device allows. While builder threads
    /// compile pipelines this one is queued for them, see [`wait_ready`](Self::wait_ready); otherwise it is compiled
    /// now.
    pub fn new(
        gpu: &WgpuDevice,
        key: &PipelineKey,
        buffers: &[(&dyn Bind, AccessRange)],
        grid: [GridExtent; 3],
    ) -> Result<Self, WgpuError> {
        let max = gpu.wgpu().limits().max_compute_workgroups_per_dimension;
        for extent in grid {
            if let GridExtent::Fixed(n) | GridExtent::WhenSplit(n) = extent
                && n > max
            {
                let why = format!("it takes {n} workgroups along an axis, and this GPU runs {max}");
                return Err(WgpuError::Mismatch { what: format!("the grid of {}", key.name), why });
            }
        }
        let capacity = BufferCapacity::of(buffers).ok_or_else(|| {
            let lengths = buffers.iter().map(|(buffer, range)| format!("{} bytes for {range:?}", buffer.bytes()));
            let why = format!("one is too short: {}", lengths.collect::<Vec<_>>().join(", "));
            WgpuError::Mismatch { what: format!("the buffers of {}", key.name), why }
        })?;
        let ranges = buffers.iter().map(|(buffer, _)| BoundRange::from(buffer.binding())).collect();
        let dispatch =
            Self { kernel: Arc::new(BoundKernel { key: key.clone(), ranges, ready: OnceLock::new() }), grid, capacity };
        if !gpu.pipelines().enqueue(key) {
            dispatch.wait_ready(gpu)?;
        }
        Ok(dispatch)
    }

    /// Waits until the pipeline is compiled; an error if it cannot be, or does not accept the buffers.
    pub fn wait_ready(&self, gpu: &WgpuDevice) -> Result<(), WgpuError> {
        self.kernel.ready(gpu).map(|_| ())
    }

    /// Whether the pipeline is compiled, or could not be.
    pub(crate) fn is_ready(&self, gpu: &WgpuDevice) -> bool {
        self.kernel.ready.get().is_some() || gpu.pipelines().is_built(&self.kernel.key)
    }

    /// The kernel's name.
    pub fn kernel(&self) -> &str {
        &self.kernel.key.name
    }

    /// Whether the grid is not empty for a batch of these dimensions.
    pub fn has_work(&self, size: BatchDims) -> bool {
        self.grid.iter().all(|extent| extent.workgroups(size) > 0)
    }

    /// Whether the buffers are long enough for a batch of these dimensions.
    pub fn fits(&self, size: BatchDims) -> bool {
        self.capacity.fits(size)
    }

    /// Records the dispatch for a batch of these dimensions; nothing if its grid is empty. If the pipeline cannot be
    /// compiled, the device reports the error at the next [`check`](WgpuDevice::check).
    ///
    /// # Panics
    /// If the buffers are [too short](Self::fits).
    pub fn record(&self, gpu: &WgpuDevice, pass: &mut wgpu::ComputePass<'_>, size: BatchDims) {
        if !self.has_work(size) {
            return;
        }
        assert!(
            self.fits(size),
            "{}: {size:?} is more than its buffers have room for, {:?}",
            self.kernel.key.name,
            self.capacity
        );
        let (pipeline, bind_group) = match self.kernel.ready(gpu) {
            Ok(ready) => ready,
            // The caller waits for the submission, and gets the error then.
            Err(e) => return gpu.record_error(e),
        };
        let [x, y, z] = self.grid.map(|extent| extent.workgroups(size));
        pass.set_pipeline(pipeline);
        pass.set_bind_group(0, bind_group, &[]);
        pass.dispatch_workgroups(x, y, z);
        gpu.count_dispatch();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A buffer of this many bytes.
    #[derive(Debug)]
    struct Bytes(u64);

    impl Bind for Bytes {
        fn binding(&self) -> wgpu::BufferBinding<'_> {
            unreachable!("nothing is bound here")
        }

        fn bytes(&self) -> u64 {
            self.0
        }
    }

    fn step(n_tokens: u32, n_outputs: u32, n_splits: u32) -> BatchDims {
        BatchDims { n_tokens, n_outputs, n_runs: 1, n_splits }
    }

    #[test]
    fn a_batch_fits_if_its_buffers_are_long_enough() {
        let capacity = BufferCapacity::of(&[
            (&Bytes(64), AccessRange::Fixed(64)),
            (&Bytes(96), AccessRange::Tokens(32)),
            (&Bytes(144), AccessRange::Batch),
            (&Bytes(112), AccessRange::Segments),
            (&Bytes(8), AccessRange::Outputs(4)),
            (&Bytes(48), AccessRange::Splits(8)),
        ]);
        let capacity = capacity.expect("long enough");
        assert!(capacity.fits(step(3, 2, 1)) && capacity.fits(step(3, 2, 2)) && capacity.fits(step(1, 1, 6)));
        // The buffer with `Tokens` ends before the batch buffer, which holds four tokens.
        assert!(!capacity.fits(step(4, 2, 1)) && !capacity.fits(step(3, 3, 1)));
        assert!(!capacity.fits(step(3, 2, 3)) && !capacity.fits(step(1, 1, 7)));
        assert!(!capacity.fits(step(u32::MAX, u32::MAX, u32::MAX)));
    }

    #[test]
    fn a_batch_fits_if_its_buffers_hold_its_tiles_of_experts() {
        for (n_expert, n_used, tokens) in [(1, 1, 1), (8, 2, 16), (128, 8, 64), (5, 3, 7)] {
            let tiles = ExpertTiles { n_expert, n_used, tile_tokens: tokens };
            for n in [1, 2, 17, 512] {
                let capacity = BufferCapacity::of(&[(
                    &Bytes(16 * u64::from(tiles.max_tiles(n))),
                    AccessRange::ExpertTiles(tiles, 16),
                )])
                .unwrap();
                assert!(capacity.fits(step(n, 0, 1)), "{tiles:?}, {n} tokens");
                let more = (n..10_000).find(|&more| tiles.max_tiles(more) > tiles.max_tiles(n)).unwrap();
                assert!(!capacity.fits(step(more, 0, 1)), "{tiles:?}, {more} tokens");
            }
        }
        // One token at each of two experts, and all others at one of them: three tiles.
        assert_eq!(ExpertTiles { n_expert: 2, n_used: 1, tile_tokens: 64 }.max_tiles(66), 3);
        assert_eq!(
            GridExtent::ExpertTiles(ExpertTiles { n_expert: 2, n_used: 1, tile_tokens: 64 }).workgroups(step(0, 0, 1)),
            0
        );
    }

    #[test]
    fn a_buffer_too_short_for_any_batch_is_refused() {
        assert_eq!(BufferCapacity::of(&[(&Bytes(60), AccessRange::Fixed(64))]), None);
        assert_eq!(BufferCapacity::of(&[(&Bytes(8), AccessRange::Batch)]), None);
        assert_eq!(BufferCapacity::of(&[(&Bytes(8), AccessRange::Segments)]), None);
        let none = BufferCapacity::of(&[(&Bytes(15), AccessRange::Tokens(16))]).expect("a step of no tokens");
        assert!(!none.fits(step(1, 0, 1)));
    }
}
