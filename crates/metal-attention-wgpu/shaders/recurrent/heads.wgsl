// The common part of the recurrences with a matrix for each head: kernels extend this file with the arithmetic of a token.
//
// A workgroup processes the tokens of one run with COLUMNS columns of one head's state. SPLITS neighbouring invocations share a
// column: each keeps every SPLITS-th four of its rows in registers, so that a product of a vector with the column is a sum over
// the invocation's rows and then over its neighbours. The vectors of BLOCK tokens are in workgroup memory (`staged`), while those
// of the next ones are being read into registers.
{% if fused %}
//
// It reads raw inputs, and computes everything between the layer's matrix products for a whole head: the convolution's last
// inputs are in workgroup memory (`before`). For channels that several heads read, the workgroup that is the last to have read the
// state before writes the states after.
{% endif %}
// Bounds: runs are compared with their number; tokens are those of the run, which the rows hold, and slots those of the states
// (segments.wgsl). Rows and columns of a head are compared with KEY_DIM and VALUE_DIM before they are read or written; indices of
// workgroup memory follow from constants. Loops end with the tokens and segments of the run, or count to constants.
{% set threads = columns * splits %}
{% set units = (key_dim + 4 * splits - 1) // (4 * splits) %}
{% set key_units = units * splits %}
{% set value_units = (columns + 3) // 4 %}
{% set row_units = n_vectors * key_units + n_values * value_units %}
{% set n_ahead = (block * row_units + threads - 1) // threads %}
{% set shuffles = neighbours >= splits %}
{{ declarations }}
{% include "recurrent/segments.wgsl" %}

{% include "recurrent/gates.wgsl" %}

const KEY_DIM: u32 = {{ key_dim }}u;
const VALUE_DIM: u32 = {{ value_dim }}u;
const COLUMNS: u32 = {{ columns }}u;
const SPLITS: u32 = {{ splits }}u;
const CHUNKS: u32 = {{ (value_dim + columns - 1) // columns }}u;
const BLOCK: u32 = {{ block }}u;
const VECTORS: u32 = {{ n_vectors }}u; // vectors of KEY_DIM elements of a token; those of VALUE_DIM follow them
const KEY_UNITS: u32 = {{ key_units }}u;
const VALUE_UNITS: u32 = {{ value_units }}u;
const ROW_UNITS: u32 = {{ row_units }}u;

var<workgroup> staged: array<vec4<f32>, {{ block * row_units }}>;
{% if gates %}
var<workgroup> gates: array<vec2<f32>, {{ block }}>;
{% endif %}
{% if not shuffles %}
// The values that neighbours add up, alternating between two halves.
var<workgroup> partial: array<f32, {{ 2 * n_sums * threads }}>;
{% endif %}

{% if convolved %}
// The channels of a head: one vector after the other, then the value: `channel_of(head, local)`.
const LOCAL: u32 = {{ 2 * key_dim + value_dim }}u;
{% block channels %}
{% endblock %}
{% if fused %}
const CHANNELS: u32 = {{ channels }}u;
const BEFORE: u32 = {{ width - 1 }}u;
var<workgroup> before: array<f32, {{ [(width - 1) * (2 * key_dim + value_dim), 1] | max }}>;
fn convolution_place(slot: u32) -> u32 { return slot * {{ state_stride }}u + {{ convolution_at }}u; }
{% if share > 1 %}
var<workgroup> arrived: u32;
{% endif %}

// The input `BEFORE - i` tokens before the run's token `t`.
fn raw(run: Run, i: u32, channel: u32, local: u32) -> f32 {
    if i < BEFORE { return before[i * LOCAL + local]; }
    return x(run.token + i - BEFORE, channel);
}
{% endif %}

// An input of the head, from its channels.
fn input(run: Run, t: u32, head: u32, local: u32) -> f32 {
    let channel = channel_of(head, local);
{% if fused %}
    var sum = {{ "bias[channel]" if bias else "0.0" }};
{% for j in range(width) %}
    sum += taps[{{ j }}u * CHANNELS + channel] * raw(run, t + {{ j }}u, channel, local);
{% endfor %}
    return sum * sigmoid(sum);
{% else %}
    return x(run.token + t, channel);
{% endif %}
}
{% endif %}

// `element(run, t, head, vector, i)`, and other functions that kernels need.
{% block functions %}
{% endblock %}

// Four elements of the staged data of the run's token `t`.
fn unit_of(run: Run, t: u32, head: u32, first_column: u32, unit: u32) -> vec4<f32> {
    let value_unit = max(unit, VECTORS * KEY_UNITS) - VECTORS * KEY_UNITS;
    let is_value = unit >= VECTORS * KEY_UNITS;
    let vector = select(unit / KEY_UNITS, VECTORS + value_unit / VALUE_UNITS, is_value);
    let first = select(4u * (unit % KEY_UNITS), first_column + 4u * (value_unit % VALUE_UNITS), is_value);
    let end = select(KEY_DIM, VALUE_DIM, is_value);
    var v = vec4<f32>();
{% for j in range(4) %}
    if first + {{ j }}u < end { v[{{ j }}] = element(run, t, head, vector, first + {{ j }}u); }
{% endfor %}
    return v;
}

// The staged element of a vector of values for the invocation's column.
fn value_of(at: u32, i: u32, tid: u32) -> f32 {
    let place = tid / SPLITS;
    return staged[at + VECTORS * KEY_UNITS + i * VALUE_UNITS + place / 4u][place % 4u];
}

// Reads four rows of a column of the state; then writes them.
fn read_state(place: u32, row: u32, column: u32) -> vec4<f32> {
    var v = vec4<f32>();
    if column < VALUE_DIM {
{% for j in range(4) %}
        if row + {{ j }}u < KEY_DIM { v[{{ j }}] = state[place + (row + {{ j }}u) * VALUE_DIM + column]; }
{% endfor %}
    }
    return v;
}

fn write_state(place: u32, row: u32, column: u32, v: vec4<f32>) {
    if column < VALUE_DIM {
{% for j in range(4) %}
        if row + {{ j }}u < KEY_DIM { state[place + (row + {{ j }}u) * VALUE_DIM + column] = v[{{ j }}]; }
{% endfor %}
    }
}

{% macro over_splits(names) %}
{% if shuffles %}
{% for mask in [1, 2, 4, 8, 16] if mask < splits %}
{% for name in names %}
            {{ name }} += subgroupShuffleXor({{ name }}, {{ mask }}u);
{% endfor %}
{% endfor %}
{% elif splits > 1 %}
            let half = t % 2u * {{ n_sums * threads }}u;
{% for name in names %}
            partial[half + {{ loop.index0 * threads }}u + tid] = {{ name }};
{% endfor %}
            workgroupBarrier();
{% for name in names %}
{% set row = loop.index0 * threads %}
            {{ name }} = 0.0;
{% for s in range(splits) %}
            {{ name }} += partial[half + {{ row + s }}u + tid / SPLITS * SPLITS];
{% endfor %}
{% endfor %}
{% endif %}
{% endmacro %}

{% macro fetch(first) %}
{% for j in range(n_ahead) %}
        ahead_{{ j }} = vec4<f32>();
        {
            let e = tid + {{ j * threads }}u;
            let t = {{ first }} + e / ROW_UNITS;
            if e < BLOCK * ROW_UNITS && t < run.n_tokens { ahead_{{ j }} = unit_of(run, t, head, first_column, e % ROW_UNITS); }
        }
{% endfor %}
{% if gates %}
        if tid < BLOCK && {{ first }} + tid < run.n_tokens { gate_ahead = gates_of(run.token + {{ first }} + tid, head); }
{% endif %}
{% endmacro %}

@compute @workgroup_size({{ threads }})
fn main(@builtin(local_invocation_index) tid: u32, @builtin(workgroup_id) group: vec3<u32>) {
    if group.y >= n_runs() { return; }
    let run = run_of(group.y);
    let head = group.x / CHUNKS;
    let first_column = group.x % CHUNKS * COLUMNS;
    let column = first_column + tid / SPLITS;
    let split = tid % SPLITS;
    let matrix = head * KEY_DIM * VALUE_DIM;
    var segment = segment_of(run.first);
    let from_place = state_place(segment.from_slot) + matrix;
{% for i in range(units) %}
    var state_{{ i }} = read_state(from_place, 4u * (split + {{ i * splits }}u), column);
{% endfor %}
{% block constants %}
{% endblock %}
{% if fused and convolved %}
    for (var e = tid; e < BEFORE * LOCAL; e += {{ threads }}u) {
        let channel = channel_of(head, e % LOCAL);
        before[e] = state[convolution_place(segment.from_slot) + e / LOCAL * CHANNELS + channel];
    }
    workgroupBarrier();
{% if share > 1 %}
    if tid == 0u {
        let ticket = group.y * {{ n_shared }}u + shared_of(head);
        arrived = atomicAdd(&tickets[ticket], 1u) + 1u;
        if arrived == {{ share }}u { atomicStore(&tickets[ticket], 0u); }
    }
{% endif %}
{% endif %}
{% for j in range(n_ahead) %}
    var ahead_{{ j }} = vec4<f32>();
{% endfor %}
{% if gates %}
    var gate_ahead = vec2<f32>();
{% endif %}
{{ fetch("0u") }}
    var index = 0u; // index of the segment in the run
    var next = segment.n_tokens; // the token where it ends
    for (var first = 0u; first < run.n_tokens; first += BLOCK) {
{% for j in range(n_ahead) %}
        if tid + {{ j * threads }}u < BLOCK * ROW_UNITS { staged[tid + {{ j * threads }}u] = ahead_{{ j }}; }
{% endfor %}
{% if gates %}
        if tid < BLOCK { gates[tid] = gate_ahead; }
{% endif %}
        workgroupBarrier();
{{ fetch("first + BLOCK") }}
        let end = min(first + BLOCK, run.n_tokens);
        for (var t = first; t < end; t++) {
            let at = (t - first) * ROW_UNITS;
{% block token %}
{% endblock %}
            if t + 1u == next {
                let to_place = state_place(segment.to_slot) + matrix;
{% for i in range(units) %}
                write_state(to_place, 4u * (split + {{ i * splits }}u), column, state_{{ i }});
{% endfor %}
                index++;
                if index < run.n_segments {
                    segment = segment_of(run.first + index);
                    next += segment.n_tokens;
                }
            }
        }
        workgroupBarrier();
    }
{% if fused and convolved %}
    var after = 0u; // tokens of the run up to the segment's end
    for (var i = 0u; i < run.n_segments; i++) {
        let ended = segment_of(run.first + i);
        after += ended.n_tokens;
        for (var e = tid; e < BEFORE * LOCAL; e += {{ threads }}u) {
            let local = e % LOCAL;
{% if share > 1 %}
            if is_shared(local) && arrived != {{ share }}u { continue; }
{% endif %}
            let channel = channel_of(head, local);
            state[convolution_place(ended.to_slot) + e / LOCAL * CHANNELS + channel] = raw(run, after + e / LOCAL, channel, local);
        }
    }
{% endif %}
}
