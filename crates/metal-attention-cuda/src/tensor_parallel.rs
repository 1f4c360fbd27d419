//! [`TensorParallelPass`]: one model on several NVIDIA GPUs by tensor parallelism.
//!
//! Each GPU is a rank with a [`CudaForwardPass`] over its shard of the weights (`sharding.rs`) and of the KV cache. Rank 0 runs on the
//! caller's thread, each other rank on a thread of its own ([`RankWorker`]); all evaluate the same batches in the same order and so
//! have the same pages and slots. Within a forward pass kernels exchange partial sums and logits through peer memory
//! (`exchange.rs`), in the order of the ranks, so that all ranks compute the same bits. Results are those of rank 0.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;

use metal_attention_model::{
    BatchToken, CacheBlock, CacheLayout, DeviceInfo, ForwardError, ForwardPass, LayerTrace, Logits, MemoryUse,
    ModelSpec, PageTable, PageUse, Profile, SequenceCache, SequenceExtent, SnapshotError, TopK, Weights,
};

use crate::exchange::{AbortFlag, Exchange};
use crate::sharding::{Shard, ShardingPlan};
use crate::{CudaDevice, CudaError, CudaForwardPass, CudaForwardPassOptions};

/// Runs a model on several NVIDIA GPUs of one host by tensor parallelism. Each rank has some attention heads with their keys and
/// values, some of the width of the feed-forwards and experts, and some rows of the output head; layers that cannot be sharded are
/// replicated on every rank.
///
/// After an error every rank has the tokens that all of them had before ([`ForwardPass::n_past`] agrees), and the pass can be used
/// again.
pub struct TensorParallelPass {
    /// The whole model.
    spec: ModelSpec,
    /// Rank 0.
    first: CudaForwardPass,
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

/// What a rank does with a batch.
#[derive(Debug, Clone, Copy)]
enum RankCommand {
    /// [`ForwardPass::forward_traced`], without a trace.
    Logits,
    /// [`ForwardPass::forward_hidden`].
    Hidden,
    /// [`ForwardPass::forward_greedy`].
    Greedy,
    /// [`ForwardPass::forward_top_k`].
    TopK(usize),
    /// [`ForwardPass::wake`]; the batch is empty.
    Wake,
}

/// The outcome of a command on one rank.
type RankResult = Result<(), ForwardError>;

/// One of the ranks 1 and up, with a thread that evaluates batches. Its results are discarded, as they equal those of rank 0.
struct RankWorker {
    /// Locked by the thread during a command, and by other callers between commands.
    pass: Arc<Mutex<CudaForwardPass>>,
    /// `None` once the thread is to end.
    commands: Option<Sender<(RankCommand, Arc<[BatchToken]>)>>,
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

/// [`ForwardPass::wake`], with an error instead of `false`.
fn wake(pass: &mut CudaForwardPass) -> RankResult {
    if pass.wake() { Ok(()) } else { Err(CudaError::RanksDiverged.into()) }
}

impl RankWorker {
    /// Starts the thread of a rank.
    fn start(pass: CudaForwardPass, ended: &Arc<AbortFlag>) -> Result<Self, CudaError> {
        let pass = Arc::new(Mutex::new(pass));
        let (command_sender, commands) = mpsc::channel::<(RankCommand, Arc<[BatchToken]>)>();
        let (result_sender, results) = mpsc::channel();
        let (shared_pass, ended) = (Arc::clone(&pass), Arc::clone(ended));
        let run = move || {
            for (command, batch) in commands {
                let mut pass = shared_pass.lock().unwrap_or_else(PoisonError::into_inner);
                let evaluate = AssertUnwindSafe(|| match command {
                    RankCommand::Logits => pass.forward_traced(&batch, None).map(|_| ()),
                    RankCommand::Hidden => pass.forward_hidden(&batch).map(|_| ()),
                    RankCommand::TopK(k) => pass.forward_top_k(&batch, k).map(|_| ()),
                    RankCommand::Greedy => pass.forward_greedy(&batch).map(|_| ()),
                    RankCommand::Wake => wake(&mut pass),
                });
                let result = catch_unwind(evaluate).unwrap_or_else(|_| Err(panicked()));
                drop(pass);
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
        Ok(Self { pass, commands: Some(command_sender), results, thread: Some(thread) })
    }

    /// Sends a command to the thread. Its result is to be received before the next command is sent.
    fn begin(&self, command: RankCommand, batch: &Arc<[BatchToken]>) {
        // If the thread is gone, `result` fails, too.
        let _ = self.commands.as_ref().map(|commands| commands.send((command, Arc::clone(batch))));
    }

    /// Waits for the result of the last command.
    fn result(&self) -> RankResult {
        self.results.recv().unwrap_or_else(|_| Err(panicked()))
    }

    /// The forward pass of the rank, between commands.
    fn pass(&self) -> MutexGuard<'_, CudaForwardPass> {
        self.pass.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl TensorParallelPass {
    /// Shards a model over `gpus`, all different, in the order of the ranks, and sets it up on each. `options` are those of the whole
    /// model, and are the same on each rank.
    ///
    /// # Errors
    /// If the model cannot be sharded by that many ranks, if a GPU has no access to another one's memory, or if one rank cannot be
    /// set up.
    pub fn new(
        gpus: &[Arc<CudaDevice>],
        spec: &ModelSpec,
        weights: &Weights,
        options: &CudaForwardPassOptions,
    ) -> Result<Self, CudaError> {
        let plan = Arc::new(ShardingPlan::new(spec, weights, gpus.len())?);
        for from in gpus {
            for to in gpus.iter().filter(|to| !Arc::ptr_eq(from, to)) {
                from.enable_peer_access(to)?;
            }
        }
        let Some(first) = gpus.first() else { return Err(CudaError::Indivisible { n_ranks: 0 }) };
        let ended = Arc::new(AbortFlag::new(first)?);
        let set_up = |rank: usize| {
            let shard = Shard { plan: Arc::clone(&plan), rank };
            CudaForwardPass::with_shard(Arc::clone(&gpus[rank]), spec.clone(), weights, options, Some((&shard, &ended)))
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
        let mailboxes: Vec<u64> = mailboxes.into_iter().map(Exchange::mailbox_address).collect();
        let mut memory = MemoryUse { weights: 0, kv_cache: 0, scratch: 0 };
        for pass in &mut passes {
            pass.limit_steps_per_launch(steps_per_launch);
            if let Some(exchange) = &mut pass.runner.exchange {
                exchange.connect(&mailboxes);
            }
            let of_rank = pass.memory_use();
            memory.weights += of_rank.weights;
            memory.kv_cache += of_rank.kv_cache;
            memory.scratch += of_rank.scratch;
            // Mailboxes have to be zero before another rank writes to them.
            pass.gpu().wait()?;
        }
        let mut passes = passes.into_iter();
        let Some(first) = passes.next() else { return Err(CudaError::Indivisible { n_ranks: 0 }) };
        let others = passes.map(|pass| RankWorker::start(pass, &ended)).collect::<Result<_, _>>()?;
        Ok(Self { spec: spec.clone(), first, others, ended, leases: DeviceLease::of(gpus), memory, plan })
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

    /// Bytes that are allocated on all GPUs together.
    pub fn memory_use(&self) -> MemoryUse {
        self.memory
    }

    /// Has all ranks evaluate `batch`, and returns what `on_first` returns for rank 0. If one rank fails, the others are aborted and
    /// all are brought back to a common state ([`recover`](Self::recover)).
    fn on_all<T>(
        &mut self,
        command: RankCommand,
        batch: &[BatchToken],
        on_first: impl FnOnce(&mut CudaForwardPass) -> Result<T, ForwardError>,
    ) -> Result<T, ForwardError> {
        let leases = Arc::clone(&self.leases);
        let _leased = leases.iter().map(DeviceLease::acquire).collect::<Result<Vec<_>, _>>()?;
        let shared_batch: Arc<[BatchToken]> = batch.into();
        for other in &self.others {
            other.begin(command, &shared_batch);
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
        self.recover(batch)?;
        // Ranks that were aborted because of another one have `RanksDiverged`; the cause is the error of that other one.
        let diverged = ForwardError::from(CudaError::RanksDiverged);
        let at = errors.iter().position(|why| *why != diverged).unwrap_or(0);
        Err(if errors.is_empty() { diverged } else { errors.swap_remove(at) })
    }

    /// Brings all ranks back to a common state after a failure: drops decode steps in flight, clears the mailboxes, and rewinds each
    /// sequence of `batch` to the tokens that all ranks have.
    fn recover(&mut self, batch: &[BatchToken]) -> Result<(), CudaError> {
        let Self { first, others, ended, .. } = self;
        let mut passes: Vec<_> = others.iter().map(RankWorker::pass).collect();
        let mut all: Vec<&mut CudaForwardPass> = vec![first];
        all.extend(passes.iter_mut().map(|pass| &mut **pass));
        for pass in &mut all {
            pass.clear_lookahead();
            pass.gpu().wait()?;
        }
        for exchange in all.iter().filter_map(|pass| pass.runner.exchange.as_ref()) {
            exchange.clear()?;
        }
        all.iter().try_for_each(|pass| pass.gpu().wait())?;
        ended.set(false);
        let n_seq = all[0].n_seq();
        for token in batch.iter().filter(|token| token.seq < n_seq) {
            // Repeated, since a rewind may go further back than asked for.
            loop {
                let lengths = || all.iter().map(|pass| pass.n_past(token.seq));
                let (min, max) = (lengths().min().unwrap_or(0), lengths().max().unwrap_or(0));
                if min == max {
                    break;
                }
                for pass in &mut all {
                    pass.rewind(token.seq, min);
                }
            }
        }
        Ok(())
    }

    /// Calls `f` with the pass of each rank but the first, in their order.
    fn on_others<T>(&self, mut f: impl FnMut(&mut CudaForwardPass) -> T) -> Vec<T> {
        self.others.iter().map(|other| f(&mut other.pass())).collect()
    }
}

impl Drop for TensorParallelPass {
    fn drop(&mut self) {
        // Decode steps in flight write to the mailboxes of all ranks, so no mailbox may be freed before they end.
        self.ended.set(true);
        let _ = self.first.gpu().wait();
        self.on_others(|pass| drop(pass.gpu().wait()));
    }
}

/// A block of the whole model is the concatenation of the ranks' blocks, in their order: all ranks have the same pages and slots.
impl SequenceCache for TensorParallelPass {
    fn layout(&self) -> CacheLayout {
        let mut all = self.first.layout();
        all.format = format!("{} on {} cards", all.format, self.n_ranks());
        for other in self.on_others(|pass| pass.layout()) {
            all.page_bytes.iter_mut().zip(other.page_bytes).for_each(|(sum, bytes)| *sum += bytes);
            all.state_bytes += other.state_bytes;
        }
        all
    }

    fn pages(&self) -> &PageTable {
        self.first.pages()
    }

    fn discard_lookahead(&mut self) {
        self.on_others(CudaForwardPass::clear_lookahead);
        self.first.discard_lookahead();
    }

    fn allocate(&mut self, seq: usize, extent: &SequenceExtent) -> Result<Vec<Option<CacheBlock>>, SnapshotError> {
        self.on_others(|pass| pass.allocate(seq, extent)).into_iter().try_for_each(|adopted| adopted.map(|_| ()))?;
        self.first.allocate(seq, extent)
    }

    fn read_block(&mut self, block: CacheBlock, bytes: &mut [u8]) -> Result<(), ForwardError> {
        let (of_first, mut rest) = bytes.split_at_mut(self.first.block_bytes(block) as usize);
        self.first.read_block(block, of_first)?;
        for other in &self.others {
            let mut pass = other.pass();
            let (of_rank, after) = rest.split_at_mut(pass.block_bytes(block) as usize);
            pass.read_block(block, of_rank)?;
            rest = after;
        }
        Ok(())
    }

    fn write_block(&mut self, block: CacheBlock, bytes: &[u8]) -> Result<(), ForwardError> {
        let (of_first, mut rest) = bytes.split_at(self.first.block_bytes(block) as usize);
        self.first.write_block(block, of_first)?;
        for other in &self.others {
            let mut pass = other.pass();
            let (of_rank, after) = rest.split_at(pass.block_bytes(block) as usize);
            pass.write_block(block, of_rank)?;
            rest = after;
        }
        Ok(())
    }
}

impl ForwardPass for TensorParallelPass {
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn device(&self) -> DeviceInfo {
        let first = self.first.device();
        DeviceInfo { name: format!("{} x {}", self.n_ranks(), first.name), ..first }
    }

    fn n_ctx(&self) -> usize {
        self.first.n_ctx()
    }

    fn n_seq(&self) -> usize {
        self.first.n_seq()
    }

    fn n_ubatch(&self) -> usize {
        self.first.n_ubatch()
    }

    fn n_past(&self, seq: usize) -> usize {
        self.first.n_past(seq)
    }

    fn rewind(&mut self, seq: usize, n: usize) -> usize {
        self.on_others(|pass| pass.rewind(seq, n));
        self.first.rewind(seq, n)
    }

    fn reachable(&self, seq: usize, n: usize) -> usize {
        self.first.reachable(seq, n)
    }

    fn share_prefix(&mut self, from: usize, to: usize, n: usize) -> Result<usize, ForwardError> {
        // All ranks have the same pages, and so succeed or fail alike.
        self.on_others(|pass| pass.share_prefix(from, to, n)).into_iter().try_for_each(|shared| shared.map(|_| ()))?;
        self.first.share_prefix(from, to, n)
    }

    fn cache_pages(&self) -> PageUse {
        self.first.cache_pages()
    }

    fn pages_held(&self, sequences: &[usize]) -> usize {
        self.first.pages_held(sequences)
    }

    fn kv_cache_bytes(&self) -> usize {
        self.first.kv_cache_bytes() + self.on_others(|pass| pass.kv_cache_bytes()).into_iter().sum::<usize>()
    }

    fn cache(&mut self) -> &mut dyn SequenceCache {
        self
    }

    fn forward_traced(
        &mut self,
        batch: &[BatchToken],
        trace: Option<LayerTrace<'_>>,
    ) -> Result<Logits<'_>, ForwardError> {
        self.on_all(RankCommand::Logits, batch, |first| first.forward_traced(batch, trace).map(|_| ()))?;
        Ok(self.first.last_logits())
    }

    fn forward_hidden(&mut self, batch: &[BatchToken]) -> Result<Vec<f32>, ForwardError> {
        self.on_all(RankCommand::Hidden, batch, |first| first.forward_hidden(batch))
    }

    fn forward_greedy(&mut self, batch: &[BatchToken]) -> Result<Vec<u32>, ForwardError> {
        self.on_all(RankCommand::Greedy, batch, |first| first.forward_greedy(batch))
    }

    fn forward_top_k(&mut self, batch: &[BatchToken], k: usize) -> Result<Vec<TopK>, ForwardError> {
        self.on_all(RankCommand::TopK(k), batch, |first| first.forward_top_k(batch, k))
    }

    fn max_top_k(&self) -> usize {
        self.first.max_top_k()
    }

    fn wake(&mut self) -> bool {
        self.on_all(RankCommand::Wake, &[], wake).is_ok()
    }

    fn start_profile(&mut self) -> Result<(), ForwardError> {
        // Timed passes launch other kernels (no graph, no persistent kernel), so all ranks have to be timed.
        self.on_others(ForwardPass::start_profile).into_iter().collect::<Result<(), _>>()?;
        self.first.start_profile()
    }

    fn take_profile(&mut self) -> Option<Profile> {
        self.on_others(ForwardPass::take_profile);
        self.first.take_profile()
    }
}
