//! Models, and text to token ids and back.

use std::ffi::c_char;
use std::path::PathBuf;
use std::sync::OnceLock;

use metal_attention::tokenizer::EncodeOptions;
use metal_attention_chat::ChatTemplate;
use metal_attention_grammar::GrammarCompiler;

use crate::pointers::{Out, fill, free, reference, text, values};
use crate::status::{Failure, Status, call};

/// In the place of a text's length: it ends with a NUL.
pub const MA_NUL_TERMINATED: usize = usize::MAX;

/// An open model. Any number of threads may use one at once.
pub struct Model {
    pub(crate) inner: metal_attention::Model,
    template: OnceLock<ChatTemplate>,
    grammars: OnceLock<GrammarCompiler>,
}

impl Model {
    fn new(inner: metal_attention::Model) -> Self {
        Self { inner, template: OnceLock::new(), grammars: OnceLock::new() }
    }

    /// The model's chat template.
    pub(crate) fn template(&self) -> Result<&ChatTemplate, Failure> {
        let tokenizer = self.inner.tokenizer()?;
        Ok(self.template.get_or_init(|| ChatTemplate::for_model(self.inner.gguf().metadata(), tokenizer)))
    }

    /// What makes grammars for the model's vocabulary.
    pub(crate) fn grammars(&self) -> Result<&GrammarCompiler, Failure> {
        let tokenizer = self.inner.tokenizer()?;
        Ok(self.grammars.get_or_init(|| GrammarCompiler::new(&tokenizer)))
    }
}

/// Opens the GGUF file at `path`, any of them where it is split, and writes the model to `model`. It is freed by
/// ma_model_free.
///
/// # Safety
/// `path` is null or ends with a NUL; `model` is null or leads to room for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_model_open(path: *const c_char, model: *mut *mut Model) -> Status {
    call(|| {
        // SAFETY: as the caller promises.
        let (out, path) = unsafe { (Out::new(model, "model")?, text(path, MA_NUL_TERMINATED, "path")?) };
        let opened = metal_attention::Model::open(PathBuf::from(path))?;
        out.set(Box::into_raw(Box::new(Model::new(opened))));
        Ok(())
    })
}

/// Opens the small model that is part of the library, which tells short stories for children: for a first try.
///
/// # Safety
/// `model` is null or leads to room for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_model_built_in(model: *mut *mut Model) -> Status {
    call(|| {
        // SAFETY: as the caller promises.
        let out = unsafe { Out::new(model, "model") }?;
        out.set(Box::into_raw(Box::new(Model::new(metal_attention::Model::built_in()?))));
        Ok(())
    })
}

/// Frees a model. Contexts that were made of it go on. Null is nothing to free.
///
/// # Safety
/// `model` is null or comes from ma_model_open or ma_model_built_in, and is not used after this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_model_free(model: *mut Model) {
    // SAFETY: as the caller promises.
    unsafe { free(model) }
}

/// Size of the vocabulary; 0 for a null pointer.
///
/// # Safety
/// `model` is null or a model.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_model_n_vocab(model: *const Model) -> usize {
    // SAFETY: as the caller promises.
    unsafe { model.as_ref() }.map_or(0, |model| model.inner.spec().n_vocab)
}

/// Tokens of the texts that the model was trained with; 0 for a null pointer.
///
/// # Safety
/// `model` is null or a model.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_model_n_ctx_train(model: *const Model) -> usize {
    // SAFETY: as the caller promises.
    unsafe { model.as_ref() }.map_or(0, |model| model.inner.spec().n_ctx_train)
}

/// Writes the tokens of a text to `ids`, and how many there are to `n_ids`.
///
/// `length` is in bytes; MA_NUL_TERMINATED: the text ends with a NUL. `add_special`, where it is not 0, adds the tokens that
/// the model wants around a text, as prompts need them; `parse_special` reads spellings of control tokens in it as these. Where
/// `ids` has room for too few (`capacity`; null has room for none) the result is MA_STATUS_BUFFER_TOO_SMALL, and `n_ids` how
/// many are needed.
///
/// # Safety
/// Pointers are null or lead to what is said here; `ids` to room for `capacity` of them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_tokenize(
    model: *const Model,
    text: *const c_char,
    length: usize,
    add_special: i32,
    parse_special: i32,
    ids: *mut u32,
    capacity: usize,
    n_ids: *mut usize,
) -> Status {
    call(|| {
        // SAFETY: as the caller promises.
        let (n_ids, model) = unsafe { (Out::new(n_ids, "n_ids")?, reference(model, "model")?) };
        // SAFETY: as the caller promises.
        let text = unsafe { crate::pointers::text(text, length, "text") }?;
        let options = EncodeOptions { add_special: add_special != 0, parse_special: parse_special != 0 };
        let encoded = model.inner.tokenizer()?.encode(text, options);
        // SAFETY: as the caller promises.
        unsafe { fill(&encoded, ids, capacity, &n_ids) }
    })
}

/// Writes the text of tokens to `text`, without a NUL behind it, and its bytes to `length`.
///
/// Control tokens are left out, unless `special` is not 0. What is no whole character is U+FFFD. Where `text` has room for too
/// little (`capacity`; null has room for nothing) the result is MA_STATUS_BUFFER_TOO_SMALL, and `length` what is needed.
///
/// # Safety
/// Pointers are null or lead to what is said here; `ids` to `n_ids` ids, `text` to room for `capacity` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_detokenize(
    model: *const Model,
    ids: *const u32,
    n_ids: usize,
    special: i32,
    text: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> Status {
    call(|| {
        // SAFETY: as the caller promises.
        let (length, model) = unsafe { (Out::new(length, "length")?, reference(model, "model")?) };
        // SAFETY: as the caller promises.
        let ids = unsafe { values(ids, n_ids, "ids") }?;
        check_ids(&model.inner, ids)?;
        let decoded = model.inner.tokenizer()?.decode(ids, special != 0);
        // SAFETY: as the caller promises.
        unsafe { fill(decoded.as_bytes(), text.cast(), capacity, &length) }
    })
}

/// An error where the model does not know one of the ids.
pub(crate) fn check_ids(model: &metal_attention::Model, ids: &[u32]) -> Result<(), Failure> {
    let n_vocab = model.spec().n_vocab;
    match ids.iter().find(|&&id| id as usize >= n_vocab) {
        Some(id) => Err(Failure::argument(format!("token id {id} is outside the vocabulary of {n_vocab} tokens"))),
        None => Ok(()),
    }
}
