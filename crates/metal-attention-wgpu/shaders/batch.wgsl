// The batch buffer. `batch[0]` is (number of tokens, number of output tokens, index of the page tables' first vector, pages of
// all of a sequence's tables); `batch[1 + 2 t]` is (id, index in its sequence, sequence, index in the batch of the t-th output
// token); `batch[2 + 2 t]` is (row of the RoPE tables, position, whether its embedding is given, end of its run). A run is
// neighbouring tokens of one sequence whose indices in it follow each other; it ends at the index in the batch behind its last token.
// Pages and masks go by the index in the sequence (`token_pos`); RoPE, learned positions and temperatures go by the position,
// which differs from it behind a span of embedding rows. Output tokens are those with `BatchToken::output`. The page tables of a
// sequence follow each other, one for each cache group, each with a word for every page of n_ctx inputs; kv_cache.wgsl reads them.
// Bounds: `BatchBuffer` refuses more tokens than fit, and sequences, indices in them and positions out of range; ids are those
// of the vocabulary (`check_batch`), `output_token` gives indices of the batch (`batch_words`). What argmax_advance writes is an
// id of the vocabulary, and the next index and position. Kernels compare `token_pos` with N_CTX before they use it as an index,
// and clamp rows of the RoPE tables, positions and ends of runs.
@group(0) @binding({{ batch_binding }}) var<storage, read> batch: array<vec4<u32>>;
fn n_tokens() -> u32 { return batch[0].x; }
fn n_outputs() -> u32 { return batch[0].y; }
fn token_id(t: u32) -> u32 { return batch[1u + 2u * t].x; }
fn token_pos(t: u32) -> u32 { return batch[1u + 2u * t].y; }
fn token_seq(t: u32) -> u32 { return batch[1u + 2u * t].z; }
fn output_token(i: u32) -> u32 { return batch[1u + 2u * i].w; }
fn token_rope_row(t: u32) -> u32 { return batch[2u + 2u * t].x; }
fn token_position(t: u32) -> u32 { return batch[2u + 2u * t].y; }
fn has_row(t: u32) -> bool { return batch[2u + 2u * t].z != 0u; }
fn run_end(t: u32) -> u32 { return batch[2u + 2u * t].w; }

