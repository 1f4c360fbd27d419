//! The parts of an encoder.

use std::sync::Arc;

use metal_attention_gguf::Tensor;

use super::geometry::{MergeOrder, RowOrder};
use super::ops::PrepareEncoder;
use super::positions::{Angles, PositionTable};
use crate::NormKind;

/// The types of an encoder's weights: as loaded ([`FileWeights`]), or in a backend's form.
pub trait EncoderTypes {
    /// A matrix, `[n_out, n_in]`.
    type Matrix;
    /// A vector: a bias, or the weight of a norm.
    type Vector;
}

/// Weights as they are in the file.
#[derive(Debug, Clone, Copy)]
pub struct FileWeights;

impl EncoderTypes for FileWeights {
    type Matrix = Tensor;
    type Vector = Vec<f32>;
}

/// An encoder of pictures with its projector.
pub struct Encoder<T: EncoderTypes> {
    /// How the bytes of pixels become numbers.
    pub colours: Colours,
    /// How a picture is cut into patches.
    pub patch: PatchSpec,
    /// What is computed, in this order.
    pub stages: Vec<Stage<T>>,
    /// The width of a row of embeddings of the text model.
    pub n_embd: usize,
    /// Rows that are added after the first layers of the text model (deepstack), beside each row. The encoder's rows have
    /// `(1 + n_deepstack) * n_embd` elements.
    pub n_deepstack: usize,
}

/// How bytes of pixels become numbers: `(v / 255 - mean) / std`, for each of red, green and blue (`clip.vision.image_mean` and
/// `image_std`).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Colours {
    /// Subtracted.
    pub mean: [f32; 3],
    /// Divided by.
    pub std: [f32; 3],
}

impl Colours {
    /// The numbers of all bytes, for each colour.
    pub fn table(self) -> [[f32; 256]; 3] {
        std::array::from_fn(|c| std::array::from_fn(|v| (v as f32 / 255.0 - self.mean[c]) / self.std[c]))
    }
}

/// How a picture is cut into patches, each of which is a row of `3 * side * side` values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PatchSpec {
    /// Pixels of a side.
    pub side: usize,
    /// The order of a row's values.
    pub order: PatchOrder,
}

/// The order of the values of a patch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PatchOrder {
    /// `[3, side, side]`: all of a colour together, as the kernels of convolutions are stored.
    ColourFirst,
    /// `[side, side, 3]`: the colours of a pixel together.
    PixelFirst,
}

/// One step of an encoder. The rows of a picture have a [`Layout`](super::Layout), which some stages change.
pub enum Stage<T: EncoderTypes> {
    /// A matrix product with a bias.
    Linear(EncoderLinear<T>),
    /// A norm of each row.
    Norm(EncoderNorm<T>),
    /// An activation of each element.
    Activation(EncoderActivation),
    /// Multiplies each element.
    Scale(f32),
    /// Multiplies each column: `[width]`.
    ScaleColumns(T::Vector),
    /// Adds a row to each column: `[width]`.
    AddRow(T::Vector),
    /// Adds learned positions to the rows of patches.
    Positions(Arc<PositionTable>),
    /// Puts rows before and behind all others: class tokens with their positions, or marks of a picture's begin and end.
    Others {
        /// The rows before, `[n, width]`.
        before: Vec<f32>,
        /// The rows behind, `[n, width]`.
        after: Vec<f32>,
    },
    /// Takes all rows away that are not those of patches.
    DropOthers,
    /// Puts as many learned rows behind the patches of a picture as it has: the first table `[n, width]` with that number of rows. A picture of
    /// another number of patches gets none.
    Queries(Vec<Vec<f32>>),
    /// Puts the rows that [`Self::Queries`] has added in the place of the patches.
    KeepQueries,
    /// Puts the rows of patches in an order.
    Reorder(RowOrder),
    /// A transformer block.
    Block(Box<Block<T>>),
    /// Joins each `side` x `side` neighbouring patches to one row, `[side * side * width]`.
    Merge {
        /// Patches along each side.
        side: usize,
        /// The order of the values in the row.
        order: MergeOrder,
    },
    /// The mean of each `side` x `side` neighbouring patches.
    Pool {
        /// Patches along each side.
        side: usize,
    },
    /// Joins the `side` x `side` patches around each `stride`-th patch to one row, `[side * side * width]`, of which a product makes
    /// a convolution.
    Unfold {
        /// Patches along each side.
        side: usize,
        /// Patches from one to the next.
        stride: usize,
        /// Whether the middle of the first window is the first patch; otherwise there are as many zeros before the grid as behind it, or
        /// one less.
        centred: bool,
    },
    /// A convolution of each column by itself.
    Depthwise {
        /// Patches along each side.
        side: usize,
        /// Patches from one to the next.
        stride: usize,
        /// The kernel, `[side * side, width]`.
        kernel: T::Vector,
    },
    /// Repeats each patch in both directions.
    Enlarge {
        /// How often.
        factor: usize,
    },
    /// Attention whose keys and values are computed by stages, of fewer patches.
    QueryAttention(Box<QueryAttention<T>>),
    /// A feed-forward without a residual connection.
    FeedForward(EncoderFeedForward<T>),
    /// Attention without a residual connection.
    Attention(Box<EncoderAttention<T>>),
    /// The sum of the results of two lists of stages over the same rows; an empty list gives the rows themselves.
    Sum([Vec<Stage<T>>; 2]),
    /// Runs stages over windows of `side` x `side` patches, each as a picture of its own. The last windows are filled up with rows of
    /// zeros, which the stages see. The stages keep the number of rows.
    Windows {
        /// Patches along each side.
        side: usize,
        /// The stages.
        stages: Vec<Stage<T>>,
    },
    /// Runs stages over the squares of which a picture that is taller than wide consists, each as a picture of its own, and puts the
    /// results beside each other. Patches must be row by row, before and after the stages.
    Squares(Vec<Stage<T>>),
    /// Computes stages apart from the rows, which stay as they are, and keeps the result for [`Self::JoinFeatures`].
    Feature(Vec<Stage<T>>),
    /// Puts the columns of all results that were kept beside each other, behind those of the rows if `with_rows`.
    JoinFeatures {
        /// Whether the rows themselves come first.
        with_rows: bool,
    },
    /// Puts a row behind each row of patches.
    RowBreaks {
        /// The row, `[width]`.
        row: Vec<f32>,
        /// Whether it stands behind the last row of patches, too.
        after_last: bool,
    },
    /// Puts a row behind all others of the pictures with `ny` rows of patches.
    Separator {
        /// The row, `[width]`.
        row: Vec<f32>,
        /// Rows of patches.
        ny: usize,
    },
    /// Learned queries attend to the rows: there are as many rows after it as queries.
    Resampler(Box<Resampler<T>>),
}

/// A matrix with its bias: `y = W x + b`.
pub struct EncoderLinear<T: EncoderTypes> {
    /// `W`, `[n_out, n_in]`.
    pub matrix: T::Matrix,
    /// `b`, `[n_out]`.
    pub bias: Option<T::Vector>,
    /// The ranges to which inputs and outputs are clamped.
    pub clamp: Option<Clamp>,
    /// Elements of an output row.
    pub n_out: usize,
}

/// The ranges of a product's inputs and outputs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Clamp {
    /// Least and greatest input.
    pub input: [f32; 2],
    /// Least and greatest output.
    pub output: [f32; 2],
}

/// A norm of each `width` elements of a row.
pub struct EncoderNorm<T: EncoderTypes> {
    /// The formula.
    pub kind: NormKind,
    /// Added to the mean of squares or the variance.
    pub eps: f32,
    /// Elements that are normed together: the row, or a head's part of it.
    pub width: usize,
    /// Factors, `[width]`; all ones where the norm has none.
    pub weight: T::Vector,
    /// Added, `[width]`.
    pub bias: Option<T::Vector>,
}

/// An activation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EncoderActivation {
    /// `x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))` (arXiv 1606.08415).
    Gelu,
    /// `x / 2 (1 + erf(x / sqrt(2)))` (arXiv 1606.08415).
    GeluErf,
    /// `x / (1 + exp(-1.702 x))` (arXiv 1606.08415).
    QuickGelu,
    /// `x / (1 + exp(-x))` (arXiv 1702.03118).
    Silu,
    /// `max(x, 0)^2` (arXiv 2109.08668).
    SquaredRelu,
}

/// A transformer block: `x += s1 * post1(attention(norm1(x)))`, `x += s2 * post2(feed_forward(norm2(x)))`.
pub struct Block<T: EncoderTypes> {
    /// Norm before attention.
    pub attention_norm: EncoderNorm<T>,
    /// Attention.
    pub attention: EncoderAttention<T>,
    /// Norm after attention.
    pub attention_post_norm: Option<EncoderNorm<T>>,
    /// Factors on attention's columns (LayerScale, arXiv 2103.17239).
    pub attention_scale: Option<T::Vector>,
    /// Norm before the feed-forward.
    pub feed_forward_norm: EncoderNorm<T>,
    /// The feed-forward.
    pub feed_forward: EncoderFeedForward<T>,
    /// Norm after the feed-forward.
    pub feed_forward_post_norm: Option<EncoderNorm<T>>,
    /// Factors on the feed-forward's columns.
    pub feed_forward_scale: Option<T::Vector>,
    /// Factor on the block's output.
    pub output_scale: f32,
}

/// Bidirectional attention among the rows of a picture, or of a window of it.
pub struct EncoderAttention<T: EncoderTypes> {
    /// Queries, keys and values.
    pub q: EncoderLinear<T>,
    /// Keys.
    pub k: EncoderLinear<T>,
    /// Values.
    pub v: EncoderLinear<T>,
    /// Norms of each head.
    pub q_norm: Option<EncoderNorm<T>>,
    /// Norms of each head.
    pub k_norm: Option<EncoderNorm<T>>,
    /// Norms of each head.
    pub v_norm: Option<EncoderNorm<T>>,
    /// Heads.
    pub n_head: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Factor on the scores.
    pub scale: f32,
    /// The rotation of queries and keys.
    pub rope: Option<Angles>,
    /// Patches along the side of a window; `None`: rows attend to all rows of their picture.
    pub window: Option<usize>,
    /// Whether patches attend to patches alone, and each other row to all patches and to the rows up to itself, which stand behind them.
    pub causal_others: bool,
    /// Scores by the distance of a key, for square grids of each size that pictures have; empty: none.
    pub relative: Vec<RelativeScores<T>>,
    /// The output projection.
    pub out: EncoderLinear<T>,
}

/// Scores of keys by their distance from the query, down and to the right, that are added to the scaled products (SAM, arXiv
/// 2304.02643).
pub struct RelativeScores<T: EncoderTypes> {
    /// Patches along the side of the grid.
    pub side: usize,
    /// `[2 * (2 * side - 1), head_dim]`: the product of row `i` with a query is the score of the keys `side - 1 - i` rows below it, that
    /// of row `2 * side - 1 + i` the score of the keys `side - 1 - i` columns to its right.
    pub matrix: EncoderLinear<T>,
}

/// A feed-forward.
pub enum EncoderFeedForward<T: EncoderTypes> {
    /// `down(activation(up(x)))`
    Plain {
        /// Up.
        up: EncoderLinear<T>,
        /// The activation.
        activation: EncoderActivation,
        /// Down.
        down: EncoderLinear<T>,
    },
    /// `down(activation(gate(x)) * up(x))`
    Gated {
        /// Gate.
        gate: EncoderLinear<T>,
        /// Up.
        up: EncoderLinear<T>,
        /// The activation.
        activation: EncoderActivation,
        /// Down.
        down: EncoderLinear<T>,
    },
}

impl<T: EncoderTypes> EncoderFeedForward<T> {
    /// The last product.
    pub fn down(&self) -> &EncoderLinear<T> {
        match self {
            Self::Plain { down, .. } | Self::Gated { down, .. } => down,
        }
    }
}

/// Attention of all patches to keys and values of a coarser grid, with one head of them (MobileNet V5).
pub struct QueryAttention<T: EncoderTypes> {
    /// Queries.
    pub q: EncoderLinear<T>,
    /// The stages of keys.
    pub k: Vec<Stage<T>>,
    /// The stages of values.
    pub v: Vec<Stage<T>>,
    /// Elements of a head.
    pub head_dim: usize,
    /// The output projection.
    pub out: EncoderLinear<T>,
}

/// Cross attention of learned queries to the rows of a picture (MiniCPM-V's resampler, arXiv 2408.01800).
pub struct Resampler<T: EncoderTypes> {
    /// The queries, normed, `[n_queries, width]`.
    pub queries: Vec<f32>,
    /// The projection of rows.
    pub input: EncoderLinear<T>,
    /// The norm of projected rows.
    pub input_norm: EncoderNorm<T>,
    /// Queries.
    pub q: EncoderLinear<T>,
    /// Keys, of rows with their positions.
    pub k: EncoderLinear<T>,
    /// Values.
    pub v: EncoderLinear<T>,
    /// Heads.
    pub n_head: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// The output projection.
    pub out: EncoderLinear<T>,
}

impl Encoder<FileWeights> {
    /// The encoder with the weights that `backend` prepares.
    ///
    /// # Errors
    ///
    /// Those of `backend`.
    pub fn prepare<B: PrepareEncoder>(self, backend: &mut B) -> Result<Encoder<B::Types>, B::Error> {
        let Self { colours, patch, stages, n_embd, n_deepstack } = self;
        Ok(Encoder { colours, patch, stages: prepare_stages(stages, backend)?, n_embd, n_deepstack })
    }
}

fn prepare_stages<B: PrepareEncoder>(
    stages: Vec<Stage<FileWeights>>,
    backend: &mut B,
) -> Result<Vec<Stage<B::Types>>, B::Error> {
    stages.into_iter().map(|stage| stage.prepare(backend)).collect()
}

impl Stage<FileWeights> {
    /// [`Stage::Positions`] of a table.
    pub fn positions(table: PositionTable) -> Self {
        Self::Positions(Arc::new(table))
    }

    fn prepare<B: PrepareEncoder>(self, backend: &mut B) -> Result<Stage<B::Types>, B::Error> {
        Ok(match self {
            Self::Linear(linear) => Stage::Linear(linear.prepare(backend)?),
            Self::Norm(norm) => Stage::Norm(norm.prepare(backend)?),
            Self::Activation(activation) => Stage::Activation(activation),
            Self::Scale(factor) => Stage::Scale(factor),
            Self::ScaleColumns(factors) => Stage::ScaleColumns(backend.vector(factors)?),
            Self::AddRow(row) => Stage::AddRow(backend.vector(row)?),
            Self::Positions(table) => Stage::Positions(table),
            Self::Others { before, after } => Stage::Others { before, after },
            Self::DropOthers => Stage::DropOthers,
            Self::Queries(tables) => Stage::Queries(tables),
            Self::KeepQueries => Stage::KeepQueries,
            Self::Reorder(order) => Stage::Reorder(order),
            Self::Block(block) => Stage::Block(Box::new(block.prepare(backend)?)),
            Self::Merge { side, order } => Stage::Merge { side, order },
            Self::Pool { side } => Stage::Pool { side },
            Self::Unfold { side, stride, centred } => Stage::Unfold { side, stride, centred },
            Self::Depthwise { side, stride, kernel } => {
                Stage::Depthwise { side, stride, kernel: backend.vector(kernel)? }
            }
            Self::Enlarge { factor } => Stage::Enlarge { factor },
            Self::QueryAttention(attention) => {
                let QueryAttention { q, k, v, head_dim, out } = *attention;
                let (q, out) = (q.prepare(backend)?, out.prepare(backend)?);
                let (k, v) = (prepare_stages(k, backend)?, prepare_stages(v, backend)?);
                Stage::QueryAttention(Box::new(QueryAttention { q, k, v, head_dim, out }))
            }
            Self::FeedForward(feed_forward) => Stage::FeedForward(feed_forward.prepare(backend)?),
            Self::Attention(attention) => Stage::Attention(Box::new(attention.prepare(backend)?)),
            Self::Sum([first, second]) => {
                Stage::Sum([prepare_stages(first, backend)?, prepare_stages(second, backend)?])
            }
            Self::Windows { side, stages } => Stage::Windows { side, stages: prepare_stages(stages, backend)? },
            Self::Squares(stages) => Stage::Squares(prepare_stages(stages, backend)?),
            Self::Separator { row, ny } => Stage::Separator { row, ny },
            Self::Feature(stages) => Stage::Feature(prepare_stages(stages, backend)?),
            Self::JoinFeatures { with_rows } => Stage::JoinFeatures { with_rows },
            Self::RowBreaks { row, after_last } => Stage::RowBreaks { row, after_last },
            Self::Resampler(resampler) => Stage::Resampler(Box::new(resampler.prepare(backend)?)),
        })
    }
}

impl EncoderLinear<FileWeights> {
    fn prepare<B: PrepareEncoder>(self, backend: &mut B) -> Result<EncoderLinear<B::Types>, B::Error> {
        let Self { matrix, bias, clamp, n_out } = self;
        let bias = bias.map(|bias| backend.vector(bias)).transpose()?;
        Ok(EncoderLinear { matrix: backend.matrix(&matrix)?, bias, clamp, n_out })
    }
}

impl EncoderNorm<FileWeights> {
    /// The norm of a row of `width` elements, on the host.
    pub(crate) fn of_row(&self, row: &[f32]) -> Vec<f32> {
        let n = row.len() as f32;
        let mean = match self.kind {
            NormKind::Rms => 0.0,
            NormKind::Layer => row.iter().sum::<f32>() / n,
        };
        let squares = row.iter().map(|v| (v - mean) * (v - mean)).sum::<f32>() / n;
        let factor = 1.0 / (squares + self.eps).sqrt();
        let bias = self.bias.iter().flatten().copied().chain(std::iter::repeat(0.0));
        row.iter().zip(&self.weight).zip(bias).map(|((v, w), b)| (v - mean) * factor * w + b).collect()
    }

    fn prepare<B: PrepareEncoder>(self, backend: &mut B) -> Result<EncoderNorm<B::Types>, B::Error> {
        let Self { kind, eps, width, weight, bias } = self;
        let bias = bias.map(|bias| backend.vector(bias)).transpose()?;
        Ok(EncoderNorm { kind, eps, width, weight: backend.vector(weight)?, bias })
    }
}

/// A norm that may be missing.
fn prepare_norm<B: PrepareEncoder>(
    norm: Option<EncoderNorm<FileWeights>>,
    backend: &mut B,
) -> Result<Option<EncoderNorm<B::Types>>, B::Error> {
    norm.map(|norm| norm.prepare(backend)).transpose()
}

impl Block<FileWeights> {
    /// Replaces the activation of the feed-forward.
    pub(crate) fn set_activation(&mut self, new: EncoderActivation) {
        match &mut self.feed_forward {
            EncoderFeedForward::Plain { activation, .. } | EncoderFeedForward::Gated { activation, .. } => {
                *activation = new;
            }
        }
    }

    fn prepare<B: PrepareEncoder>(self, backend: &mut B) -> Result<Block<B::Types>, B::Error> {
        Ok(Block {
            attention_norm: self.attention_norm.prepare(backend)?,
            attention: self.attention.prepare(backend)?,
            attention_post_norm: prepare_norm(self.attention_post_norm, backend)?,
            attention_scale: self.attention_scale.map(|scale| backend.vector(scale)).transpose()?,
            feed_forward_norm: self.feed_forward_norm.prepare(backend)?,
            feed_forward: self.feed_forward.prepare(backend)?,
            feed_forward_post_norm: prepare_norm(self.feed_forward_post_norm, backend)?,
            feed_forward_scale: self.feed_forward_scale.map(|scale| backend.vector(scale)).transpose()?,
            output_scale: self.output_scale,
        })
    }
}

impl EncoderAttention<FileWeights> {
    fn prepare<B: PrepareEncoder>(self, backend: &mut B) -> Result<EncoderAttention<B::Types>, B::Error> {
        Ok(EncoderAttention {
            q: self.q.prepare(backend)?,
            k: self.k.prepare(backend)?,
            v: self.v.prepare(backend)?,
            q_norm: prepare_norm(self.q_norm, backend)?,
            k_norm: prepare_norm(self.k_norm, backend)?,
            v_norm: prepare_norm(self.v_norm, backend)?,
            n_head: self.n_head,
            head_dim: self.head_dim,
            scale: self.scale,
            rope: self.rope,
            window: self.window,
            causal_others: self.causal_others,
            relative: self
                .relative
                .into_iter()
                .map(|scores| Ok(RelativeScores { side: scores.side, matrix: scores.matrix.prepare(backend)? }))
                .collect::<Result<_, _>>()?,
            out: self.out.prepare(backend)?,
        })
    }
}

impl EncoderFeedForward<FileWeights> {
    fn prepare<B: PrepareEncoder>(self, backend: &mut B) -> Result<EncoderFeedForward<B::Types>, B::Error> {
        Ok(match self {
            Self::Plain { up, activation, down } => {
                EncoderFeedForward::Plain { up: up.prepare(backend)?, activation, down: down.prepare(backend)? }
            }
            Self::Gated { gate, up, activation, down } => EncoderFeedForward::Gated {
                gate: gate.prepare(backend)?,
                up: up.prepare(backend)?,
                activation,
                down: down.prepare(backend)?,
            },
        })
    }
}

impl Resampler<FileWeights> {
    fn prepare<B: PrepareEncoder>(self, backend: &mut B) -> Result<Resampler<B::Types>, B::Error> {
        Ok(Resampler {
            queries: self.queries,
            input: self.input.prepare(backend)?,
            input_norm: self.input_norm.prepare(backend)?,
            q: self.q.prepare(backend)?,
            k: self.k.prepare(backend)?,
            v: self.v.prepare(backend)?,
            n_head: self.n_head,
            head_dim: self.head_dim,
            out: self.out.prepare(backend)?,
        })
    }
}
