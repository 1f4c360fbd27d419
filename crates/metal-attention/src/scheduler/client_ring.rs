//! Fairness between clients: the order in which they are served, and the division of a step's prefill tokens between
//! them.

use std::collections::BTreeMap;

use super::Client;

/// The order in which waiting clients are served: least recently served first, new clients last.
#[derive(Debug, Default)]
pub(super) struct ClientRing {
    /// For each waiting client the value of `now` when it was served last, or joined.
    last_served: BTreeMap<Client, u64>,
    /// Counts servings.
    now: u64,
}

impl ClientRing {
    /// Sets the waiting clients: others are dropped, new ones join at the end.
    pub fn update(&mut self, waiting: &[Client]) {
        self.last_served.retain(|client, _| waiting.contains(client));
        for &client in waiting {
            if !self.last_served.contains_key(&client) {
                self.served(client);
            }
        }
    }

    /// The rank of a client; the smallest is served next.
    pub fn rank(&self, client: Client) -> u64 {
        self.last_served.get(&client).copied().unwrap_or(self.now)
    }

    /// Moves a client to the end.
    pub fn served(&mut self, client: Client) {
        self.now += 1;
        self.last_served.insert(client, self.now);
    }
}

/// Divides `n_tokens` tokens of a step among requests, given each one's client and the tokens it wants. Every client
/// gets an equal share; what it does not need goes to the others. Within a client, earlier requests come first. Returns
/// the tokens of each request.
pub(super) fn share_between_clients(wanted: &[(Client, usize)], mut n_tokens: usize) -> Vec<usize> {
    let mut totals = BTreeMap::<Client, usize>::new();
    for &(client, n) in wanted {
        *totals.entry(client).or_default() += n;
    }
    // In ascending order, so that what a client does not need is shared by those after it.
    let mut by_total: Vec<(&Client, &mut usize)> = totals.iter_mut().collect();
    by_total.sort_by_key(|(_, total)| **total);
    let n_clients = by_total.len();
    for (i, (_, share)) in by_total.into_iter().enumerate() {
        *share = (*share).min(n_tokens.div_ceil(n_clients - i));
        n_tokens -= *share;
    }
    let share = |&(client, n): &(Client, usize)| {
        let left = totals.entry(client).or_default();
        let n = n.min(*left);
        *left -= n;
        n
    };
    wanted.iter().map(share).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const A: Client = Client::Key(0);
    const B: Client = Client::Key(1);
    const C: Client = Client::Key(2);

    #[test]
    fn no_client_is_served_twice_while_another_waits() {
        let mut turns = ClientRing::default();
        let first = |turns: &ClientRing, waiting: &[Client]| *waiting.iter().min_by_key(|c| turns.rank(**c)).unwrap();
        turns.update(&[A]);
        turns.served(A);
        // A new client waits once for those before it.
        turns.update(&[A, B]);
        assert_eq!(first(&turns, &[A, B]), A);
        turns.served(A);
        assert_eq!(first(&turns, &[A, B]), B);
        turns.served(B);
        // A client that leaves and returns counts as new: it cannot overtake others.
        turns.update(&[A]);
        turns.update(&[A, B, C]);
        assert_eq!(first(&turns, &[A, B, C]), A);
        turns.served(A);
        assert_eq!(first(&turns, &[A, B, C]), B);
    }

    #[test]
    fn tokens_are_shared_out_between_clients() {
        assert_eq!(share_between_clients(&[(A, 500), (A, 500), (B, 10)], 100), [90, 0, 10]);
        assert_eq!(share_between_clients(&[(A, 500), (B, 500), (B, 500)], 100), [50, 50, 0]);
        assert_eq!(share_between_clients(&[(A, 20), (B, 5), (A, 20), (C, 500)], 64), [20, 5, 10, 29]);
        assert_eq!(share_between_clients(&[(A, 3), (A, 4)], 100), [3, 4]);
        assert_eq!(share_between_clients(&[(A, 3), (B, 4)], 1), [1, 0]);
        assert_eq!(share_between_clients(&[], 7), [0; 0]);
    }

    proptest! {
        #[test]
        fn no_token_is_wasted_and_no_client_has_more_than_its_share(
            wanted in prop::collection::vec((0..5usize, 0..200usize), 0..12),
            n_tokens in 0..300usize,
        ) {
            let wanted: Vec<(Client, usize)> = wanted.into_iter().map(|(key, n)| (Client::Key(key), n)).collect();
            let shares = share_between_clients(&wanted, n_tokens);
            let total: usize = wanted.iter().map(|(_, n)| n).sum();
            prop_assert_eq!(shares.iter().sum::<usize>(), total.min(n_tokens));
            let of = |client: Client| {
                let one = |i: usize| (wanted[i].0 == client).then_some((wanted[i].1, shares[i]));
                (0..wanted.len()).filter_map(one).fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
            };
            for &(client, _) in &wanted {
                for &(other, _) in &wanted {
                    let ((want, got), (_, others)) = (of(client), of(other));
                    prop_assert!(got == want || got + 1 >= others, "{got} of {want}, and another has {others}");
                }
            }
        }
    }
}
