//! Cancellation on the CPU, through `Watch`: a batch ends within a micro-batch, and the cache is unchanged.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::support::{batch, bits, on_threads, start_on};
use metal_attention_cpu::{CpuError, CpuExecutor, CpuForwardPass, CpuOptions};
use metal_attention_gguf::GgufFile;
use metal_attention_model::{ForwardError, ForwardPass, PAGE, SessionOptions, Watch};

fn open(path: &str) -> GgufFile {
    GgufFile::read(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join(path)).expect("the model")
}

/// Micro-batches of 40 tokens, which allow batches whose sequences are evaluated concurrently.
fn options() -> SessionOptions {
    SessionOptions { n_ctx: 128, n_seq: 3, n_ubatch: 40, ..SessionOptions::default() }
}

fn cpu(n_threads: usize, watch: &Watch) -> CpuOptions {
    CpuOptions { watch: watch.clone(), ..on_threads(n_threads) }
}

fn ids(n: usize) -> Vec<u32> {
    (0..n).map(|i| ((i * i * 31 + i * 7 + 3) % 512) as u32).collect()
}

/// Appends `ids` to sequence `seq`. Returns the logits' bits.
fn logits(model: &mut CpuForwardPass, seq: usize, ids: &[u32]) -> Vec<u32> {
    let batch = batch(model, seq, ids);
    bits(model.forward(&batch).expect("a batch that fits").as_slice())
}

#[test]
fn a_micro_batch_ends_after_the_layer_in_which_it_is_cancelled() {
    let file = open("models/stories260K.gguf");
    for n_threads in [1, 2] {
        for last in 0..5 {
            let watch = Watch::default();
            let mut model = start_on(&cpu(n_threads, &watch), &file, &options());
            let loaded = watch.done();
            let before = logits(&mut model, 0, &ids(PAGE + 6));
            let work = watch.done();
            assert_eq!(work - loaded, 5 * (PAGE as u64 + 6), "tokens times layers");

            let mut layers = Vec::new();
            let mut cancel = |layer: usize, _: &[f32]| {
                layers.push(layer);
                if layer == last {
                    watch.cancel();
                }
            };
            let batch = batch(&model, 0, &ids(30));
            let outcome = model.forward_traced(&batch, Some(&mut cancel)).map(drop);
            assert_eq!(outcome, Err(ForwardError::Cancelled));
            assert_eq!(layers, (0..=last).collect::<Vec<_>>(), "no layer is evaluated after the one that cancelled");
            assert_eq!(watch.done() - work, 30 * (last as u64 + 1));
            assert_eq!(model.n_past(0), PAGE + 6);

            // No batch runs until the watch is reset.
            assert_eq!(model.forward(&batch).map(drop), Err(ForwardError::Cancelled));
            watch.resume();
            let mut fresh = start_on(&cpu(n_threads, &Watch::default()), &file, &options());
            assert_eq!(logits(&mut fresh, 0, &ids(PAGE + 6)), before);
            assert_eq!(logits(&mut model, 0, &ids(30)), logits(&mut fresh, 0, &ids(30)), "the cache is unchanged");
        }
    }
}

#[test]
fn earlier_micro_batches_of_a_cancelled_batch_are_undone() {
    let file = open("models/stories260K.gguf");
    let watch = Watch::default();
    let mut model = start_on(&cpu(2, &watch), &file, &options());
    let shared = logits(&mut model, 0, &ids(70));
    model.share_prefix(0, 1, 70).expect("a prefix that is there");
    let free = model.cache_pages().free;
    // Cancelled in the third of three micro-batches, with two sequences whose last page is shared.
    let all = [batch(&model, 0, &ids(50)), batch(&model, 1, &ids(50))].concat();
    let mut micro_batches = 0;
    let mut cancel = |layer: usize, _: &[f32]| {
        micro_batches += usize::from(layer == 0);
        if micro_batches == 3 {
            watch.cancel();
        }
    };
    assert_eq!(model.forward_traced(&all, Some(&mut cancel)).map(drop), Err(ForwardError::Cancelled));
    assert_eq!((model.n_past(0), model.n_past(1)), (70, 70));
    // The page that both sequences would have written was copied.
    assert_eq!(model.cache_pages().free, free - 1);
    watch.resume();
    let mut fresh = start_on(&cpu(2, &Watch::default()), &file, &options());
    assert_eq!(logits(&mut fresh, 2, &ids(70)), shared);
    let expected = logits(&mut fresh, 2, &ids(50));
    for seq in [0, 1] {
        assert_eq!(logits(&mut model, seq, &ids(50)), expected, "sequence {seq}");
    }
}

#[test]
fn concurrent_sequences_are_cancelled_together() {
    let file = open("models/stories260K.gguf");
    let watch = Watch::default();
    let mut model = start_on(&cpu(2, &watch), &file, &options());
    let expected = logits(&mut model, 0, &ids(20));
    model.reset();
    watch.cancel();
    let both = [batch(&model, 0, &ids(20)), batch(&model, 1, &ids(20))].concat();
    assert_eq!(model.forward(&both).map(drop), Err(ForwardError::Cancelled));
    assert_eq!((model.n_past(0), model.n_past(1)), (0, 0));
    watch.resume();
    let found = bits(model.forward(&both).expect("a batch that fits").as_slice());
    assert_eq!(found, [&expected[..], &expected].concat());
}

/// Whenever the cancellation comes, a batch is evaluated completely or not at all.
#[test]
fn another_thread_may_cancel_at_any_moment() {
    let file = open("models/tales-4m-q4_0.gguf");
    let watch = Watch::default();
    let mut model = start_on(&cpu(2, &watch), &file, &options());
    let expected = logits(&mut model, 0, &ids(60));
    let over = AtomicBool::new(false);
    let mut outcomes = [0, 0];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut pause = 1;
            while !over.load(Ordering::Relaxed) {
                std::thread::sleep(std::time::Duration::from_micros(pause % 9973));
                pause += 1009;
                watch.cancel();
                std::thread::yield_now();
                watch.resume();
            }
        });
        for _ in 0..60 {
            model.reset();
            let batch = batch(&model, 0, &ids(60));
            match model.forward(&batch) {
                Ok(logits) => {
                    assert!(bits(logits.as_slice()) == expected, "a batch that was not cancelled is right");
                    outcomes[0] += 1;
                }
                Err(error) => {
                    assert_eq!(error, ForwardError::Cancelled);
                    assert_eq!(model.n_past(0), 0);
                    outcomes[1] += 1;
                }
            }
        }
        over.store(true, Ordering::Relaxed);
    });
    eprintln!("{} evaluated, {} cancelled", outcomes[0], outcomes[1]);
}

#[test]
fn loading_counts_bytes_and_can_be_cancelled() {
    let file = open("models/tales-4m-q4_0.gguf");
    for n_threads in [1, 2] {
        let watch = Watch::default();
        let model = start_on(&cpu(n_threads, &watch), &file, &options());
        assert_eq!(watch.done(), model.memory_use().weights, "every repacked byte counts");
        watch.cancel();
        let error = CpuExecutor::session_of_file(&cpu(n_threads, &watch), &file, &options()).err();
        assert!(matches!(error, Some(CpuError::Cancelled)), "{error:?}");
        assert_eq!(watch.done(), model.memory_use().weights, "nothing is repacked");
    }
}
