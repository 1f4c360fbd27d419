//! Writes the generated models as files: `write_models FOLDER [COLLECTION...]`; `tools/reference-models` runs it. The collection
//! `pictures` is a model with a picture encoder, and two pictures.

use std::path::PathBuf;

use metal_attention_testing::mmproj;
use metal_attention_testing::models::{COLLECTIONS, generate};

fn main() {
    let mut args = std::env::args().skip(1);
    let folder = PathBuf::from(args.next().expect("write_models FOLDER [COLLECTION...]"));
    let names: Vec<String> = args.collect();
    let names = if names.is_empty() { COLLECTIONS.map(str::to_owned).to_vec() } else { names };
    for name in names {
        std::fs::create_dir_all(folder.join(&name)).expect("a folder that can be made");
        let files = if name == "pictures" { mmproj::files() } else { generate(&name) };
        for (file, bytes) in files {
            std::fs::write(folder.join(&name).join(file), bytes).expect("a file that can be written");
        }
    }
}
