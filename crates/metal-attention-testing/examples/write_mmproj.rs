//! Writes the encoders whose embeddings are compared with llama.cpp's, and their pictures: `write_mmproj FOLDER`;
//! `tools/reference-pictures` runs it. A line for each file: its name, then the names of its pictures.

use std::path::PathBuf;

use metal_attention_testing::mmproj::{bmp, families};

fn main() {
    let folder = PathBuf::from(std::env::args().nth(1).expect("write_mmproj FOLDER"));
    for family in families() {
        let mut line = vec![family.name.to_owned()];
        let bytes = family.for_llama_cpp.as_ref().unwrap_or(&family.bytes);
        std::fs::write(folder.join(format!("{}.gguf", family.name)), bytes).expect("a file that can be written");
        for &[width, height, seed] in family.pictures {
            let name = format!("{width}x{height}-{seed}.bmp");
            std::fs::write(folder.join(&name), bmp(width, height, seed)).expect("a file that can be written");
            line.push(name);
        }
        println!("{}", line.join(" "));
    }
}
