//! [`IndexSet`]: a bit set of small numbers.

/// A set of numbers below a fixed bound.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IndexSet(Vec<u64>);

impl IndexSet {
    /// The empty set of numbers below `bound`.
    pub fn new(bound: usize) -> Self {
        Self(vec![0; bound.div_ceil(64)])
    }

    /// Adds `number`.
    pub fn insert(&mut self, number: usize) {
        self.0[number / 64] |= 1 << (number % 64);
    }

    /// Whether `number` is in the set.
    pub fn has(&self, number: usize) -> bool {
        self.0[number / 64] & (1 << (number % 64)) != 0
    }

    /// Adds the numbers of `other`. Returns whether any of them was new.
    pub fn add(&mut self, other: &Self) -> bool {
        let mut new = 0;
        for (word, other) in self.0.iter_mut().zip(&other.0) {
            new |= other & !*word;
            *word |= other;
        }
        new != 0
    }

    /// The numbers in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = usize> {
        self.0.iter().enumerate().flat_map(|(i, &word)| {
            let mut left = word;
            std::iter::from_fn(move || {
                let bit = (left != 0).then(|| left.trailing_zeros() as usize)?;
                left &= left - 1;
                Some(i * 64 + bit)
            })
        })
    }
}
