//! The part of `/metrics` under vLLM's names, which routers of inference requests read: the [model server protocol] of
//! the Gateway API Inference Extension.

use metal_attention::scheduler::Metrics;

use super::metrics::{MetricLines, ModelMetrics, escaped};

/// Returns the metrics of `models`. `started`: the start of the server, in seconds since 1970.
pub fn render(started: u64, models: &[ModelMetrics]) -> String {
    if models.is_empty() {
        return String::new();
    }
    let mut lines = MetricLines::new("vllm:");
    let name = |model: &ModelMetrics| format!("model_name=\"{}\"", escaped(&model.name));
    let of_model = |model: &ModelMetrics| format!("{{{},engine=\"0\"}}", name(model));
    // vLLM serves one model and has no model label here.
    let or_several = |model: &ModelMetrics, labels: String| match models {
        [_] => format!("{{{labels}}}"),
        _ => format!("{{{},{labels}}}", name(model)),
    };
    let mut gauge =
        |metric: &str, help: &str, labels: &dyn Fn(&ModelMetrics) -> String, value: &dyn Fn(&Metrics) -> f64| {
            lines.head(metric, "gauge", help);
            for model in models {
                lines.value(metric, &labels(model), value(&model.scheduler));
            }
        };
    gauge("num_requests_running", "Requests that are running now.", &of_model, &|m| m.running as f64);
    gauge("num_requests_waiting", "Requests that wait now.", &of_model, &|m| m.waiting as f64);
    let n_pages = |m: &Metrics| m.pages_used + m.pages_free;
    let help =
        "Share of the KV cache that running requests hold, from 0 to 1. What is kept of finished ones gives way.";
    gauge("kv_cache_usage_perc", help, &of_model, &|m| m.pages_running as f64 / n_pages(m).max(1) as f64);
    let cache = |model: &ModelMetrics| {
        let (page_len, n_pages) = (model.scheduler.page_len, n_pages(&model.scheduler));
        let labels = format!(
            "block_size=\"{page_len}\",num_gpu_blocks=\"{n_pages}\",enable_prefix_caching=\"True\",engine=\"0\""
        );
        or_several(model, labels)
    };
    gauge("cache_config_info", "The KV cache: positions of a page, and pages.", &cache, &|_| 1.0);
    // There are no adapters. Routers read the value as the time of the last change of adapters.
    let adapters = |model: &ModelMetrics| {
        or_several(model, "max_lora=\"0\",running_lora_adapters=\"\",waiting_lora_adapters=\"\"".to_owned())
    };
    gauge("lora_requests_info", "LoRA adapters, of which there are none.", &adapters, &|_| started as f64);
    lines.text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_types_and_labels_follow_the_protocol() {
        let metrics = Metrics {
            running: 3,
            waiting: 5,
            pages_used: 40,
            pages_free: 24,
            pages_running: 16,
            page_len: 64,
            ..Default::default()
        };
        let model = |name: &str, scheduler| ModelMetrics {
            name: name.into(),
            label: String::new(),
            n_replicas: 1,
            n_failed: 0,
            scheduler,
            pictures: None,
        };
        let text = render(1_795_293_423, &[model("a \"b\\\n", metrics)]);
        let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with("# HELP")).collect();
        let labels = r#"{model_name="a \"b\\\n",engine="0"}"#;
        assert_eq!(
            lines,
            [
                "# TYPE vllm:num_requests_running gauge",
                &format!("vllm:num_requests_running{labels} 3"),
                "# TYPE vllm:num_requests_waiting gauge",
                &format!("vllm:num_requests_waiting{labels} 5"),
                "# TYPE vllm:kv_cache_usage_perc gauge",
                &format!("vllm:kv_cache_usage_perc{labels} 0.25"),
                "# TYPE vllm:cache_config_info gauge",
                r#"vllm:cache_config_info{block_size="64",num_gpu_blocks="64",enable_prefix_caching="True",engine="0"} 1"#,
                "# TYPE vllm:lora_requests_info gauge",
                r#"vllm:lora_requests_info{max_lora="0",running_lora_adapters="",waiting_lora_adapters=""} 1795293423"#,
            ]
        );
        // Without a KV cache the share in use is 0.
        let two = render(0, &[model("m", Metrics::default()), model("n", Metrics::default())]);
        assert!(two.contains("vllm:kv_cache_usage_perc{model_name=\"m\",engine=\"0\"} 0\n"));
        assert!(two.contains("vllm:lora_requests_info{model_name=\"n\",max_lora=\"0\","));
    }
}
