//! Sets `METAL_ATTENTION_BUILT_IN_MODEL` at compile time to the file of the built-in model. In the repository it is in the folder
//! `models`, to which this crate's folder has a link. In the crate's package the link is a file.

use std::path::Path;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let package = std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets the folder of the package");
    let package = Path::new(&package);
    // Not the link: a checkout on Windows may have a file with the name of its target there.
    let file = [package.join("../../models/stories260K.gguf"), package.join("models/stories260K.gguf")]
        .into_iter()
        .find(|file| file.exists())
        .expect("the built-in model is in the repository's folder models, or in the package's");
    println!("cargo::rerun-if-changed={}", file.display());
    println!("cargo::rustc-env=METAL_ATTENTION_BUILT_IN_MODEL={}", file.display());
}
