//! The byte stream of a connection, which detects clients that do not read their response.

use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use hyper::body::{Body as HttpBody, Bytes, Frame, SizeHint};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Sleep, sleep};

use super::connections::ClientConnection;

/// A connection whose writes fail after a timeout without progress.
pub struct ClientStream {
    /// The socket.
    stream: TcpStream,
    /// The connection's state, which is notified of stalled writes.
    connection: Arc<ClientConnection>,
    /// Maximum time without progress of a write.
    timeout: Duration,
    /// Runs while a write makes no progress.
    limit: Option<Pin<Box<Sleep>>>,
}

impl ClientStream {
    /// Wraps `stream`; writes fail with `TimedOut` after `timeout` without progress.
    pub fn new(stream: TcpStream, connection: Arc<ClientConnection>, timeout: Duration) -> Self {
        Self { stream, connection, timeout, limit: None }
    }

    /// Returns `written`, and starts or stops the timeout.
    fn note<T>(&mut self, context: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            if self.limit.take().is_some() {
                self.connection.set_reading(true);
            }
            return written;
        }
        let timeout = self.timeout;
        let limit = self.limit.get_or_insert_with(|| {
            self.connection.set_reading(false);
            Box::pin(sleep(timeout))
        });
        limit.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for ClientStream {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for ClientStream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write(context, bytes);
        this.note(context, written)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write_vectored(context, slices);
        this.note(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }
}

/// A response body that marks its connection as waiting for the next request when it ends.
pub struct AnswerBody {
    /// The body.
    body: Body,
    /// The connection that it is sent over.
    connection: Arc<ClientConnection>,
}

impl AnswerBody {
    /// Wraps `body`, which is sent over `connection`.
    pub fn new(body: Body, connection: Arc<ClientConnection>) -> Self {
        Self { body, connection }
    }
}

impl HttpBody for AnswerBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.get_mut().body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for AnswerBody {
    fn drop(&mut self) {
        self.connection.waits_for_head();
    }
}
