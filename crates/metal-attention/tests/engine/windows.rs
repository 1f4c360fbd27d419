//! Sliding windows and chunked attention: layers keep only the KV pages that later tokens may attend to, and reuse the
//! others. The results of sequences much longer than the window equal those of a cache with all pages. Without a GPU its
//! test is skipped; in CI that is a failure.

use crate::toys::{Toy, batch, metadata, read, some_ids, toy};
use metal_attention::{BatchToken, CacheType, CpuExecutor, CpuForwardPass, ForwardPass, SessionOptions};
use metal_attention_cpu::CpuOptions;
use metal_attention_model::{Mask, Mixer};
use metal_attention_testing::models::more_architectures;

const N_CTX: usize = 640;
/// Tokens of a micro-batch: few, so that pages are soon reused; and the whole context, so that none is.
const FEW: usize = 24;
const ALL: usize = N_CTX;

/// Layers with sliding windows, with chunks that begin at a page boundary and with others that do not, and with full
/// attention.
fn mixed() -> Toy {
    let masks = [Mask::Window(40), Mask::Chunk(128), Mask::Causal, Mask::Chunk(100), Mask::Window(90)];
    with_masks(toy("mixed", &metadata("llama", 5, &[])), masks)
}

/// The model with these masks in its layers.
fn with_masks(toy: Toy, masks: impl IntoIterator<Item = Mask>) -> Toy {
    toy.with_spec(|spec| {
        for (layer, mask) in spec.layers.iter_mut().zip(masks) {
            let Mixer::Attention(a) = &mut layer.mixer else { panic!("llama has attention") };
            a.mask = mask;
        }
    })
}

/// A model with sliding windows in all layers.
fn windows_only(name: &'static str, windows: [usize; 2]) -> Toy {
    with_masks(toy(name, &metadata("llama", 2, &[])), windows.map(Mask::Window))
}

fn models(names: &[&'static str]) -> Vec<Toy> {
    let published = names.iter().map(|&name| read(name, &more_architectures()[name]));
    let windowed = [windows_only("windows only", [70, 70]), windows_only("narrow windows", [1, 64])];
    [mixed()].into_iter().chain(windowed).chain(published).collect()
}

fn on_cpu(toy: &Toy, n_seq: usize, n_ubatch: usize) -> CpuForwardPass {
    let cache_type = CacheType::F32;
    let options = SessionOptions { n_ctx: N_CTX, n_seq, cache_type, n_ubatch, ..Default::default() };
    CpuExecutor::session(&CpuOptions { n_threads: 2, ..Default::default() }, &toy.model, &options).unwrap()
}

/// Appends `ids` to sequence `seq`. Returns the logits of all of them.
fn logits(pass: &mut dyn ForwardPass, seq: usize, ids: &[u32]) -> Vec<f32> {
    let batch = batch(pass, seq, ids, true);
    pass.forward(&batch).unwrap().as_slice().to_vec()
}

/// Appends `ids` to sequence 0 and generates `n` tokens greedily. The device may queue decode steps ahead.
fn greedy(pass: &mut dyn ForwardPass, ids: &[u32], n: usize) -> Vec<u32> {
    let mut tokens = vec![pass.forward_prompt(ids).unwrap()];
    while tokens.len() < n {
        tokens.push(pass.forward_token_greedy(tokens[tokens.len() - 1]).unwrap());
    }
    tokens
}

#[test]
fn reused_pages_give_the_logits_of_a_cache_with_all_pages() {
    let ids = some_ids(500);
    for toy in models(&["gemma2.gguf", "gemma3.gguf", "gemma3n.gguf", "gemma4.gguf", "cohere2.gguf", "gpt-oss.gguf"]) {
        let (name, n_vocab) = (toy.name, toy.model.spec().n_vocab);
        let mut whole = on_cpu(&toy, 2, ALL);
        let mut pass = on_cpu(&toy, 2, FEW);
        let want = logits(&mut whole, 0, &ids);
        let rest = |n: usize| &want[n * n_vocab..];
        assert!(pass.kv_cache_bytes() < whole.kv_cache_bytes(), "{name}");
        assert!(logits(&mut pass, 0, &ids) == want, "{name}: in one call");
        // A sequence can be cut back by as many tokens as a micro-batch has. The pages further back are reused, and the
        // sequence becomes empty.
        assert_eq!(pass.rewind(0, 500 - FEW), 500 - FEW, "{name}");
        assert!(logits(&mut pass, 0, &ids[500 - FEW..]) == rest(500 - FEW), "{name}: the last tokens anew");
        assert_eq!(pass.share_prefix(0, 1, 490).unwrap(), 490, "{name}");
        assert!(logits(&mut pass, 1, &ids[490..]) == rest(490), "{name}: after a shared beginning");
        let reached = pass.share_prefix(0, 1, 150).unwrap();
        assert_eq!(reached, 0, "{name}");
        assert!(logits(&mut pass, 1, &ids[reached..]) == want, "{name}: after a beginning that was lost");
        assert_eq!((pass.reachable(0, 150), pass.rewind(0, 150), pass.n_past(0)), (0, 0, 0), "{name}");
        // In batches of 20 tokens, beside another sequence.
        for at in (0..500).step_by(20) {
            let both = [batch(&pass, 0, &ids[at..at + 20], true), batch(&pass, 1, &ids[..5], false)].concat();
            let found = pass.forward(&both).unwrap();
            assert!(found.as_slice()[..20 * n_vocab] == rest(at)[..20 * n_vocab], "{name}: from {at} on");
        }
        pass.reset();
        assert_eq!(pass.cache_pages().free, pass.cache_pages().total, "{name}");
        // One sequence may have all pages, again and again.
        assert!(logits(&mut pass, 0, &ids) == want, "{name}: once more");
    }
}

#[test]
fn a_sequence_can_be_cut_back_to_a_chunk_at_a_page_boundary() {
    let toy = with_masks(mixed(), [Mask::Causal, Mask::Chunk(128)].into_iter().cycle());
    let ids = some_ids(500);
    let want = logits(&mut on_cpu(&toy, 1, ALL), 0, &ids);
    let mut pass = on_cpu(&toy, 2, FEW);
    logits(&mut pass, 0, &ids);
    assert_eq!(pass.share_prefix(0, 1, 200).unwrap(), 128);
    assert_eq!(pass.rewind(0, 150), 128);
    for seq in [0, 1] {
        assert!(logits(&mut pass, seq, &ids[128..]) == want[128 * toy.model.spec().n_vocab..], "sequence {seq}");
    }
}

/// Generates greedily in three sequences of `pass`, after shared prefixes and after cuts, and compares them with `single`,
/// which has one sequence and all pages.
fn check_concurrent_sequences(name: &str, pass: &mut dyn ForwardPass, single: &mut dyn ForwardPass) {
    const N: usize = 80;
    let ids = some_ids(300);
    // (sequence, tokens of `ids` that its prompt begins with, the last token of its prompt)
    let prompts = [(0, 300, 5), (1, 299, 6), (2, 40, 7)];
    let want = prompts.map(|(_, n, last)| {
        single.reset();
        greedy(single, &[&ids[..n], &[last]].concat(), N)
    });
    // Decode steps are queued ahead, and pages reused, until half of the tokens are cut off and generated again.
    let found = greedy(pass, &[&ids[..], &[prompts[0].2]].concat(), N);
    assert_eq!(found, want[0], "{name}: single");
    let reached = pass.truncate(301 + N / 2);
    let again = [&ids[..], &[prompts[0].2], &want[0][..=N / 2]].concat();
    assert_eq!(greedy(pass, &again[reached..], N / 2 - 1), want[0][N / 2 + 1..], "{name}: after a cut");
    let reached = pass.truncate(300);
    if reached < 300 {
        let batch = batch(pass, 0, &ids[reached..], false);
        pass.forward(&batch).unwrap();
    }
    for &(seq, n, _) in &prompts[1..] {
        let reached = pass.share_prefix(0, seq, n).unwrap();
        assert!(reached == n || n == 40, "{name}: {reached} of {n}");
        if reached < n {
            let batch = batch(pass, seq, &ids[reached..n], false);
            pass.forward(&batch).unwrap();
        }
    }
    let mut sequences = prompts.map(|(_, _, last)| vec![last]);
    for i in 0..N {
        let next = |(seq, tokens): (usize, &Vec<u32>)| {
            let id = tokens[tokens.len() - 1];
            BatchToken { id, seq, pos: pass.n_past(seq), output: true }
        };
        let batch: Vec<_> = sequences.iter().enumerate().map(next).collect();
        // Seven of ten steps may be queued ahead; the others are not.
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

#[test]
fn concurrent_sequences_on_the_cpu_equal_single_ones() {
    for toy in models(&["gemma2.gguf", "gemma3.gguf", "gemma3n.gguf", "gemma4.gguf", "cohere2.gguf", "gpt-oss.gguf"]) {
        check_concurrent_sequences(toy.name, &mut on_cpu(&toy, 3, FEW), &mut on_cpu(&toy, 1, ALL));
    }
}

#[cfg(feature = "wgpu")]
#[test]
fn concurrent_sequences_on_the_gpu_equal_single_ones() {
    use std::sync::Arc;

    use metal_attention::{SessionOptions, WgpuExecutor};

    let Some(gpu) = crate::wgpu::device::gpu() else { return };
    let ids = some_ids(500);
    // A window in every second layer.
    let few = crate::wgpu::device::takes_fewer_cases(&gpu);
    let names = ["gemma2.gguf", "gemma3.gguf", "gemma3n.gguf", "cohere2.gguf"];
    for toy in models(&names[..if few { 1 } else { names.len() }]) {
        let name = toy.name;
        let open = |n_seq, n_ubatch| {
            let options =
                SessionOptions { n_ctx: N_CTX, n_seq, n_ubatch, cache_type: CacheType::F32, ..Default::default() };
            let needed = WgpuExecutor::memory_needed(&toy.model, &options, gpu.summary().max_binding);
            let pass = WgpuExecutor::session(Arc::clone(&gpu), &toy.model, &options).unwrap();
            assert_eq!(needed.kv_cache, pass.memory_use().kv_cache, "{name}");
            pass
        };
        let (mut pass, mut single) = (open(3, FEW), open(1, ALL));
        assert!(pass.kv_cache_bytes() < 3 * single.kv_cache_bytes(), "{name}");
        let want = logits(&mut on_cpu(&toy, 1, ALL), 0, &ids);
        let error = crate::toys::nmse(&logits(&mut pass, 0, &ids), &want);
        assert!(error < 1e-6, "{name}: NMSE {error:e}");
        pass.reset();
        check_concurrent_sequences(name, &mut pass, &mut single);
    }
}
