//! What becomes of a text's states: its embedding, or a reranker's score.

use metal_attention_gguf::Tensor;
use metal_attention_model::{BatchToken, Linear, NormWeights, Pooling};

use crate::Model;

/// Makes one vector of the states of a text's tokens, as the model's file says: pooled, through the matrices after that, and
/// divided by its length.
///
/// ```
/// use metal_attention::tokenizer::EncodeOptions;
/// use metal_attention::{EngineOptions, Model, Pooler};
/// # fn main() -> Result<(), metal_attention::Error> {
/// let model = Model::built_in()?;
/// let mut pass = model.forward_pass(&EngineOptions::default())?;
/// let pooler = Pooler::new(&model, None);
/// let text = model.tokenizer()?.encode("Once upon a time", EncodeOptions::default());
/// let mut pooled = pooler.begin();
/// let states = pass.forward_hidden(&pooler.batch(&text, 0))?;
/// pooled.add(&states);
/// let embedding = pooler.finish(pooled);
/// assert_eq!(embedding.len(), model.spec().n_embd);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Pooler {
    pooling: Pooling,
    n_embd: usize,
    /// What follows pooling.
    steps: Vec<PoolingOp>,
    /// Whether scores come out, which are not divided by anything.
    is_score: bool,
}

/// A step from the pooled state on.
#[derive(Debug, Clone)]
enum PoolingOp {
    Matrix(F32Matrix),
    Tanh,
    Gelu,
    LayerNorm(NormWeights, f32),
    Softmax,
}

/// A matrix in F32, `[n_out, n_in]`.
#[derive(Debug, Clone)]
struct F32Matrix {
    n_in: usize,
    weight: Vec<f32>,
    bias: Option<Vec<f32>>,
}

/// States of a text so far.
#[derive(Debug, Clone)]
pub struct Pooled {
    sum: Vec<f64>,
    n: usize,
}

impl Pooler {
    /// The pooler of `model`; `pooling` where it is not to be that of the file. A file that says none has the mean.
    pub fn new(model: &Model, pooling: Option<Pooling>) -> Self {
        let (spec, weights) = (model.spec(), model.weights());
        let pooling = pooling.or(spec.output.pooling).unwrap_or(Pooling::Mean);
        let mut steps: Vec<_> = weights.dense.iter().map(|linear| PoolingOp::Matrix(F32Matrix::of(linear))).collect();
        let mut by = pooling;
        if pooling == Pooling::Rank {
            by = Pooling::First;
            if let (Some(c), Some(w)) = (&spec.output.classifier, &weights.classifier) {
                by = c.pooling;
                if let Some(dense) = &w.dense {
                    steps.push(PoolingOp::Matrix(F32Matrix::of(dense)));
                    steps.push(if c.gelu { PoolingOp::Gelu } else { PoolingOp::Tanh });
                    steps.extend(w.norm.clone().map(|norm| PoolingOp::LayerNorm(norm, c.norm_eps)));
                }
                steps.extend(w.out.iter().map(|out| PoolingOp::Matrix(F32Matrix::of(out))));
                if c.softmax {
                    steps.push(PoolingOp::Softmax);
                }
            }
        }
        Self { pooling: by, n_embd: spec.n_embd, steps, is_score: pooling == Pooling::Rank }
    }

    /// Whether a text has a score instead of an embedding: the model is a reranker.
    pub fn is_ranker(&self) -> bool {
        self.is_score
    }

    /// Whether the state at `pos` of a text of `n` tokens is needed.
    pub fn needs(&self, pos: usize, n: usize) -> bool {
        match self.pooling {
            Pooling::Mean => true,
            Pooling::First | Pooling::Rank => pos == 0,
            Pooling::Last => pos + 1 == n,
        }
    }

    /// The batch of a whole text in sequence `seq`, with the tokens marked whose states are needed.
    pub fn batch(&self, ids: &[u32], seq: usize) -> Vec<BatchToken> {
        let token = |(pos, &id)| BatchToken { id, seq, pos, logits: self.needs(pos, ids.len()) };
        ids.iter().enumerate().map(token).collect()
    }

    /// Nothing of a text so far.
    pub fn begin(&self) -> Pooled {
        Pooled { sum: vec![0.0; self.n_embd], n: 0 }
    }

    /// The embedding, of length 1 (zeros stay zeros); of a reranker its scores, one for each label.
    pub fn finish(&self, pooled: Pooled) -> Vec<f32> {
        let Pooled { sum, n } = pooled;
        let n = n.max(1) as f64;
        let mut x: Vec<f32> = sum.into_iter().map(|sum| (sum / n) as f32).collect();
        for step in &self.steps {
            step.apply(&mut x);
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
    /// Adds the states that [`Pooler::needs`] asked for, `[n, n_embd]`.
    pub fn add(&mut self, states: &[f32]) {
        for state in states.chunks_exact(self.sum.len().max(1)) {
            self.sum.iter_mut().zip(state).for_each(|(sum, &x)| *sum += f64::from(x));
            self.n += 1;
        }
    }
}

impl PoolingOp {
    fn apply(&self, x: &mut Vec<f32>) {
        match self {
            Self::Matrix(matrix) => *x = matrix.times(x),
            Self::Tanh => x.iter_mut().for_each(|x| *x = x.tanh()),
            Self::Gelu => x.iter_mut().for_each(|x| {
                let z = (2.0 / std::f32::consts::PI).sqrt() * (*x + 0.044_715 * *x * *x * *x);
                *x *= 0.5 * (1.0 + z.tanh());
            }),
            Self::LayerNorm(norm, eps) => {
                let n = x.len() as f64;
                let mean = x.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
                let variance = x.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / n;
                let factor = 1.0 / (variance + f64::from(*eps)).sqrt();
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
    fn of(linear: &Linear) -> Self {
        let weight: &Tensor = &linear.weight;
        Self { n_in: weight.row_len(), weight: weight.to_f32(), bias: linear.bias.clone() }
    }

    fn times(&self, x: &[f32]) -> Vec<f32> {
        let rows = self.weight.chunks_exact(self.n_in).enumerate();
        let row = |(i, row): (usize, &[f32])| {
            let dot: f64 = row.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
            dot as f32 + self.bias.as_ref().map_or(0.0, |bias| bias[i])
        };
        rows.map(row).collect()
    }
}
