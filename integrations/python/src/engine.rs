//! The class `Engine`: a model on its device with its scheduler.
//!
//! Its methods take prompts as token ids, submit requests to the scheduler and wait with Python detached. `llm.py` wraps it.

use std::future::Future;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use metal_attention::sampling::{NumberOption, SamplerOptions};
use metal_attention::scheduler::{Client, Request, Scheduler, SubmitError};
use metal_attention::speculation::{Speculation, UnknownDrafter};
use metal_attention::tokenizer::EncodeOptions;
use metal_attention::{Device, EngineOptions, PicturePrompt, PromptBuilder, TokenLimits, Watch};
use metal_attention_chat::ChatTemplate;
use pyo3::prelude::*;
use pyo3::types::PyByteArray;

use crate::conversation::{AnswerReader, PyConversation, Rendering};
use crate::errors::{self, EngineError, ModelError, OptionError, PromptError};
use crate::grammar::PyGrammar;
use crate::load::{LoadOptions, LoadedModel};
use crate::params::{prediction, python_name, request};
use crate::picture::{PyPicture, PySpans};
use crate::processor::RaisedException;
use crate::text::{Completion, EventStream};
use crate::wait::Threads;

/// The number of requests of one call that are submitted at a time, as a multiple of the sequences that run at once.
const AHEAD: usize = 4;

/// A model on its device, and its scheduler.
#[pyclass(frozen, weakref, module = "metal_attention._engine")]
pub struct Engine {
    /// The model, its tokenizer and what is made of them.
    loaded: LoadedModel,
    /// The scheduler. `None`: the engine is closed.
    scheduler: Mutex<Option<Scheduler>>,
    /// The number of sequences that run at once.
    n_parallel: usize,
    /// The thread that runs callbacks.
    threads: Arc<Threads>,
    /// The process that loaded the model: its threads do not exist in forked processes.
    process: u32,
}

#[pymethods]
impl Engine {
    /// Loads a model. Ctrl-C ends the loading.
    #[new]
    #[pyo3(signature = (model, *, mmproj, image_min_tokens, image_max_tokens, device, n_ranks, n_ctx, n_parallel, n_threads, cache_type, exact, in_memory, drafter, draft_model, download))]
    fn new(
        py: Python<'_>,
        model: Option<String>,
        mmproj: Option<PathBuf>,
        image_min_tokens: Option<usize>,
        image_max_tokens: Option<usize>,
        device: &str,
        n_ranks: usize,
        n_ctx: Option<usize>,
        n_parallel: usize,
        n_threads: Option<usize>,
        cache_type: &str,
        exact: bool,
        in_memory: bool,
        drafter: &str,
        draft_model: Option<PathBuf>,
        download: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let device: Device = device.parse().map_err(|error| errors::of_model(&error))?;
        let cache_type = cache_type.parse().map_err(|why| OptionError::new_err(format!("cache_type: {why}")))?;
        let drafter = drafter.parse().map_err(|why: UnknownDrafter| OptionError::new_err(format!("drafter: {why}")))?;
        let speculation = Speculation { drafter, ..Default::default() };
        let watch = Watch::default();
        let engine = EngineOptions {
            device,
            n_ranks,
            n_ctx,
            n_threads,
            cache_type,
            exact,
            watch: watch.clone(),
            ..Default::default()
        };
        let picture_tokens = TokenLimits { min: image_min_tokens, max: image_max_tokens };
        let options = LoadOptions {
            model,
            mmproj,
            picture_tokens,
            in_memory,
            engine,
            n_parallel,
            speculation,
            draft_model,
            download,
        };
        let without_thread = |error| EngineError::new_err(format!("the system gave no thread: {error}"));
        let threads = Threads::start().map_err(without_thread)?;
        let (answer, loaded) = tokio::sync::oneshot::channel();
        let load = move || drop(answer.send(options.load()));
        std::thread::Builder::new().name("load".into()).spawn(load).map_err(without_thread)?;
        // After Ctrl-C the loading thread is cancelled but not waited for, because it may wait for a silent server.
        let loaded = threads.wait(py, loaded).inspect_err(|_| watch.cancel())?;
        let (loaded, scheduler) =
            loaded.map_err(|_| EngineError::new_err("a defect of the engine ended the loading of the model"))??;
        let scheduler = Mutex::new(Some(scheduler));
        Ok(Self { loaded, scheduler, n_parallel, threads: Arc::new(threads), process: std::process::id() })
    }

    #[getter]
    fn n_ctx(&self) -> usize {
        self.loaded.n_ctx
    }

    #[getter]
    fn n_vocab(&self) -> usize {
        self.loaded.model.spec().n_vocab
    }

    #[getter]
    fn n_embd(&self) -> usize {
        self.loaded.model.spec().n_embd
    }

    #[getter]
    fn n_parallel(&self) -> usize {
        self.n_parallel
    }

    #[getter]
    fn device(&self) -> &str {
        &self.loaded.device
    }

    #[getter]
    fn architecture(&self) -> &str {
        &self.loaded.model.spec().architecture
    }

    /// The id of the token that begins a text. `None`: the model has none.
    #[getter]
    fn bos_token_id(&self) -> Option<u32> {
        self.loaded.tokenizer.bos()
    }

    /// The id of the token that ends a text. `None`: the model has none.
    #[getter]
    fn eos_token_id(&self) -> Option<u32> {
        self.loaded.tokenizer.eos()
    }

    /// The id of the token for text that the vocabulary does not have. `None`: the model has none.
    #[getter]
    fn unk_token_id(&self) -> Option<u32> {
        self.loaded.tokenizer.unknown()
    }

    /// The model's chat template. `None`: it has none, or it cannot be used.
    #[getter]
    fn chat_template(&self) -> Option<&str> {
        let template = &self.loaded.template;
        (!template.is_fallback()).then(|| template.source())
    }

    /// The sampling options that the model's file recommends: a JSON object with the names of `SamplingParams`.
    fn recommended_sampling(&self) -> String {
        let metadata = self.loaded.model.gguf().metadata();
        let options = self.loaded.model.sampling();
        let has = |key: Option<&str>| key.is_some_and(|key| metadata.get(key).is_some());
        let mut recommended = serde_json::Map::new();
        for option in NumberOption::ALL.iter().filter(|option| has(option.metadata_key)) {
            let value = option.get(&options);
            let json = if option.is_count() {
                // A count that is too large for an i64 means all tokens, which is -1 in Python.
                value.to_string().parse::<i64>().unwrap_or(-1).into()
            } else {
                value.into()
            };
            recommended.insert(python_name(option).to_owned(), json);
        }
        if has(Some(SamplerOptions::SEQUENCE_KEY)) {
            let names: Vec<_> = options.order.iter().map(ToString::to_string).collect();
            recommended.insert("samplers".into(), names.into());
        }
        serde_json::Value::Object(recommended).to_string()
    }

    fn tokenize(&self, py: Python<'_>, text: &str, add_special: bool, parse_special: bool) -> Vec<u32> {
        py.detach(|| self.loaded.tokenizer.encode(text, EncodeOptions { add_special, parse_special }))
    }

    fn detokenize(&self, ids: Vec<u32>, special: bool) -> PyResult<String> {
        let n_vocab = self.loaded.tokenizer.n_vocab();
        match ids.iter().find(|&&id| id as usize >= n_vocab) {
            Some(id) => {
                Err(PromptError::new_err(format!("token id {id} is outside the vocabulary of {n_vocab} tokens")))
            }
            None => Ok(self.loaded.tokenizer.decode(&ids, special)),
        }
    }

    /// The text of a token in the middle of other text; control tokens have their names.
    fn token_text(&self, id: u32) -> String {
        let mut decoder = self.loaded.tokenizer.decoder().continuing().with_special();
        decoder.push(id) + &decoder.finish()
    }

    /// The name of a token in the vocabulary.
    fn id_to_token(&self, id: u32) -> Option<&str> {
        self.loaded.tokenizer.token_text(id)
    }

    /// The token with this name in the vocabulary.
    fn token_to_id(&self, token: &str) -> Option<u32> {
        self.loaded.tokenizer.token_id(token)
    }

    /// Whether a token is a control token, which has no text.
    fn is_control(&self, id: u32) -> bool {
        self.loaded.tokenizer.is_control(id)
    }

    /// Encodes the picture of a file. Ctrl-C takes effect afterwards.
    fn encode_picture(&self, py: Python<'_>, file: &[u8]) -> PyResult<PyPicture> {
        let Some(encoder) = &self.loaded.encoder else {
            return Err(ModelError::new_err(
                "there is no encoder for pictures: give the model's mmproj file, which is in its repository, as LLM(mmproj=...)",
            ));
        };
        py.detach(|| encoder.encode(file, &self.loaded.tokenizer))
    }

    /// The token ids of a text with pictures, and their rows. A picture stands where the text has `<image>`, otherwise before the
    /// text.
    fn picture_prompt(&self, text: &str, pictures: Vec<Bound<'_, PyPicture>>) -> PyResult<(Vec<u32>, PySpans)> {
        let mut builder = PromptBuilder::new(&self.loaded.tokenizer);
        let pictures: Vec<_> = pictures.iter().map(|picture| &*picture.get().0).collect();
        builder.text_with_pictures(text, false, &pictures).map_err(|error| errors::of_model(&error))?;
        let (ids, spans) = builder.finish();
        Ok((ids, PySpans(spans.into())))
    }

    /// Renders a conversation; messages, tools and variables are JSON. `chat_template` replaces the model's. `pictures` are those of
    /// the messages' parts of the type `image_url`, in their order.
    fn conversation(
        &self,
        py: Python<'_>,
        messages: &str,
        tools: &str,
        variables: &str,
        add_generation_prompt: bool,
        continue_final_message: bool,
        chat_template: Option<&str>,
        pictures: Vec<Bound<'_, PyPicture>>,
    ) -> PyResult<PyConversation> {
        let tokenizer = &self.loaded.tokenizer;
        let pictures: Vec<&PicturePrompt> = pictures.iter().map(|picture| &*picture.get().0).collect();
        let pictures = &pictures[..];
        py.detach(|| {
            let template = match chat_template {
                None => self.loaded.template.clone(),
                Some(source) => ChatTemplate::with_tokenizer(source, Some(Arc::clone(tokenizer)))
                    .map_err(|error| errors::of_template(&error))?,
            };
            let rendering =
                Rendering { messages, tools, variables, add_generation_prompt, continue_final_message, pictures };
            PyConversation::render(template, tokenizer, rendering)
        })
    }

    /// Compiles the grammar that `fields` describe, a JSON object of fields as in requests to the server, for text or for an answer to
    /// `conversation`. `None`: the fields describe no form.
    fn grammar(
        &self,
        py: Python<'_>,
        fields: &str,
        conversation: Option<&Bound<'_, PyConversation>>,
    ) -> PyResult<Option<PyGrammar>> {
        let conversation = conversation.map(|chat| chat.get().inner());
        py.detach(|| PyGrammar::make(&self.loaded.grammars, fields, conversation))
    }

    /// Compiles the grammar of an answer that calls a function; with `parallel`, one or more.
    fn call_grammar(
        &self,
        py: Python<'_>,
        conversation: &Bound<'_, PyConversation>,
        parallel: bool,
    ) -> PyResult<PyGrammar> {
        let conversation = conversation.get().inner();
        py.detach(|| PyGrammar::of_calls(&self.loaded.grammars, conversation, parallel))
    }

    /// The prompt of a reranker for a query and a document, as token ids.
    fn rerank_prompt(&self, query: &str, document: &str) -> PyResult<Vec<u32>> {
        match &self.loaded.reranker {
            Ok(reranker) => Ok(reranker.encode(query, document)),
            Err(error) => Err(errors::of_model(error)),
        }
    }

    /// Generates complete texts. `done` is called with the index of each that is finished.
    fn generate(
        &self,
        py: Python<'_>,
        texts: Vec<SequenceArgs<'_>>,
        done: Option<Py<PyAny>>,
    ) -> PyResult<Vec<Completion>> {
        let texts = texts.into_iter().map(|text| self.prepare(text)).collect::<PyResult<Vec<_>>>()?;
        self.gather(py, texts, done.as_ref(), |scheduler, PreparedRequest { request, raised, answer }| {
            // The text is read only when it is complete.
            let events = scheduler.submit(Request { buffer_events: true, ..request })?;
            Ok(async move { Completion::of_events(events, answer, &raised).await })
        })
    }

    /// Generates a text, token by token.
    fn stream(&self, text: SequenceArgs<'_>) -> PyResult<EventStream> {
        let PreparedRequest { request, raised, answer } = self.prepare(text)?;
        let events = self.scheduler()?.submit(request).map_err(|error| errors::of_submit(&error))?;
        Ok(EventStream::new(Arc::clone(&self.threads), events, answer, raised))
    }

    /// Computes the embedding of each list of token ids.
    fn embed(&self, py: Python<'_>, texts: Vec<Vec<u32>>, done: Option<Py<PyAny>>) -> PyResult<Vec<Vec<f32>>> {
        self.gather(py, texts, done.as_ref(), |scheduler, ids| {
            let vector = scheduler.embed(Client::Unknown, ids)?;
            Ok(async move { vector.await.map_err(|why| errors::of_request(&why)) })
        })
    }

    /// The scores of prompts of [`rerank_prompt`](Self::rerank_prompt).
    fn rerank(&self, py: Python<'_>, texts: Vec<Vec<u32>>, done: Option<Py<PyAny>>) -> PyResult<Vec<f32>> {
        let reranker = self.loaded.reranker.as_ref().map_err(errors::of_model)?;
        let outputs = self.embed(py, texts, done)?;
        Ok(outputs.iter().map(|outputs| reranker.score(outputs)).collect())
    }

    /// The logits after each token from index `start` on, as the bytes of `[n_tokens, n_vocab]` floats.
    fn logits<'py>(&self, py: Python<'py>, ids: Vec<u32>, start: usize) -> PyResult<Bound<'py, PyByteArray>> {
        let logits = self.scheduler()?.logits(Client::Unknown, ids, start);
        let logits = self.threads.wait(py, logits.map_err(|error| errors::of_submit(&error))?)?;
        let logits = logits.map_err(|why| errors::of_request(&why))?;
        Ok(PyByteArray::new(py, bytemuck::cast_slice(&logits)))
    }

    /// Cancels all requests and frees the memory of the KV cache and the weights. When it returns, no thread of the engine calls
    /// Python any more. Does nothing in a forked process.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        if self.process != std::process::id() {
            return Ok(());
        }
        let scheduler = self.scheduler.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(scheduler) = scheduler {
            self.threads.wait(py, scheduler.shut_down(Duration::ZERO))?;
        }
        self.threads.wait_for_callers(py)
    }
}

/// The arguments of one sequence: the token ids of the prompt, the rows of its pictures, its parameters, its index among the texts of
/// the prompt, its grammar, and the conversation that it answers.
type SequenceArgs<'py> = (
    Vec<u32>,
    Option<Bound<'py, PySpans>>,
    Bound<'py, PyAny>,
    u64,
    Option<Bound<'py, PyGrammar>>,
    Option<Bound<'py, PyConversation>>,
);

/// A request for the scheduler, with what is needed to read its result.
struct PreparedRequest {
    /// The request.
    request: Request,
    /// The exception of its logits processor.
    raised: RaisedException,
    /// The reader of the answer. `None`: the text answers no conversation.
    answer: Option<AnswerReader>,
}

impl Engine {
    /// Converts the arguments of a sequence to a request.
    fn prepare(
        &self,
        (ids, spans, params, index, grammar, conversation): SequenceArgs<'_>,
    ) -> PyResult<PreparedRequest> {
        let spans = spans.map(|spans| Arc::clone(&spans.get().0)).unwrap_or_default();
        let (request, raised) = request(ids, spans, &params, index, self.n_vocab())?;
        let prediction = prediction(&params)?;
        let prediction = prediction.map(|text| self.loaded.tokenizer.encode(&text, EncodeOptions::default()).into());
        let has_form = grammar.as_ref().is_some_and(|grammar| grammar.get().is_form());
        let chat = conversation.as_ref().map(|chat| chat.get().inner());
        let constraint = grammar.as_ref().and_then(|grammar| grammar.get().constraint(chat));
        let answer = conversation.as_ref().map(|chat| chat.get().answer(has_form));
        let request = Request { constraint, prediction: prediction.unwrap_or_default(), ..request };
        Ok(PreparedRequest { request, raised, answer })
    }

    /// The scheduler. An error if the engine is closed, or in a forked process.
    fn scheduler(&self) -> PyResult<Scheduler> {
        if self.process != std::process::id() {
            return Err(EngineError::new_err(
                "the model was loaded before this process was forked off, and its threads are not in this one: load it here, \
                 or start processes by \"spawn\"",
            ));
        }
        let scheduler = self.scheduler.lock().unwrap_or_else(PoisonError::into_inner);
        scheduler.clone().ok_or_else(|| EngineError::new_err("the model was closed"))
    }

    /// Submits items, at most [`AHEAD`] times as many as run at once, and waits for all results, in the order of the items. `done` is
    /// called with the index of each that is finished. The first error ends the call and cancels the other items.
    fn gather<Item, Waiting, T>(
        &self,
        py: Python<'_>,
        items: Vec<Item>,
        done: Option<&Py<PyAny>>,
        submit: impl Fn(&Scheduler, Item) -> Result<Waiting, SubmitError>,
    ) -> PyResult<Vec<T>>
    where
        Waiting: Future<Output = PyResult<T>> + Send,
        T: Send,
    {
        let scheduler = self.scheduler()?;
        let mut outcomes: Vec<Option<T>> = items.iter().map(|_| None).collect();
        let mut items = items.into_iter().enumerate();
        let mut waiting = FuturesUnordered::new();
        loop {
            let room = self.n_parallel.saturating_mul(AHEAD) - waiting.len();
            for (i, item) in items.by_ref().take(room) {
                let outcome = submit(&scheduler, item).map_err(|error| errors::of_submit(&error))?;
                waiting.push(async move { (i, outcome.await) });
            }
            let Some((i, outcome)) = self.threads.wait(py, waiting.next())? else { break };
            // If all results arrive quickly, no wait checks for signals.
            py.check_signals()?;
            outcomes[i] = Some(outcome?);
            if let Some(done) = done {
                done.call1(py, (i,))?;
            }
        }
        Ok(outcomes.into_iter().flatten().collect())
    }
}
