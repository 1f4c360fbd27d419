//! `general_attention` with every mask and option, the kernels that prepare its inputs, and those of latent attention,
//! against their twins.

use crate::support::matrices::tensor;
use crate::support::{
    GROUP, batch_with_pages, nmse, on_variants, poisoned, random, run, run_sized, shuffled_pages, variants,
};
use metal_attention_gguf::TensorType;
use metal_attention_model::{
    BatchToken, CacheType, Mask, NormKind, NormOver, PAGE, QkNorm, QueryTemperature, Rope, RopeFactors, RopeLayout,
    RopeScaling,
};
use metal_attention_wgpu::kernels::{
    AttentionInputsBuffers, AttentionInputsShape, GeneralAttention, GeneralAttentionBuffers, HeadRows, KvInputs,
    LatentInputsBuffers, LatentInputsShape, attention_inputs, attention_inputs_twin, cached_row_twin,
    general_attention, general_attention_merge, general_attention_twin, head_products, head_products_twin,
    latent_inputs, latent_inputs_twin, n_splits,
};
use metal_attention_wgpu::{Arena, BatchBuffer, BatchDims, InputPlace, WgpuDevice, WgpuMatrix, wgpu};

const N_CTX: usize = 400;

/// The RoPE cos/sin table, `[N_CTX, n_rot]`.
fn rope_angles(n_rot: usize) -> Vec<f32> {
    let (layout, scaling, factors) = (RopeLayout::Halves, RopeScaling::None, RopeFactors::None);
    let rope = Rope { scaling, factors, ..Rope::new(n_rot, layout, 10_000.0) };
    rope.rotation(None).table(N_CTX)
}

/// Batch tokens `pos..pos + n` of a sequence.
fn batch_tokens(seq: usize, pos: usize, n: usize) -> Vec<BatchToken> {
    (pos..pos + n).map(|pos| BatchToken { id: 0, seq, pos, output: false }).collect()
}

/// The row of the RoPE table that rotates `token`, other than its index.
fn rope_row(token: &BatchToken) -> usize {
    token.pos * 2 + 7
}

/// Row `row` of a KV cache in floats.
fn cached_row(gpu: &WgpuDevice, cache: &wgpu::Buffer, ty: CacheType, row: usize, dim: usize) -> Vec<f32> {
    let padded = dim.next_multiple_of(4);
    let words: Vec<u32> = gpu.read(cache, cache.size() as usize / 4).unwrap();
    let bytes: &[u8] = &words.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<_>>()[row * padded * ty.bytes()..];
    match ty {
        CacheType::F32 => bytes.chunks(4).take(dim).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        CacheType::F16 => bytes.chunks(2).take(dim).map(|b| half::f16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
    }
}

/// Keys and values by sequence and KV head, then by position, as the twin reads them; and the same in the GPU's KV
/// cache.
struct KvCachePair {
    keys: Vec<Vec<Vec<f32>>>,
    values: Vec<Vec<Vec<f32>>>,
    gpu_keys: wgpu::Buffer,
    gpu_values: wgpu::Buffer,
}

/// A KV cache with random keys and values of the first `lens[seq]` positions of each sequence.
fn filled(gpu: &WgpuDevice, shape: &GeneralAttention, lens: &[usize], pages: &[Vec<u32>]) -> KvCachePair {
    let n_pages = pages.iter().flatten().count();
    let half = |dim: usize, seed: u64| {
        let padded = dim.next_multiple_of(4);
        let mut all = vec![0.0; n_pages * shape.n_head_kv * PAGE * padded];
        let mut rows = Vec::new();
        for (seq, &len) in lens.iter().enumerate() {
            for head in 0..shape.n_head_kv {
                let seed = seed + (seq * shape.n_head_kv + head) as u64;
                let values: Vec<Vec<f32>> =
                    random(seed, len * dim).chunks(dim).map(|row| cached_row_twin(shape.cache, row)).collect();
                for (pos, row) in values.iter().enumerate() {
                    let page = pages[seq][pos / PAGE] as usize;
                    all[((page * shape.n_head_kv + head) * PAGE + pos % PAGE) * padded..][..dim].copy_from_slice(row);
                }
                rows.push(values);
            }
        }
        let buffer = match shape.cache {
            CacheType::F32 => gpu.upload("cache", &all).unwrap(),
            CacheType::F16 => {
                let halves: Vec<u16> = all.iter().map(|&x| half::f16::from_f32(x).to_bits()).collect();
                gpu.upload("cache", &halves).unwrap()
            }
        };
        (rows, buffer)
    };
    let ((keys, gpu_keys), (values, gpu_values)) = (half(shape.key_dim, 100), half(shape.value_dim, 200));
    KvCachePair { keys, values, gpu_keys, gpu_values }
}

/// Runs random queries of `tokens` on the GPU and in the twin, and compares the results. `split`: split-KV with a
/// merge. Without it, some tokens attend to later ones. Positions are behind the slots.
fn check_attention(gpu: &WgpuDevice, shape: &GeneralAttention, lens: &[usize], tokens: &[BatchToken], split: bool) {
    let position = |t: usize| tokens[t].pos * 2 / 3;
    let ahead = |t: &BatchToken| if t.pos % 3 == 1 { (t.pos + 3 + t.pos % 40).min(lens[t.seq] - 1) } else { 0 };
    let last_seen: Vec<u32> = tokens.iter().map(|t| if split { 0 } else { ahead(t) as u32 }).collect();
    let pages = shuffled_pages(lens.len(), shape.n_ctx);
    let cache = filled(gpu, shape, lens, &pages);
    let n = tokens.len();
    let q: Vec<f32> = random(1, n * shape.n_head * shape.key_dim);
    let slopes = metal_attention_model::alibi_slopes(shape.n_head, 8.0);
    let sinks_and_slopes: Vec<f32> = slopes.iter().enumerate().flat_map(|(h, &s)| [h as f32 - 1.0, s]).collect();
    let (gq, gh) = (gpu.upload("q", &q).unwrap(), gpu.upload("heads", &sinks_and_slopes).unwrap());
    let attention_out = poisoned(gpu, n * shape.n_head * shape.value_dim);
    let partial = gpu.buffer("partial", 4 * (n * shape.partial_len()) as u64).unwrap();
    let batch = batch_with_pages(gpu, tokens, shape.n_ctx, &pages);
    batch.write_tokens_at(gpu, tokens, |t| InputPlace::of_text(position(t) as u32));
    let buffers = GeneralAttentionBuffers {
        queries: &gq,
        keys: &cache.gpu_keys,
        values: &cache.gpu_values,
        sinks_and_slopes: Some(&gh),
        attention_out: &attention_out,
        partial: &partial,
        last_seen: &gpu.upload("last seen", &last_seen).unwrap(),
        batch: batch.buffer(),
    };
    let mut dispatches = vec![general_attention(gpu, shape, split, &buffers).unwrap()];
    if split {
        dispatches.push(general_attention_merge(gpu, shape, &buffers).unwrap());
    }
    let last = tokens.iter().map(|t| t.pos).max().unwrap_or(0);
    let size =
        BatchDims { n_tokens: n as u32, n_outputs: 0, n_runs: 1, n_splits: if split { n_splits(last) } else { 1 } };
    run_sized(gpu, &dispatches, size);
    let mut want = Vec::new();
    for (t, &token) in tokens.iter().enumerate() {
        for h in 0..shape.n_head {
            let kv = token.seq * shape.n_head_kv + h / (shape.n_head / shape.n_head_kv);
            let q = &q[(t * shape.n_head + h) * shape.key_dim..][..shape.key_dim];
            let params = [sinks_and_slopes[2 * h], sinks_and_slopes[2 * h + 1]];
            let at = (position(t), last_seen[t] as usize);
            want.extend(general_attention_twin(shape, token, at, q, params, &cache.keys[kv], &cache.values[kv]));
        }
    }
    let error = nmse(&gpu.read::<f32>(&attention_out, want.len()).unwrap(), &want);
    // Exponentials and a tanh within a few units of 2^-24, of scores of some tens.
    assert!(error < 1e-10, "{shape:?}, split {split}: {error:e}");
}

#[test]
fn general_attention_matches_its_twin() {
    let plain = GeneralAttention {
        n_head: 4,
        n_head_kv: 2,
        key_dim: 16,
        value_dim: 16,
        scale: 0.5,
        mask: Mask::Causal,
        soft_cap: None,
        sinks: false,
        slopes: false,
        temperature: None,
        n_ctx: N_CTX,
        group: GROUP,
        cache: CacheType::F16,
    };
    let temperature = Some(QueryTemperature { scale: 0.3, length: 16, offset: 1 });
    let shapes = [
        plain,
        GeneralAttention { soft_cap: Some(2.0), mask: Mask::Window(37), cache: CacheType::F32, ..plain },
        GeneralAttention { sinks: true, mask: Mask::Chunk(50), n_head: 6, n_head_kv: 3, ..plain },
        GeneralAttention { slopes: true, temperature, n_head: 3, n_head_kv: 1, key_dim: 7, value_dim: 7, ..plain },
        GeneralAttention { n_head: 2, n_head_kv: 1, key_dim: 576, value_dim: 512, scale: 0.05, ..plain },
    ];
    for (gpu, shape) in on_variants(&shapes) {
        let decode_step = [batch_tokens(0, 299, 1), batch_tokens(1, 3, 1), batch_tokens(2, 256, 1)].concat();
        check_attention(gpu, &shape, &[300, 4, 257], &decode_step, true);
        check_attention(gpu, &shape, &[40, 4, 130], &[batch_tokens(0, 31, 9), batch_tokens(2, 1, 129)].concat(), false);
    }
    for (gpu, mask) in on_variants(&[Mask::Full, Mask::SymmetricWindow(20)]) {
        let shape = GeneralAttention { mask, slopes: true, ..plain };
        check_attention(
            gpu,
            &shape,
            &[40, 1, 150],
            &[batch_tokens(0, 0, 40), batch_tokens(1, 0, 1), batch_tokens(2, 0, 150)].concat(),
            false,
        );
    }
}

#[test]
fn attention_inputs_match_their_twin() {
    let plain = AttentionInputsShape {
        n_head: 4,
        n_head_kv: 2,
        head_dim: 16,
        rope: Some((16, RopeLayout::Halves)),
        qk_norm: None,
        qk_norm_bias: false,
        value_norm: None,
        clamp: None,
        kv: KvInputs::Own,
        n_ctx: N_CTX,
        group: GROUP,
        cache: CacheType::F32,
        n_trailing: 0,
    };
    let norm = |kind, over, after_rope| Some(QkNorm { kind, eps: 1e-3, over, after_rope });
    let shapes = [
        plain,
        AttentionInputsShape {
            rope: Some((6, RopeLayout::Interleaved)),
            clamp: Some(0.5),
            cache: CacheType::F16,
            ..plain
        },
        AttentionInputsShape { qk_norm: norm(NormKind::Rms, NormOver::Row, false), ..plain },
        AttentionInputsShape {
            qk_norm: norm(NormKind::Layer, NormOver::Row, false),
            qk_norm_bias: true,
            clamp: Some(0.8),
            ..plain
        },
        AttentionInputsShape {
            qk_norm: norm(NormKind::Layer, NormOver::EachHead, false),
            head_dim: 7,
            rope: None,
            ..plain
        },
        AttentionInputsShape { qk_norm: norm(NormKind::Rms, NormOver::Head, true), value_norm: Some(1e-3), ..plain },
        AttentionInputsShape {
            qk_norm: norm(NormKind::Rms, NormOver::Unweighted, true),
            kv: KvInputs::KeysAsValues,
            ..plain
        },
        AttentionInputsShape { value_norm: Some(1e-3), kv: KvInputs::KeysAsValues, head_dim: 300, ..plain },
        AttentionInputsShape { qk_norm: norm(NormKind::Rms, NormOver::Head, false), kv: KvInputs::None, ..plain },
    ];
    for (gpu, shape) in on_variants(&shapes) {
        let tokens = [batch_tokens(0, 70, 3), batch_tokens(1, 0, 2)].concat();
        let (n, dim) = (tokens.len(), shape.head_dim);
        let n_rot = shape.rope.map_or(0, |(n_rot, _)| n_rot);
        let table = rope_angles(n_rot);
        let qkv = random(1, n * shape.row());
        let weights = random(2, shape.weights_of_norm() * if shape.qk_norm_bias { 2 } else { 1 });
        let pages = shuffled_pages(2, N_CTX);
        let cache_len = pages.iter().flatten().count() * shape.n_head_kv * PAGE * dim.next_multiple_of(4);
        let cache = || gpu.buffer("cache", (cache_len * shape.cache.bytes()) as u64).unwrap();
        let (keys, values) = (cache(), cache());
        let [gqkv, grope, gw] = [&qkv, &table, &weights].map(|v| gpu.upload("x", v).unwrap());
        let queries = poisoned(gpu, n * shape.n_head * dim);
        let batch: BatchBuffer = batch_with_pages(gpu, &tokens, N_CTX, &pages);
        batch.write_tokens_at(gpu, &tokens, |t| InputPlace::of_text(rope_row(&tokens[t]) as u32));
        let buffers = AttentionInputsBuffers {
            qkv: &gqkv,
            queries: &queries,
            rope: shape.rope.map(|_| &grope),
            qk_norm: Some(&gw),
            cache: if shape.kv == KvInputs::None { None } else { Some((&keys, &values)) },
            batch: batch.buffer(),
        };
        run(gpu, &[attention_inputs(gpu, &shape, &buffers).unwrap()], n);
        let (mut got, mut want) = (gpu.read::<f32>(&queries, n * shape.n_head * dim).unwrap(), Vec::new());
        let mut cached = Vec::new();
        for (token, row) in tokens.iter().zip(qkv.chunks(shape.row())) {
            let angles = &table[rope_row(token) * n_rot..][..n_rot];
            let [q, k, v] = attention_inputs_twin(&shape, row, angles, &weights);
            want.extend(q);
            if shape.kv == KvInputs::None {
                continue;
            }
            let page = pages[token.seq][token.pos / PAGE] as usize;
            for h in 0..shape.n_head_kv {
                let at = (page * shape.n_head_kv + h) * PAGE + token.pos % PAGE;
                for (cache, half) in [(&keys, &k), (&values, &v)] {
                    got.extend(cached_row(gpu, cache, shape.cache, at, dim));
                    cached.extend(cached_row_twin(shape.cache, &half[h * dim..][..dim]));
                }
            }
        }
        want.extend(cached);
        let error = nmse(&got, &want);
        // An F16 that is rounded to the other side has an error of 2^-11 of itself, which happens to one in
        // thousands.
        let limit = if shape.cache == CacheType::F16 { 1e-8 } else { 1e-12 };
        assert!(error < limit, "{shape:?}: {error:e}");
    }
}

#[test]
fn latent_inputs_match_their_twin() {
    let halves = Some(RopeLayout::Halves);
    let cases = [
        (24, 8, 16, halves, CacheType::F32),
        (30, 6, 5, halves, CacheType::F32),
        (512, 64, 128, halves, CacheType::F16),
        (24, 8, 16, None, CacheType::F32),
        (512, 64, 128, None, CacheType::F16),
    ];
    for (gpu, (rank, n_rot, n_nope, layout, cache)) in on_variants(&cases) {
        let (n_head, shared_dim) = (3, n_rot);
        let shape = LatentInputsShape {
            n_head,
            n_nope,
            shared_dim,
            layout,
            rank,
            eps: 1e-3,
            n_ctx: N_CTX,
            group: GROUP,
            cache,
        };
        let tokens = [batch_tokens(0, 70, 3), batch_tokens(1, 0, 2)].concat();
        let n = tokens.len();
        let (table, pages) = (rope_angles(n_rot), shuffled_pages(2, N_CTX));
        let (q, kv, norm) = (random(1, n * n_head * (n_nope + n_rot)), random(2, n * (rank + n_rot)), random(3, rank));
        let [gq, gkv, gn, grope] = [&q, &kv, &norm, &table].map(|v| gpu.upload("x", v).unwrap());
        let n_pages = pages.iter().flatten().count();
        let half = |dim: usize| {
            gpu.buffer("cache", (n_pages * PAGE * dim.next_multiple_of(4) * cache.bytes()) as u64).unwrap()
        };
        let (keys, values) = (half(rank + n_rot), half(rank));
        let queries = poisoned(gpu, n * n_head * (rank + n_rot));
        let batch = batch_with_pages(gpu, &tokens, N_CTX, &pages);
        batch.write_tokens_at(gpu, &tokens, |t| InputPlace::of_text(rope_row(&tokens[t]) as u32));
        let buffers = LatentInputsBuffers {
            q: &gq,
            kv: &gkv,
            norm: &gn,
            queries: &queries,
            keys: &keys,
            values: &values,
            rope: &grope,
            batch: batch.buffer(),
        };
        run(gpu, &[latent_inputs(gpu, &shape, &buffers).unwrap()], n);
        let all: Vec<f32> = gpu.read(&queries, n * n_head * (rank + n_rot)).unwrap();
        let mut got: Vec<f32> = all.chunks(rank + n_rot).flat_map(|row| row[rank..].to_vec()).collect();
        let (mut want, mut rows) = (Vec::new(), Vec::new());
        for ((token, q), kv) in tokens.iter().zip(q.chunks(n_head * (n_nope + n_rot))).zip(kv.chunks(rank + n_rot)) {
            let (rotated, key) = latent_inputs_twin(&shape, q, kv, &norm, &table[rope_row(token) * n_rot..][..n_rot]);
            want.extend(rotated);
            let row = pages[token.seq][token.pos / PAGE] as usize * PAGE + token.pos % PAGE;
            got.extend(cached_row(gpu, &keys, cache, row, rank + n_rot));
            got.extend(cached_row(gpu, &values, cache, row, rank));
            rows.extend(cached_row_twin(cache, &key));
            rows.extend(cached_row_twin(cache, &key[..rank]));
        }
        want.extend(rows);
        let error = nmse(&got, &want);
        let limit = if cache == CacheType::F16 { 1e-8 } else { 1e-12 };
        assert!(error < limit, "{shape:?}: {error:e}");
    }
}

#[test]
fn head_products_match_their_twin() {
    for gpu in variants() {
        for (ty, n_in, n_out) in [(TensorType::F32, 5, 7), (TensorType::Q8_0, 32, 24), (TensorType::Q4_K, 256, 3)] {
            let shape = HeadRows { n_head: 3, in_head_stride: n_in + 2, out_head_stride: n_out + 1 };
            let matrices = tensor(ty, n_in, 3 * n_out, 4);
            let on_gpu = WgpuMatrix::concat(gpu, "W", &[&matrices], &mut Arena::default()).unwrap();
            let x = random(1, 4 * 3 * shape.in_head_stride);
            let (gx, y) = (gpu.upload("x", &x).unwrap(), poisoned(gpu, 4 * 3 * shape.out_head_stride));
            run(gpu, &head_products(gpu, &on_gpu, shape, &gx, &y).unwrap(), 4);
            let all: Vec<f32> = gpu.read(&y, 4 * 3 * shape.out_head_stride).unwrap();
            let got: Vec<f32> = all.chunks(shape.out_head_stride).flat_map(|row| row[..n_out].to_vec()).collect();
            let weights = matrices.to_f32();
            let rows = x.chunks(shape.in_head_stride).enumerate();
            let want: Vec<f32> = rows
                .flat_map(|(i, x)| head_products_twin(&weights[i % 3 * n_out * n_in..][..n_out * n_in], &x[..n_in]))
                .collect();
            let error = nmse(&got, &want);
            assert!(error < 1e-12, "{ty}: {error:e}");
        }
    }
}
