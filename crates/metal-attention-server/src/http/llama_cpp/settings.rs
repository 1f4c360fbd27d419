//! The settings of generation under llama.cpp's names.

use metal_attention::sampling::{NumberOption, SamplerOptions};
use metal_attention::scheduler::Request;
use serde_json::{Map, Value, json};

/// llama.cpp's seed for a random one.
const RANDOM_SEED: u32 = u32::MAX;

/// Returns the sampling options and limits of `request`, in the form of `generation_settings` in responses.
pub fn settings(request: &Request) -> Map<String, Value> {
    let sampling = &request.sampling;
    let mut settings: Map<String, Value> = NumberOption::ALL
        .iter()
        .map(|option| {
            let name = if option.name == "penalty_last_n" { "repeat_last_n" } else { option.name };
            (name.to_owned(), number(option, sampling))
        })
        .collect();
    let max_tokens = json!(request.max_tokens.map_or(-1, |n| i64::try_from(n).unwrap_or(-1)));
    let samplers: Vec<_> = sampling.order.iter().map(|sampler| sampler.name()).collect();
    for (name, value) in [
        ("seed", sampling.seed.map_or(json!(RANDOM_SEED), |seed| json!(seed))),
        ("samplers", json!(samplers)),
        ("dry_sequence_breakers", json!(sampling.dry_sequence_breakers)),
        ("mirostat", json!(0)),
        ("stop", json!(*request.stop)),
        ("n_predict", max_tokens.clone()),
        ("max_tokens", max_tokens),
        ("n_keep", json!(0)),
        ("ignore_eos", json!(request.ignore_eos)),
        ("stream", json!(!request.buffer_events)),
        ("n_probs", json!(request.logprobs.unwrap_or(0))),
        ("post_sampling_probs", json!(false)),
        ("timings_per_token", json!(false)),
        ("lora", json!([])),
    ] {
        settings.insert(name.to_owned(), value);
    }
    settings
}

/// The value of an option; -1 for an unlimited count.
fn number(option: &NumberOption, sampling: &SamplerOptions) -> Value {
    let value = option.get(sampling);
    if !option.is_count() {
        // Through f32, so that 0.1 is not written as 0.10000000149.
        return json!((value as f32).to_string().parse().unwrap_or(value));
    }
    if value >= usize::MAX as f64 { json!(-1) } else { json!(value as u64) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_have_the_names_of_llama_cpp() {
        let sampling = SamplerOptions { penalty_last_n: usize::MAX, temperature: 0.8, ..Default::default() };
        let stop = ["x".to_owned()].into();
        let settings =
            settings(&Request { sampling, max_tokens: Some(7), stop, buffer_events: true, ..Default::default() });
        for (name, value) in [
            ("temperature", json!(0.8)),
            ("repeat_last_n", json!(-1)),
            ("top_k", json!(40)),
            ("seed", json!(4_294_967_295_u32)),
            ("n_predict", json!(7)),
            ("max_tokens", json!(7)),
            ("stop", json!(["x"])),
            ("n_probs", json!(0)),
            ("stream", json!(false)),
        ] {
            assert_eq!(settings[name], value, "{name}");
        }
        assert!(!settings.contains_key("penalty_last_n"));
        assert_eq!(super::settings(&Request::default())["n_predict"], -1);
    }
}
