//! A second model beside a first one, whose embedding table and output head it reads: its logits are those of its whole file, bit
//! for bit, and it does not hold these matrices again.

use metal_attention::gguf::{GgufFile, GgufWriter, TensorDecl};
use metal_attention::{
    BatchToken, CacheType, CpuExecutor, Executor, ForwardPass, LoadedModel, MemoryUse, Session, SessionOptions,
};
use metal_attention_cpu::CpuOptions;
use metal_attention_testing::models::{architectures, more_architectures, quants};

/// Models with heads of their own, with tied heads, and with quantised matrices.
const MODELS: [&str; 4] = ["llama-mha.gguf", "qwen3.gguf", "gemma3.gguf", "Q4_K.gguf"];

/// A whole model, and the model of the same file without embedding table and head, loaded beside it.
struct Pair {
    name: &'static str,
    whole: LoadedModel,
    second: LoadedModel,
}

fn pair(name: &'static str) -> Pair {
    let all = [architectures(), more_architectures(), quants()];
    let bytes = all.into_iter().find_map(|files| files.get(name)).unwrap_or_else(|| panic!("{name}"));
    let file = GgufFile::from_bytes(bytes).unwrap();
    let is_end = |name: &str| name.starts_with("token_embd.") || name.starts_with("output.");
    let tensors: Vec<_> = file.tensors().iter().filter(|tensor| !is_end(tensor.name())).collect();
    assert!(tensors.len() < file.tensors().len(), "{name}");
    let decls: Vec<_> = tensors
        .iter()
        .map(|t| TensorDecl { name: t.name().to_owned(), shape: t.shape().to_vec(), ty: t.ty() })
        .collect();
    let mut writer = GgufWriter::new(Vec::new(), 3, file.metadata(), &decls).unwrap();
    for tensor in tensors {
        writer.write(tensor.bytes()).unwrap();
    }
    let second = GgufFile::from_bytes(&writer.finish().unwrap()).unwrap();
    let whole = LoadedModel::load(&file).unwrap();
    Pair { name, second: LoadedModel::load_beside(&second, &whole).unwrap(), whole }
}

fn options(exact: bool) -> SessionOptions {
    SessionOptions { n_ctx: 64, cache_type: CacheType::F32, exact, ..Default::default() }
}

/// The logits of a prompt of 20 tokens and of two more.
fn logits(pass: &mut dyn ForwardPass) -> Vec<f32> {
    let token = |pos: usize| BatchToken { id: (pos * 37 + 5) as u32 % 90, seq: 0, pos, output: true };
    let mut rows = Vec::new();
    for positions in [0..20, 20..21, 21..22] {
        rows.extend_from_slice(pass.forward(&positions.map(token).collect::<Vec<_>>()).unwrap().as_slice());
    }
    rows
}

/// Checks the second model of `pair` on the executor that `beside` makes of the first one. `shared`: bytes of the matrices that
/// it shares.
fn check<E: Executor>(pair: &Pair, first: E, shared: usize, beside: impl Fn(&E) -> E) {
    let name = pair.name;
    let mut second = Session::new(beside(&first));
    let mut first = Session::new(first);
    let weights = |MemoryUse { weights, .. }: MemoryUse| weights as usize;
    let (whole, own) = (weights(first.memory_use()), weights(second.memory_use()));
    assert!(own + shared <= whole, "{name}: {own} bytes beside {whole}, of which {shared} are shared");
    let want = logits(&mut first);
    assert!(logits(&mut second) == want, "{name}: other logits");
    // The shared matrices outlive the first executor.
    drop(first);
    second.reset();
    assert!(logits(&mut second) == want, "{name}: other logits without the first model");
}

/// Bytes of the embedding table and of a head of its own.
fn bytes_of_ends(model: &LoadedModel) -> usize {
    let weights = model.weights();
    let head = weights.own_head().map_or(0, |head| head.weight.bytes().len());
    weights.token_embd.as_ref().unwrap().weight.bytes().len() + head
}

#[test]
fn a_second_model_shares_the_ends_of_the_first_on_the_cpu() {
    let cpu = CpuOptions { n_threads: 2, ..Default::default() };
    for pair in MODELS.map(pair) {
        let head = pair.whole.weights().output.as_ref().unwrap().weight.bytes().len();
        let set_up = |exact| CpuExecutor::new(&cpu, &pair.whole, &options(exact)).unwrap();
        // The table stays in the file; the head is repacked, also one that is tied to the table.
        check(&pair, set_up(false), head, |first| {
            CpuExecutor::beside(first, &cpu, &pair.second, &options(false)).unwrap()
        });
        check(&pair, set_up(true), 0, |first| CpuExecutor::beside(first, &cpu, &pair.second, &options(true)).unwrap());
        // A head for products of another kind is not that of the first.
        let exact = set_up(true);
        let mut second = Session::new(CpuExecutor::beside(&exact, &cpu, &pair.second, &options(false)).unwrap());
        let mut whole = Session::new(set_up(false));
        assert_eq!(second.memory_use().weights, whole.memory_use().weights, "{}", pair.name);
        assert!(logits(&mut second) == logits(&mut whole), "{}", pair.name);
    }
}

#[test]
fn models_of_both_kinds_of_heads_are_tested() {
    let own = MODELS.map(|name| pair(name).whole.weights().own_head().is_some());
    assert!(own.contains(&true) && own.contains(&false), "{own:?}");
}

#[cfg(feature = "wgpu")]
#[test]
fn a_second_model_shares_the_ends_of_the_first_on_a_gpu() {
    use metal_attention::{WgpuExecutor, WgpuTuning};

    let Some(gpu) = crate::wgpu::device::gpu() else { return };
    let tuning = WgpuTuning::default();
    for pair in MODELS.map(pair) {
        let first = WgpuExecutor::new(std::sync::Arc::clone(&gpu), &pair.whole, &options(true), &tuning).unwrap();
        check(&pair, first, bytes_of_ends(&pair.whole), |first| {
            WgpuExecutor::beside(first, &pair.second, &options(true), &tuning).unwrap()
        });
    }
}

#[cfg(feature = "cuda")]
#[test]
fn a_second_model_shares_the_ends_of_the_first_through_cuda() {
    use metal_attention::{CudaDevice, CudaExecutor, CudaTuning, Watch};

    if !crate::cuda::has_cuda() {
        return;
    }
    let tuning = CudaTuning::default();
    let models = if crate::cuda::takes_fewer_cases() { &MODELS[2..] } else { &MODELS[..] };
    for &name in models {
        let pair = pair(name);
        let gpu = std::sync::Arc::new(CudaDevice::open(0, Watch::default()).unwrap());
        let first = CudaExecutor::new(gpu, &pair.whole, &options(true), &tuning).unwrap();
        check(&pair, first, bytes_of_ends(&pair.whole), |first| {
            CudaExecutor::beside(first, &pair.second, &options(true), &tuning).unwrap()
        });
    }
}
