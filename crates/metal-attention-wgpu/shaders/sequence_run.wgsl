// Bounds: `run` and `next` are below `end`, at most the tokens of the batch, for which `last_seen` has words (`Dispatch`); `high` is
// below N_CTX. The loop around it advances by a token or more each time, whatever the batch holds.
{#
  The beginning of a run in prefill attention: the tokens from `run` on that are of one sequence, and the indices that they
  attend to. Their own indices follow each other, and the last indices that they attend to never decrease (batch.wgsl,
  `LastSeen`). Tiles begin at multiples of KEYS, which divides PAGE: each is on one page.
#}
        // Tokens run..next are of one sequence; together they attend to its indices low..=high.
        let seq = token_seq(run);
        let next = clamp(run_end(run), run + 1u, end);
{% if window > 0 %}
        let low = (max(token_pos(run) + 1u, {{ window }}u) - {{ window }}u) / KEYS * KEYS;
{% else %}
        let low = 0u;
{% endif %}
        let high = min(max(token_pos(next - 1u), last_seen[next - 1u]), N_CTX - 1u);
        let mine = known >= run && known < next;
