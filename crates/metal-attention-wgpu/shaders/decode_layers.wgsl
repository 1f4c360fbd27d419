// The persistent kernel: all layers of one token in one dispatch; x becomes the residual stream after the last layer.
//
// {{ groups }} workgroups stay resident for the whole step. A value that one of them computes and others need is passed
// through `flow`, one word for each: 0 means not there yet, and the readers poll until it is. A word is its own flag, so
// that no other memory has to be ordered, and there is no barrier between workgroups. Weights and cached keys and values,
// which depend on no other workgroup, are requested before a workgroup begins to poll.
//
// Each layer, divided by rows or heads among the workgroups:
//   1. queries, keys, values = W norm(x)
//   2. attention: each workgroup a query head and a split of the positions
//   3. x += W attention, merging the splits
//   4. gated = silu(gate) * up, of W norm(x)
//   5. x += W gated
//
// `flow` has two halves: a step uses one and clears the other for the next step. All workgroups have to run at the same
// time; if they do not, polling ends after {{ patience }} rounds of {{ looks }} load(s), and `gave_up` is set.
//
// The pages of the sequence are consecutive in the KV cache: only the first one is looked up.
// Bounds: the buffers have the sizes of the constants, matrices included (`decode_layers` in src/kernels). Items are
// clamped to the last, units to the last of a row where lanes reach beyond it, quads to the width of the vector, each
// where it is read. Positions are compared with N_CTX, and their pages follow the first one, being consecutive
// (`DispatchPlan::layers`). A workgroup has items of a part only if it is one of those that compute the part. `flow` and
// `params` are indexed by layer, item and split, all below constants. Polling ends when `patience` is used up; other
// loops count to constants, to the layers, or to the positions of a split.
@group(0) @binding(0) var<storage, read> w: array<u32>;
@group(0) @binding(1) var<storage, read> params: array<f32>; // norms and biases of each layer
@group(0) @binding(2) var<storage, read_write> x: array<f32>;
@group(0) @binding(3) var<storage, read_write> flow: array<atomic<u32>>;
@group(0) @binding(4) var<storage, read_write> ended: atomic<u32>; // workgroups that reached their end, in all steps
{% set rope_binding = 5 %}
{% include "rope.wgsl" %}
{% include "kv_cache.wgsl" %}
@group(0) @binding(6) var<storage, read_write> keys: array<Unit>;
@group(0) @binding(7) var<storage, read_write> values: array<Unit>;
{% set batch_binding = 8 %}
{% include "batch.wgsl" %}
@group(0) @binding(9) var<storage, read_write> gave_up: atomic<u32>; // not 0 after a workgroup timed out
{% include "types/numbers.wgsl" %}
{% if integer %}

{% include "types/inputs.wgsl" %}
{% endif %}

{#
  The four matrices. `variants` lists the forms that the matrix has in different layers, separated by slashes. A form is a
  list of parts, separated by plus signs, each type:first row:rows:lanes:unroll:stretches:first workgroup:workgroups.
  Each workgroup computes rows of one part.
#}
{% set qkv = {"name": "qkv", "index": 0, "n_in": n_embd, "rows": 1, "variants": qkv_variants} %}
{% set out = {"name": "out", "index": 1, "n_in": n_att, "rows": 1, "variants": out_variants} %}
{% set gate_up = {"name": "gate_up", "index": 2, "n_in": n_embd, "rows": 2, "variants": gate_up_variants} %}
{% set down = {"name": "down", "index": 3, "n_in": n_ff, "rows": 1, "variants": down_variants} %}
{% for m in [qkv, out, gate_up, down] %}
{% if placed %}
var<private> {{ m.name }}_variant: u32;
{% endif %}
{% for variant in m.variants | split("/") %}
{% set v = loop.index0 %}
{% for part in variant | split("+") %}
{% set name = m.name ~ "_" ~ v ~ "_" ~ loop.index0 %}
{% set f = part | split(":") | list %}
var<private> {{ name }}_at: u32; // the word of w where the matrix begins
{{ matrix(name, f[0], m.n_in, f[2] | int) }}
{% endfor %}
{% endfor %}
{% endfor %}
{% if placed %}
@group(0) @binding(10) var<storage, read> places: array<u32>; // for each layer and matrix: its variant, and the words where its parts begin
{% endif %}
{# Sets the position of a matrix for another layer. #}
{% macro place(m, layer) %}
{% if placed %}
        {{ m.name }}_variant = places[({{ layer }}) * {{ 4 * (1 + n_parts) }}u + {{ m.index * (1 + n_parts) }}u];
{% for variant in m.variants | split("/") %}
{% set v = loop.index0 %}
{% for part in variant | split("+") %}
        {{ m.name }}_{{ v }}_{{ loop.index0 }}_at = places[({{ layer }}) * {{ 4 * (1 + n_parts) }}u + {{ m.index * (1 + n_parts) + 1 + loop.index0 }}u];
{% endfor %}
{% endfor %}
{% else %}
        {{ m.name }}_0_0_at = {{ [qkv_at, out_at, gate_up_at, down_at][m.index] }}u + ({{ layer }}) * {{ layer_words }}u;
{% endif %}
{% endmacro %}
{% set as_input = "input_bytes" if integer else "input_floats" %}
{% set warps = threads // subgroup %}
{# Attention: four lanes share a key. Units of a key that each lane reads. #}
{% set kv_units = head_dim // 4 %}
{% set key_units = (kv_units + 3) // 4 %}
{% set warp_keys = subgroup // 4 %}
{# Lanes that share a value, units of it that each lane reads, and the values of a subgroup at a time and in turn. #}
{% set value_lanes = [kv_lanes, subgroup] | min %}
{% set value_units = (kv_units + value_lanes - 1) // value_lanes %}
{% set values_at_once = subgroup // value_lanes %}
{% set value_turns = (warp_keys + values_at_once - 1) // values_at_once %}
{% set half_dim = head_dim // 2 %}
{# Offsets in flow, in words. #}
{% set att_at = n_qkv %}
{% set lse_at = att_at + max_splits * n_att %}
{% set mid_at = lse_at + max_splits * n_head %}
{% set gated_at = mid_at + n_embd %}
{% set x_at = gated_at + n_ff %}
{% set layer_flow = x_at + n_embd %}
{# Offsets in params, in words. #}
{% set ffn_norm_at = n_embd %}
{% set qkv_bias_at = 2 * n_embd %}
{% set out_bias_at = qkv_bias_at + (n_qkv if qkv_bias else 0) %}
{% set gate_up_bias_at = out_bias_at + (n_embd if out_bias else 0) %}
{% set down_bias_at = gate_up_bias_at + (2 * n_ff if gate_up_bias else 0) %}
{% set qk_norm_at = down_bias_at + (n_embd if down_bias else 0) %}
{% set layer_params = qk_norm_at + (2 * head_dim if qk_norm else 0) %}
const FLOW: u32 = {{ n_layer * layer_flow }}u;
const GROUPS: u32 = {{ groups }}u;
const N_HEAD: u32 = {{ n_head }}u;
const GROUP: u32 = {{ n_head // n_head_kv }}u; // query heads of a KV head
const NEVER: f32 = -3.4e38; // the score of a position that is not attended to

// The input of a product, in units of 8 numbers: first halves, then second halves; floats, or integers as in X8.
var<workgroup> h: array<vec4<u32>, {{ 2 * h_units }}>;
var<workgroup> wide: array<vec4<u32>, {{ [2 * wide_units, warps * kv_units] | max }}>;
var<workgroup> squares: array<f32, {{ warps }}>;
var<workgroup> heads: array<vec4<f32>, {{ 12 * key_units }}>; // the query, the new key, the new value
var<workgroup> spread: array<vec2<f32>, {{ warps }}>; // of each subgroup: largest score, sum of weights
{% if qk_norm %}
var<workgroup> head_squares: array<f32, {{ 3 * half_dim }}>;
{% endif %}

var<private> group: u32;
var<private> patience: u32 = {{ patience }}u;

{% if not integer %}
fn input_floats(_quad: u32, v: vec4<f32>) -> vec4<u32> { return bitcast<vec4<u32>>(v); }

{% endif %}
// Below -80 the result is 0 in f32, but exp(-v) would overflow.
fn silu(v: f32) -> f32 { return v / (1.0 + exp(-max(v, -80.0))); }

{% if looks > 1 %}
// A plain load would be moved out of loops by llvmpipe's compiler.
fn look(at: u32) -> u32 { return atomicAdd(&flow[at], 0u); }
{% else %}
fn look(at: u32) -> u32 { return atomicLoad(&flow[at]); }
{% endif %}

// Makes `v` visible to all workgroups; 0 is stored as -0.
fn publish(at: u32, v: f32) {
    let bits = bitcast<u32>(v);
    atomicStore(&flow[at], select(bits, 0x80000000u, bits == 0u));
}

// Position of number `i` of a vector of `4 * quads`: lanes that poll neighbouring quads read neighbouring words.
fn place(i: u32, quads: u32) -> u32 { return i % 4u * quads + i / 4u; }

// Polls the four words of a quad, the first at `at`, until all are there.
fn arrived4(at: u32, quads: u32) -> vec4<f32> {
    var got = vec4(look(at), look(at + quads), look(at + 2u * quads), look(at + 3u * quads));
    while any(got == vec4(0u)) && patience > 0u {
{% for _ in range(looks) %}
        got = vec4(look(at), look(at + quads), look(at + 2u * quads), look(at + 3u * quads));
{% endfor %}
        patience--;
    }
    return bitcast<vec4<f32>>(got);
}

fn arrived2(at: vec2<u32>) -> vec2<f32> {
    var got = vec2(look(at.x), look(at.y));
    while any(got == vec2(0u)) && patience > 0u {
{% for _ in range(looks) %}
        got = vec2(look(at.x), look(at.y));
{% endfor %}
        patience--;
    }
    return bitcast<vec2<f32>>(got);
}

// A quad and one more word.
struct Part { v: vec4<f32>, lse: f32 }
fn arrived_part(at: u32, quads: u32, lse: u32) -> Part {
    var got = vec4(look(at), look(at + quads), look(at + 2u * quads), look(at + 3u * quads));
    var last = look(lse);
    while (any(got == vec4(0u)) || last == 0u) && patience > 0u {
{% for _ in range(looks) %}
        got = vec4(look(at), look(at + quads), look(at + 2u * quads), look(at + 3u * quads));
        last = look(lse);
{% endfor %}
        patience--;
    }
    return Part(bitcast<vec4<f32>>(got), bitcast<f32>(last));
}

{#
  A product. Its items are rows, or pairs of rows that give one number. `lanes` lanes share an item; each requests `unroll`
  units at once, those of the next step before it uses those of this one.
#}
{% macro load(p, to, item, stretch) %}
{% for u in range(p.unroll) %}
            {
{% if p.lanes * p.unroll * p.stretches == p.n_in // 8 %}
                let unit = tid % {{ p.lanes }}u + {{ u * p.lanes }}u + {{ stretch }};
{% else %}
                let unit = min(tid % {{ p.lanes }}u + {{ u * p.lanes }}u + {{ stretch }}, {{ p.n_in // 8 - 1 }}u);
{% endif %}
{% for r in range(p.rows) %}
                {{ p.name }}_{{ to }}_{{ r }}_{{ u }} = {{ p.name }}_load8({{ item }} * {{ p.rows }}u + {{ r }}u, unit);
{% endfor %}
            }
{% endfor %}
{% endmacro %}
{# Items of a part that this workgroup computes: (first, number). #}
{% macro share_of(p) %}share({{ p.n_items }}u, {{ p.from }}u, {{ p.groups }}u){% endmacro %}
{# The item of this lane in a round, counted from the first one of the part. #}
{% macro item_of(p, round) %}
min({{ share_of(p) }}.x + min({{ round }} * {{ threads // p.lanes }}u + tid / {{ p.lanes }}u, max({{ share_of(p) }}.y, 1u) - 1u), {{ p.n_items - 1 }}u)
{%- endmacro %}
{% macro declare_part(p) %}
{% for r in range(p.rows) %}
{% for u in range(p.unroll) %}
    var {{ p.name }}_raw_{{ r }}_{{ u }}: {{ p.name }}_Raw8;
{% endfor %}
{% endfor %}
{% endmacro %}
{# Requests the first units. #}
{% macro begin_part(p) %}
        {
            let item = {{ item_of(p, "0u") }};
{{ load(p, "raw", "item", "0u") }}
        }
{% endmacro %}
{# Touches weights that this workgroup needs later, so that they are in the cache by then. #}
{% macro touch_part(p) %}
{% set quads = p.n_in // 32 %}
{% set most = ((p.n_items + p.groups - 1) // p.groups) * p.rows * quads %}
{% for k in range((most + threads - 1) // threads) %}
        {
            let i = min(tid + {{ k * threads }}u, max({{ share_of(p) }}.y, 1u) * {{ p.rows * quads }}u - 1u);
            let raw = {{ p.name }}_load8(min({{ share_of(p) }}.x, {{ p.n_items - 1 }}u) * {{ p.rows }}u + i / {{ quads }}u, i % {{ quads }}u * 4u);
            let codes = {{ p.name }}_codes8(raw);
            touched += {{ p.name }}_scale8(raw) * (codes.lo.x + codes.hi.w);
        }
{% endfor %}
{% endmacro %}
{% macro part_product(p, input, input_units, fill, bias_at, before, result) %}
{% set teams = threads // p.lanes %}
{% set rounds = ((p.n_items + p.groups - 1) // p.groups + teams - 1) // teams %}
{% set steps = rounds * p.stretches %}
        {
            let lane = tid % {{ p.lanes }}u;
            var own = {{ item_of(p, "0u") }};
{% macro load_before() %}
{% for r in range(p.rows) %}
            {
                let item = own + {{ p.first }}u;
                before_{{ r }} = {{ before }}{% if bias_at %} + params[params_at + {{ bias_at }}u + item * {{ p.rows }}u + {{ r }}u]{% endif %};
            }
{% endfor %}
{% endmacro %}
{% for r in range(p.rows) %}
            var before_{{ r }}: f32;
            var acc_{{ r }} = {{ "0.0" if integer else "vec4<f32>()" }};
{% endfor %}
{{ load_before() }}
{{ fill }}
{% if steps > 1 %}
            for (var step = 0u; step < {{ steps }}u; step++) {
{% for r in range(p.rows) %}
{% for u in range(p.unroll) %}
                var {{ p.name }}_next_{{ r }}_{{ u }} = {{ p.name }}_raw_{{ r }}_{{ u }};
{% endfor %}
{% endfor %}
                if step < {{ steps - 1 }}u {
                    let next_item = {{ item_of(p, "(step + 1u) / %du" | format(p.stretches)) }};
{{ load(p, "next", "next_item", "(step + 1u) %% %du * %du" | format(p.stretches, p.unroll * p.lanes)) }}
                }
                let at = step % {{ p.stretches }}u * {{ p.unroll * p.lanes }}u;
{% else %}
            {
                let step = 0u;
                let at = 0u;
{% endif %}
{% for u in range(p.unroll) %}
                {
                    let first = {{ input }}[lane + {{ u * p.lanes }}u + at];
                    let second = {{ input }}[lane + {{ u * p.lanes + input_units }}u + at];
{% for r in range(p.rows) %}
{% if integer %}
                    acc_{{ r }} += {{ p.name }}_dots8({{ p.name }}_raw_{{ r }}_{{ u }}, X8(first, second));
{% else %}
                    let codes_{{ r }} = {{ p.name }}_codes8({{ p.name }}_raw_{{ r }}_{{ u }});
                    acc_{{ r }} += {{ p.name }}_scale8({{ p.name }}_raw_{{ r }}_{{ u }})
                        * (codes_{{ r }}.lo * bitcast<vec4<f32>>(first) + codes_{{ r }}.hi * bitcast<vec4<f32>>(second));
{% endif %}
{% endfor %}
                }
{% endfor %}
                if step % {{ p.stretches }}u == {{ p.stretches - 1 }}u {
{% for r in range(p.rows) %}
{% if integer %}
                    var sum_{{ r }} = acc_{{ r }};
                    acc_{{ r }} = 0.0;
{% else %}
                    var sum_{{ r }} = dot(acc_{{ r }}, vec4<f32>(1.0));
                    acc_{{ r }} = vec4<f32>();
{% endif %}
{% endfor %}
{% for half in [16, 8, 4, 2, 1] if half < p.lanes %}
{% for r in range(p.rows) %}
                    sum_{{ r }} += subgroupShuffleXor(sum_{{ r }}, {{ half }}u);
{% endfor %}
{% endfor %}
                    if lane == 0u && step / {{ p.stretches }}u * {{ teams }}u + tid / {{ p.lanes }}u < {{ share_of(p) }}.y {
                        let item = own + {{ p.first }}u;
                        {{ result }}
                    }
{% if rounds > 1 %}
                    own = {{ item_of(p, "(step / %du + 1u)" | format(p.stretches)) }};
{{ load_before() }}
{% endif %}
                }
{% if steps > 1 %}
{% for r in range(p.rows) %}
{% for u in range(p.unroll) %}
                {{ p.name }}_raw_{{ r }}_{{ u }} = {{ p.name }}_next_{{ r }}_{{ u }};
{% endfor %}
{% endfor %}
{% endif %}
            }
        }
        // A device need not run all subgroups of a workgroup at the same time: none may wait for another's later publish.
        workgroupBarrier();
{% endmacro %}

{# For a matrix that is one part, of the same form in all layers. #}
{% macro declare(m) %}
{% set v = 0 %}
{% set q = 0 %}
{% set part = m.variants %}
{% set f = part | split(":") | list %}
{% set p = {"name": m.name ~ "_" ~ v ~ "_" ~ q, "n_in": m.n_in, "rows": m.rows, "first": (f[1] | int) // m.rows, "n_items": (f[2] | int) // m.rows, "lanes": f[3] | int, "unroll": f[4] | int, "stretches": f[5] | int, "from": f[6] | int, "groups": f[7] | int} %}
{{ declare_part(p) }}
{% endmacro %}
{% macro begin(m) %}
{% set v = 0 %}
{% set q = 0 %}
{% set part = m.variants %}
{% set f = part | split(":") | list %}
{% set p = {"name": m.name ~ "_" ~ v ~ "_" ~ q, "n_in": m.n_in, "rows": m.rows, "first": (f[1] | int) // m.rows, "n_items": (f[2] | int) // m.rows, "lanes": f[3] | int, "unroll": f[4] | int, "stretches": f[5] | int, "from": f[6] | int, "groups": f[7] | int} %}
{{ begin_part(p) }}
{% endmacro %}
{% macro touch(m) %}
{% set v = 0 %}
{% set q = 0 %}
{% set part = m.variants %}
{% set f = part | split(":") | list %}
{% set p = {"name": m.name ~ "_" ~ v ~ "_" ~ q, "n_in": m.n_in, "rows": m.rows, "first": (f[1] | int) // m.rows, "n_items": (f[2] | int) // m.rows, "lanes": f[3] | int, "unroll": f[4] | int, "stretches": f[5] | int, "from": f[6] | int, "groups": f[7] | int} %}
{{ touch_part(p) }}
{% endmacro %}
{#
  The product with a matrix; `fill` waits for its input. If the matrix has several parts, or its form differs between
  layers, the part of this workgroup is chosen here, outside of branches: loads inside of a branch end with the branch.
#}
{% macro product(m, input, input_units, fill, bias_at, before, result) %}
{% if mixed(m) == "no" %}
{% set v = 0 %}
{% set q = 0 %}
{% set part = m.variants %}
{% set f = part | split(":") | list %}
{% set p = {"name": m.name ~ "_" ~ v ~ "_" ~ q, "n_in": m.n_in, "rows": m.rows, "first": (f[1] | int) // m.rows, "n_items": (f[2] | int) // m.rows, "lanes": f[3] | int, "unroll": f[4] | int, "stretches": f[5] | int, "from": f[6] | int, "groups": f[7] | int} %}
{{ part_product(p, input, input_units, fill, bias_at, before, result) }}
{% else %}
{% for variant in m.variants | split("/") %}
{% set v = loop.index0 %}
{% for part in variant | split("+") %}
{% set q = loop.index0 %}
{% set f = part | split(":") | list %}
{% set p = {"name": m.name ~ "_" ~ v ~ "_" ~ q, "n_in": m.n_in, "rows": m.rows, "first": (f[1] | int) // m.rows, "n_items": (f[2] | int) // m.rows, "lanes": f[3] | int, "unroll": f[4] | int, "stretches": f[5] | int, "from": f[6] | int, "groups": f[7] | int} %}
        if {{ m.name }}_variant == {{ v }}u && group >= {{ p.from }}u && group < {{ p.from + p.groups }}u {
{{ declare_part(p) }}
{{ begin_part(p) }}
{{ part_product(p, input, input_units, fill, bias_at, before, result) }}
        }
{% endfor %}
{% endfor %}
{% endif %}
{% endmacro %}
{% macro mixed(m) %}{{ "yes" if "/" in m.variants or "+" in m.variants else "no" }}{% endmacro %}

{# Waits for x and writes norm(x), without the factor common to all elements, to h; the factor is `inverse`. #}
{% macro fill_norm(norm_at, source) %}
        var sum_of_squares = 0.0;
{% for k in range((h_units * 2 + threads - 1) // threads) %}
{% if (k + 1) * threads > h_units * 2 %}
        if tid < {{ h_units * 2 - k * threads }}u {
{% else %}
        {
{% endif %}
            let quad = tid + {{ k * threads }}u;
            var v = vec4<f32>();
            var gain = vec4<f32>();
            if quad < {{ n_embd // 4 }}u {
                let at = params_at + {{ norm_at }}u + 4u * quad;
                gain = vec4(params[at], params[at + 1u], params[at + 2u], params[at + 3u]);
{{ source }}
            }
            sum_of_squares += dot(v, v);
            h[quad / 2u + quad % 2u * {{ h_units }}u] = {{ as_input }}(quad, v * gain);
        }
{% endfor %}
        sum_of_squares = subgroupAdd(sum_of_squares);
        if tid % {{ subgroup }}u == 0u { squares[tid / {{ subgroup }}u] = sum_of_squares; }
        workgroupBarrier();
        let inverse = inverseSqrt(({% for i in range(warps) %}squares[{{ i }}]{{ " + " if not loop.last }}{% endfor %}) / {{ n_embd }}.0 + {{ norm_eps }});
{% endmacro %}
{% macro x_source() %}
                if layer == 0u {
                    v = vec4(x[4u * quad], x[4u * quad + 1u], x[4u * quad + 2u], x[4u * quad + 3u]);
                } else {
                    v = arrived4(flow_at - {{ layer_flow - x_at }}u + quad, {{ n_embd // 4 }}u);
                }
{% endmacro %}
{% macro mid_source() %}
                v = arrived4(flow_at + {{ mid_at }}u + quad, {{ n_embd // 4 }}u);
{% endmacro %}

{#
  Writes a vector to `wide`, quad by quad, each computed by `source`. For large products this is a loop, since the unrolled
  code of a layer is larger than a core's instruction cache.
#}
{% macro fill_wide(source) %}
{% macro quad_of_wide() %}
            var v = vec4<f32>();
{{ source }}
            wide[quad / 2u + quad % 2u * {{ wide_units }}u] = {{ as_input }}(quad, v);
{% endmacro %}
{% if ahead %}
{% for k in range((2 * wide_units + threads - 1) // threads) %}
        if tid + {{ k * threads }}u < {{ 2 * wide_units }}u {
            let quad = tid + {{ k * threads }}u;
{{ quad_of_wide() }}
        }
{% endfor %}
{% else %}
        for (var quad = tid; quad < {{ 2 * wide_units }}u; quad += {{ threads }}u) {
{{ quad_of_wide() }}
        }
{% endif %}
        workgroupBarrier();
{% endmacro %}
{# Waits for attention and merges its splits. #}
{% macro att_source() %}
            if quad < {{ n_att // 4 }}u {
                let source = flow_at + {{ att_at }}u + quad;
                if splits == 1u {
                    v = arrived4(source, {{ n_att // 4 }}u);
                } else {
                    let head = flow_at + {{ lse_at }}u + quad / {{ kv_units }}u;
                    var largest = NEVER;
                    var total = 0.0;
                    for (var split = 0u; split < splits; split += 4u) {
{% for s in range(4) %}
                        let split_{{ s }} = min(split + {{ s }}u, splits - 1u);
                        let part_{{ s }} = arrived_part(source + split_{{ s }} * {{ n_att }}u, {{ n_att // 4 }}u, head + split_{{ s }} * N_HEAD);
{% endfor %}
                        let lse = vec4(part_0.lse, part_1.lse, part_2.lse, part_3.lse);
                        let now_largest = max(largest, max(max(lse.x, lse.y), max(lse.z, lse.w)));
                        let before = exp(largest - now_largest);
                        let there = vec4(split, split + 1u, split + 2u, split + 3u) < vec4(splits);
                        let weight = select(vec4<f32>(), exp(lse - now_largest), there);
                        v = v * before + weight.x * part_0.v + weight.y * part_1.v + weight.z * part_2.v + weight.w * part_3.v;
                        total = total * before + dot(weight, vec4<f32>(1.0));
                        largest = now_largest;
                    }
                    v /= total;
                }
            }
{% endmacro %}
{% macro gated_source() %}
            if quad < {{ n_ff // 4 }}u { v = arrived4(flow_at + {{ gated_at }}u + quad, {{ n_ff // 4 }}u); }
{% endmacro %}

// Distance in cache rows between a head's first position and its position `pos`, with consecutive pages.
fn place_in_order(pos: u32) -> u32 { return pos + pos / PAGE * ((N_HEAD_KV - 1u) * PAGE); }

// The first of n items that this workgroup computes, if `groups` workgroups from `first` on do, and how many.
fn share(n: u32, first: u32, groups: u32) -> vec2<u32> {
    let i = group - first;
    return vec2(i * (n / groups) + min(i, n % groups), n / groups + select(0u, 1u, i < n % groups));
}

@compute @workgroup_size({{ threads }})
fn main(@builtin(local_invocation_index) tid: u32, @builtin(workgroup_id) workgroup: vec3<u32>) {
    group = workgroup.x;
    let pos = token_pos(0u);
    let rope_row = token_rope_row(0u);
    if pos >= N_CTX { return; }
    let first_page = page_of(token_seq(0u), 0u);
    // All workgroups of a step see the same half: the count advances only when the last of them has ended.
    let this_half = (atomicLoad(&ended) / GROUPS % 2u) * FLOW;
    for (var i = group * {{ threads }}u + tid; i < FLOW; i += {{ groups * threads }}u) {
        atomicStore(&flow[FLOW - this_half + i], 0u);
    }
{% if window > 0 %}
    let seen = max(pos + 1u, {{ window }}u) - {{ window }}u;
{% else %}
    let seen = 0u;
{% endif %}
    let splits = clamp((pos - seen + {{ split }}u) / {{ split }}u, 1u, {{ max_splits }}u);
    let split_len = (pos - seen + splits) / splits;

{{ place(qkv, "0u") }}
{% if mixed(qkv) == "no" %}
{{ declare(qkv) }}
{% endif %}
{% if mixed(out) == "no" %}
{{ declare(out) }}
{% endif %}
{% if mixed(gate_up) == "no" %}
{{ declare(gate_up) }}
{% endif %}
{% if mixed(down) == "no" %}
{{ declare(down) }}
{% endif %}
{{ begin(qkv) if ahead }}
    for (var layer = 0u; layer < {{ n_layer }}u; layer++) {
        let flow_at = this_half + layer * {{ layer_flow }}u;
        let params_at = layer * {{ layer_params }}u;
{{ place(qkv, "layer") }}
{{ begin(qkv) if not ahead and mixed(qkv) == "no" }}
{% if ahead %}
{# The weights of these are requested before their phase. #}
{{ place(out, "layer") }}
{{ place(gate_up, "layer") }}
{{ place(down, "layer") }}
{% endif %}

        // Queries, keys, values.
{{ begin(out) if ahead }}
{{ product(qkv, "h", h_units, fill_norm(0, x_source()), qkv_bias_at if qkv_bias else 0, "0.0",
    "publish(flow_at + item, sum_0 * inverse + before_0);") }}

        // Attention: each workgroup a query head and a split of the positions.
{{ begin(gate_up) if ahead }}
{% if ahead %}
        var touched = 0.0;
{{ touch(gate_up) }}
{{ touch(down) }}
        if layer < {{ n_layer - 1 }}u {
{{ place(qkv, "layer + 1u") }}
{{ place(out, "layer + 1u") }}
{{ touch(qkv) }}
{{ touch(out) }}
{{ place(qkv, "layer") }}
{{ place(out, "layer") }}
        }
{% endif %}
{% include "decode_layers_attention.wgsl" %}

{% if ahead %}
        // Changes nothing; without it the compiler would remove the prefetching reads above.
        if touched == 1.2345e30 { atomicOr(&gave_up, 0u); }
{% endif %}

        // x += W attention.
        let x_from = flow_at - {{ layer_flow - x_at }}u;
{{ place(out, "layer") if not ahead }}
{{ begin(out) if not ahead and mixed(out) == "no" }}
{{ begin(down) if ahead }}
{{ product(out, "wide", wide_units, fill_wide(att_source()), out_bias_at if out_bias else 0,
    "x_before(layer, x_from, item)", "publish(flow_at + %du + place(item, %du), sum_0 + before_0);" | format(mid_at, n_embd // 4)) }}

        // gated = silu(gate) * up.
{{ place(gate_up, "layer") if not ahead }}
{{ begin(gate_up) if not ahead and mixed(gate_up) == "no" }}
{{ product(gate_up, "h", h_units, fill_norm(ffn_norm_at, mid_source()), gate_up_bias_at if gate_up_bias else 0, "0.0",
    "publish(flow_at + %du + place(item, %du), silu(sum_0 * inverse + before_0) * (sum_1 * inverse + before_1));" | format(gated_at, n_ff // 4)) }}

        // x += W gated.
{{ place(down, "layer") if not ahead }}
{{ begin(down) if not ahead and mixed(down) == "no" }}
{% if ahead %}
        if layer < {{ n_layer - 1 }}u {
{{ place(qkv, "layer + 1u") }}
{{ begin(qkv) }}
{{ place(qkv, "layer") }}
        }
{% endif %}
{{ product(down, "wide", wide_units, fill_wide(gated_source()), down_bias_at if down_bias else 0,
    "bitcast<f32>(look(flow_at + %du + place(item, %du)))" | format(mid_at, n_embd // 4),
    "if layer < %du { publish(flow_at + %du + place(item, %du), sum_0 + before_0); } else { x[item] = sum_0 + before_0; }" | format(n_layer - 1, x_at, n_embd // 4)) }}
    }

    if patience == 0u { atomicStore(&gave_up, 1u); }
    workgroupBarrier();
    if tid == 0u { atomicAdd(&ended, 1u); }
}

// An element of the residual stream before a layer; to be called only when all of the stream has arrived.
fn x_before(layer: u32, at: u32, i: u32) -> f32 {
    if layer == 0u { return x[i]; }
    return bitcast<f32>(look(at + place(i, {{ n_embd // 4 }}u)));
}
