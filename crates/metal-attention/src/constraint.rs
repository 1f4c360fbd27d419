//! Constraints on generated tokens, such as grammars and schemas.

use std::fmt;

/// Restricts which tokens may be sampled next: a grammar, a schema. In a scheduler, a panic in it fails only its own
/// request.
pub trait Constraint: Send {
    /// Sets the bit of each token that may come next: bit `id % 32` of word `id / 32`. `mask` has
    /// `n_vocab.div_ceil(32)` words, all zero. An error ends the generation.
    fn allowed(&mut self, mask: &mut [u32]) -> Result<(), String>;

    /// Accepts the token that was sampled. End tokens are not passed on. An error ends the generation.
    fn accept(&mut self, id: u32) -> Result<(), String>;

    /// Whether the generated text is complete: nothing but an end token may follow.
    fn is_complete(&self) -> bool;

    /// Tokens that are likely to come next because the constraint leaves no choice, as in the names of a schema's
    /// properties. They become drafts ([`speculation`](crate::speculation)), so that they need not be certain.
    fn forced(&mut self) -> Vec<u32> {
        Vec::new()
    }

    /// How many of the drafts `ids` may come next, one after another. It may be more than the constraint allows: all of
    /// them are masked later.
    fn n_allowed(&mut self, ids: &[u32]) -> usize {
        ids.len()
    }
}

/// A constraint in use, with a buffer for its mask.
pub(crate) struct ActiveConstraint {
    /// The constraint.
    constraint: Box<dyn Constraint>,
    /// Buffer for the mask, `n_vocab.div_ceil(32)` words.
    mask: Vec<u32>,
}

impl fmt::Debug for ActiveConstraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ActiveConstraint").finish_non_exhaustive()
    }
}

impl ActiveConstraint {
    pub fn new(constraint: Box<dyn Constraint>) -> Self {
        Self { constraint, mask: Vec::new() }
    }

    /// The mask of the tokens that may come next, without `forbidden` ones: a bit for each of `n_vocab` tokens. An
    /// error if none is left.
    pub fn mask(&mut self, n_vocab: usize, forbidden: &[u32]) -> Result<&[u32], String> {
        self.mask.clear();
        self.mask.resize(n_vocab.div_ceil(32), 0);
        self.constraint.allowed(&mut self.mask)?;
        for &id in forbidden {
            self.mask[id as usize / 32] &= !(1 << (id % 32));
        }
        if self.mask.iter().all(|&word| word == 0) {
            return Err("no token may come next".into());
        }
        Ok(&self.mask)
    }

    /// Accepts the token that was sampled.
    pub fn accept(&mut self, id: u32) -> Result<(), String> {
        self.constraint.accept(id)
    }

    /// Whether nothing but an end token may follow.
    pub fn is_complete(&self) -> bool {
        self.constraint.is_complete()
    }

    /// Tokens that are likely to come next because nothing else may.
    pub fn forced(&mut self) -> Vec<u32> {
        self.constraint.forced()
    }

    /// How many of the drafts `ids` may come next.
    pub fn n_allowed(&mut self, ids: &[u32]) -> usize {
        self.constraint.n_allowed(ids)
    }
}
