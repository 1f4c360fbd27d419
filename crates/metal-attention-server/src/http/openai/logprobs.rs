//! Log probabilities in the form of chat completions, and in that of completions. Probabilities are those of the model
//! before sampling.

use metal_attention::TextStream;
use metal_attention::tokenizer::Tokenizer;
use serde::Serialize;
use std::collections::BTreeMap;
use utoipa::ToSchema;

use metal_attention::scheduler::TokenLogprobs;

/// The log probabilities of a message's tokens.
#[derive(Debug, Clone, Default, Serialize, ToSchema)]
pub struct ChatLogprobs {
    /// One for each token.
    pub content: Vec<ChatTokenLogprob>,
}

/// The log probability of a token, and its most likely alternatives.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct ChatTokenLogprob {
    /// The token's text.
    token: String,
    /// Natural logarithm of its probability.
    logprob: f32,
    /// The token's bytes, which may be a part of a character.
    bytes: Vec<u8>,
    /// The most likely tokens at this position.
    top_logprobs: Vec<TopLogprob>,
}

/// One of the most likely tokens at a position.
#[derive(Debug, Clone, Serialize, ToSchema)]
struct TopLogprob {
    /// The token's text.
    token: String,
    /// Natural logarithm of its probability.
    logprob: f32,
    /// The token's bytes.
    bytes: Vec<u8>,
}

impl ChatTokenLogprob {
    /// The entry of token `id`.
    pub fn new(tokenizer: &Tokenizer, id: u32, logprobs: &TokenLogprobs) -> Self {
        let one = |id: u32, logprob: f32| TopLogprob {
            token: spelling(tokenizer, id),
            logprob: finite(logprob),
            bytes: tokenizer.token_bytes(id).to_vec(),
        };
        let TopLogprob { token, logprob, bytes } = one(id, logprobs.logprob);
        let top_logprobs = logprobs.top.iter().map(|&(id, logprob)| one(id, logprob)).collect();
        Self { token, logprob, bytes, top_logprobs }
    }
}

/// The log probabilities of a completion's tokens: one list for each property, all of the same length.
#[derive(Debug, Clone, Default, Serialize, ToSchema)]
pub struct CompletionLogprobs {
    /// The text of each token.
    tokens: Vec<String>,
    /// Natural logarithm of each token's probability; null for the first token of a prompt.
    token_logprobs: Vec<Option<f32>>,
    /// The most likely tokens at each position, by their texts; null for the first token of a prompt.
    top_logprobs: Vec<Option<BTreeMap<String, f32>>>,
    /// The offset of each token's text, in characters.
    text_offset: Vec<usize>,
}

impl CompletionLogprobs {
    /// Appends token `id`, whose text starts at character `offset`. Returns the offset of its end.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32, logprobs: &TokenLogprobs, offset: usize) -> usize {
        let token = spelling(tokenizer, id);
        let end = offset + token.chars().count();
        self.add(tokenizer, token, Some(logprobs), logprobs.top.len(), offset);
        end
    }

    /// The tokens of a prompt, with log probabilities of those after the first and of the `n_top` most likely ones at
    /// each position.
    pub fn of_prompt(tokenizer: &Tokenizer, prompt: &[u32], logprobs: &[TokenLogprobs], n_top: usize) -> Self {
        let mut list = Self::default();
        let mut text = TextStream::new(tokenizer, &[], Vec::new());
        let mut offset = 0;
        for (&id, logprobs) in prompt.iter().zip(std::iter::once(None).chain(logprobs.iter().map(Some))) {
            list.add(tokenizer, spelling(tokenizer, id), logprobs, n_top, offset);
            offset += text.push(id).0.chars().count();
        }
        list
    }

    /// Appends a token. `logprobs`: `None` for the first token of a prompt.
    fn add(
        &mut self,
        tokenizer: &Tokenizer,
        token: String,
        logprobs: Option<&TokenLogprobs>,
        n_top: usize,
        offset: usize,
    ) {
        self.tokens.push(token);
        self.token_logprobs.push(logprobs.map(|logprobs| finite(logprobs.logprob)));
        self.top_logprobs.push(logprobs.map(|logprobs| {
            let mut top = BTreeMap::new();
            for &(id, logprob) in logprobs.top.iter().take(n_top) {
                // Several tokens may have the same text: the most likely one comes first and is kept.
                top.entry(spelling(tokenizer, id)).or_insert(finite(logprob));
            }
            top
        }));
        self.text_offset.push(offset);
    }

    /// Appends the tokens of `more`.
    pub fn append(&mut self, mut more: Self) {
        self.tokens.append(&mut more.tokens);
        self.token_logprobs.append(&mut more.token_logprobs);
        self.top_logprobs.append(&mut more.top_logprobs);
        self.text_offset.append(&mut more.text_offset);
    }
}

/// The log probabilities at one position of a prompt, by token ids (vLLM): of the token itself, and of the most likely
/// ones.
pub type PromptLogprobs = BTreeMap<String, PromptLogprob>;

/// The log probability of a token at a position of a prompt.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct PromptLogprob {
    /// Natural logarithm of its probability.
    logprob: f32,
    /// Its rank among all tokens; 1 is the most likely.
    rank: usize,
    /// The token's text.
    decoded_token: String,
}

/// The log probabilities of a prompt, null for its first token, with the `n_top` most likely tokens at each position.
pub fn of_prompt(
    tokenizer: &Tokenizer,
    prompt: &[u32],
    logprobs: &[TokenLogprobs],
    n_top: usize,
) -> Vec<Option<PromptLogprobs>> {
    let place = |(&id, logprobs): (&u32, &TokenLogprobs)| {
        let one = |(id, logprob, rank): (u32, f32, usize)| {
            let decoded_token = spelling(tokenizer, id);
            (id.to_string(), PromptLogprob { logprob: finite(logprob), rank, decoded_token })
        };
        let top = logprobs.top.iter().take(n_top).zip(1..).map(|(&(id, logprob), rank)| (id, logprob, rank));
        Some(top.chain([(id, logprobs.logprob, logprobs.rank)]).map(one).collect())
    };
    std::iter::once(None).chain(prompt.iter().skip(1).zip(logprobs).map(place)).collect()
}

/// The text of a token; its spelling in the vocabulary if it writes nothing.
pub fn spelling(tokenizer: &Tokenizer, id: u32) -> String {
    match tokenizer.token_bytes(id) {
        [] => tokenizer.token_text(id).unwrap_or_default().to_owned(),
        bytes => String::from_utf8_lossy(bytes).into_owned(),
    }
}

/// Clamps -inf, which JSON cannot express, to OpenAI's number for it.
pub fn finite(logprob: f32) -> f32 {
    logprob.max(-9999.0)
}
