//! The codes of a quantised block, 32 elements at a time, for whoever stores them in another order.

/// Codes of 32 elements.
pub type Codes = [u8; 32];

/// 16 bytes whose low nibbles are elements 0..16 and high ones 16..32.
pub fn nibble_halves(qs: &[u8]) -> Codes {
    let mut codes = [0; 32];
    let (low, high) = codes.split_at_mut(16);
    for ((q, low), high) in qs[..16].iter().zip(low).zip(high) {
        *low = q & 15;
        *high = q >> 4;
    }
    codes
}

/// Two bits of element 32 i + l at byte 32 (i / 4) + l, bits 2 (i mod 4) up.
pub fn two_bits(qs: &[u8], i: usize) -> Codes {
    shifted(&qs[32 * (i / 4)..], 2 * (i % 4), 3)
}

/// Nibble of element 32 i + l at byte 32 (i / 2) + l, the low one for even i.
pub fn four_bits(qs: &[u8], i: usize) -> Codes {
    shifted(&qs[32 * (i / 2)..], 4 * (i % 2), 15)
}

/// `b[l] >> shift & mask` for 32 bytes.
pub fn shifted(b: &[u8], shift: usize, mask: u8) -> Codes {
    let mut codes = [0; 32];
    for (code, b) in codes.iter_mut().zip(&b[..32]) {
        *code = b >> shift & mask;
    }
    codes
}
