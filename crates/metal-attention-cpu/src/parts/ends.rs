//! The ends of a model: the token embedding with what is computed once for all layers, and the output norm with the head.

use metal_attention_model::{AssistantWeights, BatchToken, LayerTrace, NormWeights, StateInputWeights};

use crate::forward::{
    MicroBatchOutput, MicroBatchRun, ProductInput, ProductOutput, RopeTable, add, add_bias, normalize, normalize_row,
    resize, scale_by,
};
use crate::kernels::matmul::{MatmulOp, embedding, matmul};
use crate::layers::{PreparedHead, PreparedLinear};
use crate::simd::Isa;

impl MicroBatchRun<'_> {
    /// `x = norm(scale * table[id] + token_types[0] + positions[position])`, with the rows of spans in the place of
    /// `scale * table[id]`, and the further inputs of later layers: the
    /// per-layer embeddings and the other residual streams, in models that have them.
    pub(crate) fn embed(&mut self, tokens: &[BatchToken]) {
        let (spec, weights, n_embd) = (self.spec, self.weights, self.spec.n_embd);
        if let Some(w) = &weights.assistant {
            self.embed_for_assistant(tokens, w);
            return;
        }
        let mut position_row = vec![0.0; if weights.positions.is_some() { n_embd } else { 0 }];
        let positions: Vec<usize> = match weights.positions {
            Some(_) => tokens.iter().map(|token| self.position(token).0[0] as usize).collect(),
            None => vec![0; tokens.len()],
        };
        resize(&mut self.scratch.x, tokens.len() * n_embd);
        for (t, (token, row)) in tokens.iter().zip(self.scratch.x.chunks_exact_mut(n_embd)).enumerate() {
            if let Some((span, i)) = self.inputs.and_then(|inputs| inputs.of_token(token)) {
                row.copy_from_slice(&span.rows[i * n_embd..][..n_embd]);
            } else if let Some(table) = &weights.token_embd {
                embedding(table, token.id as usize, row);
                if spec.embedding.scale != 1.0 {
                    scale_by(row, spec.embedding.scale);
                }
            }
            if let Some(token_type) = &weights.token_type {
                add(row, token_type);
            }
            if let Some(table) = &weights.positions {
                embedding(table, positions[t], &mut position_row);
                add(row, &position_row);
            }
        }
        if let Some(norm) = &weights.embedding_norm {
            self.normalize_x(norm);
        }
        self.record_time("embedding");
        self.read_states();
        self.compute_per_layer_inputs(tokens);
        self.init_streams();
    }

    /// Lets drafters read the tokens' states: see [`StateInput`](metal_attention_model::StateInput). What attention reads of them goes
    /// to `normed`.
    fn read_states(&mut self) {
        let weights = self.weights;
        let Some(w) = &weights.state else { return };
        let (n_embd, isa, states) = (self.spec.n_embd, self.isa, self.token_states);
        let s = &mut *self.scratch;
        let n_tokens = s.x.len() / n_embd;
        let width = self.spec.state_width();
        assert_eq!(states.len(), n_tokens * width, "a session checks that each token has a state");
        match w {
            StateInputWeights::Joined { embedding_norm, state_norm, proj } => {
                resize(&mut s.mixer_out, 2 * s.x.len());
                norm_pairs(isa, (embedding_norm, &s.x), (state_norm, states), n_embd, &mut s.mixer_out);
                self.project(proj, ProductInput::MixerOut, ProductOutput::ReplaceX);
            }
            StateInputWeights::Attended { embedding_norm, state_norm, norms_residual } => {
                resize(&mut s.normed, 2 * s.x.len());
                norm_pairs(isa, (embedding_norm, &s.x), (state_norm, states), n_embd, &mut s.normed);
                if *norms_residual {
                    for (x, pair) in s.x.chunks_exact_mut(n_embd).zip(s.normed.chunks_exact(2 * n_embd)) {
                        x.copy_from_slice(&pair[n_embd..]);
                    }
                } else {
                    s.x.copy_from_slice(states);
                }
            }
            StateInputWeights::Projected { norm, fc } => {
                resize(&mut s.mixer_out, states.len());
                match norm {
                    Some(norm) => normalize(self.pool, isa, norm, states, &mut s.mixer_out),
                    None => s.mixer_out.copy_from_slice(states),
                }
                self.project(fc, ProductInput::MixerOut, ProductOutput::ReplaceX);
            }
        }
        self.record_time("matmul_state");
    }

    /// `x = pre_projection * [scale * target_table[id] | state]`, in assistants.
    fn embed_for_assistant(&mut self, tokens: &[BatchToken], w: &AssistantWeights<PreparedLinear>) {
        let (width, scale, table) = (w.spec.target_width, self.spec.embedding.scale, &self.weights.token_embd);
        let Some(table) = table else { return };
        let s = &mut *self.scratch;
        assert_eq!(self.token_states.len(), tokens.len() * width, "a session checks that each token has a state");
        resize(&mut s.x, tokens.len() * self.spec.n_embd);
        resize(&mut s.mixer_out, 2 * tokens.len() * width);
        let rows = tokens.iter().zip(self.token_states.chunks_exact(width));
        for (joined, (token, state)) in s.mixer_out.chunks_exact_mut(2 * width).zip(rows) {
            let (of_embedding, of_state) = joined.split_at_mut(width);
            embedding(table, token.id as usize, of_embedding);
            scale_by(of_embedding, scale);
            of_state.copy_from_slice(state);
        }
        self.record_time("embedding");
        self.project(&w.pre_projection, ProductInput::MixerOut, ProductOutput::ReplaceX);
        self.record_time("matmul_state");
    }

    /// The states for an assistant's next drafts, `post_projection * normed`, `[n_tokens, target_width]`; `None` unless `trace` is
    /// of them. Precondition: that of [`write_output`](Self::write_output).
    pub(crate) fn next_states(&mut self, trace: &LayerTrace<'_>) -> Option<Vec<f32>> {
        let w = self.weights.assistant.as_ref()?;
        if !trace.before.contains(&(self.spec.n_layer() + 2)) {
            return None;
        }
        self.observe(&[&w.post_projection], ProductInput::Normed);
        let s = &mut *self.scratch;
        let n_tokens = s.normed.len() / self.spec.n_embd;
        let mut states = vec![0.0; n_tokens * w.spec.target_width];
        let matrix = &w.post_projection.weight;
        let mut products = [MatmulOp { matrix, rows: 0..n_tokens, y: &mut states, accumulate: false }];
        matmul(self.pool, self.isa, &s.normed, &mut s.q8, &mut products);
        self.record_time("matmul_state");
        Some(states)
    }

    /// Computes the RoPE cos/sin table of each rotation of the model for the positions of `tokens`.
    pub(crate) fn fill_rope_tables(&mut self, tokens: &[BatchToken]) {
        self.scratch.rope_tables.resize_with(self.weights.rotations.len(), RopeTable::default);
        let positions: Vec<_> = tokens.iter().map(|token| self.position(token)).collect();
        for (table, rotation) in self.scratch.rope_tables.iter_mut().zip(&self.weights.rotations) {
            table.cos.clear();
            table.sin.clear();
            for position in &positions {
                for [cos, sin] in rotation.cos_sin(*position) {
                    table.cos.push(cos);
                    table.sin.push(sin);
                }
            }
        }
        if !self.weights.rotations.is_empty() {
            self.record_time("rope_table");
        }
    }

    /// Adds the spans' deepstack rows of layer `layer` to `x`, after the layer.
    pub(crate) fn add_deepstack(&mut self, layer: usize, tokens: &[BatchToken]) {
        let (Some(inputs), n_embd) = (self.inputs, self.spec.n_embd) else { return };
        for (token, row) in tokens.iter().zip(self.scratch.x.chunks_exact_mut(n_embd)) {
            let Some((span, i)) = inputs.of_token(token) else { continue };
            if let Some(rows) = span.deepstack.get(layer) {
                add(row, &rows[i * n_embd..][..n_embd]);
            }
        }
    }

    /// The output norm of all rows that are left, to `normed`.
    pub(crate) fn normalize_output(&mut self) {
        self.merge_streams();
        self.normalize_x_to_normed(self.weights.output_norm.as_ref());
    }

    /// Writes the output of all rows that are left: the result of the output norm or, for logits, of the output head:
    /// `logits = scale * (W * normed + b)`, with a cap `cap * tanh(logits / cap)`.
    /// Precondition: [`normalize_output`](Self::normalize_output) has computed the norm of these rows.
    pub(crate) fn write_output(&mut self, output: MicroBatchOutput<'_>) {
        match output {
            MicroBatchOutput::Hidden(out) => out.copy_from_slice(&self.scratch.normed),
            MicroBatchOutput::Logits { head: PreparedHead { spec: head, linear, .. }, logits } => {
                self.observe(&[linear], ProductInput::Normed);
                let s = &mut *self.scratch;
                let token_rows = 0..s.normed.len() / self.spec.n_embd;
                let mut products =
                    [MatmulOp { matrix: &linear.weight, rows: token_rows, y: logits, accumulate: false }];
                matmul(self.pool, self.isa, &s.normed, &mut s.q8, &mut products);
                for row in logits.chunks_exact_mut(self.spec.n_vocab) {
                    add_bias(row, linear);
                    if head.scale != 1.0 {
                        scale_by(row, head.scale);
                    }
                    if let Some(cap) = head.soft_cap {
                        for x in row.iter_mut() {
                            *x = cap * (*x / cap).tanh();
                        }
                    }
                }
                self.record_time("matmul_output");
            }
        }
    }
}

/// Writes `[norm_a(a) | norm_b(b)]` of each row of `a` and `b`, `[n_tokens, n_embd]`, to `out`, `[n_tokens, 2 * n_embd]`.
fn norm_pairs(
    isa: Isa,
    (norm_a, a): (&NormWeights, &[f32]),
    (norm_b, b): (&NormWeights, &[f32]),
    n_embd: usize,
    out: &mut [f32],
) {
    let rows = a.chunks_exact(n_embd).zip(b.chunks_exact(n_embd));
    for (pair, (a, b)) in out.chunks_exact_mut(2 * n_embd).zip(rows) {
        let (of_a, of_b) = pair.split_at_mut(n_embd);
        normalize_row(isa, norm_a, a, of_a);
        normalize_row(isa, norm_b, b, of_b);
    }
}
