//! Writes the generated models as files: `write_models FOLDER [COLLECTION...]`; `tools/reference-models` runs it.

use std::path::PathBuf;

use metal_attention_testing::models::{COLLECTIONS, generate};

fn main() {
    let mut args = std::env::args().skip(1);
    let folder = PathBuf::from(args.next().expect("write_models FOLDER [COLLECTION...]"));
    let names: Vec<String> = args.collect();
    let names = if names.is_empty() { COLLECTIONS.map(str::to_owned).to_vec() } else { names };
    for name in names {
        std::fs::create_dir_all(folder.join(&name)).expect("a folder that can be made");
        for (file, bytes) in generate(&name) {
            std::fs::write(folder.join(&name).join(file), bytes).expect("a file that can be written");
        }
    }
}
