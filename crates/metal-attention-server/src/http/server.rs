//! Takes connections, and ends them when it is time.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};

use super::app::App;
use super::client_stream::{AnswerBody, ClientStream};
use super::connections::Place;
use super::peer::Peer;
use super::{HttpOptions, Loaded, routes};

/// Room for a request's head; a connection has no more until a body is read.
const MAX_HEAD: usize = 64 << 10;

/// How long a connection in an extra place may take to send a request's head.
const EXTRA_HEADER_TIMEOUT: Duration = Duration::from_secs(2);

/// How long answers may take to reach their clients once nothing is generated any more.
const FLUSH: Duration = Duration::from_secs(2);

/// Why a server ended by itself.
#[derive(Debug, thiserror::Error)]
pub enum ServeError<E> {
    /// The model could not be loaded.
    #[error("{0}")]
    Load(E),
    /// A defect: loading the model panicked.
    #[error("loading the model met a defect, which is told above: the server has ended")]
    LoadPanicked,
    /// A defect: the engine's thread panicked. All requests were told.
    #[error("the engine met a defect ({0}): the server has ended, and can be started again")]
    Engine(Arc<str>),
}

/// Serves on `listener` until `shutdown` is ready, and then until the running requests are finished or the grace is
/// over. `load` makes the model meanwhile, on a thread of its own; where it fails the server ends with its error. Where
/// the engine meets a defect the server ends too, once all have been told: whoever watches over it starts it again, with
/// a forward pass that nothing is wrong with.
pub async fn serve<E: Send + 'static>(
    listener: TcpListener,
    options: HttpOptions,
    load: impl FnOnce() -> Result<Loaded, E> + Send + 'static,
    shutdown: impl Future<Output = ()>,
) -> Result<(), ServeError<E>> {
    // Everybody on this machine is let in where no key is asked for, and nobody else.
    let is_loopback = listener.local_addr().is_ok_and(|address| address.ip().is_loopback());
    let checks_host = is_loopback && options.keys.is_empty();
    let app = App::new(options);
    let router = routes::router(&app, checks_host);
    let graceful = GracefulShutdown::new();
    let (loaded_sender, mut loaded) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || loaded_sender.send(load()).map_err(|_| "the server has ended"));
    let mut is_loading = true;
    let mut failure = None;
    let mut shutdown = pin!(shutdown);
    loop {
        tokio::select! {
            () = &mut shutdown => break,
            result = &mut loaded, if is_loading => {
                is_loading = false;
                match result {
                    Ok(Ok(model)) => app.set_model(model),
                    Ok(Err(error)) => return Err(ServeError::Load(error)),
                    // The thread panicked and has said why.
                    Err(_) => {
                        failure = Some(ServeError::LoadPanicked);
                        break;
                    }
                }
            }
            why = engine_defect(&app), if !is_loading => {
                failure = Some(ServeError::Engine(why));
                break;
            }
            (stream, peer) = accept(&listener, &app) => {
                // Where not even an extra place is free the connection is closed.
                if let Some(place) = app.connections.enter_soon(peer).await {
                    tokio::spawn(serve_connection(stream, peer, place, &app, router.clone(), &graceful));
                }
            }
        }
    }
    drop(listener);
    app.shut_down();
    let grace = app.options.grace;
    let requests = async {
        if let Some(scheduler) = app.scheduler() {
            scheduler.shut_down(grace).await;
        }
    };
    // Connections that carry nothing end at once, the others with their answer.
    let flushed = tokio::time::timeout(grace.saturating_add(FLUSH), graceful.shutdown());
    let ((), flushed) = tokio::join!(requests, flushed);
    if flushed.is_err() {
        tracing::warn!("some clients did not take their answers in time");
    }
    failure.map_or(Ok(()), Err)
}

/// Waits for the engine to meet a defect.
async fn engine_defect(app: &App) -> Arc<str> {
    match app.scheduler() {
        Some(scheduler) => scheduler.wait_for_defect().await,
        None => std::future::pending().await,
    }
}

/// The next connection.
async fn accept(listener: &TcpListener, app: &App) -> (TcpStream, Peer) {
    loop {
        match listener.accept().await {
            Ok((stream, address)) => return (stream, Peer::at(address.ip())),
            // The client went away, or there are too many open files: both pass, the latter with a connection that waits
            // for its client.
            Err(error) => {
                tracing::warn!("cannot accept a connection: {error}");
                if !is_of_the_client(&error) {
                    app.connections.make_room();
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
    place: Place,
    app: &App,
    router: Router,
    graceful: &GracefulShutdown,
) -> impl Future<Output = ()> + Send + 'static {
    // Without it tokens wait for each other. A connection that cannot is served all the same.
    let _ = stream.set_nodelay(true);
    let connection = Arc::clone(&place.connection);
    let stream = ClientStream::new(stream, Arc::clone(&connection), app.options.write_timeout);
    let header_timeout = match connection.full {
        Some(_) => app.options.header_timeout.min(EXTRA_HEADER_TIMEOUT),
        None => app.options.header_timeout,
    };
    let routes = TowerToHyperService::new(router);
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
        .serve_connection(TokioIo::new(stream), service);
    let served = graceful.watch(served);
    async move {
        tokio::select! {
            result = served => if let Err(error) = result {
                // Clients that go away or send no HTTP are everyday life.
                tracing::debug!("a connection ended early: {error}");
            },
            () = place.connection.given_up() => tracing::debug!("a connection was given up for another"),
        }
    }
}
