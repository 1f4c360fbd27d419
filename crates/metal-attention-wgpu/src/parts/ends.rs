//! The two ends of the forward pass: token embeddings before the first layer; the last norm and logits after the last
//! one.

use metal_attention_gguf::Tensor;
use metal_attention_model::{AssistantWeights, InputEmbedding, OutputHead, StateInputWeights, Weights};
use wgpu::Buffer;

use crate::kernels::{self, MatvecOutput, NormColumns, NormShape, ScaleShape, TokenRows};
use crate::plan::{LinearProduct, PlanBuilder};
use crate::weights::{Uploads, WgpuLinear, WgpuNorm, concat};
use crate::{Dispatch, WgpuDevice, WgpuError, WgpuMatrix};

/// The embedding, the last norm and the output head, with their weights.
#[derive(Debug)]
pub(crate) struct WgpuEnds {
    /// The embedding table, `[n_vocab, n_embd]`; `None` if no tokens are read.
    token_embd: Option<WgpuMatrix>,
    /// Factor on the rows of the embedding table.
    embedding_scale: f32,
    /// Embedding of token type 0, added to every embedding, `[n_embd]`.
    token_type: Option<Buffer>,
    /// Learned position embeddings, F32 `[n, n_embd]`, and their number `n`.
    positions: Option<(Buffer, usize)>,
    /// The norm of the sum of embeddings.
    embedding_norm: Option<WgpuNorm>,
    /// What reads states (drafters).
    state: Option<WgpuStateInput>,
    /// What leads from the target model to an assistant and back.
    assistant: Option<WgpuAssistantEnds>,
    /// The norm after the last layer.
    output_norm: Option<WgpuNorm>,
    /// The output head, unless it is the embedding table.
    output: Option<WgpuMatrix>,
    /// Added to the logits, `[n_vocab]`.
    output_bias: Option<Buffer>,
    /// The embedding table and the output head, each with its tensor: a second model may share them.
    pub(crate) matrices: Vec<(Tensor, WgpuMatrix)>,
}

/// The weights that read states: those of a [`StateInput`](metal_attention_model::StateInput).
#[derive(Debug)]
enum WgpuStateInput {
    /// The normed embedding and the normed state, `proj`, `[n_embd, 2 * n_embd]`, times which is the input of the first layer.
    Joined { embedding_norm: WgpuNorm, state_norm: WgpuNorm, proj: WgpuLinear },
    /// The normed embedding and the normed state, which attention reads beside each other.
    Attended { embedding_norm: WgpuNorm, state_norm: WgpuNorm, norms_residual: bool },
    /// The state, `fc`, `[n_embd, width]`, times which is the residual stream.
    Projected { norm: Option<WgpuNorm>, fc: WgpuLinear },
}

impl WgpuStateInput {
    /// Uploads the weights.
    fn new(gpu: &WgpuDevice, w: &StateInputWeights, uploads: &mut Uploads) -> Result<Self, WgpuError> {
        Ok(match w {
            StateInputWeights::Joined { embedding_norm, state_norm, proj } => Self::Joined {
                embedding_norm: WgpuNorm::new(gpu, embedding_norm)?,
                state_norm: WgpuNorm::new(gpu, state_norm)?,
                proj: concat(gpu, "the projection of states", &[proj], uploads)?,
            },
            StateInputWeights::Attended { embedding_norm, state_norm, norms_residual } => Self::Attended {
                embedding_norm: WgpuNorm::new(gpu, embedding_norm)?,
                state_norm: WgpuNorm::new(gpu, state_norm)?,
                norms_residual: *norms_residual,
            },
            StateInputWeights::Projected { norm, fc } => Self::Projected {
                norm: norm.as_ref().map(|norm| WgpuNorm::new(gpu, norm)).transpose()?,
                fc: concat(gpu, "the projection of states", &[fc], uploads)?,
            },
        })
    }
}

/// The weights between an assistant and its target model.
#[derive(Debug)]
struct WgpuAssistantEnds {
    /// Width of the target's residual stream.
    width: usize,
    /// From the target's embedding and the state to the input of the first layer, `[n_embd, 2 * width]`.
    pre_projection: WgpuLinear,
    /// From the result of the output norm to the next state, `[width, n_embd]`.
    post_projection: WgpuLinear,
}

impl WgpuEnds {
    /// Uploads the weights. The output head comes first, since an idle GPU is kept awake by products of it while the
    /// others are uploaded. `first`: the [`matrices`](Self::matrices) of another model on `gpu`, which are shared where they are
    /// the same.
    pub(crate) fn new(
        gpu: &WgpuDevice,
        spec: &InputEmbedding,
        w: &Weights,
        uploads: &mut Uploads,
        first: &[(Tensor, WgpuMatrix)],
    ) -> Result<Self, WgpuError> {
        // The other fields are those of the weights.
        let InputEmbedding {
            scale,
            n_token_types: _,
            n_positions: _,
            norm: _,
            per_layer: _,
            streams: _,
            state: _,
            n_rows: _,
            assistant: _,
        } = *spec;
        let mut matrices = Vec::new();
        let mut matrix = |what: &str, tensor: &Tensor| {
            let matrix = match first.iter().find(|(of_first, _)| of_first.is_same(tensor)) {
                Some((_, matrix)) => matrix.clone(),
                None => uploads.concat(gpu, what, &[tensor])?,
            };
            matrices.push((tensor.clone(), matrix.clone()));
            Ok::<_, WgpuError>(matrix)
        };
        let output = w.own_head().map(|head| matrix("the output head", &head.weight)).transpose()?;
        let token_embd = w.token_embd.as_ref().map(|table| matrix("the embedding table", &table.weight)).transpose()?;
        let positions = match &w.positions {
            Some(table) => Some((gpu.upload("positions", &table.weight.to_f32())?, table.weight.n_rows())),
            None => None,
        };
        let state = w.state.as_ref().map(|state| WgpuStateInput::new(gpu, state, uploads)).transpose()?;
        let assistant = match &w.assistant {
            Some(AssistantWeights { spec, pre_projection, post_projection }) => Some(WgpuAssistantEnds {
                width: spec.target_width,
                pre_projection: concat(gpu, "the projection from the target", &[pre_projection], uploads)?,
                post_projection: concat(gpu, "the projection to the target", &[post_projection], uploads)?,
            }),
            None => None,
        };
        let output_bias = w.output.as_ref().and_then(|linear| linear.bias.as_ref());
        Ok(Self {
            token_embd,
            embedding_scale: scale,
            token_type: w.token_type.as_ref().map(|row| gpu.upload("the token type", row)).transpose()?,
            positions,
            embedding_norm: w.embedding_norm.as_ref().map(|norm| WgpuNorm::new(gpu, norm)).transpose()?,
            state,
            assistant,
            output_norm: w.output_norm.as_ref().map(|norm| WgpuNorm::new(gpu, norm)).transpose()?,
            output,
            output_bias: output_bias.map(|bias| gpu.upload("a bias", bias)).transpose()?,
            matrices,
        })
    }
}

/// The factor and the cap on the logits, if they are more than a product.
fn scaled_logits(head: &OutputHead) -> Option<(f32, Option<f32>)> {
    let OutputHead { scale, soft_cap, matrix: _, may_have_bias: _ } = *head;
    (scale != 1.0 || soft_cap.is_some()).then_some((scale, soft_cap))
}

impl PlanBuilder<'_> {
    /// The dispatches before the first layer: `x = norm(scale * table[id] + types[0] + positions[position])`, then the
    /// per-layer embeddings and residual streams of models that have them. Of an input that is an embedding row, `x` has
    /// `scale * table[id]` already.
    pub(crate) fn embedding(&self) -> Result<Vec<Dispatch>, WgpuError> {
        let (scratch, w) = (self.scratch, &self.weights.ends);
        if let (Some(assistant), Some(table)) = (&w.assistant, &w.token_embd) {
            return self.embedding_of_assistant(assistant, table);
        }
        let mut dispatches = match &w.token_embd {
            Some(table) => kernels::embedding(self.gpu, table, &scratch.x, true, self.batch)?,
            None => Vec::new(),
        };
        let positions = w.positions.as_ref().map(|(table, n)| (table, *n));
        if w.embedding_scale != 1.0 || w.token_type.is_some() || positions.is_some() {
            let (n, types) = (self.spec.n_embd, w.token_type.as_ref());
            dispatches.push(kernels::embedding_sum(
                self.gpu,
                n,
                w.embedding_scale,
                &scratch.x,
                types,
                positions,
                self.batch,
            )?);
        }
        if let Some(norm) = &w.embedding_norm {
            dispatches.push(self.norm(norm, NormShape::of_row(norm.n), None, &scratch.x)?);
        }
        if let Some(state) = &w.state {
            self.read_states(&mut dispatches, state)?;
        }
        self.embed_for_layers(&mut dispatches)?;
        self.spread_over_streams(&mut dispatches)?;
        Ok(dispatches)
    }

    /// The dispatches before the first layer of an assistant: `x = pre_projection * [scale * target_table[id] | state]`.
    fn embedding_of_assistant(&self, w: &WgpuAssistantEnds, table: &WgpuMatrix) -> Result<Vec<Dispatch>, WgpuError> {
        let (scratch, width) = (self.scratch, w.width);
        let mut dispatches = kernels::embedding(self.gpu, table, &scratch.target_rows, false, self.batch)?;
        let scale = self.weights.ends.embedding_scale;
        for (rows, at, scale) in [(&scratch.target_rows, 0, scale), (&scratch.states, width, 1.0)] {
            let columns = Some(NormColumns { at, y_width: 2 * width });
            let shape = NormShape { scale, columns, ..NormShape::of_row(width) };
            dispatches.push(kernels::norm(self.gpu, shape, Some(rows), None, &scratch.joined, self.batch)?);
        }
        let product = LinearProduct::new(&w.pre_projection, MatvecOutput::Store, &scratch.joined, &scratch.x);
        self.multiply(&mut dispatches, product)?;
        Ok(dispatches)
    }

    /// The dispatches behind the last layer of an assistant that compute the states for the next drafts, in `target_rows`; empty in
    /// other models.
    pub(crate) fn next_states(&self) -> Result<Vec<Dispatch>, WgpuError> {
        let Some(w) = &self.weights.ends.assistant else { return Ok(Vec::new()) };
        let mut dispatches = self.hidden(false)?;
        let (normed, states) = (&self.scratch.normed, &self.scratch.target_rows);
        self.multiply(&mut dispatches, LinearProduct::new(&w.post_projection, MatvecOutput::Store, normed, states))?;
        Ok(dispatches)
    }

    /// Appends what reads the states: `x` as [`StateInput`](metal_attention_model::StateInput) says, and in `joined` what attention
    /// reads beside each other.
    fn read_states(&self, dispatches: &mut Vec<Dispatch>, w: &WgpuStateInput) -> Result<(), WgpuError> {
        let (scratch, n) = (self.scratch, self.spec.n_embd);
        match w {
            WgpuStateInput::Joined { embedding_norm, state_norm, proj } => {
                self.norm_pairs(dispatches, embedding_norm, state_norm)?;
                let product = LinearProduct::new(proj, MatvecOutput::Store, &scratch.joined, &scratch.x);
                self.multiply(dispatches, product)
            }
            WgpuStateInput::Attended { embedding_norm, state_norm, norms_residual } => {
                self.norm_pairs(dispatches, embedding_norm, state_norm)?;
                let shape = NormShape::of_row(n);
                dispatches.push(if *norms_residual {
                    self.norm(state_norm, shape, Some(&scratch.states), &scratch.x)?
                } else {
                    kernels::norm(self.gpu, shape, Some(&scratch.states), None, &scratch.x, self.batch)?
                });
                Ok(())
            }
            WgpuStateInput::Projected { norm, fc } => {
                let input = match norm {
                    Some(norm) => {
                        let shape = NormShape::of_row(norm.n);
                        dispatches.push(self.norm(norm, shape, Some(&scratch.states), &scratch.joined)?);
                        &scratch.joined
                    }
                    None => &scratch.states,
                };
                self.multiply(dispatches, LinearProduct::new(fc, MatvecOutput::Store, input, &scratch.x))
            }
        }
    }

    /// Appends `joined = [embedding_norm(x) | state_norm(state)]`.
    fn norm_pairs(
        &self,
        dispatches: &mut Vec<Dispatch>,
        embedding_norm: &WgpuNorm,
        state_norm: &WgpuNorm,
    ) -> Result<(), WgpuError> {
        let (scratch, n) = (self.scratch, self.spec.n_embd);
        let columns = |at| Some(NormColumns { at, y_width: 2 * n });
        for (norm, rows, at) in [(embedding_norm, &scratch.x, 0), (state_norm, &scratch.states, n)] {
            let shape = NormShape { columns: columns(at), ..NormShape::of_row(n) };
            dispatches.push(self.norm(norm, shape, Some(rows), &scratch.joined)?);
        }
        Ok(())
    }

    /// The dispatches between the last layer and the last norm: `x` from the residual streams of models that have several.
    pub(crate) fn merge_streams(&self) -> Result<Vec<Dispatch>, WgpuError> {
        let mut dispatches = Vec::new();
        self.join_streams(&mut dispatches)?;
        Ok(dispatches)
    }

    /// The hidden vectors after the last norm, of output tokens, `normed` as `[n_outputs, n_embd]`, or of all, `[n_tokens, n_embd]`.
    pub(crate) fn hidden(&self, outputs_only: bool) -> Result<Vec<Dispatch>, WgpuError> {
        let scratch = self.scratch;
        let shape = NormShape { outputs_only, ..NormShape::of_row(self.spec.n_embd) };
        let norm = match &self.weights.ends.output_norm {
            Some(norm) => self.norm(norm, shape, Some(&scratch.x), &scratch.normed)?,
            None => kernels::norm(self.gpu, shape, Some(&scratch.x), None, &scratch.normed, self.batch)?,
        };
        Ok(vec![norm])
    }

    /// The logits of output tokens: `logits`, `[n_outputs, n_vocab]`. Empty for a model without an output head.
    pub(crate) fn head(&self) -> Result<Vec<Dispatch>, WgpuError> {
        let (scratch, w) = (self.scratch, &self.weights.ends);
        let matrix = w.output.as_ref().or(w.token_embd.as_ref());
        let Some((head, matrix)) = self.spec.output.head.as_ref().zip(matrix) else { return Ok(Vec::new()) };
        let mut dispatches = Vec::new();
        let logits = LinearProduct {
            linear: (matrix, w.output_bias.as_ref()),
            output: MatvecOutput::Store,
            rows: TokenRows::Outputs,
            x: &scratch.x,
            y: &scratch.logits,
        };
        match &w.output_norm {
            Some(norm) if norm.fits_prologue() => self.norm_then_multiply(&mut dispatches, norm, logits)?,
            Some(_) | None => {
                dispatches = self.hidden(true)?;
                self.multiply(
                    &mut dispatches,
                    LinearProduct { rows: TokenRows::Gathered, x: &scratch.normed, ..logits },
                )?;
            }
        }
        if let Some((scale, soft_cap)) = scaled_logits(head) {
            let shape = ScaleShape { n: self.spec.n_vocab, scale, soft_cap, outputs_only: true };
            dispatches.push(kernels::scale(self.gpu, shape, &scratch.logits)?);
        }
        Ok(dispatches)
    }
}
