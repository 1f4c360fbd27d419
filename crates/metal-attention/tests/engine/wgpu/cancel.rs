//! Cancellation on the GPU, through `Watch`. Without a GPU (a software one will do) the tests are skipped; in CI that is a
//! failure.

use std::sync::Arc;
use std::time::Duration;

use crate::wgpu::device::{gpu, gpu_with, start};
use metal_attention::gguf::GgufFile;
use metal_attention::wgpu::WgpuError;
use metal_attention::{
    BatchToken, CacheType, ForwardError, ForwardPass, LoadedModel, SessionOptions, Watch, WgpuExecutor,
};

fn stories() -> GgufFile {
    GgufFile::read(metal_attention_testing::stories()).unwrap()
}

fn options() -> SessionOptions {
    SessionOptions { n_ctx: 256, n_ubatch: 64, cache_type: CacheType::F32, ..Default::default() }
}

/// A batch of `n` tokens that continues sequence 0, with logits of the last.
fn prompt(model: &dyn ForwardPass, n: usize) -> Vec<BatchToken> {
    let start = model.position();
    let token = |i| BatchToken { id: ((i * i * 31 + 3) % 512) as u32, seq: 0, pos: start + i, output: i + 1 == n };
    (0..n).map(token).collect()
}

#[test]
fn a_cancelled_batch_leaves_the_cache_unchanged() {
    let Some(known) = gpu() else { return };
    let mut other = start(&known, &stories(), &options());
    let watch = Watch::default();
    let gpu = gpu_with(&watch).unwrap();
    let mut model = start(&gpu, &stories(), &options());
    let first = prompt(&model, 20);
    assert_eq!(model.forward(&first).unwrap().as_slice(), other.forward(&first).unwrap().as_slice());

    let next = prompt(&model, 200);
    watch.cancel();
    let submissions = gpu.submissions();
    assert_eq!(model.forward(&next).map(drop), Err(ForwardError::Cancelled));
    assert_eq!(model.forward_greedy(&next), Err(ForwardError::Cancelled));
    assert_eq!(model.forward_token_greedy(5), Err(ForwardError::Cancelled));
    assert_eq!((model.position(), gpu.submissions()), (20, submissions));

    // Cancelled in the middle of a batch, after some of it was submitted.
    watch.resume();
    let before = watch.done();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while watch.done() == before {
                std::thread::sleep(Duration::from_micros(100));
            }
            watch.cancel();
        });
        let outcome = model.forward(&next).map(drop);
        // On a fast GPU the whole batch may have finished by then.
        assert!(matches!(outcome, Ok(()) | Err(ForwardError::Cancelled)), "{outcome:?}");
        if outcome.is_err() {
            assert_eq!(model.position(), 20);
        }
        model.truncate(20);
    });
    watch.resume();
    let before = watch.done();
    assert_eq!(model.forward(&next).unwrap().as_slice(), other.forward(&next).unwrap().as_slice());
    // Work that was submitted before the cancellation may finish now and count, too.
    assert!(watch.done() - before >= 200 * 5, "{}", watch.done() - before);
    let expected = other.forward_token_greedy(5).unwrap();
    assert_eq!(model.forward_token_greedy(5).unwrap(), expected);
}

#[test]
fn loading_ends_when_it_is_cancelled() {
    let watch = Watch::default();
    let Some(gpu) = gpu_with(&watch) else { return };
    let file = stories();
    let model = LoadedModel::load(&file).unwrap();
    let set_up = || WgpuExecutor::session(Arc::clone(&gpu), &model, &options());
    watch.cancel();
    assert!(matches!(set_up().err(), Some(WgpuError::Cancelled)));
    assert!(gpu.pipelines().is_empty());
    // Cancelled when the weights are on the GPU, before the pipelines are built.
    watch.resume();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while watch.done() == 0 {
                std::thread::sleep(Duration::from_micros(100));
            }
            watch.cancel();
        });
        assert!(matches!(set_up().err(), Some(WgpuError::Cancelled)));
    });
    assert!(watch.done() > 0);
    watch.resume();
    let mut model = set_up().unwrap();
    model.forward_token(1).unwrap();
}
