//! Fuzz target of the HTTP server. Any bytes are sent as the body of an endpoint, or as the whole stream of a connection. The
//! server must not panic; every request gets a response, and an error response has a message.
#![no_main]

use libfuzzer_sys::fuzz_target;
use metal_attention_fuzz::{ask, send};

/// Endpoints with a request body.
const ENDPOINTS: [&str; 6] =
    ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/detokenize", "/v1/rerank"];

fuzz_target!(|data: &[u8]| {
    // The first byte selects an endpoint (a, b, c, ...) or, with any other value, a raw connection. Letters keep seeds
    // readable.
    let [choice, rest @ ..] = data else { return };
    match ENDPOINTS.get(usize::from(choice.wrapping_sub(b'a'))) {
        Some(path) => ask("POST", path, rest).check(),
        None => send(rest),
    }
});
