// sums[i] = the sum of eight vectors, each started with its number and {{ steps }} times multiplied by the operand and added to it.
// Bounds: `sums` has an element for every thread, `operands` the four numbers (`Dispatch`). The loop counts to a constant.
@group(0) @binding(0) var<storage, read> operands: array<f32>;
@group(0) @binding(1) var<storage, read_write> sums: array<f32>;

@compute @workgroup_size({{ threads }})
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let x = vec4(operands[0], operands[1], operands[2], operands[3]);
{% for k in range(8) %}
    var a{{ k }} = vec4({{ k }}.0);
{% endfor %}
    for (var step = 0u; step < {{ steps }}u; step += 4u) {
{% for _ in range(4) %}
{% for k in range(8) %}
        a{{ k }} = fma(a{{ k }}, x, x);
{% endfor %}
{% endfor %}
    }
    let sum = ((a0 + a1) + (a2 + a3)) + ((a4 + a5) + (a6 + a7));
    sums[id.x] = sum.x + sum.y + sum.z + sum.w;
}
