//! The open connections: how many there may be, and which is given up where another needs its place.
//!
//! Every connection is taken. Where there are as many as there may be, one that waits for its client makes room. Where
//! none does, the new one gets an extra place, which serves those that watch over the server and tells others to come
//! back later.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use super::peer::Peer;

/// Places beyond the limits.
pub const EXTRA_CONNECTIONS: usize = 64;
/// What a client has to send may be on its way for so long: where only a few connections wait for their clients, those that
/// are so new are not given up.
pub const TRANSIT_TIME: Duration = Duration::from_millis(50);
const FEW_WAITING: usize = 4;
/// How long a new connection waits for an extra place, and how often it looks: requests there are answered at once.
const PERMIT_TRIES: u32 = 25;
const PERMIT_RETRY: Duration = Duration::from_millis(10);
/// A client that takes nothing of its answer for so long may lose its place to another.
const STUCK: Duration = Duration::from_secs(1);

/// Why a connection has an extra place only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExceededLimit {
    /// Its address has as many connections as one may have.
    Address,
    /// There are as many connections as there may be.
    Server,
}

/// What a connection waits for, in the order in which they are given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum WaitsFor {
    /// The client, to send a request's head: it may never have another one.
    Head,
    /// The client, to send the rest of a body.
    Body,
    /// The server, which makes an answer.
    Answer,
}

/// An open connection: an extension of its requests.
pub struct ClientConnection {
    /// Whose it is.
    peer: Peer,
    /// Set where it has an extra place only.
    pub exceeded_limit: Option<ExceededLimit>,
    state: Mutex<ConnectionState>,
    evicted: Notify,
}

struct ConnectionState {
    wait: WaitsFor,
    since: Instant,
    /// Since when the client takes nothing of its answer.
    stuck: Option<Instant>,
}

impl ClientConnection {
    fn new(peer: Peer, exceeded_limit: Option<ExceededLimit>) -> Self {
        let state = ConnectionState { wait: WaitsFor::Head, since: Instant::now(), stuck: None };
        Self { peer, exceeded_limit, state: Mutex::new(state), evicted: Notify::new() }
    }

    /// Its client has sent a head, or the whole of a body: it waits for the server.
    pub fn waits_for_answer(&self) {
        self.set(WaitsFor::Answer);
    }

    /// Its client is about to send a body.
    pub fn waits_for_body(&self) {
        self.set(WaitsFor::Body);
    }

    /// The answer is on its way: the next thing is another request.
    pub fn waits_for_head(&self) {
        self.set(WaitsFor::Head);
    }

    /// Whether the client takes its answer.
    pub fn takes_answer(&self, takes: bool) {
        let mut state = self.state();
        if takes {
            state.stuck = None;
        } else {
            state.stuck.get_or_insert_with(Instant::now);
        }
    }

    /// Ready once the place is wanted by another.
    pub async fn evicted(&self) {
        self.evicted.notified().await;
    }

    fn set(&self, wait: WaitsFor) {
        let mut state = self.state();
        (state.wait, state.since) = (wait, Instant::now());
    }

    /// What the client is waited for, and since when; `None` where it is not its turn.
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

/// All open connections.
pub struct Connections {
    /// Most at a time.
    all: usize,
    /// Most of one address.
    each: usize,
    open: Mutex<Vec<Arc<ClientConnection>>>,
    evicted: AtomicU64,
    refused: AtomicU64,
}

impl Connections {
    /// None yet, and at most `all` at a time, `each` of one address.
    pub fn new(all: usize, each: usize) -> Self {
        Self { all, each, open: Mutex::default(), evicted: AtomicU64::new(0), refused: AtomicU64::new(0) }
    }

    /// How many are open.
    pub fn len(&self) -> usize {
        self.open().len()
    }

    /// How many were given up for others so far, and how many got an extra place or none.
    pub fn evicted_and_refused(&self) -> (u64, u64) {
        (self.evicted.load(Ordering::Relaxed), self.refused.load(Ordering::Relaxed))
    }

    /// A place for a connection of `peer`. `None` where not even an extra one comes free within a quarter of a second.
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

    /// A place for a connection of `peer`. `None` where not even an extra one is free.
    fn admit(self: &Arc<Self>, peer: Peer) -> Option<ConnectionPermit> {
        let mut open = self.open();
        let count = |open: &[Arc<ClientConnection>], of: Option<Peer>| {
            let counts =
                |c: &&Arc<ClientConnection>| c.exceeded_limit.is_none() && of.is_none_or(|peer| c.peer == peer);
            open.iter().filter(counts).count()
        };
        let exceeded_limit = if count(&open, Some(peer)) >= self.each
            && !self.evict(&mut open, |c| c.exceeded_limit.is_none() && c.peer == peer)
        {
            Some(ExceededLimit::Address)
        } else if count(&open, None) >= self.all && !self.evict(&mut open, |c| c.exceeded_limit.is_none()) {
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

    /// Gives up one connection that waits for its client: the system has no room for more.
    pub fn evict_any(&self) {
        self.evict(&mut self.open(), |_| true);
    }

    /// Gives up one of the connections that `may_evict` and wait for their clients: of the address that has most of them, the
    /// one whose client has least to lose. False where there is none.
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

/// A connection's place, released on drop.
pub struct ConnectionPermit {
    connections: Arc<Connections>,
    /// Whose place it is.
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

    /// Lets all connections have waited for a while.
    fn wait_a_while(connections: &Connections) {
        for connection in &*connections.open() {
            let mut state = connection.state();
            state.since = state.since.checked_sub(TRANSIT_TIME).unwrap();
        }
    }

    /// Connections of `peer` that wait for answers.
    fn busy(connections: &Arc<Connections>, of: Peer, n: usize) -> Vec<ConnectionPermit> {
        let admit = |_| {
            let permit = connections.admit(of).unwrap();
            permit.connection.waits_for_answer();
            permit
        };
        (0..n).map(admit).collect()
    }

    #[test]
    fn who_waits_for_a_client_makes_room() {
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
    fn who_has_most_makes_room_first() {
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
    fn an_address_has_its_share() {
        let connections = Arc::new(Connections::new(4, 2));
        let _busy = busy(&connections, peer(1), 2);
        assert_eq!(connections.admit(peer(1)).unwrap().connection.exceeded_limit, Some(ExceededLimit::Address));
        let _others = busy(&connections, peer(2), 2);
        assert_eq!(connections.admit(peer(3)).unwrap().connection.exceeded_limit, Some(ExceededLimit::Server));
    }

    #[test]
    fn extra_places_come_to_an_end_too() {
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
    fn a_client_that_does_not_read_makes_room() {
        let connections = Arc::new(Connections::new(1, 1));
        let places = busy(&connections, peer(1), 1);
        places[0].connection.takes_answer(false);
        assert!(
            connections.admit(peer(2)).unwrap().connection.exceeded_limit.is_some(),
            "for a moment that is nothing special"
        );
        places[0].connection.state().stuck = Instant::now().checked_sub(STUCK);
        assert_eq!(connections.admit(peer(2)).unwrap().connection.exceeded_limit, None);
    }
}
