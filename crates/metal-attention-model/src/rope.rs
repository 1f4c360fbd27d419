//! Rotary position embedding (`RoPE`, Su et al. 2021, arXiv 2104.09864), with the context extensions that GGUF files
//! describe.

use std::ops::Range;

use crate::{ModelSpec, Position};

/// Which elements of a head form a rotated pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeLayout {
    /// NORM: neighbours, `(x[2i], x[2i + 1])`, as in the paper (Llama files).
    Interleaved,
    /// NeoX: `(x[i], x[i + n_rot / 2])`, as in GPT-NeoX (Qwen files).
    Halves,
}

/// The mapping of positions beyond the training context into its range.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeScaling {
    /// No scaling.
    None,
    /// Every position is divided by `factor` (arXiv 2306.15595).
    Linear {
        /// The factor by which the context grows.
        factor: f32,
    },
    /// `YaRN` (arXiv 2309.00071): low frequencies are interpolated, high ones kept.
    Yarn {
        /// The factor by which the context grows.
        factor: f32,
        /// Context length of the original training.
        n_ctx_orig: usize,
        /// Full rotations over `n_ctx_orig` above which a frequency is kept.
        beta_fast: f32,
        /// Full rotations over `n_ctx_orig` below which a frequency is interpolated.
        beta_slow: f32,
        /// Weight of the kept frequencies; 1 in the paper.
        ext_factor: f32,
        /// `Some(m)`: the length of rotated vectors is divided by `1 + 0.1 m ln(factor)` (DeepSeek, Ministral 3), which
        /// cancels or replaces YaRN's own growth; the scale of the scores makes up for it.
        log_multiplier: Option<f32>,
    },
}

/// Which tensor has divisors of the frequencies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeFactors {
    /// None, even if the file has such a tensor.
    None,
    /// `rope_freqs`, if the file has it (Llama 3.1 and later, full layers of Gemma 4).
    Tensor,
    /// The first `n_rot / 2` of the `n` divisors in `rope_freqs`, if the file has it (Step 3.5, where other layers rotate
    /// more elements without divisors).
    FirstOfTensor {
        /// Length of the tensor, at least `n_rot / 2`.
        n: usize,
    },
    /// `rope_factors_long` if the context is longer than `n_ctx_orig`, otherwise `rope_factors_short` (Phi-3).
    ByContext {
        /// Training context before the extension.
        n_ctx_orig: usize,
    },
}

impl RopeFactors {
    /// The tensor without `.weight`, for a context of `n_ctx` positions; `None` if there are no divisors.
    pub fn tensor(self, n_ctx: usize) -> Option<&'static str> {
        match self {
            Self::None => None,
            Self::Tensor | Self::FirstOfTensor { n: _ } => Some("rope_freqs"),
            Self::ByContext { n_ctx_orig } if n_ctx > n_ctx_orig => Some("rope_factors_long"),
            Self::ByContext { .. } => Some("rope_factors_short"),
        }
    }

    /// All tensors that may be read.
    pub fn tensors(self) -> &'static [&'static str] {
        match self {
            Self::None => &[],
            Self::Tensor | Self::FirstOfTensor { n: _ } => &["rope_freqs"],
            Self::ByContext { .. } => &["rope_factors_long", "rope_factors_short"],
        }
    }
}

/// Rotary position embedding of one attention layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rope {
    /// Rotated elements at the start of each head; even, at most `head_dim`.
    pub n_rot: usize,
    /// Which elements form a pair.
    pub layout: RopeLayout,
    /// Base of the geometric series of frequencies (10 000 in the paper).
    pub freq_base: f32,
    /// Scaling of positions.
    pub scaling: RopeScaling,
    /// Factor on the length of rotated vectors; 1 in the paper.
    pub attn_factor: f32,
    /// Divisors of the frequencies.
    pub factors: RopeFactors,
    /// Which component of a position rotates which pair. `None`: the first one rotates all.
    pub sections: Option<RopeSections>,
}

/// The components of a [`Position`](crate::Position) that rotate the pairs of a head: `sizes` of time, height and width, and of
/// a fourth component that is always 0 (M-RoPE, arXiv 2409.12191). Pairs are counted modulo the sum of the sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RopeSections {
    /// Pairs of each component.
    pub sizes: [u32; 4],
    /// Whether the pairs of the first three alternate, as far as each has pairs (Qwen 3-VL), instead of following each other.
    pub interleaved: bool,
}

impl RopeSections {
    /// The component that rotates `pair`; `None`: the fourth one, so that the pair is not rotated.
    pub fn component(self, pair: usize) -> Option<usize> {
        let n: u32 = self.sizes.iter().sum();
        let i = (pair % (n.max(1) as usize)) as u32;
        if self.interleaved {
            let component = (i % 3) as usize;
            return (i < 3 * self.sizes[component]).then_some(component);
        }
        let mut end = 0;
        (0..3).find(|&component| {
            end += self.sizes[component];
            i < end
        })
    }
}

impl Rope {
    /// The rotation of the paper.
    pub fn new(n_rot: usize, layout: RopeLayout, freq_base: f32) -> Self {
        Self {
            n_rot,
            layout,
            freq_base,
            scaling: RopeScaling::None,
            attn_factor: 1.0,
            factors: RopeFactors::None,
            sections: None,
        }
    }

    /// The rotation of each pair. `factors` as in [`frequencies`](Self::frequencies).
    pub fn rotation(&self, factors: Option<&[f32]>) -> Rotation {
        let component = |pair| self.sections.and_then(|sections| sections.component(pair)).unwrap_or(0);
        let (frequencies, magnitude) = self.frequencies(factors);
        Rotation { components: (0..frequencies.len()).map(component).collect(), frequencies, magnitude }
    }

    /// Length of the tensors with divisors.
    pub(crate) fn n_factors(&self) -> usize {
        match self.factors {
            RopeFactors::None | RopeFactors::Tensor | RopeFactors::ByContext { n_ctx_orig: _ } => self.n_rot / 2,
            RopeFactors::FirstOfTensor { n } => n,
        }
    }

    /// Radians per position of each pair, `[n_rot / 2]`, and the factor on the length of rotated vectors. `factors`:
    /// divisors of the frequencies, at least `n_rot / 2` (see [`RopeFactors`]). Pairs that no component rotates have 0.
    pub fn frequencies(&self, factors: Option<&[f32]>) -> (Vec<f64>, f64) {
        let (mut frequencies, length) = self.frequencies_of_all(factors);
        if let Some(sections) = self.sections {
            for (pair, frequency) in frequencies.iter_mut().enumerate() {
                if sections.component(pair).is_none() {
                    *frequency = 0.0;
                }
            }
        }
        (frequencies, length)
    }

    /// [`frequencies`](Self::frequencies), whatever the sections.
    fn frequencies_of_all(&self, factors: Option<&[f32]>) -> (Vec<f64>, f64) {
        let base = f64::from(self.freq_base);
        let n_rot = self.n_rot as f64;
        let plain = (0..self.n_rot / 2).map(|i| {
            let factor = factors.map_or(1.0, |f| f64::from(f[i]));
            base.powf(-2.0 * i as f64 / n_rot) / factor
        });
        let attn_factor = f64::from(self.attn_factor);
        match self.scaling {
            RopeScaling::None => (plain.collect(), attn_factor),
            RopeScaling::Linear { factor } => (plain.map(|f| f / f64::from(factor)).collect(), attn_factor),
            RopeScaling::Yarn { factor, n_ctx_orig, beta_fast, beta_slow, ext_factor, log_multiplier } => {
                let factor = f64::from(factor);
                // The pair that makes `rotations` full rotations over the original context (section 3.2).
                let pair_of = |rotations: f32| {
                    let turns = n_ctx_orig as f64 / (f64::from(rotations) * std::f64::consts::TAU);
                    n_rot * turns.ln() / (2.0 * base.ln())
                };
                let low = pair_of(beta_fast).floor().max(0.0);
                let high = pair_of(beta_slow).ceil().min(n_rot - 1.0);
                let frequencies = plain.enumerate().map(|(i, f)| {
                    let ramp = ((i as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
                    let keep = (1.0 - ramp) * f64::from(ext_factor);
                    f * keep + f / factor * (1.0 - keep)
                });
                let grown = |multiplier: f64| 1.0 + 0.1 * multiplier * factor.max(1.0).ln();
                let length = if ext_factor == 0.0 { 1.0 } else { grown(1.0) };
                let length = length / log_multiplier.map_or(1.0, |m| grown(f64::from(m)));
                (frequencies.collect(), attn_factor * length)
            }
        }
    }
}

/// How RoPE rotates the pairs of a head: what cos/sin tables are computed from.
#[derive(Debug, Clone, PartialEq)]
pub struct Rotation {
    /// Radians per position of each pair, `[n_rot / 2]`.
    pub frequencies: Vec<f64>,
    /// The component of the position that rotates each pair, `[n_rot / 2]`.
    pub components: Vec<usize>,
    /// Factor on cosines and sines, and so on the length of rotated vectors.
    pub magnitude: f64,
}

impl Rotation {
    /// Cosine and sine of each pair at `position`, times the magnitude.
    pub fn cos_sin(&self, position: Position) -> impl Iterator<Item = [f32; 2]> {
        self.frequencies.iter().zip(&self.components).map(move |(frequency, &component)| {
            // In f64: at position 100 000 an f32 angle is off by about 0.01 rad.
            let (sin, cos) = (f64::from(position.0[component]) * frequency).sin_cos();
            [(cos * self.magnitude) as f32, (sin * self.magnitude) as f32]
        })
    }

    /// The cos/sin table of the positions of text below `n`, row-major `[n, n_rot / 2, 2]`.
    pub fn table(&self, n: usize) -> Vec<f32> {
        (0..n as u32).flat_map(|position| self.cos_sin(Position::of_text(position))).flatten().collect()
    }
}

/// The rows of the RoPE cos/sin tables of a device: one for each position of text; in models with RoPE sections these are followed
/// by one for each input of the largest step, for positions whose components differ. An input has the same row in all tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RopeRows {
    /// Positions of text.
    pub n_positions: usize,
    /// Rows of inputs; 0 in models without RoPE sections.
    pub n_inputs: usize,
}

impl RopeRows {
    /// The rows for the positions of text below `n_positions` and steps of at most `n_tokens` inputs of `spec`.
    pub fn new(spec: &ModelSpec, n_positions: usize, n_tokens: usize) -> Self {
        let has_sections = spec.ropes().iter().any(|rope| rope.sections.is_some());
        Self { n_positions, n_inputs: if has_sections { n_tokens } else { 0 } }
    }

    /// Number of rows. Saturates.
    pub fn n_rows(self) -> usize {
        self.n_positions.saturating_add(self.n_inputs)
    }

    /// The row for input `i` of a step, which has this position.
    pub fn row(self, i: usize, position: Position) -> u32 {
        if self.is_own(position) { (self.n_positions + i) as u32 } else { position.0[0] }
    }

    /// Whether an input with this position has a row of its own, as those of text have none for it.
    fn is_own(self, position: Position) -> bool {
        self.n_inputs > 0 && !position.is_of_text()
    }

    /// The inputs whose rows a step has to write, given the positions of all: from the first one that has a row of its own to the
    /// last. Empty in most steps.
    pub fn inputs_to_write(self, positions: &[Position]) -> Range<usize> {
        let own = |position: &Position| self.is_own(*position);
        let first = positions.iter().position(own).unwrap_or(0);
        first..positions.iter().rposition(own).map_or(first, |last| last + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rope(scaling: RopeScaling) -> Rope {
        Rope { scaling, ..Rope::new(8, RopeLayout::Halves, 10_000.0) }
    }

    #[test]
    fn plain_frequencies_are_a_geometric_series() {
        let (f, length) = rope(RopeScaling::None).frequencies(None);
        for (got, want) in f.iter().zip([1.0, 0.1, 0.01, 0.001]) {
            assert!((got - want).abs() < 1e-15, "{got} {want}");
        }
        assert_eq!(length, 1.0);
    }

    #[test]
    fn sections_name_the_component_of_each_pair() {
        let components = |sizes, interleaved| -> Vec<_> {
            let sections = RopeSections { sizes, interleaved };
            (0..9).map(|pair| sections.component(pair).map_or(9, |component| component)).collect()
        };
        assert_eq!(components([4, 2, 2, 0], false), [0, 0, 0, 0, 1, 1, 2, 2, 0]);
        assert_eq!(components([3, 2, 1, 2], false), [0, 0, 0, 1, 1, 2, 9, 9, 0]);
        assert_eq!(components([4, 2, 2, 0], true), [0, 1, 2, 0, 1, 2, 0, 9, 0]);
        let sections = Some(RopeSections { sizes: [2, 1, 0, 1], interleaved: false });
        let (f, _) = Rope { sections, ..rope(RopeScaling::None) }.frequencies(None);
        let (all, _) = rope(RopeScaling::None).frequencies(None);
        assert_eq!((&f[..3], f[3]), (&all[..3], 0.0));
    }

    #[test]
    fn positions_with_different_components_have_rows_behind_those_of_text() {
        let spec = |name| ModelSpec::from_metadata(&crate::ModelShape::custom(name).unwrap().metadata()).unwrap();
        let positions = [[3; 3], [4, 4, 5], [6; 3], [4, 5, 4], [7; 3]].map(Position);
        let of = |rows: RopeRows| {
            let row = |(i, position): (usize, &Position)| rows.row(i, *position);
            let found: Vec<_> = positions.iter().enumerate().map(row).collect();
            (rows.n_rows(), found, rows.inputs_to_write(&positions))
        };
        assert_eq!(of(RopeRows::new(&spec("qwen2vl"), 100, 8)), (108, vec![3, 101, 6, 103, 7], 1..4));
        assert_eq!(of(RopeRows::new(&spec("llama"), 100, 8)), (100, vec![3, 4, 6, 4, 7], 0..0));
        assert_eq!(RopeRows::new(&spec("qwen2vl"), 100, 8).inputs_to_write(&positions[2..3]), 0..0);
    }

    #[test]
    fn factors_divide_and_linear_scaling_divides_once_more() {
        let (f, _) = rope(RopeScaling::Linear { factor: 4.0 }).frequencies(Some(&[1.0, 2.0, 5.0, 8.0]));
        for (got, want) in f.iter().zip([0.25, 0.0125, 0.0005, 0.001 / 32.0]) {
            assert!((got - want).abs() < 1e-15, "{got} {want}");
        }
    }

    #[test]
    fn yarn_keeps_the_fastest_and_divides_the_slowest() {
        let yarn = RopeScaling::Yarn {
            factor: 4.0,
            n_ctx_orig: 64,
            beta_fast: 32.0,
            beta_slow: 1.0,
            ext_factor: 1.0,
            log_multiplier: None,
        };
        let (f, length) = rope(yarn).frequencies(None);
        // pair_of(32) = 8 ln(64 / 64 pi) / (2 ln 10^4) < 0 and pair_of(1) = 1.008 rounds up to 2:
        // ramp = 0, 1/2, 1, 1.
        for (got, want) in f.iter().zip([1.0, 0.1 * 0.5 + 0.025 * 0.5, 0.0025, 0.00025]) {
            assert!((got - want).abs() < 1e-12, "{got} {want}");
        }
        assert!((length - (1.0 + 0.1 * 4f64.ln())).abs() < 1e-12);
    }
}
