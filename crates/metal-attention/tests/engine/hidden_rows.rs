//! Hidden rows before named layers, in the step that also returns logits, ids or lists: on each backend they are those of the
//! CPU's trace, and the other results are what they are without them.

use metal_attention::gguf::GgufFile;
use metal_attention::{
    BatchToken, CacheType, Device, EngineOptions, ForwardError, ForwardPass, HiddenRequest, HiddenRows, Model,
    ModelOptions, OutputKind, Outputs, TracedTokens, highest,
};
use metal_attention_model::argmax;
use metal_attention_testing::models::{architectures, more_architectures};

/// Micro-batches of this many tokens divide the batch of the tests.
const N_UBATCH: usize = 16;

fn options(device: Device) -> EngineOptions {
    let (n_ctx, n_ubatch) = (Some(96), Some(N_UBATCH));
    EngineOptions { device, n_ctx, n_ubatch, n_seq: 2, cache_type: CacheType::F32, exact: true, ..Default::default() }
}

fn open(name: &str) -> Model {
    let bytes = architectures().get(name).unwrap_or_else(|| &more_architectures()[name]);
    Model::from_gguf(GgufFile::from_bytes(bytes).unwrap(), &ModelOptions::default()).unwrap()
}

/// Twenty tokens of sequence 0, four of them with output, and seven of sequence 1, all but one with output.
fn prompts() -> Vec<BatchToken> {
    let token =
        |seq: usize, pos: usize, output| BatchToken { id: (pos * 37 + seq * 11 + 5) as u32 % 90, seq, pos, output };
    let first = (0..20).map(|pos| token(0, pos, [3, 4, 11, 19].contains(&pos)));
    first.chain((0..7).map(|pos| token(1, pos, pos != 2))).collect()
}

/// The next token of both sequences.
fn decode_step() -> Vec<BatchToken> {
    [20, 7].into_iter().enumerate().map(|(seq, pos)| BatchToken { id: 8, seq, pos, output: true }).collect()
}

/// The rows of the output tokens of `batch` after each layer, by a trace: `[n_layer][n_outputs * n_embd]`.
fn traced(pass: &mut dyn ForwardPass, batch: &[BatchToken]) -> Vec<Vec<f32>> {
    let n_embd = pass.spec().n_embd;
    let mut all = vec![Vec::new(); pass.spec().n_layer()];
    pass.forward_traced(batch, Some(&mut |layer, x| all[layer].extend_from_slice(x))).unwrap();
    let of_outputs = |x: &Vec<f32>| -> Vec<f32> {
        let rows = batch.iter().zip(x.chunks(n_embd)).filter(|(token, _)| token.output);
        rows.flat_map(|(_, row)| row).copied().collect()
    };
    all.iter().map(of_outputs).collect()
}

fn nmse(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let error: f64 = want.iter().zip(got).map(|(w, g)| f64::from(w - g).powi(2)).sum();
    error / want.iter().map(|&w| f64::from(w).powi(2)).sum::<f64>()
}

/// Compares rows before layers 2, 1, the number of layers, and 1 again with the trace's.
fn compare(name: &str, rows: &HiddenRows, before: &[usize], want: &[Vec<f32>], limit: f64) {
    for (i, &layer) in before.iter().enumerate() {
        let error = nmse(rows.of_layer(i), &want[layer - 1]);
        assert!(error <= limit, "{name}, before layer {layer}: NMSE {error:e}");
    }
}

/// Checks the forward pass `pass` of the model `name`. `limit`: of the squared error of hidden rows against the CPU's trace.
pub fn check(name: &str, pass: &mut dyn ForwardPass, limit: f64) {
    let mut cpu = open(name).forward_pass(&options(Device::Cpu)).unwrap();
    let (n_layer, n_vocab) = (pass.spec().n_layer(), pass.spec().n_vocab);
    let before = [2.min(n_layer), 1, n_layer, 1];
    let batch = prompts();
    let want = traced(&mut *cpu, &batch);
    let plain = pass.forward(&batch).unwrap().as_slice().to_vec();
    let choices: Vec<_> = plain.chunks(n_vocab).map(argmax).collect();
    let lists: Vec<_> = plain.chunks(n_vocab).map(|row| highest(row, 5)).collect();
    pass.reset();
    let hidden = pass.forward_hidden(&batch).unwrap();
    for kind in [OutputKind::Logits, OutputKind::Ids, OutputKind::TopK(5), OutputKind::Hidden] {
        pass.reset();
        let (outputs, rows) = pass.forward_outputs((&batch[..]).into(), kind, &before).unwrap();
        match outputs {
            Outputs::Logits(found) => assert!(found.as_slice() == plain, "{name}: the logits differ"),
            Outputs::Ids(found) => assert_eq!(found, choices, "{name}"),
            Outputs::TopK(found) => assert_eq!(found, lists, "{name}"),
            Outputs::Hidden(found) => assert!(found == hidden, "{name}: the hidden states differ"),
        }
        assert_eq!(rows.as_slice().len(), before.len() * want[0].len(), "{name}");
        compare(name, &rows, &before, &want, limit);
        assert_eq!(rows.of_layer(1), rows.of_layer(3), "{name}");
    }
    // After the output norm, and of all tokens.
    pass.reset();
    let of_all = HiddenRequest { before: &[n_layer + 1, n_layer], tokens: TracedTokens::All };
    let (outputs, rows) = pass.forward_with_hidden((&batch[..]).into(), OutputKind::Logits, of_all).unwrap();
    let Outputs::Logits(found) = outputs else { panic!("{name}: {outputs:?}") };
    let error = nmse(found.as_slice(), &plain);
    assert!(error <= limit, "{name}: NMSE {error:e} of the logits");
    let of_outputs = |layer: usize| -> Vec<f32> {
        let rows = rows.of_layer(layer).chunks(hidden.len() / choices.len());
        let rows = batch.iter().zip(rows).filter(|(token, _)| token.output);
        rows.flat_map(|(_, row)| row).copied().collect()
    };
    assert_eq!(rows.of_layer(0).len(), batch.len() * (hidden.len() / choices.len()), "{name}");
    for (i, want) in [&hidden, &want[n_layer - 1]].into_iter().enumerate() {
        let error = nmse(&of_outputs(i), want);
        assert!(error <= limit, "{name}, the rows {i} of all tokens: NMSE {error:e}");
    }
    pass.reset();
    let (_, rows) = pass.forward_outputs((&batch[..]).into(), OutputKind::Ids, &[n_layer + 1]).unwrap();
    let error = nmse(rows.as_slice(), &hidden);
    assert!(error <= limit, "{name}, after the output norm: NMSE {error:e}");
    // A decode step, whose kernels may differ from those of the same step without hidden rows.
    let step = decode_step();
    let want = traced(&mut *cpu, &step);
    let plain = pass.forward(&step).unwrap().as_slice().to_vec();
    (0..2).for_each(|seq| assert_eq!(pass.rewind(seq, step[seq].pos), step[seq].pos, "{name}"));
    let (outputs, rows) = pass.forward_outputs((&step[..]).into(), OutputKind::Logits, &before).unwrap();
    let Outputs::Logits(found) = outputs else { panic!("{name}: {outputs:?}") };
    let error = nmse(found.as_slice(), &plain);
    assert!(error <= limit, "{name}: NMSE {error:e} of the logits");
    compare(name, &rows, &before, &want, limit);
    // Before the first layer: the embedding. Without output tokens there are no rows.
    let next =
        [BatchToken { id: 3, seq: 0, pos: 21, output: true }, BatchToken { id: 3, seq: 1, pos: 8, output: true }];
    let (_, rows) = pass.forward_outputs((&next[..]).into(), OutputKind::Ids, &[0]).unwrap();
    let (first, second) = rows.as_slice().split_at(rows.as_slice().len() / 2);
    assert!(first == second && first.iter().any(|&x| x != 0.0), "{name}: one token, two embeddings");
    let silent = [BatchToken { id: 3, seq: 0, pos: 22, output: false }];
    let (_, rows) = pass.forward_outputs((&silent[..]).into(), OutputKind::Logits, &before).unwrap();
    assert!(rows.as_slice().is_empty(), "{name}");
    // A layer that there is not: nothing is evaluated.
    let batch = [BatchToken { id: 3, seq: 0, pos: 23, output: true }];
    let error = pass.forward_outputs((&batch[..]).into(), OutputKind::Logits, &[n_layer + 2]).unwrap_err();
    assert_eq!(error, ForwardError::LayerOutOfRange { layer: n_layer + 2, n_layer }, "{name}");
    assert_eq!(pass.n_past(0), 23, "{name}");
}

/// Models with other residual streams than Llama's: windows and norms after branches, several streams, recurrent states.
const MODELS: [&str; 4] = ["llama-mha.gguf", "gemma3.gguf", "gemma3n.gguf", "lfm2.gguf"];

#[test]
fn on_the_cpu() {
    for name in MODELS {
        check(name, &mut *open(name).forward_pass(&options(Device::Cpu)).unwrap(), 0.0);
    }
}

#[cfg(feature = "wgpu")]
#[test]
fn through_wgpu() {
    use std::sync::Arc;

    use metal_attention::WgpuExecutor;

    let Some(gpu) = crate::wgpu::device::gpu() else { return };
    let models = if crate::wgpu::device::takes_fewer_cases(&gpu) { &MODELS[..1] } else { &MODELS };
    for name in models {
        let (model, options) = (open(name), options(Device::Wgpu));
        let session = options.session_options(options.n_ctx_of(&model), N_UBATCH);
        let pass = WgpuExecutor::session(Arc::clone(&gpu), model.loaded(), &session);
        check(name, &mut pass.unwrap(), 1e-8);
    }
}

#[cfg(feature = "cuda")]
#[test]
fn through_cuda() {
    if !crate::cuda::has_cuda() {
        return;
    }
    let models = if crate::cuda::takes_fewer_cases() { &MODELS[..1] } else { &MODELS };
    for name in models {
        check(name, &mut *open(name).forward_pass(&options(Device::Cuda(0))).unwrap(), 1e-8);
    }
}

/// `cuda` in the name is a filter of `scripts/test`.
#[cfg(feature = "cuda")]
#[test]
fn on_two_cuda_ranks() {
    if !crate::cuda::has_ranks(2) {
        return;
    }
    let options = EngineOptions { n_ranks: 2, ..options(Device::Cuda(0)) };
    check("llama-mha.gguf", &mut *open("llama-mha.gguf").forward_pass(&options).unwrap(), 1e-8);
}
