//! A kernel bound to its buffers, ready to be recorded.

use std::sync::{Arc, OnceLock};

use crate::arena::Bind;
use crate::device::WgpuDevice;
use crate::error::WgpuError;
use crate::pipelines::PipelineKey;

/// Number of workgroups along one axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GridExtent {
    /// Always so many.
    Fixed(u32),
    /// One for every so many tokens of the batch.
    Tokens(u32),
    /// One for every so many tokens whose logits are wanted.
    Wanted(u32),
    /// One for each sequence that the batch has tokens of, in models that keep recurrent states.
    Runs,
    /// One for each part that decode attention cuts the context into.
    Splits,
    /// So many when there is more than one such part, else none: what joins the parts.
    WhenSplit(u32),
    /// One for each tile of experts that a batch may need.
    ExpertTiles(ExpertTiles),
}

/// Tiles of what the tokens of a batch bring to experts, each of one expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertTiles {
    /// Experts.
    pub n_expert: u32,
    /// Experts that a token goes to.
    pub n_used: u32,
    /// Tokens of a tile.
    pub tile_tokens: u32,
}

impl ExpertTiles {
    /// Enough tiles for `n_tokens` tokens, whichever experts they go to: each expert's last may hold a single token.
    pub fn max_tiles(self, n_tokens: u32) -> u32 {
        let visits = u64::from(n_tokens) * u64::from(self.n_used);
        let tiles = (visits + u64::from(self.n_expert) * u64::from(self.tile_tokens - 1)) / u64::from(self.tile_tokens);
        u32::try_from(tiles.min(visits)).unwrap_or(u32::MAX)
    }

    /// The most tokens for which so many tiles are enough.
    fn max_tokens(self, tiles: u64) -> u64 {
        let ends = u64::from(self.n_expert) * u64::from(self.tile_tokens - 1);
        let visits = ((tiles + 1).saturating_mul(u64::from(self.tile_tokens)) - 1).saturating_sub(ends);
        visits.max(tiles) / u64::from(self.n_used)
    }
}

/// Sizes of a step that grids depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchDims {
    /// Tokens of the batch.
    pub n_tokens: u32,
    /// Tokens whose logits are wanted.
    pub n_wanted: u32,
    /// Tokens of one sequence that follow each other are a run.
    pub n_runs: u32,
    /// Parts of the context in decode attention.
    pub n_splits: u32,
}

impl GridExtent {
    fn workgroups(self, size: BatchDims) -> u32 {
        match self {
            Self::Fixed(n) => n,
            Self::Tokens(per) => size.n_tokens.div_ceil(per),
            Self::Wanted(per) => size.n_wanted.div_ceil(per),
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

/// How much of a buffer a kernel reaches, in bytes: what its shader's bounds rest on, since release builds do not check
/// accesses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AccessRange {
    /// So much in every step.
    Fixed(u64),
    /// So much for each token of the batch.
    Tokens(u64),
    /// So much for each token whose logits are wanted.
    Wanted(u64),
    /// So much for each token and each part of the context, where there is more than one.
    Splits(u64),
    /// So much for each tile of experts that the batch may need.
    ExpertTiles(ExpertTiles, u64),
    /// A batch as [`batch_words`](crate::batch_words) lays it out.
    Batch,
    /// Segments as [`segment_words`](crate::kernels::segment_words) lays them out, of as many runs as tokens at most.
    Segments,
}

impl AccessRange {
    /// Of `n` floats.
    pub(crate) fn floats(n: usize) -> Self {
        Self::Fixed(4 * n as u64)
    }
}

/// The largest step that the buffers of a dispatch have room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct BufferCapacity {
    tokens: u64,
    wanted: u64,
    /// Tokens times parts of the context.
    parts: u64,
}

impl BufferCapacity {
    /// The capacity of `buffers`; `None` where one of them is shorter than any step needs.
    fn of(buffers: &[(&dyn Bind, AccessRange)]) -> Option<Self> {
        let mut capacity = Self { tokens: u64::MAX, wanted: u64::MAX, parts: u64::MAX };
        for (buffer, range) in buffers {
            let bytes = buffer.bytes();
            match *range {
                AccessRange::Fixed(needed) if needed > bytes => return None,
                AccessRange::Fixed(_) => {}
                AccessRange::Tokens(each) => capacity.tokens = capacity.tokens.min(bytes / each.max(1)),
                AccessRange::Wanted(each) => capacity.wanted = capacity.wanted.min(bytes / each.max(1)),
                AccessRange::Splits(each) => capacity.parts = capacity.parts.min(bytes / each.max(1)),
                AccessRange::ExpertTiles(tiles, each) => {
                    capacity.tokens = capacity.tokens.min(tiles.max_tokens(bytes / each.max(1)));
                }
                AccessRange::Batch => capacity.tokens = capacity.tokens.min((bytes / 16).checked_sub(1)?),
                // A run and a segment for each token at most.
                AccessRange::Segments => capacity.tokens = capacity.tokens.min((bytes / 16).checked_sub(1)? / 2),
            }
        }
        Some(capacity)
    }

    fn fits(self, size: BatchDims) -> bool {
        let n_tokens = u64::from(size.n_tokens);
        n_tokens <= self.tokens
            && u64::from(size.n_wanted) <= self.wanted
            && (size.n_splits <= 1 || n_tokens * u64::from(size.n_splits) <= self.parts)
    }
}

/// A pipeline, the buffers it works on, and its grid.
#[derive(Debug, Clone)]
pub struct Dispatch {
    kernel: Arc<BoundKernel>,
    grid: [GridExtent; 3],
    capacity: BufferCapacity,
}

/// A pipeline with its buffers, put together when it is first needed.
#[derive(Debug)]
struct BoundKernel {
    key: PipelineKey,
    ranges: Vec<BoundRange>,
    ready: OnceLock<(wgpu::ComputePipeline, wgpu::BindGroup)>,
}

/// What is bound of a buffer.
#[derive(Debug)]
struct BoundRange {
    buffer: wgpu::Buffer,
    offset: u64,
    size: Option<wgpu::BufferSize>,
}

impl From<wgpu::BufferBinding<'_>> for BoundRange {
    fn from(binding: wgpu::BufferBinding<'_>) -> Self {
        Self { buffer: binding.buffer.clone(), offset: binding.offset, size: binding.size }
    }
}

impl BoundKernel {
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
    /// Binds `buffers`, in the order of the shader's bindings and with how much of each the kernel reaches, to the pipeline
    /// of `key`. Refuses a buffer that is too short, and a fixed extent that the device cannot run. While pipelines are
    /// built beside other work this one is, too: see [`ready`](Self::ready).
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
            dispatch.ready(gpu)?;
        }
        Ok(dispatch)
    }

    /// Waits for the pipeline, where it is still being built; an error where it could not be, or does not take the buffers.
    pub fn ready(&self, gpu: &WgpuDevice) -> Result<(), WgpuError> {
        self.kernel.ready(gpu).map(|_| ())
    }

    /// Whether nothing is to be waited for: the pipeline is built.
    pub(crate) fn is_ready(&self, gpu: &WgpuDevice) -> bool {
        self.kernel.ready.get().is_some() || gpu.pipelines().is_built(&self.kernel.key)
    }

    /// The kernel's name.
    pub fn kernel(&self) -> &str {
        &self.kernel.key.name
    }

    /// Whether a step of this size has any work for it.
    pub fn has_work(&self, size: BatchDims) -> bool {
        self.grid.iter().all(|extent| extent.workgroups(size) > 0)
    }

    /// Whether the buffers have room for a step of this size.
    pub fn fits(&self, size: BatchDims) -> bool {
        self.capacity.fits(size)
    }

    /// Records the dispatch for a step of this size; nothing when its grid is empty.
    ///
    /// # Panics
    /// When the buffers have [no room](Self::fits) for it.
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
            // Whoever waits for the step hears of it.
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

    /// A buffer of so many bytes.
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

    fn step(n_tokens: u32, n_wanted: u32, n_splits: u32) -> BatchDims {
        BatchDims { n_tokens, n_wanted, n_runs: 1, n_splits }
    }

    #[test]
    fn a_step_is_no_larger_than_its_buffers() {
        let capacity = BufferCapacity::of(&[
            (&Bytes(64), AccessRange::Fixed(64)),
            (&Bytes(96), AccessRange::Tokens(32)),
            (&Bytes(80), AccessRange::Batch),
            (&Bytes(112), AccessRange::Segments),
            (&Bytes(8), AccessRange::Wanted(4)),
            (&Bytes(48), AccessRange::Splits(8)),
        ]);
        let room = room.expect("long enough");
        assert!(capacity.fits(step(3, 2, 1)) && capacity.fits(step(3, 2, 2)) && capacity.fits(step(1, 1, 6)));
        // The buffer of tokens ends before the batch does, which has room for four.
        assert!(!capacity.fits(step(4, 2, 1)) && !capacity.fits(step(3, 3, 1)));
        assert!(!capacity.fits(step(3, 2, 3)) && !capacity.fits(step(1, 1, 7)));
        assert!(!capacity.fits(step(u32::MAX, u32::MAX, u32::MAX)));
    }

    #[test]
    fn a_step_has_no_more_tiles_of_experts_than_its_buffers() {
        for (n_expert, n_used, tokens) in [(1, 1, 1), (8, 2, 16), (128, 8, 64), (5, 3, 7)] {
            let tiles = ExpertTiles { n_expert, n_used, tokens };
            for n in [1, 2, 17, 512] {
                let capacity = BufferCapacity::of(&[(
                    &Bytes(16 * u64::from(tiles.max_tiles(n))),
                    AccessRange::ExpertTiles(tiles, 16),
                )])
                .unwrap();
                assert!(room.fits(step(n, 0, 1)), "{tiles:?}, {n} tokens");
                let more = (n..10_000).find(|&more| tiles.max_tiles(more) > tiles.max_tiles(n)).unwrap();
                assert!(!room.fits(step(more, 0, 1)), "{tiles:?}, {more} tokens");
            }
        }
        // One token at each of two experts, and all others at one of them.
        assert_eq!(ExpertTiles { n_expert: 2, n_used: 1, tokens: 64 }.max_tiles(66), 3);
        assert_eq!(GridExtent::ExpertTiles(ExpertTiles { n_expert: 2, n_used: 1, tokens: 64 }).of(step(0, 0, 1)), 0);
    }

    #[test]
    fn a_buffer_shorter_than_any_step_needs_has_no_room() {
        assert_eq!(BufferCapacity::of(&[(&Bytes(60), AccessRange::Fixed(64))]), None);
        assert_eq!(BufferCapacity::of(&[(&Bytes(8), AccessRange::Batch)]), None);
        assert_eq!(BufferCapacity::of(&[(&Bytes(8), AccessRange::Segments)]), None);
        let none = BufferCapacity::of(&[(&Bytes(15), AccessRange::Tokens(16))]).expect("a step of no tokens");
        assert!(!none.fits(step(1, 0, 1)));
    }
}
