//! Feed-forwards: dense ones, mixtures of experts with their routers, and activations.

use crate::{FeedForward, Norm};

impl FeedForward {
    /// F32 elements of the recurrent state of one sequence; 0 if there is none.
    pub fn state_elements(&self) -> usize {
        match self {
            Self::Dense(_) | Self::Experts(_) | Self::None => 0,
            Self::ChannelMix(mix) => mix.state_elements(),
        }
    }
}

/// `down(activation(up(x)))`, or `down(activation(gate(x)) * up(x))` if gated (arXiv 2002.05202).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dense {
    /// Elements of gate and up.
    pub n_ff: usize,
    /// Whether there is a gate.
    pub gated: bool,
    /// Activation of the gate; without a gate, of up.
    pub activation: Activation,
    /// Whether the family's files usually have gate and up in one matrix, the gate's rows first: `ffn_up`, of experts
    /// `ffn_gate_up_exps`. Both forms are read.
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
    /// With gate and up: `g / (1 + exp(-1.702 g)) * (1 + u)`, where `g = min(gate, limit)` and `u` is up clamped to
    /// `-limit..=limit` (gpt-oss).
    ClampedSwiglu {
        /// The limit.
        limit: f32,
    },
    /// With gate and up: `min(silu(gate), limit) * u`, where `u` is up clamped to `-limit..=limit`: the gate is cut after
    /// the activation (Step 3.5). Without a gate `min(silu(up), limit)`.
    ClampedSilu {
        /// The limit.
        limit: f32,
    },
    /// GELU of the part of each element that is more than `n_std` standard deviations above the mean of the row (Gemma
    /// 3n): `gelu(max(x - mean - n_std * std, 0))`.
    SparseGelu {
        /// Standard deviations.
        n_std: f32,
    },
}

/// A mixture of experts: `sum over the chosen of weight * expert(x)`, plus a shared expert that all tokens go through.
#[derive(Debug, Clone, PartialEq)]
pub struct Experts {
    /// Number of experts.
    pub n_expert: usize,
    /// Experts chosen for each token.
    pub n_used: usize,
    /// The feed-forward of each expert.
    pub expert: Dense,
    /// Whether router and experts have biases (gpt-oss).
    pub biases: bool,
    /// Width of the experts' input and output, if it is not `n_embd`: `up(sum of experts(down(x)))` (Nemotron 3 Super).
    pub latent: Option<usize>,
    /// Choice and weights of the experts.
    pub router: Router,
    /// Norms around the experts, in addition to those of the layer; the experts' input is then the residual stream (Gemma 4).
    pub expert_norms: Option<ExpertNorms>,
    /// The shared expert, if there is one.
    pub shared: Option<SharedExpert>,
}

/// Norms around experts that lie beside a dense feed-forward (Gemma 4).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertNorms {
    /// Norm of the experts' input.
    pub input: Norm,
    /// Norm of their weighted sum.
    pub result: Norm,
    /// Norm of the dense feed-forward's result.
    pub shared_result: Norm,
    /// Epsilon of the RMSNorm of the router's input, which is then multiplied by `ffn_gate_inp.scale / sqrt(n_embd)`.
    pub router_eps: f32,
}

/// A feed-forward beside the experts, for all tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SharedExpert {
    /// The feed-forward.
    pub dense: Dense,
    /// Whether its result is multiplied by a sigmoid gate of the input, `ffn_gate_inp_shexp` (Qwen 2).
    pub gated: bool,
    /// Whether its tensors have the names of a dense feed-forward (Gemma 4) instead of `*_shexp`.
    pub plain_names: bool,
}

/// Choice and weights of a token's experts.
#[derive(Debug, Clone, PartialEq)]
pub struct Router {
    /// From the router's products to scores.
    pub score: RouterScore,
    /// Whether `exp_probs_b`, if the file has it, is added to the scores for the choice (DeepSeek-V3). The weights do
    /// not include it.
    pub choice_bias: bool,
    /// Whether the weights of the chosen experts are divided by their sum.
    pub renormalize: bool,
    /// Factor on the weights.
    pub scale: f32,
    /// Groups of experts, of which only the best take part.
    pub groups: Option<RouterGroups>,
    /// Whether the weight multiplies an expert's input instead of its result (Llama 4).
    pub weights_inputs: bool,
}

/// From a router's products to scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RouterScore {
    /// Softmax over all experts.
    Softmax,
    /// Sigmoid of each.
    Sigmoid,
    /// The largest products are chosen; the weights are the softmax over these (gpt-oss).
    SoftmaxOfChosen,
}

/// Groups of experts. The score of a group is the sum of its two best experts' scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RouterGroups {
    /// Number of groups.
    pub n: usize,
    /// Groups that take part.
    pub n_used: usize,
}

impl Router {
    /// The experts of a token and their weights: `n_used` of `products.len()`, best first, the lower index on ties.
    /// `products`, `[n_expert]`: the router's products, its bias included; `bias`, `[n_expert]`: added for the choice
    /// only.
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
            // At least the smallest normal F16 number, so that the division cannot overflow.
            let sum = weights.iter().sum::<f32>().max(6.103_515_6e-5);
            for w in &mut weights {
                *w /= sum;
            }
        }
        chosen.into_iter().zip(weights.into_iter().map(|w| w * self.scale)).collect()
    }
}

/// Indices of the `n` largest values, largest first; the first on ties, NaN last.
fn best(values: &[f32], n: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    let key = |i: &usize| if values[*i].is_nan() { f32::NEG_INFINITY } else { values[*i] };
    order.sort_by(|a, b| key(b).total_cmp(&key(a)));
    order.truncate(n);
    order
}
