// RoPE of one head of HEAD_DIM elements: its first N_ROT elements are rotated in pairs, by an angle for each pair and row of
// the table. Its first N_CTX rows are those of the positions of text; rows of inputs may follow (batch.wgsl).
// Bounds: indices of the table are clamped to its length. Elements of a pair below HALF_ROT are in the head, as N_ROT is even
// and at most HEAD_DIM (`AttentionShape::check`).
@group(0) @binding({{ rope_binding }}) var<storage, read> rope: array<vec2<f32>>; // [at least N_CTX, N_ROT / 2] of (cos, sin)
const HEAD_DIM: u32 = {{ head_dim }}u;
const HALF_ROT: u32 = {{ n_rot // 2 }}u;

{% if halves %}
// Elements of pair `i` (NeoX); pairs from HALF_ROT on are not rotated.
fn pair_elements(i: u32) -> vec2<u32> {
    if i < HALF_ROT { return vec2(i, i + HALF_ROT); }
    return vec2(2u * i, 2u * i + 1u);
}
// The pair of element `e` < N_ROT.
fn pair_of(e: u32) -> u32 { return e % HALF_ROT; }
{% else %}
// Elements of pair `i` (NORM); pairs from HALF_ROT on are not rotated.
fn pair_elements(i: u32) -> vec2<u32> { return vec2(2u * i, 2u * i + 1u); }
// The pair of element `e` < N_ROT.
fn pair_of(e: u32) -> u32 { return e / 2u; }
{% endif %}

// The rotation of pair `i` in row `row` of the table: (cos, sin).
fn angle(i: u32, row: u32) -> vec2<f32> {
    if i >= HALF_ROT { return vec2(1.0, 0.0); }
    return rope[min(row * HALF_ROT + i, arrayLength(&rope) - 1u)];
}

fn turn_by(pair: vec2<f32>, by: vec2<f32>) -> vec2<f32> {
    return vec2(pair.x * by.x - pair.y * by.y, pair.x * by.y + pair.y * by.x);
}

// Pair `i` rotated by row `row` of the table.
fn rotate(pair: vec2<f32>, i: u32, row: u32) -> vec2<f32> {
    if i >= HALF_ROT { return pair; }
    return turn_by(pair, angle(i, row));
}
