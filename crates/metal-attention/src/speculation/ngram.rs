//! Drafts from the sequence itself: what followed the last tokens where they occurred before (prompt lookup).
//!
//! Code that is edited, text that is quoted and answers in a fixed form repeat what the prompt or the answer has already. A
//! table maps the hash of each n-gram to its latest place, for a few lengths; the longest match is continued. No model takes
//! part, so that a proposal costs less than a microsecond.
//!
//! The table of a sequence with a prediction holds the prediction's tokens before those of the sequence. While an answer
//! begins and nothing of the prediction came yet, the prediction's beginning is proposed.

use super::confidence::Confidence;
use super::{Draft, DraftRequest, Drafter};
use crate::{ForwardError, MemoryUse};

/// Lengths of n-grams that are looked up, longest first.
const LENGTHS: [usize; 3] = [8, 4, 2];

/// Matches are counted up to this many tokens.
const LONGEST: usize = 64;

/// Matches of at least this many tokens have the same confidence, up to the next of these numbers. The first class is that
/// of the beginning of a prediction.
const CLASSES: [usize; 9] = [0, 2, 3, 4, 6, 9, 14, 24, 40];

/// The confidence that is assumed of each class before anything was observed, of matches in the sequence.
const ASSUMED: [f32; CLASSES.len()] = [0.3, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9];

/// The same of matches in a prediction: it is likely to be repeated.
const ASSUMED_OF_PREDICTIONS: [f32; CLASSES.len()] = [0.6, 0.8, 0.85, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9];

/// The beginning of a prediction is proposed behind each of this many tokens, unless it came: an answer may start with other
/// words, such as the fence of a code block.
const BEGINNING_TOKENS: usize = 8;

/// Between the prediction and the sequence: an id that no vocabulary has, so that no n-gram spans the border.
const BORDER: u32 = u32::MAX;

/// Drafts from n-grams of each sequence.
#[derive(Debug, Default)]
pub struct NgramDrafter {
    /// The tables of the sequences, by index in the KV cache.
    tables: Vec<NgramTable>,
}

impl Drafter for NgramDrafter {
    fn name(&self) -> &'static str {
        "ngram"
    }

    fn estimates(&self) -> bool {
        true
    }

    fn propose(&mut self, requests: &[DraftRequest<'_>]) -> Result<Vec<Draft>, ForwardError> {
        let mut propose = |request: &DraftRequest<'_>| {
            if self.tables.len() <= request.seq {
                self.tables.resize_with(request.seq + 1, NgramTable::default);
            }
            let table = &mut self.tables[request.seq];
            table.follow(request.prediction, request.ids);
            table.propose(request.n)
        };
        Ok(requests.iter().map(&mut propose).collect())
    }

    fn memory_use(&self) -> MemoryUse {
        let bytes = self.tables.iter().map(NgramTable::bytes).sum::<usize>() as u64;
        MemoryUse { scratch: bytes, ..MemoryUse::default() }
    }
}

/// The n-grams of one sequence.
#[derive(Debug)]
struct NgramTable {
    /// The tokens of the prediction and [`BORDER`], if there is a prediction; then the tokens of the sequence.
    ids: Vec<u32>,
    /// Number of tokens of the prediction.
    n_prediction: usize,
    /// Tokens behind which the beginning of the prediction is still proposed.
    beginning_left: usize,
    /// For each of [`LENGTHS`] a hash table without chains: the end of the latest n-gram with this hash, or 0.
    /// `[LENGTHS.len()][n_slots]`.
    ends: [Vec<u32>; LENGTHS.len()],
    /// The index in `ids` of the token that is expected next, and the length of the match before it; `None`: no match.
    expected: Option<Match>,
    /// How often what was expected came, by the length of the match: in the sequence, and in a prediction.
    holds: [[Confidence; CLASSES.len()]; 2],
}

/// A place in the sequence or the prediction whose tokens equal the last ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Match {
    /// The index of the token behind it.
    next: usize,
    /// Its length in tokens, at most [`LONGEST`]; 0: the beginning of the prediction.
    len: usize,
}

impl Default for NgramTable {
    fn default() -> Self {
        Self {
            ids: Vec::new(),
            n_prediction: 0,
            beginning_left: 0,
            ends: Default::default(),
            expected: None,
            holds: [ASSUMED, ASSUMED_OF_PREDICTIONS].map(|assumed| assumed.map(Confidence::assumed)),
        }
    }
}

impl NgramTable {
    /// The index of the first token of the sequence in `ids`.
    fn start(&self) -> usize {
        if self.n_prediction == 0 { 0 } else { self.n_prediction + 1 }
    }

    /// Makes the sequence that of `ids`, with this prediction. Tokens behind the common prefix are new. If the sequence goes on
    /// where it was, they show whether the expected tokens came.
    fn follow(&mut self, prediction: &[u32], ids: &[u32]) {
        if self.ids[..self.n_prediction] != *prediction {
            self.ids.clear();
            self.ids.extend(prediction);
            self.ids.extend((!prediction.is_empty()).then_some(BORDER));
            self.n_prediction = prediction.len();
        }
        let start = self.start();
        let known = &self.ids[start..];
        let goes_on = !known.is_empty() && ids.starts_with(known);
        if !goes_on {
            let n_common = known.iter().zip(ids).take_while(|(a, b)| a == b).count();
            // The last token is appended anew, so that its match is found.
            self.ids.truncate(start + n_common.min(ids.len().saturating_sub(1)));
            self.expected = None;
        }
        let n_slots = (2 * (start + ids.len())).next_power_of_two().max(1024);
        if !goes_on || self.ends[0].len() < n_slots {
            self.enter_again(2 * n_slots);
        }
        let new = &ids[self.ids.len() - start..];
        // A prompt is long and does not show how an answer repeats it.
        let is_answer = goes_on && new.len() <= LONGEST;
        let n_unobserved = if is_answer { 0 } else { new.len().saturating_sub(1) };
        for &id in &new[..n_unobserved] {
            self.ids.push(id);
            self.insert();
        }
        if n_unobserved > 0 {
            self.expected = None;
        }
        if !is_answer {
            self.beginning_left = if prediction.is_empty() { 0 } else { BEGINNING_TOKENS };
        }
        for &id in &new[n_unobserved..] {
            self.observe(id);
        }
    }

    /// Appends a token, which shows whether the expected one came, and expects the next.
    fn observe(&mut self, id: u32) {
        let before = self.expected;
        let came = before.map(|expected| self.ids[expected.next] == id);
        if let (Some(expected), Some(came)) = (before, came) {
            self.holds[usize::from(self.is_predicted(expected))][class(expected.len)].observe(came);
            if came && self.is_predicted(expected) {
                self.beginning_left = 0;
            }
        }
        self.ids.push(id);
        let longer = |m: Match| Match { next: m.next + 1, len: (m.len + 1).min(LONGEST) };
        let continued = before.filter(|_| came == Some(true)).map(longer);
        // Nothing follows the prediction.
        let continued = continued.filter(|m| self.n_prediction == 0 || m.next != self.n_prediction);
        // The latest of the longest matches.
        self.expected = match (continued, self.find()) {
            (Some(continued), Some(found)) if continued.len > found.len => Some(continued),
            (Some(_) | None, Some(found)) => Some(found),
            (continued, None) => continued,
        };
        if self.beginning_left > 0 {
            self.beginning_left -= 1;
            let n_came = usize::from(self.n_prediction > 1 && self.ids[0] == id);
            let beginning = Match { next: n_came, len: n_came };
            if self.expected.is_none_or(|other| self.probability(other, 0) < self.probability(beginning, 0)) {
                self.expected = Some(beginning);
            }
        }
        self.insert();
    }

    /// Whether a match is in the prediction.
    fn is_predicted(&self, of: Match) -> bool {
        of.next < self.n_prediction
    }

    /// The confidence of the token `i` of those that a match proposes.
    fn probability(&self, of: Match, i: usize) -> f32 {
        self.holds[usize::from(self.is_predicted(of))][class(of.len + i)].probability()
    }

    /// Enters the n-grams that end with the last token, unless they reach into the prediction, or end it.
    fn insert(&mut self) {
        let (n, start) = (self.ids.len(), self.start());
        for (length, ends) in LENGTHS.into_iter().zip(&mut self.ends) {
            if n >= start + length || (n >= length && n < self.n_prediction) {
                let place = slot(&self.ids[n - length..], ends.len());
                ends[place] = n as u32;
            }
        }
    }

    /// The latest earlier place of the longest n-gram that ends the sequence. The last token is not entered yet.
    fn find(&self) -> Option<Match> {
        let n = self.ids.len();
        for (length, ends) in LENGTHS.into_iter().zip(&self.ends) {
            if n < self.start() + length || ends.is_empty() {
                continue;
            }
            let last = &self.ids[n - length..];
            let end = ends[slot(last, ends.len())] as usize;
            if end >= length && end < n && self.ids[end - length..end] == *last {
                let more =
                    (length..LONGEST.min(end)).take_while(|i| self.ids[end - 1 - i] == self.ids[n - 1 - i]).count();
                return Some(Match { next: end, len: length + more });
            }
        }
        None
    }

    /// Up to `n` tokens that follow the match. Where they reach the end of the sequence they repeat themselves; where they
    /// reach the end of the prediction they end.
    fn propose(&self, n: usize) -> Draft {
        let Some(expected) = self.expected else { return Draft::default() };
        let n = if self.is_predicted(expected) { n.min(self.n_prediction - expected.next) } else { n };
        let mut draft = Draft::default();
        for i in 0..n {
            let at = expected.next + i;
            draft.ids.push(self.ids.get(at).copied().unwrap_or_else(|| draft.ids[at - self.ids.len()]));
            draft.confidence.push(self.probability(expected, i));
        }
        draft
    }

    /// Empties the tables, with `n_slots` slots each, and enters all tokens. Those that were cut back have replaced others.
    fn enter_again(&mut self, n_slots: usize) {
        for ends in &mut self.ends {
            ends.clear();
            ends.resize(n_slots, 0);
        }
        for id in std::mem::take(&mut self.ids) {
            self.ids.push(id);
            self.insert();
        }
    }

    /// Bytes that it holds.
    fn bytes(&self) -> usize {
        size_of::<u32>() * (self.ids.capacity() + self.ends.iter().map(Vec::capacity).sum::<usize>())
    }
}

/// The class of a match of `len` tokens.
fn class(len: usize) -> usize {
    CLASSES.iter().rposition(|&least| len >= least).unwrap_or(0)
}

/// The slot of an n-gram in a table of `n_slots`, a power of two: the high bits of a multiplicative hash.
fn slot(ids: &[u32], n_slots: usize) -> usize {
    const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
    let hash = ids.iter().fold(0u64, |h, &id| (h.rotate_left(23) ^ (u64::from(id) + 1)).wrapping_mul(FACTOR));
    (hash >> (64 - n_slots.trailing_zeros())) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn propose(drafter: &mut NgramDrafter, ids: &[u32], n: usize) -> Vec<u32> {
        propose_with(drafter, &[], ids, n)
    }

    fn propose_with(drafter: &mut NgramDrafter, prediction: &[u32], ids: &[u32], n: usize) -> Vec<u32> {
        drafter.propose(&[DraftRequest { seq: 0, ids, prediction, n }]).unwrap().remove(0).ids
    }

    #[test]
    fn the_longest_and_then_the_latest_match_is_continued() {
        let mut drafter = NgramDrafter::default();
        // 1 2 3 occurs twice, and 9 1 2 3 once.
        let text = [9, 1, 2, 3, 50, 51, 8, 7, 1, 2, 3, 60, 61, 62, 1, 2, 3];
        assert_eq!(propose(&mut drafter, &text, 4), [60, 61, 62, 1]);
        // Tokens that are cut back are no matches.
        assert_eq!(propose(&mut drafter, &[9, 1, 2, 3, 50, 51, 1, 2, 3], 3), [50, 51, 1]);
        let longer = [5, 4, 9, 1, 2, 3, 50, 8, 1, 2, 3, 60, 4, 9, 1, 2, 3];
        assert_eq!(propose(&mut drafter, &longer, 1), [50]);
        assert_eq!(propose(&mut drafter, &[1, 2, 3, 4, 5], 4), [0u32; 0]);
        // A repetition goes on.
        assert_eq!(propose(&mut drafter, &[7, 1, 2, 3, 1, 2, 3, 1, 2], 7), [3, 1, 2, 3, 1, 2, 3]);
    }

    #[test]
    fn predictions_are_continued_like_the_sequence() {
        let prediction = [1, 2, 3, 4, 5, 6];
        let mut drafter = NgramDrafter::default();
        let mut propose = |ids: &[u32], n| propose_with(&mut drafter, &prediction, ids, n);
        // Nothing came yet: its beginning, or what follows it.
        assert_eq!(propose(&[70, 71], 3), [1, 2, 3]);
        assert_eq!(propose(&[70, 71, 90], 2), [1, 2]);
        assert_eq!(propose(&[70, 71, 90, 1], 3), [2, 3, 4]);
        // Where it differs from what comes it is no more proposed, until two tokens equal some of it.
        assert_eq!(propose(&[70, 71, 90, 1, 2, 80], 3), [0u32; 0]);
        assert_eq!(propose(&[70, 71, 90, 1, 2, 80, 3], 3), [0u32; 0]);
        assert_eq!(propose(&[70, 71, 90, 1, 2, 80, 3, 4], 9), [5, 6]);
        assert_eq!(propose(&[70, 71, 90, 1, 2, 80, 3, 4, 5, 6], 9), [0u32; 0]);
        // The sequence comes later than the prediction.
        assert_eq!(propose(&[70, 71, 90, 1, 2, 80, 3, 4, 5, 6, 1, 2], 2), [80, 3]);
        // The last token of the prediction and the first one of the sequence are no pair.
        assert_eq!(propose(&[70, 71, 6, 70], 2), [1, 2]);
        // At the end of a prompt, after its first token, with other tokens before it, and without it.
        let mut drafter = NgramDrafter::default();
        assert_eq!(propose_with(&mut drafter, &prediction, &[9, 1], 2), [2, 3]);
        assert_eq!(propose_with(&mut drafter, &[7], &[9, 1], 2), [7]);
        assert_eq!(propose_with(&mut drafter, &[], &[9, 1, 9], 2), [0u32; 0]);
    }

    #[test]
    fn the_beginning_of_a_prediction_is_proposed_a_few_times() {
        let mut table = NgramTable::default();
        let mut ids = vec![100];
        let mut confidence = Vec::new();
        for i in 0..12 {
            table.follow(&[1, 2, 3], &ids);
            confidence.extend(table.propose(1).confidence);
            ids.push(200 + i);
        }
        // Observations fade while it does not come: 2.4 / 4, 2.4 / 5, ...
        assert_eq!(confidence.len(), BEGINNING_TOKENS);
        assert!((confidence[0] - 0.6).abs() < 1e-6 && (0.47..0.49).contains(&confidence[1]), "{confidence:?}");
        assert!(confidence[7] < 0.25, "{confidence:?}");
        // A longer prompt begins another answer.
        ids.extend(300..400);
        table.follow(&[1, 2, 3], &ids);
        assert_eq!(table.propose(9).ids, [1, 2, 3]);
    }

    #[test]
    fn confidence_follows_what_comes() {
        let mut drafter = NgramDrafter::default();
        let confidence = |drafter: &mut NgramDrafter, ids: &[u32]| {
            drafter.propose(&[DraftRequest { seq: 0, ids, prediction: &[], n: 1 }]).unwrap()[0]
                .confidence
                .first()
                .copied()
        };
        let mut ids: Vec<u32> = (0..40).collect();
        assert_eq!(confidence(&mut drafter, &ids), None);
        // The pair 5 6 is never followed by what followed it before.
        let mut last = 0.0;
        for i in 0..20 {
            ids.extend([5, 6]);
            last = confidence(&mut drafter, &ids).unwrap();
            ids.push(100 + i);
            confidence(&mut drafter, &ids);
        }
        assert!(last < 0.1, "{last}");
        // A text that repeats itself.
        let page: Vec<u32> = (200..260).collect();
        ids.extend(&page);
        confidence(&mut drafter, &ids);
        for &id in page.iter().chain(&page) {
            ids.push(id);
            last = confidence(&mut drafter, &ids).unwrap_or(0.0);
        }
        assert!(last > 0.9, "{last}");
    }

    proptest::proptest! {
        #[test]
        fn tables_find_what_a_search_finds(
            prediction in proptest::collection::vec(0..4u32, 0..30),
            ids in proptest::collection::vec(0..4u32, 0..200),
            cuts in proptest::collection::vec((0..200usize, proptest::collection::vec(0..4u32, 1..40)), 0..6),
        ) {
            let (mut table, mut ids) = (NgramTable::default(), ids);
            for (cut, more) in cuts {
                ids.truncate(cut);
                ids.extend(more);
                table.follow(&prediction, &ids);
                proptest::prop_assert_eq!(&table.ids[table.start()..], &ids);
                let (text, draft) = (&table.ids, table.propose(9));
                let Some(Match { next, len }) = table.expected else {
                    proptest::prop_assert!(draft.ids.is_empty());
                    continue;
                };
                let matched = |i: &usize| text[next - 1 - i] == text[text.len() - 1 - i];
                proptest::prop_assert!(next < text.len() && (0..len).all(|i| matched(&i)));
                if next < prediction.len() {
                    proptest::prop_assert!(len >= 2 || len == next);
                    proptest::prop_assert_eq!(draft.ids.len(), 9.min(prediction.len() - next));
                } else {
                    proptest::prop_assert!(len >= 2 && draft.ids.len() == 9);
                }
                proptest::prop_assert!(draft.ids.iter().all(|&id| id < 4));
            }
        }
    }
}
