//! Spans of embedding rows on each backend: own rows give the results of token ids, and rows with positions of their own,
//! deepstack rows and bidirectional attention give the CPU's results.

use metal_attention::gguf::GgufFile;
use metal_attention::{
    BatchToken, CacheType, Device, EngineOptions, ForwardPass, Model, ModelOptions, OutputKind, Outputs,
};
use metal_attention_model::{Batch, Position, Span};
use metal_attention_testing::models::{architectures, more_architectures};

/// Tokens before a span, in it, and behind it.
type Sizes = [usize; 3];

/// Those of the small models.
const SMALL: Sizes = [5, 12, 7];

/// Models with RoPE sections, windows, per-layer embeddings and several residual streams, recurrent states, latent attention
/// and a temperature.
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
    "rwkv7.gguf",
    "gpt-oss.gguf",
];

fn open(name: &str) -> Model {
    let bytes = architectures().get(name).unwrap_or_else(|| &more_architectures()[name]);
    Model::from_gguf(GgufFile::from_bytes(bytes).unwrap(), &ModelOptions::default()).unwrap()
}

/// Micro-batches hold a span and some more.
fn options(device: &Device, n: Sizes, cache_type: CacheType, exact: bool) -> EngineOptions {
    let (device, n_ctx, n_ubatch) = (device.clone(), Some(n.iter().sum::<usize>() + 40), Some(n[1] + 8));
    EngineOptions { device, n_ctx, n_ubatch, n_seq: 2, cache_type, exact, ..Default::default() }
}

/// The tokens of sequence `seq`, all with output. Those in the place of rows stand in for them where layers read ids.
fn tokens(model: &Model, n: Sizes, seq: usize) -> Vec<BatchToken> {
    let n_vocab = model.spec().n_vocab as u32;
    let token = |pos: usize| BatchToken { id: (pos as u32 * 37 + 5) % n_vocab, seq, pos, output: true };
    (0..n.iter().sum()).map(token).collect()
}

/// The embeddings of the tokens of the span, times the factor of the model.
fn own_rows(model: &Model, n: Sizes, tokens: &[BatchToken]) -> Vec<f32> {
    let (table, spec) = (&model.weights().token_embd.weight, model.spec());
    let row = |token: &BatchToken| {
        let mut row = vec![0.0; spec.n_embd];
        table.ty().dequantize(table.row(token.id as usize), &mut row);
        row.into_iter().map(|x| x * spec.embedding.scale)
    };
    tokens[n[0]..n[0] + n[1]].iter().flat_map(row).collect()
}

fn logits(pass: &mut dyn ForwardPass, tokens: &[BatchToken], spans: &[Span<'_>]) -> Vec<f32> {
    let (outputs, _) = pass.forward_outputs(Batch { tokens, spans }, OutputKind::Logits, &[]).unwrap();
    let Outputs::Logits(logits) = outputs else { panic!("{outputs:?}") };
    logits.as_slice().to_vec()
}

fn nmse(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let error: f64 = want.iter().zip(got).map(|(w, g)| f64::from(w - g).powi(2)).sum();
    error / want.iter().map(|&w| f64::from(w).powi(2)).sum::<f64>()
}

/// Evaluates text, spans of all kinds and text on `pass` and returns all logits: in one sequence a grid that all layers see
/// with bidirectional attention, in the other one rows with deepstack, of which every second layer sees all; then further text
/// in one step each, greedy tokens that run ahead, and a span of one row.
fn all_kinds(model: &Model, n: Sizes, pass: &mut dyn ForwardPass) -> (Vec<f32>, Vec<u32>) {
    let (n_embd, n_layer) = (model.spec().n_embd, model.spec().n_layer());
    let (first, second) = (tokens(model, n, 0), tokens(model, n, 1));
    let both = [first.clone(), second].concat();
    let rows = own_rows(model, n, &first);
    let changed: Vec<f32> = rows.iter().enumerate().map(|(i, x)| x * (1.0 + (i % 5) as f32 / 10.0)).collect();
    let grid: Vec<_> = (0..n[1] as u32).map(|i| Position([0, i / 4, i % 4])).collect();
    let scale = rows.iter().map(|x| x.abs()).fold(0.0, f32::max);
    let deepstack = [0, 1].map(|layer: usize| -> Vec<f32> {
        (0..rows.len()).map(|i| scale * ((i * 7 + layer) % 11) as f32 / 40.0).collect()
    });
    // Models with several residual streams take none.
    let n_deepstack = if model.spec().embedding.streams.is_some() { 0 } else { n_layer.min(2) };
    let deepstack: Vec<&[f32]> = deepstack[..n_deepstack].iter().map(Vec::as_slice).collect();
    let (all, alternate) = (vec![true; n_layer], (0..n_layer).map(|i| i % 2 == 1).collect::<Vec<_>>());
    let spans = [
        Span { first: n[0], rows: &rows, deepstack: &[], positions: &grid, bidirectional_in: &all },
        Span {
            first: first.len() + n[0],
            rows: &changed,
            deepstack: &deepstack,
            positions: &[],
            bidirectional_in: &alternate,
        },
    ];
    let mut results = logits(pass, &both, &spans);
    let next = |pass: &dyn ForwardPass, seq, id| BatchToken { id, seq, pos: pass.n_past(seq), output: true };
    for id in [3, 8] {
        let step = [next(pass, 0, id), next(pass, 1, id + 1)];
        results.extend(logits(pass, &step, &[]));
    }
    let (mut ids, mut id) = (Vec::new(), 4);
    for _ in 0..6 {
        id = pass.forward_greedy(&[next(pass, 0, id)]).unwrap()[0];
        ids.push(id);
    }
    let one = Span { first: 0, rows: &changed[..n_embd], deepstack: &[], positions: &[], bidirectional_in: &[] };
    let step = [next(pass, 0, 2)];
    results.extend(logits(pass, &step, &[one]));
    let step = [next(pass, 0, 2)];
    results.extend(logits(pass, &step, &[]));
    (results, ids)
}

/// Compares a backend, of which `pass` makes forward passes, with itself and with the CPU.
fn check(
    name: &str,
    model: &Model,
    n: Sizes,
    make: &dyn Fn(&Model, &EngineOptions) -> Box<dyn ForwardPass>,
    device: &Device,
) {
    // Embeddings may differ in their last bit, as a device may fuse the products of a quantisation block; rounding to F16 then
    // turns some to the next number.
    let limits = [(CacheType::F32, true, 1e-10, 1e-9), (CacheType::F16, false, 1e-8, 1e-5)];
    for (cache_type, exact, limit_of_own, limit) in limits {
        let mut pass = make(model, &options(device, n, cache_type, exact));
        let ids = tokens(model, n, 0);
        let rows = own_rows(model, n, &ids);
        let from_ids = logits(&mut *pass, &ids, &[]);
        pass.reset();
        let span = Span { first: n[0], rows: &rows, deepstack: &[], positions: &[], bidirectional_in: &[] };
        let error = nmse(&logits(&mut *pass, &ids, &[span]), &from_ids);
        assert!(error <= limit_of_own, "{name}, {cache_type}: own rows: NMSE {error:e}");
        pass.reset();
        let (found, greedy) = all_kinds(model, n, &mut *pass);
        let mut cpu = model.forward_pass(&options(&Device::Cpu, n, cache_type, /* exact */ true)).unwrap();
        let (want, greedy_on_cpu) = all_kinds(model, n, &mut *cpu);
        let error = nmse(&found, &want);
        assert!(error <= limit, "{name}, {cache_type}: NMSE {error:e}");
        if exact {
            assert_eq!(greedy, greedy_on_cpu, "{name}");
        }
    }
}

#[cfg(feature = "cuda")]
#[test]
fn through_cuda() {
    if !crate::cuda::has_cuda() {
        return;
    }
    let pass = |model: &Model, options: &EngineOptions| model.forward_pass(options).unwrap();
    for name in MODELS {
        check(name, &open(name), SMALL, &pass, &Device::Cuda(0));
    }
    // Heads and spans that prefill attention takes on tensor cores, in several query tiles; windows that are longer and shorter than
    // the span.
    for window in [120, 40] {
        let model = crate::cuda::windowed_model(window);
        check(&format!("window {window}"), &model, [30, 90, 20], &pass, &Device::Cuda(0));
    }
}

/// `cuda` in the name is a filter of `scripts/test`.
#[cfg(feature = "cuda")]
#[test]
fn on_two_cuda_ranks() {
    if !crate::cuda::has_ranks(2) {
        return;
    }
    let two = |model: &Model, options: &EngineOptions| {
        model.forward_pass(&EngineOptions { n_ranks: 2, ..options.clone() }).unwrap()
    };
    check("llama-mha.gguf", &open("llama-mha.gguf"), SMALL, &two, &Device::Cuda(0));
}
