//! The router of a mixture of experts: chooses each token's experts from their scores.

use metal_attention_model::{Router, RouterScore};

use super::ExpertsScratch;
use crate::arena::Bind;
use crate::device::WgpuDevice;
use crate::dispatch::{AccessRange, Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::pipelines::PipelineKey;

/// Most experts of one token.
pub const MAX_USED_EXPERTS: usize = 32;

/// Most experts of a layer: a workgroup keeps 12 bytes for each.
pub const MAX_EXPERTS: usize = 1024;

/// Chooses `n_used` of `n_expert` experts for each token, like [`Router::choose`], and writes them with their weights
/// to `scratch`. `products`, `[n_tokens, n_expert]`: the router's products, with its bias. `choice_bias`, `[n_expert]`:
/// added for the choice only. `expert_scale`, `[n_expert]`: a factor on each expert's weight.
pub fn route(
    gpu: &WgpuDevice,
    router: &Router,
    [n_expert, n_used]: [usize; 2],
    products: &wgpu::Buffer,
    choice_bias: Option<&wgpu::Buffer>,
    expert_scale: Option<&wgpu::Buffer>,
    scratch: &ExpertsScratch,
) -> Result<Dispatch, WgpuError> {
    let mismatch = |why: String| Err(WgpuError::Mismatch { what: "the choice of experts".to_owned(), why });
    if n_used == 0 || n_used > n_expert.min(MAX_USED_EXPERTS) || n_expert > MAX_EXPERTS {
        return mismatch(format!("{n_used} of {n_expert}, and the kernel finds {MAX_USED_EXPERTS} of {MAX_EXPERTS}"));
    }
    if let Some(groups) = router.groups
        && (groups.n == 0 || !n_expert.is_multiple_of(groups.n))
    {
        return mismatch(format!("{n_expert} experts are no {} groups of one size", groups.n));
    }
    if router.weights_inputs && expert_scale.is_some() {
        return mismatch("one factor is for the experts' input and another for their result".to_owned());
    }
    let mut buffers: Vec<(&dyn Bind, AccessRange)> = vec![
        (products, AccessRange::Tokens(4 * n_expert as u64)),
        (&scratch.chosen, AccessRange::Tokens(4 * n_used as u64)),
        (&scratch.weights, AccessRange::Tokens(4 * n_used as u64)),
    ];
    let of_experts = choice_bias.into_iter().chain(expert_scale);
    buffers.extend(of_experts.map(|buffer| (buffer as &dyn Bind, AccessRange::floats(n_expert))));
    let key = key(router, [n_expert, n_used], choice_bias.is_some(), expert_scale.is_some());
    Dispatch::new(gpu, &key, &buffers, [GridExtent::Tokens(1), GridExtent::Fixed(1), GridExtent::Fixed(1)])
}

fn key(router: &Router, [n_expert, n_used]: [usize; 2], choice_bias: bool, expert_scale: bool) -> PipelineKey {
    let score = match router.score {
        RouterScore::Softmax => "softmax",
        RouterScore::Sigmoid => "sigmoid",
        RouterScore::SoftmaxOfChosen => "softmax_of_chosen",
    };
    let constants = [
        ("n_expert", n_expert.into()),
        ("n_used", n_used.into()),
        ("score", score.into()),
        ("renormalize", router.renormalize.into()),
        ("scale", router.scale.into()),
        ("n_groups", router.groups.map_or(1, |groups| groups.n).into()),
        ("n_groups_used", router.groups.map_or(1, |groups| groups.n_used).into()),
        ("choice_bias", choice_bias.into()),
        ("expert_scale", expert_scale.into()),
    ];
    PipelineKey::new("experts_route", constants).named(format!("experts_route_{score}"))
}

/// The keys for every score function, as Qwen 3, `DeepSeek-V3` and gpt-oss use them.
pub(super) fn catalogue() -> Vec<PipelineKey> {
    use metal_attention_model::RouterGroups;
    let router = Router {
        score: RouterScore::Softmax,
        choice_bias: false,
        renormalize: true,
        scale: 1.0,
        groups: None,
        weights_inputs: false,
    };
    let groups = Some(RouterGroups { n: 8, n_used: 4 });
    let sigmoid = Router { score: RouterScore::Sigmoid, scale: 2.5, groups, ..router.clone() };
    let of_chosen = Router { score: RouterScore::SoftmaxOfChosen, renormalize: false, ..router.clone() };
    vec![
        key(&router, [128, 8], false, false),
        key(&sigmoid, [256, 8], true, false),
        key(&of_chosen, [32, 4], false, false),
    ]
}
