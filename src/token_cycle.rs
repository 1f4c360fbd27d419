//! Weights with which the next token of a model is known, for measuring speculation with models that were not trained.
//!
//! Each token has a random vector. The embedding table has it as the token's row, the layers change it little, and the output
//! matrix has it as the row of the token that follows: that row's logit is the highest by far. A draft model has the vectors of
//! other tokens in some rows of the embedding table, and follows the model everywhere else.

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
    /// For each of them, whether the model chooses the token that follows in the order.
    agrees: Vec<bool>,
}

impl TokenCycle {
    /// The order of the vocabulary in `metadata`, which the model follows after the part `agree` of the tokens.
    pub fn new(metadata: &Metadata, agree: f64) -> Result<Self, CliError> {
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
        Ok(Self { members, agrees })
    }

    /// The place of a token in the order. Tokens that are not in it have that of one that is.
    fn place(&self, id: usize) -> usize {
        self.members.binary_search(&(id as u32)).unwrap_or(id % self.members.len())
    }

    /// The token whose vector is the row of token `id` in the embedding table.
    fn embedded(&self, id: usize) -> usize {
        let (n, place) = (self.members.len(), self.place(id));
        let place = if self.agrees[place] { place } else { (place + n / 2) % n };
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

/// The rows of a tensor: the vectors of tokens.
pub struct TokenRows<'a> {
    cycle: &'a TokenCycle,
    /// Whether it is the output matrix, else the embedding table.
    is_output: bool,
    /// The length of a row.
    n_embd: usize,
    /// The generator of the vectors, before that of token 0.
    generator: RandomWeights,
}

impl<'a> TokenRows<'a> {
    /// The rows of the tensor `name` with rows of `n_embd` elements, in a model made from `seed`; `None` for other tensors than
    /// the embedding table and the output matrix.
    pub fn of(cycle: &'a TokenCycle, name: &str, n_embd: usize, seed: u64) -> Option<Self> {
        let is_output = match name {
            "token_embd.weight" => false,
            "output.weight" => true,
            _ => return None,
        };
        Some(Self { cycle, is_output, n_embd, generator: RandomWeights::new(seed, usize::MAX) })
    }

    /// Fills `out` with the elements from number `from` on.
    pub fn fill(&self, from: usize, out: &mut [f32]) {
        let std = if self.is_output { LOGIT / self.n_embd as f32 } else { 1.0 };
        let mut done = 0;
        while done < out.len() {
            let (row, column) = ((from + done) / self.n_embd, (from + done) % self.n_embd);
            let n = (self.n_embd - column).min(out.len() - done);
            let token = if self.is_output { self.cycle.before(row) } else { self.cycle.embedded(row) };
            self.generator.clone().skip(token * self.n_embd + column).fill(&mut out[done..done + n], 0.0, std);
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
