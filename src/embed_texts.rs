//! Evaluates texts and pools their hidden states, several texts in one batch.

use metal_attention::{Error, ForwardError, ForwardPass, Pooler};

use crate::cli_error::CliError;
use crate::progress::ProgressLine;

/// Evaluates `texts`, each of at least one token, in batches of as many as the forward pass has sequences. `done` is called
/// with the index of each text and the result of `pooler`, in order. An error if a result is not finite.
pub fn embed_texts(
    pass: &mut dyn ForwardPass,
    pooler: &Pooler,
    texts: &[Vec<u32>],
    mut done: impl FnMut(usize, Vec<f32>) -> Result<(), CliError>,
) -> Result<(), CliError> {
    let n_embd = pass.spec().n_embd;
    let n_tokens = texts.iter().map(|text| text.len() as u64).sum();
    let progress = ProgressLine::steps(if pooler.is_ranker() { "scoring" } else { "embedding" }, n_tokens)
        .watched(pass.spec().n_layer());
    let (mut next, mut evaluated) = (0, 0);
    while next < texts.len() {
        let some = &texts[next..texts.len().min(next + pass.n_seq())];
        pass.reset();
        let batches: Vec<_> = some.iter().enumerate().map(|(seq, ids)| pooler.batch(ids, seq)).collect();
        let states = match pass.forward_hidden(&batches.concat()) {
            Err(ForwardError::Cancelled) => return Err(CliError::Interrupted),
            states => states.map_err(Error::from)?,
        };
        let mut states = states.as_slice();
        for (i, batch) in batches.iter().enumerate() {
            let n = batch.iter().filter(|token| token.output).count();
            let mut pooled = pooler.begin();
            pooled.add(states.split_off(..n * n_embd).unwrap_or_default());
            let vector = pooler.finish(pooled);
            if !vector.iter().all(|x| x.is_finite()) {
                return Err(Error::NoNumbers.into());
            }
            done(next + i, vector)?;
            evaluated += batch.len() as u64;
        }
        next += some.len();
        progress.set(evaluated);
    }
    Ok(())
}
