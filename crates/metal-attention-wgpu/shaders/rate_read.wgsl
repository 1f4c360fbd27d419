// sums[i] = the sum of the vectors of words i, i + stride, i + 2 stride, ...: reads memory and does next to nothing else.
// Bounds: `words` has the words that the loops count to, `sums` an element for every thread (`Dispatch`).
@group(0) @binding(0) var<storage, read> words: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read_write> sums: array<u32>;

{% set stride = threads * groups %}
@compute @workgroup_size({{ threads }})
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    var sum = vec4(0u);
    var i = id.x;
    // Four loads in flight at a time.
    for (; i + {{ 3 * stride }}u < {{ n }}u; i += {{ 4 * stride }}u) {
        let a = words[i];
        let b = words[i + {{ stride }}u];
        let c = words[i + {{ 2 * stride }}u];
        let d = words[i + {{ 3 * stride }}u];
        sum += (a + b) + (c + d);
    }
    for (; i < {{ n }}u; i += {{ stride }}u) { sum += words[i]; }
    sums[id.x] = sum.x + sum.y + sum.z + sum.w;
}
