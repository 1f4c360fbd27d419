// llama.cpp's logits of all tokens of a prompt, [n_tokens, n_vocab], or the prompt's embedding, [n_embd], computed in floats:
// 32-bit floats in the file OUT. tools/reference-logits and tools/reference-models compile and run it.
//
//     llama-logits FILE ID,ID,... logits|embedding OUT

#include "llama.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

int main(int argc, char ** argv) {
    if (argc != 5) {
        return 2;
    }
    llama_log_set([](ggml_log_level level, const char * text, void *) {
        if (level == GGML_LOG_LEVEL_ERROR) fputs(text, stderr);
    }, nullptr);
    llama_backend_init();
    auto model_params = llama_model_default_params();
    model_params.n_gpu_layers = 0;
    model_params.use_extra_bufts = false;
    llama_model * model = llama_model_load_from_file(argv[1], model_params);
    if (!model) {
        return 1;
    }
    std::vector<llama_token> ids;
    for (char * id = strtok(argv[2], ","); id; id = strtok(nullptr, ",")) {
        ids.push_back(atoi(id));
    }
    const bool embedding = strcmp(argv[3], "embedding") == 0;
    auto params = llama_context_default_params();
    params.n_ctx = params.n_batch = params.n_ubatch = ids.size() < 32 ? 32 : ids.size();
    params.type_k = params.type_v = GGML_TYPE_F32;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    params.embeddings = embedding;
    llama_context * context = llama_init_from_model(model, params);
    if (!context) {
        return 1;
    }
    llama_batch batch = llama_batch_init(ids.size(), 0, 1);
    batch.n_tokens = ids.size();
    for (size_t i = 0; i < ids.size(); i++) {
        batch.token[i] = ids[i];
        batch.pos[i] = i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = true;
    }
    if (llama_decode(context, batch)) {
        return 1;
    }
    FILE * out = fopen(argv[4], "wb");
    if (!out) {
        return 1;
    }
    const size_t n = embedding ? llama_model_n_embd(model) : llama_vocab_n_tokens(llama_model_get_vocab(model));
    for (size_t row = 0; row < (embedding ? 1 : ids.size()); row++) {
        const float * values = embedding ? llama_get_embeddings_seq(context, 0) : llama_get_logits_ith(context, row);
        if (!values || fwrite(values, sizeof(float), n, out) != n) {
            return 1;
        }
    }
    return fclose(out) ? 1 : 0;
}
