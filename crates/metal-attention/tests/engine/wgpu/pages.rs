//! Sequences that share KV pages on the GPU, and free pages that run out. Without a GPU (a software one will do) the tests
//! are skipped; in CI that is a failure.

use std::sync::Arc;

use crate::wgpu::device::{gpu, start};
use metal_attention::gguf::GgufFile;
use metal_attention::wgpu::WgpuDevice;
use metal_attention::{
    BatchToken, CacheType, ForwardError, ForwardPass, LoadedModel, PageUse, SessionOptions, WgpuExecutor,
    WgpuForwardPass, WgpuTuning,
};

const PAGE: usize = 64;

fn stories() -> GgufFile {
    let path = metal_attention_testing::stories();
    GgufFile::read(path).unwrap()
}

/// The forward pass with `n_seq` sequences and `n_pages` KV pages. The persistent kernel, which is used only while a
/// sequence's pages lie in order, is disabled, because some tests compare bits.
fn model(gpu: &Arc<WgpuDevice>, n_seq: usize, n_pages: usize) -> WgpuForwardPass {
    let options = SessionOptions {
        n_ctx: 512,
        n_seq,
        n_cache: Some(n_pages * PAGE),
        cache_type: CacheType::F32,
        ..Default::default()
    };
    let file = stories();
    let model = LoadedModel::load(&file).unwrap();
    let tuning = WgpuTuning { persistent_workgroups: Some(0), ..Default::default() };
    WgpuExecutor::tuned_session(Arc::clone(gpu), &model, &options, &tuning).unwrap()
}

/// `n` ids of the vocabulary.
fn some_ids(n: usize) -> Vec<u32> {
    (0..n).map(|i| ((i * i * 31 + i * 7 + 3) % 512) as u32).collect()
}

/// The batch that appends `ids` to sequence `seq`, with the logits of the last token.
fn batch(model: &dyn ForwardPass, seq: usize, ids: &[u32]) -> Vec<BatchToken> {
    let start = model.n_past(seq);
    let token = |(i, &id)| BatchToken { id, seq, pos: start + i, output: i + 1 == ids.len() };
    ids.iter().enumerate().map(token).collect()
}

/// The `n` ids that greedy decoding generates after `ids` in an empty cache.
fn generate_alone(model: &mut WgpuForwardPass, ids: &[u32], n: usize) -> Vec<u32> {
    model.reset();
    let mut tokens = vec![model.forward_prompt(ids).unwrap()];
    while tokens.len() < n {
        tokens.push(model.forward_token_greedy(tokens[tokens.len() - 1]).unwrap());
    }
    tokens
}

/// Generates the next token of each (sequence, tokens), whose last token is not in the cache yet.
fn step(model: &mut WgpuForwardPass, sequences: &mut [(usize, Vec<u32>)]) -> Result<(), ForwardError> {
    let batch: Vec<_> = sequences
        .iter()
        .map(|(seq, tokens)| BatchToken {
            id: tokens[tokens.len() - 1],
            seq: *seq,
            pos: model.n_past(*seq),
            output: true,
        })
        .collect();
    let ids = model.forward_greedy(&batch)?;
    for ((_, tokens), id) in sequences.iter_mut().zip(ids) {
        tokens.push(id);
    }
    Ok(())
}

#[test]
fn sequences_that_share_pages_generate_the_tokens_of_single_ones() {
    let Some(gpu) = gpu() else { return };
    let mut single = model(&gpu, 1, 8);
    let ids = some_ids(80);
    // (sequence, tokens of `ids` that its prompt begins with, the last token of its prompt)
    let prompts = [(0, 80, 5), (1, 80, 6), (2, 70, 7), (3, 64, 8)];
    let want = prompts.map(|(_, n, last)| generate_alone(&mut single, &[&ids[..n], &[last]].concat(), 70));

    // Two pages for each sequence and one more. Without sharing each would need three.
    let mut model = model(&gpu, 5, 9);
    model.forward(&batch(&model, 0, &ids)).unwrap();
    for (seq, n, _) in &prompts[1..] {
        model.share_prefix(0, *seq, *n).unwrap();
    }
    assert_eq!(model.cache_pages(), PageUse { page_len: PAGE, total: 9, free: 7, ..Default::default() });
    let mut sequences: Vec<_> = prompts.iter().map(|&(seq, _, last)| (seq, vec![last])).collect();
    for i in 0..70 {
        step(&mut model, &mut sequences).unwrap();
        let used: usize = 1 + (0..4).map(|seq| model.n_past(seq).div_ceil(PAGE) - 1).sum::<usize>();
        assert_eq!(model.cache_pages().free, 9 - used, "step {i}: pages reserved for steps in flight are free");
        if i == 30 {
            // Shares a page that steps in flight write to. Both sequences continue; sequence 4 ends before the pages run
            // out.
            model.share_prefix(1, 4, 100).unwrap();
            let mut newcomer = [(4, vec![sequences[1].1[100 - 80]])];
            for _ in 0..5 {
                step(&mut model, &mut newcomer).unwrap();
            }
            assert_eq!(newcomer[0].1, sequences[1].1[20..26]);
            model.rewind(4, 0);
        }
    }
    for ((seq, tokens), want) in sequences.iter().zip(&want) {
        assert_eq!(tokens[1..], want[..], "sequence {seq}");
    }
    model.reset();
    assert_eq!(model.cache_pages().free, 9);
}

#[test]
fn a_batch_without_free_pages_is_refused_and_changes_nothing() {
    let Some(gpu) = gpu() else { return };
    let ids = some_ids(120);
    let want = generate_alone(&mut model(&gpu, 1, 8), &ids[..50], 40);
    let mut model = model(&gpu, 2, 3);
    model.forward(&batch(&model, 0, &ids)).unwrap();
    model.forward(&batch(&model, 1, &ids[..49])).unwrap();
    let mut sequences = [(0, vec![3]), (1, vec![ids[49]])];
    // Greedy steps stop being queued ahead before the pages run out.
    for _ in 49..PAGE {
        step(&mut model, &mut sequences[1..]).unwrap();
    }
    let lengths = |model: &WgpuForwardPass| (model.n_past(0), model.n_past(1), model.cache_pages().free);
    assert_eq!(lengths(&model), (120, 64, 0));
    let full = |needed| ForwardError::OutOfPages { needed, free: 0, total: 3, page_len: PAGE };
    assert_eq!(step(&mut model, &mut sequences[1..]).unwrap_err(), full(1));
    assert_eq!(step(&mut model, &mut sequences).unwrap_err(), full(1));
    let long = batch(&model, 1, &ids[..70]);
    assert_eq!(model.forward(&long).unwrap_err(), full(2));
    assert_eq!(model.forward_top_k(&long, 3).unwrap_err(), full(2));
    assert_eq!(lengths(&model), (120, 64, 0));
    // Sequence 0 is replaced with a prefix of sequence 1.
    model.share_prefix(1, 0, 50).unwrap();
    assert_eq!(lengths(&model), (50, 64, 2));
    sequences[0].1 = vec![want[0]];
    for _ in 0..5 {
        step(&mut model, &mut sequences[..1]).unwrap();
    }
    assert_eq!(sequences[0].1, want[..6]);
    for _ in 0..want.len() - 15 {
        step(&mut model, &mut sequences[1..]).unwrap();
    }
    assert_eq!(sequences[1].1[1..], want);
    assert_eq!(lengths(&model), (55, 89, 0));
}

#[test]
fn steps_ahead_stop_at_the_last_page() {
    let Some(gpu) = gpu() else { return };
    let ids = some_ids(40);
    let want = generate_alone(&mut model(&gpu, 1, 8), &ids, 25);
    let mut model = model(&gpu, 1, 1);
    assert_eq!(generate_alone(&mut model, &ids, 25), want);
    assert_eq!(model.position(), PAGE);
    let full = ForwardError::OutOfPages { needed: 1, free: 0, total: 1, page_len: PAGE };
    assert_eq!(model.forward_token_greedy(want[24]).unwrap_err(), full);
    assert_eq!(model.forward_token(want[24]).unwrap_err(), full);
    model.truncate(63);
    assert_eq!(model.forward_token_greedy(want[23]).unwrap(), want[24]);
}

#[test]
fn steps_ahead_of_a_replaced_sequence_are_discarded() {
    let Some(gpu) = gpu() else { return };
    let mut model = model(&gpu, 2, 8);
    let ids = some_ids(60);
    let tokens = generate_alone(&mut model, &ids, 11);
    // Another sequence, as long as the first one with ten generated tokens, and the token that follows in it after the tenth
    // of those.
    model.reset();
    let other: Vec<u32> = (0..69).map(|i| (i * 37 + 11) % 512).collect();
    model.forward(&batch(&model, 1, &other)).unwrap();
    let next = [BatchToken { id: tokens[9], seq: 1, pos: other.len(), output: true }];
    let want = model.forward_greedy(&next).unwrap()[0];
    assert_ne!(want, tokens[10]);
    model.rewind(1, other.len());
    // Now steps are in flight that begin with the same token at the same position.
    assert_eq!(model.forward_prompt(&ids).unwrap(), tokens[0]);
    for pair in tokens[..10].windows(2) {
        assert_eq!(model.forward_token_greedy(pair[0]).unwrap(), pair[1]);
    }
    assert_eq!(model.position(), other.len());
    model.share_prefix(1, 0, other.len()).unwrap();
    assert_eq!(model.forward_token_greedy(tokens[9]).unwrap(), want);
}

#[test]
fn the_page_pool_has_the_size_of_the_cache() {
    let Some(gpu) = gpu() else { return };
    let file = stories();
    let loaded = LoadedModel::load(&file).unwrap();
    // Bytes of a page: keys and values of 5 layers, 4 heads of 8 elements, in 16 bits.
    let page = (2 * PAGE * 5 * 4 * 8 * 2) as u64;
    for (n_ctx, n_seq, n_cache, n_pages) in
        [(100, 1, None, 2), (100, 3, None, 6), (300, 9, Some(129), 3), (64, 1, Some(300), 5)]
    {
        let options = SessionOptions { n_ctx, n_seq, n_cache, ..Default::default() };
        let model = start(&gpu, &file, &options);
        assert_eq!(
            model.cache_pages(),
            PageUse { page_len: PAGE, total: n_pages, free: n_pages, ..Default::default() }
        );
        assert_eq!(model.memory_use().kv_cache, n_pages as u64 * page);
        assert_eq!(model.kv_cache_bytes() as u64, n_pages as u64 * page);
        assert_eq!((model.n_ctx(), model.n_seq()), (n_ctx, n_seq));
        let needed = WgpuExecutor::memory_needed(&loaded, &options, gpu.summary().max_binding);
        assert_eq!(needed.kv_cache, n_pages as u64 * page);
    }
}

#[test]
fn a_shared_prefix_gives_the_logits_of_the_original_sequence() {
    let Some(gpu) = gpu() else { return };
    let mut model = model(&gpu, 3, 24);
    let ids = some_ids(90);
    model.forward(&batch(&model, 0, &ids[..80])).unwrap();
    model.forward(&batch(&model, 2, &ids[10..70])).unwrap();
    // One token per batch, which gives equal bits in all sequences.
    let bits_after = |model: &mut WgpuForwardPass, seq: usize, ids: &[u32]| -> Vec<u32> {
        let rows = ids.iter().flat_map(|&id| {
            let batch = batch(model, seq, &[id]);
            model.forward(&batch).unwrap().row(0).to_vec()
        });
        rows.map(f32::to_bits).collect()
    };
    for n in [77, 64, 1] {
        model.share_prefix(0, 2, n).unwrap();
        assert_eq!([0, 1, 2].map(|seq| model.n_past(seq)), [80, 0, n]);
        let other = bits_after(&mut model, 2, &ids[80..]);
        // Neither of two sequences that share pages changes the other.
        model.share_prefix(0, 1, n).unwrap();
        assert_eq!(bits_after(&mut model, 1, &ids[80..]), other, "{n} tokens");
        model.share_prefix(1, 2, n).unwrap();
        model.rewind(1, 0);
        assert_eq!(bits_after(&mut model, 2, &ids[80..]), other, "{n} tokens");
    }
    model.truncate(77);
    let want = bits_after(&mut model, 0, &ids[80..]);
    model.truncate(77);
    model.share_prefix(0, 1, 77).unwrap();
    assert_eq!(bits_after(&mut model, 1, &ids[80..]), want);
    assert_eq!(model.share_prefix(0, 1, 78).unwrap_err(), ForwardError::PrefixTooLong { seq: 0, n: 78, n_past: 77 });
    model.reset();
    assert_eq!(model.cache_pages(), PageUse { page_len: 64, total: 24, free: 24, ..Default::default() });
}
