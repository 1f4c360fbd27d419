//! `/slots`: the running sequences, by their numbers of tokens.

use axum::extract::State;
use metal_attention::scheduler::SequenceProgress;
use serde::Serialize;
use utoipa::ToSchema;

use super::error::ErrorBody;
use super::props::ModelQuery;
use crate::http::address::Query;
use crate::http::{ApiError, App};

/// A slot: the place of one running sequence.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = LlamaCppSlot)]
pub struct Slot {
    /// Its number: of each replica, the running sequences come first, in the order of their start.
    id: usize,
    /// Maximum tokens of a sequence, its prompt included.
    n_ctx: usize,
    /// Whether a sequence is running.
    is_processing: bool,
    /// Whether decode steps may have drafts.
    speculative: bool,
    /// Tokens of the prompt.
    n_prompt_tokens: usize,
    /// Tokens of the prompt that were evaluated or found in the prefix cache.
    n_prompt_tokens_processed: usize,
    /// Tokens of the prompt that were found in the prefix cache.
    n_prompt_tokens_cache: usize,
    /// The progress of its generation.
    next_token: [NextTokenState; 1],
}

/// The progress of a sequence.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = LlamaCppTextProgress)]
struct NextTokenState {
    /// Whether more tokens come.
    has_next_token: bool,
    /// Generated tokens.
    n_decoded: usize,
    /// Maximum tokens that are still to come; -1: limited by the context only.
    n_remain: i64,
}

impl Slot {
    /// The slot number `id`; `sequence`: the running one, if any.
    fn new(id: usize, n_ctx: usize, speculative: bool, sequence: Option<&SequenceProgress>) -> Self {
        let remaining = |sequence: &SequenceProgress| {
            Some(sequence.max_tokens.filter(|n| *n < usize::MAX)?.saturating_sub(sequence.n_generated))
        };
        let n_remain = sequence.and_then(remaining).map_or(-1, |n| i64::try_from(n).unwrap_or(i64::MAX));
        let count = |n: fn(&SequenceProgress) -> usize| sequence.map_or(0, n);
        Self {
            id,
            n_ctx,
            is_processing: sequence.is_some(),
            speculative,
            n_prompt_tokens: count(|sequence| sequence.n_prompt),
            n_prompt_tokens_processed: count(|sequence| sequence.n_evaluated.min(sequence.n_prompt)),
            n_prompt_tokens_cache: count(|sequence| sequence.n_cached),
            next_token: [NextTokenState {
                has_next_token: sequence.is_some(),
                n_decoded: count(|sequence| sequence.n_generated),
                n_remain,
            }],
        }
    }
}

/// Reports the running sequences by their numbers of tokens, without their text.
#[utoipa::path(get, path = "/slots", tag = "llama.cpp", params(
    ("model" = Option<String>, Query, description = "The model's name"),
    ("fail_on_no_slot" = Option<String>, Query, description = "Not empty: 503 where no slot is free")),
    responses(
        (status = 200, description = "All slots", body = Vec<Slot>),
        (status = 400, description = "The query is wrong", body = ErrorBody),
        (status = 503, description = "The model is loading, the server shuts down, or no slot is free where one must be",
            body = ErrorBody)))]
pub async fn slots(State(app): State<App>, Query(query): Query<ModelQuery>) -> Result<axum::Json<Vec<Slot>>, ApiError> {
    let model = app.lease(query.model.as_deref()).await?;
    let sequences = model.scheduler.slots();
    if sequences.iter().all(Option::is_some) && query.fail_on_no_slot.is_some_and(|value| !value.is_empty()) {
        return Err(ApiError::unavailable("no_slot", "no slot is free: try again later"));
    }
    let speculative = model.scheduler.drafter().is_some();
    let slot =
        |(id, sequence): (usize, &Option<SequenceProgress>)| Slot::new(id, model.n_ctx, speculative, sequence.as_ref());
    Ok(axum::Json(sequences.iter().enumerate().map(slot).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_show_the_counts_of_their_sequences() {
        let sequence =
            SequenceProgress { n_prompt: 7, n_cached: 3, n_evaluated: 9, n_generated: 3, max_tokens: Some(8) };
        let busy = serde_json::to_value(Slot::new(1, 512, true, Some(&sequence))).unwrap();
        let next = serde_json::json!({"has_next_token": true, "n_decoded": 3, "n_remain": 5});
        assert_eq!((&busy["id"], &busy["is_processing"], &busy["next_token"][0]), (&1.into(), &true.into(), &next));
        assert_eq!(busy["speculative"], true);
        assert_eq!((&busy["n_prompt_tokens_processed"], &busy["n_prompt_tokens_cache"]), (&7.into(), &3.into()));
        let idle = Slot::new(0, 512, false, None);
        assert!(
            !idle.is_processing && !idle.speculative && idle.next_token[0].n_remain == -1 && idle.n_prompt_tokens == 0
        );
    }
}
