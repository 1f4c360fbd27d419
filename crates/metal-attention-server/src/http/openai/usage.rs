//! The number of tokens of a request, in OpenAI's form.

use serde::Serialize;
use utoipa::ToSchema;

/// The number of tokens of a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct Usage {
    /// Tokens of the prompts, each counted once for all its choices.
    pub prompt_tokens: usize,
    /// Generated tokens.
    pub completion_tokens: usize,
    /// The sum of both.
    pub total_tokens: usize,
    /// Details of the prompt tokens.
    pub prompt_tokens_details: PromptDetails,
    /// Details of the generated tokens, if some are reasoning, or drafts were evaluated for them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completion_tokens_details: Option<CompletionDetails>,
}

/// Details of the generated tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, ToSchema)]
#[expect(clippy::struct_field_names, reason = "OpenAI's own names")]
pub struct CompletionDetails {
    /// Tokens of reasoning, including its delimiters.
    pub reasoning_tokens: usize,
    /// Generated tokens that were drafts, of a prediction or other ones; only where drafts were evaluated.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub accepted_prediction_tokens: Option<usize>,
    /// Drafts that were evaluated and are not part of the text; only where drafts were evaluated.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub rejected_prediction_tokens: Option<usize>,
}

/// Details of the prompt tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct PromptDetails {
    /// Tokens that were found in the prefix cache.
    pub cached_tokens: usize,
}

impl Usage {
    /// Adds tokens of reasoning; `None`: there was no reasoning.
    pub fn add_reasoning_tokens(&mut self, n: Option<usize>) {
        if let Some(n) = n {
            self.completion_tokens_details.get_or_insert_default().reasoning_tokens += n;
        }
    }

    /// Adds the tokens of a sequence. `first`: whether it is the first choice of its prompt.
    pub fn add(&mut self, usage: metal_attention::scheduler::Usage, first: bool) {
        if first {
            self.prompt_tokens += usage.prompt_tokens;
            self.prompt_tokens_details.cached_tokens += usage.cached_tokens;
        }
        self.completion_tokens += usage.generated_tokens;
        self.total_tokens = self.prompt_tokens + self.completion_tokens;
        if usage.drafted_tokens > 0 {
            let details = self.completion_tokens_details.get_or_insert_default();
            *details.accepted_prediction_tokens.get_or_insert_default() += usage.accepted_tokens;
            *details.rejected_prediction_tokens.get_or_insert_default() += usage.drafted_tokens - usage.accepted_tokens;
        }
    }
}
