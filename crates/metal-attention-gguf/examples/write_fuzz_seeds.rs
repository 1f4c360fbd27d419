//! Writes the seeds of the fuzz target `gguf`: small valid files with all value types and all tensor types.
//!
//! `cargo run -p metal-attention-gguf --example write_fuzz_seeds fuzz/seeds/gguf`

#[path = "../tests/gguf/support/mod.rs"]
mod support;

use std::path::PathBuf;

use metal_attention_gguf::{GgufWriter, Metadata, Result, TensorDecl, TensorType};

/// A file with this metadata and tensors of constant bytes.
fn write(version: u32, metadata: &Metadata, tensors: &[TensorDecl]) -> Result<Vec<u8>> {
    let mut writer = GgufWriter::new(Vec::new(), version, metadata, tensors)?;
    for tensor in tensors {
        writer.write(&vec![0x2a; tensor.ty.row_bytes(tensor.shape.iter().product())])?;
    }
    writer.finish()
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = PathBuf::from(std::env::args().nth(1).ok_or("usage: write_fuzz_seeds FOLDER")?);
    std::fs::create_dir_all(&folder)?;
    std::fs::write(folder.join("empty.gguf"), write(3, &Metadata::new(), &[])?)?;
    std::fs::write(folder.join("values.gguf"), write(2, &support::every_value(), &[])?)?;
    let mut metadata = Metadata::new();
    metadata.set("general.alignment", 8u32);
    metadata.set("tokenizer.ggml.tokens", vec!["<s>", "a", "é"]);
    let decl = |name: &str, shape: &[usize], ty| TensorDecl { name: name.into(), shape: shape.to_vec(), ty };
    let small = [decl("w", &[3, 2, 1, 2], TensorType::F32), decl("q", &[32, 2], TensorType::Q4_0)];
    std::fs::write(folder.join("tensors.gguf"), write(3, &metadata, &small)?)?;
    for &ty in TensorType::ALL {
        let tensor = decl("t", &[ty.block_len()], ty);
        std::fs::write(folder.join(format!("{ty}.gguf")), write(3, &Metadata::new(), &[tensor])?)?;
    }
    Ok(())
}
