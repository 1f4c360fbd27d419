//! What a card needs to exchange parts of a step with others that share the model: `kernels/exchange.cuh`.

use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::sys;

use crate::CudaError;
use crate::args::{CountExchangesArgs, ExchangeArgs, MAX_RANKS};
use crate::device::{CudaBuffer, CudaDevice, check};
use crate::sharding::{Shard, ShardingPlan};

/// Most words of a mailbox for what one card sends at a time.
const MOST_WORDS: usize = 1 << 20;
/// Most values that are summed slice by slice at a time.
const MOST_IN_SLICES: usize = 1 << 23;
/// Words behind those of vectors: what cards tell of the token that each has chosen, as `decode.cu` has it.
const WORDS_OF_CHOICE: usize = 2;
/// Values of a chunk of a slice: `CHUNK` of `exchange.cu`.
pub(crate) const CHUNK: usize = 1 << 13;

/// A word that all cards and the host see: whether the exchanges of a step were given up.
#[derive(Debug)]
pub(crate) struct Ended {
    word: *mut c_void,
    /// Whose context it was made in.
    gpu: Arc<CudaDevice>,
}

// SAFETY: the word is used through atomics alone.
unsafe impl Send for Ended {}
// SAFETY: as above.
unsafe impl Sync for Ended {}

impl Drop for Ended {
    fn drop(&mut self) {
        // SAFETY: who has the address holds this.
        unsafe {
            if self.gpu.bind().is_ok() {
                let _ = sys::cuMemFreeHost(self.word);
            }
        }
    }
}

impl Ended {
    /// A word that says no.
    pub(crate) fn new(gpu: &Arc<CudaDevice>) -> Result<Self, CudaError> {
        gpu.bind()?;
        let mut word = std::ptr::null_mut();
        // 1 and 2: for all devices, at the same address.
        // SAFETY: the driver gives memory, which is this one's until it is dropped.
        check("take pinned memory", unsafe { sys::cuMemHostAlloc(&raw mut word, 16, 3) })?;
        let ended = Self { word, gpu: Arc::clone(gpu) };
        ended.set(false);
        Ok(ended)
    }

    fn word(&self) -> &AtomicU32 {
        // SAFETY: 16 bytes from an aligned address on, which live as long as this.
        unsafe { &*self.word.cast::<AtomicU32>() }
    }

    /// Lets all that wait for other cards give up, or wait again.
    pub(crate) fn set(&self, ended: bool) {
        self.word().store(u32::from(ended), Ordering::SeqCst);
    }

    /// An error where a card gave up.
    pub(crate) fn check(&self) -> Result<(), CudaError> {
        if self.word().load(Ordering::SeqCst) == 0 { Ok(()) } else { Err(CudaError::RanksDiverged) }
    }
}

/// A card's mailbox, and where those of the others are.
#[derive(Debug)]
pub(crate) struct Exchange {
    pub(crate) shard: Shard,
    /// `[2, n_ranks, capacity + WORDS_OF_CHOICE]` words of 8 bytes, and then of 4 `[2, n_ranks, 2, n_chunks]` and as many chunks.
    mailbox: CudaBuffer,
    /// How many exchanges the steps before had.
    before: CudaBuffer,
    /// How many this step has so far.
    of_step: u32,
    /// Values of vectors that a card sends another at a time.
    pub(crate) capacity: usize,
    n_chunks: usize,
    mailboxes: [u64; MAX_RANKS],
    pub(crate) ended: Arc<Ended>,
    /// The rows of the output head of each card.
    pub(crate) vocabulary: Vec<Range<usize>>,
}

/// Values that a card sends another at a time, of vectors of up to `n` elements and of its part of the logits of a token.
fn capacity_of(vocabulary: &[Range<usize>], n: usize) -> usize {
    let widest = vocabulary.iter().map(ExactSizeIterator::len).max().unwrap_or(0);
    n.min(MOST_WORDS).max(widest)
}

/// Chunks that a card sends another for each phase of a sum of up to `n` values.
fn chunks_of(n_ranks: usize, n: usize) -> usize {
    n.min(MOST_IN_SLICES).div_ceil(4).div_ceil(n_ranks).div_ceil(CHUNK / 4).next_multiple_of(4)
}

fn mailbox_bytes(n_ranks: usize, capacity: usize, n_chunks: usize) -> u64 {
    (2 * n_ranks * ((capacity + WORDS_OF_CHOICE) * 8 + 2 * n_chunks * (1 + CHUNK) * 4)) as u64
}

impl Exchange {
    /// That of a card, for vectors of up to `n` elements at a time; it is yet to be connected with the others.
    pub(crate) fn new(
        gpu: &Arc<CudaDevice>,
        shard: &Shard,
        (n_vocab, n): (usize, usize),
        ended: &Arc<Ended>,
    ) -> Result<Self, CudaError> {
        let vocabulary = shard.plan.vocabulary(n_vocab);
        let n_ranks = shard.plan.n_ranks;
        let (capacity, n_chunks) = (capacity_of(&vocabulary, n), chunks_of(n_ranks, n));
        Ok(Self {
            shard: shard.clone(),
            mailbox: gpu.zeros("mailboxes", mailbox_bytes(n_ranks, capacity, n_chunks))?,
            before: gpu.zeros("mailboxes", 16)?,
            of_step: 0,
            capacity,
            n_chunks,
            mailboxes: [0; MAX_RANKS],
            ended: Arc::clone(ended),
            vocabulary,
        })
    }

    /// Bytes of a card's mailbox.
    pub(crate) fn bytes(plan: &ShardingPlan, n_vocab: usize, n: usize) -> u64 {
        let capacity = capacity_of(&plan.vocabulary(n_vocab), n);
        mailbox_bytes(plan.n_ranks, capacity, chunks_of(plan.n_ranks, n))
    }

    /// Where its mailbox is.
    pub(crate) fn address(&self) -> u64 {
        self.mailbox.ptr()
    }

    /// Tells it where the mailboxes of all cards are, in their order.
    pub(crate) fn connect(&mut self, mailboxes: &[u64]) {
        self.mailboxes[..mailboxes.len()].copy_from_slice(mailboxes);
    }

    /// Begins anew, where no exchange is under way on any card.
    pub(crate) fn clear(&self) -> Result<(), CudaError> {
        self.mailbox.clear()?;
        self.before.clear()
    }

    /// Values that are summed slice by slice at a time.
    pub(crate) fn most_in_slices(&self) -> usize {
        self.n_chunks * CHUNK * self.shard.plan.n_ranks
    }

    /// The first row of the output head that this card has.
    pub(crate) fn first_row(&self) -> usize {
        if self.shard.plan.head { self.vocabulary[self.shard.rank].start } else { 0 }
    }

    /// Whether another card's results are the ones that count.
    pub(crate) fn follows(&self) -> bool {
        self.shard.rank > 0
    }

    /// Begins a step.
    pub(crate) fn begin_step(&mut self) {
        self.of_step = 0;
    }

    /// How many exchanges the step had before the one that begins.
    pub(crate) fn next(&mut self) -> u32 {
        self.of_step += 1;
        self.of_step - 1
    }

    pub(crate) fn args(&self) -> ExchangeArgs {
        ExchangeArgs {
            mailboxes: self.mailboxes,
            before: self.before.ptr(),
            ended: self.ended.word as u64,
            rank: self.shard.rank as u32,
            n_ranks: self.shard.plan.n_ranks as u32,
            n_words: (self.capacity + WORDS_OF_CHOICE) as u32,
            n_chunks: self.n_chunks as u32,
        }
    }

    /// What counts those of the step, at its end.
    pub(crate) fn count(&self) -> CountExchangesArgs {
        CountExchangesArgs { before: self.before.ptr(), n: self.of_step, unused: 0 }
    }
}
