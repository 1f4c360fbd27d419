//! Takes connections, and ends them when it is time.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_io_timeout::TimeoutStream;

use super::app::App;
use super::peer::Peer;
use super::{HttpOptions, Loaded, routes};

/// Room for a request's head; a connection has no more until a body is read.
const MAX_HEAD: usize = 64 << 10;

/// How long answers may take to reach their clients once nothing is generated any more.
const FLUSH: Duration = Duration::from_secs(2);

/// Serves on `listener` until `shutdown` is ready, and then until the running requests are finished or the grace is
/// over. `load` makes the model meanwhile, on a thread of its own; where it fails the server ends with its error.
pub async fn serve<E: Send + 'static>(
    listener: TcpListener,
    options: HttpOptions,
    load: impl FnOnce() -> Result<Loaded, E> + Send + 'static,
    shutdown: impl Future<Output = ()>,
) -> Result<(), E> {
    // Everybody on this machine is let in where no key is asked for, and nobody else.
    let is_loopback = listener.local_addr().is_ok_and(|address| address.ip().is_loopback());
    let checks_host = is_loopback && options.keys.is_empty();
    let app = App::new(options);
    let router = routes::router(&app, checks_host);
    let connections = Arc::new(Semaphore::new(app.options.max_connections));
    let graceful = GracefulShutdown::new();
    let (loaded_sender, mut loaded) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || loaded_sender.send(load()).map_err(|_| "the server has ended"));
    let mut is_loading = true;
    let mut shutdown = pin!(shutdown);
    loop {
        tokio::select! {
            () = &mut shutdown => break,
            result = &mut loaded, if is_loading => {
                is_loading = false;
                match result {
                    Ok(Ok(model)) => app.set_model(model),
                    Ok(Err(error)) => return Err(error),
                    // The thread panicked and has said why.
                    Err(_) => break,
                }
            }
            (stream, peer, permit) = accept(&listener, &connections) => {
                let served = serve_connection(stream, peer, &app, router.clone(), &graceful);
                let app = app.clone();
                app.metrics.connections.fetch_add(1, Ordering::Relaxed);
                tokio::spawn(async move {
                    served.await;
                    app.metrics.connections.fetch_sub(1, Ordering::Relaxed);
                    drop(permit);
                });
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
    let flushed = tokio::time::timeout(grace + FLUSH, graceful.shutdown());
    let ((), flushed) = tokio::join!(requests, flushed);
    if flushed.is_err() {
        tracing::warn!("some clients did not take their answers in time");
    }
    Ok(())
}

/// The next connection, as soon as there may be one more.
async fn accept(
    listener: &TcpListener,
    connections: &Arc<Semaphore>,
) -> (TcpStream, Peer, Option<OwnedSemaphorePermit>) {
    // The semaphore is never closed.
    let permit = Arc::clone(connections).acquire_owned().await.ok();
    loop {
        match listener.accept().await {
            Ok((stream, address)) => return (stream, Peer(address.ip().to_canonical()), permit),
            // The client went away, or the process has too many files open: both pass.
            Err(error) => {
                tracing::warn!("cannot accept a connection: {error}");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

fn serve_connection(
    stream: TcpStream,
    peer: Peer,
    app: &App,
    router: Router,
    graceful: &GracefulShutdown,
) -> impl Future<Output = ()> + Send + 'static {
    // Without it tokens wait for each other. A connection that cannot is served all the same.
    let _ = stream.set_nodelay(true);
    let mut stream = TimeoutStream::new(stream);
    stream.set_write_timeout(Some(app.options.write_timeout));
    let routes = TowerToHyperService::new(router);
    let service = service_fn(move |mut request: hyper::Request<hyper::body::Incoming>| {
        request.extensions_mut().insert(peer);
        routes.call(request)
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(app.options.header_timeout)
        .max_buf_size(MAX_HEAD)
        .serve_connection(TokioIo::new(Box::pin(stream)), service);
    let connection = graceful.watch(connection);
    async move {
        // Clients that go away or send no HTTP are everyday life.
        if let Err(error) = connection.await {
            tracing::debug!("a connection ended early: {error}");
        }
    }
}
