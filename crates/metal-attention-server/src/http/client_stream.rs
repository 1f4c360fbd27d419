//! A connection's bytes, and whether its client takes them.

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

/// A connection whose writes fail where the client takes nothing for too long.
pub struct ClientStream {
    stream: TcpStream,
    connection: Arc<ClientConnection>,
    timeout: Duration,
    /// Runs while the client takes nothing.
    limit: Option<Pin<Box<Sleep>>>,
}

impl ClientStream {
    /// The client of `stream` may take nothing for `timeout`.
    pub fn new(stream: TcpStream, connection: Arc<ClientConnection>, timeout: Duration) -> Self {
        Self { stream, connection, timeout, limit: None }
    }

    /// Passes on what a write gave, and notes whether it went on.
    fn note<T>(&mut self, context: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            if self.limit.take().is_some() {
                self.connection.takes_answer(true);
            }
            return written;
        }
        let timeout = self.timeout;
        let limit = self.limit.get_or_insert_with(|| {
            self.connection.takes_answer(false);
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

/// An answer's body, at whose end its connection waits for the next request.
pub struct AnswerBody {
    body: Body,
    connection: Arc<ClientConnection>,
}

impl AnswerBody {
    /// `body`, sent over `connection`.
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
