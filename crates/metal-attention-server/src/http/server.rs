//! Takes connections, and ends them when it is time.

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

/// Room for a request's head; a connection has no more until a body is read.
const MAX_HEAD: usize = 64 << 10;

/// How long a connection in an extra place may take to send a request's head.
const EXTRA_HEADER_TIMEOUT: Duration = Duration::from_secs(2);

/// Connections at a time of those that watch over the server.
const MONITORING_CONNECTIONS: usize = 32;

/// How long answers may take to reach their clients once nothing is generated any more.
const FLUSH: Duration = Duration::from_secs(2);

/// Why a server ended by itself.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A model that the server starts with could not be loaded.
    #[error("{0}")]
    Load(SourceError),
    /// The system gave no thread to load the model on.
    #[error(
        "cannot start a thread to load the model on: {0}; the limit of processes (ulimit -u) or of memory is too low"
    )]
    Thread(std::io::Error),
    /// A defect: loading the model panicked.
    #[error("loading the model met a defect, which is told above: the server has ended")]
    LoadPanicked,
    /// A defect: the engine's thread panicked. All requests were told.
    #[error("the engine met a defect ({0}): the server has ended, and can be started again")]
    Engine(Arc<str>),
}

impl From<StartFailure> for ServeError {
    fn from(failure: StartFailure) -> Self {
        match failure {
            StartFailure::Load(error) => Self::Load(error),
            StartFailure::Thread(error) => Self::Thread(error),
            // The thread has said why.
            StartFailure::Panicked => Self::LoadPanicked,
        }
    }
}

/// Where a server listens.
pub struct Listeners {
    /// For requests. At least one.
    pub requests: Vec<TcpListener>,
    /// For those that watch over the server: `/health`, `/ready` and `/metrics` alone, without a key. It has connections of
    /// its own, however many requests there are.
    pub monitoring: Option<TcpListener>,
}

impl From<TcpListener> for Listeners {
    fn from(requests: TcpListener) -> Self {
        Self { requests: vec![requests], monitoring: None }
    }
}

/// Serves `models` on `listeners` until `shutdown` is ready, and for the drain's delay from there on; then until the
/// running requests are finished or the grace is over; meanwhile new requests are told to go elsewhere. Where a model that
/// the server starts with cannot be loaded the server ends with the error. Where the engine of the only model meets a
/// defect the server ends too, once all have been told: what watches over it starts it again, with a forward pass that
/// nothing is wrong with.
pub async fn serve(
    listeners: impl Into<Listeners>,
    options: HttpOptions,
    models: ModelsOptions,
    shutdown: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    let Listeners { requests: listeners, monitoring } = listeners.into();
    // Everybody on this machine is let in where no key is asked for, and nobody else.
    let on_loopback = listeners.iter().all(is_loopback);
    let checks_host = on_loopback && options.keys.is_empty();
    let app = App::new(options, models, on_loopback);
    // Ends with this function.
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
                // Who connects is about to ask.
                if let Some(scheduler) = app.models.only_scheduler() {
                    scheduler.announce();
                }
                acceptor.spawn_connection(stream, peer).await;
            }
        }
    }
    // Routers hear that the server goes, while it takes requests as ever.
    if failure.is_none() && !is_loading && !app.options.drain_delay.is_zero() {
        app.leave();
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
    // Who comes now is told so, instead of finding nobody: routers take a moment to hear that the server is not ready any more.
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

/// Ends connections: those that carry nothing as soon as what is on its way must have come, the others with their answer.
async fn end(connections: GracefulShutdown) {
    tokio::time::sleep(TRANSIT_TIME).await;
    connections.shutdown().await;
}

/// Answers those that watch over the server, to its very end.
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

/// Lets connections in.
struct Acceptor {
    app: App,
    router: Router,
    connections: Arc<Connections>,
    graceful: GracefulShutdown,
    /// A connection carries one request only.
    closes: bool,
}

impl Acceptor {
    fn new(app: &App, router: Router) -> Self {
        let connections = Arc::clone(&app.connections);
        Self { app: app.clone(), router, connections, graceful: GracefulShutdown::new(), closes: false }
    }

    /// Serves a connection, where there is a place for it. Where not even an extra one is free it is closed.
    async fn spawn_connection(&self, stream: TcpStream, peer: Peer) {
        if let Some(permit) = self.connections.admit_soon(peer).await {
            tokio::spawn(serve_connection(stream, peer, permit, self));
        }
    }

    /// The connections so far, to be ended. Those to come carry one request.
    fn close(&mut self) -> GracefulShutdown {
        self.closes = true;
        std::mem::take(&mut self.graceful)
    }
}

/// Waits for the engine of the only model to meet a defect.
async fn engine_defect(app: &App) -> Arc<str> {
    match app.models.only_scheduler() {
        Some(scheduler) => scheduler.wait_for_defect().await,
        None => std::future::pending().await,
    }
}

/// The next connection.
async fn accept(listeners: &[TcpListener], connections: &Connections) -> (TcpStream, Peer) {
    loop {
        let (accepted, ..) = select_all(listeners.iter().map(|listener| Box::pin(listener.accept()))).await;
        match accepted {
            Ok((stream, address)) => return (stream, Peer::at(address.ip())),
            // The client went away, or there are too many open files: both pass, the latter with a connection that waits
            // for its client.
            Err(error) => {
                tracing::warn!("cannot accept a connection: {error}");
                if !is_of_the_client(&error) {
                    connections.evict_any();
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

/// Whether the connection that was to be accepted is at fault, and not this machine.
fn is_of_the_client(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted, WouldBlock};
    matches!(error.kind(), ConnectionAborted | ConnectionReset | Interrupted | WouldBlock)
}

fn serve_connection(
    stream: TcpStream,
    peer: Peer,
    permit: ConnectionPermit,
    acceptor: &Acceptor,
) -> impl Future<Output = ()> + Send + 'static {
    let options = &acceptor.app.options;
    // Without it tokens wait for each other. A connection that cannot is served all the same.
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
                // Clients that go away or send no HTTP are everyday life.
                tracing::debug!("a connection ended early: {error}");
            },
            () = permit.connection.evicted() => tracing::debug!("a connection was given up for another"),
        }
    }
}
