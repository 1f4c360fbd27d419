//! Pictures: their encoder, and prompts that have them.

use std::ffi::c_char;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, TryLockError};

use metal_attention::picture_files::{Limits, Picture as PictureFile};
use metal_attention::tokenizer::Tokenizer;
use metal_attention::{PicturePrompt, PromptBuilder, PromptSpan, TokenLimits};

use crate::chat::Chat;
use crate::context::ContextOptions;
use crate::model::{MA_NUL_TERMINATED, Model};
use crate::pointers::{Out, check_struct, free, options, reference, text, values};
use crate::status::{Failure, Status, call};

/// The encoder of pictures of a model. It may be used by one call at a time: a call while another one runs returns MA_STATUS_BUSY.
pub struct PictureEncoder {
    /// The encoder on its device.
    encoder: Mutex<metal_attention::PictureEncoder>,
    /// The tokenizer of the text model.
    tokenizer: Arc<Tokenizer>,
}

/// An encoded picture. Any number of threads may use it at once.
pub struct Picture(PicturePrompt);

/// A prompt of text and pictures. Any number of threads may use it at once.
pub struct Prompt {
    /// An id for each input; 0 in the place of a picture's rows.
    pub(crate) ids: Vec<u32>,
    /// The rows of the pictures.
    pub(crate) spans: Vec<PromptSpan>,
}

/// The settings of a picture encoder. ma_picture_options_default sets all members.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct PictureOptions {
    /// The size of this struct in bytes.
    pub size: usize,
    /// The fewest tokens of a picture, in models that keep its size. 0: the model's own.
    pub min_tokens: usize,
    /// The most tokens of a picture, in models that keep its size. 0: the model's own.
    pub max_tokens: usize,
}

impl PictureOptions {
    /// The defaults.
    fn new() -> Self {
        Self { size: size_of::<Self>(), min_tokens: 0, max_tokens: 0 }
    }
}

/// Sets all members of `options`; `size` is sizeof(ma_picture_options).
///
/// # Safety
/// `options` is null or points to memory for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_picture_options_default(options: *mut PictureOptions, size: usize) -> Status {
    call(|| {
        // SAFETY: as the caller promises.
        let out = unsafe { Out::new(options, "options") }?;
        check_struct::<PictureOptions>(size, "picture_options")?;
        out.set(PictureOptions::new());
        Ok(())
    })
}

/// Opens the file `mmproj` of a model, which encodes its pictures, and writes the encoder to `encoder`. Free it by
/// ma_picture_encoder_free. The file has mmproj in its name and is found beside the model's.
///
/// Null `context_options` and `options` stand for the defaults. Of the context's options device, n_threads and exact count. The
/// file is mapped: it must not be truncated or changed in place while the encoder exists. The model may be freed before.
///
/// # Safety
/// Pointers are null or point to what is described here; `mmproj` ends with a NUL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_picture_encoder_open(
    model: *const Model,
    mmproj: *const c_char,
    context_options: *const ContextOptions,
    options: *const PictureOptions,
    encoder: *mut *mut PictureEncoder,
) -> Status {
    call(|| {
        // SAFETY: as the caller promises.
        let (out, model) = unsafe { (Out::new(encoder, "encoder")?, reference(model, "model")?) };
        // SAFETY: as the caller promises.
        let path = PathBuf::from(unsafe { text(mmproj, MA_NUL_TERMINATED, "mmproj") }?);
        // SAFETY: as the caller promises.
        let engine = unsafe { ContextOptions::engine_of(context_options) }?;
        let defaults = PictureOptions::new();
        // SAFETY: as the caller promises.
        let options = unsafe { crate::picture::options(options, "picture_options") }?.unwrap_or(&defaults);
        let some = |n: usize| (n > 0).then_some(n);
        let limits = TokenLimits { min: some(options.min_tokens), max: some(options.max_tokens) };
        let tokenizer = model.inner.tokenizer()?;
        let opened = metal_attention::PictureEncoder::open(&path, model.inner.spec(), &engine, limits)?;
        out.set(Box::into_raw(Box::new(PictureEncoder { encoder: Mutex::new(opened), tokenizer })));
        Ok(())
    })
}

/// Frees an encoder. Pictures that it encoded can still be used. Null is allowed.
///
/// # Safety
/// `encoder` is null or comes from ma_picture_encoder_open; no call uses it, now or after this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_picture_encoder_free(encoder: *mut PictureEncoder) {
    // SAFETY: as the caller promises.
    unsafe { free(encoder) }
}

/// Encodes a picture and writes it to `picture`. Free it by ma_picture_free.
///
/// `file` are the `length` bytes of a JPEG, PNG, WebP, BMP or GIF file, of which the first frame counts. A file that is damaged or too
/// large (64 MiB, 67 million pixels) is MA_STATUS_INVALID_ARGUMENT.
///
/// # Safety
/// Pointers are null or point to what is described here; `file` to `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_picture_encode(
    encoder: *const PictureEncoder,
    file: *const u8,
    length: usize,
    picture: *mut *mut Picture,
) -> Status {
    call(|| {
        // SAFETY: as the caller promises.
        let (out, encoder) = unsafe { (Out::new(picture, "picture")?, reference(encoder, "encoder")?) };
        // SAFETY: as the caller promises.
        let file = unsafe { values(file, length, "file") }?;
        let wrong = |error: &dyn std::fmt::Display| Failure::argument(format!("file: {error}"));
        let pixels = PictureFile::decode(file, &Limits::default()).map_err(|error| wrong(&error))?;
        let mut inner = match encoder.encoder.try_lock() {
            Ok(inner) => inner,
            Err(TryLockError::WouldBlock) => {
                return Err(Failure::new(Status::Busy, "the encoder is in use by another call: wait for it"));
            }
            Err(TryLockError::Poisoned(_)) => {
                let message = "an earlier call met a defect: free the encoder and open another one";
                return Err(Failure::new(Status::Defect, message));
            }
        };
        let divided = inner.divider().divide(&pixels).map_err(|error| wrong(&error))?;
        let mut encoded = inner.encode(&[divided], &encoder.tokenizer, |_, _| {})?;
        out.set(Box::into_raw(Box::new(Picture(encoded.remove(0)))));
        Ok(())
    })
}

/// Frees a picture. Prompts that were made of it can still be used. Null is allowed.
///
/// # Safety
/// `picture` is null or comes from ma_picture_encode, and is not used after this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_picture_free(picture: *mut Picture) {
    // SAFETY: as the caller promises.
    unsafe { free(picture) }
}

/// Makes a prompt of a text and pictures, and writes it to `prompt`. Free it by ma_prompt_free.
///
/// A picture stands where the text has `<image>`; those without a place stand before the text. `length` is in bytes, or
/// MA_NUL_TERMINATED. BOS is put first if the model expects it. If `parse_special` is not 0, the names of control tokens in the text
/// become these tokens.
///
/// # Safety
/// Pointers are null or point to what is described here; `text` to `length` bytes, `pictures` to `n_pictures` pictures.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_prompt_new(
    model: *const Model,
    text: *const c_char,
    length: usize,
    parse_special: i32,
    pictures: *const *const Picture,
    n_pictures: usize,
    prompt: *mut *mut Prompt,
) -> Status {
    call(|| {
        // SAFETY: as the caller promises.
        let (out, model) = unsafe { (Out::new(prompt, "prompt")?, reference(model, "model")?) };
        // SAFETY: as the caller promises.
        let text = unsafe { crate::pointers::text(text, length, "text") }?;
        // SAFETY: as the caller promises.
        let pictures = unsafe { references(pictures, n_pictures) }?;
        let tokenizer = model.inner.tokenizer()?;
        let mut builder = PromptBuilder::new(&tokenizer);
        builder.text_with_pictures(text, parse_special != 0, &pictures)?;
        let (ids, spans) = builder.finish();
        out.set(Box::into_raw(Box::new(Prompt { ids, spans })));
        Ok(())
    })
}

/// Makes the prompt of a conversation and its pictures, and writes it to `prompt`. Free it by ma_prompt_free.
///
/// The messages of the conversation have a part {"type": "image_url", "image_url": {"url": "..."}} for each picture; the address is not
/// read. `pictures` are those of the parts, in their order, and as many.
///
/// # Safety
/// Pointers are null or point to what is described here; `pictures` to `n_pictures` pictures.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_prompt_of_chat(
    chat: *const Chat,
    pictures: *const *const Picture,
    n_pictures: usize,
    prompt: *mut *mut Prompt,
) -> Status {
    call(|| {
        // SAFETY: as the caller promises.
        let (out, chat) = unsafe { (Out::new(prompt, "prompt")?, reference(chat, "chat")?) };
        // SAFETY: as the caller promises.
        let pictures = unsafe { references(pictures, n_pictures) }?;
        if n_pictures != chat.n_pictures {
            return Err(Failure::argument(format!(
                "the messages have {} parts for pictures, and there are {n_pictures} pictures",
                chat.n_pictures
            )));
        }
        let (ids, spans) = chat.rendered.with_pictures(&pictures);
        out.set(Box::into_raw(Box::new(Prompt { ids, spans })));
        Ok(())
    })
}

/// The `n` pictures that `pictures` points to.
///
/// # Safety
/// A pointer that is not null points to `n` pointers, each of which is null or points to a picture.
unsafe fn references<'a>(pictures: *const *const Picture, n: usize) -> Result<Vec<&'a PicturePrompt>, Failure> {
    // SAFETY: as the caller promises.
    let pointers = unsafe { values(pictures, n, "pictures") }?;
    // SAFETY: as the caller promises.
    pointers.iter().map(|&each| Ok(&unsafe { reference(each, "pictures") }?.0)).collect()
}

/// Frees a prompt. Null is allowed.
///
/// # Safety
/// `prompt` is null or comes from ma_prompt_new or ma_prompt_of_chat, and is not used after this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_prompt_free(prompt: *mut Prompt) {
    // SAFETY: as the caller promises.
    unsafe { free(prompt) }
}

/// The number of tokens of a prompt, its pictures included; 0 for a null pointer.
///
/// # Safety
/// `prompt` is null or a prompt.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_prompt_n_tokens(prompt: *const Prompt) -> usize {
    // SAFETY: as the caller promises.
    unsafe { prompt.as_ref() }.map_or(0, |prompt| prompt.ids.len())
}
