//! Where a model runs, and the text that it is at.

use std::ffi::c_char;
use std::sync::{Mutex, MutexGuard, TryLockError};

use metal_attention::{Device, EngineOptions, Generator, Watch};

use crate::model::{MA_NUL_TERMINATED, Model};
use crate::pointers::{Out, check_struct, free, options, reference, text};
use crate::status::{Failure, Status, call};

/// A model that is set up to run, with room for one text at a time. Threads take turns: a call while another one runs is
/// MA_STATUS_BUSY.
pub struct Context {
    generator: Mutex<Generator>,
    watch: Watch,
}

impl Context {
    /// The generator, for one call.
    pub(crate) fn lock(&self) -> Result<MutexGuard<'_, Generator>, Failure> {
        match self.generator.try_lock() {
            Ok(generator) => {
                self.watch.resume();
                Ok(generator)
            }
            Err(TryLockError::WouldBlock) => Err(Failure::new(
                Status::Busy,
                "the context is in use by another call: wait for it, or make another one",
            )),
            Err(TryLockError::Poisoned(_)) => {
                Err(Failure::new(Status::Defect, "an earlier call met a defect: free the context and make another one"))
            }
        }
    }
}

/// How a model is set up to run. ma_context_options_default sets all members.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ContextOptions {
    /// Bytes of this struct.
    pub size: usize,
    /// What runs the model: "auto", "cpu", "cuda", "cuda:1", "wgpu", "wgpu:1" by index, "wgpu:NAME". Null: "auto", a GPU with room
    /// for it, through CUDA where that can be, else the CPU.
    pub device: *const c_char,
    /// Tokens that a text has room for. 0: as many as the model was trained with, at most 4096.
    pub n_ctx: usize,
    /// Threads that compute on the CPU. 0: one for each physical core.
    pub n_threads: usize,
    /// Most tokens of a prompt that go through the layers at once. 0: as many as suit the device.
    pub n_ubatch: usize,
    /// Not 0: compute in F32 throughout, which is slower and as exact as the weights allow.
    pub exact: i32,
}

impl ContextOptions {
    fn new() -> Self {
        let size = size_of::<Self>();
        Self { size, device: std::ptr::null(), n_ctx: 0, n_threads: 0, n_ubatch: 0, exact: 0 }
    }

    /// The engine's options of `options`, whose null pointer is the defaults.
    ///
    /// # Safety
    /// `options` is null or leads to options whose `device` is null or ends with a NUL.
    pub(crate) unsafe fn engine_of(options: *const Self) -> Result<EngineOptions, Failure> {
        // SAFETY: as the caller promises.
        let options = unsafe { crate::context::options(options, "context_options") }?;
        // SAFETY: as the caller promises.
        unsafe { options.unwrap_or(&Self::new()).engine() }
    }

    /// # Safety
    /// `device` is null or ends with a NUL.
    unsafe fn engine(&self) -> Result<EngineOptions, Failure> {
        let device = if self.device.is_null() {
            Device::Auto
        } else {
            // SAFETY: it ends with a NUL.
            unsafe { text(self.device, MA_NUL_TERMINATED, "device") }?.parse()?
        };
        let some = |n: usize| (n > 0).then_some(n);
        let defaults = EngineOptions::default();
        Ok(EngineOptions {
            device,
            n_ctx: some(self.n_ctx),
            n_threads: some(self.n_threads),
            n_ubatch: some(self.n_ubatch),
            exact: self.exact != 0,
            ..defaults
        })
    }
}

/// Sets all members of `options`; `size` is sizeof(ma_context_options).
///
/// # Safety
/// `options` is null or leads to room for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_context_options_default(options: *mut ContextOptions, size: usize) -> Status {
    call(|| {
        // SAFETY: as the caller promises.
        let out = unsafe { Out::new(options, "options") }?;
        check_struct::<ContextOptions>(size, "context_options")?;
        out.set(ContextOptions::new());
        Ok(())
    })
}

/// Sets a model up to run and writes the context to `context`. It is freed by ma_context_free. Null `options` are the
/// defaults.
///
/// This takes a moment for a large model: weights are brought into the form that the device computes with, and the KV
/// cache is allocated.
///
/// # Safety
/// Pointers are null or lead to what is said here.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_context_new(
    model: *const Model,
    options: *const ContextOptions,
    context: *mut *mut Context,
) -> Status {
    call(|| {
        // SAFETY: as the caller promises.
        let (out, model) = unsafe { (Out::new(context, "context")?, reference(model, "model")?) };
        // SAFETY: as the caller promises.
        let engine = unsafe { ContextOptions::engine_of(options) }?;
        let watch = engine.watch.clone();
        let generator = Generator::new(&model.inner, &engine, model.inner.sampling())?;
        out.set(Box::into_raw(Box::new(Context { generator: Mutex::new(generator), watch })));
        Ok(())
    })
}

/// Frees a context. Null is nothing to free.
///
/// # Safety
/// `context` is null or comes from ma_context_new; no call uses it, now or after this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_context_free(context: *mut Context) {
    // SAFETY: as the caller promises.
    unsafe { free(context) }
}

/// Tokens that a text has room for, its prompt included; 0 for a null pointer, and while another call runs.
///
/// # Safety
/// `context` is null or a context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_context_n_ctx(context: *const Context) -> usize {
    // SAFETY: as the caller promises.
    let context = unsafe { context.as_ref() };
    context
        .and_then(|context| context.generator.try_lock().ok())
        .map_or(0, |generator| generator.forward_pass().n_ctx())
}

/// Ends the call that runs on the context, from another thread: it returns MA_STATUS_CANCELLED within moments. Calls that
/// begin after this are not concerned.
///
/// # Safety
/// `context` is null or a context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_context_cancel(context: *const Context) {
    // SAFETY: as the caller promises.
    if let Some(context) = unsafe { context.as_ref() } {
        context.watch.cancel();
    }
}
