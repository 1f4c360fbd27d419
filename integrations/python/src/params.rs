//! Converts Python's `SamplingParams` to a request of the scheduler.

use std::sync::Arc;
use std::time::{Duration, Instant};

use metal_attention::sampling::{NumberOption, SamplerKind, SamplerOptions};
use metal_attention::scheduler::Request;
use metal_attention::{LogitsProcessor, PromptSpan};
use pyo3::conversion::FromPyObjectOwned;
use pyo3::prelude::*;

use crate::errors::OptionError;
use crate::processor::{PythonProcessor, RaisedException};

/// The request for text number `index` that `params` describe for the prompt `ids`, in which `spans` are the rows of pictures, with a
/// vocabulary of `n_vocab` tokens, and the place for the exception of its logits processors.
pub fn request(
    ids: Vec<u32>,
    spans: Arc<[PromptSpan]>,
    params: &Bound<'_, PyAny>,
    index: u64,
    n_vocab: usize,
) -> PyResult<(Request, RaisedException)> {
    let raised = RaisedException::default();
    let processor: Option<Py<PyAny>> = call(params, "_processor")?;
    let logits_processor = processor.map(|function| {
        let processor: Box<dyn LogitsProcessor> = Box::new(PythonProcessor { function, raised: raised.clone() });
        processor
    });
    let stop: Vec<String> = call(params, "_stop")?;
    let stop_ids: Vec<u32> = call(params, "_stop_token_ids")?;
    let prompt_logprobs = most_probable(params, "prompt_logprobs", n_vocab)?;
    let request = Request {
        prompt: ids.into(),
        spans,
        sampling: sampling(params, index)?,
        max_tokens: get(params, "max_tokens")?,
        min_tokens: get(params, "min_tokens")?,
        stop: stop.into(),
        stop_ids: stop_ids.into(),
        ignore_eos: get(params, "ignore_eos")?,
        logprobs: most_probable(params, "logprobs", n_vocab)?,
        // They are the same for all texts of a prompt, so that only the first one computes them.
        prompt_logprobs: prompt_logprobs.filter(|_| index == 0),
        logits_processor,
        max_drafts: get(params, "max_drafts")?,
        deadline: get::<Option<f64>>(params, "timeout")?.map(deadline).transpose()?,
        ..Default::default()
    };
    Ok((request, raised))
}

/// The text that the answer is likely to repeat, of which drafts are taken.
pub fn prediction(params: &Bound<'_, PyAny>) -> PyResult<Option<String>> {
    get(params, "prediction")
}

/// The name of an option in `SamplingParams`: vLLM's if that differs.
pub fn python_name(option: &NumberOption) -> &'static str {
    if option.name == "repeat_penalty" { "repetition_penalty" } else { option.name }
}

/// The sampler's options for text number `index`.
fn sampling(params: &Bound<'_, PyAny>, index: u64) -> PyResult<SamplerOptions> {
    let mut options = SamplerOptions { logit_bias: call(params, "_logit_bias")?, ..SamplerOptions::default() };
    for option in NumberOption::ALL {
        let name = python_name(option);
        let value: f64 = get(params, name)?;
        let refused = |_| OptionError::new_err(format!("{name} is {value}, but it must be {}", option.allowed));
        option.set(&mut options, value).map_err(refused)?;
    }
    if let Some(names) = call::<Option<Vec<String>>>(params, "_samplers")? {
        let kinds = names.iter().map(|name| name.parse()).collect::<Result<Vec<SamplerKind>, _>>();
        options.order = kinds.map_err(|error| OptionError::new_err(error.to_string()))?;
    }
    if let Some(breakers) = call(params, "_dry_sequence_breakers")? {
        options.dry_sequence_breakers = breakers;
    }
    // A negative seed means none, as in the rest of the library.
    let seed = get::<Option<i128>>(params, "seed")?.filter(|&seed| seed >= 0);
    let too_large = |seed| OptionError::new_err(format!("seed is {seed}, but it must be at most {}", u64::MAX));
    let seed = seed.map(|seed| u64::try_from(seed).map_err(|_| too_large(seed))).transpose()?;
    options.seed = seed.map(|seed| seed.wrapping_add(index));
    Ok(options)
}

/// The number of most probable tokens to report; -1 becomes all.
fn most_probable(params: &Bound<'_, PyAny>, name: &str, n_vocab: usize) -> PyResult<Option<usize>> {
    match get::<Option<i64>>(params, name)? {
        None => Ok(None),
        Some(-1) => Ok(Some(n_vocab)),
        Some(n) => match usize::try_from(n) {
            Ok(n) => Ok(Some(n)),
            Err(_) => Err(OptionError::new_err(format!("{name} is {n}, but it must be -1 (all) or more"))),
        },
    }
}

/// The time `seconds` from now.
fn deadline(seconds: f64) -> PyResult<Instant> {
    let patience = Duration::try_from_secs_f64(seconds).ok();
    patience
        .and_then(|patience| Instant::now().checked_add(patience))
        .ok_or_else(|| OptionError::new_err(format!("timeout is {seconds}, but it must be a time in seconds")))
}

/// The value of an option. One of the wrong type, or too large for it, is an error with its name.
fn get<'py, T: FromPyObjectOwned<'py>>(params: &Bound<'py, PyAny>, name: &str) -> PyResult<T> {
    extract(&params.getattr(name)?, name)
}

/// The result of a method that converts one or more options.
fn call<'py, T: FromPyObjectOwned<'py>>(params: &Bound<'py, PyAny>, name: &str) -> PyResult<T> {
    extract(&params.call_method0(name)?, name.trim_start_matches('_'))
}

/// Converts a Python value; errors call it `name`.
fn extract<'py, T: FromPyObjectOwned<'py>>(value: &Bound<'py, PyAny>, name: &str) -> PyResult<T> {
    value.extract().map_err(|error: T::Error| {
        let error: PyErr = error.into();
        OptionError::new_err(format!("{name}: {}", error.value(value.py())))
    })
}
