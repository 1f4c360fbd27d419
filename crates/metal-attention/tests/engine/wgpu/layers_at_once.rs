//! All layers of a token in one dispatch give what they give one by one, with as few workgroups as one and with as many
//! as run side by side.
//!
//! On a software GPU these are two, of which one test makes do with a few steps, and the others with one. Mesa's llvmpipe
//! has a thread for each core, and gives each thread a workgroup where there are no more of these than threads
//! (`lp_cs_tpool.c`); so two of them do run side by side, and hand each other what they make as on any GPU. A third could
//! wait for one that never begins. The system may hold a thread up for longer than another one waits for it: then the step
//! is given up, as it should be, and tried again from the start. Tests with several workgroups run one after the other, so
//! that they do not hold up each other.

use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::wgpu::device::{gpu, start};
use metal_attention::gguf::{GgufFile, GgufWriter, Tensor, TensorDecl, TensorType};
use metal_attention::kernels::WgpuDevice;
use metal_attention::{BatchToken, CacheType, ForwardPass, WgpuForwardPass, WgpuForwardPassOptions};
use metal_attention_testing::models::{architectures, quants, small_quants};

/// Squared error of `got` over the squares of `want`.
fn nmse(got: &[f32], want: &[f32]) -> f64 {
    let square = |v: f64| v * v;
    let error: f64 = got.iter().zip(want).map(|(&g, &w)| square(f64::from(g) - f64::from(w))).sum();
    error / want.iter().map(|&w| square(f64::from(w))).sum::<f64>()
}

/// A model that runs all its layers in one dispatch.
struct AtOnce<'a> {
    gpu: &'a Arc<WgpuDevice>,
    file: &'a GgufFile,
    options: WgpuForwardPassOptions,
    pass: WgpuForwardPass,
    /// What it has seen, in the order of each sequence.
    tokens: Vec<BatchToken>,
    /// How often workgroups were held up.
    given_up: usize,
}

impl<'a> AtOnce<'a> {
    /// The model with `groups` workgroups; `None` where it does not suit that.
    fn start(
        gpu: &'a Arc<WgpuDevice>,
        file: &'a GgufFile,
        options: &WgpuForwardPassOptions,
        groups: usize,
    ) -> Option<Self> {
        let with = |groups| WgpuForwardPassOptions { persistent_workgroups: Some(groups), ..options.clone() };
        // One workgroup waits for nobody.
        let pass = start(gpu, file, &with(1));
        if !is_at_once(&pass) {
            return None;
        }
        let mut this = Self { gpu, file, options: with(groups), pass, tokens: Vec::new(), given_up: 0 };
        if groups > 1 {
            this.restart();
        }
        Some(this)
    }

    /// Begins anew, until all workgroups have run side by side, and goes as far as before.
    fn restart(&mut self) {
        while {
            self.pass = start(self.gpu, self.file, &self.options);
            !is_at_once(&self.pass)
        } {
            self.gave_up();
        }
        for tokens in self.tokens.chunk_by(|a, b| a.seq == b.seq) {
            self.pass.forward(tokens).unwrap();
        }
    }

    fn gave_up(&mut self) {
        self.given_up += 1;
        let groups = self.options.persistent_workgroups;
        assert!(self.given_up < MAX_GIVEN_UP, "{groups:?} workgroups have not run side by side");
    }

    /// Tokens that go through the kernels for many tokens.
    fn prompt(&mut self, tokens: &[BatchToken]) {
        self.pass.forward(tokens).unwrap();
        self.seen(tokens);
    }

    fn seen(&mut self, tokens: &[BatchToken]) {
        self.tokens.extend(tokens);
        self.tokens.sort_by_key(|token| (token.seq, token.pos));
    }

    /// The logits after a token, made in one dispatch unless its pages lie in no order; and, where a step was given up, each
    /// time what came out in its place.
    fn forward(&mut self, token: BatchToken) -> Vec<Vec<f32>> {
        let mut all = Vec::new();
        loop {
            all.push(self.pass.forward(&[token]).unwrap().row(0).to_vec());
            if is_at_once(&self.pass) {
                self.seen(&[token]);
                return all;
            }
            self.gave_up();
            self.restart();
        }
    }
}

/// Steps that may be given up: on a machine with more to do than cores there are some.
const MAX_GIVEN_UP: usize = 20;

fn is_at_once(pass: &WgpuForwardPass) -> bool {
    pass.dispatches(1)[1] == "decode_layers"
}

static RUNNING: RwLock<()> = RwLock::new(());

/// Keeps the other tests waiting.
fn alone() -> RwLockWriteGuard<'static, ()> {
    RUNNING.write().unwrap_or_else(PoisonError::into_inner)
}

/// What a test holds while it runs.
type Turn = (Option<RwLockReadGuard<'static, ()>>, Option<RwLockWriteGuard<'static, ()>>);

/// Lets other tests run beside this one where one workgroup is [all there is](group_counts).
fn turn(gpu: &WgpuDevice) -> Turn {
    match group_counts(gpu)[..] {
        [1] => (Some(RUNNING.read().unwrap_or_else(PoisonError::into_inner)), None),
        [..] => (None, Some(alone())),
    }
}

/// Numbers of workgroups to test with, the largest last.
fn group_counts(gpu: &WgpuDevice) -> Vec<usize> {
    if gpu.summary().is_software() {
        return vec![1];
    }
    // What suits a large GPU, and what divides nothing evenly.
    vec![1, 2, 5, 32, 64, 128]
}

/// Runs `n` tokens of each sequence, each alone, after `filled` others, layer by layer and at once with each number of
/// workgroups; tells whether the model suits the latter.
fn compare(
    gpu: &Arc<WgpuDevice>,
    name: &str,
    file: &GgufFile,
    options: &WgpuForwardPassOptions,
    counts: &[usize],
    filled: usize,
    n: usize,
) -> bool {
    let layer_by_layer = WgpuForwardPassOptions { persistent_workgroups: Some(0), ..options.clone() };
    let mut one_by_one = start(gpu, file, &layer_by_layer);
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
        let Some(mut at_once) = AtOnce::start(gpu, file, options, groups) else { return false };
        for prompt in &prompts {
            at_once.prompt(prompt);
        }
        for (&step, want) in steps.iter().zip(&want) {
            for got in at_once.forward(step) {
                let error = nmse(&got, want);
                // Halves in the cache round some numbers the other way, where sums differ in their last bit.
                let limit = if options.cache_type == CacheType::F16 { 1e-6 } else { 1e-9 };
                assert!(error < limit, "{name}, {groups} workgroups, {step:?}: {error:e}");
            }
        }
        eprintln!("{name}, {groups} workgroups: {} times held up", at_once.given_up);
    }
    true
}

/// Whose layers are all alike, with as many KV heads as heads.
fn llama() -> GgufFile {
    GgufFile::from_bytes(&architectures()["llama-mha.gguf"]).unwrap()
}

#[test]
fn architectures_give_the_same_logits() {
    let Some(gpu) = gpu() else { return };
    let _turn = turn(&gpu);
    let options = WgpuForwardPassOptions { n_ctx: 64, cache_type: CacheType::F32, ..Default::default() };
    let mut suited = Vec::new();
    for (name, bytes) in architectures() {
        if compare(&gpu, name, &GgufFile::from_bytes(bytes).unwrap(), &options, &group_counts(&gpu), 0, 10) {
            suited.push(name);
        }
    }
    eprintln!("at once: {suited:?}");
    assert!(suited.len() >= 4, "{suited:?}");
}

#[test]
fn quantised_types_give_the_same_logits() {
    let Some(gpu) = gpu() else { return };
    let _turn = turn(&gpu);
    let options = WgpuForwardPassOptions { n_ctx: 64, cache_type: CacheType::F32, ..Default::default() };
    let counts = group_counts(&gpu);
    // A software GPU takes minutes to compile the kernel for some types: it has one, and other kernels read the others.
    let tested = |name: &str| !gpu.summary().is_software() || name == "Q4_K.gguf";
    for (name, bytes) in quants().iter().chain(small_quants()).filter(|(name, _)| tested(name)) {
        let file = GgufFile::from_bytes(bytes).unwrap();
        assert!(compare(&gpu, name, &file, &options, &counts[counts.len() - 1..], 0, 4), "{name}");
    }
}

/// `file` with some layers' values and down projections in other types than the rest, as recipes such as `Q4_K_M` have it, and
/// with one layer whose queries are in a third.
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

#[test]
fn a_mix_of_types_gives_the_same_logits() {
    let Some(gpu) = gpu() else { return };
    let _turn = turn(&gpu);
    let options = WgpuForwardPassOptions { n_ctx: 64, cache_type: CacheType::F32, ..Default::default() };
    assert!(compare(&gpu, "a mix", &mixed(&llama()), &options, &group_counts(&gpu), 0, 10));
}

#[test]
fn layers_in_several_buffers_give_the_same_logits() {
    let Some(gpu) = gpu() else { return };
    let _turn = turn(&gpu);
    let options = WgpuForwardPassOptions { n_ctx: 64, layers_in_a_buffer: 1, ..Default::default() };
    let counts = group_counts(&gpu);
    assert!(compare(&gpu, "a buffer for each layer", &llama(), &options, &counts, 0, 10));
    assert!(compare(&gpu, "a mix, a buffer for each layer", &mixed(&llama()), &options, &counts[..1], 0, 5));
    let pass = start(&gpu, &llama(), &WgpuForwardPassOptions { persistent_workgroups: Some(1), ..options });
    let dispatches = pass.dispatches(1);
    assert_eq!(dispatches.iter().filter(|name| **name == "decode_layers").count(), 2, "{dispatches:?}");
}

#[test]
fn long_contexts_and_several_sequences_give_the_same_logits() {
    let Some(gpu) = gpu() else { return };
    let _turn = turn(&gpu);
    let file = llama();
    // Alone, pages lie in order throughout; of two sequences, until both have filled theirs.
    for (cache_type, n_seq) in [(CacheType::F16, 2), (CacheType::F32, 1)] {
        let options = WgpuForwardPassOptions { n_ctx: 300, n_seq, cache_type, ..Default::default() };
        assert!(compare(&gpu, "llama-mha", &file, &options, &group_counts(&gpu), 245, 20));
    }
}

/// On software, where every workgroup needs a core of its own; other GPUs do this in all tests.
#[test]
fn two_workgroups_hand_each_other_what_they_make() {
    let _alone = alone();
    let Some(gpu) = gpu().filter(|gpu| gpu.summary().is_software()) else { return };
    if std::thread::available_parallelism().is_ok_and(|cores| cores.get() > 1) {
        let options = WgpuForwardPassOptions { n_ctx: 64, cache_type: CacheType::F32, ..Default::default() };
        assert!(compare(&gpu, "llama-mha", &llama(), &options, &[2], 7, 6));
        assert!(compare(&gpu, "a mix", &mixed(&llama()), &options, &[2], 7, 6));
    }
}

/// More workgroups than the device runs side by side: the model is set up layer by layer, and nothing hangs. A software GPU
/// takes minutes to look in vain.
#[test]
fn more_workgroups_than_run_side_by_side_are_left_alone() {
    let _alone = alone();
    let Some(gpu) = gpu().filter(|gpu| !gpu.summary().is_software()) else { return };
    let file = llama();
    let most = *group_counts(&gpu).last().unwrap();
    let options =
        |groups| WgpuForwardPassOptions { n_ctx: 64, persistent_workgroups: Some(groups), ..Default::default() };
    let mut one_by_one = start(&gpu, &file, &options(0));
    let token = |pos| BatchToken { id: 3 + pos as u32, seq: 0, pos, output: true };
    let want: Vec<Vec<f32>> = (0..4).map(|pos| one_by_one.forward(&[token(pos)]).unwrap().row(0).to_vec()).collect();
    let mut side_by_side = Vec::new();
    for groups in [2 * most, 8 * most, 32 * most] {
        let mut pass = start(&gpu, &file, &options(groups));
        if is_at_once(&pass) {
            side_by_side.push(groups);
        }
        for (pos, want) in want.iter().enumerate() {
            let error = nmse(pass.forward(&[token(pos)]).unwrap().row(0), want);
            assert!(error < 1e-6, "{groups} workgroups, position {pos}: {error:e}");
        }
    }
    eprintln!("beyond {most} workgroups these run side by side: {side_by_side:?}");
}

#[test]
fn greedy_text_is_the_same() {
    let Some(gpu) = gpu() else { return };
    let _turn = turn(&gpu);
    let path = metal_attention_testing::tales();
    let texts = [0, 1].map(|groups| {
        let options = WgpuForwardPassOptions { n_ctx: 128, persistent_workgroups: Some(groups), ..Default::default() };
        let mut model = start(&gpu, &GgufFile::open(&path).unwrap(), &options);
        let mut ids = vec![model.forward_prompt(&[1, 403, 407]).unwrap()];
        while ids.len() < 100 {
            ids.push(model.forward_token_greedy(ids[ids.len() - 1]).unwrap());
        }
        // A cut, another token, and on.
        model.truncate(50);
        ids.push(model.forward_token_greedy(5).unwrap());
        for _ in 0..10 {
            ids.push(model.forward_token_greedy(ids[ids.len() - 1]).unwrap());
        }
        ids
    });
    assert_eq!(texts[0], texts[1]);
}
