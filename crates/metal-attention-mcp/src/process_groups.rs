//! The process groups of running servers, so that none outlives this process even if it ends without cleanup.

use std::collections::BTreeSet;
use std::io;
use std::process::{Child, Command};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The process ids of the groups' leaders.
static GROUPS: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());

/// Kills all servers that run as child processes, and their child processes, without waiting for them: for a process
/// that ends without dropping its clients. Outside Unix, the servers only see the end of their stdin.
pub fn kill_servers() {
    for &leader in groups().iter() {
        kill(leader);
    }
}

/// Starts a process as the leader of a group and registers the group atomically with regard to [`kill_servers`].
pub fn start(program: &mut Command) -> io::Result<Child> {
    // In its own process group, Ctrl-C in the terminal cancels a call without reaching the server, and a signal to the
    // group also reaches the server's child processes.
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(program, 0);
    let mut groups = groups();
    let child = program.spawn()?;
    groups.insert(child.id());
    Ok(child)
}

/// Unregisters the group of a process that has exited.
pub fn remove(leader: u32) {
    groups().remove(&leader);
}

/// Sends SIGTERM to a group.
pub fn terminate(leader: u32) {
    #[cfg(unix)]
    signal(leader, nix::sys::signal::Signal::SIGTERM);
    #[cfg(not(unix))]
    let _ = leader;
}

/// Sends SIGKILL to a group.
pub fn kill(leader: u32) {
    #[cfg(unix)]
    signal(leader, nix::sys::signal::Signal::SIGKILL);
    #[cfg(not(unix))]
    let _ = leader;
}

#[cfg(unix)]
fn signal(leader: u32, signal: nix::sys::signal::Signal) {
    // Signalling an empty group fails without harm: the system does not reuse its id at once.
    let _ = nix::sys::signal::killpg(nix::unistd::Pid::from_raw(leader.cast_signed()), signal);
}

fn groups() -> MutexGuard<'static, BTreeSet<u32>> {
    GROUPS.lock().unwrap_or_else(PoisonError::into_inner)
}
