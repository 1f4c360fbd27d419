//! Models with experts, latent attention and recurrent layers through CUDA, on an NVIDIA GPU or on the software CUDA device
//! (`scripts/software-cuda`): their results equal the CPU's for every division of the tokens into batches, and after decode
//! steps that were queued ahead were discarded or cancelled. Without a device the tests are skipped, or fail where
//! `METAL_ATTENTION_TEST_CUDA` is set.

use std::sync::Arc;

use crate::toys::{
    LIMIT, Toy, batch, close, greedy, kimi_linear, logits, metadata, nmse, read, some_ids, token, toy, toy_with_bf16,
};
use metal_attention::{
    BatchToken, CacheType, CpuExecutor, CpuForwardPass, CudaDevice, CudaExecutor, CudaForwardPass, ForwardError,
    ForwardPass, SessionOptions, cuda_summaries,
};
use metal_attention_cpu::CpuOptions;
use metal_attention_model::{PAGE, Watch};
use metal_attention_testing::models::more_architectures;

const N_CTX: usize = 300;

/// Opens the first device; `None` if there is none, and the test is recorded as skipped.
fn cuda(watch: &Watch) -> Option<Arc<CudaDevice>> {
    let why = match cuda_summaries() {
        Ok(found) if !found.is_empty() => {
            return Some(Arc::new(CudaDevice::open(0, watch.clone()).expect("a device")));
        }
        Ok(_) => "CUDA knows no device".to_owned(),
        Err(why) => why.to_string(),
    };
    assert!(std::env::var_os("METAL_ATTENTION_TEST_CUDA").is_none(), "{why}");
    metal_attention_testing::skip(&why);
    None
}

/// The models of `more_architectures` with these file names.
fn published(names: &[&'static str]) -> Vec<Toy> {
    names.iter().map(|name| read(name, &more_architectures()[*name])).collect()
}

/// Published models with each kind of recurrent layer, and toys: models that end with a recurrent layer, the delta rule with
/// a decay per channel, and RWKV with options that no published model has.
fn recurrent() -> Vec<Toy> {
    let mut toys = published(&[
        "lfm2.gguf",
        "qwen35.gguf",
        "qwen3next.gguf",
        "falcon-h1.gguf",
        "mamba2.gguf",
        "nemotron_h.gguf",
        "mamba.gguf",
        "jamba.gguf",
        "rwkv6.gguf",
        "rwkv7.gguf",
    ]);
    let mut ends = metadata("lfm2", 4, &[("shortconv.l_cache", 16)]);
    ends.set("lfm2.attention.head_count_kv", vec![0u32, 2, 0, 0]);
    toys.push(toy("a convolution last", &ends));
    toys.push(toy("channels that decay each by itself", &kimi_linear(20)));
    let ranks = [
        ("attention.decay_lora_rank", 8),
        ("attention.iclr_lora_rank", 4),
        ("attention.value_residual_mix_lora_rank", 12),
        ("wkv.head_size", 16),
    ];
    let linear = [("wkv.head_size", 8), ("time_mix_extra_dim", 8), ("time_decay_extra_dim", 4)];
    toys.push(toy("arwkv7", &metadata("arwkv7", 2, &ranks)));
    toys.push(toy("rwkv6qwen2", &metadata("rwkv6qwen2", 2, &linear)));
    toys
}

/// One model with each kind of recurrent state, or with half of them where [`takes_fewer_cases`](super::takes_fewer_cases), for
/// tests of cutting back, sharing and cancelling.
fn some_recurrent() -> Vec<Toy> {
    let mut toys = published(&["lfm2.gguf", "qwen35.gguf", "falcon-h1.gguf", "jamba.gguf", "rwkv7.gguf"]);
    toys.push(toy("channels that decay each by itself", &kimi_linear(20)));
    if super::takes_fewer_cases() {
        toys.retain(|toy| ["qwen35.gguf", "jamba.gguf", "rwkv7.gguf"].contains(&toy.name));
        assert_eq!(toys.len(), 3);
    }
    toys
}

fn options() -> SessionOptions {
    SessionOptions {
        n_ctx: N_CTX,
        n_seq: 4,
        n_ubatch: 50,
        cache_type: CacheType::F32,
        exact: true,
        ..Default::default()
    }
}

fn on_cuda(gpu: &Arc<CudaDevice>, toy: &Toy, options: &SessionOptions) -> CudaForwardPass {
    CudaExecutor::session(Arc::clone(gpu), &toy.model, options).unwrap_or_else(|e| panic!("{}: {e}", toy.name))
}

fn on_cpu(toy: &Toy) -> CpuForwardPass {
    let options = SessionOptions { n_ctx: N_CTX, cache_type: CacheType::F32, exact: true, ..Default::default() };
    CpuExecutor::session(&CpuOptions { n_threads: 1, ..Default::default() }, &toy.model, &options).unwrap()
}

#[test]
fn logits_equal_those_of_the_cpu_for_every_division_into_batches() {
    let Some(gpu) = cuda(&Watch::default()) else { return };
    let ids = some_ids(80);
    for toy in recurrent() {
        let (name, n_vocab) = (toy.name, toy.model.spec().n_vocab);
        let want = logits(&mut on_cpu(&toy), 0, &ids);
        for (n_ubatch, n, step) in [(512, 80, 80), (33, 80, 80), (512, 28, 7), (512, 6, 1)] {
            let mut pass = on_cuda(&gpu, &toy, &SessionOptions { n_ubatch, ..options() });
            let found: Vec<_> = ids[..n].chunks(step).flat_map(|chunk| logits(&mut pass, 1, chunk)).collect();
            close(&found, &want[..n * n_vocab], &format!("{name}: {n_ubatch} at once, in steps of {step}"));
        }
        // Logits of the last tokens only, of two sequences whose tokens alternate in runs of `run`.
        let other: Vec<u32> = ids[..20].iter().rev().copied().collect();
        let other_logits = logits(&mut on_cpu(&toy), 0, &other);
        for run in [1, 3, 20] {
            let mut pass = on_cuda(&gpu, &toy, &options());
            let token_of = |seq, ids: &[u32], pos: usize| BatchToken { id: ids[pos], seq, pos, output: pos == 19 };
            let alternating: Vec<_> = (0..20usize)
                .step_by(run)
                .flat_map(|at| {
                    let part = at..(at + run).min(20);
                    let first = part.clone().map(|pos| token_of(2, &ids, pos));
                    first.chain(part.map(|pos| token_of(0, &other, pos))).collect::<Vec<_>>()
                })
                .collect();
            let found = pass.forward(&alternating).unwrap();
            close(found.row(0), &want[19 * n_vocab..20 * n_vocab], &format!("{name}: in runs of {run}"));
            close(found.row(1), &other_logits[19 * n_vocab..], &format!("{name}: beside it, in runs of {run}"));
        }
    }
}

/// Models with recurrences whose key and value sizes are not multiples of what a thread or a tile processes, for each rule
/// and each number of rows per thread.
fn odd_sizes() -> Vec<Toy> {
    let with_n_embd = |architecture: &'static str, n_layer, n_embd: u32, more: &[(&str, u32)]| {
        let mut metadata = metadata(architecture, n_layer, more);
        metadata.set(format!("{architecture}.embedding_length"), n_embd);
        metadata
    };
    let delta = |key_dim: u32, value_dim: u32| {
        let keys = [
            ("ssm.group_count", 1),
            ("ssm.state_size", key_dim),
            ("ssm.time_step_rank", 2),
            ("ssm.inner_size", 2 * value_dim),
            ("ssm.conv_kernel", 3),
            ("rope.dimension_count", 8),
            ("full_attention_interval", 3),
        ];
        metadata("qwen35", 2, &keys)
    };
    let mamba = |architecture, d_state, width, n_head, n_group| {
        let keys = [
            ("ssm.conv_kernel", 4),
            ("ssm.inner_size", width),
            ("ssm.state_size", d_state),
            ("ssm.time_step_rank", n_head),
            ("ssm.group_count", n_group),
        ];
        metadata(architecture, 2, &keys)
    };
    let ranks = |head_size| {
        [
            ("attention.decay_lora_rank", 6),
            ("attention.iclr_lora_rank", 5),
            ("attention.value_residual_mix_lora_rank", 4),
            ("wkv.head_size", head_size),
        ]
    };
    let linear = |head_size| [("wkv.head_size", head_size), ("time_mix_extra_dim", 8), ("time_decay_extra_dim", 5)];
    vec![
        toy("delta rule, 6 x 9", &delta(6, 9)),
        toy("delta rule, 66 x 20", &delta(66, 20)),
        toy("delta rule, 131 x 17", &delta(131, 17)),
        toy("delta rule of channels, 18", &kimi_linear(18)),
        toy("delta rule of channels, 67", &kimi_linear(67)),
        toy("delta rule of channels, 132", &kimi_linear(132)),
        toy("Mamba, 5", &mamba("mamba", 5, 40, 3, 1)),
        toy("Mamba, 18", &mamba("mamba", 18, 33, 3, 1)),
        toy("Mamba, 61", &mamba("mamba", 61, 20, 3, 1)),
        toy("Mamba-2, 5 x 7", &mamba("mamba2", 5, 28, 4, 2)),
        toy("Mamba-2, 70 x 17", &mamba("mamba2", 70, 34, 2, 1)),
        toy("Mamba-2, 129 x 4", &mamba("mamba2", 129, 16, 4, 1)),
        toy("RWKV-6, 9", &with_n_embd("rwkv6", 2, 36, &linear(9))),
        toy("RWKV-6, 70", &with_n_embd("rwkv6", 2, 140, &linear(70))),
        toy("RWKV-6, 132", &with_n_embd("rwkv6", 1, 132, &linear(132))),
        toy("RWKV-7, 10", &with_n_embd("arwkv7", 2, 40, &ranks(10))),
        toy("RWKV-7, 66", &with_n_embd("arwkv7", 2, 132, &ranks(66))),
        toy("RWKV-7, 130", &with_n_embd("arwkv7", 1, 130, &ranks(130))),
    ]
}

#[test]
fn recurrences_of_any_shape_are_right_for_batches_of_any_length() {
    let Some(gpu) = cuda(&Watch::default()) else { return };
    let ids = some_ids(90);
    let few = super::takes_fewer_cases();
    for (i, toy) in odd_sizes().into_iter().enumerate() {
        let (name, n_vocab) = (toy.name, toy.model.spec().n_vocab);
        let want = logits(&mut on_cpu(&toy), 0, &ids);
        // Every division into batches gives the same bits.
        let in_batches = |lengths: &[usize]| {
            let mut pass = on_cuda(&gpu, &toy, &options());
            let mut rest = &ids[..50];
            let mut found = Vec::new();
            for &n in lengths {
                let (batch, others) = rest.split_at(n);
                found.extend(logits(&mut pass, 0, batch));
                rest = others;
            }
            found
        };
        assert_eq!(in_batches(&[50]), in_batches(&[1, 17, 16, 3, 13]), "{name}");
        // Token counts of a tile (16), one more and one less, and one of several recurrence segments. Where the cases are
        // fewer, successive models take one each.
        let all = [[1, 15, 16, 17], [33, 2, 70, 31]];
        let taken = if few { &all[i % 2..][..1] } else { &all[..] };
        for &lengths in taken {
            let mut pass = on_cuda(&gpu, &toy, &SessionOptions { n_ubatch: 200, ..options() });
            // First with empty states, then with earlier states, then single tokens.
            for more in [lengths, [17, 3, 1, 16], [1; 4]] {
                let starts: [usize; 4] = std::array::from_fn(|seq| pass.n_past(seq));
                let tokens = (0..4).flat_map(|seq| {
                    let end = starts[seq] + more[seq];
                    batch(&pass, seq, &ids[starts[seq]..end], true)
                });
                let tokens: Vec<_> = tokens.collect();
                let found = pass.forward(&tokens).unwrap().as_slice().to_vec();
                let mut rest = &found[..];
                for seq in 0..4 {
                    let (rows, others) = rest.split_at(more[seq] * n_vocab);
                    let from = starts[seq] * n_vocab;
                    let what = format!("{name}: {} tokens after {} of sequence {seq}", more[seq], starts[seq]);
                    close(rows, &want[from..from + rows.len()], &what);
                    rest = others;
                }
            }
        }
    }
}

#[test]
fn sequences_are_cut_back_to_checkpoints_and_shared_from_there() {
    let Some(gpu) = cuda(&Watch::default()) else { return };
    let ids = some_ids(150);
    for toy in some_recurrent() {
        let (name, n_vocab) = (toy.name, toy.model.spec().n_vocab);
        let want = logits(&mut on_cpu(&toy), 0, &ids);
        let rest = |n: usize| &want[n * n_vocab..];
        let mut pass = on_cuda(&gpu, &toy, &options());
        logits(&mut pass, 0, &ids);
        assert_eq!((pass.reachable(0, 149), pass.reachable(0, 148)), (149, 2 * PAGE), "{name}");
        assert_eq!(pass.share_prefix(0, 1, 149).unwrap(), 149, "{name}");
        close(&logits(&mut pass, 1, &ids[149..]), rest(149), name);
        assert_eq!(pass.share_prefix(1, 2, 100).unwrap(), PAGE, "{name}");
        close(&logits(&mut pass, 2, &ids[PAGE..]), rest(PAGE), name);
        // Pages that other sequences share keep their contents when this sequence overwrites its own.
        assert_eq!(pass.rewind(0, 140), 2 * PAGE, "{name}");
        logits(&mut pass, 0, &ids[..20]);
        assert_eq!(pass.rewind(1, 2 * PAGE + 1), 2 * PAGE, "{name}");
        close(&logits(&mut pass, 1, &ids[2 * PAGE..]), rest(2 * PAGE), name);
        // Without memory for checkpoints.
        let few = SessionOptions { state_cache: 0, n_windows: Some(1), ..options() };
        let mut pass = on_cuda(&gpu, &toy, &few);
        close(&logits(&mut pass, 0, &ids), &want, name);
        let reached = pass.rewind(0, 140);
        assert!(reached <= 2 * PAGE, "{name}: {reached}");
        close(&logits(&mut pass, 0, &ids[reached..]), rest(reached), name);
    }
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
    let Some(gpu) = cuda(&Watch::default()) else { return };
    let ids = some_ids(120);
    for toy in some_recurrent() {
        let name = toy.name;
        // (sequence, tokens of `ids` that its prompt begins with, the last token of its prompt)
        let prompts = [(0, 110, 5), (1, 110, 6), (2, 64, 7), (3, 30, 8)];
        let want = prompts.map(|(_, n, last)| greedy_on_cpu(&toy, &[&ids[..n], &[last]].concat(), 30));
        for (state_cache, n_windows) in [(1 << 20, None), (0, Some(1))] {
            let mut pass = on_cuda(&gpu, &toy, &SessionOptions { state_cache, n_windows, ..options() });
            logits(&mut pass, 0, &ids[..110]);
            assert_eq!(greedy(&mut pass, 0, 5, 30), want[0], "{name}");
            assert_eq!(pass.n_past(0), 140);
            // Checkpoints are saved at ends of pages.
            let checkpoint = if n_windows.is_none() { 2 * PAGE } else { 0 };
            assert_eq!(pass.reachable(0, 130), checkpoint, "{name}");
            if checkpoint > 0 {
                pass.rewind(0, 130);
                let at = checkpoint - 111;
                assert_eq!(greedy(&mut pass, 0, want[0][at], 30 - at - 1), want[0][at + 1..], "{name}: a checkpoint");
            }
        }
        // Several sequences with a shared prefix.
        let mut pass = on_cuda(&gpu, &toy, &options());
        logits(&mut pass, 0, &ids[..110]);
        for &(seq, n, _) in &prompts[1..] {
            let reached = pass.share_prefix(0, seq, n).unwrap();
            if reached < n {
                logits(&mut pass, seq, &ids[reached..n]);
            }
        }
        let mut sequences = prompts.map(|(_, _, last)| vec![last]);
        for _ in 0..30 {
            let next = |(seq, tokens): (usize, &Vec<u32>)| token(&pass, seq, tokens[tokens.len() - 1]);
            let batch: Vec<_> = sequences.iter().enumerate().map(next).collect();
            let next = pass.forward_greedy(&batch).unwrap();
            sequences.iter_mut().zip(next).for_each(|(tokens, id)| tokens.push(id));
        }
        for (seq, (tokens, want)) in sequences.iter().zip(&want).enumerate() {
            assert_eq!(tokens[1..], want[..], "{name}: sequence {seq}");
        }
    }
}

#[test]
fn discarded_steps_in_flight_have_no_effect() {
    let Some(gpu) = cuda(&Watch::default()) else { return };
    let ids = some_ids(100);
    for toy in some_recurrent() {
        let name = toy.name;
        let mut pass = on_cuda(&gpu, &toy, &SessionOptions { n_seq: 3, ..options() });
        let mut tokens = ids[..60].to_vec();
        let mut fresh = on_cpu(&toy);
        let mut check = |pass: &mut CudaForwardPass, seq: usize, tokens: &mut Vec<u32>, more: &[u32], what: &str| {
            fresh.reset();
            tokens.extend(more);
            let found = logits(pass, seq, more);
            let want = logits(&mut fresh, 0, tokens);
            close(&found, &want[want.len() - found.len()..], &format!("{name}: {what}, {} tokens", tokens.len()));
            assert_eq!(pass.n_past(seq), tokens.len());
        };
        let ahead = |pass: &mut CudaForwardPass, tokens: &mut Vec<u32>, n: usize| {
            let next = greedy(pass, 0, 9, n);
            tokens.push(9);
            tokens.extend(&next[..n - 1]);
        };
        logits(&mut pass, 0, &tokens);
        for n in [1, 2, 7] {
            ahead(&mut pass, &mut tokens, n);
            check(&mut pass, 0, &mut tokens, &[ids[n]], "another token than was queued");
            ahead(&mut pass, &mut tokens, n);
            check(&mut pass, 0, &mut tokens, &ids[..12], "a prompt");
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
        }
    }
}

#[test]
fn a_cancelled_batch_leaves_states_unchanged() {
    let watch = Watch::default();
    let Some(gpu) = cuda(&watch) else { return };
    let ids = some_ids(160);
    for toy in some_recurrent() {
        let want = logits(&mut on_cpu(&toy), 0, &ids);
        let rest = |n: usize| &want[n * toy.model.spec().n_vocab..];
        for (n, at_micro_batch) in [(70, 1), (64, 2), (0, 2)] {
            let mut pass = on_cuda(&gpu, &toy, &options());
            logits(&mut pass, 1, &ids[..40]);
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
            let both = [batch(&pass, 0, &ids[n..], true), batch(&pass, 1, &ids[40..], true)].concat();
            let outcome = pass.forward_traced(&both, Some(&mut cancel)).map(drop);
            assert_eq!(outcome, Err(ForwardError::Cancelled));
            assert_eq!((pass.n_past(0), pass.n_past(1)), (n, 40), "{}", toy.name);
            watch.resume();
            close(&logits(&mut pass, 0, &ids[n..]), rest(n), toy.name);
            close(&logits(&mut pass, 1, &ids[40..]), rest(40), toy.name);
        }
    }
}

/// Published models with experts, at least one for each router, or with latent attention.
const EXPERTS_AND_LATENT: &[&str] = &[
    "mixtral.gguf",
    "qwen2moe.gguf",
    "qwen3moe.gguf",
    "qwen35moe.gguf",
    "lfm2moe.gguf",
    "granitemoe.gguf",
    "deepseek2.gguf",
    "deepseek2-lite.gguf",
    "gpt-oss.gguf",
    "glm4moe.gguf",
    "gemma4-moe.gguf",
];

#[test]
fn experts_and_latent_attention_give_the_logits_of_the_cpu() {
    let Some(gpu) = cuda(&Watch::default()) else { return };
    let ids = some_ids(40);
    for toy in published(EXPERTS_AND_LATENT) {
        let want = logits(&mut on_cpu(&toy), 0, &ids);
        // F16 keys and values are rounded.
        let f32 = |n, step| (CacheType::F32, n, step, LIMIT);
        for (cache_type, n, step, limit) in [f32(40, 40), f32(6, 1), f32(15, 5), (CacheType::F16, 30, 30, 1e-5)] {
            let mut pass = on_cuda(&gpu, &toy, &SessionOptions { cache_type, ..options() });
            let found: Vec<_> = ids[..n].chunks(step).flat_map(|part| logits(&mut pass, 1, part)).collect();
            let error = nmse(&found, &want[..found.len()]);
            assert!(error < limit, "{}: {cache_type:?}, in steps of {step}: NMSE {error:e}", toy.name);
        }
    }
}

/// The kernels for one or a few tokens have F32 precision also without `exact`, and differ from those of the exact path.
#[test]
fn single_tokens_give_the_logits_of_the_cpu() {
    let Some(gpu) = cuda(&Watch::default()) else { return };
    let ids = some_ids(14);
    for toy in recurrent().into_iter().chain(published(EXPERTS_AND_LATENT)) {
        let want = logits(&mut on_cpu(&toy), 0, &ids);
        for step in [1, 2] {
            let mut pass = on_cuda(&gpu, &toy, &SessionOptions { exact: false, ..options() });
            let found: Vec<_> = ids.chunks(step).flat_map(|part| logits(&mut pass, 1, part)).collect();
            let error = nmse(&found, &want);
            assert!(error < LIMIT, "{}: in steps of {step}: NMSE {error:e}", toy.name);
        }
    }
}

/// In GEMMs that round their inputs to F16, rows are sorted by expert, or by head.
#[test]
fn rows_sorted_by_expert_or_head_return_to_their_tokens() {
    let Some(gpu) = cuda(&Watch::default()) else { return };
    let is_bf16 = |name: &str| name.ends_with(".weight") && !name.contains("norm") && !name.contains("conv1d");
    let experts = [("expert_count", 8), ("expert_used_count", 3), ("expert_feed_forward_length", 64)];
    let toys = [
        toy_with_bf16("qwen3moe", &metadata("qwen3moe", 2, &experts), &is_bf16),
        toy_with_bf16("kimi-linear", &kimi_linear(20), &is_bf16),
    ];
    let ids = some_ids(120);
    for toy in toys {
        let n_vocab = toy.model.spec().n_vocab;
        let want = logits(&mut on_cpu(&toy), 0, &ids);
        for (n_ubatch, step) in [(120, 120), (32, 120), (120, 7)] {
            let options = SessionOptions { exact: false, n_ubatch, ..options() };
            let mut pass = on_cuda(&gpu, &toy, &options);
            let found: Vec<_> = ids.chunks(step).flat_map(|part| logits(&mut pass, 1, part)).collect();
            let rows = found.chunks(n_vocab).zip(want.chunks(n_vocab));
            let mut errors: Vec<f64> = rows.map(|(found, want)| nmse(found, want)).collect();
            errors.sort_by(f64::total_cmp);
            // Rounding may change the experts of a token where two router scores are nearly equal. So one row in five may
            // differ.
            let (eighth_decile, largest) = (errors[errors.len() * 8 / 10], errors[errors.len() - 1]);
            assert!(
                eighth_decile < 1e-4,
                "{}, {n_ubatch} at once, in steps of {step}: {eighth_decile:e}, {largest:e}",
                toy.name
            );
        }
    }
}
