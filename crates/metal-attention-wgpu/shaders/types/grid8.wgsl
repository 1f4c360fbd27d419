// The indices of the values of entry `code` of a codebook, as bytes. The codebook is behind the rows, a 2-bit plane.
fn point8(code: u32) -> vec2<u32> { return pairs(w[GRID + code / 2u] >> (4u * (code % 2u)), 0u); }
