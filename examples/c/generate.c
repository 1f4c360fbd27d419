/* Continues a text with a model, and says how near two texts are to each other.
 *
 *   cc examples/c/generate.c -I crates/metal-attention-c/include -L target/release -lmetal_attention_c -lm -o generate
 *   ./generate [MODEL.gguf]
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "metal_attention.h"

/* Ends the program where a call failed. */
static void check(ma_status status) {
    if (status != MA_STATUS_OK) {
        fprintf(stderr, "error %d: %s\n", (int)status, ma_last_error());
        exit(1);
    }
}

/* Prints a token as soon as it is there. */
static int32_t print(const ma_token *token, void *user) {
    size_t *n_pieces = user;
    *n_pieces += 1;
    fwrite(token->text, 1, token->length, stdout);
    fflush(stdout);
    return 0;
}

/* Stops a text after its third token. */
static int32_t stop_soon(const ma_token *token, void *user) {
    int *n = user;
    return token->id != MA_NO_TOKEN && ++*n == 3;
}

/* The cosine of the angle between the embeddings of two texts. */
static double similarity(const ma_model *model, ma_context *context, const char *a, const char *b) {
    const size_t n_embd = ma_model_n_embedding(model);
    float *vectors = malloc(2 * n_embd * sizeof *vectors);
    size_t n;
    double sum = 0;
    if (!vectors) {
        exit(1);
    }
    check(ma_embed(context, a, MA_NUL_TERMINATED, vectors, n_embd, &n));
    check(ma_embed(context, b, MA_NUL_TERMINATED, vectors + n_embd, n_embd, &n));
    for (size_t i = 0; i < n; i++) {
        sum += (double)vectors[i] * vectors[n_embd + i];
    }
    free(vectors);
    return sum;
}

int main(int argc, char **argv) {
    const char *prompt = "Once upon a time";
    ma_model *model = NULL;
    ma_context *context = NULL;
    ma_context_options setup;
    ma_sampling_options sampling;
    ma_generate_options options;
    ma_generation done;
    uint32_t ids[64];
    char text[256];
    size_t n_ids, length, n_pieces = 0;
    int n = 0;

    if (ma_abi_version() != MA_ABI_VERSION) {
        fprintf(stderr, "the library has another version than this program was compiled for\n");
        return 1;
    }
    check(argc > 1 ? ma_model_open(argv[1], &model) : ma_model_built_in(&model));
    check(ma_context_options_default(&setup, sizeof setup));
    setup.device = "cpu";
    check(ma_context_new(model, &setup, &context));

    check(ma_tokenize(model, prompt, MA_NUL_TERMINATED, 1, 0, ids, 64, &n_ids));
    check(ma_detokenize(model, ids, n_ids, 0, text, sizeof text, &length));
    printf("%zu tokens: %.*s\n", n_ids, (int)length, text);

    check(ma_sampling_options_greedy(&sampling, sizeof sampling));
    check(ma_generate_options_default(&options, sizeof options));
    options.max_tokens = 20;
    check(ma_generate(context, ids, n_ids, &sampling, &options, print, &n_pieces, &done));
    printf("\n%zu tokens in %zu pieces after %zu\n", done.n_generated, n_pieces, done.n_prompt);

    check(ma_complete(context, prompt, MA_NUL_TERMINATED, NULL, NULL, stop_soon, &n, &done));
    printf("stopped after %zu tokens: %s\n", done.n_generated,
           done.stop_reason == MA_STOP_REASON_CALLBACK ? "by the caller" : "by itself");

    printf("similarity %.3f\n", similarity(model, context, "The dog runs.", "The dog runs."));

    ma_context_free(context);
    ma_model_free(model);
    return 0;
}
