//! Requests to the server: any bytes as the body of each endpoint, or as all that a connection carries. Nothing panics,
//! every request is answered, and a refusal says why.
#![no_main]

use libfuzzer_sys::fuzz_target;
use metal_attention_fuzz::{ask, send};

/// The endpoints that take a body.
const ENDPOINTS: [&str; 6] =
    ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/detokenize", "/v1/rerank"];

fuzz_target!(|data: &[u8]| {
    // The first byte is a letter, so that inputs are texts: a, b, c, ... for the endpoints, any other for a connection.
    let [choice, rest @ ..] = data else { return };
    match ENDPOINTS.get(usize::from(choice.wrapping_sub(b'a'))) {
        Some(path) => ask("POST", path, rest).check(),
        None => send(rest),
    }
});
