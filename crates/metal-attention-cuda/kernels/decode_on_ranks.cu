// The persistent decode kernel of a model that several ranks share by tensor parallelism: one launch of decode.cu's template on each rank.
// Rows of the attention output and of down are sums over the ranks: the block that has a row of the residual stream sends its term to the
// same block of the other ranks and adds theirs (exchange.cuh). Everything else stays on the rank, except for the best logit at the end of a token.
#define TEMPLATES_ALONE
#include "decode.cu"

struct DecodeOnRanksArgs {
    DecodeArgs decode;
    RankShare ranks;
};
ASSERT_LAYOUT(DecodeOnRanksArgs);
#define DECODE_ON_RANKS(NAME, HEAD_CHUNKS, EXPERTS)                                                                              \
    extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1) NAME(const __grid_constant__ DecodeOnRanksArgs a) {             \
        decode<HEAD_CHUNKS, false, EXPERTS, true>(a.decode, &a.ranks);                                                           \
    }
DECODE_ON_RANKS(decode_on_ranks_128, 2, false)
DECODE_ON_RANKS(decode_experts_on_ranks_128, 2, true)
