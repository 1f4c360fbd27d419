//! What the tests of the scheduler share.
#![allow(dead_code, reason = "each test file uses its part")]

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use metal_attention::gguf::{GgufFile, GgufWriter, Metadata, Tensor, TensorDecl};
use metal_attention::sampling::SamplerOptions;
use metal_attention::scheduler::{
    Event, Events, FinishReason, Request, RequestError, Scheduler, SchedulerOptions, TokenLogprobs, Usage,
};
use metal_attention::tokenizer::EncodeOptions;
use metal_attention::{
    BUILT_IN_MODEL, BatchToken, Device, DeviceInfo, EngineOptions, ForwardError, ForwardPass, GenerateOptions,
    Generator, LayerTrace, Logits, Model, ModelOptions, ModelSpec, PageUse, SequenceCache,
};

/// Small enough for a CPU without optimisation, and the same bits however texts are batched.
pub fn engine() -> EngineOptions {
    EngineOptions { device: Device::Cpu, n_ctx: Some(256), n_threads: Some(1), ..Default::default() }
}

/// Eight sequences, and room for the windows or the recurrent states of two.
pub fn few_windows() -> EngineOptions {
    EngineOptions { n_seq: 8, n_windows: Some(2), n_ubatch: Some(16), state_cache: 0, ..engine() }
}

pub fn start(model: &Model, engine: &EngineOptions, options: SchedulerOptions) -> Scheduler {
    Scheduler::start(model.forward_pass(engine).unwrap(), Arc::new(model.clone()), options).unwrap()
}

/// A scheduler for the built-in model that runs `n` texts at once.
pub fn stories(n: usize) -> (Model, Scheduler) {
    let model = Model::built_in().unwrap();
    let options = SchedulerOptions { n_parallel: n, ..Default::default() };
    let scheduler = start(&model, &EngineOptions { n_seq: n, ..engine() }, options);
    (model, scheduler)
}

pub fn encode(model: &Model, text: &str) -> Vec<u32> {
    model.tokenizer().unwrap().encode(text, EncodeOptions { add_special: true, parse_special: false })
}

/// A greedy continuation by `n` tokens.
pub fn greedy(prompt: Vec<u32>, n: usize) -> Request {
    Request { prompt: prompt.into(), max_tokens: Some(n), sampling: SamplerOptions::greedy(), ..Default::default() }
}

/// All of an answer.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Answer {
    pub ids: Vec<u32>,
    pub text: String,
    pub logprobs: Vec<TokenLogprobs>,
    pub prompt_logprobs: Option<Vec<TokenLogprobs>>,
    pub reason: Option<FinishReason>,
    pub end_token: Option<u32>,
    pub usage: Usage,
    pub error: Option<RequestError>,
}

/// Reads an answer to its end.
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

/// The built-in model, all of whose layers see so many tokens at most.
pub fn windowed(window: u32) -> Model {
    with_metadata(|metadata| metadata.set("llama.attention.sliding_window", window))
}

/// The built-in model with other metadata.
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

/// The log probability of each token of `ids` after the first, by the logits of the whole text.
pub fn log_probabilities(model: &Model, ids: &[u32]) -> Vec<f32> {
    let mut pass = model.forward_pass(&engine()).unwrap();
    let batch: Vec<_> = ids.iter().enumerate().map(|(pos, &id)| BatchToken { id, seq: 0, pos, output: true }).collect();
    let logits = pass.forward(&batch).unwrap();
    let of = |i: usize| {
        let row = logits.row(i);
        let sum: f64 = row.iter().map(|&logit| f64::from(logit).exp()).sum();
        (f64::from(row[ids[i + 1] as usize]) - sum.ln()) as f32
    };
    (0..ids.len() - 1).map(of).collect()
}

/// The ids and the text that a request without a constraint gets when it runs alone, in a `Generator`.
pub fn alone(model: &Model, request: &Request) -> (Vec<u32>, String) {
    alone_in(model, &engine(), request)
}

/// The same in a context of another size.
pub fn alone_in(model: &Model, engine: &EngineOptions, request: &Request) -> (Vec<u32>, String) {
    let mut generator = Generator::new(model, engine, request.sampling.clone()).unwrap();
    generator.prompt(&request.prompt, |_, _| ControlFlow::Continue(())).unwrap();
    let options = GenerateOptions {
        n_predict: request.max_tokens,
        stop: request.stop.to_vec(),
        stop_ids: request.stop_ids.to_vec(),
        ignore_eos: request.ignore_eos,
        min_tokens: request.min_tokens,
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

/// A forward pass that can be held up, made to fail, and made to prefer short lists.
pub struct Wrapped {
    pub pass: Box<dyn ForwardPass>,
    /// Steps wait as long as this is locked.
    pub gate: Arc<Mutex<()>>,
    /// The next step fails.
    pub fail: Arc<AtomicBool>,
    /// The step after so many more panics; 0: none does.
    pub panic_in: Arc<AtomicUsize>,
    /// The tokens of each step.
    pub log: Arc<Mutex<Vec<Vec<u32>>>>,
    pub max_top_k: usize,
    /// How often it was woken.
    pub woken: Arc<AtomicUsize>,
}

impl Wrapped {
    pub fn new(pass: Box<dyn ForwardPass>) -> Self {
        Self {
            pass,
            gate: Arc::default(),
            fail: Arc::default(),
            panic_in: Arc::default(),
            log: Arc::default(),
            max_top_k: 0,
            woken: Arc::default(),
        }
    }
}

impl Wrapped {
    /// Notes the batch, and waits or fails as it was told.
    fn enter(&self, batch: &[BatchToken]) -> Result<(), ForwardError> {
        drop(self.gate.lock().unwrap());
        self.log.lock().unwrap().push(batch.iter().map(|token| token.id).collect());
        let counted = |n: usize| n.checked_sub(1);
        let left = self.panic_in.fetch_update(Ordering::Relaxed, Ordering::Relaxed, counted);
        assert!(left != Ok(1), "a defect in the forward pass");
        if self.fail.swap(false, Ordering::Relaxed) {
            return Err(ForwardError::Device { why: "the device is gone".into() });
        }
        Ok(())
    }
}

impl ForwardPass for Wrapped {
    fn spec(&self) -> &ModelSpec {
        self.pass.spec()
    }
    fn device(&self) -> DeviceInfo {
        self.pass.device()
    }
    fn n_ctx(&self) -> usize {
        self.pass.n_ctx()
    }
    fn n_seq(&self) -> usize {
        self.pass.n_seq()
    }
    fn n_ubatch(&self) -> usize {
        self.pass.n_ubatch()
    }
    fn n_past(&self, seq: usize) -> usize {
        self.pass.n_past(seq)
    }
    fn rewind(&mut self, seq: usize, n: usize) -> usize {
        self.pass.rewind(seq, n)
    }
    fn reachable(&self, seq: usize, n: usize) -> usize {
        self.pass.reachable(seq, n)
    }
    fn share_prefix(&mut self, from: usize, to: usize, n: usize) -> Result<usize, ForwardError> {
        self.pass.share_prefix(from, to, n)
    }
    fn cache_pages(&self) -> PageUse {
        self.pass.cache_pages()
    }
    fn pages_held(&self, sequences: &[usize]) -> usize {
        self.pass.pages_held(sequences)
    }
    fn kv_cache_bytes(&self) -> usize {
        self.pass.kv_cache_bytes()
    }
    fn cache(&mut self) -> &mut dyn SequenceCache {
        self.pass.cache()
    }
    fn forward_traced(
        &mut self,
        batch: &[BatchToken],
        trace: Option<LayerTrace<'_>>,
    ) -> Result<Logits<'_>, ForwardError> {
        self.enter(batch)?;
        self.pass.forward_traced(batch, trace)
    }
    fn forward_hidden(&mut self, batch: &[BatchToken]) -> Result<Vec<f32>, ForwardError> {
        self.enter(batch)?;
        self.pass.forward_hidden(batch)
    }
    fn max_top_k(&self) -> usize {
        self.max_top_k
    }
    fn wake(&mut self) -> bool {
        self.woken.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(5));
        true
    }
}
