//! The C functions for conversations, answers, grammars and batches, called from Rust on the built-in model.

use std::ffi::{CStr, CString, c_void};
use std::mem::MaybeUninit;
use std::ptr::{null, null_mut};
use std::time::Duration;

use metal_attention_c::{
    Answer, Batch, BatchResult, Chat, ChatOptions, Context, ContextOptions, GenerateOptions, Generation, Grammar,
    MA_NO_TOKEN, Model, SamplingOptions, Status, StopReason, Token, ma_answer_free, ma_answer_message, ma_answer_new,
    ma_batch_add, ma_batch_cancel, ma_batch_error, ma_batch_free, ma_batch_new, ma_batch_run, ma_chat_free,
    ma_chat_new, ma_chat_options_default, ma_chat_prompt, ma_chat_tokens, ma_context_cancel, ma_context_free,
    ma_context_new, ma_context_options_default, ma_generate, ma_generate_options_default, ma_grammar_free,
    ma_grammar_left_out, ma_grammar_new, ma_last_error, ma_model_built_in, ma_model_free, ma_model_open,
    ma_sampling_options_greedy,
};

/// A template in the style of Qwen: its text makes the library choose the formats of calls and thoughts.
const TEMPLATE: &CStr =
    c"{%- if tools %}{{ tools[0].function.name }}: <tool_call>{\"name\": ..., \"arguments\": ...}</tool_call>
{% endif %}{%- for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant:{% if think %}<think>
{% endif %}{% endif %}{# </think> #}";
const TOOLS: &CStr =
    c"[{\"type\": \"function\", \"function\": {\"name\": \"look_up\", \"parameters\": {\"type\": \"object\",
    \"properties\": {\"city\": {\"enum\": [\"Rome\", \"Paris\"]}}, \"required\": [\"city\"]}}}]";
const HELLO: &str = r#"[{"role": "user", "content": "Hello!"}]"#;
/// The token ids of "Once upon a time" with BOS.
const ONCE: [u32; 5] = [1, 403, 407, 261, 378];

/// The message of the last failed call.
fn last_error() -> String {
    // SAFETY: the message of this thread is valid until its next call.
    unsafe { CStr::from_ptr(ma_last_error()) }.to_str().unwrap().to_owned()
}

/// The handle that `call` writes through its out-pointer, or its status and error message.
fn new_handle<T>(call: impl FnOnce(*mut *mut T) -> Status) -> Result<*mut T, (Status, String)> {
    let mut handle = null_mut();
    match call(&raw mut handle) {
        Status::Ok => Ok(handle),
        failed => Err((failed, last_error())),
    }
}

/// The text that `call(buffer, capacity, n)` writes. The first call reports the size.
fn text(call: impl Fn(*mut i8, usize, *mut usize) -> Status) -> String {
    let mut n = 0;
    assert_eq!(call(null_mut(), 0, &raw mut n), Status::BufferTooSmall, "{}", last_error());
    let mut bytes = vec![0u8; n];
    assert_eq!(call(bytes.as_mut_ptr().cast(), n, &raw mut n), Status::Ok, "{}", last_error());
    String::from_utf8(bytes).unwrap()
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

fn built_in() -> *mut Model {
    // SAFETY: the out-pointer is valid.
    new_handle(|model| unsafe { ma_model_built_in(model) }).unwrap()
}

/// Options of a context on one CPU thread.
fn context_options() -> ContextOptions {
    ContextOptions { device: c"cpu".as_ptr(), n_threads: 1, ..defaults(ma_context_options_default) }
}

fn context(model: *const Model) -> *mut Context {
    let options = context_options();
    // SAFETY: all pointers are valid.
    new_handle(|context| unsafe { ma_context_new(model, &raw const options, context) }).unwrap()
}

/// A conversation rendered with [`TEMPLATE`]. `change` changes the options.
fn chat(
    model: *const Model,
    messages: &str,
    change: impl FnOnce(&mut ChatOptions),
) -> Result<*mut Chat, (Status, String)> {
    let mut options = ChatOptions { chat_template: TEMPLATE.as_ptr(), ..defaults(ma_chat_options_default) };
    change(&mut options);
    // SAFETY: all pointers are valid, and the text has the given length.
    new_handle(|chat| unsafe { ma_chat_new(model, messages.as_ptr().cast(), messages.len(), &raw const options, chat) })
}

fn grammar(model: *const Model, kind: &str, form: &str, chat: *const Chat) -> Result<*mut Grammar, (Status, String)> {
    let kind = CString::new(kind).unwrap();
    // SAFETY: as above.
    new_handle(|to| unsafe { ma_grammar_new(model, kind.as_ptr(), form.as_ptr().cast(), form.len(), chat, to) })
}

/// The rendered prompt.
fn prompt(chat: *const Chat) -> String {
    // SAFETY: the buffer has the given capacity.
    text(|to, capacity, n| unsafe { ma_chat_prompt(chat, to.cast(), capacity, n) })
}

/// The token ids of the prompt.
fn tokens(chat: *const Chat) -> Vec<u32> {
    let mut n = 0;
    // SAFETY: the buffer has the given capacity.
    unsafe {
        assert_eq!(ma_chat_tokens(chat, null_mut(), 0, &raw mut n), Status::BufferTooSmall);
        let mut ids = vec![0; n];
        assert_eq!(ma_chat_tokens(chat, ids.as_mut_ptr(), n, &raw mut n), Status::Ok);
        ids
    }
}

/// The parsed message in JSON.
fn message(answer: *const Answer) -> String {
    // SAFETY: the buffer has the given capacity.
    text(|to, capacity, n| unsafe { ma_answer_message(answer, to.cast(), capacity, n) })
}

/// The tokens and text of a sequence that the callback [`listen`] received.
#[derive(Debug, Default, Clone, PartialEq)]
struct Streamed {
    ids: Vec<u32>,
    text: String,
}

unsafe extern "C" fn listen(token: *const Token, user: *mut c_void) -> i32 {
    // SAFETY: the token is valid, and the tests pass a `Streamed` as user pointer.
    let (token, streamed) = unsafe { (&*token, &mut *user.cast::<Streamed>()) };
    if token.id != MA_NO_TOKEN {
        streamed.ids.push(token.id);
    }
    // SAFETY: the text has the given length.
    let bytes = unsafe { std::slice::from_raw_parts(token.text.cast::<u8>(), token.length) };
    streamed.text += std::str::from_utf8(bytes).unwrap();
    0
}

/// The greedy continuation of `prompt`, and its statistics.
fn generate(context: *const Context, prompt: &[u32], options: &GenerateOptions) -> (Streamed, Generation) {
    let sampling: SamplingOptions = defaults(ma_sampling_options_greedy);
    let (mut streamed, mut done) = (Streamed::default(), MaybeUninit::uninit());
    // SAFETY: all pointers are valid.
    unsafe {
        let user = (&raw mut streamed).cast();
        let (ids, n) = (prompt.as_ptr(), prompt.len());
        let status = ma_generate(context, ids, n, &raw const sampling, options, Some(listen), user, done.as_mut_ptr());
        assert_eq!(status, Status::Ok, "{}", last_error());
        (streamed, done.assume_init())
    }
}

/// Default options with a limit of tokens.
fn with_max_tokens(max_tokens: usize) -> GenerateOptions {
    GenerateOptions { max_tokens, ..defaults(ma_generate_options_default) }
}

#[test]
fn conversations_are_rendered_with_the_template() {
    let model = built_in();
    let plain = chat(model, HELLO, |_| ()).unwrap();
    assert_eq!(prompt(plain), "user: Hello!\nassistant:");
    let with_tools = chat(model, HELLO, |options| options.tools = TOOLS.as_ptr()).unwrap();
    assert!(prompt(with_tools).starts_with("look_up: <tool_call>"));
    let thinking = chat(model, HELLO, |options| options.variables = c"{\"think\": true}".as_ptr()).unwrap();
    assert_eq!(prompt(thinking), "user: Hello!\nassistant:<think>\n");
    let messages = r#"[{"role": "user", "content": "<s></s>"}, {"role": "assistant", "content": "I"}]"#;
    let begun = chat(model, messages, |options| options.continue_final_message = 1).unwrap();
    assert_eq!(prompt(begun), "user: <s></s>\nassistant: I");
    // The spelling of a control token in a message is encoded as text.
    let ids = tokens(begun);
    assert!(ids[0] == 1 && !ids[1..].contains(&1) && !ids.contains(&2), "{ids:?}");
    let whole = chat(model, HELLO, |options| options.add_generation_prompt = 0).unwrap();
    assert_eq!(prompt(whole), "user: Hello!\n");

    for (messages, expected) in [("[", "messages: EOF"), (r#"[{"role": "pirate"}]"#, "unknown variant `pirate`")] {
        let (status, error) = chat(model, messages, |_| ()).unwrap_err();
        assert!(status == Status::InvalidArgument && error.contains(expected), "{error}");
    }
    let (status, error) = chat(model, HELLO, |options| options.tools = c"[{}]".as_ptr()).unwrap_err();
    assert!(status == Status::InvalidArgument && error.contains("tools: a tool must be"), "{error}");
    let (status, error) = chat(model, HELLO, |options| options.chat_template = c"{% if %}".as_ptr()).unwrap_err();
    assert!(status == Status::InvalidArgument && error.contains("chat template"), "{error}");
    let (status, _) = chat(model, HELLO, |options| options.size -= 8).unwrap_err();
    assert_eq!(status, Status::InvalidArgument);
    // SAFETY: the handles come from the library and are not used afterwards.
    unsafe {
        for chat in [plain, with_tools, thinking, begun, whole] {
            ma_chat_free(chat);
        }
        ma_model_free(model);
    }
}

#[test]
fn answers_are_parsed_into_thoughts_text_and_calls() {
    let model = built_in();
    let context = context(model);
    let with_tools = chat(model, HELLO, |options| options.tools = TOOLS.as_ptr()).unwrap();
    let calls = grammar(model, "tool_call", "", with_tools).unwrap();
    // SAFETY: the out-pointer and the conversation are valid.
    let answer = |chat| new_handle(|answer| unsafe { ma_answer_new(chat, answer) }).unwrap();

    let called = answer(with_tools);
    let options = GenerateOptions { grammar: calls, answer: called, ..with_max_tokens(200) };
    let (streamed, done) = generate(context, &tokens(with_tools), &options);
    let arguments = r#"{ "city" : "Paris" }"#;
    assert_eq!(
        streamed.text,
        format!("<tool_call>\n{{\"name\": \"look_up\", \"arguments\": {arguments}}}\n</tool_call>")
    );
    assert_eq!((done.stop_reason, done.n_generated), (StopReason::EndOfGeneration, streamed.ids.len()));
    let parsed: serde_json::Value = serde_json::from_str(&message(called)).unwrap();
    assert_eq!(parsed["content"], serde_json::Value::Null);
    assert_eq!(parsed["tool_calls"][0]["function"], serde_json::json!({"name": "look_up", "arguments": arguments}));

    // With a grammar other than that of calls the same text is no call.
    let text = streamed.text.replace('"', "\\\"").replace('\n', "\\n");
    let same = grammar(model, "choice", &format!("[\"{text}\"]"), null()).unwrap();
    let plain = answer(with_tools);
    let (again, _) = generate(
        context,
        &tokens(with_tools),
        &GenerateOptions { grammar: same, answer: plain, ..with_max_tokens(200) },
    );
    assert_eq!(again.text, streamed.text);
    let parsed: serde_json::Value = serde_json::from_str(&message(plain)).unwrap();
    assert_eq!(parsed, serde_json::json!({"role": "assistant", "content": streamed.text}));

    // The prompt begins the thoughts; they are separated from the text.
    let thinking = chat(model, HELLO, |options| options.variables = c"{\"think\": true}".as_ptr()).unwrap();
    let thoughts = grammar(model, "choice", r#"["It is hot.\n</think>\n\nYes."]"#, null()).unwrap();
    let thought = answer(thinking);
    generate(
        context,
        &tokens(thinking),
        &GenerateOptions { grammar: thoughts, answer: thought, ..with_max_tokens(100) },
    );
    assert_eq!(message(thought), r#"{"role":"assistant","content":"Yes.","reasoning_content":"It is hot."}"#);

    // An answer can be used for one generation only.
    let sampling: SamplingOptions = defaults(ma_sampling_options_greedy);
    // SAFETY: all pointers are valid, and no handle is used after it was freed.
    unsafe {
        let (once, n) = (ONCE.as_ptr(), ONCE.len());
        let status =
            ma_generate(context, once, n, &raw const sampling, &raw const options, None, null_mut(), null_mut());
        assert!(
            status == Status::InvalidArgument && last_error().contains("make one for each text"),
            "{}",
            last_error()
        );
        for answer in [called, plain, thought] {
            ma_answer_free(answer);
        }
        for grammar in [calls, same, thoughts] {
            ma_grammar_free(grammar);
        }
        for chat in [with_tools, thinking] {
            ma_chat_free(chat);
        }
        ma_context_free(context);
        ma_model_free(model);
    }
}

/// User data of the callback [`end`].
struct Ending {
    context: *const Context,
    /// Tokens until the generation is ended.
    n_tokens: usize,
    /// Whether the callback cancels the context instead of returning 1.
    cancels: bool,
}

/// Ends the generation after a number of tokens.
unsafe extern "C" fn end(_: *const Token, user: *mut c_void) -> i32 {
    // SAFETY: the test passes an `Ending` as user pointer.
    let ending = unsafe { &mut *user.cast::<Ending>() };
    ending.n_tokens -= 1;
    if ending.n_tokens > 0 {
        return 0;
    }
    if ending.cancels {
        // SAFETY: the context is valid.
        unsafe { ma_context_cancel(ending.context) };
    }
    i32::from(!ending.cancels)
}

#[test]
fn truncated_answers_keep_their_text_but_no_open_call() {
    let model = built_in();
    let context = context(model);
    let with_tools = chat(model, HELLO, |options| options.tools = TOOLS.as_ptr()).unwrap();
    let prompt = tokens(with_tools);
    let sampling: SamplingOptions = defaults(ma_sampling_options_greedy);
    // SAFETY: the out-pointer and the conversation are valid.
    let answer = || new_handle(|answer| unsafe { ma_answer_new(with_tools, answer) }).unwrap();
    let generate_to_end = |options: &GenerateOptions, ending: &mut Ending| {
        let (ids, n, user) = (prompt.as_ptr(), prompt.len(), (&raw mut *ending).cast());
        // SAFETY: all pointers are valid.
        unsafe { ma_generate(context, ids, n, &raw const sampling, options, Some(end), user, null_mut()) }
    };

    let calls = grammar(model, "tool_call", "", with_tools).unwrap();
    let (whole, _) = generate(context, &prompt, &GenerateOptions { grammar: calls, ..with_max_tokens(200) });
    let (cut, complete) = (answer(), answer());
    let options = GenerateOptions { grammar: calls, answer: cut, ..with_max_tokens(whole.ids.len() - 16) };
    let (streamed, done) = generate(context, &prompt, &options);
    assert!(streamed.text.contains("\"look_up\", \"arguments\": {"), "{}", streamed.text);
    assert_eq!((done.stop_reason, message(cut)), (StopReason::Length, r#"{"role":"assistant","content":""}"#.into()));
    // A complete call is kept, even if the closing marker is missing.
    let options = GenerateOptions { grammar: calls, answer: complete, ..with_max_tokens(whole.ids.len() - 1) };
    let (_, done) = generate(context, &prompt, &options);
    assert_eq!(done.stop_reason, StopReason::Length);
    assert!(message(complete).contains("look_up"), "{}", message(complete));

    // Text that was held back as the possible beginning of a stop string or call is added at the end.
    let text = grammar(model, "grammar", "root ::= \"Hm. <tool_call!\"", null()).unwrap();
    let (whole, _) = generate(context, &prompt, &GenerateOptions { grammar: text, ..with_max_tokens(100) });
    let stop = [c"Hm. <tool_call!!".as_ptr()];
    let held_back = GenerateOptions { grammar: text, stop: stop.as_ptr(), n_stop: 1, ..with_max_tokens(100) };
    let n_tokens = whole.ids.len() - 1;
    let (stopped, cancelled) = (answer(), answer());
    let mut ending = Ending { context, n_tokens, cancels: false };
    assert_eq!(generate_to_end(&GenerateOptions { answer: stopped, ..held_back }, &mut ending), Status::Ok);
    let expected = r#"{"role":"assistant","content":"Hm. <tool_call"}"#;
    assert_eq!(message(stopped), expected);

    // A failed `ma_generate` does not use up the answer.
    let options = GenerateOptions { answer: cancelled, ..held_back };
    let unknown = 512_u32;
    // SAFETY: all pointers are valid.
    let status = unsafe {
        ma_generate(context, &raw const unknown, 1, null(), &raw const options, None, null_mut(), null_mut())
    };
    assert_eq!(status, Status::InvalidArgument);
    let mut ending = Ending { context, n_tokens, cancels: true };
    assert_eq!(generate_to_end(&options, &mut ending), Status::Cancelled, "{}", last_error());
    assert_eq!(message(cancelled), expected);
    // SAFETY: the handles come from the library and are not used afterwards.
    unsafe {
        for answer in [cut, complete, stopped, cancelled] {
            ma_answer_free(answer);
        }
        for grammar in [calls, text] {
            ma_grammar_free(grammar);
        }
        ma_chat_free(with_tools);
        ma_context_free(context);
        ma_model_free(model);
    }
}

#[test]
fn generated_texts_match_the_grammar() {
    let model = built_in();
    let context = context(model);
    let schema = r#"{"type": "object", "properties": {"name": {"enum": ["Tom", "Lily"]}}, "required": ["name"]}"#;
    for (kind, form, expected) in [
        ("grammar", "root ::= \" a \" pet \".\"\npet ::= \"cat\" | \"dog\"", " a dog."),
        ("grammar", "start: \" a\"", " a"),
        ("regex", " [a-z]{3}", " ind"),
        ("choice", r#"[" blue", " red"]"#, " red"),
        ("json_schema", schema, r#"{ "name" : "Lily" }"#),
    ] {
        let grammar = grammar(model, kind, form, null()).unwrap();
        // A grammar can be used several times.
        for _ in 0..2 {
            let (streamed, done) = generate(context, &ONCE, &GenerateOptions { grammar, ..with_max_tokens(60) });
            assert_eq!((streamed.text.as_str(), done.stop_reason), (expected, StopReason::EndOfGeneration));
        }
        // SAFETY: the handle comes from the library and is not used afterwards.
        unsafe { ma_grammar_free(grammar) };
    }
    let (streamed, _) = generate(context, &ONCE, &with_max_tokens(3));
    assert_eq!(streamed.ids, [432, 383, 286], "a later text has no grammar");

    // A grammar is bound to the vocabulary of its model.
    let other = CString::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-4m-q4_0.gguf")).unwrap();
    // SAFETY: the path ends with a NUL, and the out-pointer is valid.
    let other = new_handle(|model| unsafe { ma_model_open(other.as_ptr(), model) }).unwrap();
    let foreign = grammar(other, "regex", " [a-z]{3}", null()).unwrap();
    let options = GenerateOptions { grammar: foreign, ..with_max_tokens(3) };
    // SAFETY: all pointers are valid.
    let status = unsafe {
        let (once, n) = (ONCE.as_ptr(), ONCE.len());
        ma_generate(context, once, n, null(), &raw const options, None, null_mut(), null_mut())
    };
    let expected = "grammar is for a vocabulary of 4096 tokens, but the model has 512: make one for this model";
    assert_eq!((status, last_error()), (Status::InvalidArgument, expected.to_owned()));

    let unique = grammar(model, "json_schema", r#"{"type": "array", "uniqueItems": true}"#, null()).unwrap();
    // SAFETY: the buffer has the given capacity.
    let left_out = text(|to, capacity, n| unsafe { ma_grammar_left_out(unique, to.cast(), capacity, n) });
    assert!(left_out.contains("uniqueItems"), "{left_out}");
    for (kind, form, expected) in [
        ("xml", "", "kind is \"xml\", but it must be one of"),
        ("regex", "(", "form cannot be followed: the regular expression"),
        ("choice", "[1]", "form: invalid type"),
        ("json_schema", "{", "form: EOF"),
        ("tool_call", "", "kind \"tool_call\" needs tools to call"),
    ] {
        let (status, error) = grammar(model, kind, form, null()).unwrap_err();
        assert!(status == Status::InvalidArgument && error.contains(expected), "{error}");
    }
    // SAFETY: the handles come from the library and are not used afterwards.
    unsafe {
        ma_grammar_free(unique);
        ma_grammar_free(foreign);
        ma_model_free(other);
        ma_context_free(context);
        ma_model_free(model);
    }
}

#[test]
fn stop_ids_end_a_text_after_min_tokens() {
    let model = built_in();
    let context = context(model);
    let stop_ids = [286_u32];
    let stopping =
        |min_tokens| GenerateOptions { stop_ids: stop_ids.as_ptr(), n_stop_ids: 1, min_tokens, ..with_max_tokens(8) };
    for min_tokens in [0, 2] {
        let (streamed, done) = generate(context, &ONCE, &stopping(min_tokens));
        assert_eq!((streamed.ids, done.stop_reason), (vec![432, 383], StopReason::EndOfGeneration));
    }
    let (streamed, _) = generate(context, &ONCE, &stopping(3));
    assert!(streamed.ids[..2] == [432, 383] && streamed.ids[2] != 286, "{streamed:?}");
    let unknown = [512_u32];
    let options = GenerateOptions { stop_ids: unknown.as_ptr(), n_stop_ids: 1, ..with_max_tokens(8) };
    // SAFETY: all pointers are valid, and no handle is used after it was freed.
    unsafe {
        let (once, n) = (ONCE.as_ptr(), ONCE.len());
        let status = ma_generate(context, once, n, null(), &raw const options, None, null_mut(), null_mut());
        assert!(status == Status::InvalidArgument && last_error().contains("token id 512"), "{}", last_error());
        ma_context_free(context);
        ma_model_free(model);
    }
}

/// A batch with `n_parallel` slots.
fn batch(model: *const Model, n_parallel: usize) -> *mut Batch {
    let options = context_options();
    // SAFETY: all pointers are valid.
    new_handle(|batch| unsafe { ma_batch_new(model, &raw const options, n_parallel, batch) }).unwrap()
}

/// Runs a batch of `N` sequences.
fn run<const N: usize>(batch: *const Batch) -> (Status, [BatchResult; N]) {
    let (mut results, mut n) = (MaybeUninit::<[BatchResult; N]>::uninit(), 0);
    // SAFETY: the buffer has `N` results, all of which are written.
    unsafe {
        assert_eq!(ma_batch_run(batch, null_mut(), 0, &raw mut n), Status::BufferTooSmall);
        assert_eq!(n, N, "the sequences stay in the batch");
        let status = ma_batch_run(batch, results.as_mut_ptr().cast(), N, &raw mut n);
        (status, results.assume_init())
    }
}

#[test]
fn sequences_of_a_batch_equal_single_generations() {
    let model = built_in();
    let (context, batch) = (context(model), batch(model, 2));
    let sampling: SamplingOptions = defaults(ma_sampling_options_greedy);
    let regex = grammar(model, "regex", " [a-z]{3}", null()).unwrap();
    let prompts: [&[u32]; 4] = [&ONCE, &[1, 403, 407], &ONCE, &[1, 300]];
    let options = [
        with_max_tokens(12),
        with_max_tokens(20),
        GenerateOptions { grammar: regex, ..with_max_tokens(12) },
        with_max_tokens(0),
    ];
    let mut streamed = [(); 4].map(|()| Streamed::default());
    for (i, ((prompt, options), streamed)) in prompts.iter().zip(&options).zip(&mut streamed).enumerate() {
        let (mut index, user) = (9, (&raw mut *streamed).cast());
        // SAFETY: all pointers are valid until the batch has run.
        let status = unsafe {
            ma_batch_add(
                batch,
                prompt.as_ptr(),
                prompt.len(),
                &raw const sampling,
                options,
                Some(listen),
                user,
                &raw mut index,
            )
        };
        assert_eq!((status, index), (Status::Ok, i), "{}", last_error());
    }
    let (status, results) = run::<4>(batch);
    assert_eq!(status, Status::Ok);
    for i in 0..4 {
        let (alone, done) = generate(context, prompts[i], &options[i]);
        assert_eq!(streamed[i], alone, "sequence {i}");
        let BatchResult { status, generation } = results[i];
        assert_eq!(status, Status::Ok);
        assert_eq!((generation.n_prompt, generation.n_generated), (done.n_prompt, done.n_generated));
        assert_eq!(generation.stop_reason, done.stop_reason);
    }
    // SAFETY: all pointers are valid, and no handle is used after it was freed.
    unsafe {
        assert_eq!(*ma_batch_error(batch, 0), 0);
        let mut n = 9;
        assert_eq!((ma_batch_run(batch, null_mut(), 0, &raw mut n), n), (Status::Ok, 0), "the batch is empty");
        ma_grammar_free(regex);
        ma_batch_free(batch);
        ma_context_free(context);
        ma_model_free(model);
    }
}

/// Ends the generation at the first token.
unsafe extern "C" fn stop(_: *const Token, _: *mut c_void) -> i32 {
    1
}

/// Cancels the batch from its own callback, when further events are waiting.
unsafe extern "C" fn cancel(_: *const Token, batch: *mut c_void) -> i32 {
    std::thread::sleep(Duration::from_millis(200));
    let mut n = 9;
    // SAFETY: the test passes its batch as user pointer.
    unsafe {
        assert_eq!(ma_batch_run(batch.cast(), null_mut(), 0, &raw mut n), Status::Busy);
        ma_batch_cancel(batch.cast());
    }
    0
}

#[test]
fn a_failed_sequence_does_not_affect_the_others() {
    let model = built_in();
    let batch = batch(model, 4);
    let greedy: SamplingOptions = defaults(ma_sampling_options_greedy);
    // The empty grammar allows only EOS, which `min_tokens` forbids.
    let empty = grammar(model, "grammar", "root ::= \"\"", null()).unwrap();
    let (ids, n) = (ONCE.as_ptr(), ONCE.len());
    let forever = GenerateOptions { ignore_eos: 1, ..defaults(ma_generate_options_default) };
    let impossible = GenerateOptions { grammar: empty, min_tokens: 5, ..with_max_tokens(8) };
    let mut streamed = Streamed::default();
    // SAFETY: all pointers are valid until the batch has run.
    unsafe {
        let add = |sampling: &SamplingOptions, options: &GenerateOptions, on_token, user| {
            ma_batch_add(batch, ids, n, sampling, options, on_token, user, null_mut())
        };
        assert_eq!(add(&greedy, &impossible, None, null_mut()), Status::Ok);
        assert_eq!(add(&greedy, &with_max_tokens(3), Some(listen), (&raw mut streamed).cast()), Status::Ok);
        assert_eq!(add(&greedy, &forever, Some(stop), null_mut()), Status::Ok);
        // Invalid sequences are rejected when they are added.
        let hot = SamplingOptions { temperature: -1.0, ..greedy };
        assert_eq!(add(&hot, &with_max_tokens(3), None, null_mut()), Status::InvalidArgument);
        assert_eq!(add(&greedy, &with_max_tokens(0), None, null_mut()), Status::Ok);
        let long = [1_u32; 1000];
        let status = ma_batch_add(batch, long.as_ptr(), 1000, null(), null(), None, null_mut(), null_mut());
        assert_eq!(status, Status::ContextFull);
    }
    let (status, results) = run::<4>(batch);
    assert_eq!(status, Status::Ok);
    let of = |i: usize| (results[i].status, results[i].generation.n_generated, results[i].generation.stop_reason);
    // SAFETY: the batch is valid, and its messages are valid until it runs again.
    let error = |i| unsafe { CStr::from_ptr(ma_batch_error(batch, i)) }.to_str().unwrap().to_owned();
    assert_eq!(of(0).0, Status::Failed);
    assert!(error(0).contains("no token may come next"), "{}", error(0));
    assert_eq!((of(1), streamed.ids.as_slice()), ((Status::Ok, 3, StopReason::Length), &[432, 383, 286][..]));
    assert_eq!(of(2), (Status::Ok, 1, StopReason::Callback));
    assert_eq!(of(3), (Status::Ok, 0, StopReason::Length));
    assert_eq!((error(1), error(9)), (String::new(), String::new()));

    // A cancelled batch reports the tokens so far.
    // SAFETY: as above.
    unsafe {
        let status =
            ma_batch_add(batch, ids, n, &raw const greedy, &raw const forever, Some(cancel), batch.cast(), null_mut());
        assert_eq!(status, Status::Ok);
        let (status, [result]) = run::<1>(batch);
        assert_eq!((status, result.status), (Status::Cancelled, Status::Cancelled));
        assert_eq!(result.generation.n_generated, 1);
        assert_eq!(error(0), "the batch was cancelled");
        ma_grammar_free(empty);
        ma_batch_free(batch);
        ma_model_free(model);
    }
}
