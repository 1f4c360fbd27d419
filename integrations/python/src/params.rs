//! Python's `SamplingParams` as a request of the scheduler.

use std::time::{Duration, Instant};

use metal_attention::LogitsProcessor;
use metal_attention::sampling::{SamplerKind, SamplerOptions};
use metal_attention::scheduler::Request;
use pyo3::conversion::FromPyObjectOwned;
use pyo3::prelude::*;

use crate::errors::OptionError;
use crate::processor::{PythonProcessor, Raised};

/// The `index`-th text that `params` want of the prompt `ids`, and what its logits processors will have raised.
pub fn request(ids: Vec<u32>, params: &Bound<'_, PyAny>, index: u64) -> PyResult<(Request, Raised)> {
    let raised = Raised::default();
    let processor: Option<Py<PyAny>> = call(params, "_processor")?;
    let logits_processor = processor.map(|function| {
        let processor: Box<dyn LogitsProcessor> = Box::new(PythonProcessor { function, raised: raised.clone() });
        processor
    });
    let stop: Vec<String> = call(params, "_stop")?;
    let request = Request {
        prompt: ids.into(),
        sampling: sampling(params, index)?,
        max_tokens: get(params, "max_tokens")?,
        stop: stop.into(),
        ignore_eos: get(params, "ignore_eos")?,
        logprobs: get(params, "logprobs")?,
        logits_processor,
        deadline: get::<Option<f64>>(params, "timeout")?.map(deadline).transpose()?,
        ..Default::default()
    };
    Ok((request, raised))
}

fn sampling(params: &Bound<'_, PyAny>, index: u64) -> PyResult<SamplerOptions> {
    let defaults = SamplerOptions::default();
    let order: Option<Vec<String>> = call(params, "_samplers")?;
    let kinds = |names: Vec<String>| names.iter().map(|name| name.parse()).collect::<Result<Vec<SamplerKind>, _>>();
    let order = order.map(kinds).transpose().map_err(|error| OptionError::new_err(error.to_string()))?;
    // A seed below 0 is none, as everywhere.
    let seed = get::<Option<i128>>(params, "seed")?.filter(|&seed| seed >= 0);
    let too_large = |seed| OptionError::new_err(format!("seed is {seed}, but it must be at most {}", u64::MAX));
    let seed = seed.map(|seed| u64::try_from(seed).map_err(|_| too_large(seed))).transpose()?;
    // 0 turns top_k off here; vLLM says -1, too.
    let top_k: i64 = get(params, "top_k")?;
    Ok(SamplerOptions {
        temperature: get(params, "temperature")?,
        dynatemp_range: get(params, "dynatemp_range")?,
        dynatemp_exponent: get(params, "dynatemp_exponent")?,
        top_k: if top_k == -1 { 0 } else { count("top_k", top_k)? },
        top_p: get(params, "top_p")?,
        min_p: get(params, "min_p")?,
        typical_p: get(params, "typical_p")?,
        top_n_sigma: get(params, "top_n_sigma")?,
        xtc_probability: get(params, "xtc_probability")?,
        xtc_threshold: get(params, "xtc_threshold")?,
        penalty_last_n: last_n(params, "penalty_last_n")?,
        repeat_penalty: get(params, "repetition_penalty")?,
        frequency_penalty: get(params, "frequency_penalty")?,
        presence_penalty: get(params, "presence_penalty")?,
        dry_multiplier: get(params, "dry_multiplier")?,
        dry_base: get(params, "dry_base")?,
        dry_allowed_length: get(params, "dry_allowed_length")?,
        dry_penalty_last_n: last_n(params, "dry_penalty_last_n")?,
        logit_bias: call(params, "_logit_bias")?,
        order: order.unwrap_or(defaults.order),
        min_keep: defaults.min_keep,
        dry_sequence_breakers: defaults.dry_sequence_breakers,
        seed: seed.map(|seed| seed.wrapping_add(index)),
    })
}

/// So many tokens; -1: all there are.
fn last_n(params: &Bound<'_, PyAny>, name: &str) -> PyResult<usize> {
    match get(params, name)? {
        -1 => Ok(usize::MAX),
        n => count(name, n),
    }
}

fn count(name: &str, n: i64) -> PyResult<usize> {
    usize::try_from(n).map_err(|_| OptionError::new_err(format!("{name} is {n}, but it must be -1 or more")))
}

fn deadline(seconds: f64) -> PyResult<Instant> {
    let patience = Duration::try_from_secs_f64(seconds).ok();
    patience
        .and_then(|patience| Instant::now().checked_add(patience))
        .ok_or_else(|| OptionError::new_err(format!("timeout is {seconds}, but it must be a time in seconds")))
}

/// An option. One of the wrong type, or too large for it, is an error that names it.
fn get<'py, T: FromPyObjectOwned<'py>>(params: &Bound<'py, PyAny>, name: &str) -> PyResult<T> {
    extract(&params.getattr(name)?, name)
}

/// What a method makes of one or more options.
fn call<'py, T: FromPyObjectOwned<'py>>(params: &Bound<'py, PyAny>, name: &str) -> PyResult<T> {
    extract(&params.call_method0(name)?, name.trim_start_matches('_'))
}

fn extract<'py, T: FromPyObjectOwned<'py>>(value: &Bound<'py, PyAny>, name: &str) -> PyResult<T> {
    value.extract().map_err(|error: T::Error| {
        let error: PyErr = error.into();
        OptionError::new_err(format!("{name}: {}", error.value(value.py())))
    })
}
