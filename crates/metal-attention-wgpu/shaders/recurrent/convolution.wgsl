// out[t][c] = f(bias[c] + sum over j < WIDTH of taps[j][c] * x[t - (WIDTH - 1) + j][c]), where inputs before the run's first token
// come from its state. One invocation for each channel and TOKENS tokens of a run: it keeps the last inputs in registers. The one
// with the first tokens, which alone reads the state, also writes the states after the run's segments.
// Bounds: runs are compared with their number, tokens with those of the run, which the rows hold (`segments.wgsl`), channels with
// CHANNELS. Rows of the state are below WIDTH - 1. Loops end with the tokens and the segments of the run.
{{ declarations }}
{% include "recurrent/segments.wgsl" %}
const CHANNELS: u32 = {{ channels }}u;
const BEFORE: u32 = {{ width - 1 }}u;
const TOKENS: u32 = {{ tokens }}u;

@compute @workgroup_size({{ threads }})
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(workgroup_id) group: vec3<u32>) {
    let channel = id.x;
    if group.y >= n_runs() || channel >= CHANNELS { return; }
    let run = run_of(group.y);
    let first = group.z * TOKENS;
    if first >= run.n_tokens { return; }
    let end = min(first + TOKENS, run.n_tokens);
{% if width > 1 %}
    // The inputs before tokens first..: x_1 is the oldest, then x_2 and so on.
{% for j in range(1, width) %}
    var x_{{ j }} = 0.0;
{% endfor %}
    if first == 0u {
        let place = state_place(segment_of(run.first).from_slot) + channel;
{% for j in range(1, width) %}
        x_{{ j }} = state[place + {{ (j - 1) * channels }}u];
{% endfor %}
    } else {
{% for j in range(1, width) %}
        x_{{ j }} = x(run.token + first - {{ width - j }}u, channel);
{% endfor %}
    }
{% for j in range(1, width) %}
    let before_{{ j }} = x_{{ j }};
{% endfor %}
{% endif %}
{% for j in range(width) %}
    let tap_{{ j }} = taps[{{ j * channels }}u + channel];
{% endfor %}
    for (var t = first; t < end; t++) {
        let newest = x(run.token + t, channel);
        var sum = {{ "bias[channel]" if bias else "0.0" }};
{% for j in range(width - 1) %}
        sum += tap_{{ j }} * x_{{ j + 1 }};
{% endfor %}
        sum += tap_{{ width - 1 }} * newest;
{% for j in range(1, width - 1) %}
        x_{{ j }} = x_{{ j + 1 }};
{% endfor %}
{% if width > 1 %}
        x_{{ width - 1 }} = newest;
{% endif %}
{% if silu %}
        // The bound avoids infinities: drivers may assume that there are none.
        sum /= 1.0 + exp(min(-sum, 80.0));
{% endif %}
        set_out(run.token + t, channel, sum);
    }
{% if width > 1 %}
    if first > 0u { return; }
    var after = 0u; // tokens of the run up to the segment's end
    for (var i = 0u; i < run.n_segments; i++) {
        let segment = segment_of(run.first + i);
        after += segment.n_tokens;
        let place = state_place(segment.to_slot) + channel;
{% for j in range(1, width) %}
        // Input {{ j - 1 }} of the last BEFORE ones: token after - BEFORE + {{ j - 1 }}, or one before the run.
        if after >= {{ width - j }}u {
            state[place + {{ (j - 1) * channels }}u] = x(run.token + after - {{ width - j }}u, channel);
        } else {
            // after + {{ j }} is at most BEFORE.
            var old = before_{{ j }};
{% for k in range(j + 1, width) %}
            if after == {{ k - j }}u { old = before_{{ k }}; }
{% endfor %}
            state[place + {{ (j - 1) * channels }}u] = old;
        }
{% endfor %}
    }
{% endif %}
}
