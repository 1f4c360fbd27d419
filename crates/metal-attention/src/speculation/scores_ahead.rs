//! Scores of drafts that were evaluated before the tokens are sampled.

use metal_attention_model::TopK;

use crate::choice::Scores;

/// The scores after each draft of a verification, until a token is sampled that differs.
#[derive(Debug, Default)]
pub(crate) struct ScoresAhead {
    /// The index of the first draft in the sequence.
    start: usize,
    /// The drafts.
    drafts: Vec<u32>,
    /// The scores after each of them, as far as they were added.
    rows: Vec<Row>,
    /// Buffer for rows of logits, `[n_rows, n_vocab]`.
    logits: Vec<f32>,
}

/// The scores after one draft.
#[derive(Debug)]
enum Row {
    Argmax(u32),
    TopK(TopK, usize),
    /// The end of the row in the buffer of logits, and its length.
    Logits(usize, usize),
}

impl ScoresAhead {
    /// Forgets all rows, and expects those of `drafts`, of which the first one will have the index `start`.
    pub fn begin(&mut self, start: usize, drafts: Vec<u32>) {
        self.start = start;
        self.drafts = drafts;
        self.rows.clear();
        self.logits.clear();
    }

    /// Forgets all rows.
    pub fn clear(&mut self) {
        self.begin(0, Vec::new());
    }

    /// Adds the scores after the next draft.
    pub fn push(&mut self, scores: Scores<'_>) {
        self.rows.push(match scores {
            Scores::Argmax(id) => Row::Argmax(id),
            Scores::TopK(list, k) => Row::TopK(list.clone(), k),
            Scores::Logits(logits) => {
                self.logits.extend_from_slice(logits);
                Row::Logits(self.logits.len(), logits.len())
            }
        });
    }

    /// The scores after the last of `ids`, the tokens of the sequence; `None` if it is not a draft that was evaluated.
    pub fn after(&self, ids: &[u32]) -> Option<Scores<'_>> {
        let n = ids.len().checked_sub(self.start).filter(|&n| n > 0 && n <= self.rows.len())?;
        if ids[self.start..] != self.drafts[..n] {
            return None;
        }
        Some(match &self.rows[n - 1] {
            Row::Argmax(id) => Scores::Argmax(*id),
            Row::TopK(list, k) => Scores::TopK(list, *k),
            &Row::Logits(end, n_vocab) => Scores::Logits(&self.logits[end - n_vocab..end]),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_belong_to_the_drafts_that_hold() {
        let mut ahead = ScoresAhead::default();
        assert!(ahead.after(&[]).is_none() && ahead.after(&[1, 2]).is_none());
        ahead.begin(2, vec![7, 8, 9]);
        ahead.push(Scores::Logits(&[1.0, 2.0]));
        ahead.push(Scores::Logits(&[3.0, 4.0]));
        let row = |ids: &[u32]| match ahead.after(ids) {
            Some(Scores::Logits(row)) => Some(row.to_vec()),
            None => None,
            Some(other) => panic!("{other:?}"),
        };
        assert_eq!(row(&[1, 2]), None);
        assert_eq!(row(&[1, 2, 7]), Some(vec![1.0, 2.0]));
        assert_eq!(row(&[1, 2, 7, 8]), Some(vec![3.0, 4.0]));
        assert_eq!(row(&[1, 2, 7, 8, 9]), None);
        assert_eq!(row(&[1, 2, 6]), None);
        assert_eq!(row(&[1, 2, 7, 9]), None);
    }
}
