//! What the benches share: models made on the spot, and when to do nothing.

use std::path::Path;
use std::process::Command;

use criterion::Criterion;
use metal_attention::Model;

/// Whether `cargo bench` runs this program: `cargo test --benches` does, too, which should not take minutes.
pub fn asked() -> bool {
    std::env::args().any(|arg| arg == "--bench")
}

/// Criterion with the flags of the command line, when [`asked`].
pub fn criterion() -> Option<Criterion> {
    asked().then(|| Criterion::default().sample_size(20).configure_from_args())
}

/// The model that `metal-attention synth ARGS` writes into `folder`.
pub fn synthetic_model(folder: &Path, args: &[&str]) -> Model {
    let path = folder.join(args.join("_") + ".gguf");
    let output =
        Command::new(env!("CARGO_BIN_EXE_metal-attention")).arg("synth").args(args).arg("-o").arg(&path).output();
    let output = output.expect("the program starts");
    assert!(output.status.success(), "synth: {}", String::from_utf8_lossy(&output.stderr));
    Model::open(&path).expect("synth writes models that load")
}
