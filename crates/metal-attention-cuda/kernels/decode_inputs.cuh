// Inputs of full ops in the persistent decode kernel: a consumer warp loads the elements of the op's input vector that belong to its columns, as
// words of other blocks, and stores them to its part of shared memory, as digits for quantised weights or as two F16 parts for F16 and F32
// weights. Small ops load theirs in decode_preload.cuh.
#pragma once
#include "code_products.cuh"
#include "decode_weights.cuh"

// `e`: -126 to 127.
__device__ __forceinline__ float power_of_two(int e) { return __uint_as_float((u32)(e + 127) << 23); }

// Converts the warp's inputs of a product with F16 or F32 weights, in place, from floats to two F16 parts (hi, and lo, which is 2048 times the
// remainder), after scaling by a power of two. `largest`: the largest magnitude that the lane has stored. Returns the factor of the products. All
// lanes of the warp call it.
//
// The scale makes 13 the exponent of the largest magnitude. Then both parts are within F16, whose largest exponent is 15: hi is at most 2^14, its
// remainder at most half a unit in its last place, which is 2^2, and lo, 2048 = 2^11 times that, at most 2^13.
constexpr int F16_PARTS_EXPONENT = 13;
__device__ __forceinline__ float split_into_f16(float4* inputs, float largest, u32 n_panels, int lane) {
    largest = warp_max(largest);
    // Values beyond these exponents, and infinity, are not scaled: the power of two would not be a normal number.
    const int largest_exponent = (__float_as_uint(largest) >> 23) - 127;
    const int exponent = largest_exponent > -100 && largest_exponent < 100 ? largest_exponent : 0;
    const float up = power_of_two(F16_PARTS_EXPONENT - exponent);
    // Eight lanes have the 32 elements of a quant block. Its two F16 parts take the same 128 bytes as its floats.
    const u32 n = n_panels * 16;
    for (u32 i = lane; i < (n + 31) / 32 * 32; i += 32) {
        const float4 v = i < n ? inputs[i] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        const float e[4] = {v.x * up, v.y * up, v.z * up, v.w * up};
        half hi[4], lo[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            hi[k] = __float2half_rn(e[k]);
            lo[k] = __float2half_rn((e[k] - __half2float(hi[k])) * 2048.0f);
        }
        // A lane's parts go to where other lanes have read their floats in this iteration.
        __syncwarp();
        if (i >= n) continue;
        // `place_in_quant_block`: products read elements in the order of mma operands.
        unsigned char* to = (unsigned char*)inputs + i / 8 * 128 + 2 * place_in_quant_block(i % 8 * 4);
        *(uint2*)to = make_uint2(bits(__halves2half2(hi[0], hi[1])), bits(__halves2half2(hi[2], hi[3])));
        *(uint2*)(to + 64) = make_uint2(bits(__halves2half2(lo[0], lo[1])), bits(__halves2half2(lo[2], lo[3])));
    }
    return power_of_two(exponent - F16_PARTS_EXPONENT);
}

__device__ __forceinline__ float largest_magnitude(const float4& v) { return fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))); }

// A consumer warp's inputs of an op, stored as they arrive. Four lanes have a quant block of 32 inputs; each has a quad of its first half and the
// corresponding quad of its second half.
struct Inputs {
    CodeInput digits;      // for quantised matrices: digits, their factors and sums of inputs
    float4* floats;        // the same memory, for F16 and F32: floats, which `split_into_f16` turns into F16 parts in place
    u32 n_quant_blocks;    // quant blocks of the warp
    bool has_codes;        // which of the two: whether the matrices are quantised
    bool with_sums;        // whether sums of inputs are needed, for mins
    float squares = 0.0f;  // sum of squares of what the lane has stored, before the norm's weights
    float largest = 0.0f;  // largest magnitude of it (floats only)
    // `warp_inputs`: the warp's part of shared memory.
    __device__ __forceinline__ Inputs(unsigned char* warp_inputs, u32 n_panels, const OpArgs& op)
        : digits(warp_inputs, n_panels), floats((float4*)warp_inputs), n_quant_blocks(2 * n_panels), has_codes(op.has_codes),
          with_sums(op.has_mins) {}
    // Stores the lane's two quads of each of N quant blocks: quant block `first + lane / 4` of the warp and those 8, 16, ... after it. Quant blocks
    // beyond the warp's are left out. `weights`: of the norm, or ones. All lanes of the warp call it.
    template <int N> __device__ __forceinline__ void store(u32 first, float4 (&v)[N][2], const float4 (&weights)[N][2], int lane) {
        const u32 quant_block = first + lane / 4;
        bool exists[N];
#pragma unroll
        for (int i = 0; i < N; i++) exists[i] = quant_block + 8 * i < n_quant_blocks;
#pragma unroll
        for (int i = 0; i < N; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) squares += sum_of_squares(v[i][h]), multiply_by(v[i][h], weights[i][h]);
        if (has_codes) {
            store_digits<N>(digits, quant_block, lane % 4, v, exists, with_sums);
        } else {
#pragma unroll
            for (int i = 0; i < N; i++)
#pragma unroll
                for (int h = 0; h < 2; h++)
                    if (exists[i]) {
                        floats[(quant_block + 8 * i) * 8 + lane % 4 + 4 * h] = v[i][h];
                        largest = fmaxf(largest, largest_magnitude(v[i][h]));
                    }
        }
    }
};
constexpr float4 ONES = {1.0f, 1.0f, 1.0f, 1.0f};

// Where the lane's k-th quad lies relative to its first one, in quads: 0, 4, 64, 68, 128, 132, 192, 196 for k = 0, 1, ..., 7. Quads k = 2 i and
// 2 i + 1 are in the first and in the second half of its i-th quant block; a quant block has 8 quads, and the lane has every eighth quant block.
__device__ __forceinline__ constexpr int quad_offset(int k) { return k / 2 * 64 + k % 2 * 4; }
// Loads 8 N quant blocks of inputs, from quant block `first` of the warp on, from words with tag `tag`; waits for them. `from`: the words of the
// lane's first quad there; `norm`: the norm's weights of that quad, or null; `n`: quads from there to the end of the vector, which is padded with
// zeros.
template <int N>
__device__ __forceinline__ void load_inputs_of_words(Inputs& inputs, u32 first, const ulonglong2* from, const float4* norm, u32 n, u32 tag,
                                                     int lane) {
    ulonglong2 words[2 * N];
    float4 v[N][2], weights[N][2];
    bool wanted[2 * N];
#pragma unroll
    for (int k = 0; k < 2 * N; k++)
        wanted[k] = ((u32)quad_offset(k) < n) & (first + k / 2 * 8 + lane / 4 < inputs.n_quant_blocks); // & instead of &&: no branch
    auto words_at = [&](int k) { return from + quad_offset(k); };
    load_words(words, wanted, words_at);
#pragma unroll
    for (int k = 0; k < 2 * N; k++) {
        weights[k / 2][k % 2] = ONES;
        if (norm && wanted[k]) weights[k / 2][k % 2] = norm[quad_offset(k)];
    }
    wait_for_words(words, wanted, tag, words_at);
    // Words that were not wanted are zeros.
#pragma unroll
    for (int k = 0; k < 2 * N; k++) v[k / 2][k % 2] = unpack_quad(words[k]);
    inputs.store<N>(first, v, weights, lane);
}

// Loads the warp's inputs of an op: words of its input vector with tag `tag`, in copy `copy_index`. `n4`: quads of the vector; `first_quad`: the
// lane's first one. Loads 32 quant blocks at a time (N = 4), so that many loads are in flight. If at most eight are left, they are loaded by
// N = 1: with N = 4 the warp would also convert 24 quant blocks that it does not have.
__device__ __forceinline__ void load_vector(const OpArgs& op, Inputs& inputs, u32 copy_index, u32 tag, u32 n4, const float4* norm, u32 first_quad,
                                            int lane) {
    const ulonglong2* from = op.input + copy_index * n4 + first_quad;
    const u32 n = n4 > first_quad ? n4 - first_quad : 0;
    u32 first = 0; // the next quant block of the warp
#pragma unroll 1
    for (; first + 8 < inputs.n_quant_blocks; first += 32) // more than eight are left
        load_inputs_of_words<4>(inputs, first, from + 8 * first, norm ? norm + first_quad + 8 * first : nullptr, n > 8 * first ? n - 8 * first : 0,
                                tag, lane);
    if (first < inputs.n_quant_blocks)
        load_inputs_of_words<1>(inputs, first, from + 8 * first, norm ? norm + first_quad + 8 * first : nullptr, n > 8 * first ? n - 8 * first : 0,
                                tag, lane);
}
