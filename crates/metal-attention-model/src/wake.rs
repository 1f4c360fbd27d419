//! A device that was idle, brought up to its speed before there is work.

use std::time::{Duration, Instant};

use crate::ForwardPass;

/// How long an idle GPU takes to come up to its speed: 170 ms on an H200.
pub const WAKING: Duration = Duration::from_millis(200);

/// After how long without work a GPU counts as idle.
pub const ASLEEP_AFTER: Duration = Duration::from_secs(2);

/// [Wakes](ForwardPass::wake) what `pass` runs on: for [`WAKING`], or until `enough` says that there is work. For those who
/// hear that work is about to come; nobody else should keep a device busy.
pub fn wake(pass: &mut dyn ForwardPass, mut enough: impl FnMut() -> bool) {
    let start = Instant::now();
    while start.elapsed() < WAKING && !enough() && pass.wake() {}
}
