//! [`Launcher`]: launches kernels, matrix products among them, for a forward pass or for an encoder of pictures.

use std::sync::Arc;

use super::ModelRunner;
use super::linear::{LinearInput, LinearOp, gemv_tokens};
use super::matmul_wide::packed_layout;
use crate::CudaError;
use crate::args::NormArgs;
use crate::bounds::KernelArgs;
use crate::device::CudaDevice;
use crate::kernels::{EntryPoint, Kernels};
use crate::launch::{LaunchGrid, LaunchOrder};
use crate::matrix::WeightLayout;
use crate::profile::Timers;
use crate::slice::{DevicePtr, DeviceSlice, F16};

/// What launches need, borrowed from a [`ModelRunner`] or from an encoder.
pub(crate) struct Launcher<'a> {
    /// The device.
    pub(crate) gpu: &'a Arc<CudaDevice>,
    /// Kernel handles, looked up at their first launch.
    pub(crate) kernels: &'a mut Kernels,
    /// Kernels launched so far.
    pub(crate) n_launches: &'a mut u64,
    /// Present while kernels are timed for a profile.
    pub(crate) timers: Option<&'a mut Timers>,
    /// Most rows of a product that uses the path of `matmul_few.rs`.
    pub(crate) max_few_tokens: usize,
    /// Space for the partial sums of split-K products ([`split_bytes`](super::split_bytes)).
    pub(crate) split_sums: DevicePtr<[f32; 4]>,
    /// Counters of split-K products, zero between kernels.
    pub(crate) split_tickets: DevicePtr<u32>,
}

impl Launcher<'_> {
    /// Launches a kernel. `label` is shown after its name in a profile.
    pub(crate) fn launch<A: KernelArgs>(
        &mut self,
        entry: EntryPoint<A>,
        label: &str,
        grid: LaunchGrid,
        args: &A,
    ) -> Result<(), CudaError> {
        let kernel = self.kernels.get(self.gpu, entry)?;
        *self.n_launches += 1;
        // SAFETY: this holds for all `args` that `runner/`, `parts/` and `encoder/` make, which alone call this function:
        // - Each address is null, or of a buffer that the executor or the encoder holds as long as this is borrowed from it, or longer than the
        //   step: weights, caches, activations. Buffers are freed, or used anew, in the order of the stream.
        // - The buffers have room for the largest micro-batch, or for all rows; `KernelArgs::bounds` states what a kernel touches, and debug
        //   builds check it.
        // - Indices in device memory were checked on the host before they were uploaded: pages, sequences and ids by `PageTable::check`, state
        //   slots by `CudaRecurrentStates::write`; positions by `PageTable::span_places` behind spans, and elsewhere they are indices; rows of
        //   encoders by `encoder/ops.rs`.
        let launch = |order: LaunchOrder| unsafe { self.gpu.launch(kernel, grid, args, order) };
        match &mut self.timers {
            None => launch(LaunchOrder::Overlapped),
            Some(timers) => {
                timers.around(format!("{} {label}", entry.name).trim_end(), || launch(LaunchOrder::AfterPrevious))
            }
        }
    }
}

impl ModelRunner {
    /// What launches need, with the runner's buffers.
    pub(crate) fn launcher(&mut self) -> Launcher<'_> {
        Launcher {
            gpu: &self.gpu,
            kernels: &mut self.kernels,
            n_launches: &mut self.n_launches,
            timers: self.timers.as_mut(),
            max_few_tokens: self.max_few_tokens,
            split_sums: self.buffers.split_sums.ptr(),
            split_tickets: self.buffers.split_tickets.ptr(),
        }
    }

    /// [`Launcher::launch`].
    pub(crate) fn launch<A: KernelArgs>(
        &mut self,
        entry: EntryPoint<A>,
        label: &str,
        grid: LaunchGrid,
        args: &A,
    ) -> Result<(), CudaError> {
        self.launcher().launch(entry, label, grid, args)
    }

    /// [`Launcher::norm`].
    pub(crate) fn norm(&mut self, args: NormArgs, n_rows: usize) -> Result<(), CudaError> {
        self.launcher().norm(args, n_rows)
    }

    /// [`Launcher::product`].
    pub(crate) fn product(
        &mut self,
        p: &LinearOp<'_>,
        input: LinearInput,
        n_in: usize,
        n_tokens: usize,
    ) -> Result<(), CudaError> {
        self.launcher().product(p, input, n_in, n_tokens)
    }

    /// [`Launcher::gemm`].
    pub(crate) fn gemm(&mut self, p: &LinearOp<'_>, x: DeviceSlice<F16>, n_tokens: usize) -> Result<(), CudaError> {
        self.launcher().gemm(p, x, n_tokens)
    }

    /// [`gemv_tokens`].
    pub(crate) fn gemv_tokens(&self, layouts: &(impl Iterator<Item = WeightLayout> + Clone), n_in: usize) -> usize {
        gemv_tokens(self.gpu.summary(), layouts, n_in)
    }

    /// [`packed_layout`].
    pub(crate) fn packed_layout(&self, n_tokens: usize) -> u32 {
        packed_layout(self.gpu.summary(), self.max_few_tokens, n_tokens)
    }
}
