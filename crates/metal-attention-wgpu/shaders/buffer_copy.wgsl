// destination = source, word by word.
// Bounds: both buffers have the {{ n }} words that the loop counts to (`Dispatch`).
@group(0) @binding(0) var<storage, read> source: array<u32>;
@group(0) @binding(1) var<storage, read_write> destination: array<u32>;

@compute @workgroup_size({{ threads }})
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    for (var i = id.x; i < {{ n }}u; i += {{ threads * groups }}u) { destination[i] = source[i]; }
}
