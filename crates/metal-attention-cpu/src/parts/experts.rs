//! Mixtures of experts: the router assigns each token to a few experts; the result is the weighted sum of these, plus a shared
//! expert where the model has one.
//!
//! The assignments of a micro-batch are sorted by expert, so that the weights of each chosen expert are read once (a grouped
//! GEMM) and those of the others not at all.

use metal_attention_model::ExpertsWeights;

use crate::forward::{
    MIN_PARALLEL_ELEMENTS, MicroBatchRun, ProductInput, ProductOutput, add, add_bias, normalize, normalize_row, resize,
    scale_by,
};
use crate::kernels::elementwise::{Activate, RmsNorm};
use crate::kernels::matmul::{MatmulOp, matmul};
use crate::layers::PreparedLinear;
use crate::observer::MatrixInput;
use crate::shared::SharedMut;

/// Buffers of a mixture of experts. The experts' width is `n_embd`, or `latent` where the model projects their input to
/// fewer elements.
#[derive(Default)]
pub(crate) struct ExpertScratch {
    /// The router's products, `[n_tokens, n_expert]`.
    scores: Vec<f32>,
    /// The input of the router, then of the experts, where that is not `normed`, `[n_tokens, n_embd]` or `[n_tokens, width]`;
    /// also the target of the norm or projection of `sum`.
    input: Vec<f32>,
    /// The input rows of all assignments, sorted by expert, `[n_tokens * n_used, width]`.
    sorted: Vec<f32>,
    /// The down projection of all assignments, `[n_tokens * n_used, width]`.
    down: Vec<f32>,
    /// The weighted sum of each token's experts, `[n_tokens, width]`, later `[n_tokens, n_embd]`.
    sum: Vec<f32>,
}

impl ExpertScratch {
    /// Bytes of all buffers.
    pub(crate) fn bytes(&self) -> usize {
        let all = [&self.scores, &self.input, &self.sorted, &self.down, &self.sum];
        all.iter().map(|v| 4 * v.capacity()).sum()
    }
}

/// One token's use of one expert.
#[derive(Clone, Copy)]
struct Assignment {
    /// The token's row in the micro-batch.
    token: usize,
    /// The expert's index.
    expert: usize,
    /// The router's weight of the expert's result.
    weight: f32,
}

impl MicroBatchRun<'_> {
    /// The mixture of experts of `normed`, plus the shared expert, to `up`, `[n_tokens, n_embd]`. Uses `branch_out`.
    pub(crate) fn experts(&mut self, w: &ExpertsWeights<PreparedLinear>) {
        let n_tokens = self.scratch.x.len() / self.spec.n_embd;
        let mut assignments = self.route(w, n_tokens);
        // The sort is stable, so each token's experts are summed up in a fixed order whatever the batch contains.
        assignments.sort_by_key(|assignment| assignment.expert);
        self.expert_input(w);
        self.evaluate_experts(w, &assignments, n_tokens);
        self.sum_assignments(w, &assignments, n_tokens);
        if let Some([_, result, _]) = &w.expert_norms {
            let s = &mut *self.scratch;
            s.experts.input.resize(s.experts.sum.len(), 0.0);
            normalize(self.pool, self.isa, result, &s.experts.sum, &mut s.experts.input);
            std::mem::swap(&mut s.experts.sum, &mut s.experts.input);
        }
        if let Some([_, up]) = &w.latent {
            self.widen_sum(up, n_tokens);
        }
        if let Some(shared) = &w.shared {
            self.dense(shared);
            self.project(&shared.down, ProductInput::Hidden, ProductOutput::ReplaceBranchOut);
            self.record_time("matmul_down");
            self.scale_shared(w);
            let s = &mut *self.scratch;
            add(&mut s.experts.sum, &s.branch_out);
        }
        let s = &mut *self.scratch;
        std::mem::swap(&mut s.up, &mut s.experts.sum);
        self.record_time("experts_sum");
    }

    /// Chooses the experts of each token; assignments in the order of tokens, and of a token in the order of its choices.
    fn route(&mut self, w: &ExpertsWeights<PreparedLinear>, n_tokens: usize) -> Vec<Assignment> {
        let (e, n_embd) = (&w.spec, self.spec.n_embd);
        let s = &mut *self.scratch;
        if let (Some(own), Some(factors)) = (&e.expert_norms, &w.router_scale) {
            // The router's input is rms(x) / sqrt(n_embd) * scale.
            let factor = 1.0 / (n_embd as f32).sqrt();
            let weight: Vec<f32> = factors.iter().map(|s| s * factor).collect();
            resize(&mut s.experts.input, s.x.len());
            for (x, out) in s.x.chunks_exact(n_embd).zip(s.experts.input.chunks_exact_mut(n_embd)) {
                self.isa.run(RmsNorm { x, weight: &weight, eps: own.router_eps, out });
            }
        }
        let input = if w.router_scale.is_some() { &s.experts.input } else { &s.normed };
        if let Some(observer) = &mut self.observer {
            observer(MatrixInput { matrix: &w.router.name, sub_matrix: None, x: input, n_in: n_embd });
        }
        resize(&mut s.experts.scores, n_tokens * e.n_expert);
        let mut products =
            [MatmulOp { matrix: &w.router.weight, rows: 0..n_tokens, y: &mut s.experts.scores, accumulate: false }];
        matmul(self.pool, self.isa, input, &mut s.q8, &mut products);
        let mut assignments = Vec::with_capacity(n_tokens * e.n_used);
        for (token, scores) in s.experts.scores.chunks_exact_mut(e.n_expert).enumerate() {
            add_bias(scores, &w.router);
            let chosen = e.router.choose(scores, w.choice_bias.as_deref(), e.n_used);
            assignments.extend(chosen.into_iter().map(|(expert, weight)| Assignment { token, expert, weight }));
        }
        self.record_time("router");
        assignments
    }

    /// Writes the experts' input to `experts.input` where it is not `normed`: `x` with a norm of its own, or the projection of
    /// `normed` to the experts' width.
    fn expert_input(&mut self, w: &ExpertsWeights<PreparedLinear>) {
        if let Some([input, _, _]) = &w.expert_norms {
            let s = &mut *self.scratch;
            normalize(self.pool, self.isa, input, &s.x, &mut s.experts.input);
        }
        if let Some([down, _]) = &w.latent {
            self.observe(&[down], ProductInput::Normed);
            let s = &mut *self.scratch;
            let rows = 0..s.normed.len() / self.spec.n_embd;
            resize(&mut s.experts.input, rows.len() * down.weight.n_out());
            let mut products = [MatmulOp { matrix: &down.weight, rows, y: &mut s.experts.input, accumulate: false }];
            matmul(self.pool, self.isa, &s.normed, &mut s.q8, &mut products);
            self.record_time("matmul_experts_latent");
        }
    }

    /// Projects the experts' sum back to `n_embd` elements.
    fn widen_sum(&mut self, up: &PreparedLinear, n_tokens: usize) {
        let s = &mut *self.scratch;
        if let Some(observer) = &mut self.observer {
            observer(MatrixInput { matrix: &up.name, sub_matrix: None, x: &s.experts.sum, n_in: up.weight.n_in() });
        }
        resize(&mut s.experts.input, n_tokens * self.spec.n_embd);
        let y = &mut s.experts.input;
        let mut products = [MatmulOp { matrix: &up.weight, rows: 0..n_tokens, y, accumulate: false }];
        matmul(self.pool, self.isa, &s.experts.sum, &mut s.q8, &mut products);
        std::mem::swap(&mut s.experts.sum, &mut s.experts.input);
        self.record_time("matmul_experts_latent");
    }

    /// `down(activation(gate(x)) * up(x))` of every assignment, to `experts.down`. `assignments` are sorted by expert.
    fn evaluate_experts(&mut self, w: &ExpertsWeights<PreparedLinear>, assignments: &[Assignment], n_tokens: usize) {
        let e = &w.spec;
        let (n_in, n_ff, isa) = (e.latent.unwrap_or(self.spec.n_embd), e.expert.n_ff, self.isa);
        let runs: Vec<_> = assignments.chunk_by(|a, b| a.expert == b.expert).collect();
        let s = &mut *self.scratch;
        let input = if e.expert_norms.is_some() || e.latent.is_some() { &s.experts.input } else { &s.normed };
        // All experts of a single token read the same row, so none has to be copied.
        let one = n_tokens == 1 && !e.router.weights_inputs;
        if !one {
            resize(&mut s.experts.sorted, assignments.len() * n_in);
            for (assignment, row) in assignments.iter().zip(s.experts.sorted.chunks_exact_mut(n_in)) {
                row.copy_from_slice(&input[assignment.token * n_in..][..n_in]);
                if e.router.weights_inputs {
                    scale_by(row, assignment.weight);
                }
            }
        }
        let x: &[f32] = if one { input } else { &s.experts.sorted };
        resize(&mut s.gate_or_hidden, assignments.len() * n_ff);
        resize(&mut s.up, if e.expert.gated { assignments.len() * n_ff } else { 0 });
        let mut products = Vec::with_capacity(2 * runs.len());
        let (mut gates, mut ups, mut first) = (&mut s.gate_or_hidden[..], &mut s.up[..], 0);
        for run in &runs {
            let weights = &w.experts[run[0].expert];
            let rows = if one { 0..1 } else { first..first + run.len() };
            first += run.len();
            let linears =
                [Some(weights.gate.as_ref().unwrap_or(&weights.up)), weights.gate.as_ref().map(|_| &weights.up)];
            if let Some(observer) = &mut self.observer {
                let x = &x[rows.start * n_in..rows.end * n_in];
                for linear in linears.iter().flatten() {
                    observer(MatrixInput {
                        matrix: &linear.name,
                        sub_matrix: Some((run[0].expert, e.n_expert)),
                        x,
                        n_in,
                    });
                }
            }
            for (linear, y) in linears.into_iter().zip([&mut gates, &mut ups]) {
                let Some(linear) = linear else { continue };
                let y = y.split_off_mut(..run.len() * n_ff).expect("a row for each assignment");
                products.push(MatmulOp { matrix: &linear.weight, rows: rows.clone(), y, accumulate: false });
            }
        }
        matmul(self.pool, isa, x, &mut s.q8, &mut products);
        self.record_time("matmul_experts_gate_up");
        let s = &mut *self.scratch;
        let activation = e.expert.activation;
        let (gate, up) = (SharedMut::new(&mut s.gate_or_hidden), SharedMut::new(&mut s.up));
        self.pool.for_each_if(assignments.len() * n_ff >= MIN_PARALLEL_ELEMENTS, assignments.len(), &|v| {
            let weights = &w.experts[assignments[v].expert];
            // SAFETY: each assignment owns its rows.
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
        self.record_time("ffn_activation");
        let s = &mut *self.scratch;
        resize(&mut s.experts.down, assignments.len() * n_in);
        let mut products = Vec::with_capacity(runs.len());
        let (mut downs, mut first) = (&mut s.experts.down[..], 0);
        for run in &runs {
            let down = &w.experts[run[0].expert].down;
            let rows = first..first + run.len();
            first += run.len();
            if let Some(observer) = &mut self.observer {
                let x = &s.gate_or_hidden[rows.start * n_ff..rows.end * n_ff];
                observer(MatrixInput {
                    matrix: &down.name,
                    sub_matrix: Some((run[0].expert, e.n_expert)),
                    x,
                    n_in: n_ff,
                });
            }
            let y = downs.split_off_mut(..run.len() * n_in).expect("a row for each assignment");
            products.push(MatmulOp { matrix: &down.weight, rows, y, accumulate: false });
        }
        matmul(self.pool, isa, &s.gate_or_hidden, &mut s.q8, &mut products);
        self.record_time("matmul_experts_down");
    }

    /// `experts.sum`: the weighted sum of each token's assignments.
    fn sum_assignments(&mut self, w: &ExpertsWeights<PreparedLinear>, assignments: &[Assignment], n_tokens: usize) {
        let e = &w.spec;
        let n_in = e.latent.unwrap_or(self.spec.n_embd);
        let mut of_token: Vec<Vec<usize>> = vec![Vec::with_capacity(e.n_used); n_tokens];
        for (v, assignment) in assignments.iter().enumerate() {
            of_token[assignment.token].push(v);
        }
        let s = &mut *self.scratch;
        resize(&mut s.experts.sum, n_tokens * n_in);
        let (down, sum) = (&s.experts.down, SharedMut::new(&mut s.experts.sum));
        self.pool.for_each_if(assignments.len() * n_in >= MIN_PARALLEL_ELEMENTS, n_tokens, &|t| {
            // SAFETY: each token owns its row.
            let sum = unsafe { sum.slice(t * n_in, n_in) };
            sum.fill(0.0);
            for &v in &of_token[t] {
                let Assignment { expert, weight, .. } = assignments[v];
                let weight = if e.router.weights_inputs { 1.0 } else { weight };
                let weight = weight * w.expert_scale.as_ref().map_or(1.0, |scale| scale[expert]);
                let bias = w.experts[expert].down.bias.as_deref();
                for (i, (sum, x)) in sum.iter_mut().zip(&down[v * n_in..][..n_in]).enumerate() {
                    *sum += weight * (x + bias.map_or(0.0, |bias| bias[i]));
                }
            }
        });
    }

    /// Applies the gate and the norm of the shared expert to its result in `branch_out`.
    fn scale_shared(&mut self, w: &ExpertsWeights<PreparedLinear>) {
        let n_embd = self.spec.n_embd;
        let s = &mut *self.scratch;
        if let Some(gate) = &w.shared_gate {
            for (h, row) in s.normed.chunks_exact(n_embd).zip(s.branch_out.chunks_exact_mut(n_embd)) {
                let dot: f32 = h.iter().zip(gate).map(|(h, g)| h * g).sum();
                let factor = 1.0 / (1.0 + (-dot).exp());
                scale_by(row, factor);
            }
        }
        if let Some([_, _, shared]) = &w.expert_norms {
            for row in s.branch_out.chunks_exact_mut(n_embd) {
                let x = row.to_vec();
                normalize_row(self.isa, shared, &x, row);
            }
        }
    }
}
