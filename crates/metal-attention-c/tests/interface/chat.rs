//! Conversations, forms and batches through the functions that C calls, on the built-in model.

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

/// As Qwen's models write calls and thoughts.
const TEMPLATE: &CStr =
    c"{%- if tools %}{{ tools[0].function.name }}: <tool_call>{\"name\": ..., \"arguments\": ...}</tool_call>
{% endif %}{%- for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant:{% if think %}<think>
{% endif %}{% endif %}{# </think> #}";
const TOOLS: &CStr =
    c"[{\"type\": \"function\", \"function\": {\"name\": \"look_up\", \"parameters\": {\"type\": \"object\",
    \"properties\": {\"city\": {\"enum\": [\"Rome\", \"Paris\"]}}, \"required\": [\"city\"]}}}]";
const HELLO: &str = r#"[{"role": "user", "content": "Hello!"}]"#;
const ONCE: [u32; 5] = [1, 403, 407, 261, 378];

/// What the last call that failed says.
fn why() -> String {
    // SAFETY: the message of this thread stays until its next call.
    unsafe { CStr::from_ptr(ma_last_error()) }.to_str().unwrap().to_owned()
}

/// A handle that a call writes; an error where the call fails.
fn made<T>(call: impl FnOnce(*mut *mut T) -> Status) -> Result<*mut T, (Status, String)> {
    let mut handle = null_mut();
    match call(&raw mut handle) {
        Status::Ok => Ok(handle),
        failed => Err((failed, why())),
    }
}

/// The text that a call writes to a buffer.
fn text(call: impl Fn(*mut i8, usize, *mut usize) -> Status) -> String {
    let mut n = 0;
    assert_eq!(call(null_mut(), 0, &raw mut n), Status::BufferTooSmall, "{}", why());
    let mut bytes = vec![0u8; n];
    assert_eq!(call(bytes.as_mut_ptr().cast(), n, &raw mut n), Status::Ok, "{}", why());
    String::from_utf8(bytes).unwrap()
}

/// Options as a call sets them.
fn defaults<T>(set: unsafe extern "C" fn(*mut T, usize) -> Status) -> T {
    let mut options = MaybeUninit::uninit();
    // SAFETY: there is room for them, and the call sets them.
    unsafe {
        assert_eq!(set(options.as_mut_ptr(), size_of::<T>()), Status::Ok);
        options.assume_init()
    }
}

fn built_in() -> *mut Model {
    // SAFETY: there is room for the pointer.
    made(|model| unsafe { ma_model_built_in(model) }).unwrap()
}

fn setup() -> ContextOptions {
    ContextOptions { device: c"cpu".as_ptr(), n_threads: 1, ..defaults(ma_context_options_default) }
}

fn context(model: *const Model) -> *mut Context {
    let setup = setup();
    // SAFETY: pointers lead to what they should.
    made(|context| unsafe { ma_context_new(model, &raw const setup, context) }).unwrap()
}

/// A conversation through `TEMPLATE`.
fn chat(
    model: *const Model,
    messages: &str,
    change: impl FnOnce(&mut ChatOptions),
) -> Result<*mut Chat, (Status, String)> {
    let mut options = ChatOptions { chat_template: TEMPLATE.as_ptr(), ..defaults(ma_chat_options_default) };
    change(&mut options);
    // SAFETY: pointers lead to what they should, and the text has so many bytes.
    made(|chat| unsafe { ma_chat_new(model, messages.as_ptr().cast(), messages.len(), &raw const options, chat) })
}

fn grammar(model: *const Model, kind: &str, form: &str, chat: *const Chat) -> Result<*mut Grammar, (Status, String)> {
    let kind = CString::new(kind).unwrap();
    // SAFETY: as above.
    made(|to| unsafe { ma_grammar_new(model, kind.as_ptr(), form.as_ptr().cast(), form.len(), chat, to) })
}

fn prompt(chat: *const Chat) -> String {
    // SAFETY: the buffer has the room that is said.
    text(|to, capacity, n| unsafe { ma_chat_prompt(chat, to.cast(), capacity, n) })
}

fn tokens(chat: *const Chat) -> Vec<u32> {
    let mut n = 0;
    // SAFETY: the buffer has the room that is said.
    unsafe {
        assert_eq!(ma_chat_tokens(chat, null_mut(), 0, &raw mut n), Status::BufferTooSmall);
        let mut ids = vec![0; n];
        assert_eq!(ma_chat_tokens(chat, ids.as_mut_ptr(), n, &raw mut n), Status::Ok);
        ids
    }
}

fn message(answer: *const Answer) -> String {
    // SAFETY: the buffer has the room that is said.
    text(|to, capacity, n| unsafe { ma_answer_message(answer, to.cast(), capacity, n) })
}

/// What was told of a text.
#[derive(Debug, Default, Clone, PartialEq)]
struct Told {
    ids: Vec<u32>,
    text: String,
}

unsafe extern "C" fn listen(token: *const Token, user: *mut c_void) -> i32 {
    // SAFETY: the token is there, and each text is given a `Told`.
    let (token, told) = unsafe { (&*token, &mut *user.cast::<Told>()) };
    if token.id != MA_NO_TOKEN {
        told.ids.push(token.id);
    }
    // SAFETY: the text has so many bytes.
    let bytes = unsafe { std::slice::from_raw_parts(token.text.cast::<u8>(), token.length) };
    told.text += std::str::from_utf8(bytes).unwrap();
    0
}

/// The greedy continuation of `prompt`.
fn generate(context: *const Context, prompt: &[u32], options: &GenerateOptions) -> (Told, Generation) {
    let sampling: SamplingOptions = defaults(ma_sampling_options_greedy);
    let (mut told, mut done) = (Told::default(), MaybeUninit::uninit());
    // SAFETY: pointers lead to what they should.
    unsafe {
        let user = (&raw mut told).cast();
        let (ids, n) = (prompt.as_ptr(), prompt.len());
        let status = ma_generate(context, ids, n, &raw const sampling, options, Some(listen), user, done.as_mut_ptr());
        assert_eq!(status, Status::Ok, "{}", why());
        (told, done.assume_init())
    }
}

fn at_most(max_tokens: usize) -> GenerateOptions {
    GenerateOptions { max_tokens, ..defaults(ma_generate_options_default) }
}

#[test]
fn conversations_go_through_the_template() {
    let model = built_in();
    let plain = chat(model, HELLO, |_| ()).unwrap();
    assert_eq!(prompt(plain), "user: Hello!\nassistant:");
    let with_tools = chat(model, HELLO, |options| options.tools = TOOLS.as_ptr()).unwrap();
    assert!(prompt(with_tools).starts_with("look_up: <tool_call>"));
    let thinking = chat(model, HELLO, |options| options.variables = c"{\"think\": true}".as_ptr()).unwrap();
    assert_eq!(prompt(thinking), "user: Hello!\nassistant:<think>\n");
    let said = r#"[{"role": "user", "content": "<s></s>"}, {"role": "assistant", "content": "I"}]"#;
    let begun = chat(model, said, |options| options.continue_final_message = 1).unwrap();
    assert_eq!(prompt(begun), "user: <s></s>\nassistant: I");
    // The spelling of a control token in a message is text.
    let ids = tokens(begun);
    assert!(ids[0] == 1 && !ids[1..].contains(&1) && !ids.contains(&2), "{ids:?}");
    let whole = chat(model, HELLO, |options| options.add_generation_prompt = 0).unwrap();
    assert_eq!(prompt(whole), "user: Hello!\n");

    for (messages, expected) in [("[", "messages: EOF"), (r#"[{"role": "pirate"}]"#, "unknown variant `pirate`")] {
        let (status, why) = chat(model, messages, |_| ()).unwrap_err();
        assert!(status == Status::InvalidArgument && why.contains(expected), "{why}");
    }
    let (status, why) = chat(model, HELLO, |options| options.tools = c"[{}]".as_ptr()).unwrap_err();
    assert!(status == Status::InvalidArgument && why.contains("tools: a tool must be"), "{why}");
    let (status, why) = chat(model, HELLO, |options| options.chat_template = c"{% if %}".as_ptr()).unwrap_err();
    assert!(status == Status::InvalidArgument && why.contains("chat template"), "{why}");
    let (status, _) = chat(model, HELLO, |options| options.size -= 8).unwrap_err();
    assert_eq!(status, Status::InvalidArgument);
    // SAFETY: they come from the library and are not used any more.
    unsafe {
        for chat in [plain, with_tools, thinking, begun, whole] {
            ma_chat_free(chat);
        }
        ma_model_free(model);
    }
}

#[test]
fn answers_are_taken_apart() {
    let model = built_in();
    let context = context(model);
    let with_tools = chat(model, HELLO, |options| options.tools = TOOLS.as_ptr()).unwrap();
    let calls = grammar(model, "tool_call", "", with_tools).unwrap();
    // SAFETY: there is room for the pointer, and the conversation is there.
    let answer = |chat| made(|answer| unsafe { ma_answer_new(chat, answer) }).unwrap();

    let called = answer(with_tools);
    let options = GenerateOptions { grammar: calls, answer: called, ..at_most(200) };
    let (told, done) = generate(context, &tokens(with_tools), &options);
    let arguments = r#"{ "city" : "Paris" }"#;
    assert_eq!(told.text, format!("<tool_call>\n{{\"name\": \"look_up\", \"arguments\": {arguments}}}\n</tool_call>"));
    assert_eq!((done.stop_reason, done.n_generated), (StopReason::EndOfGeneration, told.ids.len()));
    let parsed: serde_json::Value = serde_json::from_str(&message(called)).unwrap();
    assert_eq!(parsed["content"], serde_json::Value::Null);
    assert_eq!(parsed["tool_calls"][0]["function"], serde_json::json!({"name": "look_up", "arguments": arguments}));

    // A text with a form of its own has no calls.
    let text = told.text.replace('"', "\\\"").replace('\n', "\\n");
    let same = grammar(model, "choice", &format!("[\"{text}\"]"), null()).unwrap();
    let plain = answer(with_tools);
    let (again, _) =
        generate(context, &tokens(with_tools), &GenerateOptions { grammar: same, answer: plain, ..at_most(200) });
    assert_eq!(again.text, told.text);
    let parsed: serde_json::Value = serde_json::from_str(&message(plain)).unwrap();
    assert_eq!(parsed, serde_json::json!({"role": "assistant", "content": told.text}));

    // Thoughts that the prompt has begun come apart.
    let thinking = chat(model, HELLO, |options| options.variables = c"{\"think\": true}".as_ptr()).unwrap();
    let thoughts = grammar(model, "choice", r#"["It is hot.\n</think>\n\nYes."]"#, null()).unwrap();
    let thought = answer(thinking);
    generate(context, &tokens(thinking), &GenerateOptions { grammar: thoughts, answer: thought, ..at_most(100) });
    assert_eq!(message(thought), r#"{"role":"assistant","content":"Yes.","reasoning_content":"It is hot."}"#);

    // One answer is for one text.
    let sampling: SamplingOptions = defaults(ma_sampling_options_greedy);
    // SAFETY: pointers lead to what they should, and are not used after they were freed.
    unsafe {
        let (once, n) = (ONCE.as_ptr(), ONCE.len());
        let status =
            ma_generate(context, once, n, &raw const sampling, &raw const options, None, null_mut(), null_mut());
        assert!(status == Status::InvalidArgument && why().contains("make one for each text"), "{}", why());
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

/// Ends a text in some way after so many tokens.
struct Ending {
    context: *const Context,
    n_tokens: usize,
    cancels: bool,
}

unsafe extern "C" fn end(_: *const Token, user: *mut c_void) -> i32 {
    // SAFETY: the test gives an `Ending`.
    let ending = unsafe { &mut *user.cast::<Ending>() };
    ending.n_tokens -= 1;
    if ending.n_tokens > 0 {
        return 0;
    }
    if ending.cancels {
        // SAFETY: the context is there.
        unsafe { ma_context_cancel(ending.context) };
    }
    i32::from(!ending.cancels)
}

#[test]
fn answers_that_are_cut_off_have_their_text_but_no_open_call() {
    let model = built_in();
    let context = context(model);
    let with_tools = chat(model, HELLO, |options| options.tools = TOOLS.as_ptr()).unwrap();
    let prompt = tokens(with_tools);
    let sampling: SamplingOptions = defaults(ma_sampling_options_greedy);
    // SAFETY: there is room for the pointer, and the conversation is there.
    let answer = || made(|answer| unsafe { ma_answer_new(with_tools, answer) }).unwrap();
    let generate_to_end = |options: &GenerateOptions, ending: &mut Ending| {
        let (ids, n, user) = (prompt.as_ptr(), prompt.len(), (&raw mut *ending).cast());
        // SAFETY: pointers lead to what they should.
        unsafe { ma_generate(context, ids, n, &raw const sampling, options, Some(end), user, null_mut()) }
    };

    let calls = grammar(model, "tool_call", "", with_tools).unwrap();
    let (whole, _) = generate(context, &prompt, &GenerateOptions { grammar: calls, ..at_most(200) });
    let (cut, complete) = (answer(), answer());
    let options = GenerateOptions { grammar: calls, answer: cut, ..at_most(whole.ids.len() - 16) };
    let (told, done) = generate(context, &prompt, &options);
    assert!(told.text.contains("\"look_up\", \"arguments\": {"), "{}", told.text);
    assert_eq!((done.stop_reason, message(cut)), (StopReason::Length, r#"{"role":"assistant","content":""}"#.into()));
    // A call that is complete stays, though the answer does not end with it.
    let options = GenerateOptions { grammar: calls, answer: complete, ..at_most(whole.ids.len() - 1) };
    let (_, done) = generate(context, &prompt, &options);
    assert_eq!(done.stop_reason, StopReason::Length);
    assert!(message(complete).contains("look_up"), "{}", message(complete));

    // What is held back, as it may begin a stop string or a call, belongs to the text.
    let text = grammar(model, "grammar", "root ::= \"Hm. <tool_call!\"", null()).unwrap();
    let (whole, _) = generate(context, &prompt, &GenerateOptions { grammar: text, ..at_most(100) });
    let stop = [c"Hm. <tool_call!!".as_ptr()];
    let held_back = GenerateOptions { grammar: text, stop: stop.as_ptr(), n_stop: 1, ..at_most(100) };
    let n_tokens = whole.ids.len() - 1;
    let (stopped, cancelled) = (answer(), answer());
    let mut ending = Ending { context, n_tokens, cancels: false };
    assert_eq!(generate_to_end(&GenerateOptions { answer: stopped, ..held_back }, &mut ending), Status::Ok);
    let expected = r#"{"role":"assistant","content":"Hm. <tool_call"}"#;
    assert_eq!(message(stopped), expected);

    // A call that never began leaves the answer as it was.
    let options = GenerateOptions { answer: cancelled, ..held_back };
    let unknown = 512_u32;
    // SAFETY: pointers lead to what they should.
    let status = unsafe {
        ma_generate(context, &raw const unknown, 1, null(), &raw const options, None, null_mut(), null_mut())
    };
    assert_eq!(status, Status::InvalidArgument);
    let mut ending = Ending { context, n_tokens, cancels: true };
    assert_eq!(generate_to_end(&options, &mut ending), Status::Cancelled, "{}", why());
    assert_eq!(message(cancelled), expected);
    // SAFETY: they come from the library and are not used any more.
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
fn texts_have_their_form() {
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
        // One serves any number of texts.
        for _ in 0..2 {
            let (told, done) = generate(context, &ONCE, &GenerateOptions { grammar, ..at_most(60) });
            assert_eq!((told.text.as_str(), done.stop_reason), (expected, StopReason::EndOfGeneration));
        }
        // SAFETY: it comes from the library and is not used any more.
        unsafe { ma_grammar_free(grammar) };
    }
    let (told, _) = generate(context, &ONCE, &at_most(3));
    assert_eq!(told.ids, [432, 383, 286], "a later text has no form");

    // A grammar is for the vocabulary of its model.
    let other = CString::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-4m-q4_0.gguf")).unwrap();
    // SAFETY: the path ends with a NUL, and there is room for the pointer.
    let other = made(|model| unsafe { ma_model_open(other.as_ptr(), model) }).unwrap();
    let foreign = grammar(other, "regex", " [a-z]{3}", null()).unwrap();
    let options = GenerateOptions { grammar: foreign, ..at_most(3) };
    // SAFETY: pointers lead to what they should.
    let status = unsafe {
        let (once, n) = (ONCE.as_ptr(), ONCE.len());
        ma_generate(context, once, n, null(), &raw const options, None, null_mut(), null_mut())
    };
    let expected = "grammar is for a vocabulary of 4096 tokens, but the model has 512: make one for this model";
    assert_eq!((status, why()), (Status::InvalidArgument, expected.to_owned()));

    let unique = grammar(model, "json_schema", r#"{"type": "array", "uniqueItems": true}"#, null()).unwrap();
    // SAFETY: the buffer has the room that is said.
    let left_out = text(|to, capacity, n| unsafe { ma_grammar_left_out(unique, to.cast(), capacity, n) });
    assert!(left_out.contains("uniqueItems"), "{left_out}");
    for (kind, form, expected) in [
        ("xml", "", "kind is \"xml\", but it must be one of"),
        ("regex", "(", "form cannot be followed: the regular expression"),
        ("choice", "[1]", "form: invalid type"),
        ("json_schema", "{", "form: EOF"),
        ("tool_call", "", "kind \"tool_call\" needs tools to call"),
    ] {
        let (status, why) = grammar(model, kind, form, null()).unwrap_err();
        assert!(status == Status::InvalidArgument && why.contains(expected), "{why}");
    }
    // SAFETY: they come from the library and are not used any more.
    unsafe {
        ma_grammar_free(unique);
        ma_grammar_free(foreign);
        ma_model_free(other);
        ma_context_free(context);
        ma_model_free(model);
    }
}

#[test]
fn stop_ids_end_a_text_once_it_has_its_least_tokens() {
    let model = built_in();
    let context = context(model);
    let stop_ids = [286_u32];
    let stopping =
        |min_tokens| GenerateOptions { stop_ids: stop_ids.as_ptr(), n_stop_ids: 1, min_tokens, ..at_most(8) };
    for min_tokens in [0, 2] {
        let (told, done) = generate(context, &ONCE, &stopping(min_tokens));
        assert_eq!((told.ids, done.stop_reason), (vec![432, 383], StopReason::EndOfGeneration));
    }
    let (told, _) = generate(context, &ONCE, &stopping(3));
    assert!(told.ids[..2] == [432, 383] && told.ids[2] != 286, "{told:?}");
    let unknown = [512_u32];
    let options = GenerateOptions { stop_ids: unknown.as_ptr(), n_stop_ids: 1, ..at_most(8) };
    // SAFETY: pointers lead to what they should, and are not used after they were freed.
    unsafe {
        let (once, n) = (ONCE.as_ptr(), ONCE.len());
        let status = ma_generate(context, once, n, null(), &raw const options, None, null_mut(), null_mut());
        assert!(status == Status::InvalidArgument && why().contains("token id 512"), "{}", why());
        ma_context_free(context);
        ma_model_free(model);
    }
}

/// A batch of `n_parallel` texts at once.
fn batch(model: *const Model, n_parallel: usize) -> *mut Batch {
    let setup = setup();
    // SAFETY: pointers lead to what they should.
    made(|batch| unsafe { ma_batch_new(model, &raw const setup, n_parallel, batch) }).unwrap()
}

/// Runs a batch of `N` texts.
fn run<const N: usize>(batch: *const Batch) -> (Status, [BatchResult; N]) {
    let (mut results, mut n) = (MaybeUninit::<[BatchResult; N]>::uninit(), 0);
    // SAFETY: there is room for the results, all of which are written.
    unsafe {
        assert_eq!(ma_batch_run(batch, null_mut(), 0, &raw mut n), Status::BufferTooSmall);
        assert_eq!(n, N, "the texts stay");
        let status = ma_batch_run(batch, results.as_mut_ptr().cast(), N, &raw mut n);
        (status, results.assume_init())
    }
}

#[test]
fn texts_of_a_batch_are_those_that_each_gets_alone() {
    let model = built_in();
    let (context, batch) = (context(model), batch(model, 2));
    let sampling: SamplingOptions = defaults(ma_sampling_options_greedy);
    let regex = grammar(model, "regex", " [a-z]{3}", null()).unwrap();
    let prompts: [&[u32]; 4] = [&ONCE, &[1, 403, 407], &ONCE, &[1, 300]];
    let options = [at_most(12), at_most(20), GenerateOptions { grammar: regex, ..at_most(12) }, at_most(0)];
    let mut told = [(); 4].map(|()| Told::default());
    for (i, ((prompt, options), told)) in prompts.iter().zip(&options).zip(&mut told).enumerate() {
        let (mut index, user) = (9, (&raw mut *told).cast());
        // SAFETY: pointers lead to what they should, and stay until the batch has run.
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
        assert_eq!((status, index), (Status::Ok, i), "{}", why());
    }
    let (status, results) = run::<4>(batch);
    assert_eq!(status, Status::Ok);
    for i in 0..4 {
        let (alone, done) = generate(context, prompts[i], &options[i]);
        assert_eq!(told[i], alone, "text {i}");
        let BatchResult { status, generation } = results[i];
        assert_eq!(status, Status::Ok);
        assert_eq!((generation.n_prompt, generation.n_generated), (done.n_prompt, done.n_generated));
        assert_eq!(generation.stop_reason, done.stop_reason);
    }
    // SAFETY: pointers lead to what they should, and are not used after they were freed.
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

unsafe extern "C" fn stop(_: *const Token, _: *mut c_void) -> i32 {
    1
}

/// Cancels the batch that it is called by once there are more events.
unsafe extern "C" fn cancel(_: *const Token, batch: *mut c_void) -> i32 {
    std::thread::sleep(Duration::from_millis(200));
    let mut n = 9;
    // SAFETY: the test gives its batch.
    unsafe {
        assert_eq!(ma_batch_run(batch.cast(), null_mut(), 0, &raw mut n), Status::Busy);
        ma_batch_cancel(batch.cast());
    }
    0
}

#[test]
fn a_text_of_a_batch_that_fails_holds_no_other_up() {
    let model = built_in();
    let batch = batch(model, 4);
    let greedy: SamplingOptions = defaults(ma_sampling_options_greedy);
    // Nothing may come but an end, and no end may come.
    let empty = grammar(model, "grammar", "root ::= \"\"", null()).unwrap();
    let (ids, n) = (ONCE.as_ptr(), ONCE.len());
    let forever = GenerateOptions { ignore_eos: 1, ..defaults(ma_generate_options_default) };
    let impossible = GenerateOptions { grammar: empty, min_tokens: 5, ..at_most(8) };
    let mut told = Told::default();
    // SAFETY: pointers lead to what they should, and stay until the batch has run.
    unsafe {
        let add = |sampling: &SamplingOptions, options: &GenerateOptions, on_token, user| {
            ma_batch_add(batch, ids, n, sampling, options, on_token, user, null_mut())
        };
        assert_eq!(add(&greedy, &impossible, None, null_mut()), Status::Ok);
        assert_eq!(add(&greedy, &at_most(3), Some(listen), (&raw mut told).cast()), Status::Ok);
        assert_eq!(add(&greedy, &forever, Some(stop), null_mut()), Status::Ok);
        // What cannot be is refused at once.
        let hot = SamplingOptions { temperature: -1.0, ..greedy };
        assert_eq!(add(&hot, &at_most(3), None, null_mut()), Status::InvalidArgument);
        assert_eq!(add(&greedy, &at_most(0), None, null_mut()), Status::Ok);
        let long = [1_u32; 1000];
        let status = ma_batch_add(batch, long.as_ptr(), 1000, null(), null(), None, null_mut(), null_mut());
        assert_eq!(status, Status::ContextFull);
    }
    let (status, results) = run::<4>(batch);
    assert_eq!(status, Status::Ok);
    let of = |i: usize| (results[i].status, results[i].generation.n_generated, results[i].generation.stop_reason);
    // SAFETY: the batch is there, and its message stays until it runs again.
    let error = |i| unsafe { CStr::from_ptr(ma_batch_error(batch, i)) }.to_str().unwrap().to_owned();
    assert_eq!(of(0).0, Status::Failed);
    assert!(error(0).contains("no token may come next"), "{}", error(0));
    assert_eq!((of(1), told.ids.as_slice()), ((Status::Ok, 3, StopReason::Length), &[432, 383, 286][..]));
    assert_eq!(of(2), (Status::Ok, 1, StopReason::Callback));
    assert_eq!(of(3), (Status::Ok, 0, StopReason::Length));
    assert_eq!((error(1), error(9)), (String::new(), String::new()));

    // A batch that is cancelled says what it had.
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
