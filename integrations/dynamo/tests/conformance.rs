//! The worker for NVIDIA Dynamo, on the built-in model: Dynamo's conformance kit, migration of requests, stop tokens, log
//! probabilities.

use std::sync::Arc;
use std::time::Duration;

use dynamo_backend_common::testing::{mock_context, run_conformance};
use dynamo_backend_common::{
    FinishReason, GenerateContext, LLMEngine, LLMEngineOutput, OutputOptions, PreprocessedRequest, SamplingOptions,
    StopConditions,
};
use futures::StreamExt;
use metal_attention::scheduler::SchedulerOptions;
use metal_attention::speculation::{DrafterKind, Speculation};
use metal_attention::{Device, EngineOptions, Model};
use metal_attention_dynamo::{WorkerEngine, WorkerSetup};

/// An engine with four slots on the CPU, not started.
fn engine() -> WorkerEngine {
    WorkerEngine::new(WorkerSetup {
        speculation: Speculation { drafter: DrafterKind::Auto, ..Speculation::default() },
        draft: None,
        model: Arc::new(Model::built_in().unwrap()),
        name: "stories".into(),
        engine: EngineOptions { device: Device::Cpu, n_ctx: Some(256), n_seq: 8, ..Default::default() },
        scheduler: SchedulerOptions { n_parallel: 4, ..Default::default() },
        grace: Duration::from_secs(5),
        token_delay: Duration::ZERO,
    })
}

#[tokio::test]
async fn the_engine_passes_the_conformance_kit() {
    run_conformance(engine).await.unwrap();
}

/// A request in the form that Dynamo's frontend sends.
fn request(prompt: &[u32], sampling: SamplingOptions, stop: StopConditions) -> PreprocessedRequest {
    let request = PreprocessedRequest::builder()
        .model("stories".to_owned())
        .token_ids(prompt.to_vec())
        .sampling_options(sampling)
        .stop_conditions(stop)
        .output_options(OutputOptions { logprobs: Some(2), ..Default::default() })
        .build();
    request.unwrap()
}

/// The generated tokens, and the last item of the stream.
async fn answer(engine: &WorkerEngine, request: PreprocessedRequest) -> (Vec<u32>, LLMEngineOutput) {
    let context = GenerateContext::new(mock_context(), None);
    let items: Vec<_> = engine.generate(request, context).await.unwrap().map(Result::unwrap).collect().await;
    let ids = items.iter().flat_map(|item| item.token_ids.clone()).collect();
    (ids, items.into_iter().next_back().unwrap())
}

/// Greedy sampling, sampling with a seed, and the same with penalties.
fn sampling_options() -> [SamplingOptions; 3] {
    let seeded = SamplingOptions { temperature: Some(1.2), seed: Some(-7), ..Default::default() };
    let penalised = SamplingOptions {
        repetition_penalty: Some(1.3),
        frequency_penalty: Some(0.5),
        presence_penalty: Some(0.5),
        ..seeded.clone()
    };
    [SamplingOptions { temperature: Some(0.0), ..Default::default() }, seeded, penalised]
}

/// If a worker dies, the frontend sends the request to another one, with the generated tokens appended to the prompt.
#[tokio::test]
async fn a_migrated_sequence_continues_unchanged() {
    let [from, to] = [engine(), engine()];
    from.start(1).await.unwrap();
    to.start(2).await.unwrap();
    let prompt = [1, 403, 407, 261, 378];
    let stop = |n| StopConditions { max_tokens: Some(n), min_tokens: Some(n), ..Default::default() };
    for sampling in sampling_options() {
        let (ids, last) = answer(&from, request(&prompt, sampling.clone(), stop(60))).await;
        assert_eq!((ids.len(), last.finish_reason), (60, Some(FinishReason::Length)));
        for n in [1, 17, 59, 60] {
            let moved = [&prompt, &ids[..n]].concat();
            let (rest, last) = answer(&to, request(&moved, sampling.clone(), stop(60 - n as u32))).await;
            assert_eq!(rest, ids[n..], "after {n} tokens");
            assert_eq!(last.finish_reason, Some(FinishReason::Length));
        }
    }
    from.cleanup().await.unwrap();
    to.cleanup().await.unwrap();
}

#[tokio::test]
async fn stop_tokens_end_a_sequence_after_min_tokens() {
    let engine = engine();
    engine.start(1).await.unwrap();
    let [greedy, ..] = sampling_options();
    let stop = StopConditions { max_tokens: Some(40), min_tokens: Some(40), ..Default::default() };
    let (ids, _) = answer(&engine, request(&[1, 403], greedy.clone(), stop.clone())).await;
    let end = ids[5];
    let first = ids.iter().position(|&id| id == end).unwrap();
    for min_tokens in [0, 20] {
        let stop = StopConditions { stop_token_ids: Some(vec![end]), min_tokens: Some(min_tokens), ..stop.clone() };
        let (stopped, last) = answer(&engine, request(&[1, 403], greedy.clone(), stop)).await;
        let later = |&(i, &id): &(usize, &u32)| id == end && i + 1 >= min_tokens as usize;
        match ids.iter().enumerate().find(later) {
            Some((i, _)) => {
                assert_eq!(stopped, ids[..=i]);
                assert_eq!(last.finish_reason, Some(FinishReason::Stop));
            }
            None => assert_eq!((stopped, last.finish_reason), (ids.clone(), Some(FinishReason::Length))),
        }
    }
    assert!(first <= 5);
    engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn log_probabilities_are_returned_with_their_tokens() {
    let engine = engine();
    engine.start(1).await.unwrap();
    let [greedy, ..] = sampling_options();
    let stop = StopConditions { max_tokens: Some(3), ..Default::default() };
    let context = GenerateContext::new(mock_context(), None);
    let items = engine.generate(request(&[1, 403], greedy, stop), context).await.unwrap();
    let items: Vec<_> =
        items.map(Result::unwrap).filter(|item| std::future::ready(!item.token_ids.is_empty())).collect().await;
    assert_eq!(items.len(), 3);
    for item in items {
        let [top] = &item.top_logprobs.unwrap()[..] else { panic!("one position") };
        // The greedy token is the most likely one.
        assert_eq!((top.len(), top[0].token_id, top[0].rank, top[1].rank), (2, item.token_ids[0], 1, 2));
        assert_eq!(item.log_probs.unwrap(), [top[0].logprob]);
        assert!(top[0].logprob >= top[1].logprob && top[0].logprob <= 0.0);
    }
    engine.cleanup().await.unwrap();
}
