//! Small models of random shapes, tensor types and options. On the CPU, approximate arithmetic is compared with exact
//! arithmetic; wgpu and CUDA are compared with the CPU. A model is generated from its number, so that it is the same in
//! every run and on every machine.
//!
//! `METAL_ATTENTION_RANDOM_MODELS` sets the number of models. Without it the CPU and GPUs run 500. A software GPU, which
//! takes seconds to compile the kernels for each shape, runs 16, and CUDA 60.

use metal_attention::gguf::blocks::random_blocks;
use metal_attention::gguf::{GgufFile, GgufWriter, TensorDecl, TensorType};
use metal_attention::{BatchToken, CacheType, ForwardPass, ModelSpec, SessionOptions};
use metal_attention_cpu::{CpuExecutor, CpuOptions, Isa};
use metal_attention_model::{ModelShape, RopeStretch};

/// Types that are slow to quantise, because the nearest codebook entries are searched. They get random blocks instead.
const CODEBOOKS: [TensorType; 7] = [
    TensorType::IQ1_S,
    TensorType::IQ1_M,
    TensorType::IQ2_XXS,
    TensorType::IQ2_XS,
    TensorType::IQ2_S,
    TensorType::IQ3_XXS,
    TensorType::IQ3_S,
];

/// `SplitMix64`.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// One of `choices`.
    fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// A number in `-1..1`.
    fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
    }
}

/// A random model, and the options and batches with which it runs.
#[derive(Debug)]
struct Case {
    number: usize,
    shape: ModelShape,
    /// The sliding window of all layers; 0: none.
    window: u32,
    /// Elements of a head that RoPE rotates.
    n_rot: usize,
    /// Whether layers differ in their numbers of heads and their feed-forward widths.
    uneven: bool,
    n_ctx: usize,
    n_ubatch: usize,
    cache_type: CacheType,
    /// Tokens of the first prompts: of sequence 0, then of 1 and 2 in one batch.
    prompts: [usize; 3],
    /// Tensor types that the matrices use in rotation. A type whose quantisation blocks do not divide the rows is skipped.
    types: Vec<TensorType>,
    /// Seed of the weights.
    seed: u64,
}

impl Case {
    fn new(number: usize) -> Self {
        let mut random = Random(number as u64);
        let any_size = |random: &mut Random| {
            let n = 1 + random.below(80);
            random.of(&[8, 24, 32, 64, 96, 256, n])
        };
        let architecture = random.of(&["llama", "qwen2", "qwen3"]);
        let n_head_kv = random.of(&[1, 2, 3]);
        let head_dim = random.of(&[2, 4, 8, 16, 20, 32, 64, 9]);
        let n_rot = if random.one_in(3) { 2 * (1 + random.below(head_dim / 2)) } else { head_dim & !1 };
        let factors = RopeStretch { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, n_ctx_orig: 64 };
        let shape = ModelShape {
            architecture,
            n_layer: 1 + random.below(3),
            n_embd: any_size(&mut random),
            n_head: n_head_kv * random.of(&[1, 2, 3, 5]),
            n_head_kv,
            head_dim,
            n_ff: any_size(&mut random),
            n_vocab: random.of(&[2, 50, 64, 300, 1030]),
            rope_freq_base: random.of(&[10_000.0, 500_000.0]),
            rope_factors: random.one_in(4).then_some(factors),
            norm_eps: random.of(&[1e-5, 1e-6]),
            tied: random.one_in(2),
            ..ModelShape::named("custom").expect("a named shape").clone()
        };
        let n_types = 1 + random.below(3);
        Self {
            number,
            window: random.of(&[0, 0, 1, 7, 40]),
            n_rot,
            uneven: random.one_in(4),
            n_ctx: 128,
            n_ubatch: random.of(&[512, 512, 17, 4]),
            cache_type: random.of(&[CacheType::F32, CacheType::F16]),
            prompts: [1 + random.below(40), 1 + random.below(20), 1 + random.below(20)],
            types: (0..n_types).map(|_| random.of(TensorType::ALL)).collect(),
            seed: random.next(),
            shape,
        }
    }

    /// The tensor type of matrix `i` with rows of `n_in`: the next of `types` whose blocks divide the rows, or F32.
    fn ty(&self, n_in: usize, i: usize) -> TensorType {
        let candidates = self.types.iter().cycle().skip(i).take(self.types.len());
        candidates.copied().find(|ty| n_in.is_multiple_of(ty.block_len())).unwrap_or(TensorType::F32)
    }

    /// The model as a GGUF file.
    fn file(&self) -> GgufFile {
        let mut random = Random(self.seed);
        let shape = &self.shape;
        let mut metadata = shape.metadata();
        let mut set = |key: &str, value: u32| metadata.set(format!("{}.{key}", shape.architecture), value);
        set("rope.dimension_count", self.n_rot as u32);
        set("attention.sliding_window", self.window);
        if self.uneven {
            let per_layer =
                |n: usize, all: &[usize]| (0..shape.n_layer).map(|i| (n * all[i % all.len()]) as u32).collect();
            let values: [(&str, Vec<u32>); 3] = [
                ("attention.head_count", per_layer(shape.n_head, &[1, 2])),
                ("attention.head_count_kv", per_layer(shape.n_head_kv, &[1, 2])),
                ("feed_forward_length", per_layer(shape.n_ff, &[1, 2, 1])),
            ];
            for (key, values) in values {
                metadata.set(format!("{}.{key}", shape.architecture), values);
            }
        }
        let spec = ModelSpec::from_metadata(&metadata).unwrap_or_else(|e| panic!("{self:?}: {e}"));
        let is_present = |name: &str, required: bool, random: &mut Random| match name {
            "output.weight" => !shape.tied,
            "rope_freqs.weight" => shape.rope_factors.is_some(),
            // Biases that the architecture does not require are present in one of four cases.
            _ => required || random.one_in(4),
        };
        let tensors: Vec<_> =
            spec.tensors().into_iter().filter(|t| is_present(&t.name, t.required, &mut random)).collect();
        let decls: Vec<_> = tensors
            .iter()
            .enumerate()
            .map(|(i, t)| TensorDecl {
                ty: if t.is_matrix() { self.ty(t.shape[0], i) } else { TensorType::F32 },
                name: t.name.clone(),
                shape: t.shape.clone(),
            })
            .collect();
        let mut writer = GgufWriter::new(Vec::new(), 3, &metadata, &decls).expect("a header");
        for (tensor, decl) in tensors.iter().zip(&decls) {
            let n: usize = decl.shape.iter().product();
            let values: Vec<f32> = if tensor.name == "rope_freqs.weight" {
                let factors = shape.rope_factors.expect("the tensor is there with the factors");
                factors.divisors(2 * n, shape.rope_freq_base)
            } else if tensor.is_matrix() {
                // With this scale activations keep their size from layer to layer, and softmax has several positions with
                // noticeable weights.
                let scale = 1.7 / (decl.shape[0] as f32).sqrt();
                (0..n).map(|_| scale * random.float()).collect()
            } else if tensor.name.ends_with("bias") {
                (0..n).map(|_| 0.2 * random.float()).collect()
            } else {
                (0..n).map(|_| 1.0 + 0.3 * random.float()).collect()
            };
            let mut bytes = Vec::new();
            if CODEBOOKS.contains(&decl.ty) {
                let size = 1.7 / (decl.shape[0] as f32).sqrt();
                bytes = random_blocks(decl.ty, n, random.next(), size);
            } else {
                decl.ty.quantize(&values, &mut bytes).unwrap_or_else(|e| panic!("{}: {e}", tensor.name));
            }
            writer.write(&bytes).expect("memory");
        }
        GgufFile::from_bytes(&writer.finish().expect("all tensors")).expect("a file")
    }

    /// Logits of prompts, of single tokens, and of batches of three sequences, in a fixed order of batches.
    fn logits(&self, pass: &mut dyn ForwardPass) -> Vec<f32> {
        let n_vocab = pass.spec().n_vocab;
        let mut random = Random(!self.seed);
        let mut all = Vec::new();
        let mut evaluate = |pass: &mut dyn ForwardPass, lengths: [usize; 3], one_in: usize| {
            let mut batch = Vec::new();
            for (seq, n) in lengths.into_iter().enumerate() {
                let start = pass.n_past(seq);
                batch.extend((start..start + n).map(|pos| BatchToken {
                    id: random.below(n_vocab) as u32,
                    seq,
                    pos,
                    output: random.one_in(one_in) || pos + 1 == start + n,
                }));
            }
            let logits = pass.forward(&batch).unwrap_or_else(|e| panic!("{self:?}: {e}"));
            all.extend_from_slice(logits.as_slice());
        };
        evaluate(pass, [self.prompts[0], 0, 0], 1);
        evaluate(pass, [1, 0, 0], 1);
        evaluate(pass, [0, self.prompts[1], self.prompts[2]], 3);
        for _ in 0..2 {
            evaluate(pass, [1, 1, 1], 1);
            evaluate(pass, [0, 1, 0], 1);
        }
        pass.rewind(0, 1);
        evaluate(pass, [2, 0, 0], 1);
        all
    }

    /// [`Self::logits`] on the CPU.
    fn cpu(&self, file: &GgufFile, isa: Isa, exact: bool) -> Vec<f32> {
        let cpu = CpuOptions { n_threads: 1 + self.number % 2, isa: Some(isa), ..Default::default() };
        let options = SessionOptions {
            n_ctx: self.n_ctx,
            n_seq: 3,
            n_ubatch: self.n_ubatch,
            cache_type: self.cache_type,
            exact,
            ..Default::default()
        };
        let mut pass = CpuExecutor::session_of_file(&cpu, file, &options).unwrap_or_else(|e| panic!("{self:?}: {e}"));
        self.logits(&mut pass)
    }

    /// The largest NMSE with exact arithmetic. F16 keys and values are rounded differently where sums differ in their last
    /// bits.
    fn limit(&self) -> f64 {
        if self.cache_type == CacheType::F16 { 1e-5 } else { 1e-9 }
    }

    /// Checks that the squared error of `got` over the squares of `want` is at most `limit`. Returns it.
    fn compare(&self, what: &str, got: &[f32], want: &[f32], limit: f64) -> f64 {
        assert_eq!(got.len(), want.len(), "{what}: {self:?}");
        let square = |v: f64| v * v;
        let error: f64 = got.iter().zip(want).map(|(&g, &w)| square(f64::from(g) - f64::from(w))).sum();
        let nmse = error / want.iter().map(|&w| square(f64::from(w))).sum::<f64>();
        assert!(nmse <= limit, "{what}: NMSE {nmse:e}, at most {limit:e}: {self:?}");
        nmse
    }
}

/// Number of models to run: the environment variable's value, or `default`.
fn n_models(default: usize) -> usize {
    let variable = "METAL_ATTENTION_RANDOM_MODELS";
    std::env::var(variable).map_or(default, |n| n.parse().unwrap_or_else(|_| panic!("{variable}={n} is no number")))
}

#[test]
fn every_instruction_set_gives_the_same_logits_and_nearly_so_with_8_bit_activations() {
    let mut worst = (0.0, 0);
    for number in 0..n_models(200) {
        let case = Case::new(number);
        let file = case.file();
        let mut sets = Isa::available().into_iter();
        let first = sets.next().expect("plain Rust runs everywhere");
        let want = case.cpu(&file, first, true);
        assert!(want.iter().all(|v| v.is_finite()), "{case:?}");
        for isa in sets {
            case.compare(&format!("{isa:?}, exact"), &case.cpu(&file, isa, true), &want, case.limit());
        }
        for isa in Isa::available() {
            // Activations of 8 bits are wrong by up to 2^-8 of the largest in their block, an NMSE of some 1e-5 per product.
            // In a model this small a few products determine the logits. The largest NMSE of 500 models is 1.8e-3.
            let nmse = case.compare(&format!("{isa:?}"), &case.cpu(&file, isa, false), &want, 5e-3);
            if nmse > worst.0 {
                worst = (nmse, number);
            }
        }
    }
    println!("the largest NMSE with activations of 8 bits is {:.1e}, of model {}", worst.0, worst.1);
}

#[cfg(feature = "wgpu")]
mod on_gpu {
    use std::sync::Arc;

    use metal_attention::{SessionOptions, WgpuExecutor};
    use metal_attention_model::LoadedModel;

    use super::*;
    use crate::wgpu::device::{gpu, takes_fewer_cases};

    /// Number of models where [`takes_fewer_cases`].
    const FEW: usize = 4;

    #[test]
    fn the_gpu_gives_the_logits_of_the_cpu() {
        let Some(gpu) = gpu() else { return };
        let best = Isa::available().into_iter().last().expect("plain Rust runs everywhere");
        let n = n_models(if takes_fewer_cases(&gpu) { FEW } else { 500 });
        for number in 0..n {
            let case = Case::new(number);
            let file = case.file();
            let want = case.cpu(&file, best, true);
            let model = LoadedModel::load(&file).expect("a whole model");
            // Matrix units round their inputs to 16 bits.
            let exact = !number.is_multiple_of(3);
            let rounded = !exact && gpu.features().cooperative_f16;
            let options = SessionOptions {
                n_ctx: case.n_ctx,
                n_seq: 3,
                n_ubatch: case.n_ubatch,
                cache_type: case.cache_type,
                exact,
                ..Default::default()
            };
            let pass = WgpuExecutor::session(Arc::clone(&gpu), &model, &options);
            let mut pass = pass.unwrap_or_else(|e| panic!("{case:?}: {e}"));
            let limit = if rounded { 1e-4 } else { case.limit() };
            case.compare("GPU", &case.logits(&mut pass), &want, limit);
        }
        println!("{n} models, {} pipelines", gpu.pipelines().len());
    }
}

#[cfg(feature = "cuda")]
mod on_cuda {
    use std::sync::Arc;

    use metal_attention::{CudaDevice, CudaExecutor, CudaTuning, SessionOptions, Watch, cuda_summaries};
    use metal_attention_model::LoadedModel;

    use super::*;

    #[test]
    fn cuda_gives_the_logits_of_the_cpu() {
        if let Err(why) = cuda_summaries() {
            metal_attention_testing::skip(&format!("{why}"));
            return;
        }
        let gpu = Arc::new(CudaDevice::open(0, Watch::default()).expect("a device"));
        let best = Isa::available().into_iter().last().expect("plain Rust runs everywhere");
        for number in 0..n_models(60) {
            let case = Case::new(number);
            let file = case.file();
            let want = case.cpu(&file, best, true);
            let model = LoadedModel::load(&file).expect("a whole model");
            // GEMMs round their inputs to 16 bits.
            let exact = !number.is_multiple_of(3);
            let options = SessionOptions {
                n_ctx: case.n_ctx,
                n_seq: 3,
                n_ubatch: case.n_ubatch,
                cache_type: case.cache_type,
                exact,
                ..Default::default()
            };
            let positions = if number.is_multiple_of(2) { usize::MAX } else { 0 };
            let tuning = CudaTuning { persistent_kernel_positions: Some(positions) };
            let pass = CudaExecutor::tuned_session(Arc::clone(&gpu), &model, &options, &tuning);
            let mut pass = pass.unwrap_or_else(|e| panic!("{case:?}: {e}"));
            let limit = if exact { case.limit() } else { 1e-4 };
            case.compare("CUDA", &case.logits(&mut pass), &want, limit);
        }
    }
}
