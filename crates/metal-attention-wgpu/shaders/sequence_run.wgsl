// Bounds: `run` and `next` are below `end`, at most the tokens of the batch, for which `last_seen` has words (`Dispatch`); `high`
// is below N_CTX. The loop advances by a
// token each time.
{#
  The beginning of a sequence in prefill attention: the tokens from `run` on that are of one sequence, and the positions
  that they attend to. Tiles begin at multiples of KEYS, which divides PAGE: each is on one page.
#}
        // Tokens run..next are of one sequence; together they attend to its positions low..=high.
        let seq = token_seq(run);
        var low = token_pos(run);
        var high = max(low, last_seen[run]);
        var next = run + 1u;
        while next < end {
            if token_seq(next) != seq { break; }
            low = min(low, token_pos(next));
            high = max(high, max(token_pos(next), last_seen[next]));
            next++;
        }
{% if window > 0 %}
        low = (max(low + 1u, {{ window }}u) - {{ window }}u) / KEYS * KEYS;
{% else %}
        low = 0u;
{% endif %}
        high = min(high, N_CTX - 1u);
        let mine = known >= run && known < next;
