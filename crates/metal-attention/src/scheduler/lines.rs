//! Things that wait, in a line for each client.

use std::collections::{BTreeMap, VecDeque};

use super::Client;

/// Things that wait, in a line for each client.
#[derive(Debug)]
pub(super) struct Lines<T>(BTreeMap<Client, VecDeque<T>>);

impl<T> Default for Lines<T> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<T> Lines<T> {
    /// All that wait.
    pub fn len(&self) -> usize {
        self.0.values().map(VecDeque::len).sum()
    }

    /// Those of `client`.
    pub fn of(&self, client: Client) -> usize {
        self.0.get(&client).map_or(0, VecDeque::len)
    }

    /// The clients for whom something waits.
    pub fn clients(&self) -> impl Iterator<Item = Client> {
        self.0.keys().copied()
    }

    /// Adds to the end of a client's line.
    pub fn push(&mut self, client: Client, item: T) {
        self.0.entry(client).or_default().push_back(item);
    }

    /// Takes what is `at`-th in a client's line.
    pub fn take(&mut self, client: Client, at: usize) -> Option<T> {
        let line = self.0.get_mut(&client)?;
        let item = line.remove(at);
        if line.is_empty() {
            self.0.remove(&client);
        }
        item
    }

    /// Puts what was taken back to where it was.
    pub fn put_back(&mut self, client: Client, at: usize, item: T) {
        self.0.entry(client).or_default().insert(at, item);
    }

    /// Takes what `wanted` gives a reason for.
    pub fn extract<R>(&mut self, mut wanted: impl FnMut(&T) -> Option<R>) -> Vec<(T, R)> {
        let mut taken = Vec::new();
        for line in self.0.values_mut() {
            let mut at = 0;
            while let Some(item) = line.get(at) {
                match wanted(item) {
                    Some(reason) => taken.extend(line.remove(at).map(|item| (item, reason))),
                    None => at += 1,
                }
            }
        }
        self.0.retain(|_, line| !line.is_empty());
        taken
    }

    /// Takes everything.
    pub fn drain(&mut self) -> impl Iterator<Item = T> + use<T> {
        std::mem::take(&mut self.0).into_values().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_client_has_a_line_of_its_own() {
        let (a, b) = (Client::Key(0), Client::Key(1));
        let mut lines = Lines::default();
        for (client, item) in [(a, 1), (a, 2), (b, 3), (a, 4)] {
            lines.push(client, item);
        }
        assert_eq!((lines.len(), lines.of(a), lines.of(b), lines.of(Client::Unknown)), (4, 3, 1, 0));
        assert_eq!(lines.take(a, 1), Some(2));
        lines.put_back(a, 1, 2);
        assert_eq!((lines.take(a, 3), lines.take(b, 0), lines.take(b, 0)), (None, Some(3), None));
        assert_eq!(lines.clients().collect::<Vec<_>>(), [a]);
        assert_eq!(lines.extract(|item| (item % 2 == 0).then_some(())), [(2, ()), (4, ())]);
        lines.push(b, 5);
        assert_eq!(lines.drain().collect::<Vec<_>>(), [1, 5]);
        assert_eq!((lines.len(), lines.clients().count()), (0, 0));
    }
}
