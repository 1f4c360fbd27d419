//! Fuzz target of the GGUF reader. Any bytes give either a typed error, or a file whose metadata and tensors can be read,
//! dequantised and written again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use metal_attention_gguf::{GgufFile, GgufWriter, TensorDecl};

/// Writes `file` again.
fn rewrite(file: &GgufFile) -> Vec<u8> {
    let tensors: Vec<TensorDecl> = file.tensors().iter().map(Into::into).collect();
    let mut writer = GgufWriter::new(Vec::new(), file.version(), file.metadata(), &tensors).expect("declares");
    for tensor in file.tensors() {
        writer.write(tensor.bytes()).expect("fits");
    }
    writer.finish().expect("is complete")
}

fuzz_target!(|bytes: &[u8]| {
    let file = match GgufFile::from_bytes(bytes) {
        Ok(file) => file,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return;
        }
    };
    let metadata = file.metadata();
    for (key, value) in metadata.iter() {
        assert_eq!(metadata.get(key).map(|found| found.value_type()), Some(value.value_type()));
        // Every getter returns, whatever the type of the value is.
        let _ = (metadata.u32(key), metadata.usize(key), metadata.f32(key), metadata.bool(key), metadata.str(key));
        let _ = (metadata.u32s(key), metadata.i32s(key), metadata.f32s(key));
        if let Ok(Some(strings)) = metadata.strings(key) {
            assert_eq!(strings.iter().count(), strings.len());
            assert_eq!(strings.iter().last(), strings.len().checked_sub(1).and_then(|last| strings.get(last)));
        }
    }
    for tensor in file.tensors() {
        assert_eq!(file.tensor(tensor.name()).map(|found| found.name()), Some(tensor.name()));
        let mut row = vec![0.0; tensor.row_len()];
        tensor.ty().dequantize(tensor.row(0), &mut row);
        tensor.row(tensor.n_rows() - 1);
        let _ = (tensor.as_f32(), tensor.as_f16(), tensor.as_bf16());
    }
    let rewritten = rewrite(&file);
    let again = GgufFile::from_bytes(&rewritten).expect("what was written can be read");
    assert_eq!((again.metadata().len(), again.tensors().len()), (metadata.len(), file.tensors().len()));
    for (tensor, copy) in file.tensors().iter().zip(again.tensors()) {
        assert_eq!((tensor.name(), tensor.shape(), tensor.ty()), (copy.name(), copy.shape(), copy.ty()));
        assert!(tensor.bytes() == copy.bytes());
    }
    assert!(rewrite(&again) == rewritten);
});
