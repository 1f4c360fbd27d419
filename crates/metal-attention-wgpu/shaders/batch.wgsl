// The batch buffer. `batch[0]` is (number of tokens, number of output tokens, index of the page tables' first vector,
// pages of all of a sequence's tables); `batch[1 + t]` is (id, position, sequence, index in the batch of the t-th
// output token). Output tokens are those with `BatchToken::output`. The page tables of a sequence follow each other,
// one for each cache group, each with a word for every page of n_ctx positions; kv_cache.wgsl reads them.
// Bounds: `BatchBuffer::write_tokens` refuses more tokens than fit, and positions and sequences out of range; ids are
// those of the vocabulary (`check_batch`), `output_token` gives indices of the batch (`batch_words`). What
// argmax_advance writes is an id of the vocabulary and the next position, which kernels compare with N_CTX before they
// use it as an index.
@group(0) @binding({{ batch_binding }}) var<storage, read> batch: array<vec4<u32>>;
fn n_tokens() -> u32 { return batch[0].x; }
fn n_outputs() -> u32 { return batch[0].y; }
fn token_id(t: u32) -> u32 { return batch[1u + t].x; }
fn token_pos(t: u32) -> u32 { return batch[1u + t].y; }
fn token_seq(t: u32) -> u32 { return batch[1u + t].z; }
fn output_token(i: u32) -> u32 { return batch[1u + i].w; }

