//! Benchmark of the scheduler with one sequence and with several: tokens per second of all sequences together, for the built-in
//! model and a synthetic model of the shape of SmolLM-135M in `Q4_0`, on the CPU and, where there is one, on a GPU:
//! `cargo bench --bench scheduler -- "smollm-135m cpu"`.

mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, SamplingMode, Throughput};
use metal_attention::sampling::SamplerOptions;
use metal_attention::scheduler::{Event, Request, Scheduler, SchedulerOptions};
use metal_attention::{Device, EngineOptions, Model};

/// The largest number of sequences.
const N_PARALLEL: usize = 16;

/// Tokens of a prompt.
const N_PROMPT: usize = 16;

/// Tokens that are generated after a prompt.
const N_GEN: usize = 32;

fn main() {
    let Some(mut criterion) = support::criterion() else { return };
    let folder = tempfile::tempdir().expect("a folder for temporary files");
    let built_in = Model::built_in().expect("the built-in model loads");
    let smollm = support::synthetic_model(folder.path(), &["smollm-135m", "--type", "q4_0"]);
    for device in [Device::Cpu, Device::Wgpu] {
        for (name, model) in [("built-in", &built_in), ("smollm-135m", &smollm)] {
            bench(&mut criterion, name, model, &device);
        }
    }
    criterion.final_summary();
}

/// Measures one model on one device, with 1, 4 and [`N_PARALLEL`] sequences.
fn bench(criterion: &mut Criterion, name: &str, model: &Model, device: &Device) {
    let engine = EngineOptions {
        device: device.clone(),
        n_ctx: Some(N_PROMPT + N_GEN),
        // As in `serve`: more sequences than slots, in the memory of the slots.
        n_seq: N_PARALLEL + 64,
        n_cache: Some(N_PARALLEL * (N_PROMPT + N_GEN).next_multiple_of(64)),
        ..Default::default()
    };
    let pass = match model.forward_pass(&engine) {
        Ok(pass) => pass,
        Err(why) => return eprintln!("{device} is left out: {why}"),
    };
    let options = SchedulerOptions { n_parallel: N_PARALLEL, ..Default::default() };
    let scheduler = Scheduler::start(pass, Arc::new(model.clone()), options).expect("a scheduler");
    let mut group = criterion.benchmark_group(format!("scheduler {name} {device}"));
    group.sample_size(10).sampling_mode(SamplingMode::Flat).measurement_time(Duration::from_secs(5));
    let mut seed = 0;
    for n in [1, 4, N_PARALLEL] {
        group.throughput(Throughput::Elements((n * N_GEN) as u64));
        group.bench_function(BenchmarkId::from_parameter(n), |bencher| {
            bencher.iter_custom(|rounds| {
                let start = Instant::now();
                for _ in 0..rounds {
                    round(&scheduler, model.spec().n_vocab, n, &mut seed);
                }
                start.elapsed()
            });
        });
    }
}

/// Runs `n` requests to their ends. Their prompts are all different, so the prefix cache is not used.
fn round(scheduler: &Scheduler, n_vocab: usize, n: usize, seed: &mut usize) {
    let request = || {
        *seed += 1;
        let ids = (0..N_PROMPT).map(|i| ((i * 7919 + *seed * 104_729) % n_vocab) as u32).collect();
        let sampling = SamplerOptions::greedy();
        Request { prompt: ids, sampling, max_tokens: Some(N_GEN), ignore_eos: true, ..Default::default() }
    };
    let answers: Vec<_> = std::iter::repeat_with(request)
        .take(n)
        .map(|request| scheduler.submit(request).expect("the queue is not full"))
        .collect();
    for mut events in answers {
        let mut last = None;
        while let Some(event) = events.blocking_recv() {
            last = Some(event);
        }
        assert!(matches!(last, Some(Event::Done { .. })), "{last:?}");
    }
}
