// Weights whose codes have 8 bits or less, for integer dot products: `packed8` returns the codes of a unit's even elements
// and of its odd ones as signed bytes, and a weight is affine8.x * code + affine8.y.
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
{% if in_blocks %}

{#
  A block of 32, four units, for products with quantised inputs. `scales` is how many of these have scales of their own;
  `affine32` returns those of a unit. Types that define it read a block as vectors of words, in `w4`; for others it is four units.
#}
{% if scales is undefined %}
{% set scales = 4 %}
struct Raw32 { units: array<Raw8, 4> }
fn load32(row: u32, block: u32) -> Raw32 {
    return Raw32(array<Raw8, 4>({% for u in range(4) %}load8(row, (4u * block) | {{ u }}u){{ ", " if not loop.last }}{% endfor %}));
}
fn codes32(raw: Raw32, _block: u32) -> Codes32 {
{% for u in range(4) %}
    let q_{{ u }} = packed8(raw.units[{{ u }}]);
{% endfor %}
    return Codes32(vec4(q_0.x, q_1.x, q_2.x, q_3.x), vec4(q_0.y, q_1.y, q_2.y, q_3.y));
}
fn affine32(raw: Raw32, _block: u32, i: u32) -> vec2<f32> { return affine8(raw.units[i]); }
{% endif %}
// Sum over a block of weight times input.
fn dots32(raw: Raw32, block: u32, x: X32) -> f32 {
    let codes = codes32(raw, block);
    var sum = 0.0;
{% for s in range(scales) %}
{% set units = range(4 // scales * s, 4 // scales * (s + 1)) %}
    {
{% for byte in range(3) %}
        let whole_{{ byte }} = {% for u in units %}
dot4I8Packed(codes.even[{{ u }}], x.even[{{ byte }}][{{ u }}]) + dot4I8Packed(codes.odd[{{ u }}], x.odd[{{ byte }}][{{ u }}])
            {{- " + " if not loop.last }}{% endfor %};
{% endfor %}
        let whole = f32(whole_0) * 65536.0 + f32(256 * whole_1 + whole_2);
        let affine = affine32(raw, block, {{ s }}u);
        sum += affine.x * (x.worth * whole) + affine.y * ({% for u in units %}x.sums[{{ u }}]{{ " + " if not loop.last }}{% endfor %});
    }
{% endfor %}
    return sum;
}
{% endif %}
