//! Random quantised tensors, read from GGUF files in memory.

use metal_attention_gguf::blocks::random_blocks;
use metal_attention_gguf::{GgufFile, GgufWriter, Metadata, Tensor, TensorDecl, TensorType};

use super::random;

/// Random tensors of `(type, n_in, n_out)`.
pub fn tensors(shapes: &[(TensorType, usize, usize)], seed: u64) -> Vec<Tensor> {
    let decls: Vec<_> = shapes
        .iter()
        .enumerate()
        .map(|(i, &(ty, n_in, n_out))| TensorDecl { name: format!("w{i}"), shape: vec![n_in, n_out], ty })
        .collect();
    let mut writer = GgufWriter::new(Vec::new(), 3, &Metadata::new(), &decls).unwrap();
    for (i, &(ty, n_in, n_out)) in shapes.iter().enumerate() {
        writer.write(&quantized(ty, &random(seed + 100 * i as u64, n_in * n_out), 1.0)).unwrap();
    }
    GgufFile::from_bytes(&writer.finish().unwrap()).unwrap().tensors().to_vec()
}

/// A tensor of `n_out` rows that are quantised already.
fn from_rows<'a>(ty: TensorType, n_in: usize, n_out: usize, rows: impl Iterator<Item = &'a [u8]>) -> Tensor {
    let decl = TensorDecl { name: "w".into(), shape: vec![n_in, n_out], ty };
    let mut writer = GgufWriter::new(Vec::new(), 3, &Metadata::new(), &[decl]).unwrap();
    rows.for_each(|row| writer.write(row).unwrap());
    GgufFile::from_bytes(&writer.finish().unwrap()).unwrap().tensors()[0].clone()
}

/// A random tensor with values in `-1..1`.
pub fn tensor(ty: TensorType, n_in: usize, n_out: usize, seed: u64) -> Tensor {
    scaled_tensor(ty, n_in, n_out, seed, 1.0)
}

/// A tensor that repeats the `period` rows of [`tensor`].
pub fn repeated(ty: TensorType, n_in: usize, n_out: usize, period: usize, seed: u64) -> Tensor {
    let some = tensor(ty, n_in, period, seed);
    from_rows(ty, n_in, n_out, (0..n_out).map(|i| some.row(i % period)))
}

/// A random tensor with values in `-scale..scale`.
pub fn scaled_tensor(ty: TensorType, n_in: usize, n_out: usize, seed: u64, scale: f32) -> Tensor {
    let values: Vec<f32> = random(seed, n_in * n_out).iter().map(|v| v * scale).collect();
    from_rows(ty, n_in, n_out, std::iter::once(&quantized(ty, &values, scale)[..]))
}

/// `values` as quantisation blocks of `ty`. Types that are slow to quantise get random blocks with values within `size`
/// instead.
fn quantized(ty: TensorType, values: &[f32], size: f32) -> Vec<u8> {
    use TensorType::{IQ1_M, IQ1_S, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS};
    if [IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S].contains(&ty) {
        return random_blocks(ty, values.len(), values.len() as u64, size);
    }
    let mut bytes = Vec::new();
    ty.quantize(values, &mut bytes).unwrap_or_else(|e| panic!("{ty}: {e}"));
    bytes
}
