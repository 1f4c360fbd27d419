//! Compares two forward passes of one model: where their hidden states and logits differ.

use std::ops::ControlFlow;

use metal_attention_model::{BatchToken, ForwardPass, argmax};

use crate::Error;

/// Maximum bytes of logits that a pass returns at once.
const MAX_LOGITS_BYTES: usize = 64 << 20;

/// The way in which the tokens of a comparison are evaluated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EvaluationMode {
    /// In prefill chunks of at most this many tokens.
    Prefill(usize),
    /// One by one, as in decoding.
    Decode,
}

/// The deviation of vectors, one for each token, from those of the reference.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Deviation {
    /// The largest normalised mean squared error of any token, `|x - reference|^2 / |reference|^2`. Not finite if a
    /// value is not.
    pub nmse: f64,
    /// Position of the token with that error.
    pub position: usize,
    /// The largest absolute difference of two elements, of any token. NaN if one is.
    pub max_difference: f32,
}

impl Deviation {
    const NONE: Self = Self { nmse: 0.0, position: 0, max_difference: 0.0 };

    /// Whether the error is at most `tolerance`; never for NaN.
    pub fn within(&self, tolerance: f64) -> bool {
        self.nmse <= tolerance
    }

    /// Adds vectors of `width` elements, of the tokens from position `start` on.
    fn add_rows(&mut self, start: usize, got: &[f32], want: &[f32], width: usize) {
        for (i, (got, want)) in got.chunks(width).zip(want.chunks(width)).enumerate() {
            self.add(start + i, got, want);
        }
    }

    /// Adds the vector of the token at `position`.
    fn add(&mut self, position: usize, got: &[f32], want: &[f32]) {
        let (mut error, mut power, mut largest) = (0.0, 0.0, 0.0f32);
        for (&g, &w) in got.iter().zip(want) {
            let difference = (g - w).abs();
            error += f64::from(difference) * f64::from(difference);
            power += f64::from(w) * f64::from(w);
            largest = larger(largest, difference);
        }
        let nmse = if power == 0.0 { error } else { error / power };
        // The first NaN stays.
        if nmse > self.nmse || nmse.is_nan() && !self.nmse.is_nan() {
            (self.nmse, self.position) = (nmse, position);
        }
        self.max_difference = larger(self.max_difference, largest);
    }
}

/// The larger of two numbers; NaN if one is.
fn larger(a: f32, b: f32) -> f32 {
    if a >= b || a.is_nan() { a } else { b }
}

/// The result of [`compare`].
#[derive(Debug, Clone, PartialEq)]
pub struct Comparison {
    /// Deviation of the hidden state after each layer.
    pub layers: Vec<Deviation>,
    /// Deviation of the logits; without an output head, of the states after the last norm.
    pub output: Deviation,
    /// Compared tokens.
    pub n_tokens: usize,
    /// Agreement of the argmax; `None` if the model has no output head.
    pub choices: Option<ArgmaxAgreement>,
}

/// The agreement of two passes' argmax.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ArgmaxAgreement {
    /// Number of positions with the same argmax.
    pub same: usize,
    /// Argmax of the reference at the last position.
    pub reference: u32,
    /// Argmax of the other pass at the last position.
    pub other: u32,
}

/// A point in the computation at which two passes can diverge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DivergencePoint {
    /// After the layer with this index.
    Layer(usize),
    /// After the output head; without one, after the last norm.
    Output,
}

impl Comparison {
    /// The first point at which the error exceeds `tolerance`.
    pub fn first_past(&self, tolerance: f64) -> Option<DivergencePoint> {
        let layer = self.layers.iter().position(|layer| !layer.within(tolerance));
        layer.map(DivergencePoint::Layer).or((!self.output.within(tolerance)).then_some(DivergencePoint::Output))
    }
}

/// Evaluates `ids` with `reference` and `other`, two passes of one model, after emptying both, and compares the hidden
/// states after every layer and the logits of every token (without an output head, the states after the last norm). A
/// model without a causal mask evaluates all tokens in one batch, and [`EvaluationMode::Decode`] fails for more than
/// one.
///
/// Before each batch `progress` is called with the number of tokens done and in total; if it returns `Break`, the
/// result is [`Error::Interrupted`].
///
/// ```
/// use std::ops::ControlFlow;
///
/// use metal_attention::compare::{EvaluationMode, compare};
/// use metal_attention::{CacheType, Device, EngineOptions, Model};
///
/// # fn main() -> Result<(), metal_attention::Error> {
/// let model = Model::built_in()?;
/// let exact = EngineOptions { device: Device::Cpu, exact: true, cache_type: CacheType::F32, ..Default::default() };
/// let mut reference = model.forward_pass(&exact)?;
/// let mut other = model.forward_pass(&EngineOptions::default())?;
/// let ids = [1, 403, 407, 261, 378];
/// let found = compare(&mut *reference, &mut *other, &ids, EvaluationMode::Decode, |_, _| ControlFlow::Continue(()))?;
/// assert_eq!(found.first_past(1e-2), None);
/// assert_eq!(found.choices.map(|choices| choices.same), Some(5));
/// # Ok(())
/// # }
/// ```
pub fn compare(
    reference: &mut dyn ForwardPass,
    other: &mut dyn ForwardPass,
    ids: &[u32],
    way: EvaluationMode,
    mut progress: impl FnMut(usize, usize) -> ControlFlow<()>,
) -> Result<Comparison, Error> {
    if ids.is_empty() {
        return Err(Error::EmptyPrompt);
    }
    reference.reset();
    other.reset();
    let spec = reference.spec();
    let (n_layer, n_embd, n_vocab) = (spec.n_layer(), spec.n_embd, spec.n_vocab);
    let (has_head, is_causal) = (spec.output.head.is_some(), spec.is_causal());
    let n_batch = match way {
        EvaluationMode::Prefill(_) if !is_causal => ids.len(),
        EvaluationMode::Prefill(n) => (MAX_LOGITS_BYTES / (4 * n_vocab)).clamp(1, n.max(1)),
        EvaluationMode::Decode => 1,
    };
    // With all logits wanted, the last layer evaluates every token.
    let tokens: Vec<_> =
        ids.iter().enumerate().map(|(pos, &id)| BatchToken { id, seq: 0, pos, output: has_head }).collect();
    let mut found = Comparison {
        layers: vec![Deviation::NONE; n_layer],
        output: Deviation::NONE,
        n_tokens: ids.len(),
        choices: has_head.then(ArgmaxAgreement::default),
    };
    let mut report = |start: usize| match progress(start, ids.len()) {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(()) => Err(Error::Interrupted { done: start, total: ids.len() }),
    };
    for batch in tokens.chunks(n_batch) {
        let start = batch[0].pos;
        report(start)?;
        let (want_states, want_logits) = states_and_logits(reference, batch)?;
        let (got_states, got_logits) = states_and_logits(other, batch)?;
        for ((layer, got), want) in found.layers.iter_mut().zip(&got_states).zip(&want_states) {
            layer.add_rows(start, got, want, n_embd);
        }
        if let Some(choices) = &mut found.choices {
            found.output.add_rows(start, &got_logits, &want_logits, n_vocab);
            for (got, want) in got_logits.chunks(n_vocab).zip(want_logits.chunks(n_vocab)) {
                (choices.other, choices.reference) = (argmax(got), argmax(want));
                choices.same += usize::from(choices.other == choices.reference);
            }
        }
    }
    if !has_head {
        // The states after the last norm need a second evaluation.
        reference.reset();
        other.reset();
        let tokens: Vec<_> = tokens.iter().map(|&token| BatchToken { output: true, ..token }).collect();
        for batch in tokens.chunks(n_batch) {
            let start = batch[0].pos;
            report(start)?;
            found.output.add_rows(start, &other.forward_hidden(batch)?, &reference.forward_hidden(batch)?, n_embd);
        }
    }
    Ok(found)
}

/// The hidden states after each layer, `[n_tokens, n_embd]` each, and the logits, `[n_tokens, n_vocab]` (empty without
/// an output head).
fn states_and_logits(pass: &mut dyn ForwardPass, batch: &[BatchToken]) -> Result<(Vec<Vec<f32>>, Vec<f32>), Error> {
    let mut states = vec![Vec::new(); pass.spec().n_layer()];
    // A pass may divide the batch into micro-batches, and then reports each layer several times.
    let mut keep = |layer: usize, x: &[f32]| states[layer].extend_from_slice(x);
    let logits = pass.forward_traced(batch, Some(&mut keep))?.as_slice().to_vec();
    Ok((states, logits))
}

#[cfg(test)]
mod tests {
    use metal_attention_cpu::{CpuExecutor, CpuOptions};
    use metal_attention_model::{Executor, ForwardError, HookedExecutor, Hooks, Session, SessionOptions, Step};

    use super::*;
    use crate::{CacheType, Device, EngineOptions, Model};

    const IDS: [u32; 5] = [1, 403, 407, 261, 378];

    fn pass(exact: bool) -> Box<dyn ForwardPass> {
        let cache_type = if exact { CacheType::F32 } else { CacheType::F16 };
        let options = EngineOptions { device: Device::Cpu, exact, cache_type, n_ctx: Some(16), ..Default::default() };
        Model::built_in().unwrap().forward_pass(&options).unwrap()
    }

    fn keep_going(_: usize, _: usize) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }

    /// The built-in model with exact arithmetic, whose hidden states are changed from layer `layer` on: `error` is added to the
    /// first element of the token at position 3.
    fn faulty(layer: usize, error: f32) -> Session<impl Executor> {
        struct Fault {
            layer: usize,
            error: f32,
        }
        impl Hooks for Fault {
            fn change_rows(&mut self, step: &Step, before: usize, rows: &mut [f32]) {
                let n_embd = rows.len() / step.tokens.len();
                // The rows before a layer are the result of the one before it.
                if let Some(i) = step.tokens.iter().position(|t| t.pos == 3).filter(|_| before > self.layer) {
                    rows[i * n_embd] += self.error;
                }
            }
        }
        let model = Model::built_in().unwrap();
        let options = SessionOptions { n_ctx: 16, cache_type: CacheType::F32, exact: true, ..Default::default() };
        let cpu = CpuOptions::default();
        let inner = CpuExecutor::new(&cpu, model.loaded(), &options).unwrap();
        Session::new(HookedExecutor::new(inner, Fault { layer, error }))
    }

    #[test]
    fn equal_passes_do_not_differ() {
        for way in [EvaluationMode::Decode, EvaluationMode::Prefill(2), EvaluationMode::Prefill(512)] {
            let found = compare(&mut *pass(true), &mut *pass(true), &IDS, way, keep_going).unwrap();
            let none = Deviation { nmse: 0.0, position: 0, max_difference: 0.0 };
            assert_eq!((&found.layers, found.output), (&vec![none; 5], none));
            assert_eq!(found.n_tokens, 5);
            assert_eq!(found.choices, Some(ArgmaxAgreement { same: 5, reference: 432, other: 432 }));
            assert_eq!(found.first_past(0.0), None);
        }
    }

    #[test]
    fn a_used_pass_is_emptied_first() {
        let (mut reference, mut other) = (pass(true), pass(true));
        other.forward_prompt(&[5, 6, 7]).unwrap();
        let found = compare(&mut *reference, &mut *other, &IDS, EvaluationMode::Decode, keep_going).unwrap();
        assert_eq!(found.first_past(0.0), None);
    }

    #[test]
    fn rounding_is_seen_and_small() {
        let found =
            compare(&mut *pass(true), &mut *pass(false), &IDS, EvaluationMode::Prefill(512), keep_going).unwrap();
        // The weights of the built-in model are F32, so that only the cache rounds.
        assert!(found.layers.iter().all(|l| l.nmse > 0.0 && l.nmse < 1e-5 && l.max_difference > 0.0), "{found:?}");
        assert_eq!(found.first_past(0.0), Some(DivergencePoint::Layer(0)));
        assert_eq!(found.first_past(1e-5), None);
    }

    #[test]
    fn the_first_layer_that_differs_is_named() {
        for (error, way) in [
            (0.5, EvaluationMode::Decode),
            (0.5, EvaluationMode::Prefill(512)),
            (f32::NAN, EvaluationMode::Decode),
            (f32::INFINITY, EvaluationMode::Decode),
        ] {
            let mut faulty = faulty(3, error);
            let found = compare(&mut *pass(true), &mut faulty, &IDS, way, keep_going).unwrap();
            assert_eq!(found.first_past(1e-6), Some(DivergencePoint::Layer(3)), "{found:?}");
            assert_eq!(found.layers[3].position, 3);
            assert_eq!(found.layers[2].max_difference, 0.0);
            let largest = found.layers[3].max_difference;
            assert!(
                (largest - error).abs() < 1e-6 || largest.is_nan() == error.is_nan() && !largest.is_finite(),
                "{largest}"
            );
            assert_eq!((found.output.nmse, found.choices.unwrap().same), (0.0, 5));
        }
    }

    #[test]
    fn what_cannot_be_compared_is_refused() {
        let run = |ids: &[u32], progress: fn(usize, usize) -> ControlFlow<()>| {
            compare(&mut *pass(true), &mut *pass(true), ids, EvaluationMode::Decode, progress).unwrap_err()
        };
        assert!(matches!(run(&[], keep_going), Error::EmptyPrompt));
        assert!(matches!(run(&[1, 512], keep_going), Error::Forward(ForwardError::TokenOutOfRange { id: 512, .. })));
        assert!(matches!(run(&[1; 17], keep_going), Error::Forward(ForwardError::ContextFull { n_ctx: 16, .. })));
        let stop = |done, _| if done == 2 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
        assert!(matches!(run(&IDS, stop), Error::Interrupted { done: 2, total: 5 }));
    }
}
