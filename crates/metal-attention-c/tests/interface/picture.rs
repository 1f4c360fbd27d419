//! The C functions for pictures, called from Rust with a picture encoder of random weights for the built-in model.

use std::ffi::{CStr, CString, c_void};
use std::mem::MaybeUninit;
use std::ptr::{null, null_mut};

use metal_attention_c::{
    Batch, BatchResult, Chat, Context, ContextOptions, GenerateOptions, Generation, MA_NO_TOKEN, MA_NUL_TERMINATED,
    Model, Picture, PictureEncoder, PictureOptions, Prompt, SamplingOptions, Status, Token, ma_batch_add_prompt,
    ma_batch_free, ma_batch_new, ma_batch_run, ma_chat_free, ma_chat_new, ma_chat_prompt, ma_chat_tokens,
    ma_context_free, ma_context_new, ma_context_options_default, ma_generate_options_default, ma_generate_prompt,
    ma_last_error, ma_model_built_in, ma_model_free, ma_picture_encode, ma_picture_encoder_free,
    ma_picture_encoder_open, ma_picture_free, ma_picture_options_default, ma_prompt_free, ma_prompt_n_tokens,
    ma_prompt_new, ma_prompt_of_chat, ma_sampling_options_greedy,
};
use metal_attention_testing::mmproj;

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

/// The handle that `call` writes through its out-pointer, or its status and error message.
fn new_handle<T>(call: impl FnOnce(*mut *mut T) -> Status) -> Result<*mut T, (Status, String)> {
    let mut handle = null_mut();
    match call(&raw mut handle) {
        Status::Ok => Ok(handle),
        failed => Err((failed, last_error())),
    }
}

/// Options of a context on one CPU thread.
fn context_options() -> ContextOptions {
    ContextOptions { device: c"cpu".as_ptr(), n_threads: 1, ..defaults(ma_context_options_default) }
}

/// The built-in model, and an encoder of the file `mmproj`.
fn open(mmproj: &[u8]) -> (*mut Model, Result<*mut PictureEncoder, (Status, String)>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mmproj.gguf");
    std::fs::write(&path, mmproj).unwrap();
    let (path, options) = (CString::new(path.to_str().unwrap()).unwrap(), context_options());
    // SAFETY: all pointers are valid.
    let model = new_handle(|model| unsafe { ma_model_built_in(model) }).unwrap();
    // SAFETY: all pointers are valid. The file is not changed; that it is removed does not matter to its mapping.
    let encoder = new_handle(|encoder| unsafe {
        ma_picture_encoder_open(model, path.as_ptr(), &raw const options, null(), encoder)
    });
    (model, encoder)
}

/// Encodes a file.
fn encode(encoder: *const PictureEncoder, file: &[u8]) -> Result<*mut Picture, (Status, String)> {
    // SAFETY: all pointers are valid, and the file has the given length.
    new_handle(|picture| unsafe { ma_picture_encode(encoder, file.as_ptr(), file.len(), picture) })
}

/// A prompt of a text and pictures.
fn prompt(model: *const Model, text: &CStr, pictures: &[*const Picture]) -> Result<*mut Prompt, (Status, String)> {
    let (first, n) = (pictures.as_ptr(), pictures.len());
    // SAFETY: all pointers are valid.
    new_handle(|prompt| unsafe { ma_prompt_new(model, text.as_ptr(), MA_NUL_TERMINATED, 0, first, n, prompt) })
}

/// Appends ids of tokens to the list that `user` points to.
unsafe extern "C" fn collect(token: *const Token, user: *mut c_void) -> i32 {
    // SAFETY: the tests pass a list that nothing else uses meanwhile, and the token is valid.
    unsafe {
        if (*token).id != MA_NO_TOKEN {
            (*user.cast::<Vec<u32>>()).push((*token).id);
        }
    }
    0
}

/// Options for 24 greedy tokens.
fn greedy() -> (SamplingOptions, GenerateOptions) {
    let options = GenerateOptions { max_tokens: 24, ignore_eos: 1, ..defaults(ma_generate_options_default) };
    (defaults(ma_sampling_options_greedy), options)
}

/// The greedy ids after a prompt, and the result of the generation.
fn generate(context: *const Context, prompt: *const Prompt) -> (Vec<u32>, Generation) {
    let ((sampling, options), mut ids, mut done) = (greedy(), Vec::new(), MaybeUninit::uninit());
    // SAFETY: all pointers are valid, and `collect` gets the list that it expects.
    unsafe {
        let user = (&raw mut ids).cast();
        let (sampling, options) = (&raw const sampling, &raw const options);
        let status = ma_generate_prompt(context, prompt, sampling, options, Some(collect), user, done.as_mut_ptr());
        assert_eq!(status, Status::Ok, "{}", last_error());
        (ids, done.assume_init())
    }
}

#[test]
fn pictures_change_texts_and_are_evaluated_once() {
    let (model, encoder) = open(&mmproj::gemma3(64));
    let encoder = encoder.unwrap();
    let pictures = [1, 2, 1].map(|seed| encode(encoder, &mmproj::bmp(40, 30, seed)).unwrap().cast_const());
    let texts = [c"", c"", c"<image>"];
    let prompts: Vec<_> =
        texts.iter().zip(pictures).map(|(text, picture)| prompt(model, text, &[picture]).unwrap()).collect();
    let without = prompt(model, c"Once", &[]).unwrap();
    let options = context_options();
    // SAFETY: all pointers are valid. Handles are freed once, in any order.
    unsafe {
        let context = new_handle(|context| ma_context_new(model, &raw const options, context)).unwrap();
        // Prompts and contexts outlive what they are made of.
        ma_picture_encoder_free(encoder);
        for picture in pictures {
            ma_picture_free(picture.cast_mut());
        }
        let n = ma_prompt_n_tokens(prompts[0]);
        assert_eq!(n, ma_prompt_n_tokens(prompts[2]), "a picture without a place stands before the text");
        assert!(n >= ma_prompt_n_tokens(without) + 4, "a picture has four rows");

        let (first, done) = generate(context, prompts[0]);
        assert_eq!((done.n_prompt, done.n_cached, done.n_generated, first.len()), (n, 0, 24, 24));
        let (again, done) = generate(context, prompts[2]);
        assert_eq!((again, done.n_cached), (first.clone(), n - 1), "the same picture is in the KV cache");
        let (second, done) = generate(context, prompts[1]);
        assert!(done.n_cached < n - 4, "another picture is evaluated");
        assert_ne!(second, first, "another picture gives another text");
        assert_ne!(generate(context, without).0, first);

        // A batch generates the same texts.
        let batch: *mut Batch = new_handle(|batch| ma_batch_new(model, &raw const options, 2, batch)).unwrap();
        let ((sampling, options), mut ids) = (greedy(), [Vec::<u32>::new(), Vec::new()]);
        for (prompt, ids) in prompts.iter().zip(&mut ids) {
            let (sampling, options, user) = (&raw const sampling, &raw const options, &raw mut *ids);
            let on_token = Some(collect as unsafe extern "C" fn(*const Token, *mut c_void) -> i32);
            let status = ma_batch_add_prompt(batch, *prompt, sampling, options, on_token, user.cast(), null_mut());
            assert_eq!(status, Status::Ok, "{}", last_error());
        }
        let (mut results, mut n) = ([MaybeUninit::<BatchResult>::uninit(); 2], 0);
        assert_eq!(ma_batch_run(batch, results.as_mut_ptr().cast(), 2, &raw mut n), Status::Ok, "{}", last_error());
        assert_eq!(ids, [first, second]);
        ma_batch_free(batch);
        for prompt in prompts {
            ma_prompt_free(prompt);
        }
        ma_prompt_free(without);
        ma_context_free(context);
        ma_model_free(model);
    }
}

#[test]
fn conversations_have_a_picture_for_each_part() {
    let (model, encoder) = open(&mmproj::gemma3(64));
    let encoder = encoder.unwrap();
    let picture = encode(encoder, &mmproj::bmp(40, 30, 1)).unwrap();
    let messages = r#"[{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "one"}}, {"type": "text", "text": "or"},
        {"type": "image_url", "image_url": {"url": "another"}}]}]"#;
    // SAFETY: all pointers are valid, and lists have the given lengths. Handles are freed once.
    unsafe {
        let chat: *mut Chat =
            new_handle(|chat| ma_chat_new(model, messages.as_ptr().cast(), messages.len(), null(), chat)).unwrap();
        let mut n = 0;
        let mut text = [0_u8; 64];
        assert_eq!(ma_chat_prompt(chat, text.as_mut_ptr().cast(), 64, &raw mut n), Status::Ok);
        let text = std::str::from_utf8(&text[..n]).unwrap();
        assert!(text.contains("<image>or<image>"), "{text:?}");
        assert_eq!(ma_chat_tokens(chat, null_mut(), 0, &raw mut n), Status::InvalidArgument);
        assert!(last_error().contains("ma_prompt_of_chat"), "{}", last_error());
        let of_chat = |pictures: &[*const Picture]| {
            new_handle(|prompt| ma_prompt_of_chat(chat, pictures.as_ptr(), pictures.len(), prompt))
        };
        let (status, message) = of_chat(&[picture]).unwrap_err();
        assert_eq!(status, Status::InvalidArgument);
        assert_eq!(message, "the messages have 2 parts for pictures, and there are 1 pictures");
        let prompt = of_chat(&[picture, picture]).unwrap();
        assert!(ma_prompt_n_tokens(prompt) >= 8, "each picture has four rows");
        ma_prompt_free(prompt);
        ma_chat_free(chat);
        ma_picture_free(picture);
        ma_picture_encoder_free(encoder);
        ma_model_free(model);
    }
}

#[test]
fn wrong_files_and_pictures_are_errors() {
    // An encoder for wider rows, a damaged file, and none.
    let (model, wider) = open(&mmproj::gemma3(48));
    let (status, message) = wider.unwrap_err();
    assert!(status == Status::Model && message.contains("rows of 48"), "{message}");
    // SAFETY: the model comes from the library and is not used afterwards.
    unsafe { ma_model_free(model) };
    let (model, damaged) = open(b"GGUF and no more");
    assert_eq!(damaged.unwrap_err().0, Status::Model);
    // SAFETY: as above.
    unsafe { ma_model_free(model) };

    let (model, encoder) = open(&mmproj::gemma3(64));
    let encoder = encoder.unwrap();
    let file = mmproj::bmp(40, 30, 1);
    for wrong in [&file[..40], &file[..0], b"no picture at all", &mmproj::bmp(1, 4000, 1)[..100]] {
        let (status, message) = encode(encoder, wrong).unwrap_err();
        assert!(status == Status::InvalidArgument && message.starts_with("file: "), "{message}");
    }
    let (status, message) = prompt(model, c"<image>", &[]).unwrap_err();
    assert!(status == Status::InvalidArgument && message.contains("1 places"), "{message}");
    assert_eq!(prompt(model, c"", &[null()]).unwrap_err().0, Status::InvalidArgument);
    let wrong = PictureOptions { size: 8, ..defaults(ma_picture_options_default) };
    let (mut other, mut picture, mut made) = (null_mut(), null_mut(), null_mut());
    // SAFETY: these functions check for null pointers and sizes; the handles are not used afterwards.
    unsafe {
        let statuses = [
            ma_picture_options_default(null_mut(), size_of::<PictureOptions>()),
            ma_picture_encoder_open(null(), c"x".as_ptr(), null(), null(), &raw mut other),
            ma_picture_encoder_open(model, null(), null(), null(), &raw mut other),
            ma_picture_encoder_open(model, c"x".as_ptr(), null(), &raw const wrong, &raw mut other),
            ma_picture_encoder_open(model, c"x".as_ptr(), null(), null(), null_mut()),
            ma_picture_encode(null(), file.as_ptr(), file.len(), &raw mut picture),
            ma_picture_encode(encoder, null(), 5, &raw mut picture),
            ma_picture_encode(encoder, file.as_ptr(), file.len(), null_mut()),
            ma_prompt_new(null(), c"x".as_ptr(), 1, 0, null(), 0, &raw mut made),
            ma_prompt_new(model, c"x".as_ptr(), 1, 0, null(), 1, &raw mut made),
            ma_prompt_new(model, c"x".as_ptr(), 1, 0, null(), 0, null_mut()),
            ma_prompt_of_chat(null(), null(), 0, &raw mut made),
            ma_generate_prompt(null(), null(), null(), null(), None, null_mut(), null_mut()),
            ma_batch_add_prompt(null(), null(), null(), null(), None, null_mut(), null_mut()),
        ];
        assert_eq!(statuses, [Status::InvalidArgument; 14]);
        assert!(other.is_null() && picture.is_null() && made.is_null());
        assert_eq!(ma_prompt_n_tokens(null()), 0);
        ma_prompt_free(null_mut());
        ma_picture_free(null_mut());
        ma_picture_encoder_free(null_mut());
        ma_picture_encoder_free(encoder);
        ma_model_free(model);
    }
}

/// The header documents that threads may share these handles.
#[test]
fn handles_can_be_shared() {
    fn is_shared<T: Send + Sync>() {}
    is_shared::<PictureEncoder>();
    is_shared::<Picture>();
    is_shared::<Prompt>();
}
