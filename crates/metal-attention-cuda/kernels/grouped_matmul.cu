// The grouped GEMM: many rows (items), each multiplied by the matrix of its group, an expert or a head. First the items are
// sorted by group on the device, into slots; each group begins at a multiple of 8 slots, a tile. Then their rows are packed in
// that order. Then a block multiplies some tiles of one group by some rows of its matrix. Slots between groups are empty
// (NONE).
#define TEMPLATES_ALONE
#include "matmul.cu"

// No item.
constexpr u32 NONE = 0xffffffffu;
// Most groups, which is the number of threads that sort.
constexpr u32 MAX_GROUPS = 1024;

struct SortArgs {
    const u32* groups;     // of each item; null: item i has group i % n_groups
    u32 n_items, n_groups; // items and groups
    u32* items;            // of each slot, or NONE, [n_slots]
    uint4* work;           // the list of work, [n_work]: group, first tile, end tile
    u32* n_work;           // its length
    u32 n_slots;           // slots, including empty ones
    u32 tiles_of_work;     // most tiles of an entry
};
ASSERT_LAYOUT(SortArgs);

SHARED_MEMORY(16, u32, sort_memory);

// Sorts by counting; a single block.
extern "C" __global__ void __launch_bounds__(1024) sort_by_group(const __grid_constant__ SortArgs a) {
    // For each group: its items; its tiles, and its entries in the list of work, at first as counts, then summed over all
    // groups up to it.
    u32 *counts = sort_memory, *slots = counts + MAX_GROUPS, *works = slots + MAX_GROUPS;
    wait_for_input();
    let_next_start();
    const u32 tid = threadIdx.x;
    counts[tid] = 0;
    for (u32 i = tid; i < a.n_slots; i += blockDim.x) a.items[i] = NONE;
    __syncthreads();
    for (u32 i = tid; i < a.n_items; i += blockDim.x) atomicAdd(counts + (a.groups ? a.groups[i] : i % a.n_groups), 1u);
    __syncthreads();
    const u32 tiles = (counts[tid] + 7) / 8, n_work = (tiles + a.tiles_of_work - 1) / a.tiles_of_work;
    slots[tid] = tiles;
    works[tid] = n_work;
    __syncthreads();
    // Inclusive prefix sums over the groups.
    for (u32 d = 1; d < MAX_GROUPS; d *= 2) {
        const u32 added[2] = {tid >= d ? slots[tid - d] : 0, tid >= d ? works[tid - d] : 0};
        __syncthreads();
        slots[tid] += added[0];
        works[tid] += added[1];
        __syncthreads();
    }
    const u32 first = slots[tid] - tiles, first_work = works[tid] - n_work;
    for (u32 i = 0; i < n_work; i++) {
        const u32 begin = first + i * a.tiles_of_work;
        a.work[first_work + i] = make_uint4(tid, begin, min(begin + a.tiles_of_work, first + tiles), 0);
    }
    if (tid == MAX_GROUPS - 1) *a.n_work = works[tid];
    __syncthreads();
    counts[tid] = 8 * first;
    __syncthreads();
    // Items of a group are in any order: the result of a row does not depend on its neighbours.
    for (u32 i = tid; i < a.n_items; i += blockDim.x) {
        a.items[atomicAdd(counts + (a.groups ? a.groups[i] : i % a.n_groups), 1u)] = i;
    }
}

struct GatherArgs {
    const float* x;            // item i has the row that begins at element i / items_a_row * x_stride
    const u32* items;          // of each slot
    half* packed;              // packed rows of all slots
    u32 items_a_row, x_stride; // items that share a row; elements from a row to the next one
    u32 n_in, n_slots;         // elements of a row; slots
};
ASSERT_LAYOUT(GatherArgs);
// Packs the row of the item in each slot; a block for each slot.
extern "C" __global__ void __launch_bounds__(128) gather(const __grid_constant__ GatherArgs a) {
    wait_for_input();
    let_next_start();
    const u32 slot = blockIdx.x, item = a.items[slot];
    const float* x = a.x + (size_t)(item == NONE ? 0 : item / a.items_a_row) * a.x_stride;
    for (u32 i = threadIdx.x; i < (a.n_in + 63) / 64 * 64; i += blockDim.x) {
        const float v = item != NONE && i < a.n_in ? x[i] : 0.0f;
        a.packed[packed_input(slot, i, a.n_slots / 8)] = __float2half_rn(v);
    }
}

struct GroupedMatmulArgs {
    Matrix matrices[2];   // of all groups, the rows of each padded to whole tiles; `n_rows`: of one group
    u32 tile_bytes[2];    // bytes of a tile of rows
    const uint4* work;    // as SortArgs has it
    const u32* n_work;    // as SortArgs has it
    const uint4* x;       // packed rows of all slots
    const float* bias[2]; // [n_groups][n_rows], or null
    const u32* items;     // of each slot, or NONE
    float* y;             // [item][n_out]
    half* packed;         // GATED: the result as packed rows of all slots
    u32 n_slots;          // slots, including empty ones
    u32 n_out;            // elements of a row of y
    u32 output;           // Output
    u32 activation;       // Activation, for GATED
};
ASSERT_LAYOUT(GroupedMatmulArgs);

// Stores sums to the rows of the slots' items.
__device__ __forceinline__ void write_items(const GroupedMatmulArgs& a, const Matrix& m, const float* bias, u32 first, u32 tile, int lane,
                                            u32 slot_tile, const float (&c)[4]) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 row = tile * 16 + g + 8 * (i / 2), slot = slot_tile * 8 + 2 * t + i % 2, item = a.items[slot];
        if (row < m.n_rows && item != NONE) a.y[(size_t)item * a.n_out + first + row] = bias ? c[i] + bias[row] : c[i];
    }
}

// The grid: rows of the matrix, entries of the list of work, and, unless gated, the two matrices.
template <int TILES, typename P> __device__ __forceinline__ void grouped_matmul(const GroupedMatmulArgs& a) {
    wait_for_input();
    let_next_start();
    if (blockIdx.y >= *a.n_work) return;
    const uint4 work = a.work[blockIdx.y];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, half_of = warp / 4;
    const bool gated = a.output == GATED;
    const u32 part = blockIdx.z;
    auto of_group = [&](int i) {
        Matrix m = a.matrices[i];
        m.records += (size_t)work.x * ((m.n_rows + 15) / 16) * a.tile_bytes[i];
        return m;
    };
    const Matrix first_matrix = of_group(part);
    const Matrix m[2] = {first_matrix, gated ? of_group(1) : first_matrix};
    const u32 first = blockIdx.x * (gated ? 4 : 8) + (warp % 4) * (gated ? 1 : 2);
    const u32 tile[2] = {first, gated ? first : first + 1};
    const bool in_range[2] = {tile[0] * 16 < m[0].n_rows, tile[1] * 16 < m[1].n_rows};
    MatmulArgs p = {};
    p.x = a.x;
    p.n_token_tiles = a.n_slots / 8;
    p.n_tokens = a.n_slots;
    p.output = a.output;
    p.activation = a.activation;
    p.packed = a.packed;
    p.y_token_tiles = a.n_slots / 8;
    float acc[2][TILES / 2][4] = {};
    many_products<TILES, P, P>(p, m, tile, in_range, (uint4*)(float*)matmul_memory, work.y, work.z, lane, half_of, acc);
    const float* bias = a.bias[part] ? a.bias[part] + (size_t)work.x * m[0].n_rows : nullptr;
    const u32 first_row = part == 0 ? 0 : a.matrices[0].n_rows;
#pragma unroll
    for (int n = 0; n < TILES / 2; n++) {
        const u32 slot_tile = work.y + half_of * (TILES / 2) + n;
        if (slot_tile >= work.z) break;
        if (gated) {
            if (in_range[0]) write_product(p, m[0], tile[0], lane, slot_tile, acc[0][n], acc[1][n]);
            continue;
        }
        if (in_range[0]) write_items(a, m[0], bias, first_row, tile[0], lane, slot_tile, acc[0][n]);
        if (in_range[1]) write_items(a, m[1], bias, first_row, tile[1], lane, slot_tile, acc[1][n]);
    }
}

#define GROUPED(TILES, NAME, FORMAT)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256, 1) grouped_matmul_##TILES##_##NAME(const __grid_constant__ GroupedMatmulArgs a) { \
        grouped_matmul<TILES, Panel<FORMAT>>(a);                                                                                      \
    }
#define GROUPED_FORMATS(TILES)               \
    GROUPED(TILES, f16, F16)                 \
    GROUPED(TILES, q8_0, Q8_0)               \
    GROUPED(TILES, q4_0, Q4_0)               \
    GROUPED(TILES, q4_k, Q4_K)               \
    GROUPED(TILES, q5_k, Q5_K)               \
    GROUPED(TILES, q6_k, Q6_K)               \
    GROUPED(TILES, f32, F32)                 \
    GROUPED(TILES, codes, CODES)             \
    GROUPED(TILES, codes_and_mins, CODES_AND_MINS)
GROUPED_FORMATS(4)
GROUPED_FORMATS(16)
