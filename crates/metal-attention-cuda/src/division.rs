//! How a model is shared out among cards (tensor parallelism, arXiv 1909.08053): of attention each has some heads, of a
//! feed-forward some of its width, of the output head some of the vocabulary. Each card's share is a smaller model, which the same
//! steps run; only its last products give parts of sums.

use std::ops::Range;
use std::sync::Arc;

use metal_attention_gguf::Tensor;
use metal_attention_model::{
    Activation, AttentionSpec, AttentionWeights, Dense, DenseWeights, ExpertsWeights, FeedForward, FeedForwardWeights,
    LayerWeights, Linear, Mixer, MixerWeights, ModelSpec, NormOver, Positions, Weights,
};

use crate::CudaError;
use crate::args::MAX_CARDS;
use crate::matrix::{PANEL, TILE, packed_bytes};

/// Which parts of a model are shared out; each card has the others whole, and computes what the others do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Division {
    pub(crate) n_cards: usize,
    /// Attention, in layers that have nothing beside it.
    pub(crate) attention: bool,
    /// The feed-forward of each layer.
    pub(crate) feed_forwards: Vec<bool>,
    /// The output head.
    pub(crate) head: bool,
}

/// What one of the cards has.
#[derive(Debug, Clone)]
pub(crate) struct Share {
    pub(crate) division: Arc<Division>,
    /// Its place among the cards.
    pub(crate) rank: usize,
}

/// The `rank`-th of `n_cards` parts of `n` units, as equal as they can be.
fn part_of(n: usize, rank: usize, n_cards: usize) -> Range<usize> {
    n * rank / n_cards..n * (rank + 1) / n_cards
}

/// The same of `n` elements in whole units, the last of which may be shorter; `None` where somebody would get nothing.
fn units_of(n: usize, unit: usize, rank: usize, n_cards: usize) -> Option<Range<usize>> {
    let n_units = n.div_ceil(unit.max(1));
    let part = part_of(n_units, rank, n_cards);
    (n_units >= n_cards).then(|| part.start * unit..(part.end * unit).min(n))
}

/// The heads of queries and of keys and values that a card has. Where there are fewer of the latter than cards several have the same.
fn heads(of: &AttentionSpec, rank: usize, n_cards: usize) -> Option<(Range<usize>, Range<usize>)> {
    let (n_kv, group) = (of.n_head_kv, of.n_head / of.n_head_kv.max(1));
    if n_kv >= n_cards {
        let kv = part_of(n_kv, rank, n_cards);
        return Some((kv.start * group..kv.end * group, kv));
    }
    let cards = n_cards.is_multiple_of(n_kv.max(1)).then(|| n_cards / n_kv.max(1))?;
    let queries = group.is_multiple_of(cards).then(|| group / cards)?;
    let (kv, first) = (rank / cards, rank / cards * group + rank % cards * queries);
    Some((first..first + queries, kv..kv + 1))
}

/// The columns of `down`, and rows of gate and up, that a card has.
fn width(of: &Dense, down: &Tensor, rank: usize, n_cards: usize) -> Option<Range<usize>> {
    match of.activation {
        Activation::Silu | Activation::Gelu | Activation::ReluSquared | Activation::ClampedSwiglu { limit: _ } => {}
        // It looks at the whole row.
        Activation::SparseGelu { n_std: _ } => return None,
    }
    let block = down.ty().block_len();
    let finer = || units_of(of.n_ff, block.max(4), rank, n_cards).filter(|_| of.n_ff.is_multiple_of(4));
    units_of(of.n_ff, block.max(PANEL), rank, n_cards).or_else(finer)
}

fn divides_attention(of: &AttentionSpec, w: &AttentionWeights, n_cards: usize) -> bool {
    let by_head = match of.positions {
        Positions::None | Positions::Rope(_) => true,
        Positions::Alibi { max_bias: _ } => false,
    } && of.qk_norm.is_none_or(|norm| match norm.over {
        NormOver::Head | NormOver::Unweighted => true,
        NormOver::EachHead | NormOver::Row => false,
    });
    let block = w.out.weight.ty().block_len().max(4);
    let at_blocks = |rank| {
        heads(of, rank, n_cards).is_some_and(|(queries, _)| {
            let [start, end] = [queries.start, queries.end].map(|head| head * of.head_dim);
            !queries.is_empty() && start.is_multiple_of(block) && end.is_multiple_of(block)
        })
    };
    by_head && (0..n_cards).all(at_blocks)
}

fn divides_feed_forward(of: &FeedForward, w: &FeedForwardWeights, n_cards: usize) -> bool {
    let dense =
        |of: &Dense, w: &DenseWeights| (0..n_cards).all(|rank| width(of, &w.down.weight, rank, n_cards).is_some());
    match (of, w) {
        (FeedForward::Dense(of), FeedForwardWeights::Dense(w)) => dense(of, w),
        (FeedForward::Experts(of), FeedForwardWeights::Experts(w)) => {
            let shared = of.shared.as_ref().zip(w.shared.as_ref()).is_none_or(|(of, w)| dense(&of.dense, w));
            // Norms of sums, and products with them, want them whole.
            let at_once = of.expert_norms.is_none() && of.latent.is_none();
            at_once && shared && w.experts.iter().all(|expert| dense(&of.expert, expert))
        }
        (FeedForward::Dense(_) | FeedForward::Experts(_) | FeedForward::ChannelMix(_) | FeedForward::None, _) => false,
    }
}

impl Division {
    /// How `n_cards` share a model out. An error where too little of it can be.
    pub(crate) fn new(spec: &ModelSpec, weights: &Weights, n_cards: usize) -> Result<Self, CudaError> {
        if n_cards > MAX_CARDS {
            return Err(CudaError::TooManyCards { n_cards, most: MAX_CARDS });
        }
        let layers = || spec.layers.iter().zip(&weights.layers);
        let mut mixers = layers().map(|(layer, w)| {
            if let (Mixer::Attention(of), MixerWeights::Attention(w)) = (&layer.mixer, &w.mixer) {
                divides_attention(of, w, n_cards)
            } else {
                true
            }
        });
        // All or none, as layers may read each other's keys and values.
        let attention = mixers.all(|divides| divides);
        let feed_forwards: Vec<_> =
            layers().map(|(layer, w)| divides_feed_forward(&layer.feed_forward, &w.feed_forward, n_cards)).collect();
        let head = weights.output.is_some() && spec.n_vocab.div_ceil(TILE) >= n_cards;
        let has_attention = layers().any(|(layer, _)| matches!(layer.mixer, Mixer::Attention(_)));
        if !(feed_forwards.contains(&true) || attention && has_attention) {
            return Err(CudaError::Indivisible { n_cards });
        }
        Ok(Self { n_cards, attention, feed_forwards, head })
    }

    /// The rows of the output head that each card has.
    pub(crate) fn vocabulary(&self, n_vocab: usize) -> Vec<Range<usize>> {
        let rows = |rank| units_of(n_vocab, TILE, rank, self.n_cards).filter(|_| self.head);
        (0..self.n_cards).map(|rank| rows(rank).unwrap_or(0..n_vocab)).collect()
    }

    /// Whether all that has weights is shared out: every mixer, every feed-forward and the output head.
    pub(crate) fn divides_all(&self, spec: &ModelSpec) -> bool {
        let mixers = spec.layers.iter().all(|layer| self.divides_mixer(&layer.mixer));
        mixers && self.feed_forwards.iter().all(|divided| *divided) && self.head
    }

    /// Whether the mixer of that kind is shared out.
    pub(crate) fn divides_mixer(&self, mixer: &Mixer) -> bool {
        match mixer {
            Mixer::Attention(_) => self.attention,
            Mixer::LatentAttention(_)
            | Mixer::ShortConv(_)
            | Mixer::Mamba(_)
            | Mixer::Mamba2(_)
            | Mixer::AttentionAndMamba2(_)
            | Mixer::DeltaRule(_)
            | Mixer::Rwkv6(_)
            | Mixer::Rwkv7(_)
            | Mixer::None => false,
        }
    }
}

impl Share {
    /// `spec` as this card has it.
    pub(crate) fn spec(&self, spec: &ModelSpec, weights: &Weights) -> ModelSpec {
        let (rank, n_cards) = (self.rank, self.division.n_cards);
        let mut own = spec.clone();
        for (i, (layer, w)) in own.layers.iter_mut().zip(&weights.layers).enumerate() {
            if let Mixer::Attention(of) = &mut layer.mixer
                && self.division.attention
                && let Some((queries, kv)) = heads(of, rank, n_cards)
            {
                (of.n_head, of.n_head_kv) = (queries.len(), kv.len());
            }
            let narrow = |of: &mut Dense, w: &DenseWeights| {
                of.n_ff = width(of, &w.down.weight, rank, n_cards).map_or(of.n_ff, |columns| columns.len());
            };
            if !self.division.feed_forwards[i] {
                continue;
            }
            match (&mut layer.feed_forward, &w.feed_forward) {
                (FeedForward::Dense(of), FeedForwardWeights::Dense(w)) => narrow(of, w),
                (FeedForward::Experts(of), FeedForwardWeights::Experts(w)) => {
                    w.experts.first().into_iter().for_each(|expert| narrow(&mut of.expert, expert));
                    if let Some((of, w)) = of.shared.as_mut().zip(w.shared.as_ref()) {
                        narrow(&mut of.dense, w);
                    }
                }
                (
                    FeedForward::Dense(_) | FeedForward::Experts(_) | FeedForward::ChannelMix(_) | FeedForward::None,
                    _,
                ) => {}
            }
        }
        own
    }

    /// The weights of layer `i` of `spec`, the whole model, as this card has them. Rows stay where they are; columns are copied.
    pub(crate) fn layer(&self, spec: &ModelSpec, i: usize, w: &LayerWeights) -> LayerWeights {
        let (layer, n_cards) = (&spec.layers[i], self.division.n_cards);
        let mut own = w.clone();
        if let (Mixer::Attention(of), MixerWeights::Attention(w)) = (&layer.mixer, &mut own.mixer)
            && self.division.attention
            && let Some((queries, kv)) = heads(of, self.rank, n_cards)
        {
            *w = self.attention(of, w, &queries, &kv);
        }
        if self.division.feed_forwards[i] {
            match (&layer.feed_forward, &mut own.feed_forward) {
                (FeedForward::Dense(of), FeedForwardWeights::Dense(w)) => *w = self.dense(of, w),
                (FeedForward::Experts(of), FeedForwardWeights::Experts(w)) => {
                    let ExpertsWeights { experts, shared, .. } = &mut **w;
                    for expert in experts.iter_mut() {
                        *expert = self.dense(&of.expert, expert);
                    }
                    if let Some((of, w)) = of.shared.as_ref().zip(shared.as_mut()) {
                        *w = self.dense(&of.dense, w);
                    }
                }
                (
                    FeedForward::Dense(_) | FeedForward::Experts(_) | FeedForward::ChannelMix(_) | FeedForward::None,
                    _,
                ) => {}
            }
        }
        own
    }

    fn attention(
        &self,
        of: &AttentionSpec,
        w: &AttentionWeights,
        queries: &Range<usize>,
        kv: &Range<usize>,
    ) -> AttentionWeights {
        let times = |heads: &Range<usize>, n: usize| heads.start * n..heads.end * n;
        // With each head's gate, where there is one.
        let rows_of_query = w.q.weight.n_rows() / of.n_head;
        AttentionWeights {
            q: rows(&w.q, times(queries, rows_of_query)),
            k: w.k.as_ref().map(|k| rows(k, times(kv, of.head_dim))),
            v: w.v.as_ref().map(|v| rows(v, times(kv, of.head_dim))),
            out: self.columns(&w.out, times(queries, of.head_dim)),
            q_norm: w.q_norm.clone(),
            k_norm: w.k_norm.clone(),
            sinks: w.sinks.as_ref().map(|sinks| sinks[queries.clone()].to_vec()),
        }
    }

    fn dense(&self, of: &Dense, w: &DenseWeights) -> DenseWeights {
        let Some(own) = width(of, &w.down.weight, self.rank, self.division.n_cards) else { return w.clone() };
        DenseWeights {
            gate: w.gate.as_ref().map(|gate| rows(gate, own.clone())),
            up: rows(&w.up, own.clone()),
            down: self.columns(&w.down, own),
        }
    }

    /// Columns of a matrix whose products are summed over the cards; the first one adds the bias.
    fn columns(&self, of: &Linear, columns: Range<usize>) -> Linear {
        let ty = of.weight.ty();
        let bytes = ty.row_bytes(columns.start)..ty.row_bytes(columns.end);
        let n_rows = of.weight.n_rows();
        let mut copied = Vec::with_capacity(n_rows * bytes.len());
        for row in 0..n_rows {
            copied.extend_from_slice(&of.weight.row(row)[bytes.clone()]);
        }
        let weight = Tensor::in_memory(of.weight.name(), [columns.len(), n_rows], ty, &copied);
        Linear { weight, bias: of.bias.clone().filter(|_| self.rank == 0) }
    }

    /// About how many bytes this card has less than a card that has all.
    pub(crate) fn saved_bytes(&self, weights: &Weights) -> u64 {
        let bytes = |linears: &[&Linear]| linears.iter().map(|linear| packed_bytes(&linear.weight)).sum::<u64>();
        let dense = |w: &DenseWeights| bytes(&w.gate.iter().chain([&w.up, &w.down]).collect::<Vec<_>>());
        let layers = weights.layers.iter().zip(&self.division.feed_forwards).map(|(layer, divided)| {
            let mixer = if let (MixerWeights::Attention(w), true) = (&layer.mixer, self.division.attention) {
                let parts = [Some(&w.q), w.k.as_ref(), w.v.as_ref(), Some(&w.out)];
                bytes(&parts.into_iter().flatten().collect::<Vec<_>>())
            } else {
                0
            };
            let feed_forward = match &layer.feed_forward {
                FeedForwardWeights::Dense(w) => dense(w),
                FeedForwardWeights::Experts(w) => w.experts.iter().chain(&w.shared).map(dense).sum(),
                FeedForwardWeights::ChannelMix(_) | FeedForwardWeights::None => 0,
            };
            let feed_forward = if *divided { feed_forward } else { 0 };
            mixer + feed_forward
        });
        // A head that is the table of embeddings, too, is there besides.
        let head = weights.own_head().filter(|_| self.division.head).map_or(0, |head| packed_bytes(&head.weight));
        let n_cards = self.division.n_cards as u64;
        (layers.sum::<u64>() + head) / n_cards * (n_cards - 1)
    }

    /// The output head's own rows.
    pub(crate) fn head(&self, head: &Linear) -> Tensor {
        head.weight.rows(self.division.vocabulary(head.weight.n_rows())[self.rank].clone())
    }
}

/// Rows of a matrix, and what is added to them.
fn rows(of: &Linear, rows: Range<usize>) -> Linear {
    let bias = of.bias.as_ref().map(|bias| bias[rows.clone()].to_vec());
    Linear { weight: of.weight.rows(rows), bias }
}
