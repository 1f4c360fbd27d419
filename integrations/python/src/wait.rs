//! Waits for the engine with Python detached, and runs tasks that call Python.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::RwLock;
use tokio::task::AbortHandle;
use tokio::time::timeout;

/// The longest time until a signal such as Ctrl-C is noticed.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(50);

/// A thread that passes events to `async` code, and provides timers.
pub struct Threads {
    /// The runtime of the thread. `None` only while this value is dropped.
    runtime: Option<Runtime>,
    /// Locked for reading by each task that calls Python.
    callers: Arc<RwLock<()>>,
}

impl Threads {
    /// Starts the thread.
    pub fn start() -> std::io::Result<Self> {
        let mut builder = Builder::new_multi_thread();
        let runtime = builder.worker_threads(1).thread_name("events").enable_time().build()?;
        Ok(Self { runtime: Some(runtime), callers: Arc::default() })
    }

    fn runtime(&self) -> &Runtime {
        self.runtime.as_ref().expect("it is there until it is dropped")
    }

    /// Starts a task that calls Python.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> AbortHandle {
        let callers = Arc::clone(&self.callers);
        let task = async move {
            let _calling = callers.read_owned().await;
            task.await;
        };
        self.runtime().spawn(task).abort_handle()
    }

    /// Waits until all tasks that call Python have ended.
    pub fn wait_for_callers(&self, py: Python<'_>) -> PyResult<()> {
        self.wait(py, async { drop(self.callers.write().await) })
    }

    /// Waits for `future` with Python detached. If the handler of a signal raises, the wait ends with that error, and the future is
    /// dropped.
    pub fn wait<F: Future<Output: Send> + Send>(&self, py: Python<'_>, future: F) -> PyResult<F::Output> {
        let mut future = pin!(future);
        loop {
            let waiting = future.as_mut();
            let outcome = py.detach(|| self.runtime().block_on(async { timeout(SIGNAL_INTERVAL, waiting).await }));
            if let Ok(output) = outcome {
                return Ok(output);
            }
            py.check_signals()?;
        }
    }
}

impl Drop for Threads {
    /// Does not wait for the thread: it may wait for Python, which the dropping thread holds.
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
