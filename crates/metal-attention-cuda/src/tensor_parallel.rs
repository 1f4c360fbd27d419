//! [`TensorParallelExecutor`]: one model on several NVIDIA GPUs by tensor parallelism, an executor over executors.
//!
//! Each GPU is a rank with a [`CudaExecutor`] over its shard of the weights (`sharding.rs`) and of the KV cache. Rank 0 runs on the
//! caller's thread, each other rank on a thread of its own ([`RankWorker`]); all evaluate the same steps in the same order, with the
//! session's page table. Within a step kernels exchange partial sums and logits through peer memory (`exchange.rs`), in the order of
//! the ranks, so that all ranks compute the same bits. Results are those of rank 0.

use std::collections::BTreeMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;

use metal_attention_model::{
    CacheBlock, CacheGroups, CacheLayout, DeviceInfo, Executor, ForwardError, LayerTrace, LoadedModel, MemoryUse,
    ModelSpec, PageCopy, Profiler, Session, SessionOptions, Step, StepLimits, StepResults, TracedTokens,
};

use crate::exchange::{AbortFlag, Exchange};
use crate::executor::output_of;
use crate::runner::TokenOutput;
use crate::sharding::{Shard, ShardingPlan};
use crate::{CudaDevice, CudaError, CudaExecutor, CudaTuning};

/// A forward pass on several NVIDIA GPUs.
pub type TensorParallelPass = Session<TensorParallelExecutor>;

/// Runs a model on several NVIDIA GPUs of one host by tensor parallelism. Each rank has some attention heads with their keys and
/// values, some of the width of the feed-forwards and experts, and some rows of the output head; layers that cannot be sharded are
/// replicated on every rank. After an error it can be used again.
pub struct TensorParallelExecutor {
    /// The whole model.
    spec: ModelSpec,
    /// Rank 0.
    first: CudaExecutor,
    /// Ranks 1 and up, in their order.
    others: Vec<RankWorker>,
    /// A word that all kernels poll: set to abort the exchanges of a forward pass on all ranks.
    ended: Arc<AbortFlag>,
    /// Leases of the devices of all ranks, by ordinal.
    leases: Arc<[DeviceLease]>,
    /// Bytes allocated on all GPUs together.
    memory: MemoryUse,
    /// The parts of the model that are sharded.
    plan: Arc<ShardingPlan>,
    /// Cache groups with pages and state slots that every rank has.
    groups: CacheGroups,
}

/// The [`CudaDevice`] (that is, the context and stream of one model) that launched last on a GPU under tensor parallelism.
type LastUser = Arc<Mutex<Weak<CudaDevice>>>;

/// The last user of each GPU, by ordinal, over all models of the process.
///
/// Kernels that wait for another rank occupy their GPU, with all that is queued behind them. Two models that share two GPUs could
/// therefore deadlock, each waiting for a rank whose GPU the other one occupies. So a model leases all its GPUs for a forward pass.
static LAST_USERS: Mutex<BTreeMap<usize, LastUser>> = Mutex::new(BTreeMap::new());

/// One rank's GPU and the record of its last user.
struct DeviceLease {
    /// The GPU, as this model has opened it.
    gpu: Arc<CudaDevice>,
    /// The last user of the GPU, shared by all models; locked while the lease is held.
    last: LastUser,
}

impl DeviceLease {
    /// The leases of `gpus`, sorted by ordinal: all models acquire them in that order, so that none holds one while it waits for
    /// another in a circle.
    fn of(gpus: &[Arc<CudaDevice>]) -> Arc<[Self]> {
        let mut users = LAST_USERS.lock().unwrap_or_else(PoisonError::into_inner);
        let gpus: BTreeMap<usize, _> = gpus.iter().map(|gpu| (gpu.summary().ordinal, gpu)).collect();
        let lease = |(ordinal, gpu)| Self { gpu: Arc::clone(gpu), last: Arc::clone(users.entry(ordinal).or_default()) };
        gpus.into_iter().map(lease).collect()
    }

    /// Acquires the GPU until the guard is dropped. Waits until another model's launches there have ended, including decode steps
    /// that it has launched ahead.
    fn acquire(&self) -> Result<MutexGuard<'_, Weak<CudaDevice>>, CudaError> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(other) = last.upgrade().filter(|other| !Arc::ptr_eq(other, &self.gpu)) {
            other.wait()?;
        }
        *last = Arc::downgrade(&self.gpu);
        Ok(last)
    }
}

/// What a rank does.
#[derive(Debug, Clone)]
enum RankCommand {
    /// [`Executor::copy_page`].
    CopyPage(PageCopy),
    /// [`CudaExecutor::run_step`], without results. Rank 0 launches other kernels for steps that are traced or timed, and so
    /// do the other ranks.
    Run { step: Step, output: TokenOutput, traced: bool, timed: bool },
    /// [`Executor::submit`].
    Submit(Step, Range<usize>),
    /// [`Executor::wake`].
    Wake,
}

impl RankCommand {
    /// Runs the command on a rank other than 0.
    fn run(self, rank: &mut CudaExecutor) -> RankResult {
        match self {
            Self::CopyPage(copy) => rank.copy_page(copy),
            Self::Run { step, output, traced, timed } => {
                let mut profiler = if timed { Some(rank.profiler()?) } else { None };
                // Rank 0 copies the residual stream, which is the same on all ranks.
                let mut ignore = |_: usize, _: &[f32]| {};
                let nothing = LayerTrace { before: &[], tokens: TracedTokens::Output, rows: &mut ignore };
                let trace = traced.then_some(nothing);
                Ok(rank.run_step(&step, output, None, trace, profiler.as_mut())?)
            }
            Self::Submit(step, ahead) => rank.submit(&step, ahead).map(drop),
            Self::Wake => wake(rank),
        }
    }
}

/// The outcome of a command on one rank.
type RankResult = Result<(), ForwardError>;

/// One of the ranks 1 and up, with a thread that runs commands. Its results are discarded, as they equal those of rank 0.
struct RankWorker {
    /// Locked by the thread during a command, and by other callers between commands.
    rank: Arc<Mutex<CudaExecutor>>,
    /// `None` once the thread is to end.
    commands: Option<Sender<RankCommand>>,
    /// One result of each command.
    results: Receiver<RankResult>,
    /// The thread; joined when the worker is dropped.
    thread: Option<JoinHandle<()>>,
}

impl Drop for RankWorker {
    fn drop(&mut self) {
        self.commands = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The error where the system starts no thread for a rank.
fn no_thread(error: &std::io::Error) -> CudaError {
    CudaError::Driver { what: "start a thread for a GPU", why: error.to_string() }
}

/// The error where the thread of a rank has panicked.
fn panicked() -> ForwardError {
    ForwardError::Device { why: "the thread of a GPU met a defect".into() }
}

/// [`Executor::wake`], with an error instead of `false`.
fn wake(rank: &mut CudaExecutor) -> RankResult {
    if rank.wake() { Ok(()) } else { Err(CudaError::RanksDiverged.into()) }
}

impl RankWorker {
    /// Starts the thread of a rank.
    fn start(rank: CudaExecutor, ended: &Arc<AbortFlag>) -> Result<Self, CudaError> {
        let rank = Arc::new(Mutex::new(rank));
        let (command_sender, commands) = mpsc::channel::<RankCommand>();
        let (result_sender, results) = mpsc::channel();
        let (shared_rank, ended) = (Arc::clone(&rank), Arc::clone(ended));
        let run = move || {
            for command in commands {
                let mut rank = shared_rank.lock().unwrap_or_else(PoisonError::into_inner);
                let outcome = catch_unwind(AssertUnwindSafe(|| command.run(&mut rank)));
                let result = outcome.unwrap_or_else(|_| Err(panicked()));
                drop(rank);
                if result.is_err() {
                    // The kernels of the other ranks wait for this one.
                    ended.set(true);
                }
                if result_sender.send(result).is_err() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("cuda rank".into()).spawn(run);
        let thread = thread.map_err(|error| no_thread(&error))?;
        Ok(Self { rank, commands: Some(command_sender), results, thread: Some(thread) })
    }

    /// Sends a command to the thread. Its result is to be received before the next command is sent.
    fn begin(&self, command: RankCommand) {
        // If the thread is gone, `result` fails, too.
        let _ = self.commands.as_ref().map(|commands| commands.send(command));
    }

    /// Waits for the result of the last command.
    fn result(&self) -> RankResult {
        self.results.recv().unwrap_or_else(|_| Err(panicked()))
    }

    /// The executor of the rank, between commands.
    fn rank(&self) -> MutexGuard<'_, CudaExecutor> {
        self.rank.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl TensorParallelExecutor {
    /// A session with a model, tuned by the GPUs: see [`new`](Self::new).
    pub fn session(
        gpus: &[Arc<CudaDevice>],
        model: &LoadedModel,
        options: &SessionOptions,
    ) -> Result<TensorParallelPass, CudaError> {
        Self::tuned_session(gpus, model, options, &CudaTuning::default())
    }

    /// A session with a model: see [`new`](Self::new).
    pub fn tuned_session(
        gpus: &[Arc<CudaDevice>],
        model: &LoadedModel,
        options: &SessionOptions,
        tuning: &CudaTuning,
    ) -> Result<TensorParallelPass, CudaError> {
        Ok(Session::new(Self::new(gpus, model, options, tuning)?))
    }

    /// Shards a model over `gpus`, all different, in the order of the ranks, and sets it up on each. `options` are those of the whole
    /// model, and are the same on each rank.
    ///
    /// # Errors
    /// If the model cannot be sharded by that many ranks, if a GPU has no access to another one's memory, or if one rank cannot be
    /// set up.
    pub fn new(
        gpus: &[Arc<CudaDevice>],
        model: &LoadedModel,
        options: &SessionOptions,
        tuning: &CudaTuning,
    ) -> Result<Self, CudaError> {
        let plan = Arc::new(ShardingPlan::new(model, gpus.len())?);
        for from in gpus {
            for to in gpus.iter().filter(|to| !Arc::ptr_eq(from, to)) {
                from.enable_peer_access(to)?;
            }
        }
        let Some(first) = gpus.first() else { return Err(CudaError::Indivisible { n_ranks: 0 }) };
        let ended = Arc::new(AbortFlag::new(first)?);
        let set_up = |rank: usize| {
            let shard = Shard { plan: Arc::clone(&plan), rank };
            CudaExecutor::with_shard(Arc::clone(&gpus[rank]), model, (options, tuning), Some((&shard, &ended)), None)
        };
        let passes: Result<Vec<_>, CudaError> = std::thread::scope(|scope| {
            let set_up = &set_up;
            let begin = |rank| std::thread::Builder::new().spawn_scoped(scope, move || set_up(rank));
            let threads: Vec<_> = (0..gpus.len()).map(begin).collect();
            let panicked = || CudaError::Driver { what: "set a GPU up", why: "its thread met a defect".into() };
            let end = |thread: std::io::Result<std::thread::ScopedJoinHandle<'_, _>>| {
                thread.map_err(|error| no_thread(&error))?.join().unwrap_or_else(|_| Err(panicked()))
            };
            threads.into_iter().map(end).collect()
        });
        let mut passes = passes?;
        // Shards and devices may differ, but all ranks have to make the same launches, or their exchanges would not match.
        let steps_per_launch = passes.iter().map(|pass| pass.steps_per_launch(0)).min().unwrap_or(0);
        let mailboxes: Vec<_> = passes.iter().filter_map(|pass| pass.runner.exchange.as_ref()).collect();
        let mailboxes: Vec<_> = mailboxes.into_iter().map(Exchange::mailbox).collect();
        let mut memory = MemoryUse::default();
        for pass in &mut passes {
            pass.limit_steps_per_launch(steps_per_launch);
            if let Some(exchange) = &mut pass.runner.exchange {
                exchange.connect(&mailboxes);
            }
            memory += pass.memory_use(0);
            // Mailboxes have to be zero before another rank writes to them.
            pass.gpu().wait()?;
        }
        // Shards of different sizes have room for different numbers of states: the fewest are there on all ranks.
        let n_states = |groups: &CacheGroups| groups.states().map_or(0, |states| states.n_states);
        let groups = passes.iter().map(|rank| rank.cache_groups().clone()).min_by_key(n_states);
        let Some(groups) = groups else { return Err(CudaError::Indivisible { n_ranks: 0 }) };
        let mut passes = passes.into_iter();
        let Some(first) = passes.next() else { return Err(CudaError::Indivisible { n_ranks: 0 }) };
        let others = passes.map(|pass| RankWorker::start(pass, &ended)).collect::<Result<_, _>>()?;
        Ok(Self {
            spec: model.spec().clone(),
            first,
            others,
            ended,
            leases: DeviceLease::of(gpus),
            memory,
            plan,
            groups,
        })
    }

    /// The GPU of rank 0.
    pub fn gpu(&self) -> &Arc<CudaDevice> {
        self.first.gpu()
    }

    /// A phrase for the log that says which parts of the model are sharded.
    pub fn shared(&self) -> String {
        let layers = self.spec.layers.iter();
        let mixers = layers.filter(|layer| self.plan.shards_mixer(&layer.mixer)).count();
        let feed_forwards = self.plan.feed_forwards.iter().filter(|sharded| **sharded).count();
        let n_layer = self.spec.n_layer();
        let head = if self.plan.head { "and the output head" } else { "not the output head" };
        format!("the mixers of {mixers} and the feed-forwards of {feed_forwards} of {n_layer} layers, {head}")
    }

    /// Whether a decode step of one sequence at position `pos` is one launch of the persistent kernel on each rank.
    pub fn uses_persistent_kernel(&self, pos: usize) -> bool {
        self.first.uses_persistent_kernel(pos)
    }

    /// The number of ranks.
    pub fn n_ranks(&self) -> usize {
        1 + self.others.len()
    }

    /// Has all other ranks run `command`, and rank 0 `on_first`, whose value is returned. If one rank fails, the others are aborted
    /// and all can be used again ([`recover`](Self::recover)).
    fn on_all<T>(
        &mut self,
        command: &RankCommand,
        on_first: impl FnOnce(&mut CudaExecutor) -> Result<T, ForwardError>,
    ) -> Result<T, ForwardError> {
        let leases = Arc::clone(&self.leases);
        let _leased = leases.iter().map(DeviceLease::acquire).collect::<Result<Vec<_>, _>>()?;
        for other in &self.others {
            other.begin(command.clone());
        }
        let result = on_first(&mut self.first);
        if result.is_err() {
            self.ended.set(true);
        }
        let other_results: Vec<_> = self.others.iter().map(RankWorker::result).collect();
        let (value, mut errors) = match result {
            Ok(value) => (Some(value), Vec::new()),
            Err(why) => (None, vec![why]),
        };
        errors.extend(other_results.into_iter().filter_map(Result::err));
        if errors.is_empty()
            && let Some(value) = value
        {
            return Ok(value);
        }
        self.recover()?;
        // Ranks that were aborted because of another one have `RanksDiverged`; the cause is the error of that other one.
        let diverged = ForwardError::from(CudaError::RanksDiverged);
        let at = errors.iter().position(|why| *why != diverged).unwrap_or(0);
        Err(if errors.is_empty() { diverged } else { errors.swap_remove(at) })
    }

    /// After a failure: waits until no rank launches or waits, and clears the mailboxes and the abort flag.
    fn recover(&mut self) -> Result<(), CudaError> {
        let Self { first, others, ended, .. } = self;
        let ranks: Vec<_> = others.iter().map(RankWorker::rank).collect();
        let all = || std::iter::once(&*first).chain(ranks.iter().map(|rank| &**rank));
        all().try_for_each(|rank| rank.gpu().wait())?;
        all().filter_map(|rank| rank.runner.exchange.as_ref()).try_for_each(Exchange::clear)?;
        all().try_for_each(|rank| rank.gpu().wait())?;
        ended.set(false);
        Ok(())
    }

    /// Calls `f` with each rank but the first, in their order.
    fn on_others<T>(&self, mut f: impl FnMut(&mut CudaExecutor) -> T) -> Vec<T> {
        self.others.iter().map(|other| f(&mut other.rank())).collect()
    }
}

impl Drop for TensorParallelExecutor {
    fn drop(&mut self) {
        // Decode steps in flight write to the mailboxes of all ranks, so no mailbox may be freed before they end.
        self.ended.set(true);
        let _ = self.first.gpu().wait();
        self.on_others(|rank| drop(rank.gpu().wait()));
    }
}

/// A block of the whole model is the concatenation of the ranks' blocks, in their order: all ranks have the same pages and slots.
impl Executor for TensorParallelExecutor {
    /// The step's number on rank 0.
    type InFlight = u32;

    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn device(&self) -> DeviceInfo {
        let first = self.first.device();
        DeviceInfo { name: format!("{} x {}", self.n_ranks(), first.name), ..first }
    }

    fn cache_groups(&self) -> &CacheGroups {
        &self.groups
    }

    fn limits(&self) -> StepLimits {
        self.first.limits()
    }

    /// Bytes that are allocated on all GPUs together.
    fn memory_use(&self, _results: usize) -> MemoryUse {
        self.memory
    }

    fn begin_batch(&mut self) -> Result<(), ForwardError> {
        self.first.begin_batch()
    }

    fn copy_page(&mut self, copy: PageCopy) -> Result<(), ForwardError> {
        self.on_all(&RankCommand::CopyPage(copy), |first| first.copy_page(copy))
    }

    fn run(
        &mut self,
        step: &Step,
        results: StepResults<'_>,
        trace: Option<LayerTrace<'_>>,
        profiler: Option<&mut Profiler>,
    ) -> Result<(), ForwardError> {
        let (output, traced, timed) = (output_of(&results), trace.is_some(), profiler.is_some());
        let command = RankCommand::Run { step: step.clone(), output, traced, timed };
        self.on_all(&command, |first| first.run(step, results, trace, profiler))
    }

    fn n_at_once(&self, pos: usize) -> usize {
        self.first.n_at_once(pos)
    }

    fn submit(&mut self, step: &Step, ahead: Range<usize>) -> Result<Vec<u32>, ForwardError> {
        self.on_all(&RankCommand::Submit(step.clone(), ahead.clone()), |first| first.submit(step, ahead))
    }

    /// Rank 0 alone reads: the other ranks take part in its steps.
    fn read(&mut self, number: u32, ids: &mut [u32]) -> Result<bool, ForwardError> {
        let outcome = self.first.read(number, ids);
        if outcome.is_err() {
            self.ended.set(true);
            self.recover()?;
        }
        outcome
    }

    fn cache_layout(&self) -> CacheLayout {
        let mut all = self.first.cache_layout();
        all.format = format!("{} on {} cards", all.format, self.n_ranks());
        for other in self.on_others(|rank| rank.cache_layout()) {
            all.page_bytes.iter_mut().zip(other.page_bytes).for_each(|(sum, bytes)| *sum += bytes);
            all.state_bytes += other.state_bytes;
        }
        all
    }

    fn cache_bytes(&self) -> usize {
        self.first.cache_bytes() + self.on_others(|rank| rank.cache_bytes()).into_iter().sum::<usize>()
    }

    fn read_block(&mut self, block: CacheBlock, bytes: &mut [u8]) -> Result<(), ForwardError> {
        let (of_first, mut rest) = bytes.split_at_mut(self.first.block_bytes(block) as usize);
        self.first.read_block(block, of_first)?;
        for other in &self.others {
            let mut rank = other.rank();
            let (of_rank, after) = rest.split_at_mut(rank.block_bytes(block) as usize);
            rank.read_block(block, of_rank)?;
            rest = after;
        }
        Ok(())
    }

    fn write_block(&mut self, block: CacheBlock, bytes: &[u8]) -> Result<(), ForwardError> {
        let (of_first, mut rest) = bytes.split_at(self.first.block_bytes(block) as usize);
        self.first.write_block(block, of_first)?;
        for other in &self.others {
            let mut rank = other.rank();
            let (of_rank, after) = rest.split_at(rank.block_bytes(block) as usize);
            rank.write_block(block, of_rank)?;
            rest = after;
        }
        Ok(())
    }

    fn profiler(&self) -> Result<Profiler, ForwardError> {
        self.first.profiler()
    }

    fn wake(&mut self) -> bool {
        self.on_all(&RankCommand::Wake, wake).is_ok()
    }
}
