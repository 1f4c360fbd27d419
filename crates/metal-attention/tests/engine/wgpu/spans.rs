//! Spans of embedding rows on the GPU: a model that is given its own embeddings computes what it computes from the token ids;
//! and with positions, additional rows and spans that layers see whole, what the CPU computes. Without a GPU the tests are
//! skipped; in CI that is a failure.

use std::sync::Arc;

use crate::toys::{Toy, nmse, read, some_ids};
use crate::wgpu::device::{gpu, takes_fewer_cases};
use metal_attention::wgpu::WgpuDevice;
use metal_attention::{
    BatchToken, CacheType, CpuExecutor, CpuForwardPass, ForwardPass, SessionOptions, WgpuExecutor, WgpuForwardPass,
};
use metal_attention_cpu::CpuOptions;
use metal_attention_model::{Batch, Mask, Mixer, OutputKind, Outputs, Position, Span};
use metal_attention_testing::SeenParts;
use metal_attention_testing::models::{architectures, more_architectures};

/// The largest NMSE to the CPU, which sums in another order.
const LIMIT: f64 = 1e-8;

/// Rows of a picture's patches, and patches of a row.
const PATCHES: [usize; 2] = [6, 9];

fn options() -> SessionOptions {
    SessionOptions { n_ctx: 256, n_seq: 2, n_ubatch: 96, cache_type: CacheType::F32, exact: true, ..Default::default() }
}

fn on_gpu(gpu: &Arc<WgpuDevice>, toy: &Toy) -> WgpuForwardPass {
    WgpuExecutor::session(Arc::clone(gpu), &toy.model, &options()).unwrap_or_else(|e| panic!("{}: {e}", toy.name))
}

fn on_cpu(toy: &Toy) -> CpuForwardPass {
    CpuExecutor::session(&CpuOptions { n_threads: 1, ..Default::default() }, &toy.model, &options()).unwrap()
}

/// Tokens `start..start + n` of sequence `seq`, all with results.
fn tokens(pass: &dyn ForwardPass, seq: usize, start: usize, n: usize) -> Vec<BatchToken> {
    let n_vocab = pass.spec().n_vocab as u32;
    let ids = some_ids(start + n);
    (start..start + n).map(|pos| BatchToken { id: (ids[pos] + seq as u32) % n_vocab, seq, pos, output: true }).collect()
}

fn logits(pass: &mut dyn ForwardPass, tokens: &[BatchToken], spans: &[Span<'_>]) -> Vec<f32> {
    let (outputs, _) =
        pass.forward_outputs(Batch { tokens, spans }, OutputKind::Logits, &[]).expect("a batch that runs");
    let Outputs::Logits(logits) = outputs else { panic!("logits") };
    logits.as_slice().to_vec()
}

/// The embeddings of `tokens`, times the factor of the model.
fn own_rows(toy: &Toy, tokens: &[BatchToken]) -> Vec<f32> {
    let table = &toy.model.weights().token_embd.weight;
    let mut rows = Vec::new();
    for token in tokens {
        let mut row = vec![0.0; toy.model.spec().n_embd];
        table.ty().dequantize(table.row(token.id as usize), &mut row);
        rows.extend(row.iter().map(|x| x * toy.model.spec().embedding.scale));
    }
    rows
}

#[test]
fn own_embeddings_give_the_logits_of_the_tokens() {
    let Some(gpu) = gpu() else { return };
    let mut seen = takes_fewer_cases(&gpu).then(SeenParts::default);
    let files = || architectures().iter().chain(more_architectures());
    for (name, bytes) in files() {
        let toy = read("own embeddings", bytes);
        let spec = toy.model.spec();
        if !spec.generates_text() || seen.as_mut().is_some_and(|parts| !parts.adds(spec)) {
            continue;
        }
        let mut pass = on_gpu(&gpu, &toy);
        // Before the span, in it, and behind it.
        let tokens = tokens(&pass, 0, 0, 3 + 9 + 4);
        let want = logits(&mut pass, &tokens, &[]);
        let rows = own_rows(&toy, &tokens[3..12]);
        pass.rewind(0, 0);
        // Wrong ids in the place of the rows, if the layers read none.
        let mut tokens = tokens.clone();
        if spec.embedding.per_layer.is_none() {
            tokens[3..12].iter_mut().for_each(|token| token.id = 0);
        }
        let span = Span { first: 3, rows: &rows, additions: &[], positions: &[], whole_in: &[] };
        let found = logits(&mut pass, &tokens, &[span]);
        let error = nmse(&found, &want);
        // A device may dequantise with another rounding than the CPU.
        assert!(error < 1e-10, "{name}: NMSE {error:e}");
    }
}

/// The logits of batches with spans, the hidden rows after layers in the first of them, and greedily generated ids.
fn results(pass: &mut dyn ForwardPass) -> (Vec<Vec<f32>>, Vec<u32>) {
    let (n_embd, n_layer) = (pass.spec().n_embd, pass.spec().n_layer());
    let n = PATCHES[0] * PATCHES[1];
    let random = |seed: usize, n: usize, scale: f32| -> Vec<f32> {
        (0..n * n_embd).map(|i| ((i * 7919 + seed * 104_729) % 1009) as f32 / 504.5 - 1.0).map(|x| x * scale).collect()
    };
    let grid = |i: usize| Position([2, 2 + (i / PATCHES[1]) as u32, 2 + (i % PATCHES[1]) as u32]);
    let positions: Vec<_> = (0..n).map(grid).collect();
    let (rows, more) = (random(1, n, 0.7), random(2, n, 0.3));
    let even: Vec<bool> = (0..n_layer).map(|layer| layer % 2 == 0).collect();
    let additions: Vec<&[f32]> = vec![&more[..]; n_layer.min(2)];
    let picture = Span { first: 5, rows: &rows, additions: &additions, positions: &positions, whole_in: &even };
    // Of another sequence, with positions like text, and seen whole by all layers.
    let small = random(3, 4, 0.5);
    let whole = vec![true; n_layer];
    let other = Span { first: 5 + n + 3 + 2, rows: &small, additions: &[], positions: &[], whole_in: &whole };
    let mut found = Vec::new();
    let first = [tokens(pass, 0, 0, 5 + n + 3), tokens(pass, 1, 0, 2 + 4 + 1)].concat();
    let batch = Batch { tokens: &first, spans: &[picture, other] };
    let (outputs, hidden) = pass.forward_outputs(batch, OutputKind::Logits, &[1, n_layer]).expect("a batch that runs");
    let Outputs::Logits(rows_of_logits) = outputs else { panic!("logits") };
    found.push(rows_of_logits.as_slice().to_vec());
    found.push(hidden.as_slice().to_vec());
    // Text, in batches of all kinds: of two sequences, of one token, of several.
    let [slot, other_slot] = [5 + n + 3, 7];
    let both = [tokens(pass, 0, slot, 1), tokens(pass, 1, other_slot, 1)].concat();
    found.push(logits(pass, &both, &[]));
    let one = tokens(pass, 0, slot + 1, 1);
    found.push(logits(pass, &one, &[]));
    let several = tokens(pass, 0, slot + 2, 20);
    found.push(logits(pass, &several, &[]));
    // Greedy steps, which may be submitted ahead: of one sequence, and of two.
    let mut ids = Vec::new();
    let mut id = 3;
    for pos in slot + 22..slot + 30 {
        id = pass.forward_greedy(&[BatchToken { id, seq: 0, pos, output: true }]).unwrap()[0];
        ids.push(id);
    }
    let mut next = [id, 4];
    for i in 0..5 {
        let token = |seq: usize, pos: usize| BatchToken { id: next[seq], seq, pos: pos + i, output: true };
        let batch = [token(0, slot + 30), token(1, other_slot + 1)];
        next.copy_from_slice(&pass.forward_greedy(&batch).unwrap());
        ids.extend(next);
    }
    // A span of one row, with an addition, by itself; and text behind it.
    let row = random(4, 1, 0.6);
    let position = [Position([0, 3, 1])];
    let alone = Span { first: 0, rows: &row, additions: &[&row], positions: &position, whole_in: &whole };
    let token = tokens(pass, 0, slot + 35, 1);
    found.push(logits(pass, &token, &[alone]));
    let behind = tokens(pass, 0, slot + 36, 1);
    found.push(logits(pass, &behind, &[]));
    // Without an addition, two rows: the lists of last slots are those of this step.
    let rows = random(5, 2, 0.6);
    let two = Span { first: 1, rows: &rows, additions: &[], positions: &[], whole_in: &[] };
    let more = tokens(pass, 0, slot + 37, 4);
    found.push(logits(pass, &more, &[two]));
    (found, ids)
}

/// Checks that the GPU gives the results of the CPU.
fn check(gpu: &Arc<WgpuDevice>, toy: &Toy, what: &str) {
    let (want, ids) = results(&mut on_cpu(toy));
    let mut pass = on_gpu(gpu, toy);
    let (found, found_ids) = results(&mut pass);
    for (i, (found, want)) in found.iter().zip(&want).enumerate() {
        let error = nmse(found, want);
        assert!(error < LIMIT, "{what}, batch {i}: NMSE {error:e}");
    }
    assert_eq!(found_ids, ids, "{what}");
}

/// RoPE sections one after the other, alternating and beside a delta rule; windows; latent attention; residual streams and
/// per-layer embeddings; temperatures.
#[test]
fn positions_additions_and_whole_spans_give_the_results_of_the_cpu() {
    let Some(gpu) = gpu() else { return };
    for name in ["qwen2vl", "qwen3vl", "qwen35", "gemma3", "deepseek2", "gemma3n", "mistral3"] {
        check(&gpu, &read("spans", &more_architectures()[&format!("{name}.gguf")]), name);
    }
}

/// Each step writes its part of the rows, of the additions and of the RoPE tables.
#[test]
fn a_span_that_is_divided_over_steps_gives_the_results_of_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let toy = read("divided", &more_architectures()["qwen3vl.gguf"]);
    let options = SessionOptions { n_ubatch: 16, ..options() };
    let mut passes: [Box<dyn ForwardPass>; 2] =
        [Box::new(on_cpu(&toy)), Box::new(WgpuExecutor::session(Arc::clone(&gpu), &toy.model, &options).unwrap())];
    let [want, found] = passes.each_mut().map(|pass| {
        let n = 40 * pass.spec().n_embd;
        let rows: Vec<f32> = (0..n).map(|i| (i * 7919 % 1009) as f32 / 504.5 - 1.0).collect();
        let positions: Vec<_> = (0..40).map(|i| Position([i / 20, i % 7, i / 7])).collect();
        let additions: [&[f32]; 2] = [&rows, &rows];
        let span = Span { first: 3, rows: &rows, additions: &additions, positions: &positions, whole_in: &[] };
        let tokens = tokens(pass.as_ref(), 0, 0, 3 + 40 + 6);
        logits(pass.as_mut(), &tokens, &[span])
    });
    let error = nmse(&found, &want);
    assert!(error < LIMIT, "NMSE {error:e}");
}

#[test]
fn spans_longer_than_a_window_or_a_chunk_are_seen_whole() {
    let Some(gpu) = gpu() else { return };
    for (name, masks) in
        [("fast", [Mask::Window(20), Mask::Window(70)]), ("general", [Mask::Chunk(16), Mask::Window(20)])]
    {
        let toy = read("windows", &more_architectures()["qwen2vl.gguf"]).with_spec(|spec| {
            for (layer, mask) in spec.layers.iter_mut().zip(masks.into_iter().cycle()) {
                let Mixer::Attention(a) = &mut layer.mixer else { panic!("this model has attention") };
                a.mask = mask;
            }
        });
        check(&gpu, &toy, name);
    }
}
