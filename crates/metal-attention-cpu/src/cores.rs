//! The default number of threads.

/// The number of physical cores that this process may use: hardware threads of one core count once. At most the number of
/// processors that the process is allowed to run on.
pub fn physical_cores() -> usize {
    let allowed = std::thread::available_parallelism().map_or(1, usize::from);
    core_ids().map_or(allowed, |n| n.clamp(1, allowed))
}

/// The number of different (package, core) pairs in sysfs; `None` where sysfs does not list them.
#[cfg(target_os = "linux")]
fn core_ids() -> Option<usize> {
    let mut cores = std::collections::HashSet::new();
    for entry in std::fs::read_dir("/sys/devices/system/cpu").ok()?.flatten() {
        let topology = entry.path().join("topology");
        let read = |name: &str| std::fs::read_to_string(topology.join(name)).ok();
        if let (Some(package), Some(core)) = (read("physical_package_id"), read("core_id")) {
            cores.insert((package, core));
        }
    }
    (!cores.is_empty()).then_some(cores.len())
}

#[cfg(not(target_os = "linux"))]
fn core_ids() -> Option<usize> {
    None
}
