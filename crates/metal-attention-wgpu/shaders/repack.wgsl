// Repacks rows of a matrix from the file's format to the weight layout of src/matrix/layout.rs: section by section, rows
// `first..first + n` of {{ "n_rows" }} in `to`. One invocation makes a word; `bits` gives the source of each of its bits in a stretch of blocks.
//
// `source` begins with a header: bytes of a row, rows of the part, the first row and the number of rows, words of a row, bits of
// a stretch, sections; then for each section its words of a row, those of a plane, those of a stretch in a plane, and where its
// words begin in `bits`. The rows follow. For each word `bits` holds a word to XOR with it, and 32 bit positions of 16 bits;
// 0xffff is a constant bit.
// Bounds: words beyond the last row's are skipped; rows, sections and bit positions come from src/matrix/repack.rs, which
// binds `to` for all rows of the part and `source` for all rows in it (`Dispatch`). The loop ends with the sections.
@group(0) @binding(0) var<storage, read> source: array<u32>;
@group(0) @binding(1) var<storage, read> bits: array<u32>;
@group(0) @binding(2) var<storage, read_write> to: array<u32>;

fn bit_of_row(start: u32, row_bits: u32, at: u32) -> u32 {
    if at >= row_bits { return 0u; }
    let bit = start + at;
    return source[{{ header }}u + bit / 32u] >> (bit % 32u) & 1u;
}

@compute @workgroup_size({{ threads }})
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let row_bits = 8u * source[0];
    let n_rows = source[1];
    let first = source[2];
    let n = source[3];
    if id.x >= n * source[4] { return; }
    let n_sections = source[6];
    // Which section this word is in, and where in it.
    var at = id.x;
    var section = 0u;
    var begin = 0u;
    while section + 1u < n_sections && at >= n * source[7u + 4u * section] {
        let words = source[7u + 4u * section];
        at -= n * words;
        begin += n_rows * words;
        section++;
    }
    let words = source[7u + 4u * section];
    let plane_words = source[8u + 4u * section];
    let stretch_words = source[9u + 4u * section];
    let row = at / words;
    let word = at % words;
    let plane = word / plane_words;
    let stretch = word % plane_words / stretch_words;
    let entry = {{ entry }}u * (source[10u + 4u * section] + plane * stretch_words + word % plane_words % stretch_words);
    let start = row * row_bits;
    let stretch_start = stretch * source[5];
    var value = bits[entry];
    for (var pair = 0u; pair < 16u; pair++) {
        let places = bits[entry + 1u + pair];
        let low = places & 0xffffu;
        let high = places >> 16u;
        if low != 0xffffu { value ^= bit_of_row(start, row_bits, stretch_start + low) << (2u * pair); }
        if high != 0xffffu { value ^= bit_of_row(start, row_bits, stretch_start + high) << (2u * pair + 1u); }
    }
    to[begin + (first + row) * words + word] = value;
}
