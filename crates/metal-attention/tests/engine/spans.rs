//! Spans of embedding rows on each GPU backend: own rows give the results of token ids, and rows with positions of their own,
//! deepstack rows and bidirectional attention give the CPU's results.

use metal_attention::{
    BatchToken, CacheType, CpuExecutor, ForwardPass, LoadedModel, OutputKind, Outputs, SessionOptions,
};
use metal_attention_cpu::CpuOptions;
use metal_attention_model::{Batch, Mask, Mixer, Position, Span};
use metal_attention_testing::models::{architectures, more_architectures};

use crate::toys::{Toy, nmse, read, some_ids};

/// Rows of the patches of a small picture, and patches of a row.
const SMALL: [usize; 2] = [6, 9];

/// RoPE sections one after the other, alternating and beside a delta rule; windows; latent attention; residual streams and
/// per-layer embeddings; temperatures; rotations of a part of a head; sinks; token shifts.
const MODELS: [&str; 12] = [
    "llama-mha.gguf",
    "qwen2vl.gguf",
    "gemma3.gguf",
    "qwen35.gguf",
    "deepseek2.gguf",
    "qwen3vl.gguf",
    "gemma3n.gguf",
    "mistral3.gguf",
    "gemma4.gguf",
    "glm4.gguf",
    "gpt-oss.gguf",
    "rwkv7.gguf",
];

/// Makes a forward pass on the backend of a test.
type Make<'a> = dyn Fn(&LoadedModel, &SessionOptions) -> Box<dyn ForwardPass> + 'a;

fn open(name: &'static str) -> Toy {
    read(name, architectures().get(name).unwrap_or_else(|| &more_architectures()[name]))
}

fn options(n_ubatch: usize, cache_type: CacheType, exact: bool) -> SessionOptions {
    SessionOptions { n_ctx: 256, n_ubatch, n_seq: 2, cache_type, exact, ..Default::default() }
}

fn on_cpu(model: &LoadedModel, options: &SessionOptions) -> Box<dyn ForwardPass> {
    let threads = CpuOptions { n_threads: 1, ..Default::default() };
    Box::new(CpuExecutor::session(&threads, model, &SessionOptions { exact: true, ..*options }).unwrap())
}

/// Tokens `start..start + n` of sequence `seq`, all with results.
fn tokens(pass: &dyn ForwardPass, seq: usize, start: usize, n: usize) -> Vec<BatchToken> {
    let n_vocab = pass.spec().n_vocab as u32;
    let ids = some_ids(start + n);
    (start..start + n).map(|pos| BatchToken { id: (ids[pos] + seq as u32) % n_vocab, seq, pos, output: true }).collect()
}

fn logits(pass: &mut dyn ForwardPass, tokens: &[BatchToken], spans: &[Span<'_>]) -> Vec<f32> {
    let (outputs, _) = pass.forward_outputs(Batch { spans, ..Batch::from(tokens) }, OutputKind::Logits, &[]).unwrap();
    let Outputs::Logits(logits) = outputs else { panic!("{outputs:?}") };
    logits.as_slice().to_vec()
}

/// Checks that the embeddings of the tokens, times the factor of the model, give their logits.
fn check_own_rows(name: &str, model: &LoadedModel, make: &Make<'_>) {
    let (table, spec) = (&model.weights().token_embd.as_ref().unwrap().weight, model.spec());
    // Embeddings may differ from the rows in their last bits: CUDA stores an F32 table as two F16 numbers for each element, and a
    // device may fuse the products of a quantisation block. Where inputs of products are rounded to F16, that turns some of
    // them to the next F16 number.
    for (cache_type, exact, limit) in [(CacheType::F32, true, 1e-10), (CacheType::F16, false, 1e-6)] {
        let mut pass = make(model, &options(96, cache_type, exact));
        // Before the span, in it, and behind it.
        let mut tokens = tokens(&*pass, 0, 0, 3 + 9 + 4);
        let want = logits(&mut *pass, &tokens, &[]);
        pass.reset();
        let mut rows = Vec::new();
        for token in &tokens[3..12] {
            let mut row = vec![0.0; spec.n_embd];
            table.ty().dequantize(table.row(token.id as usize), &mut row);
            rows.extend(row.iter().map(|x| x * spec.embedding.scale));
        }
        // Wrong ids in the place of the rows, if the layers read none.
        if spec.embedding.per_layer.is_none() {
            tokens[3..12].iter_mut().for_each(|token| token.id = 0);
        }
        let span = Span { first: 3, rows: &rows, deepstack: &[], positions: &[], bidirectional_in: &[] };
        let error = nmse(&logits(&mut *pass, &tokens, &[span]), &want);
        assert!(error <= limit, "{name}, {cache_type}: own rows: NMSE {error:e}");
    }
}

/// The logits of batches with spans, the hidden rows after layers in the first of them, and greedily generated ids.
fn results(pass: &mut dyn ForwardPass, patches: [usize; 2]) -> (Vec<Vec<f32>>, Vec<u32>) {
    let (n_embd, n_layer) = (pass.spec().n_embd, pass.spec().n_layer());
    let n = patches[0] * patches[1];
    let random = |seed: usize, n: usize, scale: f32| -> Vec<f32> {
        (0..n * n_embd).map(|i| ((i * 7919 + seed * 104_729) % 1009) as f32 / 504.5 - 1.0).map(|x| x * scale).collect()
    };
    let grid = |i: usize| Position([2, 2 + (i / patches[1]) as u32, 2 + (i % patches[1]) as u32]);
    let positions: Vec<_> = (0..n).map(grid).collect();
    let (rows, more) = (random(1, n, 0.7), random(2, n, 0.3));
    let even: Vec<bool> = (0..n_layer).map(|layer| layer % 2 == 0).collect();
    // Models with several residual streams take none.
    let n_deepstack = if pass.spec().embedding.streams.is_some() { 0 } else { n_layer.min(2) };
    let deepstack: Vec<&[f32]> = vec![&more[..]; n_deepstack];
    let picture = Span { first: 5, rows: &rows, deepstack: &deepstack, positions: &positions, bidirectional_in: &even };
    // Of another sequence, with positions like text, and bidirectional in all layers.
    let small = random(3, 4, 0.5);
    let all = vec![true; n_layer];
    let other = Span { first: 5 + n + 3 + 2, rows: &small, deepstack: &[], positions: &[], bidirectional_in: &all };
    let mut found = Vec::new();
    let first = [tokens(pass, 0, 0, 5 + n + 3), tokens(pass, 1, 0, 2 + 4 + 1)].concat();
    let batch = Batch { spans: &[picture, other], ..Batch::from(&first[..]) };
    let (outputs, hidden) = pass.forward_outputs(batch, OutputKind::Logits, &[1, n_layer]).expect("a batch that runs");
    let Outputs::Logits(rows_of_logits) = outputs else { panic!("logits") };
    found.push(rows_of_logits.as_slice().to_vec());
    found.push(hidden.as_slice().to_vec());
    // Text, in batches of all kinds: of two sequences, of one token, of several.
    let [end, end_of_other] = [5 + n + 3, 7];
    let both = [tokens(pass, 0, end, 1), tokens(pass, 1, end_of_other, 1)].concat();
    found.push(logits(pass, &both, &[]));
    let one = tokens(pass, 0, end + 1, 1);
    found.push(logits(pass, &one, &[]));
    let several = tokens(pass, 0, end + 2, 20);
    found.push(logits(pass, &several, &[]));
    // Greedy steps, which may be submitted ahead: of one sequence, and of two.
    let mut ids = Vec::new();
    let mut id = 3;
    for pos in end + 22..end + 30 {
        id = pass.forward_greedy(&[BatchToken { id, seq: 0, pos, output: true }]).unwrap()[0];
        ids.push(id);
    }
    let mut next = [id, 4];
    for i in 0..5 {
        let token = |seq: usize, pos: usize| BatchToken { id: next[seq], seq, pos: pos + i, output: true };
        let batch = [token(0, end + 30), token(1, end_of_other + 1)];
        next.copy_from_slice(&pass.forward_greedy(&batch).unwrap());
        ids.extend(next);
    }
    // A span of one row, with a deepstack row, by itself; and text behind it.
    let row = random(4, 1, 0.6);
    let position = [Position([0, 3, 1])];
    let alone = Span {
        first: 0,
        rows: &row,
        deepstack: &[&row[..]][..n_deepstack.min(1)],
        positions: &position,
        bidirectional_in: &all,
    };
    let token = tokens(pass, 0, end + 35, 1);
    found.push(logits(pass, &token, &[alone]));
    let behind = tokens(pass, 0, end + 36, 1);
    found.push(logits(pass, &behind, &[]));
    // Without a deepstack row, two rows: the lists of last indices are those of this step.
    let rows = random(5, 2, 0.6);
    let two = Span { first: 1, rows: &rows, deepstack: &[], positions: &[], bidirectional_in: &[] };
    let more = tokens(pass, 0, end + 37, 4);
    found.push(logits(pass, &more, &[two]));
    (found, ids)
}

/// Checks that a backend gives the results of the CPU for pictures of `patches`, in micro-batches of up to `n_ubatch` inputs.
fn check(name: &str, model: &LoadedModel, patches: [usize; 2], n_ubatch: usize, make: &Make<'_>) {
    for (cache_type, exact, limit) in [(CacheType::F32, true, 1e-9), (CacheType::F16, false, 1e-5)] {
        let (want, ids) = results(&mut *on_cpu(model, &options(n_ubatch, cache_type, exact)), patches);
        let (found, found_ids) = results(&mut *make(model, &options(n_ubatch, cache_type, exact)), patches);
        for (i, (found, want)) in found.iter().zip(&want).enumerate() {
            let error = nmse(found, want);
            assert!(error <= limit, "{name}, {cache_type}, batch {i}: NMSE {error:e}");
        }
        if exact {
            assert_eq!(found_ids, ids, "{name}");
        }
    }
}

/// Each step writes its part of the rows, of the deepstack rows and of the RoPE tables.
fn check_divided_span(make: &Make<'_>) {
    let toy = open("qwen3vl.gguf");
    let run = |pass: &mut dyn ForwardPass| {
        let n = 40 * pass.spec().n_embd;
        let rows: Vec<f32> = (0..n).map(|i| (i * 7919 % 1009) as f32 / 504.5 - 1.0).collect();
        let positions: Vec<_> = (0..40).map(|i| Position([i / 20, i % 7, i / 7])).collect();
        let deepstack: [&[f32]; 2] = [&rows, &rows];
        let span = Span { first: 3, rows: &rows, deepstack: &deepstack, positions: &positions, bidirectional_in: &[] };
        let tokens = tokens(pass, 0, 0, 3 + 40 + 6);
        logits(pass, &tokens, &[span])
    };
    let options = options(16, CacheType::F32, true);
    let want = run(&mut *on_cpu(&toy.model, &options));
    let error = nmse(&run(&mut *make(&toy.model, &options)), &want);
    assert!(error <= 1e-9, "NMSE {error:e}");
}

/// Windows and chunks that are shorter than a span, on layers that take it in both directions.
fn check_short_masks(make: &Make<'_>) {
    for (name, masks) in
        [("windows", [Mask::Window(20), Mask::Window(70)]), ("chunks", [Mask::Chunk(16), Mask::Window(20)])]
    {
        let toy = open("qwen2vl.gguf").with_spec(|spec| {
            for (layer, mask) in spec.layers.iter_mut().zip(masks.into_iter().cycle()) {
                let Mixer::Attention(a) = &mut layer.mixer else { panic!("this model has attention") };
                a.mask = mask;
            }
        });
        check(name, &toy.model, SMALL, 96, make);
    }
}

/// All checks, with `models`.
fn check_backend(models: &[&'static str], make: &Make<'_>) {
    for name in models {
        let toy = open(name);
        check_own_rows(name, &toy.model, make);
        check(name, &toy.model, SMALL, 96, make);
    }
    check_divided_span(make);
    check_short_masks(make);
}

#[cfg(feature = "wgpu")]
#[test]
fn through_wgpu() {
    use std::sync::Arc;

    use metal_attention::WgpuExecutor;

    let Some(gpu) = crate::wgpu::device::gpu() else { return };
    let make = |model: &LoadedModel, options: &SessionOptions| -> Box<dyn ForwardPass> {
        Box::new(WgpuExecutor::session(Arc::clone(&gpu), model, options).unwrap())
    };
    check_backend(if crate::wgpu::device::takes_fewer_cases(&gpu) { &MODELS[..8] } else { &MODELS }, &make);
}

#[cfg(feature = "cuda")]
#[test]
fn through_cuda() {
    use std::sync::Arc;

    use metal_attention::{CudaDevice, CudaExecutor, Watch};

    if !crate::cuda::has_cuda() {
        return;
    }
    let gpu = Arc::new(CudaDevice::open(0, Watch::default()).unwrap());
    let make = |model: &LoadedModel, options: &SessionOptions| -> Box<dyn ForwardPass> {
        Box::new(CudaExecutor::session(Arc::clone(&gpu), model, options).unwrap())
    };
    check_backend(&MODELS, &make);
    // Heads that prefill attention takes on tensor cores, and spans of several query tiles, longer and shorter than a window.
    for window in [120, 40] {
        let model = crate::cuda::windowed_model(window);
        check(&format!("window {window}"), model.loaded(), [9, 10], 128, &make);
    }
}

/// `cuda` in the name is a filter of `scripts/test`.
#[cfg(feature = "cuda")]
#[test]
fn on_two_cuda_ranks() {
    use std::sync::Arc;

    use metal_attention::{CudaDevice, TensorParallelExecutor, Watch};

    if !crate::cuda::has_ranks(2) {
        return;
    }
    let gpus = [0, 1].map(|i| Arc::new(CudaDevice::open(i, Watch::default()).unwrap()));
    let make = |model: &LoadedModel, options: &SessionOptions| -> Box<dyn ForwardPass> {
        Box::new(TensorParallelExecutor::session(&gpus, model, options).unwrap())
    };
    check_backend(&MODELS[..1], &make);
}
