// First stage of top_k: the K best of each chunk of N_ITEMS logits of a row.
// Bounds: ids are compared with N_VOCAB before they are used as indices; rows are those that both buffers hold (`Dispatch`).
// Indices of `items` are below N_ITEMS, a multiple of every `size`.
@group(0) @binding(0) var<storage, read> logits: array<u32>;
@group(0) @binding(1) var<storage, read_write> lists: array<vec2<u32>>;
{% include "logit_key.wgsl" %}
{% include "top_k_lists.wgsl" %}
const N_VOCAB: u32 = {{ n_vocab }}u;

// Sorts each K consecutive items.
fn sort_lists(tid: u32) {
    for (var size = 2u; size <= K; size *= 2u) {
        let half = size / 2u;
        for (var i = tid; i < N_ITEMS / 2u; i += {{ threads }}u) {
            let start = i / half * size;
            put_in_order(start + i % half, start + size - 1u - i % half);
        }
        workgroupBarrier();
        for (var stride = size / 4u; stride > 0u; stride /= 2u) {
            for (var i = tid; i < N_ITEMS / 2u; i += {{ threads }}u) {
                let at = i / stride * 2u * stride + i % stride;
                put_in_order(at, at + stride);
            }
            workgroupBarrier();
        }
    }
}

@compute @workgroup_size({{ threads }})
fn main(@builtin(local_invocation_index) tid: u32, @builtin(workgroup_id) group: vec3<u32>) {
    for (var i = tid; i < N_ITEMS; i += {{ threads }}u) {
        let id = group.x * N_ITEMS + i;
        var item = ABSENT;
        if id < N_VOCAB {
            let key = logit_key(logits[group.y * N_VOCAB + id]);
            item = select(ABSENT, vec2(key, id), key > 0u);
        }
        items[i] = item;
    }
    workgroupBarrier();
    sort_lists(tid);
    merge_lists(tid);
    let list = group.y * {{ row_items }}u + group.x * K;
    for (var i = tid; i < K; i += {{ threads }}u) { lists[list + i] = items[i]; }
}
