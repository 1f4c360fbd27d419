//! The engine that Dynamo drives: start, requests, and shutdown.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use dynamo_backend_common::{
    DynamoError, EngineConfig, GenerateContext, KvEventSource, LLMEngine, LlmRegistration, MetricsBindings, MetricsCtx,
    PreprocessedRequest,
};
use futures::stream::BoxStream;
use metal_attention::scheduler::{Scheduler, SchedulerOptions, SchedulerParts};
use metal_attention::speculation::{DraftFile, Speculation, SpeculativePass};
use metal_attention::{EngineOptions, Model};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::answer::{self, InFlight, StreamItem, StreamOptions};
use crate::{cache, error, load, request};

/// The time for Dynamo to send the last parts of streams before it closes its connections. A text whose end does not arrive counts as
/// unfinished, and the frontend migrates it.
const FLUSH: Duration = Duration::from_millis(500);

/// The settings of a worker.
#[derive(Clone)]
pub struct WorkerSetup {
    /// The model.
    pub model: Arc<Model>,
    /// Its name in requests.
    pub name: String,
    /// Device, context and memory.
    pub engine: EngineOptions,
    /// Slots and queue of the scheduler.
    pub scheduler: SchedulerOptions,
    /// Which drafter proposes tokens.
    pub speculation: Speculation,
    /// The file that has it; `None`: the model's own file.
    pub draft: Option<DraftFile>,
    /// The time for running requests to finish at shutdown.
    pub grace: Duration,
    /// For tests: the time that each token takes at least.
    pub token_delay: Duration,
}

/// metal-attention's scheduler as an engine of Dynamo.
pub struct WorkerEngine {
    /// The settings.
    setup: WorkerSetup,
    /// The scheduler, once it has started.
    scheduler: OnceLock<Scheduler>,
    /// Dynamo's publisher of cache events.
    cache_publisher: cache::Publisher,
    /// The task that reports the load.
    load: Arc<Mutex<Option<JoinHandle<()>>>>,
    /// The number of streams that are being read.
    in_flight: watch::Sender<usize>,
}

impl WorkerEngine {
    /// An engine that has not started.
    pub fn new(setup: WorkerSetup) -> Self {
        Self {
            setup,
            scheduler: OnceLock::new(),
            cache_publisher: cache::Publisher::default(),
            load: Arc::default(),
            in_flight: watch::Sender::default(),
        }
    }

    /// The scheduler. An error before the start.
    fn scheduler(&self) -> Result<&Scheduler, DynamoError> {
        self.scheduler.get().ok_or_else(|| error::shut_down("the engine has not started"))
    }

    /// Replaces the task that reports the load.
    fn set_load_task(&self, task: Option<JoinHandle<()>>) {
        replace(&self.load, task);
    }
}

/// Puts `task` into the slot and aborts the task that was there.
fn replace(slot: &Mutex<Option<JoinHandle<()>>>, task: Option<JoinHandle<()>>) {
    let before = std::mem::replace(&mut *slot.lock().unwrap_or_else(PoisonError::into_inner), task);
    if let Some(before) = before {
        before.abort();
    }
}

/// Starts the scheduler. Returns it with the description that Dynamo registers.
fn start(setup: &WorkerSetup, publisher: cache::Publisher) -> Result<(Scheduler, LlmRegistration), DynamoError> {
    let WorkerSetup { model, engine, scheduler: options, speculation, draft, .. } = setup;
    let pass = match draft {
        None => SpeculativePass::new(model, engine, *speculation),
        Some(draft) => SpeculativePass::with_draft_file(model, draft, engine, *speculation, None),
    };
    let SpeculativePass { pass, drafter } = pass.map_err(|why| error::unknown(why.to_string()))?;
    let pages = pass.cache_pages();
    let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let registration = LlmRegistration {
        context_length: Some(number(pass.n_ctx().min(pages.total * pages.page_len))),
        kv_cache_block_size: Some(number(pages.page_len)),
        total_kv_blocks: Some(pages.total as u64),
        max_num_seqs: Some(options.n_parallel as u64),
        max_num_batched_tokens: Some(pass.n_ubatch().max(options.n_parallel) as u64),
        ..Default::default()
    };
    let observer = cache::observer(publisher, pages.page_len);
    let parts = SchedulerParts { observer: Some(observer), drafter };
    let scheduler = Scheduler::start_with(pass, Arc::clone(model), options.clone(), parts);
    Ok((scheduler.map_err(|why| error::unknown(why.to_string()))?, registration))
}

/// Ends the process if the engine fails, so that a service manager restarts it.
async fn exit_on_defect(scheduler: Scheduler) {
    let why = scheduler.wait_for_defect().await;
    tracing::error!("the engine met a defect and has ended: {why}");
    // Its requests get their errors first, so that the frontend migrates them.
    tokio::time::sleep(Duration::from_secs(1)).await;
    std::process::exit(1);
}

#[async_trait]
impl LLMEngine for WorkerEngine {
    async fn start(&self, _worker_id: u64) -> Result<EngineConfig, DynamoError> {
        let (setup, publisher) = (self.setup.clone(), Arc::clone(&self.cache_publisher));
        let started = tokio::task::spawn_blocking(move || start(&setup, publisher)).await;
        let (scheduler, registration) = started.map_err(|why| error::unknown(why.to_string()))??;
        tokio::spawn(exit_on_defect(scheduler.clone()));
        if self.scheduler.set(scheduler).is_err() {
            return Err(error::unknown("the engine has started already"));
        }
        let name = self.setup.name.clone();
        Ok(EngineConfig {
            model: name.clone(),
            served_model_name: Some(name),
            llm: Some(registration),
            ..Default::default()
        })
    }

    async fn generate(
        &self,
        request: PreprocessedRequest,
        context: GenerateContext,
    ) -> Result<BoxStream<'static, StreamItem>, DynamoError> {
        let scheduler = self.scheduler()?;
        let plan = request::plan(&request)?;
        // The worker before this one died between the last token and the end of the stream.
        if plan.request.max_tokens == Some(0) {
            return Ok(answer::complete());
        }
        let options = StreamOptions {
            stop_ids: plan.stop_ids,
            min_tokens: plan.request.min_tokens,
            token_delay: self.setup.token_delay,
            in_flight: InFlight::new(&self.in_flight),
        };
        let events = scheduler.submit(plan.request).map_err(|why| error::refused(&why))?;
        Ok(answer::stream(events, context, options))
    }

    async fn cleanup(&self) -> Result<(), DynamoError> {
        if let Some(scheduler) = self.scheduler.get() {
            let grace = self.setup.grace;
            let told = async {
                scheduler.shut_down(grace).await;
                // Waits until the ends of all streams are read.
                let mut in_flight = self.in_flight.subscribe();
                let _ = in_flight.wait_for(|&n| n == 0).await;
            };
            if tokio::time::timeout(grace + Duration::from_secs(1), told).await.is_err() {
                tracing::warn!("requests were cut short at the end: they go on elsewhere");
            }
            tokio::time::sleep(FLUSH).await;
        }
        self.set_load_task(None);
        Ok(())
    }

    async fn kv_event_sources(&self) -> Result<Vec<KvEventSource>, DynamoError> {
        let stored = Arc::clone(&self.cache_publisher);
        let on_ready = Box::new(move |publisher| {
            stored.set(publisher).map_err(|_| error::unknown("there is a publisher of cache events already"))
        });
        Ok(vec![KvEventSource::Push { on_ready, dp_rank: cache::RANK }])
    }

    async fn setup_metrics(&self, _context: MetricsCtx<'_>) -> Result<MetricsBindings, DynamoError> {
        let (scheduler, slot) = (self.scheduler()?.clone(), Arc::clone(&self.load));
        let runtime = tokio::runtime::Handle::current();
        let on_ready = Box::new(move |publisher| {
            replace(&slot, Some(runtime.spawn(load::publish(scheduler, publisher))));
            Ok(())
        });
        Ok(MetricsBindings { dp_ranks: vec![cache::RANK], on_publisher_ready: Some(on_ready) })
    }

    /// A request for one token, which Dynamo sends to an idle worker to check its health.
    async fn health_check_payload(&self) -> Result<Option<serde_json::Value>, DynamoError> {
        Ok(Some(serde_json::json!({
            "token_ids": [0],
            "sampling_options": { "temperature": 0.0 },
            "stop_conditions": { "max_tokens": 1, "ignore_eos": true },
        })))
    }
}
