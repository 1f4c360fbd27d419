//! Tensor parallelism: models that several ranks (CUDA devices) share give the results of the CPU and of one device. The
//! module's name is a filter of `scripts/test`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use metal_attention::{
    CudaDevice, CudaTuning, ForwardError, SessionOptions, TensorParallelExecutor, TensorParallelPass, Watch,
};

use super::*;

/// Number of CUDA devices.
fn n_ranks() -> usize {
    if has_cuda() { cuda_summaries().map_or(0, |found| found.len()) } else { 0 }
}

/// Whether there are `n` devices; with fewer the test is recorded as skipped.
pub(crate) fn has_ranks(n: usize) -> bool {
    let n_devices = n_ranks();
    if n_devices < n {
        metal_attention_testing::skip(&format!("{n_devices} of {n} CUDA devices"));
    }
    n_devices >= n
}

/// Engine options with tensor parallelism.
fn shared(n_ranks: usize, cache_type: CacheType, exact: bool) -> EngineOptions {
    EngineOptions { n_ranks, ..options(Device::Cuda(0), cache_type, exact) }
}

/// Compares the logits of `model`, a case of a test by its index `i`, with the CPU's, as `compare` does, for each number of ranks in
/// `rank_counts` for which there
/// are devices.
fn compare_ranks(i: usize, what: &str, model: &Model, rank_counts: &[usize]) {
    for (cache_type, exact, tolerance) in precisions(i) {
        let pass = |options: &EngineOptions| model.forward_pass(options).unwrap_or_else(|e| panic!("{what}: {e}"));
        let want = logits(&mut *pass(&options(Device::Cpu, cache_type, true)));
        for &n in rank_counts.iter().filter(|&&n| n <= n_ranks()) {
            let mut pass = pass(&shared(n, cache_type, exact));
            let error = nmse(&logits(&mut *pass), &want);
            assert!(error <= tolerance, "{what}, {n} ranks, cache {cache_type}, exact {exact}: NMSE {error:e}");
        }
    }
}

#[test]
fn ranks_that_share_a_model_give_the_logits_of_the_cpu() {
    if !has_ranks(2) {
        return;
    }
    let small = small();
    let qwen = |architecture| ModelShape { architecture, ..small.clone() };
    let cases = [
        ("F32", small.clone(), F32, &[2, 4][..]),
        ("F16", small.clone(), F16, &[2]),
        ("Q8_0", small.clone(), Q8_0, &[4]),
        ("Q4_0", small.clone(), Q4_0, &[2]),
        // Quantisation blocks of 256 values: attention's output projection cannot be divided among ranks.
        ("Q4_K", small.clone(), Q4_K, &[2]),
        ("Q6_K, heads of 128", ModelShape { head_dim: 128, ..small.clone() }, Q6_K, &[2]),
        (
            "unequal shares",
            ModelShape { n_head: 6, n_head_kv: 3, n_ff: 480, n_vocab: 1010, ..small.clone() },
            Q8_0,
            &[2],
        ),
        ("normed heads", qwen("qwen3"), Q8_0, &[2]),
        ("biases", qwen("qwen2"), Q4_0, &[2]),
        ("a window", small.clone(), TensorType::Q5_0, &[2]),
    ];
    for (i, (what, shape, ty, rank_counts)) in cases.into_iter().enumerate() {
        let window = if what == "a window" { 70 } else { 0 };
        compare_ranks(i, what, &model(&shape, ty, window), rank_counts);
    }
}

/// The sums of long prompts, which do not fit the LL buffer, are exchanged in slices, the last of which is shorter and ends
/// within a chunk. Micro-batches of several lengths leave the tags of earlier exchanges in the buffer.
#[test]
fn ranks_sum_long_prompts_in_slices() {
    if !has_ranks(2) {
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
            if crate::cuda::takes_fewer_cases() && exact != (n % 2 == 0) {
                continue;
            }
            let got = last_logits(&shared(n, CacheType::F32, exact));
            let error = nmse(&got, &want);
            assert!(error <= tolerance, "{n} ranks, exact {exact}: NMSE {error:e}");
        }
    }
}

/// Models with norms of sums, parallel attention and feed-forward, biases of summed products, and several residual streams.
/// Layers that cannot be divided are whole on each rank.
#[test]
fn ranks_share_layers_of_every_kind() {
    if !has_ranks(2) {
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
    let cases = [
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
    ];
    for (i, (what, architecture, n_layer, keys)) in cases.into_iter().enumerate() {
        compare_ranks(i, what, &random_model(&crate::toys::metadata(architecture, n_layer, keys), F16, 1.0), &[2]);
    }
}

/// Each rank has whole recurrent layers and their states.
#[test]
fn ranks_repeat_layers_that_cannot_be_divided() {
    if !has_ranks(2) {
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

/// Greedy steps of several sequences are queued ahead on all ranks, and prompts with a common prefix share pages. The
/// generated tokens are those of one rank.
#[test]
fn greedy_tokens_of_several_ranks_equal_those_of_one() {
    if !has_ranks(2) {
        return;
    }
    let model = model(&small(), Q4_0, 0);
    let generate = |n_ranks: usize| {
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
                // The sequences continue with other tokens than those of the steps in flight.
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
    assert_eq!(generate(2), generate(1));
}

/// Decode steps of single tokens in the persistent kernel of each rank give the logits of one launch per op, except for the
/// rounding of exchanged values. Greedy tokens and top-k lists are those of the logits of all ranks.
#[test]
fn ranks_run_single_tokens_in_the_persistent_kernel() {
    if !has_ranks(2) {
        return;
    }
    let gpus: Vec<_> =
        (0..n_ranks().min(3)).map(|i| Arc::new(CudaDevice::open(i, Watch::default()).unwrap())).collect();
    let experts = [("expert_count", 20), ("expert_used_count", 3), ("expert_feed_forward_length", 192)];
    let heads = [("attention.key_length", 64), ("attention.value_length", 64), ("embedding_length", 160)];
    let with_experts: Vec<_> = heads.into_iter().chain(experts).chain([("attention.sliding_window", 70)]).collect();
    let unequal = ModelShape { architecture: "qwen2", n_head: 6, n_head_kv: 3, n_ff: 480, ..small() };
    for (what, model, max_ranks) in [
        ("heads of 128", model(&ModelShape { head_dim: 128, n_vocab: 1010, ..small() }, Q6_K, 0), 2),
        ("biases, unequal shares", model(&unequal, F16, 0), 3),
        ("experts", random_model(&crate::toys::metadata("gpt-oss", 3, &with_experts), MXFP4, 1.0), 2),
    ] {
        for n in 2..=gpus.len().min(max_ranks) {
            let pass = |persistent_kernel_positions| {
                let options = SessionOptions { n_ctx: 256, exact: true, ..Default::default() };
                let tuning = CudaTuning { persistent_kernel_positions };
                TensorParallelExecutor::tuned_session(&gpus[..n], model.loaded(), &options, &tuning).unwrap()
            };
            let (mut persistent, mut per_op) = (pass(None), pass(Some(0)));
            assert!(persistent.uses_persistent_kernel(0) && !per_op.uses_persistent_kernel(0), "{what}, {n} ranks");
            let prompt: Vec<u32> = (0..20).map(|i| i * 11 % 90).collect();
            let mut id = persistent.forward_prompt(&prompt).unwrap();
            assert_eq!(per_op.forward_prompt(&prompt).unwrap(), id, "{what}, {n} ranks");
            let mut errors = Vec::new();
            for pos in prompt.len()..prompt.len() + 5 {
                let batch = [BatchToken { id, seq: 0, pos, output: true }];
                let logits = persistent.forward(&batch).unwrap().row(0).to_vec();
                errors.push(nmse(&logits, per_op.forward(&batch).unwrap().row(0)));
                // The same token again, for its top-k list and its greedy token.
                let best = highest(&logits, 5);
                persistent.rewind(0, pos);
                let lists = persistent.forward_top_k(&batch, 5).unwrap();
                assert!(lists.len() == 1 && lists[0] == best, "{what}, {n} ranks");
                persistent.rewind(0, pos);
                let next = persistent.forward_greedy(&batch).unwrap();
                assert_eq!(next, [best[0].0], "{what}, {n} ranks");
                id = next[0];
            }
            errors.sort_by(f64::total_cmp);
            // Rounding may change the experts of a token where two router scores are nearly equal. So one row in five may
            // differ.
            let (eighth_decile, largest) = (errors[errors.len() * 8 / 10], errors[errors.len() - 1]);
            assert!(eighth_decile < 1e-7, "{what}, {n} ranks: NMSE {eighth_decile:e}, {largest:e}");

            // Greedy steps, which are queued ahead, give the tokens of single steps.
            let generate = |pass: &mut TensorParallelPass, is_queued: bool| {
                pass.rewind(0, prompt.len());
                let mut id = 7;
                let step = |pos: usize| {
                    let batch = [BatchToken { id, seq: 0, pos, output: true }];
                    id = if is_queued {
                        pass.forward_greedy(&batch).unwrap()[0]
                    } else {
                        highest(pass.forward(&batch).unwrap().row(0), 1)[0].0
                    };
                    id
                };
                (prompt.len()..prompt.len() + 9).map(step).collect::<Vec<_>>()
            };
            let want = generate(&mut persistent, false);
            assert_eq!(generate(&mut persistent, true), want, "{what}, {n} ranks");
        }
    }
}

/// Models that share the same devices run on several threads, one with steps queued ahead and others with prompts. None
/// waits forever where another one occupies a device.
#[test]
fn models_on_the_same_devices_run_concurrently() {
    if !has_ranks(2) {
        return;
    }
    let model = model(&small(), Q4_0, 0);
    let generate = |prompt_length: u32, n_sequences: usize, n_tokens: usize| {
        let mut pass = model.forward_pass(&shared(2, CacheType::F16, false)).unwrap();
        let prompt: Vec<u32> = (0..prompt_length).map(|i| i * 11 % 1000).collect();
        let mut all = Vec::new();
        for _ in 0..n_sequences {
            assert_eq!(pass.rewind(0, 0), 0);
            let mut id = pass.forward_prompt(&prompt).unwrap();
            for pos in prompt.len()..prompt.len() + n_tokens {
                id = pass.forward_greedy(&[BatchToken { id, seq: 0, pos, output: true }]).unwrap()[0];
                all.push(id);
            }
        }
        all
    };
    let few = crate::cuda::takes_fewer_cases();
    let kinds = if few { [(5, 1, 20), (90, 3, 2), (20, 2, 6)] } else { [(5, 1, 60), (90, 15, 2), (20, 4, 10)] };
    let want = kinds.map(|(length, n, tokens)| generate(length, n, tokens));
    std::thread::scope(|scope| {
        let generate = &generate;
        let threads = kinds.map(|(length, n, tokens)| scope.spawn(move || generate(length, n, tokens)));
        assert_eq!(threads.map(|thread| thread.join().unwrap()), want);
    });
}

/// A rank that fails to start a step ends it on all ranks, and the cache is unchanged.
#[test]
fn a_rank_that_fails_ends_the_step_on_all() {
    if !has_ranks(2) {
        return;
    }
    let model = model(&small(), Q8_0, 0);
    let options = SessionOptions { n_ctx: 256, n_seq: 2, ..Default::default() };
    let batch = |start: usize, n: usize| {
        let token = |pos| BatchToken { id: (pos * 7 % 1000) as u32, seq: 0, pos, output: pos + 1 == start + n };
        (start..start + n).map(token).collect::<Vec<_>>()
    };
    let mut want = Vec::new();
    for failing in [None, Some(0), Some(1)] {
        let watches = [Watch::default(), Watch::default()];
        let open = |i: usize| Arc::new(CudaDevice::open(i, watches[i].clone()).unwrap());
        let mut pass = TensorParallelExecutor::session(&[open(0), open(1)], model.loaded(), &options).unwrap();
        pass.forward(&batch(0, 40)).unwrap();
        if let Some(rank) = failing {
            watches[rank].cancel();
            let begun = Instant::now();
            for step in [batch(40, 30), batch(40, 1)] {
                assert_eq!(pass.forward(&step).err(), Some(ForwardError::Cancelled), "rank {rank}");
                assert_eq!(pass.forward_greedy(&step).err(), Some(ForwardError::Cancelled), "rank {rank}");
                assert_eq!(pass.n_past(0), 40);
            }
            assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
            watches[rank].resume();
        }
        // All ranks continue from the unchanged cache.
        let mut logits = Vec::new();
        for step in [batch(40, 30), batch(70, 1), batch(71, 1), batch(72, 1)] {
            logits.extend_from_slice(pass.forward(&step).unwrap().as_slice());
        }
        if failing.is_none() {
            want = logits.clone();
        }
        assert!(logits == want, "{failing:?}");
    }
}

#[test]
fn models_that_ranks_cannot_share_are_refused_with_the_reason() {
    let refused = |model: &Model, options: &EngineOptions| model.forward_pass(options).err().expect("a refusal");
    let dense = model(&small(), Q4_0, 0);
    let on_cpu = EngineOptions { n_ranks: 2, ..options(Device::Cpu, CacheType::F16, false) };
    let error = refused(&dense, &on_cpu);
    assert!(matches!(error, Error::TensorParallelWithoutCuda { device: Device::Cpu, n_ranks: 2 }), "{error}");
    if !has_ranks(4) {
        return;
    }
    // A row of 512 has two quantisation blocks of 256 values, too few for four ranks.
    let error = refused(&model(&small(), Q4_K, 0), &shared(4, CacheType::F16, false));
    assert!(
        matches!(&error, Error::Gpu(e) if matches!(e.downcast_ref(), Some(CudaError::Indivisible { n_ranks: 4 }))),
        "{error}"
    );
    let error = refused(&dense, &EngineOptions { device: Device::Cuda(99), ..shared(2, CacheType::F16, false) });
    assert!(
        matches!(&error, Error::Gpu(e) if matches!(e.downcast_ref(), Some(CudaError::NoDevice { ordinal: 99, .. }))),
        "{error}"
    );
    let ssm = [("ssm.conv_kernel", 4), ("ssm.inner_size", 64), ("ssm.state_size", 16), ("ssm.time_step_rank", 4)];
    let recurrent = crate::toys::metadata("mamba", 2, &ssm);
    let error = refused(&random_model(&recurrent, F16, 1.0), &shared(2, CacheType::F16, false));
    assert!(
        matches!(&error, Error::Gpu(e) if matches!(e.downcast_ref(), Some(CudaError::Indivisible { n_ranks: 2 }))),
        "{error}"
    );
}
