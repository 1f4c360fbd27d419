//! Files that are read and written again are equal, and the writer refuses what the reader could not read.

use metal_attention_gguf::{
    Array, ErrorKind, GgufError, GgufFile, GgufWriter, Metadata, TensorDecl, TensorType, Value,
};

#[test]
fn files_of_other_tools_are_rewritten_byte_for_byte() {
    let mut n_files = 0;
    let dir = tempfile::tempdir().unwrap();
    for (name, bytes) in metal_attention_testing::models::architectures() {
        std::fs::write(dir.path().join(name), bytes).unwrap();
    }
    for folder in [crate::support::repository("models"), dir.path().to_owned()] {
        let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        for path in entries.filter(|path| path.extension().is_some_and(|e| e == "gguf")) {
            // SAFETY: nothing changes the file.
            let file = unsafe { GgufFile::map(&path) }.unwrap();
            let bytes = std::fs::read(&path).unwrap();
            assert_eq!(file.file_size(), bytes.len() as u64);
            assert!(crate::support::rewrite(&file).unwrap() == bytes, "{}", path.display());
            assert!(crate::support::rewrite(&GgufFile::from_bytes(&bytes).unwrap()).unwrap() == bytes);
            n_files += 1;
        }
    }
    assert!(n_files >= 10, "{n_files} files");
}

#[test]
fn every_value_and_tensor_type_survives_in_both_versions() {
    for version in [2, 3] {
        let bytes = crate::support::every_kind(version);
        let file = GgufFile::from_bytes(&bytes).unwrap();
        assert_eq!((file.version(), file.alignment(), file.n_parts()), (version, 64, 1));
        let mut metadata = file.metadata().clone();
        assert_eq!(metadata.remove("general.alignment"), Some(Value::U32(64)));
        assert_eq!(metadata, crate::support::every_value());
        assert_eq!(file.tensors().len(), TensorType::ALL.len());
        for tensor in file.tensors() {
            assert_eq!(tensor.bytes().as_ptr() as usize % 64, 0);
            assert_eq!(tensor.shape()[2], 1);
            assert_eq!(tensor.row(tensor.n_rows() - 1).len(), tensor.ty().block_bytes());
            assert_eq!(tensor.bytes()[1], 7);
        }
        assert!(crate::support::rewrite(&file).unwrap() == bytes);
    }
}

#[test]
fn tensors_outlive_their_file_and_the_release_of_their_pages() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let bytes = crate::support::every_kind(3);
    std::fs::write(&path, &bytes).unwrap();
    // SAFETY: nothing changes the file.
    let mapped = unsafe { GgufFile::map(&path) }.unwrap();
    let copied = GgufFile::from_bytes(&bytes).unwrap();
    for (mapped, copied) in mapped.tensors().iter().zip(copied.tensors()) {
        mapped.release_pages();
        copied.release_pages();
        assert_eq!(mapped.bytes(), copied.bytes());
    }
    let tensor = mapped.tensor("tensor F32").unwrap().clone();
    drop(mapped);
    assert_eq!(tensor.as_f32(), copied.tensor("tensor F32").unwrap().as_f32());
    assert_eq!((tensor.as_f16(), tensor.as_bf16()), (None, None));
}

#[test]
fn a_vocabulary_without_tensors_ends_after_its_metadata() {
    let mut metadata = Metadata::new();
    metadata.set("tokenizer.ggml.tokens", (0..1000).map(|i| format!("token {i}")).collect::<Vec<_>>());
    let bytes = GgufWriter::new(Vec::new(), 3, &metadata, &[]).unwrap().finish().unwrap();
    let file = GgufFile::from_bytes(&bytes).unwrap();
    let tokens = file.metadata().strings("tokenizer.ggml.tokens").unwrap().unwrap();
    assert_eq!((tokens.len(), tokens.get(999), tokens.get(1000)), (1000, Some("token 999"), None));
    assert_eq!(tokens.iter().nth(10), Some("token 10"));
    assert!(crate::support::rewrite(&file).unwrap() == bytes);
}

#[test]
fn gaps_between_tensors_and_trailing_bytes_are_read_and_not_written() {
    let raw = crate::support::Raw::new(2, 0).tensor("b", &[1], 0, 64).tensor("a", &[2], 0, 0).data(100);
    let file = GgufFile::from_bytes(&raw.0).unwrap();
    assert_eq!(file.tensors()[0].name(), "b");
    let rewritten = crate::support::rewrite(&file).unwrap();
    assert_eq!(rewritten.len() % 32, 0);
    assert!(crate::support::rewrite(&GgufFile::from_bytes(&rewritten).unwrap()).unwrap() == rewritten);
}

#[test]
fn typed_getters_convert_values_or_explain_why_not() {
    let metadata = crate::support::every_value();
    assert_eq!(metadata.u32("u8").unwrap(), Some(255));
    assert_eq!(metadata.usize("u64").unwrap(), Some(usize::MAX));
    assert_eq!(metadata.u32("absent").unwrap(), None);
    assert_eq!(metadata.f32("f32").unwrap(), Some(-1.5));
    assert_eq!(metadata.f32("f64").unwrap(), Some(f32::INFINITY));
    assert_eq!(metadata.bool("bool").unwrap(), Some(true));
    assert_eq!(metadata.str("string").unwrap(), Some("grüße, 世界"));
    assert_eq!(metadata.u32s("array.0").unwrap(), Some(vec![1, 2, 3]));
    assert_eq!(metadata.i32s("array.3").unwrap(), Some(vec![-2]));
    assert_eq!(metadata.f32s("array.11").unwrap(), Some(vec![0.0]));
    assert_eq!(metadata.strings("array.8").unwrap().unwrap().get(3), Some("\u{10ffff}"));
    let message = |error: GgufError| error.to_string();
    assert_eq!(message(metadata.u32("i8").unwrap_err()), "the metadata key `i8` is -128, which does not fit u32");
    assert_eq!(
        message(metadata.u32("string").unwrap_err()),
        "the metadata key `string` is of type string, expected u32"
    );
    assert_eq!(
        message(metadata.str("array.8").unwrap_err()),
        "the metadata key `array.8` is of type array of string, expected string"
    );
    assert_eq!(
        message(metadata.u32s("array.5").unwrap_err()),
        "the metadata key `array.5` is -7, which does not fit array of u32"
    );
}

#[test]
fn metadata_keeps_its_order() {
    let mut metadata = Metadata::new();
    for key in ["c", "a", "b"] {
        metadata.set(key, 1u8);
    }
    metadata.set("a", "replaced");
    assert_eq!(metadata.remove("c"), Some(Value::U8(1)));
    assert_eq!(metadata.remove("c"), None);
    metadata.set("c", vec![1i32]);
    let keys: Vec<_> = metadata.iter().map(|(key, _)| key).collect();
    assert_eq!(keys, ["a", "b", "c"]);
    assert_eq!(metadata.str("a").unwrap(), Some("replaced"));
    assert_eq!(metadata.get("c"), Some(&Value::Array(Array::I32(vec![1]))));
    assert_eq!(metadata.len(), 3);
}

fn decl(name: &str, shape: &[usize], ty: TensorType) -> TensorDecl {
    TensorDecl { name: name.into(), shape: shape.to_vec(), ty }
}

#[test]
fn the_writer_refuses_files_that_could_not_be_read() {
    let none = Metadata::new();
    let new = |metadata: &Metadata, tensors: &[TensorDecl]| {
        GgufWriter::new(Vec::new(), 3, metadata, tensors).unwrap_err().to_string()
    };
    assert!(matches!(GgufWriter::new(Vec::new(), 1, &none, &[]), Err(GgufError::UnsupportedVersion { version: 1 })));
    let x = decl("x", &[32], TensorType::Q4_0);
    assert_eq!(new(&none, &[x.clone(), x.clone()]), "the tensor name `x` occurs twice");
    assert_eq!(
        new(&none, &[decl("x", &[33], TensorType::Q4_0)]),
        "tensor `x` has rows of 33 elements, but Q4_0 needs a multiple of 32"
    );
    assert!(new(&none, &[decl("x", &[], TensorType::F32)]).contains("0 dimensions"));
    assert!(new(&none, &[decl("x", &[1; 5], TensorType::F32)]).contains("5 dimensions"));
    assert!(new(&none, &[decl("x", &[4, 0], TensorType::F32)]).contains("no elements"));
    assert!(new(&none, &[decl("x", &[usize::MAX, 2], TensorType::F32)]).contains("more elements"));
    let largest = |name| decl(name, &[(1 << 61) - 1], TensorType::F32);
    let too_large = new(&none, &[largest("x"), largest("y")]);
    assert!(too_large.contains("`y`") && too_large.contains("larger than can be addressed"), "{too_large}");
    let mut metadata = Metadata::new();
    metadata.set("general.alignment", 24u32);
    assert!(new(&metadata, &[]).contains("power of two"));
    let deep = (0..5).fold(Array::U8(vec![1]), |inner, _| Array::Array(vec![inner]));
    let mut metadata = Metadata::new();
    metadata.set("deep", deep);
    assert!(new(&metadata, &[]).contains("deeper than 4"));
}

#[test]
fn the_writer_counts_the_data() {
    let tensors = [decl("x", &[2], TensorType::F32), decl("y", &[1], TensorType::F32)];
    let new = || GgufWriter::new(Vec::new(), 3, &Metadata::new(), &tensors).unwrap();
    let mut writer = new();
    writer.write(&[0; 5]).unwrap();
    let error = writer.finish().unwrap_err();
    assert_eq!(error.to_string(), "tensor `x` got 5 of its 8 bytes");
    assert_eq!(error.kind(), ErrorKind::Usage);
    let mut writer = new();
    assert_eq!(
        writer.write(&[0; 15]).unwrap_err().to_string(),
        "3 bytes were written beyond the 12 that the declared tensors hold"
    );
    // Writing both tensors at once equals writing single bytes.
    let (mut one, mut many) = (new(), new());
    one.write(&[1; 12]).unwrap();
    (0..12).for_each(|_| many.write(&[1]).unwrap());
    assert_eq!(one.finish().unwrap(), many.finish().unwrap());
}

#[test]
fn errors_of_the_output_are_passed_on() {
    struct Full;
    impl std::io::Write for Full {
        fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
            Err(std::io::ErrorKind::StorageFull.into())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let Err(error) = GgufWriter::new(Full, 3, &Metadata::new(), &[]) else { panic!("wrote to a full disk") };
    assert_eq!(error.kind(), ErrorKind::Io);
}
