//! Fields of completions and chats with the names and values of other servers (vLLM, llama.cpp): limits, samplers, stop
//! tokens, log probabilities of prompts, infilling (`suffix`, `/infill`), dimensions of embeddings.

use std::collections::BTreeSet;

use metal_attention::Model;
use metal_attention::tokenizer::EncodeOptions;
use metal_attention_server::http::HttpOptions;
use serde_json::{Value, json};

use crate::client::{Answer, Server, load_model};
use crate::support::{log_probabilities, with_metadata};
use crate::{PROMPT, STORY, chat, completion, server};

/// The response to a completion with further fields `more`.
#[expect(clippy::needless_pass_by_value, reason = "`json!` gives it by value")]
fn complete(server: &Server, more: Value) -> Value {
    let answer = server.post("/v1/completions", &completion(&more));
    assert_eq!(answer.status, 200, "{more}: {answer:?}");
    answer.json()
}

fn text(server: &Server, more: Value) -> String {
    complete(server, more)["choices"][0]["text"].as_str().unwrap().to_owned()
}

fn header<'a>(answer: &'a Answer, name: &str) -> Option<&'a str> {
    answer.headers.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
}

#[test]
fn negative_seeds_are_random() {
    let server = server();
    let varied = json!({"temperature": 1.9, "min_p": 0, "top_p": 1, "top_k": 0, "max_tokens": 24});
    let texts = |path: &str, body: &dyn Fn(&Value) -> Value, field: &str, seed: i64| {
        let mut more = varied.clone();
        more[field] = json!(seed);
        (0..5).map(|_| server.post(path, &body(&more)).json()["choices"].to_string()).collect::<BTreeSet<_>>().len()
    };
    for seed in [-1, -2, i64::MIN] {
        assert!(texts("/v1/completions", &completion, "seed", seed) > 1);
        assert!(texts("/v1/chat/completions", &chat, "seed", seed) > 1);
    }
    for field in ["seed", "random_seed", "sampler_seed"] {
        assert_eq!(texts("/v1/completions", &completion, field, 7), 1, "{field}");
    }
}

#[test]
fn max_tokens_has_aliases_and_minus_one_is_no_limit() {
    let server = server();
    for field in
        ["max_tokens", "max_completion_tokens", "n_predict", "num_predict", "max_new_tokens", "max_output_tokens"]
    {
        let request = |n: i64, more: Value| {
            let mut request = json!({"prompt": PROMPT, "temperature": 0, field: n});
            request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            request
        };
        let answer = server.post("/v1/completions", &request(3, json!({}))).json();
        assert_eq!(answer["usage"]["completion_tokens"], 3, "{field}");
        // Without a limit the text ends at a stop string, EOS or the end of the context.
        let answer = server.post("/v1/completions", &request(-1, json!({"stop": " girl"}))).json();
        assert_eq!(answer["choices"][0]["text"], ", there was a little", "{field}");
        let answer = server.post("/v1/completions", &request(-1, json!({"ignore_eos": true}))).json();
        assert_eq!(answer["usage"]["completion_tokens"], 512 - 5 + 1, "{field}");
    }
    let body = json!({"messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 2, "max_tokens": 5});
    assert_eq!(server.post("/v1/chat/completions", &body).json()["usage"]["completion_tokens"], 2);
}

#[test]
fn stop_strings_have_a_limit_in_total() {
    let server = server();
    let stop = |n: usize, bytes: usize| {
        let stop: Vec<String> = (0..n).map(|i| format!("{i:0bytes$}")).collect();
        server.post("/v1/completions", &completion(&json!({"stop": stop})))
    };
    assert_eq!(stop(32, 512).json()["choices"][0]["text"], STORY);
    for (n, bytes) in [(33, 2), (32, 513), (1, 1025)] {
        assert_eq!(stop(n, bytes).error().0, 400, "{n} {bytes}");
    }
}

#[test]
fn stop_token_ids_and_min_tokens_apply() {
    let server = server();
    let tokenizer = Model::built_in().unwrap().tokenizer().unwrap();
    let there = *tokenizer.encode("a there", EncodeOptions::default()).last().unwrap();
    let answer = complete(&server, json!({"stop_token_ids": [there], "max_tokens": 20}));
    assert_eq!((&answer["choices"][0]["text"], &answer["choices"][0]["finish_reason"]), (&json!(","), &json!("stop")));
    for field in ["min_tokens", "min_new_tokens"] {
        let answer = complete(&server, json!({"stop_token_ids": [there], "max_tokens": 8, field: 8}));
        assert_eq!(answer["usage"]["completion_tokens"], 8, "{field}");
    }
    let error = |ids: Vec<u32>| server.post("/v1/completions", &completion(&json!({"stop_token_ids": ids}))).error();
    assert_eq!(error(vec![512]), (400, json!("stop_token_ids"), Value::Null));
    assert_eq!(error(vec![1; 65]), (400, json!("stop_token_ids"), Value::Null));
}

#[test]
fn requests_choose_samplers() {
    let server = server();
    let hot = |more: Value| {
        let mut body = json!({"temperature": 5.5, "seed": 1, "min_p": 0, "top_p": 1, "top_k": -1});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        text(&server, body)
    };
    assert_ne!(hot(json!({})), STORY);
    // Each of these leaves only the most likely token.
    for more in [
        json!({"top_k": 1}),
        json!({"top_k": 1.0, "samplers": ["temp", "top_k"]}),
        json!({"top_k": 1, "samplers": "kt"}),
        json!({"top_p": 0}),
        json!({"samplers": ["top_n_sigma"], "top_n_sigma": 0.001}),
        json!({"samplers": "min_p", "min_p": 1}),
    ] {
        assert_eq!(hot(more.clone()), STORY, "{more}");
    }
    assert_ne!(hot(json!({"top_p": 0, "min_keep": 400})), STORY);
    assert_ne!(hot(json!({"top_k": 1, "samplers": ["temperature"]})), STORY);
    // XTC removes the more likely one of two tokens above its threshold.
    assert_ne!(hot(json!({"top_k": 2, "xtc_probability": 1, "xtc_threshold": 0})), STORY);
    // DRY penalises a repetition of the prompt.
    let again = json!({"prompt": "Tim and Sue. Tim and Sue. Tim and", "max_tokens": 1});
    let mut dry = again.clone();
    dry.as_object_mut()
        .unwrap()
        .extend(json!({"dry_multiplier": 1e6, "dry_allowed_length": 1}).as_object().unwrap().clone());
    assert_eq!(text(&server, again), " S");
    assert_ne!(text(&server, dry.clone()), " S");
    dry["dry_sequence_breakers"] = json!([" and"]);
    assert_eq!(text(&server, dry), " S");

    for (more, field) in [
        (json!({"typical_p": 1.5}), "typical_p"),
        (json!({"typical": -1}), "typical"),
        (json!({"dry_allowed_length": -1}), "dry_allowed_length"),
        (json!({"top_k": 0.5}), "top_k"),
        (json!({"samplers": ["nothing"]}), "samplers"),
        (json!({"repetition_penalty": 0}), "repetition_penalty"),
    ] {
        let error = server.post("/v1/completions", &completion(&more)).error();
        assert_eq!(error, (400, json!(field), Value::Null), "{more}");
    }
}

#[test]
fn fields_without_an_effect_are_named_in_a_header() {
    let server = server();
    let more = json!({"user": "me", "metadata": {"a": "b"}, "store": false, "mirostat_tau": 5, "samplers": ["tfs_z", "top_k"],
        "nobody": "knows"});
    for (path, body) in [("/v1/completions", completion(&more)), ("/v1/chat/completions", chat(&more))] {
        let answer = server.post(path, &body);
        assert_eq!(answer.status, 200, "{answer:?}");
        assert_eq!(header(&answer, "x-ignored"), Some("metadata, mirostat_tau, samplers.tfs_z, user"), "{answer:?}");
    }
    assert_eq!(header(&server.post("/v1/completions", &completion(&json!({}))), "x-ignored"), None);
}

#[test]
fn logit_bias_may_be_a_list_of_pairs() {
    let server = server();
    let comma = text(&server, json!({"max_tokens": 1}));
    assert_eq!(comma, ",");
    let id = Model::built_in().unwrap().tokenizer().unwrap().token_id(&comma).unwrap();
    for bias in
        [json!([[id, false]]), json!([[id, -100]]), json!({id.to_string(): -100}), json!({id.to_string(): false})]
    {
        assert_ne!(text(&server, json!({"max_tokens": 1, "logit_bias": bias})), comma, "{bias}");
    }
}

/// The sampling values of a model's metadata are the defaults of requests.
#[test]
fn sampling_defaults_come_from_the_model_file() {
    let greedy = || with_metadata(|metadata| metadata.set("general.sampling.temp", 0.0f32));
    let server = Server::with_model(HttpOptions::default(), move || load_model(greedy(), 2, 8));
    server.wait_until_ready();
    let text = |more: Value| {
        let mut body = json!({"prompt": PROMPT, "max_tokens": 8});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post("/v1/completions", &body).json()["choices"][0]["text"].as_str().unwrap().to_owned()
    };
    assert!((0..5).all(|_| text(json!({})) == STORY));
    let hot = json!({"temperature": 5, "top_k": 0, "top_p": 1, "min_p": 0, "seed": 3});
    assert_ne!(text(hot), STORY);
}

#[test]
fn echoed_prompts_have_log_probabilities() {
    let (server, model) = (server(), Model::built_in().unwrap());
    let ids = model.tokenizer().unwrap().encode(PROMPT, EncodeOptions { add_special: true, parse_special: false });
    let expected = log_probabilities(&model, &ids);
    for prompt in [json!(PROMPT), json!(ids), json!([ids])] {
        for n in [0, 1, 3] {
            let answer = complete(&server, json!({"prompt": prompt, "echo": true, "logprobs": 1, "max_tokens": n}));
            let logprobs = &answer["choices"][0]["logprobs"];
            let tokens = ["<s>", " Once", " upon", " a", " time", ",", " there", " was"];
            assert_eq!(logprobs["tokens"], json!(tokens[..5 + n]));
            assert_eq!(logprobs["text_offset"], json!([0, 0, 4, 9, 11, 16, 17, 23][..5 + n]));
            assert_eq!((&logprobs["token_logprobs"][0], &logprobs["top_logprobs"][0]), (&Value::Null, &Value::Null));
            for (i, expected) in expected.iter().enumerate() {
                let got = logprobs["token_logprobs"][i + 1].as_f64().unwrap();
                assert!((got - f64::from(*expected)).abs() < 1e-5, "{got} {expected}");
                // Each of these tokens is the most likely one at its position.
                assert_eq!(logprobs["top_logprobs"][i + 1][tokens[i + 1]], logprobs["token_logprobs"][i + 1]);
            }
            let text = answer["choices"][0]["text"].as_str().unwrap();
            assert!(text.starts_with(PROMPT) && (n > 0 || text == PROMPT), "{text}");
        }
    }
    // The same as a stream.
    let body = completion(&json!({"echo": true, "logprobs": 0, "max_tokens": 1, "stream": true}));
    let chunks = server.stream("/v1/completions", &body).take_while(|data| data != "[DONE]");
    let chunks: Vec<Value> = chunks.map(|data| serde_json::from_str(&data).unwrap()).collect();
    let values = |path: &str| chunks.iter().filter_map(|chunk| chunk.pointer(path)).cloned().collect::<Vec<_>>();
    assert_eq!(values("/choices/0/text").iter().filter_map(Value::as_str).collect::<String>(), format!("{PROMPT},"));
    let n_tokens =
        values("/choices/0/logprobs/tokens").iter().map(|tokens| tokens.as_array().unwrap().len()).sum::<usize>();
    assert_eq!(n_tokens, 6);
}

/// Clients such as lm-evaluation-harness drop the last log probability, so that EOS must have one, too.
#[test]
fn the_eos_token_of_an_echoed_text_has_a_log_probability() {
    let server = server();
    let eos = Model::built_in().unwrap().tokenizer().unwrap().eos().unwrap();
    let more = json!({"echo": true, "logprobs": 1, "max_tokens": 1, "logit_bias": {eos.to_string(): 100}});
    let answer = complete(&server, more);
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    assert_eq!(answer["choices"][0]["logprobs"]["token_logprobs"].as_array().unwrap().len(), 6);
    assert_eq!(answer["choices"][0]["text"], PROMPT);
}

#[test]
fn prompt_logprobs_are_given_by_token_id() {
    let (server, model) = (server(), Model::built_in().unwrap());
    let ids = model.tokenizer().unwrap().encode(PROMPT, EncodeOptions { add_special: true, parse_special: false });
    let expected = log_probabilities(&model, &ids);
    let answer = complete(&server, json!({"prompt_logprobs": 2, "n": 2, "prompt": [PROMPT, PROMPT]}));
    for choice in answer["choices"].as_array().unwrap() {
        assert_eq!((&choice["text"], &choice["logprobs"]), (&json!(STORY), &Value::Null));
        let positions = choice["prompt_logprobs"].as_array().unwrap();
        assert_eq!((positions.len(), &positions[0]), (5, &Value::Null));
        for (i, expected) in expected.iter().enumerate() {
            let position = positions[i + 1].as_object().unwrap();
            let token = &position[&ids[i + 1].to_string()];
            assert!((token["logprob"].as_f64().unwrap() - f64::from(*expected)).abs() < 1e-5, "{token} {expected}");
            assert_eq!((&token["rank"], position.len()), (&json!(1), 2));
        }
        assert_eq!(positions[1][ids[1].to_string()]["decoded_token"], " Once");
    }
    let answer = server.post("/v1/chat/completions", &chat(&json!({"prompt_logprobs": 0}))).json();
    let n_prompt = answer["usage"]["prompt_tokens"].as_u64().unwrap() as usize;
    let positions = answer["prompt_logprobs"].as_array().unwrap();
    assert_eq!((positions.len(), &positions[0]), (n_prompt, &Value::Null));
    assert!(positions[1..].iter().all(|position| position.as_object().unwrap().len() == 1));
    for more in [json!({"prompt_logprobs": 1, "stream": true}), json!({"prompt_logprobs": 21})] {
        let error = server.post("/v1/completions", &completion(&more)).error();
        assert_eq!(error, (400, json!("prompt_logprobs"), Value::Null));
    }
    // `n_probs` is llama.cpp's name of `logprobs`.
    let answer = complete(&server, json!({"n_probs": 2, "max_tokens": 1}));
    assert_eq!(answer["choices"][0]["logprobs"]["top_logprobs"][0].as_object().unwrap().len(), 2);
    let answer = server.post("/v1/chat/completions", &chat(&json!({"n_probs": 2, "max_tokens": 1}))).json();
    assert_eq!(answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"].as_array().unwrap().len(), 2);
}

#[test]
fn infilling_writes_the_text_between_prefix_and_suffix() {
    let [prefix, suffix, middle] = [500u32, 501, 502];
    let model = move || {
        with_metadata(|metadata| {
            metadata.set("tokenizer.ggml.fim_pre_token_id", prefix);
            metadata.set("tokenizer.ggml.fim_suf_token_id", suffix);
            metadata.set("tokenizer.ggml.fim_mid_token_id", middle);
        })
    };
    let server = Server::with_model(HttpOptions::default(), move || load_model(model(), 2, 8));
    server.wait_until_ready();
    let tokenizer = Model::built_in().unwrap().tokenizer().unwrap();
    let encode = |text: &str| tokenizer.encode(text, EncodeOptions::default());
    let (before, after) = ("Once upon a time", "She was happy.");
    let prompt = [&[1, prefix][..], &encode(before), &[suffix], &encode(after), &[middle]].concat();
    let expected = text(&server, json!({"prompt": prompt}));
    assert_eq!(text(&server, json!({"prompt": before, "suffix": after})), expected);
    let echoed = text(&server, json!({"prompt": before, "suffix": after, "echo": true}));
    assert!(echoed.ends_with(&expected) && echoed.len() > expected.len(), "{echoed}");

    let ask = |more: Value| {
        let mut body = json!({"input_prefix": before, "input_suffix": after, "temperature": 0, "n_predict": 8});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let answer = server.post("/infill", &ask(json!({"n_indent": 4, "samplers": ["top_k", "infill"]})));
    assert_eq!(header(&answer, "x-ignored"), Some("n_indent, samplers.infill"));
    let answer = answer.json();
    assert_eq!((&answer["content"], &answer["stop"]), (&json!(expected), &json!(true)));
    assert_eq!((&answer["stop_type"], &answer["truncated"]), (&json!("limit"), &json!(false)));
    assert_eq!((&answer["tokens_predicted"], &answer["tokens_evaluated"]), (&json!(8), &json!(prompt.len())));

    let events: Vec<Value> = server
        .stream("/infill", &ask(json!({"stream": true})))
        .map(|data| serde_json::from_str(&data).unwrap())
        .collect();
    let streamed: String = events.iter().map(|event| event["content"].as_str().unwrap()).collect();
    assert_eq!(streamed, expected);
    let stops: Vec<bool> = events.iter().map(|event| event["stop"].as_bool().unwrap()).collect();
    assert!(stops.last() == Some(&true) && stops[..stops.len() - 1].iter().all(|stop| !stop));

    // Additional texts precede the prefix. What exceeds the context is cut off.
    let extra = json!([{"filename": "a.txt", "text": "Tim had a ball."}]);
    let with_extra = server.post("/infill", &ask(json!({"input_extra": extra}))).json();
    let n_extra = encode("\n\n--- snippet ---\n\n").len() + encode("Tim had a ball.").len();
    assert_eq!(with_extra["tokens_evaluated"], prompt.len() + n_extra);
    let long =
        server.post("/infill", &ask(json!({"input_prefix": "a ".repeat(600), "input_suffix": "b ".repeat(600)})));
    let long = long.json();
    assert_eq!((&long["truncated"], &long["tokens_evaluated"]), (&json!(true), &json!(512 - 8)));

    let wrong = |more: Value| server.post("/infill", &ask(more)).error();
    assert_eq!(wrong(json!({"input_prefix": 1})).1, "input_prefix");
    assert_eq!(wrong(json!({"n": 2})).1, "n");
    assert_eq!(wrong(json!({"suffix": "x"})), (400, json!("suffix"), json!(400)));
}

#[test]
fn embeddings_can_be_truncated_to_fewer_dimensions() {
    let server = server();
    let vector = |more: Value| {
        let mut body = json!({"input": PROMPT});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let answer = server.post("/v1/embeddings", &body).json();
        let vector = answer["data"][0]["embedding"].as_array().unwrap().clone();
        vector.iter().map(|x| x.as_f64().unwrap()).collect::<Vec<f64>>()
    };
    let whole = vector(json!({}));
    assert_eq!(whole.len(), 64);
    assert_eq!(vector(json!({"dimensions": 64})), whole);
    for n in [1, 16, 63] {
        let cut = vector(json!({"dimensions": n}));
        let length = whole[..n].iter().map(|x| x * x).sum::<f64>().sqrt();
        assert_eq!(cut.len(), n);
        assert!(cut.iter().zip(&whole).all(|(cut, whole)| (cut - whole / length).abs() < 1e-6), "{cut:?}");
    }
    for n in [0, 65] {
        let error = server.post("/v1/embeddings", &json!({"input": PROMPT, "dimensions": n})).error();
        assert_eq!(error, (400, json!("dimensions"), Value::Null));
    }
}
