//! `/slots`: the texts that are generated now, by their counts.

use axum::extract::State;
use metal_attention::scheduler::SequenceProgress;
use serde::Serialize;
use utoipa::ToSchema;

use super::error::ErrorBody;
use super::props::ModelQuery;
use crate::http::{ApiError, App};

/// A place for a text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = LlamaCppSlot)]
pub struct Slot {
    /// Its number: of each replica the texts that are generated come first, in the order in which they began.
    id: usize,
    /// Tokens a text has room for, its prompt included.
    n_ctx: usize,
    /// Whether a text is generated.
    is_processing: bool,
    /// False: texts are not guessed ahead.
    speculative: bool,
    /// Tokens of the prompt.
    n_prompt_tokens: usize,
    /// Those of them that were evaluated, or were in the KV cache already.
    n_prompt_tokens_processed: usize,
    /// Those of them that were in the KV cache already.
    n_prompt_tokens_cache: usize,
    /// What comes next.
    next_token: [TextProgress; 1],
}

/// How far a text is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = LlamaCppTextProgress)]
struct TextProgress {
    /// Whether more tokens come.
    has_next_token: bool,
    /// Tokens that were generated.
    n_decoded: usize,
    /// Tokens that may still come; -1: as many as there is room for.
    n_remain: i64,
}

impl Slot {
    fn new(id: usize, n_ctx: usize, text: Option<&SequenceProgress>) -> Self {
        let remaining = |text: &SequenceProgress| {
            Some(text.max_tokens.filter(|n| *n < usize::MAX)?.saturating_sub(text.n_generated))
        };
        let n_remain = text.and_then(remaining).map_or(-1, |n| i64::try_from(n).unwrap_or(i64::MAX));
        let count = |n: fn(&SequenceProgress) -> usize| text.map_or(0, n);
        Self {
            id,
            n_ctx,
            is_processing: text.is_some(),
            speculative: false,
            n_prompt_tokens: count(|text| text.n_prompt),
            n_prompt_tokens_processed: count(|text| text.n_evaluated.min(text.n_prompt)),
            n_prompt_tokens_cache: count(|text| text.n_cached),
            next_token: [TextProgress {
                has_next_token: text.is_some(),
                n_decoded: count(|text| text.n_generated),
                n_remain,
            }],
        }
    }
}

/// Tells which texts are generated now, by their counts. No text is shown.
#[utoipa::path(get, path = "/slots", tag = "llama.cpp", params(
    ("model" = Option<String>, Query, description = "The model's name"),
    ("fail_on_no_slot" = Option<String>, Query, description = "Not empty: 503 where no slot is free")),
    responses(
        (status = 200, description = "All slots", body = Vec<Slot>),
        (status = 400, description = "The query is wrong", body = ErrorBody),
        (status = 503, description = "The model is loading, the server shuts down, or no slot is free where one must be",
            body = ErrorBody)))]
pub async fn slots(State(app): State<App>, query: ModelQuery) -> Result<axum::Json<Vec<Slot>>, ApiError> {
    let model = app.lease(query.model.as_deref()).await?;
    let texts = model.scheduler.slots();
    if texts.iter().all(Option::is_some) && query.fail_on_no_slot.is_some_and(|value| !value.is_empty()) {
        return Err(ApiError::unavailable("no_slot", "no slot is free: try again later"));
    }
    let slot = |(id, text): (usize, &Option<SequenceProgress>)| Slot::new(id, model.n_ctx, text.as_ref());
    Ok(axum::Json(texts.iter().enumerate().map(slot).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_show_the_counts_of_their_texts() {
        let text = SequenceProgress { n_prompt: 7, n_cached: 3, n_evaluated: 9, n_generated: 3, max_tokens: Some(8) };
        let busy = serde_json::to_value(Slot::new(1, 512, Some(&text))).unwrap();
        let next = serde_json::json!({"has_next_token": true, "n_decoded": 3, "n_remain": 5});
        assert_eq!((&busy["id"], &busy["is_processing"], &busy["next_token"][0]), (&1.into(), &true.into(), &next));
        assert_eq!((&busy["n_prompt_tokens_processed"], &busy["n_prompt_tokens_cache"]), (&7.into(), &3.into()));
        let idle = Slot::new(0, 512, None);
        assert!(!idle.is_processing && idle.next_token[0].n_remain == -1 && idle.n_prompt_tokens == 0);
    }
}
