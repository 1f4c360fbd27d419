//! Damaged, foreign and malicious files: each gives an error that names the fault and its position.

use metal_attention_gguf::{ErrorKind, GgufError, GgufFile, Value};

use crate::support::Raw;

/// Asserts that reading fails with the error variant, and that the message contains all the strings.
macro_rules! assert_error {
    ($raw:expr, $pattern:pat, $($text:literal),+) => {
        let error = GgufFile::from_bytes(&$raw.0).expect_err("a damaged file was read");
        let message = error.to_string();
        assert!(matches!(error, $pattern), "{error:?}");
        assert_eq!(error.kind(), ErrorKind::Model);
        $(assert!(message.contains($text), "{message}");)+
    };
}

/// A header with one metadata entry, whose value follows.
fn entry(key: &str, ty: u32) -> Raw {
    Raw::new(0, 1).string(key.as_bytes()).u32(ty)
}

#[test]
fn every_prefix_of_a_file_is_truncated() {
    let bytes = crate::support::every_kind(3);
    let whole = GgufFile::from_bytes(&bytes).unwrap();
    let last = whole.tensors().last().unwrap();
    let data_end = last.bytes().as_ptr_range().end as usize - whole.tensors()[0].bytes().as_ptr() as usize
        + bytes.len()
        - padded_data(&whole);
    for len in 0..data_end {
        let error = GgufFile::from_bytes(&bytes[..len]).expect_err("read a truncated file");
        let expected = matches!(
            error,
            GgufError::Empty
                | GgufError::NotGguf { .. }
                | GgufError::Truncated { .. }
                | GgufError::CountBeyondFile { .. }
                | GgufError::TensorBeyondFile { .. }
        );
        assert!(expected, "{len} bytes: {error:?}");
    }
    // The padding after the last tensor may be missing.
    GgufFile::from_bytes(&bytes[..data_end]).unwrap();
}

/// Bytes of the tensor data, with the padding after each tensor.
fn padded_data(file: &GgufFile) -> usize {
    file.tensors().iter().map(|tensor| tensor.bytes().len().next_multiple_of(file.alignment())).sum()
}

#[test]
fn foreign_formats_are_recognised() {
    let lfs = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345678\n";
    assert_error!(Raw(lfs.into()), GgufError::GitLfsPointer { size: Some(12_345_678) }, "git lfs pull", "12345678");
    let safetensors = Raw(vec![]).string(br#"{"__metadata__":{"format":"pt"}}"#);
    assert_error!(safetensors, GgufError::Safetensors, "safetensors", "convert_hf_to_gguf");
    for html in ["<!DOCTYPE html><html>", "\n  <HTML lang=en>", "\u{feff}<!doctype html>"] {
        assert_error!(Raw(html.into()), GgufError::Html, "HTML page", "direct link");
    }
    assert_error!(Raw(b"PK\x03\x04archive/data.pkl".into()), GgufError::ZipOrPytorch, "PyTorch");
    assert_error!(Raw(b"\x80\x02}q\x00".into()), GgufError::ZipOrPytorch, "PyTorch");
    assert_error!(Raw(b"tjgg\x03\0\0\0".into()), GgufError::LegacyGgml { .. }, "ggjt", "old GGML");
    assert_error!(Raw(b"hello, world".into()), GgufError::NotGguf { .. }, "\"hello, w\"");
    assert_error!(Raw(b"GG".into()), GgufError::NotGguf { .. }, "\"GG\"");
    assert_error!(Raw(vec![]), GgufError::Empty, "empty", "fetch it again");
}

#[test]
fn unsupported_versions_and_byte_orders_are_named() {
    let version = |bytes: [u8; 4]| Raw(b"GGUF".to_vec()).bytes(&bytes).u64(0).u64(0);
    assert_error!(version([1, 0, 0, 0]), GgufError::UnsupportedVersion { version: 1 }, "version 1", "convert");
    assert_error!(version([4, 0, 0, 0]), GgufError::UnsupportedVersion { version: 4 }, "version 4");
    assert_error!(version([0, 0, 0, 3]), GgufError::BigEndian { version: 3 }, "big-endian");
}

#[test]
fn counts_beyond_the_file_are_refused_before_anything_is_allocated() {
    assert_error!(Raw::new(u64::MAX, 0), GgufError::CountBeyondFile { .. }, "number of tensors", "byte 16");
    assert_error!(Raw::new(0, 1 << 40), GgufError::CountBeyondFile { .. }, "metadata entries", "byte 24");
    assert_error!(Raw::new(0, 1).u64(u64::MAX).data(64), GgufError::CountBeyondFile { .. }, "key of metadata entry 0");
    assert_error!(entry("k", 8).u64(1 << 63), GgufError::CountBeyondFile { .. }, "value of `k`");
    for ty in 0..13 {
        let raw = entry("tokens", 9).u32(ty).u64(u64::MAX / 8 + 2).data(64);
        assert_error!(raw, GgufError::CountBeyondFile { .. }, "`tokens`", "2305843009213693953");
    }
}

#[test]
fn bad_values_are_located() {
    assert_error!(entry("k", 13).data(9), GgufError::UnknownValueType { id: 13, .. }, "`k`", "type 13", "byte 33");
    assert_error!(entry("k", 9).u32(99).data(9), GgufError::UnknownValueType { id: 99, .. }, "byte 37");
    assert_error!(entry("k", 7).bytes(&[2]), GgufError::InvalidBool { value: 2, .. }, "`k`", "value 2", "byte 37");
    let bools = entry("k", 9).u32(7).u64(3).bytes(&[1, 0, 255]);
    assert_error!(bools, GgufError::InvalidBool { value: 255, .. }, "byte 51");
    let twice = Raw::new(0, 2).string(b"k").u32(0).bytes(&[1]).string(b"k").u32(0).bytes(&[1]);
    assert_error!(twice, GgufError::DuplicateKey { offset: 38, .. }, "`k` occurs twice", "byte 38");
}

/// Bytes that are not valid UTF-8 are escaped. A string that is looked up ends at its first zero byte.
#[test]
fn strings_of_any_bytes_are_read() {
    let metadata = |raw: Raw| GgufFile::from_bytes(&raw.data(0).0).unwrap().metadata().clone();
    let latin_1 = metadata(entry("k", 8).string(b"caf\xe9 \xc3\xa9"));
    assert_eq!(latin_1.str("k").unwrap(), Some("caf\\xe9 é"));
    let zero = metadata(entry("k", 8).string(b"llama\0\0x"));
    assert_eq!(zero.str("k").unwrap(), Some("llama"));
    assert_eq!(zero.get("k"), Some(&Value::String("llama\0\0x".into())));
    let key = metadata(Raw::new(0, 1).string(b"k\xff").u32(0).bytes(&[7]));
    assert_eq!(key.get("k\\xff"), Some(&Value::U8(7)));
    // The halves of a character in two strings are each escaped, although they are valid together.
    let halves = metadata(entry("k", 9).u32(8).u64(4).string(b"ok").string(b"\xc3").string(b"\xbc").string(b""));
    let strings: Vec<_> = halves.strings("k").unwrap().unwrap().iter().collect();
    assert_eq!(strings, ["ok", "\\xc3", "\\xbc", ""]);
}

#[test]
fn nesting_is_bounded() {
    let nested = |depth| {
        let raw = (1..depth).fold(entry("k", 9), |raw, _| raw.u32(9).u64(1));
        raw.u32(0).u64(1).bytes(&[5]).data(0)
    };
    GgufFile::from_bytes(&nested(4).0).unwrap();
    assert_error!(nested(5), GgufError::NestedTooDeep { limit: 4, .. }, "`k`", "4 levels");
    assert_error!(nested(100_000), GgufError::NestedTooDeep { .. }, "`k`");
}

#[test]
fn alignment_is_checked() {
    for value in [0, 1, 4, 24, 1 << 21] {
        let raw = entry("general.alignment", 4).u32(value);
        assert_error!(raw, GgufError::InvalidAlignment { .. }, "general.alignment", "power of two");
    }
    let text = entry("general.alignment", 8).string(b"32");
    assert_error!(text, GgufError::MetadataType { .. }, "general.alignment", "string");
    let negative = entry("general.alignment", 5).bytes(&(-32i32).to_le_bytes());
    assert_error!(negative, GgufError::MetadataRange { .. }, "general.alignment", "-32");
}

#[test]
fn bad_tensors_are_named() {
    let one = |dims: &[u64], ty, offset| Raw::new(1, 0).tensor("w", dims, ty, offset).data(256);
    GgufFile::from_bytes(&one(&[64], 0, 0).0).unwrap();
    assert_error!(one(&[], 0, 0), GgufError::DimensionCount { n_dims: 0, .. }, "`w`", "0 dimensions");
    assert_error!(one(&[1; 5], 0, 0), GgufError::DimensionCount { n_dims: 5, .. }, "`w`", "5 dimensions");
    assert_error!(one(&[0], 0, 0), GgufError::InvalidShape { .. }, "`w`", "[0]", "no elements");
    assert_error!(one(&[4, 0], 0, 0), GgufError::InvalidShape { .. }, "[4, 0]");
    assert_error!(one(&[1 << 32, 1 << 32], 0, 0), GgufError::InvalidShape { .. }, "more elements");
    assert_error!(one(&[1 << 62], 0, 0), GgufError::InvalidShape { .. }, "more elements");
    assert_error!(one(&[48], 2, 0), GgufError::PartialBlock { row_len: 48, .. }, "`w`", "Q4_0", "multiple of 32");
    assert_error!(one(&[128], 12, 0), GgufError::PartialBlock { .. }, "Q4_K", "multiple of 256");
    assert_error!(one(&[256], 4, 0), GgufError::UnsupportedTensorType { .. }, "`w`", "Q4_2", "Q4_K");
    assert_error!(one(&[256], 9, 0), GgufError::UnsupportedTensorType { .. }, "Q8_1");
    assert_error!(one(&[256], 31, 0), GgufError::UnsupportedTensorType { .. }, "Q4_0_4_4");
    assert_error!(one(&[256], 999, 0), GgufError::UnknownTensorType { id: 999, .. }, "`w`", "999");
    assert_error!(one(&[1], 0, 4), GgufError::Misaligned { offset: 4, .. }, "`w`", "offset 4", "alignment 32");
    assert_error!(one(&[65], 0, 0), GgufError::TensorBeyondFile { size: 260, .. }, "`w`", "260 bytes", "truncated");
    assert_error!(one(&[1], 0, 256), GgufError::TensorBeyondFile { offset: 256, .. }, "`w`", "offset 256");
    assert_error!(one(&[1], 0, u64::MAX - 31), GgufError::TensorBeyondFile { .. }, "`w`");
    let name = Raw::new(1, 0).string(b"\xfe").u32(1).u64(1).u32(0).u64(0).data(64);
    assert_error!(name, GgufError::InvalidUtf8 { .. }, "name of tensor 0");
}

#[test]
fn tensors_may_not_share_names_or_bytes() {
    let two =
        |a, b, offset_a, offset_b| Raw::new(2, 0).tensor(a, &[9], 0, offset_a).tensor(b, &[9], 0, offset_b).data(256);
    GgufFile::from_bytes(&two("a", "b", 64, 0).0).unwrap();
    assert_error!(two("a", "a", 0, 64), GgufError::DuplicateTensor { .. }, "`a`", "twice");
    assert_error!(two("a", "b", 0, 32), GgufError::Overlap { .. }, "`a` and `b`", "overlap");
    assert_error!(two("a", "b", 32, 0), GgufError::Overlap { .. }, "`b` and `a`");
    assert_error!(two("a", "b", 0, 0), GgufError::Overlap { .. }, "overlap");
}

#[test]
fn missing_files_and_directories_are_explained() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["smollm-135m-q4_0.gguf", "qwen.gguf", "notes.txt"] {
        std::fs::write(folder.path().join(name), "").unwrap();
    }
    let missing = GgufFile::read(folder.path().join("smolm-135m-q4_0.gguf")).unwrap_err();
    let GgufError::NotFound { suggestions, .. } = &missing else { panic!("{missing:?}") };
    let names: Vec<_> = suggestions.iter().map(|path| path.file_name().unwrap().to_str().unwrap()).collect();
    assert_eq!(names, ["smollm-135m-q4_0.gguf", "qwen.gguf"]);
    assert!(missing.to_string().contains("did you mean"), "{missing}");
    assert_eq!(missing.kind(), ErrorKind::Model);

    let lonely = GgufFile::read(folder.path().join("no/such/folder.gguf")).unwrap_err();
    assert!(matches!(&lonely, GgufError::NotFound { suggestions, .. } if suggestions.is_empty()));

    let directory = GgufFile::read(folder.path()).unwrap_err();
    assert!(matches!(&directory, GgufError::IsDirectory { suggestions, .. } if suggestions.len() == 2));
    assert!(directory.to_string().contains("is a directory"), "{directory}");

    let empty = GgufFile::read(folder.path().join("qwen.gguf")).unwrap_err();
    assert!(matches!(empty.root(), GgufError::Empty));
    assert!(empty.to_string().contains("qwen.gguf: the file is empty"), "{empty}");
}

#[cfg(unix)]
#[test]
fn devices_are_refused() {
    let device = GgufFile::read("/dev/null").unwrap_err();
    assert!(matches!(device, GgufError::NotRegular { .. }), "{device:?}");
}
