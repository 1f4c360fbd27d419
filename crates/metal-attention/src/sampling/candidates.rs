//! The candidates of a choice (the tokens that may still be chosen) and the softmax over them.

use std::cmp::Ordering;

/// A token with its logit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct TokenCandidate {
    /// The token's id.
    pub id: u32,
    /// Its logit.
    pub logit: f32,
}

impl TokenCandidate {
    /// Highest logit first, lowest id first among equals.
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature that sorting wants")]
    pub fn by_logit(&self, other: &Self) -> Ordering {
        other.logit.partial_cmp(&self.logit).unwrap_or(Ordering::Equal).then(self.id.cmp(&other.id))
    }
}

/// The tokens that may still be chosen. Their logits are finite. Their order depends only on the logits and on the
/// samplers applied, so that the same random number draws the same token everywhere.
#[derive(Debug, Default)]
pub(super) struct Candidates {
    /// The candidates; never with NaN or infinite logits.
    items: Vec<TokenCandidate>,
    /// Whether `items` is sorted by id.
    sorted_by_id: bool,
}

impl Candidates {
    /// Replaces the candidates by all `allowed` tokens, with the bias added to their logits. Tokens whose logit is NaN
    /// or -inf are left out. If there are infinite logits, only their tokens are candidates, with equal logits.
    pub fn fill(&mut self, logits: &[f32], bias: &[(u32, f32)], allowed: impl Fn(u32) -> bool) {
        let all = logits.iter().zip(0..).map(|(&logit, id)| TokenCandidate { id, logit });
        let finite = logits.iter().fold(true, |finite, logit| finite & logit.is_finite());
        self.items.clear();
        self.items.extend(all);
        self.items.retain(|c| allowed(c.id));
        self.sorted_by_id = true;
        for &(id, bias) in bias {
            if let Some(candidate) = self.find(id) {
                candidate.logit += bias;
            }
        }
        if !finite || !bias.is_empty() {
            self.keep_finite();
        }
    }

    /// Replaces the candidates by listed tokens and their logits, in the order of the list. Logits that are not finite
    /// are treated as in [`fill`](Self::fill).
    pub fn fill_listed(&mut self, list: impl Iterator<Item = (u32, f32)>) {
        self.items.clear();
        self.items.extend(list.map(|(id, logit)| TokenCandidate { id, logit }));
        self.sorted_by_id = false;
        self.keep_finite();
    }

    /// Sorts by id, the order that [`fill`](Self::fill) leaves.
    pub fn sort_by_id(&mut self) {
        if !self.sorted_by_id {
            self.items.sort_unstable_by_key(|c| c.id);
            self.sorted_by_id = true;
        }
    }

    /// Removes logits that are not finite; if some are infinite, keeps only those, as 0.
    fn keep_finite(&mut self) {
        // NaN, such as infinity plus a bias of -inf, is not greater than -inf and is removed as well.
        self.items.retain(|c| c.logit > f32::NEG_INFINITY);
        if self.items.iter().any(|c| c.logit == f32::INFINITY) {
            self.items.retain(|c| c.logit == f32::INFINITY);
            self.items.iter_mut().for_each(|c| c.logit = 0.0);
        }
    }

    /// The candidates.
    pub fn as_slice(&self) -> &[TokenCandidate] {
        &self.items
    }

    /// The candidate with the highest logit, the lowest id among equals.
    pub fn best(&self) -> Option<TokenCandidate> {
        self.items.iter().copied().min_by(TokenCandidate::by_logit)
    }

    /// Replaces the logit of token `id`, if it is a candidate. The new logit is
    /// computed in double precision, where no sum or product of the options can
    /// overflow to NaN.
    pub fn adjust(&mut self, id: u32, new_logit: impl FnOnce(f64) -> f64) {
        if let Some(candidate) = self.find(id) {
            let logit = new_logit(f64::from(candidate.logit));
            candidate.logit = logit.clamp(f64::from(f32::MIN), f64::from(f32::MAX)) as f32;
        }
    }

    /// The candidate with token `id`.
    fn find(&mut self, id: u32) -> Option<&mut TokenCandidate> {
        self.sort_by_id();
        let at = self.items.binary_search_by_key(&id, |c| c.id).ok()?;
        self.items.get_mut(at)
    }

    /// Divides the logits by `temperature`. If that exceeds the range of a float, as at 0, only the highest logit is
    /// kept, which is the limit.
    pub fn divide_by(&mut self, temperature: f32) {
        let Some(best) = self.best() else { return };
        if (best.logit / temperature).is_finite() {
            for c in &mut self.items {
                c.logit = (c.logit / temperature).clamp(f32::MIN, f32::MAX);
            }
        } else {
            self.items.clear();
            self.items.push(best);
        }
    }

    /// Keeps the candidates for which `keep` is true; the caller makes sure that at least one is.
    pub fn retain(&mut self, keep: impl Fn(&TokenCandidate) -> bool) {
        self.items.retain(keep);
    }

    /// Keeps the `k` highest logits, sorted from the highest.
    pub fn keep_highest(&mut self, k: usize) {
        let sorted = self.items.is_sorted_by(|a, b| a.by_logit(b).is_lt());
        if !sorted && (1..self.items.len()).contains(&k) {
            self.items.select_nth_unstable_by(k - 1, TokenCandidate::by_logit);
        }
        self.items.truncate(k);
        if !sorted {
            self.items.sort_unstable_by(TokenCandidate::by_logit);
        }
        self.sorted_by_id = false;
    }

    /// Keeps the shortest prefix in the given order whose probabilities sum to at least `mass`, with at least
    /// `min_keep` candidates and at least one. The candidates end up in that order, which must be total.
    pub fn keep_mass(
        &mut self,
        mass: f32,
        min_keep: usize,
        order: impl Fn(&TokenCandidate, &TokenCandidate) -> Ordering,
    ) {
        /// Most distributions have their mass in fewer candidates than this.
        const FIRST_SORT: usize = 256;
        let softmax = Softmax::of(&self.items);
        let needed = f64::from(mass) * softmax.total;
        let (mut sorted, mut kept, mut sum) = (0, 0, 0.0);
        while kept < self.items.len() && (kept < min_keep.max(1) || sum < needed) {
            if kept == sorted {
                let rest = &mut self.items[sorted..];
                let n = rest.len().min(FIRST_SORT.max(3 * sorted));
                if n < rest.len() {
                    rest.select_nth_unstable_by(n - 1, &order);
                }
                rest[..n].sort_unstable_by(&order);
                sorted += n;
            }
            sum += softmax.weight(self.items[kept]);
            kept += 1;
        }
        self.items.truncate(kept);
        self.sorted_by_id = false;
    }

    /// The candidate at `position` (0 to below 1) of the cumulative probabilities.
    pub fn at(&self, position: f64) -> Option<TokenCandidate> {
        let softmax = Softmax::of(&self.items);
        let target = position * softmax.total;
        let mut sum = 0.0;
        let drawn = self.items.iter().copied().find(|&c| {
            sum += softmax.weight(c);
            sum > target
        });
        // Rounding may put the target at the very end.
        drawn.or_else(|| self.best())
    }
}

/// The softmax over candidates, as weights that sum to `total`: the exponentials
/// of the logits' distances to the highest one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Softmax {
    /// The highest logit.
    highest: f32,
    /// Sum of the weights, at least 1.
    pub total: f64,
}

impl Softmax {
    /// The softmax over `candidates`.
    pub fn of(candidates: &[TokenCandidate]) -> Self {
        let highest = candidates.iter().fold(f32::MIN, |highest, c| highest.max(c.logit));
        let mut softmax = Self { highest, total: 0.0 };
        softmax.total = candidates.iter().map(|&c| softmax.weight(c)).sum();
        softmax
    }

    /// The candidate's probability times `total`.
    pub fn weight(&self, candidate: TokenCandidate) -> f64 {
        f64::from((candidate.logit - self.highest).exp())
    }

    /// The candidate's probability.
    pub fn probability(&self, candidate: TokenCandidate) -> f64 {
        self.weight(candidate) / self.total
    }

    /// Minus the natural logarithm of the candidate's probability.
    pub fn surprise(&self, candidate: TokenCandidate) -> f64 {
        self.total.ln() - (f64::from(candidate.logit) - f64::from(self.highest))
    }

    /// The distribution's entropy in nats: the expected surprise.
    pub fn entropy(&self, candidates: &[TokenCandidate]) -> f64 {
        candidates.iter().map(|&c| self.probability(c) * self.surprise(c)).sum()
    }
}
