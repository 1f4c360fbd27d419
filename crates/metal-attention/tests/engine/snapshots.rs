//! Snapshots of sequences: after a restore the logits have the same bits as without it, on every backend and with every kind
//! of layer. Without a GPU or CUDA the test of it is skipped; without a GPU in CI, or without CUDA where
//! `METAL_ATTENTION_TEST_CUDA` is set, it fails.

use crate::toys::{Toy, kimi_linear, logits, read, some_ids, toy};
use metal_attention::{
    CacheType, CpuExecutor, CpuForwardPass, ForwardError, ForwardPass, SessionOptions, Snapshot, SnapshotError,
};
use metal_attention_cpu::CpuOptions;
use metal_attention_model::PAGE;
use metal_attention_testing::models::{architectures, more_architectures};
use proptest::prelude::*;

const N_CTX: usize = 400;

/// Models with attention, latent attention with the delta rule, and those of `names`: sliding windows and recurrent layers.
fn models(names: &[&'static str]) -> Vec<Toy> {
    let mut toys = vec![
        read("qwen3.gguf", &architectures()["qwen3.gguf"]),
        toy("latent attention, and channels that decay each by itself", &kimi_linear(20)),
    ];
    toys.extend(names.iter().map(|name| read(name, &more_architectures()[*name])));
    toys
}

fn on_cpu(toy: &Toy, cache_type: CacheType, n_seq: usize) -> CpuForwardPass {
    let options = SessionOptions { n_ctx: N_CTX, n_seq, cache_type, n_ubatch: 24, ..Default::default() };
    CpuExecutor::session(&CpuOptions { n_threads: 2, ..Default::default() }, &toy.model, &options).unwrap()
}

/// The snapshot of sequence `seq`, header and blocks.
fn save(pass: &mut dyn ForwardPass, seq: usize) -> Vec<u8> {
    let snapshot = Snapshot::of_sequence(pass.cache(), seq).unwrap();
    let mut bytes = Vec::new();
    snapshot.write_header(&mut bytes).unwrap();
    let header = bytes.len() as u64;
    snapshot.write_blocks(pass.cache(), seq, &mut bytes).unwrap();
    assert_eq!(bytes.len() as u64 - header, snapshot.block_bytes());
    bytes
}

/// Restores a snapshot as sequence `seq`. Returns the number of its tokens.
fn restore(pass: &mut dyn ForwardPass, seq: usize, mut bytes: &[u8]) -> Result<usize, SnapshotError> {
    let snapshot = Snapshot::read_header(&mut bytes, pass.n_ctx())?;
    snapshot.restore(pass.cache(), seq, &mut bytes)?;
    Ok(snapshot.n_tokens())
}

/// Saves prefixes of a sequence from `pass` and restores them in `other`, beside other sequences there; checks that they
/// continue with the same logits.
fn check_continuation(name: &str, lengths: &[usize], pass: &mut dyn ForwardPass, other: &mut dyn ForwardPass) {
    let ids = some_ids(300);
    for &n in lengths {
        let rest = &ids[n..n + 40];
        pass.reset();
        logits(pass, 0, &ids[..n]);
        let bytes = save(pass, 0);
        let (reached, cut) = (pass.reachable(0, n - 1), pass.reachable(0, n / 2));
        let want = logits(pass, 0, rest);
        // Restored while other sequences have pages and states.
        other.reset();
        logits(other, 0, &ids[3..80]);
        logits(other, 2, &ids[7..20]);
        assert_eq!(restore(other, 2, &bytes).unwrap(), n, "{name}");
        assert_eq!((other.n_past(2), other.reachable(2, n - 1)), (n, reached), "{name}: {n} tokens");
        assert_eq!(other.reachable(2, n / 2), cut, "{name}: {n} tokens");
        assert_eq!(save(other, 2), bytes, "{name}: {n} tokens");
        assert!(logits(other, 2, rest) == want, "{name}: after {n} tokens");
        // Restored beside a sequence that shares its pages; and continued from its last token, which is evaluated again
        // alone.
        restore(other, 1, &bytes).unwrap();
        other.share_prefix(1, 2, n).unwrap();
        pass.reset();
        logits(pass, 0, &ids[..n]);
        let last_token_again = |pass: &mut dyn ForwardPass, seq| {
            assert_eq!(pass.rewind(seq, n - 1), n - 1, "{name}");
            (logits(pass, seq, &ids[n - 1..n]), logits(pass, seq, rest))
        };
        assert!(last_token_again(other, 1) == last_token_again(pass, 0), "{name}: after the last of {n} tokens");
        assert!(logits(other, 2, rest) == want, "{name}: beside it");
    }
}

#[test]
fn sequences_continue_on_the_cpu() {
    let names = [
        "gemma3.gguf",
        "gemma3n.gguf",
        "gpt-oss.gguf",
        "lfm2.gguf",
        "qwen35.gguf",
        "mamba.gguf",
        "mamba2.gguf",
        "jamba.gguf",
        "falcon-h1.gguf",
        "rwkv6.gguf",
        "rwkv7.gguf",
    ];
    for toy in models(&names) {
        for cache_type in [CacheType::F16, CacheType::F32] {
            check_continuation(
                toy.name,
                &[1, 130, 4 * PAGE],
                &mut on_cpu(&toy, cache_type, 3),
                &mut on_cpu(&toy, cache_type, 3),
            );
        }
    }
}

#[cfg(feature = "wgpu")]
#[test]
fn sequences_continue_on_the_gpu() {
    use std::sync::Arc;

    use metal_attention::{SessionOptions, WgpuExecutor};

    let Some(gpu) = crate::wgpu::device::gpu() else { return };
    let options = SessionOptions { n_ctx: N_CTX, n_seq: 3, n_ubatch: 50, ..Default::default() };
    let few = crate::wgpu::device::takes_fewer_cases(&gpu);
    for toy in models(if few { &["qwen35.gguf"] } else { &["qwen35.gguf", "gemma3.gguf"] }) {
        let open = || WgpuExecutor::session(Arc::clone(&gpu), &toy.model, &options).unwrap();
        check_continuation(toy.name, &[130], &mut open(), &mut open());
    }
}

#[cfg(feature = "cuda")]
#[test]
fn sequences_continue_on_cuda() {
    use std::sync::Arc;

    use metal_attention::{CudaDevice, CudaExecutor, SessionOptions, TensorParallelExecutor, Watch, cuda_summaries};

    let n_devices = cuda_summaries().map_or(0, |found| found.len());
    if n_devices == 0 {
        assert!(std::env::var_os("METAL_ATTENTION_TEST_CUDA").is_none(), "CUDA knows no device");
        return metal_attention_testing::skip("CUDA knows no device");
    }
    let options = SessionOptions { n_ctx: N_CTX, n_seq: 3, n_ubatch: 50, ..Default::default() };
    let device = |i| Arc::new(CudaDevice::open(i, Watch::default()).unwrap());
    let gpu = device(0);
    for toy in models(&["gemma3.gguf", "qwen35.gguf", "rwkv7.gguf"]) {
        let open = || CudaExecutor::session(Arc::clone(&gpu), &toy.model, &options).unwrap();
        check_continuation(toy.name, &[130], &mut open(), &mut open());
    }
    if n_devices > 1 {
        let toy = &models(&[])[0];
        let gpus = [gpu, device(1)];
        let open = || TensorParallelExecutor::session(&gpus, &toy.model, &options).unwrap();
        check_continuation("two ranks", &[130], &mut open(), &mut open());
    }
}

#[test]
fn snapshots_of_other_caches_are_refused() {
    let all = models(&["gemma3.gguf"]);
    let mut pass = on_cpu(&all[0], CacheType::F16, 2);
    logits(&mut pass, 0, &some_ids(70));
    let bytes = save(&mut pass, 0);
    let free = pass.cache_pages().free;
    for (toy, cache_type) in [(&all[0], CacheType::F32), (&all[2], CacheType::F16)] {
        let mut other = on_cpu(toy, cache_type, 1);
        let outcome = restore(&mut other, 0, &bytes);
        assert!(matches!(outcome, Err(SnapshotError::OtherLayout { .. })), "{outcome:?}");
    }
    // Truncated within the header and within a page: the sequence is empty afterwards, also of its earlier tokens.
    for n in [0, 40, bytes.len() - 1] {
        logits(&mut pass, 1, &some_ids(9));
        let outcome = restore(&mut pass, 1, &bytes[..n]);
        assert!(matches!(outcome, Err(SnapshotError::Read(_))), "{outcome:?}");
        pass.rewind(1, 0);
        assert_eq!(pass.cache_pages().free, free, "{n} bytes");
    }
    // Longer than the context, and larger than the free pages.
    let small = |n_ctx, n_cache| {
        let options = SessionOptions { n_ctx, n_cache: Some(n_cache), n_seq: 2, ..Default::default() };
        CpuExecutor::session(&CpuOptions { n_threads: 1, ..Default::default() }, &all[0].model, &options).unwrap()
    };
    let outcome = restore(&mut small(69, 128), 0, &bytes);
    assert!(matches!(outcome, Err(SnapshotError::Damaged { .. })), "{outcome:?}");
    let mut full = small(128, 128);
    logits(&mut full, 0, &some_ids(3));
    let outcome = restore(&mut full, 1, &bytes);
    let out_of_pages = ForwardError::OutOfPages { needed: 2, free: 1, total: 2, page_len: PAGE };
    assert!(matches!(&outcome, Err(SnapshotError::Forward(e)) if *e == out_of_pages), "{outcome:?}");
    let outcome = restore(&mut full, 2, &bytes);
    assert!(matches!(outcome, Err(SnapshotError::Forward(ForwardError::SequenceOutOfRange { .. }))), "{outcome:?}");
}

/// If memory does not have room for all checkpoints, the state at the end is restored, and as many checkpoints as fit.
#[test]
fn checkpoints_that_do_not_fit_are_left_out() {
    let toy = read("qwen35.gguf", &more_architectures()["qwen35.gguf"]);
    let ids = some_ids(330);
    let mut pass = on_cpu(&toy, CacheType::F16, 2);
    logits(&mut pass, 0, &ids[..300]);
    let bytes = save(&mut pass, 0);
    let want = logits(&mut pass, 0, &ids[300..]);
    let options = SessionOptions { n_ctx: N_CTX, n_seq: 1, n_ubatch: 24, state_cache: 0, ..Default::default() };
    let mut small =
        CpuExecutor::session(&CpuOptions { n_threads: 2, ..Default::default() }, &toy.model, &options).unwrap();
    assert_eq!(small.cache_pages().states.total, 3);
    restore(&mut small, 0, &bytes).unwrap();
    assert_eq!(small.cache_pages().states.free, 0);
    assert!(logits(&mut small, 0, &ids[300..]) == want);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Restoring any changed header returns an error or a usable sequence. It does not panic, and the other sequence is
    /// unchanged.
    #[test]
    fn hostile_snapshots_do_no_harm(at in 0usize..160, value in prop_oneof![0u64..400, any::<u64>()], n in 1usize..9) {
        use std::cell::RefCell;
        thread_local!(static ALL: RefCell<Option<(CpuForwardPass, Vec<u8>)>> = const { RefCell::new(None) });
        ALL.with_borrow_mut(|all| {
            let (pass, bytes) = all.get_or_insert_with(|| {
                let toy = toy("hybrid", &kimi_linear(8));
                let mut pass = on_cpu(&toy, CacheType::F16, 2);
                logits(&mut pass, 0, &some_ids(150));
                let bytes = save(&mut pass, 0);
                (pass, bytes)
            });
            let mut bytes = bytes.clone();
            bytes[at..at + n].copy_from_slice(&value.to_le_bytes()[..n]);
            if restore(pass, 1, &bytes).is_ok() {
                let n_past = pass.n_past(1);
                logits(pass, 1, &some_ids(1));
                assert_eq!(pass.n_past(1), n_past + 1);
            } else {
                assert_eq!(pass.n_past(1), 0);
            }
            assert_eq!(pass.n_past(0), 150);
            pass.rewind(1, 0);
        });
    }
}
