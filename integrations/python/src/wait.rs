//! Waiting for the engine while Python goes on.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::RwLock;
use tokio::task::AbortHandle;
use tokio::time::timeout;

/// How long a signal such as Ctrl-C may go unnoticed.
const PATIENCE: Duration = Duration::from_millis(50);

/// The thread that hands events on to `async` code, and keeps the time.
pub struct Threads {
    runtime: Option<Runtime>,
    /// Read by each task that calls Python.
    callers: Arc<RwLock<()>>,
}

impl Threads {
    pub fn start() -> std::io::Result<Self> {
        let mut builder = Builder::new_multi_thread();
        let runtime = builder.worker_threads(1).thread_name("events").enable_time().build()?;
        Ok(Self { runtime: Some(runtime), callers: Arc::default() })
    }

    fn runtime(&self) -> &Runtime {
        self.runtime.as_ref().expect("it is there until it is dropped")
    }

    /// Runs a task that calls Python.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> AbortHandle {
        let callers = Arc::clone(&self.callers);
        let task = async move {
            let _calling = callers.read_owned().await;
            task.await;
        };
        self.runtime().spawn(task).abort_handle()
    }

    /// Waits for all tasks that call Python.
    pub fn wait_for_callers(&self, py: Python<'_>) -> PyResult<()> {
        self.wait(py, async { drop(self.callers.write().await) })
    }

    /// Waits for `future` with Python detached. A signal whose handler raises ends the wait, and drops the future.
    pub fn wait<F: Future<Output: Send> + Send>(&self, py: Python<'_>, future: F) -> PyResult<F::Output> {
        let mut future = pin!(future);
        loop {
            let waiting = future.as_mut();
            let outcome = py.detach(|| self.runtime().block_on(async { timeout(PATIENCE, waiting).await }));
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
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
