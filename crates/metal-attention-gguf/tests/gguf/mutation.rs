//! Valid files with random damage: a damaged file that opens can be read completely and written again.

use std::sync::LazyLock;

use metal_attention_gguf::GgufFile;
use proptest::prelude::*;

/// A valid file with every value type and tensor type.
static VALID: LazyLock<Vec<u8>> = LazyLock::new(|| crate::support::every_kind(3));

/// Reads a damaged file. If it opens, reads all tensors, and writes and reads it again.
fn read_completely(bytes: &[u8]) {
    let Ok(file) = GgufFile::from_bytes(bytes) else { return };
    for tensor in file.tensors() {
        assert_eq!(tensor.to_f32().len(), tensor.n_elements());
        for i in 0..tensor.n_rows() {
            assert_eq!(tensor.row(i).len(), tensor.ty().row_bytes(tensor.row_len()));
        }
    }
    let rewritten = crate::support::rewrite(&file).unwrap();
    let again = GgufFile::from_bytes(&rewritten).unwrap();
    assert_eq!(again.tensors().len(), file.tensors().len());
    assert!(crate::support::rewrite(&again).unwrap() == rewritten);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn flipped_bits(flips in prop::collection::vec((0..VALID.len(), 0..8), 1..4)) {
        let mut bytes = VALID.clone();
        for (i, bit) in flips {
            bytes[i] ^= 1u8 << bit;
        }
        read_completely(&bytes);
    }

    #[test]
    fn removed_bytes(start in 0..VALID.len(), len in 0..VALID.len()) {
        let mut bytes = VALID.clone();
        bytes.drain(start..(start + len).min(VALID.len()));
        read_completely(&bytes);
    }

    #[test]
    fn replaced_lengths(i in 0..VALID.len() - 8, value in any::<u64>(), shift in 0..64u32) {
        let mut bytes = VALID.clone();
        bytes[i..i + 8].copy_from_slice(&(value >> shift).to_le_bytes());
        read_completely(&bytes);
    }

    #[test]
    fn inserted_bytes(i in 0..VALID.len(), inserted in prop::collection::vec(any::<u8>(), 1..40)) {
        let mut bytes = VALID.clone();
        bytes.splice(i..i, inserted);
        read_completely(&bytes);
    }
}
