//! A model that runs, and its queue.

use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use metal_attention::sampling::{NumberOption, SamplerOptions};
use metal_attention::scheduler::{Client, Request, Scheduler, SubmitError};
use metal_attention::tokenizer::EncodeOptions;
use metal_attention::{Device, EngineOptions, Watch};
use metal_attention_chat::ChatTemplate;
use pyo3::prelude::*;
use pyo3::types::PyByteArray;

use crate::conversation::{Answer, PyConversation, Rendering};
use crate::errors::{self, EngineError, OptionError, PromptError};
use crate::grammar::PyGrammar;
use crate::load::{Loaded, Wanted};
use crate::params::{python_name, request};
use crate::processor::Raised;
use crate::text::{Completion, EventStream};
use crate::wait::Threads;

/// Requests of a call that wait while others run: so many times the texts that run at once.
const AHEAD: usize = 4;

/// A model that runs, and its queue.
#[pyclass(frozen, weakref, module = "metal_attention._engine")]
pub struct Engine {
    loaded: Loaded,
    /// The queue until it is closed.
    scheduler: Mutex<Option<Scheduler>>,
    n_parallel: usize,
    threads: Arc<Threads>,
    /// The process whose threads run the model.
    process: u32,
}

#[pymethods]
impl Engine {
    /// Loads a model. Ctrl-C ends it.
    #[new]
    #[pyo3(signature = (model, *, device, n_cards, n_ctx, n_parallel, n_threads, cache_type, exact, in_memory, download))]
    fn new(
        py: Python<'_>,
        model: Option<String>,
        device: &str,
        n_cards: usize,
        n_ctx: Option<usize>,
        n_parallel: usize,
        n_threads: Option<usize>,
        cache_type: &str,
        exact: bool,
        in_memory: bool,
        download: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let device: Device = device.parse().map_err(|error| errors::of_model(&error))?;
        let cache_type = cache_type.parse().map_err(|why| OptionError::new_err(format!("cache_type: {why}")))?;
        let watch = Watch::default();
        let engine = EngineOptions {
            device,
            n_ranks: n_cards,
            n_ctx,
            n_threads,
            cache_type,
            exact,
            watch: watch.clone(),
            ..Default::default()
        };
        let wanted = Wanted { model, in_memory, engine, n_parallel, download };
        let without_thread = |error| EngineError::new_err(format!("the system gave no thread: {error}"));
        let threads = Threads::start().map_err(without_thread)?;
        let (answer, loaded) = tokio::sync::oneshot::channel();
        let load = move || drop(answer.send(wanted.load()));
        std::thread::Builder::new().name("load".into()).spawn(load).map_err(without_thread)?;
        // It may be waiting for a silent server: it is told to end, and not waited for.
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

    /// The token that begins a text, where the model has one.
    #[getter]
    fn bos_token_id(&self) -> Option<u32> {
        self.loaded.tokenizer.bos()
    }

    /// The token that ends a text, where the model has one.
    #[getter]
    fn eos_token_id(&self) -> Option<u32> {
        self.loaded.tokenizer.eos()
    }

    /// The token in the place of what the vocabulary has not, where the model has one.
    #[getter]
    fn unk_token_id(&self) -> Option<u32> {
        self.loaded.tokenizer.unknown()
    }

    /// The chat template that the model brought, where that works.
    #[getter]
    fn chat_template(&self) -> Option<&str> {
        let template = &self.loaded.template;
        (!template.is_fallback()).then(|| template.source())
    }

    /// What the model's file recommends for sampling, as a JSON object with the names of `SamplingParams`.
    fn recommended_sampling(&self) -> String {
        let metadata = self.loaded.model.gguf().metadata();
        let options = self.loaded.model.sampling();
        let has = |key: Option<&str>| key.is_some_and(|key| metadata.get(key).is_some());
        let mut recommended = serde_json::Map::new();
        for option in NumberOption::ALL.iter().filter(|option| has(option.metadata_key)) {
            let value = option.get(&options);
            let json = if option.is_count() {
                // What is too large for a number of tokens is all of them.
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

    /// The text of one token within others.
    fn token_text(&self, id: u32) -> String {
        let mut decoder = self.loaded.tokenizer.decoder().continuing().with_special();
        decoder.push(id) + &decoder.finish()
    }

    /// A token as the vocabulary spells it.
    fn id_to_token(&self, id: u32) -> Option<&str> {
        self.loaded.tokenizer.token_text(id)
    }

    /// The token that the vocabulary spells so.
    fn token_to_id(&self, token: &str) -> Option<u32> {
        self.loaded.tokenizer.token_id(token)
    }

    /// Whether a token is a control token, which has no text.
    fn is_control(&self, id: u32) -> bool {
        self.loaded.tokenizer.is_control(id)
    }

    /// A conversation as a prompt; messages, tools and variables in JSON. `chat_template`: another one than the model's.
    fn conversation(
        &self,
        py: Python<'_>,
        messages: &str,
        tools: &str,
        variables: &str,
        add_generation_prompt: bool,
        continue_final_message: bool,
        chat_template: Option<&str>,
    ) -> PyResult<PyConversation> {
        let tokenizer = &self.loaded.tokenizer;
        py.detach(|| {
            let template = match chat_template {
                None => self.loaded.template.clone(),
                Some(source) => ChatTemplate::with_tokenizer(source, Some(Arc::clone(tokenizer)))
                    .map_err(|error| errors::of_template(&error))?,
            };
            let rendering = Rendering { messages, tools, variables, add_generation_prompt, continue_final_message };
            PyConversation::render(template, tokenizer, rendering)
        })
    }

    /// The grammar of texts, or of answers to a conversation, that `fields` ask for: a JSON object of fields as in requests to the
    /// server. None: they ask for nothing.
    fn grammar(
        &self,
        py: Python<'_>,
        fields: &str,
        conversation: Option<&Bound<'_, PyConversation>>,
    ) -> PyResult<Option<PyGrammar>> {
        let conversation = conversation.map(|chat| chat.get().inner());
        py.detach(|| PyGrammar::make(&self.loaded.grammars, fields, conversation))
    }

    /// The grammar of an answer that calls a function; `parallel`: or several.
    fn call_grammar(
        &self,
        py: Python<'_>,
        conversation: &Bound<'_, PyConversation>,
        parallel: bool,
    ) -> PyResult<PyGrammar> {
        let conversation = conversation.get().inner();
        py.detach(|| PyGrammar::of_calls(&self.loaded.grammars, conversation, parallel))
    }

    /// The ids of a query and a document as one text.
    fn rerank_prompt(&self, query: &str, document: &str) -> PyResult<Vec<u32>> {
        match &self.loaded.reranker {
            Ok(reranker) => Ok(reranker.encode(query, document)),
            Err(error) => Err(errors::of_model(error)),
        }
    }

    /// Continues prompts.
    fn generate(&self, py: Python<'_>, texts: Vec<Text<'_>>, done: Option<Py<PyAny>>) -> PyResult<Vec<Completion>> {
        let texts = texts.into_iter().map(|text| self.asked(text)).collect::<PyResult<Vec<_>>>()?;
        self.gather(py, texts, done.as_ref(), |scheduler, Asked { request, raised, answer }| {
            // Nobody looks at the text before it is finished.
            let events = scheduler.submit(Request { buffer_events: true, ..request })?;
            Ok(async move { Completion::of_events(events, answer, &raised).await })
        })
    }

    /// Continues a prompt, piece by piece.
    fn stream(&self, text: Text<'_>) -> PyResult<EventStream> {
        let Asked { request, raised, answer } = self.asked(text)?;
        let events = self.scheduler()?.submit(request).map_err(|error| errors::of_submit(&error))?;
        Ok(EventStream::new(Arc::clone(&self.threads), events, answer, raised))
    }

    /// Makes a vector of each text.
    fn embed(&self, py: Python<'_>, texts: Vec<Vec<u32>>, done: Option<Py<PyAny>>) -> PyResult<Vec<Vec<f32>>> {
        self.gather(py, texts, done.as_ref(), |scheduler, ids| {
            let vector = scheduler.embed(Client::Unknown, ids)?;
            Ok(async move { vector.await.map_err(|why| errors::of_request(&why)) })
        })
    }

    /// The scores of texts that [`rerank_prompt`](Self::rerank_prompt) made.
    fn rerank(&self, py: Python<'_>, texts: Vec<Vec<u32>>, done: Option<Py<PyAny>>) -> PyResult<Vec<f32>> {
        let reranker = self.loaded.reranker.as_ref().map_err(errors::of_model)?;
        let outputs = self.embed(py, texts, done)?;
        Ok(outputs.iter().map(|outputs| reranker.score(outputs)).collect())
    }

    /// The bytes of the logits after each token from `start` on, `[n_tokens, n_vocab]`.
    fn logits<'py>(&self, py: Python<'py>, ids: Vec<u32>, start: usize) -> PyResult<Bound<'py, PyByteArray>> {
        let logits = self.scheduler()?.logits(Client::Unknown, ids, start);
        let logits = self.threads.wait(py, logits.map_err(|error| errors::of_submit(&error))?)?;
        let logits = logits.map_err(|why| errors::of_request(&why))?;
        Ok(PyByteArray::new(py, bytemuck::cast_slice(&logits)))
    }

    /// Cancels what runs, and gives the memory of the KV cache and the engine's weights back. When this returns no thread of
    /// the engine calls Python any more.
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

/// What a text goes on with: the ids of its prompt, its parameters, its number among the texts of the prompt, the form that it
/// must have, and the conversation that it answers.
type Text<'py> = (Vec<u32>, Bound<'py, PyAny>, u64, Option<Bound<'py, PyGrammar>>, Option<Bound<'py, PyConversation>>);

/// A text that is to be generated.
struct Asked {
    request: Request,
    raised: Raised,
    answer: Option<Answer>,
}

impl Engine {
    fn asked(&self, (ids, params, index, grammar, conversation): Text<'_>) -> PyResult<Asked> {
        let (request, raised) = request(ids, &params, index, self.n_vocab())?;
        let has_form = grammar.as_ref().is_some_and(|grammar| grammar.get().is_form());
        let chat = conversation.as_ref().map(|chat| chat.get().inner());
        let constraint = grammar.as_ref().and_then(|grammar| grammar.get().constraint(chat));
        let answer = conversation.as_ref().map(|chat| chat.get().answer(has_form));
        Ok(Asked { request: Request { constraint, ..request }, raised, answer })
    }

    /// The queue; an error where it is closed, or in a process that was forked off.
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

    /// Submits items, some more than run at a time, and waits for all outcomes; tells `done` the number of each that is
    /// finished. The first error ends it, and cancels the others.
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
            // Where all outcomes come quickly no wait looks.
            py.check_signals()?;
            outcomes[i] = Some(outcome?);
            if let Some(done) = done {
                done.call1(py, (i,))?;
            }
        }
        Ok(outcomes.into_iter().flatten().collect())
    }
}
