//! Helpers of the benchmarks: synthetic models, and whether to run.

use std::path::Path;
use std::process::Command;

use criterion::Criterion;
use metal_attention::Model;

/// Criterion with the flags of the command line, if `cargo bench` runs this program. `cargo test --benches` runs it, too, and
/// should not take minutes.
pub fn criterion() -> Option<Criterion> {
    let benchmark = std::env::args().any(|arg| arg == "--bench");
    benchmark.then(|| Criterion::default().sample_size(20).configure_from_args())
}

/// Writes a model with `metal-attention synth ARGS` to `folder`, and opens it.
pub fn synthetic_model(folder: &Path, args: &[&str]) -> Model {
    let path = folder.join(args.join("_") + ".gguf");
    let output =
        Command::new(env!("CARGO_BIN_EXE_metal-attention")).arg("synth").args(args).arg("-o").arg(&path).output();
    let output = output.expect("the program starts");
    assert!(output.status.success(), "synth: {}", String::from_utf8_lossy(&output.stderr));
    Model::open(&path).expect("synth writes models that load")
}
