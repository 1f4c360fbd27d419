//! Embeddings of texts.

use std::ffi::c_char;

use metal_attention::tokenizer::EncodeOptions;
use metal_attention::{Pooler, Pooling};

use crate::context::Context;
use crate::model::Model;
use crate::pointers::{Out, fill, reference};
use crate::status::{Failure, Status, call};

/// The number of elements of the embeddings of ma_embed; 0 for a null pointer.
///
/// # Safety
/// `model` is null or a model.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_model_n_embedding(model: *const Model) -> usize {
    // SAFETY: as the caller promises.
    let Some(model) = (unsafe { model.as_ref() }) else { return 0 };
    let spec = model.inner.spec();
    spec.output.pooled_projections.last().map_or(spec.n_embd, |last| last.n_out)
}

/// Writes the embedding of a text to `embedding`, and its number of elements to `n`: the hidden states of its tokens, pooled in the
/// way that the model's file gives, with length 1. `length` is in bytes, or MA_NUL_TERMINATED. The context's sequence is discarded.
///
/// If there are more elements than `capacity`, the result is MA_STATUS_BUFFER_TOO_SMALL and only `n` is written; ma_model_n_embedding
/// returns their number.
///
/// # Safety
/// Pointers are null or point to what is described here; `text` to `length` bytes, `embedding` to memory for `capacity` elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ma_embed(
    context: *const Context,
    text: *const c_char,
    length: usize,
    embedding: *mut f32,
    capacity: usize,
    n: *mut usize,
) -> Status {
    call(|| {
        // SAFETY: as the caller promises.
        let (n, context) = unsafe { (Out::new(n, "n")?, reference(context, "context")?) };
        // SAFETY: as the caller promises.
        let text = unsafe { crate::pointers::text(text, length, "text") }?;
        let mut generator = context.lock()?;
        if generator.model().spec().output.pooling == Some(Pooling::Classifier) {
            return Err(Failure::new(Status::Unsupported, "the model is a reranker, which makes no embeddings"));
        }
        let options = EncodeOptions { add_special: true, parse_special: false };
        let ids = generator.model().tokenizer()?.encode(text, options);
        let pooler = Pooler::new(generator.model(), None);
        let values = generator.embed(&pooler, &ids)?;
        // SAFETY: as the caller promises.
        unsafe { fill(&values, embedding, capacity, &n) }
    })
}
