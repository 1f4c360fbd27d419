//! Kernel launches in the device's stream, and CUDA graphs.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys::{
    self, CUgraphExec, CUlaunchAttribute, CUlaunchAttributeID, CUlaunchConfig, CUstreamCaptureMode,
};

use crate::CudaError;
use crate::bounds::{self, KernelArgs, Launch};
use crate::device::{CudaDevice, check};
use crate::kernels::Kernel;

/// The size of a launch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LaunchGrid {
    /// Blocks in each dimension of the grid.
    pub(crate) blocks: [usize; 3],
    /// Threads of a block, in one dimension.
    pub(crate) threads: usize,
    /// Bytes of dynamic shared memory of a block.
    pub(crate) shared: usize,
}

/// When the blocks of a launch may start, relative to the launch before it in the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LaunchOrder {
    /// After the previous kernel has ended.
    AfterPrevious,
    /// While the previous kernel ends (programmatic dependent launch), from compute capability 9.0 on; else as `AfterPrevious`.
    /// The kernel itself waits for the previous one's results (`wait_for_input` in `ptx.cuh`).
    Overlapped,
    /// After the previous kernel, and all blocks at the same time (cooperative launch), for kernels whose blocks wait for each
    /// other. The launch fails if they do not fit on the device.
    Cooperative,
}

impl CudaDevice {
    /// Appends a launch of `kernel` to the stream. `args` is the kernel's only parameter. Does not wait. In debug builds an error if
    /// what [`KernelArgs::bounds`] states reaches beyond a buffer; what indices in device memory select is not checked.
    ///
    /// # Safety
    /// - Each address in `args` is of device memory, or null where the kernel allows that.
    /// - The memory is freed only after the stream has been awaited, as `CudaBuffer::drop` does.
    /// - It has what the kernel touches: what [`KernelArgs::bounds`] states, and what indices in device memory select: pages of the KV cache,
    ///   state slots, rows of RoPE tables, rows and items.
    /// - The kernel supports the grid.
    pub(crate) unsafe fn launch<A: KernelArgs>(
        &self,
        kernel: Kernel<A>,
        grid: LaunchGrid,
        args: &A,
        start: LaunchOrder,
    ) -> Result<(), CudaError> {
        bounds::check(&Launch { kernel: kernel.entry.name, grid }, args)?;
        let size = |n: usize| u32::try_from(n).expect("a grid is made of sizes that CUDA has");
        let blocks = grid.blocks.map(size);
        // SAFETY: an attribute of zeros has no effect.
        let mut attribute: CUlaunchAttribute = unsafe { std::mem::zeroed() };
        let has_attribute = match start {
            LaunchOrder::AfterPrevious => false,
            LaunchOrder::Overlapped => {
                attribute.id = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
                attribute.value.programmaticStreamSerializationAllowed = 1;
                self.summary().capability.0 >= 9
            }
            LaunchOrder::Cooperative => {
                attribute.id = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
                attribute.value.cooperative = 1;
                true
            }
        };
        let config = CUlaunchConfig {
            gridDimX: blocks[0],
            gridDimY: blocks[1],
            gridDimZ: blocks[2],
            blockDimX: size(grid.threads),
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: size(grid.shared),
            hStream: self.stream(),
            attrs: &raw mut attribute,
            numAttrs: u32::from(has_attribute),
        };
        let mut params = [std::ptr::from_ref(args).cast_mut().cast::<c_void>()];
        // SAFETY: the kernel takes one `A`: the table of `kernels.rs` says so, and `args_layout.cuh` holds its C++ structure to the same
        // layout. What its addresses are of is the caller's promise.
        check("run a kernel", unsafe {
            sys::cuLaunchKernelEx(&raw const config, kernel.function, params.as_mut_ptr(), std::ptr::null_mut())
        })
    }

    /// Records the launches that `launches` makes as a CUDA graph, without running them. On an error nothing stays recorded.
    ///
    /// Preconditions: the kernels are loaded (`Kernels::get`), `launches` does not wait for the device, and nothing else uses the stream
    /// meanwhile; otherwise the driver returns an error. The addresses of the launches have to stay valid as long as the graph: the executor
    /// holds it beside the buffers.
    pub(crate) fn record(
        self: &Arc<Self>,
        launches: impl FnOnce() -> Result<(), CudaError>,
    ) -> Result<CudaGraph, CudaError> {
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the handles are of this device and are used here alone: the stream, whose capture ends on every return; `graph`, which is
        // destroyed on every path; `exec`, which the result owns.
        unsafe {
            check("begin a graph", sys::cuStreamBeginCapture_v2(self.stream(), mode))?;
            let outcome = launches();
            let mut graph = std::ptr::null_mut();
            let ended = check("end a graph", sys::cuStreamEndCapture(self.stream(), &raw mut graph));
            let mut exec = std::ptr::null_mut();
            let made = outcome
                .and(ended)
                .and_then(|()| check("make a graph", sys::cuGraphInstantiateWithFlags(&raw mut exec, graph, 0)));
            if !graph.is_null() {
                let _ = sys::cuGraphDestroy(graph);
            }
            made?;
            Ok(CudaGraph { device: Arc::clone(self), exec })
        }
    }
}

/// A CUDA graph: launches that were recorded once and are submitted together. Their arguments are those of the recording.
#[derive(Debug)]
pub(crate) struct CudaGraph {
    /// The GPU that it was recorded for.
    device: Arc<CudaDevice>,
    /// The executable graph.
    exec: CUgraphExec,
}

// SAFETY: the handle is used through this value only.
unsafe impl Send for CudaGraph {}

impl Drop for CudaGraph {
    fn drop(&mut self) {
        // SAFETY: the graph is idle after the wait.
        unsafe {
            let _ = self.device.wait();
            let _ = sys::cuGraphExecDestroy(self.exec);
        }
    }
}

impl CudaGraph {
    /// Appends the graph's launches to the stream.
    pub(crate) fn launch(&self) -> Result<(), CudaError> {
        // SAFETY: the graph is valid, and its buffers live as long as the forward pass that owns it.
        check("run a graph", unsafe { sys::cuGraphLaunch(self.exec, self.device.stream()) })
    }
}
