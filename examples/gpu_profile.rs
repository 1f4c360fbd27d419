//! Where a step's time goes on a GPU: `gpu_profile MODEL GPU N_PAST N_TOKENS`, with an index or part of the name of the
//! GPU. Prints the time of a step by the GPU's clock, then that of each kernel, summed up over the layers.

use std::collections::BTreeMap;
use std::sync::Arc;

use metal_attention::kernels::{AdapterChoice, GpuDevice, GpuOptions};
use metal_attention::{BatchToken, ForwardPass, GpuForwardPass, GpuForwardPassOptions, Model};

/// Times that every kernel is timed.
const ROUNDS: usize = 20;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [model, gpu, n_past, n_tokens] = args.as_slice() else {
        return Err("usage: gpu_profile MODEL GPU N_PAST N_TOKENS".into());
    };
    let (n_past, n_tokens): (usize, usize) = (n_past.parse()?, n_tokens.parse()?);
    let adapter = gpu.parse().map_or_else(|_| AdapterChoice::Name(gpu.clone()), AdapterChoice::Index);
    let gpu = Arc::new(GpuDevice::open(&GpuOptions { adapter, ..Default::default() })?);
    let model = Model::open(model)?;
    let options = GpuForwardPassOptions { n_ctx: n_past + n_tokens, ..Default::default() };
    let mut pass = GpuForwardPass::new(gpu, model.spec().clone(), model.weights(), &options)?;
    let n_vocab = model.spec().n_vocab;
    let ids: Vec<u32> = (0..n_past + n_tokens).map(|i| ((i * 7919 + 13) % n_vocab) as u32).collect();
    if n_past > 0 {
        pass.forward_prompt(&ids[..n_past])?;
    }
    let batch: Vec<_> = (n_past..n_past + n_tokens)
        .map(|pos| BatchToken { id: ids[pos], seq: 0, pos, logits: pos + 1 == n_past + n_tokens })
        .collect();
    let mut steps = Vec::new();
    let mut kernels: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    let mut n_dispatches = 0;
    for _ in 0..ROUNDS {
        let profile = pass.profile(&batch)?;
        steps.push(profile.step.as_secs_f64() * 1e6);
        n_dispatches = profile.dispatches.len();
        for (kernel, time) in profile.dispatches {
            kernels.entry(kernel).or_default().push(time.as_secs_f64() * 1e6);
        }
    }
    steps.sort_by(f64::total_cmp);
    let step = steps[ROUNDS / 2];
    println!(
        "step of {n_tokens} after {n_past}: {step:.1} us, {n_dispatches} dispatches, {:.2} us each",
        step / n_dispatches as f64
    );
    println!("{:>6} {:>10} {:>10}  kernel, in passes of their own", "count", "us each", "us in all");
    for (kernel, mut times) in kernels {
        times.sort_by(f64::total_cmp);
        let (count, median) = (times.len() / ROUNDS, times[times.len() / 2]);
        println!("{count:>6} {median:>10.2} {:>10.1}  {kernel}", median * count as f64);
    }
    Ok(())
}
