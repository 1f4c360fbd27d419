//! Concurrent sequences of a scheduler on the GPU: each has the tokens that the CPU generates for its request alone. Without
//! a GPU (a software one will do) the test is skipped; in CI that is a failure.

use std::ops::ControlFlow;
use std::sync::Arc;

use crate::wgpu::device::{gpu, start};
use metal_attention::sampling::SamplerOptions;
use metal_attention::scheduler::{Event, Request, Scheduler, SchedulerOptions};
use metal_attention::tokenizer::EncodeOptions;
use metal_attention::{CacheType, Device, EngineOptions, GenerateOptions, Generator, Model, SessionOptions};

const N_GEN: usize = 24;

#[test]
fn concurrent_sequences_equal_those_of_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let model = Model::built_in().unwrap();
    let cache_type = CacheType::F32;
    let options = SessionOptions { n_ctx: 128, n_seq: 4, n_ubatch: 32, cache_type, ..Default::default() };
    let pass = start(&gpu, model.gguf(), &options);
    let options = SchedulerOptions { n_parallel: 3, n_batch: Some(16), ..Default::default() };
    let scheduler = Scheduler::start(Box::new(pass), Arc::new(model.clone()), options).unwrap();
    let sampled = SamplerOptions { seed: Some(3), top_k: 2, ..Default::default() };
    let requests = [
        ("Once upon a time", SamplerOptions::greedy()),
        ("Once upon a time", sampled.clone()),
        ("Lily and Ben went to the park. They saw a big dog and a little cat in the tree.", SamplerOptions::greedy()),
        ("Lily and Ben went to the park. They saw a big dog", sampled),
        ("Once upon a time, there was a little dog", SamplerOptions::greedy()),
    ];
    let encode = |text| {
        let tokenizer = model.tokenizer().unwrap();
        tokenizer.encode(text, EncodeOptions { add_special: true, parse_special: false })
    };
    let submit = |(text, sampling): &(&'static str, SamplerOptions)| {
        let (prompt, sampling) = (encode(text).into(), sampling.clone());
        scheduler.submit(Request { prompt, sampling, max_tokens: Some(N_GEN), ..Default::default() }).unwrap()
    };
    // Two rounds: in the second one most of the prompts are in the prefix cache.
    for round in 0..2 {
        let answers: Vec<_> = requests.iter().map(submit).collect();
        for (mut events, (text, sampling)) in answers.into_iter().zip(&requests) {
            let (mut ids, mut cached) = (Vec::new(), 0);
            while let Some(event) = events.blocking_recv() {
                match event {
                    Event::Prompt(_) => {}
                    Event::Token { id, .. } => ids.push(id),
                    Event::Done { usage, .. } => cached = usage.cached_tokens,
                    Event::Failed(why) => panic!("{why}"),
                }
            }
            let cpu = EngineOptions { device: Device::Cpu, n_threads: Some(1), cache_type, ..Default::default() };
            let mut generator = Generator::new(&model, &cpu, sampling.clone()).unwrap();
            generator.prompt(&encode(text), |_, _| ControlFlow::Continue(())).unwrap();
            let options = GenerateOptions { n_predict: Some(N_GEN), ..Default::default() };
            let want: Vec<_> = generator.generate(options).map(|token| token.unwrap().id).collect();
            assert_eq!(ids, want, "{text} in round {round}");
            assert!(round == 0 || cached > 0, "{text}");
        }
    }
    assert!(scheduler.metrics().cached_tokens > 0);
}
