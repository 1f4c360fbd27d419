//! Models that several cards share (tensor parallelism).

use std::sync::Arc;
use std::time::{Duration, Instant};

use metal_attention::{CudaDevice, CudaForwardPassOptions, ForwardError, TensorParallelPass, Watch};

use super::*;

/// Cards there are to test.
fn n_ranks() -> usize {
    if has_cuda() { cuda_summaries().map_or(0, |found| found.len()) } else { 0 }
}

/// Whether there are so many cards to test.
fn has_cards(n: usize) -> bool {
    let there = n_ranks();
    if there < n {
        metal_attention_testing::skip(&format!("{there} of {n} cards"));
    }
    there >= n
}

fn shared(n_ranks: usize, cache_type: CacheType, exact: bool) -> EngineOptions {
    EngineOptions { n_ranks, ..options(Device::Cuda(0), cache_type, exact) }
}

/// Holds a model that cards share to what the CPU gives, as `compare` holds one card to it, by as many cards as there are.
fn compare_cards(what: &str, model: &Model, cards: &[usize]) {
    for (cache_type, exact, tolerance) in
        [(CacheType::F32, true, 1e-10), (CacheType::F16, true, 1e-5), (CacheType::F16, false, 1e-5)]
    {
        let pass = |options: &EngineOptions| model.forward_pass(options).unwrap_or_else(|e| panic!("{what}: {e}"));
        let want = logits(&mut *pass(&options(Device::Cpu, cache_type, true)));
        for &n in cards.iter().filter(|&&n| n <= n_ranks()) {
            let mut pass = pass(&shared(n, cache_type, exact));
            let error = nmse(&logits(&mut *pass), &want);
            assert!(error <= tolerance, "{what}, {n} cards, cache {cache_type}, exact {exact}: NMSE {error:e}");
        }
    }
}

#[test]
fn cards_that_share_a_model_give_the_logits_of_the_cpu() {
    if !has_cards(2) {
        return;
    }
    let small = small();
    let qwen = |architecture| ModelShape { architecture, ..small.clone() };
    for (what, shape, ty, cards) in [
        ("F32", small.clone(), F32, &[2, 4][..]),
        ("F16", small.clone(), F16, &[2]),
        ("Q8_0", small.clone(), Q8_0, &[4]),
        ("Q4_0", small.clone(), Q4_0, &[2]),
        // Blocks of 256: attention's output cannot be cut.
        ("Q4_K", small.clone(), Q4_K, &[2]),
        ("Q6_K, heads of 128", ModelShape { head_dim: 128, ..small.clone() }, Q6_K, &[2]),
        (
            "unlike shares",
            ModelShape { n_head: 6, n_head_kv: 3, n_ff: 480, n_vocab: 1010, ..small.clone() },
            Q8_0,
            &[2],
        ),
        ("normed heads", qwen("qwen3"), Q8_0, &[2]),
        ("biases", qwen("qwen2"), Q4_0, &[2]),
        ("a window", small.clone(), TensorType::Q5_0, &[2]),
    ] {
        let window = if what == "a window" { 70 } else { 0 };
        compare_cards(what, &model(&shape, ty, window), cards);
    }
}

/// What is too much for a word each is summed slice by slice, the last of them shorter and with a part of a chunk; in micro-batches of
/// several lengths, so that tags of exchanges before are there.
#[test]
fn cards_sum_long_prompts_in_slices() {
    if !has_cards(2) {
        return;
    }
    let shape = ModelShape { n_layer: 1, n_embd: 1028, n_ff: 256, ..small() };
    let model = model(&shape, F16, 0);
    let prompt: Vec<u32> = (0..700).map(|i| (i * i * 7 + 3) % 1000).collect();
    let last_logits = |options: &EngineOptions| {
        let options = EngineOptions { n_ctx: Some(800), n_seq: 1, n_ubatch: Some(500), ..options.clone() };
        let mut pass = model.forward_pass(&options).unwrap();
        pass.forward_prompt(&prompt).unwrap();
        (0..3).flat_map(|id| pass.forward_token(id).unwrap().to_vec()).collect::<Vec<_>>()
    };
    let want = last_logits(&options(Device::Cpu, CacheType::F32, true));
    for n in [2, 3, 4].into_iter().filter(|&n| n <= n_ranks()) {
        for (exact, tolerance) in [(true, 1e-10), (false, 1e-5)] {
            let got = last_logits(&shared(n, CacheType::F32, exact));
            let error = nmse(&got, &want);
            assert!(error <= tolerance, "{n} cards, exact {exact}: NMSE {error:e}");
        }
    }
}

/// Norms of sums, layers side by side, biases of what is summed, several streams; what cannot be cut is whole on each card.
#[test]
fn cards_share_layers_of_every_kind() {
    if !has_cards(2) {
        return;
    }
    let experts = [("expert_count", 8), ("expert_used_count", 3), ("expert_feed_forward_length", 64)];
    let shared_expert = [
        ("expert_count", 6),
        ("expert_used_count", 2),
        ("expert_feed_forward_length", 72),
        ("expert_shared_feed_forward_length", 40),
    ];
    let latent = [
        ("attention.head_count_kv", 1),
        ("attention.q_lora_rank", 20),
        ("attention.kv_lora_rank", 24),
        ("attention.key_length_mla", 24),
        ("attention.value_length_mla", 12),
        ("attention.key_length", 32),
        ("attention.value_length", 24),
        ("rope.dimension_count", 8),
        ("leading_dense_block_count", 1),
        ("expert_count", 4),
        ("expert_used_count", 2),
        ("expert_feed_forward_length", 16),
        ("expert_shared_count", 1),
    ];
    for (what, architecture, n_layer, keys) in [
        ("gemma2", "gemma2", 3, &[("attention.sliding_window", 40)][..]),
        ("gemma3n", "gemma3n", 5, &STREAMS),
        ("olmo2", "olmo2", 2, &[]),
        ("command-r", "command-r", 2, &[]),
        ("gpt2", "gpt2", 2, &[("context_length", 512)]),
        ("bloom", "bloom", 2, &[]),
        ("qwen3moe", "qwen3moe", 2, &experts),
        ("qwen2moe", "qwen2moe", 2, &shared_expert),
        ("latent attention whole", "deepseek2", 2, &latent),
        ("gates of queries", "qwen35", 2, &crate::toys::GATED_ATTENTION),
    ] {
        compare_cards(what, &random_model(&crate::toys::metadata(architecture, n_layer, keys), F16, 1.0), &[2]);
    }
}

/// Recurrent layers are whole on each card, with states of their own.
#[test]
fn cards_repeat_what_cannot_be_cut() {
    if !has_cards(2) {
        return;
    }
    let linear = [("wkv.head_size", 8), ("time_mix_extra_dim", 8), ("time_decay_extra_dim", 4)];
    let model = random_model(&crate::toys::metadata("rwkv6qwen2", 2, &linear), F16, 1.0);
    let logits = |options: &EngineOptions| {
        let mut pass = model.forward_pass(options).unwrap();
        let prompt: Vec<u32> = (0..70).map(|i| i * 11 % 96).collect();
        pass.forward_prompt(&prompt).unwrap();
        (0..4).flat_map(|id| pass.forward_token(id).unwrap().to_vec()).collect::<Vec<_>>()
    };
    let want = logits(&options(Device::Cpu, CacheType::F32, true));
    let error = nmse(&logits(&shared(2, CacheType::F32, true)), &want);
    assert!(error <= 1e-10, "NMSE {error:e}");
}

/// Greedy steps of several sequences run ahead on all cards; prompts that begin alike share pages; ids are those of one card.
#[test]
fn greedy_texts_of_several_cards_are_those_of_one() {
    if !has_cards(2) {
        return;
    }
    let model = model(&small(), Q4_0, 0);
    let texts = |n_ranks: usize| {
        let mut pass = model.forward_pass(&shared(n_ranks, CacheType::F16, true)).unwrap();
        let prompt: Vec<u32> = (0..90).map(|i| i * 11 % 1000).collect();
        assert!(pass.wake());
        let first = pass.forward_prompt(&prompt).unwrap();
        assert!(pass.wake());
        for seq in 1..3 {
            assert_eq!(pass.share_prefix(0, seq, 90 - seq).unwrap(), 90 - seq);
        }
        let mut ids = vec![first, 5, 7];
        let mut all = Vec::new();
        for step in 0..40 {
            if step == 25 {
                // Another way than the steps that run ahead go.
                for seq in 0..3 {
                    let n = pass.n_past(seq);
                    assert_eq!(pass.rewind(seq, n - 4), n - 4);
                }
                ids = vec![3, 4, 5];
            }
            let token = |(seq, &id): (usize, &u32)| BatchToken { id, seq, pos: pass.n_past(seq), output: true };
            let batch: Vec<_> = ids.iter().enumerate().map(token).collect();
            ids = pass.forward_greedy(&batch).unwrap();
            all.extend_from_slice(&ids);
        }
        all
    };
    assert_eq!(texts(2), texts(1));
}

/// Single tokens in one launch on each card give what they give in launches of their own, as far as what blocks tell each other goes; what is chosen is the highest
/// of all cards' logits, in launches of several tokens, too.
#[test]
fn cards_take_tokens_through_one_launch() {
    if !has_cards(2) {
        return;
    }
    let gpus: Vec<_> =
        (0..n_ranks().min(3)).map(|i| Arc::new(CudaDevice::open(i, Watch::default()).unwrap())).collect();
    let experts = [("expert_count", 20), ("expert_used_count", 3), ("expert_feed_forward_length", 192)];
    let heads = [("attention.key_length", 64), ("attention.value_length", 64), ("embedding_length", 160)];
    let of_experts: Vec<_> = heads.into_iter().chain(experts).chain([("attention.sliding_window", 70)]).collect();
    let unlike = ModelShape { architecture: "qwen2", n_head: 6, n_head_kv: 3, n_ff: 480, ..small() };
    for (what, model, most_cards) in [
        ("heads of 128", model(&ModelShape { head_dim: 128, n_vocab: 1010, ..small() }, Q6_K, 0), 2),
        ("biases, unlike shares", model(&unlike, F16, 0), 3),
        ("experts", random_model(&crate::toys::metadata("gpt-oss", 3, &of_experts), MXFP4, 1.0), 2),
    ] {
        for n in 2..=gpus.len().min(most_cards) {
            let pass = |persistent_kernel_limit| {
                let options =
                    CudaForwardPassOptions { n_ctx: 256, exact: true, persistent_kernel_limit, ..Default::default() };
                TensorParallelPass::new(&gpus[..n], model.spec(), model.weights(), &options).unwrap()
            };
            let (mut one, mut several) = (pass(None), pass(Some(0)));
            assert!(one.uses_persistent_kernel(0) && !several.uses_persistent_kernel(0), "{what}, {n} cards");
            let prompt: Vec<u32> = (0..20).map(|i| i * 11 % 90).collect();
            let mut id = one.forward_prompt(&prompt).unwrap();
            assert_eq!(several.forward_prompt(&prompt).unwrap(), id, "{what}, {n} cards");
            let mut errors = Vec::new();
            for pos in prompt.len()..prompt.len() + 5 {
                let batch = [BatchToken { id, seq: 0, pos, output: true }];
                let logits = one.forward(&batch).unwrap().row(0).to_vec();
                errors.push(nmse(&logits, several.forward(&batch).unwrap().row(0)));
                // The same token again, chosen from and listed.
                let best = highest(&logits, 5);
                one.rewind(0, pos);
                let lists = one.forward_top_k(&batch, 5).unwrap();
                assert!(lists.len() == 1 && lists[0] == best, "{what}, {n} cards");
                one.rewind(0, pos);
                let chosen = one.forward_greedy(&batch).unwrap();
                assert_eq!(chosen, [best[0].0], "{what}, {n} cards");
                id = chosen[0];
            }
            errors.sort_by(f64::total_cmp);
            // What is rounded otherwise may turn a close choice of experts, of a token here and there.
            let (most, last) = (errors[errors.len() * 8 / 10], errors[errors.len() - 1]);
            assert!(most < 1e-7, "{what}, {n} cards: NMSE {most:e}, {last:e}");

            // Steps that run ahead give what each gives by itself.
            let texts = |one: &mut TensorParallelPass, at_once: bool| {
                one.rewind(0, prompt.len());
                let mut id = 7;
                let step = |pos: usize| {
                    let batch = [BatchToken { id, seq: 0, pos, output: true }];
                    id = if at_once {
                        one.forward_greedy(&batch).unwrap()[0]
                    } else {
                        highest(one.forward(&batch).unwrap().row(0), 1)[0].0
                    };
                    id
                };
                (prompt.len()..prompt.len() + 9).map(step).collect::<Vec<_>>()
            };
            let want = texts(&mut one, false);
            assert_eq!(texts(&mut one, true), want, "{what}, {n} cards");
        }
    }
}

/// Models that share the same cards, asked from several threads, one with steps that run ahead and one with prompts: neither waits where
/// the other has filled a card.
#[test]
fn models_on_the_same_cards_take_turns() {
    if !has_cards(2) {
        return;
    }
    let model = model(&small(), Q4_0, 0);
    let texts = |prompt_length: u32, n_texts: usize, n_tokens: usize| {
        let mut pass = model.forward_pass(&shared(2, CacheType::F16, false)).unwrap();
        let prompt: Vec<u32> = (0..prompt_length).map(|i| i * 11 % 1000).collect();
        let mut all = Vec::new();
        for _ in 0..n_texts {
            assert_eq!(pass.rewind(0, 0), 0);
            let mut id = pass.forward_prompt(&prompt).unwrap();
            for pos in prompt.len()..prompt.len() + n_tokens {
                id = pass.forward_greedy(&[BatchToken { id, seq: 0, pos, output: true }]).unwrap()[0];
                all.push(id);
            }
        }
        all
    };
    let kinds = [(5, 1, 60), (90, 15, 2), (20, 4, 10)];
    let want = kinds.map(|(length, n, tokens)| texts(length, n, tokens));
    std::thread::scope(|scope| {
        let texts = &texts;
        let threads = kinds.map(|(length, n, tokens)| scope.spawn(move || texts(length, n, tokens)));
        assert_eq!(threads.map(|thread| thread.join().unwrap()), want);
    });
}

/// A card that does not come to a step ends it on all, and leaves the cache as it was.
#[test]
fn a_card_that_fails_ends_the_step_on_all() {
    if !has_cards(2) {
        return;
    }
    let model = model(&small(), Q8_0, 0);
    let options = CudaForwardPassOptions { n_ctx: 256, n_seq: 2, ..Default::default() };
    let batch = |start: usize, n: usize| {
        let token = |pos| BatchToken { id: (pos * 7 % 1000) as u32, seq: 0, pos, output: pos + 1 == start + n };
        (start..start + n).map(token).collect::<Vec<_>>()
    };
    let mut want = Vec::new();
    for failing in [None, Some(0), Some(1)] {
        let watches = [Watch::default(), Watch::default()];
        let open = |i: usize| Arc::new(CudaDevice::open(i, watches[i].clone()).unwrap());
        let mut cards = TensorParallelPass::new(&[open(0), open(1)], model.spec(), model.weights(), &options).unwrap();
        cards.forward(&batch(0, 40)).unwrap();
        if let Some(card) = failing {
            watches[card].cancel();
            let begun = Instant::now();
            for step in [batch(40, 30), batch(40, 1)] {
                assert_eq!(cards.forward(&step).err(), Some(ForwardError::Cancelled), "card {card}");
                assert_eq!(cards.forward_greedy(&step).err(), Some(ForwardError::Cancelled), "card {card}");
                assert_eq!(cards.n_past(0), 40);
            }
            assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
            watches[card].resume();
        }
        // All go on from where they were.
        let mut given = Vec::new();
        for step in [batch(40, 30), batch(70, 1), batch(71, 1), batch(72, 1)] {
            given.extend_from_slice(cards.forward(&step).unwrap().as_slice());
        }
        if failing.is_none() {
            want = given.clone();
        }
        assert!(given == want, "{failing:?}");
    }
}

#[test]
fn what_cards_cannot_share_is_refused_by_name() {
    let refused = |model: &Model, options: &EngineOptions| model.forward_pass(options).err().expect("a refusal");
    let dense = model(&small(), Q4_0, 0);
    let on_cpu = EngineOptions { n_ranks: 2, ..options(Device::Cpu, CacheType::F16, false) };
    let error = refused(&dense, &on_cpu);
    assert!(matches!(error, Error::TensorParallelWithoutCuda { device: Device::Cpu, n_ranks: 2 }), "{error}");
    if !has_cards(4) {
        return;
    }
    // Two blocks of 256.
    let error = refused(&model(&small(), Q4_K, 0), &shared(4, CacheType::F16, false));
    assert!(matches!(error, Error::Cuda(CudaError::Indivisible { n_ranks: 4 })), "{error}");
    let error = refused(&dense, &EngineOptions { device: Device::Cuda(99), ..shared(2, CacheType::F16, false) });
    assert!(matches!(error, Error::Cuda(CudaError::NoDevice { ordinal: 99, .. })), "{error}");
    let ssm = [("ssm.conv_kernel", 4), ("ssm.inner_size", 64), ("ssm.state_size", 16), ("ssm.time_step_rank", 4)];
    let recurrent = crate::toys::metadata("mamba", 2, &ssm);
    let error = refused(&random_model(&recurrent, F16, 1.0), &shared(2, CacheType::F16, false));
    assert!(matches!(error, Error::Cuda(CudaError::Indivisible { n_ranks: 2 })), "{error}");
}
