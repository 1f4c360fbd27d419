// y = W f(x) for a token, as matvec.cu has it, where each of several cards has some of the columns: a block sends the others what it has of its rows
// as soon as it is there, and adds up what they send.
#define TEMPLATES_ALONE
#include "matvec.cu"

struct MatvecOnCardsArgs {
    MatvecArgs product; // of one matrix, STORE or ADD
    Exchange cards;
    u32 of_step; // exchanges of this step before this one
    u32 unused;
};
extern "C" __global__ void __launch_bounds__(32 * WARPS, 2) matvec_on_cards(const __grid_constant__ MatvecOnCardsArgs a) {
    const Matrix& m = a.product.parts[0];
    WITH_FORMAT(m.format, (matvec_part<FORMAT, 1, true>(a.product, m, m, blockIdx.x, gridDim.x, &a.cards, a.of_step)));
}
