//! The command `run`: text and JSON output, prompts, sampling flags, stop conditions and interruption, on the built-in model
//! and its reference continuations.

use std::io::{BufRead, BufReader, Read};
use std::process::Stdio;

use crate::common::{ids, program, reference, run, run_with_input, stderr, stdout};
use serde_json::Value;

const PROMPT: &str = "Once upon a time";
const STORY: &str = ", there was a little girl named Lily. She loved to play outside in the park.";

fn json_lines(args: &[&str]) -> Vec<Value> {
    let text = stdout(run(&[&["run", "--json"], args].concat()));
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn token_ids(lines: &[Value]) -> Vec<u32> {
    lines.iter().filter(|l| l["type"] == "token").map(|l| l["id"].as_u64().unwrap() as u32).collect()
}

#[test]
fn greedy_continuations_equal_the_reference() {
    for case in reference("stories260K")["cases"].as_array().unwrap() {
        let prompt = case["prompt"].as_str().unwrap();
        let lines = json_lines(&["-p", prompt, "--temp", "0", "-n", "128", "--cache-type", "f32"]);
        assert_eq!(ids(&lines[0]["prompt_ids"]), ids(&case["tokens"]), "{prompt}");
        assert_eq!(token_ids(&lines), ids(&case["greedy"]), "{prompt}");
    }
}

#[test]
fn stdout_has_only_the_continuation() {
    let continuation = ids(&reference("stories260K")["cases"][0]["greedy"]);
    let list = continuation.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    let expected = stdout(run(&["detokenize", &format!("1,403,407,261,378,{list}")]));
    let output = run(&["run", "-p", PROMPT, "--temp", "0", "-n", "128", "--spec", "off"]);
    let errors = stderr(&output);
    let text = stdout(output);
    assert!(text.starts_with(STORY), "{text}");
    assert_eq!(format!("{PROMPT}{text}"), expected);

    assert!(errors.starts_with("note: no model given with -m: using the built-in model stories260K\n"), "{errors}");
    let labels: Vec<_> = errors.lines().skip(1).map(|line| line.split("  ").next().unwrap()).collect();
    let expected = ["load time", "prompt", "generated", "time to first token", "peak memory"];
    assert_eq!(labels, expected[..if cfg!(target_os = "linux") { 5 } else { labels.len() }]);
    assert!(errors.contains("5 tokens, ") && errors.contains("128 tokens, "), "{errors}");
}

#[cfg(unix)]
#[test]
fn statistics_begin_a_new_line_if_stdout_and_stderr_share_a_pipe() {
    let shared_output = |args: &[&str]| {
        let (mut reader, writer) = std::io::pipe().unwrap();
        let mut command = program();
        command.args(["run", "--temp", "0"]).args(args).stdout(writer.try_clone().unwrap()).stderr(writer);
        let mut child = command.spawn().unwrap();
        drop(command);
        let mut all = String::new();
        reader.read_to_string(&mut all).unwrap();
        assert!(child.wait().unwrap().success());
        all
    };
    let all = shared_output(&["-p", PROMPT, "-n", "8"]);
    assert!(all.contains(", there was a little girl\nload time"), "{all}");
    // A note precedes the statistics.
    let all = shared_output(&["-p", PROMPT, "-c", "9"]);
    assert!(all.contains(", there was a little\nnote: the text ends here"), "{all}");
    // No line break is added after a text that ends with one, after no text, and after JSON lines.
    for args in
        [&["-p", "Once\n", "-n", "0", "--echo"][..], &["-p", PROMPT, "-n", "0"], &["-p", PROMPT, "-n", "2", "--json"]]
    {
        let all = shared_output(args);
        assert!(all.contains("\nload time") && !all.contains("\n\n"), "{all}");
    }
    // With separate pipes no line break is added.
    let output = run(&["run", "--temp", "0", "-p", PROMPT, "-n", "8"]);
    assert!(!stderr(&output).contains("\n\n"), "{}", stderr(&output));
    assert_eq!(stdout(output), ", there was a little girl");
}

#[test]
fn a_model_file_gives_the_reference_continuation() {
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/models/tales-4m-q4_0.gguf");
    let case = &reference("tales-4m")["cases"][0];
    let prompt = case["prompt"].as_str().unwrap();
    let lines = json_lines(&["-m", model, "-p", prompt, "--temp", "0", "-n", "16", "--exact"]);
    assert_eq!(token_ids(&lines), ids(&case["greedy"])[..16]);
}

#[test]
fn json_has_a_meta_line_token_lines_and_a_done_line() {
    let lines = json_lines(&["-p", PROMPT, "--temp", "0", "-n", "20", "-s", "7"]);
    let types: Vec<_> = lines.iter().map(|l| l["type"].as_str().unwrap()).collect();
    assert_eq!(types[0], "meta");
    assert_eq!(types[1..21], ["token"; 20]);
    assert_eq!(types[21..], ["done"]);

    let meta = &lines[0];
    assert_eq!(meta["architecture"], "llama");
    assert_eq!(meta["model"], "stories260K (built in)");
    assert_eq!((meta["n_ctx"].as_u64(), meta["seed"].as_u64()), (Some(512), Some(7)));
    assert_eq!(meta["prompt"], PROMPT);

    let done = &lines[21];
    let pieces: String = lines[1..21].iter().map(|l| l["text"].as_str().unwrap()).collect();
    assert_eq!(done["text"], pieces);
    assert!(STORY.starts_with(&pieces) || pieces.starts_with(STORY), "{pieces}");
    assert_eq!(done["stop_reason"], "length");
    let timings = &done["timings"];
    assert_eq!((timings["prompt_tokens"].as_u64(), timings["generated_tokens"].as_u64()), (Some(5), Some(20)));
    for key in ["load_ms", "prefill_ms", "prefill_tokens_per_second", "decode_ms", "decode_tokens_per_second"] {
        assert!(timings[key].as_f64().unwrap() > 0.0, "{key}: {timings}");
    }
    assert!(timings["first_token_ms"].as_f64() >= timings["prefill_ms"].as_f64(), "{timings}");
}

/// Stdout is a datagram socket, on which every write is a message of its own.
#[cfg(unix)]
#[test]
fn every_token_is_written_immediately() {
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixDatagram;

    let (ours, theirs) = UnixDatagram::pair().unwrap();
    let mut child = program()
        .args(["run", "-p", PROMPT, "--temp", "0", "-n", "8"])
        .stdout(OwnedFd::from(theirs))
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut pieces = Vec::new();
    for _ in 0..8 {
        let mut buffer = [0; 100];
        let n = ours.recv(&mut buffer).unwrap();
        pieces.push(String::from_utf8(buffer[..n].to_vec()).unwrap());
    }
    assert!(child.wait().unwrap().success());
    assert_eq!(pieces, [",", " there", " was", " a", " little", " g", "ir", "l"]);
}

#[test]
fn prompts_from_files_and_stdin_are_unchanged() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let text = "\nOnce upon a  time \n";
    std::fs::write(file.path(), text).unwrap();
    let path = file.path().to_str().unwrap();
    let args = ["--temp", "0", "-n", "12", "--echo"];
    let from_file = stdout(run(&[&["run", "-f", path][..], &args].concat()));
    assert!(from_file.starts_with(text), "{from_file:?}");
    assert_eq!(stdout(run_with_input(&[&["run", "-f", "-"][..], &args].concat(), text.as_bytes())), from_file);
    assert_eq!(stdout(run_with_input(&[&["run", "-"][..], &args].concat(), text.as_bytes())), from_file);
    assert_eq!(stdout(run(&[&["run", "-p", text][..], &args].concat())), from_file);
}

#[test]
fn the_model_may_come_from_the_environment() {
    let output = program()
        .args(["run", "-p", "Hello", "-n", "1", "--json"])
        .env("METAL_ATTENTION_MODEL", concat!(env!("CARGO_MANIFEST_DIR"), "/models/stories260K.gguf"))
        .output()
        .unwrap();
    assert!(!stderr(&output).contains("built-in"), "{}", stderr(&output));
    assert!(stdout(output).contains("models/stories260K.gguf"));
}

#[test]
fn stop_strings_end_the_text_before_them() {
    let args = ["run", "-p", PROMPT, "--temp", "0", "-n", "128", "--stop", "never", "--stop", "named Li"];
    assert_eq!(stdout(run(&args)), ", there was a little girl ");
    let lines = json_lines(&args[1..]);
    assert_eq!(lines.last().unwrap()["stop_reason"], "stop_string");
    assert_eq!(lines.last().unwrap()["text"], ", there was a little girl ");
    // The beginning of a stop string is printed if the rest does not follow.
    let text = stdout(run(&["run", "-p", PROMPT, "--temp", "0", "-n", "8", "--stop", " girl named Bob"]));
    assert_eq!(text, ", there was a little girl");
}

#[test]
fn the_same_seed_gives_the_same_text() {
    let story = |seed: &str| stdout(run(&["run", "-p", PROMPT, "--temp", "1.5", "-n", "40", "-s", seed]));
    assert_eq!(story("1"), story("1"));
    assert_ne!(story("1"), story("2"));
    assert_ne!(story("-1"), story("-1"));
}

#[test]
fn sampling_flags_reach_the_sampler() {
    let greedy = json_lines(&["-p", PROMPT, "--temp", "0", "-n", "3"]);
    let only_one = json_lines(&["-p", PROMPT, "--temp", "2", "--top-k", "1", "-n", "3"]);
    assert_eq!(token_ids(&only_one), token_ids(&greedy));
    let forbidden = json_lines(&["-p", PROMPT, "--temp", "0", "-n", "1", "--logit-bias", "432-inf"]);
    assert_ne!(token_ids(&forbidden), [432]);
    let forced = json_lines(&["-p", PROMPT, "-s", "3", "-n", "2", "-l", "300+1000"]);
    assert_eq!(token_ids(&forced), [300, 300]);
}

#[test]
fn a_full_context_ends_the_text_without_an_error() {
    let output = run(&["run", "-p", PROMPT, "--temp", "0", "-c", "20"]);
    let errors = stderr(&output);
    let text = stdout(output);
    assert!(text.starts_with(", there was a little girl named"), "{text}");
    assert!(errors.contains("the context of 20 tokens is full"), "{errors}");
    let lines = json_lines(&["-p", PROMPT, "--temp", "0", "-c", "20"]);
    assert_eq!(lines.last().unwrap()["stop_reason"], "context_full");
    // 5 prompt tokens and 15 generated ones fill the context; one more is sampled from the last logits.
    assert_eq!(token_ids(&lines).len(), 16);
}

#[test]
fn a_limit_of_zero_tokens_gives_an_empty_text() {
    let lines = json_lines(&["-p", PROMPT, "-n", "0"]);
    assert_eq!(lines.len(), 2);
    assert_eq!((&lines[1]["text"], &lines[1]["stop_reason"]), (&"".into(), &"length".into()));
    assert_eq!(stdout(run(&["run", "-p", PROMPT, "-n", "0"])), "");
}

#[test]
fn an_empty_prompt_starts_with_bos() {
    let text = stdout(run(&["run", "-p", "", "--temp", "0", "-n", "4"]));
    assert_eq!(text, "Once upon a time");
    let output = run(&["run", "-p", "", "--no-bos"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("the prompt is empty"), "{}", stderr(&output));
}

#[test]
fn special_tokens_are_parsed_on_request_only() {
    let prompt_ids = |args: &[&str]| ids(&json_lines(&[args, &["-n", "1", "-p", "<s>a"]].concat())[0]["prompt_ids"]);
    assert_eq!(prompt_ids(&["--parse-special", "--no-bos"])[0], 1);
    assert_ne!(prompt_ids(&["--no-bos"])[0], 1);
    assert_eq!(prompt_ids(&[])[0], 1);
}

#[test]
fn verbose_shows_memory_and_threads() {
    let errors = stderr(&run(&["run", "-v", "--device", "cpu", "-p", PROMPT, "-n", "1", "-t", "1"]));
    for what in ["threads: 1", "weights: 1.0 MiB", "KV cache: ", "scratch: ", "seed: "] {
        assert!(errors.contains(what), "{what} is not in {errors}");
    }
}

#[test]
fn a_closed_stdout_ends_the_program_without_an_error() {
    // The context takes much longer to fill than the test lasts.
    let mut child = program()
        .args(["run", "-p", PROMPT, "-c", "100000", "--ignore-eos", "--json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains("meta"), "{line}");
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert!(!stderr(&output).contains("error"), "{}", stderr(&output));
}

#[cfg(unix)]
#[test]
fn ctrl_c_prints_the_statistics_and_exits_with_130() {
    let mut child = program()
        .args(["run", "-p", PROMPT, "-c", "100000", "--ignore-eos"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = [0; 8];
    let mut reader = child.stdout.take().unwrap();
    reader.read_exact(&mut first).unwrap();
    let pid = child.id().to_string();
    assert!(std::process::Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    let mut rest = Vec::new();
    reader.read_to_end(&mut rest).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    let errors = stderr(&output);
    assert!(errors.contains("generated") && errors.contains("tok/s"), "{errors}");
}
