// A gated short convolution: y_t = c_t * sum_j taps[j] * (b x)_(t - N_BEFORE + j), for each channel, and the states after the
// segments of a run. A thread computes a channel of TILE tokens of a run. The one with the first tokens reads the state before
// the run, which no other does, and then writes all states, so that one of them may be in the same slot.
// Bounds: channels are compared with WIDTH, runs with `n_runs`, tokens with those of the run (recurrent/segments.wgsl), which
// `inputs` and `y` hold (`Dispatch`), as `states` holds all slots. Tiles are longer than N_BEFORE, so that in all but the first
// the preceding inputs are in the run.
@group(0) @binding(0) var<storage, read> inputs: array<f32>; // [n_tokens, 3, WIDTH]: b, c and x
@group(0) @binding(1) var<storage, read> taps: array<f32>; // [N_BEFORE + 1, WIDTH], the oldest token's first
@group(0) @binding(2) var<storage, read_write> states: array<f32>; // [n_slots, N_BEFORE, WIDTH], the oldest input first
@group(0) @binding(3) var<storage, read_write> y: array<f32>; // [n_tokens, WIDTH]
@group(0) @binding(4) var<storage, read> segments: array<vec4<u32>>;
{% include "recurrent/segments.wgsl" %}
{% set n_before = n_tap - 1 %}
const WIDTH: u32 = {{ width }}u;
const N_BEFORE: u32 = {{ n_before }}u;
const TILE: u32 = {{ tile }}u;

// The input of the convolution at a token of the batch.
fn input_at(token: u32, channel: u32) -> f32 {
    let row = token * (3u * WIDTH) + channel;
    return inputs[row] * inputs[row + 2u * WIDTH];
}

// The j-th of the N_BEFORE inputs before the n-th token after `first`; `slot` holds those before `first`.
fn input_before(j: u32, n: u32, first: u32, slot: u32, channel: u32) -> f32 {
    if n + j >= N_BEFORE { return input_at(first + (n + j - N_BEFORE), channel); }
    return states[(slot * N_BEFORE + n + j) * WIDTH + channel];
}

@compute @workgroup_size({{ threads }})
fn main(@builtin(local_invocation_index) tid: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let channel = group.x * {{ threads }}u + tid;
    if channel >= WIDTH || group.y >= n_runs() { return; }
    let tokens = run_of(group.y);
    let start = group.z * TILE;
    if start >= tokens.n_tokens { return; }
    let slot = segment_of(tokens.first).from_slot;
{% for j in range(n_before) %}
    var seen{{ j }} = input_before({{ j }}u, start, tokens.token, slot, channel);
{% endfor %}
{% for j in range(n_tap) %}
    let tap{{ j }} = taps[{{ j }}u * WIDTH + channel];
{% endfor %}
    let end = tokens.token + min(start + TILE, tokens.n_tokens);
    for (var token = tokens.token + start; token < end; token++) {
        let x = input_at(token, channel);
        var sum = tap0 * seen0;
{% for j in range(1, n_before) %}
        sum = fma(tap{{ j }}, seen{{ j }}, sum);
{% endfor %}
        sum = fma(tap{{ n_before }}, x, sum);
        y[token * WIDTH + channel] = inputs[token * (3u * WIDTH) + WIDTH + channel] * sum;
{% for j in range(1, n_before) %}
        seen{{ j - 1 }} = seen{{ j }};
{% endfor %}
        seen{{ n_before - 1 }} = x;
    }
    if start > 0u { return; }
    for (var i = 0u; i < tokens.n_segments; i++) {
        let part = segment_of(tokens.first + i);
        // Oldest first: if the states before and after share a slot, what is still to be read is not overwritten yet.
        for (var j = 0u; j < N_BEFORE; j++) {
            let seen = input_before(j, part.n_tokens, part.token, part.from_slot, channel);
            states[(part.to_slot * N_BEFORE + j) * WIDTH + channel] = seen;
        }
    }
}
