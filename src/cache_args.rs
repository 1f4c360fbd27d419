//! Flags for the prefix cache beyond the KV cache: main memory and disk for the KV pages of finished sequences.

use std::path::PathBuf;
use std::str::FromStr;

use metal_attention::scheduler::{CacheDisk, SchedulerOptions};

const MIB: u64 = 1 << 20;

/// The limit on disk in MiB if the flag has none.
const DISK_MIB: u64 = 16 << 10;

/// The flags `--cache-ram` and `--cache-disk`.
#[derive(Debug, Clone, clap::Args)]
pub struct CacheArgs {
    /// Main memory in MiB for the KV pages of finished sequences that leave the KV cache, for all replicas; -1: no limit, 0: none
    /// [default: 8192, or a quarter of the free memory]
    #[arg(long, value_name = "MIB", allow_negative_numbers = true, value_parser = clap::value_parser!(i64).range(-1..=1 << 40))]
    cache_ram: Option<i64>,

    /// Folder for KV pages that leave that memory, and the MiB that they may take there (16384 if no number is given)
    #[arg(long, value_name = "DIR[:MIB]")]
    cache_disk: Option<FolderAndSize>,
}

/// The value of `--cache-disk`.
#[derive(Debug, Clone, PartialEq, Eq)]
struct FolderAndSize {
    /// The folder.
    folder: PathBuf,
    /// The limit in MiB.
    mib: u64,
}

impl FromStr for FolderAndSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // The folder's name may contain colons.
        let sized = text.rsplit_once(':').and_then(|(folder, mib)| Some((folder, mib.parse::<u64>().ok()?)));
        let (folder, mib) = sized.unwrap_or((text, DISK_MIB));
        if folder.is_empty() || mib == 0 {
            return Err("it is a folder, or a folder, a colon and a number of MiB".into());
        }
        Ok(Self { folder: folder.into(), mib })
    }
}

impl CacheArgs {
    /// Sets the limits in `options` of one scheduler, of which there are `n_replicas`: each gets an equal share. The default for
    /// main memory depends on what is free at the time of the call.
    pub fn set(&self, options: &mut SchedulerOptions, n_replicas: usize) {
        let n = n_replicas.max(1) as u64;
        options.cache_ram = match self.cache_ram.map(u64::try_from) {
            None => SchedulerOptions::default_cache_ram() / n,
            Some(Ok(mib)) => mib.saturating_mul(MIB) / n,
            // A negative number: no limit.
            Some(Err(_)) => u64::MAX,
        };
        options.cache_disk = self.cache_disk.as_ref().map(|FolderAndSize { folder, mib }| CacheDisk {
            folder: folder.clone(),
            bytes: mib.saturating_mul(MIB) / n,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_may_have_a_size() {
        let read =
            |text: &str| text.parse().map(|FolderAndSize { folder, mib }| (folder.display().to_string(), mib)).ok();
        assert_eq!(read("/tmp/a"), Some(("/tmp/a".into(), 16384)));
        assert_eq!(read("/tmp/a:100"), Some(("/tmp/a".into(), 100)));
        assert_eq!(read("C:\\a"), Some(("C:\\a".into(), 16384)));
        assert_eq!(read("C:\\a:1"), Some(("C:\\a".into(), 1)));
        assert_eq!((read(""), read(":5"), read("a:0")), (None, None, None));
    }

    #[test]
    fn limits_are_divided_among_replicas() {
        let of = |cache_ram, n| {
            let mut options = SchedulerOptions::default();
            let disk = Some(FolderAndSize { folder: "a".into(), mib: 10 });
            CacheArgs { cache_ram, cache_disk: disk }.set(&mut options, n);
            (options.cache_ram, options.cache_disk.map(|disk| disk.bytes))
        };
        assert_eq!(of(Some(100), 4), (25 * MIB, Some(10 * MIB / 4)));
        assert_eq!(of(Some(0), 1).0, 0);
        assert_eq!(of(Some(-1), 2).0, u64::MAX);
        assert!(of(None, 2).0 <= 4 << 30);
    }
}
