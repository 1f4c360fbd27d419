//! Accepts connections, serves them, and shuts the server down in order.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use futures_util::future::select_all;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use super::app::App;
use super::client_stream::{AnswerBody, ClientStream};
use super::connections::{ConnectionPermit, Connections, TRANSIT_TIME};
use super::models::{ModelsOptions, SourceError, StartFailure};
use super::peer::Peer;
use super::{HttpOptions, routes};

/// Maximum bytes of a request's head, and of a connection's buffer before a body.
const MAX_HEAD: usize = 64 << 10;

/// Maximum time for the head of a request on an extra connection.
const EXTRA_HEADER_TIMEOUT: Duration = Duration::from_secs(2);

/// Maximum connections to the monitoring port.
const MONITORING_CONNECTIONS: usize = 32;

/// The time in which responses may still be sent after the last token is generated.
const FLUSH: Duration = Duration::from_secs(2);

/// The reason why a server ended without a shutdown signal.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A model that is loaded at the start could not be loaded.
    #[error("{0}")]
    Load(SourceError),
    /// The system could not start a thread to load the model on.
    #[error(
        "cannot start a thread to load the model on: {0}; the limit of processes (ulimit -u) or of memory is too low"
    )]
    Thread(std::io::Error),
    /// Loading the model panicked.
    #[error("loading the model met a defect, which is told above: the server has ended")]
    LoadPanicked,
    /// The engine's thread panicked. All requests were answered with an error.
    #[error("the engine met a defect ({0}): the server has ended, and can be started again")]
    Engine(Arc<str>),
}

impl From<StartFailure> for ServeError {
    fn from(failure: StartFailure) -> Self {
        match failure {
            StartFailure::Load(error) => Self::Load(error),
            StartFailure::Thread(error) => Self::Thread(error),
            // The thread has logged why.
            StartFailure::Panicked => Self::LoadPanicked,
        }
    }
}

/// The sockets that a server listens on.
pub struct Listeners {
    /// For requests. At least one.
    pub requests: Vec<TcpListener>,
    /// For monitoring: `/health`, `/ready` and `/metrics` alone, without a key. Its connections are counted separately,
    /// so it answers even when the server has no free connection.
    pub monitoring: Option<TcpListener>,
}

impl From<TcpListener> for Listeners {
    fn from(requests: TcpListener) -> Self {
        Self { requests: vec![requests], monitoring: None }
    }
}

/// Serves `models` on `listeners` until `shutdown` completes. Must run within a tokio runtime.
///
/// Shutdown: for `drain_delay`, `/ready` fails while requests are still accepted; then new requests are refused, and
/// running ones may finish for `grace`.
///
/// Errors: a model that is loaded at the start fails to load, or the engine of the only model panics. In the second
/// case all requests are answered before the server ends, so that a supervisor can start it again with a fresh forward
/// pass.
pub async fn serve(
    listeners: impl Into<Listeners>,
    options: HttpOptions,
    models: ModelsOptions,
    shutdown: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    let Listeners { requests: listeners, monitoring } = listeners.into();
    // Without keys, only programs of this machine may send requests.
    let on_loopback = listeners.iter().all(is_loopback);
    let checks_host = on_loopback && options.keys.is_empty();
    let app = App::new(options, models, on_loopback);
    // Aborted when this function returns.
    let mut background = JoinSet::new();
    if let Some(listener) = monitoring {
        background.spawn(serve_monitoring(listener, app.clone()));
    }
    background.spawn(Arc::clone(&app.models).expire());
    let mut acceptor = Acceptor::new(&app, routes::router(&app, on_loopback, checks_host));
    let mut start = pin!(app.models.start());
    let mut is_loading = true;
    let mut failure = None;
    let mut shutdown = pin!(shutdown);
    loop {
        tokio::select! {
            () = &mut shutdown => break,
            result = &mut start, if is_loading => {
                is_loading = false;
                match result {
                    Ok(()) => {}
                    Err(StartFailure::Panicked) => {
                        failure = Some(ServeError::LoadPanicked);
                        break;
                    }
                    Err(error) => return Err(error.into()),
                }
            }
            why = engine_defect(&app), if !is_loading => {
                failure = Some(ServeError::Engine(why));
                break;
            }
            (stream, peer) = accept(&listeners, &app.connections) => {
                // A new connection usually sends a request at once: an idle device raises its clock meanwhile.
                if let Some(scheduler) = app.models.only_scheduler() {
                    scheduler.announce();
                }
                acceptor.spawn_connection(stream, peer).await;
            }
        }
    }
    // Load balancers see `/ready` fail while requests are still accepted.
    if failure.is_none() && !is_loading && !app.options.drain_delay.is_zero() {
        app.announce_shutdown();
        let mut delay = pin!(tokio::time::sleep(app.options.drain_delay));
        loop {
            tokio::select! {
                () = &mut delay => break,
                why = engine_defect(&app) => {
                    failure = Some(ServeError::Engine(why));
                    break;
                }
                (stream, peer) = accept(&listeners, &app.connections) => acceptor.spawn_connection(stream, peer).await,
            }
        }
    }
    app.shut_down();
    let grace = app.options.grace;
    let requests = app.models.shut_down(grace);
    // New connections are answered with 503 rather than refused: load balancers notice with a delay that the server is
    // not ready.
    let flushed = tokio::time::timeout(grace.saturating_add(FLUSH), end(acceptor.close()));
    let mut ended = pin!(async { tokio::join!(requests, flushed).1 });
    let flushed = loop {
        tokio::select! {
            flushed = &mut ended => break flushed,
            (stream, peer) = accept(&listeners, &app.connections) => acceptor.spawn_connection(stream, peer).await,
        }
    };
    drop(listeners);
    let refused = tokio::time::timeout(FLUSH, end(acceptor.close())).await;
    if flushed.is_err() || refused.is_err() {
        tracing::warn!("some clients did not take their answers in time");
    }
    failure.map_or(Ok(()), Err)
}

/// Ends connections: idle ones after the time in which a request may still be in transit, the others after their
/// response.
async fn end(connections: GracefulShutdown) {
    tokio::time::sleep(TRANSIT_TIME).await;
    connections.shutdown().await;
}

/// Serves the monitoring port until the server ends.
async fn serve_monitoring(listener: TcpListener, app: App) {
    let router = routes::monitoring_router(&app, is_loopback(&listener));
    let acceptor = Acceptor {
        connections: Arc::new(Connections::new(MONITORING_CONNECTIONS, MONITORING_CONNECTIONS)),
        ..Acceptor::new(&app, router)
    };
    loop {
        let (stream, peer) = accept(std::slice::from_ref(&listener), &acceptor.connections).await;
        acceptor.spawn_connection(stream, peer).await;
    }
}

fn is_loopback(listener: &TcpListener) -> bool {
    listener.local_addr().is_ok_and(|address| address.ip().is_loopback())
}

/// Serves accepted connections with one router.
struct Acceptor {
    /// The shared state.
    app: App,
    /// The routes.
    router: Router,
    /// The connections and their limits; the monitoring port has its own.
    connections: Arc<Connections>,
    /// Ends the connections at a shutdown.
    graceful: GracefulShutdown,
    /// Whether each connection carries one request only, during a shutdown.
    closes: bool,
}

impl Acceptor {
    fn new(app: &App, router: Router) -> Self {
        let connections = Arc::clone(&app.connections);
        Self { app: app.clone(), router, connections, graceful: GracefulShutdown::new(), closes: false }
    }

    /// Serves a connection on a new task. Closes it where not even an extra connection can be admitted.
    async fn spawn_connection(&self, stream: TcpStream, peer: Peer) {
        if let Some(permit) = self.connections.admit_soon(peer).await {
            tokio::spawn(serve_connection(stream, peer, permit, self));
        }
    }

    /// Returns the present connections, to be ended; later ones carry one request each.
    fn close(&mut self) -> GracefulShutdown {
        self.closes = true;
        std::mem::take(&mut self.graceful)
    }
}

/// Waits until the engine of the only model panics. Never returns where there are several models.
async fn engine_defect(app: &App) -> Arc<str> {
    match app.models.only_scheduler() {
        Some(scheduler) => scheduler.wait_for_defect().await,
        None => std::future::pending().await,
    }
}

/// Accepts the next connection of any listener.
async fn accept(listeners: &[TcpListener], connections: &Connections) -> (TcpStream, Peer) {
    loop {
        let (accepted, ..) = select_all(listeners.iter().map(|listener| Box::pin(listener.accept()))).await;
        match accepted {
            Ok((stream, address)) => return (stream, Peer::at(address.ip())),
            // The client has disconnected, or too many files are open: both pass. In the second case an idle connection
            // is closed.
            Err(error) => {
                tracing::warn!("cannot accept a connection: {error}");
                if !is_client_error(&error) {
                    connections.evict_any();
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

/// Whether the client, not this machine, caused the failure of `accept`.
fn is_client_error(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted, WouldBlock};
    matches!(error.kind(), ConnectionAborted | ConnectionReset | Interrupted | WouldBlock)
}

/// Serves the requests of a connection until its end, its eviction, or the shutdown.
fn serve_connection(
    stream: TcpStream,
    peer: Peer,
    permit: ConnectionPermit,
    acceptor: &Acceptor,
) -> impl Future<Output = ()> + Send + 'static {
    let options = &acceptor.app.options;
    // Without it, tokens are delayed by Nagle's algorithm. A connection that does not support it is served all the
    // same.
    let _ = stream.set_nodelay(true);
    let connection = Arc::clone(&permit.connection);
    let stream = ClientStream::new(stream, Arc::clone(&connection), options.write_timeout);
    let header_timeout = match connection.exceeded_limit {
        Some(_) => options.header_timeout.min(EXTRA_HEADER_TIMEOUT),
        None => options.header_timeout,
    };
    let routes = TowerToHyperService::new(acceptor.router.clone());
    let service = service_fn(move |mut request: hyper::Request<hyper::body::Incoming>| {
        connection.waits_for_answer();
        request.extensions_mut().insert(peer);
        request.extensions_mut().insert(Arc::clone(&connection));
        let (answer, connection) = (routes.call(request), Arc::clone(&connection));
        async move { answer.await.map(|answer| answer.map(|body| AnswerBody::new(body, connection))) }
    });
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(header_timeout)
        .max_buf_size(MAX_HEAD)
        .keep_alive(!acceptor.closes)
        .serve_connection(TokioIo::new(stream), service);
    let served = acceptor.graceful.watch(served);
    async move {
        tokio::select! {
            result = served => if let Err(error) = result {
                // Clients that disconnect or do not send HTTP are ordinary.
                tracing::debug!("a connection ended early: {error}");
            },
            () = permit.connection.evicted() => tracing::debug!("a connection was given up for another"),
        }
    }
}
