//! A model without layers that projects hidden rows of several layers of its target to states, on each backend.

use metal_attention::backends::BackendPass;
use metal_attention::gguf::{GgufFile, GgufWriter, Metadata, TensorDecl, TensorType};
use metal_attention::speculation::StateProjection;
use metal_attention::{
    BatchToken, CacheType, Device, EngineOptions, ForwardError, HiddenRequest, Model, OutputKind, TracedTokens,
};
use metal_attention_model::{
    InputEmbedding, LoadedModel, ModelSpec, Norm, NormKind, OutputSpec, ProjectedState, StateInput,
};

/// Width of the states.
const N_EMBD: usize = 40;
/// The rows that make up a state: not ascending, one twice, and the output of the last layer.
const LAYERS: [usize; 4] = [3, 1, 5, 1];
const EPS: f32 = 1e-3;

/// A random number for each index, from -0.5 to 0.5.
fn random(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1_u64 << 24) as f32 - 0.5
    };
    (0..n).map(|_| next()).collect()
}

fn options(device: Device) -> EngineOptions {
    let (n_ctx, n_ubatch) = (Some(128), Some(24));
    EngineOptions { device, n_ctx, n_ubatch, n_seq: 2, cache_type: CacheType::F32, exact: true, ..Default::default() }
}

/// The projection of states of a target with `n_embd` elements, and its weights: `fc`, the norm before it, the norm after it.
fn projection(target: &Model, before: bool, after: bool) -> (LoadedModel, [Vec<f32>; 3]) {
    let spec = target.spec();
    let width = LAYERS.len() * spec.n_embd;
    let weights = [
        random(1, width * N_EMBD),
        random(2, width).iter().map(|x| 1.0 + x).collect(),
        random(3, N_EMBD).iter().map(|x| 1.0 + x).collect(),
    ];
    let tensors =
        [("fc.weight", vec![width, N_EMBD]), ("before.weight", vec![width]), ("enc.output_norm.weight", vec![N_EMBD])];
    let tensors: Vec<_> =
        tensors.map(|(name, shape)| TensorDecl { name: name.into(), shape, ty: TensorType::F32 }).into();
    let mut writer = GgufWriter::new(Vec::new(), 3, &Metadata::default(), &tensors).unwrap();
    for values in &weights {
        writer.write(&values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>()).unwrap();
    }
    let file = GgufFile::from_bytes(&writer.finish().unwrap()).unwrap();
    let norm = |tensor_stem| Norm {
        tensor_stem,
        has_weight: true,
        has_bias: false,
        kind: NormKind::Rms,
        eps: EPS,
        omits_weight_suffix: false,
    };
    let state = ProjectedState { width, norm: before.then(|| norm("before")) };
    let spec = ModelSpec {
        n_embd: N_EMBD,
        layers: Vec::new(),
        embedding: InputEmbedding { state: Some(StateInput::Projected(state)), ..spec.embedding.clone() },
        output: OutputSpec { norm: after.then(|| norm("enc.output_norm")), head: None, ..spec.output.clone() },
        ..spec.clone()
    };
    (LoadedModel::with_spec(&file, spec).unwrap(), weights)
}

fn rms_norm(row: &[f64], weight: &[f32]) -> Vec<f64> {
    let mean = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
    row.iter().zip(weight).map(|(x, &w)| x / (mean + f64::from(EPS)).sqrt() * f64::from(w)).collect()
}

/// The states of rows of the target are those of an F64 product, in chunks of one and of several micro-batches.
fn check(model: &Model, mut target: Box<dyn BackendPass>, options: &EngineOptions) {
    for (before, after) in [(false, false), (true, false), (false, true), (true, true)] {
        let (loaded, [fc, before_weight, after_weight]) = projection(model, before, after);
        let mut projection = StateProjection::beside(&loaded, &LAYERS, &*target, options).unwrap();
        assert_eq!((projection.reads(), projection.n_embd()), (&[1, 3, 5][..], N_EMBD));
        let n_embd = model.spec().n_embd;
        for n in [1, 2, 50] {
            target.reset();
            let tokens: Vec<_> =
                (0..n).map(|pos| BatchToken { id: (7 * pos as u32 + 3) % 500, seq: 0, pos, output: false }).collect();
            let request = HiddenRequest { before: projection.reads(), tokens: TracedTokens::All };
            let (_, rows) = target.forward_with_hidden(tokens[..].into(), OutputKind::Hidden, request).unwrap();
            let hidden: Vec<_> = (0..3).map(|i| rows.of_layer(i)).collect();
            let states = projection.project(n, &hidden).unwrap();
            for (position, state) in states.chunks_exact(N_EMBD).enumerate() {
                let part = |layer: usize| {
                    let at = [1, 3, 5].iter().position(|&read| read == layer).unwrap();
                    hidden[at][position * n_embd..][..n_embd].iter().map(|&x| f64::from(x))
                };
                let mut row: Vec<f64> = LAYERS.into_iter().flat_map(part).collect();
                if before {
                    row = rms_norm(&row, &before_weight);
                }
                let product = |of: &[f32]| of.iter().zip(&row).map(|(&w, x)| f64::from(w) * x).sum::<f64>();
                let mut want: Vec<f64> = fc.chunks_exact(row.len()).map(product).collect();
                if after {
                    want = rms_norm(&want, &after_weight);
                }
                let error: f64 = want.iter().zip(state).map(|(w, &g)| (w - f64::from(g)).powi(2)).sum();
                let nmse = error / want.iter().map(|w| w * w).sum::<f64>();
                assert!(nmse < 1e-10, "norms {before} {after}, position {position} of {n}: {nmse:e}");
            }
            assert_eq!(states.len(), n * N_EMBD);
        }
        let wrong = |found, expected| ForwardError::WrongStates { found, expected };
        let rows = vec![0.0; 2 * n_embd];
        assert_eq!(projection.project(1, &[&rows[..]; 2]).unwrap_err(), wrong(4 * n_embd, 3 * n_embd));
        assert_eq!(projection.project(3, &[&rows[..]; 3]).unwrap_err(), wrong(6 * n_embd, 9 * n_embd));
        assert!(projection.project(0, &[&[][..]; 3]).unwrap().is_empty());
    }
}

#[test]
fn states_are_products_of_several_rows_on_the_cpu() {
    let (model, options) = (Model::built_in().unwrap(), options(Device::Cpu));
    check(&model, model.backend(&options).unwrap(), &options);
}

#[cfg(feature = "wgpu")]
#[test]
fn states_are_products_of_several_rows_through_wgpu() {
    let Some(gpu) = crate::wgpu::device::gpu() else { return };
    let (model, options) = (Model::built_in().unwrap(), options(Device::Wgpu));
    let session = options.session_options(options.n_ctx_of(&model), 24);
    let target = metal_attention::WgpuExecutor::session(gpu, model.loaded(), &session).unwrap();
    check(&model, Box::new(target), &options);
}

#[cfg(feature = "cuda")]
#[test]
fn states_are_products_of_several_rows_through_cuda() {
    if !crate::cuda::has_cuda() {
        return;
    }
    let (model, options) = (Model::built_in().unwrap(), options(Device::Cuda(0)));
    check(&model, model.backend(&options).unwrap(), &options);
}
