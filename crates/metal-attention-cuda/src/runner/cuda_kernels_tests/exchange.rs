//! Sums and gathers over several devices (`exchange.cu`), each rank in a thread of its own: vectors of fewer elements than
//! a block has threads and of many blocks, slices of which some are empty, halves of mailboxes that are used again, and
//! numbers of exchanges that wrap around.
//!
//! All ranks have to have the same bits. The tests need several devices with access to each other's memory.
//!
//! Kernels wait for those of other ranks, and calls such as an allocation or the first use of a kernel may wait for all kernels of
//! a device. So all ranks prepare, then all launch, then all read; and one test has the devices at a time.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use metal_attention_model::Watch;

use super::{Expected, assert_close, device, launch, poisoned, random, read};
use crate::CudaDevice;
use crate::args::{AllGatherArgs, AllReduceArgs, CountExchangesArgs, ExchangeArgs, MAX_RANKS};
use crate::bounds::KernelArgs;
use crate::device::{CudaBuffer, cuda_summaries};
use crate::exchange::{AbortFlag, CHUNK};
use crate::kernels::{self, EntryPoint};
use crate::launch::LaunchGrid;
use crate::slice::DevicePtr;

/// Words from each rank to each; chunks likewise.
const N_WORDS: usize = 3001;
const N_CHUNKS: usize = 4;

/// Held by the test that has the devices.
static DEVICES: Mutex<()> = Mutex::new(());

/// The ranks' devices and mailboxes.
struct Ranks {
    _devices: MutexGuard<'static, ()>,
    gpus: Vec<Arc<CudaDevice>>,
    mailboxes: Vec<CudaBuffer>,
    done: Vec<CudaBuffer>,
    abort: AbortFlag,
}

impl Ranks {
    /// `exchanges_done`: exchanges before. `None` if there are no such devices; noted as skipped.
    fn new(n: usize, exchanges_done: u32) -> Option<Self> {
        device()?;
        if cuda_summaries().unwrap().len() < n {
            metal_attention_testing::skip(&format!("no {n} CUDA devices"));
            return None;
        }
        let devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
        let gpus: Vec<_> = (0..n).map(|i| Arc::new(CudaDevice::open(i, Watch::default()).unwrap())).collect();
        for from in &gpus {
            for to in gpus.iter().filter(|to| !Arc::ptr_eq(from, to)) {
                if from.enable_peer_access(to).is_err() {
                    metal_attention_testing::skip("no access to the memory of other CUDA devices");
                    return None;
                }
            }
        }
        let bytes = 2 * n * (8 * N_WORDS + 2 * N_CHUNKS * (1 + CHUNK) * 4);
        let mailboxes = gpus.iter().map(|gpu| gpu.zeros("mailboxes", bytes as u64).unwrap()).collect();
        let done = gpus.iter().map(|gpu| gpu.upload("mailboxes", &[exchanges_done]).unwrap()).collect();
        let abort = AbortFlag::new(&gpus[0]).unwrap();
        Some(Self { _devices: devices, gpus, mailboxes, done, abort })
    }

    fn n(&self) -> usize {
        self.gpus.len()
    }

    fn args(&self, rank: usize) -> ExchangeArgs {
        let mut mailboxes = [DevicePtr::NULL; MAX_RANKS];
        mailboxes.iter_mut().zip(&self.mailboxes).for_each(|(to, mailbox)| *to = mailbox.ptr());
        ExchangeArgs {
            mailboxes,
            exchanges_done: self.done[rank].ptr(),
            abort: self.abort.ptr(),
            rank: rank as u32,
            n_ranks: self.n() as u32,
            n_words: N_WORDS as u32,
            n_chunks: N_CHUNKS as u32,
        }
    }

    /// Loads a kernel on all devices.
    fn load<A: KernelArgs>(&self, entry: EntryPoint<A>) {
        self.gpus.iter().for_each(|gpu| {
            gpu.bind().unwrap();
            gpu.kernel(entry).unwrap();
        });
    }

    /// Runs `of_rank` for each rank at the same time. The results, by rank.
    fn on_all<T: Send>(&self, of_rank: impl Fn(usize, &Arc<CudaDevice>) -> T + Sync) -> Vec<T> {
        std::thread::scope(|scope| {
            let of_rank = &of_rank;
            let start = |(rank, gpu): (usize, &Arc<CudaDevice>)| {
                let gpu = Arc::clone(gpu);
                scope.spawn(move || {
                    gpu.bind().unwrap();
                    of_rank(rank, &gpu)
                })
            };
            let threads: Vec<_> = self.gpus.iter().enumerate().map(start).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    /// Launches the end of a step of `n` exchanges.
    fn count(&self, rank: usize, n: usize) {
        let gpu = &self.gpus[rank];
        let args = CountExchangesArgs { exchanges_done: self.done[rank].ptr(), n: n as u32, unused: 0 };
        let grid = LaunchGrid { blocks: [1, 1, 1], threads: 32, shared: 0 };
        launch(gpu, kernels::COUNT_EXCHANGES, grid, &args);
    }
}

/// The terms of rank `rank` of the `i`-th sum, of several sizes.
fn terms(rank: usize, i: usize, n: usize) -> Vec<f32> {
    let size = |at: usize| [1.0f32, 1e4, 1e-3, 0.0][at / 4 % 512 % 4];
    random((1000 * rank + i) as u64, n).iter().enumerate().map(|(at, v)| v * size(at)).collect()
}

/// A step of sums of vectors of `lengths` elements by a kernel, twice, so that all halves of the mailboxes are
/// used. `grid`: by the length. `rounds`: whether sums and the terms of other ranks are sent as F16.
fn check_sums(
    ranks: &Ranks,
    entry: EntryPoint<AllReduceArgs>,
    lengths: &[usize],
    grid: impl Fn(usize) -> LaunchGrid + Sync,
    rounds: bool,
) {
    ranks.load(entry);
    ranks.load(kernels::COUNT_EXCHANGES);
    for step in 0..2 {
        let scale = [0.75f32, -2.0][step];
        let number = |i: usize| step * lengths.len() + i;
        let before = |i: usize, n: usize| random((500 + number(i)) as u64, n);
        let adds = |i: usize| number(i).is_multiple_of(2);
        let buffers = ranks.on_all(|rank, gpu| {
            let buffers = lengths.iter().enumerate().map(|(i, &n)| {
                let part = gpu.upload("terms", &terms(rank, number(i), n)).unwrap();
                let out = if adds(i) { gpu.upload("sums", &before(i, n)).unwrap() } else { poisoned(gpu, n) };
                (part, out)
            });
            buffers.collect::<Vec<_>>()
        });
        // Launched one after the other, so that ranks may be ahead of each other.
        ranks.on_all(|rank, gpu| {
            for (i, (&n, (part, out))) in lengths.iter().zip(&buffers[rank]).enumerate() {
                let args = AllReduceArgs {
                    exchange: ranks.args(rank),
                    part: part.ptr(),
                    out: out.ptr(),
                    n: n as u32,
                    add: u32::from(adds(i)),
                    scale,
                    exchanges_before: i as u32,
                };
                launch(gpu, entry, grid(n), &args);
            }
            ranks.count(rank, lengths.len());
        });
        let results = ranks.on_all(|rank, gpu| {
            let sums = buffers[rank].iter().zip(lengths);
            sums.map(|((_, out), &n)| read::<f32>(gpu, out, n)).collect::<Vec<_>>()
        });
        ranks.abort.check().unwrap();
        for (i, &n) in lengths.iter().enumerate() {
            let what = format!("{} of {n} elements over {} ranks, exchange {}", entry.name, ranks.n(), number(i));
            let all: Vec<_> = (0..ranks.n()).map(|rank| terms(rank, number(i), n)).collect();
            let before = before(i, n);
            let expected: Vec<_> = (0..n)
                .map(|at| {
                    let sum: f64 = all.iter().map(|terms| f64::from(terms[at])).sum();
                    let size: f64 = all.iter().map(|terms| f64::from(terms[at]).abs()).sum();
                    let old = if adds(i) { f64::from(before[at]) } else { 0.0 };
                    // Half a unit in the last place of F16, of terms and of sums; and a few of F32.
                    let of = if rounds { 2.0 / 2048.0 } else { 0.0 } + 3e-7;
                    let error = of * size * f64::from(scale).abs() + 1e-7 * old.abs();
                    Expected { value: old + f64::from(scale) * sum, error }
                })
                .collect();
            for (rank, of_rank) in results.iter().enumerate() {
                assert_close(&of_rank[i], &expected, n, &format!("{what}, rank {rank}"));
                assert_eq!(of_rank[i], results[0][i], "{what}: ranks 0 and {rank}");
            }
        }
    }
}

#[test]
fn all_reduces() {
    // The number of the exchange wraps around within the first step.
    for (n_ranks, exchanges_done) in [(2, 0), (3, u32::MAX - 2), (4, u32::MAX - 3)] {
        let Some(ranks) = Ranks::new(n_ranks, exchanges_done) else { return };
        let n_sm = ranks.gpus[0].summary().n_sm;
        let grid = |n: usize| LaunchGrid { blocks: [n.div_ceil(256).clamp(1, n_sm), 1, 1], threads: 256, shared: 0 };
        check_sums(&ranks, kernels::ALL_REDUCE, &[1, 255, 257, 3, N_WORDS], grid, false);
        for (rank, done) in ranks.done.iter().enumerate() {
            let expected = exchanges_done.wrapping_add(10);
            assert_eq!(read::<u32>(&ranks.gpus[rank], done, 1), [expected], "exchanges of rank {rank}");
        }
    }
}

/// The grid of a sum by slices, as the runner chooses it.
fn sliced(n_ranks: usize, n: usize) -> LaunchGrid {
    LaunchGrid { blocks: [n.div_ceil(n_ranks).div_ceil(CHUNK), 1, 1], threads: 512, shared: 0 }
}

#[test]
fn sums_by_slices() {
    for (n_ranks, exchanges_done) in [(2, u32::MAX - 1), (3, 0), (4, 1)] {
        let Some(ranks) = Ranks::new(n_ranks, exchanges_done) else { return };
        // Ranks without a slice; a last slice that is shorter; slices around a chunk, and of two chunks and a rest.
        let lengths = [4, 8, 4 * n_ranks + 4, CHUNK * n_ranks, CHUNK * n_ranks + 4, 2 * CHUNK * n_ranks + 100];
        for (entry, rounds) in [(kernels::SUM_SLICES_EXACTLY, false), (kernels::SUM_SLICES, true)] {
            check_sums(&ranks, entry, &lengths, |n| sliced(n_ranks, n), rounds);
        }
    }
}

#[test]
fn all_gathers() {
    // Columns of each rank, of which some have none; rows have further columns.
    for (widths, n_rows) in [(vec![1, 1], 1), (vec![5, 0, 300], 3), (vec![70, 33, 1, 128], 7), (vec![0, 3000], 1)] {
        let Some(ranks) = Ranks::new(widths.len(), 7) else { return };
        let n_columns: usize = widths.iter().sum();
        let stride = n_columns + 2;
        let mut first_columns = [n_columns as u32; MAX_RANKS + 1];
        let mut first = 0;
        for (to, width) in first_columns.iter_mut().zip(&widths) {
            *to = first;
            first += *width as u32;
        }
        let what = format!("{n_rows} rows of {widths:?}");
        ranks.load(kernels::ALL_GATHER);
        ranks.load(kernels::COUNT_EXCHANGES);
        for step in 0..3 {
            let whole = random(60 + step, n_rows * stride);
            let buffers = ranks.on_all(|rank, gpu| {
                let own = first_columns[rank] as usize..first_columns[rank + 1] as usize;
                let rows: Vec<f32> = whole
                    .iter()
                    .enumerate()
                    .map(|(i, v)| if own.contains(&(i % stride)) { *v } else { f32::NAN })
                    .collect();
                gpu.upload("rows", &rows).unwrap()
            });
            ranks.on_all(|rank, gpu| {
                let (n_rows, stride, exchange) = (n_rows as u32, stride as u32, ranks.args(rank));
                let rows = buffers[rank].ptr();
                let args = AllGatherArgs { exchange, rows, n_rows, stride, first_columns, exchanges_before: 0 };
                let grid = LaunchGrid { blocks: [2, 1, 1], threads: 256, shared: 0 };
                launch(gpu, kernels::ALL_GATHER, grid, &args);
                ranks.count(rank, 1);
            });
            let results = ranks.on_all(|rank, gpu| read::<f32>(gpu, &buffers[rank], whole.len()));
            ranks.abort.check().unwrap();
            for (rank, got) in results.iter().enumerate() {
                for (i, v) in got.iter().enumerate() {
                    let (row, column) = (i / stride, i % stride);
                    let right = if column < n_columns { *v == whole[i] } else { v.is_nan() };
                    assert!(right, "{what}, step {step}, rank {rank}: row {row}, column {column}: {v}");
                }
            }
        }
    }
}

/// A rank whose peer never sends: it ends once the flag is set.
#[test]
fn aborted_exchanges_end() {
    let Some(gpu) = device() else { return };
    let abort = AbortFlag::new(&gpu).unwrap();
    abort.set(true);
    let bytes = 2 * 2 * (8 * N_WORDS + 2 * N_CHUNKS * (1 + CHUNK) * 4);
    let mailboxes = [0, 1].map(|_| gpu.zeros("mailboxes", bytes as u64).unwrap());
    let (done, terms, out) = (gpu.upload("mailboxes", &[5u32]).unwrap(), random(1, 300), poisoned(&gpu, 300));
    let part = gpu.upload("terms", &terms).unwrap();
    let mut addresses = [DevicePtr::NULL; MAX_RANKS];
    addresses.iter_mut().zip(&mailboxes).for_each(|(to, mailbox)| *to = mailbox.ptr());
    let args = AllReduceArgs {
        exchange: ExchangeArgs {
            mailboxes: addresses,
            exchanges_done: done.ptr(),
            abort: abort.ptr(),
            rank: 0,
            n_ranks: 2,
            n_words: N_WORDS as u32,
            n_chunks: N_CHUNKS as u32,
        },
        part: part.ptr(),
        out: out.ptr(),
        n: 300,
        add: 0,
        scale: 1.0,
        exchanges_before: 0,
    };
    for (entry, threads) in [(kernels::ALL_REDUCE, 256), (kernels::SUM_SLICES, 512), (kernels::SUM_SLICES_EXACTLY, 512)]
    {
        let grid = LaunchGrid { blocks: [1, 1, 1], threads, shared: 0 };
        launch(&gpu, entry, grid, &args);
        gpu.wait().unwrap();
    }
    assert!(abort.check().is_err());
    // Sent all the same: exchange 5, in the second half, with tag 6.
    let words: Vec<u64> = read(&gpu, &mailboxes[1], 4 * N_WORDS);
    for (i, v) in terms.iter().enumerate() {
        assert_eq!(words[2 * N_WORDS + i], 6 << 32 | u64::from(v.to_bits()), "word {i}");
    }
}
