//! [`CudaCards`]: a model that several cards share (tensor parallelism).

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;

use metal_attention_model::{
    BatchToken, CacheBlock, CacheLayout, DeviceInfo, ForwardError, ForwardPass, LayerTrace, Logits, MemoryUse,
    ModelSpec, PageTable, PageUse, Profile, SequenceCache, SequenceExtent, SnapshotError, TopK, Weights,
};

use crate::division::{Division, Share};
use crate::exchange::{Ended, Exchange};
use crate::{CudaDevice, CudaError, CudaForwardPass, CudaForwardPassOptions};

/// Runs a model on several NVIDIA GPUs of one host, each of which has a share of it: some heads of attention with their keys and
/// values, some of the width of feed-forwards and experts, some of the vocabulary. What cannot be shared out each has whole.
///
/// Each card has a [`CudaForwardPass`] over its share, with a thread of its own, and all are told the same things in the same order.
/// Inside a step they exchange their parts of sums in kernels, through each other's memory; all come to the same bits.
pub struct CudaCards {
    spec: ModelSpec,
    first: CudaForwardPass,
    others: Vec<Follower>,
    ended: Arc<Ended>,
    turns: Arc<[Turn]>,
    memory: MemoryUse,
    division: Arc<Division>,
}

/// Who took the last step on a card.
type LastStep = Arc<Mutex<Weak<CudaDevice>>>;

/// Those of all cards, by ordinal. Kernels that wait for another card fill their own, together with what is queued behind them: models
/// that have two cards in common would wait for each other, each where the other has no room. So they take turns.
static LAST_STEPS: Mutex<BTreeMap<usize, LastStep>> = Mutex::new(BTreeMap::new());

/// A card of a model, and who took the last step on it.
struct Turn {
    gpu: Arc<CudaDevice>,
    last: LastStep,
}

impl Turn {
    /// Of all cards, in an order in which everybody waits for them.
    fn of(gpus: &[Arc<CudaDevice>]) -> Arc<[Self]> {
        let mut cards = LAST_STEPS.lock().unwrap_or_else(PoisonError::into_inner);
        let gpus: BTreeMap<usize, _> = gpus.iter().map(|gpu| (gpu.summary().ordinal, gpu)).collect();
        let turn = |(ordinal, gpu)| Self { gpu: Arc::clone(gpu), last: Arc::clone(cards.entry(ordinal).or_default()) };
        gpus.into_iter().map(turn).collect()
    }

    /// The card, when steps of others have ended there, also those that run ahead.
    fn take(&self) -> Result<MutexGuard<'_, Weak<CudaDevice>>, CudaError> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(other) = last.upgrade().filter(|other| !Arc::ptr_eq(other, &self.gpu)) {
            other.wait()?;
        }
        *last = Arc::downgrade(&self.gpu);
        Ok(last)
    }
}

/// What a step is to give.
#[derive(Debug, Clone, Copy)]
enum Work {
    Logits,
    Hidden,
    Greedy,
    TopK(usize),
    /// Nothing: cards that were idle come up to their speed.
    Wake,
}

type Outcome = Result<(), ForwardError>;

/// A card whose results are those of the first.
struct Follower {
    pass: Arc<Mutex<CudaForwardPass>>,
    /// Taken when the thread is to end.
    steps: Option<Sender<(Work, Arc<[BatchToken]>)>>,
    outcomes: Receiver<Outcome>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.steps = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The system gives no thread for a card.
fn no_thread(error: &std::io::Error) -> CudaError {
    CudaError::Driver { what: "start a thread for a card", why: error.to_string() }
}

fn lost() -> ForwardError {
    ForwardError::Device { why: "the thread of a card met a defect".into() }
}

/// As [`ForwardPass::wake`]; an error where that is of no use.
fn wake(pass: &mut CudaForwardPass) -> Outcome {
    if pass.wake() { Ok(()) } else { Err(CudaError::Parted.into()) }
}

impl Follower {
    fn start(pass: CudaForwardPass, ended: &Arc<Ended>) -> Result<Self, CudaError> {
        let pass = Arc::new(Mutex::new(pass));
        let (steps, wanted) = mpsc::channel::<(Work, Arc<[BatchToken]>)>();
        let (told, outcomes) = mpsc::channel();
        let (own, ended) = (Arc::clone(&pass), Arc::clone(ended));
        let run = move || {
            for (work, batch) in wanted {
                let mut pass = own.lock().unwrap_or_else(PoisonError::into_inner);
                let step = AssertUnwindSafe(|| match work {
                    Work::Logits => pass.forward_traced(&batch, None).map(|_| ()),
                    Work::Hidden => pass.forward_hidden(&batch).map(|_| ()),
                    Work::TopK(k) => pass.forward_top_k(&batch, k).map(|_| ()),
                    Work::Greedy => pass.forward_greedy(&batch).map(|_| ()),
                    Work::Wake => wake(&mut pass),
                });
                let outcome = catch_unwind(step).unwrap_or_else(|_| Err(lost()));
                drop(pass);
                if outcome.is_err() {
                    // The others wait for this one.
                    ended.set(true);
                }
                if told.send(outcome).is_err() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("cuda card".into()).spawn(run);
        Ok(Self { pass, steps: Some(steps), outcomes, thread: Some(thread.map_err(|error| no_thread(&error))?) })
    }

    fn begin(&self, work: Work, batch: &Arc<[BatchToken]>) {
        // Where the thread is gone there is no outcome either.
        let _ = self.steps.as_ref().map(|steps| steps.send((work, Arc::clone(batch))));
    }

    fn outcome(&self) -> Outcome {
        self.outcomes.recv().unwrap_or_else(|_| Err(lost()))
    }

    /// Its forward pass, between steps.
    fn pass(&self) -> MutexGuard<'_, CudaForwardPass> {
        self.pass.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CudaCards {
    /// Shares a model out among `gpus`, different ones, and sets it up on each. `options` hold for all of them together.
    pub fn new(
        gpus: &[Arc<CudaDevice>],
        spec: &ModelSpec,
        weights: &Weights,
        options: &CudaForwardPassOptions,
    ) -> Result<Self, CudaError> {
        let division = Arc::new(Division::new(spec, weights, gpus.len())?);
        for from in gpus {
            for to in gpus.iter().filter(|to| !Arc::ptr_eq(from, to)) {
                from.see_memory_of(to)?;
            }
        }
        let Some(first) = gpus.first() else { return Err(CudaError::Indivisible { n_cards: 0 }) };
        let ended = Arc::new(Ended::new(first)?);
        let set_up = |rank: usize| {
            let share = Share { division: Arc::clone(&division), rank };
            CudaForwardPass::with_share(Arc::clone(&gpus[rank]), spec.clone(), weights, options, Some((&share, &ended)))
        };
        let passes: Result<Vec<_>, CudaError> = std::thread::scope(|scope| {
            let set_up = &set_up;
            let begin = |rank| std::thread::Builder::new().spawn_scoped(scope, move || set_up(rank));
            let threads: Vec<_> = (0..gpus.len()).map(begin).collect();
            let lost = || CudaError::Driver { what: "set a card up", why: "its thread met a defect".into() };
            let end = |thread: std::io::Result<std::thread::ScopedJoinHandle<'_, _>>| {
                thread.map_err(|error| no_thread(&error))?.join().unwrap_or_else(|_| Err(lost()))
            };
            threads.into_iter().map(end).collect()
        });
        let mut passes = passes?;
        // All take the same launches, whatever each by itself would: shares, and cards, may be unlike.
        let at_once = passes.iter().map(|pass| pass.tokens_at_once(0)).min().unwrap_or(0);
        let mailboxes: Vec<_> = passes.iter().filter_map(|pass| pass.steps.exchange.as_ref()).collect();
        let mailboxes: Vec<u64> = mailboxes.into_iter().map(Exchange::address).collect();
        let mut memory = MemoryUse { weights: 0, kv_cache: 0, scratch: 0 };
        for pass in &mut passes {
            pass.limit_at_once(at_once);
            if let Some(exchange) = &mut pass.steps.exchange {
                exchange.connect(&mailboxes);
            }
            let own = pass.memory_use();
            memory.weights += own.weights;
            memory.kv_cache += own.kv_cache;
            memory.scratch += own.scratch;
            // Nobody writes to a mailbox before it is cleared.
            pass.gpu().wait()?;
        }
        let mut passes = passes.into_iter();
        let Some(first) = passes.next() else { return Err(CudaError::Indivisible { n_cards: 0 }) };
        let others = passes.map(|pass| Follower::start(pass, &ended)).collect::<Result<_, _>>()?;
        Ok(Self { spec: spec.clone(), first, others, ended, turns: Turn::of(gpus), memory, division })
    }

    /// The first card.
    pub fn gpu(&self) -> &Arc<CudaDevice> {
        self.first.gpu()
    }

    /// What of the model is shared out, and what each card has whole, in words.
    pub fn shared(&self) -> String {
        let layers = self.spec.layers.iter();
        let mixers = layers.filter(|layer| self.division.divides_mixer(&layer.mixer)).count();
        let feed_forwards = self.division.feed_forwards.iter().filter(|divided| **divided).count();
        let n_layer = self.spec.n_layer();
        let head = if self.division.head { "and the output head" } else { "not the output head" };
        format!("the mixers of {mixers} and the feed-forwards of {feed_forwards} of {n_layer} layers, {head}")
    }

    /// Whether the token at position `pos` of a text goes through all layers in one launch on each card when it goes alone.
    pub fn has_one_launch(&self, pos: usize) -> bool {
        self.first.has_one_launch(pos)
    }

    /// How many cards there are.
    pub fn n_cards(&self) -> usize {
        1 + self.others.len()
    }

    /// Bytes it holds on all cards together.
    pub fn memory_use(&self) -> MemoryUse {
        self.memory
    }

    /// Has all cards take the same step; what the first one gives. On an error the cache is as it was.
    fn step<T>(
        &mut self,
        work: Work,
        batch: &[BatchToken],
        of_first: impl FnOnce(&mut CudaForwardPass) -> Result<T, ForwardError>,
    ) -> Result<T, ForwardError> {
        let turns = Arc::clone(&self.turns);
        let _cards = turns.iter().map(Turn::take).collect::<Result<Vec<_>, _>>()?;
        let shared: Arc<[BatchToken]> = batch.into();
        for other in &self.others {
            other.begin(work, &shared);
        }
        let given = of_first(&mut self.first);
        if given.is_err() {
            self.ended.set(true);
        }
        let outcomes: Vec<_> = self.others.iter().map(Follower::outcome).collect();
        let (given, mut errors) = match given {
            Ok(given) => (Some(given), Vec::new()),
            Err(why) => (None, vec![why]),
        };
        errors.extend(outcomes.into_iter().filter_map(Result::err));
        if errors.is_empty()
            && let Some(given) = given
        {
            return Ok(given);
        }
        self.meet(batch)?;
        // Who gave up because of another one has less to tell.
        let parted = ForwardError::from(CudaError::Parted);
        let at = errors.iter().position(|why| *why != parted).unwrap_or(0);
        Err(if errors.is_empty() { parted } else { errors.swap_remove(at) })
    }

    /// After a step that failed: brings all cards to the same place again.
    fn meet(&mut self, batch: &[BatchToken]) -> Result<(), CudaError> {
        let Self { first, others, ended, .. } = self;
        let mut passes: Vec<_> = others.iter().map(Follower::pass).collect();
        let mut all: Vec<&mut CudaForwardPass> = vec![first];
        all.extend(passes.iter_mut().map(|pass| &mut **pass));
        for pass in &mut all {
            pass.clear_lookahead();
            pass.gpu().wait()?;
        }
        for exchange in all.iter().filter_map(|pass| pass.steps.exchange.as_ref()) {
            exchange.clear()?;
        }
        all.iter().try_for_each(|pass| pass.gpu().wait())?;
        ended.set(false);
        let n_seq = all[0].n_seq();
        for token in batch.iter().filter(|token| token.seq < n_seq) {
            loop {
                let lengths = || all.iter().map(|pass| pass.n_past(token.seq));
                let (least, most) = (lengths().min().unwrap_or(0), lengths().max().unwrap_or(0));
                if least == most {
                    break;
                }
                for pass in &mut all {
                    pass.rewind(token.seq, least);
                }
            }
        }
        Ok(())
    }

    fn on_others<T>(&self, mut of: impl FnMut(&mut CudaForwardPass) -> T) -> Vec<T> {
        self.others.iter().map(|other| of(&mut other.pass())).collect()
    }
}

impl Drop for CudaCards {
    fn drop(&mut self) {
        // Steps that run ahead write to mailboxes of all cards.
        self.ended.set(true);
        let _ = self.first.gpu().wait();
        self.on_others(|pass| drop(pass.gpu().wait()));
    }
}

/// A block is that of the first card, then those of the others: all have the same pages and slots.
impl SequenceCache for CudaCards {
    fn layout(&self) -> CacheLayout {
        let mut all = self.first.layout();
        all.format = format!("{} on {} cards", all.format, self.n_cards());
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
        let (own, mut rest) = bytes.split_at_mut(self.first.block_bytes(block) as usize);
        self.first.read_block(block, own)?;
        for other in &self.others {
            let mut pass = other.pass();
            let (own, others) = rest.split_at_mut(pass.block_bytes(block) as usize);
            pass.read_block(block, own)?;
            rest = others;
        }
        Ok(())
    }

    fn write_block(&mut self, block: CacheBlock, bytes: &[u8]) -> Result<(), ForwardError> {
        let (own, mut rest) = bytes.split_at(self.first.block_bytes(block) as usize);
        self.first.write_block(block, own)?;
        for other in &self.others {
            let mut pass = other.pass();
            let (own, others) = rest.split_at(pass.block_bytes(block) as usize);
            pass.write_block(block, own)?;
            rest = others;
        }
        Ok(())
    }
}

impl ForwardPass for CudaCards {
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn device(&self) -> DeviceInfo {
        let of_one = self.first.device();
        DeviceInfo { name: format!("{} x {}", self.n_cards(), of_one.name), ..of_one }
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
        // All have the same pages, and so the same errors.
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
        self.step(Work::Logits, batch, |first| first.forward_traced(batch, trace).map(|_| ()))?;
        Ok(self.first.last_logits())
    }

    fn forward_hidden(&mut self, batch: &[BatchToken]) -> Result<Vec<f32>, ForwardError> {
        self.step(Work::Hidden, batch, |first| first.forward_hidden(batch))
    }

    fn forward_greedy(&mut self, batch: &[BatchToken]) -> Result<Vec<u32>, ForwardError> {
        self.step(Work::Greedy, batch, |first| first.forward_greedy(batch))
    }

    fn forward_top_k(&mut self, batch: &[BatchToken], k: usize) -> Result<Vec<TopK>, ForwardError> {
        self.step(Work::TopK(k), batch, |first| first.forward_top_k(batch, k))
    }

    fn max_top_k(&self) -> usize {
        self.first.max_top_k()
    }

    fn wake(&mut self) -> bool {
        self.step(Work::Wake, &[], wake).is_ok()
    }

    fn start_profile(&mut self) -> Result<(), ForwardError> {
        // What is timed goes another way, on all cards.
        self.on_others(ForwardPass::start_profile).into_iter().collect::<Result<(), _>>()?;
        self.first.start_profile()
    }

    fn take_profile(&mut self) -> Option<Profile> {
        self.on_others(ForwardPass::take_profile);
        self.first.take_profile()
    }
}
