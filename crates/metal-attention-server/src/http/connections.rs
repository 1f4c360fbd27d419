//! The open connections: their limits, and which one is closed for a new one.
//!
//! Every connection is accepted. At a limit, a connection that waits for its client (an idle one, or one that does not
//! send or read) is closed to admit the new one. Where there is none, the new connection is admitted beyond the limit
//! as an extra one: it serves the monitoring paths and answers everything else with 429 or 503.
//!
//! "Evict" means: close a connection for another.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use super::peer::Peer;

/// Extra connections beyond the limits.
pub const EXTRA_CONNECTIONS: usize = 64;
/// The time in which data of a client may still be in transit. Where at most [`FEW_WAITING`] connections wait for their
/// clients, those that began to wait within this time are not evicted.
pub const TRANSIT_TIME: Duration = Duration::from_millis(50);
/// The number of waiting connections up to which [`TRANSIT_TIME`] protects new ones.
const FEW_WAITING: usize = 4;
/// Attempts to admit a new connection where not even an extra one is free: extra connections end soon.
const PERMIT_TRIES: u32 = 25;
/// The time between two attempts.
const PERMIT_RETRY: Duration = Duration::from_millis(10);
/// The time without progress of a response after which a connection counts as waiting for its client.
const STUCK: Duration = Duration::from_secs(1);

/// The limit that a connection exceeds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExceededLimit {
    /// The maximum of its address.
    Address,
    /// The maximum of the server.
    Server,
}

/// The side and message that a connection waits for. The order is the order of eviction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum WaitsFor {
    /// The client, which has to send the head of a request: it may never send another one.
    Head,
    /// The client, which has to send the rest of a body.
    Body,
    /// The server, which computes a response.
    Answer,
}

/// An open connection, as its requests see it (a request extension).
pub struct ClientConnection {
    /// The client's address.
    peer: Peer,
    /// The limit that this connection exceeds: it is an extra one. `None`: an ordinary one.
    pub exceeded_limit: Option<ExceededLimit>,
    /// Whom it waits for, since when.
    state: Mutex<ConnectionState>,
    /// Notified when it is evicted.
    evicted: Notify,
}

/// The wait of a connection.
struct ConnectionState {
    /// The awaited side and message.
    wait: WaitsFor,
    /// The begin of the wait.
    since: Instant,
    /// The time at which the client stopped to read its response; `None`: it reads.
    stuck: Option<Instant>,
}

impl ClientConnection {
    fn new(peer: Peer, exceeded_limit: Option<ExceededLimit>) -> Self {
        let state = ConnectionState { wait: WaitsFor::Head, since: Instant::now(), stuck: None };
        Self { peer, exceeded_limit, state: Mutex::new(state), evicted: Notify::new() }
    }

    /// Sets that the client has sent a head, or a whole body, and waits for the server.
    pub fn waits_for_answer(&self) {
        self.set(WaitsFor::Answer);
    }

    /// Sets that the client is about to send a body.
    pub fn waits_for_body(&self) {
        self.set(WaitsFor::Body);
    }

    /// Sets that the response was sent: the next thing is another request.
    pub fn waits_for_head(&self) {
        self.set(WaitsFor::Head);
    }

    /// Sets whether the client reads its response.
    pub fn set_reading(&self, reads: bool) {
        let mut state = self.state();
        if reads {
            state.stuck = None;
        } else {
            state.stuck.get_or_insert_with(Instant::now);
        }
    }

    /// Waits until the connection is evicted.
    pub async fn evicted(&self) {
        self.evicted.notified().await;
    }

    fn set(&self, wait: WaitsFor) {
        let mut state = self.state();
        (state.wait, state.since) = (wait, Instant::now());
    }

    /// The wait for the client and its begin; `None`: the connection waits for the server, or its client reads.
    fn waits_for_client(&self) -> Option<(WaitsFor, Instant)> {
        let state = self.state();
        match (state.wait, state.stuck) {
            (_, Some(since)) => (since.elapsed() >= STUCK).then_some((state.wait, since)),
            (WaitsFor::Head | WaitsFor::Body, None) => Some((state.wait, state.since)),
            (WaitsFor::Answer, None) => None,
        }
    }

    fn state(&self) -> MutexGuard<'_, ConnectionState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// All open connections, and their limits.
pub struct Connections {
    /// Maximum number of connections.
    max_total: usize,
    /// Maximum number of connections of one address.
    max_per_address: usize,
    /// The open connections, extra ones included.
    open: Mutex<Vec<Arc<ClientConnection>>>,
    /// Connections that were evicted so far.
    evicted: AtomicU64,
    /// Connections that exceeded a limit so far, refused ones included.
    refused: AtomicU64,
}

impl Connections {
    /// No connections; at most `max_total` at a time, and `max_per_address` of one address.
    pub fn new(max_total: usize, max_per_address: usize) -> Self {
        Self {
            max_total,
            max_per_address,
            open: Mutex::default(),
            evicted: AtomicU64::new(0),
            refused: AtomicU64::new(0),
        }
    }

    /// The number of open connections.
    pub fn len(&self) -> usize {
        self.open().len()
    }

    /// Counts since the start: connections that were evicted, and those that exceeded a limit.
    pub fn evicted_and_refused(&self) -> (u64, u64) {
        (self.evicted.load(Ordering::Relaxed), self.refused.load(Ordering::Relaxed))
    }

    /// Admits a connection of `peer`, if need be as an extra one. `None`: no extra one became free within
    /// [`PERMIT_TRIES`] times [`PERMIT_RETRY`]; the connection is to be closed.
    pub async fn admit_soon(self: &Arc<Self>, peer: Peer) -> Option<ConnectionPermit> {
        for _ in 0..PERMIT_TRIES {
            if let Some(permit) = self.admit(peer) {
                return Some(permit);
            }
            tokio::time::sleep(PERMIT_RETRY).await;
        }
        self.refused.fetch_add(1, Ordering::Relaxed);
        None
    }

    /// Admits a connection of `peer`, if need be as an extra one; `None` where not even an extra one is free.
    fn admit(self: &Arc<Self>, peer: Peer) -> Option<ConnectionPermit> {
        let mut open = self.open();
        let count = |open: &[Arc<ClientConnection>], peer: Option<Peer>| {
            let counts =
                |c: &&Arc<ClientConnection>| c.exceeded_limit.is_none() && peer.is_none_or(|peer| c.peer == peer);
            open.iter().filter(counts).count()
        };
        let exceeded_limit = if count(&open, Some(peer)) >= self.max_per_address
            && !self.evict(&mut open, |c| c.exceeded_limit.is_none() && c.peer == peer)
        {
            Some(ExceededLimit::Address)
        } else if count(&open, None) >= self.max_total && !self.evict(&mut open, |c| c.exceeded_limit.is_none()) {
            Some(ExceededLimit::Server)
        } else {
            None
        };
        if exceeded_limit.is_some() {
            let n_extra = open.iter().filter(|c| c.exceeded_limit.is_some()).count();
            let may_evict =
                |c: &ClientConnection| c.exceeded_limit.is_some() && c.state().since.elapsed() >= TRANSIT_TIME;
            if n_extra >= EXTRA_CONNECTIONS && !self.evict(&mut open, may_evict) {
                return None;
            }
            self.refused.fetch_add(1, Ordering::Relaxed);
        }
        let connection = Arc::new(ClientConnection::new(peer, exceeded_limit));
        open.push(Arc::clone(&connection));
        Some(ConnectionPermit { connections: Arc::clone(self), connection })
    }

    /// Evicts one connection that waits for its client, after the system has run out of file descriptors.
    pub fn evict_any(&self) {
        self.evict(&mut self.open(), |_| true);
    }

    /// Evicts one of the connections that `may_evict` accepts and that wait for their clients. Chosen is the address
    /// with most connections, and there the connection in the order of [`WaitsFor`], the longest wait first. Returns
    /// whether there was one.
    fn evict(&self, open: &mut Vec<Arc<ClientConnection>>, may_evict: impl Fn(&ClientConnection) -> bool) -> bool {
        let mut of_peer = HashMap::new();
        for connection in &*open {
            *of_peer.entry(connection.peer).or_insert(0) += 1;
        }
        let waiting = open.iter().enumerate().filter(|(_, connection)| may_evict(connection));
        let waiting = waiting.filter_map(|(i, c)| Some((Reverse(of_peer[&c.peer]), c.waits_for_client()?, i)));
        let mut waiting: Vec<_> = waiting.collect();
        if waiting.len() <= FEW_WAITING {
            waiting.retain(|(_, (_, since), _)| since.elapsed() >= TRANSIT_TIME);
        }
        let Some((.., i)) = waiting.into_iter().min() else { return false };
        open.swap_remove(i).evicted.notify_one();
        self.evicted.fetch_add(1, Ordering::Relaxed);
        true
    }

    fn open(&self) -> MutexGuard<'_, Vec<Arc<ClientConnection>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The permit of an open connection. Dropping it removes the connection from [`Connections`].
pub struct ConnectionPermit {
    /// The connections from which it is removed on drop.
    connections: Arc<Connections>,
    /// The connection.
    pub connection: Arc<ClientConnection>,
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        self.connections.open().retain(|open| !Arc::ptr_eq(open, &self.connection));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(n: u8) -> Peer {
        Peer::at([10, 0, 0, n].into())
    }

    fn is_open(connections: &Connections, permit: &ConnectionPermit) -> bool {
        connections.open().iter().any(|open| Arc::ptr_eq(open, &permit.connection))
    }

    /// Makes all connections look as if they had waited for a while.
    fn wait_a_while(connections: &Connections) {
        for connection in &*connections.open() {
            let mut state = connection.state();
            state.since = state.since.checked_sub(TRANSIT_TIME).unwrap();
        }
    }

    /// Connections of `peer` that wait for responses.
    fn busy(connections: &Arc<Connections>, peer: Peer, n: usize) -> Vec<ConnectionPermit> {
        let admit = |_| {
            let permit = connections.admit(peer).unwrap();
            permit.connection.waits_for_answer();
            permit
        };
        (0..n).map(admit).collect()
    }

    #[test]
    fn connections_that_wait_for_their_client_are_evicted() {
        let connections = Arc::new(Connections::new(3, 3));
        let [idle, uploads, works] = [(); 3].map(|()| connections.admit(peer(1)).unwrap());
        uploads.connection.waits_for_body();
        works.connection.waits_for_answer();
        assert!(
            connections.admit(peer(2)).unwrap().connection.exceeded_limit.is_some(),
            "their requests may be on their way"
        );
        wait_a_while(&connections);
        let permit = connections.admit(peer(2)).unwrap();
        permit.connection.waits_for_answer();
        assert_eq!((permit.connection.exceeded_limit, is_open(&connections, &idle)), (None, false));
        let permit = connections.admit(peer(1)).unwrap();
        assert_eq!((permit.connection.exceeded_limit, is_open(&connections, &uploads)), (None, false));
        assert!(is_open(&connections, &works));
        assert_eq!(connections.len(), 3);
    }

    #[test]
    fn the_address_with_most_connections_is_evicted_first() {
        let connections = Arc::new(Connections::new(4, 4));
        let one = connections.admit(peer(1)).unwrap();
        let many = [(); 3].map(|()| connections.admit(peer(2)).unwrap());
        for connection in &many {
            connection.connection.waits_for_body();
        }
        wait_a_while(&connections);
        let _new = connections.admit(peer(3)).unwrap();
        assert!(is_open(&connections, &one) && !is_open(&connections, &many[0]));
    }

    #[test]
    fn an_address_has_a_limit_of_its_own() {
        let connections = Arc::new(Connections::new(4, 2));
        let _busy = busy(&connections, peer(1), 2);
        assert_eq!(connections.admit(peer(1)).unwrap().connection.exceeded_limit, Some(ExceededLimit::Address));
        let _others = busy(&connections, peer(2), 2);
        assert_eq!(connections.admit(peer(3)).unwrap().connection.exceeded_limit, Some(ExceededLimit::Server));
    }

    #[test]
    fn extra_connections_have_a_limit_too() {
        let connections = Arc::new(Connections::new(1, 1));
        let mut places = busy(&connections, peer(1), 1 + EXTRA_CONNECTIONS);
        assert!(connections.admit(peer(2)).is_none());
        assert_eq!(connections.len(), 1 + EXTRA_CONNECTIONS);
        places.pop();
        assert_eq!(connections.admit(peer(2)).unwrap().connection.exceeded_limit, Some(ExceededLimit::Server));
        places.clear();
        assert_eq!(connections.len(), 0);
    }

    #[test]
    fn the_connection_of_a_client_that_does_not_read_is_evicted() {
        let connections = Arc::new(Connections::new(1, 1));
        let places = busy(&connections, peer(1), 1);
        places[0].connection.set_reading(false);
        assert!(
            connections.admit(peer(2)).unwrap().connection.exceeded_limit.is_some(),
            "for a moment that is nothing special"
        );
        places[0].connection.state().stuck = Instant::now().checked_sub(STUCK);
        assert_eq!(connections.admit(peer(2)).unwrap().connection.exceeded_limit, None);
    }
}
