//! Kernels on their way: launches in a stream, and graphs of launches that are sent at once.

use std::ffi::c_void;
use std::sync::Arc;

use bytemuck::Pod;
use cudarc::driver::sys::{
    self, CUgraphExec, CUlaunchAttribute, CUlaunchAttributeID, CUlaunchConfig, CUstreamCaptureMode,
};

use crate::CudaError;
use crate::device::{CudaDevice, Kernel, check};

/// How many blocks of how many threads, with how many bytes of workgroup memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LaunchGrid {
    pub(crate) blocks: [usize; 3],
    pub(crate) threads: usize,
    pub(crate) shared: usize,
}

/// When the blocks of a kernel start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LaunchOrder {
    /// When the kernel before has ended.
    AfterPrevious,
    /// While the kernel before ends, where the device can: the kernel waits itself (`wait_for_input`).
    Overlapped,
    /// In turn, and all at once: they wait for each other.
    Cooperative,
}

impl CudaDevice {
    /// Runs `kernel` with `args` after what was asked for before.
    pub(crate) fn launch<A: Pod>(
        &self,
        kernel: Kernel,
        grid: LaunchGrid,
        args: &A,
        start: LaunchOrder,
    ) -> Result<(), CudaError> {
        let blocks = grid.blocks.map(|n| u32::try_from(n).expect("as many blocks as a grid can have"));
        // SAFETY: zeros are an attribute of no effect.
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
            blockDimX: grid.threads as u32,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: grid.shared as u32,
            hStream: self.stream(),
            attrs: &raw mut attribute,
            numAttrs: u32::from(has_attribute),
        };
        let mut params = [std::ptr::from_ref(args).cast_mut().cast::<c_void>()];
        // SAFETY: the kernel takes one structure, which `args.rs` declares as the kernels do; buffers that it names live longer
        // than what runs with them (`CudaBuffer::drop`).
        check("run a kernel", unsafe {
            sys::cuLaunchKernelEx(&raw const config, kernel.0, params.as_mut_ptr(), std::ptr::null_mut())
        })
    }

    /// What `launches` asks for, to be sent again and again.
    pub(crate) fn record(
        self: &Arc<Self>,
        launches: impl FnOnce() -> Result<(), CudaError>,
    ) -> Result<CudaGraph, CudaError> {
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is the device's, and nothing but `launches` uses it meanwhile: the forward pass is borrowed.
        unsafe {
            check("begin a graph", sys::cuStreamBeginCapture_v2(self.stream(), mode))?;
            let outcome = launches();
            let mut graph = std::ptr::null_mut();
            let ended = check("end a graph", sys::cuStreamEndCapture(self.stream(), &raw mut graph));
            outcome.and(ended)?;
            let mut exec = std::ptr::null_mut();
            let made = check("make a graph", sys::cuGraphInstantiateWithFlags(&raw mut exec, graph, 0));
            let _ = sys::cuGraphDestroy(graph);
            made?;
            Ok(CudaGraph { device: Arc::clone(self), exec })
        }
    }
}

/// Launches that are sent at once.
#[derive(Debug)]
pub(crate) struct CudaGraph {
    device: Arc<CudaDevice>,
    exec: CUgraphExec,
}

// SAFETY: a handle that is used through this alone.
unsafe impl Send for CudaGraph {}

impl Drop for CudaGraph {
    fn drop(&mut self) {
        // SAFETY: what runs of it is waited for.
        unsafe {
            let _ = self.device.wait();
            let _ = sys::cuGraphExecDestroy(self.exec);
        }
    }
}

impl CudaGraph {
    /// Runs it after what was asked for before.
    pub(crate) fn launch(&self) -> Result<(), CudaError> {
        // SAFETY: the graph is whole, and its buffers live as long as the forward pass that has it.
        check("run a graph", unsafe { sys::cuGraphLaunch(self.exec, self.device.stream()) })
    }
}
