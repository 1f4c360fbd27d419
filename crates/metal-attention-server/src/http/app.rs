//! What all requests share.

use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use metal_attention::sampling::SamplerOptions;
use metal_attention::scheduler::{Replicas, SchedulerOptions, StartError};
use metal_attention::tokenizer::Tokenizer;
use metal_attention::{BatchToken, Error, ForwardError, ForwardPass, Model, Pooling, Reranker};
use metal_attention_chat::ChatTemplate;

use super::body::Bodies;
use super::connections::Connections;
use super::constraint::Grammars;
use super::limits::{MAX_MODEL_NAME, MAX_UNCLEAR_BYTES};
use super::metrics::HttpMetrics;
use super::notes::Notes;
use super::work::Work;
use super::{ApiError, HttpOptions};

/// What all requests share; clones are the same.
#[derive(Clone)]
pub struct App(Arc<Parts>);

/// The parts of an [`App`].
pub struct Parts {
    /// How the server is set up.
    pub options: HttpOptions,
    /// What was counted.
    pub metrics: HttpMetrics,
    /// Those that are open.
    pub connections: Arc<Connections>,
    /// The bodies of the requests that are read or worked on.
    pub bodies: Arc<Bodies>,
    /// Shares out the threads that may block.
    pub work: Work,
    /// When the server started, in seconds since 1970.
    pub started: u64,
    /// Set once the model is loaded.
    model: OnceLock<Loaded>,
    leaving: AtomicBool,
    shutting_down: AtomicBool,
}

impl Deref for App {
    type Target = Parts;

    fn deref(&self) -> &Parts {
        &self.0
    }
}

impl App {
    /// A server whose model is yet to be loaded.
    pub fn new(options: HttpOptions) -> Self {
        let started = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        Self(Arc::new(Parts {
            connections: Arc::new(Connections::new(options.max_connections, options.connections_of_one())),
            bodies: Bodies::new(options.max_bodies, options.max_body),
            work: Work::default(),
            options,
            metrics: HttpMetrics::default(),
            started,
            model: OnceLock::new(),
            leaving: AtomicBool::new(false),
            shutting_down: AtomicBool::new(false),
        }))
    }
}

impl Parts {
    /// The model is loaded: requests can be answered from now on.
    pub fn set_model(&self, model: Loaded) {
        // A second model would be a defect of the caller; the first one stays.
        let _ = self.model.set(model);
    }

    /// From now on `/ready` says that the server ends.
    pub fn leave(&self) {
        self.leaving.store(true, Ordering::Release);
    }

    /// From now on requests are refused.
    pub fn shut_down(&self) {
        // In this order: whoever hears that it ends is refused, too.
        self.shutting_down.store(true, Ordering::Release);
        self.leave();
    }

    /// An error where requests had better go elsewhere.
    pub fn check_ready(&self) -> Result<(), ApiError> {
        self.model()?;
        if self.leaving.load(Ordering::Acquire) { Err(shutting_down()) } else { Ok(()) }
    }

    /// The model, once it is loaded and until the server shuts down.
    pub fn model(&self) -> Result<&Loaded, ApiError> {
        self.check_engine()?;
        if self.shutting_down.load(Ordering::Relaxed) {
            return Err(shutting_down());
        }
        self.model.get().ok_or_else(|| ApiError::unavailable("loading", "the model is still loading: try again soon"))
    }

    /// An error where the engine, or each replica of it, met a defect: nothing can be answered any more.
    pub fn check_engine(&self) -> Result<(), ApiError> {
        match self.scheduler().and_then(Replicas::defect) {
            Some(_) => Err(ApiError::engine_failed()),
            None => Ok(()),
        }
    }

    /// The model, for a request that names one: there is only one, so it answers by any name.
    pub fn model_named(&self, name: Option<&str>) -> Result<&Loaded, ApiError> {
        match name {
            Some(name) if name.len() > MAX_MODEL_NAME => {
                let message = format!("model: the name is longer than the {MAX_MODEL_NAME} bytes that one may have");
                Err(ApiError::field("model", message))
            }
            Some(_) | None => self.model(),
        }
    }

    /// The name that an answer has: the one that was asked for, else the model's own. `notes` say which model it is where
    /// it does not have that name.
    pub fn answer_name(&self, asked: Option<&str>, notes: &mut Notes) -> String {
        match asked.filter(|name| !name.is_empty()) {
            Some(name) => {
                if !self.options.names.iter().any(|known| known == name) {
                    notes.answered_by(self.model_name());
                }
                name.to_owned()
            }
            None => self.model_name(),
        }
    }

    /// What runs requests, as soon as there is something.
    pub fn scheduler(&self) -> Option<&Replicas> {
        self.model.get().map(|model| &model.scheduler)
    }

    /// The model's main name.
    pub fn model_name(&self) -> String {
        self.options.names.first().cloned().unwrap_or_default()
    }
}

fn shutting_down() -> ApiError {
    ApiError::unavailable("shutting_down", "the server is shutting down")
}

/// A model that is ready to answer.
pub struct Loaded {
    /// Runs the requests.
    pub scheduler: Replicas,
    /// Text to ids and back.
    pub tokenizer: Arc<Tokenizer>,
    /// Conversations to text.
    pub template: ChatTemplate,
    /// Makes constraints on what may be generated.
    pub grammars: Grammars,
    /// Tokens each text has room for, its prompt included.
    pub n_ctx: usize,
    /// Bytes of the longest token.
    longest_token: usize,
    /// Makes texts of queries and documents; else why the model ranks none.
    reranker: Result<Reranker, String>,
    model: Model,
}

/// Why a model that was opened cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file has no tokenizer that can work.
    #[error(transparent)]
    Model(#[from] Error),
    /// The device failed at the first token.
    #[error("the model is loaded, but cannot evaluate a first token: {0}")]
    FirstToken(ForwardError),
    /// The device computes something, but no numbers.
    #[error(
        "the model is loaded, but a first token gives no number: the file or the device is damaged; metal-attention compare \
         tells which layer it comes from"
    )]
    NoNumbers,
    /// The scheduler did not start.
    #[error(transparent)]
    Start(#[from] StartError),
}

/// Evaluates a first token and forgets it: a device that cannot is known before requests come.
fn evaluate_first(pass: &mut dyn ForwardPass) -> Result<(), LoadError> {
    let batch = [BatchToken { id: 0, seq: 0, pos: 0, logits: true }];
    let is_number = if pass.spec().output.head.is_some() {
        pass.forward(&batch).map_err(LoadError::FirstToken)?.row(0).iter().any(|logit| logit.is_finite())
    } else {
        pass.forward_hidden(&batch).map_err(LoadError::FirstToken)?.iter().all(|value| value.is_finite())
    };
    pass.rewind(0, 0);
    if is_number { Ok(()) } else { Err(LoadError::NoNumbers) }
}

impl Loaded {
    /// Has `pass`, a forward pass of `model`, evaluate a first token, and then starts a scheduler over it.
    pub fn start(model: Model, pass: Box<dyn ForwardPass>, options: &SchedulerOptions) -> Result<Self, LoadError> {
        Self::start_replicas(model, vec![pass], options)
    }

    /// The same over several forward passes, set up alike, each with a scheduler of its own.
    pub fn start_replicas(
        model: Model,
        mut passes: Vec<Box<dyn ForwardPass>>,
        options: &SchedulerOptions,
    ) -> Result<Self, LoadError> {
        passes.iter_mut().try_for_each(|pass| evaluate_first(&mut **pass))?;
        let n_ctx = passes.iter().map(|pass| pass.n_ctx()).min().unwrap_or(0);
        let scheduler = Replicas::start(passes, &Arc::new(model.clone()), options)?;
        let tokenizer = model.tokenizer()?;
        let grammars = Grammars::new(&tokenizer);
        let template = ChatTemplate::for_model(model.gguf().metadata(), Arc::clone(&tokenizer));
        let ids = 0..tokenizer.n_vocab() as u32;
        let longest_token = ids.map(|id| tokenizer.token_bytes(id).len()).max().unwrap_or(0);
        let reranker = Reranker::new(&model).map_err(|error| error.to_string());
        Ok(Self { scheduler, tokenizer, template, grammars, n_ctx, longest_token, reranker, model })
    }

    /// The model with another chat template than its own.
    #[must_use]
    pub fn with_chat_template(self, template: ChatTemplate) -> Self {
        Self { template, ..self }
    }

    /// Refuses a text that is too long for the context by its length already: its tokens would take a long time to tell
    /// the same. `param` is the field's name.
    pub fn check_length(&self, text: &str, param: &str) -> Result<(), ApiError> {
        let n = text.len();
        let most = self.n_ctx.saturating_mul(self.longest_token).max(MAX_UNCLEAR_BYTES);
        if n <= most {
            return Ok(());
        }
        let message = format!(
            "{param}: a text of {n} bytes has no room in the context of {} tokens: shorten it, or start the server with a \
             larger context (-c)",
            self.n_ctx
        );
        Err(ApiError::field(param, message).with_code("context_length_exceeded"))
    }

    /// Size of the vocabulary.
    pub fn n_vocab(&self) -> usize {
        self.model.spec().n_vocab
    }

    /// Width of the embeddings.
    pub fn n_embd(&self) -> usize {
        let spec = self.model.spec();
        spec.output.dense.last().map_or(spec.n_embd, |last| last.n_out)
    }

    /// Refuses to make embeddings with a reranker, whose outputs are scores.
    pub fn check_embeds(&self) -> Result<(), ApiError> {
        if self.model.spec().output.pooling == Some(Pooling::Rank) {
            let message = "the model is a reranker, which makes no embeddings: use /v1/rerank";
            return Err(ApiError::unsupported_by_model(message));
        }
        Ok(())
    }

    /// How tokens are chosen where a request does not say.
    pub fn sampling(&self) -> SamplerOptions {
        self.model.sampling()
    }

    /// What ranks documents; an error where the model is no reranker.
    pub fn reranker(&self) -> Result<&Reranker, ApiError> {
        self.reranker.as_ref().map_err(ApiError::unsupported_by_model)
    }

    /// Context length of the training.
    pub fn n_ctx_train(&self) -> usize {
        self.model.spec().n_ctx_train
    }
}
