//! The persistent kernel, which runs all layers of one token in one dispatch, gives the logits that one dispatch per op
//! gives, with one workgroup and with as many as run concurrently.
//!
//! The workgroups wait for each other, so that all must run at the same time. A software GPU (Mesa's llvmpipe) has a thread
//! per core and gives each thread a workgroup if there are no more workgroups than threads (`lp_cs_tpool.c`): there one test
//! uses two workgroups for a few steps, and the other tests use one. More could wait for a workgroup that never begins. The
//! operating system may pause a thread for longer than another one waits for it: then the kernel aborts the step, and the
//! test repeats it from the start. Tests with several workgroups run one after the other, so that they do not delay each
//! other.
//!
//! llvmpipe compiles the persistent kernel of one model for ten seconds and more. On it each kind of model, tensor types and
//! options is tested once, in as few different kernels as hold them all; other GPUs test every combination.

use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::wgpu::device::{gpu, takes_fewer_cases};
use metal_attention::gguf::{GgufFile, GgufWriter, Tensor, TensorDecl, TensorType};
use metal_attention::wgpu::WgpuDevice;
use metal_attention::{
    BatchToken, CacheType, ForwardPass, LoadedModel, SessionOptions, WgpuExecutor, WgpuForwardPass, WgpuTuning,
};
use metal_attention_testing::models::{architectures, quants, small_quants};

/// Squared error of `got` over the squares of `want`.
fn nmse(got: &[f32], want: &[f32]) -> f64 {
    let square = |v: f64| v * v;
    let error: f64 = got.iter().zip(want).map(|(&g, &w)| square(f64::from(g) - f64::from(w))).sum();
    error / want.iter().map(|&w| square(f64::from(w))).sum::<f64>()
}

/// The options of forward passes that differ in the workgroups of the persistent kernel.
#[derive(Clone, Copy)]
struct Setup {
    options: SessionOptions,
    layers_in_a_buffer: usize,
}

impl Setup {
    /// A context of `n_ctx` tokens, and buffers as large as the device allows.
    fn new(n_ctx: usize) -> Self {
        let options = SessionOptions { n_ctx, cache_type: CacheType::F32, ..Default::default() };
        Self { options, layers_in_a_buffer: usize::MAX }
    }

    /// The model of `file` with `groups` workgroups, or without the persistent kernel (0).
    fn start(&self, gpu: &Arc<WgpuDevice>, file: &GgufFile, groups: usize) -> WgpuForwardPass {
        let model = LoadedModel::load(file).unwrap();
        let tuning = WgpuTuning { persistent_workgroups: Some(groups), layers_in_a_buffer: self.layers_in_a_buffer };
        WgpuExecutor::tuned_session(Arc::clone(gpu), &model, &self.options, &tuning).unwrap()
    }
}

/// A forward pass with the persistent kernel, and the tokens that it needs to start again.
struct PersistentPass<'a> {
    gpu: &'a Arc<WgpuDevice>,
    file: &'a GgufFile,
    setup: Setup,
    /// Workgroups of the persistent kernel.
    groups: usize,
    pass: WgpuForwardPass,
    /// The tokens evaluated so far, by sequence and position.
    tokens: Vec<BatchToken>,
    /// Number of aborted steps.
    n_aborted: usize,
}

impl<'a> PersistentPass<'a> {
    /// Starts a forward pass with `groups` workgroups; `None` if the persistent kernel does not support the model.
    fn start(gpu: &'a Arc<WgpuDevice>, file: &'a GgufFile, setup: Setup, groups: usize) -> Option<Self> {
        // A single workgroup waits for no other. Software GPUs, which compile the kernel for ten seconds, take several
        // workgroups for models that it supports.
        let first = if gpu.summary().is_software() { groups } else { 1 };
        let pass = setup.start(gpu, file, first);
        if first == 1 && !is_persistent(&pass) {
            return None;
        }
        let mut this = Self { gpu, file, setup, groups, pass, tokens: Vec::new(), n_aborted: 0 };
        if groups != first || !is_persistent(&this.pass) {
            this.restart();
        }
        Some(this)
    }

    /// Starts forward passes until all workgroups of one have run concurrently, and evaluates the tokens so far again.
    fn restart(&mut self) {
        while {
            self.pass = self.setup.start(self.gpu, self.file, self.groups);
            !is_persistent(&self.pass)
        } {
            self.count_abort();
        }
        for tokens in self.tokens.chunk_by(|a, b| a.seq == b.seq) {
            self.pass.forward(tokens).unwrap();
        }
    }

    /// Counts an aborted step; panics after too many.
    fn count_abort(&mut self) {
        self.n_aborted += 1;
        let groups = self.groups;
        assert!(self.n_aborted < MAX_ABORTED, "{groups} workgroups have not run concurrently");
    }

    /// Evaluates a prompt, with the kernels for many tokens.
    fn prompt(&mut self, tokens: &[BatchToken]) {
        self.pass.forward(tokens).unwrap();
        self.record(tokens);
    }

    /// Records tokens as evaluated.
    fn record(&mut self, tokens: &[BatchToken]) {
        self.tokens.extend(tokens);
        self.tokens.sort_by_key(|token| (token.seq, token.pos));
    }

    /// Evaluates one token. Returns its logits: the last ones from the persistent kernel, after one entry for each aborted
    /// attempt, which the kernels of single ops finished.
    fn forward(&mut self, token: BatchToken) -> Vec<Vec<f32>> {
        let mut all = Vec::new();
        loop {
            all.push(self.pass.forward(&[token]).unwrap().row(0).to_vec());
            if is_persistent(&self.pass) {
                self.record(&[token]);
                return all;
            }
            self.count_abort();
            self.restart();
        }
    }
}

/// Maximum of aborted steps. On a busy machine some are expected.
const MAX_ABORTED: usize = 20;

/// Whether the pass runs a decode step with the persistent kernel.
fn is_persistent(pass: &WgpuForwardPass) -> bool {
    pass.dispatches(1)[1] == "decode_layers"
}

/// Held for reading by tests with one workgroup, for writing by tests with several.
static RUNNING: RwLock<()> = RwLock::new(());

/// Waits for the other tests to end, and excludes them until the guard is dropped.
fn exclusive() -> RwLockWriteGuard<'static, ()> {
    RUNNING.write().unwrap_or_else(PoisonError::into_inner)
}

/// The guard that a test keeps while it runs.
type TestGuard = (Option<RwLockReadGuard<'static, ()>>, Option<RwLockWriteGuard<'static, ()>>);

/// Excludes other tests, unless [one workgroup is the maximum](group_counts).
fn test_guard(gpu: &WgpuDevice) -> TestGuard {
    match group_counts(gpu)[..] {
        [1] => (Some(RUNNING.read().unwrap_or_else(PoisonError::into_inner)), None),
        [..] => (None, Some(exclusive())),
    }
}

/// Numbers of workgroups to test, in ascending order.
fn group_counts(gpu: &WgpuDevice) -> Vec<usize> {
    if gpu.summary().is_software() {
        return vec![1];
    }
    // Numbers for a large GPU, and 5, which divides none of the models' sizes.
    vec![1, 2, 5, 32, 64, 128]
}

/// Evaluates `n` tokens of each sequence, one per batch, after prompts of `filled` tokens, with one dispatch per op and with
/// the persistent kernel in each number of workgroups; compares the logits. Returns whether the persistent kernel supports
/// the model.
fn compare(
    gpu: &Arc<WgpuDevice>,
    name: &str,
    file: &GgufFile,
    setup: Setup,
    counts: &[usize],
    filled: usize,
    n: usize,
) -> bool {
    let options = setup.options;
    let mut one_by_one = setup.start(gpu, file, 0);
    let n_vocab = one_by_one.spec().n_vocab;
    let token = |seq: usize, pos: usize, logits| {
        let id = (seq * 31 + pos * 7919 + 3) % n_vocab;
        BatchToken { id: id as u32, seq, pos, output: logits }
    };
    let prompts: Vec<Vec<_>> = (0..options.n_seq)
        .filter(|_| filled > 0)
        .map(|seq| (0..filled).map(|pos| token(seq, pos, false)).collect())
        .collect();
    let steps: Vec<_> =
        (filled..filled + n).flat_map(|pos| (0..options.n_seq).map(move |seq| token(seq, pos, true))).collect();
    for prompt in &prompts {
        one_by_one.forward(prompt).unwrap();
    }
    let want: Vec<Vec<f32>> = steps.iter().map(|&step| one_by_one.forward(&[step]).unwrap().row(0).to_vec()).collect();
    for &groups in counts {
        let Some(mut persistent) = PersistentPass::start(gpu, file, setup, groups) else { return false };
        for prompt in &prompts {
            persistent.prompt(prompt);
        }
        for (&step, want) in steps.iter().zip(&want) {
            for got in persistent.forward(step) {
                let error = nmse(&got, want);
                // F16 keys and values may be rounded differently where sums differ in their last bits.
                let limit = if options.cache_type == CacheType::F16 { 1e-6 } else { 1e-9 };
                assert!(error < limit, "{name}, {groups} workgroups, {step:?}: {error:e}");
            }
        }
        eprintln!("{name}, {groups} workgroups: {} aborted steps", persistent.n_aborted);
    }
    true
}

/// A model whose layers have equal shapes, with as many KV heads as heads.
fn llama() -> GgufFile {
    GgufFile::from_bytes(&architectures()["llama-mha.gguf"]).unwrap()
}

#[test]
fn architectures_give_the_same_logits() {
    let Some(gpu) = gpu() else { return };
    let _guard = test_guard(&gpu);
    let setup = Setup::new(64);
    let mut suited = Vec::new();
    // Normed heads. The test of several buffers has biases, others neither. The rest differ in the RoPE table or the number of heads.
    let few = ["qwen3.gguf"];
    let tested = |name: &str| !takes_fewer_cases(&gpu) || few.contains(&name);
    for (name, bytes) in architectures().iter().filter(|(name, _)| tested(name)) {
        if compare(&gpu, name, &GgufFile::from_bytes(bytes).unwrap(), setup, &group_counts(&gpu), 0, 10) {
            suited.push(name);
        }
    }
    eprintln!("at once: {suited:?}");
    assert!(suited.len() >= few.len(), "{suited:?}");
}

/// Where [`takes_fewer_cases`], the test of two workgroups runs a mix of types, and other tests cover the reading of all.
#[test]
fn quantised_types_give_the_same_logits() {
    let Some(gpu) = gpu().filter(|gpu| !takes_fewer_cases(gpu)) else { return };
    let _guard = test_guard(&gpu);
    let setup = Setup::new(64);
    let counts = group_counts(&gpu);
    for (name, bytes) in quants().iter().chain(small_quants()) {
        let file = GgufFile::from_bytes(bytes).unwrap();
        assert!(compare(&gpu, name, &file, setup, &counts[counts.len() - 1..], 0, 4), "{name}");
    }
}

/// `file` with the values and down projection of one layer in another tensor type than the rest, as in recipes such as
/// `Q4_K_M`, and the queries of one layer in a third.
fn mixed(file: &GgufFile) -> GgufFile {
    let ty = |tensor: &Tensor| match tensor.name() {
        name if tensor.shape().len() < 2 || !name.starts_with("blk.") => tensor.ty(),
        "blk.1.attn_v.weight" | "blk.1.ffn_down.weight" => TensorType::Q8_0,
        "blk.0.attn_q.weight" => TensorType::Q5_1,
        _ => TensorType::Q4_0,
    };
    let decls: Vec<_> =
        file.tensors().iter().map(|tensor| TensorDecl { ty: ty(tensor), ..TensorDecl::from(tensor) }).collect();
    let mut writer = GgufWriter::new(Vec::new(), 3, file.metadata(), &decls).unwrap();
    for (tensor, decl) in file.tensors().iter().zip(&decls) {
        let mut bytes = Vec::new();
        decl.ty.quantize(&tensor.to_f32(), &mut bytes).unwrap();
        writer.write(&bytes).unwrap();
    }
    GgufFile::from_bytes(&writer.finish().unwrap()).unwrap()
}

/// Where [`takes_fewer_cases`], the test of two workgroups runs the mix.
#[test]
fn a_mix_of_types_gives_the_same_logits() {
    let Some(gpu) = gpu().filter(|gpu| !takes_fewer_cases(gpu)) else { return };
    let _guard = test_guard(&gpu);
    let setup = Setup::new(64);
    assert!(compare(&gpu, "a mix", &mixed(&llama()), setup, &group_counts(&gpu), 0, 10));
}

#[test]
fn layers_in_several_buffers_give_the_same_logits() {
    let Some(gpu) = gpu() else { return };
    let _guard = test_guard(&gpu);
    let options = SessionOptions { n_ctx: 64, ..Default::default() };
    let setup = Setup { options, layers_in_a_buffer: 1 };
    let counts = group_counts(&gpu);
    let biases = GgufFile::from_bytes(&architectures()["qwen2.gguf"]).unwrap();
    assert!(compare(&gpu, "biases, a buffer for each layer", &biases, setup, &counts, 0, 10));
    if !takes_fewer_cases(&gpu) {
        assert!(compare(&gpu, "a mix, a buffer for each layer", &mixed(&llama()), setup, &counts[..1], 0, 10));
    }
    let pass = setup.start(&gpu, &biases, 1);
    let dispatches = pass.dispatches(1);
    assert_eq!(dispatches.iter().filter(|name| **name == "decode_layers").count(), 2, "{dispatches:?}");
}

#[test]
fn long_contexts_and_several_sequences_give_the_same_logits() {
    let Some(gpu) = gpu() else { return };
    let _guard = test_guard(&gpu);
    let file = llama();
    // One sequence has its pages in order throughout, two of them until both have filled theirs.
    for (cache_type, n_seq) in [(CacheType::F16, 2), (CacheType::F32, 1)] {
        let options = SessionOptions { n_ctx: 300, n_seq, cache_type, ..Default::default() };
        let setup = Setup { options, ..Setup::new(300) };
        assert!(compare(&gpu, "llama-mha", &file, setup, &group_counts(&gpu), 245, 20));
    }
}

/// For software GPUs, where each workgroup needs a core. On other GPUs all tests use several workgroups.
#[test]
fn two_workgroups_exchange_their_results() {
    let _guard = exclusive();
    let Some(gpu) = gpu().filter(|gpu| gpu.summary().is_software()) else { return };
    if std::thread::available_parallelism().is_ok_and(|cores| cores.get() > 1) {
        let setup = Setup::new(64);
        assert!(compare(&gpu, "a mix", &mixed(&llama()), setup, &[2], 7, 6));
    }
}

/// With more workgroups than run concurrently the model is loaded without the persistent kernel, and nothing waits forever.
/// Not for software GPUs, which take minutes to detect it.
#[test]
fn more_workgroups_than_run_concurrently_disable_the_persistent_kernel() {
    let _guard = exclusive();
    let Some(gpu) = gpu().filter(|gpu| !gpu.summary().is_software()) else { return };
    let file = llama();
    let max_groups = *group_counts(&gpu).last().unwrap();
    let options = SessionOptions { n_ctx: 64, ..Default::default() };
    let setup = Setup { options, ..Setup::new(64) };
    let mut one_by_one = setup.start(&gpu, &file, 0);
    let token = |pos| BatchToken { id: 3 + pos as u32, seq: 0, pos, output: true };
    let want: Vec<Vec<f32>> = (0..4).map(|pos| one_by_one.forward(&[token(pos)]).unwrap().row(0).to_vec()).collect();
    let mut concurrent = Vec::new();
    for groups in [2 * max_groups, 8 * max_groups, 32 * max_groups] {
        let mut pass = setup.start(&gpu, &file, groups);
        if is_persistent(&pass) {
            concurrent.push(groups);
        }
        for (pos, want) in want.iter().enumerate() {
            let error = nmse(pass.forward(&[token(pos)]).unwrap().row(0), want);
            assert!(error < 1e-6, "{groups} workgroups, position {pos}: {error:e}");
        }
    }
    eprintln!("more than {max_groups} workgroups that run concurrently: {concurrent:?}");
}

#[test]
fn greedy_tokens_are_equal() {
    let Some(gpu) = gpu() else { return };
    let _guard = test_guard(&gpu);
    // A software GPU takes the model whose kernel another test compiles.
    let file =
        if gpu.summary().is_software() { llama() } else { GgufFile::read(metal_attention_testing::tales()).unwrap() };
    let sequences = [0, 1].map(|groups| {
        // The kernel is that of another test.
        let options = SessionOptions { n_ctx: 300, n_seq: 2, ..Default::default() };
        let mut model = Setup { options, ..Setup::new(300) }.start(&gpu, &file, groups);
        let mut ids = vec![model.forward_prompt(&[1, 43, 47]).unwrap()];
        while ids.len() < 100 {
            ids.push(model.forward_token_greedy(ids[ids.len() - 1]).unwrap());
        }
        // The sequence is cut back and continues with another token.
        model.truncate(50);
        ids.push(model.forward_token_greedy(5).unwrap());
        for _ in 0..10 {
            ids.push(model.forward_token_greedy(ids[ids.len() - 1]).unwrap());
        }
        ids
    });
    assert_eq!(sequences[0], sequences[1]);
}
