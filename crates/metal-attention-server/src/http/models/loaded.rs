//! A loaded model: its scheduler, tokenizer, chat template and grammars.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use metal_attention::gguf::Tensor;
use metal_attention::sampling::SamplerOptions;
use metal_attention::scheduler::{Replicas, SchedulerOptions, StartError};
use metal_attention::speculation::SpeculativePass;
use metal_attention::tokenizer::Tokenizer;
use metal_attention::{BatchToken, Error, ForwardError, ForwardPass, Model, PictureEncoder, Pooling, Reranker};
use metal_attention_chat::ChatTemplate;
use metal_attention_grammar::GrammarCompiler;

use crate::http::ApiError;
use crate::http::job::generation::no_such_token;
use crate::http::limits::MAX_UNCLEAR_BYTES;
use crate::http::pictures::{PictureMetrics, PictureService};

/// A model that is ready to answer requests.
pub struct LoadedModel {
    /// The schedulers of its replicas, which run the requests.
    pub scheduler: Replicas,
    /// Its tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// Its chat template.
    pub template: ChatTemplate,
    /// Compiles grammars for its tokenizer.
    pub grammars: GrammarCompiler,
    /// Maximum tokens of a sequence, its prompt included.
    pub n_ctx: usize,
    /// Bytes of the longest token.
    longest_token: usize,
    /// Ranks documents; else the reason why the model is no reranker.
    reranker: Result<Reranker, String>,
    /// Encodes pictures; `None`: the model has no encoder.
    pictures: Option<PictureService>,
    /// The file and the specification.
    model: Model,
}

/// The reason why a model that was opened cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file has no usable tokenizer.
    #[error(transparent)]
    Model(#[from] Error),
    /// The device failed at the first token.
    #[error("the model is loaded, but cannot evaluate a first token: {0}")]
    FirstToken(ForwardError),
    /// The device computed no finite numbers.
    #[error(
        "the model is loaded, but a first token gives no number: the file or the device is damaged; metal-attention compare \
         tells which layer it comes from"
    )]
    NoNumbers,
    /// The scheduler did not start.
    #[error(transparent)]
    Start(#[from] StartError),
}

/// Evaluates one token and discards it, so that a failing device is detected before requests arrive.
fn evaluate_first(pass: &mut dyn ForwardPass) -> Result<(), LoadError> {
    let batch = [BatchToken { id: 0, seq: 0, pos: 0, output: true }];
    let is_number = if pass.spec().output.head.is_some() {
        pass.forward(&batch).map_err(LoadError::FirstToken)?.row(0).iter().any(|logit| logit.is_finite())
    } else {
        pass.forward_hidden(&batch).map_err(LoadError::FirstToken)?.iter().all(|value| value.is_finite())
    };
    pass.rewind(0, 0);
    if is_number { Ok(()) } else { Err(LoadError::NoNumbers) }
}

impl LoadedModel {
    /// Starts a scheduler over `pass`, a forward pass of `model`, after it has evaluated a first token.
    pub fn start(model: Model, pass: Box<dyn ForwardPass>, options: &SchedulerOptions) -> Result<Self, LoadError> {
        Self::start_replicas(model, vec![pass.into()], options)
    }

    /// Starts a scheduler over each of `passes`, which are replicas with the same options.
    pub fn start_replicas(
        model: Model,
        mut passes: Vec<SpeculativePass>,
        options: &SchedulerOptions,
    ) -> Result<Self, LoadError> {
        passes.iter_mut().try_for_each(|pass| evaluate_first(&mut *pass.pass))?;
        let n_ctx = passes.iter().map(|pass| pass.pass.n_ctx()).min().unwrap_or(0);
        let scheduler = Replicas::start(passes, &Arc::new(model.clone()), options)?;
        let tokenizer = model.tokenizer()?;
        let grammars = GrammarCompiler::new(&tokenizer);
        let template = ChatTemplate::for_model(model.gguf().metadata(), Arc::clone(&tokenizer));
        let ids = 0..tokenizer.n_vocab() as u32;
        let longest_token = ids.map(|id| tokenizer.token_bytes(id).len()).max().unwrap_or(0);
        let reranker = Reranker::new(&model).map_err(|error| error.to_string());
        Ok(Self { scheduler, tokenizer, template, grammars, n_ctx, longest_token, reranker, pictures: None, model })
    }

    /// Replaces the chat template of the model's file.
    #[must_use]
    pub fn with_chat_template(self, template: ChatTemplate) -> Self {
        Self { template, ..self }
    }

    /// Lets the model see pictures. `cache_bytes`: bytes of the rows of the last pictures that are kept.
    ///
    /// # Errors
    ///
    /// A thread that the system refuses.
    pub fn with_pictures(self, encoder: PictureEncoder, cache_bytes: usize) -> std::io::Result<Self> {
        let service = PictureService::start(encoder, Arc::clone(&self.tokenizer), cache_bytes)?;
        Ok(Self { pictures: Some(service), ..self })
    }

    /// What encodes pictures; an error if the model sees none.
    pub fn picture_service(&self) -> Result<&PictureService, ApiError> {
        self.pictures.as_ref().ok_or_else(|| {
            let message = "this model sees no pictures: it has no mmproj file; put the model's mmproj file beside it, which \
                           metal-attention pull brings, or use another model";
            ApiError::unsupported_by_model(message)
        })
    }

    /// The work of the picture encoder so far; `None`: there is none.
    pub fn picture_metrics(&self) -> Option<PictureMetrics> {
        self.pictures.as_ref().map(PictureService::metrics)
    }

    /// Refuses a text whose length alone shows that it exceeds the context: to tokenise it would take long. `param`:
    /// the field's name, for errors.
    pub fn check_length(&self, text: &str, param: &str) -> Result<(), ApiError> {
        let n = text.len();
        let max = self.n_ctx.saturating_mul(self.longest_token).max(MAX_UNCLEAR_BYTES);
        if n <= max {
            return Ok(());
        }
        let message = format!(
            "{param}: a text of {n} bytes has no room in the context of {} tokens: shorten it, or start the server with a \
             larger context (-c)",
            self.n_ctx
        );
        Err(ApiError::field(param, message).with_code("context_length_exceeded"))
    }

    /// The model's file and specification.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Refuses token ids outside the vocabulary. `param`: the field's name, for errors.
    pub fn check_ids(&self, ids: &[u32], param: &str) -> Result<(), ApiError> {
        let n_vocab = self.n_vocab();
        let unknown = ids.iter().find(|&&id| id as usize >= n_vocab);
        unknown.map_or(Ok(()), |id| Err(no_such_token(param, id, n_vocab)))
    }

    /// Size of the vocabulary.
    pub fn n_vocab(&self) -> usize {
        self.model.spec().n_vocab
    }

    /// The width of the embeddings.
    pub fn n_embd(&self) -> usize {
        let spec = self.model.spec();
        spec.output.pooled_projections.last().map_or(spec.n_embd, |last| last.n_out)
    }

    /// Refuses to compute embeddings with a reranker, whose outputs are scores.
    pub fn check_embeds(&self) -> Result<(), ApiError> {
        if self.model.spec().output.pooling == Some(Pooling::Classifier) {
            let message = "the model is a reranker, which makes no embeddings: use /v1/rerank";
            return Err(ApiError::unsupported_by_model(message));
        }
        Ok(())
    }

    /// The sampling options that the model's file recommends.
    pub fn sampling(&self) -> SamplerOptions {
        self.model.sampling()
    }

    /// The reranker; an error if the model is none.
    pub fn reranker(&self) -> Result<&Reranker, ApiError> {
        self.reranker.as_ref().map_err(ApiError::unsupported_by_model)
    }

    /// The model's file, or the first of several; `None`: the model is built in.
    pub fn path(&self) -> Option<&Path> {
        self.model.gguf().paths().first().map(PathBuf::as_path)
    }

    /// The number of values in all tensors of the file.
    pub fn n_params(&self) -> usize {
        self.model.gguf().tensors().iter().map(Tensor::n_elements).sum()
    }

    /// Bytes of all tensors of the file.
    pub fn tensor_bytes(&self) -> u64 {
        self.model.gguf().tensor_bytes()
    }

    /// The context length of the training.
    pub fn n_ctx_train(&self) -> usize {
        self.model.spec().n_ctx_train
    }
}
