//! Whole models on the GPU: against float64 references, against the CPU, and for different divisions of the tokens into
//! batches. Without a GPU (a software one will do) the tests are skipped; in CI that is a failure.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use crate::wgpu::device::{gpu, gpu_of_any_subgroups, start, takes_fewer_cases};
use metal_attention::gguf::GgufFile;
use metal_attention::wgpu::{WgpuDevice, WgpuError};
use metal_attention::{
    BatchToken, CacheType, EngineOptions, ForwardError, ForwardPass, LoadedModel, Model, SessionOptions, WgpuExecutor,
};
use metal_attention_testing::models::{Files, quants, small_quants};
use metal_attention_testing::reference::read;
use serde::Deserialize;

fn options(cache_type: CacheType) -> SessionOptions {
    SessionOptions { n_ctx: 512, cache_type, ..Default::default() }
}

fn open(path: &Path) -> GgufFile {
    GgufFile::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn stories() -> GgufFile {
    open(&metal_attention_testing::stories())
}

/// The contents of `stories260K.json` and `tales-4m.json`: prompts with their logits and greedy continuations.
#[derive(Deserialize)]
struct Continuations {
    cases: Vec<Case>,
}

/// Reference values of one prompt.
#[derive(Deserialize)]
struct Case {
    prompt: String,
    /// Token ids of `prompt`.
    tokens: Vec<u32>,
    /// The logits of the last token, `[n_vocab]`.
    logits_last: Vec<f64>,
    /// The token with the largest logit after each token.
    argmax_all: Vec<u32>,
    /// The tokens that greedy decoding generates.
    greedy: Vec<u32>,
    /// The difference of the two largest logits at each of those.
    #[serde(default)]
    greedy_margins: Vec<f64>,
}

/// The contents of `quants.json` and `architectures.json`: reference values of several models for one prompt.
#[derive(Deserialize)]
struct Models {
    tokens: Vec<u32>,
    models: BTreeMap<String, ModelCase>,
}

/// Reference values of one model.
#[derive(Deserialize)]
struct ModelCase {
    logits_last: Vec<f64>,
    argmax_all: Vec<u32>,
}

/// The batch that appends `ids` to sequence `seq`, with the logits of every token.
fn batch(model: &dyn ForwardPass, seq: usize, ids: &[u32]) -> Vec<BatchToken> {
    let start = model.n_past(seq);
    ids.iter().enumerate().map(|(i, &id)| BatchToken { id, seq, pos: start + i, output: true }).collect()
}

/// Appends `ids` to sequence 0 in one batch. Returns the logits of every token.
fn logits(model: &mut dyn ForwardPass, ids: &[u32]) -> Vec<Vec<f32>> {
    let batch = batch(model, 0, ids);
    let logits = model.forward(&batch).expect("a batch that fits");
    (0..logits.n_rows()).map(|i| logits.row(i).to_vec()).collect()
}

/// The `n` ids that greedy decoding generates after `ids`, in an empty cache.
fn greedy(model: &mut dyn ForwardPass, ids: &[u32], n: usize) -> Vec<u32> {
    model.reset();
    let mut out = vec![model.forward_prompt(ids).expect("a prompt that fits")];
    while out.len() < n {
        out.push(model.forward_token_greedy(out[out.len() - 1]).expect("room for a token"));
    }
    out
}

fn argmax(row: &[f32]) -> u32 {
    (0..row.len()).fold(0, |best, i| if row[i] > row[best] { i } else { best }) as u32
}

/// Squared error over the reference's variance.
fn nmse(got: &[f32], want: impl IntoIterator<Item = f64>) -> f64 {
    let want: Vec<f64> = want.into_iter().collect();
    assert_eq!(got.len(), want.len());
    let mean = want.iter().sum::<f64>() / want.len() as f64;
    let error: f64 = got.iter().zip(&want).map(|(g, w)| (f64::from(*g) - w).powi(2)).sum();
    error / want.iter().map(|w| (w - mean).powi(2)).sum::<f64>()
}

fn widened(row: &[f32]) -> impl Iterator<Item = f64> {
    row.iter().map(|&v| f64::from(v))
}

/// `n` ids of the model's vocabulary.
fn some_ids(model: &dyn ForwardPass, n: usize) -> Vec<u32> {
    let n_vocab = model.spec().n_vocab;
    (0..n).map(|i| ((i * i * 31 + i * 7 + 3) % n_vocab) as u32).collect()
}

#[test]
fn stories_continuations_argmaxes_and_logits() {
    let Some(gpu) = gpu() else { return };
    let file = stories();
    let mut f32_cache = start(&gpu, &file, &options(CacheType::F32));
    let mut f16_cache = start(&gpu, &file, &options(CacheType::F16));
    for case in read::<Continuations>("stories260K").cases {
        f32_cache.reset();
        let rows = logits(&mut f32_cache, &case.tokens);
        let argmaxes: Vec<_> = rows.iter().map(|row| argmax(row)).collect();
        assert_eq!(argmaxes, case.argmax_all, "{:?}", case.prompt);
        for (got, want) in rows[rows.len() - 1].iter().zip(&case.logits_last) {
            assert!((f64::from(*got) - want).abs() <= 1e-3, "{:?}: {got} {want}", case.prompt);
        }
        assert_eq!(greedy(&mut f32_cache, &case.tokens, case.greedy.len()), case.greedy, "{:?}", case.prompt);
        f16_cache.reset();
        let rows = logits(&mut f16_cache, &case.tokens);
        let error = nmse(&rows[rows.len() - 1], case.logits_last);
        assert!(error <= 1e-5, "{:?}: NMSE {error:e} with an F16 cache", case.prompt);
    }
}

#[test]
fn tales_continuations() {
    let Some(gpu) = gpu() else { return };
    let file = open(&metal_attention_testing::tales());
    let exact = SessionOptions { exact: true, ..options(CacheType::F32) };
    for (options, limit) in [(exact, 1e-6), (options(CacheType::F16), 1e-4)] {
        let mut model = start(&gpu, &file, &options);
        for case in read::<Continuations>("tales-4m").cases {
            model.reset();
            let rows = logits(&mut model, &case.tokens);
            let error = nmse(&rows[rows.len() - 1], case.logits_last);
            assert!(error <= limit, "{:?} {options:?}: NMSE {error:e}", case.prompt);
            // Greedy ids are compared up to the first where the two largest logits are nearly equal.
            let certain = case.greedy_margins.iter().position(|m| *m < 0.01).unwrap_or(case.greedy.len());
            // A software GPU takes a fifth of a second per token.
            let n = if takes_fewer_cases(&gpu) { certain.min(16) } else { certain };
            assert_eq!(greedy(&mut model, &case.tokens, n), case.greedy[..n], "{:?}", case.prompt);
        }
    }
}

#[test]
fn quantised_types() {
    let Some(gpu) = gpu() else { return };
    check_quantised_types(&gpu, "quants", quants(), 3);
    check_quantised_types(&gpu, "small-quants", small_quants(), 9);
}

/// Compares the models in `files` with their logits in `reference`, which may also have other models.
fn check_quantised_types(gpu: &Arc<WgpuDevice>, reference: &str, files: &Files, n: usize) {
    let Models { tokens, mut models } = read(reference);
    models.retain(|name, _| files.contains_key(name));
    assert_eq!((models.len(), files.len()), (n, n));
    // Without matrix units the kernels are the same.
    let on_units = gpu.features().cooperative_f16 || gpu.features().cooperative_f32;
    for (name, case) in models.into_iter().step_by(if takes_fewer_cases(gpu) { 2 } else { 1 }) {
        let file = GgufFile::from_bytes(&files[&name]).unwrap();
        let mut exact_rows = Vec::new();
        for &exact in if on_units { &[true, false][..] } else { &[true] } {
            let mut model = start(gpu, &file, &SessionOptions { exact, ..options(CacheType::F32) });
            let rows = logits(&mut model, &tokens);
            // Matrix units round the operands of a product to F16, with an error that differs by a factor of three from row to row:
            // all rows are held to those of exact products, of which the last is held to the reference.
            let error = if exact {
                nmse(&rows[rows.len() - 1], case.logits_last.iter().copied())
            } else {
                nmse(&rows.concat(), widened(&exact_rows))
            };
            println!("{name} exact {exact}: NMSE {error:.1e}");
            assert!(error <= 1e-6, "{name} exact {exact}: NMSE {error:e}");
            if exact {
                exact_rows = rows.concat();
            }
            // Token by token, through the kernels for a single token.
            model.reset();
            let mut last = Vec::new();
            for &id in &tokens {
                last = model.forward_token(id).unwrap().to_vec();
            }
            let error = nmse(&last, case.logits_last.iter().copied());
            assert!(error <= 1e-6, "{name} exact {exact}, token by token: NMSE {error:e}");
        }
    }
}

#[test]
fn architectures() {
    let Some(gpu) = gpu() else { return };
    check_architectures(&gpu, usize::MAX);
}

/// Devices of AMD and Intel choose the number of lanes per subgroup for each kernel.
#[test]
fn subgroups_of_unknown_size() {
    let Some(gpu) = gpu_of_any_subgroups() else { return };
    if gpu.features().neighbours < 4 {
        return;
    }
    assert_eq!((gpu.features().subgroup_size, gpu.features().neighbours), (0, 4));
    check_architectures(&gpu, 3);
}

/// Compares the first `n` models with their reference logits, as one batch and token by token.
fn check_architectures(gpu: &Arc<WgpuDevice>, n: usize) {
    let Models { tokens, models } = read("architectures");
    assert_eq!(models.len(), metal_attention_testing::models::architectures().len());
    for (name, case) in models.into_iter().take(n) {
        let file = GgufFile::from_bytes(&metal_attention_testing::models::architectures()[&name]).unwrap();
        let mut model = start(gpu, &file, &options(CacheType::F32));
        let rows = logits(&mut model, &tokens);
        let argmaxes: Vec<_> = rows.iter().map(|row| argmax(row)).collect();
        let error = nmse(&rows[rows.len() - 1], case.logits_last.iter().copied());
        println!("{name}: NMSE {error:.1e}");
        assert_eq!(argmaxes, case.argmax_all, "{name}");
        assert!(error <= 1e-9, "{name}: NMSE {error:e}");
        model.reset();
        for (&id, &want) in tokens.iter().zip(&case.argmax_all) {
            let got = model.forward_token_greedy(id).unwrap();
            assert_eq!(got, want, "{name}, token by token");
        }
    }
}

#[test]
fn a_prompt_gives_the_logits_of_single_tokens() {
    let Some(gpu) = gpu() else { return };
    let qwen3 = GgufFile::from_bytes(&metal_attention_testing::models::architectures()["qwen3.gguf"]).unwrap();
    let tales = open(&metal_attention_testing::tales());
    for (name, file) in [("stories260K", stories()), ("tales-4m", tales), ("qwen3", qwen3)] {
        for cache_type in [CacheType::F16, CacheType::F32] {
            // Where there are fewer cases, the model of the tales has 32-bit caches and the others have 16-bit ones.
            if takes_fewer_cases(&gpu) && (name == "tales-4m") != (cache_type == CacheType::F32) {
                continue;
            }
            let mut model = start(&gpu, &file, &options(cache_type));
            let ids = some_ids(&model, 75);
            let whole = logits(&mut model, &ids);
            model.reset();
            for (i, &id) in ids.iter().enumerate() {
                let one = model.forward_token(id).expect("room for a token").to_vec();
                let error = nmse(&one, widened(&whole[i]));
                // F16 keys and values may be rounded differently where sums differ in their last bits.
                let limit = if cache_type == CacheType::F16 { 1e-5 } else { 1e-6 };
                assert!(error <= limit, "{name} {cache_type} token {i}: NMSE {error:e}");
            }
            model.reset();
            let last = model.forward_prompt(&ids).unwrap();
            assert_eq!(last, argmax(&whole[ids.len() - 1]), "{name} {cache_type}");
        }
    }
}

/// A xorshift generator with the same numbers on every machine.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 33) as usize % n
    }
}

#[test]
fn prompts_in_random_chunks_match_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let model = Model::built_in().unwrap();
    let options = EngineOptions {
        device: "cpu".parse().unwrap(),
        n_ctx: Some(160),
        cache_type: CacheType::F32,
        ..Default::default()
    };
    let mut cpu = model.forward_pass(&options).unwrap();
    let wgpu_options = SessionOptions { n_ctx: 160, n_ubatch: 40, cache_type: CacheType::F32, ..Default::default() };
    let n_rounds = if takes_fewer_cases(&gpu) { 200 } else { 1000 };
    let mut pass = WgpuExecutor::session(gpu, model.loaded(), &wgpu_options).unwrap();
    let mut random = Random(0x5EED);
    for round in 0..n_rounds {
        // Mostly short prompts. The lengths include every boundary between the kernels' tiles.
        let n = 1 + random.below(if round % 10 == 0 { 150 } else { 40 });
        let ids: Vec<u32> = (0..n).map(|_| random.below(model.spec().n_vocab) as u32).collect();
        cpu.reset();
        let batch: Vec<_> =
            ids.iter().enumerate().map(|(pos, &id)| BatchToken { id, seq: 0, pos, output: pos + 1 == n }).collect();
        let want = cpu.forward(&batch).unwrap().row(0).to_vec();
        pass.reset();
        let mut rest = batch.as_slice();
        let mut got = Vec::new();
        while !rest.is_empty() {
            let (chunk, after) = rest.split_at(1 + random.below(rest.len()));
            got = pass.forward(chunk).unwrap().last().map(<[f32]>::to_vec).unwrap_or_default();
            rest = after;
        }
        let error = nmse(&got, widened(&want));
        assert!(error <= 1e-9, "round {round}: {n} tokens, NMSE {error:e}");
    }
}

#[test]
fn decoding_continues_after_a_prompt_a_cut_and_a_reset() {
    let Some(gpu) = gpu() else { return };
    let mut model = start(&gpu, &stories(), &options(CacheType::F32));
    let ids = some_ids(&model, 80);
    let mut other = ids.clone();
    other[30..].reverse();
    let want = logits(&mut model, &other);
    model.reset();
    assert_eq!(model.position(), 0);
    logits(&mut model, &ids);
    model.truncate(200);
    assert_eq!(model.position(), 80);
    model.truncate(30);
    let got = logits(&mut model, &other[30..]);
    for (i, row) in got.iter().enumerate() {
        let error = nmse(row, widened(&want[30 + i]));
        assert!(error <= 1e-9, "token {} after a cut: NMSE {error:e}", 30 + i);
    }
    // Greedy steps that were queued ahead have no effect when the sequence continues with another token.
    model.reset();
    let ahead = greedy(&mut model, &ids[..20], 10);
    assert_eq!(model.position(), 29);
    model.truncate(25);
    let mut token = model.forward_token_greedy(ahead[5]).unwrap();
    assert_eq!(token, ahead[6]);
    token = model.forward_token_greedy(token).unwrap();
    assert_eq!(token, ahead[7]);
    let another = (token + 1) % model.spec().n_vocab as u32;
    let forced = model.forward_token(another).unwrap().to_vec();
    model.reset();
    let tokens: Vec<u32> = ids[..20].iter().chain(&ahead[..7]).copied().chain([another]).collect();
    // The last token of `tokens` replaces the greedy one at its position.
    let tokens = &tokens[..tokens.len()];
    let rows = logits(&mut model, tokens);
    let error = nmse(&forced, widened(&rows[rows.len() - 1]));
    assert!(error <= 1e-9, "after a token that the caller chose: NMSE {error:e}");
}

#[test]
fn greedy_steps_ahead_stop_at_the_end_of_the_context() {
    let Some(gpu) = gpu() else { return };
    let file = stories();
    let mut model = start(&gpu, &file, &SessionOptions { n_ctx: 24, ..options(CacheType::F32) });
    let mut long = start(&gpu, &file, &options(CacheType::F32));
    let ids = some_ids(&model, 12);
    let want = greedy(&mut long, &ids, 13);
    assert_eq!(greedy(&mut model, &ids, 13), want);
    assert_eq!(model.position(), 24);
    let full = ForwardError::ContextFull { seq: 0, n_past: 24, n_new: 1, n_ctx: 24 };
    assert_eq!(model.forward_token_greedy(want[12]).unwrap_err(), full);
    assert_eq!(model.forward_token(want[12]).unwrap_err(), full);
    model.truncate(23);
    assert_eq!(model.forward_token_greedy(want[11]).unwrap(), want[12]);
}

#[test]
fn sequences_in_one_batch_are_independent() {
    let Some(gpu) = gpu() else { return };
    let file = stories();
    let mut single = start(&gpu, &file, &options(CacheType::F32));
    let ids = some_ids(&single, 60);
    let prompts = [&ids[..40], &ids[25..60], &ids[10..11]];
    let want = prompts.map(|prompt| {
        single.reset();
        logits(&mut single, prompt)
    });
    for n_ubatch in [4, 17, 512] {
        let mut concurrent = start(&gpu, &file, &SessionOptions { n_seq: 3, n_ubatch, ..options(CacheType::F32) });
        let tokens: Vec<Vec<BatchToken>> =
            prompts.iter().enumerate().map(|(seq, prompt)| batch(&concurrent, seq, prompt)).collect();
        let one_after_another: Vec<_> = tokens.iter().flatten().copied().collect();
        let alternating: Vec<_> = (0..40).flat_map(|i| tokens.iter().filter_map(move |t| t.get(i)).copied()).collect();
        for order in [one_after_another, alternating] {
            concurrent.reset();
            let got = concurrent.forward(&order).expect("a batch that fits");
            for (i, token) in order.iter().enumerate() {
                let error = nmse(got.row(i), widened(&want[token.seq][token.pos]));
                assert!(error <= 1e-9, "ubatch {n_ubatch}, sequence {} position {}: {error:e}", token.seq, token.pos);
            }
            assert_eq!([0, 1, 2].map(|seq| concurrent.n_past(seq)), [40, 35, 1]);
        }
        // Greedy decoding of all three in one batch, with steps queued ahead.
        concurrent.rewind(0, 20);
        concurrent.rewind(1, 20);
        let mut sequences = [prompts[0][..20].to_vec(), prompts[1][..20].to_vec(), prompts[2].to_vec()];
        let mut next: Vec<u32> = (0..3).map(|s| argmax(&want[s][sequences[s].len() - 1])).collect();
        for _ in 0..6 {
            let batch: Vec<_> = (0..3)
                .map(|seq| BatchToken { id: next[seq], seq, pos: concurrent.n_past(seq), output: true })
                .collect();
            for (tokens, &id) in sequences.iter_mut().zip(&next) {
                tokens.push(id);
            }
            next = concurrent.forward_greedy(&batch).unwrap();
        }
        for (seq, tokens) in sequences.iter().enumerate() {
            single.reset();
            let rows = logits(&mut single, tokens);
            assert_eq!(next[seq], argmax(&rows[rows.len() - 1]), "sequence {seq} of ubatch {n_ubatch}");
        }
    }
}

#[test]
fn only_requested_logits_are_returned() {
    let Some(gpu) = gpu() else { return };
    let mut model = start(&gpu, &stories(), &SessionOptions { n_ubatch: 20, ..options(CacheType::F32) });
    let ids = some_ids(&model, 50);
    let all = logits(&mut model, &ids);
    for requested in [vec![], vec![0], vec![49], vec![3, 15, 16, 17, 40], (20..50).collect()] {
        model.reset();
        let mut batch = batch(&model, 0, &ids);
        for (i, token) in batch.iter_mut().enumerate() {
            token.output = requested.contains(&i);
        }
        let got = model.forward(&batch).expect("a batch that fits");
        assert_eq!(got.n_rows(), requested.len());
        for (row, &i) in requested.iter().enumerate() {
            let error = nmse(got.row(row), widened(&all[i]));
            assert!(error <= 1e-12, "token {i} of {requested:?}: {error:e}");
        }
        assert_eq!(model.position(), 50);
        model.reset();
        let ids = model.forward_greedy(&batch).unwrap();
        assert_eq!(ids, requested.iter().map(|&i| argmax(&all[i])).collect::<Vec<_>>());
    }
}

#[test]
fn top_k_lists_have_the_largest_logits() {
    let Some(gpu) = gpu() else { return };
    let mut model = start(&gpu, &stories(), &SessionOptions { n_ubatch: 20, ..options(CacheType::F32) });
    let ids = some_ids(&model, 50);
    let all = logits(&mut model, &ids);
    assert_eq!(model.max_top_k(), 128);
    for (k, requested) in [(1, vec![49]), (40, vec![0, 16, 17, 49]), (128, (30..50).collect()), (200, vec![3])] {
        model.reset();
        let mut batch = batch(&model, 0, &ids);
        for (i, token) in batch.iter_mut().enumerate() {
            token.output = requested.contains(&i);
        }
        let lists = model.forward_top_k(&batch, k).unwrap();
        assert_eq!((lists.len(), model.position()), (requested.len(), 50));
        for (list, &i) in lists.iter().zip(&requested) {
            let mut order: Vec<usize> = (0..all[i].len()).collect();
            order.sort_by(|&a, &b| all[i][b].total_cmp(&all[i][a]).then(a.cmp(&b)));
            let want: Vec<(u32, f32)> = order[..k].iter().map(|&id| (id as u32, all[i][id])).collect();
            assert_eq!(*list, want, "{k} of token {i}");
        }
    }
    assert_eq!(model.forward_top_k(&[], 5).unwrap_err(), ForwardError::EmptyPrompt);
}

#[test]
fn a_seed_gives_equal_tokens_on_every_device() {
    use metal_attention::sampling::SamplerOptions;
    use metal_attention::{Device, GenerateOptions, Generator};
    if gpu().is_none() {
        return;
    }
    let model = Model::built_in().unwrap();
    let defaults = SamplerOptions { seed: Some(11), ..Default::default() };
    for sampling in [SamplerOptions { top_k: 0, min_p: 0.0, ..defaults.clone() }, defaults] {
        let [cpu, gpu] = [Device::Cpu, Device::Wgpu].map(|device| {
            let options = EngineOptions { device, cache_type: CacheType::F32, exact: true, ..Default::default() };
            let mut generator = Generator::new(&model, &options, sampling.clone()).unwrap();
            let options = GenerateOptions { n_predict: Some(60), ..Default::default() };
            generator.complete("Once upon a time", options).unwrap().map(|token| token.unwrap().id).collect::<Vec<_>>()
        });
        assert_eq!(gpu, cpu, "{sampling:?}");
        assert!(cpu.len() > 20);
    }
}

#[test]
fn a_refused_batch_leaves_the_cache_unchanged() {
    let Some(gpu) = gpu() else { return };
    let file = stories();
    let mut model = start(&gpu, &file, &SessionOptions { n_ctx: 12, n_seq: 2, ..options(CacheType::F32) });
    let ids = some_ids(&model, 12);
    let want = logits(&mut model, &ids);
    model.truncate(8);
    let n_vocab = model.spec().n_vocab;
    let token = |id, seq, pos| BatchToken { id, seq, pos, output: true };
    let bad = n_vocab as u32;
    let refused = [
        (vec![], ForwardError::EmptyPrompt),
        (vec![token(1, 0, 8), token(bad, 0, 9)], ForwardError::TokenOutOfRange { id: bad, n_vocab }),
        (vec![token(1, 0, 8), token(1, 2, 0)], ForwardError::SequenceOutOfRange { seq: 2, n_seq: 2 }),
        (vec![token(1, 0, 8), token(1, 0, 10)], ForwardError::PositionGap { seq: 0, pos: 10, expected: 9 }),
        (
            (8..13).map(|pos| token(1, 0, pos)).collect(),
            ForwardError::ContextFull { seq: 0, n_past: 8, n_new: 5, n_ctx: 12 },
        ),
    ];
    for (batch, want) in refused {
        assert_eq!(model.forward(&batch).expect_err("a refusal"), want);
        assert_eq!(model.forward_greedy(&batch).expect_err("a refusal"), want);
        assert_eq!((model.n_past(0), model.n_past(1)), (8, 0), "after {want}");
    }
    assert_eq!(model.forward_prompt(&[]).expect_err("a refusal"), ForwardError::EmptyPrompt);
    let got = logits(&mut model, &ids[8..]);
    for (row, want) in got.iter().zip(&want[8..]) {
        assert!(nmse(row, widened(want)) <= 1e-9);
    }
}

#[test]
fn traced_and_untraced_runs_agree() {
    let Some(gpu) = gpu() else { return };
    let mut model = start(&gpu, &stories(), &SessionOptions { n_ubatch: 32, ..options(CacheType::F32) });
    let (n_layer, n_embd) = (model.spec().n_layer(), model.spec().n_embd);
    let ids = some_ids(&model, 20);
    let want = logits(&mut model, &ids);
    model.reset();
    let batch = batch(&model, 0, &ids);
    let mut states = Vec::new();
    let mut keep = |layer: usize, x: &[f32]| states.push((layer, x.to_vec()));
    let got = model.forward_traced(&batch, Some(&mut keep)).unwrap();
    for (i, want) in want.iter().enumerate() {
        assert_eq!(got.row(i), want, "token {i}");
    }
    assert_eq!(states.iter().map(|s| s.0).collect::<Vec<_>>(), (0..n_layer).collect::<Vec<_>>());
    assert!(states.iter().all(|s| s.1.len() == ids.len() * n_embd));
    model.truncate(19);
    let (one, single) = model.forward_token_debug(ids[19]).unwrap();
    assert!(nmse(&one, widened(&want[19])) <= 1e-9);
    for ((layer, all), one) in states.iter().zip(&single) {
        let error = nmse(one, widened(&all[19 * n_embd..]));
        assert!(error <= 1e-9, "layer {layer}: {error:e}");
    }
}

#[test]
fn a_step_is_one_submission_of_at_most_seven_dispatches_a_layer() {
    let Some(gpu) = gpu() else { return };
    let file = open(&metal_attention_testing::tales());
    let mut model = start(&gpu, &file, &options(CacheType::F16));
    let n_layer = model.spec().n_layer() as u64;
    let ids = some_ids(&model, 40);
    let count = |gpu: &WgpuDevice| (gpu.submissions(), gpu.dispatches());

    let before = count(&gpu);
    model.forward_prompt(&ids).unwrap();
    let after = count(&gpu);
    // One submission after 16 dispatches, after 32 more, after 64 more and so on, and one for the rest.
    let max_submissions = 1 + u64::from((after.1 - before.1).ilog2().saturating_sub(3));
    assert!((1..=max_submissions).contains(&(after.0 - before.0)), "{} submissions of a prompt", after.0 - before.0);
    assert!(after.1 - before.1 <= 13 * n_layer + 6, "{} dispatches for a prompt", after.1 - before.1);

    for context in [40, 400] {
        model.reset();
        model.forward_prompt(&some_ids(&model, context)).unwrap();
        // During the first token's step the commands of the next one are recorded already.
        model.forward_token(7).unwrap();
        let before = count(&gpu);
        model.forward_token(8).unwrap();
        let after = count(&gpu);
        assert_eq!(after.0 - before.0, 1, "submissions of a token");
        let dispatches = after.1 - before.1;
        assert!(dispatches <= 7 * n_layer + 5, "{dispatches} dispatches for a token after {context}");
    }
}

#[test]
fn later_prompts_allocate_nothing() {
    let Some(gpu) = gpu() else { return };
    let mut model = start(&gpu, &stories(), &SessionOptions { n_ubatch: 64, ..options(CacheType::F16) });
    let ids = some_ids(&model, 200);
    let mut allocations = Vec::new();
    let pipelines = gpu.pipelines().len();
    for _ in 0..3 {
        greedy(&mut model, &ids, 20);
        model.reset();
        model.forward_prompt(&ids[..33]).unwrap();
        model.forward_token(1).unwrap();
        allocations.push(gpu.allocations());
    }
    assert_eq!(allocations[1], allocations[0]);
    assert_eq!(allocations[2], allocations[0]);
    assert_eq!(gpu.pipelines().len(), pipelines, "pipelines built after the model was loaded");
}

#[test]
fn a_lost_device_is_reported_as_an_error() {
    let Some(gpu) = gpu() else { return };
    let mut model = start(&gpu, &stories(), &options(CacheType::F16));
    let ids = greedy(&mut model, &[1, 403, 407], 5);
    let past = model.position();
    gpu.destroy();
    let lost = |e: ForwardError| assert!(matches!(&e, ForwardError::Device { why } if why.contains("lost")), "{e}");
    // A step that was queued before may still finish, later ones do not.
    let mut id = ids[4];
    let outcome = (0..6).try_for_each(|_| model.forward_token_greedy(id).map(|next| id = next));
    lost(outcome.unwrap_err());
    let kept = model.position();
    assert!((past..past + 4).contains(&kept), "{past} {kept}");
    lost(model.forward_token(1).unwrap_err());
    lost(model.forward_prompt(&[1, 2, 3]).unwrap_err());
    assert_eq!(model.position(), kept);
    assert!(matches!(gpu.buffer("a buffer", 64), Err(WgpuError::Lost { .. })));
}

#[test]
fn options_that_cannot_fit_are_refused() {
    let Some(gpu) = gpu() else { return };
    let file = stories();
    let model = LoadedModel::load(&file).unwrap();
    let open =
        |options: &SessionOptions| WgpuExecutor::session(Arc::clone(&gpu), &model, options).err().expect("a refusal");
    for options in [
        SessionOptions { n_ctx: 0, ..Default::default() },
        SessionOptions { n_seq: 0, ..Default::default() },
        SessionOptions { n_ubatch: 0, ..Default::default() },
        SessionOptions { n_cache: Some(0), ..Default::default() },
        SessionOptions { n_ctx: 64, n_seq: usize::MAX / 8, n_cache: Some(64), ..Default::default() },
        SessionOptions { n_seq: usize::MAX, ..Default::default() },
    ] {
        let error = open(&options);
        assert!(matches!(error, WgpuError::Option { .. }), "{error}");
        assert!(error.to_string().contains("must be at least 1"), "{error}");
    }
    for (n_ctx, n_seq, n_cache) in [
        (usize::MAX / 4, 1, None),
        (1 << 40, 1, None),
        (1 << 31, 64, None),
        (1 << 40, 1 << 20, None),
        (64, 1, Some(usize::MAX)),
    ] {
        let error = open(&SessionOptions { n_ctx, n_seq, n_cache, ..Default::default() });
        assert!(
            matches!(error, WgpuError::ModelTooLarge { .. } | WgpuError::TooLarge { .. }),
            "{n_ctx} {n_seq} {n_cache:?}: {error}"
        );
    }
}
