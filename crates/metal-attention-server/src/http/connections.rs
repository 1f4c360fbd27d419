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
pub const EXTRA_PLACES: usize = 64;
/// What a client has to send may be on its way for so long: where only a few connections wait for their clients, those that
/// are so new are not given up.
pub const ON_ITS_WAY: Duration = Duration::from_millis(50);
const FEW: usize = 4;
/// How long a new connection waits for an extra place, and how often it looks: requests there are answered at once.
const LOOKS: u32 = 25;
const LOOK: Duration = Duration::from_millis(10);
/// A client that takes nothing of its answer for so long may lose its place to another.
const STUCK: Duration = Duration::from_secs(1);

/// Why a connection has an extra place only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Full {
    /// Its address has as many connections as one may have.
    Address,
    /// There are as many connections as there may be.
    Server,
}

/// What a connection waits for, in the order in which they are given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Wait {
    /// The client, to send a request's head: it may never have another one.
    Head,
    /// The client, to send the rest of a body.
    Body,
    /// The server, which makes an answer.
    Answer,
}

/// An open connection: an extension of its requests.
pub struct Connection {
    /// Whose it is.
    peer: Peer,
    /// Set where it has an extra place only.
    pub full: Option<Full>,
    state: Mutex<State>,
    given_up: Notify,
}

struct State {
    wait: Wait,
    since: Instant,
    /// Since when the client takes nothing of its answer.
    stuck: Option<Instant>,
}

impl Connection {
    fn new(peer: Peer, full: Option<Full>) -> Self {
        let state = State { wait: Wait::Head, since: Instant::now(), stuck: None };
        Self { peer, full, state: Mutex::new(state), given_up: Notify::new() }
    }

    /// Its client has sent a head, or the whole of a body: it waits for the server.
    pub fn waits_for_answer(&self) {
        self.set(Wait::Answer);
    }

    /// Its client is about to send a body.
    pub fn waits_for_body(&self) {
        self.set(Wait::Body);
    }

    /// The answer is on its way: the next thing is another request.
    pub fn waits_for_head(&self) {
        self.set(Wait::Head);
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
    pub async fn given_up(&self) {
        self.given_up.notified().await;
    }

    fn set(&self, wait: Wait) {
        let mut state = self.state();
        (state.wait, state.since) = (wait, Instant::now());
    }

    /// What the client is waited for, and since when; `None` where it is not its turn.
    fn waits_for_client(&self) -> Option<(Wait, Instant)> {
        let state = self.state();
        match (state.wait, state.stuck) {
            (_, Some(since)) => (since.elapsed() >= STUCK).then_some((state.wait, since)),
            (Wait::Head | Wait::Body, None) => Some((state.wait, state.since)),
            (Wait::Answer, None) => None,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// All open connections.
pub struct Connections {
    /// Most at a time.
    all: usize,
    /// Most of one address.
    each: usize,
    open: Mutex<Vec<Arc<Connection>>>,
    given_up: AtomicU64,
    refused: AtomicU64,
}

impl Connections {
    /// None yet, and at most `all` at a time, `each` of one address.
    pub fn new(all: usize, each: usize) -> Self {
        Self { all, each, open: Mutex::default(), given_up: AtomicU64::new(0), refused: AtomicU64::new(0) }
    }

    /// How many are open.
    pub fn len(&self) -> usize {
        self.open().len()
    }

    /// How many were given up for others so far, and how many got an extra place or none.
    pub fn turned_away(&self) -> (u64, u64) {
        (self.given_up.load(Ordering::Relaxed), self.refused.load(Ordering::Relaxed))
    }

    /// A place for a connection of `peer`. `None` where not even an extra one comes free within a quarter of a second.
    pub async fn enter_soon(self: &Arc<Self>, peer: Peer) -> Option<Place> {
        for _ in 0..LOOKS {
            if let Some(place) = self.enter(peer) {
                return Some(place);
            }
            tokio::time::sleep(LOOK).await;
        }
        self.refused.fetch_add(1, Ordering::Relaxed);
        None
    }

    /// A place for a connection of `peer`. `None` where not even an extra one is free.
    fn enter(self: &Arc<Self>, peer: Peer) -> Option<Place> {
        let mut open = self.open();
        let count = |open: &[Arc<Connection>], of: Option<Peer>| {
            let counts = |c: &&Arc<Connection>| c.full.is_none() && of.is_none_or(|peer| c.peer == peer);
            open.iter().filter(counts).count()
        };
        let full = if count(&open, Some(peer)) >= self.each
            && !self.give_up(&mut open, |c| c.full.is_none() && c.peer == peer)
        {
            Some(Full::Address)
        } else if count(&open, None) >= self.all && !self.give_up(&mut open, |c| c.full.is_none()) {
            Some(Full::Server)
        } else {
            None
        };
        if full.is_some() {
            let n_extra = open.iter().filter(|c| c.full.is_some()).count();
            let may_go = |c: &Connection| c.full.is_some() && c.state().since.elapsed() >= ON_ITS_WAY;
            if n_extra >= EXTRA_PLACES && !self.give_up(&mut open, may_go) {
                return None;
            }
            self.refused.fetch_add(1, Ordering::Relaxed);
        }
        let connection = Arc::new(Connection::new(peer, full));
        open.push(Arc::clone(&connection));
        Some(Place { connections: Arc::clone(self), connection })
    }

    /// Gives up one connection that waits for its client: the system has no room for more.
    pub fn make_room(&self) {
        self.give_up(&mut self.open(), |_| true);
    }

    /// Gives up one of the connections that `may_go` and wait for their clients: of the address that has most of them, the
    /// one whose client has least to lose. False where there is none.
    fn give_up(&self, open: &mut Vec<Arc<Connection>>, may_go: impl Fn(&Connection) -> bool) -> bool {
        let mut of_peer = HashMap::new();
        for connection in &*open {
            *of_peer.entry(connection.peer).or_insert(0) += 1;
        }
        let waiting = open.iter().enumerate().filter(|(_, connection)| may_go(connection));
        let waiting = waiting.filter_map(|(i, c)| Some((Reverse(of_peer[&c.peer]), c.waits_for_client()?, i)));
        let mut waiting: Vec<_> = waiting.collect();
        if waiting.len() <= FEW {
            waiting.retain(|(_, (_, since), _)| since.elapsed() >= ON_ITS_WAY);
        }
        let Some((.., i)) = waiting.into_iter().min() else { return false };
        open.swap_remove(i).given_up.notify_one();
        self.given_up.fetch_add(1, Ordering::Relaxed);
        true
    }

    fn open(&self) -> MutexGuard<'_, Vec<Arc<Connection>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A connection's place, released on drop.
pub struct Place {
    connections: Arc<Connections>,
    /// Whose place it is.
    pub connection: Arc<Connection>,
}

impl Drop for Place {
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

    fn is_open(connections: &Connections, place: &Place) -> bool {
        connections.open().iter().any(|open| Arc::ptr_eq(open, &place.connection))
    }

    /// Lets all connections have waited for a while.
    fn wait_a_while(connections: &Connections) {
        for connection in &*connections.open() {
            let mut state = connection.state();
            state.since = state.since.checked_sub(ON_ITS_WAY).unwrap();
        }
    }

    /// Connections of `peer` that wait for answers.
    fn busy(connections: &Arc<Connections>, of: Peer, n: usize) -> Vec<Place> {
        let enter = |_| {
            let place = connections.enter(of).unwrap();
            place.connection.waits_for_answer();
            place
        };
        (0..n).map(enter).collect()
    }

    #[test]
    fn who_waits_for_a_client_makes_room() {
        let connections = Arc::new(Connections::new(3, 3));
        let [idle, uploads, works] = [(); 3].map(|()| connections.enter(peer(1)).unwrap());
        uploads.connection.waits_for_body();
        works.connection.waits_for_answer();
        assert!(connections.enter(peer(2)).unwrap().connection.full.is_some(), "their requests may be on their way");
        wait_a_while(&connections);
        let place = connections.enter(peer(2)).unwrap();
        place.connection.waits_for_answer();
        assert_eq!((place.connection.full, is_open(&connections, &idle)), (None, false));
        let place = connections.enter(peer(1)).unwrap();
        assert_eq!((place.connection.full, is_open(&connections, &uploads)), (None, false));
        assert!(is_open(&connections, &works));
        assert_eq!(connections.len(), 3);
    }

    #[test]
    fn who_has_most_makes_room_first() {
        let connections = Arc::new(Connections::new(4, 4));
        let one = connections.enter(peer(1)).unwrap();
        let many = [(); 3].map(|()| connections.enter(peer(2)).unwrap());
        for connection in &many {
            connection.connection.waits_for_body();
        }
        wait_a_while(&connections);
        let _new = connections.enter(peer(3)).unwrap();
        assert!(is_open(&connections, &one) && !is_open(&connections, &many[0]));
    }

    #[test]
    fn an_address_has_its_share() {
        let connections = Arc::new(Connections::new(4, 2));
        let _busy = busy(&connections, peer(1), 2);
        assert_eq!(connections.enter(peer(1)).unwrap().connection.full, Some(Full::Address));
        let _others = busy(&connections, peer(2), 2);
        assert_eq!(connections.enter(peer(3)).unwrap().connection.full, Some(Full::Server));
    }

    #[test]
    fn extra_places_come_to_an_end_too() {
        let connections = Arc::new(Connections::new(1, 1));
        let mut places = busy(&connections, peer(1), 1 + EXTRA_PLACES);
        assert!(connections.enter(peer(2)).is_none());
        assert_eq!(connections.len(), 1 + EXTRA_PLACES);
        places.pop();
        assert_eq!(connections.enter(peer(2)).unwrap().connection.full, Some(Full::Server));
        places.clear();
        assert_eq!(connections.len(), 0);
    }

    #[test]
    fn a_client_that_does_not_read_makes_room() {
        let connections = Arc::new(Connections::new(1, 1));
        let places = busy(&connections, peer(1), 1);
        places[0].connection.takes_answer(false);
        assert!(connections.enter(peer(2)).unwrap().connection.full.is_some(), "for a moment that is nothing special");
        places[0].connection.state().stuck = Instant::now().checked_sub(STUCK);
        assert_eq!(connections.enter(peer(2)).unwrap().connection.full, None);
    }
}
