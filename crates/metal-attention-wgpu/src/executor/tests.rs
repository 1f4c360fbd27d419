//! Tests of the persistent kernel's fallbacks (time-outs, late compilation, pages out of order) and of keeping the GPU
//! awake.

use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::{WgpuOptions, WgpuTuning};
use metal_attention_gguf::GgufFile;
use metal_attention_model::{
    Batch, CacheType, ForwardPass, LoadedModel, OutputKind, Outputs, Position, SessionOptions, Span, argmax,
};

use super::*;

/// The device of all tests, for one test at a time: a software GPU compiles the persistent kernel for ten seconds, and two
/// tests that begin together would both compile it. `None` without a GPU. Bounds of buffers are checked by the tests of each
/// kernel, not here.
fn device() -> Option<(MutexGuard<'static, ()>, Arc<WgpuDevice>)> {
    static DEVICE: OnceLock<Option<Arc<WgpuDevice>>> = OnceLock::new();
    static IN_USE: Mutex<()> = Mutex::new(());
    let guard = IN_USE.lock().unwrap_or_else(PoisonError::into_inner);
    let open = || match WgpuDevice::open(&WgpuOptions { checked: false, ..Default::default() }) {
        Ok(gpu) => Some(Arc::new(gpu)),
        Err(WgpuError::NoAdapter) if std::env::var_os("CI").is_none() => None,
        Err(e) => panic!("{e}"),
    };
    Some((guard, DEVICE.get_or_init(open).clone()?))
}

/// A forward pass with `groups` workgroups of the persistent kernel, or without it (0); `None`: the device's choice. All tests have the same options, and so
/// the same kernels.
fn start(gpu: &Arc<WgpuDevice>, groups: impl Into<Option<usize>>) -> WgpuForwardPass {
    let options = SessionOptions { n_ctx: 256, n_seq: 3, cache_type: CacheType::F32, ..Default::default() };
    let tuning = WgpuTuning { persistent_workgroups: groups.into(), ..Default::default() };
    let file = GgufFile::from_bytes(&metal_attention_testing::models::architectures()["llama-mha.gguf"]).unwrap();
    let model = LoadedModel::load(&file).unwrap();
    WgpuExecutor::tuned_session(Arc::clone(gpu), &model, &options, &tuning).unwrap()
}

#[test]
fn a_step_that_timed_out_is_evaluated_again() {
    let Some((_in_use, gpu)) = device() else { return };
    let mut one_by_one = start(&gpu, 0);
    let token = |pos| BatchToken { id: 5 + pos as u32, seq: 0, pos, output: true };
    let want: Vec<_> = (0..4).map(|pos| one_by_one.forward_greedy(&[token(pos)]).unwrap()).collect();
    for greedy in [false, true] {
        let mut persistent = start(&gpu, 1);
        for (pos, want) in want.iter().enumerate() {
            if pos == 2 {
                gpu.write(persistent.persistent_timed_out.as_ref().unwrap(), &[1u32]);
            }
            let got = if greedy {
                persistent.forward_greedy(&[token(pos)]).unwrap()
            } else {
                let top = persistent.forward_top_k(&[token(pos)], 1).unwrap();
                top.iter().map(|list| list[0].0).collect()
            };
            assert_eq!(got, *want, "position {pos}");
            assert_eq!(persistent.persistent_timed_out.is_none(), pos >= 2);
        }
    }
}

#[test]
fn keeping_the_gpu_awake_changes_no_results() {
    let Some((_in_use, gpu)) = device() else { return };
    let results = [false, true].map(|wakes| {
        let mut pass = start(&gpu, 0);
        pass.waker.is_of_use = true;
        let mut id = pass.forward_prompt(&[5, 6, 7]).unwrap();
        let mut generated = vec![id];
        for i in 0..12 {
            // In the first half with greedy steps in flight, in the second with a recorded next step.
            if wakes && i % 3 == 0 {
                assert!(pass.wake());
            }
            id = if i < 6 { pass.forward_token_greedy(id).unwrap() } else { argmax(pass.forward_token(id).unwrap()) };
            generated.push(id);
        }
        generated
    });
    assert_eq!(results[0].len(), 13);
    assert_eq!(results[0], results[1]);
}

#[test]
fn late_kernels_are_used() {
    let Some((_in_use, gpu)) = device() else { return };
    let want: Vec<_> = {
        let mut pass = start(&gpu, 0);
        let id = pass.forward_prompt(&[5, 6, 7]).unwrap();
        greedy(&mut pass, 0, id, 12).iter().map(|t| t.0).collect()
    };
    let mut pass = start(&gpu, 1);
    let Some(timed_out) = pass.persistent_timed_out.take() else { return };
    let dispatches = pass.plan_one.persistent_layers.take().unwrap();
    let id = pass.forward_prompt(&[5, 6, 7]).unwrap();
    let mut generated = greedy(&mut pass, 0, id, 5);
    assert!(pass.persistent_timed_out.is_none());
    // At this point greedy steps are in flight.
    pass.compiling_layers =
        Some(UntestedLayers { layers: PersistentLayers { dispatches, timed_out }, ended: Vec::new(), groups: 1 });
    let last = generated[4].0;
    generated.extend(greedy(&mut pass, 0, last, 7));
    assert!(pass.persistent_timed_out.is_some() && pass.compiling_layers.is_none());
    assert_eq!(generated.iter().map(|t| t.0).collect::<Vec<_>>(), want);
}

/// Decodes `n` tokens of sequence `seq` greedily after `id`. Returns each id, and whether the step found the sequence's
/// pages consecutive.
fn greedy(pass: &mut WgpuForwardPass, seq: usize, mut id: u32, n: usize) -> Vec<(u32, bool)> {
    let mut generated = Vec::new();
    for _ in 0..n {
        let token = BatchToken { id, seq, pos: pass.n_past(seq), output: true };
        id = pass.forward_greedy(&[token]).unwrap()[0];
        generated.push((id, pass.batch_shape(&[token], pass.page_table(), 0, ResultKind::Id).consecutive_pages));
    }
    generated
}

#[test]
fn pages_that_are_not_consecutive_are_read_layer_by_layer() {
    let Some((_in_use, gpu)) = device() else { return };
    let software = gpu.summary().kind == wgpu::DeviceType::Cpu;
    let [want, got] = [Some(0), if software { Some(1) } else { None }].map(|persistent_workgroups| {
        let mut pass = start(&gpu, persistent_workgroups);
        let is_persistent = pass.persistent_timed_out.is_some();
        let prompt: Vec<u32> = (0..100).map(|i| 3 + i * 7 % 200).collect();
        let id = pass.forward_prompt(&prompt).unwrap();
        // A sequence alone in the cache keeps consecutive pages: across page boundaries, after a cut, after sharing
        // with itself.
        let mut results = greedy(&mut pass, 0, id, 40);
        pass.truncate(70);
        results.extend(greedy(&mut pass, 0, 9, 70));
        pass.share_prefix(0, 0, 60).unwrap();
        results.extend(greedy(&mut pass, 0, 9, 10));
        assert!(results.iter().all(|&(_, consecutive_pages)| consecutive_pages));
        // Three sequences share a prefix: each one that appends first copies the last page, so that pages are seldom
        // consecutive.
        pass.share_prefix(0, 1, 70).unwrap();
        pass.share_prefix(0, 2, 70).unwrap();
        let others = [0, 1, 2].map(|seq| greedy(&mut pass, seq, 11, 80));
        assert_eq!(
            others[0].iter().map(|t| t.0).collect::<Vec<_>>(),
            others[1].iter().map(|t| t.0).collect::<Vec<_>>()
        );
        assert_eq!(
            others[0].iter().map(|t| t.0).collect::<Vec<_>>(),
            others[2].iter().map(|t| t.0).collect::<Vec<_>>()
        );
        assert!(others.iter().flatten().any(|&(_, consecutive_pages)| !consecutive_pages));
        // Alone in the cache again.
        pass.reset();
        pass.forward_prompt(&prompt).unwrap();
        let again = greedy(&mut pass, 0, id, 40);
        assert!(again.iter().all(|&(_, consecutive_pages)| consecutive_pages));
        assert_eq!(again, results[..40]);
        assert_eq!(pass.persistent_timed_out.is_some(), is_persistent, "no step timed out");
        results.extend(others.concat());
        results
    });
    assert_eq!(got, want);
}

/// Text behind a span has positions below its indices; the persistent kernel evaluates it, and a row by itself.
#[test]
fn text_behind_a_span_gives_the_same_ids_layer_by_layer() {
    let Some((_in_use, gpu)) = device() else { return };
    let [want, got] = [0, 1].map(|groups| {
        let mut pass = start(&gpu, groups);
        let is_persistent = pass.persistent_timed_out.is_some();
        let n_embd = pass.spec().n_embd;
        let rows: Vec<f32> = (0..9 * n_embd).map(|i| ((i * 7919) % 1009) as f32 / 504.5 - 1.0).collect();
        let positions: Vec<_> = (0..9).map(|i| Position([i / 3; 3])).collect();
        let tokens = |from: usize, n: usize| -> Vec<_> {
            (from..from + n).map(|pos| BatchToken { id: 5 + pos as u32, seq: 0, pos, output: true }).collect()
        };
        let first = Span { first: 4, rows: &rows, deepstack: &[], positions: &positions, bidirectional_in: &[] };
        let batch = tokens(0, 15);
        let run = |pass: &mut WgpuForwardPass, batch: Batch<'_>| {
            let (outputs, _) = pass.forward_outputs(batch, OutputKind::Ids, &[]).unwrap();
            let Outputs::Ids(ids) = outputs else { panic!("ids") };
            ids
        };
        let mut ids = run(&mut pass, Batch { tokens: &batch, spans: &[first], states: &[] });
        let last = ids[ids.len() - 1];
        ids.extend(greedy(&mut pass, 0, last, 8).iter().map(|t| t.0));
        // A row by itself, without and with an addition.
        let row = &rows[..n_embd];
        for deepstack in [&[][..], &[row]] {
            let alone = Span { first: 0, rows: row, deepstack, positions: &[], bidirectional_in: &[] };
            let batch = tokens(pass.n_past(0), 1);
            ids.extend(run(&mut pass, Batch { tokens: &batch, spans: &[alone], states: &[] }));
            ids.extend(greedy(&mut pass, 0, 7, 3).iter().map(|t| t.0));
        }
        assert_eq!(pass.persistent_timed_out.is_some(), is_persistent, "no step timed out");
        ids
    });
    assert_eq!(got, want);
}

#[test]
fn more_workgroups_than_run_at_the_same_time_are_not_used() {
    let Some((_in_use, gpu)) = device() else { return };
    if gpu.summary().kind == wgpu::DeviceType::Cpu {
        let groups = 4 * std::thread::available_parallelism().map_or(1, usize::from);
        assert!(start(&gpu, groups).persistent_timed_out.is_none());
    }
}
