//! Choosing the next token: which scores it needs, evaluating a batch for them, and the choice.
//!
//! A device can return the argmax of the logits, a short list of the highest ones (top-k), or all of them, at rising
//! cost. Both [`Sequence`](crate::sequence::Sequence) and the scheduler request the cheapest that suffices, and fall
//! back to all logits.

use metal_attention_model::{
    Batch, BatchToken, ForwardError, ForwardPass, HiddenRequest, HiddenRows, OutputKind, Outputs, TopK, TracedTokens,
};

use crate::sampling::Sampler;

/// The scores that the choice of the next token needs, cheapest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum RequiredScores {
    /// The id of the largest logit.
    Argmax,
    /// A list of the largest logits.
    TopK,
    /// All logits.
    Logits,
}

/// The scores of the next token, as a forward pass returned them.
#[derive(Debug, Clone, Copy)]
pub enum Scores<'a> {
    /// The id of the largest logit.
    Argmax(u32),
    /// The largest logits, and the requested length of the list.
    TopK(&'a TopK, usize),
    /// Logits `[n_vocab]`.
    Logits(&'a [f32]),
}

/// The tokens that may be chosen.
#[derive(Debug, Clone, Copy, Default)]
pub struct AllowedTokens<'a> {
    /// Tokens that may not be chosen.
    pub forbidden: &'a [u32],
    /// Among the others, only those whose bit is set: bit `id % 32` of word `id / 32`. `None`: all.
    pub mask: Option<&'a [u32]>,
}

impl AllowedTokens<'_> {
    /// Whether `id` may be chosen.
    pub fn has(&self, id: u32) -> bool {
        !self.forbidden.contains(&id) && self.mask.is_none_or(|mask| mask[id as usize / 32] & (1 << (id % 32)) != 0)
    }
}

/// The scores that the next choice of `sampler` needs, if `n_forbidden` tokens are forbidden, a mask may forbid others
/// (`masked`), and a list of `max_top_k` logits is cheaper than all of them. They may still turn out not to be enough.
pub fn required_scores(sampler: &Sampler, n_forbidden: usize, masked: bool, max_top_k: usize) -> RequiredScores {
    // A forbidden token is rarely the largest, so the argmax is tried. `max_top_k` 0 means that all logits cost no more
    // than it.
    if sampler.is_greedy() && !masked && max_top_k > 0 {
        RequiredScores::Argmax
    } else if sampler.short_list().is_some_and(|needed| needed + n_forbidden <= max_top_k) {
        RequiredScores::TopK
    } else {
        RequiredScores::Logits
    }
}

/// Chooses a token. `None` if `scores` do not determine it; the sampler is then unchanged, and all logits will do.
pub fn choose(sampler: &mut Sampler, allowed: AllowedTokens<'_>, scores: Scores<'_>) -> Option<u32> {
    match scores {
        // A device returns 0 if no logit is a number; all logits are then needed to see that.
        Scores::Argmax(id) => Some(id).filter(|&id| id != 0 && allowed.has(id)),
        Scores::TopK(list, k) => sampler.sample_short(list, k, |id| allowed.has(id)),
        Scores::Logits(logits) => Some(sampler.sample_allowed(logits, |id| allowed.has(id))),
    }
}

/// Whether the score of token `id`, chosen from `scores`, is a number. NaN and infinity are not; -inf is if another
/// logit is finite.
pub fn is_number(scores: Scores<'_>, id: u32) -> bool {
    let ok = |logit: f32, finite: &dyn Fn() -> bool| logit.is_finite() || (logit == f32::NEG_INFINITY && finite());
    match scores {
        Scores::Argmax(_) => true,
        Scores::TopK(list, _) => {
            let logit = list.iter().find(|&&(listed, _)| listed == id).map_or(f32::NAN, |&(_, logit)| logit);
            ok(logit, &|| list.iter().any(|(_, logit)| logit.is_finite()))
        }
        Scores::Logits(logits) => {
            let logit = logits.get(id as usize).copied().unwrap_or(f32::NAN);
            ok(logit, &|| logits.iter().any(|logit| logit.is_finite()))
        }
    }
}

/// Evaluates `batch` and calls `row(i, scores)` for the `i`-th token with `output` set, with scores of the `required`
/// kind. On an error `row` is not called. Returns the hidden rows of all tokens before the layers `hidden`
/// ([`HiddenRequest::before`]).
pub fn evaluate(
    pass: &mut dyn ForwardPass,
    batch: Batch<'_>,
    required: RequiredScores,
    hidden: &[usize],
    mut row: impl FnMut(usize, Scores<'_>),
) -> Result<HiddenRows, ForwardError> {
    let k = pass.max_top_k();
    // Decode steps have neither spans nor drafts; `forward_greedy` runs them ahead.
    let runs_ahead = batch.spans.is_empty() && batch.drafted.is_empty() && hidden.is_empty();
    let kind = match required {
        RequiredScores::Argmax if runs_ahead => {
            let ids = pass.forward_greedy(batch.tokens)?;
            ids.into_iter().enumerate().for_each(|(i, id)| row(i, Scores::Argmax(id)));
            return Ok(HiddenRows::default());
        }
        RequiredScores::Argmax => OutputKind::Ids,
        RequiredScores::TopK => OutputKind::TopK(k),
        RequiredScores::Logits => OutputKind::Logits,
    };
    let request = HiddenRequest { before: hidden, tokens: TracedTokens::All };
    let (outputs, hidden) = pass.forward_with_hidden(batch, kind, request)?;
    match outputs {
        Outputs::Ids(ids) => ids.into_iter().enumerate().for_each(|(i, id)| row(i, Scores::Argmax(id))),
        Outputs::TopK(lists) => lists.iter().enumerate().for_each(|(i, list)| row(i, Scores::TopK(list, k))),
        Outputs::Logits(logits) => (0..logits.n_rows()).for_each(|i| row(i, Scores::Logits(logits.row(i)))),
        // Not requested.
        Outputs::Hidden(_) => {}
    }
    Ok(hidden)
}

/// Evaluates the last tokens of sequences a second time, for all logits: cuts each sequence back by its token in
/// `tokens`, and then calls `row` as [`evaluate`] does. No effect without tokens.
pub fn evaluate_again(
    pass: &mut dyn ForwardPass,
    tokens: &[BatchToken],
    row: impl FnMut(usize, Scores<'_>),
) -> Result<(), ForwardError> {
    if tokens.is_empty() {
        return Ok(());
    }
    for token in tokens {
        let reached = pass.rewind(token.seq, token.pos);
        assert_eq!(reached, token.pos, "a sequence can always do without its last token");
    }
    evaluate(pass, tokens.into(), RequiredScores::Logits, &[], row).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampling::SamplerOptions;

    fn sampler(options: SamplerOptions) -> Sampler {
        Sampler::new(options).unwrap()
    }

    #[test]
    fn the_cheapest_sufficient_scores_are_required() {
        let greedy = sampler(SamplerOptions::greedy());
        // A device with lists of 8, and one whose logits cost nothing.
        for (n_forbidden, masked, on_device, at_hand) in [
            (0, false, RequiredScores::Argmax, RequiredScores::Logits),
            (2, false, RequiredScores::Argmax, RequiredScores::Logits),
            (2, true, RequiredScores::TopK, RequiredScores::Logits),
            (8, true, RequiredScores::Logits, RequiredScores::Logits),
        ] {
            assert_eq!(required_scores(&greedy, n_forbidden, masked, 8), on_device, "{n_forbidden} {masked}");
            assert_eq!(required_scores(&greedy, n_forbidden, masked, 0), at_hand, "{n_forbidden} {masked}");
        }
        let top_5 = sampler(SamplerOptions { top_k: 5, ..Default::default() });
        assert_eq!(
            (required_scores(&top_5, 3, false, 8), required_scores(&top_5, 4, false, 8)),
            (RequiredScores::TopK, RequiredScores::Logits)
        );
        let all = sampler(SamplerOptions { logit_bias: vec![(1, 1.0)], ..SamplerOptions::greedy() });
        assert_eq!(required_scores(&all, 0, false, 8), RequiredScores::Logits);
    }

    #[test]
    fn only_numbers_can_be_chosen() {
        let (nan, inf) = (f32::NAN, f32::INFINITY);
        for (logits, id, want) in [
            (&[1.0, nan][..], 0, true),
            (&[1.0, nan], 1, false),
            (&[nan, nan], 0, false),
            (&[1.0, inf], 1, false),
            (&[1.0, -inf], 1, true),
            (&[nan, -inf], 1, false),
        ] {
            assert_eq!(is_number(Scores::Logits(logits), id), want, "{logits:?} {id}");
            let list: TopK = logits.iter().zip(0..).map(|(&logit, id)| (id, logit)).collect();
            assert_eq!(is_number(Scores::TopK(&list, 2), id), want, "{logits:?} {id}");
        }
        // An argmax of 0 may mean that no logit is a number: all logits decide.
        let mut greedy = sampler(SamplerOptions::greedy());
        assert_eq!(choose(&mut greedy, AllowedTokens::default(), Scores::Argmax(0)), None);
    }

    #[test]
    fn insufficient_scores_give_no_choice() {
        let mut greedy = sampler(SamplerOptions::greedy());
        let logits = [0.0, 3.0, 2.0, 1.0];
        let mask = [0b1001];
        for (allowed, of_id, of_list, of_all) in [
            (AllowedTokens::default(), Some(1), Some(1), 1),
            (AllowedTokens { forbidden: &[1], mask: None }, None, Some(2), 2),
            (AllowedTokens { forbidden: &[1, 2], mask: None }, None, None, 3),
            (AllowedTokens { forbidden: &[], mask: Some(&mask) }, None, None, 3),
            (AllowedTokens { forbidden: &[3], mask: Some(&mask) }, None, None, 0),
        ] {
            assert_eq!(choose(&mut greedy, allowed, Scores::Argmax(1)), of_id, "{allowed:?}");
            let list = vec![(1, 3.0), (2, 2.0)];
            assert_eq!(choose(&mut greedy, allowed, Scores::TopK(&list, 2)), of_list, "{allowed:?}");
            assert_eq!(choose(&mut greedy, allowed, Scores::Logits(&logits)), Some(of_all), "{allowed:?}");
        }
    }
}
