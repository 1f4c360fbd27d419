//! The driver, a device, its memory.

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytemuck::Pod;
use cudarc::driver::sys::{
    self, CUcontext, CUdevice, CUdevice_attribute, CUevent, CUfunction, CUfunction_attribute, CUmodule, CUresult,
    CUstream,
};
use metal_attention_model::Watch;

use crate::CudaError;

/// The CUDA version that the kernels are compiled with, as the driver counts, and the first driver that knows it.
const CUDA: (i32, &str) = (13000, "580");

/// Compiled kernels, for several generations of GPUs each.
const MODULES: &[&[u8]] = &[
    include_bytes!("../prebuilt/repack.fatbin"),
    include_bytes!("../prebuilt/matvec.fatbin"),
    include_bytes!("../prebuilt/matmul_few.fatbin"),
    include_bytes!("../prebuilt/attention.fatbin"),
    include_bytes!("../prebuilt/attention_on_units.fatbin"),
    include_bytes!("../prebuilt/prefill_attention.fatbin"),
    include_bytes!("../prebuilt/ends.fatbin"),
    include_bytes!("../prebuilt/top_k.fatbin"),
    include_bytes!("../prebuilt/rates.fatbin"),
    include_bytes!("../prebuilt/norm.fatbin"),
    include_bytes!("../prebuilt/activation.fatbin"),
    include_bytes!("../prebuilt/streams.fatbin"),
    include_bytes!("../prebuilt/attention_inputs.fatbin"),
    include_bytes!("../prebuilt/general_attention.fatbin"),
    include_bytes!("../prebuilt/odd_rows.fatbin"),
    include_bytes!("../prebuilt/experts.fatbin"),
    include_bytes!("../prebuilt/grouped_matvec.fatbin"),
    include_bytes!("../prebuilt/grouped_matmul.fatbin"),
    include_bytes!("../prebuilt/latent_attention.fatbin"),
    include_bytes!("../prebuilt/recurrent.fatbin"),
    include_bytes!("../prebuilt/delta_rule.fatbin"),
    include_bytes!("../prebuilt/mamba.fatbin"),
    include_bytes!("../prebuilt/mamba2.fatbin"),
    include_bytes!("../prebuilt/rwkv.fatbin"),
    include_bytes!("../prebuilt/exchange.fatbin"),
];
/// For devices of compute capability 9.0: a token in one launch, also on several cards, products of many tokens; what all others take
/// for the last.
const WIDE_MODULES: &[&[u8]] = &[
    include_bytes!("../prebuilt/decode.fatbin"),
    include_bytes!("../prebuilt/decode_on_cards.fatbin"),
    include_bytes!("../prebuilt/matmul_wide.fatbin"),
];
const OTHER_MODULES: &[&[u8]] = &[include_bytes!("../prebuilt/matmul.fatbin")];

/// How long something is looked for without a pause: a step takes some hundred microseconds, and a prompt leaves the core to others.
const IMPATIENT: Duration = Duration::from_millis(20);

/// Workgroup memory beyond which a kernel has to ask for it.
const SMALL_SHARED: usize = 48 << 10;

/// What a device is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CudaSummary {
    /// Its number among the driver's.
    pub ordinal: usize,
    /// Its name.
    pub name: String,
    /// Compute capability.
    pub capability: (i32, i32),
    /// Bytes of memory.
    pub memory: u64,
    /// Bytes a second that the memory gives by its clock and width; 0 where the driver does not say.
    pub bandwidth: u64,
    /// Multiprocessors.
    pub n_sm: usize,
    /// Most bytes of workgroup memory of a block.
    pub max_shared: usize,
    /// The CUDA version that the driver knows, 1000 times the major number and 10 times the minor one.
    pub driver: i32,
}

impl CudaSummary {
    /// Whether the kernels run on it.
    pub fn is_new_enough(&self) -> bool {
        self.capability.0 >= 8
    }
}

impl CudaSummary {
    /// Whether four warps multiply together (`wgmma`) and give each other registers, as on the H100 and H200 alone.
    pub(crate) fn has_wide(&self) -> bool {
        self.capability == (9, 0)
    }
}

/// All devices that the driver knows; an error where there is no driver that can run the kernels.
pub fn cuda_summaries() -> Result<Vec<CudaSummary>, CudaError> {
    let driver = driver()?;
    let mut n = 0;
    // SAFETY: the driver is there and writes one number.
    check("count the devices", unsafe { sys::cuDeviceGetCount(&raw mut n) })?;
    (0..usize::try_from(n).unwrap_or(0)).map(|ordinal| Ok(summary(ordinal, driver)?.1)).collect()
}

/// The version of the driver, which is made ready.
fn driver() -> Result<i32, CudaError> {
    // SAFETY: looks for the library, and calls what every version of it has.
    unsafe {
        if !sys::is_culib_present() {
            return Err(CudaError::NoDriver);
        }
        let mut found = 0;
        check("ask for the driver's version", sys::cuDriverGetVersion(&raw mut found))?;
        if found < CUDA.0 {
            return Err(CudaError::OldDriver { found, wanted: CUDA.0, driver: CUDA.1 });
        }
        match sys::cuInit(0) {
            // A driver without a card.
            CUresult::CUDA_ERROR_NO_DEVICE => return Err(CudaError::NoDevice { ordinal: 0, n_devices: 0 }),
            outcome => check("start", outcome)?,
        }
        Ok(found)
    }
}

fn summary(ordinal: usize, driver: i32) -> Result<(CUdevice, CudaSummary), CudaError> {
    use CUdevice_attribute::{
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
        CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH as BUS_BITS,
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN as SHARED,
        CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE as MEMORY_KHZ, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT as SMS,
    };
    let mut n_devices = 0;
    let (mut device, mut name, mut memory) = (0, [0; 256], 0);
    // SAFETY: the driver writes into these, no more than they hold.
    unsafe {
        check("count the devices", sys::cuDeviceGetCount(&raw mut n_devices))?;
        let n_devices = usize::try_from(n_devices).unwrap_or(0);
        let number = i32::try_from(ordinal).ok().filter(|_| ordinal < n_devices);
        let number = number.ok_or(CudaError::NoDevice { ordinal, n_devices })?;
        check("find the device", sys::cuDeviceGet(&raw mut device, number))?;
        check("ask for the device's name", sys::cuDeviceGetName(name.as_mut_ptr(), 255, device))?;
        check("ask for the device's memory", sys::cuDeviceTotalMem_v2(&raw mut memory, device))?;
    }
    let attribute = |of: CUdevice_attribute| {
        let mut value = 0;
        // SAFETY: as above.
        check("ask what the device can do", unsafe { sys::cuDeviceGetAttribute(&raw mut value, of, device) })?;
        Ok::<i32, CudaError>(value)
    };
    // SAFETY: the driver ended the name with a zero, or left the last one as it was.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
    // Twice a clock.
    let of_memory = |of| attribute(of).ok().and_then(|value| u64::try_from(value).ok()).unwrap_or(0);
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

/// The driver's words where a call failed.
pub(crate) fn check(what: &'static str, outcome: CUresult) -> Result<(), CudaError> {
    if outcome == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut text = std::ptr::null();
    // SAFETY: the driver gives a text that lives as long as it, or none.
    let why = unsafe {
        if sys::cuGetErrorString(outcome, &raw mut text) == CUresult::CUDA_SUCCESS && !text.is_null() {
            CStr::from_ptr(text).to_string_lossy().into_owned()
        } else {
            format!("error {outcome:?}")
        }
    };
    Err(CudaError::Driver { what, why })
}

/// An open device: a stream in which everything runs in order, and the kernels.
#[derive(Debug)]
pub struct CudaDevice {
    device: CUdevice,
    context: CUcontext,
    stream: CUstream,
    modules: Vec<CUmodule>,
    summary: CudaSummary,
    watch: Watch,
    allocated: AtomicU64,
}

// SAFETY: these are handles that the driver lets any thread use; each call makes the context the thread's first.
unsafe impl Send for CudaDevice {}
// SAFETY: as above.
unsafe impl Sync for CudaDevice {}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        // SAFETY: nobody has the handles any more; the driver may be at its end, when these calls fail.
        unsafe {
            let _ = sys::cuCtxSetCurrent(self.context);
            let _ = sys::cuStreamSynchronize(self.stream);
            for module in &self.modules {
                let _ = sys::cuModuleUnload(*module);
            }
            let _ = sys::cuStreamDestroy_v2(self.stream);
            let _ = sys::cuDevicePrimaryCtxRelease_v2(self.device);
        }
    }
}

impl CudaDevice {
    /// Opens device `ordinal` and loads the kernels. `watch` ends what is done with it.
    pub fn open(ordinal: usize, watch: Watch) -> Result<Self, CudaError> {
        let (device, summary) = summary(ordinal, driver()?)?;
        let (major, minor) = summary.capability;
        if !summary.is_new_enough() {
            return Err(CudaError::OldDevice { name: summary.name, major, minor });
        }
        let mut context = std::ptr::null_mut();
        // SAFETY: the driver gives the context, which is this device's until it is dropped.
        check("open the device", unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut context, device) })?;
        let stream = std::ptr::null_mut();
        let mut opened =
            Self { device, context, stream, modules: Vec::new(), summary, watch, allocated: AtomicU64::new(0) };
        opened.bind()?;
        // 1: does not wait for the stream that others use.
        // SAFETY: the driver gives a stream of this context.
        check("make a stream", unsafe { sys::cuStreamCreate(&raw mut opened.stream, 1) })?;
        let more = if opened.summary.has_wide() { WIDE_MODULES } else { OTHER_MODULES };
        for image in MODULES.iter().chain(more) {
            let mut module = std::ptr::null_mut();
            // SAFETY: the image is whole; the driver copies it.
            check("load the kernels", unsafe { sys::cuModuleLoadData(&raw mut module, image.as_ptr().cast()) })?;
            opened.modules.push(module);
        }
        Ok(opened)
    }

    /// The first device, for tests; `None` where there is none, and need not be one.
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

    /// What it is.
    pub fn summary(&self) -> &CudaSummary {
        &self.summary
    }

    /// Bytes that are free.
    pub fn free_memory(&self) -> Result<u64, CudaError> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the driver writes two numbers.
        check("ask for free memory", unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) })?;
        Ok(free as u64)
    }

    /// Bytes of all buffers.
    pub(crate) fn allocated_bytes(&self) -> u64 {
        self.allocated.load(Ordering::Relaxed)
    }

    /// Who may end the work.
    pub(crate) fn watch(&self) -> &Watch {
        &self.watch
    }

    /// An error where the work was ended.
    pub(crate) fn check_watch(&self) -> Result<(), CudaError> {
        if self.watch.is_cancelled() { Err(CudaError::Cancelled) } else { Ok(()) }
    }

    pub(crate) fn stream(&self) -> CUstream {
        self.stream
    }

    /// Makes the device that of the thread that calls.
    pub(crate) fn bind(&self) -> Result<(), CudaError> {
        // SAFETY: the context lives as long as this.
        check("use the device", unsafe { sys::cuCtxSetCurrent(self.context) })
    }

    /// Lets kernels of this device read and write the memory of `other`.
    pub(crate) fn enable_peer_access(&self, other: &Self) -> Result<(), CudaError> {
        let mut can = 0;
        // SAFETY: the driver writes a number.
        check("ask what devices see of each other", unsafe {
            sys::cuDeviceCanAccessPeer(&raw mut can, self.device, other.device)
        })?;
        if can == 0 {
            return Err(CudaError::NoPeerAccess { from: self.summary.ordinal, to: other.summary.ordinal });
        }
        self.bind()?;
        // SAFETY: both contexts live as long as the process uses them.
        match unsafe { sys::cuCtxEnablePeerAccess(other.context, 0) } {
            CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            outcome => check("let devices see each other's memory", outcome),
        }
    }

    /// All kernels by name, with as much workgroup memory as they may want.
    pub(crate) fn kernel(&self, name: &str) -> Result<Kernel, CudaError> {
        let symbol = CString::new(name).expect("a kernel's name");
        for module in &self.modules {
            let mut function = std::ptr::null_mut();
            // SAFETY: the module is loaded.
            if unsafe { sys::cuModuleGetFunction(&raw mut function, *module, symbol.as_ptr()) }
                == CUresult::CUDA_SUCCESS
            {
                use CUfunction_attribute::{
                    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as SHARED,
                    CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES as OWN,
                };
                // What the kernel has in any case is not to be had twice.
                let mut own = 0;
                // SAFETY: the function is of a loaded module; the driver writes one number.
                check("ask what a kernel needs", unsafe { sys::cuFuncGetAttribute(&raw mut own, OWN, function) })?;
                let max = self.summary.max_shared as i32 - own;
                // SAFETY: the function is of a loaded module.
                check("give a kernel workgroup memory", unsafe { sys::cuFuncSetAttribute(function, SHARED, max) })?;
                // As many blocks side by side as their memory allows, and less of a cache.
                let carveout = CUfunction_attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
                // SAFETY: as above.
                check("give kernels workgroup memory", unsafe { sys::cuFuncSetAttribute(function, carveout, 100) })?;
                return Ok(Kernel(function));
            }
        }
        Err(CudaError::Driver { what: "find a kernel", why: format!("{name} is in none of the modules") })
    }

    /// A buffer of zeros.
    pub(crate) fn zeros(self: &Arc<Self>, what: &'static str, bytes: u64) -> Result<CudaBuffer, CudaError> {
        let buffer = self.buffer(what, bytes)?;
        // SAFETY: the buffer is as long as that.
        check("clear memory", unsafe { sys::cuMemsetD8Async(buffer.ptr, 0, buffer.bytes as usize, self.stream) })?;
        Ok(buffer)
    }

    /// A buffer with whatever was there.
    pub(crate) fn buffer(self: &Arc<Self>, what: &'static str, bytes: u64) -> Result<CudaBuffer, CudaError> {
        self.bind()?;
        let bytes = bytes.max(16);
        let mut ptr = 0;
        let n = usize::try_from(bytes).map_err(|_| CudaError::OutOfMemory { what, bytes })?;
        // SAFETY: the driver gives memory, which is the buffer's until it is dropped.
        match unsafe { sys::cuMemAlloc_v2(&raw mut ptr, n) } {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => return Err(CudaError::OutOfMemory { what, bytes }),
            outcome => check("take memory", outcome)?,
        }
        self.allocated.fetch_add(bytes, Ordering::Relaxed);
        Ok(CudaBuffer { device: Arc::clone(self), ptr, bytes })
    }

    /// A buffer with `data`.
    pub(crate) fn upload<T: Pod>(self: &Arc<Self>, what: &'static str, data: &[T]) -> Result<CudaBuffer, CudaError> {
        let bytes: &[u8] = bytemuck::cast_slice(data);
        let buffer = self.buffer(what, bytes.len() as u64)?;
        buffer.write(0, bytes)?;
        Ok(buffer)
    }

    /// Looks for something until it is there. The watch is looked at meanwhile.
    pub(crate) fn poll_until<T>(&self, mut look: impl FnMut() -> Result<Option<T>, CudaError>) -> Result<T, CudaError> {
        let begin = Instant::now();
        loop {
            if let Some(found) = look()? {
                return Ok(found);
            }
            self.check_watch()?;
            if begin.elapsed() > IMPATIENT {
                std::thread::sleep(Duration::from_micros(50));
            } else {
                std::hint::spin_loop();
            }
        }
    }

    /// Waits until everything that was asked for is done.
    pub(crate) fn wait(&self) -> Result<(), CudaError> {
        self.bind()?;
        // SAFETY: the stream is the device's.
        check("finish", unsafe { sys::cuStreamSynchronize(self.stream) })
    }
}

/// A kernel.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kernel(pub(crate) CUfunction);

// SAFETY: a handle that the driver lets any thread use.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

/// Kernels by name, looked up once.
#[derive(Debug, Default)]
pub(crate) struct Kernels(HashMap<String, Kernel>);

impl Kernels {
    /// The kernel `name`.
    pub(crate) fn get(&mut self, device: &CudaDevice, name: &str) -> Result<Kernel, CudaError> {
        if let Some(kernel) = self.0.get(name) {
            return Ok(*kernel);
        }
        let kernel = device.kernel(name)?;
        self.0.insert(name.to_owned(), kernel);
        Ok(kernel)
    }
}

/// Memory of the device.
#[derive(Debug)]
pub(crate) struct CudaBuffer {
    device: Arc<CudaDevice>,
    ptr: u64,
    bytes: u64,
}

impl Drop for CudaBuffer {
    fn drop(&mut self) {
        // SAFETY: what still runs with it is waited for; nobody has its address any more.
        unsafe {
            let _ = sys::cuCtxSetCurrent(self.device.context);
            let _ = sys::cuStreamSynchronize(self.device.stream);
            let _ = sys::cuMemFree_v2(self.ptr);
        }
        self.device.allocated.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl CudaBuffer {
    /// Where it lies.
    pub(crate) fn ptr(&self) -> u64 {
        self.ptr
    }

    /// Its size.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Writes `data` at byte `at`, in the order of the stream.
    pub(crate) fn write(&self, at: u64, data: &[u8]) -> Result<(), CudaError> {
        assert!(at + data.len() as u64 <= self.bytes, "{} bytes at {at} of {}", data.len(), self.bytes);
        // SAFETY: the bytes lie in the buffer; the driver is done with data that is not pinned when it returns.
        check("write to the device", unsafe {
            sys::cuMemcpyHtoDAsync_v2(self.ptr + at, data.as_ptr().cast(), data.len(), self.device.stream)
        })
    }

    /// Fills it with zeros, in the order of the stream.
    pub(crate) fn clear(&self) -> Result<(), CudaError> {
        self.device.bind()?;
        // SAFETY: the buffer is as long as that.
        check("clear memory", unsafe { sys::cuMemsetD8Async(self.ptr, 0, self.bytes as usize, self.device.stream) })
    }

    /// Copies `bytes` from byte `from` to byte `to`, in the order of the stream.
    pub(crate) fn copy_within(&self, from: u64, to: u64, bytes: u64) -> Result<(), CudaError> {
        assert!(from.max(to) + bytes <= self.bytes, "{bytes} bytes from {from} to {to} of {}", self.bytes);
        // SAFETY: both lie in the buffer.
        check("copy on the device", unsafe {
            sys::cuMemcpyDtoDAsync_v2(self.ptr + to, self.ptr + from, bytes as usize, self.device.stream)
        })
    }
}

/// Memory of this process that the device writes to by itself.
#[derive(Debug)]
pub(crate) struct Pinned {
    device: Arc<CudaDevice>,
    ptr: *mut c_void,
    bytes: usize,
}

// SAFETY: the memory is given back once, by whoever drops it; who looks at it says how.
unsafe impl Send for Pinned {}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: what still writes to it is waited for.
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
        // SAFETY: the driver gives memory, which is this one's until it is dropped.
        check("take pinned memory", unsafe { sys::cuMemHostAlloc(&raw mut ptr, bytes, 0) })?;
        Ok(Self { device: Arc::clone(device), ptr, bytes })
    }

    pub(crate) fn device(&self) -> &CudaDevice {
        &self.device
    }

    /// Where it lies, for the device as for the process.
    pub(crate) fn ptr(&self) -> *mut c_void {
        self.ptr
    }
}

/// Memory that results are copied to, and when they are.
#[derive(Debug)]
pub(crate) struct Readback {
    memory: Pinned,
    written: CUevent,
}

// SAFETY: its memory and its event are used through it alone.
unsafe impl Send for Readback {}

impl Drop for Readback {
    fn drop(&mut self) {
        // SAFETY: the event is this one's; the driver keeps one that is still to come.
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
        // 2: without a time.
        // SAFETY: the driver gives an event, which is this one's until it is dropped.
        check("make an event", unsafe { sys::cuEventCreate(&raw mut written, 2) })?;
        Ok(Self { memory, written })
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.memory.bytes as u64
    }

    /// Has the device copy the first `bytes` of `from` here, in the order of the stream.
    pub(crate) fn copy(&mut self, from: &CudaBuffer, bytes: u64) -> Result<(), CudaError> {
        self.copy_part(from, 0, bytes, 0)?;
        self.end_copies()
    }

    /// Has the device copy the `bytes` of `from` from byte `start` on to byte `at`, in the order of the stream. After the last
    /// part comes [`end_copies`](Self::end_copies).
    pub(crate) fn copy_part(&mut self, from: &CudaBuffer, start: u64, bytes: u64, at: u64) -> Result<(), CudaError> {
        assert!(at + bytes <= self.bytes() && start + bytes <= from.bytes, "{bytes} bytes to read back");
        let stream = self.memory.device.stream;
        // SAFETY: both buffers hold the range, and the copy is read only after the event that is recorded behind it.
        unsafe {
            let to = self.memory.ptr.byte_add(at as usize);
            check("read from the device", sys::cuMemcpyDtoHAsync_v2(to, from.ptr + start, bytes as usize, stream))
        }
    }

    /// Has the device note when the copies so far are there.
    pub(crate) fn end_copies(&mut self) -> Result<(), CudaError> {
        // SAFETY: the event is this one's, and the stream the device's.
        check("note that it was read", unsafe { sys::cuEventRecord(self.written, self.memory.device.stream) })
    }

    /// The first `bytes`, once they are there. The watch is looked at meanwhile.
    pub(crate) fn read(&mut self, bytes: u64) -> Result<&[u8], CudaError> {
        assert!(bytes <= self.bytes(), "{bytes} bytes to read back");
        self.memory.device.poll_until(|| {
            // SAFETY: the event is this one's.
            match unsafe { sys::cuEventQuery(self.written) } {
                CUresult::CUDA_ERROR_NOT_READY => Ok(None),
                outcome => check("run the kernels", outcome).map(Some),
            }
        })?;
        // SAFETY: the device has written as many bytes.
        Ok(unsafe { std::slice::from_raw_parts(self.memory.ptr.cast(), bytes as usize) })
    }
}
