//! Waking an idle device before there is work.

use std::time::{Duration, Instant};

use crate::ForwardPass;

/// Time that an idle GPU takes to come up to its clock: 170 ms on an H200.
pub const WAKING: Duration = Duration::from_millis(200);

/// Time without work after which a GPU counts as idle.
pub const ASLEEP_AFTER: Duration = Duration::from_secs(2);

/// [Wakes](ForwardPass::wake) the device of `pass` for [`WAKING`], or until `enough` returns true. For callers that
/// expect work very soon, as it keeps the device busy.
pub fn wake(pass: &mut dyn ForwardPass, mut enough: impl FnMut() -> bool) {
    let start = Instant::now();
    while start.elapsed() < WAKING && !enough() && pass.wake() {}
}
