// Tokens through all layers of a model that several cards share in one launch on each, as decode.cu has it: who has a row of the residual stream tells the same
// block of the other cards what this one adds to it, and adds up what they tell. Everything else of a token stays on its card, but for what is chosen at its end.
#define TEMPLATES_ALONE
#include "decode.cu"

struct DecodeOnCardsArgs {
    DecodeArgs decode;
    OnCards cards;
};
#define DECODE_ON_CARDS(NAME, C, EXPERTS)                                                                                        \
    extern "C" __global__ void __launch_bounds__(ALL_THREADS, 1) NAME(const __grid_constant__ DecodeOnCardsArgs a) {             \
        decode<C, false, EXPERTS, true>(a.decode, &a.cards);                                                                     \
    }
DECODE_ON_CARDS(decode_on_cards_128, 2, false)
DECODE_ON_CARDS(decode_experts_on_cards_128, 2, true)
