//! Exchange of values between the ranks that share a model (tensor parallelism), on the host's side: each rank's mailbox in device memory, and the
//! flag by which any rank aborts a step. `kernels/exchange.cuh` describes the protocol.

use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::sys;

use crate::CudaError;
use crate::args::{CountExchangesArgs, ExchangeArgs, MAX_RANKS};
use crate::bounds;
use crate::device::{CudaBuffer, CudaDevice, check};
use crate::sharding::{Shard, ShardingPlan};
use crate::slice::DevicePtr;

/// Words at most that a rank sends another in one exchange. Longer vectors take several exchanges, or chunks.
const MAX_WORDS: usize = 1 << 20;
/// Values at most that one exchange sums by slices.
const MAX_SLICE_VALUES: usize = 1 << 23;
/// Words behind those of vectors: the best logit of a rank, in the persistent decode kernel (`highest_of_ranks` of `decode_argmax.cuh`).
const WORDS_OF_CHOICE: usize = 2;
/// Values of a chunk: `CHUNK` of `exchange.cu`.
pub(crate) const CHUNK: usize = 1 << 13;

/// A word in host memory that all ranks and the host access: whether the exchanges of the step are aborted. Kernels that poll a mailbox stop
/// when it is set, and set it when they time out.
#[derive(Debug)]
pub(crate) struct AbortFlag {
    word: *mut c_void,
    /// The device in whose context the memory was allocated.
    gpu: Arc<CudaDevice>,
}

// SAFETY: the word is accessed with atomics only.
unsafe impl Send for AbortFlag {}
// SAFETY: as above.
unsafe impl Sync for AbortFlag {}

impl Drop for AbortFlag {
    fn drop(&mut self) {
        bounds::note_free(self.word as u64);
        // SAFETY: all holders of the address hold this object, too.
        unsafe {
            if self.gpu.bind().is_ok() {
                let _ = sys::cuMemFreeHost(self.word);
            }
        }
    }
}

impl AbortFlag {
    /// A flag that is not set. Errors: pinned memory cannot be allocated.
    pub(crate) fn new(gpu: &Arc<CudaDevice>) -> Result<Self, CudaError> {
        gpu.bind()?;
        let mut word = std::ptr::null_mut();
        // Flags 1 and 2: portable to all devices, and mapped at the same address.
        // SAFETY: the driver returns memory that this object owns until it is dropped.
        check("take pinned memory", unsafe { sys::cuMemHostAlloc(&raw mut word, 16, 3) })?;
        bounds::note_allocation(word as u64, 16);
        let flag = Self { word, gpu: Arc::clone(gpu) };
        flag.set(false);
        Ok(flag)
    }

    /// The address of the word, which is the same on all devices.
    pub(crate) fn ptr(&self) -> DevicePtr<u32> {
        DevicePtr::from_address(self.word as u64)
    }

    fn word(&self) -> &AtomicU32 {
        // SAFETY: 16 bytes at an aligned address, which live as long as this object.
        unsafe { &*self.word.cast::<AtomicU32>() }
    }

    /// Sets the flag, which ends all waiting for other ranks, or clears it.
    pub(crate) fn set(&self, aborted: bool) {
        self.word().store(u32::from(aborted), Ordering::SeqCst);
    }

    /// `CudaError::RanksDiverged` if the flag is set: a rank aborted the step, whose results are invalid.
    pub(crate) fn check(&self) -> Result<(), CudaError> {
        if self.word().load(Ordering::SeqCst) == 0 { Ok(()) } else { Err(CudaError::RanksDiverged) }
    }
}

/// A rank's mailbox, and the addresses of the other ranks' mailboxes.
#[derive(Debug)]
pub(crate) struct Exchange {
    /// This rank's part of the model.
    pub(crate) shard: Shard,
    /// `[2, n_ranks, capacity + WORDS_OF_CHOICE]` words of 8 bytes, then `[2, n_ranks, 2, n_chunks]` tags of 4 bytes, then as many chunks.
    mailbox: CudaBuffer,
    /// Exchanges of all earlier steps: a `u32` that kernels read and increase.
    exchanges_done: CudaBuffer,
    /// Exchanges of this step so far.
    exchanges_of_step: u32,
    /// Values that a rank sends another in one exchange, a word each.
    pub(crate) capacity: usize,
    /// Chunks that a rank sends another in one phase of an exchange.
    n_chunks: usize,
    /// All mailboxes; null before [`Self::connect`].
    mailboxes: [DevicePtr<u64>; MAX_RANKS],
    /// The flag of all ranks of the model.
    pub(crate) abort: Arc<AbortFlag>,
    /// The rows of the output head that each rank has.
    pub(crate) vocabulary: Vec<Range<usize>>,
}

/// Values that a rank sends another in one exchange: enough for a vector of `n` elements, up to [`MAX_WORDS`], and for its part of a token's logits.
fn capacity_of(vocabulary: &[Range<usize>], n: usize) -> usize {
    let widest = vocabulary.iter().map(ExactSizeIterator::len).max().unwrap_or(0);
    n.min(MAX_WORDS).max(widest)
}

/// Chunks that a rank sends another in each phase of a sum of up to `n` values.
fn chunks_of(n_ranks: usize, n: usize) -> usize {
    n.min(MAX_SLICE_VALUES).div_ceil(4).div_ceil(n_ranks).div_ceil(CHUNK / 4).next_multiple_of(4)
}

/// Bytes of a mailbox.
fn mailbox_bytes(n_ranks: usize, capacity: usize, n_chunks: usize) -> u64 {
    (2 * n_ranks * ((capacity + WORDS_OF_CHOICE) * 8 + 2 * n_chunks * (1 + CHUNK) * 4)) as u64
}

impl Exchange {
    /// The mailbox of a rank, for vectors of up to `n` elements; it has to be connected before it is used. Errors: device memory cannot be allocated.
    pub(crate) fn new(
        gpu: &Arc<CudaDevice>,
        shard: &Shard,
        (n_vocab, n): (usize, usize),
        abort: &Arc<AbortFlag>,
    ) -> Result<Self, CudaError> {
        let vocabulary = shard.plan.vocabulary(n_vocab);
        let n_ranks = shard.plan.n_ranks;
        let (capacity, n_chunks) = (capacity_of(&vocabulary, n), chunks_of(n_ranks, n));
        Ok(Self {
            shard: shard.clone(),
            mailbox: gpu.zeros("mailboxes", mailbox_bytes(n_ranks, capacity, n_chunks))?,
            exchanges_done: gpu.zeros("mailboxes", 16)?,
            exchanges_of_step: 0,
            capacity,
            n_chunks,
            mailboxes: [DevicePtr::NULL; MAX_RANKS],
            abort: Arc::clone(abort),
            vocabulary,
        })
    }

    /// Bytes of device memory of a rank's mailbox.
    pub(crate) fn bytes(plan: &ShardingPlan, n_vocab: usize, n: usize) -> u64 {
        let capacity = capacity_of(&plan.vocabulary(n_vocab), n);
        mailbox_bytes(plan.n_ranks, capacity, chunks_of(plan.n_ranks, n))
    }

    /// This rank's mailbox.
    pub(crate) fn mailbox(&self) -> DevicePtr<u64> {
        self.mailbox.ptr()
    }

    /// Sets the addresses of all ranks' mailboxes, in the order of the ranks.
    pub(crate) fn connect(&mut self, mailboxes: &[DevicePtr<u64>]) {
        self.mailboxes[..mailboxes.len()].copy_from_slice(mailboxes);
    }

    /// Clears the mailbox and the number of exchanges. All ranks have to do it, while none of them runs an exchange.
    pub(crate) fn clear(&self) -> Result<(), CudaError> {
        self.mailbox.clear()?;
        self.exchanges_done.clear()
    }

    /// Values that one exchange can sum by slices.
    pub(crate) fn max_slice_values(&self) -> usize {
        self.n_chunks * CHUNK * self.shard.plan.n_ranks
    }

    /// The first row of the output head that this rank has.
    pub(crate) fn first_row(&self) -> usize {
        if self.shard.plan.head { self.vocabulary[self.shard.rank].start } else { 0 }
    }

    /// Begins a step: its exchanges are counted from 0.
    pub(crate) fn begin_step(&mut self) {
        self.exchanges_of_step = 0;
    }

    /// Counts an exchange; returns its index in the step.
    pub(crate) fn next_index(&mut self) -> u32 {
        self.exchanges_of_step += 1;
        self.exchanges_of_step - 1
    }

    /// The arguments of kernels that exchange values.
    pub(crate) fn args(&self) -> ExchangeArgs {
        ExchangeArgs {
            mailboxes: self.mailboxes,
            exchanges_done: self.exchanges_done.ptr(),
            abort: self.abort.ptr(),
            rank: self.shard.rank as u32,
            n_ranks: self.shard.plan.n_ranks as u32,
            n_words: (self.capacity + WORDS_OF_CHOICE) as u32,
            n_chunks: self.n_chunks as u32,
        }
    }

    /// The arguments of `count_exchanges`, which adds the step's exchanges to those before.
    pub(crate) fn count_args(&self) -> CountExchangesArgs {
        CountExchangesArgs { exchanges_done: self.exchanges_done.ptr(), n: self.exchanges_of_step, unused: 0 }
    }
}
