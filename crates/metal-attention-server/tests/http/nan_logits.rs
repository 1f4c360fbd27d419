//! NaN logits: a request that leads to them fails with an error; other requests are not affected.

use metal_attention::gguf::{GgufFile, GgufWriter, TensorDecl};
use metal_attention::{BUILT_IN_MODEL, Model, ModelOptions};
use metal_attention_server::http::HttpOptions;
use serde_json::{Value, json};

use crate::client::{Server, load_model};
use crate::completion;

/// A token whose embedding is NaN.
const DAMAGED: u32 = 400;

/// The built-in model with NaN in the embedding of the token [`DAMAGED`]. The output matrix, which was tied to the
/// embedding, keeps the original values, so that the token can be sampled.
fn damaged() -> Model {
    let file = GgufFile::from_bytes(BUILT_IN_MODEL).unwrap();
    let embedding = file.tensor("token_embd.weight").unwrap();
    let head = TensorDecl { name: "output.weight".into(), ..embedding.into() };
    let tensors: Vec<TensorDecl> = file.tensors().iter().map(TensorDecl::from).chain([head]).collect();
    let mut writer = GgufWriter::new(Vec::new(), 3, file.metadata(), &tensors).unwrap();
    for tensor in file.tensors() {
        let mut bytes = tensor.bytes().to_vec();
        if tensor.name() == embedding.name() {
            let row = tensor.ty().row_bytes(tensor.row_len());
            let damaged_row = &mut bytes[DAMAGED as usize * row..][..row];
            damaged_row.chunks_exact_mut(4).for_each(|number| number.copy_from_slice(&f32::NAN.to_le_bytes()));
        }
        writer.write(&bytes).unwrap();
    }
    writer.write(embedding.bytes()).unwrap();
    let file = GgufFile::from_bytes(&writer.finish().unwrap()).unwrap();
    Model::from_gguf(file, &ModelOptions::default()).unwrap()
}

#[test]
fn only_the_request_with_nan_logits_fails() {
    let server = Server::with_model(HttpOptions::default(), || load_model(damaged(), 4, 64));
    server.wait_until_ready();
    let error = (500, Value::Null, json!("model_gave_no_numbers"));
    // Longer than a KV page; other sequences reuse the page afterwards.
    let long = |last: u32| [vec![1], vec![50; 70], vec![last]].concat();
    let good = || server.post("/v1/completions", &completion(&json!({"prompt": long(60), "max_tokens": 70}))).json();
    let before = good()["choices"][0]["text"].clone();
    for (prompt, temperature) in [(vec![1, DAMAGED], 0), (vec![1, DAMAGED], 1), (long(DAMAGED), 0)] {
        let request = completion(&json!({"prompt": prompt, "temperature": temperature}));
        assert_eq!(server.post("/v1/completions", &request).error(), error);
        assert_eq!(good()["choices"][0]["text"], before);
    }
    // The damaged token is sampled and sent; the next decode step fails.
    let bias = completion(&json!({"prompt": [1, 50], "logit_bias": {"400": 100}, "stream": true}));
    let events: Vec<String> = server.stream("/v1/completions", &bias).collect();
    assert!(events.len() >= 2 && events.last().is_some_and(|event| event == "[DONE]"), "{events:?}");
    let failed: Value = serde_json::from_str(&events[events.len() - 2]).unwrap();
    assert_eq!(failed["error"]["code"], "model_gave_no_numbers");
    let bias = json!({"input": "Hello", "logit_bias": {"400": 100}, "stream": true});
    let events = server.stream("/v1/responses", &bias).map(|event| serde_json::from_str(&event).unwrap());
    let events: Vec<Value> = events.collect();
    let [.., error_event, failed] = events.as_slice() else { panic!("{events:?}") };
    assert_eq!((&error_event["type"], &error_event["code"]), (&json!("error"), &json!("server_error")));
    assert_eq!((&failed["type"], &failed["response"]["status"]), (&json!("response.failed"), &json!("failed")));
    assert_eq!(failed["response"]["error"], json!({"code": "server_error", "message": error_event["message"]}));
    assert_eq!(failed["sequence_number"], events.len() - 1);
    for input in [vec![1, DAMAGED], long(DAMAGED)] {
        assert_eq!(server.post("/v1/embeddings", &json!({"input": input})).error(), error);
    }
    assert_eq!(server.post("/v1/embeddings", &json!({"input": [1, 50]})).status, 200);
    assert_eq!(good()["choices"][0]["text"], before);
}
