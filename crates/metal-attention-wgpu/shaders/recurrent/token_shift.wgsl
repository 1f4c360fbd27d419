// out_j[t] = x[t] + (before[t] - x[t]) * mu_j[t] for {{ n_out }} results, where before[t] is the row of the token before: x[t - 1], or for the
// run's first token its state. {% if by_token %}mu_j[t] is a factor of each channel plus what each token adds to it.{% endif %}

// One invocation for each channel and TOKENS tokens of a run. The one with the first tokens, which alone reads the state, {% if advance %}also
// writes the states after the run's segments{% else %}leaves it to another dispatch to write the states after{% endif %}.
// Bounds: runs are compared with their number, tokens with those of the run, which the rows hold (segments.wgsl), channels with
// CHANNELS. Loops end with the tokens and the segments of the run.
{{ declarations }}
{% include "recurrent/segments.wgsl" %}

const CHANNELS: u32 = {{ channels }}u;
const TOKENS: u32 = {{ tokens }}u;

@compute @workgroup_size({{ threads }})
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(workgroup_id) group: vec3<u32>) {
    let channel = id.x;
    if group.y >= n_runs() || channel >= CHANNELS { return; }
    let run = run_of(group.y);
    let first = group.z * TOKENS;
    if first >= run.n_tokens { return; }
    let end = min(first + TOKENS, run.n_tokens);
    var before = 0.0;
    if first == 0u {
        before = state[state_place(segment_of(run.first).from_slot) + channel];
    } else {
        before = x(run.token + first - 1u, channel);
    }
    for (var t = first; t < end; t++) {
        let token = run.token + t;
        let own = x(token, channel);
{% for j in range(n_out) %}
        set_out_{{ j }}(token, channel, own + (before - own) * (mu[{{ j * channels }}u + channel]{% if by_token %} + mu_of(token, {{ j * channels }}u + channel){% endif %}));
{% endfor %}
        before = own;
    }
{% if advance %}
    if first > 0u { return; }
    var after = 0u; // tokens of the run up to the segment's end
    for (var i = 0u; i < run.n_segments; i++) {
        let segment = segment_of(run.first + i);
        after += segment.n_tokens;
        state[state_place(segment.to_slot) + channel] = x(run.token + after - 1u, channel);
    }
{% endif %}
}
