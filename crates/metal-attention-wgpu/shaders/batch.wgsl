// A batch of tokens. `batch[0]` is (number of tokens, number of tokens whose logits are wanted, index of the first vector
// of the page table, pages of one of its rows); `batch[1 + t]` is (id, position, sequence, index in the batch of the t-th
// wanted token). The page table has a row for each sequence, the pages of a group of layers after those of the other, each
// as long as n_ctx takes: kv_cache.wgsl reads it.
// Bounds: `BatchBuffer::write_tokens` refuses more tokens than there is room for, and positions and sequences that do
// not exist; ids are those of the vocabulary (`check_batch`), `wanted` indices of the batch (`batch_words`). What
// argmax_advance writes is an id of the vocabulary and the next position, which kernels compare with N_CTX before they
// index by it.
@group(0) @binding({{ batch_binding }}) var<storage, read> batch: array<vec4<u32>>;
fn n_tokens() -> u32 { return batch[0].x; }
fn n_wanted() -> u32 { return batch[0].y; }
fn token_id(t: u32) -> u32 { return batch[1u + t].x; }
fn token_pos(t: u32) -> u32 { return batch[1u + t].y; }
fn token_seq(t: u32) -> u32 { return batch[1u + t].z; }
fn wanted(i: u32) -> u32 { return batch[1u + i].w; }

