//! Models through CUDA, on an NVIDIA GPU or on the software CUDA device (`scripts/software-cuda`): their results equal the
//! CPU's. Without a device the tests are skipped, or fail where `METAL_ATTENTION_TEST_CUDA` is set. `scripts/test` runs some
//! tests by name again, on software devices of other sizes.

pub(crate) mod ranks;

use std::sync::Arc;

use metal_attention::gguf::TensorType::{self, BF16, F16, F32, IQ4_XS, MXFP4, Q4_0, Q4_K, Q5_1, Q5_K, Q6_K, Q8_0};
use metal_attention::gguf::blocks::random_blocks;
use metal_attention::gguf::{GgufFile, GgufWriter, Metadata, TensorDecl};
use metal_attention::{
    BatchToken, CacheType, CudaDevice, CudaError, CudaExecutor, CudaTuning, Device, EngineOptions, Error, ForwardError,
    ForwardPass, Model, ModelOptions, ModelSpec, SessionOptions, Watch, cuda_summaries,
};
use metal_attention_model::{ModelShape, highest};

/// Whether there is a CUDA device; without one the test is recorded as skipped.
pub(crate) fn has_cuda() -> bool {
    let why = match cuda_summaries() {
        Ok(found) if !found.is_empty() => return true,
        Ok(_) => "CUDA knows no device".to_owned(),
        Err(why) => why.to_string(),
    };
    assert!(std::env::var_os("METAL_ATTENTION_TEST_CUDA").is_none(), "{why}");
    metal_attention_testing::skip(&why);
    false
}

/// A model of `shape` with random matrices of type `ty`. `window`: the sliding window of all layers; 0: none.
fn model(shape: &ModelShape, ty: TensorType, window: u32) -> Model {
    let mut metadata = shape.metadata();
    let mut set = |key: &str, value: u32| metadata.set(format!("{}.{key}", shape.architecture), value);
    set("rope.dimension_count", shape.head_dim as u32);
    set("attention.sliding_window", window);
    random_model(&metadata, ty, 1.0)
}

/// The model that `metadata` describes, with random matrices of type `ty` and random norm weights around `mean`.
fn random_model(metadata: &Metadata, ty: TensorType, mean: f32) -> Model {
    let spec = ModelSpec::from_metadata(metadata).expect("a model");
    let tensors: Vec<_> = spec.tensors().into_iter().filter(|t| t.required).collect();
    let decls: Vec<_> = tensors
        .iter()
        .map(|t| TensorDecl { ty: if t.is_matrix() { ty } else { F32 }, name: t.name.clone(), shape: t.shape.clone() })
        .collect();
    let mut writer = GgufWriter::new(Vec::new(), 3, metadata, &decls).expect("a header");
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    for (seed, (tensor, decl)) in (1..).zip(tensors.iter().zip(&decls)) {
        let n: usize = decl.shape.iter().product();
        // With this scale the elements of the residual stream stay near 1.
        let (mean, scale) = if tensor.is_matrix() { (0.0, 1.0 / (decl.shape[0] as f32).sqrt()) } else { (mean, 0.3) };
        let values: Vec<f32> = (0..n)
            .map(|_| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                mean + scale * ((state >> 40) as f32 / (1_u64 << 23) as f32 - 1.0)
            })
            .collect();
        let mut bytes = Vec::new();
        if decl.ty.name().starts_with("IQ") {
            // These types are slow to quantise, because the nearest codebook entries are searched.
            bytes = random_blocks(decl.ty, n, seed, 1.7 * scale);
        } else {
            decl.ty.quantize(&values, &mut bytes).expect("whole blocks");
        }
        writer.write(&bytes).expect("memory");
    }
    let file = GgufFile::from_bytes(&writer.finish().expect("all tensors")).expect("a file");
    Model::from_gguf(file, &ModelOptions::default()).expect("a model")
}

fn options(device: Device, cache_type: CacheType, exact: bool) -> EngineOptions {
    EngineOptions { device, cache_type, exact, n_ctx: Some(512), n_seq: 4, n_ubatch: Some(128), ..Default::default() }
}

/// A shape with two layers, which the variants of the tests are made of.
fn small() -> ModelShape {
    let custom = ModelShape::named("custom").expect("a named shape").clone();
    ModelShape { n_layer: 2, n_embd: 256, n_head: 4, n_head_kv: 2, head_dim: 64, n_ff: 512, n_vocab: 1000, ..custom }
}

/// A Gemma 2 of two layers, of which every second has a window of `window` positions.
pub(crate) fn windowed_model(window: u32) -> Model {
    model(&ModelShape { architecture: "gemma2", ..small() }, Q8_0, window)
}

/// The logits of prompts and single tokens of one sequence, of decode steps of four sequences that share prefixes, and of a
/// step after a cut, in a fixed order of batches.
fn logits(pass: &mut dyn ForwardPass) -> Vec<f32> {
    let n_vocab = pass.spec().n_vocab;
    let mut ids = (0..).map(|i: u32| (i * i * 7 + 3) % n_vocab as u32);
    let mut logits = Vec::new();
    let mut evaluate = |pass: &mut dyn ForwardPass, batch: &[BatchToken]| {
        logits.extend_from_slice(pass.forward(batch).expect("room").as_slice());
    };
    for n in [150, 35, 20, 12, 5, 1, 1, 3, 1] {
        let start = pass.n_past(0);
        let batch: Vec<_> = ids
            .by_ref()
            .take(n)
            .enumerate()
            .map(|(i, id)| BatchToken { id, seq: 0, pos: start + i, output: i % 3 == 0 || i + 1 == n })
            .collect();
        evaluate(pass, &batch);
    }
    for (seq, n) in [(1, 70), (2, 64), (3, 130)] {
        pass.share_prefix(0, seq, n).expect("sequences");
    }
    for _ in 0..3 {
        let batch: Vec<_> = (0..4)
            .map(|seq| BatchToken { id: ids.next().unwrap_or(0), seq, pos: pass.n_past(seq), output: true })
            .collect();
        evaluate(pass, &batch);
    }
    assert_eq!(pass.rewind(0, 100), 100);
    let batch = [BatchToken { id: 7, seq: 0, pos: 100, output: true }];
    evaluate(pass, &batch);
    logits
}

/// Squared error over the squares of `want`.
fn nmse(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let error: f64 = want.iter().zip(got).map(|(w, g)| f64::from(w - g).powi(2)).sum();
    error / want.iter().map(|&w| f64::from(w).powi(2)).sum::<f64>()
}

#[test]
fn models_give_the_logits_of_the_cpu() {
    if !has_cuda() {
        return;
    }
    let small = small();
    let qwen = |architecture| ModelShape { architecture, ..small.clone() };
    let cases = [
        ("F32", small.clone(), F32, 0),
        ("F16", small.clone(), F16, 0),
        ("BF16", small.clone(), BF16, 0),
        ("Q8_0", small.clone(), Q8_0, 0),
        ("Q4_0", small.clone(), Q4_0, 0),
        ("Q4_K", small.clone(), Q4_K, 0),
        ("Q5_K", small.clone(), Q5_K, 0),
        ("Q6_K", small.clone(), Q6_K, 0),
        ("heads of 128, one KV head", ModelShape { head_dim: 128, n_head_kv: 1, ..small.clone() }, Q4_0, 0),
        ("heads of 96, each a KV head", ModelShape { head_dim: 96, n_head_kv: 4, ..small.clone() }, Q8_0, 0),
        ("heads of 40", ModelShape { head_dim: 40, ..small.clone() }, F16, 0),
        ("heads of 256", ModelShape { head_dim: 256, ..small.clone() }, F16, 0),
        ("17 heads to a KV head", ModelShape { n_head: 17, n_head_kv: 1, ..small.clone() }, Q4_0, 0),
        ("normed heads", qwen("qwen3"), Q4_K, 0),
        ("biases", qwen("qwen2"), Q4_0, 0),
        ("a window", small.clone(), Q4_0, 70),
        (
            "rows of 36, 44 and 100",
            ModelShape { n_embd: 36, n_ff: 44, n_vocab: 100, head_dim: 8, ..small.clone() },
            F16,
            0,
        ),
        ("rows of 8256", ModelShape { n_ff: 8256, ..small.clone() }, Q4_0, 0),
        ("SmolLM's rows", ModelShape { n_embd: 576, n_ff: 1536, n_head: 9, n_head_kv: 3, ..small.clone() }, Q4_0, 0),
    ];
    // Each tensor type and each kind of head has tests of its kernels alone.
    let left_out = ["F32", "BF16", "Q5_K", "heads of 96, each a KV head", "heads of 40", "rows of 8256"];
    for (i, (what, shape, ty, window)) in cases.into_iter().enumerate() {
        if left_out.contains(&what) && super::takes_fewer_cases() {
            continue;
        }
        compare(i, what, &model(&shape, ty, window));
    }
}

/// (type of the KV cache, exact products, largest NMSE) of the comparisons of a test's case `i`. Where
/// [`takes_fewer_cases`](super::takes_fewer_cases), a case has one comparison, and successive cases have different ones.
fn precisions(i: usize) -> Vec<(CacheType, bool, f64)> {
    let all = [(CacheType::F32, true, 1e-10), (CacheType::F16, true, 1e-5), (CacheType::F16, false, 1e-5)];
    if super::takes_fewer_cases() { vec![all[2 * (i % 2)]] } else { all.to_vec() }
}

/// Compares the logits of `model`, a test's case `i`, with the CPU's, with exact and rounded products.
fn compare(i: usize, what: &str, model: &Model) {
    for (cache_type, exact, tolerance) in precisions(i) {
        let pass = |device, exact| {
            let options = options(device, cache_type, exact);
            model.forward_pass(&options).unwrap_or_else(|e| panic!("{what}: {e}"))
        };
        let want = logits(&mut *pass(Device::Cpu, true));
        let error = nmse(&logits(&mut *pass(Device::Cuda(0), exact)), &want);
        assert!(error <= tolerance, "{what}, cache {cache_type}, exact {exact}: NMSE {error:e}");
    }
}

/// Products so small that a multiprocessor has a tile of one or two matrices, so that it prefetches weights before their
/// inputs are ready: the first shape on the four multiprocessors of the software device, the others on 28.
#[test]
fn small_layers_give_the_logits_of_the_cpu() {
    if !has_cuda() {
        return;
    }
    let tiny = ModelShape { n_embd: 64, n_ff: 64, n_head: 2, n_head_kv: 1, head_dim: 32, n_layer: 3, ..small() };
    let with = |architecture| ModelShape { architecture, ..tiny.clone() };
    let wide = ModelShape { n_embd: 576, ..tiny.clone() };
    let heads = ModelShape { n_head: 12, head_dim: 64, ..tiny.clone() };
    let cases = [
        ("tiny, Q4_0", tiny.clone(), Q4_0),
        ("tiny, Q8_0", tiny.clone(), Q8_0),
        ("tiny, Q5_1", tiny.clone(), Q5_1),
        ("tiny, MXFP4", tiny.clone(), MXFP4),
        ("tiny, biases", with("qwen2"), Q4_0),
        ("tiny, normed heads", with("qwen3"), Q5_1),
        ("rows of 576, Q4_0", wide.clone(), Q4_0),
        ("rows of 576, Q5_1", wide, Q5_1),
        ("12 heads, Q8_0", heads.clone(), Q8_0),
        ("12 heads, Q5_1", heads, Q5_1),
    ];
    for (i, (what, shape, ty)) in cases.into_iter().enumerate() {
        compare(i, what, &model(&shape, ty, 0));
    }
}

/// The tensor types without a kernel for their own format, which are repacked as codes and scales.
#[test]
fn every_type_gives_the_logits_of_the_cpu() {
    if !has_cuda() {
        return;
    }
    let shape = ModelShape { n_layer: 1, ..small() };
    for (i, &ty) in TensorType::ALL.iter().enumerate() {
        if ![F32, F16, BF16, Q8_0, Q4_0, Q4_K, Q5_K, Q6_K].contains(&ty) {
            compare(i, ty.name(), &model(&shape, ty, 0));
        }
    }
}

/// Metadata of a Gemma 3n with several residual streams.
const STREAMS: [(&str, u32); 5] = [
    ("attention.sliding_window", 40),
    ("attention.shared_kv_layers", 2),
    ("embedding_length_per_layer_input", 12),
    ("altup.num_inputs", 4),
    ("laurel.rank", 8),
];

/// Models with post-norms, norms of whole query rows and of heads, parallel attention and feed-forward, learned positions,
/// ALiBi, gated queries, several residual streams, per-layer embeddings, shared KV caches, and unusual head sizes.
#[test]
fn every_layer_kind_gives_the_logits_of_the_cpu() {
    if !has_cuda() {
        return;
    }
    let heads = |n: u32| [("attention.key_length", n), ("attention.value_length", n), ("rope.dimension_count", n & !1)];
    let cases = [
        ("gemma2", "gemma2", 3, &[("attention.sliding_window", 40)][..]),
        ("gemma3n", "gemma3n", 5, &STREAMS),
        ("olmo2", "olmo2", 2, &[]),
        ("command-r", "command-r", 2, &[]),
        ("gpt2", "gpt2", 2, &[("context_length", 512)]),
        ("bloom", "bloom", 2, &[]),
        ("phi2", "phi2", 2, &[("rope.dimension_count", 8)]),
        ("heads of 9", "qwen3", 2, &heads(9)),
        ("heads of 264", "qwen3", 2, &heads(264)),
        ("heads of 512", "llama", 1, &heads(512)),
    ];
    for (i, (what, architecture, n_layer, keys)) in cases.into_iter().enumerate() {
        compare(i, what, &random_model(&crate::toys::metadata(architecture, n_layer, keys), F16, 1.0));
    }
}

/// Models without causal masks. The sequences of a batch are longer than a micro-batch.
#[test]
fn encoders_give_the_hidden_states_of_the_cpu() {
    if !has_cuda() {
        return;
    }
    let sequence = |seq: usize, n: usize| {
        let token = move |pos| BatchToken { id: ((pos * pos * 31 + seq * 7 + 3) % 96) as u32, seq, pos, output: true };
        (0..n).map(token).collect::<Vec<_>>()
    };
    let batch = [sequence(0, 300), sequence(1, 1), sequence(2, 190)].concat();
    for dim in [16, 64] {
        let heads = [("attention.sliding_window", 10), ("attention.key_length", dim), ("attention.value_length", dim)];
        let model = random_model(&crate::toys::metadata("gemma-embedding", 3, &heads), F16, 1.0);
        for (cache_type, exact, tolerance) in [(CacheType::F32, true, 1e-10), (CacheType::F16, false, 1e-5)] {
            let states = |device, exact| {
                let mut pass = model.forward_pass(&options(device, cache_type, exact)).expect("a forward pass");
                pass.forward_hidden(&batch).expect("room")
            };
            let error = nmse(&states(Device::Cuda(0), exact), &states(Device::Cpu, true));
            assert!(error <= tolerance, "heads of {dim}, cache {cache_type}, exact {exact}: NMSE {error:e}");
        }
    }
}

/// A decode step of an encoder is refused with the same error as on the CPU.
#[test]
fn decode_steps_of_encoders_are_refused() {
    if !has_cuda() {
        return;
    }
    let token = |pos, logits| BatchToken { id: 7, seq: 0, pos, output: logits };
    for (name, error) in
        [("bert", ForwardError::NoLogits), ("llama-embed", ForwardError::NotFromStart { seq: 0, n_past: 20 })]
    {
        let model = random_model(&crate::toys::metadata(name, 2, &[]), F16, 1.0);
        for device in [Device::Cpu, Device::Cuda(0)] {
            let mut pass = model.forward_pass(&options(device, CacheType::F16, false)).expect("a forward pass");
            pass.forward_hidden(&(0..20).map(|pos| token(pos, pos == 19)).collect::<Vec<_>>()).expect("room");
            assert_eq!(pass.forward_greedy(&[token(20, true)]), Err(error.clone()), "{name}");
            assert_eq!(pass.n_past(0), 20, "{name}");
        }
    }
}

/// Greedy steps that are queued ahead give the tokens of single steps, also when the sequence continues with another token,
/// and when the context becomes too long for the persistent kernel while steps are in flight.
#[test]
fn greedy_steps_run_ahead() {
    if !has_cuda() {
        return;
    }
    let model = model(&small(), Q4_0, 0);
    let gpu = Arc::new(CudaDevice::open(0, Watch::default()).unwrap());
    let options = SessionOptions { n_ctx: 256, ..Default::default() };
    let tuning = CudaTuning { persistent_kernel_positions: Some(130) };
    let pass = || CudaExecutor::tuned_session(Arc::clone(&gpu), model.loaded(), &options, &tuning).expect("a pass");
    let (mut ahead, mut single) = (pass(), pass());
    assert!(ahead.uses_persistent_kernel(129) && !ahead.uses_persistent_kernel(130));
    let prompt: Vec<u32> = (0..90).map(|i| i * 11 % 1000).collect();
    let mut id = ahead.forward_prompt(&prompt).unwrap();
    assert_eq!(single.forward_prompt(&prompt).unwrap(), id);
    for step in 0..120 {
        if step % 29 == 28 {
            // The sequence is cut back by five tokens and continues with another token than the generated one.
            for pass in [&mut ahead, &mut single] {
                let n = pass.position();
                assert_eq!(pass.truncate(n - 5), n - 5);
            }
            id = 3;
        }
        let next = ahead.forward_token_greedy(id).unwrap();
        let logits = single.forward_token(id).unwrap();
        let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        assert_eq!(logits[next as usize], best, "step {step}");
        id = next;
    }
}

/// Greedy steps in the persistent kernel with blocks that have no rows of some products: on the software device with twelve
/// multiprocessors, and on GPUs with most blocks. Blocks without rows must not run ahead of the others.
#[test]
fn models_give_equal_tokens_with_blocks_without_rows() {
    if !has_cuda() {
        return;
    }
    let tiny =
        ModelShape { n_vocab: 32, n_embd: 32, n_ff: 32, n_head: 1, n_head_kv: 1, head_dim: 32, n_layer: 2, ..small() };
    // A shape with small products only, and one with a product of more tiles than there are blocks.
    for (what, shape) in [("small", tiny.clone()), ("longer", ModelShape { n_ff: 1280, ..tiny })] {
        let model = model(&shape, Q4_0, 0);
        let pass = || model.forward_pass(&options(Device::Cuda(0), CacheType::F16, false)).expect("a pass");
        let (mut ahead, mut single) = (pass(), pass());
        let mut id = 1;
        for step in 0..100 {
            let next = ahead.forward_token_greedy(id).unwrap();
            let logits = single.forward_token(id).unwrap();
            assert_eq!(next, highest(logits, 1)[0].0, "{what}, step {step}");
            id = next;
        }
    }
}

/// The persistent kernel with experts gives the logits of one launch per op, except for the rounding of F16 keys and values:
/// for every weight type, expert widths that do and do not divide evenly among warps, leading dense layers, and every
/// router.
#[test]
fn experts_run_in_the_persistent_kernel() {
    if !has_cuda() {
        return;
    }
    let gpu = Arc::new(CudaDevice::open(0, Watch::default()).unwrap());
    let experts = |n: u32, n_used: u32, n_ff: u32| {
        [("expert_count", n), ("expert_used_count", n_used), ("expert_feed_forward_length", n_ff)]
    };
    // (architecture, type, [experts, experts used per token, feed-forward width of an expert], n_embd, more metadata)
    let cases = [
        ("qwen3moe", Q4_K, [16, 4, 512], 512, &[][..]),
        ("qwen3moe", Q6_K, [20, 3, 256], 256, &[]),
        ("qwen3moe", Q4_0, [72, 8, 64], 96, &[]),
        ("qwen3moe", Q4_0, [200, 5, 448], 64, &[]),
        ("qwen3moe", Q8_0, [32, 7, 192], 128, &[]),
        ("qwen3moe", F16, [8, 2, 128], 64, &[]),
        ("qwen3moe", Q5_K, [12, 1, 768], 256, &[]),
        ("qwen3moe", IQ4_XS, [24, 4, 512], 256, &[]),
        ("qwen3moe", Q5_1, [24, 4, 128], 128, &[]),
        ("gpt-oss", MXFP4, [24, 4, 192], 160, &[("attention.sliding_window", 70)]),
        ("dots1", Q4_0, [16, 4, 128], 128, &[("leading_dense_block_count", 1), ("expert_gating_func", 2)]),
    ];
    let step = if super::takes_fewer_cases() { 2 } else { 1 };
    for (architecture, ty, [n, n_used, n_ff], n_embd, others) in cases.into_iter().step_by(step) {
        let what = format!("{architecture}, {ty}, {n_used} of {n} experts of {n_ff}, rows of {n_embd}");
        let heads = [("attention.key_length", 64), ("attention.value_length", 64)];
        let mut all = [("embedding_length", n_embd), ("feed_forward_length", 256)].to_vec();
        all.extend(heads);
        all.extend(experts(n, n_used, n_ff));
        all.extend(others);
        let model = random_model(&crate::toys::metadata(architecture, 3, &all), ty, 1.0);
        let pass = |persistent_kernel_positions| {
            let tuning = CudaTuning { persistent_kernel_positions: Some(persistent_kernel_positions) };
            let options = SessionOptions { n_ctx: 256, exact: true, ..Default::default() };
            CudaExecutor::tuned_session(Arc::clone(&gpu), model.loaded(), &options, &tuning).expect("a pass")
        };
        let (mut persistent, mut per_op) = (pass(usize::MAX), pass(0));
        assert!(persistent.uses_persistent_kernel(0) && !per_op.uses_persistent_kernel(0), "{what}");
        let mut errors = Vec::new();
        for sequence in 0..2 {
            persistent.reset();
            per_op.reset();
            for i in 0..4 {
                let id = (sequence * 31 + i * i * 7 + 3) % 90;
                let (got, want) = (persistent.forward_token(id).unwrap(), per_op.forward_token(id).unwrap());
                errors.push(nmse(got, want));
            }
        }
        errors.sort_by(f64::total_cmp);
        // Rounding may change the experts of a token where two router scores are nearly equal. So one row in five may
        // differ.
        let (eighth_decile, largest) = (errors[errors.len() * 8 / 10], errors[errors.len() - 1]);
        assert!(eighth_decile < 1e-7, "{what}: NMSE {eighth_decile:e}, {largest:e}");
    }
}

/// Top-k lists equal those computed from all logits, for single tokens, several sequences and prompts, with and without the
/// persistent kernel.
#[test]
fn top_k_lists_have_the_highest_logits() {
    if !has_cuda() {
        return;
    }
    let model = model(&ModelShape { n_vocab: 5000, ..small() }, Q4_K, 0);
    let gpu = Arc::new(CudaDevice::open(0, Watch::default()).unwrap());
    for persistent_kernel_positions in [0, 53] {
        let options = SessionOptions { n_ctx: 256, n_seq: 3, n_ubatch: 40, ..Default::default() };
        let tuning = CudaTuning { persistent_kernel_positions: Some(persistent_kernel_positions) };
        let pass = || CudaExecutor::tuned_session(Arc::clone(&gpu), model.loaded(), &options, &tuning).expect("a pass");
        let (mut lists, mut all) = (pass(), pass());
        assert_eq!(lists.max_top_k(), 128);
        let token = |seq, pos, logits| BatchToken { id: (7 * pos + seq) as u32, seq, pos, output: logits };
        let prompt: Vec<_> = (0..50).map(|pos| token(0, pos, pos % 3 == 0)).collect();
        let prompts = (1..3).flat_map(|seq| (0..20).map(move |pos| token(seq, pos, pos == 19)));
        let mut batches = vec![prompt, prompts.collect()];
        batches.extend((50..55).map(|pos| vec![token(0, pos, true)]));
        batches.extend((20..24).map(|pos| vec![token(0, pos + 35, true), token(1, pos, true), token(2, pos, true)]));
        for (i, batch) in batches.iter().enumerate() {
            let k = if i == 3 { 200 } else { 128 - i };
            let got = lists.forward_top_k(batch, k).unwrap();
            let logits = all.forward(batch).unwrap();
            let want: Vec<_> = (0..logits.n_rows()).map(|row| highest(logits.row(row), k)).collect();
            assert_eq!(got, want, "batch {i}, persistent kernel up to {persistent_kernel_positions}");
        }
    }
}

#[test]
fn unsupported_models_are_refused_with_the_reason() {
    let model = model(&ModelShape { head_dim: 520, n_embd: 64, ..small() }, F16, 0);
    let error = model.forward_pass(&options(Device::Cuda(0), CacheType::F16, false)).err().expect("a refusal");
    assert!(
        matches!(&error, Error::Gpu(e) if matches!(e.downcast_ref(), Some(CudaError::UnsupportedPart { part: "heads of that many elements" }))),
        "{error}"
    );
    if !has_cuda() {
        let model = Model::built_in().unwrap();
        let error = model.forward_pass(&options(Device::Cuda(0), CacheType::F16, false)).err().expect("a refusal");
        let message = error.to_string();
        assert!(
            matches!(&error, Error::Gpu(e) if e.downcast_ref::<CudaError>().is_some())
                && message.contains("--device gpu"),
            "{message}"
        );
    }
}
