//! First-in, first-out queues, one for each client.

use std::collections::{BTreeMap, VecDeque};

use super::Client;

/// A queue of `T` for each client that has something waiting.
#[derive(Debug)]
pub(super) struct ClientQueues<T>(BTreeMap<Client, VecDeque<T>>);

impl<T> Default for ClientQueues<T> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<T> ClientQueues<T> {
    /// Number of items, over all clients.
    pub fn len(&self) -> usize {
        self.0.values().map(VecDeque::len).sum()
    }

    /// Number of items of `client`.
    pub fn n_waiting(&self, client: Client) -> usize {
        self.0.get(&client).map_or(0, VecDeque::len)
    }

    /// The clients with at least one item, in ascending order.
    pub fn clients(&self) -> impl Iterator<Item = Client> {
        self.0.keys().copied()
    }

    /// Appends an item to a client's queue.
    pub fn push(&mut self, client: Client, item: T) {
        self.0.entry(client).or_default().push_back(item);
    }

    /// Removes the item at index `at` of a client's queue; `None` if there is none.
    pub fn remove(&mut self, client: Client, at: usize) -> Option<T> {
        let queue = self.0.get_mut(&client)?;
        let item = queue.remove(at);
        if queue.is_empty() {
            self.0.remove(&client);
        }
        item
    }

    /// Inserts an item at index `at` of a client's queue, from which it was removed.
    pub fn put_back(&mut self, client: Client, at: usize, item: T) {
        self.0.entry(client).or_default().insert(at, item);
    }

    /// Removes the items for which `wanted` returns a reason. Returns them with their reasons.
    pub fn extract<R>(&mut self, mut wanted: impl FnMut(&T) -> Option<R>) -> Vec<(T, R)> {
        let mut taken = Vec::new();
        for queue in self.0.values_mut() {
            let mut at = 0;
            while let Some(item) = queue.get(at) {
                match wanted(item) {
                    Some(reason) => taken.extend(queue.remove(at).map(|item| (item, reason))),
                    None => at += 1,
                }
            }
        }
        self.0.retain(|_, queue| !queue.is_empty());
        taken
    }

    /// Removes and returns all items.
    pub fn drain(&mut self) -> impl Iterator<Item = T> + use<T> {
        std::mem::take(&mut self.0).into_values().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_client_has_its_own_queue() {
        let (a, b) = (Client::Key(0), Client::Key(1));
        let mut queues = ClientQueues::default();
        for (client, item) in [(a, 1), (a, 2), (b, 3), (a, 4)] {
            queues.push(client, item);
        }
        assert_eq!(
            (queues.len(), queues.n_waiting(a), queues.n_waiting(b), queues.n_waiting(Client::Unknown)),
            (4, 3, 1, 0)
        );
        assert_eq!(queues.remove(a, 1), Some(2));
        queues.put_back(a, 1, 2);
        assert_eq!((queues.remove(a, 3), queues.remove(b, 0), queues.remove(b, 0)), (None, Some(3), None));
        assert_eq!(queues.clients().collect::<Vec<_>>(), [a]);
        assert_eq!(queues.extract(|item| (item % 2 == 0).then_some(())), [(2, ()), (4, ())]);
        queues.push(b, 5);
        assert_eq!(queues.drain().collect::<Vec<_>>(), [1, 5]);
        assert_eq!((queues.len(), queues.clients().count()), (0, 0));
    }
}
