// Shared by the files of this folder. They read `w`, the repacked rows of a matrix part, in the layout of
// src/matrix/layout.rs. A unit is 8 elements of a row: `load8` fetches its words, `codes8` and `scale8` turn them into
// numbers, where a weight is scale8 * code (the scale of types with a minimum or without scales is 1).
// Bounds: rows are below {{ n_rows }} and units below UNITS, which every caller ensures; the sections that `load8` of each
// type reads have the lengths of src/matrix/layout.rs, {{ n_rows }} rows each, and the part is as long as all of them
// (`Dispatch`).
const UNITS: u32 = {{ (n_in + 7) // 8 }}u;

{% if not scoped %}
{% include "types/numbers.wgsl" %}

{% endif %}
// Elements 8 * unit to 8 * unit + 7 of a row of the part.
fn weights8(row: u32, unit: u32) -> W8 {
    let raw = load8(row, unit);
    let codes = codes8(raw);
    let scale = scale8(raw);
    return W8(codes.lo * scale, codes.hi * scale);
}
