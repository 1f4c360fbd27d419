//! Damaged model files: loading and running them returns an error or some text, and never panics.

use metal_attention::gguf::GgufFile;
use metal_attention::sampling::SamplerOptions;
use metal_attention::{Device, EngineOptions, Error, GenerateOptions, Generator, Model, ModelOptions};
use metal_attention_testing::models::{Files, architectures, quants};

/// `SplitMix64`, so that the changes are the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n as u64) as usize
    }
}

/// Opens `bytes` as a model and generates three tokens. Returns their number.
fn run(bytes: &[u8], device: &Device) -> Result<usize, Error> {
    let model = Model::from_gguf(GgufFile::from_bytes(bytes)?, &ModelOptions::default())?;
    let options = EngineOptions { device: device.clone(), n_ctx: Some(16), n_threads: Some(1), ..Default::default() };
    let mut generator = Generator::new(&model, &options, SamplerOptions::greedy())?;
    let generation = generator.complete("Once", GenerateOptions { n_predict: Some(3), ..Default::default() })?;
    generation.map(|token| token.map(|_| 1)).sum()
}

/// Changes one to three bytes of a model, three of four in its header, `n_tries` times, and runs each damaged file.
fn damage(models: &Files, name: &str, device: &Device, n_tries: usize) {
    let original = &models[name];
    let file = GgufFile::from_bytes(original).expect("a sound file");
    let header = original.len() - file.tensor_bytes() as usize;
    assert_eq!(run(original, device).expect("a sound model"), 3);
    let mut random = Random(2026);
    let (mut sound, mut broken) = (0, 0);
    for _ in 0..n_tries {
        let mut bytes = original.clone();
        for _ in 0..=random.below(3) {
            let end = if random.below(4) == 0 { bytes.len() } else { header };
            let at = random.below(end);
            bytes[at] = match random.below(3) {
                0 => bytes[at] ^ 1 << random.below(8),
                1 => 0xff,
                _ => random.below(256) as u8,
            };
        }
        match run(&bytes, device) {
            Ok(_) => sound += 1,
            Err(error) => {
                broken += 1;
                assert!(!error.to_string().is_empty());
            }
        }
    }
    println!("{name} on {device}: {sound} ran, {broken} were refused");
}

#[test]
fn damaged_float_model() {
    damage(architectures(), "qwen2.gguf", &Device::Cpu, 300);
}

#[test]
fn damaged_quantised_model() {
    damage(quants(), "Q2_K.gguf", &Device::Cpu, 300);
}

/// Skipped without a GPU; in CI that is a failure.
#[cfg(feature = "wgpu")]
#[test]
fn damaged_models_on_the_gpu() {
    let adapters = metal_attention::wgpu::adapter_summaries();
    if adapters.is_empty() {
        assert!(std::env::var_os("CI").is_none(), "this machine has no GPU");
        metal_attention_testing::skip("this machine has no GPU");
        return;
    }
    // A software GPU compiles kernels for each model whose sizes differ.
    let n_tries = if metal_attention_testing::takes_fewer_cases(adapters[0].is_software()) { 6 } else { 40 };
    damage(architectures(), "qwen2.gguf", &Device::Wgpu, n_tries);
    damage(quants(), "Q2_K.gguf", &Device::Wgpu, n_tries);
}
