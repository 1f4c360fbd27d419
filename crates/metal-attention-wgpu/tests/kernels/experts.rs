//! Mixtures of experts: routing against `Router::choose`, expert feed-forwards of few and of many tokens against their
//! scalar twin.

use crate::support::matrices::tensors;
use crate::support::{batch, nmse, on_variants, poisoned, random, run, takes_fewer_cases, variants};
use half::f16;
use metal_attention_gguf::{Tensor, TensorType};
use metal_attention_model::{Activation, Router, RouterGroups, RouterScore};
use metal_attention_wgpu::kernels::{
    CooperativeTile, ExpertsMatrices, ExpertsScratch, ExpertsShape, ExpertsValues, MatmulMethod, MatvecInput,
    experts_matmul_by, experts_matvec, experts_method, experts_twin, rmsnorm_twin, route,
};
use metal_attention_wgpu::{Arena, WgpuDevice, WgpuMatrix, wgpu};

/// The largest NMSE of two products of some hundred f32 numbers, with an activation between them: each product has a squared
/// relative error of at most some 1e-12 (`matmul.rs`).
const EXACT: f64 = 1e-11;

/// The largest NMSE of two products of numbers rounded to 11 bits (`matmul.rs`), of sums that do not cancel.
const HALF: f64 = 1e-6;

const EPS: f32 = 1e-5;

const ROUTER: Router = Router {
    score: RouterScore::Softmax,
    choice_bias: false,
    renormalize: false,
    scale: 1.0,
    groups: None,
    weights_inputs: false,
};

/// Scratch buffers for routing only.
fn choice_scratch(gpu: &WgpuDevice, [n_expert, n_used]: [usize; 2], n_tokens: usize) -> ExpertsScratch {
    let shape = ExpertsShape { n_embd: 8, n_ff: 8, n_expert, n_used, ..SHAPE };
    ExpertsScratch::new(gpu, &[shape], n_tokens).unwrap()
}

/// The GPU's experts and weights for each row of router logits `products`, `[n_tokens, n_expert]`.
fn choices(
    gpu: &WgpuDevice,
    router: &Router,
    [n_expert, n_used]: [usize; 2],
    products: &[f32],
    bias: Option<&[f32]>,
    scale: Option<&[f32]>,
) -> Vec<Vec<(usize, f32)>> {
    let n = products.len() / n_expert;
    let scratch = choice_scratch(gpu, [n_expert, n_used], n);
    let products = gpu.upload("products", products).unwrap();
    let [bias, scale] = [bias, scale].map(|v| v.map(|v| gpu.upload("of experts", v).unwrap()));
    let sizes = [n_expert, n_used];
    run(gpu, &[route(gpu, router, sizes, &products, bias.as_ref(), scale.as_ref(), &scratch).unwrap()], n);
    let chosen: Vec<u32> = gpu.read(&scratch.chosen, n * n_used).unwrap();
    let weights: Vec<f32> = gpu.read(&scratch.weights, n * n_used).unwrap();
    let pairs: Vec<_> = chosen.iter().zip(weights).map(|(&e, w)| (e as usize, w)).collect();
    pairs.chunks(n_used).map(<[_]>::to_vec).collect()
}

#[test]
fn route_chooses_the_experts_of_the_router() {
    let groups = |n, n_used| Some(RouterGroups { n, n_used });
    let scores = [RouterScore::Softmax, RouterScore::Sigmoid, RouterScore::SoftmaxOfChosen];
    for (v, gpu) in variants().iter().enumerate() {
        for (i, (sizes, groups)) in [
            ([1, 1], None),
            ([7, 7], None),
            ([128, 8], None),
            ([512, 10], None),
            ([60, 4], None),
            ([256, 8], groups(8, 4)),
            ([72, 32], groups(9, 8)),
            ([16, 2], groups(16, 5)),
        ]
        .into_iter()
        .enumerate()
        {
            let [n_expert, n_used] = sizes;
            // Few different values, so that many are equal.
            let products = random(i as u64, 5 * n_expert).iter().map(|v| (v * 24.0).round() / 8.0).collect::<Vec<_>>();
            let (bias, scale) = (random(21, n_expert), random(22, n_expert));
            for (j, score) in scores.into_iter().enumerate() {
                for (k, bias) in [None, Some(&bias[..])].into_iter().enumerate() {
                    // The first variant tests every combination, the others one combination per size.
                    if v > 0 && 2 * j + k != i % 6 {
                        continue;
                    }
                    let renormalize = (i + j + k) % 2 == 0;
                    let router = Router { score, renormalize, groups, scale: 1.0 + k as f32, ..ROUTER };
                    let scale = (j == k).then_some(&scale[..]);
                    let got = choices(gpu, &router, sizes, &products, bias, scale);
                    for (got, products) in got.iter().zip(products.chunks(n_expert)) {
                        let want = router.choose(products, bias, n_used);
                        let ids = |v: &[(usize, f32)]| v.iter().map(|v| v.0).collect::<Vec<_>>();
                        assert_eq!(ids(got), ids(&want), "{router:?}, {sizes:?}, bias {}", bias.is_some());
                        let want: Vec<f32> = want.iter().map(|&(e, w)| w * scale.map_or(1.0, |s| s[e])).collect();
                        let got: Vec<f32> = got.iter().map(|v| v.1).collect();
                        // Exponentials within a few units of the last place.
                        assert!(nmse(&got, &want) < 4e-12, "{router:?}, {sizes:?}: {got:?}, {want:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn known_choices() {
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    let router = Router { score: RouterScore::SoftmaxOfChosen, ..ROUTER };
    for gpu in variants() {
        let chosen_experts = |products: &[f32], n_used: usize| {
            let got = choices(gpu, &router, [products.len(), n_used], products, None, None).remove(0);
            assert_eq!(
                got.iter().map(|v| v.0).collect::<Vec<_>>(),
                router.choose(products, None, n_used).iter().map(|v| v.0).collect::<Vec<_>>()
            );
            got.iter().map(|v| v.0).collect::<Vec<_>>()
        };
        assert_eq!(chosen_experts(&[2.5; 6], 4), [0, 1, 2, 3]);
        assert_eq!(chosen_experts(&[1.0, -0.0, 0.0, 3.0], 4), [3, 0, 2, 1]);
        assert_eq!(chosen_experts(&[nan, -1.0, nan, -2.0], 2), [1, 3]);
        assert_eq!(chosen_experts(&[nan, -inf, 5.0], 3), [2, 0, 1]);
        assert_eq!(chosen_experts(&[nan; 3], 2), [0, 1]);
        assert_eq!(chosen_experts(&[-1e30, 1e30, -1e-30], 3), [1, 2, 0]);
    }
}

#[test]
fn routers_that_the_kernel_does_not_support_are_refused() {
    let gpu = &variants()[0];
    let scratch = choice_scratch(gpu, [64, 32], 1);
    let x = gpu.buffer("x", 1 << 12).unwrap();
    let why = |router: &Router, sizes: [usize; 2], scale| {
        route(gpu, router, sizes, &x, None, scale, &scratch).unwrap_err().to_string()
    };
    assert!(why(&ROUTER, [64, 33], None).contains("33 of 64"));
    assert!(why(&ROUTER, [4, 5], None).contains("5 of 4"));
    let groups = Some(RouterGroups { n: 3, n_used: 1 });
    assert!(why(&Router { groups, ..ROUTER }, [64, 2], None).contains("no 3 groups"));
    assert!(why(&Router { weights_inputs: true, ..ROUTER }, [64, 2], Some(&x)).contains("one factor"));
}

const SHAPE: ExpertsShape = ExpertsShape {
    n_embd: 256,
    n_ff: 256,
    n_expert: 5,
    n_used: 2,
    gated: true,
    activation: Activation::Silu,
    weights_inputs: false,
};

/// The experts of the tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
enum ExpertChoice {
    /// Random experts for each token.
    Random,
    /// The same experts for all tokens.
    Same,
}

/// The kernels that evaluate the experts.
#[derive(Debug, Clone, Copy, PartialEq)]
enum How {
    /// `experts_matvec`, for few tokens.
    Few,
    /// `experts_matmul_by` with the method that the device would use.
    Many { exact: bool },
    /// `experts_matmul_by` with such tiles, in plain loops in place of matrix units.
    Loops(CooperativeTile),
}

/// One comparison of the GPU with the twin.
#[derive(Debug, Clone, Copy)]
struct Case {
    shape: ExpertsShape,
    /// The types of gate and up, and of down.
    types: [TensorType; 2],
    choice: ExpertChoice,
    n_tokens: usize,
    /// Whether the matrices have biases.
    bias: bool,
    /// Whether the input is RMS-normalised in the prologue.
    norm: bool,
    /// Whether the result is added to `y`.
    accumulate: bool,
    /// Maximum of bytes in one part of a matrix.
    max_part: u64,
}

const PLAIN: Case = Case {
    shape: SHAPE,
    types: [TensorType::F32; 2],
    choice: ExpertChoice::Random,
    n_tokens: 3,
    bias: false,
    norm: false,
    accumulate: false,
    max_part: u64::MAX,
};

/// The experts of a layer on the GPU, and their dequantised weights.
struct Layer {
    up: WgpuMatrix,
    down: WgpuMatrix,
    up_values: Vec<f32>,
    down_values: Vec<f32>,
}

impl Layer {
    fn new(gpu: &WgpuDevice, case: Case) -> Self {
        let ExpertsShape { n_embd, n_ff, n_expert, gated, .. } = case.shape;
        let [up_type, down_type] = case.types;
        let mut shapes = vec![(up_type, n_embd, n_ff); 2 * n_expert];
        shapes.resize(3 * n_expert, (down_type, n_ff, n_embd));
        let all = tensors(&shapes, 7);
        let all: Vec<&Tensor> = all.iter().collect();
        let (gates, rest) = all.split_at(n_expert);
        let (ups, downs) = rest.split_at(n_expert);
        let arena = || Arena::default().with_max_slice(case.max_part);
        let values = |tensors: &[&Tensor]| tensors.iter().flat_map(|t| t.to_f32()).collect::<Vec<_>>();
        let (up, up_values) = if gated {
            let (a, b) = (values(gates), values(ups));
            let rows = a.chunks(n_embd).zip(b.chunks(n_embd)).flat_map(|(a, b)| [a, b].concat()).collect();
            (WgpuMatrix::interleave_all(gpu, "gate_up", gates, ups, &mut arena()).unwrap(), rows)
        } else {
            (WgpuMatrix::concat(gpu, "up", ups, &mut arena()).unwrap(), values(ups))
        };
        let down = WgpuMatrix::concat(gpu, "down", downs, &mut arena()).unwrap();
        Self { up, down, up_values, down_values: values(downs) }
    }
}

/// The experts and weights of each token.
fn expert_choices(case: Case) -> Vec<Vec<(usize, f32)>> {
    let ExpertsShape { n_expert, n_used, .. } = case.shape;
    let weights = random(31, case.n_tokens * n_used);
    let keys = random(32, case.n_tokens * n_expert);
    let mut choices_of_tokens = Vec::new();
    for (keys, weights) in keys.chunks(n_expert).zip(weights.chunks(n_used)) {
        let mut experts: Vec<usize> = (0..n_expert).collect();
        if case.choice == ExpertChoice::Random {
            experts.sort_by(|&a, &b| keys[a].total_cmp(&keys[b]));
        }
        choices_of_tokens.push(experts.into_iter().zip(weights.iter().map(|w| 0.5 + w.abs())).take(n_used).collect());
    }
    choices_of_tokens
}

/// Evaluates the experts of random tokens on the GPU and in the twin, and compares the results.
fn check(gpu: &WgpuDevice, case: Case, how: How, layer: &Layer) {
    let Case { shape, n_tokens, .. } = case;
    let ExpertsShape { n_embd, n_used, .. } = shape;
    let (x, before) = (random(1, n_tokens * n_embd), random(2, n_tokens * n_embd));
    let gain: Vec<f32> = random(3, n_embd).iter().map(|v| 1.0 + v / 2.0).collect();
    let (up_bias, down_bias) = (random(4, layer.up.n_out()), random(5, layer.down.n_out()));
    let upload = |values: &[f32]| gpu.upload("x", values).unwrap();
    let (gx, gain_buffer) = (upload(&x), upload(&gain));
    let biases: [Option<wgpu::Buffer>; 2] = [&up_bias, &down_bias].map(|bias| case.bias.then(|| upload(bias)));
    let matrices = ExpertsMatrices {
        up: &layer.up,
        up_bias: biases[0].as_ref(),
        down: &layer.down,
        down_bias: biases[1].as_ref(),
    };
    let y = if case.accumulate { upload(&before) } else { poisoned(gpu, n_tokens * n_embd) };
    let scratch = match how {
        How::Few => ExpertsScratch::new(gpu, &[shape], n_tokens),
        How::Many { .. } | How::Loops(_) => ExpertsScratch::for_loops(gpu, &[shape], n_tokens),
    };
    let scratch = scratch.unwrap();
    let choices_of_tokens = expert_choices(case);
    gpu.write(&scratch.chosen, &choices_of_tokens.iter().flatten().map(|v| v.0 as u32).collect::<Vec<_>>());
    gpu.write(&scratch.weights, &choices_of_tokens.iter().flatten().map(|v| v.1).collect::<Vec<_>>());

    let method = match how {
        How::Few => MatmulMethod::Tiled,
        How::Many { exact } => experts_method(gpu.features(), &shape, &matrices, n_tokens, exact),
        How::Loops(tile) => MatmulMethod::Cooperative(tile),
    };
    let on_units = method != MatmulMethod::Tiled;
    let norm = case.norm && (how == How::Few || on_units);
    let input = if norm { MatvecInput::RmsNorm { weight: &gain_buffer, eps: EPS } } else { MatvecInput::Plain };
    let dispatches = if how == How::Few {
        experts_matvec(gpu, &shape, &matrices, input, &gx, &y, case.accumulate, &scratch)
    } else {
        let batch = batch(gpu, n_tokens, 0);
        experts_matmul_by(gpu, &shape, &matrices, input, method, &gx, &y, case.accumulate, &scratch, &batch)
    };
    run(gpu, &dispatches.unwrap(), n_tokens);
    let got: Vec<f32> = gpu.read(&y, n_tokens * n_embd).unwrap();

    let values = ExpertsValues {
        up: &layer.up_values,
        up_bias: case.bias.then_some(&up_bias),
        down: &layer.down_values,
        down_bias: case.bias.then_some(&down_bias),
    };
    let halves = |values: &[f32]| values.iter().map(|&v| f16::from_f32(v).to_f32()).collect::<Vec<_>>();
    let in_half = on_units && gpu.features().cooperative_f16;
    let rounded_weights = in_half.then(|| [halves(&layer.up_values), halves(&layer.down_values)]);
    for (t, choices) in choices_of_tokens.iter().enumerate() {
        assert_eq!(choices.len(), n_used);
        let row = t * n_embd..(t + 1) * n_embd;
        let x = &x[row.clone()];
        let normed = if norm { rmsnorm_twin(x, &gain, EPS) } else { x.to_vec() };
        let mut want = experts_twin(&shape, &values, &normed, choices);
        // Where sums cancel, the limit is the error that rounding the weights and the input alone causes.
        let tolerance = rounded_weights.as_ref().map_or(EXACT, |[up, down]| {
            let rounded = experts_twin(&shape, &ExpertsValues { up, down, ..values }, &halves(&normed), choices);
            HALF.max(2.0 * nmse(&rounded, &want))
        });
        if case.accumulate {
            want.iter_mut().zip(&before[row.clone()]).for_each(|(y, b)| *y += b);
        }
        let error = nmse(&got[row], &want);
        assert!(error < tolerance, "token {t}, {how:?} of {case:?}: {error:e}");
    }
}

/// The kernels that `gpu` supports; on a software GPU without the loops in place of matrix units, which it compiles for ten
/// seconds for each type and shape.
fn methods(gpu: &WgpuDevice) -> Vec<How> {
    let mut methods = all_methods(gpu);
    methods.retain(|how| !matches!(how, How::Loops(_)) || !takes_fewer_cases(gpu));
    methods
}

/// The kernels that `gpu` supports.
fn all_methods(gpu: &WgpuDevice) -> Vec<How> {
    let features = gpu.features();
    let mut methods = vec![How::Few, How::Many { exact: true }];
    if features.cooperative_f16 || features.cooperative_f32 {
        methods.push(How::Many { exact: false });
    } else if features.subgroup_size >= 8 {
        let tile =
            CooperativeTile { rows: 32, tokens: 16, depth: 32, subgroups_rows: 2, subgroups_tokens: 1, stages: 2 };
        methods.push(How::Loops(tile));
    }
    methods
}

#[test]
fn pairs_of_types() {
    for (i, gpu) in variants().iter().enumerate() {
        for (up, down, n) in [
            (TensorType::F32, TensorType::F16, 40),
            (TensorType::Q4_0, TensorType::Q8_0, 64),
            (TensorType::Q4_K, TensorType::Q6_K, 256),
            (TensorType::MXFP4, TensorType::MXFP4, 96),
            (TensorType::Q5_K, TensorType::Q4_K, 256),
        ] {
            // Weights are read by the same code in all variants.
            if i > 0 && up != TensorType::Q4_0 {
                continue;
            }
            let shape = ExpertsShape { n_embd: n, n_ff: n, ..SHAPE };
            let case = Case { shape, types: [up, down], ..PLAIN };
            let layer = Layer::new(gpu, case);
            for how in if up == TensorType::Q4_0 { all_methods(gpu) } else { methods(gpu) } {
                for n_tokens in [1, 19] {
                    check(gpu, Case { n_tokens, accumulate: n_tokens > 1, ..case }, how, &layer);
                }
            }
        }
    }
}

#[test]
fn every_type() {
    let gpu = &variants()[0];
    // `matvec::every_type` reads the types that are left out.
    let step = if takes_fewer_cases(gpu) { 4 } else { 1 };
    for &ty in TensorType::ALL.iter().step_by(step) {
        let n = if ty.block_len() == 1 { 33 } else { ty.block_len() };
        let shape = ExpertsShape { n_embd: n, n_ff: n, n_expert: 3, ..SHAPE };
        let case = Case { shape, types: [ty; 2], ..PLAIN };
        let layer = Layer::new(gpu, case);
        for how in methods(gpu) {
            check(gpu, case, how, &layer);
        }
    }
}

#[test]
fn shapes_and_expert_choices() {
    let shape = |n_embd, n_ff, n_expert, n_used| ExpertsShape { n_embd, n_ff, n_expert, n_used, ..SHAPE };
    for (gpu, (shape, ty, n_tokens, choice)) in on_variants(&[
        (shape(33, 17, 1, 1), TensorType::F32, 21, ExpertChoice::Random),
        (shape(32, 96, 4, 4), TensorType::Q4_0, 66, ExpertChoice::Random),
        (shape(288, 32, 60, 4), TensorType::Q8_0, 33, ExpertChoice::Random),
        (shape(64, 32, 130, 32), TensorType::Q4_0, 5, ExpertChoice::Random),
        (shape(32, 32, 150, 1), TensorType::Q8_0, 17, ExpertChoice::Random),
        (shape(64, 544, 7, 2), TensorType::MXFP4, 130, ExpertChoice::Same),
        (shape(2048, 768, 3, 2), TensorType::Q8_0, 1, ExpertChoice::Same),
    ]) {
        let case = Case { shape, types: [ty; 2], n_tokens, choice, ..PLAIN };
        let layer = Layer::new(gpu, case);
        for how in methods(gpu) {
            check(gpu, case, how, &layer);
        }
    }
}

#[test]
fn activations_gates_and_biases() {
    let activations = [
        Activation::Silu,
        Activation::Gelu,
        Activation::ReluSquared,
        Activation::ClampedSwiglu { limit: 3.0 },
        Activation::ClampedSilu { limit: 2.0 },
    ];
    for (i, gpu) in variants().iter().enumerate() {
        // The variants after the first test those with a limit.
        let activations = if i == 0 { &activations[..] } else { &activations[3..] };
        for (j, &activation) in activations.iter().enumerate() {
            for (k, (gated, bias, weights_inputs)) in
                [(true, true, false), (true, false, true), (false, j == 0, false)].into_iter().enumerate()
            {
                if takes_fewer_cases(gpu) && j > 0 && k != j % 3 {
                    continue;
                }
                let shape = ExpertsShape { n_embd: 96, n_ff: 32, gated, activation, weights_inputs, ..SHAPE };
                let case = Case { shape, types: [TensorType::Q4_0; 2], bias, norm: true, n_tokens: 18, ..PLAIN };
                let layer = Layer::new(gpu, case);
                for how in methods(gpu) {
                    check(gpu, case, how, &layer);
                }
            }
        }
    }
}

#[test]
fn matrices_in_parts() {
    let cases = [(true, 1000), (false, 3000)];
    for (gpu, (gated, max_part)) in on_variants(&cases[..if takes_fewer_cases(&variants()[0]) { 1 } else { 2 }]) {
        let shape = ExpertsShape { n_embd: 64, n_ff: 32, gated, ..SHAPE };
        let case = Case { shape, types: [TensorType::Q4_0; 2], bias: true, n_tokens: 20, max_part, ..PLAIN };
        let layer = Layer::new(gpu, case);
        assert!(layer.up.parts().len() > 1 && layer.down.parts().len() > 1);
        for how in methods(gpu) {
            check(gpu, case, how, &layer);
            check(gpu, Case { accumulate: true, ..case }, how, &layer);
        }
    }
}

#[test]
fn mismatched_buffers_and_types_are_refused() {
    let gpu = &variants()[0];
    let case = Case { shape: ExpertsShape { n_embd: 64, n_ff: 32, ..SHAPE }, ..PLAIN };
    let layer = Layer::new(gpu, case);
    let matrices = ExpertsMatrices { up: &layer.up, up_bias: None, down: &layer.down, down_bias: None };
    let scratch = ExpertsScratch::new(gpu, &[case.shape], 3).unwrap();
    let x = gpu.buffer("x", 4 * 64 * 3).unwrap();
    let few = |shape: ExpertsShape| {
        experts_matvec(gpu, &shape, &matrices, MatvecInput::Plain, &x, &x, false, &scratch).unwrap_err().to_string()
    };
    assert!(few(ExpertsShape { n_ff: 64, ..case.shape }).contains("up is 320 x 64"));
    let sparse = Activation::SparseGelu { n_std: 1.0 };
    assert!(few(ExpertsShape { activation: sparse, ..case.shape }).contains("sparse GELU"));
    let (tiled, input) = (MatmulMethod::Tiled, MatvecInput::Plain);
    let many = experts_matmul_by(gpu, &case.shape, &matrices, input, tiled, &x, &x, false, &scratch, &x);
    assert!(many.unwrap_err().to_string().contains("a few tokens"));
    let w = tensors(&[(TensorType::Q4_0, 64, 4), (TensorType::Q8_0, 64, 4)], 1);
    let mixed = WgpuMatrix::interleave_all(gpu, "gate_up", &[&w[0]], &[&w[1]], &mut Arena::default());
    assert!(mixed.unwrap_err().to_string().contains("w0 has 4 rows of"), "types differ");
}

#[test]
fn scratch_buffers_have_the_predicted_size() {
    let gpu = &variants()[0];
    for n_tokens in [1, 16, 17, 100] {
        let before = gpu.allocated_bytes();
        let _scratch = ExpertsScratch::new(gpu, &[SHAPE], n_tokens).unwrap();
        let allocated = gpu.allocated_bytes() - before;
        let predicted = ExpertsScratch::bytes(gpu.features(), &[SHAPE], n_tokens);
        // Buffers are whole 16-byte vectors, and none is empty.
        assert!(predicted <= allocated && allocated < predicted + 200, "{n_tokens} tokens: {predicted}, {allocated}");
    }
}
