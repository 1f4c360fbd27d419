//! Texts through the scheduler, one at a time and several at once: tokens per second of all of them together, for the
//! built-in model and a synthetic one in the shape of SmolLM-135M, in `Q4_0`, on the CPU and on a GPU where there is one.
//! `cargo bench --bench scheduler -- "smollm-135m cpu"`

mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, SamplingMode, Throughput};
use metal_attention::sampling::SamplerOptions;
use metal_attention::scheduler::{Event, Request, Scheduler, SchedulerOptions};
use metal_attention::{Device, EngineOptions, Model};

/// Most texts at once.
const N_PARALLEL: usize = 16;

/// Tokens of a prompt.
const N_PROMPT: usize = 16;

/// Tokens that follow it.
const N_GEN: usize = 32;

fn main() {
    let Some(mut criterion) = support::criterion() else { return };
    let folder = tempfile::tempdir().expect("there is room for temporary files");
    let built_in = Model::built_in().expect("the built-in model loads");
    let smollm = support::synthetic_model(folder.path(), &["smollm-135m", "--type", "q4_0"]);
    for device in [Device::Cpu, Device::Wgpu] {
        for (name, model) in [("built-in", &built_in), ("smollm-135m", &smollm)] {
            bench(&mut criterion, name, model, &device);
        }
    }
    criterion.final_summary();
}

fn bench(criterion: &mut Criterion, name: &str, model: &Model, device: &Device) {
    let engine = EngineOptions {
        device: device.clone(),
        n_ctx: Some(N_PROMPT + N_GEN),
        // As `serve` has it: more sequences than run, in the same memory.
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

/// Runs `n` texts at once to their ends. None begins like another one: all of them are evaluated.
fn round(scheduler: &Scheduler, n_vocab: usize, n: usize, seed: &mut usize) {
    let request = || {
        *seed += 1;
        let ids = (0..N_PROMPT).map(|i| ((i * 7919 + *seed * 104_729) % n_vocab) as u32).collect();
        let sampling = SamplerOptions::greedy();
        Request { prompt: ids, sampling, max_tokens: Some(N_GEN), ignore_eos: true, ..Default::default() }
    };
    let answers: Vec<_> = std::iter::repeat_with(request)
        .take(n)
        .map(|request| scheduler.submit(request).expect("the queue has room"))
        .collect();
    for mut events in answers {
        let mut last = None;
        while let Some(event) = events.blocking_recv() {
            last = Some(event);
        }
        assert!(matches!(last, Some(Event::Done { .. })), "{last:?}");
    }
}
