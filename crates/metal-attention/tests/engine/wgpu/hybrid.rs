//! Models with recurrent states on the GPU: their results equal the CPU's for every division of the tokens into batches, and
//! after decode steps that were queued ahead were discarded or cancelled. Without a GPU the tests are skipped; in CI that is
//! a failure.

use std::sync::Arc;

use crate::toys::{
    Toy, batch, close, greedy, kimi_linear, logits, metadata, read, some_ids, token, toy, toy_with_bf16,
};
use crate::wgpu::device::{gpu, gpu_with, takes_fewer_cases};
use metal_attention::wgpu::WgpuDevice;
use metal_attention::{
    BatchToken, CacheType, CpuExecutor, CpuForwardPass, ForwardError, ForwardPass, SessionOptions, WgpuExecutor,
    WgpuForwardPass,
};
use metal_attention_cpu::CpuOptions;
use metal_attention_model::{CacheGroups, Capacity, PAGE, ProfiledStep, StateLayout, Watch};
use metal_attention_testing::models::more_architectures;

const N_CTX: usize = 400;

/// Published models with each kind of recurrent layer; toys that end with a recurrent layer, a convolution over more tokens
/// or a delta rule; and the models of RWKV.
fn models() -> Vec<Toy> {
    let published = ["lfm2.gguf", "lfm2moe.gguf", "qwen35.gguf", "qwen35moe.gguf", "qwen3next.gguf"];
    let published = published.map(|name| read(name, &more_architectures()[name]));
    let mut ends = metadata("lfm2", 4, &[("shortconv.l_cache", 16)]);
    ends.set("lfm2.attention.head_count_kv", vec![0u32, 2, 0, 0]);
    let delta = [
        ("ssm.group_count", 3),
        ("ssm.state_size", 20),
        ("ssm.time_step_rank", 6),
        ("ssm.inner_size", 54),
        ("ssm.conv_kernel", 3),
        ("rope.dimension_count", 8),
        ("full_attention_interval", 2),
    ];
    // The projections of its gates are BF16 matrices.
    let is_gate = |name: &str| name.contains("ssm_alpha") || name.contains("ssm_beta");
    let delta = metadata("qwen35", 5, &delta);
    let toys = [
        toy("a convolution last", &ends),
        toy_with_bf16("the delta rule last, in heads of odd lengths", &delta, &is_gate),
        toy("channels that decay each by itself", &kimi_linear(20)),
        toy_with_bf16("channels that decay each by itself, in heads of odd lengths", &kimi_linear(18), &is_gate),
    ];
    let state_spaces =
        ["falcon-h1.gguf", "mamba2.gguf", "granitehybrid.gguf", "nemotron_h.gguf", "mamba.gguf", "jamba.gguf"]
            .map(|name| read(name, &more_architectures()[name]));
    published.into_iter().chain(toys).chain(state_spaces).chain(rwkv_models()).collect()
}

/// Published models of RWKV, and toys with options that those do not have: no gate, no norm, linear attention, scaled
/// results of some layers.
fn rwkv_models() -> Vec<Toy> {
    let published = ["rwkv6.gguf", "rwkv7.gguf"].map(|name| read(name, &more_architectures()[name]));
    let ranks = [
        ("attention.decay_lora_rank", 6),
        ("attention.iclr_lora_rank", 5),
        ("attention.value_residual_mix_lora_rank", 4),
        ("wkv.head_size", 16),
    ];
    let linear = [("wkv.head_size", 8), ("time_mix_extra_dim", 6), ("time_decay_extra_dim", 5)];
    let mut halved = metadata("rwkv6", 3, &linear);
    halved.set("rwkv6.rescale_every_n_layers", 2u32);
    let small = [
        toy("arwkv7", &metadata("arwkv7", 2, &ranks)),
        toy("rwkv6qwen2", &metadata("rwkv6qwen2", 2, &linear)),
        toy("rwkv6, rescaled", &halved),
    ];
    published.into_iter().chain(small).collect()
}

/// All models, or one with each kind of state where [`takes_fewer_cases`].
fn one_of_each_kind(gpu: &WgpuDevice) -> Vec<Toy> {
    models_or(
        gpu,
        &[
            "lfm2.gguf",
            "qwen35.gguf",
            "the delta rule last, in heads of odd lengths",
            "channels that decay each by itself, in heads of odd lengths",
            "falcon-h1.gguf",
            "jamba.gguf",
            "rwkv6.gguf",
            "rwkv7.gguf",
        ],
    )
}

/// All models, or two where [`takes_fewer_cases`]: one with the states of convolutions and of the delta rule beside KV pages, one
/// without pages. For tests of what is done with states, whatever they consist of.
fn with_and_without_pages(gpu: &WgpuDevice) -> Vec<Toy> {
    models_or(gpu, &["qwen35.gguf", "rwkv7.gguf"])
}

/// All models, or those named in `few` where [`takes_fewer_cases`].
fn models_or(gpu: &WgpuDevice, few: &[&str]) -> Vec<Toy> {
    let mut models = models();
    if takes_fewer_cases(gpu) {
        models.retain(|toy| few.contains(&toy.name));
        assert_eq!(models.len(), few.len());
    }
    models
}

fn options() -> SessionOptions {
    SessionOptions { n_ctx: N_CTX, n_seq: 4, n_ubatch: 50, cache_type: CacheType::F32, ..Default::default() }
}

/// The forward pass on the GPU. Checks that it uses the memory that `memory_needed` predicts.
fn on_gpu(gpu: &Arc<WgpuDevice>, toy: &Toy, options: &SessionOptions) -> WgpuForwardPass {
    let needed = WgpuExecutor::memory_needed(&toy.model, options, gpu.summary().max_binding);
    let pass =
        WgpuExecutor::session(Arc::clone(gpu), &toy.model, options).unwrap_or_else(|e| panic!("{}: {e}", toy.name));
    assert_eq!(needed.kv_cache, pass.memory_use().kv_cache, "{}", toy.name);
    assert_eq!(pass.kv_cache_bytes() as u64, pass.memory_use().kv_cache, "{}", toy.name);
    pass
}

fn on_cpu(toy: &Toy) -> CpuForwardPass {
    let options = SessionOptions { n_ctx: N_CTX, cache_type: CacheType::F32, exact: true, ..Default::default() };
    CpuExecutor::session(&CpuOptions { n_threads: 1, ..Default::default() }, &toy.model, &options).unwrap()
}

#[test]
fn logits_equal_those_of_the_cpu_for_every_division_into_batches() {
    let Some(gpu) = gpu() else { return };
    let ids = some_ids(300);
    for toy in one_of_each_kind(&gpu) {
        let (name, n_vocab) = (toy.name, toy.model.spec().n_vocab);
        let want = logits(&mut on_cpu(&toy), 0, &ids);
        let divisions = [(50, 300), (512, 7), (17, 17), (512, 300), (64, 64), (24, 130), (512, 1)];
        let n_divisions = if takes_fewer_cases(&gpu) { 3 } else { divisions.len() };
        for &(n_ubatch, step) in &divisions[..n_divisions] {
            let mut pass = on_gpu(&gpu, &toy, &SessionOptions { n_ubatch, ..options() });
            let found: Vec<_> = ids.chunks(step).flat_map(|chunk| logits(&mut pass, 1, chunk)).collect();
            close(&found, &want, &format!("{name}: {n_ubatch} at once, in steps of {step}"));
        }
        // Logits of the last tokens only, of two sequences whose tokens alternate in runs of `run`.
        let other: Vec<u32> = ids[..40].iter().rev().copied().collect();
        let other_logits = logits(&mut on_cpu(&toy), 0, &other);
        for run in [1, 3, 40] {
            let mut pass = on_gpu(&gpu, &toy, &options());
            let token_of = |seq, ids: &[u32], pos: usize| BatchToken { id: ids[pos], seq, pos, output: pos == 39 };
            let alternating: Vec<_> = (0..40usize)
                .step_by(run)
                .flat_map(|at| {
                    let part = at..(at + run).min(40);
                    let first = part.clone().map(|pos| token_of(2, &ids, pos));
                    first.chain(part.map(|pos| token_of(0, &other, pos))).collect::<Vec<_>>()
                })
                .collect();
            let found = pass.forward(&alternating).unwrap();
            close(found.row(0), &want[39 * n_vocab..40 * n_vocab], &format!("{name}: in runs of {run}"));
            close(found.row(1), &other_logits[39 * n_vocab..], &format!("{name}: beside it, in runs of {run}"));
        }
    }
}

#[test]
fn sequences_are_cut_back_to_checkpoints_and_shared_from_there() {
    let Some(gpu) = gpu() else { return };
    let ids = some_ids(300);
    for toy in with_and_without_pages(&gpu) {
        let (name, n_vocab) = (toy.name, toy.model.spec().n_vocab);
        let want = logits(&mut on_cpu(&toy), 0, &ids);
        let rest = |n: usize| &want[n * n_vocab..];
        let mut pass = on_gpu(&gpu, &toy, &options());
        logits(&mut pass, 0, &ids);
        assert_eq!((pass.reachable(0, 299), pass.reachable(0, 298)), (299, 4 * PAGE), "{name}");
        assert_eq!(pass.share_prefix(0, 1, 299).unwrap(), 299, "{name}");
        close(&logits(&mut pass, 1, &ids[299..]), rest(299), name);
        assert_eq!(pass.share_prefix(1, 2, 150).unwrap(), 2 * PAGE, "{name}");
        close(&logits(&mut pass, 2, &ids[2 * PAGE..]), rest(2 * PAGE), name);
        // Pages that other sequences share keep their contents when this sequence overwrites its own.
        assert_eq!(pass.rewind(0, 200), 3 * PAGE, "{name}");
        logits(&mut pass, 0, &ids[..60]);
        assert_eq!(pass.rewind(1, 3 * PAGE + 1), 3 * PAGE, "{name}");
        close(&logits(&mut pass, 1, &ids[3 * PAGE..]), rest(3 * PAGE), name);
        pass.reset();
        close(&logits(&mut pass, 3, &ids), &want, name);
        // Without memory for checkpoints.
        let few = SessionOptions { state_cache: 0, n_windows: Some(1), ..options() };
        let mut pass = on_gpu(&gpu, &toy, &few);
        close(&logits(&mut pass, 0, &ids), &want, name);
        let reached = pass.rewind(0, 290);
        assert!(reached <= 4 * PAGE, "{name}: {reached}");
        close(&logits(&mut pass, 0, &ids[reached..]), rest(reached), name);
        // The memory: the KV pages, the state of an empty sequence and three of the running one.
        let state = 4 * StateLayout::new(toy.model.spec()).n_elements();
        let elements = CacheGroups::new(toy.model.spec(), small_capacity()).n_elements(toy.model.spec()) as usize;
        assert_eq!(pass.kv_cache_bytes(), 4 * elements + 4 * state, "{name}");
    }
}

/// The capacity of [`options`] with states for one sequence and none for checkpoints.
fn small_capacity() -> Capacity {
    let SessionOptions { n_ctx, n_seq, n_cache, n_ubatch, .. } = options();
    Capacity { n_ctx, n_seq, n_cache, n_windows: Some(1), state_cache: 0, n_ubatch }
}

/// The `n` tokens that the CPU generates greedily after `ids`.
fn greedy_on_cpu(toy: &Toy, ids: &[u32], n: usize) -> Vec<u32> {
    let mut pass = on_cpu(toy);
    let (last, before) = ids.split_last().unwrap();
    logits(&mut pass, 0, before);
    greedy(&mut pass, 0, *last, n)
}

#[test]
fn greedy_steps_are_queued_and_give_the_tokens_of_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let ids = some_ids(200);
    for toy in with_and_without_pages(&gpu) {
        let name = toy.name;
        // (sequence, tokens of `ids` that its prompt begins with, the last token of its prompt)
        let prompts = [(0, 150, 5), (1, 150, 6), (2, 128, 7), (3, 50, 8)];
        let want = prompts.map(|(_, n, last)| greedy_on_cpu(&toy, &[&ids[..n], &[last]].concat(), 70));
        for (state_cache, n_windows, depth) in [(1 << 20, None, 3), (0, Some(1), 2)] {
            // One sequence: a step's result is read after the steps that follow were submitted.
            let options = SessionOptions { state_cache, n_windows, ..options() };
            let mut pass = on_gpu(&gpu, &toy, &options);
            logits(&mut pass, 0, &ids[..150]);
            let mut tokens = greedy(&mut pass, 0, 5, 1);
            let before = gpu.submissions();
            let next = greedy(&mut pass, 0, tokens[0], 1);
            assert_eq!(gpu.submissions() - before, depth, "{name}: steps in flight");
            tokens.extend(next);
            let before = gpu.submissions();
            let next = greedy(&mut pass, 0, tokens[1], 68);
            tokens.extend(next);
            assert_eq!(gpu.submissions() - before, 68, "{name}: one more for each that was read");
            assert_eq!(tokens, want[0], "{name}");
            assert_eq!(pass.n_past(0), 220);
            // Checkpoints are saved at ends of pages.
            let checkpoint = if n_windows.is_none() { 3 * PAGE } else { 0 };
            assert_eq!(pass.reachable(0, 200), checkpoint, "{name}");
            if checkpoint > 0 {
                pass.rewind(0, 200);
                let at = checkpoint - 151;
                assert_eq!(
                    greedy(&mut pass, 0, want[0][at], 70 - at - 1),
                    want[0][at + 1..],
                    "{name}: from a checkpoint"
                );
            }
        }
        // Several sequences with a shared prefix. Seven of ten steps may be queued ahead; the others are not.
        let mut pass = on_gpu(&gpu, &toy, &options());
        logits(&mut pass, 0, &ids[..150]);
        for &(seq, n, _) in &prompts[1..] {
            let reached = pass.share_prefix(0, seq, n).unwrap();
            assert_eq!(reached, if n == 50 { 0 } else { n }, "{name}");
            if reached < n {
                logits(&mut pass, seq, &ids[reached..n]);
            }
        }
        let mut sequences = prompts.map(|(_, _, last)| vec![last]);
        for i in 0..70 {
            let next = |(seq, tokens): (usize, &Vec<u32>)| token(&pass, seq, tokens[tokens.len() - 1]);
            let batch: Vec<_> = sequences.iter().enumerate().map(next).collect();
            let next = if i % 10 < 7 {
                pass.forward_greedy(&batch).unwrap()
            } else {
                pass.forward_top_k(&batch, 4).unwrap().iter().map(|list| list[0].0).collect()
            };
            sequences.iter_mut().zip(next).for_each(|(tokens, id)| tokens.push(id));
        }
        for (seq, (tokens, want)) in sequences.iter().zip(&want).enumerate() {
            assert_eq!(tokens[1..], want[..], "{name}: sequence {seq}");
        }
    }
}

#[test]
fn discarded_steps_in_flight_have_no_effect() {
    let Some(gpu) = gpu() else { return };
    let ids = some_ids(300);
    for toy in with_and_without_pages(&gpu) {
        for state_cache in [0, 1 << 20] {
            let name = toy.name;
            let mut pass = on_gpu(&gpu, &toy, &SessionOptions { state_cache, n_seq: 3, ..options() });
            let mut tokens = ids[..120].to_vec();
            let mut fresh = on_cpu(&toy);
            let mut check = |pass: &mut WgpuForwardPass,
                             seq: usize,
                             tokens: &mut Vec<u32>,
                             more: &[u32],
                             what: &str| {
                fresh.reset();
                tokens.extend(more);
                let found = logits(pass, seq, more);
                let want = logits(&mut fresh, 0, tokens);
                close(&found, &want[want.len() - found.len()..], &format!("{name}: {what}, {} tokens", tokens.len()));
                assert_eq!(pass.n_past(seq), tokens.len());
            };
            let ahead = |pass: &mut WgpuForwardPass, tokens: &mut Vec<u32>, n: usize| {
                let next = greedy(pass, 0, 9, n);
                tokens.push(9);
                tokens.extend(&next[..n - 1]);
            };
            logits(&mut pass, 0, &tokens);
            for n in [1, 2, 5, 12] {
                ahead(&mut pass, &mut tokens, n);
                check(&mut pass, 0, &mut tokens, &[ids[n]], "another token than was queued");
                ahead(&mut pass, &mut tokens, n);
                check(&mut pass, 0, &mut tokens, &ids[..20], "a prompt");
                ahead(&mut pass, &mut tokens, n);
                let reached = pass.rewind(0, tokens.len() - 1);
                assert_eq!(reached, tokens.len() - 1, "{name}: the last token can be removed");
                tokens.truncate(reached);
                check(&mut pass, 0, &mut tokens, &[ids[n + 1]], "the last token removed");
                ahead(&mut pass, &mut tokens, n);
                let mut other = tokens.clone();
                assert_eq!(pass.share_prefix(0, 1, tokens.len()).unwrap(), tokens.len());
                check(&mut pass, 1, &mut other, &ids[30..33], "shared");
                check(&mut pass, 0, &mut tokens, &ids[40..42], "the sequence that was shared");
                pass.rewind(1, 0);
                // A step of another sequence, and one of both.
                ahead(&mut pass, &mut tokens, n);
                let mut new = Vec::new();
                check(&mut pass, 2, &mut new, &ids[..10 + n], "a new sequence");
                let both = [token(&pass, 0, 3), token(&pass, 2, 4)];
                let next = pass.forward_greedy(&both).unwrap();
                let both = [token(&pass, 0, next[0]), token(&pass, 2, next[1])];
                pass.forward_greedy(&both).unwrap();
                tokens.extend([3, next[0]]);
                new.extend([4, next[1]]);
                check(&mut pass, 2, &mut new, &[8], "after two concurrent sequences");
                check(&mut pass, 0, &mut tokens, &[8], "after two concurrent sequences");
                pass.rewind(2, 0);
                ahead(&mut pass, &mut tokens, n);
                let reached = pass.rewind(0, tokens.len() - n.min(tokens.len()) - 1);
                tokens.truncate(reached);
                check(&mut pass, 0, &mut tokens, &ids[60..62], "cut back further");
            }
        }
    }
}

#[test]
fn a_cancelled_batch_leaves_states_unchanged() {
    let watch = Watch::default();
    let Some(gpu) = gpu_with(&watch) else { return };
    let ids = some_ids(300);
    for toy in with_and_without_pages(&gpu) {
        let want = logits(&mut on_cpu(&toy), 0, &ids);
        let rest = |n: usize| &want[n * toy.model.spec().n_vocab..];
        for (n, at_micro_batch) in [(70, 1), (64, 2), (0, 3), (1, 4), (63, 5)] {
            let mut pass = on_gpu(&gpu, &toy, &options());
            logits(&mut pass, 1, &ids[..80]);
            if n > 0 {
                logits(&mut pass, 0, &ids[..n]);
            }
            // Cancels after the layers of `at_micro_batch` micro-batches.
            let mut micro_batches = 0;
            let mut cancel = |layer: usize, _: &[f32]| {
                micro_batches += usize::from(layer == 0);
                if micro_batches == at_micro_batch {
                    watch.cancel();
                }
            };
            let both = [batch(&pass, 0, &ids[n..], true), batch(&pass, 1, &ids[80..], true)].concat();
            let outcome = pass.forward_traced(&both, Some(&mut cancel)).map(drop);
            assert_eq!(outcome, Err(ForwardError::Cancelled));
            assert_eq!((pass.n_past(0), pass.n_past(1)), (n, 80), "{}", toy.name);
            watch.resume();
            close(&logits(&mut pass, 0, &ids[n..]), rest(n), toy.name);
            close(&logits(&mut pass, 1, &ids[80..]), rest(80), toy.name);
            // Steps in flight are cancelled, too.
            let next = greedy(&mut pass, 0, 7, 4);
            watch.cancel();
            assert_eq!(pass.forward_greedy(&[token(&pass, 0, next[3])]), Err(ForwardError::Cancelled));
            watch.resume();
            let tokens = [&ids[..], &[7], &next[..3]].concat();
            assert_eq!(pass.n_past(0), tokens.len());
            let expected = logits(&mut on_cpu(&toy), 0, &[&tokens[..], &[next[3]]].concat());
            let found = logits(&mut pass, 0, &next[3..]);
            close(&found, &expected[expected.len() - found.len()..], toy.name);
        }
    }
}

/// Prompts, steps that are queued, discarded and cancelled, cuts and shared prefixes, in random order.
#[test]
fn random_operations_give_the_results_of_the_cpu() {
    const N_SEQ: usize = 3;
    let watch = Watch::default();
    let Some(gpu) = gpu_with(&watch) else { return };
    for (seed, toy) in (1..).zip(&with_and_without_pages(&gpu)) {
        let mut state = 0x9E37_79B9_7F4A_7C15_u64 ^ seed;
        let mut random = |n: usize| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 33) as usize % n
        };
        let state_cache = [1 << 20, 0, 5 * 4 * StateLayout::new(toy.model.spec()).n_elements()][seed as usize % 3];
        let mut pass = on_gpu(&gpu, toy, &SessionOptions { n_seq: N_SEQ, state_cache, ..options() });
        let mut fresh = on_cpu(toy);
        let mut sequences = vec![Vec::new(); N_SEQ];
        for step in 0..120 {
            let (seq, operation) = (random(N_SEQ), random(10));
            if sequences[seq].len() > N_CTX - 110 {
                pass.rewind(seq, 0);
                sequences[seq].clear();
            }
            match operation {
                0 | 1 => {
                    let n = 1 + random(if operation == 0 { 90 } else { 3 });
                    let ids: Vec<u32> = (0..n).map(|_| random(96) as u32).collect();
                    sequences[seq].extend(&ids);
                    let found = logits(&mut pass, seq, &ids);
                    fresh.reset();
                    let want = logits(&mut fresh, 0, &sequences[seq]);
                    close(&found, &want[want.len() - found.len()..], &format!("{}, operation {step}", toy.name));
                }
                2..=5 => {
                    // One sequence, or all that are not nearly full.
                    let seqs: Vec<_> =
                        (0..N_SEQ).filter(|&s| s == seq || operation > 3 && sequences[s].len() < 300).collect();
                    let mut ids: Vec<u32> = seqs.iter().map(|_| random(96) as u32).collect();
                    for _ in 0..=random(20) {
                        let next = |(&seq, &id): (&usize, &u32)| token(&pass, seq, id);
                        let batch: Vec<_> = seqs.iter().zip(&ids).map(next).collect();
                        if random(8) == 0 {
                            watch.cancel();
                            assert_eq!(pass.forward_greedy(&batch), Err(ForwardError::Cancelled));
                            watch.resume();
                        }
                        let next = pass.forward_greedy(&batch).unwrap();
                        seqs.iter().zip(&ids).for_each(|(&seq, &id)| sequences[seq].push(id));
                        ids = next;
                    }
                }
                6 => {
                    let n = random(sequences[seq].len() + 1).max(sequences[seq].len().saturating_sub(random(100)));
                    let reached = pass.rewind(seq, n);
                    assert!(reached <= n);
                    sequences[seq].truncate(reached);
                }
                7 => {
                    let (to, n) = (random(N_SEQ), sequences[seq].len() - random(5).min(sequences[seq].len()));
                    let reached = pass.share_prefix(seq, to, n).unwrap();
                    sequences[to] = sequences[seq][..reached].to_vec();
                }
                8 => {
                    let ids: Vec<u32> = (0..70 + random(30)).map(|_| random(96) as u32).collect();
                    let mut cancel = |_: usize, _: &[f32]| watch.cancel();
                    let outcome = pass.forward_traced(&batch(&pass, seq, &ids, false), Some(&mut cancel)).map(drop);
                    assert_eq!(outcome, Err(ForwardError::Cancelled));
                    watch.resume();
                }
                _ => {
                    let id = random(96) as u32;
                    pass.forward_top_k(&[token(&pass, seq, id)], 3).unwrap();
                    sequences[seq].push(id);
                }
            }
            let lengths: Vec<_> = (0..N_SEQ).map(|seq| pass.n_past(seq)).collect();
            assert_eq!(lengths, sequences.iter().map(Vec::len).collect::<Vec<_>>(), "{}, operation {step}", toy.name);
        }
    }
}

/// Profiling runs each step several times.
#[test]
fn profiled_steps_give_the_same_states() {
    let Some(gpu) = gpu() else { return };
    let ids = some_ids(300);
    for toy in with_and_without_pages(&gpu) {
        let want = logits(&mut on_cpu(&toy), 0, &ids);
        let mut pass = on_gpu(&gpu, &toy, &options());
        if let Err(ForwardError::Device { .. }) = pass.start_profile() {
            return;
        }
        let mut found = logits(&mut pass, 0, &ids[..170]);
        for part in ids[170..190].chunks(1).chain([&ids[190..]]) {
            found.extend(logits(&mut pass, 0, part));
        }
        close(&found, &want, toy.name);
        let next = greedy(&mut pass, 0, 4, 10);
        assert_eq!(next, greedy_on_cpu(&toy, &[&ids[..], &[4]].concat(), 10), "{}", toy.name);
        let profile = pass.take_profile().unwrap();
        let recurrent =
            ["short_conv", "mamba", "mamba2", "mamba2_step", "delta_rule", "delta_rule_step", "rwkv6_mix", "rwkv7_mix"];
        let has_one = |step: &ProfiledStep| step.kernels.iter().any(|kernel| recurrent.contains(&&*kernel.kernel));
        assert!(profile.steps.iter().all(has_one), "{}", toy.name);
        // The sequence continues with steps queued ahead.
        let more = greedy(&mut pass, 0, next[9], 5);
        let tokens = [&ids[..], &[4], &next[..]].concat();
        assert_eq!(more, greedy_on_cpu(&toy, &tokens, 5), "{}", toy.name);
    }
}

#[test]
fn sequences_without_memory_for_their_states_are_refused() {
    let Some(gpu) = gpu() else { return };
    let toy = &models()[0];
    let small = SessionOptions { state_cache: 0, n_windows: Some(1), ..options() };
    let mut pass = on_gpu(&gpu, toy, &small);
    for seq in 0..2 {
        logits(&mut pass, seq, &[1, 2]);
    }
    let two = batch(&pass, 2, &[1, 2], true);
    let full = ForwardError::OutOfStates { needed: 2, free: 1, total: 3 };
    assert_eq!(pass.forward(&two).map(drop), Err(full));
    assert_eq!((pass.n_past(1), pass.n_past(2)), (2, 0));
    pass.rewind(0, 0);
    logits(&mut pass, 2, &[1, 2]);
}

#[test]
fn states_are_limited_to_the_size_of_a_binding() {
    let toy = &models().into_iter().find(|toy| toy.name == "a convolution last").unwrap();
    let max_binding = 1 << 16;
    let layout = StateLayout::new(toy.model.spec());
    let needed = |state_cache| {
        let options = SessionOptions { state_cache, ..options() };
        WgpuExecutor::memory_needed(&toy.model, &options, max_binding).kv_cache
    };
    let widest = (0..toy.model.spec().n_layer()).map(|i| 4 * layout.of_layer(i).len() as u64).max().unwrap();
    // The widest state of a layer has 15 taps of 32 channels. Without checkpoints there are 13 states: three for each of
    // four sequences, and that of an empty one.
    let n_slots = max_binding / widest;
    assert_eq!((widest, n_slots), (1920, 34));
    assert_eq!(needed(usize::MAX) - needed(0), (n_slots - 13) * 4 * layout.n_elements() as u64);
}
