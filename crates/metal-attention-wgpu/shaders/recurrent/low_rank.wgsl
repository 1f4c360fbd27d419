// y[t][p] = up_p squash_p(x[t][p]) for {{ n_parts }} part(s) p, each with its own number of elements, one after the other in x and in the rows of `up`.
//
// A workgroup computes {{ columns }} channels of a part's result for {{ tokens }} token(s); {{ splits }} invocations share a channel, each with every {{ splits }}th
// element. So neighbours read neighbouring weights.
// Bounds: tokens are clamped to the batch's last, which `x` and `y` hold (`Dispatch`), and channels to the last; results beyond
// them are not written. Elements are compared with the part's. Indices of workgroup memory follow from constants; loops end with
// the part's elements, or count to constants.
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read> up: array<f32>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;
{% set batch_binding = 3 %}
{% include "batch.wgsl" %}

{% include "recurrent/gates.wgsl" %}

const WIDTH: u32 = {{ width }}u;
const GROUPS: u32 = {{ (width + columns - 1) // columns }}u; // workgroups for the channels of a part
const COLUMNS: u32 = {{ columns }}u;
const SPLITS: u32 = {{ splits }}u;
const TOKENS: u32 = {{ tokens }}u;
const BLOCK: u32 = {{ block }}u;

var<workgroup> staged: array<f32, {{ block * tokens }}>;
var<workgroup> partial: array<f32, {{ threads * tokens }}>;

@compute @workgroup_size({{ threads }})
fn main(@builtin(local_invocation_index) tid: u32, @builtin(workgroup_id) group: vec3<u32>) {
    var ranks = array<u32, {{ n_parts }}>({{ ranks }});
    var squashes = array<u32, {{ n_parts }}>({{ squashes }});
    let part = group.x / GROUPS;
    let rank = ranks[part];
    let squash = squashes[part];
    var at = 0u;
    for (var p = 0u; p < part; p++) { at += ranks[p]; }
    let first_column = group.x % GROUPS * COLUMNS;
    let column = min(first_column + tid % COLUMNS, WIDTH - 1u);
    let split = tid / COLUMNS;
    let first = group.y * TOKENS;
    let count = n_tokens();
{% for t in range(tokens) %}
    var sum_{{ t }} = 0.0;
{% endfor %}
    for (var base = 0u; base < rank; base += BLOCK) {
        for (var e = tid; e < BLOCK * TOKENS; e += {{ threads }}u) {
            let i = base + e % BLOCK;
            let token = first + e / BLOCK;
            var v = 0.0;
            if i < rank && token < count {
                v = x[token * {{ n_in }}u + at + i];
                if squash == 1u { v = tanh(clamp(v, -15.0, 15.0)); }
                if squash == 2u { v = sigmoid(v); }
            }
            staged[e] = v;
        }
        workgroupBarrier();
        let end = min(BLOCK, rank - base);
        for (var k = split; k < end; k += SPLITS) {
            let weight = up[(at + base + k) * WIDTH + column];
{% for t in range(tokens) %}
            sum_{{ t }} += weight * staged[{{ t * block }}u + k];
{% endfor %}
        }
        workgroupBarrier();
    }
{% for t in range(tokens) %}
    partial[{{ t * threads }}u + tid] = sum_{{ t }};
{% endfor %}
    workgroupBarrier();
    for (var e = tid; e < COLUMNS * TOKENS; e += {{ threads }}u) {
        let t = e / COLUMNS;
        let c = e % COLUMNS;
        var sum = 0.0;
        for (var s = 0u; s < SPLITS; s++) { sum += partial[t * {{ threads }}u + s * COLUMNS + c]; }
        if first + t < count && first_column + c < WIDTH {
            y[(first + t) * {{ n_parts * width }}u + part * WIDTH + first_column + c] = sum;
        }
    }
}
