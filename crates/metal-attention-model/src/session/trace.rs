//! Copies of the residual stream between the layers of a step.

use std::ops::Range;

use crate::BatchToken;

/// The residual stream that a step copies to the host.
pub struct LayerTrace<'t> {
    /// The layers before which it is copied, ascending and all different: `i` is the input of layer `i`, `n_layer` the
    /// output of the last layer, before the output norm, and `n_layer + 1` the result of the output norm. In an assistant
    /// `n_layer + 2`, alone, is the next state, `[n_rows, target_width]`.
    pub before: &'t [usize],
    /// The tokens whose rows are copied.
    pub tokens: TracedTokens,
    /// Called for each layer of `before`, in order, with the rows of the tokens, row-major `[n_rows, n_embd]`. Not called where
    /// there are no rows.
    pub rows: &'t mut dyn FnMut(usize, &[f32]),
}

/// The tokens of a step whose rows a [`LayerTrace`] copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TracedTokens {
    /// All.
    All,
    /// The output tokens.
    Output,
}

impl TracedTokens {
    /// The rows of these tokens among those of all `tokens`: maximal ranges, ascending.
    pub fn rows(self, tokens: &[BatchToken]) -> Vec<Range<usize>> {
        match self {
            Self::All => std::iter::once(0..tokens.len()).collect(),
            Self::Output => {
                let mut ranges: Vec<Range<usize>> = Vec::new();
                for (i, _) in tokens.iter().enumerate().filter(|(_, token)| token.output) {
                    match ranges.last_mut() {
                        Some(range) if range.end == i => range.end += 1,
                        Some(_) | None => ranges.push(i..i + 1),
                    }
                }
                ranges
            }
        }
    }
}

impl LayerTrace<'_> {
    /// The same, for one of several steps.
    pub(super) fn reborrow(&mut self) -> LayerTrace<'_> {
        LayerTrace { before: self.before, tokens: self.tokens, rows: &mut *self.rows }
    }

    /// Calls `rows` if `layer` is in `before`. `x`: the residual stream of all `tokens` there, `[tokens.len(), n_embd]`.
    pub fn copy(&mut self, layer: usize, tokens: &[BatchToken], x: &[f32]) {
        if tokens.is_empty() || !self.before.contains(&layer) {
            return;
        }
        let n_embd = x.len() / tokens.len();
        match &self.tokens.rows(tokens)[..] {
            [] => {}
            [rows] => (self.rows)(layer, &x[rows.start * n_embd..rows.end * n_embd]),
            ranges => {
                let rows = ranges.iter().map(|rows| &x[rows.start * n_embd..rows.end * n_embd]);
                (self.rows)(layer, &rows.collect::<Vec<_>>().concat());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_output_tokens_are_maximal_ranges() {
        let tokens = |outputs: &[bool]| -> Vec<_> {
            outputs.iter().enumerate().map(|(pos, &output)| BatchToken { id: 0, seq: 0, pos, output }).collect()
        };
        let some = tokens(&[false, true, true, false, true]);
        assert_eq!(TracedTokens::Output.rows(&some), [1..3, 4..5]);
        assert_eq!(TracedTokens::All.rows(&some), std::slice::from_ref(&(0..5)));
        assert!(TracedTokens::Output.rows(&tokens(&[false, false])).is_empty());
        let mut found = Vec::new();
        let mut keep = |layer: usize, rows: &[f32]| found.push((layer, rows.to_vec()));
        let mut trace = LayerTrace { before: &[0, 2], tokens: TracedTokens::Output, rows: &mut keep };
        let x: Vec<f32> = (0..10).map(|i| i as f32).collect();
        (0..3).for_each(|layer| trace.copy(layer, &some, &x));
        let rows = vec![2.0, 3.0, 4.0, 5.0, 8.0, 9.0];
        assert_eq!(found, [(0, rows.clone()), (2, rows)]);
    }
}
