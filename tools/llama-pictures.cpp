// llama.cpp's embeddings of pictures: for each PICTURE (PNG, BMP or JPEG) a prompt that is only the picture, encoded by an mmproj
// file MMPROJ for the text model MODEL, whose rows must have as many values as the encoder's (deepstack rows included). Each part
// of a picture (the whole, or a tile) is a line of JSON on stdout, with its 32-bit floats, [n_tokens, n_values], in the NumPy
// file OUT.PICTURE.PART.npy. Runs on the CPU, without flash attention. tools/reference-pictures compiles and runs it.
//
//     llama-pictures MMPROJ MODEL OUT PICTURE...

#include "llama.h"
#include "mtmd-helper.h"
#include "mtmd.h"

#pragma GCC diagnostic ignored "-Wdeprecated-declarations" // nx and ny

#include <cstdio>
#include <string>

static bool write_npy(const std::string & path, const float * values, size_t n_rows, size_t width) {
    std::string head = "{'descr': '<f4', 'fortran_order': False, 'shape': (" + std::to_string(n_rows) + ", " + std::to_string(width) + "), }";
    while ((10 + head.size() + 1) % 64) {
        head += ' ';
    }
    head += '\n';
    FILE * out = fopen(path.c_str(), "wb");
    if (!out) {
        return false;
    }
    const unsigned char start[] = {0x93, 'N', 'U', 'M', 'P', 'Y', 1, 0, (unsigned char) head.size(), (unsigned char) (head.size() >> 8)};
    const bool written = fwrite(start, 1, sizeof(start), out) == sizeof(start)
        && fwrite(head.data(), 1, head.size(), out) == head.size()
        && fwrite(values, sizeof(float), n_rows * width, out) == n_rows * width;
    return !fclose(out) && written;
}

int main(int argc, char ** argv) {
    if (argc < 5) {
        return 2;
    }
    auto log = [](ggml_log_level level, const char * text, void *) {
        if (level == GGML_LOG_LEVEL_ERROR) fputs(text, stderr);
    };
    llama_log_set(log, nullptr);
    mtmd_log_set(log, nullptr);
    mtmd_helper_log_set(log, nullptr);
    llama_backend_init();
    auto model_params = llama_model_default_params();
    model_params.n_gpu_layers = 0;
    model_params.use_extra_bufts = false;
    llama_model * model = llama_model_load_from_file(argv[2], model_params);
    if (!model) {
        return 1;
    }
    auto params = mtmd_context_params_default();
    params.use_gpu = false;
    params.print_timings = false;
    params.n_threads = 1;
    params.warmup = false;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    mtmd_context * context = mtmd_init_from_file(argv[1], model, params);
    if (!context) {
        return 1;
    }
    const size_t width = llama_model_n_embd_inp(model);
    for (int i = 4; i < argc; i++) {
        auto loaded = mtmd_helper_bitmap_init_from_file(context, argv[i], false, mtmd_helper_init_opt_default());
        mtmd_bitmap * picture = loaded.bitmap;
        if (!picture) {
            fprintf(stderr, "%s: no picture\n", argv[i]);
            return 1;
        }
        const std::string prompt = mtmd_get_marker(context);
        mtmd_input_text text = {prompt.c_str(), prompt.size(), false, true};
        const mtmd_bitmap * pictures[] = {picture};
        mtmd_input_chunks * chunks = mtmd_input_chunks_init();
        if (mtmd_tokenize(context, chunks, &text, pictures, 1)) {
            return 1;
        }
        for (size_t j = 0, part = 0; j < mtmd_input_chunks_size(chunks); j++) {
            const mtmd_input_chunk * chunk = mtmd_input_chunks_get(chunks, j);
            if (mtmd_input_chunk_get_type(chunk) != MTMD_INPUT_CHUNK_TYPE_IMAGE) {
                continue;
            }
            const mtmd_image_tokens * tokens = mtmd_input_chunk_get_tokens_image(chunk);
            const size_t n_tokens = mtmd_input_chunk_get_n_tokens(chunk);
            if (mtmd_encode_chunk(context, chunk)) {
                return 1;
            }
            const std::string path = std::string(argv[3]) + "." + std::to_string(i - 4) + "." + std::to_string(part) + ".npy";
            if (!write_npy(path, mtmd_get_output_embd(context), n_tokens, width)) {
                return 1;
            }
            printf("{\"picture\": %d, \"part\": %zu, \"nx\": %zu, \"ny\": %zu, \"n_tokens\": %zu, \"file\": \"%s\"}\n", i - 4, part++,
                mtmd_image_tokens_get_nx(tokens), mtmd_image_tokens_get_ny(tokens), n_tokens, path.c_str());
        }
        mtmd_input_chunks_free(chunks);
        mtmd_bitmap_free(picture);
    }
    mtmd_free(context);
    llama_model_free(model);
    return 0;
}
