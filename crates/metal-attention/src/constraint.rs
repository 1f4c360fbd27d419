//! A rule that says which tokens may come next.

use std::fmt;

/// Which tokens may come next: a grammar, a schema. Where a scheduler runs it, a panic fails the request that it belongs to and
/// no other.
pub trait Constraint: Send {
    /// Sets the bit of each token that may come next: bit `id % 32` of word `id / 32`. `mask` has
    /// `n_vocab.div_ceil(32)` words, all zero.
    fn allowed(&mut self, mask: &mut [u32]) -> Result<(), String>;

    /// Takes the token that was chosen; tokens that end the text are not passed on.
    fn accept(&mut self, id: u32) -> Result<(), String>;

    /// Whether the text is complete: nothing but an end may follow.
    fn is_complete(&self) -> bool;
}

/// A constraint, and the mask of what it allows.
pub(crate) struct ActiveConstraint {
    constraint: Box<dyn Constraint>,
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

    /// A bit for each of `n_vocab` tokens that may come next, none of them `forbidden`. An error where none may.
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

    /// Takes the token that was chosen.
    pub fn accept(&mut self, id: u32) -> Result<(), String> {
        self.constraint.accept(id)
    }

    /// Whether nothing but an end may follow.
    pub fn is_complete(&self) -> bool {
        self.constraint.is_complete()
    }
}
