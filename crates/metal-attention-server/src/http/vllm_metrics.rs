//! The part of `/metrics` under vLLM's names: what routers of inference requests read, as the [model server protocol] of
//! the Gateway API Inference Extension wants it.
//!
//! [model server protocol]: https://gateway-api-inference-extension.sigs.k8s.io/concepts/model-server-protocol/

use metal_attention::scheduler::Metrics;

use super::metrics::Lines;

/// The metrics of `model`, served since `started`, in seconds since 1970.
pub fn render(model: &str, started: u64, m: &Metrics) -> String {
    let mut lines = Lines::new("vllm:");
    let labels = format!("{{model_name=\"{}\",engine=\"0\"}}", escaped(model));
    let mut gauge = |name: &str, help: &str, labels: &str, value: f64| {
        lines.head(name, "gauge", help);
        lines.value(name, labels, value);
    };
    gauge("num_requests_running", "Requests that are running now.", &labels, m.running as f64);
    gauge("num_requests_waiting", "Requests that wait now.", &labels, m.waiting as f64);
    let n_pages = m.pages_used + m.pages_free;
    let usage = m.pages_running as f64 / n_pages.max(1) as f64;
    let help =
        "Share of the KV cache that running requests hold, from 0 to 1. What is kept of finished ones gives way.";
    gauge("kv_cache_usage_perc", help, &labels, usage);
    let cache = format!(
        "{{block_size=\"{}\",num_gpu_blocks=\"{n_pages}\",enable_prefix_caching=\"True\",engine=\"0\"}}",
        m.page_len
    );
    gauge("cache_config_info", "The KV cache: positions of a page, and pages.", &cache, 1.0);
    // Without adapters nothing changes after the start. Readers take the value for the time of the last change.
    let adapters = "{max_lora=\"0\",running_lora_adapters=\"\",waiting_lora_adapters=\"\"}";
    gauge("lora_requests_info", "LoRA adapters, of which there are none.", adapters, started as f64);
    lines.text
}

/// `text` as the value of a label.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_types_and_labels_are_those_of_the_protocol() {
        let metrics = Metrics {
            running: 3,
            waiting: 5,
            pages_used: 40,
            pages_free: 24,
            pages_running: 16,
            page_len: 64,
            ..Default::default()
        };
        let text = render("a \"b\\\n", 1_795_293_423, &metrics);
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
        // A model without a cache that is counted uses nothing of it.
        assert!(
            render("m", 0, &Metrics::default()).contains("vllm:kv_cache_usage_perc{model_name=\"m\",engine=\"0\"} 0\n")
        );
    }
}
