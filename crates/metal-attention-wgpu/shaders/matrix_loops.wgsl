// Plain loops in place of matrix units of {{ side }}x{{ side }}, for devices without: products of {{ side }} rows of `tile_x` with as many of
// `tile_w`, and their storing to `results`. Lane `lane` of a subgroup holds every {{ subgroup_size }}th element of a product.
// Bounds: `e` is an element of a matrix of {{ side }} rows, which are in the tiles from where the caller states. Loops
// count to constants.
alias Sum = array<f32, {{ side * side // subgroup_size }}>;

fn multiply_add(x_at: u32, w_at: u32, sum: Sum, lane: u32) -> Sum {
    var out = sum;
    for (var i = 0u; i < {{ side * side // subgroup_size }}u; i++) {
        let e = lane + i * {{ subgroup_size }}u;
        for (var k = 0u; k < {{ side // 4 }}u; k++) {
            out[i] += dot(tile_x[x_at + e / {{ side }}u * PITCH + k], tile_w[w_at + e % {{ side }}u * PITCH + k]);
        }
    }
    return out;
}

fn store(sum: Sum, at: u32, lane: u32) {
    for (var i = 0u; i < {{ side * side // subgroup_size }}u; i++) {
        let e = lane + i * {{ subgroup_size }}u;
        results[at + e / {{ side }}u * RESULT_PITCH + e % {{ side }}u] = sum[i];
    }
}
