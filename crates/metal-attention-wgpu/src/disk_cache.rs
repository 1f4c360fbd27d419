//! The driver's cache of compiled pipelines, kept in a file so that the next start need not compile them again.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::{env, io};

/// Most bytes of the file. It grows with drivers and versions that come and go, and is started anew when it is larger.
const MAX_BYTES: u64 = 256 << 20;

/// The driver's cache of pipelines, and its file.
#[derive(Debug)]
pub(crate) struct DiskCache {
    /// The driver's cache.
    cache: wgpu::PipelineCache,
    /// The file.
    path: PathBuf,
    /// Checksum of the data in the file; `None`: there is no usable file.
    saved: Mutex<Option<u64>>,
}

impl DiskCache {
    /// Opens the cache of `adapter` in `folder`; `None` if the device has none. A file that is missing, damaged or from
    /// another driver counts as empty.
    pub fn open(device: &wgpu::Device, adapter: &wgpu::AdapterInfo, folder: &Path) -> Option<Self> {
        if !device.features().contains(wgpu::Features::PIPELINE_CACHE) {
            return None;
        }
        let path = folder.join(wgpu::util::pipeline_cache_key(adapter)?);
        let data = read(&path);
        let descriptor =
            wgpu::PipelineCacheDescriptor { label: Some("pipelines"), data: data.as_deref(), fallback: true };
        // SAFETY: the data must come from `PipelineCache::get_data` for this kind of adapter. `save` writes nothing
        // else under this name, the checksum detects files that were truncated or damaged, and wgpu compares adapter
        // and driver. A forged file cannot be excluded, but anyone who can write to the user's cache folder can also
        // run programs as that user.
        let cache = unsafe { device.create_pipeline_cache(&descriptor) };
        Some(Self { cache, path, saved: Mutex::new(data.as_deref().map(checksum)) })
    }

    /// The driver's cache, to compile pipelines with.
    pub fn driver_cache(&self) -> &wgpu::PipelineCache {
        &self.cache
    }

    /// Writes the file if the cache has changed. Other processes see the old file or the new one, never a part.
    pub fn save(&self) -> io::Result<()> {
        static SAVES: AtomicUsize = AtomicUsize::new(0);
        let Some(data) = self.cache.get_data() else { return Ok(()) };
        let sum = checksum(&data);
        let mut saved = self.saved.lock().unwrap_or_else(PoisonError::into_inner);
        if *saved == Some(sum) {
            return Ok(());
        }
        if let Some(folder) = self.path.parent() {
            fs::create_dir_all(folder)?;
        }
        let save = SAVES.fetch_add(1, Ordering::Relaxed);
        let partial = self.path.with_extension(format!("{}-{save}.partial", std::process::id()));
        let written = fs::write(&partial, [&sum.to_le_bytes()[..], &data].concat());
        let done = written.and_then(|()| fs::rename(&partial, &self.path));
        if done.is_err() {
            // The error of the write is reported, not that of the removal.
            let _ = fs::remove_file(&partial);
        } else {
            *saved = Some(sum);
        }
        done
    }
}

/// The data of a file that `save` wrote: a checksum of 8 bytes, then the data. `None`: it is missing, too large or
/// damaged.
fn read(path: &Path) -> Option<Vec<u8>> {
    if fs::metadata(path).ok()?.len() > MAX_BYTES {
        return None;
    }
    let mut bytes = fs::read(path).ok()?;
    let sum = u64::from_le_bytes(*bytes.first_chunk()?);
    bytes.drain(..8);
    (checksum(&bytes) == sum).then_some(bytes)
}

/// FNV-1a, 64 bits.
fn checksum(data: &[u8]) -> u64 {
    data.iter().fold(0xcbf2_9ce4_8422_2325, |sum, &byte| (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// The default folder for compiled pipelines; `None`: they are not kept.
pub(crate) fn default_folder() -> Option<PathBuf> {
    folder(|name| env::var_os(name).filter(|value| !value.is_empty()))
}

/// The folder that environment variables, read by `var`, select.
fn folder(var: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    match var("METAL_ATTENTION_CACHE") {
        Some(choice) if choice == "off" => return None,
        Some(choice) => return Some(choice.into()),
        None => {}
    }
    let path = |name| var(name).map(PathBuf::from);
    let base = if cfg!(windows) {
        path("LOCALAPPDATA")
    } else if cfg!(target_os = "macos") {
        path("HOME").map(|home| home.join("Library/Caches"))
    } else {
        path("XDG_CACHE_HOME").or_else(|| path("HOME").map(|home| home.join(".cache")))
    };
    base.map(|base| base.join("metal-attention"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_follows_the_environment() {
        let with = |vars: &[(&str, &str)]| {
            folder(|name| vars.iter().find(|(n, _)| *n == name).map(|(_, value)| OsString::from(value)))
        };
        assert_eq!(with(&[("METAL_ATTENTION_CACHE", "off"), ("HOME", "/home/me")]), None);
        assert_eq!(with(&[("METAL_ATTENTION_CACHE", "/c"), ("HOME", "/home/me")]), Some("/c".into()));
        assert_eq!(with(&[]), None);
        if cfg!(target_os = "linux") {
            assert_eq!(with(&[("HOME", "/home/me")]), Some("/home/me/.cache/metal-attention".into()));
            assert_eq!(
                with(&[("HOME", "/home/me"), ("XDG_CACHE_HOME", "/cache")]),
                Some("/cache/metal-attention".into())
            );
        }
    }

    #[test]
    fn a_file_with_another_checksum_is_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cache");
        assert_eq!(read(&path), None);
        let data = b"pipelines".to_vec();
        let file = [&checksum(&data).to_le_bytes()[..], &data].concat();
        fs::write(&path, &file).unwrap();
        assert_eq!(read(&path), Some(data));
        fs::write(&path, &file[..file.len() - 1]).unwrap();
        assert_eq!(read(&path), None);
        fs::write(&path, &file[..5]).unwrap();
        assert_eq!(read(&path), None);
    }
}
