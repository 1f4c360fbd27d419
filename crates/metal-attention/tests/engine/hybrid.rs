//! Models with recurrent states on the CPU: the logits are equal, bit for bit, for every division of the tokens into
//! batches, and after sequences were cut back, shared or cancelled.

use metal_attention_testing::models::more_architectures;
use std::ops::ControlFlow;

use crate::toys::{Toy, batch, kimi_linear, logits, metadata, read, some_ids, toy};
use metal_attention::gguf::GgufFile;
use metal_attention::sampling::SamplerOptions;
use metal_attention::{
    BatchToken, CacheType, CpuExecutor, CpuForwardPass, Device, EngineOptions, ForwardError, ForwardPass,
    GenerateOptions, Generator, Model, ModelOptions, SessionOptions,
};
use metal_attention_cpu::CpuOptions;
use metal_attention_model::{PAGE, Watch};

const N_CTX: usize = 400;

/// Files of published architectures with each kind of recurrent layer.
const PUBLISHED: &[&str] = &[
    "lfm2.gguf",
    "lfm2moe.gguf",
    "qwen35.gguf",
    "qwen35moe.gguf",
    "qwen3next.gguf",
    "mamba.gguf",
    "mamba2.gguf",
    "jamba.gguf",
    "granitehybrid.gguf",
    "nemotron_h.gguf",
    "falcon-h1.gguf",
    "rwkv6.gguf",
    "rwkv7.gguf",
];

/// The published models, and toys with shapes that no published model has.
fn models() -> Vec<Toy> {
    let published = PUBLISHED.iter().map(|name| read(name, &more_architectures()[*name]));
    let mut ends = metadata("lfm2", 4, &[("shortconv.l_cache", 4)]);
    ends.set("lfm2.attention.head_count_kv", vec![0u32, 2, 0, 0]);
    let ssm = [("ssm.conv_kernel", 3), ("ssm.inner_size", 48), ("ssm.state_size", 10), ("ssm.time_step_rank", 4)];
    let mut heads = metadata("plamo2", 4, &ssm);
    heads.set("plamo2.attention.head_count_kv", vec![0u32, 2, 0, 0]);
    let mut latent = metadata("nemotron_h_moe", 4, &ssm);
    latent.set("nemotron_h_moe.attention.head_count_kv", vec![0u32, 0, 2, 0]);
    latent.set("nemotron_h_moe.feed_forward_length", vec![0u32, 40, 0, 40]);
    for (key, n) in [
        ("ssm.group_count", 2u32),
        ("expert_count", 6),
        ("expert_used_count", 2),
        ("expert_feed_forward_length", 24),
        ("expert_shared_feed_forward_length", 24),
        ("moe_latent_size", 20),
    ] {
        latent.set(format!("nemotron_h_moe.{key}"), n);
    }
    let delta = [
        ("ssm.group_count", 3),
        ("ssm.state_size", 20),
        ("ssm.time_step_rank", 6),
        ("ssm.inner_size", 54),
        ("ssm.conv_kernel", 3),
        ("rope.dimension_count", 8),
        ("full_attention_interval", 2),
    ];
    let delta = metadata("qwen35", 5, &delta);
    let linear = [("wkv.head_size", 8), ("time_mix_extra_dim", 6), ("time_decay_extra_dim", 5)];
    let mut rwkv7 = metadata("arwkv7", 3, &[("wkv.head_size", 16), ("attention.gate_lora_rank", 7)]);
    for part in ["decay", "iclr", "value_residual_mix"] {
        rwkv7.set(format!("arwkv7.attention.{part}_lora_rank"), 5u32);
    }
    let linear = metadata("rwkv6qwen2", 3, &linear);
    let toys = [
        ("a convolution last", &ends),
        ("the delta rule last, in heads of odd lengths", &delta),
        ("channels that decay each by itself", &kimi_linear(18)),
        ("Mamba with heads", &heads),
        ("experts of a narrow row", &latent),
        ("gated linear attention", &linear),
        ("a time mix alone", &rwkv7),
    ];
    published.chain(toys.map(|(name, metadata)| toy(name, metadata))).collect()
}

fn options() -> SessionOptions {
    SessionOptions { n_ctx: N_CTX, n_seq: 4, cache_type: CacheType::F32, ..Default::default() }
}

/// A forward pass on two threads.
fn on_cpu(toy: &Toy, options: &SessionOptions) -> CpuForwardPass {
    on_threads(&CpuOptions { n_threads: 2, ..Default::default() }, toy, options)
}

fn on_threads(cpu: &CpuOptions, toy: &Toy, options: &SessionOptions) -> CpuForwardPass {
    CpuExecutor::session(cpu, &toy.model, options).unwrap()
}

#[test]
fn logits_do_not_depend_on_the_division_into_batches() {
    let ids = some_ids(300);
    for toy in models() {
        let (name, n_vocab) = (toy.name, toy.model.spec().n_vocab);
        let want = logits(&mut on_cpu(&toy, &options()), 0, &ids);
        for (n_threads, n_ubatch, step) in [(1, 512, 1), (2, 24, 300), (2, 512, 7), (2, 100, 130), (1, 64, 64)] {
            let cpu = CpuOptions { n_threads, ..Default::default() };
            let mut pass = on_threads(&cpu, &toy, &SessionOptions { n_ubatch, ..options() });
            let found: Vec<_> = ids.chunks(step).flat_map(|chunk| logits(&mut pass, 0, chunk)).collect();
            assert!(found == want, "{name}: {n_ubatch} at once, in steps of {step}");
        }
        // Logits of the last token only, while another sequence alternates with it token by token.
        let mut pass = on_cpu(&toy, &options());
        let other: Vec<u32> = ids.iter().rev().copied().collect();
        let other_logits = logits(&mut on_cpu(&toy, &options()), 0, &other);
        let token = |seq, ids: &[u32], pos: usize| BatchToken { id: ids[pos], seq, pos, output: pos + 1 == ids.len() };
        let alternating: Vec<_> = (0..300).flat_map(|pos| [token(2, &ids, pos), token(0, &other, pos)]).collect();
        let found = pass.forward(&alternating).unwrap();
        assert!(found.row(0) == &want[299 * n_vocab..] && found.row(1) == &other_logits[299 * n_vocab..], "{name}");
    }
}

#[test]
fn sequences_are_cut_back_to_checkpoints_and_shared_from_there() {
    let ids = some_ids(300);
    for toy in models() {
        let (name, n_vocab) = (toy.name, toy.model.spec().n_vocab);
        let mut pass = on_cpu(&toy, &options());
        let want = logits(&mut pass, 0, &ids);
        let rest = |n: usize| &want[n * n_vocab..];
        assert_eq!((pass.reachable(0, 299), pass.reachable(0, 298)), (299, 4 * PAGE), "{name}");
        assert_eq!(pass.share_prefix(0, 1, 299).unwrap(), 299, "{name}");
        assert!(logits(&mut pass, 1, &ids[299..]) == rest(299), "{name}: the last token anew");
        assert_eq!(pass.share_prefix(1, 2, 150).unwrap(), 2 * PAGE, "{name}");
        assert!(logits(&mut pass, 2, &ids[2 * PAGE..]) == rest(2 * PAGE), "{name}: after a shared beginning");
        // Pages that other sequences share keep their contents when this sequence overwrites its own.
        assert_eq!(pass.rewind(0, 200), 3 * PAGE, "{name}");
        logits(&mut pass, 0, &ids[..60]);
        assert_eq!(pass.rewind(1, 3 * PAGE + 1), 3 * PAGE, "{name}");
        assert!(logits(&mut pass, 1, &ids[3 * PAGE..]) == rest(3 * PAGE), "{name}: after a cut");
        pass.reset();
        assert!(logits(&mut pass, 3, &ids) == want, "{name}: once more");
        // Without memory for checkpoints the states of idle sequences are taken, and the tokens whose state is lost are
        // evaluated again.
        let mut pass = on_cpu(&toy, &SessionOptions { state_cache: 0, n_windows: Some(1), ..options() });
        logits(&mut pass, 0, &ids);
        let reached = pass.rewind(0, 290);
        assert!(reached <= 4 * PAGE, "{name}: {reached}");
        assert!(logits(&mut pass, 0, &ids[reached..]) == rest(reached), "{name}: from {reached} on");
    }
}

#[test]
fn a_cancelled_batch_leaves_states_unchanged() {
    let ids = some_ids(300);
    for toy in models() {
        let want = logits(&mut on_cpu(&toy, &options()), 0, &ids);
        let rest = |n: usize| &want[n * toy.model.spec().n_vocab..];
        let last = toy.model.spec().n_layer() - 1;
        for (n, at_layer, at_micro_batch) in [(70, 0, 1), (70, 2, 1), (64, 3, 2), (0, 1, 3), (1, 3, 4)] {
            let watch = Watch::default();
            let cpu = CpuOptions { n_threads: 2, watch: watch.clone(), ..Default::default() };
            let mut pass = on_threads(&cpu, &toy, &SessionOptions { n_ubatch: 50, ..options() });
            logits(&mut pass, 1, &ids[..80]);
            if n > 0 {
                logits(&mut pass, 0, &ids[..n]);
            }
            let mut micro_batches = 0;
            let mut cancel = |layer: usize, _: &[f32]| {
                micro_batches += usize::from(layer == 0);
                if (layer, micro_batches) == (last.min(at_layer), at_micro_batch) {
                    watch.cancel();
                }
            };
            let both = [batch(&pass, 0, &ids[n..], true), batch(&pass, 1, &ids[80..], true)].concat();
            let outcome = pass.forward_traced(&both, Some(&mut cancel)).map(drop);
            assert_eq!(outcome, Err(ForwardError::Cancelled));
            assert_eq!((pass.n_past(0), pass.n_past(1)), (n, 80), "{}", toy.name);
            watch.resume();
            assert!(logits(&mut pass, 0, &ids[n..]) == rest(n), "{}: from {n} on", toy.name);
            assert!(logits(&mut pass, 1, &ids[80..]) == rest(80), "{}", toy.name);
        }
    }
}

#[test]
fn sequences_without_memory_for_their_states_are_refused() {
    let toy = &models()[0];
    let mut pass = on_cpu(toy, &SessionOptions { state_cache: 0, n_windows: Some(1), ..options() });
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

/// The prompts of a chat after `/undo` and `/regenerate`: they end before the cached sequence does, or differ from it.
#[test]
fn answers_can_be_undone_and_regenerated() {
    let file = GgufFile::from_bytes(&more_architectures()["lfm2.gguf"]).unwrap();
    let model = Model::from_gguf(file, &ModelOptions::default()).unwrap();
    let options = EngineOptions { device: Device::Cpu, n_ctx: Some(N_CTX), n_threads: Some(2), ..Default::default() };
    let generator = || Generator::new(&model, &options, SamplerOptions::greedy()).unwrap();
    let generate = |generator: &mut Generator, prompt: &[u32]| {
        generator.prompt(prompt, |_, _| ControlFlow::Continue(())).unwrap();
        let options = GenerateOptions { n_predict: Some(30), ignore_eos: true, ..Default::default() };
        let mut generation = generator.generate(options);
        let ids: Vec<u32> = generation.by_ref().map(|token| token.unwrap().id).collect();
        (ids, generation.timings().cached_tokens)
    };
    let ids = some_ids(250);
    let mut chat = generator();
    let other = [&ids[..190], &[7; 9]].concat();
    for (prompt, cached) in [(&ids[..200], 0), (&ids[..200], 192), (&ids[..180], 128), (&other, 128), (&ids[..60], 0)] {
        let found = generate(&mut chat, prompt);
        assert_eq!(found, (generate(&mut generator(), prompt).0, cached), "{} tokens", prompt.len());
    }
}
