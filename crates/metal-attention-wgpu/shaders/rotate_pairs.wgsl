// Rotates the pairs of each head, in place: in each BLOCK elements of a head element i and element i + BLOCK / 2 are a pair, whose
// angle is that of its row and its place in the head. One invocation for each pair.
// Bounds: pairs are compared with half the length of `x`; `angles` has a row for each row of `x` (`Dispatch`). HEAD_DIM is a
// multiple of BLOCK, which is even, and WIDTH one of HEAD_DIM.
@group(0) @binding(0) var<storage, read_write> x: array<f32>; // [n_rows, WIDTH]
@group(0) @binding(1) var<storage, read> angles: array<vec2<f32>>; // [n_rows, HEAD_DIM / 2]: cosine and sine
{% include "element.wgsl" %}
const PAIRS: u32 = {{ width // 2 }}u; // of a row
const HEAD_PAIRS: u32 = {{ head_dim // 2 }}u;
const HALF: u32 = {{ block // 2 }}u;

@compute @workgroup_size(256)
fn main(
    @builtin(local_invocation_index) tid: u32,
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let pair = element(tid, group, groups);
    if pair >= arrayLength(&x) / 2u { return; }
    let angle = angles[pair / PAIRS * HEAD_PAIRS + pair % PAIRS % HEAD_PAIRS];
    // HALF divides the pairs of a head: blocks follow each other over heads and rows.
    let first = pair / HALF * (2u * HALF) + pair % HALF;
    let a = x[first];
    let b = x[first + HALF];
    x[first] = a * angle.x - b * angle.y;
    x[first + HALF] = a * angle.y + b * angle.x;
}
