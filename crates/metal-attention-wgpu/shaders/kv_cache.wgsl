// The KV cache of a layer: rows `[n_pages, N_HEAD_KV, PAGE]` of KV_UNITS units of four elements each.
// Bounds: `seq` is a sequence of the table and `pos` a position below N_CTX, so their page lies in it, as the layer's
// group is one of its groups; `BatchBuffer::write_pages` lets only pages of the group's caches in, and where nothing was
// written there is 0, the first page.
const N_HEAD_KV: u32 = {{ n_head_kv }}u;
const N_CTX: u32 = {{ n_ctx }}u;
const PAGE: u32 = {{ page }}u; // positions of a page
const KV_UNITS: u32 = {{ (head_dim + 3) // 4 }}u;
const GROUP_PAGES: u32 = {{ group * ((n_ctx + page - 1) // page) }}u; // of a sequence, in the table before those of this group

// The page of a position of a sequence.
fn page_of(seq: u32, pos: u32) -> u32 {
    let i = seq * batch[0].w + GROUP_PAGES + pos / PAGE;
    return batch[batch[0].z + i / 4u][i % 4u];
}

// First unit of the row of a position that is in `page`.
fn cache_row(page: u32, head: u32, pos: u32) -> u32 { return ((page * N_HEAD_KV + head) * PAGE + pos % PAGE) * KV_UNITS; }

// For all positions of the page of `pos`: what `position * KV_UNITS` is added to for the first unit of its row.
fn cache_rows(seq: u32, head: u32, pos: u32) -> u32 { return cache_row(page_of(seq, pos), head, pos) - pos * KV_UNITS; }

{% if cache_f16 %}
alias Unit = vec2<u32>;

// The bits of the 16-bit float nearest to `x`, the even one on a tie. Done on integers, because how pack2x16float
// rounds is left to the device.
fn half_bits(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    let size = bits & 0x7fffffffu;
    var half = (size + 0xfffu + ((size >> 13u) & 1u) - 0x38000000u) >> 13u;
    // Below 2^-14 the step is 2^-24 throughout.
    if size < 0x38800000u { half = u32(round(abs(x) * 16777216.0)); }
    // 65520 lies halfway between the largest number and the next, which would be infinity.
    if size >= 0x477ff000u { half = 0x7c00u; }
    if size > 0x7f800000u { half = 0x7e00u; }
    return half | ((bits >> 16u) & 0x8000u);
}

fn pack_unit(v: vec4<f32>) -> Unit {
    return vec2(half_bits(v.x) | (half_bits(v.y) << 16u), half_bits(v.z) | (half_bits(v.w) << 16u));
}

fn unpack_unit(unit: Unit) -> vec4<f32> { return vec4(unpack2x16float(unit.x), unpack2x16float(unit.y)); }

// Numbers as they come back from the cache.
fn as_cached(v: vec2<f32>) -> vec2<f32> { return unpack2x16float(half_bits(v.x) | (half_bits(v.y) << 16u)); }
{% else %}
alias Unit = vec4<u32>;

fn pack_unit(v: vec4<f32>) -> Unit { return bitcast<vec4<u32>>(v); }

fn unpack_unit(unit: Unit) -> vec4<f32> { return bitcast<vec4<f32>>(unit); }

// Numbers as they come back from the cache.
fn as_cached(v: vec2<f32>) -> vec2<f32> { return v; }
{% endif %}
