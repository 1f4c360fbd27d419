//! The parts of feed-forwards.

use crate::Norm;
use crate::recurrent::ChannelMixSpec;

/// What works on each token alone.
#[derive(Debug, Clone, PartialEq)]
pub enum FeedForward {
    /// The same matrices for all tokens.
    Dense(Dense),
    /// Each token goes to a few of many.
    Experts(Box<Experts>),
    /// The input is mixed with that of the token before, which is a recurrent state (RWKV).
    ChannelMix(ChannelMixSpec),
    /// Nothing: the layer has a mixer alone (Mamba).
    None,
}

impl FeedForward {
    /// F32 elements of the state that it keeps of each sequence; 0 where it keeps none.
    pub fn state_elements(&self) -> usize {
        match self {
            Self::Dense(_) | Self::Experts(_) | Self::None => 0,
            Self::ChannelMix(mix) => mix.state_elements(),
        }
    }
}

/// `down(activation(up(x)))`, or `down(activation(gate(x)) * up(x))` where gated (arXiv 2002.05202).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dense {
    /// Width of gate and up.
    pub n_ff: usize,
    /// Whether there is a gate.
    pub gated: bool,
    /// Activation of the gate, of up where there is none.
    pub activation: Activation,
    /// Whether files of the family have gate and up in one matrix, the gate's rows first: `ffn_up`, of experts
    /// `ffn_gate_up_exps`. Either form is read.
    pub fused: bool,
}

/// Activation function of a feed-forward.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Activation {
    /// `x / (1 + exp(-x))` (arXiv 1702.03118).
    Silu,
    /// `x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))` (arXiv 1606.08415).
    Gelu,
    /// `max(x, 0)^2` (arXiv 2109.08668).
    ReluSquared,
    /// `g / (1 + exp(-1.702 g)) * (1 + u)` of gate and up, `g = min(gate, limit)`, `u` within `-limit..=limit` (gpt-oss).
    ClampedSwiglu {
        /// The limit.
        limit: f32,
    },
    /// GELU of what of the row is above its mean by so many standard deviations: `gelu(max(x - mean - n std, 0))` (Gemma
    /// 3n).
    SparseGelu {
        /// Standard deviations.
        n_std: f32,
    },
}

/// A mixture of experts: `sum over the chosen of weight * expert(x)`, and what all tokens go through besides.
#[derive(Debug, Clone, PartialEq)]
pub struct Experts {
    /// Experts.
    pub n_expert: usize,
    /// Experts that a token goes to.
    pub n_used: usize,
    /// Each of them.
    pub expert: Dense,
    /// Whether router and experts have biases (gpt-oss).
    pub biases: bool,
    /// Width of the row that experts work on, where it is not that of the stream: `up(sum of experts(down(x)))` (Nemotron 3
    /// Super).
    pub latent: Option<usize>,
    /// How they are chosen.
    pub router: Router,
    /// Norms of their own beside those of the layer (Gemma 4): the experts' input is then the residual stream.
    pub expert_norms: Option<ExpertNorms>,
    /// What all tokens go through besides.
    pub shared: Option<SharedExpert>,
}

/// Norms around experts that lie beside a dense feed-forward (Gemma 4).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertNorms {
    /// Of the experts' input.
    pub input: Norm,
    /// Of their weighted sum.
    pub result: Norm,
    /// Of the dense feed-forward's result.
    pub shared_result: Norm,
    /// Epsilon of the RMSNorm of the router's input, which is then multiplied by `ffn_gate_inp.scale / sqrt(n_embd)`.
    pub router_eps: f32,
}

/// A feed-forward beside the experts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SharedExpert {
    /// What it computes.
    pub dense: Dense,
    /// Whether its result is multiplied by a sigmoid of the input, `ffn_gate_inp_shexp` (Qwen 2).
    pub gated: bool,
    /// Whether its tensors are named as those of a dense feed-forward (Gemma 4), not `*_shexp`.
    pub plain_names: bool,
}

/// How a token's experts are chosen and weighted.
#[derive(Debug, Clone, PartialEq)]
pub struct Router {
    /// What becomes of the router's products.
    pub score: RouterScore,
    /// Whether `exp_probs_b` is added to the scores for the choice (DeepSeek-V3); the weights stay as they are. `None`:
    /// where the file has it.
    pub choice_bias: bool,
    /// Whether the weights of the chosen are divided by their sum.
    pub renormalize: bool,
    /// Factor on the weights.
    pub scale: f32,
    /// Groups of experts, of which only the best take part.
    pub groups: Option<RouterGroups>,
    /// Whether the weight multiplies an expert's input instead of its result (Llama 4).
    pub weight_input: bool,
}

/// What becomes of a router's products.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RouterScore {
    /// Softmax over all experts.
    Softmax,
    /// Sigmoid of each.
    Sigmoid,
    /// The largest products are chosen, and softmax goes over these (gpt-oss).
    SoftmaxOfChosen,
}

/// Groups of experts. A group counts as much as its two best experts together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RouterGroups {
    /// Groups.
    pub n: usize,
    /// Groups that take part.
    pub n_used: usize,
}

impl Router {
    /// The experts of a token, `n_used` of `products.len()`, best first (the lower id on ties), and their weights.
    /// `products`: what the router's matrix gave, with its bias; `bias`: what is added for the choice.
    pub fn choose(&self, products: &[f32], bias: Option<&[f32]>, n_used: usize) -> Vec<(usize, f32)> {
        let softmax = |x: &[f32]| -> Vec<f32> {
            let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let powers: Vec<f32> = x.iter().map(|x| (x - max).exp()).collect();
            let sum: f32 = powers.iter().sum();
            powers.iter().map(|p| p / sum).collect()
        };
        let scores: Vec<f32> = match self.score {
            RouterScore::Softmax => softmax(products),
            RouterScore::Sigmoid => products.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect(),
            RouterScore::SoftmaxOfChosen => products.to_vec(),
        };
        let mut choice = scores.clone();
        if let Some(bias) = bias {
            for (score, bias) in choice.iter_mut().zip(bias) {
                *score += bias;
            }
        }
        if let Some(RouterGroups { n, n_used }) = self.groups {
            let of_group = choice.len() / n;
            let best_two = |group: &[f32]| best(group, 2).iter().map(|&i| group[i]).sum::<f32>();
            let groups: Vec<f32> = choice.chunks_exact(of_group).map(best_two).collect();
            let kept = best(&groups, n_used);
            for (i, group) in choice.chunks_exact_mut(of_group).enumerate() {
                if !kept.contains(&i) {
                    group.fill(f32::NEG_INFINITY);
                }
            }
        }
        let chosen = best(&choice, n_used);
        let mut weights: Vec<f32> = chosen.iter().map(|&i| scores[i]).collect();
        if self.score == RouterScore::SoftmaxOfChosen {
            weights = softmax(&weights);
        }
        if self.renormalize {
            // As large at least as the smallest number of 16 bits.
            let sum = weights.iter().sum::<f32>().max(6.103_515_6e-5);
            for w in &mut weights {
                *w /= sum;
            }
        }
        chosen.into_iter().zip(weights.into_iter().map(|w| w * self.scale)).collect()
    }
}

/// Places of the `n` largest values, largest first; the first on ties, NaN last.
fn best(values: &[f32], n: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    let key = |i: &usize| if values[*i].is_nan() { f32::NEG_INFINITY } else { values[*i] };
    order.sort_by(|a, b| key(b).total_cmp(&key(a)));
    order.truncate(n);
    order
}
