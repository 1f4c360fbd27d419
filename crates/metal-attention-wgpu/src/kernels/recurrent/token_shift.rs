//! RWKV's token shift: each token's row mixed with that of the token before, by several sets of factors.

use super::bindings::{self, Bindings, ColumnRange, RecurrentBinding, StateRange};
use crate::arena::Bind;
use crate::device::WgpuDevice;
use crate::dispatch::{Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::pipelines::PipelineKey;

/// Tokens of an invocation.
const TOKENS: u32 = 16;
const THREADS: usize = 64;
/// The names of the results in the shader.
const OUT: [&str; 6] = ["out_0", "out_1", "out_2", "out_3", "out_4", "out_5"];

/// The sizes of [`token_shift`], and where its rows and states are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenShiftShape {
    /// Channels.
    pub channels: usize,
    /// Results of each token, 1 to 6.
    pub n_out: usize,
    /// Inputs, `[channels]`.
    pub x: ColumnRange,
    /// The addition of each token to the factors, `[n_out, channels]`; `None`: nothing.
    pub mu_of_tokens: Option<ColumnRange>,
    /// The row of the last token, `[channels]`.
    pub states: StateRange,
    /// Whether the state is replaced by the batch's last row. Not if another shift of the same batch still reads it.
    pub advance: bool,
}

/// The buffers of [`token_shift`].
#[derive(Debug, Clone, Copy)]
pub struct TokenShiftBuffers<'a> {
    /// Inputs of each token.
    pub x: &'a dyn Bind,
    /// Factors of all tokens, `[n_out, channels]`.
    pub mu: &'a dyn Bind,
    /// The addition of each token to them, as [`TokenShiftShape::mu_of_tokens`].
    pub mu_of_tokens: Option<&'a dyn Bind>,
    /// The states.
    pub states: &'a dyn Bind,
    /// Receive the results, `[n_tokens, channels]` each.
    pub out: &'a [&'a dyn Bind],
    /// The words of [`segment_words`](super::segment_words).
    pub segments: &'a dyn Bind,
}

impl TokenShiftShape {
    fn bindings(&self) -> Bindings {
        let n_mu = self.n_out * self.channels;
        let mut bindings = vec![
            ("segments", RecurrentBinding::Segments),
            ("x", RecurrentBinding::Rows(self.x, self.channels)),
            ("mu", RecurrentBinding::Floats(n_mu)),
            ("state", RecurrentBinding::States(self.states, self.channels)),
        ];
        bindings.extend(self.mu_of_tokens.map(|rows| ("mu_of", RecurrentBinding::Rows(rows, n_mu))));
        let out = RecurrentBinding::Results(ColumnRange::whole(self.channels), self.channels);
        bindings.extend(OUT.iter().take(self.n_out).map(|&name| (name, out)));
        bindings
    }

    fn key(&self) -> PipelineKey {
        let constants = vec![
            ("channels", self.channels.into()),
            ("n_out", self.n_out.into()),
            ("by_token", self.mu_of_tokens.is_some().into()),
            ("advance", self.advance.into()),
            ("tokens", TOKENS.into()),
            ("threads", THREADS.into()),
        ];
        bindings::key("recurrent/token_shift", &self.bindings(), constants)
    }
}

/// `out_j[t] = x[t] + (x[t - 1] - x[t]) * (mu[j] + mu_of_tokens[t][j])` for all tokens of the batch's first `runs`
/// runs, each starting from its state.
pub fn token_shift(
    gpu: &WgpuDevice,
    shape: &TokenShiftShape,
    b: &TokenShiftBuffers<'_>,
    runs: GridExtent,
) -> Result<Dispatch, WgpuError> {
    let fits = b.out.len() == shape.n_out && shape.mu_of_tokens.is_some() == b.mu_of_tokens.is_some();
    if !fits || !(1..=OUT.len()).contains(&shape.n_out) {
        let why = format!("{shape:?} with {} results", b.out.len());
        return Err(WgpuError::Mismatch { what: "a token shift".into(), why });
    }
    let mut buffers = vec![b.segments, b.x, b.mu, b.states];
    buffers.extend(b.mu_of_tokens);
    buffers.extend(b.out);
    let columns = GridExtent::Fixed(shape.channels.div_ceil(THREADS) as u32);
    bindings::dispatch(gpu, &shape.key(), &shape.bindings(), &buffers, [columns, runs, GridExtent::Tokens(TOKENS)])
}

/// The scalar twin for one token with the factors `mu`, `[n_out, channels]`: the results `[n_out, channels]`. `before`,
/// the row of the token before, is replaced by `x`.
pub fn token_shift_twin(x: &[f64], mu: &[f64], before: &mut Vec<f64>) -> Vec<f64> {
    let mixed = |(i, mu): (usize, &f64)| x[i % x.len()] + (before[i % x.len()] - x[i % x.len()]) * mu;
    let out = mu.iter().enumerate().map(mixed).collect();
    *before = x.to_vec();
    out
}

pub(crate) fn catalogue() -> Vec<PipelineKey> {
    let channels = 2048;
    let states = StateRange { n_slots: 4, stride: channels * 66, at: 0 };
    let mu_of_tokens = Some(ColumnRange::whole(6 * channels));
    let shape =
        TokenShiftShape { channels, n_out: 6, x: ColumnRange::whole(channels), mu_of_tokens, states, advance: true };
    vec![shape.key()]
}
