// The GEMM with warpgroup instructions (`wgmma`, here `wide_mma`), for compute capability 9.0: Y = W X with packed F16 inputs
// in the WIDE order (`packed_input`) and F32 sums.
//
// A block has 128 rows and N tokens: each of two consumer warpgroups has 64 rows (GATED: one those of the gate, the other the
// same of up). A third warpgroup produces: one thread copies each consumer's records to its ring in shared memory, starting
// before `wait_for_input`, and one thread copies the inputs to a ring that both consumers read. Consumers convert codes to F16
// in registers while the products of the previous panel run. With split-K the last block to finish adds up the partial sums.
#define TEMPLATES_ALONE
#include "matmul.cu"
#include "elements.cuh"

constexpr int MAX_MATRICES = 3;

// What becomes of sums, beside Output: activation(sum + bias), as packed input of the next product.
constexpr u32 ACTIVATED = 3;

// The rows that a matrix makes; matrices one below the other have one result together.
struct ResultRows {
    float* y;          // [n_tokens][n_out]
    const float* bias; // [n_out], or null
    u32 n_out;         // elements of a row
    u32 unused;
};
ASSERT_LAYOUT(ResultRows);

struct MatmulWideArgs {
    Matrix matrices[MAX_MATRICES];  // GATED: gate and up
    ResultRows results[MAX_MATRICES]; // for each matrix
    u32 n_matrices;                 // matrices
    u32 blocks[MAX_MATRICES];       // for each matrix, the block of rows after its last one
    const half* x;               // packed inputs
    u32 n_tokens, n_token_tiles; // tokens, and tiles of 8 of them in x
    u32 output;                  // Output, or ACTIVATED
    u32 activation;              // GATED: Activation; ACTIVATED: Function
    float scale;                 // ADD: factor on what is added
    u32 n_splits;                // blocks that share the panels (split-K)
    half* packed;                // GATED, ACTIVATED: the result, as packed input of the next product
    float4* sums;                // partial sums of splits, [tile of the result][split][N / 8][256]
    u32* tickets;                // counters, one for each tile of the result, zero between launches
};
ASSERT_LAYOUT(MatmulWideArgs);

SHARED_MEMORY(1024, unsigned char, wide_memory);

// Consumer warpgroups, in addition to the producers; most stages of a ring.
constexpr int GROUPS = 2, WARPS_OF_GROUP = 4, MAX_SLOTS = 16;
constexpr int RING_BYTES = 224 << 10; // bytes of all rings

// Bytes of a record, and panels of a record, of a layout.
__device__ __forceinline__ u32 record_bytes(u32 format) {
    u32 bytes = 0;
    WITH_FORMAT(format, bytes = Record<FORMAT>::BYTES);
    return bytes;
}
__device__ __forceinline__ u32 panels_of_record(u32 format) {
    u32 n = 0;
    WITH_FORMAT(format, n = Record<FORMAT>::PANELS);
    return n;
}

// Shared memory: barriers, the ring of inputs, and for each consumer a ring of the records of its rows.
template <int N> struct Rings {
    static constexpr int X_BYTES = N * 128, X_SLOTS = N == 256 ? 4 : N == 128 ? 6 : 12;
    static constexpr int WEIGHTS = 1024 + X_SLOTS * X_BYTES, WEIGHT_BYTES = (RING_BYTES - X_SLOTS * X_BYTES) / GROUPS;
    static __device__ __forceinline__ u64_t* x_full() { return (u64_t*)wide_memory; }
    static __device__ __forceinline__ u64_t* x_empty() { return x_full() + MAX_SLOTS; }
    static __device__ __forceinline__ u64_t* full(int group) { return x_full() + (2 + 2 * group) * MAX_SLOTS; }
    static __device__ __forceinline__ u64_t* empty(int group) { return full(group) + MAX_SLOTS; }
    static __device__ __forceinline__ half* x(u32 slot) { return (half*)(wide_memory + 1024 + slot * X_BYTES); }
    static __device__ __forceinline__ unsigned char* weights(int group) { return wide_memory + WEIGHTS + group * WEIGHT_BYTES; }
    // Stages of a ring of records of that many bytes.
    static constexpr __device__ u32 slots(u32 bytes) {
        return WEIGHT_BYTES / (WARPS_OF_GROUP * bytes) < MAX_SLOTS ? WEIGHT_BYTES / (WARPS_OF_GROUP * bytes) : MAX_SLOTS;
    }
};
static_assert((2 + 2 * GROUPS) * MAX_SLOTS * 8 <= 1024, "barriers");

// A position in a ring: the stage, and the parity of the rounds so far.
struct RingPosition {
    u32 slot, phase;
    __device__ __forceinline__ void next(u32 n) {
        if (++slot == n) slot = 0, phase ^= 1;
    }
};

// Waits until the mbarrier has completed the phase with this parity.
__device__ __forceinline__ void wait_at(u64_t* barrier, u32 phase) {
    while (!barrier_try_wait(barrier, phase)) spin_pause();
}

// The work of a block: rows of a matrix for each consumer, tokens, panels.
struct BlockWork {
    const Matrix* matrix[GROUPS];
    u32 first_tile[GROUPS];
    u32 first_token, first_panel, end_panel;
};

// Producer of a consumer's records; one thread.
template <int N> __device__ __forceinline__ void fill_weights(const BlockWork& work, int group) {
    typedef Rings<N> R;
    const Matrix& m = *work.matrix[group];
    const u32 first_tile = work.first_tile[group], n_tiles = min((m.n_rows + 15) / 16 - min((m.n_rows + 15) / 16, first_tile), (u32)WARPS_OF_GROUP);
    const u32 bytes = record_bytes(m.format), n_panels = panels_of_record(m.format), n_slots = R::slots(bytes);
    const size_t row_bytes = (size_t)(m.n_panels / n_panels) * bytes;
    const unsigned char* from = m.records + first_tile * row_bytes + (size_t)(work.first_panel / n_panels) * bytes;
    RingPosition at = {0, 0};
    for (u32 panel = work.first_panel; panel < work.end_panel; panel += n_panels, from += bytes) {
        u64_t* full = R::full(group) + at.slot;
        unsigned char* to = R::weights(group) + at.slot * WARPS_OF_GROUP * bytes;
        wait_at(R::empty(group) + at.slot, at.phase ^ 1);
        barrier_arrive_expecting(full, n_tiles * bytes);
        for (u32 i = 0; i < n_tiles; i++) copy_bulk(to + i * bytes, from + i * row_bytes, bytes, full);
        at.next(n_slots);
    }
}

// Producer of the inputs; one thread.
template <int N> __device__ __forceinline__ void fill_inputs(const MatmulWideArgs& a, const BlockWork& work) {
    typedef Rings<N> R;
    wait_for_input();
    let_next_start();
    const u32 bytes = min((u32)N, a.n_token_tiles * 8 - work.first_token) * 128;
    const size_t panel_elements = (size_t)a.n_token_tiles * 8 * 64;
    const half* from = a.x + work.first_panel * panel_elements + work.first_token * 64;
    RingPosition at = {0, 0};
    for (u32 panel = work.first_panel; panel < work.end_panel; panel++, from += panel_elements) {
        wait_at(R::x_empty() + at.slot, at.phase ^ 1);
        barrier_arrive_expecting(R::x_full() + at.slot, bytes);
        copy_bulk(R::x(at.slot), from, bytes, R::x_full() + at.slot);
        at.next(R::X_SLOTS);
    }
}

// Main loop of a consumer.
template <u32 FORMAT, int N>
__device__ __forceinline__ void wide_products(const BlockWork& work, int group, int warp, int lane, float (&acc)[N / 8][4]) {
    typedef Rings<N> R;
    typedef Record<FORMAT> Of;
    constexpr u32 SLOTS = R::slots(Of::BYTES);
    const unsigned char* records = R::weights(group) + warp * Of::BYTES;
    RingPosition at = {0, 0}, x = {0, 0};
    auto decode = [&](u32 panel, u32 (&e)[2][2][4]) {
        const u32 i = panel % Of::PANELS;
        if (i == 0) wait_at(R::full(group) + at.slot, at.phase);
        Panel<FORMAT> p;
        p.template read<FromShared>(Place<FORMAT>(records + at.slot * WARPS_OF_GROUP * Of::BYTES, i), lane);
        elements(p, 0, e[0]);
        elements(p, 1, e[1]);
        if (i == Of::PANELS - 1) {
            __syncwarp();
            if (lane == 0) barrier_arrive(R::empty(group) + at.slot);
            at.next(SLOTS);
        }
    };
    // Panels whose products are issued together.
    constexpr int TOGETHER = N == 256 ? 1 : 2;
    typedef u32 Elements[TOGETHER][2][2][4];
    auto decode_panels = [&](u32 panel, Elements& e) {
#pragma unroll
        for (int i = 0; i < TOGETHER; i++) {
            if (panel + i < work.end_panel) {
                decode(panel + i, e[i]);
            } else {
                // Zero elements; their products read the first panel's inputs.
#pragma unroll
                for (int j = 0; j < 16; j++) e[i][j / 8][j / 4 % 2][j % 4] = 0;
            }
        }
    };
    // Issues the products of some panels; while they run, and once those before have completed, decodes the elements of the
    // next panels.
    auto multiply = [&](u32 panel, Elements& e, Elements& next) {
        const u32 slot_before = (x.slot + R::X_SLOTS - TOGETHER) % R::X_SLOTS;
        const u32 last = min(work.end_panel - panel, (u32)TOGETHER) - 1;
        wait_at(R::x_full() + x.slot, x.phase);
        if (TOGETHER > 1) wait_at(R::x_full() + x.slot + last, x.phase);
        WideColumns columns[TOGETHER];
#pragma unroll
        for (int i = 0; i < TOGETHER; i++) columns[i] = wide_columns(R::x(x.slot + (i == 0 ? 0 : last)));
        wide_begin();
#pragma unroll
        for (int i = 0; i < TOGETHER; i++)
#pragma unroll
            for (int step = 0; step < 4; step++) wide_mma(acc, e[i][step / 2][step % 2], columns[i], step);
        wide_commit();
        wide_wait<1>();
        if (panel > work.first_panel) {
            __syncwarp();
            if (lane < TOGETHER) barrier_arrive(R::x_empty() + slot_before + lane);
        }
        decode_panels(panel + TOGETHER, next);
        x.slot += TOGETHER;
        if (x.slot == R::X_SLOTS) x.slot = 0, x.phase ^= 1;
    };
    static_assert(R::X_SLOTS % TOGETHER == 0, "whole rounds");
    Elements even, odd;
    decode_panels(work.first_panel, even);
    stay(acc);
    for (u32 panel = work.first_panel; panel < work.end_panel; panel += 2 * TOGETHER) {
        multiply(panel, even, odd);
        if (panel + TOGETHER < work.end_panel) multiply(panel + TOGETHER, odd, even);
    }
    wide_wait<0>();
    stay(acc);
}

// All consumer threads, and their barrier.
constexpr int CONSUMERS = GROUPS * WARPS_OF_GROUP * 32;
__device__ __forceinline__ void consumers_meet() { named_barrier_sync<1, CONSUMERS>(); }

// Split-K: stores the sums of this split; the last block to finish adds up all splits and returns true, the others return
// false.
template <int N> __device__ __forceinline__ bool join_splits(const MatmulWideArgs& a, float (&acc)[N / 8][4]) {
    __shared__ bool is_last;
    const int tid = threadIdx.x;
    const u32 tile = blockIdx.y * gridDim.x + blockIdx.x;
    float4* sums = a.sums + (size_t)tile * a.n_splits * (N / 8) * CONSUMERS + tid;
#pragma unroll
    for (int n = 0; n < N / 8; n++)
        sums[(blockIdx.z * (N / 8) + n) * CONSUMERS] = make_float4(acc[n][0], acc[n][1], acc[n][2], acc[n][3]);
    __threadfence();
    consumers_meet();
    if (tid == 0) is_last = atomicAdd(a.tickets + tile, 1u) == a.n_splits - 1;
    consumers_meet();
    if (!is_last) return false;
    __threadfence();
    // In a fixed order, so that results do not depend on which block finished last; several loads in flight.
    constexpr int TILES = N / 8 < 4 ? N / 8 : 4, SPLITS = 4;
#pragma unroll
    for (int first = 0; first < N / 8; first += TILES) {
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) acc[first + n][i] = 0.0f;
#pragma unroll 1
        for (u32 split = 0; split < a.n_splits; split += SPLITS) {
            float4 v[SPLITS][TILES];
#pragma unroll
            for (int i_split = 0; i_split < SPLITS; i_split++)
#pragma unroll
                for (int n = 0; n < TILES; n++)
                    v[i_split][n] = split + i_split < a.n_splits ? sums[((split + i_split) * (N / 8) + first + n) * CONSUMERS] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
            for (int i_split = 0; i_split < SPLITS; i_split++)
#pragma unroll
                for (int n = 0; n < TILES; n++)
                    acc[first + n][0] += v[i_split][n].x, acc[first + n][1] += v[i_split][n].y, acc[first + n][2] += v[i_split][n].z, acc[first + n][3] += v[i_split][n].w;
        }
    }
    if (tid == 0) a.tickets[tile] = 0;
    return true;
}

// Transposes a block's results through shared memory, [N tokens][128 rows], so that whole vectors can be stored.
constexpr int ROW = 64 * GROUPS + 4;
template <int N> __device__ __forceinline__ float* gather_results(int group, int warp, int lane, const float (&acc)[N / 8][4]) {
    static_assert(N * ROW * 4 <= RING_BYTES, "room for results");
    float* results = (float*)(wide_memory + 1024);
    float* own_results = results + lane % 4 * 2 * ROW + group * 64 + warp * 16 + lane / 4;
    // All stages of the rings have been read.
    consumers_meet();
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) own_results[(8 * n + i % 2) * ROW + 8 * (i / 2)] = acc[n][i];
    consumers_meet();
    return results;
}

// Stores 64 rows of a result as a panel of the next product's packed input. A thread has the same eight rows of every 32nd token:
// `values` returns for the pair j of these, at `row` of the panel, a function of the pair's place in the results of a token.
template <typename Values> __device__ __forceinline__ void write_panel(const MatmulWideArgs& a, const BlockWork& work, u32 panel, u32 n_tokens, const float* results, Values values) {
    uint4* to = (uint4*)(a.packed + ((size_t)panel * a.n_token_tiles * 8 + work.first_token) * 64);
    // The inverse of `packed_input`.
    const u32 piece = threadIdx.x % 8, row = piece / 2 * 16 + piece % 2 * 2;
    auto value = values(row);
#pragma unroll 2
    for (u32 token = threadIdx.x / 8; token < n_tokens; token += CONSUMERS / 8) {
        const float* of_token = results + token * ROW + row;
        u32 pairs[4];
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            const float2 v = value(j, of_token + 4 * j);
            pairs[j] = bits(__floats2half2_rn(v.x, v.y));
        }
        to[token * 8 + (piece ^ token % 8)] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
}

// Stores a gated result: 64 rows of activation(gate) * up.
__device__ __forceinline__ void write_gated(const MatmulWideArgs& a, const BlockWork& work, u32 n_tokens, const float* results) {
    const u32 first_row = work.first_tile[0] * 16, n_rows = work.matrix[0]->n_rows;
    write_panel(a, work, blockIdx.y, n_tokens, results, [&](u32 row) {
        return [&, row](u32 j, const float* of_rows) {
            const float2 gate = *(const float2*)of_rows, up = *(const float2*)(of_rows + 64);
            const u32 at = first_row + row + 4 * j;
            return make_float2(at < n_rows ? activate(a.activation, gate.x) * up.x : 0.0f, at + 1 < n_rows ? activate(a.activation, gate.y) * up.y : 0.0f);
        };
    });
}

// Stores activation(product + bias): two panels of 64 rows, of which the second may be behind the last row.
__device__ __forceinline__ void write_activated(const MatmulWideArgs& a, const BlockWork& work, u32 n_tokens, const float* results) {
    const u32 n_rows = work.matrix[0]->n_rows;
    const float* of_rows = a.results[0].bias;
    with_activation(a.activation, [&](auto activation) {
        for (u32 panel = 2 * blockIdx.y; panel < 2 * blockIdx.y + 2 && panel * 64 < n_rows; panel++)
            write_panel(a, work, panel, n_tokens, results + panel % 2 * 64, [&](u32 row) {
                const u32 rest = n_rows - min(n_rows, panel * 64 + row);
                float2 bias[4];
#pragma unroll
                for (u32 j = 0; j < 4; j++) {
                    const u32 at = panel * 64 + row + 4 * j;
                    bias[j] = make_float2(of_rows && 4 * j < rest ? of_rows[at] : 0.0f, of_rows && 4 * j + 1 < rest ? of_rows[at + 1] : 0.0f);
                }
                return [=](u32 j, const float* result) {
                    const float2 v = *(const float2*)result;
                    return make_float2(4 * j < rest ? activation(v.x + bias[j].x) : 0.0f, 4 * j + 1 < rest ? activation(v.y + bias[j].y) : 0.0f);
                };
            });
    });
}

// Stores rows: four rows of a token for each lane, or, if these are not aligned, one after the other.
__device__ __forceinline__ void write_rows(const MatmulWideArgs& a, const BlockWork& work, const ResultRows& to, u32 n_tokens, const float* results) {
    const Matrix& m = *work.matrix[0];
    const u32 n_out = to.n_out;
    const u32 first_row = work.first_tile[0] * 16, n_rows = min(m.n_rows - first_row, 64u * GROUPS);
    float* y = to.y + (size_t)work.first_token * n_out + m.first_row + first_row;
    const float* bias = to.bias ? to.bias + m.first_row + first_row : nullptr;
    const bool adds = a.output == ADD;
    if ((n_out | n_rows) % 4 == 0 && (size_t)y % 16 == 0) {
        const u32 row = threadIdx.x % 32 * 4;
        if (row >= n_rows) return;
        const float4 b = bias ? make_float4(bias[row], bias[row + 1], bias[row + 2], bias[row + 3]) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        // Several tokens at a time, so that the loads of what is added to overlap.
        constexpr u32 AT_ONCE = 8, STEP = CONSUMERS / 32;
#pragma unroll 1
        for (u32 first = threadIdx.x / 32; first < n_tokens; first += AT_ONCE * STEP) {
            float4 v[AT_ONCE];
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; i++) {
                const u32 token = first + i * STEP;
                v[i] = adds && token < n_tokens ? *(const float4*)(y + (size_t)token * n_out + row) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            }
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; i++) {
                const u32 token = first + i * STEP;
                if (token >= n_tokens) break;
                const float4 product = *(const float4*)(results + token * ROW + row);
                const float4 sum = make_float4(product.x + b.x, product.y + b.y, product.z + b.z, product.w + b.w);
                if (adds) v[i].x += a.scale * sum.x, v[i].y += a.scale * sum.y, v[i].z += a.scale * sum.z, v[i].w += a.scale * sum.w;
                else v[i] = sum;
                *(float4*)(y + (size_t)token * n_out + row) = v[i];
            }
        }
        return;
    }
#pragma unroll 1
    for (u32 i = threadIdx.x; i < n_tokens * 64 * GROUPS; i += CONSUMERS) {
        const u32 token = i / (64 * GROUPS), row = i % (64 * GROUPS);
        if (row >= n_rows) continue;
        float* out = y + (size_t)token * n_out + row;
        const float v = results[token * ROW + row] + (bias ? bias[row] : 0.0f);
        *out = adds ? *out + a.scale * v : v;
    }
}

// The grid: groups of tokens, blocks of rows, splits.
template <int N> __device__ __forceinline__ void matmul_wide(const MatmulWideArgs& a) {
    typedef Rings<N> R;
    const int tid = threadIdx.x, warp = tid / 32 % WARPS_OF_GROUP, lane = tid % 32, group = tid / 32 / WARPS_OF_GROUP;
    const bool gated = a.output == GATED;
    u32 part = 0;
    while (!gated && part + 1 < a.n_matrices && blockIdx.y >= a.blocks[part]) part++;
    const u32 block = blockIdx.y - (part == 0 ? 0 : a.blocks[part - 1]);
    // Splits are whole records.
    const u32 n_panels = a.matrices[part].n_panels, panels_per_split = (n_panels + 4 * a.n_splits - 1) / (4 * a.n_splits) * 4;
    BlockWork work;
    work.matrix[0] = &a.matrices[part];
    work.matrix[1] = gated ? &a.matrices[1] : &a.matrices[part];
    work.first_tile[0] = block * (gated ? WARPS_OF_GROUP : 2 * WARPS_OF_GROUP);
    work.first_tile[1] = work.first_tile[0] + (gated ? 0 : WARPS_OF_GROUP);
    work.first_token = blockIdx.x * N;
    work.first_panel = min(blockIdx.z * panels_per_split, n_panels);
    work.end_panel = min(work.first_panel + panels_per_split, n_panels);
    // Each warp initialises some of the barriers, since the lanes of a warp do so one after the other.
    if (lane == 0) {
        for (u32 i = tid / 32; i < (2 + 2 * GROUPS) * MAX_SLOTS; i += WARPS_OF_GROUP * (GROUPS + 1)) {
            const u32 kind = i / MAX_SLOTS;
            barrier_init(R::x_full() + i, kind % 2 == 0 ? 1 : kind == 1 ? GROUPS * WARPS_OF_GROUP : WARPS_OF_GROUP);
        }
        fence_barrier_init();
    }
    __syncthreads();
    if (group == GROUPS) {
        release_registers<40>();
        if (warp < GROUPS && lane == 0) fill_weights<N>(work, warp);
        if (warp == GROUPS && lane == 0) fill_inputs<N>(a, work);
        return;
    }
    take_registers<232>();
    wait_for_input();
    float acc[N / 8][4] = {};
    WITH_FORMAT(work.matrix[group]->format, (wide_products<FORMAT, N>(work, group, warp, lane, acc)));
    if (a.n_splits > 1 && !join_splits<N>(a, acc)) return;
    const float* results = gather_results<N>(group, warp, lane, acc);
    if (gated) write_gated(a, work, min((u32)N, a.n_token_tiles * 8 - work.first_token), results);
    else if (a.output == ACTIVATED) write_activated(a, work, min((u32)N, a.n_token_tiles * 8 - work.first_token), results);
    else write_rows(a, work, a.results[part], min((u32)N, a.n_tokens - work.first_token), results);
}

#define MATMUL_WIDE(N)                                                                                              \
    extern "C" __global__ void __launch_bounds__(32 * WARPS_OF_GROUP * (GROUPS + 1), 1) matmul_wide_##N(const __grid_constant__ MatmulWideArgs a) { \
        matmul_wide<N>(a);                                                                                          \
    }
MATMUL_WIDE(16)
MATMUL_WIDE(32)
MATMUL_WIDE(64)
MATMUL_WIDE(128)
MATMUL_WIDE(256)
