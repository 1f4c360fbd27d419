//! Models: opening them, their vocabulary, and tokenization.

use std::ffi::c_char;
use std::path::PathBuf;
use std::sync::OnceLock;

use metal_attention::tokenizer::EncodeOptions;
use metal_attention_chat::ChatTemplate;
use metal_attention_grammar::GrammarCompiler;

use crate::pointers::{Out, fill, free, reference, text, values};
use crate::status::{Failure, Status, call};

/// The value of a text's length that stands for: the text ends with a NUL.
pub const MA_NUL_TERMINATED: usize = usize::MAX;

/// An open model. Any number of threads may use it at once.
pub struct Model {
    /// The model.
    pub(crate) inner: metal_attention::Model,
    /// The chat template, parsed at first use.
    template: OnceLock<ChatTemplate>,
    /// The compiler of grammars for the vocabulary, made at first use.
    grammars: OnceLock<GrammarCompiler>,
}

impl Model {
    /// Wraps a model; template and grammars are made later.
    fn new(inner: metal_attention::Model) -> Self {
        Self { inner, template: OnceLock::new(), grammars: OnceLock::new() }
    }

    /// The model's chat template.
    pub(crate) fn template(&self) -> Result<&ChatTemplate, Failure> {
        let tokenizer = self.inner.tokenizer()?;
        Ok(self.template.get_or_init(|| ChatTemplate::for_model(self.inner.gguf().metadata(), tokenizer)))
    }

    /// The compiler of grammars for the model's vocabulary.
    pub(crate) fn grammars(&self) -> Result<&GrammarCompiler, Failure> {
        let tokenizer = self.inner.tokenizer()?;
        Ok(self.grammars.get_or_init(|| GrammarCompiler::new(&tokenizer)))
    }
}

/// Opens the GGUF file at `path`, any part of a split one, and writes the model to `model`. Free it by ma_model_free.
/// The file is mapped: it must not be truncated or changed in place while the model exists.
///
/// # Safety
/// `path` is null or ends with a NUL; `model` is null or points to memory for a pointer.
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

/// Opens the small model that is part of the library, which tells short stories for children, for a first try. Free it by
/// ma_model_free.
///
/// # Safety
/// `model` is null or points to memory for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_model_built_in(model: *mut *mut Model) -> Status {
    call(|| {
        // SAFETY: as the caller promises.
        let out = unsafe { Out::new(model, "model") }?;
        out.set(Box::into_raw(Box::new(Model::new(metal_attention::Model::built_in()?))));
        Ok(())
    })
}

/// Frees a model. Contexts that were made of it can still be used. Null is allowed.
///
/// # Safety
/// `model` is null or comes from ma_model_open or ma_model_built_in, and is not used after this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_model_free(model: *mut Model) {
    // SAFETY: as the caller promises.
    unsafe { free(model) }
}

/// The size of the vocabulary; 0 for a null pointer.
///
/// # Safety
/// `model` is null or a model.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_model_n_vocab(model: *const Model) -> usize {
    // SAFETY: as the caller promises.
    unsafe { model.as_ref() }.map_or(0, |model| model.inner.spec().n_vocab)
}

/// The context that the model was trained with, in tokens; 0 for a null pointer.
///
/// # Safety
/// `model` is null or a model.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_model_n_ctx_train(model: *const Model) -> usize {
    // SAFETY: as the caller promises.
    unsafe { model.as_ref() }.map_or(0, |model| model.inner.spec().n_ctx_train)
}

/// Writes the tokens of a text to `ids`, and their number to `n_ids`.
///
/// `length` is in bytes, or MA_NUL_TERMINATED. If `add_special` is not 0, the tokens that the model expects around a text (BOS, EOS)
/// are added, as prompts need them. If `parse_special` is not 0, the names of control tokens in the text become these tokens. If
/// there are more tokens than `capacity` (a null `ids` has room for none), the result is MA_STATUS_BUFFER_TOO_SMALL and only `n_ids`
/// is written.
///
/// # Safety
/// Pointers are null or point to what is described here; `ids` to memory for `capacity` ids.
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

/// Writes the text of tokens to `text`, without a NUL at its end, and its length in bytes to `length`.
///
/// Control tokens are left out, unless `special` is not 0. Bytes that are no whole character become U+FFFD. If the text is longer
/// than `capacity` (a null `text` has room for nothing), the result is MA_STATUS_BUFFER_TOO_SMALL and only `length` is written.
///
/// # Safety
/// Pointers are null or point to what is described here; `ids` to `n_ids` ids, `text` to memory for `capacity` bytes.
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

/// An error if one of the ids is not in the model's vocabulary.
pub(crate) fn check_ids(model: &metal_attention::Model, ids: &[u32]) -> Result<(), Failure> {
    let n_vocab = model.spec().n_vocab;
    match ids.iter().find(|&&id| id as usize >= n_vocab) {
        Some(id) => Err(Failure::argument(format!("token id {id} is outside the vocabulary of {n_vocab} tokens"))),
        None => Ok(()),
    }
}
