// The start and the end of a forward pass: token embeddings; scale and soft cap of logits; argmax for greedy decoding.
#include "element.cuh"
#include "heads.cuh"
#include "argmax.cuh"

struct EmbeddingArgs {
    Matrix table;        // [n_vocab][n_embd]
    Matrix positions;    // [position][n_embd]; without records: none
    const float* types;  // [n_embd], or null
    const float* rows;   // [n_tokens][n_embd] embeddings in the place of those of the table, scaled already; null: the table's
    const Token* tokens; // [n_tokens]
    float* x;            // [n_tokens][n_embd]
    float scale;         // factor on the token embedding
    u32 n_embd;          // elements of a row
};
ASSERT_LAYOUT(EmbeddingArgs);

// x = scale * table[id] + types + positions[position]. A thread for each element, a row of blocks for each token.
extern "C" __global__ void embedding(const __grid_constant__ EmbeddingArgs a) {
    wait_for_input();
    let_next_start();
    const u32 k = blockIdx.x * blockDim.x + threadIdx.x, token = blockIdx.y;
    if (k >= a.n_embd) return;
    float v;
    if (a.rows) {
        v = a.rows[(size_t)token * a.n_embd + k];
    } else {
        WITH_PANEL(a.table.format, (v = element_of<P>(a.table, a.tokens[token].id, k)));
        v *= a.scale;
    }
    if (a.types) v += a.types[k];
    if (a.positions.records) {
        float p;
        WITH_PANEL(a.positions.format, (p = element_of<P>(a.positions, a.tokens[token].position, k)));
        v += p;
    }
    a.x[(size_t)token * a.n_embd + k] = v;
}

struct LogitsArgs {
    float* logits;  // [n_rows][n_vocab]
    u32 n;          // logits of all rows
    float scale;    // factor on the logits
    float soft_cap; // 0: none
    u32 unused;
};
ASSERT_LAYOUT(LogitsArgs);
// logits = soft_cap * tanh(scale * logits / soft_cap)
extern "C" __global__ void scale_logits(const __grid_constant__ LogitsArgs a) {
    wait_for_input();
    let_next_start();
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < a.n; i += gridDim.x * blockDim.x) {
        const float v = a.logits[i] * a.scale;
        a.logits[i] = a.soft_cap != 0.0f ? a.soft_cap * tanhf(v / a.soft_cap) : v;
    }
}

struct ArgmaxArgs {
    const float* logits; // [n_rows][n_vocab]
    u32 n_vocab;         // logits of a row
    u32 advance;         // whether the tokens become the chosen ones, one position later
    u64_t* best;         // keys (`argmax_key`), [n_rows][gridDim.x]
    u32* tickets;        // counters [n_rows], zero between launches
    u64_t* ids;          // in host memory: [n_rows][STEPS] words, written by `publish_id`
    Token* tokens;       // [n_rows]
    u32* numbers;        // [n_rows]: number of the last step that was counted here
};
ASSERT_LAYOUT(ArgmaxArgs);

// The largest key of a block, in each of its threads.
__device__ __forceinline__ u64_t largest_of_block(u64_t best, u64_t* scratch) {
    best = highest_of_lanes(best);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = best;
    __syncthreads();
    best = 0;
    for (int i = 0; i < (int)blockDim.x / 32; i++) best = scratch[i] > best ? scratch[i] : best;
    __syncthreads();
    return best;
}

// The id of the highest logit of each row. Each block searches a part of the row; the last block to finish merges, stores the
// id for the host with the step's number (`publish_id`), and advances the token.
extern "C" __global__ void __launch_bounds__(256) argmax(const __grid_constant__ ArgmaxArgs a) {
    __shared__ u64_t scratch[8];
    __shared__ bool is_last;
    wait_for_input();
    let_next_start();
    const u32 row = blockIdx.y;
    const float* logits = a.logits + (size_t)row * a.n_vocab;
    u64_t best = 0;
#pragma unroll 4
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < a.n_vocab; i += gridDim.x * blockDim.x) {
        const u64_t key = argmax_key(logits[i], i);
        best = key > best ? key : best;
    }
    best = largest_of_block(best, scratch);
    if (threadIdx.x == 0) {
        a.best[row * gridDim.x + blockIdx.x] = best;
        __threadfence();
        is_last = atomicAdd(a.tickets + row, 1) == gridDim.x - 1;
        if (is_last) a.tickets[row] = 0;
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    best = 0;
    for (u32 i = threadIdx.x; i < gridDim.x; i += blockDim.x) {
        const u64_t key = __ldcg((const unsigned long long*)a.best + row * gridDim.x + i);
        best = key > best ? key : best;
    }
    best = largest_of_block(best, scratch);
    if (threadIdx.x == 0) {
        // If all logits are NaN, the first id.
        const u32 id = best == 0 ? 0 : 0xffffffffu - (u32)best;
        const u32 number = a.numbers[row] + 1;
        a.numbers[row] = number;
        publish_id(a.ids, row, number, id);
        if (a.advance) {
            a.tokens[row].id = id;
            a.tokens[row].pos++;
            a.tokens[row].position++;
            a.tokens[row].rope_row++;
        }
    }
}
