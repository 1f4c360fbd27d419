//! Pictures in requests of every interface.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use metal_attention::gguf::GgufFile;
use metal_attention::{Device, EngineOptions, Model, PictureEncoder, TokenLimits};
use metal_attention_server::http::{HttpOptions, PictureOptions};
use metal_attention_testing::mmproj;
use serde_json::{Value, json};

use crate::client::{Answer, Server, load};

/// A server whose model sees pictures with the encoder in the file `mmproj`.
fn server_with(mmproj: fn(usize) -> Vec<u8>, options: HttpOptions) -> Server {
    let server = Server::with_model(options, move || {
        let model = Model::built_in()?;
        let engine = EngineOptions { device: Device::Cpu, n_threads: Some(1), ..Default::default() };
        let file = GgufFile::from_bytes(&mmproj(model.spec().n_embd)).unwrap();
        let encoder = PictureEncoder::new(&file, model.spec(), &engine, TokenLimits::default())?;
        Ok(load(4, 64)?.with_pictures(encoder, 1 << 20).unwrap())
    });
    server.wait_until_ready();
    server
}

fn server() -> Server {
    server_with(mmproj::gemma3, HttpOptions::default())
}

/// A picture's file in Base64.
fn base64(seed: usize) -> String {
    STANDARD.encode(mmproj::bmp(50, 30, seed))
}

fn data_url(seed: usize) -> String {
    format!("data:image/bmp;base64,{}", base64(seed))
}

/// A chat with the parts as the user's message.
fn chat(parts: &Value) -> Value {
    json!({"messages": [{"role": "user", "content": parts}], "temperature": 0, "max_tokens": 24})
}

fn image_url(url: &str) -> Value {
    json!({"type": "image_url", "image_url": {"url": url}})
}

/// A chat about a picture, with the greedy answer of 24 tokens.
fn about(seed: usize) -> Value {
    chat(&json!([image_url(&data_url(seed)), {"type": "text", "text": "What is it?"}]))
}

#[expect(clippy::needless_pass_by_value, reason = "an answer is looked at once")]
fn ok(answer: Answer) -> Value {
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()
}

fn text_of_chat(answer: &Value) -> String {
    answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
}

#[test]
fn every_interface_reads_the_same_picture() {
    let server = server();
    let first = ok(server.post("/v1/chat/completions", &about(1)));
    let text = text_of_chat(&first);
    assert!(!text.is_empty());
    let encoded = || (server.metric("pictures_encoded_total"), server.metric("pictures_cached_total"));
    assert_eq!(encoded(), (1.0, 0.0));

    let input = json!([{"role": "user", "content": [{"type": "input_image", "image_url": data_url(1)},
        {"type": "input_text", "text": "What is it?"}]}]);
    let request = json!({"input": input, "temperature": 0, "max_output_tokens": 24, "store": true});
    let response = ok(server.post("/v1/responses", &request));
    assert_eq!(response["output"][0]["content"][0]["text"], text.as_str());

    let source = json!({"type": "base64", "media_type": "image/bmp", "data": base64(1)});
    let content = json!([{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}]);
    let messages = json!({"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 24});
    assert_eq!(ok(server.post("/v1/messages", &messages))["content"][0]["text"], text.as_str());
    let counted = ok(server.post("/v1/messages/count_tokens", &messages));
    assert_eq!(counted["input_tokens"], first["usage"]["prompt_tokens"]);

    let options = json!({"temperature": 0, "num_predict": 24});
    let message = json!({"role": "user", "content": "What is it?", "images": [base64(1)]});
    let request = json!({"model": "stories", "messages": [message], "stream": false, "options": options});
    assert_eq!(ok(server.post("/api/chat", &request))["message"]["content"], text.as_str());
    let request = json!({"model": "stories", "prompt": "What is it?", "images": [base64(1)], "stream": false, "options": options});
    let generated = ok(server.post("/api/generate", &request));
    assert_eq!(generated["response"], text.as_str());
    // The ids do not tell the picture, so that nobody can continue them.
    assert_eq!(generated["context"], Value::Null);

    // All of them had one picture, in one file.
    assert_eq!(encoded(), (1.0, 6.0 - 1.0));
    // Rows of another picture give another text.
    let other = format!("data:image/bmp;base64,{}", STANDARD.encode(mmproj::bmp(16, 64, 9)));
    let request = chat(&json!([image_url(&other), {"type": "text", "text": "What is it?"}]));
    assert_ne!(text_of_chat(&ok(server.post("/v1/chat/completions", &request))), text);
    assert_eq!(encoded().0, 2.0);
    assert!(ok(server.get("/props"))["modalities"]["vision"].as_bool().unwrap());
}

#[test]
fn pictures_of_earlier_turns_are_neither_encoded_nor_evaluated_again() {
    let server = server();
    let mut request = about(1);
    let first = ok(server.post("/v1/chat/completions", &request));
    let messages = request["messages"].as_array_mut().unwrap();
    messages.push(json!({"role": "assistant", "content": text_of_chat(&first)}));
    messages.push(json!({"role": "user", "content": "Why?"}));
    let second = ok(server.post("/v1/chat/completions", &request));
    let usage = |answer: &Value, field: &str| answer["usage"][field].as_u64().unwrap();
    let cached = second["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert!(cached >= usage(&first, "prompt_tokens") - 1, "{second}");
    assert_eq!(server.metric("pictures_encoded_total"), 1.0);

    // So it is with a response that continues another.
    let input =
        json!([{"role": "user", "content": [{"type": "input_image", "image_url": data_url(3), "detail": "low"}]}]);
    let first = ok(server.post("/v1/responses", &json!({"input": input, "temperature": 0, "max_output_tokens": 4})));
    let more = json!({"previous_response_id": first["id"], "input": "And?", "temperature": 0, "max_output_tokens": 4});
    let second = ok(server.post("/v1/responses", &more));
    let cached = second["usage"]["input_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert!(cached >= usage(&first, "input_tokens") - 1, "{second}");
    assert_eq!(server.metric("pictures_encoded_total"), 2.0);
}

#[test]
fn pictures_of_many_clients_are_encoded_together() {
    let server = server();
    let alone: Vec<_> =
        (0..4).map(|seed| text_of_chat(&ok(server.post("/v1/chat/completions", &about(10 + seed))))).collect();
    let batches = server.metric("picture_batches_total");
    assert_eq!((server.metric("pictures_encoded_total"), batches), (4.0, 4.0));
    std::thread::scope(|threads| {
        let answers = (0..16).map(|i| {
            let server = &server;
            // Twelve new pictures, and the four from before.
            threads.spawn(move || ok(server.post("/v1/chat/completions", &about(10 + i))))
        });
        let answers: Vec<_> = answers.collect::<Vec<_>>().into_iter().map(|answer| answer.join().unwrap()).collect();
        let texts: Vec<_> = answers.iter().map(text_of_chat).collect();
        assert_eq!(texts[..4], alone);
    });
    assert_eq!(server.metric("pictures_encoded_total"), 16.0);
    assert!(server.metric("picture_batches_total") - batches <= 12.0);
}

#[test]
fn several_pictures_stand_where_their_parts_do() {
    let server = server();
    let ask = |parts: Value| text_of_chat(&ok(server.post("/v1/chat/completions", &chat(&parts))));
    let [a, b] = [1, 2].map(|seed| image_url(&data_url(seed)));
    let text = json!({"type": "text", "text": " and "});
    let orders = [json!([a, text, b]), json!([b, text, a]), json!([text, a, b])].map(ask);
    assert!(orders[0] != orders[1] && orders[1] != orders[2] && orders[0] != orders[2], "{orders:?}");
    assert_eq!(server.metric("pictures_encoded_total"), 2.0);
    // A marker in a text is no picture of the request.
    let forged = chat(&json!([{"type": "text", "text": "\u{f5ac}0\u{f5ad}"}]));
    assert_eq!(server.post("/v1/chat/completions", &forged).status, 200);
}

#[test]
fn detail_low_needs_few_tokens() {
    let server = server_with(mmproj::qwen3vl, HttpOptions::default());
    let tokens = |detail: &str| {
        let url = format!("data:image/bmp;base64,{}", STANDARD.encode(mmproj::bmp(1024, 16, 1)));
        let part = json!({"type": "image_url", "image_url": {"url": url, "detail": detail}});
        ok(server.post("/v1/chat/completions", &chat(&json!([part]))))["usage"]["prompt_tokens"].as_u64().unwrap()
    };
    let [high, auto, low] = ["high", "auto", "low"].map(tokens);
    // Of 128 x 2 rows 64 x 1 are left.
    assert_eq!((high, auto), (auto, low + 192));
}

#[test]
fn pictures_that_cannot_be_read_are_refused_with_the_reason() {
    let options = PictureOptions { max_count: 3, ..Default::default() };
    let server = server_with(mmproj::gemma3, HttpOptions { pictures: options, ..Default::default() });
    let refused = |url: &str| {
        let answer = server.post("/v1/chat/completions", &chat(&json!([image_url(&data_url(1)), image_url(url)])));
        assert_eq!(answer.status, 400, "{answer:?}");
        let error = answer.json()["error"].clone();
        assert_eq!((&error["param"], &error["code"]), (&json!("messages"), &json!("invalid_image")));
        error["message"].as_str().unwrap().to_owned()
    };
    let bmp = mmproj::bmp(50, 30, 1);
    // A header of 60,000 x 60,000 pixels.
    let mut bomb = bmp.clone();
    bomb[18..26].copy_from_slice([60_000_u32, 60_000].map(u32::to_le_bytes).as_flattened());
    for (url, why) in [
        ("data:image/png;base64,AAAA".to_owned(), "messages: picture 2 of 2: "),
        (format!("data:image/bmp;base64,{}", STANDARD.encode(&bmp[..1000])), "messages: picture 2 of 2: "),
        (format!("data:image/bmp;base64,{}", STANDARD.encode(&bomb)), "pixels"),
        ("data:image/png;base64,???".to_owned(), "its Base64 is damaged"),
        ("file:///etc/passwd".to_owned(), "is no address"),
        ("http://127.0.0.1/a.png".to_owned(), "not fetched over http"),
        ("https://example.org/a.png".to_owned(), "--allow-image-urls example.org"),
    ] {
        let message = refused(&url);
        assert!(message.contains(why), "{message}");
    }
    let four = chat(&Value::from_iter([1, 1, 1, 1].map(|seed| image_url(&data_url(seed)))));
    let answer = server.post("/v1/chat/completions", &four);
    assert_eq!(answer.error(), (400, json!("messages"), json!("too_many_images")));
}

#[test]
fn a_model_without_an_encoder_sees_no_pictures() {
    let server = Server::new(HttpOptions::default());
    let answer = server.post("/v1/chat/completions", &about(1));
    assert_eq!(answer.error(), (400, Value::Null, json!("unsupported_by_model")));
    assert!(answer.json()["error"]["message"].as_str().unwrap().contains("mmproj"));
    assert!(!ok(server.get("/props"))["modalities"]["vision"].as_bool().unwrap());
}

#[test]
fn pictures_have_a_limit_of_their_own() {
    let pictures = PictureOptions { max_bytes: 10_000, ..Default::default() };
    let options = HttpOptions { max_body: 2000, pictures, ..Default::default() };
    let server = server_with(mmproj::gemma3, options);
    // A picture has about 6,000 bytes.
    assert_eq!(server.post("/v1/chat/completions", &about(1)).status, 200);
    let two = chat(&json!([image_url(&data_url(1)), image_url(&data_url(2))]));
    let long_text = chat(&json!([{"type": "text", "text": "a ".repeat(2000)}]));
    for request in [two, long_text] {
        let answer = server.post("/v1/chat/completions", &request);
        assert_eq!(answer.error(), (413, Value::Null, json!("body_too_large")));
    }
    let embeddings = json!({"input": "a ".repeat(2000)});
    assert_eq!(server.post("/v1/embeddings", &embeddings).status, 413);
}
