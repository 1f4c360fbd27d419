// Codes of 8 bits or less are whole numbers: `packed8` has those of a unit's even elements and those of its odd ones as
// bytes, signed ones, and a weight is affine8.x * code + affine8.y.
{% if integer %}

// Sum over a unit of weight times input.
fn dots8(raw: Raw8, x: X8) -> f32 {
    let codes = packed8(raw);
    let affine = affine8(raw);
    let high = dot4I8Packed(codes.x, x.even.x) + dot4I8Packed(codes.y, x.odd.x);
    let middle = dot4I8Packed(codes.x, x.even.y) + dot4I8Packed(codes.y, x.odd.y);
    let low = dot4I8Packed(codes.x, x.even.z) + dot4I8Packed(codes.y, x.odd.z);
    let sum = f32(high) * 65536.0 + f32(256 * middle + low);
    return affine.x * (bitcast<f32>(x.even.w) * sum) + affine.y * bitcast<f32>(x.odd.w);
}
{% endif %}
