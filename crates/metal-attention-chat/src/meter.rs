//! The meter: a budget of work for each rendering of a template.
//!
//! minijinja limits the number of instructions, but not the work of an instruction. So every operator, filter, test,
//! function and method calls [`charge`] first, with the number of bytes that it will create, compare or search. Each
//! rendering runs on a thread of its own, and the meter is thread-local.

use std::cell::Cell;
use std::time::{Duration, Instant};

use minijinja::Error;

use crate::TemplateLimit;

/// The maximum number of instructions of one rendering. Published templates run a few hundred per message.
pub(crate) const MAX_STEPS: u64 = 5_000_000;
/// The maximum size in bytes of the output of one rendering.
pub(crate) const MAX_OUTPUT: usize = 32 << 20;
/// The base budget of work in bytes. [`WORK_PER_BYTE`] is added for each byte of the conversation; published templates
/// use up to 8 per byte.
const MAX_WORK: u64 = 128 << 20;
/// The additional budget of work per byte of the conversation.
const WORK_PER_BYTE: u64 = 16;
/// The maximum time of one rendering, in case the charges underestimate its cost. Real conversations take
/// milliseconds.
const MAX_TIME: Duration = Duration::from_secs(10);
/// The amount of charges between two checks of the time.
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

/// Starts a rendering on this thread, of a conversation whose values weigh `bytes`. Before the first call nothing is
/// limited.
pub(crate) fn start(bytes: u64) {
    METER.with(|meter| {
        let limit = MAX_WORK.saturating_add(bytes.saturating_mul(WORK_PER_BYTE));
        meter.limit.set(limit);
        meter.left.set(limit);
        meter.written.set(0);
        meter.started.set(Some(Instant::now()));
    });
}

/// Takes `bytes` off the budget of work; an error if it is exceeded.
pub(crate) fn charge(bytes: u64) -> Result<(), Error> {
    METER.with(|meter| {
        let Some(left) = meter.left.get().checked_sub(bytes) else {
            return Err(TemplateLimit::Work { limit: meter.limit.get() }.into());
        };
        meter.left.set(left);
        // Every charge counts for some time, however small it is.
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

/// Takes `bytes` off the limit of the output, and off the budget of work.
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

/// The work since [`start`], in bytes.
#[cfg(test)]
pub(crate) fn work() -> u64 {
    METER.with(|meter| meter.limit.get() - meter.left.get())
}
