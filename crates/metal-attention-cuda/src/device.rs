//! [`CudaDevice`]: a GPU with its context, its stream and the loaded kernels; device buffers and pinned host memory. A thin
//! layer over the driver (`cudarc`). Everything that a device does, it does in the order of one stream.

use std::ffi::{CStr, CString, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytemuck::Pod;
use cudarc::driver::sys::{
    self, CUcontext, CUdevice, CUdevice_attribute, CUevent, CUfunction, CUfunction_attribute, CUmodule, CUresult,
    CUstream,
};
use metal_attention_model::{DeviceInfo, Watch};

use crate::CudaError;
use crate::bounds::{self, KernelArgs};
use crate::kernels::{EntryPoint, Kernel, MODULES, Module};
use crate::slice::{DevicePtr, DeviceSlice};

/// The CUDA version that the kernels are compiled with (1000 times the major number plus 10 times the minor one), and the first
/// driver release that supports it.
const CUDA: (i32, &str) = (13000, "580");

/// Time that the host spins while it polls, before it sleeps between polls. Decode steps take some hundred microseconds; during
/// a longer prefill the core is left to other threads.
const SPIN_TIME: Duration = Duration::from_millis(20);

/// Dynamic shared memory of a block that needs no attribute.
const SMALL_SHARED: usize = 48 << 10;

/// The properties of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CudaSummary {
    /// Its ordinal in the driver's list.
    pub ordinal: usize,
    /// Its name.
    pub name: String,
    /// Compute capability: major and minor number.
    pub capability: (i32, i32),
    /// Bytes of device memory.
    pub memory: u64,
    /// Memory bandwidth in bytes per second, from the memory's clock and bus width; 0 if the driver does not report these.
    pub bandwidth: u64,
    /// Streaming multiprocessors.
    pub n_sm: usize,
    /// Bytes of shared memory that a block can have.
    pub max_shared: usize,
    /// The CUDA version of the driver: 1000 times the major number plus 10 times the minor one.
    pub driver: i32,
}

impl CudaSummary {
    /// Whether there are kernels for its compute capability.
    pub fn is_new_enough(&self) -> bool {
        self.capability.0 >= 8
    }
}

impl CudaSummary {
    /// Whether it has warpgroup matrix instructions (`wgmma`) and register reallocation between warps (`setmaxnreg`): compute
    /// capability 9.0, that is, H100 and H200.
    pub(crate) fn has_wgmma(&self) -> bool {
        self.capability == (9, 0)
    }
}

/// All GPUs that the driver lists. An error if there is no driver, or only one that is too old for the kernels.
pub fn cuda_summaries() -> Result<Vec<CudaSummary>, CudaError> {
    let driver = driver()?;
    let mut n = 0;
    // SAFETY: the driver is loaded and writes one number.
    check("count the devices", unsafe { sys::cuDeviceGetCount(&raw mut n) })?;
    (0..usize::try_from(n).unwrap_or(0)).map(|ordinal| Ok(summary(ordinal, driver)?.1)).collect()
}

/// Initialises the driver and returns its version.
fn driver() -> Result<i32, CudaError> {
    // SAFETY: looks for the library, and calls functions that every version of it has.
    unsafe {
        if !sys::is_culib_present() {
            return Err(CudaError::NoDriver);
        }
        let mut found = 0;
        check("read the driver's version", sys::cuDriverGetVersion(&raw mut found))?;
        if found < CUDA.0 {
            return Err(CudaError::OldDriver { found, wanted: CUDA.0, driver: CUDA.1 });
        }
        match sys::cuInit(0) {
            // A driver without a GPU.
            CUresult::CUDA_ERROR_NO_DEVICE => return Err(CudaError::NoDevice { ordinal: 0, n_devices: 0 }),
            outcome => check("start", outcome)?,
        }
        Ok(found)
    }
}

/// The handle and the properties of GPU `ordinal`.
fn summary(ordinal: usize, driver: i32) -> Result<(CUdevice, CudaSummary), CudaError> {
    use CUdevice_attribute::{
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
        CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH as BUS_BITS,
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN as SHARED,
        CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE as MEMORY_KHZ, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT as SMS,
    };
    let mut n_devices = 0;
    let (mut device, mut name, mut memory) = (0, [0; 256], 0);
    // SAFETY: the driver writes no more than these variables hold.
    unsafe {
        check("count the devices", sys::cuDeviceGetCount(&raw mut n_devices))?;
        let n_devices = usize::try_from(n_devices).unwrap_or(0);
        let number = i32::try_from(ordinal).ok().filter(|_| ordinal < n_devices);
        let number = number.ok_or(CudaError::NoDevice { ordinal, n_devices })?;
        check("find the device", sys::cuDeviceGet(&raw mut device, number))?;
        check("read the device's name", sys::cuDeviceGetName(name.as_mut_ptr(), 255, device))?;
        check("read the size of the device's memory", sys::cuDeviceTotalMem_v2(&raw mut memory, device))?;
    }
    let attribute = |which: CUdevice_attribute| {
        let mut value = 0;
        // SAFETY: as above.
        check("read a property of the device", unsafe { sys::cuDeviceGetAttribute(&raw mut value, which, device) })?;
        Ok::<i32, CudaError>(value)
    };
    // SAFETY: the driver has ended the name with a zero; the last byte is zero in any case.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
    // Twice the clock, as the memory transfers at both edges.
    let of_memory = |which| attribute(which).ok().and_then(|value| u64::try_from(value).ok()).unwrap_or(0);
    let bandwidth = of_memory(MEMORY_KHZ) * 1000 * 2 * of_memory(BUS_BITS) / 8;
    let summary = CudaSummary {
        ordinal,
        name,
        capability: (attribute(MAJOR)?, attribute(MINOR)?),
        memory: memory as u64,
        bandwidth,
        n_sm: usize::try_from(attribute(SMS)?).unwrap_or(1),
        max_shared: usize::try_from(attribute(SHARED)?).unwrap_or(SMALL_SHARED),
        driver,
    };
    Ok((device, summary))
}

/// Turns a result of the driver into an error with the driver's message. `what`: the operation, as an infinitive after "could
/// not".
pub(crate) fn check(what: &'static str, outcome: CUresult) -> Result<(), CudaError> {
    if outcome == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut text = std::ptr::null();
    // SAFETY: the driver returns null or a string that lives as long as the driver.
    let why = unsafe {
        if sys::cuGetErrorString(outcome, &raw mut text) == CUresult::CUDA_SUCCESS && !text.is_null() {
            CStr::from_ptr(text).to_string_lossy().into_owned()
        } else {
            format!("error {outcome:?}")
        }
    };
    Err(CudaError::Driver { what, why })
}

/// Bytes of the argument of a function, which takes one.
pub(crate) fn argument_bytes(function: CUfunction) -> Result<usize, CudaError> {
    let (mut offset, mut bytes) = (0, 0);
    // SAFETY: the function is of a loaded module; the driver writes two numbers.
    check("read the size of a kernel's argument", unsafe {
        sys::cuFuncGetParamInfo(function, 0, &raw mut offset, &raw mut bytes)
    })?;
    Ok(bytes)
}

/// An open GPU: its context, one stream, and the loaded kernels.
#[derive(Debug)]
pub struct CudaDevice {
    /// The driver's handle of the GPU.
    device: CUdevice,
    /// The GPU's primary context.
    context: CUcontext,
    /// The stream of all launches and copies.
    stream: CUstream,
    /// The loaded modules, by name.
    modules: Vec<(&'static str, CUmodule)>,
    /// The properties of the GPU.
    summary: CudaSummary,
    /// Cancels work and reports its progress.
    watch: Watch,
    /// Bytes of all buffers.
    allocated: AtomicU64,
}

// SAFETY: these are handles that the driver allows any thread to use; each thread sets the context current before a call.
unsafe impl Send for CudaDevice {}
// SAFETY: as above.
unsafe impl Sync for CudaDevice {}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        // SAFETY: nothing else has the handles any more. The driver may already be shut down; then these calls fail, and that
        // is ignored.
        unsafe {
            let _ = sys::cuCtxSetCurrent(self.context);
            let _ = sys::cuStreamSynchronize(self.stream);
            for (_, module) in &self.modules {
                let _ = sys::cuModuleUnload(*module);
            }
            let _ = sys::cuStreamDestroy_v2(self.stream);
            let _ = sys::cuDevicePrimaryCtxRelease_v2(self.device);
        }
    }
}

impl CudaDevice {
    /// Opens GPU `ordinal` and loads the kernels. Work on the device ends with an error once `watch` is cancelled.
    pub fn open(ordinal: usize, watch: Watch) -> Result<Self, CudaError> {
        let (device, summary) = summary(ordinal, driver()?)?;
        let (major, minor) = summary.capability;
        if !summary.is_new_enough() {
            return Err(CudaError::OldDevice { name: summary.name, major, minor });
        }
        let mut context = std::ptr::null_mut();
        // SAFETY: the driver returns a context, which this value holds until it is dropped.
        check("open the device", unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut context, device) })?;
        let stream = std::ptr::null_mut();
        let mut opened =
            Self { device, context, stream, modules: Vec::new(), summary, watch, allocated: AtomicU64::new(0) };
        opened.bind()?;
        // 1 (non-blocking): does not synchronise with the default stream, which other code may use.
        // SAFETY: the driver returns a stream of this context.
        check("create a stream", unsafe { sys::cuStreamCreate(&raw mut opened.stream, 1) })?;
        let has_wgmma = opened.summary.has_wgmma();
        for Module { name, gpus: _, image } in MODULES.iter().filter(|module| module.gpus.include(has_wgmma)) {
            let mut module = std::ptr::null_mut();
            // SAFETY: the image is complete; the driver copies it.
            check("load the kernels", unsafe { sys::cuModuleLoadData(&raw mut module, image.as_ptr().cast()) })?;
            opened.modules.push((name, module));
        }
        Ok(opened)
    }

    /// The first GPU, for tests. `None` if there is none, unless `METAL_ATTENTION_TEST_CUDA` demands one.
    #[cfg(test)]
    pub(crate) fn for_tests() -> Option<Arc<Self>> {
        match Self::open(0, Watch::default()) {
            Ok(gpu) => Some(Arc::new(gpu)),
            Err(why) => {
                assert!(std::env::var_os("METAL_ATTENTION_TEST_CUDA").is_none(), "{why}");
                eprintln!("skipped: {why}");
                None
            }
        }
    }

    /// The properties of the GPU.
    pub fn summary(&self) -> &CudaSummary {
        &self.summary
    }

    /// The GPU as the device of a forward pass or of an encoder.
    pub(crate) fn info(&self) -> DeviceInfo {
        let CudaSummary { name, driver, .. } = &self.summary;
        let driver = format!("CUDA {}.{}", driver / 1000, driver % 1000 / 10);
        DeviceInfo { kind: "cuda", name: name.clone(), driver: Some(driver), n_threads: 1 }
    }

    /// Bytes of device memory that are free now.
    pub fn free_memory(&self) -> Result<u64, CudaError> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the driver writes two numbers.
        check("read the size of free memory", unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) })?;
        Ok(free as u64)
    }

    /// Bytes of all buffers allocated through this value.
    pub(crate) fn allocated_bytes(&self) -> u64 {
        self.allocated.load(Ordering::Relaxed)
    }

    /// The watch that cancels work and reports its progress.
    pub(crate) fn watch(&self) -> &Watch {
        &self.watch
    }

    /// An error if the watch was cancelled.
    pub(crate) fn check_watch(&self) -> Result<(), CudaError> {
        if self.watch.is_cancelled() { Err(CudaError::Cancelled) } else { Ok(()) }
    }

    pub(crate) fn stream(&self) -> CUstream {
        self.stream
    }

    /// Makes this device's context current in the calling thread, as the driver requires before other calls.
    pub(crate) fn bind(&self) -> Result<(), CudaError> {
        // SAFETY: the context lives as long as `self`.
        check("use the device", unsafe { sys::cuCtxSetCurrent(self.context) })
    }

    /// Lets kernels of this device read and write the memory of `other` (peer access).
    pub(crate) fn enable_peer_access(&self, other: &Self) -> Result<(), CudaError> {
        let mut can = 0;
        // SAFETY: the driver writes a number.
        check("check the peer access of devices", unsafe {
            sys::cuDeviceCanAccessPeer(&raw mut can, self.device, other.device)
        })?;
        if can == 0 {
            return Err(CudaError::NoPeerAccess { from: self.summary.ordinal, to: other.summary.ordinal });
        }
        self.bind()?;
        // SAFETY: both contexts stay open while the process uses them.
        match unsafe { sys::cuCtxEnablePeerAccess(other.context, 0) } {
            CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            outcome => check("enable the peer access of devices", outcome),
        }
    }

    /// Loads a kernel and sets its attributes: as much dynamic shared memory as the device allows. An error if its compiled code takes
    /// an argument of another size.
    pub(crate) fn kernel<A: KernelArgs>(&self, entry: EntryPoint<A>) -> Result<Kernel<A>, CudaError> {
        use CUfunction_attribute::{
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as SHARED, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES as STATIC,
        };
        let function = self.function(entry.module, entry.name)?;
        let (bytes, wanted) = (argument_bytes(function)?, size_of::<A>());
        if bytes != wanted {
            let why =
                format!("{} takes {bytes} bytes of arguments, and not {wanted}: run scripts/cuda-kernels", entry.name);
            return Err(CudaError::Driver { what: "use a kernel", why });
        }
        // Static shared memory counts against the limit, too.
        let mut static_bytes = 0;
        // SAFETY: the function is of a loaded module; the driver writes one number.
        check("read a kernel's shared memory", unsafe {
            sys::cuFuncGetAttribute(&raw mut static_bytes, STATIC, function)
        })?;
        let max = self.summary.max_shared as i32 - static_bytes;
        // SAFETY: the function is of a loaded module.
        check("set a kernel's shared memory", unsafe { sys::cuFuncSetAttribute(function, SHARED, max) })?;
        // Prefers shared memory to L1 cache, so that more blocks are resident.
        let carveout = CUfunction_attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
        // SAFETY: as above.
        check("set a kernel's shared memory", unsafe { sys::cuFuncSetAttribute(function, carveout, 100) })?;
        Ok(Kernel { function, entry })
    }

    /// The function `name` of a module of [`MODULES`].
    pub(crate) fn function(&self, module: &str, name: &str) -> Result<CUfunction, CudaError> {
        let not_found =
            || CudaError::Driver { what: "find a kernel", why: format!("{name} is not in module {module}") };
        let symbol = CString::new(name).map_err(|_| not_found())?;
        let (_, image) = self.modules.iter().find(|(known, _)| *known == module).ok_or_else(not_found)?;
        let mut function = std::ptr::null_mut();
        // SAFETY: the module is loaded.
        match unsafe { sys::cuModuleGetFunction(&raw mut function, *image, symbol.as_ptr()) } {
            CUresult::CUDA_ERROR_NOT_FOUND => Err(not_found()),
            outcome => check("find a kernel", outcome).map(|()| function),
        }
    }

    /// Allocates a buffer and fills it with zeros, in the order of the stream.
    pub(crate) fn zeros(self: &Arc<Self>, what: &'static str, bytes: u64) -> Result<CudaBuffer, CudaError> {
        let buffer = self.buffer(what, bytes)?;
        // SAFETY: the buffer has that length.
        check("clear memory", unsafe { sys::cuMemsetD8Async(buffer.ptr, 0, buffer.bytes as usize, self.stream) })?;
        Ok(buffer)
    }

    /// Allocates a buffer with undefined contents; at least 16 bytes.
    pub(crate) fn buffer(self: &Arc<Self>, what: &'static str, bytes: u64) -> Result<CudaBuffer, CudaError> {
        self.bind()?;
        let bytes = bytes.max(16);
        let mut ptr = 0;
        let n = usize::try_from(bytes).map_err(|_| CudaError::OutOfMemory { what, bytes })?;
        // SAFETY: the driver returns memory, which belongs to the buffer until it is dropped.
        match unsafe { sys::cuMemAlloc_v2(&raw mut ptr, n) } {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => return Err(CudaError::OutOfMemory { what, bytes }),
            outcome => check("allocate memory", outcome)?,
        }
        bounds::note_allocation(ptr, bytes);
        self.allocated.fetch_add(bytes, Ordering::Relaxed);
        Ok(CudaBuffer { device: Arc::clone(self), ptr, bytes })
    }

    /// Allocates a buffer and copies `data` to it.
    pub(crate) fn upload<T: Pod>(self: &Arc<Self>, what: &'static str, data: &[T]) -> Result<CudaBuffer, CudaError> {
        let bytes: &[u8] = bytemuck::cast_slice(data);
        let buffer = self.buffer(what, bytes.len() as u64)?;
        buffer.write(0, bytes)?;
        Ok(buffer)
    }

    /// Calls `poll` until it returns a value, an error, or the watch is cancelled. Spins for [`SPIN_TIME`], then sleeps between
    /// calls.
    pub(crate) fn poll_until<T>(&self, mut poll: impl FnMut() -> Result<Option<T>, CudaError>) -> Result<T, CudaError> {
        let begin = Instant::now();
        loop {
            if let Some(found) = poll()? {
                return Ok(found);
            }
            self.check_watch()?;
            if begin.elapsed() > SPIN_TIME {
                std::thread::sleep(Duration::from_micros(50));
            } else {
                std::hint::spin_loop();
            }
        }
    }

    /// Waits until all launches and copies in the stream have completed. An error if one of them has failed.
    pub(crate) fn wait(&self) -> Result<(), CudaError> {
        self.bind()?;
        // SAFETY: the stream belongs to the device.
        check("finish the work on the device", unsafe { sys::cuStreamSynchronize(self.stream) })
    }
}

/// A buffer in device memory. It is freed once the stream is idle.
#[derive(Debug)]
pub(crate) struct CudaBuffer {
    /// The GPU, which stays open as long as the buffer exists.
    device: Arc<CudaDevice>,
    /// The device address.
    ptr: u64,
    /// The size in bytes.
    bytes: u64,
}

impl Drop for CudaBuffer {
    fn drop(&mut self) {
        bounds::note_free(self.ptr);
        // SAFETY: waits for launches that may use the memory; no later launch has its address.
        unsafe {
            let _ = sys::cuCtxSetCurrent(self.device.context);
            let _ = sys::cuStreamSynchronize(self.device.stream);
            let _ = sys::cuMemFree_v2(self.ptr);
        }
        self.device.allocated.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl CudaBuffer {
    /// The device address, as kernels take it. The caller knows what elements the buffer has.
    pub(crate) fn ptr<T>(&self) -> DevicePtr<T> {
        DevicePtr::from_address(self.ptr)
    }

    /// All of the buffer, as elements `T`.
    pub(crate) fn slice<T>(&self) -> DeviceSlice<T> {
        DeviceSlice::new(self.ptr(), self.bytes as usize / size_of::<T>())
    }

    /// The size in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Notes that the buffer is divided into these parts at present, so that debug builds refuse launches that reach from one into the
    /// next.
    pub(crate) fn note_parts<T>(&self, parts: &[DeviceSlice<T>]) {
        let part = |part: &DeviceSlice<T>| (part.ptr().address(), (part.len() * size_of::<T>()) as u64);
        bounds::note_parts(self.ptr, parts.iter().map(part));
    }

    /// Copies `data` to byte `at`, in the order of the stream. The caller may reuse `data` at once.
    pub(crate) fn write(&self, at: u64, data: &[u8]) -> Result<(), CudaError> {
        assert!(at + data.len() as u64 <= self.bytes, "{} bytes at {at} of {}", data.len(), self.bytes);
        // SAFETY: the range is within the buffer; the driver has copied unpinned host memory when it returns.
        check("write to the device", unsafe {
            sys::cuMemcpyHtoDAsync_v2(self.ptr + at, data.as_ptr().cast(), data.len(), self.device.stream)
        })
    }

    /// Fills the buffer with zeros, in the order of the stream.
    pub(crate) fn clear(&self) -> Result<(), CudaError> {
        self.device.bind()?;
        // SAFETY: the buffer has that length.
        check("clear memory", unsafe { sys::cuMemsetD8Async(self.ptr, 0, self.bytes as usize, self.device.stream) })
    }

    /// Copies `bytes` bytes from offset `from` to offset `to`, in the order of the stream. The ranges may not overlap.
    pub(crate) fn copy_within(&self, from: u64, to: u64, bytes: u64) -> Result<(), CudaError> {
        assert!(from.max(to) + bytes <= self.bytes, "{bytes} bytes from {from} to {to} of {}", self.bytes);
        // SAFETY: both ranges are within the buffer.
        check("copy on the device", unsafe {
            sys::cuMemcpyDtoDAsync_v2(self.ptr + to, self.ptr + from, bytes as usize, self.device.stream)
        })
    }
}

/// Page-locked host memory, which the device can write to directly.
#[derive(Debug)]
pub(crate) struct Pinned {
    /// The GPU, which stays open as long as the memory exists.
    device: Arc<CudaDevice>,
    /// The address.
    ptr: *mut c_void,
    /// The size in bytes.
    bytes: usize,
}

// SAFETY: the memory is freed once, when the value is dropped; callers synchronise their accesses.
unsafe impl Send for Pinned {}

impl Drop for Pinned {
    fn drop(&mut self) {
        bounds::note_free(self.ptr as u64);
        // SAFETY: waits for launches and copies that may write to the memory.
        unsafe {
            let _ = sys::cuCtxSetCurrent(self.device.context);
            let _ = sys::cuStreamSynchronize(self.device.stream);
            let _ = sys::cuMemFreeHost(self.ptr);
        }
    }
}

impl Pinned {
    pub(crate) fn new(device: &Arc<CudaDevice>, bytes: usize) -> Result<Self, CudaError> {
        device.bind()?;
        let (bytes, mut ptr) = (bytes.max(16), std::ptr::null_mut());
        // SAFETY: the driver returns memory, which belongs to this value until it is dropped.
        check("allocate pinned memory", unsafe { sys::cuMemHostAlloc(&raw mut ptr, bytes, 0) })?;
        bounds::note_allocation(ptr as u64, bytes as u64);
        Ok(Self { device: Arc::clone(device), ptr, bytes })
    }

    pub(crate) fn device(&self) -> &CudaDevice {
        &self.device
    }

    /// The address, the same for the device and for the host.
    pub(crate) fn ptr(&self) -> *mut c_void {
        self.ptr
    }
}

/// Pinned host memory for results, with an event that tells when they have arrived.
#[derive(Debug)]
pub(crate) struct Readback {
    /// The memory that results are copied to.
    memory: Pinned,
    /// Recorded behind the last copy.
    written: CUevent,
}

// SAFETY: the memory and the event are used through this value only.
unsafe impl Send for Readback {}

impl Drop for Readback {
    fn drop(&mut self) {
        // SAFETY: nothing else has the event; the driver keeps it until it has completed.
        unsafe {
            let _ = sys::cuCtxSetCurrent(self.memory.device.context);
            let _ = sys::cuEventDestroy_v2(self.written);
        }
    }
}

impl Readback {
    pub(crate) fn new(device: &Arc<CudaDevice>, bytes: u64) -> Result<Self, CudaError> {
        let memory = Pinned::new(device, bytes as usize)?;
        let mut written = std::ptr::null_mut();
        // 2: an event without timing.
        // SAFETY: the driver returns an event, which belongs to this value until it is dropped.
        check("create an event", unsafe { sys::cuEventCreate(&raw mut written, 2) })?;
        Ok(Self { memory, written })
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.memory.bytes as u64
    }

    /// Copies the first `bytes` bytes of `from` to this memory, in the order of the stream. [`read`](Self::read) waits for
    /// them.
    pub(crate) fn copy(&mut self, from: &CudaBuffer, bytes: u64) -> Result<(), CudaError> {
        self.copy_part(from, 0, bytes, 0)?;
        self.end_copies()
    }

    /// Copies `bytes` bytes of `from`, from offset `start` on, to offset `at` of this memory, in the order of the stream. After
    /// the last part, [`end_copies`](Self::end_copies) has to be called.
    pub(crate) fn copy_part(&mut self, from: &CudaBuffer, start: u64, bytes: u64, at: u64) -> Result<(), CudaError> {
        assert!(at + bytes <= self.bytes() && start + bytes <= from.bytes, "{bytes} bytes to read back");
        let stream = self.memory.device.stream;
        // SAFETY: both ranges are within their buffers; the host reads the copy only after the event recorded behind it.
        unsafe {
            let to = self.memory.ptr.byte_add(at as usize);
            check("read from the device", sys::cuMemcpyDtoHAsync_v2(to, from.ptr + start, bytes as usize, stream))
        }
    }

    /// Records the event behind the copies so far.
    pub(crate) fn end_copies(&mut self) -> Result<(), CudaError> {
        // SAFETY: the event belongs to this value, and the stream to the device.
        check("record an event", unsafe { sys::cuEventRecord(self.written, self.memory.device.stream) })
    }

    /// Waits for the copies and returns the first `bytes` bytes. An error if launches before them have failed, or if the watch
    /// is cancelled.
    pub(crate) fn read(&mut self, bytes: u64) -> Result<&[u8], CudaError> {
        assert!(bytes <= self.bytes(), "{bytes} bytes to read back");
        self.memory.device.poll_until(|| {
            // SAFETY: the event belongs to this value.
            match unsafe { sys::cuEventQuery(self.written) } {
                CUresult::CUDA_ERROR_NOT_READY => Ok(None),
                outcome => check("run the kernels", outcome).map(Some),
            }
        })?;
        // SAFETY: the device has written at least that many bytes.
        Ok(unsafe { std::slice::from_raw_parts(self.memory.ptr.cast(), bytes as usize) })
    }
}
