// {{ n_items }} candidates (key, id) in workgroup memory: highest key first, lowest id first among equals. If there are
// fewer, the rest is ABSENT, which comes after all others.
// Bounds: indices of `items` are below N_ITEMS, a multiple of every `step`. Loops count to constants, `step` doubles and
// `stride` halves.
{% set threads = 256 %}
const ABSENT = vec2<u32>(0u, 0xffffffffu);
const K: u32 = {{ k }}u;
const N_ITEMS: u32 = {{ n_items }}u;
var<workgroup> items: array<vec2<u32>, {{ n_items }}>;

fn before(a: vec2<u32>, b: vec2<u32>) -> bool {
    return a.x > b.x || (a.x == b.x && a.y < b.y);
}

fn put_in_order(i: u32, j: u32) {
    let a = items[i];
    let b = items[j];
    if before(b, a) {
        items[i] = b;
        items[j] = a;
    }
}

// Merges the sorted lists of K items into one with the K first of all, at the start: pairs of lists, then pairs of pairs.
// The elementwise first of list a and the reversed list b are the K first of both, rising and then falling, which
// half-cleaners sort (Batcher 1968, "Sorting networks and their applications").
fn merge_lists(tid: u32) {
    for (var step = 2u * K; step <= N_ITEMS; step *= 2u) {
        let n = N_ITEMS / step * K;
        for (var i = tid; i < n; i += {{ threads }}u) {
            let a = i / K * step + i % K;
            let b = i / K * step + step / 2u + K - 1u - i % K;
            if before(items[b], items[a]) { items[a] = items[b]; }
        }
        workgroupBarrier();
        for (var stride = K / 2u; stride > 0u; stride /= 2u) {
            for (var i = tid; i < n / 2u; i += {{ threads }}u) {
                let pair = i % (K / 2u);
                let at = i / (K / 2u) * step + pair / stride * 2u * stride + pair % stride;
                put_in_order(at, at + stride);
            }
            workgroupBarrier();
        }
    }
}
