//! Mixtures of experts: each token goes to a few of many feed-forwards. Only the chosen ones are read; the tokens of a batch
//! are sorted by expert, so that each is read once.

use metal_attention_model::{Experts, ExpertsWeights, Norm};

use super::{Input, MIN_ELEMENTS, Run, add, add_bias, normalize, normalize_row, resize, scale_by};
use crate::kernels::elementwise::{Activate, RmsNorm};
use crate::kernels::matmul::{Product, matmul};
use crate::layers::PreparedLinear;
use crate::observer::MatrixInput;
use crate::shared::SharedMut;

/// Activations of experts.
#[derive(Default)]
pub(super) struct ExpertScratch {
    /// The router's products, `[n_tokens, n_expert]`.
    scores: Vec<f32>,
    /// The input of router or experts, where it is not the normalised state, `[n_tokens, n_embd]`, or as wide as experts are.
    input: Vec<f32>,
    /// Rows of the input sorted by expert, `[n_tokens * n_used, n_embd]`.
    sorted: Vec<f32>,
    /// What the experts give, `[n_tokens * n_used, n_embd]`.
    down: Vec<f32>,
    /// Their weighted sums, `[n_tokens, n_embd]`.
    sum: Vec<f32>,
}

impl ExpertScratch {
    pub(super) fn bytes(&self) -> usize {
        let all = [&self.scores, &self.input, &self.sorted, &self.down, &self.sum];
        all.iter().map(|v| 4 * v.capacity()).sum()
    }
}

/// A token at one of its experts.
#[derive(Clone, Copy)]
struct Visit {
    token: usize,
    expert: usize,
    weight: f32,
}

impl Run<'_> {
    /// The weighted experts of the normalised state `h`, and what all tokens go through besides.
    pub(super) fn experts(&mut self, e: &Experts, w: &ExpertsWeights<PreparedLinear>, to_stream: bool) {
        let n_embd = self.spec.n_embd;
        let n_tokens = self.s.x.len() / n_embd;
        let mut visits = self.route(e, w, n_tokens);
        // By expert; a token's own stay in the order of its choice, for its sum.
        visits.sort_by_key(|visit| visit.expert);
        self.expert_input(e, w);
        self.visit(e, w, &visits, n_tokens);
        self.sum_visits(e, w, &visits, n_tokens);
        if let Some([_, result, _]) = &w.expert_norms
            && let Some(own) = &e.expert_norms
        {
            let s = &mut *self.s;
            s.experts.input.resize(s.experts.sum.len(), 0.0);
            normalize(self.pool, self.isa, (&own.result, result), &s.experts.sum, &mut s.experts.input);
            std::mem::swap(&mut s.experts.sum, &mut s.experts.input);
        }
        if let Some([_, up]) = &w.latent {
            self.widen_sum(up, n_tokens);
        }
        if let (Some(shared), Some(weights)) = (&e.shared, &w.shared) {
            self.dense(&shared.dense, weights, false);
            self.weigh_shared(e, w);
        } else {
            resize(&mut self.s.result, n_tokens * n_embd);
            self.s.result.fill(0.0);
        }
        let s = &mut *self.s;
        add(&mut s.result, &s.experts.sum);
        if to_stream {
            add(&mut s.x, &s.result);
        }
        self.lap("experts_sum");
    }

    /// Which experts each token goes to, in the order of tokens and choices.
    fn route(&mut self, e: &Experts, w: &ExpertsWeights<PreparedLinear>, n_tokens: usize) -> Vec<Visit> {
        let n_embd = self.spec.n_embd;
        let s = &mut *self.s;
        if let (Some(own), Some(factors)) = (&e.expert_norms, &w.router_scale) {
            // rms(x) / sqrt(n_embd) * scale
            let factor = 1.0 / (n_embd as f32).sqrt();
            let weight: Vec<f32> = factors.iter().map(|s| s * factor).collect();
            resize(&mut s.experts.input, s.x.len());
            for (x, out) in s.x.chunks_exact(n_embd).zip(s.experts.input.chunks_exact_mut(n_embd)) {
                self.isa.run(RmsNorm { x, weight: &weight, eps: own.router_eps, out });
            }
        }
        let input = if w.router_scale.is_some() { &s.experts.input } else { &s.h };
        if let Some(observer) = &mut self.observer {
            observer(MatrixInput { matrix: &w.router.name, part: None, x: input, n_in: n_embd });
        }
        resize(&mut s.experts.scores, n_tokens * e.n_expert);
        let mut products =
            [Product { matrix: &w.router.weight, rows: 0..n_tokens, y: &mut s.experts.scores, accumulate: false }];
        matmul(self.pool, self.isa, input, &mut s.q8, &mut products);
        let mut visits = Vec::with_capacity(n_tokens * e.n_used);
        for (token, scores) in s.experts.scores.chunks_exact_mut(e.n_expert).enumerate() {
            add_bias(scores, &w.router);
            let chosen = e.router.choose(scores, w.choice_bias.as_deref(), e.n_used);
            visits.extend(chosen.into_iter().map(|(expert, weight)| Visit { token, expert, weight }));
        }
        self.lap("router");
        visits
    }

    /// The experts' input goes to `experts.input`, where it is not `h`.
    fn expert_input(&mut self, e: &Experts, w: &ExpertsWeights<PreparedLinear>) {
        if let (Some(own), Some([input, _, _])) = (&e.expert_norms, &w.expert_norms) {
            let s = &mut *self.s;
            normalize(self.pool, self.isa, (&own.input, input), &s.x, &mut s.experts.input);
        }
        if let Some([down, _]) = &w.latent {
            self.show(&[down], Input::Normed);
            let s = &mut *self.s;
            let rows = 0..s.h.len() / self.spec.n_embd;
            resize(&mut s.experts.input, rows.len() * down.weight.n_out());
            let mut products = [Product { matrix: &down.weight, rows, y: &mut s.experts.input, accumulate: false }];
            matmul(self.pool, self.isa, &s.h, &mut s.q8, &mut products);
            self.lap("matmul_experts_latent");
        }
    }

    /// The experts' sum, as wide as the stream again.
    fn widen_sum(&mut self, up: &PreparedLinear, n_tokens: usize) {
        let s = &mut *self.s;
        if let Some(observer) = &mut self.observer {
            observer(MatrixInput { matrix: &up.name, part: None, x: &s.experts.sum, n_in: up.weight.n_in() });
        }
        resize(&mut s.experts.input, n_tokens * self.spec.n_embd);
        let y = &mut s.experts.input;
        let mut products = [Product { matrix: &up.weight, rows: 0..n_tokens, y, accumulate: false }];
        matmul(self.pool, self.isa, &s.experts.sum, &mut s.q8, &mut products);
        std::mem::swap(&mut s.experts.sum, &mut s.experts.input);
        self.lap("matmul_experts_latent");
    }

    /// `down(activation(gate(x)) * up(x))` of every visit, to `experts.down`.
    fn visit(&mut self, e: &Experts, w: &ExpertsWeights<PreparedLinear>, visits: &[Visit], n_tokens: usize) {
        let (n_in, n_ff, isa) = (e.latent.unwrap_or(self.spec.n_embd), e.expert.n_ff, self.isa);
        let runs: Vec<_> = visits.chunk_by(|a, b| a.expert == b.expert).collect();
        let s = &mut *self.s;
        let input = if e.expert_norms.is_some() || e.latent.is_some() { &s.experts.input } else { &s.h };
        // A single token's row need not be sorted: all its experts read it.
        let one = n_tokens == 1 && !e.router.weight_input;
        if !one {
            resize(&mut s.experts.sorted, visits.len() * n_in);
            for (visit, row) in visits.iter().zip(s.experts.sorted.chunks_exact_mut(n_in)) {
                row.copy_from_slice(&input[visit.token * n_in..][..n_in]);
                if e.router.weight_input {
                    scale_by(row, visit.weight);
                }
            }
        }
        let x: &[f32] = if one { input } else { &s.experts.sorted };
        resize(&mut s.gate, visits.len() * n_ff);
        resize(&mut s.up, if e.expert.gated { visits.len() * n_ff } else { 0 });
        let mut products = Vec::with_capacity(2 * runs.len());
        let (mut gates, mut ups, mut first) = (&mut s.gate[..], &mut s.up[..], 0);
        for run in &runs {
            let weights = &w.experts[run[0].expert];
            let rows = if one { 0..1 } else { first..first + run.len() };
            first += run.len();
            let linears =
                [Some(weights.gate.as_ref().unwrap_or(&weights.up)), weights.gate.as_ref().map(|_| &weights.up)];
            if let Some(observer) = &mut self.observer {
                let x = &x[rows.start * n_in..rows.end * n_in];
                for linear in linears.iter().flatten() {
                    observer(MatrixInput { matrix: &linear.name, part: Some((run[0].expert, e.n_expert)), x, n_in });
                }
            }
            for (linear, y) in linears.into_iter().zip([&mut gates, &mut ups]) {
                let Some(linear) = linear else { continue };
                let y = y.split_off_mut(..run.len() * n_ff).expect("a row for each visit");
                products.push(Product { matrix: &linear.weight, rows: rows.clone(), y, accumulate: false });
            }
        }
        matmul(self.pool, isa, x, &mut s.q8, &mut products);
        self.lap("matmul_experts_gate_up");
        let s = &mut *self.s;
        let activation = e.expert.activation;
        let (gate, up) = (SharedMut::new(&mut s.gate), SharedMut::new(&mut s.up));
        self.pool.for_each_if(visits.len() * n_ff >= MIN_ELEMENTS, visits.len(), &|v| {
            let weights = &w.experts[visits[v].expert];
            // SAFETY: each visit owns its rows.
            let gate = unsafe { gate.slice(v * n_ff, n_ff) };
            add_bias(gate, weights.gate.as_ref().unwrap_or(&weights.up));
            let up = e.expert.gated.then(|| {
                // SAFETY: as above.
                let up = unsafe { up.slice(v * n_ff, n_ff) };
                add_bias(up, &weights.up);
                &*up
            });
            isa.run(Activate { activation, gate, up });
        });
        self.lap("ffn_activation");
        let s = &mut *self.s;
        resize(&mut s.experts.down, visits.len() * n_in);
        let mut products = Vec::with_capacity(runs.len());
        let (mut downs, mut first) = (&mut s.experts.down[..], 0);
        for run in &runs {
            let down = &w.experts[run[0].expert].down;
            let rows = first..first + run.len();
            first += run.len();
            if let Some(observer) = &mut self.observer {
                let x = &s.gate[rows.start * n_ff..rows.end * n_ff];
                observer(MatrixInput { matrix: &down.name, part: Some((run[0].expert, e.n_expert)), x, n_in: n_ff });
            }
            let y = downs.split_off_mut(..run.len() * n_in).expect("a row for each visit");
            products.push(Product { matrix: &down.weight, rows, y, accumulate: false });
        }
        matmul(self.pool, isa, &s.gate, &mut s.q8, &mut products);
        self.lap("matmul_experts_down");
    }

    /// `experts.sum`: of each token the weighted sum of its visits, in the order of the choice.
    fn sum_visits(&mut self, e: &Experts, w: &ExpertsWeights<PreparedLinear>, visits: &[Visit], n_tokens: usize) {
        let n_in = e.latent.unwrap_or(self.spec.n_embd);
        let mut of_token: Vec<Vec<usize>> = vec![Vec::with_capacity(e.n_used); n_tokens];
        for (v, visit) in visits.iter().enumerate() {
            of_token[visit.token].push(v);
        }
        let s = &mut *self.s;
        resize(&mut s.experts.sum, n_tokens * n_in);
        let (down, sum) = (&s.experts.down, SharedMut::new(&mut s.experts.sum));
        self.pool.for_each_if(visits.len() * n_in >= MIN_ELEMENTS, n_tokens, &|t| {
            // SAFETY: each token owns its row.
            let sum = unsafe { sum.slice(t * n_in, n_in) };
            sum.fill(0.0);
            for &v in &of_token[t] {
                let Visit { expert, weight, .. } = visits[v];
                let weight = if e.router.weight_input { 1.0 } else { weight };
                let weight = weight * w.expert_scale.as_ref().map_or(1.0, |scale| scale[expert]);
                let bias = w.experts[expert].down.bias.as_deref();
                for (i, (sum, x)) in sum.iter_mut().zip(&down[v * n_in..][..n_in]).enumerate() {
                    *sum += weight * (x + bias.map_or(0.0, |bias| bias[i]));
                }
            }
        });
    }

    /// Gate and norm of what all tokens went through, in `result`.
    fn weigh_shared(&mut self, e: &Experts, w: &ExpertsWeights<PreparedLinear>) {
        let n_embd = self.spec.n_embd;
        let s = &mut *self.s;
        if let Some(gate) = &w.shared_gate {
            for (h, row) in s.h.chunks_exact(n_embd).zip(s.result.chunks_exact_mut(n_embd)) {
                let dot: f32 = h.iter().zip(gate).map(|(h, g)| h * g).sum();
                let factor = 1.0 / (1.0 + (-dot).exp());
                scale_by(row, factor);
            }
        }
        if let (Some(own), Some([_, _, shared])) = (&e.expert_norms, &w.expert_norms) {
            let Norm { kind, eps, .. } = own.shared_result;
            for row in s.result.chunks_exact_mut(n_embd) {
                let x = row.to_vec();
                normalize_row(self.isa, kind, eps, shared, &x, row);
            }
        }
    }
}
