//! Helpers of the scheduler's tests: engines, requests, and a forward pass that tests can stop or make fail.
#![allow(dead_code, reason = "each test file uses its part")]

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use metal_attention::gguf::{GgufFile, GgufWriter, Metadata, Tensor, TensorDecl};
use metal_attention::sampling::SamplerOptions;
use metal_attention::scheduler::{
    Event, Events, FinishReason, Request, RequestError, Scheduler, SchedulerOptions, TokenLogprobs, Usage,
};
use metal_attention::tokenizer::EncodeOptions;
use metal_attention::{
    BUILT_IN_MODEL, BatchToken, CpuExecutor, CpuOptions, DEFAULT_UBATCH, Device, EngineOptions, ForwardError,
    ForwardPass, GenerateOptions, Generator, HookedExecutor, Hooks, Model, ModelOptions, NullExecutor, Session,
    SessionOptions, Step, StepLimits, Watch,
};

/// Options of a CPU engine. The context is small enough for an unoptimised build; with one thread a sequence's results do
/// not depend on which sequences share its batch.
pub fn engine() -> EngineOptions {
    EngineOptions { device: Device::Cpu, n_ctx: Some(256), n_threads: Some(1), ..Default::default() }
}

/// Eight sequences, with memory for the sliding windows or the recurrent states of two.
pub fn few_windows() -> EngineOptions {
    EngineOptions { n_seq: 8, n_windows: Some(2), n_ubatch: Some(16), state_cache: 0, ..engine() }
}

/// Starts a scheduler with a forward pass of `engine`.
pub fn start(model: &Model, engine: &EngineOptions, options: SchedulerOptions) -> Scheduler {
    Scheduler::start(model.forward_pass(engine).unwrap(), Arc::new(model.clone()), options).unwrap()
}

/// [`start`], with the gate of the scheduler's forward pass. While it is closed, requests arrive and no step ends.
pub fn start_with_gate(model: &Model, engine: &EngineOptions, options: SchedulerOptions) -> (Scheduler, Arc<Gate>) {
    let controls = Controls::default();
    let pass = controls.pass(model, engine);
    (Scheduler::start(pass, Arc::new(model.clone()), options).unwrap(), controls.gate)
}

/// A scheduler for the built-in model with `n` slots.
pub fn stories(n: usize) -> (Model, Scheduler) {
    stories_on(n, start)
}

/// A scheduler for the built-in model with `n` slots, which `start` starts.
fn stories_on(n: usize, start: fn(&Model, &EngineOptions, SchedulerOptions) -> Scheduler) -> (Model, Scheduler) {
    let model = Model::built_in().unwrap();
    let options = SchedulerOptions { n_parallel: n, ..Default::default() };
    let scheduler = start(&model, &EngineOptions { n_seq: n, ..engine() }, options);
    (model, scheduler)
}

/// The token ids of `text`, after the model's special tokens for the beginning.
pub fn encode(model: &Model, text: &str) -> Vec<u32> {
    model.tokenizer().unwrap().encode(text, EncodeOptions { add_special: true, parse_special: false })
}

/// A request for a greedy continuation of at most `n` tokens.
pub fn greedy(prompt: Vec<u32>, n: usize) -> Request {
    Request { prompt: prompt.into(), max_tokens: Some(n), sampling: SamplerOptions::greedy(), ..Default::default() }
}

/// The events of one request, collected.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Answer {
    /// The generated tokens.
    pub ids: Vec<u32>,
    /// Their text.
    pub text: String,
    /// Log probabilities of the generated tokens; empty unless requested.
    pub logprobs: Vec<TokenLogprobs>,
    /// Log probabilities of the prompt's tokens after the first; `None` unless requested.
    pub prompt_logprobs: Option<Vec<TokenLogprobs>>,
    /// `None` if the request failed.
    pub reason: Option<FinishReason>,
    /// The token that ended the sequence, which is not in `ids`.
    pub end_token: Option<u32>,
    pub usage: Usage,
    /// `None` unless the request failed.
    pub error: Option<RequestError>,
}

/// Receives events until the channel closes. Checks that they come in a valid order.
pub fn read(mut events: Events) -> Answer {
    let mut answer = Answer::default();
    while let Some(event) = events.blocking_recv() {
        assert!(answer.reason.is_none() && answer.error.is_none(), "nothing follows the end");
        match event {
            Event::Prompt(logprobs) => {
                assert!(answer.ids.is_empty() && answer.prompt_logprobs.is_none(), "the prompt comes first, once");
                answer.prompt_logprobs = Some(logprobs);
            }
            Event::Token { id, text, logprobs } => {
                answer.ids.push(id);
                answer.text += &text;
                answer.logprobs.extend(logprobs);
            }
            Event::Done { reason, text, end_token, usage, .. } => {
                answer.reason = Some(reason);
                answer.end_token = end_token;
                answer.text += &text;
                answer.usage = usage;
            }
            Event::Failed(why) => answer.error = Some(why),
        }
    }
    answer
}

/// The built-in model with a sliding window of `window` tokens in all layers.
pub fn windowed(window: u32) -> Model {
    with_metadata(|metadata| metadata.set("llama.attention.sliding_window", window))
}

/// The built-in model with changed metadata.
pub fn with_metadata(change: impl FnOnce(&mut Metadata)) -> Model {
    let file = GgufFile::from_bytes(BUILT_IN_MODEL).unwrap();
    let mut metadata = file.metadata().clone();
    change(&mut metadata);
    let decl = |t: &Tensor| TensorDecl { ty: t.ty(), name: t.name().to_owned(), shape: t.shape().to_vec() };
    let decls: Vec<_> = file.tensors().iter().map(decl).collect();
    let mut writer = GgufWriter::new(Vec::new(), 3, &metadata, &decls).unwrap();
    file.tensors().iter().for_each(|t| writer.write(t.bytes()).unwrap());
    let file = GgufFile::from_bytes(&writer.finish().unwrap()).unwrap();
    Model::from_gguf(file, &ModelOptions::default()).unwrap()
}

/// The log probability of each token of `ids` after the first, computed from the logits of the whole sequence.
pub fn log_probabilities(model: &Model, ids: &[u32]) -> Vec<f32> {
    let mut pass = model.forward_pass(&engine()).unwrap();
    let batch: Vec<_> = ids.iter().enumerate().map(|(pos, &id)| BatchToken { id, seq: 0, pos, output: true }).collect();
    let logits = pass.forward(&batch).unwrap();
    let log_probability = |i: usize| {
        let row = logits.row(i);
        let sum: f64 = row.iter().map(|&logit| f64::from(logit).exp()).sum();
        (f64::from(row[ids[i + 1] as usize]) - sum.ln()) as f32
    };
    (0..ids.len() - 1).map(log_probability).collect()
}

/// The reference for a request without a constraint: the ids and the text that a `Generator`, which evaluates one sequence
/// only, generates for it.
pub fn reference(model: &Model, request: &Request) -> (Vec<u32>, String) {
    reference_in(model, &engine(), request)
}

/// [`reference`] with an engine of these options.
pub fn reference_in(model: &Model, engine: &EngineOptions, request: &Request) -> (Vec<u32>, String) {
    reference_of(model, model.forward_pass(engine).unwrap(), request)
}

/// [`reference`] with this forward pass.
fn reference_of(model: &Model, pass: Box<dyn ForwardPass>, request: &Request) -> (Vec<u32>, String) {
    let mut generator = Generator::with_pass(model, pass, request.sampling.clone()).unwrap();
    generator.prompt_with_spans(&request.prompt, &request.spans, |_, _| ControlFlow::Continue(())).unwrap();
    let options = GenerateOptions {
        n_predict: request.max_tokens,
        stop: request.stop.to_vec(),
        stop_ids: request.stop_ids.to_vec(),
        ignore_eos: request.ignore_eos,
        min_tokens: request.min_tokens,
        ..Default::default()
    };
    let mut generation = generator.generate(options);
    let (mut ids, mut text) = (Vec::new(), String::new());
    for token in generation.by_ref() {
        let token = token.unwrap();
        ids.push(token.id);
        text += &token.text;
    }
    text += &generation.finish();
    (ids, text)
}

/// What a test controls of a forward pass. Clones control the same one.
#[derive(Clone, Default)]
pub struct Controls {
    /// The gate at which each step waits while a test keeps it closed.
    pub gate: Arc<Gate>,
    /// Whether the next step fails. The step resets it.
    pub fail: Arc<AtomicBool>,
    /// The number of the coming step that panics, from 1 on; 0: none does.
    pub panic_in: Arc<AtomicUsize>,
    /// The token ids of each step so far.
    pub log: Arc<Mutex<Vec<Vec<u32>>>>,
    /// The result of [`ForwardPass::max_top_k`].
    pub max_top_k: usize,
    /// Number of calls of [`ForwardPass::wake`].
    pub woken: Arc<AtomicUsize>,
}

/// A gate that stops the steps of [`Controls`] while a test keeps it closed. A new gate is open.
#[derive(Default)]
pub struct Gate {
    /// The number of steps that may still pass; `None` while the gate is open.
    permits: Mutex<Option<usize>>,
    changed: Condvar,
}

impl Gate {
    /// Closes the gate until the result is dropped.
    pub fn close(&self) -> ClosedGate<'_> {
        *self.permits.lock().unwrap() = Some(0);
        ClosedGate(self)
    }

    /// Waits until one step may pass.
    fn pass(&self) {
        let mut permits = self.changed.wait_while(self.permits.lock().unwrap(), |n| *n == Some(0)).unwrap();
        if let Some(n) = &mut *permits {
            *n -= 1;
            self.changed.notify_all();
        }
    }
}

/// Keeps a [`Gate`] closed until it is dropped.
pub struct ClosedGate<'a>(&'a Gate);

impl ClosedGate<'_> {
    /// Lets exactly one step pass, and returns once it has begun.
    ///
    /// # Panics
    ///
    /// If no step arrives within a minute.
    pub fn let_one_step_pass(&self) {
        let mut permits = self.0.permits.lock().unwrap();
        *permits = Some(1);
        self.0.changed.notify_all();
        let waits = |n: &mut Option<usize>| *n == Some(1);
        let waited = self.0.changed.wait_timeout_while(permits, Duration::from_secs(60), waits).unwrap();
        assert!(!waited.1.timed_out(), "no step arrived at the gate");
    }
}

impl Drop for ClosedGate<'_> {
    fn drop(&mut self) {
        *self.0.permits.lock().unwrap() = None;
        self.0.changed.notify_all();
    }
}

impl Controls {
    /// A controlled forward pass on the CPU.
    pub fn pass(&self, model: &Model, engine: &EngineOptions) -> Box<dyn ForwardPass> {
        let cpu = CpuOptions { n_threads: engine.n_threads.unwrap_or(1), ..Default::default() };
        let inner = CpuExecutor::new(&cpu, model.loaded(), &session_options(model, engine));
        Box::new(Session::new(HookedExecutor::new(inner.unwrap(), self.clone())))
    }

    /// A controlled forward pass of a [`NullExecutor`].
    pub fn null_pass(&self, model: &Model, engine: &EngineOptions) -> Box<dyn ForwardPass> {
        let inner = NullExecutor::new(model.spec().clone(), &session_options(model, engine), Watch::default());
        Box::new(Session::new(HookedExecutor::new(inner, self.clone())))
    }
}

/// The session of `model` with `engine`.
fn session_options(model: &Model, engine: &EngineOptions) -> SessionOptions {
    engine.session_options(engine.n_ctx_of(model), engine.n_ubatch.unwrap_or(DEFAULT_UBATCH))
}

impl Hooks for Controls {
    /// No step is submitted ahead, so that each one waits at the gate.
    fn limits(&self, limits: StepLimits) -> StepLimits {
        StepLimits { n_ahead: 0, max_top_k: self.max_top_k, ..limits }
    }

    /// Waits at the gate, records the step, then panics or fails as the fields require.
    fn before_step(&mut self, step: &Step) -> Result<(), ForwardError> {
        self.gate.pass();
        self.log.lock().unwrap().push(step.tokens.iter().map(|token| token.id).collect());
        let counted = |n: usize| n.checked_sub(1);
        let left = self.panic_in.fetch_update(Ordering::Relaxed, Ordering::Relaxed, counted);
        assert!(left != Ok(1), "a defect in the forward pass");
        if self.fail.swap(false, Ordering::Relaxed) {
            return Err(ForwardError::Device { why: "the device is gone".into() });
        }
        Ok(())
    }

    fn wake(&mut self) -> Option<bool> {
        self.woken.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(5));
        Some(true)
    }
}

/// The helpers for tests that need no real numbers: a model's logits are hashes of the tokens of its sequence.
pub mod null {
    use super::*;

    /// [`super::start`].
    pub fn start(model: &Model, engine: &EngineOptions, options: SchedulerOptions) -> Scheduler {
        start_with_gate(model, engine, options).0
    }

    /// [`super::start_with_gate`].
    pub fn start_with_gate(model: &Model, engine: &EngineOptions, options: SchedulerOptions) -> (Scheduler, Arc<Gate>) {
        let controls = Controls::default();
        let pass = controls.null_pass(model, engine);
        (Scheduler::start(pass, Arc::new(model.clone()), options).unwrap(), controls.gate)
    }

    /// [`super::stories`].
    pub fn stories(n: usize) -> (Model, Scheduler) {
        stories_on(n, start)
    }

    /// [`super::reference`].
    pub fn reference(model: &Model, request: &Request) -> (Vec<u32>, String) {
        reference_in(model, &engine(), request)
    }

    /// [`super::reference_in`].
    pub fn reference_in(model: &Model, engine: &EngineOptions, request: &Request) -> (Vec<u32>, String) {
        reference_of(model, Controls::default().null_pass(model, engine), request)
    }
}
