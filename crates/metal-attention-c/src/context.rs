//! Contexts: a model on its device, with the KV cache of one sequence.

use std::ffi::c_char;
use std::sync::{Mutex, MutexGuard, TryLockError};

use metal_attention::speculation::{DraftFile, DrafterKind, Speculation, SpeculativePass, UnknownDrafter};
use metal_attention::{Device, EngineOptions, Generator, ModelOptions, Watch};

use crate::model::{MA_NUL_TERMINATED, Model};
use crate::pointers::{Out, check_struct, free, options, reference, text};
use crate::status::{Failure, Status, call};

/// A model on its device, with the KV cache of one sequence at a time. It may be used by one call at a time: a call while another
/// one runs returns MA_STATUS_BUSY.
pub struct Context {
    /// The forward pass and the sequence.
    generator: Mutex<Generator>,
    /// Cancels the call that runs.
    watch: Watch,
}

impl Context {
    /// Whether the call that runs was cancelled.
    pub(crate) fn is_cancelled(&self) -> bool {
        self.watch.is_cancelled()
    }

    /// Locks the generator for one call, and clears an earlier cancellation. An error if another call runs.
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

/// The settings of a context. ma_context_options_default sets all members.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ContextOptions {
    /// The size of this struct in bytes.
    pub size: usize,
    /// The device: "auto", "cpu", "cuda", "cuda:1", "wgpu", "wgpu:1" by index, "wgpu:NAME". Null: "auto", a GPU in which the model
    /// fits, preferably through CUDA, else the CPU.
    pub device: *const c_char,
    /// The length of the context in tokens. 0: as long as the model was trained with, at most 4096.
    pub n_ctx: usize,
    /// The number of threads that compute on the CPU. 0: one for each physical core.
    pub n_threads: usize,
    /// The largest number of tokens of a micro-batch, which go through the layers at once. 0: the device's default.
    pub n_ubatch: usize,
    /// Not 0: compute in F32 throughout, which is slower and more exact.
    pub exact: i32,
    /// The drafter, which proposes tokens so that a decode step may give several: "off" (none), "ngram" (tokens that followed the
    /// same ones earlier), "mtp" (the prediction heads in the model's file), "draft", "eagle3", "dflash" or "gemma4-assistant" (what `model_draft` has), "auto". Null:
    /// "auto", that of `model_draft`, or else the best that the model has. The text does not depend on it.
    pub drafter: *const c_char,
    /// The GGUF file of a smaller model that proposes tokens, or of a drafter made for the model (EAGLE-3, DFlash, Gemma 4's assistant); not null: with a NUL at its
    /// end. Null: none.
    pub model_draft: *const c_char,
}

/// Which drafter proposes tokens.
pub(crate) struct Drafts {
    pub(crate) speculation: Speculation,
    /// The file that has it; `None`: the model's own file.
    file: Option<DraftFile>,
}

impl Drafts {
    /// Sets up a forward pass of `model` with the drafter.
    pub(crate) fn pass(
        &self,
        model: &metal_attention::Model,
        engine: &EngineOptions,
    ) -> Result<SpeculativePass, metal_attention::Error> {
        match &self.file {
            None => SpeculativePass::new(model, engine, self.speculation),
            Some(file) => SpeculativePass::with_draft_file(model, file, engine, self.speculation, None),
        }
    }
}

impl ContextOptions {
    /// The defaults.
    fn new() -> Self {
        let size = size_of::<Self>();
        let null = std::ptr::null();
        Self { size, device: null, n_ctx: 0, n_threads: 0, n_ubatch: 0, exact: 0, drafter: null, model_draft: null }
    }

    /// The engine's options for `options`; a null pointer stands for the defaults.
    ///
    /// # Safety
    /// `options` is null or points to options whose `device` is null or ends with a NUL.
    pub(crate) unsafe fn engine_of(options: *const Self) -> Result<EngineOptions, Failure> {
        // SAFETY: as the caller promises.
        let options = unsafe { crate::context::options(options, "context_options") }?;
        // SAFETY: as the caller promises.
        unsafe { options.unwrap_or(&Self::new()).engine() }
    }

    /// The options of drafts for `options`; a null pointer stands for the defaults.
    ///
    /// # Safety
    /// `options` is null or points to options whose `drafter` and `model_draft` are null or end with a NUL.
    pub(crate) unsafe fn drafts_of(options: *const Self) -> Result<Drafts, Failure> {
        // SAFETY: as the caller promises.
        let options = unsafe { crate::context::options(options, "context_options") }?;
        let given = |pointer: fn(&Self) -> *const c_char| options.map(pointer).filter(|pointer| !pointer.is_null());
        let drafter = match given(|options| options.drafter) {
            None => DrafterKind::Auto,
            Some(drafter) => {
                // SAFETY: it ends with a NUL.
                let name = unsafe { text(drafter, MA_NUL_TERMINATED, "drafter") }?;
                name.parse().map_err(|why: UnknownDrafter| Failure::argument(format!("drafter: {why}")))?
            }
        };
        let file = match given(|options| options.model_draft) {
            None => None,
            Some(path) => {
                // SAFETY: it ends with a NUL.
                let path = unsafe { text(path, MA_NUL_TERMINATED, "model_draft") }?;
                Some(DraftFile::open(path, &ModelOptions::default())?)
            }
        };
        Ok(Drafts { speculation: Speculation { drafter, ..Default::default() }, file })
    }

    /// The engine's options.
    ///
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
/// `options` is null or points to memory for `size` bytes.
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

/// Prepares a model to run and writes the context to `context`. Free it by ma_context_free. Null `options` stand for the
/// defaults.
///
/// This takes a moment for a large model: weights are repacked for the device, and the KV cache is allocated.
///
/// # Safety
/// Pointers are null or point to what is described here.
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
        let (engine, drafts) = unsafe { (ContextOptions::engine_of(options)?, ContextOptions::drafts_of(options)?) };
        let watch = engine.watch.clone();
        let SpeculativePass { pass, drafter } = drafts.pass(&model.inner, &engine)?;
        let mut generator = Generator::with_pass(&model.inner, pass, model.inner.sampling())?;
        generator.set_drafter(drafter, drafts.speculation.depth);
        out.set(Box::into_raw(Box::new(Context { generator: Mutex::new(generator), watch })));
        Ok(())
    })
}

/// Frees a context. Null is allowed.
///
/// # Safety
/// `context` is null or comes from ma_context_new; no call uses it, now or after this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_context_free(context: *mut Context) {
    // SAFETY: as the caller promises.
    unsafe { free(context) }
}

/// The length of the context in tokens, for prompt and generated text together; 0 for a null pointer, and while another call
/// runs.
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

/// Cancels the call that runs on the context, from another thread: it soon returns MA_STATUS_CANCELLED. Calls that begin later
/// are not affected.
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
