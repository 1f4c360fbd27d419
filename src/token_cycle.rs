//! Weights with which the next token of a model is known, for measuring speculation with models that were not trained.
//!
//! Each token has a random vector. The embedding table has it as the token's row, the layers change it little, and the output
//! matrix has it as the row of the token that follows: that row's logit is the highest by far. A draft model has the vectors of
//! other tokens in some rows of the embedding table, and follows the model everywhere else. So has a prediction head, in a table
//! of its own; it passes the token's embedding on to its layer, and multiplies the model's state by zeros.

use metal_attention::Error;
use metal_attention::gguf::Metadata;
use metal_attention::tokenizer::{Tokenizer, TokenizerOptions};

use crate::cli_error::CliError;
use crate::random_weights::RandomWeights;

/// The value of `tokenizer.ggml.token_type` of ordinary tokens.
pub const TOKEN_NORMAL: i32 = 1;

/// The factor of the weights from which layers add to the residual stream.
pub const OF_LAYERS: f32 = 1.0 / 64.0;

/// The logit of the next token, about. That of another one is random, with a standard deviation of this by the square root of the
/// model's width.
const LOGIT: f32 = 20.0;

/// The order of tokens: after each ordinary token of the vocabulary comes the next one, after the last one the first.
pub struct TokenCycle {
    /// The ordinary tokens, ascending.
    members: Vec<u32>,
    /// For each of them, whether the drafter chooses the token that follows in the order.
    agrees: Vec<bool>,
    /// Whether the drafter is a prediction head, and not the model.
    heads: bool,
}

impl TokenCycle {
    /// The order of the vocabulary in `metadata`, which the model follows after the part `agree` of the tokens; with `heads` the
    /// model follows it after all of them, and its prediction heads after that part.
    pub fn new(metadata: &Metadata, agree: f64, heads: bool) -> Result<Self, CliError> {
        let tokenizer = Tokenizer::from_metadata(metadata, &TokenizerOptions::default()).map_err(Error::from)?;
        let types = metadata.i32s("tokenizer.ggml.token_type").map_err(Error::from)?;
        let normal = |id: u32| types.as_ref().is_none_or(|types| types.get(id as usize) == Some(&TOKEN_NORMAL));
        let has_text = |id| std::str::from_utf8(tokenizer.token_bytes(id)).is_ok_and(|text| !text.is_empty());
        let is_member = |&id: &u32| normal(id) && has_text(id) && !tokenizer.is_end_of_generation(id);
        let members: Vec<u32> = (0..tokenizer.n_vocab() as u32).filter(is_member).collect();
        let n = members.len();
        if n < 3 {
            return Err(CliError::Usage(format!(
                "--mtp-agree needs ordinary tokens that follow each other, and the vocabulary has {n}: give another one with --vocab"
            )));
        }
        // Those that disagree are spread at random, in the same way for each model.
        let mut order: Vec<usize> = (0..n).collect();
        order.sort_by_key(|&i| RandomWeights::new(0, i).next());
        let n_agree = (agree * n as f64).round() as usize;
        let mut agrees = vec![false; n];
        order.iter().take(n_agree).for_each(|&i| agrees[i] = true);
        Ok(Self { members, agrees, heads })
    }

    /// The place of a token in the order. Tokens that are not in it have that of one that is.
    fn place(&self, id: usize) -> usize {
        self.members.binary_search(&(id as u32)).unwrap_or(id % self.members.len())
    }

    /// The token whose vector is the row of token `id` in the embedding table, of the drafter or of a model that always agrees.
    fn embedded(&self, id: usize, drafts: bool) -> usize {
        let (n, place) = (self.members.len(), self.place(id));
        let place = if !drafts || self.agrees[place] { place } else { (place + n / 2) % n };
        self.members[place] as usize
    }

    /// The token whose vector is the row of token `id` in the output matrix.
    fn before(&self, id: usize) -> usize {
        match self.members.binary_search(&(id as u32)) {
            Ok(place) => self.members[place.checked_sub(1).unwrap_or(self.members.len() - 1)] as usize,
            // No row of the embedding table.
            Err(_) => id,
        }
    }
}

/// What the rows of a tensor are.
#[derive(Clone, Copy)]
enum Rows {
    /// The embedding table, of the drafter or of a model that always agrees.
    Embedding { drafts: bool },
    /// The output matrix.
    Output,
    /// What joins a token's embedding with the state in a prediction head: the unit matrix and zeros.
    FirstHalf,
}

/// The rows of a tensor: the vectors of tokens.
pub struct TokenRows<'a> {
    cycle: &'a TokenCycle,
    rows: Rows,
    /// The length of a row.
    n_row: usize,
    /// The generator of the vectors, before that of token 0.
    generator: RandomWeights,
}

impl<'a> TokenRows<'a> {
    /// The rows of the tensor `name` with rows of `n_row` elements, in a model made from `seed`; `None` for other tensors than
    /// embedding tables, the output matrix, and those that join tokens with states.
    pub fn of(cycle: &'a TokenCycle, name: &str, n_row: usize, seed: u64) -> Option<Self> {
        let rows = match name {
            "token_embd.weight" => Rows::Embedding { drafts: !cycle.heads },
            "output.weight" => Rows::Output,
            _ if name.ends_with("nextn.embed_tokens.weight") => Rows::Embedding { drafts: true },
            _ if name.ends_with("nextn.eh_proj.weight") => Rows::FirstHalf,
            _ => return None,
        };
        Some(Self { cycle, rows, n_row, generator: RandomWeights::new(seed, usize::MAX) })
    }

    /// Fills `out` with the elements from number `from` on.
    pub fn fill(&self, from: usize, out: &mut [f32]) {
        let mut done = 0;
        while done < out.len() {
            let (row, column) = ((from + done) / self.n_row, (from + done) % self.n_row);
            let n = (self.n_row - column).min(out.len() - done);
            let out = &mut out[done..done + n];
            let vector = |token: usize| self.generator.clone().skip(token * self.n_row + column);
            match self.rows {
                Rows::Embedding { drafts } => vector(self.cycle.embedded(row, drafts)).fill(out, 0.0, 1.0),
                Rows::Output => vector(self.cycle.before(row)).fill(out, 0.0, LOGIT / self.n_row as f32),
                Rows::FirstHalf => {
                    out.fill(0.0);
                    if let Some(one) = row.checked_sub(column).and_then(|i| out.get_mut(i)) {
                        *one = 1.0;
                    }
                }
            }
            done += n;
        }
    }
}

/// Whether a layer adds the results of this tensor to the residual stream, directly or by way of one more norm.
pub fn adds_to_residual_stream(tensor: &str) -> bool {
    const MATRICES: [&str; 6] =
        ["attn_output", "ffn_down", "ssm_out", "shortconv.out_proj", "time_mix_output", "channel_mix_value"];
    const NORMS: [&str; 5] =
        ["post_attention_norm", "post_ffw_norm", "attn_output_norm", "layer_output_norm", "post_norm"];
    let Some((_, role)) = tensor.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) else { return false };
    role.ends_with(".weight") && MATRICES.iter().chain(&NORMS).any(|part| role.starts_with(part))
}
