//! Wrong uses of the C functions (null pointers, wrong sizes, small buffers, reentrance) return an error status and a message
//! and do no harm.

use std::ffi::{CStr, CString, c_char, c_void};
use std::mem::MaybeUninit;
use std::ptr::{null, null_mut};

use metal_attention_c::{
    Answer, Batch, Chat, ChatOptions, Context, ContextOptions, GenerateOptions, Generation, Grammar, MA_NUL_TERMINATED,
    Model, OnToken, SamplingOptions, Status, Token, ma_answer_free, ma_answer_message, ma_answer_new, ma_batch_add,
    ma_batch_cancel, ma_batch_error, ma_batch_free, ma_batch_new, ma_batch_run, ma_chat_free, ma_chat_new,
    ma_chat_options_default, ma_chat_prompt, ma_chat_tokens, ma_complete, ma_context_cancel, ma_context_free,
    ma_context_n_ctx, ma_context_new, ma_context_options_default, ma_detokenize, ma_embed, ma_generate,
    ma_generate_options_default, ma_grammar_free, ma_grammar_left_out, ma_grammar_new, ma_last_error,
    ma_model_built_in, ma_model_free, ma_model_n_ctx_train, ma_model_n_embedding, ma_model_n_vocab, ma_model_open,
    ma_sampling_options_default, ma_tokenize,
};

/// The message of the last failed call.
fn last_error() -> String {
    // SAFETY: the message of this thread is valid until its next call.
    unsafe { CStr::from_ptr(ma_last_error()) }.to_str().unwrap().to_owned()
}

fn built_in() -> *mut Model {
    let mut model = null_mut();
    // SAFETY: the out-pointer is valid.
    assert_eq!(unsafe { ma_model_built_in(&raw mut model) }, Status::Ok);
    model
}

/// A context of `n_ctx` tokens on one CPU thread.
fn context(model: *const Model, n_ctx: usize) -> *mut Context {
    let mut options = MaybeUninit::<ContextOptions>::uninit();
    let mut context = null_mut();
    // SAFETY: the buffer has the size of the options, and the first call initialises them.
    unsafe {
        assert_eq!(ma_context_options_default(options.as_mut_ptr(), size_of::<ContextOptions>()), Status::Ok);
        let mut options = options.assume_init();
        (options.device, options.n_ctx, options.n_threads) = (c"cpu".as_ptr(), n_ctx, 1);
        assert_eq!(ma_context_new(model, &raw const options, &raw mut context), Status::Ok, "{}", last_error());
    }
    context
}

#[test]
fn null_pointers_are_errors() {
    let (mut n, mut model, mut context) = (0, null_mut(), null_mut());
    let (mut chat, mut answer, mut grammar, mut batch) = (null_mut(), null_mut(), null_mut(), null_mut());
    let text = c"Once".as_ptr();
    // SAFETY: these functions check for null pointers.
    let statuses = unsafe {
        [
            ma_model_open(null(), &raw mut model),
            ma_model_open(text, null_mut()),
            ma_model_built_in(null_mut()),
            ma_tokenize(null(), text, 4, 1, 0, null_mut(), 0, &raw mut n),
            ma_detokenize(null(), null(), 0, 0, null_mut(), 0, &raw mut n),
            ma_context_new(null(), null(), &raw mut context),
            ma_context_options_default(null_mut(), size_of::<ContextOptions>()),
            ma_sampling_options_default(null_mut(), size_of::<SamplingOptions>()),
            ma_generate_options_default(null_mut(), size_of::<GenerateOptions>()),
            ma_generate(null(), null(), 0, null(), null(), None, null_mut(), null_mut()),
            ma_complete(null(), text, 4, null(), null(), None, null_mut(), null_mut()),
            ma_embed(null(), text, 4, null_mut(), 0, &raw mut n),
            ma_chat_options_default(null_mut(), size_of::<ChatOptions>()),
            ma_chat_new(null(), text, 4, null(), &raw mut chat),
            ma_chat_prompt(null(), null_mut(), 0, &raw mut n),
            ma_chat_tokens(null(), null_mut(), 0, &raw mut n),
            ma_answer_new(null(), &raw mut answer),
            ma_answer_message(null(), null_mut(), 0, &raw mut n),
            ma_grammar_new(null(), text, text, 4, null(), &raw mut grammar),
            ma_grammar_left_out(null(), null_mut(), 0, &raw mut n),
            ma_batch_new(null(), null(), 1, &raw mut batch),
            ma_batch_add(null(), null(), 0, null(), null(), None, null_mut(), null_mut()),
            ma_batch_run(null(), null_mut(), 0, &raw mut n),
        ]
    };
    assert_eq!(statuses, [Status::InvalidArgument; 23]);
    assert!(last_error().contains("batch is a null pointer"), "{}", last_error());
    // SAFETY: as above.
    unsafe {
        ma_model_free(null_mut());
        ma_context_free(null_mut());
        ma_context_cancel(null());
        ma_chat_free(null_mut());
        ma_answer_free(null_mut());
        ma_grammar_free(null_mut());
        ma_batch_free(null_mut());
        ma_batch_cancel(null());
        assert_eq!(*ma_batch_error(null(), 0), 0);
        assert_eq!((ma_model_n_vocab(null()), ma_model_n_ctx_train(null()), ma_model_n_embedding(null())), (0, 0, 0));
        assert_eq!(ma_context_n_ctx(null()), 0);
    }
}

#[test]
fn files_that_are_no_model_are_errors() {
    let mut model = null_mut();
    let mut open = |path: &str| {
        let path = CString::new(path).unwrap();
        // SAFETY: the path ends with a NUL, and the out-pointer is valid.
        (unsafe { ma_model_open(path.as_ptr(), &raw mut model) }, last_error())
    };
    let (status, message) = open("nothing.gguf");
    assert!(status == Status::Model && message.contains("nothing.gguf"), "{message}");
    let folder = tempfile::tempdir().unwrap();
    let damaged = folder.path().join("damaged.gguf");
    std::fs::write(&damaged, b"GGUF and no more").unwrap();
    assert_eq!(open(damaged.to_str().unwrap()).0, Status::Model);
    assert!(model.is_null());
    let path = c"\xff".as_ptr();
    // SAFETY: as above.
    assert_eq!(unsafe { ma_model_open(path, &raw mut model) }, Status::InvalidArgument);
    assert!(last_error().contains("path is no UTF-8"), "{}", last_error());
}

#[test]
fn small_buffers_get_the_required_size() {
    let model = built_in();
    let text = "Once upon a time";
    let tokenize = |ids: *mut u32, capacity: usize| {
        let mut n = 7;
        // SAFETY: the text has the given length, and `ids` has the given capacity.
        let status = unsafe { ma_tokenize(model, text.as_ptr().cast(), text.len(), 1, 0, ids, capacity, &raw mut n) };
        (status, n)
    };
    assert_eq!(tokenize(null_mut(), 0), (Status::BufferTooSmall, 5));
    assert_eq!(tokenize(null_mut(), 100), (Status::BufferTooSmall, 5), "a null buffer has no capacity");
    let mut ids = [0; 5];
    assert_eq!(tokenize(ids.as_mut_ptr(), 4), (Status::BufferTooSmall, 5));
    assert_eq!(ids, [0; 5], "nothing is written to the small buffer");
    assert_eq!((tokenize(ids.as_mut_ptr(), 5), ids), ((Status::Ok, 5), [1, 403, 407, 261, 378]));

    let detokenize = |ids: &[u32], buffer: &mut [u8]| {
        let (mut n, to) = (0, buffer.as_mut_ptr().cast::<c_char>());
        // SAFETY: pointers and sizes are those of slices.
        let status = unsafe { ma_detokenize(model, ids.as_ptr(), ids.len(), 0, to, buffer.len(), &raw mut n) };
        (status, n)
    };
    let mut buffer = [0; 16];
    assert_eq!(detokenize(&ids, &mut buffer[..15]), (Status::BufferTooSmall, 16));
    assert_eq!(detokenize(&ids, &mut buffer), (Status::Ok, 16));
    assert_eq!(&buffer, text.as_bytes());
    assert_eq!(detokenize(&[512], &mut buffer).0, Status::InvalidArgument);
    assert!(last_error().contains("512"), "{}", last_error());
    let mut n = 0;
    // SAFETY: the impossible length is rejected before the memory is read.
    unsafe {
        assert_eq!(
            ma_detokenize(model, ids.as_ptr(), usize::MAX, 0, null_mut(), 0, &raw mut n),
            Status::InvalidArgument
        );
        assert_eq!(ma_detokenize(model, null(), 3, 0, null_mut(), 0, &raw mut n), Status::InvalidArgument);
        // A text of length 0 may be a null pointer.
        assert_eq!(ma_tokenize(model, null(), 0, 0, 0, null_mut(), 0, &raw mut n), Status::Ok);
        assert_eq!((n, ma_model_n_vocab(model)), (0, 512));
        ma_model_free(model);
    }
}

#[test]
fn options_of_wrong_size_or_value_are_rejected() {
    let model = built_in();
    let context = context(model, 64);
    let mut sampling = MaybeUninit::<SamplingOptions>::uninit();
    // SAFETY: the buffer has the size of the options, and the second call initialises them.
    let mut sampling = unsafe {
        assert_eq!(ma_sampling_options_default(sampling.as_mut_ptr(), 8), Status::InvalidArgument);
        assert!(last_error().contains("8 bytes instead of"), "{}", last_error());
        assert_eq!(ma_sampling_options_default(sampling.as_mut_ptr(), size_of::<SamplingOptions>()), Status::Ok);
        sampling.assume_init()
    };
    let complete = |sampling: &SamplingOptions| {
        // SAFETY: the prompt ends with a NUL, and the other pointers are null or valid.
        let status = unsafe {
            let prompt = c"Once upon a time".as_ptr();
            ma_complete(context, prompt, MA_NUL_TERMINATED, sampling, null(), Some(stop), null_mut(), null_mut())
        };
        (status, last_error())
    };
    assert_eq!(complete(&sampling).0, Status::Ok);
    let wrong = SamplingOptions { size: sampling.size - 8, ..sampling };
    assert_eq!(complete(&wrong).0, Status::InvalidArgument);
    sampling.temperature = -1.0;
    let (status, message) = complete(&sampling);
    assert!(status == Status::InvalidArgument && message.contains("temperature"), "{message}");
    sampling.temperature = 1.0;
    sampling.samplers = c"top_k;luck".as_ptr();
    let (status, message) = complete(&sampling);
    assert!(status == Status::InvalidArgument && message.contains("luck"), "{message}");
    sampling.samplers = null();
    sampling.n_logit_bias = 1;
    assert_eq!(complete(&sampling).0, Status::InvalidArgument);
    // SAFETY: the handles come from the library and are not used afterwards.
    unsafe {
        ma_context_free(context);
        ma_model_free(model);
    }
}

/// Ends the generation at the first token.
unsafe extern "C" fn stop(_: *const Token, _: *mut c_void) -> i32 {
    1
}

/// Uses the context from its own callback, which fails, and cancels it.
unsafe extern "C" fn reenter(token: *const Token, context: *mut c_void) -> i32 {
    // SAFETY: the test passes its context as user pointer, and the token is valid.
    unsafe {
        let id = (*token).id;
        let status = ma_generate(context.cast(), &raw const id, 1, null(), null(), None, null_mut(), null_mut());
        assert_eq!(status, Status::Busy);
        ma_context_cancel(context.cast());
    }
    0
}

#[test]
fn a_context_in_use_is_busy_and_can_be_cancelled() {
    let model = built_in();
    let context = context(model, 64);
    // SAFETY: the context keeps its model alive; all pointers are valid.
    unsafe {
        ma_model_free(model);
        let ids = [1, 403, 407, 261, 378];
        let generate = |ids: &[u32], on_token: OnToken, done: *mut Generation| {
            ma_generate(context, ids.as_ptr(), ids.len(), null(), null(), on_token, context.cast(), done)
        };
        assert_eq!(generate(&ids, Some(reenter), null_mut()), Status::Cancelled);
        let mut done = MaybeUninit::uninit();
        assert_eq!(generate(&ids, None, done.as_mut_ptr()), Status::Ok, "the next call is not cancelled");
        let done = done.assume_init();
        assert!(done.n_prompt == 5 && done.n_cached == 4 && done.n_generated > 0, "{done:?}");
        assert_eq!(generate(&[], None, null_mut()), Status::InvalidArgument);
        assert_eq!(generate(&[512], None, null_mut()), Status::InvalidArgument);
        assert_eq!(generate(&[1; 65], None, null_mut()), Status::ContextFull);
        assert_eq!(ma_context_n_ctx(context), 64);
        ma_context_free(context);
    }
}

/// The header documents that threads may share these handles.
#[test]
fn handles_can_be_shared() {
    fn is_shared<T: Send + Sync>() {}
    is_shared::<Model>();
    is_shared::<Context>();
    is_shared::<Batch>();
    is_shared::<Chat>();
    is_shared::<Answer>();
    is_shared::<Grammar>();
}

#[test]
fn embeddings_are_deterministic_vectors_of_length_one() {
    let model = built_in();
    let context = context(model, 64);
    let mut vector = [0.0_f32; 64];
    let mut n = 0;
    // SAFETY: the buffers have 64 elements.
    unsafe {
        assert_eq!(ma_model_n_embedding(model), 64);
        let text = c"Once upon a time".as_ptr();
        let mut embed =
            |capacity| (ma_embed(context, text, MA_NUL_TERMINATED, vector.as_mut_ptr(), capacity, &raw mut n), n);
        assert_eq!(embed(63), (Status::BufferTooSmall, 64));
        assert_eq!(embed(64), (Status::Ok, 64));
        let mut again = [0.0_f32; 64];
        let status = ma_embed(context, text, MA_NUL_TERMINATED, again.as_mut_ptr(), 64, &raw mut n);
        assert_eq!((status, again), (Status::Ok, vector));
        ma_context_free(context);
        ma_model_free(model);
    }
    let length: f32 = vector.iter().map(|x| x * x).sum();
    assert!((length - 1.0).abs() < 1e-5, "{length}");
}
