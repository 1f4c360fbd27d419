// Routing in the persistent decode kernel: the choice of experts, which each block with rows of experts makes by itself from the router's words.
// All blocks come to the same choice. One warp chooses; producer warps and epilogues read the choice in shared memory (Lemma 14).
#pragma once
#include "decode_exchange.cuh"

// The experts that the block has chosen for the token in the current layer. `n_used` of them are in use (RouteArgs).
constexpr int MAX_EXPERTS_PER_TOKEN = 32;
struct ExpertChoice {
    u32 experts[MAX_EXPERTS_PER_TOKEN];   // best first
    float weights[MAX_EXPERTS_PER_TOKEN]; // factors on the experts' results
    u32 n_published; // number of the layer that the choice is of: index of the token in the launch * (n_layer + 1) + index of the layer + 1, as
                     // each token has n_layer + 1 layers with the output head. 0: nothing is chosen yet
    u32 atomic_experts[FOR_RACECHECK ? MAX_EXPERTS_PER_TOKEN : 1]; // `experts` again, accessed with atomics
    // The choosing warp: the choice of layer number `n`, of `n_used` experts, is complete.
    __device__ __forceinline__ void publish(u32 n, u32 n_used, int lane) {
        if constexpr (FOR_RACECHECK) {
            if (lane < (int)n_used) atomicExch(atomic_experts + lane, experts[lane]);
        }
        __threadfence_block();
        __syncwarp();
        if (lane > 0) return;
        if constexpr (FOR_RACECHECK) atomicExch(&n_published, n);
        else *(volatile u32*)&n_published = n;
    }
    // A producer lane: whether the choice of layer number `n` is complete. Does not wait.
    __device__ __forceinline__ bool is_published(u32 n) {
        const u32 latest = FOR_RACECHECK ? atomicAdd(&n_published, 0) : *(const volatile u32*)&n_published;
        __threadfence_block();
        return latest >= n;
    }
    // A producer lane: the expert at `index` of the choice.
    __device__ __forceinline__ u32 expert(u32 index) {
        return FOR_RACECHECK ? atomicAdd(atomic_experts + (FOR_RACECHECK ? index : 0), 0) : experts[index];
    }
};

// The routing warp of a block (the last consumer warp; all lanes call it): waits for the router's products in words `from` with tag `tag`, chooses
// the experts of the token, and publishes the choice for the block's producer warps and epilogues. `layer_number`: see `n_published`.
__device__ __forceinline__ void route(const DecodeArgs& a, const RouteArgs& layer_route, ExpertChoice& chosen, const u64_t* from, u32 tag,
                                      u32 layer_number, int lane) {
    RouteArgs router = layer_route;
    router.experts = chosen.experts, router.weights = chosen.weights;
    const RoutingScratch scratch(router.n_expert, (float*)(decode_memory + a.routing_at));
    const u32 n = router.n_expert / 2; // words of two products
#pragma unroll 1
    for (u32 first = 0; first < n; first += 64) {
        u64_t words[2];
        const bool wanted[2] = {first + lane < n, first + 32 + lane < n};
        auto word_at = [&](int k) { return from + first + 32 * k + lane; };
        load_words(words, wanted, word_at);
        wait_for_words(words, wanted, tag, word_at);
#pragma unroll
        for (int k = 0; k < 2; k++)
            if (wanted[k]) *(float2*)(scratch.scores + 2 * (first + 32 * k + lane)) = unpack_pair(words[k]);
    }
    __syncwarp();
    // `scores`: the softmax or sigmoid of the products, or the products themselves. `choice_scores`: the same plus `choice_bias`, -infinity for
    // experts that cannot be chosen. Experts are chosen by `choice_scores`, and weighted by `scores`.
    make_scores(router, scratch, lane);
#pragma unroll 1
    for (u32 i = 0; i < router.n_used; i++) {
        const Best best = take_best(scratch.choice_scores, scratch.taken, router.n_expert, lane);
        if (lane == 0) chosen.experts[i] = best.at, chosen.weights[i] = scratch.scores[best.at];
    }
    __syncwarp();
    // From the scores of the chosen experts to their weights, in place: one lane an expert.
    write_weights_together(router, chosen.experts, chosen.weights, /* token */ 0, lane);
    chosen.publish(layer_number, router.n_used, lane);
}
