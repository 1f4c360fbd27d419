// Rows of x, N vectors of WIDTH elements each, become columns of the rows of y from column AT on: element c of vector n comes to
// column AT + c N + n. One invocation for each element of x.
// Bounds: elements are compared with the length of `x`; `y` has as many rows (`Dispatch`), of at least AT + N * WIDTH elements.
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> y: array<f32>;
{% include "element.wgsl" %}
const WIDTH: u32 = {{ width }}u;
const N: u32 = {{ n }}u;
const AT: u32 = {{ at }}u;
const Y_WIDTH: u32 = {{ y_width }}u;

@compute @workgroup_size(256)
fn main(
    @builtin(local_invocation_index) tid: u32,
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let i = element(tid, group, groups);
    if i >= arrayLength(&x) { return; }
    let column = i % (N * WIDTH);
    y[i / (N * WIDTH) * Y_WIDTH + AT + column % WIDTH * N + column / WIDTH] = x[i];
}
