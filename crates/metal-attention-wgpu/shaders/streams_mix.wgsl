// {% if correct %}Corrects every residual stream by the layer's result for the first: streams[i] += (x - streams[0]) * (c[i] + 1);
// then x = streams[0] and scaled = x * scale{% else %}Predicts every residual stream from all: streams[i] += sum over j of c[i][j] streams[j]; then x = streams[0]{% endif %},
// with c = W tanh(router). One invocation for each element.
// Bounds: tokens are those for which the buffers are long enough (`Dispatch`); elements are compared with N. Loops count to constants.
const STREAMS: u32 = {{ n_streams }}u;
const N: u32 = {{ n }}u;
const COEFFICIENTS: u32 = {{ n_streams if correct else n_streams * n_streams }}u;
@group(0) @binding(0) var<storage, read> router: array<f32>; // [n_tokens, STREAMS]
@group(0) @binding(1) var<storage, read> w: array<f32>; // [COEFFICIENTS, STREAMS]
@group(0) @binding(2) var<storage, read_write> streams: array<f32>; // [n_tokens, STREAMS, N]
@group(0) @binding(3) var<storage, read_write> x: array<f32>; // [n_tokens, N]
{% if correct %}
@group(0) @binding(4) var<storage, read> scale: array<f32>; // [N]
@group(0) @binding(5) var<storage, read_write> scaled: array<f32>; // [n_tokens, N]
{% endif %}

@compute @workgroup_size(256)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    if id.x >= N { return; }
    let token = id.y;
    var inputs: array<f32, {{ n_streams }}>;
    var old: array<f32, {{ n_streams }}>;
    for (var j = 0u; j < STREAMS; j++) {
        // Beyond 15 tanh is 1 to the last bit, and some devices overflow.
        inputs[j] = tanh(clamp(router[token * STREAMS + j], -15.0, 15.0));
        old[j] = streams[(token * STREAMS + j) * N + id.x];
    }
{% if correct %}
    let innovation = x[token * N + id.x] - old[0];
{% endif %}
    for (var i = 0u; i < STREAMS; i++) {
        var sum = old[i];
{% if correct %}
        var c = 1.0;
        for (var k = 0u; k < STREAMS; k++) { c += w[i * STREAMS + k] * inputs[k]; }
        sum += innovation * c;
{% else %}
        for (var j = 0u; j < STREAMS; j++) {
            var c = 0.0;
            for (var k = 0u; k < STREAMS; k++) { c += w[(i * STREAMS + j) * STREAMS + k] * inputs[k]; }
            sum += c * old[j];
        }
{% endif %}
        streams[(token * STREAMS + i) * N + id.x] = sum;
        if i == 0u {
            x[token * N + id.x] = sum;
{% if correct %}
            scaled[token * N + id.x] = sum * scale[id.x];
{% endif %}
        }
    }
}
