//! Prefill and decode speed of a model on the CPU.
//!
//! `cargo run --release -p metal-attention-cpu --example throughput -- MODEL [THREADS] [N_PROMPT] [N_GEN]`

use std::time::Instant;

use metal_attention_cpu::{CpuForwardPass, CpuOptions, physical_cores};
use metal_attention_gguf::GgufFile;
use metal_attention_model::ForwardPass;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let path = args.first().ok_or("usage: throughput MODEL [THREADS] [N_PROMPT] [N_GEN]")?;
    let number = |i: usize, default: usize| args.get(i).map_or(Ok(default), |s| s.parse());
    let (n_threads, n_prompt, n_gen) = (number(1, physical_cores())?, number(2, 512)?, number(3, 64)?);

    let start = Instant::now();
    let file = GgufFile::open(path)?;
    let options = CpuOptions { n_ctx: n_prompt.max(n_gen) + 1, n_threads, ..CpuOptions::default() };
    let mut model = CpuForwardPass::from_gguf(&file, &options)?;
    println!(
        "{} with {n_threads} threads, {}, loaded in {:.3} s",
        path,
        model.isa().name(),
        start.elapsed().as_secs_f64()
    );
    let n_vocab = model.spec().n_vocab as u32;
    let prompt: Vec<u32> = (0..n_prompt as u32).map(|i| (i * 7919 + 13) % n_vocab).collect();
    let report = |what: &str, n: usize, seconds: &mut Vec<f64>| {
        seconds.sort_by(f64::total_cmp);
        let (median, best) = (seconds[seconds.len() / 2], seconds[0]);
        println!("{what} {n}: median {:.1} tok/s, best {:.1} tok/s", n as f64 / median, n as f64 / best);
    };
    let mut seconds = Vec::new();
    for _ in 0..6 {
        model.reset();
        let start = Instant::now();
        model.forward_prompt(&prompt)?;
        seconds.push(start.elapsed().as_secs_f64());
    }
    report("prefill", n_prompt, &mut seconds);
    seconds.clear();
    for _ in 0..6 {
        model.reset();
        let mut id = 1;
        let start = Instant::now();
        for _ in 0..n_gen {
            id = model.forward_token_greedy(id)?;
        }
        seconds.push(start.elapsed().as_secs_f64());
    }
    report("decode", n_gen, &mut seconds);
    println!("{:?}", model.memory_use());
    Ok(())
}
