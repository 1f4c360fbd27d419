//! llama.cpp's `/slots/{id}?action=save|restore|erase`: the tokens, KV pages and states of a sequence are saved to a file,
//! restored from it, or removed from the cache.

use std::fs;
use std::path::Path;

use metal_attention::gguf::{GgufFile, GgufWriter, TensorDecl};
use metal_attention::{BUILT_IN_MODEL, CacheType, Device, EngineOptions, Model, ModelOptions};
use metal_attention_server::http::HttpOptions;
use serde_json::{Value, json};

use crate::client::{Answer, Server, load_model, load_with};
use crate::{STORY, completion, server};

/// A server that saves slots in `folder`.
fn server_with_folder(folder: &Path) -> Server {
    Server::new(HttpOptions { slot_save_path: Some(folder.to_owned()), ..Default::default() })
}

/// Requests an action on a slot.
fn slot_action(server: &Server, slot: &str, action: &str, filename: &str) -> Answer {
    server.post(&format!("/slots/{slot}?action={action}"), &json!({"filename": filename}))
}

/// The status, type and field of an error in llama.cpp's form.
fn error_of(answer: &Answer) -> (u16, String, Option<String>) {
    let error = &answer.json()["error"];
    assert_eq!(error["code"], answer.status, "{answer:?}");
    let text = |name: &str| error[name].as_str().map(str::to_owned);
    (answer.status, text("type").unwrap(), text("param"))
}

/// A prompt of 150 tokens.
fn prompt() -> Vec<u32> {
    (0..150).map(|i| 3 + i * 7 % 400).collect()
}

/// The eight greedy tokens after `prompt`, and how many tokens of the prompt were evaluated, not cached.
fn complete(server: &Server, prompt: &[u32]) -> (Vec<u32>, u64) {
    let request =
        json!({"prompt": prompt, "n_predict": 8, "temperature": 0, "ignore_eos": true, "return_tokens": true});
    let answer = server.post("/completion", &request).json();
    let tokens = answer["tokens"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
    let (n_prompt, n_cached) =
        (answer["tokens_evaluated"].as_u64().unwrap(), answer["tokens_cached"].as_u64().unwrap());
    assert_eq!(n_prompt, prompt.len() as u64);
    (tokens, n_prompt - n_cached)
}

#[test]
fn a_saved_sequence_continues_in_another_server() {
    let folder = tempfile::tempdir().unwrap();
    let first = server_with_folder(folder.path());
    let (tokens, n_evaluated) = complete(&first, &prompt());
    assert_eq!((tokens.len(), n_evaluated), (8, 150));
    let saved = slot_action(&first, "0", "save", "story.bin");
    let bytes = fs::metadata(folder.path().join("story.bin")).unwrap().len();
    // The last token was sampled but not evaluated.
    let expected = json!({"id_slot": 0, "filename": "story.bin", "n_saved": 157, "n_written": bytes});
    let fields = |answer: &Answer, time: &str| {
        let mut fields = answer.json();
        let timings = fields.as_object_mut().unwrap().remove("timings").unwrap();
        assert!(timings[time].as_f64().unwrap() > 0.0 && timings.as_object().unwrap().len() == 1, "{timings}");
        fields
    };
    assert_eq!(fields(&saved, "save_ms"), expected);
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = fs::metadata(folder.path().join("story.bin")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }
    let longer = [prompt(), tokens, vec![403, 407]].concat();
    let (expected, n_evaluated) = complete(&first, &longer);
    assert_eq!(n_evaluated, 3);

    let second = server_with_folder(folder.path());
    let restored = slot_action(&second, "3", "restore", "story.bin");
    let expected_fields = json!({"id_slot": 3, "filename": "story.bin", "n_restored": 157, "n_read": bytes});
    assert_eq!(fields(&restored, "restore_ms"), expected_fields);
    assert_eq!(second.metric("prompt_tokens_total"), 0.0);
    assert_eq!(complete(&second, &longer), (expected.clone(), 3));
    assert_eq!(second.metric("prompt_tokens_total"), 3.0);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "no other file is left");

    // Slot 0 is the sequence that ended last, so the longer one is slot 1. After it is erased only its tokens are evaluated
    // again.
    let other: Vec<u32> = prompt().into_iter().rev().collect();
    assert_eq!(complete(&second, &other).1, 150);
    let erase = |slot: &str| second.send("POST", &format!("/slots/{slot}?action=erase"), &[], b"");
    assert_eq!(erase("1").json(), json!({"id_slot": 1, "n_erased": longer.len() + 7}));
    assert_eq!(complete(&second, &other).1, 1);
    assert_eq!(complete(&second, &longer), (expected, longer.len() as u64));
}

#[test]
fn file_names_outside_the_folder_are_rejected() {
    let none = server();
    assert_eq!(error_of(&slot_action(&none, "0", "save", "a")), (501, "not_supported_error".into(), None));
    let folder = tempfile::tempdir().unwrap();
    let inner = folder.path().join("slots");
    fs::create_dir(&inner).unwrap();
    let server = server_with_folder(&inner);
    let wrong = |field: &str| (400, "invalid_request_error".to_owned(), Some(field.to_owned()));
    assert_eq!(error_of(&slot_action(&server, "0", "save", "empty")), wrong("id_slot"));
    complete(&server, &prompt());
    for name in ["", "..", "../a", "/etc/a", "a/../../b", "..\\a", ".hidden", "a\u{0}b", "a\nb", &"x".repeat(200)] {
        for action in ["save", "restore"] {
            assert_eq!(error_of(&slot_action(&server, "0", action, name)), wrong("filename"), "{name:?}");
        }
    }
    assert_eq!(error_of(&slot_action(&server, "4", "save", "a")), wrong("id_slot"));
    assert_eq!(error_of(&slot_action(&server, "1", "save", "a")), wrong("id_slot"));
    assert_eq!(error_of(&slot_action(&server, "-1", "erase", "a")), wrong("id_slot"));
    assert_eq!(error_of(&slot_action(&server, &"9".repeat(40), "erase", "a")), wrong("id_slot"));
    assert_eq!(error_of(&slot_action(&server, "0", "copy", "a")), wrong("action"));
    assert_eq!(error_of(&server.post("/slots/0", &json!({}))), wrong("action"));
    assert_eq!(error_of(&server.send("POST", "/slots/0?action=save", &[], b"")), wrong("filename"));
    // A request without a body needs no CORS preflight, so one with a foreign Origin is rejected.
    let page = server.send("POST", "/slots/0?action=erase", &["Origin: https://a.example"], b"");
    assert_eq!((page.status, complete(&server, &prompt()).1), (400, 1));
    let missing = error_of(&slot_action(&server, "0", "restore", "missing"));
    assert_eq!(missing, (404, "not_found_error".into(), Some("filename".into())));
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink(folder.path().join("outside"), inner.join("link")).unwrap();
        fs::create_dir(inner.join("folder")).unwrap();
        for name in ["link", "folder"] {
            assert_eq!(error_of(&slot_action(&server, "0", "save", name)), wrong("filename"));
            assert_eq!(error_of(&slot_action(&server, "0", "restore", name)), wrong("filename"));
        }
    }
    assert!(!folder.path().join("outside").exists());
    // Servers on which models may not be changed allow no slot files either.
    let options =
        HttpOptions { slot_save_path: Some(inner), cors_origin: Some("*".parse().unwrap()), ..Default::default() };
    let server = Server::new(options);
    assert_eq!(error_of(&slot_action(&server, "0", "save", "a")).0, 403);
}

/// The built-in model with one changed byte near the end of a tensor.
fn other_weights() -> Model {
    let file = GgufFile::from_bytes(BUILT_IN_MODEL).unwrap();
    let decls: Vec<TensorDecl> = file.tensors().iter().map(Into::into).collect();
    let mut writer = GgufWriter::new(Vec::new(), file.version(), file.metadata(), &decls).unwrap();
    for (i, tensor) in file.tensors().iter().enumerate() {
        let mut bytes = tensor.bytes().to_vec();
        let at = bytes.len() - 4;
        bytes[at] ^= u8::from(i == 3);
        writer.write(&bytes).unwrap();
    }
    let file = GgufFile::from_bytes(&writer.finish().unwrap()).unwrap();
    Model::from_gguf(file, &ModelOptions::default()).unwrap()
}

#[test]
fn files_that_do_not_fit_the_model_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let server = server_with_folder(folder.path());
    complete(&server, &prompt());
    assert_eq!(slot_action(&server, "0", "save", "good").status, 200);
    let good = fs::read(path("good")).unwrap();
    let restore = |server: &Server, name: &str| {
        let answer = slot_action(server, "0", "restore", name);
        assert_eq!(error_of(&answer), (400, "invalid_request_error".into(), Some("filename".into())), "{name}");
        answer.json()["error"]["message"].as_str().unwrap().to_owned()
    };
    let restore_bytes = |bytes: &[u8]| {
        fs::write(path("tried"), bytes).unwrap();
        restore(&server, "tried")
    };
    assert!(restore_bytes(b"").contains("no session file"));
    assert!(restore_bytes(b"GGUF\x03\x00\x00\x00").contains("no session file"));
    for n in [12, 60, good.len() / 2, good.len() - 1] {
        assert!(restore_bytes(&good[..n]).contains("cut off"));
    }
    let mut huge = good.clone();
    huge[12..20].copy_from_slice(&u64::MAX.to_le_bytes());
    assert!(restore_bytes(&huge).contains("its head is too long"));
    let mut long = good[..20].to_vec();
    long[12..20].copy_from_slice(&(64u64 << 20).to_le_bytes());
    assert!(restore_bytes(&long).contains("cut off"));
    let mut damaged = good.clone();
    let at = damaged.len() - 100;
    damaged[at] ^= 1;
    assert!(restore_bytes(&damaged).contains("its checksum is wrong"));

    // Files of another model, of another cache type, and of a longer sequence than the context.
    let options = || HttpOptions { slot_save_path: Some(folder.path().to_owned()), ..Default::default() };
    let other = Server::with_model(options(), || load_model(other_weights(), 2, 4));
    other.wait_until_ready();
    assert!(restore(&other, "good").contains("of another model"));
    let engine = EngineOptions { device: Device::Cpu, n_seq: 2, n_threads: Some(1), ..Default::default() };
    let f32s = EngineOptions { cache_type: CacheType::F32, ..engine.clone() };
    let other = Server::with_model(options(), move || load_with(Model::built_in()?, &f32s, 2, 4));
    other.wait_until_ready();
    assert!(restore(&other, "good").contains("another KV cache"));
    let short = EngineOptions { n_ctx: Some(100), ..engine };
    let other = Server::with_model(options(), move || load_with(Model::built_in()?, &short, 2, 4));
    other.wait_until_ready();
    assert!(restore(&other, "good").contains("157 tokens"));
    // The server still works afterwards.
    assert_eq!(server.post("/v1/completions", &completion(&json!({}))).json()["choices"][0]["text"], STORY);
    assert_eq!(slot_action(&server, "0", "restore", "good").status, 200);
    assert_eq!(server.post("/slots/0?action=restore", &json!({"filename": "good", "model": "stories"})).status, 200);
    assert_eq!(complete(&server, &prompt()).1, 1);
}

#[test]
fn the_openapi_description_has_the_slot_actions() {
    let description = server().get("/openapi.json").json();
    let post = &description["paths"]["/slots/{id_slot}"]["post"];
    let names: Vec<&Value> =
        post["parameters"].as_array().unwrap().iter().map(|parameter| &parameter["name"]).collect();
    assert_eq!(names, ["id_slot", "action", "model"]);
    assert!(post["responses"]["501"].is_object() && post["responses"]["403"].is_object());
}
