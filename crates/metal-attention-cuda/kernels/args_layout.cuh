// Generated from src/args.rs, where the host declares the arguments of the kernels: the sizes and offsets of the same structures here.
// `ASSERT_LAYOUT(S);` after the declaration of S compares them. To write this file anew:
//   METAL_ATTENTION_WRITE_LAYOUTS=1 cargo test -p metal-attention-cuda --lib layout
#pragma once
#include <stddef.h>

#define ASSERT_LAYOUT(S) LAYOUT_OF_##S(S)
#define SIZE_IS(S, SIZE) static_assert(sizeof(S) == SIZE, "the size differs from that in src/args")
#define FIELD_IS_AT(S, FIELD, OFFSET) static_assert(offsetof(S, FIELD) == OFFSET, "the offset differs from that in src/args")

// formats.cuh
#define LAYOUT_OF_Matrix(S) SIZE_IS(S, 24); \
    FIELD_IS_AT(S, records, 0); \
    FIELD_IS_AT(S, format, 8); \
    FIELD_IS_AT(S, n_rows, 12); \
    FIELD_IS_AT(S, n_panels, 16); \
    FIELD_IS_AT(S, first_row, 20)

// repack.cu
#define LAYOUT_OF_RepackArgs(S) SIZE_IS(S, 32); \
    FIELD_IS_AT(S, raw, 0); \
    FIELD_IS_AT(S, records, 8); \
    FIELD_IS_AT(S, n_rows, 16); \
    FIELD_IS_AT(S, n_in, 20); \
    FIELD_IS_AT(S, n_panels, 24); \
    FIELD_IS_AT(S, row_bytes, 28)

// matvec.cu
#define LAYOUT_OF_MatvecArgs(S) SIZE_IS(S, 160); \
    FIELD_IS_AT(S, matrices, 0); \
    FIELD_IS_AT(S, n_matrices, 72); \
    FIELD_IS_AT(S, block_ends, 76); \
    FIELD_IS_AT(S, n_in, 88); \
    FIELD_IS_AT(S, n_out, 92); \
    FIELD_IS_AT(S, warps_per_tile, 96); \
    FIELD_IS_AT(S, output, 100); \
    FIELD_IS_AT(S, activation, 104); \
    FIELD_IS_AT(S, eps, 108); \
    FIELD_IS_AT(S, scale, 112); \
    FIELD_IS_AT(S, unused, 116); \
    FIELD_IS_AT(S, x, 120); \
    FIELD_IS_AT(S, norm, 128); \
    FIELD_IS_AT(S, bias, 136); \
    FIELD_IS_AT(S, y, 144); \
    FIELD_IS_AT(S, rows, 152)

// matmul.cu
#define LAYOUT_OF_MatmulArgs(S) SIZE_IS(S, 112); \
    FIELD_IS_AT(S, a, 0); \
    FIELD_IS_AT(S, b, 24); \
    FIELD_IS_AT(S, x, 48); \
    FIELD_IS_AT(S, n_tokens, 56); \
    FIELD_IS_AT(S, n_token_tiles, 60); \
    FIELD_IS_AT(S, n_out, 64); \
    FIELD_IS_AT(S, output, 68); \
    FIELD_IS_AT(S, activation, 72); \
    FIELD_IS_AT(S, scale, 76); \
    FIELD_IS_AT(S, bias, 80); \
    FIELD_IS_AT(S, y, 88); \
    FIELD_IS_AT(S, packed, 96); \
    FIELD_IS_AT(S, y_token_tiles, 104); \
    FIELD_IS_AT(S, unused, 108)

// matmul_few.cu
#define LAYOUT_OF_MatmulFewArgs(S) SIZE_IS(S, 176); \
    FIELD_IS_AT(S, matrices, 0); \
    FIELD_IS_AT(S, n_matrices, 72); \
    FIELD_IS_AT(S, blocks, 76); \
    FIELD_IS_AT(S, x, 88); \
    FIELD_IS_AT(S, n_tokens, 96); \
    FIELD_IS_AT(S, n_token_tiles, 100); \
    FIELD_IS_AT(S, n_out, 104); \
    FIELD_IS_AT(S, output, 108); \
    FIELD_IS_AT(S, activation, 112); \
    FIELD_IS_AT(S, scale, 116); \
    FIELD_IS_AT(S, bias, 120); \
    FIELD_IS_AT(S, y, 128); \
    FIELD_IS_AT(S, packed, 136); \
    FIELD_IS_AT(S, y_token_tiles, 144); \
    FIELD_IS_AT(S, warps_per_tile, 148); \
    FIELD_IS_AT(S, n_splits, 152); \
    FIELD_IS_AT(S, unused, 156); \
    FIELD_IS_AT(S, sums, 160); \
    FIELD_IS_AT(S, tickets, 168)

// matmul_wide.cu
#define LAYOUT_OF_ResultRows(S) SIZE_IS(S, 24); \
    FIELD_IS_AT(S, y, 0); \
    FIELD_IS_AT(S, bias, 8); \
    FIELD_IS_AT(S, n_out, 16); \
    FIELD_IS_AT(S, unused, 20)

// matmul_wide.cu
#define LAYOUT_OF_MatmulWideArgs(S) SIZE_IS(S, 216); \
    FIELD_IS_AT(S, matrices, 0); \
    FIELD_IS_AT(S, results, 72); \
    FIELD_IS_AT(S, n_matrices, 144); \
    FIELD_IS_AT(S, blocks, 148); \
    FIELD_IS_AT(S, x, 160); \
    FIELD_IS_AT(S, n_tokens, 168); \
    FIELD_IS_AT(S, n_token_tiles, 172); \
    FIELD_IS_AT(S, output, 176); \
    FIELD_IS_AT(S, activation, 180); \
    FIELD_IS_AT(S, scale, 184); \
    FIELD_IS_AT(S, n_splits, 188); \
    FIELD_IS_AT(S, packed, 192); \
    FIELD_IS_AT(S, sums, 200); \
    FIELD_IS_AT(S, tickets, 208)

// odd_rows.cu
#define LAYOUT_OF_OddRowsArgs(S) SIZE_IS(S, 104); \
    FIELD_IS_AT(S, a, 0); \
    FIELD_IS_AT(S, b, 24); \
    FIELD_IS_AT(S, x, 48); \
    FIELD_IS_AT(S, bias, 56); \
    FIELD_IS_AT(S, y, 64); \
    FIELD_IS_AT(S, rows, 72); \
    FIELD_IS_AT(S, n_in, 80); \
    FIELD_IS_AT(S, n_out, 84); \
    FIELD_IS_AT(S, output, 88); \
    FIELD_IS_AT(S, activation, 92); \
    FIELD_IS_AT(S, scale, 96); \
    FIELD_IS_AT(S, unused, 100)

// heads.cuh
#define LAYOUT_OF_Token(S) SIZE_IS(S, 24); \
    FIELD_IS_AT(S, id, 0); \
    FIELD_IS_AT(S, seq, 4); \
    FIELD_IS_AT(S, pos, 8); \
    FIELD_IS_AT(S, last, 12); \
    FIELD_IS_AT(S, position, 16); \
    FIELD_IS_AT(S, rope_row, 20)

// prefill_attention.cu
#define LAYOUT_OF_QueryTile(S) SIZE_IS(S, 20); \
    FIELD_IS_AT(S, token, 0); \
    FIELD_IS_AT(S, n, 4); \
    FIELD_IS_AT(S, seq, 8); \
    FIELD_IS_AT(S, pos, 12); \
    FIELD_IS_AT(S, last, 16)

// heads.cuh
#define LAYOUT_OF_HeadInputs(S) SIZE_IS(S, 48); \
    FIELD_IS_AT(S, q_norm, 0); \
    FIELD_IS_AT(S, k_norm, 8); \
    FIELD_IS_AT(S, rope, 16); \
    FIELD_IS_AT(S, norm, 24); \
    FIELD_IS_AT(S, norm_after_rope, 28); \
    FIELD_IS_AT(S, rotation, 32); \
    FIELD_IS_AT(S, n_rot, 36); \
    FIELD_IS_AT(S, eps, 40); \
    FIELD_IS_AT(S, scale, 44)

// heads.cuh
#define LAYOUT_OF_ResultGate(S) SIZE_IS(S, 24); \
    FIELD_IS_AT(S, gates, 0); \
    FIELD_IS_AT(S, stride, 8); \
    FIELD_IS_AT(S, head_step, 12); \
    FIELD_IS_AT(S, element_step, 16); \
    FIELD_IS_AT(S, activation, 20)

// heads.cuh
#define LAYOUT_OF_Pages(S) SIZE_IS(S, 16); \
    FIELD_IS_AT(S, pages, 0); \
    FIELD_IS_AT(S, n_pages, 8); \
    FIELD_IS_AT(S, unused, 12)

// attention.cu
#define LAYOUT_OF_AttentionArgs(S) SIZE_IS(S, 216); \
    FIELD_IS_AT(S, inputs, 0); \
    FIELD_IS_AT(S, tokens, 48); \
    FIELD_IS_AT(S, pages, 56); \
    FIELD_IS_AT(S, k_cache, 72); \
    FIELD_IS_AT(S, v_cache, 80); \
    FIELD_IS_AT(S, qkv, 88); \
    FIELD_IS_AT(S, out, 96); \
    FIELD_IS_AT(S, packed, 104); \
    FIELD_IS_AT(S, partial, 112); \
    FIELD_IS_AT(S, tickets, 120); \
    FIELD_IS_AT(S, sinks, 128); \
    FIELD_IS_AT(S, n_head, 136); \
    FIELD_IS_AT(S, n_head_kv, 140); \
    FIELD_IS_AT(S, head_dim, 144); \
    FIELD_IS_AT(S, stride, 148); \
    FIELD_IS_AT(S, n_splits, 152); \
    FIELD_IS_AT(S, n_chunks, 156); \
    FIELD_IS_AT(S, n_token_tiles, 160); \
    FIELD_IS_AT(S, mask, 164); \
    FIELD_IS_AT(S, reach, 168); \
    FIELD_IS_AT(S, soft_cap, 172); \
    FIELD_IS_AT(S, q_step, 176); \
    FIELD_IS_AT(S, k_at, 180); \
    FIELD_IS_AT(S, v_at, 184); \
    FIELD_IS_AT(S, unused, 188); \
    FIELD_IS_AT(S, gate, 192)

// attention_inputs.cu
#define LAYOUT_OF_AttentionInputsArgs(S) SIZE_IS(S, 176); \
    FIELD_IS_AT(S, inputs, 0); \
    FIELD_IS_AT(S, q_bias, 48); \
    FIELD_IS_AT(S, k_bias, 56); \
    FIELD_IS_AT(S, tokens, 64); \
    FIELD_IS_AT(S, pages, 72); \
    FIELD_IS_AT(S, k_cache, 88); \
    FIELD_IS_AT(S, v_cache, 96); \
    FIELD_IS_AT(S, qkv, 104); \
    FIELD_IS_AT(S, queries, 112); \
    FIELD_IS_AT(S, n_head, 120); \
    FIELD_IS_AT(S, n_head_kv, 124); \
    FIELD_IS_AT(S, head_dim, 128); \
    FIELD_IS_AT(S, stride, 132); \
    FIELD_IS_AT(S, q_step, 136); \
    FIELD_IS_AT(S, k_at, 140); \
    FIELD_IS_AT(S, v_at, 144); \
    FIELD_IS_AT(S, owns_cache, 148); \
    FIELD_IS_AT(S, kind, 152); \
    FIELD_IS_AT(S, clamp, 156); \
    FIELD_IS_AT(S, value_eps, 160); \
    FIELD_IS_AT(S, growth, 164); \
    FIELD_IS_AT(S, growth_length, 168); \
    FIELD_IS_AT(S, growth_offset, 172)

// general_attention.cu
#define LAYOUT_OF_GeneralAttentionArgs(S) SIZE_IS(S, 160); \
    FIELD_IS_AT(S, tokens, 0); \
    FIELD_IS_AT(S, pages, 8); \
    FIELD_IS_AT(S, k_cache, 24); \
    FIELD_IS_AT(S, v_cache, 32); \
    FIELD_IS_AT(S, queries, 40); \
    FIELD_IS_AT(S, out, 48); \
    FIELD_IS_AT(S, packed, 56); \
    FIELD_IS_AT(S, partial, 64); \
    FIELD_IS_AT(S, tickets, 72); \
    FIELD_IS_AT(S, sinks, 80); \
    FIELD_IS_AT(S, slopes, 88); \
    FIELD_IS_AT(S, n_head, 96); \
    FIELD_IS_AT(S, n_head_kv, 100); \
    FIELD_IS_AT(S, key_dim, 104); \
    FIELD_IS_AT(S, value_dim, 108); \
    FIELD_IS_AT(S, n_splits, 112); \
    FIELD_IS_AT(S, n_token_tiles, 116); \
    FIELD_IS_AT(S, mask, 120); \
    FIELD_IS_AT(S, reach, 124); \
    FIELD_IS_AT(S, soft_cap, 128); \
    FIELD_IS_AT(S, unused, 132); \
    FIELD_IS_AT(S, gate, 136)

// prefill_attention.cu
#define LAYOUT_OF_PrefillArgs(S) SIZE_IS(S, 136); \
    FIELD_IS_AT(S, tiles, 0); \
    FIELD_IS_AT(S, pages, 8); \
    FIELD_IS_AT(S, k_cache, 24); \
    FIELD_IS_AT(S, v_cache, 32); \
    FIELD_IS_AT(S, qkv, 40); \
    FIELD_IS_AT(S, packed, 48); \
    FIELD_IS_AT(S, sinks, 56); \
    FIELD_IS_AT(S, n_head, 64); \
    FIELD_IS_AT(S, n_head_kv, 68); \
    FIELD_IS_AT(S, stride, 72); \
    FIELD_IS_AT(S, n_token_tiles, 76); \
    FIELD_IS_AT(S, mask, 80); \
    FIELD_IS_AT(S, reach, 84); \
    FIELD_IS_AT(S, soft_cap, 88); \
    FIELD_IS_AT(S, n_splits, 92); \
    FIELD_IS_AT(S, partial, 96); \
    FIELD_IS_AT(S, tickets, 104); \
    FIELD_IS_AT(S, gate, 112)

// ends.cu
#define LAYOUT_OF_EmbeddingArgs(S) SIZE_IS(S, 88); \
    FIELD_IS_AT(S, table, 0); \
    FIELD_IS_AT(S, positions, 24); \
    FIELD_IS_AT(S, types, 48); \
    FIELD_IS_AT(S, rows, 56); \
    FIELD_IS_AT(S, tokens, 64); \
    FIELD_IS_AT(S, x, 72); \
    FIELD_IS_AT(S, scale, 80); \
    FIELD_IS_AT(S, n_embd, 84)

// norm.cu
#define LAYOUT_OF_NormArgs(S) SIZE_IS(S, 72); \
    FIELD_IS_AT(S, x, 0); \
    FIELD_IS_AT(S, weight, 8); \
    FIELD_IS_AT(S, bias, 16); \
    FIELD_IS_AT(S, packed, 24); \
    FIELD_IS_AT(S, out, 32); \
    FIELD_IS_AT(S, rows, 40); \
    FIELD_IS_AT(S, n_in, 48); \
    FIELD_IS_AT(S, n_token_tiles, 52); \
    FIELD_IS_AT(S, kind, 56); \
    FIELD_IS_AT(S, eps, 60); \
    FIELD_IS_AT(S, scale, 64); \
    FIELD_IS_AT(S, accumulate, 68)

// activation.cu
#define LAYOUT_OF_ActivationArgs(S) SIZE_IS(S, 56); \
    FIELD_IS_AT(S, gate, 0); \
    FIELD_IS_AT(S, up, 8); \
    FIELD_IS_AT(S, out, 16); \
    FIELD_IS_AT(S, packed, 24); \
    FIELD_IS_AT(S, gate_stride, 32); \
    FIELD_IS_AT(S, up_stride, 36); \
    FIELD_IS_AT(S, n_ff, 40); \
    FIELD_IS_AT(S, n_token_tiles, 44); \
    FIELD_IS_AT(S, activation, 48); \
    FIELD_IS_AT(S, parameter, 52)

// streams.cu
#define LAYOUT_OF_StretchArgs(S) SIZE_IS(S, 48); \
    FIELD_IS_AT(S, a, 0); \
    FIELD_IS_AT(S, goal, 8); \
    FIELD_IS_AT(S, y, 16); \
    FIELD_IS_AT(S, n, 24); \
    FIELD_IS_AT(S, a_stride, 28); \
    FIELD_IS_AT(S, goal_stride, 32); \
    FIELD_IS_AT(S, y_stride, 36); \
    FIELD_IS_AT(S, accumulate, 40); \
    FIELD_IS_AT(S, scale, 44)

// streams.cu
#define LAYOUT_OF_StreamsArgs(S) SIZE_IS(S, 56); \
    FIELD_IS_AT(S, router, 0); \
    FIELD_IS_AT(S, matrix, 8); \
    FIELD_IS_AT(S, streams, 16); \
    FIELD_IS_AT(S, x, 24); \
    FIELD_IS_AT(S, scale, 32); \
    FIELD_IS_AT(S, scaled, 40); \
    FIELD_IS_AT(S, n, 48); \
    FIELD_IS_AT(S, n_streams, 52)

// block_conv.cu
#define LAYOUT_OF_BlockConvArgs(S) SIZE_IS(S, 56); \
    FIELD_IS_AT(S, x, 0); \
    FIELD_IS_AT(S, base, 8); \
    FIELD_IS_AT(S, taps, 16); \
    FIELD_IS_AT(S, y, 24); \
    FIELD_IS_AT(S, tokens, 32); \
    FIELD_IS_AT(S, n, 40); \
    FIELD_IS_AT(S, n_tap, 44); \
    FIELD_IS_AT(S, group_size, 48); \
    FIELD_IS_AT(S, side, 52)

// ends.cu
#define LAYOUT_OF_LogitsArgs(S) SIZE_IS(S, 24); \
    FIELD_IS_AT(S, logits, 0); \
    FIELD_IS_AT(S, n, 8); \
    FIELD_IS_AT(S, scale, 12); \
    FIELD_IS_AT(S, soft_cap, 16); \
    FIELD_IS_AT(S, unused, 20)

// ends.cu
#define LAYOUT_OF_ArgmaxArgs(S) SIZE_IS(S, 56); \
    FIELD_IS_AT(S, logits, 0); \
    FIELD_IS_AT(S, n_vocab, 8); \
    FIELD_IS_AT(S, advance, 12); \
    FIELD_IS_AT(S, best, 16); \
    FIELD_IS_AT(S, tickets, 24); \
    FIELD_IS_AT(S, ids, 32); \
    FIELD_IS_AT(S, tokens, 40); \
    FIELD_IS_AT(S, numbers, 48)

// top_k.cu
#define LAYOUT_OF_TopKArgs(S) SIZE_IS(S, 40); \
    FIELD_IS_AT(S, logits, 0); \
    FIELD_IS_AT(S, lists, 8); \
    FIELD_IS_AT(S, tickets, 16); \
    FIELD_IS_AT(S, best, 24); \
    FIELD_IS_AT(S, n_vocab, 32); \
    FIELD_IS_AT(S, chunk, 36)

// rates.cu
#define LAYOUT_OF_RateArgs(S) SIZE_IS(S, 32); \
    FIELD_IS_AT(S, from, 0); \
    FIELD_IS_AT(S, to, 8); \
    FIELD_IS_AT(S, n, 16); \
    FIELD_IS_AT(S, steps, 24); \
    FIELD_IS_AT(S, unused, 28)

// grouped_matvec.cu
#define LAYOUT_OF_GroupedMatvecArgs(S) SIZE_IS(S, 136); \
    FIELD_IS_AT(S, matrices, 0); \
    FIELD_IS_AT(S, tile_bytes, 48); \
    FIELD_IS_AT(S, groups, 56); \
    FIELD_IS_AT(S, n_groups, 64); \
    FIELD_IS_AT(S, n_in, 68); \
    FIELD_IS_AT(S, x, 72); \
    FIELD_IS_AT(S, items_a_row, 80); \
    FIELD_IS_AT(S, x_stride, 84); \
    FIELD_IS_AT(S, bias, 88); \
    FIELD_IS_AT(S, y, 104); \
    FIELD_IS_AT(S, y_stride, 112); \
    FIELD_IS_AT(S, first_item, 116); \
    FIELD_IS_AT(S, warps_per_tile, 120); \
    FIELD_IS_AT(S, output, 124); \
    FIELD_IS_AT(S, activation, 128); \
    FIELD_IS_AT(S, unused, 132)

// routing.cuh
#define LAYOUT_OF_RouteArgs(S) SIZE_IS(S, 80); \
    FIELD_IS_AT(S, products, 0); \
    FIELD_IS_AT(S, choice_bias, 8); \
    FIELD_IS_AT(S, expert_scale, 16); \
    FIELD_IS_AT(S, experts, 24); \
    FIELD_IS_AT(S, weights, 32); \
    FIELD_IS_AT(S, input_weights, 40); \
    FIELD_IS_AT(S, n_expert, 48); \
    FIELD_IS_AT(S, n_used, 52); \
    FIELD_IS_AT(S, score, 56); \
    FIELD_IS_AT(S, renormalize, 60); \
    FIELD_IS_AT(S, n_group, 64); \
    FIELD_IS_AT(S, n_group_used, 68); \
    FIELD_IS_AT(S, scale, 72); \
    FIELD_IS_AT(S, unused, 76)

// experts.cu
#define LAYOUT_OF_FusedRouteArgs(S) SIZE_IS(S, 136); \
    FIELD_IS_AT(S, route, 0); \
    FIELD_IS_AT(S, x, 80); \
    FIELD_IS_AT(S, norm, 88); \
    FIELD_IS_AT(S, h, 96); \
    FIELD_IS_AT(S, router, 104); \
    FIELD_IS_AT(S, bias, 112); \
    FIELD_IS_AT(S, tickets, 120); \
    FIELD_IS_AT(S, n_in, 128); \
    FIELD_IS_AT(S, eps, 132)

// experts.cu
#define LAYOUT_OF_WeighArgs(S) SIZE_IS(S, 32); \
    FIELD_IS_AT(S, x, 0); \
    FIELD_IS_AT(S, weights, 8); \
    FIELD_IS_AT(S, out, 16); \
    FIELD_IS_AT(S, n, 24); \
    FIELD_IS_AT(S, n_used, 28)

// experts.cu
#define LAYOUT_OF_ExpertsActivationArgs(S) SIZE_IS(S, 32); \
    FIELD_IS_AT(S, x, 0); \
    FIELD_IS_AT(S, out, 8); \
    FIELD_IS_AT(S, n, 16); \
    FIELD_IS_AT(S, gated, 20); \
    FIELD_IS_AT(S, activation, 24); \
    FIELD_IS_AT(S, limit, 28)

// experts.cu
#define LAYOUT_OF_ExpertsSumArgs(S) SIZE_IS(S, 64); \
    FIELD_IS_AT(S, y, 0); \
    FIELD_IS_AT(S, weights, 8); \
    FIELD_IS_AT(S, shared, 16); \
    FIELD_IS_AT(S, gate, 24); \
    FIELD_IS_AT(S, h, 32); \
    FIELD_IS_AT(S, out, 40); \
    FIELD_IS_AT(S, n, 48); \
    FIELD_IS_AT(S, n_used, 52); \
    FIELD_IS_AT(S, add, 56); \
    FIELD_IS_AT(S, scale, 60)

// grouped_matmul.cu
#define LAYOUT_OF_SortArgs(S) SIZE_IS(S, 48); \
    FIELD_IS_AT(S, groups, 0); \
    FIELD_IS_AT(S, n_items, 8); \
    FIELD_IS_AT(S, n_groups, 12); \
    FIELD_IS_AT(S, items, 16); \
    FIELD_IS_AT(S, work, 24); \
    FIELD_IS_AT(S, n_work, 32); \
    FIELD_IS_AT(S, n_slots, 40); \
    FIELD_IS_AT(S, tiles_of_work, 44)

// grouped_matmul.cu
#define LAYOUT_OF_GatherArgs(S) SIZE_IS(S, 40); \
    FIELD_IS_AT(S, x, 0); \
    FIELD_IS_AT(S, items, 8); \
    FIELD_IS_AT(S, packed, 16); \
    FIELD_IS_AT(S, items_a_row, 24); \
    FIELD_IS_AT(S, x_stride, 28); \
    FIELD_IS_AT(S, n_in, 32); \
    FIELD_IS_AT(S, n_slots, 36)

// grouped_matmul.cu
#define LAYOUT_OF_GroupedMatmulArgs(S) SIZE_IS(S, 136); \
    FIELD_IS_AT(S, matrices, 0); \
    FIELD_IS_AT(S, tile_bytes, 48); \
    FIELD_IS_AT(S, work, 56); \
    FIELD_IS_AT(S, n_work, 64); \
    FIELD_IS_AT(S, x, 72); \
    FIELD_IS_AT(S, bias, 80); \
    FIELD_IS_AT(S, items, 96); \
    FIELD_IS_AT(S, y, 104); \
    FIELD_IS_AT(S, packed, 112); \
    FIELD_IS_AT(S, n_slots, 120); \
    FIELD_IS_AT(S, n_out, 124); \
    FIELD_IS_AT(S, output, 128); \
    FIELD_IS_AT(S, activation, 132)

// latent_attention.cu
#define LAYOUT_OF_LatentInputsArgs(S) SIZE_IS(S, 112); \
    FIELD_IS_AT(S, tokens, 0); \
    FIELD_IS_AT(S, pages, 8); \
    FIELD_IS_AT(S, cache, 24); \
    FIELD_IS_AT(S, q, 32); \
    FIELD_IS_AT(S, kv, 40); \
    FIELD_IS_AT(S, norm, 48); \
    FIELD_IS_AT(S, rope, 56); \
    FIELD_IS_AT(S, queries, 64); \
    FIELD_IS_AT(S, n_head, 72); \
    FIELD_IS_AT(S, n_nope, 76); \
    FIELD_IS_AT(S, rank, 80); \
    FIELD_IS_AT(S, n_shared, 84); \
    FIELD_IS_AT(S, rotation, 88); \
    FIELD_IS_AT(S, eps, 92); \
    FIELD_IS_AT(S, scale, 96); \
    FIELD_IS_AT(S, temperature, 100); \
    FIELD_IS_AT(S, length, 104); \
    FIELD_IS_AT(S, offset, 108)

// latent_attention.cu
#define LAYOUT_OF_LatentAttentionArgs(S) SIZE_IS(S, 72); \
    FIELD_IS_AT(S, tokens, 0); \
    FIELD_IS_AT(S, pages, 8); \
    FIELD_IS_AT(S, cache, 24); \
    FIELD_IS_AT(S, queries, 32); \
    FIELD_IS_AT(S, out, 40); \
    FIELD_IS_AT(S, partial, 48); \
    FIELD_IS_AT(S, n_head, 56); \
    FIELD_IS_AT(S, rank, 60); \
    FIELD_IS_AT(S, n_shared, 64); \
    FIELD_IS_AT(S, n_splits, 68)

// recurrence.cuh
#define LAYOUT_OF_Runs(S) SIZE_IS(S, 16); \
    FIELD_IS_AT(S, runs, 0); \
    FIELD_IS_AT(S, segments, 8)

// recurrence.cuh
#define LAYOUT_OF_States(S) SIZE_IS(S, 16); \
    FIELD_IS_AT(S, states, 0); \
    FIELD_IS_AT(S, stride, 8); \
    FIELD_IS_AT(S, first, 12)

// recurrence.cuh
#define LAYOUT_OF_Rows(S) SIZE_IS(S, 16); \
    FIELD_IS_AT(S, rows, 0); \
    FIELD_IS_AT(S, stride, 8); \
    FIELD_IS_AT(S, first, 12)

// recurrence.cuh
#define LAYOUT_OF_Scan(S) SIZE_IS(S, 56); \
    FIELD_IS_AT(S, runs, 0); \
    FIELD_IS_AT(S, states, 16); \
    FIELD_IS_AT(S, out, 32); \
    FIELD_IS_AT(S, n_head, 40); \
    FIELD_IS_AT(S, key_dim, 44); \
    FIELD_IS_AT(S, value_dim, 48); \
    FIELD_IS_AT(S, tile, 52)

// recurrence.cuh
#define LAYOUT_OF_ConvolutionArgs(S) SIZE_IS(S, 96); \
    FIELD_IS_AT(S, runs, 0); \
    FIELD_IS_AT(S, states, 16); \
    FIELD_IS_AT(S, x, 32); \
    FIELD_IS_AT(S, taps, 48); \
    FIELD_IS_AT(S, bias, 56); \
    FIELD_IS_AT(S, out, 64); \
    FIELD_IS_AT(S, channels, 72); \
    FIELD_IS_AT(S, n_tap, 76); \
    FIELD_IS_AT(S, block, 80); \
    FIELD_IS_AT(S, step, 84); \
    FIELD_IS_AT(S, gated, 88); \
    FIELD_IS_AT(S, unused, 92)

// recurrence.cuh
#define LAYOUT_OF_GroupNormArgs(S) SIZE_IS(S, 104); \
    FIELD_IS_AT(S, x, 0); \
    FIELD_IS_AT(S, out, 8); \
    FIELD_IS_AT(S, weight, 16); \
    FIELD_IS_AT(S, bias, 24); \
    FIELD_IS_AT(S, gate, 32); \
    FIELD_IS_AT(S, r, 48); \
    FIELD_IS_AT(S, k, 56); \
    FIELD_IS_AT(S, v, 64); \
    FIELD_IS_AT(S, factor, 72); \
    FIELD_IS_AT(S, n, 80); \
    FIELD_IS_AT(S, n_group, 84); \
    FIELD_IS_AT(S, of_groups, 88); \
    FIELD_IS_AT(S, norm, 92); \
    FIELD_IS_AT(S, gate_kind, 96); \
    FIELD_IS_AT(S, eps, 100)

// recurrent.cu
#define LAYOUT_OF_FunctionArgs(S) SIZE_IS(S, 24); \
    FIELD_IS_AT(S, x, 0); \
    FIELD_IS_AT(S, with, 8); \
    FIELD_IS_AT(S, n, 16); \
    FIELD_IS_AT(S, function, 20)

// recurrence.cuh
#define LAYOUT_OF_FusedDecode(S) SIZE_IS(S, 208); \
    FIELD_IS_AT(S, convolution, 0); \
    FIELD_IS_AT(S, norm, 96); \
    FIELD_IS_AT(S, tickets, 200)

// delta_rule.cu
#define LAYOUT_OF_FusedDeltaRuleArgs(S) SIZE_IS(S, 344); \
    FIELD_IS_AT(S, args, 0); \
    FIELD_IS_AT(S, fused, 136)

// mamba2.cu
#define LAYOUT_OF_FusedMamba2Args(S) SIZE_IS(S, 376); \
    FIELD_IS_AT(S, args, 0); \
    FIELD_IS_AT(S, fused, 168)

// delta_rule.cu
#define LAYOUT_OF_DeltaRuleArgs(S) SIZE_IS(S, 136); \
    FIELD_IS_AT(S, scan, 0); \
    FIELD_IS_AT(S, x, 56); \
    FIELD_IS_AT(S, beta, 72); \
    FIELD_IS_AT(S, decay, 88); \
    FIELD_IS_AT(S, a, 104); \
    FIELD_IS_AT(S, dt_bias, 112); \
    FIELD_IS_AT(S, n_head_k, 120); \
    FIELD_IS_AT(S, heads_of_key, 124); \
    FIELD_IS_AT(S, unused, 128); \
    FIELD_IS_AT(S, eps, 132)

// mamba2.cu
#define LAYOUT_OF_Mamba2Args(S) SIZE_IS(S, 168); \
    FIELD_IS_AT(S, scan, 0); \
    FIELD_IS_AT(S, x, 56); \
    FIELD_IS_AT(S, b, 72); \
    FIELD_IS_AT(S, c, 88); \
    FIELD_IS_AT(S, dt, 104); \
    FIELD_IS_AT(S, gate, 120); \
    FIELD_IS_AT(S, dt_bias, 136); \
    FIELD_IS_AT(S, a, 144); \
    FIELD_IS_AT(S, d, 152); \
    FIELD_IS_AT(S, heads_of_group, 160); \
    FIELD_IS_AT(S, gate_step, 164)

// mamba.cu
#define LAYOUT_OF_SelectArgs(S) SIZE_IS(S, 80); \
    FIELD_IS_AT(S, chosen, 0); \
    FIELD_IS_AT(S, dt, 8); \
    FIELD_IS_AT(S, bc, 16); \
    FIELD_IS_AT(S, weights, 24); \
    FIELD_IS_AT(S, n, 48); \
    FIELD_IS_AT(S, rank, 52); \
    FIELD_IS_AT(S, d_state, 56); \
    FIELD_IS_AT(S, at, 60); \
    FIELD_IS_AT(S, eps, 72); \
    FIELD_IS_AT(S, unused, 76)

// mamba.cu
#define LAYOUT_OF_MambaArgs(S) SIZE_IS(S, 120); \
    FIELD_IS_AT(S, scan, 0); \
    FIELD_IS_AT(S, x, 56); \
    FIELD_IS_AT(S, dt, 64); \
    FIELD_IS_AT(S, bc, 72); \
    FIELD_IS_AT(S, gate, 80); \
    FIELD_IS_AT(S, dt_bias, 96); \
    FIELD_IS_AT(S, a, 104); \
    FIELD_IS_AT(S, d, 112)

// rwkv.cu
#define LAYOUT_OF_TokenShiftArgs(S) SIZE_IS(S, 80); \
    FIELD_IS_AT(S, runs, 0); \
    FIELD_IS_AT(S, states, 16); \
    FIELD_IS_AT(S, x, 32); \
    FIELD_IS_AT(S, lerps, 40); \
    FIELD_IS_AT(S, more, 48); \
    FIELD_IS_AT(S, out, 56); \
    FIELD_IS_AT(S, width, 64); \
    FIELD_IS_AT(S, n_mix, 68); \
    FIELD_IS_AT(S, n_tokens, 72); \
    FIELD_IS_AT(S, advance, 76)

// rwkv.cu
#define LAYOUT_OF_Rwkv6Args(S) SIZE_IS(S, 112); \
    FIELD_IS_AT(S, scan, 0); \
    FIELD_IS_AT(S, r, 56); \
    FIELD_IS_AT(S, k, 64); \
    FIELD_IS_AT(S, v, 72); \
    FIELD_IS_AT(S, decay, 80); \
    FIELD_IS_AT(S, decay_bias, 88); \
    FIELD_IS_AT(S, bonus, 96); \
    FIELD_IS_AT(S, n_head_kv, 104); \
    FIELD_IS_AT(S, unused, 108)

// rwkv.cu
#define LAYOUT_OF_SideProduct(S) SIZE_IS(S, 56); \
    FIELD_IS_AT(S, matrix, 0); \
    FIELD_IS_AT(S, x, 24); \
    FIELD_IS_AT(S, y, 32); \
    FIELD_IS_AT(S, n_in, 40); \
    FIELD_IS_AT(S, end, 44); \
    FIELD_IS_AT(S, warps_per_tile, 48); \
    FIELD_IS_AT(S, function, 52)

// rwkv.cu
#define LAYOUT_OF_SideProductsArgs(S) SIZE_IS(S, 448); \
    FIELD_IS_AT(S, products, 0)

// rwkv.cu
#define LAYOUT_OF_Rwkv7InputsArgs(S) SIZE_IS(S, 104); \
    FIELD_IS_AT(S, decay, 0); \
    FIELD_IS_AT(S, rate, 8); \
    FIELD_IS_AT(S, k, 16); \
    FIELD_IS_AT(S, v, 24); \
    FIELD_IS_AT(S, kappa, 32); \
    FIELD_IS_AT(S, decay_bias, 40); \
    FIELD_IS_AT(S, rate_bias, 48); \
    FIELD_IS_AT(S, removed, 56); \
    FIELD_IS_AT(S, kept, 64); \
    FIELD_IS_AT(S, first_value, 72); \
    FIELD_IS_AT(S, value_mix, 80); \
    FIELD_IS_AT(S, value_bias, 88); \
    FIELD_IS_AT(S, n_head, 96); \
    FIELD_IS_AT(S, head_dim, 100)

// rwkv.cu
#define LAYOUT_OF_Rwkv7Args(S) SIZE_IS(S, 104); \
    FIELD_IS_AT(S, scan, 0); \
    FIELD_IS_AT(S, r, 56); \
    FIELD_IS_AT(S, decay, 64); \
    FIELD_IS_AT(S, k, 72); \
    FIELD_IS_AT(S, v, 80); \
    FIELD_IS_AT(S, a, 88); \
    FIELD_IS_AT(S, b, 96)

// exchange.cuh
#define LAYOUT_OF_Exchange(S) SIZE_IS(S, 96); \
    FIELD_IS_AT(S, mailboxes, 0); \
    FIELD_IS_AT(S, exchanges_done, 64); \
    FIELD_IS_AT(S, abort, 72); \
    FIELD_IS_AT(S, rank, 80); \
    FIELD_IS_AT(S, n_ranks, 84); \
    FIELD_IS_AT(S, n_words, 88); \
    FIELD_IS_AT(S, n_chunks, 92)

// exchange.cu
#define LAYOUT_OF_AllReduceArgs(S) SIZE_IS(S, 128); \
    FIELD_IS_AT(S, exchange, 0); \
    FIELD_IS_AT(S, part, 96); \
    FIELD_IS_AT(S, out, 104); \
    FIELD_IS_AT(S, n, 112); \
    FIELD_IS_AT(S, add, 116); \
    FIELD_IS_AT(S, scale, 120); \
    FIELD_IS_AT(S, exchanges_before, 124)

// exchange.cu
#define LAYOUT_OF_AllGatherArgs(S) SIZE_IS(S, 152); \
    FIELD_IS_AT(S, exchange, 0); \
    FIELD_IS_AT(S, rows, 96); \
    FIELD_IS_AT(S, n_rows, 104); \
    FIELD_IS_AT(S, stride, 108); \
    FIELD_IS_AT(S, first_columns, 112); \
    FIELD_IS_AT(S, exchanges_before, 148)

// exchange.cu
#define LAYOUT_OF_CountExchangesArgs(S) SIZE_IS(S, 16); \
    FIELD_IS_AT(S, exchanges_done, 0); \
    FIELD_IS_AT(S, n, 8); \
    FIELD_IS_AT(S, unused, 12)

// decode.cuh
#define LAYOUT_OF_OpArgs(S) SIZE_IS(S, 104); \
    FIELD_IS_AT(S, norm, 0); \
    FIELD_IS_AT(S, bias, 8); \
    FIELD_IS_AT(S, input, 16); \
    FIELD_IS_AT(S, output, 24); \
    FIELD_IS_AT(S, kind, 32); \
    FIELD_IS_AT(S, n_in, 36); \
    FIELD_IS_AT(S, eps, 40); \
    FIELD_IS_AT(S, inverse_n_in, 44); \
    FIELD_IS_AT(S, first_matrix_index, 48); \
    FIELD_IS_AT(S, n_matrices, 52); \
    FIELD_IS_AT(S, n_rows, 56); \
    FIELD_IS_AT(S, tag_in_offset, 68); \
    FIELD_IS_AT(S, tag_out_offset, 72); \
    FIELD_IS_AT(S, has_codes, 76); \
    FIELD_IS_AT(S, has_mins, 78); \
    FIELD_IS_AT(S, n_copies, 80); \
    FIELD_IS_AT(S, n_out, 84); \
    FIELD_IS_AT(S, panels_per_unit, 88); \
    FIELD_IS_AT(S, units_per_tile, 92); \
    FIELD_IS_AT(S, log_warps_per_tile, 96); \
    FIELD_IS_AT(S, region, 98); \
    FIELD_IS_AT(S, has_half_scales, 100); \
    FIELD_IS_AT(S, preload_tiles, 102)

// decode.cuh
#define LAYOUT_OF_OpMatrixArgs(S) SIZE_IS(S, 56); \
    FIELD_IS_AT(S, records, 0); \
    FIELD_IS_AT(S, tile_bytes, 8); \
    FIELD_IS_AT(S, n_tiles, 12); \
    FIELD_IS_AT(S, first_tile, 16); \
    FIELD_IS_AT(S, op_tiles, 20); \
    FIELD_IS_AT(S, record_bytes, 24); \
    FIELD_IS_AT(S, records_per_stage, 26); \
    FIELD_IS_AT(S, format, 28); \
    FIELD_IS_AT(S, log_warps_per_tile, 30); \
    FIELD_IS_AT(S, units_per_tile, 32); \
    FIELD_IS_AT(S, records_per_unit, 34); \
    FIELD_IS_AT(S, expert_layer_number, 36); \
    FIELD_IS_AT(S, expert_stride, 40); \
    FIELD_IS_AT(S, tiles_per_expert, 44); \
    FIELD_IS_AT(S, records_per_expert, 48); \
    FIELD_IS_AT(S, first_block, 52)

// decode.cuh
#define LAYOUT_OF_LayerArgs(S) SIZE_IS(S, 768); \
    FIELD_IS_AT(S, ops, 0); \
    FIELD_IS_AT(S, head_inputs, 520); \
    FIELD_IS_AT(S, pages, 568); \
    FIELD_IS_AT(S, k_cache, 584); \
    FIELD_IS_AT(S, v_cache, 592); \
    FIELD_IS_AT(S, sinks, 600); \
    FIELD_IS_AT(S, n_ops, 608); \
    FIELD_IS_AT(S, n_head, 612); \
    FIELD_IS_AT(S, n_head_kv, 616); \
    FIELD_IS_AT(S, head_dim, 620); \
    FIELD_IS_AT(S, mask, 624); \
    FIELD_IS_AT(S, mask_positions, 628); \
    FIELD_IS_AT(S, activation, 632); \
    FIELD_IS_AT(S, soft_cap, 636); \
    FIELD_IS_AT(S, residual_scale, 640); \
    FIELD_IS_AT(S, heads_per_kv_head, 644); \
    FIELD_IS_AT(S, head_groups_per_kv_head, 648); \
    FIELD_IS_AT(S, tasks_per_split, 652); \
    FIELD_IS_AT(S, inverse_head_dim, 656); \
    FIELD_IS_AT(S, activation_limit, 660); \
    FIELD_IS_AT(S, expert_bias, 664); \
    FIELD_IS_AT(S, route, 688)

// decode.cuh
#define LAYOUT_OF_DecodeArgs(S) SIZE_IS(S, 208); \
    FIELD_IS_AT(S, layers, 0); \
    FIELD_IS_AT(S, matrices, 8); \
    FIELD_IS_AT(S, table, 16); \
    FIELD_IS_AT(S, token, 40); \
    FIELD_IS_AT(S, logits, 48); \
    FIELD_IS_AT(S, ids, 56); \
    FIELD_IS_AT(S, best_words, 64); \
    FIELD_IS_AT(S, qkv, 72); \
    FIELD_IS_AT(S, attention, 80); \
    FIELD_IS_AT(S, attention_max_sums, 88); \
    FIELD_IS_AT(S, n_layer, 96); \
    FIELD_IS_AT(S, n_embd, 100); \
    FIELD_IS_AT(S, n_matrices, 104); \
    FIELD_IS_AT(S, tag, 108); \
    FIELD_IS_AT(S, stores_next_token, 112); \
    FIELD_IS_AT(S, stage_bytes, 116); \
    FIELD_IS_AT(S, stages_per_warp, 120); \
    FIELD_IS_AT(S, gate_to_up_floats, 124); \
    FIELD_IS_AT(S, attention_copy_words, 128); \
    FIELD_IS_AT(S, max_sums_copy_words, 132); \
    FIELD_IS_AT(S, inputs_at, 136); \
    FIELD_IS_AT(S, input_stride, 140); \
    FIELD_IS_AT(S, regions_at, 144); \
    FIELD_IS_AT(S, residual_at, 152); \
    FIELD_IS_AT(S, shares_at, 156); \
    FIELD_IS_AT(S, spans_at, 160); \
    FIELD_IS_AT(S, head_constants_at, 164); \
    FIELD_IS_AT(S, barriers_at, 168); \
    FIELD_IS_AT(S, routing_at, 172); \
    FIELD_IS_AT(S, embedding_scale, 176); \
    FIELD_IS_AT(S, logit_scale, 180); \
    FIELD_IS_AT(S, logit_cap, 184); \
    FIELD_IS_AT(S, n_tokens, 188); \
    FIELD_IS_AT(S, first_step_number, 192); \
    FIELD_IS_AT(S, page_to_merge_time, 196); \
    FIELD_IS_AT(S, max_stages_in_flight, 200); \
    FIELD_IS_AT(S, first_best_place, 204)

// decode_rows.cuh
#define LAYOUT_OF_RankShare(S) SIZE_IS(S, 104); \
    FIELD_IS_AT(S, exchange, 0); \
    FIELD_IS_AT(S, first_vocab_row, 96); \
    FIELD_IS_AT(S, unused, 100)

// decode_on_ranks.cu
#define LAYOUT_OF_DecodeOnRanksArgs(S) SIZE_IS(S, 312); \
    FIELD_IS_AT(S, decode, 0); \
    FIELD_IS_AT(S, ranks, 208)

// encoder.cu
#define LAYOUT_OF_ElementsArgs(S) SIZE_IS(S, 64); \
    FIELD_IS_AT(S, x, 0); \
    FIELD_IS_AT(S, y, 8); \
    FIELD_IS_AT(S, out, 16); \
    FIELD_IS_AT(S, packed, 24); \
    FIELD_IS_AT(S, n_rows, 32); \
    FIELD_IS_AT(S, width, 36); \
    FIELD_IS_AT(S, y_stride, 40); \
    FIELD_IS_AT(S, function, 44); \
    FIELD_IS_AT(S, a, 48); \
    FIELD_IS_AT(S, b, 52); \
    FIELD_IS_AT(S, n_token_tiles, 56); \
    FIELD_IS_AT(S, unused, 60)

// encoder.cu
#define LAYOUT_OF_PatchesArgs(S) SIZE_IS(S, 56); \
    FIELD_IS_AT(S, rgb, 0); \
    FIELD_IS_AT(S, out, 8); \
    FIELD_IS_AT(S, width, 16); \
    FIELD_IS_AT(S, height, 20); \
    FIELD_IS_AT(S, side, 24); \
    FIELD_IS_AT(S, pixel_first, 28); \
    FIELD_IS_AT(S, mean, 32); \
    FIELD_IS_AT(S, std, 44)

// encoder.cu
#define LAYOUT_OF_SumRowsArgs(S) SIZE_IS(S, 56); \
    FIELD_IS_AT(S, x, 0); \
    FIELD_IS_AT(S, rows, 8); \
    FIELD_IS_AT(S, weights, 16); \
    FIELD_IS_AT(S, out, 24); \
    FIELD_IS_AT(S, n_rows, 32); \
    FIELD_IS_AT(S, width, 36); \
    FIELD_IS_AT(S, n, 40); \
    FIELD_IS_AT(S, out_stride, 44); \
    FIELD_IS_AT(S, divisor, 48); \
    FIELD_IS_AT(S, unused, 52)

// encoder.cu
#define LAYOUT_OF_InterleaveArgs(S) SIZE_IS(S, 32); \
    FIELD_IS_AT(S, x, 0); \
    FIELD_IS_AT(S, out, 8); \
    FIELD_IS_AT(S, n_rows, 16); \
    FIELD_IS_AT(S, width, 20); \
    FIELD_IS_AT(S, n, 24); \
    FIELD_IS_AT(S, unused, 28)

// encoder.cu
#define LAYOUT_OF_RotateArgs(S) SIZE_IS(S, 32); \
    FIELD_IS_AT(S, x, 0); \
    FIELD_IS_AT(S, table, 8); \
    FIELD_IS_AT(S, n_rows, 16); \
    FIELD_IS_AT(S, width, 20); \
    FIELD_IS_AT(S, head_dim, 24); \
    FIELD_IS_AT(S, block, 28)

// encoder_units.cuh
#define LAYOUT_OF_EncoderTile(S) SIZE_IS(S, 16); \
    FIELD_IS_AT(S, query, 0); \
    FIELD_IS_AT(S, n, 4); \
    FIELD_IS_AT(S, key, 8); \
    FIELD_IS_AT(S, n_keys, 12)

// encoder_attention.cu
#define LAYOUT_OF_EncoderAttentionArgs(S) SIZE_IS(S, 64); \
    FIELD_IS_AT(S, q, 0); \
    FIELD_IS_AT(S, k, 8); \
    FIELD_IS_AT(S, v, 16); \
    FIELD_IS_AT(S, out, 24); \
    FIELD_IS_AT(S, tiles, 32); \
    FIELD_IS_AT(S, n_queries, 40); \
    FIELD_IS_AT(S, n_keys, 44); \
    FIELD_IS_AT(S, width, 48); \
    FIELD_IS_AT(S, kv_width, 52); \
    FIELD_IS_AT(S, head_dim, 56); \
    FIELD_IS_AT(S, scale, 60)

// encoder_units.cuh
#define LAYOUT_OF_EncoderHeadsArgs(S) SIZE_IS(S, 48); \
    FIELD_IS_AT(S, k, 0); \
    FIELD_IS_AT(S, v, 8); \
    FIELD_IS_AT(S, k_heads, 16); \
    FIELD_IS_AT(S, v_heads, 24); \
    FIELD_IS_AT(S, n_keys, 32); \
    FIELD_IS_AT(S, width, 36); \
    FIELD_IS_AT(S, head_dim, 40); \
    FIELD_IS_AT(S, padded, 44)

// encoder_units.cuh
#define LAYOUT_OF_EncoderUnitsArgs(S) SIZE_IS(S, 80); \
    FIELD_IS_AT(S, q, 0); \
    FIELD_IS_AT(S, k_heads, 8); \
    FIELD_IS_AT(S, v_heads, 16); \
    FIELD_IS_AT(S, out, 24); \
    FIELD_IS_AT(S, packed, 32); \
    FIELD_IS_AT(S, tiles, 40); \
    FIELD_IS_AT(S, n_queries, 48); \
    FIELD_IS_AT(S, n_keys, 52); \
    FIELD_IS_AT(S, width, 56); \
    FIELD_IS_AT(S, kv_width, 60); \
    FIELD_IS_AT(S, head_dim, 64); \
    FIELD_IS_AT(S, n_token_tiles, 68); \
    FIELD_IS_AT(S, scale, 72); \
    FIELD_IS_AT(S, unused, 76)
