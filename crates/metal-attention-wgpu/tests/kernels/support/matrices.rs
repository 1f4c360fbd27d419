//! Random quantised tensors, in files in memory.

use metal_attention_gguf::blocks::random_blocks;
use metal_attention_gguf::{GgufFile, GgufWriter, Metadata, Tensor, TensorDecl, TensorType};

use super::random;

/// Tensors of `(type, n_in, n_out)`, in one file.
pub fn tensors(wanted: &[(TensorType, usize, usize)], seed: u64) -> Vec<Tensor> {
    let decls: Vec<_> = wanted
        .iter()
        .enumerate()
        .map(|(i, &(ty, n_in, n_out))| TensorDecl { name: format!("w{i}"), shape: vec![n_in, n_out], ty })
        .collect();
    let mut writer = GgufWriter::new(Vec::new(), 3, &Metadata::new(), &decls).unwrap();
    for (i, &(ty, n_in, n_out)) in wanted.iter().enumerate() {
        writer.write(&quantized(ty, &random(seed + 100 * i as u64, n_in * n_out), 1.0)).unwrap();
    }
    GgufFile::from_bytes(&writer.finish().unwrap()).unwrap().tensors().to_vec()
}

/// One tensor of rows that are in blocks already.
fn from_rows<'a>(ty: TensorType, n_in: usize, n_out: usize, rows: impl Iterator<Item = &'a [u8]>) -> Tensor {
    let decl = TensorDecl { name: "w".into(), shape: vec![n_in, n_out], ty };
    let mut writer = GgufWriter::new(Vec::new(), 3, &Metadata::new(), &[decl]).unwrap();
    rows.for_each(|row| writer.write(row).unwrap());
    GgufFile::from_bytes(&writer.finish().unwrap()).unwrap().tensors()[0].clone()
}

/// One tensor.
pub fn tensor(ty: TensorType, n_in: usize, n_out: usize, seed: u64) -> Tensor {
    scaled_tensor(ty, n_in, n_out, seed, 1.0)
}

/// A tensor of many rows: those of [`tensor`] with `period` rows, again and again.
pub fn repeated(ty: TensorType, n_in: usize, n_out: usize, period: usize, seed: u64) -> Tensor {
    let some = tensor(ty, n_in, period, seed);
    from_rows(ty, n_in, n_out, (0..n_out).map(|i| some.row(i % period)))
}

/// One tensor of numbers in `-scale..scale`.
pub fn scaled_tensor(ty: TensorType, n_in: usize, n_out: usize, seed: u64, scale: f32) -> Tensor {
    let values: Vec<f32> = random(seed, n_in * n_out).iter().map(|v| v * scale).collect();
    from_rows(ty, n_in, n_out, std::iter::once(&quantized(ty, &values, scale)[..]))
}

/// `values` as blocks of `ty`, or random blocks that stay within `size` where the nearest take long to find.
fn quantized(ty: TensorType, values: &[f32], size: f32) -> Vec<u8> {
    use TensorType::{IQ1_M, IQ1_S, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS};
    if [IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S].contains(&ty) {
        return random_blocks(ty, values.len(), values.len() as u64, size);
    }
    let mut bytes = Vec::new();
    ty.quantize(values, &mut bytes).unwrap_or_else(|e| panic!("{ty}: {e}"));
    bytes
}
