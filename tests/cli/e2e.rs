//! Text generation from prompt to text on the CPU and through wgpu on the GPU (a software Vulkan driver suffices). Without
//! a GPU only the CPU is tested; in CI a missing GPU is a failure.

use crate::common::{ids, program, reference, run, stderr, stdout};
use serde_json::Value;

const STORIES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/stories260K.gguf");
const TALES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/tales-4m-q4_0.gguf");

/// `cpu`, and `gpu` where there is one.
fn devices() -> Vec<&'static str> {
    let mut devices = vec!["cpu"];
    if cfg!(feature = "wgpu") {
        let output = run(&["run", "--device", "gpu", "-p", "Once", "--temp", "0", "-n", "1"]);
        if output.status.code() == Some(4) && std::env::var_os("CI").is_none() {
            metal_attention_testing::skip(&stderr(&output));
        } else {
            assert!(output.status.success(), "{}", stderr(&output));
            devices.push("gpu");
        }
    }
    devices
}

/// The `n` token ids after `prompt`, sampled greedily.
fn continuation(args: &[&str], model: &str, prompt: &str, n: usize) -> Vec<u32> {
    let n = n.to_string();
    let mut command = program();
    command.args(["run", "--json", "-m", model, "-p", prompt, "--temp", "0", "-n", &n]).args(args);
    let text = stdout(command.output().unwrap());
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.filter(|l| l["type"] == "token").map(|l| l["id"].as_u64().unwrap() as u32).collect()
}

#[test]
fn prefill_and_decode_give_the_reference_text_on_every_device() {
    for device in devices() {
        for case in reference("stories260K")["cases"].as_array().unwrap() {
            let (prompt, expected) = (case["prompt"].as_str().unwrap(), ids(&case["greedy"]));
            let got = continuation(&["--device", device, "--cache-type", "f32"], STORIES, prompt, expected.len());
            assert_eq!(got, expected, "{device} {prompt:?}");
        }
    }
}

#[test]
fn prefill_in_chunks_of_any_size_gives_the_same_text() {
    let prompt = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, \
                  she saw a big, red ball. She wanted to play with it, but it was too high up in the tree. ";
    for model in [STORIES, TALES] {
        for device in devices() {
            let whole = continuation(&["--device", device, "--cache-type", "f32", "--exact"], model, prompt, 24);
            assert!(!whole.is_empty());
            for ubatch in ["1", "7", "17", "64"] {
                let args = ["--device", device, "--cache-type", "f32", "--exact", "--ubatch-size", ubatch];
                assert_eq!(continuation(&args, model, prompt, 24), whole, "{model} {device} ubatch {ubatch}");
            }
        }
    }
}
