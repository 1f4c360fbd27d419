//! The part of `/metrics` under llama.cpp's names, as far as the metrics exist here.

use metal_attention::scheduler::Metrics;

use crate::http::metrics::{MetricLines, ModelMetrics};

/// Returns the metrics of `models`.
pub fn render(models: &[ModelMetrics]) -> String {
    if models.is_empty() {
        return String::new();
    }
    let mut lines = MetricLines::new("llamacpp:");
    let mut each = |name: &str, kind: &str, help: &str, value: &dyn Fn(&Metrics) -> f64| {
        lines.each(models, (name, kind, help), |model| value(&model.scheduler));
    };
    each("prompt_tokens_total", "counter", "Prompt tokens that were evaluated.", &|m| m.prompt_tokens as f64);
    each("tokens_predicted_total", "counter", "Tokens that were generated.", &|m| m.generated_tokens as f64);
    each("n_decode_total", "counter", "Steps of the forward pass.", &|m| m.steps as f64);
    let busy = |m: &Metrics| m.generated_tokens as f64 / m.steps.max(1) as f64;
    each("n_busy_slots_per_decode", "gauge", "Tokens generated in a step, on average.", &busy);
    each("requests_processing", "gauge", "Requests that are running now.", &|m| m.running as f64);
    each("requests_deferred", "gauge", "Requests that wait now.", &|m| m.waiting as f64);
    lines.text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_have_the_names_of_llama_cpp() {
        let metrics =
            Metrics { prompt_tokens: 30, generated_tokens: 12, steps: 8, running: 3, waiting: 5, ..Default::default() };
        let model = ModelMetrics {
            name: "m".into(),
            label: String::new(),
            n_replicas: 1,
            n_failed: 0,
            scheduler: metrics,
            pictures: None,
        };
        let text = render(&[model]);
        assert_eq!(render(&[]), "");
        let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(
            lines,
            [
                "llamacpp:prompt_tokens_total 30",
                "llamacpp:tokens_predicted_total 12",
                "llamacpp:n_decode_total 8",
                "llamacpp:n_busy_slots_per_decode 1.5",
                "llamacpp:requests_processing 3",
                "llamacpp:requests_deferred 5",
            ]
        );
    }
}
