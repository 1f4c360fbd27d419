// Later stages of top_k: the K best of each N_ITEMS / K lists of the stage before.
// Bounds: workgroups are the lists of a row, rows those that `lists` and `best` hold (`Dispatch`); items beyond the last
// list are not read. Loops count to constants.
@group(0) @binding(0) var<storage, {{ "read" if last else "read_write" }}> lists: array<vec2<u32>>;
{% if last %}
@group(0) @binding(1) var<storage, read_write> best: array<vec2<u32>>;
{% endif %}
{% include "top_k_lists.wgsl" %}

@compute @workgroup_size({{ threads }})
fn main(@builtin(local_invocation_index) tid: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let row = group.y * {{ row_items }}u;
    for (var i = tid; i < N_ITEMS; i += {{ threads }}u) {
        let at = group.x * N_ITEMS + i;
        var item = ABSENT;
        if at < {{ n_lists }}u * K { item = lists[row + {{ from }}u + at]; }
        items[i] = item;
    }
    workgroupBarrier();
    merge_lists(tid);
    for (var i = tid; i < K; i += {{ threads }}u) {
{% if last %}
        best[group.y * K + i] = items[i];
{% else %}
        lists[row + {{ from }}u + ({{ n_lists }}u + group.x) * K + i] = items[i];
{% endif %}
    }
}
