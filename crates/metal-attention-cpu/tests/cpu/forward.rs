//! `CpuForwardPass` through its public interface: every division of the tokens into batches gives the same bits, and a
//! refused batch changes nothing.

use std::path::Path;

use crate::support::{batch, bits, gguf, on_isa, on_threads, start, start_on};
use metal_attention_cpu::{CacheType, CpuError, CpuExecutor, CpuForwardPass, Isa};
use metal_attention_gguf::{GgufFile, TensorDecl};
use metal_attention_model::{
    BatchToken, ForwardError, ForwardPass, LoadedModel, ModelSpec, PAGE, PageUse, Phase, SessionOptions, argmax,
};

/// Opens a generated model by its name, or a file by its path from the root folder.
fn open(name: &str) -> GgufFile {
    if let Some(bytes) = metal_attention_testing::models::architectures()
        .get(name)
        .or_else(|| metal_attention_testing::models::quants().get(name))
    {
        return GgufFile::from_bytes(bytes).expect("a readable GGUF file");
    }
    let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join(name);
    GgufFile::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The model of `models/stories260K.gguf`: F32, Llama with GQA.
fn stories() -> GgufFile {
    open("models/stories260K.gguf")
}

/// Llama and Qwen models with every kind of RoPE scaling, and models whose quantised matrices are repacked.
fn all_models() -> Vec<(String, GgufFile)> {
    let mut found = vec![("stories260K".to_owned(), stories())];
    for (name, bytes) in
        metal_attention_testing::models::architectures().iter().chain(metal_attention_testing::models::quants())
    {
        found.push((name.clone(), GgufFile::from_bytes(bytes).expect("a readable GGUF file")));
    }
    found
}

fn options() -> SessionOptions {
    SessionOptions { n_ctx: 256, ..SessionOptions::default() }
}

/// `n` ids of the model's vocabulary.
fn ids(model: &CpuForwardPass, n: usize) -> Vec<u32> {
    let n_vocab = model.spec().n_vocab;
    (0..n).map(|i| ((i * i * 31 + i * 7 + 3) % n_vocab) as u32).collect()
}

/// Appends `ids` to sequence `seq` in one batch. Returns the logits of every token.
fn logits(model: &mut CpuForwardPass, seq: usize, ids: &[u32]) -> Vec<f32> {
    let batch = batch(model, seq, ids);
    model.forward(&batch).expect("a batch that fits").as_slice().to_vec()
}

#[test]
fn a_prompt_gives_the_bits_of_single_tokens() {
    for (name, file) in all_models() {
        for isa in Isa::available() {
            for cache_type in [CacheType::F16, CacheType::F32] {
                let mut model = start_on(&on_isa(isa), &file, &SessionOptions { cache_type, ..options() });
                let ids = ids(&model, 75);
                let whole = logits(&mut model, 0, &ids);
                model.reset();
                let mut single = Vec::new();
                for &id in &ids {
                    single.extend_from_slice(model.forward_token(id).expect("room for a token"));
                }
                assert_eq!(bits(&single), bits(&whole), "{name} {isa:?} {cache_type}");
                model.reset();
                let n_vocab = model.spec().n_vocab;
                let last = argmax(&whole[whole.len() - n_vocab..]);
                assert_eq!(model.forward_prompt(&ids).expect("a prompt that fits"), last, "{name} {isa:?}");
                model.truncate(ids.len() - 1);
                assert_eq!(model.forward_token_greedy(ids[ids.len() - 1]).expect("room"), last, "{name} {isa:?}");
            }
        }
    }
}

#[test]
fn micro_batches_and_threads_do_not_change_the_bits() {
    for path in ["models/stories260K.gguf", "qwen3.gguf", "Q4_K.gguf"] {
        let file = open(path);
        let mut first = None;
        for n_ubatch in [1, 3, 8, 64, 512] {
            for n_threads in [1, 2, 3] {
                let mut model = start_on(&on_threads(n_threads), &file, &SessionOptions { n_ubatch, ..options() });
                let ids = ids(&model, 131);
                let got = bits(&logits(&mut model, 0, &ids));
                assert!(
                    got == *first.get_or_insert_with(|| got.clone()),
                    "{path} ubatch {n_ubatch} threads {n_threads}"
                );
            }
        }
    }
}

#[test]
fn sequences_in_one_batch_are_independent() {
    let file = stories();
    let mut single = start(&file, &options());
    let ids = ids(&single, 60);
    let prompts = [&ids[..40], &ids[25..60], &ids[10..11]];
    let n_vocab = single.spec().n_vocab;
    let want = prompts.map(|prompt| {
        single.reset();
        logits(&mut single, 0, prompt)
    });
    for n_ubatch in [4, 512] {
        let mut concurrent = start(&file, &SessionOptions { n_seq: 3, n_ubatch, ..options() });
        let tokens: Vec<Vec<BatchToken>> =
            prompts.iter().enumerate().map(|(seq, prompt)| batch(&concurrent, seq, prompt)).collect();
        let one_after_another: Vec<_> = tokens.iter().flatten().copied().collect();
        let alternating: Vec<_> = (0..40).flat_map(|i| tokens.iter().filter_map(move |t| t.get(i)).copied()).collect();
        let mut reversed_runs = Vec::new();
        for i in (0..40).step_by(5) {
            reversed_runs.extend(tokens.iter().rev().flat_map(|t| t.iter().skip(i).take(5)).copied());
        }
        for order in [one_after_another, alternating, reversed_runs] {
            concurrent.reset();
            let got = concurrent.forward(&order).expect("a batch that fits");
            for (i, token) in order.iter().enumerate() {
                let want = &want[token.seq][token.pos * n_vocab..][..n_vocab];
                assert_eq!(bits(got.row(i)), bits(want), "sequence {} position {}", token.seq, token.pos);
            }
            assert_eq!([0, 1, 2].map(|seq| concurrent.n_past(seq)), [40, 35, 1]);
        }
    }
}

#[test]
fn concurrent_sequences_give_the_same_bits() {
    const N_SEQ: usize = 7;
    let file = stories();
    for exact in [false, true] {
        let mut want = None;
        for n_threads in [1, 2, 3, 8] {
            let mut model =
                start_on(&on_threads(n_threads), &file, &SessionOptions { n_seq: N_SEQ, exact, ..options() });
            let ids = ids(&model, 60);
            let mut got = Vec::new();
            // Prompts of similar lengths, then single tokens, some without logits.
            for (step, len) in [9, 1, 1, 2, 1].into_iter().enumerate() {
                let mut tokens = Vec::new();
                for seq in (0..N_SEQ).rev() {
                    let start = model.n_past(seq);
                    let new = &ids[start + seq..][..len + seq % 2 * (len - 1)];
                    tokens.extend(batch(&model, seq, new));
                }
                for (i, token) in tokens.iter_mut().enumerate() {
                    token.output = (i + step) % 3 != 0;
                }
                let logits = model.forward(&tokens).expect("a batch that fits");
                let requested = tokens.iter().filter(|t| t.output).count();
                got.extend((0..requested).flat_map(|i| bits(logits.row(i))));
            }
            assert_eq!(got, *want.get_or_insert_with(|| got.clone()), "{n_threads} threads");
        }
    }
}

#[test]
fn a_profile_measures_the_path_that_runs() {
    let file = stories();
    // Concurrent sequences on two threads, and one sequence, whose matrix products use all threads.
    for (n_seq, n_parts) in [(4, 2), (1, 1)] {
        let mut model = start(&file, &SessionOptions { n_seq, ..options() });
        let ids = ids(&model, 3);
        let step = |pos: usize, model: &mut CpuForwardPass| {
            let tokens: Vec<_> = (0..n_seq).map(|seq| BatchToken { id: ids[pos], seq, pos, output: true }).collect();
            let before = model.regions();
            let logits = bits(model.forward(&tokens).expect("a batch that fits").as_slice());
            (model.regions() - before, logits)
        };
        step(0, &mut model);
        let plain = step(1, &mut model);
        for seq in 0..n_seq {
            model.rewind(seq, 1);
        }
        model.start_profile().expect("a clock");
        assert_eq!(step(1, &mut model), plain, "{n_seq} sequences: as many parallel regions, and the same bits");
        let profile = model.take_profile().expect("a profile");
        assert_eq!((profile.steps.len(), profile.parts(Phase::Decode)), (1, n_parts));
        let step = &profile.steps[0];
        assert_eq!((step.phase, step.n_tokens, profile.note), (Phase::Decode, n_seq, None));
        for part in 0..n_parts {
            let kernels: Vec<_> = step.kernels.iter().filter(|run| run.part == part).collect();
            // Five layers of nine kernels, the embedding and the RoPE cos/sin table before them, the norm and the head after
            // them.
            assert_eq!(kernels.len(), 5 * 9 + 4, "part {part}");
            assert_eq!((&*kernels[0].kernel, &*kernels[48].kernel), ("embedding", "matmul_output"));
            assert!(step.start <= kernels[0].start);
            for pair in kernels.windows(2) {
                assert_eq!(pair[0].start + pair[0].time, pair[1].start, "kernels of a part follow one another");
            }
            assert!(kernels[48].start + kernels[48].time <= step.start + step.time);
        }
    }
}

#[test]
fn a_sequence_that_was_cut_back_continues_as_a_new_one() {
    for (name, file) in all_models() {
        let mut model = start(&file, &options());
        let ids = ids(&model, 80);
        let mut other = ids.clone();
        other[30..].reverse();
        let want = logits(&mut model, 0, &other);
        let n_vocab = model.spec().n_vocab;
        model.reset();
        assert_eq!(model.position(), 0);
        logits(&mut model, 0, &ids);
        model.truncate(200);
        assert_eq!(model.position(), 80, "{name}: cutting back to more than there is");
        model.truncate(30);
        assert_eq!(model.position(), 30);
        let got = logits(&mut model, 0, &other[30..]);
        assert_eq!(bits(&got), bits(&want[30 * n_vocab..]), "{name} after cutting back");
        model.reset();
        assert_eq!(bits(&logits(&mut model, 0, &other)), bits(&want), "{name} after a reset");
    }
}

#[test]
fn sequences_that_share_pages_are_independent() {
    const N_SEQ: usize = 4;
    for (path, cache_type) in [
        ("models/stories260K.gguf", CacheType::F16),
        ("models/stories260K.gguf", CacheType::F32),
        ("qwen3.gguf", CacheType::F16),
    ] {
        let file = open(path);
        let mut single = start(&file, &SessionOptions { cache_type, ..options() });
        let pool = SessionOptions { n_seq: N_SEQ, n_cache: Some(8 * PAGE), cache_type, ..options() };
        let mut concurrent = start(&file, &pool);
        let n_vocab = single.spec().n_vocab;
        let mut sequences = vec![Vec::new(); N_SEQ];
        let mut state = 7u64;
        let mut random = |n: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % n
        };
        let (mut refused, mut shared) = (0, 0);
        for _ in 0..120 {
            let (seq, other) = (random(N_SEQ), random(N_SEQ));
            match random(4) {
                0 => {
                    let n = random(sequences[seq].len() + 1);
                    concurrent.share_prefix(seq, other, n).expect("a prefix that is there");
                    sequences[other] = sequences[seq][..n].to_vec();
                    shared += usize::from(seq != other && n > 0);
                }
                1 if random(3) == 0 => {
                    let n = random(sequences[seq].len() + 1);
                    concurrent.rewind(seq, n);
                    sequences[seq].truncate(n);
                }
                _ => {
                    let new: Vec<Vec<u32>> = (0..N_SEQ)
                        .map(|_| (0..[0, 1, 5, 70][random(4)]).map(|_| random(n_vocab) as u32).collect())
                        .collect();
                    let parts = (0..N_SEQ).map(|seq| batch(&concurrent, seq, &new[seq]));
                    let mut tokens: Vec<BatchToken> = parts.flatten().collect();
                    if random(2) == 0 {
                        // Interleaves the sequences.
                        tokens.sort_by_key(|t| t.pos);
                    }
                    match concurrent.forward(&tokens) {
                        Ok(got) => {
                            for (seq, new) in new.iter().enumerate().filter(|(_, new)| !new.is_empty()) {
                                sequences[seq].extend_from_slice(new);
                                single.reset();
                                let want = logits(&mut single, 0, &sequences[seq]);
                                let at = |t: &BatchToken| t.seq == seq && t.pos + 1 == sequences[seq].len();
                                let row = tokens.iter().position(at).expect("the last token of the sequence");
                                assert_eq!(bits(got.row(row)), bits(&want[want.len() - n_vocab..]), "{path} {seq}");
                            }
                        }
                        Err(ForwardError::OutOfPages { .. } | ForwardError::ContextFull { .. }) => {
                            refused += 1;
                            concurrent.rewind(seq, 0);
                            sequences[seq].clear();
                        }
                        Err(error) => assert_eq!((error, tokens.len()), (ForwardError::EmptyPrompt, 0)),
                    }
                }
            }
            assert!((0..N_SEQ).all(|seq| concurrent.n_past(seq) == sequences[seq].len()));
        }
        assert!(refused > 3 && shared > 10, "{refused} batches refused, {shared} prefixes shared");
        concurrent.reset();
        assert_eq!(concurrent.cache_pages(), PageUse { page_len: PAGE, total: 8, free: 8, ..Default::default() });
    }
}

#[test]
fn only_requested_logits_are_returned() {
    let mut model = start(&stories(), &SessionOptions { n_ubatch: 16, ..options() });
    let ids = ids(&model, 50);
    let n_vocab = model.spec().n_vocab;
    let all = logits(&mut model, 0, &ids);
    for requested in [vec![], vec![0], vec![49], vec![3, 15, 16, 17, 40], (20..50).collect()] {
        model.reset();
        let mut batch = batch(&model, 0, &ids);
        for (i, token) in batch.iter_mut().enumerate() {
            token.output = requested.contains(&i);
        }
        let got = model.forward(&batch).expect("a batch that fits");
        assert_eq!(got.n_rows(), requested.len());
        assert_eq!(got.last().is_none(), requested.is_empty());
        for (row, &i) in requested.iter().enumerate() {
            assert_eq!(bits(got.row(row)), bits(&all[i * n_vocab..][..n_vocab]), "token {i} of {requested:?}");
        }
        assert_eq!(model.position(), 50);
    }
}

#[test]
fn a_refused_batch_leaves_the_cache_unchanged() {
    let file = stories();
    let options = SessionOptions { n_ctx: 12, n_seq: 2, ..options() };
    let mut fresh = start(&file, &options);
    let ids = ids(&fresh, 12);
    logits(&mut fresh, 0, &ids[..8]);
    let want = logits(&mut fresh, 0, &ids[8..]);

    let mut model = start(&file, &options);
    logits(&mut model, 0, &ids[..8]);
    let n_vocab = model.spec().n_vocab;
    let token = |id, seq, pos| BatchToken { id, seq, pos, output: true };
    let bad = n_vocab as u32;
    let refused = [
        (vec![], ForwardError::EmptyPrompt),
        (vec![token(1, 0, 8), token(bad, 0, 9)], ForwardError::TokenOutOfRange { id: bad, n_vocab }),
        (vec![token(1, 0, 8), token(1, 2, 0)], ForwardError::SequenceOutOfRange { seq: 2, n_seq: 2 }),
        (vec![token(1, 0, 8), token(1, 0, 10)], ForwardError::PositionGap { seq: 0, pos: 10, expected: 9 }),
        (vec![token(1, 0, 0)], ForwardError::PositionGap { seq: 0, pos: 0, expected: 8 }),
        (vec![token(1, 1, usize::MAX)], ForwardError::PositionGap { seq: 1, pos: usize::MAX, expected: 0 }),
        (
            (8..13).map(|pos| token(1, 0, pos)).collect(),
            ForwardError::ContextFull { seq: 0, n_past: 8, n_new: 5, n_ctx: 12 },
        ),
    ];
    for (batch, want) in refused {
        assert_eq!(model.forward(&batch).expect_err("a refusal"), want);
        assert_eq!((model.n_past(0), model.n_past(1)), (8, 0), "after {want}");
    }
    assert_eq!(model.forward_prompt(&[]).expect_err("a refusal"), ForwardError::EmptyPrompt);
    assert_eq!(bits(&logits(&mut model, 0, &ids[8..])), bits(&want), "the tokens after the refusals");
    let full = ForwardError::ContextFull { seq: 0, n_past: 12, n_new: 1, n_ctx: 12 };
    assert_eq!(model.forward_token(1).expect_err("a refusal"), full);
    assert_eq!(model.forward_token_greedy(1).expect_err("a refusal"), full);
    assert_eq!(model.position(), 12);
    // The other sequence's context is not full.
    assert_eq!(bits(&logits(&mut model, 1, &ids)[8 * n_vocab..]), bits(&want));
    assert_eq!(
        model.share_prefix(0, 1, 13).expect_err("a refusal"),
        ForwardError::PrefixTooLong { seq: 0, n: 13, n_past: 12 }
    );
    assert_eq!(
        model.share_prefix(2, 1, 0).expect_err("a refusal"),
        ForwardError::SequenceOutOfRange { seq: 2, n_seq: 2 }
    );
    assert_eq!((model.n_past(0), model.n_past(1)), (12, 12));
}

#[test]
fn a_full_cache_refuses_a_batch_and_is_unchanged() {
    let file = stories();
    let mut model = start(&file, &SessionOptions { n_seq: 2, n_cache: Some(2 * PAGE), ..options() });
    let ids = ids(&model, PAGE + 2);
    logits(&mut model, 0, &ids[..PAGE - 1]);
    logits(&mut model, 1, &ids[..PAGE]);
    let (first, second) = (batch(&model, 0, &ids[PAGE - 1..]), batch(&model, 1, &ids[PAGE..]));
    let full = ForwardError::OutOfPages { needed: 1, free: 0, total: 2, page_len: PAGE };
    assert_eq!(model.forward(&first).expect_err("a refusal"), full);
    assert_eq!(model.forward(&second).expect_err("a refusal"), full);
    assert_eq!((model.n_past(0), model.n_past(1)), (PAGE - 1, PAGE));
    model.forward(&first[..1]).expect("room for a token");
    // A page that one sequence frees is used by the other.
    model.rewind(1, 0);
    let got = bits(model.forward(&first[1..]).expect("room for a page").as_slice());
    model.reset();
    let n_vocab = model.spec().n_vocab;
    assert_eq!(got, bits(&logits(&mut model, 0, &ids)[PAGE * n_vocab..]));
}

#[test]
fn traced_and_untraced_runs_agree() {
    for (name, file) in all_models() {
        let mut model = start(&file, &options());
        let ids = ids(&model, 20);
        let (spec, n_embd) = (model.spec().clone(), model.spec().n_embd);
        let want = logits(&mut model, 0, &ids);
        model.reset();

        // A batch with a trace.
        let mut batch = batch(&model, 0, &ids);
        for token in &mut batch[..15] {
            token.output = false;
        }
        let mut states = Vec::new();
        let mut keep = |layer: usize, x: &[f32]| states.push((layer, x.to_vec()));
        let got = bits(model.forward_traced(&batch, Some(&mut keep)).expect("a batch that fits").as_slice());
        assert_eq!(got, bits(&want[15 * spec.n_vocab..]), "{name}");
        let layers: Vec<_> = states.iter().map(|s| s.0).collect();
        assert_eq!(layers, (0..spec.n_layer()).collect::<Vec<_>>(), "{name}");
        assert!(states.iter().all(|s| s.1.len() == ids.len() * n_embd), "{name}");

        // One token: the hidden states are the same, and the head on the last of them gives the logits.
        model.truncate(19);
        let (logits, single) = model.forward_token_debug(ids[19]).expect("room for a token");
        assert_eq!(bits(&logits), bits(&want[19 * spec.n_vocab..]), "{name}");
        for ((_, all), one) in states.iter().zip(&single) {
            assert_eq!(bits(&all[19 * n_embd..]), bits(one), "{name}");
            assert!(one.iter().all(|x| x.is_finite()), "{name}");
        }
        let head = head(&file, &spec, &single[spec.n_layer() - 1]);
        let scale = head.iter().fold(0f64, |m, v| m.max(v.abs()));
        // Quantised heads multiply activations of 8 bits.
        let limit = if metal_attention_testing::models::quants().contains_key(&name) { 2e-2 } else { 1e-5 };
        for (got, want) in logits.iter().zip(head) {
            assert!((f64::from(*got) - want).abs() <= limit * scale, "{name}: {got} {want}");
        }
    }
}

/// The logits of one hidden state, `[n_vocab]`, computed in float64.
fn head(file: &GgufFile, spec: &ModelSpec, x: &[f32]) -> Vec<f64> {
    let model = LoadedModel::with_spec(file, spec.clone()).expect("a whole model");
    let weights = model.weights();
    let mean = x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / x.len() as f64;
    let factor = 1.0 / (mean + f64::from(spec.output.norm.unwrap().eps)).sqrt();
    let norm = &weights.output_norm.as_ref().unwrap().weight;
    let h: Vec<_> = x.iter().zip(norm).map(|(&x, &w)| f64::from(x) * factor * f64::from(w)).collect();
    let output = weights.output.as_ref().unwrap().weight.to_f32();
    output.chunks_exact(x.len()).map(|row| row.iter().zip(&h).map(|(&w, h)| f64::from(w) * h).sum()).collect()
}

#[test]
fn options_out_of_range_are_refused() {
    let file = stories();
    let refused = [
        SessionOptions { n_ctx: 0, ..options() },
        SessionOptions { n_seq: 0, ..options() },
        SessionOptions { n_cache: Some(0), ..options() },
        SessionOptions { n_seq: usize::MAX, ..options() },
        SessionOptions { n_ctx: 64, n_seq: 1 << 40, n_cache: Some(64), ..options() },
        SessionOptions { n_ubatch: 0, ..options() },
    ];
    let refused = refused.map(|options| (on_threads(2), options)).into_iter();
    for (cpu, options) in refused.chain([0, usize::MAX].map(|n_threads| (on_threads(n_threads), options()))) {
        let error = CpuExecutor::session_of_file(&cpu, &file, &options).err().expect("a refusal");
        assert!(matches!(error, CpuError::Option { .. }), "{error}");
        assert!(error.to_string().contains("must be at least 1"), "{error}");
    }
    for (n_ctx, n_seq) in [(usize::MAX / 4, 1), (usize::MAX, 1), (1 << 50, 1), (1 << 40, 1 << 20)] {
        for cache_type in [CacheType::F16, CacheType::F32] {
            let options = SessionOptions { n_ctx, n_seq, cache_type, ..options() };
            let error = CpuExecutor::session_of_file(&on_threads(2), &file, &options).err().expect("a refusal");
            assert!(matches!(error, CpuError::OutOfMemory { what: "the KV cache", .. }), "{n_ctx} {n_seq}: {error}");
        }
    }
}

#[test]
fn memory_use_follows_from_the_shapes() {
    let file = stories();
    for (cache_type, bytes) in [(CacheType::F16, 2), (CacheType::F32, 4)] {
        let model = start(&file, &SessionOptions { n_ctx: 64, n_seq: 2, cache_type, ..options() });
        // 5 layers, 4 KV heads of 8 elements; values are padded to 16.
        assert_eq!(model.kv_cache_bytes(), 2 * 64 * 5 * 4 * (8 + 16) * bytes);
        let memory = model.memory_use();
        // The gate and up matrices have 172 rows, padded to 176.
        let layer = 64 * 64 + 2 * 32 * 64 + 64 * 64 + 2 * 176 * 64 + 64 * 172;
        assert_eq!((memory.kv_cache, memory.weights), (model.kv_cache_bytes() as u64, 4 * (5 * layer + 512 * 64)));
    }
    // The KV cache has whole pages.
    let model = start(&file, &SessionOptions { n_ctx: 300, n_seq: 9, n_cache: Some(3 * PAGE + 1), ..options() });
    assert_eq!(model.kv_cache_bytes(), 4 * PAGE * 5 * 4 * (8 + 16) * 2);
    let file = open("Q4_K.gguf");
    let model = start(&file, &options());
    assert!(model.memory_use().weights > 0);
    assert!(model.memory_use().weights <= file.tensor_bytes() * 5 / 4, "repacked weights are as large as the file's");
    let exact = start(&file, &SessionOptions { exact: true, ..options() });
    assert_eq!(exact.memory_use().weights, 0);
}

/// The model with a sliding window.
fn with_window(file: &GgufFile, window: usize) -> GgufFile {
    let mut metadata = file.metadata().clone();
    metadata.set("llama.attention.sliding_window", window as u32);
    let tensors: Vec<_> = file.tensors().iter().map(|t| (TensorDecl::from(t), t.bytes().to_vec())).collect();
    gguf(&metadata, &tensors)
}

#[test]
fn a_sliding_window_hides_earlier_tokens() {
    const N: usize = 100;
    for path in ["models/stories260K.gguf", "llama-mha.gguf"] {
        let file = open(path);
        let mut full = start(&file, &options());
        let n_layer = full.spec().n_layer();
        let n_vocab = full.spec().n_vocab;
        let ids = ids(&full, N);
        let want = logits(&mut full, 0, &ids);
        for window in [N, N + 1, 4096] {
            let mut model = start(&with_window(&file, window), &options());
            assert!(logits(&mut model, 0, &ids) == want, "{path}: a window of {window} over {N} tokens");
        }
        for window in [4, 16] {
            let mut model = start(&with_window(&file, window), &options());
            let got = logits(&mut model, 0, &ids);
            assert!(got[..window * n_vocab] == want[..window * n_vocab], "{path}: the first {window} tokens");
            for i in window..N {
                assert!(got[i * n_vocab..][..n_vocab] != want[i * n_vocab..][..n_vocab], "{path} {window}: token {i}");
            }
            // In each layer a token attends to at most `window - 1` earlier ones, so that the first token has no influence
            // after `n_layer * (window - 1)` tokens. Shortly before that position its influence is lost in rounding; within
            // the reach of two layers it is not.
            let mut other = ids.clone();
            other[0] = (ids[0] + 1) % n_vocab as u32;
            model.reset();
            let changed = logits(&mut model, 0, &other);
            let reach = n_layer * (window - 1);
            for i in 0..N {
                let same = changed[i * n_vocab..][..n_vocab] == got[i * n_vocab..][..n_vocab];
                if i > reach || i <= 2 * (window - 1) {
                    assert_eq!(same, i > reach, "{path} window {window}: token {i} of a reach of {reach}");
                }
            }
        }
    }
}
