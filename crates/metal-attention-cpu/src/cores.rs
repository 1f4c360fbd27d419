//! The default number of threads.

/// The number of physical cores that this process may use: hardware threads of one core count once. At most the number of
/// processors that the process is allowed to run on. On Apple's chips, performance cores only.
pub fn physical_cores() -> usize {
    let allowed = std::thread::available_parallelism().map_or(1, usize::from);
    cores().map_or(allowed, |n| n.clamp(1, allowed))
}

/// The number of different (package, core) pairs in sysfs; `None` where sysfs does not list them.
#[cfg(target_os = "linux")]
fn cores() -> Option<usize> {
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

/// The number of performance cores, which Apple's chips have as performance level 0; on Intel's, of all cores. `None` where the
/// system does not report it.
#[cfg(target_os = "macos")]
fn cores() -> Option<usize> {
    sysctl(c"hw.perflevel0.physicalcpu").or_else(|| sysctl(c"hw.physicalcpu"))
}

/// The value of an integer of `sysctl`; `None` if there is none above 0.
#[cfg(target_os = "macos")]
fn sysctl(name: &std::ffi::CStr) -> Option<usize> {
    let mut value: libc::c_int = 0;
    let mut size = size_of_val(&value);
    // SAFETY: `name` ends with a zero byte; the system writes at most `size` bytes, which is the size of `value`. No new value
    // is set: its pointer is null and its size 0.
    let status =
        unsafe { libc::sysctlbyname(name.as_ptr(), (&raw mut value).cast(), &raw mut size, std::ptr::null_mut(), 0) };
    (status == 0 && size == size_of_val(&value)).then(|| usize::try_from(value).ok()).flatten().filter(|&n| n > 0)
}

/// The number of cores of all processor groups; `None` where the system does not list them.
#[cfg(windows)]
fn cores() -> Option<usize> {
    use windows_sys::Win32::System::SystemInformation::{GetLogicalProcessorInformationEx, RelationProcessorCore};

    let mut size = 0u32;
    // SAFETY: without a buffer the system writes the needed size to `size` only.
    unsafe { GetLogicalProcessorInformationEx(RelationProcessorCore, std::ptr::null_mut(), &raw mut size) };
    // Words of 8 bytes, as the records contain pointer-sized masks.
    let mut buffer = vec![0u64; (size as usize).div_ceil(8)];
    // SAFETY: the buffer has at least `size` bytes, which is the most that the system writes, and the alignment of the records.
    let written =
        unsafe { GetLogicalProcessorInformationEx(RelationProcessorCore, buffer.as_mut_ptr().cast(), &raw mut size) };
    let bytes: Vec<u8> = buffer.iter().flat_map(|word| word.to_ne_bytes()).collect();
    let records = bytes.get(..size as usize).filter(|_| written != 0)?;
    Some(n_core_records(records)).filter(|&n| n > 0)
}

#[cfg(not(any(target_os = "linux", target_os = "macos", windows)))]
fn cores() -> Option<usize> {
    None
}

/// The number of records of `SYSTEM_LOGICAL_PROCESSOR_INFORMATION_EX` that describe a core. Each begins with its kind (0: a
/// core) and its size in bytes, as 32-bit integers.
#[cfg(any(windows, test))]
fn n_core_records(mut records: &[u8]) -> usize {
    let mut n = 0;
    while let Some((header, _)) = records.split_first_chunk::<8>() {
        let [kind, size] =
            [0, 4].map(|at| u32::from_ne_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]));
        n += usize::from(kind == 0);
        // A record shorter than its header would never end the loop.
        match records.get((size as usize).max(8)..) {
            Some(rest) => records = rest,
            None => break,
        }
    }
    n
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_are_at_most_the_allowed_processors() {
        let n = physical_cores();
        assert!((1..=std::thread::available_parallelism().unwrap().get()).contains(&n), "{n}");
        // The systems that the project is tested on list their cores.
        #[cfg(any(target_os = "linux", target_os = "macos", windows))]
        assert!(cores().is_some());
    }

    #[test]
    fn records_of_cores_are_counted() {
        let record = |kind: u32, size: u32| {
            let mut bytes = [kind.to_ne_bytes(), size.to_ne_bytes()].concat();
            bytes.resize(bytes.len().max(size as usize), 0xff);
            bytes
        };
        // A core, a cache, and a core with a mask for two processor groups.
        let records = [record(0, 48), record(2, 56), record(0, 64)].concat();
        assert_eq!(n_core_records(&records), 2);
        // The last record is cut off, or claims to be smaller than its header or larger than all memory.
        assert_eq!(n_core_records(&records[..records.len() - 60]), 1);
        assert_eq!(n_core_records(&[record(0, 0), record(0, 48)].concat()), 2);
        assert_eq!(n_core_records(&record(0, 48)[..8]), 1);
        assert_eq!(n_core_records(&[0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]), 1);
        assert_eq!(n_core_records(&[]), 0);
    }
}
