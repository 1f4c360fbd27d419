//! Derives the shortest time (floor) of prefill and decode of a model from the device's ceilings, and measures their time.

use std::time::Instant;

use metal_attention::backends::BackendPass;
use metal_attention::gguf::{Tensor, TensorType};
use metal_attention::{CacheType, EngineOptions, Error, ForwardError, Model};
use metal_attention_model::Mask;
use serde::Serialize;

use super::ceilings::Ceilings;
use super::{MeasurementEffort, matrices};
use crate::cli_error::CliError;

/// The size of a model, as far as speed depends on it.
#[derive(Serialize)]
pub struct ModelSize {
    /// The file's name.
    pub file: String,
    /// Bytes of the matrices that a decoded token is multiplied with; of experts, those of the used ones.
    pub matrix_bytes: u64,
    /// Elements of these matrices.
    pub matrix_elements: u64,
}

/// The floor of a phase, and its measured time.
#[derive(Serialize)]
#[allow(clippy::struct_field_names)] // names of the JSON
pub struct Floor {
    /// `prefill` or `decode`.
    pub phase: &'static str,
    /// Tokens of the prompt; 0 in decode.
    pub n_prompt: usize,
    /// Decode steps; 0 in prefill.
    pub n_gen: usize,
    /// Tokens in the KV cache before the phase.
    pub depth: usize,
    /// The work of the phase: of the whole prefill, or of one decode step.
    pub work: WorkCounts,
    /// Microseconds that its bytes take at the rate of reading.
    pub bytes_us: f64,
    /// Microseconds that its multiplications take.
    pub multiplications_us: f64,
    /// Microseconds that its launches take.
    pub launches_us: f64,
    /// The longest of the three, in microseconds.
    pub floor_us: f64,
    /// The name of the longest: `bytes`, `multiplications` or `launches`.
    pub bound: &'static str,
    /// The measured time in microseconds, the median of a few runs.
    pub measured_us: f64,
    /// Tokens per second by the floor.
    pub floor_tokens_per_second: f64,
    /// Tokens per second measured.
    pub tokens_per_second: f64,
    /// The measured speed in percent of the floor's.
    pub percent: f64,
}

/// The work that evaluating some tokens takes.
#[derive(Serialize, Debug, Clone, Copy, PartialEq)]
pub struct WorkCounts {
    /// Bytes of weights, and of keys and values of earlier tokens, that are read.
    pub bytes: u64,
    /// Multiplications by weights that are quantised or 16 bits wide.
    pub matrix_multiplications: u64,
    /// Other multiplications: by floats, and in attention.
    pub f32_multiplications: u64,
    /// Parallel regions of the CPU's threads, or dispatches or kernels of a GPU.
    pub launches: u64,
}

impl ModelSize {
    /// The size of `model`, whose file is called `file`.
    pub fn of(model: &Model, file: String) -> Self {
        Self {
            file,
            matrix_bytes: matrices(model).iter().map(|(m, share)| scaled(m.bytes().len(), *share)).sum(),
            matrix_elements: matrices(model).iter().map(|(m, share)| scaled(m.n_elements(), *share)).sum(),
        }
    }
}

impl WorkCounts {
    /// The work of `n_tokens` tokens of a sequence after `n_past` others, in micro-batches of `n_ubatch`, with the logits of the
    /// last token. `launches` is 0; the caller sets it.
    fn of(model: &Model, options: &EngineOptions, n_past: usize, n_tokens: usize, n_ubatch: usize) -> Self {
        let steps = n_tokens.div_ceil(n_ubatch) as u64;
        let output = model.weights().output.as_ref().map(|linear| &linear.weight);
        let mut work = Self { bytes: 0, matrix_multiplications: 0, f32_multiplications: 0, launches: 0 };
        for (matrix, share) in matrices(model) {
            let is_output = output.is_some_and(|output| std::ptr::eq(matrix, output));
            let (reads, tokens) = if is_output { (1, 1) } else { (steps, n_tokens as u64) };
            // The share of the matrix that a micro-batch reads: many tokens use all experts together.
            let read = (share * n_tokens.min(n_ubatch) as f64).min(1.0);
            work.bytes += reads * scaled(matrix.bytes().len(), read);
            let multiplications = tokens * scaled(matrix.n_elements(), share);
            if options.exact || !is_fast(matrix) {
                work.f32_multiplications += multiplications;
            } else {
                work.matrix_multiplications += multiplications;
            }
        }
        let element = if options.cache_type == CacheType::F16 { 2 } else { 4 };
        work.bytes += (model.spec().kv_elements_per_token() * element * n_past) as u64;
        for layer in &model.spec().layers {
            // Each head multiplies with a key and with a value.
            let of_attention = |mask: Mask, elements: usize| {
                let end = n_past + n_tokens;
                (n_past..end).map(|pos| mask.seen(pos, end).len()).sum::<usize>() * elements
            };
            let attended = match (layer.mixer.attention(), layer.mixer.latent_attention()) {
                (Some(a), _) => of_attention(a.mask, 2 * a.n_head * a.head_dim),
                (None, Some(a)) => of_attention(Mask::Causal, a.n_head * (2 * a.kv_rank + a.shared_dim)),
                (None, None) => 0,
            };
            // Each element of a recurrent state is decayed, read, and added to.
            let carried_on = n_tokens * 3 * layer.state_elements();
            work.f32_multiplications += (attended + carried_on) as u64;
        }
        work
    }
}

/// A share of `n`, rounded.
fn scaled(n: usize, share: f64) -> u64 {
    (n as f64 * share).round() as u64
}

/// Whether a matrix has a tensor type that is multiplied in fewer than 32 bits.
fn is_fast(matrix: &Tensor) -> bool {
    !matches!(matrix.ty(), TensorType::F32 | TensorType::BF16)
}

impl Floor {
    /// The floor of the work of a phase, and its speed. `measured` is in seconds.
    fn new(
        phase: &'static str,
        [n_prompt, n_gen, depth]: [usize; 3],
        work: WorkCounts,
        ceilings: &Ceilings,
        measured: f64,
    ) -> Self {
        let bytes_us = 1e6 * work.bytes as f64 / ceilings.read_bytes;
        // A GPU may compute all of it on matrix units; those of a CPU are for integers only.
        let fast = ceilings.matrix.unwrap_or(ceilings.f32).max(ceilings.f32);
        let slow = if ceilings.matrix_type == Some("half") { fast } else { ceilings.f32 };
        let multiplications_us =
            1e6 * (work.matrix_multiplications as f64 / fast + work.f32_multiplications as f64 / slow);
        let launches_us = work.launches as f64 * ceilings.launches.each_us();
        let parts = [("bytes", bytes_us), ("multiplications", multiplications_us), ("launches", launches_us)];
        let (bound, floor_us) = parts.into_iter().fold(("bytes", 0.0), |a, b| if b.1 > a.1 { b } else { a });
        let measured_us = 1e6 * measured;
        let tokens = if n_gen > 0 { 1.0 } else { n_prompt as f64 };
        Self {
            phase,
            n_prompt,
            n_gen,
            depth,
            work,
            bytes_us,
            multiplications_us,
            launches_us,
            floor_us,
            bound,
            measured_us,
            floor_tokens_per_second: 1e6 * tokens / floor_us,
            tokens_per_second: 1e6 * tokens / measured_us,
            percent: 100.0 * floor_us / measured_us,
        }
    }
}

/// Measures prefill and decode, and derives their floors. `step` is called after each of the two.
pub fn measure(
    pass: &mut dyn BackendPass,
    model: &Model,
    options: &EngineOptions,
    effort: MeasurementEffort,
    ceilings: &Ceilings,
    step: &mut dyn FnMut(),
) -> Result<Vec<Floor>, CliError> {
    let n_vocab = model.spec().n_vocab;
    let ids: Vec<u32> = (0..effort.n_prompt).map(|i| ((i * 7919 + 13) % n_vocab) as u32).collect();
    let n_ubatch = pass.n_ubatch().min(effort.n_prompt);

    // The first run is the warm-up; its launches are counted.
    let before = pass.n_launches();
    prefill(pass, &ids)?;
    let counted = pass.n_launches() - before;
    let seconds = median(effort.runs, || prefill(pass, &ids))?;
    let mut work = WorkCounts::of(model, options, 0, effort.n_prompt, n_ubatch);
    work.launches = pass.launches_of(effort.n_prompt, n_ubatch).unwrap_or(counted);
    let prefill = Floor::new("prefill", [effort.n_prompt, 0, 0], work, ceilings, seconds);
    step();

    let before = pass.n_launches();
    decode(pass, 1)?;
    // `decode(1)` takes two steps: one for the first token, and the timed one.
    let counted = (pass.n_launches() - before) / 2;
    decode(pass, effort.n_gen)?;
    let seconds = median(effort.runs, || decode(pass, effort.n_gen))?;
    let mut work = WorkCounts::of(model, options, 1, 1, 1);
    work.launches = pass.launches_of(1, 1).unwrap_or(counted);
    let decode = Floor::new("decode", [0, effort.n_gen, 0], work, ceilings, seconds);
    step();
    Ok(vec![prefill, decode])
}

/// Prefills `ids` from an empty context. Returns the seconds until the next token is known.
fn prefill(pass: &mut dyn BackendPass, ids: &[u32]) -> Result<f64, CliError> {
    pass.reset();
    let start = Instant::now();
    pass.forward_prompt(ids).map_err(engine)?;
    Ok(start.elapsed().as_secs_f64())
}

/// Takes `n` greedy steps after a first token. Returns the seconds of one step.
fn decode(pass: &mut dyn BackendPass, n: usize) -> Result<f64, CliError> {
    pass.reset();
    let mut id = pass.forward_token_greedy(0).map_err(engine)?;
    let start = Instant::now();
    for _ in 0..n {
        id = pass.forward_token_greedy(id).map_err(engine)?;
    }
    Ok(start.elapsed().as_secs_f64() / n as f64)
}

/// Converts an error.
fn engine(error: ForwardError) -> CliError {
    Error::from(error).into()
}

/// The median of `n` runs, in seconds.
fn median(n: usize, mut run: impl FnMut() -> Result<f64, CliError>) -> Result<f64, CliError> {
    let mut seconds = (0..n).map(|_| run()).collect::<Result<Vec<_>, _>>()?;
    seconds.sort_by(f64::total_cmp);
    Ok(seconds[n / 2].max(1e-9))
}

#[cfg(test)]
mod tests {
    use metal_attention::backends::Launches;

    use super::*;

    #[test]
    fn the_work_of_the_built_in_model() {
        let model = Model::built_in().unwrap();
        let options = EngineOptions::default();
        // Five layers, all F32: 64 x 64 queries and output, 32 x 64 keys and values, three of 172 x 64; a head of
        // 512 x 64.
        let layer = 64 * (64 + 32 + 32 + 64 + 3 * 172);
        let head = 512 * 64;
        let decode = WorkCounts::of(&model, &options, 1, 1, 1);
        let attention = 2 * 2 * 64 * 5;
        assert_eq!(decode.bytes, 4 * (5 * layer + head) + 5 * 2 * 32 * 2);
        assert_eq!(decode.f32_multiplications, 5 * layer + head + attention);
        assert_eq!(decode.matrix_multiplications, 0);
        // Two micro-batches read the layers twice.
        let prefill = WorkCounts::of(&model, &options, 0, 20, 10);
        assert_eq!(prefill.bytes, 4 * (2 * 5 * layer + head));
        assert_eq!(prefill.f32_multiplications, 20 * 5 * layer + head + 5 * 2 * 64 * (20 * 21 / 2));
    }

    #[test]
    fn the_floor_is_the_longest_of_its_parts() {
        let ceilings = Ceilings {
            read_bytes: 1e9,
            copy_bytes: 1e9,
            matrix: Some(1e12),
            matrix_type: Some("int8"),
            f32: 1e10,
            launches: Launches::Cpu { region_us: 2.0 },
        };
        let work =
            WorkCounts { bytes: 5000, matrix_multiplications: 1_000_000, f32_multiplications: 100_000, launches: 7 };
        let floor = Floor::new("prefill", [10, 0, 0], work, &ceilings, 28e-6);
        assert!((floor.bytes_us - 5.0).abs() < 1e-9);
        assert!((floor.multiplications_us - 11.0).abs() < 1e-9);
        assert!((floor.launches_us - 14.0).abs() < 1e-9);
        assert_eq!((floor.bound, floor.floor_us), ("launches", floor.launches_us));
        assert!((floor.percent - 50.0).abs() < 1e-9);
        assert!((floor.tokens_per_second - 10.0 / 28e-6).abs() < 1.0);
    }
}
