//! The commands `info`, `synth` (models of random weights), `quantize` and `perplexity`.

use std::path::{Path, PathBuf};

use crate::common::{held_out, run, stderr, stdout};
use metal_attention::gguf::{GgufFile, GgufWriter, Metadata, TensorDecl, TensorType};
use metal_attention_testing::mmproj;
use serde_json::{Value, json};
use tempfile::TempDir;

const TALES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/tales-4m-q4_0.gguf");
const STORIES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/stories260K.gguf");

/// Runs the program. Arguments are separated by spaces; `@` stands for the folder.
fn run_in(dir: &TempDir, args: &str) -> std::process::Output {
    let args: Vec<_> = args.split(' ').map(|arg| arg.replace('@', dir.path().to_str().unwrap())).collect();
    run(&args.iter().map(String::as_str).collect::<Vec<_>>())
}

/// The JSON of `info` with the list of tensors.
fn info(file: &Path) -> Value {
    serde_json::from_str(&stdout(run(&["info", "-m", file.to_str().unwrap(), "--json", "--tensors"]))).unwrap()
}

/// Synthesises a model with 2 layers and `n_embd` 64. Returns the file.
fn synth(dir: &TempDir, name: &str, args: &str) -> PathBuf {
    let sizes = "--n-layer 2 --n-embd 64 --n-head 4 --n-head-kv 2 --n-ff 128 --n-vocab 600";
    stdout(run_in(dir, &format!("synth custom {sizes} -o @/{name} {args}")));
    dir.path().join(name)
}

/// The tensors' names and types.
fn types(file: &Path) -> Vec<(String, String)> {
    let tensors = info(file)["tensors"].as_array().unwrap().clone();
    let text = |v: &Value| v.as_str().unwrap().to_owned();
    tensors.iter().map(|t| (text(&t["name"]), text(&t["type"]))).collect()
}

fn type_of(file: &Path, tensor: &str) -> String {
    types(file).into_iter().find(|(name, _)| name == tensor).unwrap().1
}

#[test]
fn info_reports_name_sizes_types_and_memory() {
    let info = info(Path::new(TALES));
    let keys: Vec<_> = info.as_object().unwrap().keys().map(String::as_str).collect();
    let documented = [
        "file",
        "file_bytes",
        "gguf_version",
        "parts",
        "architecture",
        "name",
        "runnable",
        "problem",
        "parameters",
        "tensor_bytes",
        "bits_per_weight",
        "tensor_types",
        "sizes",
        "tokenizer",
        "memory",
        "tensors",
    ];
    assert_eq!(keys, documented);
    assert_eq!((&info["name"], &info["runnable"], &info["problem"]), (&json!("tales-4m"), &json!(true), &Value::Null));
    assert_eq!((&info["file_bytes"], &info["parameters"]), (&json!(3_024_000), &json!(4_196_608)));
    assert_eq!(
        info["tensor_types"],
        json!([
            {"type": "F32", "tensors": 9, "bytes": 9_216},
            {"type": "Q4_0", "tensors": 28, "bytes": 1_769_472},
            {"type": "Q8_0", "tensors": 1, "bytes": 1_114_112},
        ])
    );
    let sizes = &info["sizes"];
    for (key, size) in
        [("n_layer", 4), ("n_embd", 256), ("n_head", 4), ("n_head_kv", 2), ("head_dim", 64), ("n_ff", 768)]
    {
        assert_eq!(sizes[key], json!(size), "{key}");
    }
    assert_eq!(info["tokenizer"]["special_tokens"][0], json!({"role": "bos", "id": 0, "text": "<|endoftext|>"}));
    // Keys and values: 2 * 4 layers * 2 KV heads * 64 elements * 2 bytes a token; 512 tokens.
    let kv_cache = 2 * 4 * 2 * 64 * 2 * 512;
    assert_eq!(info["memory"][0]["kv_cache_bytes"], json!(kv_cache));
    assert_eq!(info["memory"].as_array().unwrap().len(), 1);
}

#[test]
fn info_counts_the_memory_of_a_drafter() {
    let model = TALES;
    let drafted = run(&["info", "-m", model, "--model-draft", model, "--json"]);
    let info: Value = serde_json::from_str(&stdout(drafted)).unwrap();
    let memory = &info["memory"][0];
    let bytes = |key: &str| memory[key].as_u64().unwrap();
    // With a RoPE table of 512 positions of 64 numbers.
    assert_eq!(bytes("drafter_bytes"), bytes("weights_bytes") + bytes("kv_cache_bytes") + 4 * 64 * 512);
    assert_eq!(bytes("total_bytes"), bytes("weights_bytes") + bytes("kv_cache_bytes") + bytes("drafter_bytes"));
    let text = stdout(run(&["info", "-m", model, "--draft", model]));
    assert!(text.contains(" + drafter 3.9 MiB"), "{text}");
}

#[test]
fn info_without_json_is_a_readable_list() {
    let output = run(&["info", "--metadata", "--tensors"]);
    assert!(stderr(&output).contains("built-in model"));
    let text = stdout(output);
    for line in
        ["architecture        llama", "parameters          260 032", "runs here           yes", "KV heads            4"]
    {
        assert!(text.contains(line), "{line}: {text}");
    }
    assert!(text.contains("  llama.attention.layer_norm_rms_epsilon     0.00001\n"), "{text}");
    assert!(text.contains("blk.4.ffn_down.weight"), "{text}");
}

#[test]
fn info_shows_vocabularies_and_unknown_architectures() {
    let dir = TempDir::new().unwrap();
    let vocabulary = dir.path().join("gpt-2-cut.gguf");
    std::fs::write(&vocabulary, metal_attention_testing::vocabulary::bytes("gpt-2-cut.gguf")).unwrap();
    let info = info(&vocabulary);
    assert_eq!(info["runnable"], json!(false));
    assert_eq!(info["problem"], json!("it has a vocabulary, but no weights"));
    assert_eq!(info["tokenizer"]["model"], json!("gpt2"));
    assert_eq!((&info["memory"], &info["parameters"]), (&json!([]), &json!(0)));
    let text = stdout(run(&["info", "-m", vocabulary.to_str().unwrap()]));
    assert!(text.contains("runs here           no: it has a vocabulary, but no weights"), "{text}");

    let mut metadata = Metadata::new();
    metadata.set("general.architecture", "gpt-17");
    metadata.set("gpt-17.block_count", 3u32);
    let tensor = TensorDecl { name: "token_embd.weight".into(), shape: vec![4, 2], ty: TensorType::F16 };
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("gpt-17.gguf");
    let mut writer = GgufWriter::new(std::fs::File::create(&file).unwrap(), 3, &metadata, &[tensor]).unwrap();
    writer.write(&[0; 16]).unwrap();
    writer.finish().unwrap();
    let shown = self::info(&file);
    assert_eq!((&shown["architecture"], &shown["sizes"]["n_layer"]), (&json!("gpt-17"), &json!(3)));
    assert_eq!((&shown["parameters"], &shown["runnable"]), (&json!(8), &json!(false)));
    assert!(shown["problem"].as_str().unwrap().contains("\"gpt-17\" is not supported"), "{shown}");
}

#[test]
fn info_prints_chat_templates() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("template.gguf");
    let mut metadata = Metadata::new();
    metadata.set("tokenizer.chat_template", "{% for m in messages %}\n\t{{ m.content }}{% endfor %}");
    GgufWriter::new(std::fs::File::create(&path).unwrap(), 3, &metadata, &[]).unwrap().finish().unwrap();
    let text = stdout(run(&["info", "-m", path.to_str().unwrap(), "--chat-template"]));
    assert_eq!(text, "{% for m in messages %}\n\t{{ m.content }}{% endfor %}\n");
    let output = run(&["info", "--chat-template"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("stories260K (built in) has no chat template"), "{}", stderr(&output));
}

#[test]
fn synthesised_models_run() {
    let dir = TempDir::new().unwrap();
    for args in ["--arch llama", "--arch qwen2 --type q8_0", "--arch qwen3 --tied false --type bf16", "--type f32"] {
        let file = synth(&dir, "m.gguf", args);
        let shown = info(&file);
        assert_eq!((&shown["problem"], &shown["sizes"]["n_vocab"]), (&Value::Null, &json!(600)), "{args}");
        let file = file.to_str().unwrap();
        let lines = stdout(run(&["run", "-m", file, "-p", "Hi", "-n", "3", "--temp", "0", "--ignore-eos", "--json"]));
        assert_eq!(lines.lines().filter(|line| line.contains("\"token\"")).count(), 3, "{args}: {lines}");
    }
    let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["m.gguf"], "temporary files are left");
}

#[test]
fn synthesised_models_are_determined_by_their_seed() {
    let dir = TempDir::new().unwrap();
    let bytes = |args| std::fs::read(synth(&dir, "m.gguf", args)).unwrap();
    let first = bytes("--seed 1");
    assert!(first == bytes("--seed 1"), "the same seed gives another file");
    assert!(first != bytes("--seed 2"), "another seed gives the same file");
}

#[test]
fn synthesised_shapes_have_their_sizes_and_types() {
    let dir = TempDir::new().unwrap();
    // The named model with one layer instead of 30: 28.3 million weights in the embedding, 3.5 million in the layer.
    stdout(run_in(&dir, "synth smollm-135m --n-layer 1 -o @/s.gguf"));
    let file = dir.path().join("s.gguf");
    let shown = info(&file);
    assert_eq!(shown["parameters"], json!(49_152 * 576 + 3_540_096 + 576));
    assert_eq!((&shown["sizes"]["n_head_kv"], &shown["sizes"]["n_ctx_train"]), (&json!(3), &json!(2048)));
    assert_eq!(type_of(&file, "token_embd.weight"), "Q8_0");
    assert_eq!(type_of(&file, "blk.0.ffn_down.weight"), "Q4_0");
    assert_eq!(type_of(&file, "blk.0.ffn_norm.weight"), "F32");

    stdout(run_in(&dir, &format!("synth custom -o @/v.gguf --vocab {TALES}")));
    let shown = info(&dir.path().join("v.gguf"));
    assert_eq!((&shown["tokenizer"]["pre"], &shown["sizes"]["n_vocab"]), (&json!("smollm"), &json!(4096)));
}

#[test]
fn invalid_sizes_are_usage_errors() {
    let dir = TempDir::new().unwrap();
    for (args, named) in [
        ("--n-layer 0", "block_count"),
        ("--n-head 3 --n-head-kv 2", "head_count_kv"),
        ("--n-vocab 100", "--n-vocab"),
        ("--n-vocab 99999999999", "--n-vocab"),
        ("--head-dim 7", "rope.dimension_count"),
        ("--n-ff 4294967296", "feed_forward_length"),
    ] {
        let output = run_in(&dir, &format!("synth custom -o @/m.gguf {args}"));
        assert_eq!(output.status.code(), Some(2), "{args}: {}", stderr(&output));
        assert!(stderr(&output).contains(named), "{args}: {}", stderr(&output));
    }
    assert_eq!(run_in(&dir, "synth gpt-17 -o @/m.gguf").status.code(), Some(2));
    assert_eq!(run_in(&dir, "synth custom -o @").status.code(), Some(1));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "files are left");
}

#[test]
fn quantising_to_the_same_types_changes_nothing() {
    let dir = TempDir::new().unwrap();
    let output = run_in(&dir, &format!("quantize {TALES} @/t.gguf q4_0 --embd-type q8_0"));
    assert!(stderr(&output).contains("2.8 MiB (5.51 bits per weight) -> 2.8 MiB"), "{}", stderr(&output));
    stdout(output);
    assert!(std::fs::read(dir.path().join("t.gguf")).unwrap() == std::fs::read(TALES).unwrap());
}

#[test]
fn quantised_models_are_smaller_and_generate_the_same_text() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("q.gguf");
    let output = run_in(&dir, &format!("quantize {STORIES} @/q.gguf q8_0 --verbose"));
    assert!(stderr(&output).contains("blk.0.attn_q.weight"), "{}", stderr(&output));
    stdout(output);
    assert_eq!(type_of(&file, "token_embd.weight"), "Q8_0");
    // Rows of 172 values are no multiple of a quantisation block.
    assert_eq!(type_of(&file, "blk.0.ffn_down.weight"), "F16");
    assert_eq!(type_of(&file, "output_norm.weight"), "F32");
    let args = ["run", "-m", file.to_str().unwrap(), "-p", "Once upon a time", "-n", "16", "--temp", "0"];
    assert!(stdout(run(&args)).starts_with(", there was a little girl named"));
}

#[test]
fn quantising_chooses_types_by_the_flags() {
    let dir = TempDir::new().unwrap();
    synth(&dir, "f32.gguf", "--type f32 --tied false");
    let out = dir.path().join("q.gguf");
    // Rows of 64 and 128 values cannot have a type with blocks of 256.
    for (args, embd, head, down) in [
        ("q4_0", "Q4_0", "Q8_0", "Q4_0"),
        ("q4_0 --pure", "Q4_0", "Q4_0", "Q4_0"),
        ("q4_1 --embd-type f16 --output-type q8_0", "F16", "Q8_0", "Q4_1"),
        ("q4_k", "Q5_0", "Q8_0", "Q5_0"),
    ] {
        stdout(run_in(&dir, &format!("quantize @/f32.gguf @/q.gguf {args}")));
        let found = ["token_embd.weight", "output.weight", "blk.1.ffn_down.weight"].map(|name| type_of(&out, name));
        assert_eq!(found, [embd, head, down], "{args}");
    }
}

#[test]
fn the_input_is_never_overwritten() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("m.gguf");
    std::fs::copy(STORIES, &file).unwrap();
    let output = run_in(&dir, "quantize @/m.gguf @/./m.gguf q8_0");
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("would overwrite"), "{}", stderr(&output));
    assert!(std::fs::read(&file).unwrap() == std::fs::read(STORIES).unwrap());
    std::fs::write(dir.path().join("vocabulary.gguf"), metal_attention_testing::vocabulary::bytes("gpt-2-cut.gguf"))
        .unwrap();
    assert_eq!(run_in(&dir, "quantize @/vocabulary.gguf @/v.gguf q8_0").status.code(), Some(2));
    assert_eq!(run_in(&dir, "quantize @/m.gguf @/x.gguf q9_9").status.code(), Some(2));
    assert_eq!(run_in(&dir, "quantize @/none.gguf @/x.gguf q8_0").status.code(), Some(3));
}

#[test]
fn perplexity_equals_that_of_llama_cpp() {
    // llama.cpp's running estimates after 1 to 4 chunks of 512 tokens.
    let expected = [60.1165, 60.2412, 66.6087, 71.9303];
    let dir = TempDir::new().unwrap();
    let held_out = held_out(dir.path());
    for mode in [&[][..], &["--exact", "--cache-type", "f32"][..]] {
        let args = ["perplexity", "-m", TALES, "-f", &held_out, "-c", "512", "--chunks", "4", "--json"];
        let result: Value = serde_json::from_str(&stdout(run(&[&args[..], mode].concat()))).unwrap();
        assert_eq!((&result["tokens"], &result["n_ctx"]), (&json!(4 * 255), &json!(512)));
        for (i, expected) in expected.into_iter().enumerate() {
            let got = result["chunks"][i].as_f64().unwrap();
            assert!((got - expected).abs() < 0.005 * expected, "{mode:?} chunk {i}: {got} for {expected}");
        }
        assert_eq!(result["chunks"][3], result["perplexity"]);
        let error = result["error"].as_f64().unwrap();
        assert!((error - 7.8285).abs() < 0.08, "{error}");
    }
}

#[test]
fn perplexity_prints_a_line_per_chunk_and_rejects_short_texts() {
    let text = String::from_utf8(metal_attention_testing::reference::bytes("tales-heldout.txt")).unwrap();
    let text = &text[..4000];
    let lines = stdout(run(&["perplexity", "-p", text, "-c", "64", "--chunks", "2"]));
    let lines: Vec<_> = lines.lines().collect();
    assert_eq!(lines.len(), 3);
    assert!(lines[0].starts_with("   1/2  ") && lines[2].ends_with(" over 62 tokens"), "{lines:?}");
    let output = run(&["perplexity", "-p", "Once upon a time", "-c", "64"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("at least 128"), "{}", stderr(&output));
    assert_eq!(run(&["perplexity", "-p", text, "-c", "3"]).status.code(), Some(2));
}

#[test]
fn synthesised_models_see_pictures() {
    let dir = TempDir::new().unwrap();
    std::fs::write(dir.path().join("1.bmp"), mmproj::bmp(40, 30, 1)).unwrap();
    // Shapes, the rows of a picture, and flags.
    for (shape, rows, flags) in [
        ("smolvlm-500m", 13 * 64, "--mmproj-layers 1"),
        ("qwen3-vl-4b", 12, "--mmproj-layers 6 --set rope.dimension_sections=[6,5,5,0]"),
        ("gemma-3-4b", 256, "--mmproj-layers 1"),
        (
            "gemma-4-e4b",
            80,
            "--mmproj-layers 1 --set attention.shared_kv_layers=0 --set attention.sliding_window_pattern=[1,1,0]",
        ),
    ] {
        let sizes = "--n-layer 3 --n-embd 64 --n-head 2 --n-head-kv 1 --n-ff 96 --n-vocab 1000";
        stdout(run_in(
            &dir,
            &format!("synth {shape} {sizes} {flags} --type q8_0 -o @/m.gguf --mmproj @/mmproj-m.gguf"),
        ));
        let file = GgufFile::read(dir.path().join("mmproj-m.gguf")).unwrap();
        let ty = |name: &str| file.tensor(name).unwrap().ty();
        assert_eq!((ty("v.blk.0.ffn_up.weight"), ty("v.position_embd.weight")), (TensorType::F16, TensorType::F32));
        let chunks = stdout(run_in(&dir, "encode-image -m @/m.gguf --device cpu --image @/1.bmp --json"));
        let chunks: Value = serde_json::from_str(&chunks).unwrap();
        let chunks = chunks["chunks"].as_array().unwrap();
        let n_rows: u64 = chunks.iter().filter_map(|chunk| chunk["tokens"].as_u64()).sum();
        assert_eq!(n_rows, rows, "{shape}: {chunks:?}");
        // The texts around them are single tokens of the vocabulary, behind the 512 of the built-in model; 1 is BOS, 13 a line break.
        let mut ids =
            chunks.iter().filter_map(|chunk| chunk["ids"].as_array()).flatten().map(|id| id.as_u64().unwrap());
        assert!(ids.all(|id| id >= 512 || [1, 13].contains(&id)), "{shape}: {chunks:?}");
        // Many rows take long.
        if rows < 100 {
            let run = "run -m @/m.gguf --device cpu --image @/1.bmp -p What? -n 2 --temp 0 --ignore-eos";
            stdout(run_in(&dir, run));
        }
    }
    let output = run_in(&dir, "synth smollm-135m -o @/n.gguf --mmproj @/x.gguf");
    assert!(stderr(&output).contains("--mmproj works with smolvlm-500m, qwen3-vl-4b"), "{}", stderr(&output));
    assert!(!dir.path().join("n.gguf").exists());
}
