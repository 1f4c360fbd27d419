// The KV cache of a layer: rows `[n_pages, N_HEAD_KV, PAGE]` of KV_UNITS units of four elements each.
// Bounds: `seq` has a page table and `pos` is below N_CTX, so that its page is in the table, as the layer's cache group is
// one of its groups. `BatchBuffer::write_pages` admits only pages of the group; entries that were never written are 0, the
// first page.
const N_HEAD_KV: u32 = {{ n_head_kv }}u;
const N_CTX: u32 = {{ n_ctx }}u;
const PAGE: u32 = {{ page }}u; // positions of a page
const KV_UNITS: u32 = {{ (head_dim + 3) // 4 }}u;
const GROUP_PAGES: u32 = {{ group * ((n_ctx + page - 1) // page) }}u; // pages of a sequence in the tables before that of this cache group

// The page of a position of a sequence.
fn page_of(seq: u32, pos: u32) -> u32 {
    let i = seq * batch[0].w + GROUP_PAGES + pos / PAGE;
    return batch[batch[0].z + i / 4u][i % 4u];
}

// First unit of the row of a position on `page`.
fn cache_row(page: u32, head: u32, pos: u32) -> u32 { return ((page * N_HEAD_KV + head) * PAGE + pos % PAGE) * KV_UNITS; }

// The base of all rows of the page of `pos`: the first unit of a row is at `position * KV_UNITS` plus this, wrapping.
fn cache_rows(seq: u32, head: u32, pos: u32) -> u32 { return cache_row(page_of(seq, pos), head, pos) - pos * KV_UNITS; }

{% if cache_f16 %}
alias Unit = vec2<u32>;

// The bits of the 16-bit float nearest to `x`, the even one on ties. Computed with integers, because the rounding of
// pack2x16float is left to the device.
fn half_bits(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    let size = bits & 0x7fffffffu;
    var half = (size + 0xfffu + ((size >> 13u) & 1u) - 0x38000000u) >> 13u;
    // Below 2^-14 all steps are 2^-24.
    if size < 0x38800000u { half = u32(round(abs(x) * 16777216.0)); }
    // 65520 is half way between the largest number and the next one, which would be infinity.
    if size >= 0x477ff000u { half = 0x7c00u; }
    if size > 0x7f800000u { half = 0x7e00u; }
    return half | ((bits >> 16u) & 0x8000u);
}

fn pack_unit(v: vec4<f32>) -> Unit {
    return vec2(half_bits(v.x) | (half_bits(v.y) << 16u), half_bits(v.z) | (half_bits(v.w) << 16u));
}

fn unpack_unit(unit: Unit) -> vec4<f32> { return vec4(unpack2x16float(unit.x), unpack2x16float(unit.y)); }

// `v` as it is read back from the cache.
fn as_cached(v: vec2<f32>) -> vec2<f32> { return unpack2x16float(half_bits(v.x) | (half_bits(v.y) << 16u)); }
{% else %}
alias Unit = vec4<u32>;

fn pack_unit(v: vec4<f32>) -> Unit { return bitcast<vec4<u32>>(v); }

fn unpack_unit(unit: Unit) -> vec4<f32> { return bitcast<vec4<f32>>(unit); }

// `v` as it is read back from the cache.
fn as_cached(v: vec2<f32>) -> vec2<f32> { return v; }
{% endif %}
