//! Models that are split among several files (parts).

use std::path::{Path, PathBuf};

use metal_attention_gguf::{ErrorKind, GgufError, GgufFile, GgufWriter, Metadata, Tensor, TensorDecl, TensorType};

/// The split.* keys and the tensor of one part.
#[derive(Clone, Copy)]
struct SplitPart {
    /// `split.no`, from 0 on.
    no: u16,
    /// `split.count`, the number of parts.
    count: u16,
    /// `split.tensors.count`, the number of tensors in all parts.
    tensors: i32,
    /// The name of its only tensor.
    name: &'static str,
}

const PARTS: [SplitPart; 3] = [
    SplitPart { no: 0, count: 3, tensors: 3, name: "a" },
    SplitPart { no: 1, count: 3, tensors: 3, name: "b" },
    SplitPart { no: 2, count: 3, tensors: 3, name: "c" },
];

/// The path of part `no` of three.
fn path(folder: &Path, no: usize) -> PathBuf {
    folder.join(format!("model-q4-{:05}-of-00003.gguf", no + 1))
}

/// Writes a part.
fn write(path: &Path, part: SplitPart) {
    let mut metadata = Metadata::new();
    if part.no == 0 {
        metadata.set("general.architecture", "llama");
    }
    metadata.set("split.no", part.no);
    metadata.set("split.count", part.count);
    metadata.set("split.tensors.count", part.tensors);
    let decl = TensorDecl { name: part.name.into(), shape: vec![2], ty: TensorType::F32 };
    let mut writer = GgufWriter::new(Vec::new(), 3, &metadata, &[decl]).unwrap();
    writer.write(bytemuck::cast_slice(&[f32::from(part.no), 7.0])).unwrap();
    std::fs::write(path, writer.finish().unwrap()).unwrap();
}

/// A folder with these parts.
fn model(parts: &[SplitPart]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (i, &part) in parts.iter().enumerate() {
        write(&path(folder.path(), i), part);
    }
    folder
}

#[test]
fn any_part_opens_the_whole_model() {
    let folder = model(&PARTS);
    for named in 0..3 {
        // SAFETY: nothing changes the files.
        let file = unsafe { GgufFile::map(path(folder.path(), named)) }.unwrap();
        assert_eq!(file.n_parts(), 3);
        assert_eq!(file.paths(), [0, 1, 2].map(|no| path(folder.path(), no)));
        let names: Vec<_> = file.tensors().iter().map(Tensor::name).collect();
        assert_eq!(names, ["a", "b", "c"]);
        assert_eq!(file.tensor("b").unwrap().as_f32(), Some(&[1.0, 7.0][..]));
        assert_eq!(file.metadata().str("general.architecture").unwrap(), Some("llama"));
        assert_eq!(file.metadata().len(), 1, "the split.* keys are left out");
        assert_eq!(file.tensor_bytes(), 24);
        let on_disk: u64 = (0..3).map(|i| path(folder.path(), i).metadata().unwrap().len()).sum();
        assert_eq!(file.file_size(), on_disk);
        // A model that was read from several parts is written as one file.
        GgufFile::from_bytes(&crate::support::rewrite(&file).unwrap()).unwrap();
    }
}

#[test]
fn a_missing_part_is_named() {
    let folder = model(&PARTS);
    std::fs::remove_file(path(folder.path(), 1)).unwrap();
    let error = GgufFile::read(path(folder.path(), 2)).unwrap_err();
    assert!(matches!(error, GgufError::MissingPart { no: 1, count: 3, .. }), "{error:?}");
    assert!(error.to_string().contains("part 2 of 3"), "{error}");
    assert!(error.to_string().contains("model-q4-00002-of-00003.gguf"), "{error}");
    assert_eq!(error.kind(), ErrorKind::Model);
}

#[test]
fn parts_that_disagree_are_named() {
    let check = |changed: SplitPart, at: usize, key: &str| {
        let mut parts = PARTS;
        parts[at] = changed;
        let folder = model(&parts);
        let error = GgufFile::read(path(folder.path(), 0)).unwrap_err();
        assert!(matches!(error, GgufError::SplitMismatch { .. }), "{error:?}");
        let message = error.to_string();
        assert!(message.contains(key) && message.contains(&format!("{:05}-of", at + 1)), "{message}");
    };
    check(SplitPart { no: 2, ..PARTS[1] }, 1, "split.no");
    check(SplitPart { count: 4, ..PARTS[2] }, 2, "split.count");
    check(SplitPart { count: 2, ..PARTS[0] }, 0, "number of parts");
    check(SplitPart { no: 1, ..PARTS[0] }, 0, "part number");
    check(SplitPart { tensors: 4, ..PARTS[1] }, 1, "split.tensors.count is 4, expected 3");
}

#[test]
fn a_tensor_in_two_parts_is_refused() {
    let mut parts = PARTS;
    parts[2].name = "a";
    let folder = model(&parts);
    let error = GgufFile::read(path(folder.path(), 0)).unwrap_err();
    assert!(matches!(error.root(), GgufError::DuplicateTensor { .. }), "{error:?}");
}

#[test]
fn a_broken_part_is_named() {
    let folder = model(&PARTS);
    std::fs::write(path(folder.path(), 2), "GGUF").unwrap();
    let error = GgufFile::read(path(folder.path(), 0)).unwrap_err();
    assert!(matches!(error.root(), GgufError::Truncated { .. }), "{error:?}");
    assert!(error.to_string().contains("00003-of-00003.gguf: the file is truncated"), "{error}");
}

#[test]
fn a_key_of_the_wrong_type_is_named_with_its_file() {
    let folder = model(&PARTS);
    let mut metadata = Metadata::new();
    metadata.set("split.no", "one");
    metadata.set("split.count", 3u16);
    let bytes = GgufWriter::new(Vec::new(), 3, &metadata, &[]).unwrap().finish().unwrap();
    std::fs::write(path(folder.path(), 1), bytes).unwrap();
    let message = GgufFile::read(path(folder.path(), 0)).unwrap_err().to_string();
    assert!(message.contains("00002-of-00003.gguf: the metadata key `split.no` is of type string"), "{message}");
}

#[test]
fn a_renamed_part_is_explained() {
    let folder = model(&PARTS);
    for name in ["model.gguf", "model-1-of-3.gguf", "model-00002-of-0000x.gguf"] {
        let renamed = folder.path().join(name);
        write(&renamed, PARTS[1]);
        let error = GgufFile::read(&renamed).unwrap_err();
        assert!(matches!(error, GgufError::SplitName { no: 1, count: 3, .. }), "{error:?}");
        assert!(error.to_string().contains("model-00002-of-00003.gguf"), "{error}");
    }
}

#[test]
fn a_whole_model_may_have_any_name() {
    let folder = tempfile::tempdir().unwrap();
    let single = folder.path().join("model.gguf");
    write(&single, SplitPart { no: 0, count: 1, tensors: 1, name: "a" });
    let file = GgufFile::read(&single).unwrap();
    assert_eq!((file.n_parts(), file.paths()), (1, &[single][..]));
}
