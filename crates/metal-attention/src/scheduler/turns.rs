//! Whose turn it is: a ring of the clients for whom something waits, and how the tokens of a step are shared out.

use std::collections::BTreeMap;

use super::Client;

/// A ring of clients. Who is served goes to its end, and so does who is new.
#[derive(Debug, Default)]
pub(super) struct Turns {
    /// When each client was served last, or came.
    since: BTreeMap<Client, u64>,
    now: u64,
}

impl Turns {
    /// These clients wait, and no others.
    pub fn update(&mut self, waiting: &[Client]) {
        self.since.retain(|client, _| waiting.contains(client));
        for &client in waiting {
            if !self.since.contains_key(&client) {
                self.served(client);
            }
        }
    }

    /// Where a client is in the ring: the smallest number comes first.
    pub fn of(&self, client: Client) -> u64 {
        self.since.get(&client).copied().unwrap_or(self.now)
    }

    /// A client was served.
    pub fn served(&mut self, client: Client) {
        self.now += 1;
        self.since.insert(client, self.now);
    }
}

/// Tokens of `room` for each of the `wanted`: an equal share for each client, what one has no use for to the others,
/// and within a client to the first first.
pub(super) fn share_out(wanted: &[(Client, usize)], mut room: usize) -> Vec<usize> {
    let mut totals = BTreeMap::<Client, usize>::new();
    for &(client, n) in wanted {
        *totals.entry(client).or_default() += n;
    }
    // Who wants least comes first, so that what it leaves goes to the others.
    let mut by_total: Vec<(&Client, &mut usize)> = totals.iter_mut().collect();
    by_total.sort_by_key(|(_, total)| **total);
    let n_clients = by_total.len();
    for (i, (_, share)) in by_total.into_iter().enumerate() {
        *share = (*share).min(room.div_ceil(n_clients - i));
        room -= *share;
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
    fn nobody_is_served_twice_while_another_waits() {
        let mut turns = Turns::default();
        let first = |turns: &Turns, waiting: &[Client]| *waiting.iter().min_by_key(|c| turns.of(**c)).unwrap();
        turns.update(&[A]);
        turns.served(A);
        // Who comes waits for those who were there, once.
        turns.update(&[A, B]);
        assert_eq!(first(&turns, &[A, B]), A);
        turns.served(A);
        assert_eq!(first(&turns, &[A, B]), B);
        turns.served(B);
        // Who goes and comes again is new: it cannot overtake anybody.
        turns.update(&[A]);
        turns.update(&[A, B, C]);
        assert_eq!(first(&turns, &[A, B, C]), A);
        turns.served(A);
        assert_eq!(first(&turns, &[A, B, C]), B);
    }

    #[test]
    fn tokens_are_shared_out_between_clients() {
        assert_eq!(share_out(&[(A, 500), (A, 500), (B, 10)], 100), [90, 0, 10]);
        assert_eq!(share_out(&[(A, 500), (B, 500), (B, 500)], 100), [50, 50, 0]);
        assert_eq!(share_out(&[(A, 20), (B, 5), (A, 20), (C, 500)], 64), [20, 5, 10, 29]);
        assert_eq!(share_out(&[(A, 3), (A, 4)], 100), [3, 4]);
        assert_eq!(share_out(&[(A, 3), (B, 4)], 1), [1, 0]);
        assert_eq!(share_out(&[], 7), [0; 0]);
    }

    proptest! {
        #[test]
        fn no_token_is_wasted_and_no_client_has_more_than_its_share(
            wanted in prop::collection::vec((0..5usize, 0..200usize), 0..12),
            room in 0..300usize,
        ) {
            let wanted: Vec<(Client, usize)> = wanted.into_iter().map(|(key, n)| (Client::Key(key), n)).collect();
            let shares = share_out(&wanted, room);
            let total: usize = wanted.iter().map(|(_, n)| n).sum();
            prop_assert_eq!(shares.iter().sum::<usize>(), total.min(room));
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
