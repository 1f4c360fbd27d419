//! Sharding a model over ranks (tensor parallelism as in Megatron-LM, arXiv 1909.08053).
//!
//! [`ShardingPlan`] decides which parts of a model are sharded; [`Shard`] gives one rank its smaller [`ModelSpec`] and weights,
//! which the rank runs like any model. Attention is sharded by heads, a feed-forward or expert by its inner width, the output
//! head by rows of the vocabulary. The first products of a sublayer lose rows, the last one loses columns, so that its result
//! is a partial sum, which the ranks add up (`runner/collectives.rs`). Parts that cannot be sharded are replicated: each rank
//! has all of their weights and computes the same result.

use std::ops::Range;
use std::sync::Arc;

use metal_attention_gguf::Tensor;
use metal_attention_model::{
    AttentionSpec, AttentionWeights, Dense, DenseWeights, Experts, ExpertsWeights, FeedForward, Layer, Linear, Loaded,
    LoadedModel, Mixer, ModelSpec, NormOver, Parts, Positions, Weights,
};

use crate::CudaError;
use crate::args::MAX_RANKS;
use crate::matrix::{PANEL, TILE, packed_bytes};
use crate::parts::dense::is_elementwise;

/// The parts of a model that are sharded; all others are replicated on every rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ShardingPlan {
    /// The number of ranks.
    pub(crate) n_ranks: usize,
    /// Whether attention is sharded, in layers whose mixer is attention alone.
    pub(crate) attention: bool,
    /// Whether the feed-forward is sharded, for each layer.
    pub(crate) feed_forwards: Vec<bool>,
    /// Whether the output head is sharded.
    pub(crate) head: bool,
}

/// One rank's part of a model.
#[derive(Debug, Clone)]
pub(crate) struct Shard {
    /// The plan that all ranks share.
    pub(crate) plan: Arc<ShardingPlan>,
    /// The index of the rank, from 0.
    pub(crate) rank: usize,
}

/// The `rank`-th of `n_ranks` parts of `n` units, as equal as possible.
fn part_range(n: usize, rank: usize, n_ranks: usize) -> Range<usize> {
    n * rank / n_ranks..n * (rank + 1) / n_ranks
}

/// The `rank`-th of `n_ranks` parts of `n` elements, cut at multiples of `unit`; the last unit may be shorter. `None` if a rank
/// would get nothing.
fn unit_range(n: usize, unit: usize, rank: usize, n_ranks: usize) -> Option<Range<usize>> {
    let n_units = n.div_ceil(unit.max(1));
    let part = part_range(n_units, rank, n_ranks);
    (n_units >= n_ranks).then(|| part.start * unit..(part.end * unit).min(n))
}

/// The query heads and the KV heads of a rank. If there are fewer KV heads than ranks, several ranks have copies of the same KV
/// head and share its query heads. `None` if the heads cannot be divided so.
fn head_ranges(spec: &AttentionSpec, rank: usize, n_ranks: usize) -> Option<(Range<usize>, Range<usize>)> {
    let (n_kv, group) = (spec.n_head_kv, spec.n_head / spec.n_head_kv.max(1));
    if n_kv >= n_ranks {
        let kv = part_range(n_kv, rank, n_ranks);
        return Some((kv.start * group..kv.end * group, kv));
    }
    let ranks_per_kv = n_ranks.is_multiple_of(n_kv.max(1)).then(|| n_ranks / n_kv.max(1))?;
    let queries = group.is_multiple_of(ranks_per_kv).then(|| group / ranks_per_kv)?;
    let (kv, first) = (rank / ranks_per_kv, rank / ranks_per_kv * group + rank % ranks_per_kv * queries);
    Some((first..first + queries, kv..kv + 1))
}

/// The columns of `down`, and the rows of gate and up, that a rank has: whole panels where there are enough, else whole
/// quantisation blocks. `None` if the width cannot be divided so.
fn width_range(spec: &Dense, down: &Tensor, rank: usize, n_ranks: usize) -> Option<Range<usize>> {
    if !is_elementwise(spec.activation) {
        return None;
    }
    let block = down.ty().block_len();
    let finer = || unit_range(spec.n_ff, block.max(4), rank, n_ranks).filter(|_| spec.n_ff.is_multiple_of(4));
    unit_range(spec.n_ff, block.max(PANEL), rank, n_ranks).or_else(finer)
}

/// Whether attention can be sharded by heads. Norms with weights for each head and ALiBi slopes are not cut, so they rule it
/// out. The columns of the output matrix have to be cut at whole quantisation blocks (and groups of four, which products read
/// at once).
fn can_shard_attention(w: &AttentionWeights, n_ranks: usize) -> bool {
    let spec = &w.spec;
    let by_head = match spec.positions {
        Positions::None | Positions::Rope(_) => true,
        Positions::Alibi { max_bias: _ } => false,
    } && spec.qk_norm.is_none_or(|norm| match norm.over {
        NormOver::Head | NormOver::Unweighted => true,
        NormOver::EachHead | NormOver::Row => false,
    });
    let block = w.out.weight.ty().block_len().max(4);
    let at_blocks = |rank| {
        head_ranges(spec, rank, n_ranks).is_some_and(|(queries, _)| {
            let [start, end] = [queries.start, queries.end].map(|head| head * spec.head_dim);
            !queries.is_empty() && start.is_multiple_of(block) && end.is_multiple_of(block)
        })
    };
    by_head && (0..n_ranks).all(at_blocks)
}

/// Whether a feed-forward can be sharded by its inner width.
fn can_shard_feed_forward(feed_forward: &FeedForward<Loaded>, n_ranks: usize) -> bool {
    let dense =
        |w: &DenseWeights| (0..n_ranks).all(|rank| width_range(&w.spec, &w.down.weight, rank, n_ranks).is_some());
    match feed_forward {
        FeedForward::Dense(w) => dense(w),
        FeedForward::Experts(w) => {
            // A norm or a product between the experts' sum and the residual stream needs the whole sum, and not a partial one.
            let at_once = w.spec.expert_norms.is_none() && w.spec.latent.is_none();
            at_once && w.experts.iter().chain(&w.shared).all(dense)
        }
        FeedForward::ChannelMix(_) | FeedForward::None => false,
    }
}

impl ShardingPlan {
    /// The plan for `n_ranks` ranks. An error if there are too many ranks, or if neither attention nor any feed-forward can be
    /// sharded.
    pub(crate) fn new(model: &LoadedModel, n_ranks: usize) -> Result<Self, CudaError> {
        let (spec, weights) = (model.spec(), model.weights());
        if n_ranks > MAX_RANKS {
            return Err(CudaError::TooManyRanks { n_ranks, max: MAX_RANKS });
        }
        let mut attentions = weights.layers.iter().filter_map(|layer| layer.mixer.attention_alone());
        let has_attention = attentions.clone().next().is_some();
        // All layers or none, since a layer may read another one's keys and values.
        let attention = attentions.all(|w| can_shard_attention(w, n_ranks));
        let feed_forwards: Vec<_> =
            weights.layers.iter().map(|layer| can_shard_feed_forward(&layer.feed_forward, n_ranks)).collect();
        let head = weights.output.is_some() && spec.n_vocab.div_ceil(TILE) >= n_ranks;
        if !(feed_forwards.contains(&true) || attention && has_attention) {
            return Err(CudaError::Indivisible { n_ranks });
        }
        Ok(Self { n_ranks, attention, feed_forwards, head })
    }

    /// The rows of the output head of each rank: all of them if the head is replicated.
    pub(crate) fn vocabulary(&self, n_vocab: usize) -> Vec<Range<usize>> {
        let rows = |rank| unit_range(n_vocab, TILE, rank, self.n_ranks).filter(|_| self.head);
        (0..self.n_ranks).map(|rank| rows(rank).unwrap_or(0..n_vocab)).collect()
    }

    /// Whether every mixer, every feed-forward and the output head are sharded, as the persistent kernel requires.
    pub(crate) fn shards_all(&self, spec: &ModelSpec) -> bool {
        let mixers = spec.layers.iter().all(|layer| self.shards_mixer(&layer.mixer));
        mixers && self.feed_forwards.iter().all(|sharded| *sharded) && self.head
    }

    /// Whether a mixer of that kind is sharded.
    pub(crate) fn shards_mixer<P: Parts>(&self, mixer: &Mixer<P>) -> bool {
        self.attention && mixer.attention_alone().is_some()
    }
}

impl Shard {
    /// The spec of this rank's shard of `model`: fewer heads, narrower feed-forwards.
    pub(crate) fn spec(&self, model: &LoadedModel) -> ModelSpec {
        let mut sharded = model.spec().clone();
        for (i, (layer, w)) in sharded.layers.iter_mut().zip(&model.weights().layers).enumerate() {
            if let (Mixer::Attention(spec), true) = (&mut layer.mixer, self.plan.attention) {
                *spec = self.attention_spec(spec);
            }
            // The width depends on the type of the matrix, so the weights have the narrower specs, too.
            match &w.feed_forward {
                FeedForward::Dense(w) if self.plan.feed_forwards[i] => {
                    layer.feed_forward = FeedForward::Dense(self.dense_spec(w));
                }
                FeedForward::Experts(w) if self.plan.feed_forwards[i] => {
                    layer.feed_forward = FeedForward::Experts(Box::new(self.experts_spec(w)));
                }
                FeedForward::Dense(_) | FeedForward::Experts(_) | FeedForward::ChannelMix(_) | FeedForward::None => {}
            }
        }
        sharded
    }

    /// The weights of layer `i` of this rank; `w` is the whole layer. Cut rows still refer to the memory of `w`; cut columns are
    /// copied.
    pub(crate) fn layer(&self, i: usize, w: &Layer<Loaded>) -> Layer<Loaded> {
        let mut sharded = w.clone();
        if let (Mixer::Attention(w), true) = (&mut sharded.mixer, self.plan.attention) {
            *w = self.shard_attention(w);
        }
        if self.plan.feed_forwards[i] {
            match &mut sharded.feed_forward {
                FeedForward::Dense(w) => *w = self.shard_dense(w),
                FeedForward::Experts(w) => {
                    w.spec = self.experts_spec(w);
                    for expert in w.experts.iter_mut().chain(&mut w.shared) {
                        *expert = self.shard_dense(expert);
                    }
                }
                FeedForward::ChannelMix(_) | FeedForward::None => {}
            }
        }
        sharded
    }

    /// The attention of this rank; the whole of it if its heads cannot be divided.
    fn attention_spec(&self, spec: &AttentionSpec) -> AttentionSpec {
        let Some((queries, kv)) = head_ranges(spec, self.rank, self.plan.n_ranks) else { return spec.clone() };
        AttentionSpec { n_head: queries.len(), n_head_kv: kv.len(), ..spec.clone() }
    }

    /// This rank's columns of `down`; `None` if the width cannot be divided.
    fn columns(&self, w: &DenseWeights) -> Option<Range<usize>> {
        width_range(&w.spec, &w.down.weight, self.rank, self.plan.n_ranks)
    }

    /// The spec of this rank's part of a dense feed-forward or expert.
    fn dense_spec(&self, w: &DenseWeights) -> Dense {
        Dense { n_ff: self.columns(w).map_or(w.spec.n_ff, |columns| columns.len()), ..w.spec }
    }

    /// The spec of this rank's part of a mixture of experts.
    fn experts_spec(&self, w: &ExpertsWeights) -> Experts {
        let mut spec = w.spec.clone();
        spec.expert = w.experts.first().map_or(spec.expert, |expert| self.dense_spec(expert));
        if let Some((shared, w)) = spec.shared.as_mut().zip(w.shared.as_ref()) {
            shared.dense = self.dense_spec(w);
        }
        spec
    }

    /// The weights of this rank's heads; all of them if they cannot be divided.
    fn shard_attention(&self, w: &AttentionWeights) -> AttentionWeights {
        let spec = &w.spec;
        let Some((queries, kv)) = head_ranges(spec, self.rank, self.plan.n_ranks) else { return w.clone() };
        let times = |heads: &Range<usize>, n: usize| heads.start * n..heads.end * n;
        AttentionWeights {
            spec: self.attention_spec(spec),
            q: shard_rows(&w.q, times(&queries, spec.query_rows())),
            k: w.k.as_ref().map(|k| shard_rows(k, times(&kv, spec.head_dim))),
            v: w.v.as_ref().map(|v| shard_rows(v, times(&kv, spec.head_dim))),
            gate: w.gate.as_ref().map(|gate| shard_rows(gate, times(&queries, gate.weight.n_rows() / spec.n_head))),
            out: self.shard_columns(&w.out, times(&queries, spec.head_dim)),
            q_norm: w.q_norm.clone(),
            k_norm: w.k_norm.clone(),
            sinks: w.sinks.as_ref().map(|sinks| sinks[queries].to_vec()),
        }
    }

    /// The weights of this rank's part of a dense feed-forward or expert; the whole of it if it cannot be sharded.
    fn shard_dense(&self, w: &DenseWeights) -> DenseWeights {
        let Some(columns) = self.columns(w) else { return w.clone() };
        DenseWeights {
            spec: self.dense_spec(w),
            gate: w.gate.as_ref().map(|gate| shard_rows(gate, columns.clone())),
            up: shard_rows(&w.up, columns.clone()),
            down: self.shard_columns(&w.down, columns),
        }
    }

    /// The columns `columns` of a matrix whose products are partial sums; only rank 0 adds the bias.
    fn shard_columns(&self, linear: &Linear, columns: Range<usize>) -> Linear {
        let ty = linear.weight.ty();
        let bytes = ty.row_bytes(columns.start)..ty.row_bytes(columns.end);
        let n_rows = linear.weight.n_rows();
        let mut copied = Vec::with_capacity(n_rows * bytes.len());
        for row in 0..n_rows {
            copied.extend_from_slice(&linear.weight.row(row)[bytes.clone()]);
        }
        let weight = Tensor::in_memory(linear.weight.name(), [columns.len(), n_rows], ty, &copied);
        Linear { weight, bias: linear.bias.clone().filter(|_| self.rank == 0) }
    }

    /// About how many bytes of weights this rank has less than an unsharded model.
    pub(crate) fn saved_bytes(&self, weights: &Weights) -> u64 {
        let bytes = |linears: &[&Linear]| linears.iter().map(|linear| packed_bytes(&linear.weight)).sum::<u64>();
        let dense = |w: &DenseWeights| bytes(&w.gate.iter().chain([&w.up, &w.down]).collect::<Vec<_>>());
        let layers = weights.layers.iter().zip(&self.plan.feed_forwards).map(|(layer, sharded)| {
            let mixer = if let (Mixer::Attention(w), true) = (&layer.mixer, self.plan.attention) {
                let parts = [Some(&w.q), w.k.as_ref(), w.v.as_ref(), w.gate.as_ref(), Some(&w.out)];
                bytes(&parts.into_iter().flatten().collect::<Vec<_>>())
            } else {
                0
            };
            let feed_forward = match &layer.feed_forward {
                FeedForward::Dense(w) => dense(w),
                FeedForward::Experts(w) => w.experts.iter().chain(&w.shared).map(dense).sum(),
                FeedForward::ChannelMix(_) | FeedForward::None => 0,
            };
            let feed_forward = if *sharded { feed_forward } else { 0 };
            mixer + feed_forward
        });
        // An output head that is also the embedding table stays in memory whole, as the table.
        let head = weights.own_head().filter(|_| self.plan.head).map_or(0, |head| packed_bytes(&head.weight));
        let n_ranks = self.plan.n_ranks as u64;
        (layers.sum::<u64>() + head) / n_ranks * (n_ranks - 1)
    }

    /// The rows of the output head of this rank.
    pub(crate) fn head(&self, head: &Linear) -> Tensor {
        head.weight.rows(self.plan.vocabulary(head.weight.n_rows())[self.rank].clone())
    }
}

/// The rows `rows` of a matrix, with their part of the bias.
fn shard_rows(linear: &Linear, rows: Range<usize>) -> Linear {
    let bias = linear.bias.as_ref().map(|bias| bias[rows.clone()].to_vec());
    Linear { weight: linear.weight.rows(rows), bias }
}
