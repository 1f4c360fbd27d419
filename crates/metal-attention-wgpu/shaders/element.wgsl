// The element that an invocation computes, where each has its own: workgroups of 256 invocations, row by row in their grid.
// Bounds: no buffer is accessed here; kernels compare the element with the length of a buffer.
fn element(tid: u32, group: vec3<u32>, groups: vec3<u32>) -> u32 { return (group.y * groups.x + group.x) * 256u + tid; }
