//! Converts Dynamo's requests to the scheduler's, and refuses what is not supported.

use std::sync::Arc;

use dynamo_backend_common::{DynamoError, PreprocessedRequest, SamplingOptions};
use metal_attention::sampling::SamplerOptions;
use metal_attention::scheduler::Request;

use crate::error::invalid;

/// A request, divided between the scheduler and the stream.
pub struct PlannedRequest {
    /// The request for the scheduler.
    pub request: Request,
    /// Ids of tokens that end the text. They are part of the output.
    pub stop_ids: Vec<u32>,
}

/// Converts a request. An error for options that this worker does not support, or that would change the text after a migration: another
/// worker then starts from the prompt with the tokens so far.
pub fn plan(request: &PreprocessedRequest) -> Result<PlannedRequest, DynamoError> {
    refuse_unsupported(request)?;
    let stop = &request.stop_conditions;
    let lists = [&stop.stop_token_ids, &stop.stop_token_ids_visible, &stop.stop_token_ids_hidden];
    let mut stop_ids: Vec<u32> = lists.into_iter().flatten().flatten().copied().collect();
    stop_ids.extend(&request.eos_token_ids);
    let ignore_eos = stop.ignore_eos.unwrap_or(false);
    // Stop strings are handled by the frontend, because only it knows the text before a migration.
    let request = Request {
        prompt: Arc::from(request.token_ids.as_slice()),
        sampling: sampling(&request.sampling_options)?,
        max_tokens: stop.max_tokens.map(|n| n as usize),
        min_tokens: stop.min_tokens.map_or(0, |n| n as usize),
        ignore_eos,
        logprobs: request.output_options.logprobs.map(|n| n as usize),
        ..Request::default()
    };
    Ok(PlannedRequest { request, stop_ids: if ignore_eos { Vec::new() } else { stop_ids } })
}

/// An error if the request uses an option that is not supported.
fn refuse_unsupported(request: &PreprocessedRequest) -> Result<(), DynamoError> {
    let sampling = &request.sampling_options;
    let routing = request.routing.as_ref();
    let more_than_one = |n: Option<u8>| n.is_some_and(|n| n > 1);
    let refused = [
        (more_than_one(sampling.n), "n: one text a request; send it as often as you want texts"),
        (more_than_one(sampling.best_of), "best_of: one text a request"),
        (sampling.use_beam_search == Some(true), "use_beam_search"),
        (sampling.guided_decoding.is_some(), "guided decoding (response_format, guided_json, a forced tool call)"),
        (request.output_options.prompt_logprobs.is_some(), "prompt_logprobs"),
        (request.stop_conditions.max_thinking_tokens.is_some(), "max_thinking_tokens"),
        (request.prompt_embeds.is_some(), "prompt_embeds"),
        (request.multi_modal_data.as_ref().is_some_and(|data| !data.is_empty()), "images, audio and video"),
        (request.encoder_result.is_some(), "the result of an encoder"),
        (request.prefill_result.is_some() || request.bootstrap_info.is_some(), "prefill on another worker"),
        (routing.is_some_and(|routing| routing.lora_name.is_some()), "LoRA adapters"),
        (routing.is_some_and(|routing| routing.cache_namespace.is_some()), "cache_salt: all texts share one cache"),
    ];
    match refused.into_iter().find(|(is_used, _)| *is_used) {
        Some((_, what)) => Err(invalid(format!("metal-attention does not support this in Dynamo: {what}"))),
        None => Ok(()),
    }
}

/// The sampler's options. Options that are not given have the engine's defaults; a negative seed means none. Random numbers depend only
/// on seed and position, and penalties count the whole sequence with its prompt, so that a migrated text continues the same.
fn sampling(given: &SamplingOptions) -> Result<SamplerOptions, DynamoError> {
    let default = SamplerOptions::default();
    let top_k = match given.top_k {
        None => default.top_k,
        Some(-1) => 0,
        Some(k) => usize::try_from(k)
            .map_err(|_| invalid(format!("top_k is {k}, but it must be 0 or more, or -1 for all tokens")))?,
    };
    let options = SamplerOptions {
        temperature: given.temperature.unwrap_or(default.temperature),
        top_k,
        top_p: given.top_p.unwrap_or(default.top_p),
        min_p: given.min_p.unwrap_or(default.min_p),
        repeat_penalty: given.repetition_penalty.unwrap_or(default.repeat_penalty),
        frequency_penalty: given.frequency_penalty.unwrap_or(default.frequency_penalty),
        presence_penalty: given.presence_penalty.unwrap_or(default.presence_penalty),
        penalty_last_n: usize::MAX,
        seed: given.seed.and_then(|seed| u64::try_from(seed).ok()),
        ..default
    };
    options.validate().map_err(|why| invalid(why.to_string()))?;
    Ok(options)
}

#[cfg(test)]
mod tests {
    use dynamo_backend_common::{GuidedDecodingOptions, OutputOptions, StopConditions};

    use super::*;

    fn request(sampling: SamplingOptions, stop: StopConditions, output: OutputOptions) -> PreprocessedRequest {
        PreprocessedRequest::builder()
            .model("a model".to_owned())
            .token_ids(vec![1, 2, 3])
            .sampling_options(sampling)
            .stop_conditions(stop)
            .output_options(output)
            .eos_token_ids(vec![2])
            .build()
            .unwrap()
    }

    #[test]
    fn supported_options_are_converted() {
        let sampling = SamplingOptions {
            n: Some(1),
            temperature: Some(0.5),
            top_k: Some(-1),
            top_p: Some(0.25),
            min_p: Some(0.125),
            repetition_penalty: Some(1.5),
            frequency_penalty: Some(-1.0),
            presence_penalty: Some(1.0),
            seed: Some(-1),
            ..Default::default()
        };
        let stop = StopConditions {
            max_tokens: Some(7),
            min_tokens: Some(3),
            stop: Some(vec!["the".into()]),
            stop_token_ids: Some(vec![10]),
            stop_token_ids_visible: Some(vec![11]),
            stop_token_ids_hidden: Some(vec![12]),
            ..Default::default()
        };
        let output = OutputOptions { logprobs: Some(4), ..Default::default() };
        let PlannedRequest { request, stop_ids } = plan(&request(sampling, stop, output)).unwrap();
        assert_eq!(stop_ids, [10, 11, 12, 2]);
        assert_eq!(&*request.prompt, [1, 2, 3]);
        assert_eq!((request.max_tokens, request.min_tokens, request.logprobs), (Some(7), 3, Some(4)));
        assert!(request.stop.is_empty() && !request.ignore_eos);
        let expected = SamplerOptions {
            temperature: 0.5,
            top_k: 0,
            top_p: 0.25,
            min_p: 0.125,
            repeat_penalty: 1.5,
            frequency_penalty: -1.0,
            presence_penalty: 1.0,
            penalty_last_n: usize::MAX,
            seed: None,
            ..Default::default()
        };
        assert_eq!(request.sampling, expected);
    }

    #[test]
    fn unsupported_options_are_refused() {
        let refused = |sampling: SamplingOptions, stop: StopConditions, output: OutputOptions, why: &str| {
            let error = plan(&request(sampling, stop, output)).err().expect("a refusal");
            assert!(error.message().contains(why), "{error:?}");
            assert_eq!(error.public_message(), Some(error.message()));
        };
        let stop = StopConditions::default;
        let output = OutputOptions::default;
        let n = |n| SamplingOptions { n: Some(n), ..Default::default() };
        refused(n(2), stop(), output(), "n: one text");
        let guided = Some(GuidedDecodingOptions { regex: Some("a+".into()), ..Default::default() });
        let guided = SamplingOptions { guided_decoding: guided, ..Default::default() };
        refused(guided, stop(), output(), "guided decoding");
        refused(SamplingOptions { top_k: Some(-2), ..Default::default() }, stop(), output(), "top_k is -2");
        refused(SamplingOptions { top_p: Some(1.5), ..Default::default() }, stop(), output(), "top_p");
        let prompt_logprobs = OutputOptions { prompt_logprobs: Some(1), ..Default::default() };
        refused(n(1), stop(), prompt_logprobs, "prompt_logprobs");
        let thinking = StopConditions { max_thinking_tokens: Some(5), ..Default::default() };
        refused(n(1), thinking, output(), "max_thinking_tokens");
    }

    #[test]
    fn no_token_ends_a_text_with_ignore_eos() {
        let stop = StopConditions { ignore_eos: Some(true), stop_token_ids: Some(vec![5]), ..Default::default() };
        let plan = plan(&request(SamplingOptions::default(), stop, OutputOptions::default())).unwrap();
        assert!(plan.stop_ids.is_empty() && plan.request.ignore_eos);
    }
}
