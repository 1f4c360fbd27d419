//! `kv_cache_copy` and `buffer_copy`, which must keep every bit.

use crate::support::{GROUP, batch_with_pages, poisoned, random, run, shuffled_pages, variants};
use metal_attention_model::{BatchToken, CacheType, PAGE, RopeLayout};
use metal_attention_wgpu::kernels::{AttentionBuffers, AttentionShape, buffer_copy, kv_cache_copy, kv_cache_copy_twin};

fn shape(n_head: usize, n_head_kv: usize, head_dim: usize, cache: CacheType) -> AttentionShape {
    AttentionShape {
        n_head,
        n_head_kv,
        head_dim,
        scale: 1.0,
        soft_cap: None,
        sinks: false,
        window: None,
        n_ctx: 140,
        group: GROUP,
        n_rot: 0,
        rope_layout: RopeLayout::Interleaved,
        qk_norm_eps: None,
        gated: false,
        cache,
        n_trailing: 0,
    }
}

/// Copies the keys and values of a batch into a cache of three sequences that is filled with ones, and compares all its
/// bytes.
fn check(gpu: &metal_attention_wgpu::WgpuDevice, shape: AttentionShape, tokens: &[BatchToken], qkv: &[f32]) {
    let pages = shuffled_pages(3, shape.n_ctx);
    let bytes = shape.cache_bytes(pages.concat().len()) as usize;
    let mut want = [vec![0xffu8; bytes], vec![0xffu8; bytes]];
    let (keys, values) = (gpu.upload("keys", &want[0]).unwrap(), gpu.upload("values", &want[1]).unwrap());
    let batch = batch_with_pages(gpu, tokens, shape.n_ctx, &pages);
    let qkv_buffer = gpu.upload("qkv", qkv).unwrap();
    let unused = gpu.buffer("unused", 16).unwrap();
    let buffers = AttentionBuffers {
        qkv: &qkv_buffer,
        rope: &unused,
        qk_norm: None,
        sinks_and_slopes: None,
        keys: &keys,
        values: &values,
        attention_out: &unused,
        partial: &unused,
        last_seen: &unused,
        batch: batch.buffer(),
    };
    run(gpu, &[kv_cache_copy(gpu, &shape, &buffers).unwrap()], tokens.len());
    for (token, row) in tokens.iter().zip(qkv.chunks(shape.qkv_len())) {
        let heads = row.chunks(shape.head_dim).skip(shape.n_head).enumerate();
        for (i, head) in heads {
            let row = kv_cache_copy_twin(&shape, head);
            let page = pages[token.seq][token.pos / PAGE];
            let at = shape.cache_row(page, i % shape.n_head_kv, token.pos) * shape.cache.bytes();
            want[i / shape.n_head_kv][at..at + row.len()].copy_from_slice(&row);
        }
    }
    for (what, buffer, want) in [("keys", &keys, &want[0]), ("values", &values, &want[1])] {
        let got: Vec<u8> = gpu.read(buffer, bytes).unwrap();
        let wrong = got.iter().zip(want).position(|(g, w)| g != w);
        assert_eq!(wrong, None, "{what} of {shape:?}, {} tokens", tokens.len());
    }
}

#[test]
fn keys_and_values_of_several_sequences_are_written_to_their_rows() {
    // Sequence 2 from position 60, sequence 0 from 0, then one token of sequence 2 again; sequence 1 has none.
    let mut tokens: Vec<_> = (60..67).map(|pos| BatchToken { id: 0, seq: 2, pos, output: false }).collect();
    tokens.extend((0..33).map(|pos| BatchToken { id: 0, seq: 0, pos, output: false }));
    tokens.push(BatchToken { id: 0, seq: 2, pos: 139, output: true });
    for gpu in variants() {
        for cache in [CacheType::F32, CacheType::F16] {
            for (n_head, n_head_kv, head_dim) in [(1, 1, 1), (2, 1, 31), (3, 3, 20), (9, 3, 64), (8, 2, 130)] {
                let shape = shape(n_head, n_head_kv, head_dim, cache);
                for n in [1, 2, 3, 7, 8, tokens.len()] {
                    check(gpu, shape, &tokens[..n], &random(n as u64, n * shape.qkv_len()));
                }
            }
        }
    }
}

/// Every 16-bit float, the midpoints of neighbouring ones, and the 32-bit neighbours of both; infinities and 32-bit
/// subnormals.
#[test]
fn numbers_of_all_kinds_round_to_the_nearest_f16() {
    let mut numbers: Vec<f32> = Vec::new();
    for bits in 0..=u16::MAX {
        let half = half::f16::from_bits(bits);
        let tie = f32::from_bits(half.to_f32().to_bits() + (1 << 12));
        let between = half.to_f32().midpoint(half::f16::from_bits(bits.wrapping_add(1)).to_f32());
        for x in [half.to_f32(), tie, between] {
            let bits = x.to_bits();
            numbers.extend([x, f32::from_bits(bits.wrapping_add(1)), f32::from_bits(bits.wrapping_sub(1))]);
        }
    }
    numbers.extend([1e-40, -1e-40, f32::MAX, f32::MIN, f32::INFINITY, f32::NEG_INFINITY, 65519.996, 65520.0]);
    // The bits of a NaN are not specified.
    numbers.retain(|x| !x.is_nan());
    let tokens: Vec<_> = (0..160).map(|pos| BatchToken { id: 0, seq: 1, pos, output: false }).collect();
    for gpu in variants() {
        for cache in [CacheType::F16, CacheType::F32] {
            let mut shape = AttentionShape { n_ctx: 160, ..shape(8, 8, 1, cache) };
            shape.head_dim = numbers.len().div_ceil(16 * tokens.len());
            let mut qkv = vec![0.0; tokens.len() * shape.qkv_len()];
            let value_elements = (0..qkv.len()).filter(|i| i % shape.qkv_len() >= shape.n_head * shape.head_dim);
            for (i, &x) in value_elements.zip(&numbers) {
                qkv[i] = x;
            }
            check(gpu, shape, &tokens, &qkv);
        }
    }
}

#[test]
fn buffer_copy_keeps_every_bit() {
    for gpu in variants() {
        for n in [1, 31, 32, 33, 576, 49_152, 1 << 21] {
            let words: Vec<u32> = (0..n as u32).map(|i| i.wrapping_mul(0x9E37_79B9) ^ 0x7fc0_0000).collect();
            let source = gpu.upload("source", &words).unwrap();
            let destination = poisoned(gpu, n + 4);
            run(gpu, &[buffer_copy(gpu, n, &source, &destination).unwrap()], 1);
            let got: Vec<u32> = gpu.read(&destination, n + 4).unwrap();
            assert!(got[..n] == words[..], "{n} words");
            assert_eq!(got[n..], [f32::NAN.to_bits(); 4], "words beyond {n}");
        }
    }
}
