//! What one rendering may take.
//!
//! minijinja counts instructions; what an instruction makes, it does not. So every operator, filter, test, function and
//! method asks here before it makes, compares or searches something, for as many bytes as that will be. A rendering has a
//! thread of its own, and the thread has one meter.

use std::cell::Cell;
use std::time::{Duration, Instant};

use minijinja::Error;

use crate::TemplateLimit;

/// Instructions of one rendering; real templates take some hundred for a message.
pub(crate) const MAX_STEPS: u64 = 5_000_000;
/// Bytes that one rendering writes.
pub(crate) const MAX_OUTPUT: usize = 32 << 20;
/// Bytes of values that one rendering handles, besides [`WORK_PER_BYTE`] for each byte of the conversation. Published
/// templates take up to 8 for a byte.
const MAX_WORK: u64 = 128 << 20;
const WORK_PER_BYTE: u64 = 16;
/// The last resort, for what costs more than it is charged for. Real conversations take milliseconds.
const MAX_TIME: Duration = Duration::from_secs(10);
/// Charges between two looks at the clock.
const UNTIMED: u64 = 64 << 10;

struct Meter {
    limit: Cell<u64>,
    left: Cell<u64>,
    written: Cell<usize>,
    untimed: Cell<u64>,
    started: Cell<Option<Instant>>,
}

thread_local! {
    static METER: Meter = const {
        Meter {
            limit: Cell::new(0),
            left: Cell::new(u64::MAX),
            written: Cell::new(0),
            untimed: Cell::new(0),
            started: Cell::new(None),
        }
    };
}

/// Starts the rendering of a conversation with values of `bytes`, on this thread. Before that, nothing is limited.
pub(crate) fn start(bytes: u64) {
    METER.with(|meter| {
        let limit = MAX_WORK.saturating_add(bytes.saturating_mul(WORK_PER_BYTE));
        meter.limit.set(limit);
        meter.left.set(limit);
        meter.written.set(0);
        meter.started.set(Some(Instant::now()));
    });
}

/// Takes `bytes` of the work that is left.
pub(crate) fn charge(bytes: u64) -> Result<(), Error> {
    METER.with(|meter| {
        let Some(left) = meter.left.get().checked_sub(bytes) else {
            return Err(TemplateLimit::Work { limit: meter.limit.get() }.into());
        };
        meter.left.set(left);
        // Each charge stands for some work, however small.
        let untimed = meter.untimed.get().saturating_add(bytes.max(64));
        meter.untimed.set(untimed);
        if untimed > UNTIMED {
            meter.untimed.set(0);
            if meter.started.get().is_some_and(|start| start.elapsed() > MAX_TIME) {
                return Err(TemplateLimit::Time { seconds: MAX_TIME.as_secs() }.into());
            }
        }
        Ok(())
    })
}

/// Takes `bytes` of the output that is left, and the work to write them.
pub(crate) fn charge_output(bytes: usize) -> Result<(), Error> {
    METER.with(|meter| {
        let written = meter.written.get().saturating_add(bytes);
        if written > MAX_OUTPUT {
            return Err(TemplateLimit::Output { limit: MAX_OUTPUT }.into());
        }
        meter.written.set(written);
        charge(bytes as u64)
    })
}

/// The work that is done since [`start`], in bytes.
#[cfg(test)]
pub(crate) fn work() -> u64 {
    METER.with(|meter| meter.limit.get() - meter.left.get())
}
