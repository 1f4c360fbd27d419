//! Models with special layers on the GPU: their results equal the CPU's, and the generated tokens do not depend on other
//! sequences in the cache. Without a GPU the tests are skipped; in CI that is a failure.

use std::sync::Arc;

use crate::toys::{GATED_ATTENTION, Toy, batch, metadata, nmse, some_ids, toy};
use crate::wgpu::device::gpu;
use metal_attention::wgpu::WgpuDevice;
use metal_attention::{
    BatchToken, CacheType, CpuExecutor, CpuForwardPass, ForwardError, ForwardPass, SessionOptions, WgpuExecutor,
    WgpuForwardPass,
};
use metal_attention_cpu::CpuOptions;

const N_CTX: usize = 512;

/// Causal models with: sliding windows in every second layer and capped scores; latent attention; several residual streams
/// (AltUp), sparse activations and layers that read the KV caches of others; norms of whole query and key rows; gated
/// attention.
fn causal() -> Vec<Toy> {
    let latent = [
        ("attention.head_count_kv", 1),
        ("attention.kv_lora_rank", 24),
        ("attention.q_lora_rank", 20),
        ("attention.key_length_mla", 24),
        ("attention.value_length_mla", 12),
        ("attention.key_length", 32),
        ("attention.value_length", 24),
        ("rope.dimension_count", 8),
        ("leading_dense_block_count", 2),
        ("expert_count", 4),
        ("expert_used_count", 2),
        ("expert_feed_forward_length", 16),
        ("expert_shared_count", 1),
    ];
    let streams = [
        ("attention.sliding_window", 40),
        ("attention.shared_kv_layers", 2),
        ("embedding_length_per_layer_input", 12),
        ("altup.num_inputs", 4),
        ("laurel.rank", 6),
    ];
    vec![
        toy("gemma2", &metadata("gemma2", 3, &[("attention.sliding_window", 40)])),
        toy("deepseek2", &metadata("deepseek2", 2, &latent)),
        toy("gemma3n", &metadata("gemma3n", 5, &streams)),
        toy("olmo2", &metadata("olmo2", 2, &[])),
        toy("gates of attention's result", &metadata("qwen35", 2, &GATED_ATTENTION)),
    ]
}

/// The forward pass on the GPU. Checks that it uses the memory that `memory_needed` predicts.
fn on_gpu(gpu: &Arc<WgpuDevice>, toy: &Toy, n_seq: usize, n_pages: usize, cache_type: CacheType) -> WgpuForwardPass {
    let options = SessionOptions {
        n_ctx: N_CTX,
        n_seq,
        n_cache: Some(n_pages * 64),
        cache_type,
        n_ubatch: 48,
        ..Default::default()
    };
    let needed = WgpuExecutor::memory_needed(&toy.model, &options, gpu.summary().max_binding);
    let pass =
        WgpuExecutor::session(Arc::clone(gpu), &toy.model, &options).unwrap_or_else(|e| panic!("{}: {e}", toy.name));
    assert_eq!(needed.kv_cache, pass.memory_use().kv_cache, "{}", toy.name);
    pass
}

fn on_cpu(toy: &Toy, n_seq: usize) -> CpuForwardPass {
    let options = SessionOptions { n_ctx: N_CTX, n_seq, cache_type: CacheType::F32, exact: true, ..Default::default() };
    CpuExecutor::session(&CpuOptions { n_threads: 1, ..Default::default() }, &toy.model, &options).unwrap()
}

/// The logits of prompts and single tokens of two sequences, and the hidden states of a batch of both.
fn results(pass: &mut dyn ForwardPass) -> [Vec<f32>; 2] {
    let ids = some_ids(400);
    let mut logits = Vec::new();
    for (seq, range) in [(0, 0..90), (1, 3..20), (0, 90..91), (1, 20..25), (0, 91..280), (0, 280..281), (1, 25..26)] {
        let batch = batch(pass, seq, &ids[range], true);
        logits.extend_from_slice(pass.forward(&batch).unwrap().as_slice());
    }
    let both = [batch(pass, 0, &ids[281..282], true), batch(pass, 1, &ids[26..27], true)].concat();
    logits.extend_from_slice(pass.forward(&both).unwrap().as_slice());
    pass.reset();
    let batch = [batch(pass, 0, &ids[..60], true), batch(pass, 1, &ids[7..19], false)].concat();
    [logits, pass.forward_hidden(&batch).unwrap()]
}

#[test]
fn causal_models_give_the_results_of_the_cpu() {
    let Some(gpu) = gpu() else { return };
    for toy in causal() {
        let want = results(&mut on_cpu(&toy, 2));
        let got = results(&mut on_gpu(&gpu, &toy, 2, 16, CacheType::F32));
        for (got, want) in got.iter().zip(&want) {
            let error = nmse(got, want);
            assert!(error < 1e-8, "{}: NMSE {error:e}", toy.name);
        }
    }
}

/// The `n` ids that greedy decoding generates after `ids` in an empty cache.
fn generate_alone(pass: &mut WgpuForwardPass, ids: &[u32], n: usize) -> Vec<u32> {
    pass.reset();
    let mut tokens = vec![pass.forward_prompt(ids).unwrap()];
    while tokens.len() < n {
        tokens.push(pass.forward_token_greedy(tokens[tokens.len() - 1]).unwrap());
    }
    tokens
}

#[test]
fn concurrent_sequences_generate_the_tokens_of_single_ones() {
    let Some(gpu) = gpu() else { return };
    for (toy, cache_type) in causal().iter().zip([CacheType::F32, CacheType::F16].into_iter().cycle()) {
        let mut pass = on_gpu(&gpu, toy, 1, 8, cache_type);
        let ids = some_ids(80);
        // (sequence, tokens of `ids` that its prompt begins with, the last token of its prompt)
        let prompts = [(0, 80, 5), (1, 80, 6), (2, 70, 7), (3, 64, 8)];
        let want = prompts.map(|(_, n, last)| generate_alone(&mut pass, &[&ids[..n], &[last]].concat(), 40));
        let mut pass = on_gpu(&gpu, toy, 4, 9, cache_type);
        pass.forward(&batch(&pass, 0, &ids, false)).unwrap();
        for (seq, n, _) in &prompts[1..] {
            pass.share_prefix(0, *seq, *n).unwrap();
        }
        let mut sequences = prompts.map(|(_, _, last)| vec![last]);
        for i in 0..40 {
            let token = |(seq, tokens): (usize, &Vec<u32>)| BatchToken {
                id: tokens[tokens.len() - 1],
                seq,
                pos: pass.n_past(seq),
                output: true,
            };
            let batch: Vec<_> = sequences.iter().enumerate().map(token).collect();
            // Seven of ten steps may be queued ahead; the others are not.
            let next = if i % 10 < 7 {
                pass.forward_greedy(&batch).unwrap()
            } else {
                pass.forward_top_k(&batch, 4).unwrap().iter().map(|list| list[0].0).collect()
            };
            sequences.iter_mut().zip(next).for_each(|(tokens, id)| tokens.push(id));
        }
        for (seq, (tokens, want)) in sequences.iter().zip(&want).enumerate() {
            assert_eq!(tokens[1..], want[..], "{}, sequence {seq}", toy.name);
        }
    }
}

#[test]
fn sequences_without_causal_masks_are_evaluated_whole() {
    let Some(gpu) = gpu() else { return };
    let toy = toy("gemma-embedding", &metadata("gemma-embedding", 3, &[("attention.sliding_window", 10)]));
    assert!(!toy.model.spec().is_causal());
    // Each sequence is longer than a micro-batch of a causal model, and both together are longer than any batch.
    let ids = some_ids(300);
    let hidden_states = |pass: &mut dyn ForwardPass| {
        let (a, b) = (batch(pass, 0, &ids, true), batch(pass, 1, &ids[20..290], true));
        let all = pass.forward_hidden(&[a, b].concat()).unwrap();
        let error = pass.forward_hidden(&batch(pass, 0, &ids[..2], true)).unwrap_err();
        assert!(matches!(error, ForwardError::NotFromStart { seq: 0, n_past: 300 }), "{error}");
        all
    };
    let want = hidden_states(&mut on_cpu(&toy, 2));
    let got = hidden_states(&mut on_gpu(&gpu, &toy, 2, 16, CacheType::F32));
    let error = nmse(&got, &want);
    assert!(error < 1e-9, "NMSE {error:e}");
}

#[test]
fn a_decode_step_of_an_encoder_is_refused() {
    let Some(gpu) = gpu() else { return };
    for (name, error) in
        [("bert", ForwardError::NoLogits), ("llama-embed", ForwardError::NotFromStart { seq: 0, n_past: 20 })]
    {
        let toy = toy(name, &metadata(name, 2, &[]));
        assert!(!toy.model.spec().is_causal(), "{name}");
        let check = |pass: &mut dyn ForwardPass| {
            pass.forward_hidden(&batch(pass, 0, &some_ids(20), false)).unwrap();
            assert_eq!(pass.forward_greedy(&batch(pass, 0, &some_ids(1), true)), Err(error.clone()), "{name}");
            assert_eq!(pass.n_past(0), 20, "{name}");
        };
        check(&mut on_cpu(&toy, 1));
        check(&mut on_gpu(&gpu, &toy, 1, 8, CacheType::F32));
    }
}
