//! Export of a tokenizer to the JSON files of Hugging Face's `tokenizers` and `transformers`. tools/test-tokenizer-export checks
//! that these libraries give the same ids.

use metal_attention_gguf::{GgufFile, Metadata, StringArray};
use metal_attention_tokenizer::{Tokenizer, TokenizerError, TokenizerOptions};
use serde_json::{Value, json};
use std::collections::BTreeMap;

type Files = BTreeMap<&'static str, String>;

/// The exported files: text by file name.
fn export(metadata: &Metadata) -> Result<Files, TokenizerError> {
    let tokenizer = Tokenizer::from_metadata(metadata, &TokenizerOptions::default()).expect("a tokenizer");
    Ok(tokenizer.export(metadata)?.into_iter().map(|file| (file.name, file.text)).collect())
}

/// The metadata of a cut-down vocabulary of the repository.
fn recorded(name: &str) -> Metadata {
    GgufFile::from_bytes(&metal_attention_testing::vocabulary::bytes(name)).expect("a vocabulary").metadata().clone()
}

fn json_of(files: &Files, name: &str) -> Value {
    serde_json::from_str(&files[name]).expect("JSON")
}

/// The metadata of a vocabulary with these tokens (text, type, score) and merges.
fn metadata(model: &str, tokens: &[(&str, i32, f32)], merges: &[&str]) -> Metadata {
    let mut metadata = Metadata::new();
    metadata.set("tokenizer.ggml.model", model);
    metadata.set("tokenizer.ggml.pre", "qwen2");
    metadata.set("tokenizer.ggml.tokens", tokens.iter().map(|token| token.0).collect::<StringArray>());
    metadata.set("tokenizer.ggml.token_type", tokens.iter().map(|token| token.1).collect::<Vec<_>>());
    metadata.set("tokenizer.ggml.scores", tokens.iter().map(|token| token.2).collect::<Vec<_>>());
    metadata.set("tokenizer.ggml.merges", merges.iter().collect::<StringArray>());
    metadata
}

#[test]
fn merges_of_sentencepiece_follow_from_scores() {
    let tokens = [
        ("<unk>", 2, 0.0),
        ("<s>", 3, 0.0),
        ("</s>", 3, 0.0),
        ("<0x41>", 6, 0.0),
        ("▁", 1, -5.0),
        ("a", 1, -6.0),
        ("b", 1, -7.0),
        ("ab", 1, -2.0),
        ("▁a", 1, -1.0),
        ("▁ab", 1, -3.0),
        ("a</s>", 1, -4.0),
        ("[PAD7]", 5, 0.0),
    ];
    let files = export(&metadata("llama", &tokens, &[])).unwrap();
    let tokenizer = json_of(&files, "tokenizer.json");
    let model = &tokenizer["model"];
    // Of the two merges to "▁ab" the one with the longer left part comes first. Control and unused tokens have no merges.
    assert_eq!(model["merges"], json!([["▁", "a"], ["a", "b"], ["▁a", "b"], ["▁", "ab"]]));
    assert_eq!(model["vocab"]["a</s>"], json!(10));
    assert_eq!(model["vocab"]["[PAD7]"], Value::Null);
    assert_eq!((&model["byte_fallback"], &model["unk_token"]), (&json!(true), &json!("<unk>")));
    let special = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    };
    assert_eq!(tokenizer["added_tokens"], json!([special(0, "<unk>"), special(1, "<s>"), special(2, "</s>")]));
    assert_eq!(tokenizer["normalizer"]["normalizers"][0], json!({"type": "Prepend", "prepend": "▁"}));
    assert_eq!(
        tokenizer["post_processor"]["single"],
        json!([{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}])
    );
    assert_eq!(tokenizer["decoder"]["decoders"][3], json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
}

#[test]
fn byte_pairs_keep_their_merges_and_splits() {
    let tokens =
        [("a", 1, 0.0), ("b", 1, 0.0), ("ab", 1, 0.0), ("<|im_end|>", 3, 0.0), ("<think>", 4, 0.0), ("[PAD0]", 5, 0.0)];
    let files = export(&metadata("gpt2", &tokens, &["a b", "a b"])).unwrap();
    let tokenizer = json_of(&files, "tokenizer.json");
    assert_eq!(tokenizer["model"]["merges"], json!([["a", "b"]]));
    assert_eq!(tokenizer["model"]["vocab"].as_object().map(serde_json::Map::len), Some(5));
    let steps = tokenizer["pre_tokenizer"]["pretokenizers"].as_array().unwrap();
    assert_eq!(steps.len(), 2);
    assert_eq!((&steps[0]["behavior"], &steps[1]["use_regex"]), (&json!("Isolated"), &json!(false)));
    let special: Vec<_> = tokenizer["added_tokens"].as_array().unwrap().iter().map(|token| &token["special"]).collect();
    assert_eq!(special, [&json!(true), &json!(false)]);
    // The default EOS of GPT-2, token 11, does not exist here. The end of a turn, token 3, ends the generation.
    assert_eq!(json_of(&files, "generation_config.json"), json!({"eos_token_id": [3]}));

    let error = export(&metadata("gpt2", &tokens, &["a b", "ab a"])).unwrap_err();
    assert!(matches!(&error, TokenizerError::NotExportable { model, .. } if model == "gpt2"), "{error}");
    assert!(error.to_string().contains("\"aba\", of the merge \"ab a\", is no token"), "{error}");
}

#[test]
fn the_exported_files_describe_the_model() {
    let mut metadata = recorded("llama-bpe-cut.gguf");
    metadata.set("general.architecture", "qwen2");
    metadata.set("qwen2.context_length", 4096_u32);
    metadata.set("qwen2.block_count", 3_u32);
    metadata.set("tokenizer.chat_template", "{{ messages }}");
    metadata.set("tokenizer.chat_template.tool_use", "{{ tools }}");
    metadata.set("tokenizer.chat_template.rerank", "{query}{document}");
    let files = export(&metadata).unwrap();
    let names =
        ["chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"];
    assert_eq!(files.keys().copied().collect::<Vec<_>>(), names);
    assert_eq!(files["chat_template.jinja"], "{{ messages }}");
    let tokenizer = Tokenizer::from_metadata(&metadata, &TokenizerOptions::default()).unwrap();
    let (bos, eos) = (tokenizer.bos().unwrap(), tokenizer.eos().unwrap());
    assert_eq!(
        json_of(&files, "config.json"),
        json!({
            "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": tokenizer.n_vocab(),
            "max_position_embeddings": 4096, "num_hidden_layers": 3, "bos_token_id": bos, "eos_token_id": eos,
        })
    );
    let config = json_of(&files, "tokenizer_config.json");
    assert_eq!(config["bos_token"], json!("<|begin_of_text|>"));
    assert_eq!(config["added_tokens_decoder"][bos.to_string()]["content"], json!("<|begin_of_text|>"));
    let template = |name: &str, template: &str| json!({"name": name, "template": template});
    assert_eq!(
        config["chat_template"],
        json!([template("default", "{{ messages }}"), template("tool_use", "{{ tools }}")])
    );
    let ends = json_of(&files, "generation_config.json")["eos_token_id"].clone();
    assert_eq!(ends, json!(tokenizer.end_of_generation()));
}

#[test]
fn every_kind_except_rwkv_can_be_exported() {
    for name in ["gpt-2", "llama-bpe", "gemma-4", "llama-spm", "phi-3", "nomic-bert-moe", "bert-bge"] {
        let metadata = recorded(&format!("{name}-cut.gguf"));
        let files = export(&metadata).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert!(json_of(&files, "tokenizer.json")["model"]["vocab"].is_object() || name.starts_with("nomic"), "{name}");
    }
    let error = export(&recorded("rwkv-cut.gguf")).unwrap_err();
    assert!(error.to_string().contains("`rwkv`"), "{error}");
}
