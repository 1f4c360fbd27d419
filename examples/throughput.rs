//! Prefill and decode speed of a device: `throughput MODEL DEVICE N_PROMPT N_GEN [THREADS]`.
//!
//! Prefill is the time of one prompt, decode that of greedy steps after it, sampled that of steps of which a short list
//! of logits comes back: each the best and the median of several rounds after one to warm up.

use std::time::Instant;

use metal_attention::{BatchToken, Device, EngineOptions, Model};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [model, device, n_prompt, n_gen, n_threads @ ..] = args.as_slice() else {
        return Err("usage: throughput MODEL DEVICE N_PROMPT N_GEN [THREADS]".into());
    };
    let n_threads = n_threads.first().map(|n| n.parse()).transpose()?;
    let (n_prompt, n_gen): (usize, usize) = (n_prompt.parse()?, n_gen.parse()?);
    let model = Model::open(model)?;
    let device: Device = device.parse()?;
    let start = Instant::now();
    let options = EngineOptions { device, n_ctx: Some(n_prompt + n_gen + 1), n_threads, ..Default::default() };
    let mut pass = model.forward_pass(&options)?;
    println!("load {:.2} s", start.elapsed().as_secs_f64());
    let n_vocab = model.spec().n_vocab;
    let ids: Vec<u32> = (0..n_prompt).map(|i| ((i * 7919 + 13) % n_vocab) as u32).collect();
    let (mut prefill, mut decode, mut sampled) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..6 {
        pass.reset();
        let start = Instant::now();
        let mut id = pass.forward_prompt(&ids)?;
        let prompt_time = start.elapsed().as_secs_f64();
        let start = Instant::now();
        for _ in 0..n_gen {
            id = pass.forward_token_greedy(id)?;
        }
        let decode_time = start.elapsed().as_secs_f64();
        pass.truncate(n_prompt);
        let start = Instant::now();
        for pos in n_prompt..n_prompt + n_gen {
            id = pass.forward_top_k(&[BatchToken { id, seq: 0, pos, logits: true }], 40)?[0][0].0;
        }
        if round > 0 {
            prefill.push(n_prompt as f64 / prompt_time);
            decode.push(n_gen as f64 / decode_time);
            sampled.push(n_gen as f64 / start.elapsed().as_secs_f64());
        }
    }
    for (name, mut rates) in [("prefill", prefill), ("decode", decode), ("sampled", sampled)] {
        rates.sort_by(f64::total_cmp);
        println!("{name} best {:.0} median {:.0} tok/s", rates[rates.len() - 1], rates[rates.len() / 2]);
    }
    Ok(())
}
