//! Waiting for the engine while Python goes on.

use std::future::Future;
use std::pin::pin;
use std::time::Duration;

use pyo3::prelude::*;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::time::timeout;

/// How long a signal such as Ctrl-C may go unnoticed.
const PATIENCE: Duration = Duration::from_millis(50);

/// The thread that hands events on to `async` code, and keeps the time.
pub struct Threads(Option<Runtime>);

impl Threads {
    pub fn start() -> std::io::Result<Self> {
        let mut builder = Builder::new_multi_thread();
        builder.worker_threads(1).thread_name("events").enable_time().build().map(|runtime| Self(Some(runtime)))
    }

    pub fn handle(&self) -> &Handle {
        self.0.as_ref().expect("it is there until it is dropped").handle()
    }

    /// Waits for `future` with Python detached. A signal whose handler raises ends the wait, and drops the future.
    pub fn wait<F: Future<Output: Send> + Send>(&self, py: Python<'_>, future: F) -> PyResult<F::Output> {
        let mut future = pin!(future);
        loop {
            let waiting = future.as_mut();
            let outcome = py.detach(|| self.handle().block_on(async { timeout(PATIENCE, waiting).await }));
            if let Ok(output) = outcome {
                return Ok(output);
            }
            py.check_signals()?;
        }
    }
}

impl Drop for Threads {
    /// The thread may be waiting for Python, which whoever drops this holds: it is not waited for.
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}
