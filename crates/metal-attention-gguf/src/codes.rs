//! Extraction of the codes of quantisation blocks, 32 elements at a time, for backends that repack weights.

/// The codes of 32 elements.
pub type Codes = [u8; 32];

/// The codes in the first 16 bytes of `qs`: the low nibbles are elements 0..16, the high ones 16..32.
pub fn nibble_halves(qs: &[u8]) -> Codes {
    let mut codes = [0; 32];
    let (low, high) = codes.split_at_mut(16);
    for ((q, low), high) in qs[..16].iter().zip(low).zip(high) {
        *low = q & 15;
        *high = q >> 4;
    }
    codes
}

/// The 2-bit codes of elements `32 i..32 i + 32`: element `32 i + l` is in byte `32 (i / 4) + l`, from bit `2 (i mod 4)` on.
pub fn two_bits(qs: &[u8], i: usize) -> Codes {
    shifted(&qs[32 * (i / 4)..], 2 * (i % 4), 3)
}

/// The 4-bit codes of elements `32 i..32 i + 32`: element `32 i + l` is in byte `32 (i / 2) + l`, in the low nibble for even
/// `i`.
pub fn four_bits(qs: &[u8], i: usize) -> Codes {
    shifted(&qs[32 * (i / 2)..], 4 * (i % 2), 15)
}

/// `b[l] >> shift & mask` of the first 32 bytes.
pub fn shifted(b: &[u8], shift: usize, mask: u8) -> Codes {
    let mut codes = [0; 32];
    for (code, b) in codes.iter_mut().zip(&b[..32]) {
        *code = b >> shift & mask;
    }
    codes
}
