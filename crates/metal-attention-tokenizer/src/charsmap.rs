//! SentencePiece's precompiled characters map: a normalisation that replaces sequences of characters by others.

use crate::error::TokenizerError;
use metal_attention_gguf::{Array, Metadata, Value};

/// The maximum length in bytes of a replaced sequence and of a replacement. Unicode's own normal forms have at most
/// 33.
const MAX_BYTES: usize = 256;

/// The map from sequences to offsets of their replacements, as an XOR-compressed compact double array (S. Kanda,
/// Space- and Time-Efficient String Dictionaries, 2018).
#[derive(Default)]
pub(crate) struct CharsMap {
    /// The nodes of the double array: base in bits 10 to 30 (shifted by 8 if bit 9 is set), label in bits 0 to 7, leaf
    /// flag in bit 8.
    nodes: Vec<u32>,
    /// The replacements, as NUL-terminated strings.
    replacements: Vec<u8>,
}

impl CharsMap {
    /// Reads `tokenizer.ggml.precompiled_charsmap`. If the key is missing, nothing is replaced.
    ///
    /// Layout: the length of the array in bytes as a little-endian `u32`, the array, the replacements.
    pub(crate) fn read(metadata: &Metadata) -> Result<Self, TokenizerError> {
        let Some(bytes) = Self::bytes(metadata)? else { return Ok(Self::default()) };
        let short = TokenizerError::CharsMap { why: "it is shorter than it says" };
        let Some((len, rest)) = bytes.split_first_chunk() else { return Err(short) };
        let len = u32::from_le_bytes(*len) as usize;
        let Some((nodes, replacements)) = rest.split_at_checked(len) else { return Err(short) };
        if replacements.split(|&byte| byte == 0).any(|replacement| replacement.len() > MAX_BYTES) {
            return Err(TokenizerError::CharsMap { why: "a replacement is longer than 256 bytes" });
        }
        let (nodes, _) = nodes.as_chunks();
        Ok(Self {
            nodes: nodes.iter().map(|&node| u32::from_le_bytes(node)).collect(),
            replacements: replacements.to_vec(),
        })
    }

    /// The unparsed bytes of `tokenizer.ggml.precompiled_charsmap`; `None` if the key is missing.
    pub(crate) fn bytes(metadata: &Metadata) -> Result<Option<Vec<u8>>, TokenizerError> {
        match metadata.get("tokenizer.ggml.precompiled_charsmap") {
            None => Ok(None),
            Some(Value::Array(Array::U8(bytes))) => Ok(Some(bytes.clone())),
            Some(Value::Array(Array::I8(bytes))) => Ok(Some(bytes.iter().map(|&byte| byte as u8).collect())),
            Some(_) => Err(TokenizerError::CharsMap { why: "it is no array of bytes" }),
        }
    }

    /// Calls `emit` with every character of `text` after replacement. At each position the longest match is replaced.
    pub(crate) fn for_each_replaced(&self, text: &str, mut emit: impl FnMut(char)) {
        let mut rest = text;
        while let Some(c) = rest.chars().next() {
            if let Some((len, replacement)) = self.longest_match(rest) {
                replacement.chars().for_each(&mut emit);
                rest = &rest[len..];
            } else {
                emit(c);
                rest = &rest[c.len_utf8()..];
            }
        }
    }

    /// The length of the longest replaced sequence that `text` starts with, and its replacement.
    fn longest_match(&self, text: &str) -> Option<(usize, &str)> {
        let mut found = None;
        let mut index = base(*self.nodes.first()?);
        for (i, byte) in text.bytes().take(MAX_BYTES).enumerate() {
            #[cfg(test)]
            crate::steps::count();
            index ^= u32::from(byte);
            let Some(&node) = self.nodes.get(index as usize) else { break };
            let label = node & (1 << 31 | 0xFF);
            if byte == 0 || label != u32::from(byte) {
                break;
            }
            index ^= base(node);
            let leaf = node >> 8 & 1 == 1;
            if leaf && text.is_char_boundary(i + 1) {
                let value = self.nodes.get(index as usize).map(|value| value & !(1 << 31));
                found = value.map(|value| (i + 1, value as usize)).or(found);
            }
        }
        let (len, start) = found?;
        let rest = self.replacements.get(start..)?;
        let end = rest.iter().position(|&byte| byte == 0)?;
        Some((len, std::str::from_utf8(&rest[..end]).ok()?))
    }
}

/// The base of a node. Its exclusive or with a byte gives the index of the child along that byte.
fn base(node: u32) -> u32 {
    (node >> 10) << ((node & 1 << 9) >> 6)
}
