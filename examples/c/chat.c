/* Has a model call a function, choose among words, and write several texts side by side.
 *
 *   cc examples/c/chat.c -I crates/metal-attention-c/include -L target/release -lmetal_attention_c -o chat
 *   ./chat [MODEL.gguf]
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "metal_attention.h"

#define N_TEXTS 3

/* Ends the program where a call failed. */
static void check(ma_status status) {
    if (status != MA_STATUS_OK) {
        fprintf(stderr, "error %d: %s\n", (int)status, ma_last_error());
        exit(1);
    }
}

/* Prints a token as soon as it is there. */
static int32_t print(const ma_token *token, void *user) {
    (void)user;
    fwrite(token->text, 1, token->length, stdout);
    return 0;
}

/* A text of a batch. */
typedef struct {
    char text[512];
    size_t length;
} story;

/* Adds a token to a story; ends it where there is no room. */
static int32_t add(const ma_token *token, void *user) {
    story *to = user;
    if (token->length > sizeof to->text - to->length) {
        return 1;
    }
    memcpy(to->text + to->length, token->text, token->length);
    to->length += token->length;
    return 0;
}

/* Has the model call one of two functions. */
static void call_a_function(const ma_model *model, ma_context *context, const ma_sampling_options *sampling) {
    const char *messages = "[{\"role\": \"user\", \"content\": \"Is it warm in Rome?\"}]";
    const char *tools =
        "[{\"type\": \"function\", \"function\": {\"name\": \"weather\", \"parameters\": {\"type\": \"object\","
        " \"properties\": {\"city\": {\"enum\": [\"Paris\", \"Rome\"]}}, \"required\": [\"city\"]}}}]";
    ma_chat_options how;
    ma_generate_options options;
    ma_chat *chat = NULL;
    ma_grammar *grammar = NULL;
    ma_answer *answer = NULL;
    uint32_t *ids;
    char message[512];
    size_t n_ids, length;

    check(ma_chat_options_default(&how, sizeof how));
    how.tools = tools;
    check(ma_chat_new(model, messages, MA_NUL_TERMINATED, &how, &chat));

    /* The first call asks how many tokens there are. */
    if (ma_chat_tokens(chat, NULL, 0, &n_ids) != MA_STATUS_BUFFER_TOO_SMALL) {
        exit(1);
    }
    ids = malloc(n_ids * sizeof *ids);
    if (!ids) {
        exit(1);
    }
    check(ma_chat_tokens(chat, ids, n_ids, &n_ids));

    check(ma_grammar_new(model, "tool_call", NULL, 0, chat, &grammar));
    check(ma_answer_new(chat, &answer));
    check(ma_generate_options_default(&options, sizeof options));
    options.grammar = grammar;
    options.answer = answer;
    printf("the model writes: ");
    check(ma_generate(context, ids, n_ids, sampling, &options, print, NULL, NULL));
    check(ma_answer_message(answer, message, sizeof message, &length));
    printf("\n%.*s\n", (int)length, message);

    free(ids);
    ma_answer_free(answer);
    ma_grammar_free(grammar);
    ma_chat_free(chat);
}

/* Has the model choose a word. */
static void choose(const ma_model *model, ma_context *context, const ma_sampling_options *sampling) {
    ma_generate_options options;
    ma_grammar *grammar = NULL;

    check(ma_grammar_new(model, "choice", "[\" dog\", \" cat\"]", MA_NUL_TERMINATED, NULL, &grammar));
    check(ma_generate_options_default(&options, sizeof options));
    options.grammar = grammar;
    printf("Lily had a pet. It was a");
    check(ma_complete(context, "Lily had a pet. It was a", MA_NUL_TERMINATED, sampling, &options, print, NULL, NULL));
    printf("\n");
    ma_grammar_free(grammar);
}

/* Writes several texts side by side. */
static void write_stories(const ma_model *model, const ma_context_options *setup,
                          const ma_sampling_options *sampling) {
    const char *prompts[N_TEXTS] = {"Once upon a time", "Lily and Ben", "The cat"};
    ma_generate_options options;
    ma_batch *batch = NULL;
    ma_batch_result results[N_TEXTS];
    story stories[N_TEXTS] = {{{0}, 0}};
    uint32_t ids[64];
    size_t n_ids, n;

    check(ma_batch_new(model, setup, 2, &batch));
    check(ma_generate_options_default(&options, sizeof options));
    options.max_tokens = 12;
    for (size_t i = 0; i < N_TEXTS; i++) {
        check(ma_tokenize(model, prompts[i], MA_NUL_TERMINATED, 1, 0, ids, 64, &n_ids));
        check(ma_batch_add(batch, ids, n_ids, sampling, &options, add, &stories[i], NULL));
    }
    check(ma_batch_run(batch, results, N_TEXTS, &n));
    for (size_t i = 0; i < n; i++) {
        if (results[i].status == MA_STATUS_OK) {
            printf("%s|%.*s\n", prompts[i], (int)stories[i].length, stories[i].text);
        } else {
            printf("%s: %s\n", prompts[i], ma_batch_error(batch, i));
        }
    }
    ma_batch_free(batch);
}

int main(int argc, char **argv) {
    ma_model *model = NULL;
    ma_context *context = NULL;
    ma_context_options setup;
    ma_sampling_options sampling;

    if (ma_abi_version() != MA_ABI_VERSION) {
        fprintf(stderr, "the library has another version than this program was compiled for\n");
        return 1;
    }
    check(argc > 1 ? ma_model_open(argv[1], &model) : ma_model_built_in(&model));
    check(ma_context_options_default(&setup, sizeof setup));
    setup.device = "cpu";
    check(ma_context_new(model, &setup, &context));
    check(ma_sampling_options_greedy(&sampling, sizeof sampling));

    call_a_function(model, context, &sampling);
    choose(model, context, &sampling);
    write_stories(model, &setup, &sampling);

    ma_context_free(context);
    ma_model_free(model);
    return 0;
}
