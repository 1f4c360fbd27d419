//! Models of unusual shapes on the GPU: each gives the logits of the CPU, or an error that says why it cannot run. Without a
//! GPU the tests are skipped; in CI that is a failure.
use metal_attention::gguf::{GgufFile, GgufWriter, TensorDecl, TensorType};
use metal_attention::wgpu::{WgpuError, adapter_summaries};
use metal_attention::{
    BatchToken, CacheType, Device, EngineOptions, Error, ForwardPass, Model, ModelOptions, ModelSpec,
};
use metal_attention_model::ModelShape;

/// Whether there is a GPU; without one the test is recorded as skipped.
fn has_gpu() -> bool {
    let found = !adapter_summaries().is_empty();
    assert!(found || std::env::var_os("CI").is_none(), "this machine has no GPU");
    if !found {
        metal_attention_testing::skip("this machine has no GPU");
    }
    found
}

/// The smallest shape of the tests.
fn tiny() -> ModelShape {
    let custom = ModelShape::named("custom").expect("a named shape").clone();
    ModelShape { n_layer: 1, n_embd: 24, n_head: 2, n_head_kv: 1, head_dim: 8, n_ff: 40, n_vocab: 50, ..custom }
}

/// A model of `shape` with random matrices of type `ty`. RoPE rotates an even number of elements of each head. `window`: the
/// sliding window of all layers; 0: none.
fn model(shape: &ModelShape, ty: TensorType, window: u32) -> Model {
    let mut metadata = shape.metadata();
    let mut set = |key: &str, value: u32| metadata.set(format!("{}.{key}", shape.architecture), value);
    set("rope.dimension_count", shape.head_dim as u32 & !1);
    set("attention.sliding_window", window);
    let spec = ModelSpec::from_metadata(&metadata).expect("a model");
    let decls: Vec<_> = shape
        .tensors(&spec)
        .into_iter()
        .map(|t| TensorDecl { ty: if t.is_matrix() { ty } else { TensorType::F32 }, name: t.name, shape: t.shape })
        .collect();
    let mut writer = GgufWriter::new(Vec::new(), 3, &metadata, &decls).expect("a header");
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    for decl in &decls {
        let values: Vec<f32> = (0..decl.shape.iter().product())
            .map(|_| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                (state >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
            })
            .collect();
        let mut bytes = Vec::new();
        decl.ty.quantize(&values, &mut bytes).expect("whole blocks");
        writer.write(&bytes).expect("memory");
    }
    let file = GgufFile::from_bytes(&writer.finish().expect("all tensors")).expect("a file");
    Model::from_gguf(file, &ModelOptions::default()).expect("a model")
}

fn pass(model: &Model, device: Device) -> Result<Box<dyn ForwardPass>, Error> {
    let cache_type = CacheType::F32;
    model.forward_pass(&EngineOptions { device, cache_type, exact: true, n_ctx: Some(64), ..Default::default() })
}

/// The logits of all tokens of prompts of 35 and 5 tokens and of two single tokens, in one sequence.
fn logits(pass: &mut dyn ForwardPass) -> Vec<f32> {
    let n_vocab = pass.spec().n_vocab;
    let mut ids = (0..).map(|i| (i * i * 7 + 3) % n_vocab as u32);
    let mut logits = Vec::new();
    for n in [35, 5, 1, 1] {
        let prompt: Vec<u32> = ids.by_ref().take(n).collect();
        let start = pass.position();
        let batch: Vec<_> =
            prompt.iter().enumerate().map(|(i, &id)| BatchToken { id, seq: 0, pos: start + i, output: true }).collect();
        logits.extend_from_slice(pass.forward(&batch).expect("room").as_slice());
    }
    logits
}

#[test]
fn odd_shapes_give_the_logits_of_the_cpu() {
    if !has_gpu() {
        return;
    }
    let tiny = tiny();
    let every_size_odd = ModelShape { n_embd: 31, n_ff: 45, n_vocab: 3, tied: false, ..tiny.clone() };
    let qwen = |architecture| ModelShape { architecture, ..tiny.clone() };
    let f32 = TensorType::F32;
    let cases = [
        ("heads of 9", ModelShape { head_dim: 9, ..tiny.clone() }, f32, 0),
        ("normed heads of 11", ModelShape { head_dim: 11, ..qwen("qwen3") }, f32, 0),
        ("heads of 2, vectors of 1", ModelShape { head_dim: 2, n_embd: 1, n_ff: 1, ..tiny.clone() }, f32, 0),
        ("heads beyond the fast kernels", ModelShape { head_dim: 257, ..tiny.clone() }, f32, 0),
        ("the longest heads", ModelShape { head_dim: 512, ..tiny.clone() }, f32, 7),
        (
            "the longest heads of the fast kernels, 16 to a KV head",
            ModelShape { head_dim: 256, n_head: 16, ..tiny.clone() },
            f32,
            0,
        ),
        ("17 heads to a KV head", ModelShape { n_head: 34, n_head_kv: 2, ..tiny.clone() }, f32, 0),
        ("every size odd", every_size_odd.clone(), TensorType::F16, 0),
        ("every size odd, with biases", ModelShape { architecture: "qwen2", ..every_size_odd }, TensorType::BF16, 0),
        ("one token", ModelShape { n_vocab: 1, ..tiny.clone() }, f32, 0),
        ("a window of 1", tiny.clone(), f32, 1),
        ("a window of 7", tiny.clone(), f32, 7),
        ("the smallest epsilon", ModelShape { norm_eps: 1e-45, ..tiny.clone() }, f32, 0),
        ("a large epsilon", ModelShape { norm_eps: 1e30, ..tiny.clone() }, f32, 0),
    ];
    let few = metal_attention_testing::takes_fewer_cases(adapter_summaries()[0].is_software());
    for (what, shape, ty, window) in cases.into_iter().step_by(if few { 2 } else { 1 }) {
        let model = model(&shape, ty, window);
        let want = logits(&mut *pass(&model, Device::Cpu).unwrap());
        let got = logits(&mut *pass(&model, Device::Wgpu).unwrap_or_else(|e| panic!("{what}: {e}")));
        let error: f64 = want.iter().zip(&got).map(|(w, g)| f64::from(w - g).powi(2)).sum();
        let nmse = error / want.iter().map(|&w| f64::from(w).powi(2)).sum::<f64>();
        assert!(nmse <= 1e-9, "{what}: NMSE {nmse:e}");
    }
}

#[test]
fn heads_too_long_are_refused() {
    if !has_gpu() {
        return;
    }
    for head_dim in [513, 1024] {
        let model = model(&ModelShape { head_dim, ..tiny() }, TensorType::F32, 0);
        let error = pass(&model, Device::Wgpu).err().expect("a refusal");
        assert!(
            matches!(&error, Error::Gpu(e) if matches!(e.downcast_ref(), Some(WgpuError::Mismatch { .. }))),
            "{error}"
        );
        assert!(error.to_string().contains("run on the CPU"), "{error}");
    }
}
