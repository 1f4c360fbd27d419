//! A kernel bound to its buffers, ready to be recorded.

use crate::arena::Bind;
use crate::device::GpuDevice;
use crate::error::GpuError;
use crate::pso::PsoKey;

/// Number of workgroups along one axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// Always so many.
    Fixed(u32),
    /// One for every so many tokens of the batch.
    Tokens(u32),
    /// One for every so many tokens whose logits are wanted.
    Wanted(u32),
    /// One for each part that decode attention cuts the context into.
    Splits,
    /// So many when there is more than one such part, else none: what joins the parts.
    WhenSplit(u32),
}

/// Sizes of a step that grids depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepSize {
    /// Tokens of the batch.
    pub n_tokens: u32,
    /// Tokens whose logits are wanted.
    pub n_wanted: u32,
    /// Parts of the context in decode attention.
    pub n_splits: u32,
}

impl Extent {
    fn of(self, size: StepSize) -> u32 {
        match self {
            Self::Fixed(n) => n,
            Self::Tokens(per) => size.n_tokens.div_ceil(per),
            Self::Wanted(per) => size.n_wanted.div_ceil(per),
            Self::Splits => size.n_splits,
            Self::WhenSplit(n) => {
                if size.n_splits > 1 {
                    n
                } else {
                    0
                }
            }
        }
    }
}

/// A pipeline, the buffers it works on, and its grid.
#[derive(Debug, Clone)]
pub struct Dispatch {
    kernel: String,
    pipeline: wgpu::ComputePipeline,
    bind_group: wgpu::BindGroup,
    grid: [Extent; 3],
}

impl Dispatch {
    /// Binds `buffers`, in the order of the shader's bindings, to the pipeline of `key`. Refuses a fixed extent that the
    /// device cannot run.
    pub fn new(gpu: &GpuDevice, key: &PsoKey, buffers: &[&dyn Bind], grid: [Extent; 3]) -> Result<Self, GpuError> {
        let max = gpu.wgpu().limits().max_compute_workgroups_per_dimension;
        for extent in grid {
            if let Extent::Fixed(n) | Extent::WhenSplit(n) = extent
                && n > max
            {
                let why = format!("it takes {n} workgroups along an axis, and this GPU runs {max}");
                return Err(GpuError::Mismatch { what: format!("the grid of {}", key.name), why });
            }
        }
        let pipeline = gpu.pso().get(gpu, key)?;
        let entries: Vec<_> = buffers
            .iter()
            .enumerate()
            .map(|(i, buffer)| wgpu::BindGroupEntry { binding: i as u32, resource: buffer.resource() })
            .collect();
        let scope = gpu.wgpu().push_error_scope(wgpu::ErrorFilter::Validation);
        let bind_group = gpu.wgpu().create_bind_group(&wgpu::BindGroupDescriptor {
            label: Some(&key.name),
            layout: &pipeline.get_bind_group_layout(0),
            entries: &entries,
        });
        if let Some(e) = pollster::block_on(scope.pop()) {
            return Err(GpuError::Rejected { what: format!("the buffers of {}", key.name), why: e.to_string() });
        }
        Ok(Self { kernel: key.name.clone(), pipeline, bind_group, grid })
    }

    /// The kernel's name.
    pub fn kernel(&self) -> &str {
        &self.kernel
    }

    /// Whether a step of this size has any work for it.
    pub fn runs(&self, size: StepSize) -> bool {
        self.grid.iter().all(|extent| extent.of(size) > 0)
    }

    /// Records the dispatch for a step of this size; nothing when its grid is empty.
    pub fn record(&self, gpu: &GpuDevice, pass: &mut wgpu::ComputePass<'_>, size: StepSize) {
        if !self.runs(size) {
            return;
        }
        let [x, y, z] = self.grid.map(|extent| extent.of(size));
        pass.set_pipeline(&self.pipeline);
        pass.set_bind_group(0, &self.bind_group, &[]);
        pass.dispatch_workgroups(x, y, z);
        gpu.count_dispatch();
    }
}
