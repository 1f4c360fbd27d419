//! From the hidden states of a sequence to its embedding, or to a reranker's scores: pooling, and the layers after it.
//!
//! Input are the states after the model's last norm, `[n, n_embd]`, from
//! [`ForwardPass::forward_hidden`](crate::ForwardPass::forward_hidden). All computation here is in main memory, in F32
//! and F64.

use metal_attention_gguf::Tensor;
use metal_attention_model::{BatchToken, ClassifierActivation, Linear, NormWeights, Pooling};

use crate::Model;

/// Makes one vector of the hidden states of a sequence, as the model's file says: pools them, applies the matrices that
/// follow, and divides the result by its length. A reranker's scores are not divided.
///
/// ```
/// use metal_attention::tokenizer::EncodeOptions;
/// use metal_attention::{EngineOptions, Model, Pooler};
/// # fn main() -> Result<(), metal_attention::Error> {
/// let model = Model::built_in()?;
/// let mut pass = model.forward_pass(&EngineOptions::default())?;
/// let pooler = Pooler::new(&model, None);
/// let ids = model.tokenizer()?.encode("Once upon a time", EncodeOptions::default());
/// let mut pooled = pooler.begin();
/// let states = pass.forward_hidden(&pooler.batch(&ids, 0))?;
/// pooled.add(&states);
/// let embedding = pooler.finish(pooled);
/// assert_eq!(embedding.len(), model.spec().n_embd);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Pooler {
    /// The states that are averaged: all, the first, or the last.
    pooling: Pooling,
    /// Length of a state.
    n_embd: usize,
    /// Operations after pooling, in order.
    ops: Vec<PoolingOp>,
    /// Whether the result is a reranker's scores.
    is_score: bool,
}

/// An operation on the pooled state.
#[derive(Debug, Clone)]
enum PoolingOp {
    /// A product with bias.
    Matrix(F32Matrix),
    /// Tanh of each element.
    Tanh,
    /// GELU of each element (the tanh approximation).
    Gelu,
    /// A layer norm; its bias is not used.
    LayerNorm(NormWeights),
    /// Softmax over all elements.
    Softmax,
}

/// A matrix in F32, row-major `[n_out, n_in]`, with an optional bias `[n_out]`.
#[derive(Debug, Clone)]
struct F32Matrix {
    /// Length of a row.
    n_in: usize,
    /// The rows.
    weight: Vec<f32>,
    /// The bias.
    bias: Option<Vec<f32>>,
}

/// The sum of the pooled states of one sequence, as far as it was evaluated.
#[derive(Debug, Clone)]
pub struct Pooled {
    /// Sum of the states, `[n_embd]`.
    sum: Vec<f64>,
    /// Number of states in it.
    n: usize,
}

impl Pooler {
    /// The pooler of `model`. `pooling` overrides the pooling that the file names; if neither names one, it is the
    /// mean.
    pub fn new(model: &Model, pooling: Option<Pooling>) -> Self {
        let (spec, weights) = (model.spec(), model.weights());
        let pooling = pooling.or(spec.output.pooling).unwrap_or(Pooling::Mean);
        let mut ops: Vec<_> =
            weights.pooled_projections.iter().map(|linear| PoolingOp::Matrix(F32Matrix::of(linear))).collect();
        let mut by = pooling;
        if pooling == Pooling::Classifier {
            by = Pooling::First;
            if let (Some(c), Some(w)) = (&spec.output.classifier, &weights.classifier) {
                by = c.pooling;
                if let Some(dense) = &w.dense {
                    ops.push(PoolingOp::Matrix(F32Matrix::of(dense)));
                    ops.push(match c.activation {
                        ClassifierActivation::Gelu => PoolingOp::Gelu,
                        ClassifierActivation::Tanh => PoolingOp::Tanh,
                    });
                    ops.extend(w.norm.clone().map(PoolingOp::LayerNorm));
                }
                ops.extend(w.out.iter().map(|out| PoolingOp::Matrix(F32Matrix::of(out))));
                if c.softmax {
                    ops.push(PoolingOp::Softmax);
                }
            }
        }
        Self { pooling: by, n_embd: spec.n_embd, ops, is_score: pooling == Pooling::Classifier }
    }

    /// Whether the model is a reranker: a sequence has scores instead of an embedding.
    pub fn is_ranker(&self) -> bool {
        self.is_score
    }

    /// Whether the state at position `pos` of a sequence of `n` tokens is needed.
    pub fn needs(&self, pos: usize, n: usize) -> bool {
        match self.pooling {
            Pooling::Mean => true,
            Pooling::First | Pooling::Classifier => pos == 0,
            Pooling::Last => pos + 1 == n,
        }
    }

    /// The batch of a whole sequence at cache sequence `seq`. The tokens whose states are needed have `output` set.
    pub fn batch(&self, ids: &[u32], seq: usize) -> Vec<BatchToken> {
        let token = |(pos, &id)| BatchToken { id, seq, pos, output: self.needs(pos, ids.len()) };
        ids.iter().enumerate().map(token).collect()
    }

    /// An empty sum.
    pub fn begin(&self) -> Pooled {
        Pooled { sum: vec![0.0; self.n_embd], n: 0 }
    }

    /// The embedding, of length 1 (all zeros stay zeros); of a reranker its scores, one for each label.
    pub fn finish(&self, pooled: Pooled) -> Vec<f32> {
        let Pooled { sum, n } = pooled;
        let n = n.max(1) as f64;
        let mut x: Vec<f32> = sum.into_iter().map(|sum| (sum / n) as f32).collect();
        for op in &self.ops {
            op.apply(&mut x);
        }
        if !self.is_score {
            let length = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt();
            if length > 0.0 {
                for x in &mut x {
                    *x = (f64::from(*x) / length) as f32;
                }
            }
        }
        x
    }
}

impl Pooled {
    /// Adds states that [`Pooler::needs`] selects, `[n, n_embd]` row-major.
    pub fn add(&mut self, states: &[f32]) {
        for state in states.chunks_exact(self.sum.len().max(1)) {
            self.sum.iter_mut().zip(state).for_each(|(sum, &x)| *sum += f64::from(x));
            self.n += 1;
        }
    }
}

impl PoolingOp {
    /// Applies the operation to `x`, in place or with a new length.
    fn apply(&self, x: &mut Vec<f32>) {
        match self {
            Self::Matrix(matrix) => *x = matrix.times(x),
            Self::Tanh => x.iter_mut().for_each(|x| *x = x.tanh()),
            Self::Gelu => x.iter_mut().for_each(|x| {
                let z = (2.0 / std::f32::consts::PI).sqrt() * (*x + 0.044_715 * *x * *x * *x);
                *x *= 0.5 * (1.0 + z.tanh());
            }),
            Self::LayerNorm(norm) => {
                let n = x.len() as f64;
                let mean = x.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
                let variance = x.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / n;
                let factor = 1.0 / (variance + f64::from(norm.eps)).sqrt();
                for (x, w) in x.iter_mut().zip(&norm.weight) {
                    *x = ((f64::from(*x) - mean) * factor) as f32 * w;
                }
            }
            Self::Softmax => {
                let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let powers: Vec<f32> = x.iter().map(|x| (x - max).exp()).collect();
                let sum: f32 = powers.iter().sum();
                *x = powers.into_iter().map(|p| p / sum).collect();
            }
        }
    }
}

impl F32Matrix {
    /// The matrix of `linear`, converted to F32.
    fn of(linear: &Linear) -> Self {
        let weight: &Tensor = &linear.weight;
        Self { n_in: weight.row_len(), weight: weight.to_f32(), bias: linear.bias.clone() }
    }

    /// `W x + b`, `[n_out]`.
    fn times(&self, x: &[f32]) -> Vec<f32> {
        let rows = self.weight.chunks_exact(self.n_in).enumerate();
        let row = |(i, row): (usize, &[f32])| {
            let dot: f64 = row.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
            dot as f32 + self.bias.as_ref().map_or(0.0, |bias| bias[i])
        };
        rows.map(row).collect()
    }
}
