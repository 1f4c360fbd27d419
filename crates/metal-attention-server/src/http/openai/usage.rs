//! How many tokens a request took.

use serde::Serialize;
use utoipa::ToSchema;

/// How many tokens a request took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct Usage {
    /// Tokens of the prompts, each counted once however many texts continue it.
    pub prompt_tokens: usize,
    /// Tokens that were generated.
    pub completion_tokens: usize,
    /// Both.
    pub total_tokens: usize,
    /// More about the prompts.
    pub prompt_tokens_details: PromptDetails,
    /// More about the tokens that were generated, where some of them are thoughts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completion_tokens_details: Option<CompletionDetails>,
}

/// More about the tokens that were generated.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct CompletionDetails {
    /// Tokens of thoughts, their marks included.
    pub reasoning_tokens: usize,
}

/// More about the tokens of the prompts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct PromptDetails {
    /// Tokens that were in the KV cache already.
    pub cached_tokens: usize,
}

impl Usage {
    /// Counts tokens of thoughts; `None`: there were no thoughts.
    pub fn add_reasoning_tokens(&mut self, n: Option<usize>) {
        if let Some(n) = n {
            self.completion_tokens_details.get_or_insert_default().reasoning_tokens += n;
        }
    }

    /// Adds what one text took. `first` says whether it is the first one after its prompt.
    pub fn add(&mut self, usage: metal_attention::scheduler::Usage, first: bool) {
        if first {
            self.prompt_tokens += usage.prompt_tokens;
            self.prompt_tokens_details.cached_tokens += usage.cached_tokens;
        }
        self.completion_tokens += usage.generated_tokens;
        self.total_tokens = self.prompt_tokens + self.completion_tokens;
    }
}
