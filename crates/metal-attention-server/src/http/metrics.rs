//! `/metrics`: counters and gauges in Prometheus' text format.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use metal_attention::scheduler::{BATCH_SIZE_BUCKETS, Metrics};

use super::connections::Connections;
use super::error::ErrorBody;
use super::pictures::PictureMetrics;
use super::{App, llama_cpp, vllm_metrics};

/// Upper bounds of the buckets of time histograms, in seconds.
const SECONDS: [f64; 12] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0];

/// Counters of the HTTP layer.
#[derive(Default)]
pub struct HttpMetrics {
    /// Responses by route and status.
    answers: Mutex<BTreeMap<(String, u16), u64>>,
    /// The time from a request's head to the head of its response.
    answer_time: TimeHistogram,
    /// The time from the submission of a request to its first token.
    first_token: TimeHistogram,
}

/// A histogram of times with the bounds [`SECONDS`].
#[derive(Default)]
struct TimeHistogram {
    /// Counts by bucket, not cumulated; the last bucket has no upper bound.
    buckets: [AtomicU64; SECONDS.len() + 1],
    /// The sum of all times.
    microseconds: AtomicU64,
}

impl TimeHistogram {
    fn add(&self, time: Duration) {
        let seconds = time.as_secs_f64();
        let bucket = SECONDS.iter().position(|&bound| seconds <= bound).unwrap_or(SECONDS.len());
        self.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        self.microseconds.fetch_add(time.as_micros() as u64, Ordering::Relaxed);
    }
}

impl HttpMetrics {
    /// Counts a response. `route` is a pattern of the router, not a path.
    pub fn answered(&self, route: &str, status: u16, time: Duration) {
        let mut answers = self.answers.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        *answers.entry((route.to_owned(), status)).or_default() += 1;
        drop(answers);
        self.answer_time.add(time);
    }

    /// Records the time to the first token of a sequence.
    pub fn first_token(&self, time: Duration) {
        self.first_token.add(time);
    }
}

/// Reports all metrics in Prometheus' text format.
#[utoipa::path(get, path = "/metrics", tag = "operations", responses(
    (status = 200, description = "Counters and gauges", body = String, content_type = "text/plain"),
    (status = 401, description = "No key, or a wrong one", body = ErrorBody),
))]
pub async fn metrics(State(app): State<App>) -> Response {
    let several = app.models.are_several();
    let models: Vec<ModelMetrics> = app
        .models
        .schedulers()
        .into_iter()
        .map(|(name, scheduler, pictures)| ModelMetrics {
            label: if several { format!("model=\"{}\"", escaped(&name)) } else { String::new() },
            name,
            n_replicas: scheduler.n_replicas(),
            n_failed: scheduler.n_failed(),
            scheduler: scheduler.metrics(),
            pictures,
        })
        .collect();
    let mut text = render(&app.metrics, &app.connections, app.bodies.bytes(), &models);
    text += &vllm_metrics::render(app.started, &models);
    text += &llama_cpp::metrics::render(&models);
    ([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}

/// The metrics of one loaded model.
pub(super) struct ModelMetrics {
    /// The model's main name.
    pub name: String,
    /// The label of its values, such as `model="name"`; empty where the server has one model.
    pub label: String,
    /// Number of its replicas.
    pub n_replicas: usize,
    /// Replicas that have panicked.
    pub n_failed: usize,
    /// The scheduler's metrics.
    pub scheduler: Metrics,
    /// The work of the picture encoder; `None`: the model has none.
    pub pictures: Option<PictureMetrics>,
}

impl ModelMetrics {
    /// Returns the labels of a value in braces: the model's and `extra`; empty where there are none.
    fn labels(&self, extra: &str) -> String {
        let both: Vec<_> = [self.label.as_str(), extra].into_iter().filter(|label| !label.is_empty()).collect();
        if both.is_empty() { String::new() } else { format!("{{{}}}", both.join(",")) }
    }
}

/// Escapes `text` for the value of a label.
pub(super) fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// Builds metrics in Prometheus' text format.
pub(super) struct MetricLines {
    /// The prefix of all names.
    prefix: &'static str,
    /// The text so far.
    pub(super) text: String,
}

impl MetricLines {
    /// An empty text.
    pub(super) fn new(prefix: &'static str) -> Self {
        Self { prefix, text: String::new() }
    }

    /// Adds the HELP and TYPE lines of a metric.
    pub(super) fn head(&mut self, name: &str, kind: &str, help: &str) {
        let prefix = self.prefix;
        // Writing to a string cannot fail.
        let _ = writeln!(self.text, "# HELP {prefix}{name} {help}\n# TYPE {prefix}{name} {kind}");
    }

    /// Adds a value; `labels` are in braces, or empty.
    pub(super) fn value(&mut self, name: &str, labels: &str, value: impl std::fmt::Display) {
        let _ = writeln!(self.text, "{}{name}{labels} {value}", self.prefix);
    }

    /// Adds a metric that has one value without labels.
    fn one(&mut self, name: &str, kind: &str, help: &str, value: impl std::fmt::Display) {
        self.head(name, kind, help);
        self.value(name, "", value);
    }

    /// Adds a metric with one value of each model.
    pub(super) fn each<T: std::fmt::Display>(
        &mut self,
        models: &[ModelMetrics],
        (name, kind, help): (&str, &str, &str),
        value: impl Fn(&ModelMetrics) -> T,
    ) {
        self.head(name, kind, help);
        for model in models {
            self.value(name, &model.labels(""), value(model));
        }
    }

    /// Adds the values of a histogram. `buckets` are not cumulated; `labels` returns the labels of a value from its
    /// own.
    fn buckets(&mut self, name: &str, labels: impl Fn(&str) -> String, bounds: &[f64], buckets: &[u64], sum: f64) {
        let mut total = 0;
        let bounds = bounds.iter().map(ToString::to_string).chain(["+Inf".to_owned()]);
        for (bound, n) in bounds.zip(buckets) {
            total += n;
            self.value(&format!("{name}_bucket"), &labels(&format!("le=\"{bound}\"")), total);
        }
        self.value(&format!("{name}_sum"), &labels(""), sum);
        self.value(&format!("{name}_count"), &labels(""), total);
    }

    /// Adds a histogram of times.
    fn times(&mut self, name: &str, help: &str, times: &TimeHistogram) {
        let buckets: Vec<u64> = times.buckets.iter().map(|n| n.load(Ordering::Relaxed)).collect();
        let seconds = times.microseconds.load(Ordering::Relaxed) as f64 / 1e6;
        self.head(name, "histogram", help);
        let braces = |label: &str| if label.is_empty() { String::new() } else { format!("{{{label}}}") };
        self.buckets(name, braces, &SECONDS, &buckets, seconds);
    }
}

/// The metrics of picture encoders, of models that have one.
fn render_pictures(lines: &mut MetricLines, models: &[ModelMetrics]) {
    type Metric = (&'static str, &'static str, &'static str, fn(&PictureMetrics) -> f64);
    let metrics: [Metric; 5] = [
        ("pictures_encoded_total", "counter", "Pictures that were encoded.", |pictures| pictures.encoded as f64),
        ("pictures_cached_total", "counter", "Pictures whose rows were known from earlier.", |pictures| {
            pictures.cached as f64
        }),
        (
            "picture_batches_total",
            "counter",
            "Runs of the picture encoder, each over one or several pictures.",
            |pictures| pictures.batches as f64,
        ),
        ("picture_seconds_total", "counter", "Time in which pictures were encoded, in seconds.", |pictures| {
            pictures.seconds
        }),
        ("picture_cache_bytes", "gauge", "Bytes of the rows of pictures that are kept.", |pictures| {
            pictures.cache_bytes as f64
        }),
    ];
    let with_encoder: Vec<_> = models.iter().filter_map(|model| Some((model, model.pictures?))).collect();
    for (name, kind, help, value) in metrics.into_iter().filter(|_| !with_encoder.is_empty()) {
        lines.head(name, kind, help);
        for (model, pictures) in &with_encoder {
            lines.value(name, &model.labels(""), value(pictures));
        }
    }
}

/// The metrics under this server's own names.
fn render(http: &HttpMetrics, connections: &Connections, body_bytes: usize, models: &[ModelMetrics]) -> String {
    let mut lines = MetricLines::new("metal_attention_");
    lines.one("connections", "gauge", "Connections that are open now.", connections.len());
    let (evicted, refused) = connections.evicted_and_refused();
    let help = "Connections that were closed while they waited for their clients, because others needed the room.";
    lines.one("connections_given_up_total", "counter", help, evicted);
    let help = "Connections for which there was no room, or an extra place only.";
    lines.one("connections_refused_total", "counter", help, refused);
    lines.one(
        "body_bytes",
        "gauge",
        "Bytes of requests' bodies that are held now, without 64 KiB of each.",
        body_bytes,
    );
    lines.head("http_responses_total", "counter", "Responses by route and status.");
    for ((route, status), n) in http.answers.lock().unwrap_or_else(std::sync::PoisonError::into_inner).iter() {
        lines.value("http_responses_total", &format!("{{route=\"{route}\",status=\"{status}\"}}"), n);
    }
    lines.times("http_response_seconds", "From a request's head to the head of its response.", &http.answer_time);
    lines.times("time_to_first_token_seconds", "From a request's submission to its first token.", &http.first_token);
    lines.one("model_loaded", "gauge", "1 once a model is loaded.", u8::from(!models.is_empty()));
    lines.one("models_loaded", "gauge", "Models that are loaded.", models.len());
    let replicas = ("replicas", "gauge", "Replicas of the model that answer requests.");
    lines.each(models, replicas, |model| model.n_replicas - model.n_failed);
    let failed = ("replicas_failed", "gauge", "Replicas that met a defect and have ended.");
    lines.each(models, failed, |model| model.n_failed);
    if !models.is_empty() {
        render_schedulers(&mut lines, models);
    }
    render_pictures(&mut lines, models);
    lines.text
}

/// A metric of a scheduler: name, help, and value.
type MetricColumn = (&'static str, &'static str, fn(&Metrics) -> u64);

const COUNTERS: [MetricColumn; 10] = [
    ("prompt_tokens_total", "Prompt tokens that were evaluated.", |m| m.prompt_tokens),
    ("cached_prompt_tokens_total", "Prompt tokens that were in the KV cache already.", |m| m.cached_tokens),
    ("generated_tokens_total", "Tokens that were generated.", |m| m.generated_tokens),
    ("drafted_tokens_total", "Drafts that were evaluated.", |m| m.drafted_tokens),
    ("accepted_tokens_total", "Drafts that were accepted: they are generated tokens, too.", |m| m.accepted_tokens),
    ("embedding_tokens_total", "Tokens that were evaluated for embeddings.", |m| m.embedding_tokens),
    ("steps_total", "Steps of the forward pass.", |m| m.steps),
    ("preemptions_total", "Times that a running request had to give up its place.", |m| m.preemptions),
    ("prefix_store_hits_total", "Prompts whose beginning came back from main memory or disk.", |m| m.stored.hits),
    ("prefix_store_tokens_total", "Prompt tokens that came back from there.", |m| m.stored.tokens),
];

const GAUGES: [MetricColumn; 12] = [
    ("requests_running", "Requests that are running now.", |m| m.running as u64),
    ("requests_waiting", "Requests that wait now.", |m| m.waiting as u64),
    ("kv_cache_pages_used", "Pages of the KV cache that hold something.", |m| m.pages_used as u64),
    ("kv_cache_pages_free", "Pages of the KV cache that are free.", |m| m.pages_free as u64),
    ("kv_cache_pages_running", "Pages of the KV cache that running requests hold.", |m| m.pages_running as u64),
    ("recurrent_states_used", "Recurrent states that are kept of texts.", |m| (m.states.total - m.states.free) as u64),
    ("recurrent_states_checkpoints", "Those among them that texts can be cut back to, and none goes on from.", |m| {
        m.states.checkpoints as u64
    }),
    ("recurrent_states_free", "Recurrent states that there is room for yet.", |m| m.states.free as u64),
    ("prefix_store_ram_texts", "Finished texts that main memory holds.", |m| m.stored.ram_sequences as u64),
    ("prefix_store_ram_bytes", "Bytes of main memory that they take.", |m| m.stored.ram_bytes),
    ("prefix_store_disk_texts", "Finished texts that the disk holds.", |m| m.stored.disk_sequences as u64),
    ("prefix_store_disk_bytes", "Bytes of the disk that they take.", |m| m.stored.disk_bytes),
];

/// Adds the metrics of the models' schedulers.
fn render_schedulers(lines: &mut MetricLines, models: &[ModelMetrics]) {
    for (name, help, value) in COUNTERS {
        lines.each(models, (name, "counter", help), |model| value(&model.scheduler));
    }
    lines.head("requests_total", "counter", "Requests by how they ended.");
    for model in models {
        let r = &model.scheduler.requests;
        for (outcome, n) in [
            ("end_of_text", r.end_of_text),
            ("length", r.length),
            ("stop_string", r.stop_string),
            ("context_full", r.context_full),
            ("deadline", r.deadline),
            ("cancelled", r.cancelled),
            ("failed", r.failed),
            ("refused", r.refused),
            ("embeddings", r.embeddings),
        ] {
            lines.value("requests_total", &model.labels(&format!("outcome=\"{outcome}\"")), n);
        }
    }
    for (name, help, value) in GAUGES {
        lines.each(models, (name, "gauge", help), |model| value(&model.scheduler));
    }
    let bounds = BATCH_SIZE_BUCKETS.map(|bound| bound as f64);
    lines.head("batch_tokens", "histogram", "Tokens of a step.");
    for model in models {
        let m = &model.scheduler;
        let labels = |extra: &str| model.labels(extra);
        lines.buckets("batch_tokens", labels, &bounds, &m.batch_sizes, m.batch_tokens as f64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn histograms_are_cumulated() {
        let http = HttpMetrics::default();
        http.answered("/x", 200, Duration::from_millis(7));
        http.answered("/x", 200, Duration::from_millis(700));
        http.answered("/x", 404, Duration::from_secs(100));
        let text = render(&http, &Connections::new(1, 1), 0, &[]);
        for line in [
            "metal_attention_http_responses_total{route=\"/x\",status=\"200\"} 2",
            "metal_attention_http_response_seconds_bucket{le=\"0.005\"} 0",
            "metal_attention_http_response_seconds_bucket{le=\"0.01\"} 1",
            "metal_attention_http_response_seconds_bucket{le=\"60\"} 2",
            "metal_attention_http_response_seconds_bucket{le=\"+Inf\"} 3",
            "metal_attention_http_response_seconds_sum 100.707",
            "metal_attention_http_response_seconds_count 3",
            "metal_attention_model_loaded 0",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
        }
    }

    #[test]
    fn models_are_labelled_where_there_are_several() {
        let model = |label: &str, name: &str| ModelMetrics {
            name: name.into(),
            label: label.into(),
            n_replicas: 3,
            n_failed: 1,
            scheduler: Metrics { steps: 7, ..Metrics::default() },
            pictures: (name == "b").then(|| PictureMetrics { encoded: 3, seconds: 0.5, ..PictureMetrics::default() }),
        };
        let http = HttpMetrics::default();
        let text = |models: &[ModelMetrics]| render(&http, &Connections::new(1, 1), 0, models);
        let one = text(&[model("", "a")]);
        let two = text(&[model("model=\"a\"", "a"), model("model=\"b\"", "b")]);
        for (text, line) in [
            (&one, "metal_attention_replicas 2"),
            (&one, "metal_attention_replicas_failed 1"),
            (&one, "metal_attention_steps_total 7"),
            (&one, "metal_attention_requests_total{outcome=\"length\"} 0"),
            (&two, "metal_attention_models_loaded 2"),
            (&two, "metal_attention_steps_total{model=\"b\"} 7"),
            (&two, "metal_attention_requests_total{model=\"a\",outcome=\"length\"} 0"),
            (&two, "metal_attention_batch_tokens_bucket{model=\"b\",le=\"+Inf\"} 0"),
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
        }
        assert!(!one.contains("picture"));
        assert!(two.contains("metal_attention_pictures_encoded_total{model=\"b\"} 3\n"));
        assert!(two.contains("metal_attention_picture_seconds_total{model=\"b\"} 0.5\n"));
        assert!(!two.contains("pictures_encoded_total{model=\"a\"}"));
        assert_eq!(two.matches("# TYPE metal_attention_steps_total").count(), 1);
    }
}
