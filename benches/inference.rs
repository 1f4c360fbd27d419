//! Benchmark of prefill and decode, with a synthetic model of the shape of SmolLM-135M in `Q4_0`, on the CPU and, where there
//! is one, on a GPU: `cargo bench --bench inference -- prefill`, `-- decode`.

mod support;

use std::time::{Duration, Instant};

use criterion::{Criterion, SamplingMode, Throughput};
use metal_attention::{Device, EngineOptions, ForwardPass, Model};

/// Tokens of the prompt.
const N_PROMPT: usize = 64;

/// The most tokens that are generated in a sample; fewer on a device that takes longer for them than [`SAMPLE`].
const N_GEN: usize = 32;

/// The intended duration of a decode sample.
const SAMPLE: Duration = Duration::from_millis(500);

/// A device that takes longer for a prompt, such as a GPU in software, gets the fewest samples that Criterion allows.
const SLOW: Duration = Duration::from_secs(1);

fn main() {
    let Some(mut criterion) = support::criterion() else { return };
    let folder = tempfile::tempdir().expect("a folder for temporary files");
    let model = support::synthetic_model(folder.path(), &["smollm-135m", "--type", "q4_0"]);
    for device in [Device::Cpu, Device::Wgpu] {
        match pass(&model, &device) {
            Ok(mut pass) => {
                prefill(&mut criterion, &device, &mut *pass);
                decode(&mut criterion, &device, &mut *pass);
            }
            Err(why) => eprintln!("{device} is left out: {why}"),
        }
    }
    criterion.final_summary();
}

/// The forward pass of `model` on `device`.
fn pass(model: &Model, device: &Device) -> Result<Box<dyn ForwardPass>, metal_attention::Error> {
    model.forward_pass(&EngineOptions { device: device.clone(), n_ctx: Some(N_PROMPT + N_GEN), ..Default::default() })
}

/// The token ids of the prompt.
fn prompt(pass: &dyn ForwardPass) -> Vec<u32> {
    (0..N_PROMPT).map(|i| ((i * 7919 + 13) % pass.spec().n_vocab) as u32).collect()
}

/// Measures the evaluation of the prompt.
fn prefill(criterion: &mut Criterion, device: &Device, pass: &mut dyn ForwardPass) {
    let ids = prompt(pass);
    let start = Instant::now();
    pass.forward_prompt(&ids).expect("the prompt fits");
    let mut group = criterion.benchmark_group("prefill");
    if start.elapsed() > SLOW {
        group.sample_size(10).warm_up_time(Duration::from_nanos(1));
    }
    group.sampling_mode(SamplingMode::Flat).throughput(Throughput::Elements(N_PROMPT as u64));
    group.bench_function(device.to_string(), |bencher| {
        bencher.iter(|| {
            pass.reset();
            pass.forward_prompt(&ids).expect("the prompt fits")
        });
    });
}

/// Measures decode steps after the prompt.
fn decode(criterion: &mut Criterion, device: &Device, pass: &mut dyn ForwardPass) {
    let ids = prompt(pass);
    pass.reset();
    let first = pass.forward_prompt(&ids).expect("the prompt fits");
    let start = Instant::now();
    pass.forward_token_greedy(first).expect("a token fits");
    let n_gen = (SAMPLE.as_secs_f64() / start.elapsed().as_secs_f64()).clamp(1.0, N_GEN as f64) as usize;
    let mut group = criterion.benchmark_group("decode");
    group.sampling_mode(SamplingMode::Flat).throughput(Throughput::Elements(n_gen as u64));
    group.bench_function(device.to_string(), |bencher| {
        bencher.iter(|| {
            pass.truncate(N_PROMPT);
            (0..n_gen).fold(first, |id, _| pass.forward_token_greedy(id).expect("the tokens fit"))
        });
    });
}
