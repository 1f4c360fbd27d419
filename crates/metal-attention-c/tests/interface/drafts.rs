//! The option `drafter`, and the numbers of drafts in results.

use std::ffi::{CStr, CString};
use std::mem::MaybeUninit;
use std::ptr::{null, null_mut};

use metal_attention_c::{
    BatchResult, ContextOptions, GenerateOptions, Generation, MA_NO_TOKEN, Model, OnToken, Status, Token, ma_batch_add,
    ma_batch_free, ma_batch_new, ma_batch_run, ma_context_free, ma_context_new, ma_context_options_default,
    ma_generate, ma_generate_options_default, ma_last_error, ma_model_built_in, ma_model_free, ma_model_open,
    ma_sampling_options_greedy,
};

/// "Once upon a time, there was a Once upon a time" with BOS: the answer repeats some of it.
const TWICE: [u32; 13] = [1, 403, 407, 261, 378, 432, 383, 286, 261, 403, 407, 261, 378];

/// The message of the last failed call.
fn last_error() -> String {
    // SAFETY: the message of this thread is valid until its next call.
    unsafe { CStr::from_ptr(ma_last_error()) }.to_str().unwrap().to_owned()
}

/// The default options, as the C function `set` initialises them.
fn defaults<T>(set: unsafe extern "C" fn(*mut T, usize) -> Status) -> T {
    let mut options = MaybeUninit::uninit();
    // SAFETY: the buffer has the size of the options, and the call initialises them.
    unsafe {
        assert_eq!(set(options.as_mut_ptr(), size_of::<T>()), Status::Ok);
        options.assume_init()
    }
}

/// Options of a context on one CPU thread. `None`: the default drafter.
fn context_options(drafter: Option<&'static CStr>) -> ContextOptions {
    let options = ContextOptions { device: c"cpu".as_ptr(), n_threads: 1, ..defaults(ma_context_options_default) };
    assert!(options.drafter.is_null());
    ContextOptions { drafter: drafter.map_or(null(), CStr::as_ptr), ..options }
}

fn built_in() -> *mut Model {
    let mut model = null_mut();
    // SAFETY: the out-pointer is valid.
    assert_eq!(unsafe { ma_model_built_in(&raw mut model) }, Status::Ok);
    model
}

unsafe extern "C" fn collect(token: *const Token, user: *mut std::ffi::c_void) -> i32 {
    // SAFETY: the token is valid, and the tests pass a list of ids as user pointer.
    let (token, ids) = unsafe { (&*token, &mut *user.cast::<Vec<u32>>()) };
    ids.extend((token.id != MA_NO_TOKEN).then_some(token.id));
    0
}

/// The options for 60 tokens.
fn sixty_tokens() -> GenerateOptions {
    GenerateOptions { max_tokens: 60, ignore_eos: 1, ..defaults(ma_generate_options_default) }
}

/// The tokens of a context with this drafter, and the numbers of drafts that were evaluated and accepted.
fn of_context(
    model: *const Model,
    drafter: Option<&'static CStr>,
    options: &GenerateOptions,
) -> (Vec<u32>, usize, usize) {
    let (mut context, mut done, mut ids) = (null_mut(), MaybeUninit::<Generation>::uninit(), Vec::new());
    let (of_context, sampling) = (context_options(drafter), defaults(ma_sampling_options_greedy));
    let on_token: OnToken = Some(collect);
    // SAFETY: all pointers are valid, and the list of ids outlives the call.
    let done = unsafe {
        assert_eq!(ma_context_new(model, &raw const of_context, &raw mut context), Status::Ok, "{}", last_error());
        let (prompt, user) = (TWICE.as_ptr(), (&raw mut ids).cast());
        let (sampling, options) = (&raw const sampling, std::ptr::from_ref(options));
        let status = ma_generate(context, prompt, TWICE.len(), sampling, options, on_token, user, done.as_mut_ptr());
        assert_eq!(status, Status::Ok, "{}", last_error());
        ma_context_free(context);
        done.assume_init()
    };
    assert_eq!((done.n_prompt, done.n_generated), (TWICE.len(), 60));
    (ids, done.n_drafted, done.n_accepted)
}

/// The same of a batch.
fn of_batch(
    model: *const Model,
    drafter: Option<&'static CStr>,
    options: &GenerateOptions,
) -> (Vec<u32>, usize, usize) {
    let (mut batch, mut result, mut n, mut ids) = (null_mut(), MaybeUninit::<BatchResult>::uninit(), 0, Vec::new());
    let (of_context, sampling) = (context_options(drafter), defaults(ma_sampling_options_greedy));
    // SAFETY: all pointers are valid, and the list of ids outlives the call.
    let result = unsafe {
        assert_eq!(ma_batch_new(model, &raw const of_context, 2, &raw mut batch), Status::Ok, "{}", last_error());
        let (prompt, user) = (TWICE.as_ptr(), (&raw mut ids).cast());
        let (sampling, options) = (&raw const sampling, std::ptr::from_ref(options));
        let status = ma_batch_add(batch, prompt, TWICE.len(), sampling, options, Some(collect), user, null_mut());
        assert_eq!(status, Status::Ok, "{}", last_error());
        assert_eq!(ma_batch_run(batch, result.as_mut_ptr(), 1, &raw mut n), Status::Ok, "{}", last_error());
        ma_batch_free(batch);
        result.assume_init()
    };
    assert_eq!((n, result.status, result.generation.n_generated), (1, Status::Ok, 60));
    (ids, result.generation.n_drafted, result.generation.n_accepted)
}

#[test]
fn texts_do_not_depend_on_the_drafter() {
    let model = built_in();
    let options = sixty_tokens();
    let plain = of_context(model, Some(c"off"), &options);
    assert_eq!((plain.0.len(), plain.1, plain.2), (60, 0, 0));
    assert_eq!(of_batch(model, Some(c"off"), &options), plain);
    for drafter in [None, Some(c"auto"), Some(c"ngram")] {
        for (ids, n_drafted, n_accepted) in [of_context(model, drafter, &options), of_batch(model, drafter, &options)] {
            assert_eq!(ids, plain.0);
            assert!((1..60).contains(&n_accepted) && n_accepted <= n_drafted, "{n_accepted} of {n_drafted}");
        }
    }
    // Without drafts in this generation, and with drafts of a text that it repeats.
    let none = GenerateOptions { max_drafts: 0, ..options };
    let predicted = GenerateOptions { prediction: plain.0.as_ptr(), n_prediction: plain.0.len(), ..options };
    for of in [of_context, of_batch] {
        assert_eq!(of(model, Some(c"ngram"), &none), plain);
        let (ids, _, n_accepted) = of(model, Some(c"ngram"), &options);
        let (predicted_ids, _, n_predicted) = of(model, Some(c"ngram"), &predicted);
        assert_eq!((&ids, &predicted_ids), (&plain.0, &plain.0));
        assert!(n_predicted > n_accepted, "{n_predicted} with a prediction, {n_accepted} without");
    }
    // SAFETY: nothing uses it.
    unsafe { ma_model_free(model) }
}

#[test]
fn unknown_drafters_are_errors() {
    let (model, mut context, mut batch) = (built_in(), null_mut(), null_mut());
    let options = context_options(Some(c"mtb"));
    // SAFETY: all pointers are valid.
    unsafe {
        assert_eq!(ma_context_new(model, &raw const options, &raw mut context), Status::InvalidArgument);
        assert!(
            last_error().starts_with("drafter: there is no drafter \"mtb\"; choose one of off, "),
            "{}",
            last_error()
        );
        assert_eq!(ma_batch_new(model, &raw const options, 2, &raw mut batch), Status::InvalidArgument);
        ma_model_free(model);
    }
}

#[test]
fn a_draft_file_has_the_drafter() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, metal_attention_testing::models::with_drafters(name)).unwrap();
        CString::new(path.to_str().unwrap()).unwrap()
    };
    let (path, draft, mut model) = (write("eagle3.gguf"), write("eagle3-drafter.gguf"), null_mut());
    let (missing, mut context, mut batch) = (c"missing.gguf", null_mut(), null_mut());
    let with = |drafter: Option<&'static CStr>, model_draft: &CStr| {
        let options = context_options(drafter);
        assert!(options.model_draft.is_null());
        ContextOptions { model_draft: model_draft.as_ptr(), ..options }
    };
    // SAFETY: all pointers are valid, and what is freed is not used any more.
    unsafe {
        assert_eq!(ma_model_open(path.as_ptr(), &raw mut model), Status::Ok, "{}", last_error());
        for drafter in [None, Some(c"eagle3"), Some(c"off")] {
            let options = with(drafter, &draft);
            assert_eq!(ma_context_new(model, &raw const options, &raw mut context), Status::Ok, "{}", last_error());
            ma_context_free(context);
            assert_eq!(ma_batch_new(model, &raw const options, 2, &raw mut batch), Status::Ok, "{}", last_error());
            ma_batch_free(batch);
        }
        let options = with(Some(c"ngram"), &draft);
        assert_ne!(ma_context_new(model, &raw const options, &raw mut context), Status::Ok);
        assert!(last_error().contains("\"eagle3\""), "{}", last_error());
        let options = with(None, missing);
        assert_ne!(ma_context_new(model, &raw const options, &raw mut context), Status::Ok);
        assert!(last_error().contains("missing.gguf"), "{}", last_error());
        ma_model_free(model);
    }
}
