// Attention of decode_layers.wgsl: a workgroup processes tasks, each a query head and a split of the positions, whose
// positions its subgroups divide.
// Bounds: positions are clamped to the last cached one of the split, units to KV_UNITS; see also decode_layers.wgsl.
        for (var task = group; task < splits * N_HEAD; task += GROUPS) {
            let split = task / N_HEAD;
            let head = task % N_HEAD;
            let start = seen + split * split_len;
            let end = min(start + split_len, pos + 1u);
            let cached = layer * {{ layer_units }}u + cache_row(first_page, head / GROUP, 0u);
            let last_cached = max(pos, 1u) - 1u;
            let warp = tid / {{ subgroup }}u;
            let lane = tid % {{ subgroup }}u;
            let own_key = start + warp * {{ warp_keys }}u;
{% macro load_pass(p, ahead) %}
{% for u in range(key_units) %}
            key_{{ p }}_{{ u }} = keys[cached + place_in_order(min(own_key + lane / 4u{{ ahead }}, last_cached)) * KV_UNITS + min(lane % 4u + {{ 4 * u }}u, KV_UNITS - 1u)];
{% endfor %}
{% for t in range(value_turns) %}
{% for u in range(value_units) %}
            value_{{ p }}_{{ t }}_{{ u }} = values[cached + place_in_order(min(own_key + {{ t * values_at_once }}u + lane / {{ value_lanes }}u{{ ahead }}, last_cached)) * KV_UNITS + min(lane % {{ value_lanes }}u + {{ u * value_lanes }}u, KV_UNITS - 1u)];
{% endfor %}
{% endfor %}
{% endmacro %}
{% for p in range(2) %}
{% for u in range(key_units) %}
            var key_{{ p }}_{{ u }}: Unit;
{% endfor %}
{% for t in range(value_turns) %}
{% for u in range(value_units) %}
            var value_{{ p }}_{{ t }}_{{ u }}: Unit;
{% endfor %}
{% endfor %}
{% endfor %}
{{ load_pass(0, "") }}
            if end - start > {{ warps * warp_keys }}u {
{{ load_pass(1, " + %du" | format(warps * warp_keys)) }}
            }

            // The query, the new key and the new value; each thread handles a pair of elements.
{% macro pair_of_heads() %}
                let which = i / {{ half_dim }}u;
                let pair = i % {{ half_dim }}u;
                let at = pair_elements(pair);
                let turn = angle(pair, rope_row);
                let source = flow_at + vec3(head, N_HEAD + head / GROUP, N_HEAD + N_HEAD_KV + head / GROUP)[which] * HEAD_DIM;
{% endmacro %}
            for (var i = tid; i < {{ 3 * half_dim }}u; i += {{ threads }}u) {
{{ pair_of_heads() }}
{% if qk_norm %}
                let raw = arrived2(source + at);
                head_squares[i] = dot(raw, raw);
            }
            workgroupBarrier();
            for (var i = tid; i < {{ 3 * half_dim }}u; i += {{ threads }}u) {
{{ pair_of_heads() }}
                var v = arrived2(source + at);
                if which < 2u {
                    var total = 0.0;
                    for (var k = 0u; k < {{ half_dim }}u; k++) { total += head_squares[which * {{ half_dim }}u + k]; }
                    let gain = params_at + {{ qk_norm_at }}u + which * HEAD_DIM;
                    v *= inverseSqrt(total / f32(HEAD_DIM) + {{ eps }}) * vec2(params[gain + at.x], params[gain + at.y]);
                }
{% else %}
                var v = arrived2(source + at);
{% endif %}
                if which < 2u { v = turn_by(v, turn); }
                v = select(as_cached(v), v * {{ scale }}, which == 0u);
                heads[which * {{ 4 * key_units }}u + at.x / 4u][at.x % 4u] = v.x;
                heads[which * {{ 4 * key_units }}u + at.y / 4u][at.y % 4u] = v.y;
            }
{% if key_units * 4 > kv_units %}
            if tid < {{ key_units * 4 - kv_units }}u { heads[KV_UNITS + tid] = vec4<f32>(); }
{% endif %}
            workgroupBarrier();
            if end == pos + 1u && head % GROUP == 0u && tid < 2u * KV_UNITS {
                let own = cached + place_in_order(pos) * KV_UNITS;
                if tid < KV_UNITS {
                    keys[own + tid] = pack_unit(heads[{{ 4 * key_units }}u + tid]);
                } else {
                    values[own + tid - KV_UNITS] = pack_unit(heads[{{ 8 * key_units }}u + tid - KV_UNITS]);
                }
            }

            // Each subgroup attends to positions of its own, {{ warp_keys }} at a time, with a running softmax.
{% for u in range(key_units) %}
            let query_{{ u }} = heads[{{ u * 4 }}u + lane % 4u];
{% endfor %}
            var largest = NEVER;
            var total = 0.0;
{% for u in range(value_units) %}
            var sum_{{ u }} = vec4<f32>();
{% endfor %}
{% macro see(p) %}
{% for u in range(key_units) %}
                    var k_{{ u }} = unpack_unit(key_{{ p }}_{{ u }});
                    if own + lane / 4u >= pos { k_{{ u }} = heads[{{ 4 * key_units }}u + min(lane % 4u + {{ 4 * u }}u, KV_UNITS - 1u)]; }
{% endfor %}
                    let in_range = own + lane / 4u < end;
                    var score = {% for u in range(key_units) %}dot(k_{{ u }}, query_{{ u }}){{ " + " if not loop.last }}{% endfor %};
                    score += subgroupShuffleXor(score, 1u);
                    score += subgroupShuffleXor(score, 2u);
                    let most = max(largest, subgroupMax(select(NEVER, score, in_range)));
                    let weight = select(0.0, exp(score - most), in_range);
                    let shrink = exp(largest - most);
                    total = total * shrink + weight;
                    largest = most;
{% for u in range(value_units) %}
                    sum_{{ u }} *= shrink;
{% endfor %}
{% for t in range(value_turns) %}
                    {
                        let place = {{ t * values_at_once }}u + lane / {{ value_lanes }}u;
                        var of_place = subgroupShuffle(weight, min(4u * place, {{ subgroup - 1 }}u));
{% if value_turns * values_at_once > warp_keys %}
                        of_place = select(0.0, of_place, place < {{ warp_keys }}u);
{% endif %}
{% for u in range(value_units) %}
                        var v_{{ u }} = unpack_unit(value_{{ p }}_{{ t }}_{{ u }});
                        if own + place >= pos { v_{{ u }} = heads[{{ 8 * key_units }}u + min(lane % {{ value_lanes }}u + {{ u * value_lanes }}u, KV_UNITS - 1u)]; }
                        sum_{{ u }} += of_place * v_{{ u }};
{% endfor %}
                    }
{% endfor %}
{% endmacro %}
            for (var ahead = 0u; ahead < end - start; ahead += {{ 2 * warps * warp_keys }}u) {
                if ahead > 0u {
{{ load_pass(0, " + ahead") }}
{{ load_pass(1, " + ahead + %du" | format(warps * warp_keys)) }}
                }
                {
                    let own = own_key + ahead;
{{ see(0) }}
                }
                if ahead + {{ warps * warp_keys }}u < end - start {
                    let own = own_key + ahead + {{ warps * warp_keys }}u;
{{ see(1) }}
                }
            }
{% for half in [4, 8, 16] if half < subgroup %}
            total += subgroupShuffleXor(total, {{ half }}u);
{% endfor %}
{% for half in [16, 8, 4, 2, 1] if half >= value_lanes and half < subgroup %}
{% for u in range(value_units) %}
            sum_{{ u }} += subgroupShuffleXor(sum_{{ u }}, {{ half }}u);
{% endfor %}
{% endfor %}
{% for u in range(value_units) %}
            if lane < {{ value_lanes }}u && lane + {{ u * value_lanes }}u < KV_UNITS {
                wide[warp * KV_UNITS + lane + {{ u * value_lanes }}u] = bitcast<vec4<u32>>(sum_{{ u }});
            }
{% endfor %}
            if lane == 0u { spread[warp] = vec2(largest, total); }
            workgroupBarrier();

            // The subgroups' results are merged; one without positions has weight zero.
            for (var from_element = 0u; from_element < HEAD_DIM; from_element += {{ threads }}u) {
                if from_element + tid - lane < HEAD_DIM {
                    let e = min(from_element + tid, HEAD_DIM - 1u);
                    let part = select(vec2(NEVER, 0.0), spread[min(lane, {{ warps - 1 }}u)], lane < {{ warps }}u);
                    let all_largest = subgroupMax(part.x);
                    let weight = exp(part.x - all_largest);
                    let all_total = subgroupAdd(weight * part.y);
                    var sum = 0.0;
{% for s in range(warps) %}
                    sum += subgroupShuffle(weight, {{ s }}u) * bitcast<f32>(wide[{{ s }}u * KV_UNITS + e / 4u][e % 4u]);
{% endfor %}
                    if from_element + tid < HEAD_DIM {
                        publish(flow_at + {{ att_at }}u + split * {{ n_att }}u + place(head * HEAD_DIM + e, {{ n_att // 4 }}u), sum / all_total);
                    }
                    if from_element + tid == 0u { publish(flow_at + {{ lse_at }}u + split * N_HEAD + head, all_largest + log(all_total)); }
                }
            }
            workgroupBarrier();
        }
