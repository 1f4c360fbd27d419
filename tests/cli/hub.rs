//! The commands `pull`, `list` and `rm`, and `-m hf:NAME`, against a local server in place of the Hugging Face hub.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use crate::common::{program, stderr, stdout};
use metal_attention::gguf::{GgufFile, GgufWriter, Metadata, TensorDecl};
use metal_attention_testing::hub_server::{COMMIT, HubServer, REPO, sha256};
use metal_attention_testing::mmproj;
use serde_json::Value as Json;

const BUILT_IN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/stories260K.gguf");

/// A server in place of the hub, and a cache.
pub struct Setup {
    server: HubServer,
    /// The folder of the cache, as in `HF_HOME`.
    pub home: tempfile::TempDir,
}

impl Setup {
    pub fn with(files: &[(&str, &[u8])]) -> Self {
        Self { server: HubServer::with(files), home: tempfile::tempdir().unwrap() }
    }

    /// The program with the server as hub, this setup's cache, and no hub settings of the user's.
    pub fn program(&self, args: &[&str]) -> Command {
        let mut program = program();
        for name in [
            "HF_HUB_CACHE",
            "HUGGINGFACE_HUB_CACHE",
            "HF_TOKEN",
            "HUGGING_FACE_HUB_TOKEN",
            "HF_TOKEN_PATH",
            "HF_HUB_OFFLINE",
            "http_proxy",
            "HTTP_PROXY",
            "all_proxy",
            "ALL_PROXY",
        ] {
            program.env_remove(name);
        }
        program.env("HF_HOME", self.home.path()).env("HF_ENDPOINT", &self.server.url).args(args);
        program
    }

    pub fn run(&self, args: &[&str]) -> Output {
        self.program(args).output().unwrap()
    }

    #[track_caller]
    fn fails(&self, args: &[&str], code: i32, parts: &[&str]) {
        let output = self.run(args);
        let errors = stderr(&output);
        assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(code), &b""[..]), "{args:?}: {errors}");
        for part in parts {
            assert!(errors.contains(part), "{part:?} is not in the message of {args:?}: {errors}");
        }
    }

    fn repo(&self) -> PathBuf {
        self.home.path().join("hub/models--tester--tiny-GGUF")
    }
}

fn built_in() -> Vec<u8> {
    fs::read(BUILT_IN).unwrap()
}

/// The built-in model in two files, as `gguf-split` makes them.
fn split() -> [Vec<u8>; 2] {
    let model = GgufFile::read(BUILT_IN).unwrap();
    let (first, second) = model.tensors().split_at(10);
    [(0u16, first), (1, second)].map(|(no, tensors)| {
        let mut metadata = if no == 0 { model.metadata().clone() } else { Metadata::new() };
        metadata.set("split.no", no);
        metadata.set("split.count", 2u16);
        metadata.set("split.tensors.count", model.tensors().len() as i32);
        let declared: Vec<_> = tensors.iter().map(TensorDecl::from).collect();
        let mut writer = GgufWriter::new(Vec::new(), 3, &metadata, &declared).unwrap();
        for tensor in tensors {
            writer.write(tensor.bytes()).unwrap();
        }
        writer.finish().unwrap()
    })
}

#[test]
fn a_model_runs_by_name_and_the_second_time_from_the_cache() {
    let s = Setup::with(&[("stories260K-Q4_0.gguf", &built_in()), ("stories260K-F32.gguf", &built_in())]);
    let generate = ["-p", "Once upon a time", "-n", "8", "--temp", "0"];
    let expected = stdout(crate::common::run(&[&["run", "-m", BUILT_IN][..], &generate].concat()));
    let by_name = [&["run", "-m", "hf:tester/tiny-GGUF"][..], &generate].concat();
    let first = s.run(&by_name);
    let notes = stderr(&first);
    assert!(notes.contains("downloading stories260K-Q4_0.gguf, 1.0 MiB"), "{notes}");
    assert!(notes.contains("0%\n") && notes.contains("downloaded 1.0 MiB of"), "{notes}");
    assert_eq!(stdout(first), expected);
    assert_eq!(s.server.requests().len(), 2);

    let again = s.run(&by_name);
    assert!(!stderr(&again).contains("downloa"), "{}", stderr(&again));
    assert_eq!(stdout(again), expected);
    let offline =
        s.program(&["info", "--json"]).env("METAL_ATTENTION_MODEL", "hf:tester/tiny-GGUF:q4_0").output().unwrap();
    let info: Json = serde_json::from_str(&stdout(offline)).unwrap();
    assert_eq!((&info["file"], &info["file_bytes"]), (&"hf:tester/tiny-GGUF:q4_0".into(), &1_054_464.into()));
    assert_eq!(s.server.requests(), []);

    let offline =
        s.program(&["tokenize", "-m", "hf:tester/tiny-GGUF:F32", "-p", "x"]).env("HF_HUB_OFFLINE", "1").output();
    let offline = offline.unwrap();
    assert_eq!(offline.status.code(), Some(3));
    assert!(stderr(&offline).contains("HF_HUB_OFFLINE forbids"), "{}", stderr(&offline));
    assert_eq!(s.server.requests(), []);
}

#[test]
fn addresses_and_short_names_find_a_cached_model() {
    let s = Setup::with(&[("stories260K-Q4_0.gguf", &built_in())]);
    let generate = ["Once upon a time", "-n", "8", "--temp", "0"];
    let expected = stdout(crate::common::run(&[&["run", BUILT_IN][..], &generate].concat()));
    let run = |name: &str| stdout(s.run(&[&["run", name][..], &generate].concat()));
    assert_eq!(run("tester/tiny-GGUF"), expected);
    assert_eq!(s.server.requests().len(), 2);
    for name in [
        "hf.co/tester/tiny-GGUF",
        "https://huggingface.co/tester/tiny-GGUF",
        "https://huggingface.co/tester/tiny-GGUF/blob/main/stories260K-Q4_0.gguf",
        "tester/tiny-GGUF:Q4_0",
        "tester/tiny",
        "tiny-GGUF",
        "tiny",
        "stories260K",
        "stories260k-q4_0.gguf",
    ] {
        assert_eq!(run(name), expected, "{name}");
    }
    assert_eq!(stdout(s.run(&[&["run", "-hf", "tester/tiny-GGUF"][..], &generate].concat())), expected);
    let hff = ["run", "-hfr", "tester/tiny-GGUF", "-hff", "stories260K-Q4_0.gguf"];
    assert_eq!(stdout(s.run(&[&hff[..], &generate].concat())), expected);
    assert_eq!(s.server.requests(), []);
    // A file of that name takes precedence.
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("tiny"), "no model").unwrap();
    let output = s.program(&["info", "tiny"]).current_dir(folder.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
}

#[test]
fn well_known_names_are_downloaded_and_errors_name_the_repository() {
    let s = Setup::with(&[
        ("Llama-3.2-1B-Instruct-UD-Q4_K_M.gguf", b"no model"),
        ("llama-3.2-1b-instruct-q4_k_m.GGUF", &built_in()),
    ]);
    s.server.change().repo = "unsloth/Llama-3.2-1B-Instruct-GGUF".into();
    let expected = stdout(crate::common::run(&["run", BUILT_IN, "Once", "-n", "8", "--temp", "0"]));
    let output = s.run(&["run", "llama3.2:1b", "Once", "-n", "8", "--temp", "0"]);
    assert!(stderr(&output).contains("downloading llama-3.2-1b-instruct-q4_k_m.GGUF"), "{}", stderr(&output));
    assert_eq!(stdout(output), expected);
    s.server.requests();
    assert!(stdout(s.run(&["info", "llama3.2:1B"])).contains("llama3.2:1B, 1.0 MiB"));
    assert_eq!(s.server.requests(), []);
    assert!(stdout(s.run(&["pull", "llama3.2:1b"])).ends_with("llama-3.2-1b-instruct-q4_k_m.GGUF\n"));
    stdout(s.run(&["rm", "--yes", "llama3.2:1b"]));
    let message = "qwen3:8b is hf:Qwen/Qwen3-8B-GGUF:*Q4_K_M*.gguf: there is no Qwen/Qwen3-8B-GGUF on ";
    s.fails(&["run", "qwen3:8b", "hi"], 3, &[message]);
    s.fails(&["pull", "qwen3:8b"], 3, &[message]);
    s.fails(&["pull", "qwen3:9b"], 2, &["qwen3 is not known with the tag 9b", "qwen3:8b"]);
}

#[test]
fn a_split_model_is_one_model() {
    let [first, second] = split();
    let names = ["tiny-F32-00001-of-00002.gguf", "tiny-F32-00002-of-00002.gguf"];
    let s = Setup::with(&[(names[0], &first), (names[1], &second)]);
    let info: Json = serde_json::from_str(&stdout(s.run(&["info", "-m", "hf:tester/tiny-GGUF", "--json"]))).unwrap();
    assert_eq!((&info["parts"], &info["runnable"]), (&2.into(), &true.into()));
    let list = stdout(s.run(&["list"]));
    assert!(list.starts_with("hf:tester/tiny-GGUF:F32  F32 ") && list.contains("(2 files)"), "{list}");
}

#[test]
fn pull_prints_the_path_and_list_shows_it() {
    let s =
        Setup::with(&[("stories.gguf", &built_in()), ("stories-Q8_0.gguf", &built_in()), ("README.md", b"hello\n")]);
    s.server.change().redirects = true;
    assert!(stdout(s.run(&["list"])).starts_with("no models in "));
    let pulled = stdout(s.run(&["pull", "tester/tiny-GGUF:stories.gguf", "hf:tester/tiny-GGUF:Q8_0"]));
    let snapshot = s.repo().join("snapshots").join(COMMIT);
    let path = |file: &str| snapshot.join(file).display().to_string();
    assert_eq!(pulled, format!("{}\n{}\n", path("stories.gguf"), path("stories-Q8_0.gguf")));

    // A tensor type that the file's name does not contain is read from its header.
    let list = stdout(s.run(&["list"]));
    let lines: Vec<_> = list.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    assert_eq!(lines[0], "hf:tester/tiny-GGUF:Q8_0 Q8_0 1.0 MiB");
    assert_eq!(lines[1], path("stories-Q8_0.gguf"));
    assert_eq!(lines[2], "hf:tester/tiny-GGUF:stories.gguf F32 1.0 MiB");
    fs::write(s.repo().join("blobs/abc.incomplete"), "begun").unwrap();
    let list: Json = serde_json::from_str(&stdout(s.run(&["list", "--json"]))).unwrap();
    assert_eq!(list["cache"], s.home.path().join("hub").display().to_string());
    let expected = serde_json::json!({
        "name": "hf:tester/tiny-GGUF:stories.gguf", "repo": REPO, "type": "F32", "bytes": 1_054_464,
        "files": [path("stories.gguf")], "mmproj": null, "commit": COMMIT, "newest": true, "complete": true,
    });
    assert_eq!(list["models"][1], expected);
    assert_eq!(list["unfinished"], serde_json::json!([{"repo": REPO, "bytes": 5}]));
}

#[test]
fn a_model_that_sees_pictures_comes_with_its_encoder() {
    let encoder = mmproj::gemma3(64);
    let s = Setup::with(&[
        ("stories-Q4_0.gguf", &built_in()),
        ("stories-Q8_0.gguf", &built_in()),
        ("mmproj-model-f16.gguf", &encoder),
        ("mmproj-model-f32.gguf", &mmproj::gemma3(48)),
    ]);
    let picture = s.home.path().join("1.bmp");
    fs::write(&picture, mmproj::bmp(40, 30, 1)).unwrap();
    let run = |model: &str| {
        let picture = picture.to_str().unwrap();
        s.run(&["run", "-m", model, "--image", picture, "-p", "Once", "-n", "3", "--temp", "0", "--ignore-eos"])
    };
    stdout(s.run(&["pull", "--no-mmproj", "tester/tiny-GGUF:Q8_0"]));
    let errors = stderr(&run("tester/tiny-GGUF:Q8_0"));
    assert!(
        errors.contains("`metal-attention pull tester/tiny-GGUF:Q8_0` brings it if its repository has one"),
        "{errors}"
    );
    let output = run("hf:tester/tiny-GGUF:Q4_0");
    let notes = stderr(&output);
    assert!(notes.contains("downloading mmproj-model-f16.gguf") && !stdout(output).trim().is_empty(), "{notes}");
    s.server.requests();
    assert!(!stdout(run("hf:tester/tiny-GGUF:Q8_0")).trim().is_empty());
    assert_eq!(s.server.requests(), []);
    let output = s.run(&["pull", "tester/tiny-GGUF:Q8_0"]);
    let summary = format!("hf:tester/tiny-GGUF:Q8_0, {:.1} MiB with mmproj-model-f16.gguf", {
        (built_in().len() + encoder.len()) as f64 / f64::from(1 << 20)
    });
    assert!(stderr(&output).contains(&summary), "{}", stderr(&output));

    let list = stdout(s.run(&["list"]));
    assert_eq!((list.lines().count(), list.matches(" (sees pictures)\n").count()), (4, 2), "{list}");
    let list: Json = serde_json::from_str(&stdout(s.run(&["list", "--json"]))).unwrap();
    let file = s.repo().join("snapshots").join(COMMIT).join("mmproj-model-f16.gguf").display().to_string();
    assert_eq!((&list["models"][0]["mmproj"], list["models"].as_array().unwrap().len()), (&file.as_str().into(), 2));
    assert_eq!(list["models"][0]["bytes"].as_u64(), Some((built_in().len() + encoder.len()) as u64));
    let removed = stderr(&s.run(&["rm", "--yes", "tester/tiny-GGUF:Q8_0"]));
    assert!(!removed.contains("mmproj"), "{removed}");
    let removed = stderr(&s.run(&["rm", "--yes", "tester/tiny-GGUF"]));
    assert!(removed.contains("mmproj-model-f16.gguf, ") && !s.repo().exists(), "{removed}");
}

#[test]
fn rm_removes_after_confirmation() {
    let s = Setup::with(&[("stories-Q4_0.gguf", &built_in())]);
    stdout(s.run(&["pull", REPO]));
    s.fails(&["rm", REPO], 2, &["hf:tester/tiny-GGUF:Q4_0, 1.0 MiB", "[y/N]", "--yes"]);
    let rm_with_answer = |answer: &str| {
        let mut rm = s.program(&["rm", REPO]);
        let mut child = rm.stdin(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(answer.as_bytes()).unwrap();
        child.wait().unwrap().code()
    };
    assert_eq!(rm_with_answer("n\n"), Some(1));
    assert!(s.repo().exists());
    assert_eq!(rm_with_answer("y\n"), Some(0));
    assert!(!s.repo().exists());
    s.fails(&["rm", "--yes", REPO], 3, &["not in the cache"]);
    s.fails(&["rm", "--yes", "../.."], 2, &["no model's name"]);
    stdout(s.run(&["pull", REPO]));
    stdout(s.run(&["rm", "--yes", "hf:tester/tiny-GGUF:q4_0"]));
    assert!(!s.repo().exists());
}

#[test]
fn failed_downloads_are_explained() {
    let s = Setup::with(&[("a-Q8_0.gguf", &built_in()), ("a-Q2_K.gguf", &built_in())]);
    s.fails(&["run", "-m", "hf:tiny", "-p", "x"], 2, &["\"hf:tiny\"", "OWNER/REPO"]);
    s.fails(&["pull", "tiny"], 2, &["OWNER/REPO"]);
    s.fails(&["pull", REPO], 2, &["several models", "Q2_K", "Q8_0", "a-Q8_0.gguf"]);
    s.fails(&["pull", "tester/tiny-GGUF:Q4_0"], 3, &["no Q4_0", "Q8_0"]);
    s.fails(&["pull", "tester/other"], 3, &["there is no tester/other"]);
    s.server.change().damages = true;
    s.fails(&["info", "-m", "hf:tester/tiny-GGUF:Q8_0"], 3, &["damaged", "removed", &sha256(&built_in())]);
    s.server.change().refuses_files = Some((401, "GatedRepo"));
    s.fails(&["pull", "tester/tiny-GGUF:Q8_0"], 1, &["gated", "HF_TOKEN"]);
}

#[test]
fn the_access_token_is_used_and_not_shown() {
    let s = Setup::with(&[("a-Q8_0.gguf", &built_in())]);
    s.server.change().refuses = Some((401, "RepoNotFound"));
    s.fails(&["pull", REPO], 1, &["HF_TOKEN"]);
    fs::write(s.home.path().join("token"), "hf_secret\n").unwrap();
    let output = s.program(&["-v", "pull", REPO]).env("RUST_LOG", "trace").output().unwrap();
    let log = stderr(&output);
    assert!(log.contains("status 200 from 127.0.0.1") && !log.contains("hf_secret"), "{log}");
    assert!(!stdout(output).contains("hf_secret"));
}

#[cfg(unix)]
#[test]
fn ctrl_c_keeps_the_bytes_that_have_arrived() {
    let bytes = built_in();
    let s = Setup::with(&[("a-Q8_0.gguf", &bytes)]);
    s.server.change().stall = Some(500_000);
    let mut pull = s.program(&["pull", REPO]).stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(pull.stderr.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line == "a-Q8_0.gguf 40%"));
    let partial = s.repo().join(format!("blobs/{}.incomplete", sha256(&bytes)));
    while fs::metadata(&partial).unwrap().len() < 500_000 {
        std::thread::yield_now();
    }
    let kill = Command::new("kill").args(["-INT", &pull.id().to_string()]).status().unwrap();
    assert!(kill.success());
    assert!(lines.any(|line| line.contains("interrupted: what has arrived is kept")));
    assert_eq!(pull.wait().unwrap().code(), Some(130));
    s.server.requests();

    let output = s.run(&["pull", REPO]);
    assert!(
        stderr(&output).contains("downloading a-Q8_0.gguf, 1.0 MiB, 488.3 KiB are there already"),
        "{}",
        stderr(&output)
    );
    assert_eq!(fs::read(stdout(output).trim_end()).unwrap(), bytes);
    assert_eq!(s.server.requests()[1].range.as_deref(), Some("bytes=500000-"));
}

#[test]
fn format_characters_of_names_do_not_reach_the_terminal() {
    // Names with control characters are rejected. These are format characters, which are allowed.
    let odd = "\u{202e}\u{2066}\u{200b}";
    let files = [format!("a{odd}-Q8_0.gguf"), format!("b{odd}-Q2_K.gguf")];
    let s = Setup::with(&[(&files[0], &built_in()), (&files[1], &built_in())]);
    let has_control_characters = |text: &str| text.chars().any(|c| (c.is_control() && c != '\n') || odd.contains(c));
    let pull = |suffix: &str| stderr(&s.run(&["pull", &format!("{REPO}{suffix}")]));
    for (suffix, part) in [("", "several models"), (":Q4_0", "no Q4_0"), (&format!(":x{odd}.gguf"), "has no x")] {
        let errors = pull(suffix);
        assert!(errors.contains(part) && !has_control_characters(&errors), "{errors:?}");
    }
    // The cache may contain such names, too.
    let snapshot = s.repo().join("snapshots").join(COMMIT);
    fs::create_dir_all(&snapshot).unwrap();
    fs::write(snapshot.join(&files[0]), built_in()).unwrap();
    for args in [&["list"][..], &["list", "--json"], &["rm", REPO], &["info", "-m", &format!("hf:{REPO}:Q8_0")]] {
        let output = s.run(args);
        for text in [String::from_utf8(output.stdout.clone()).unwrap(), stderr(&output)] {
            assert!(!has_control_characters(&text), "{args:?}: {text:?}");
        }
    }
    let list: Json = serde_json::from_str(&stdout(s.run(&["list", "--json"]))).unwrap();
    let file = list["models"][0]["files"][0].as_str().unwrap();
    assert!(file.ends_with(&files[0]), "{file}");
}
