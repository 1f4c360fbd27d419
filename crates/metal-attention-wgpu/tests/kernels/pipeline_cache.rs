//! The cache of compiled pipelines in a file.

use crate::support::open;
use metal_attention_wgpu::{PipelineKey, WgpuDevice, WgpuOptions, catalogue, wgpu};

/// The pipelines that the tests build.
fn keys() -> Vec<PipelineKey> {
    catalogue().into_iter().filter(|key| ["argmax", "rmsnorm", "residual_add"].contains(&key.name.as_str())).collect()
}

/// Builds a few pipelines on a new device and saves them.
fn build_and_save(options: &WgpuOptions) -> Option<WgpuDevice> {
    let gpu = open(options)?;
    for key in keys() {
        gpu.pipelines().get(&gpu, &key).unwrap();
    }
    assert_eq!(gpu.pipelines().len(), 3);
    gpu.pipelines().save();
    Some(gpu)
}

#[test]
fn pipelines_are_saved_and_a_damaged_file_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("cache");
    let options = WgpuOptions { pipeline_cache: Some(folder.clone()), ..Default::default() };
    let Some(gpu) = build_and_save(&options) else { return };
    if !gpu.summary().features.contains(wgpu::Features::PIPELINE_CACHE) {
        assert!(!folder.exists());
        return;
    }
    let files: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    let [file] = &files[..] else { panic!("one file and nothing partial: {files:?}") };
    let saved = std::fs::read(file).unwrap();
    assert!(saved.len() > 64);

    // A device that finds all pipelines in the file adds none. The size may differ a little, because some drivers do not
    // write the same bytes twice.
    let check_size = |file| {
        let len = std::fs::read(file).unwrap().len();
        assert!(len.abs_diff(saved.len()) <= saved.len() / 50, "{len} bytes, not about {}", saved.len());
    };
    build_and_save(&options).unwrap();
    check_size(file);

    let mut changed = saved.clone();
    changed[saved.len() / 2] ^= 0x55;
    for broken in [&[][..], b"nonsense", &saved[..saved.len() / 2], &changed] {
        std::fs::write(file, broken).unwrap();
        build_and_save(&options).unwrap();
        check_size(file);
    }
}

#[test]
fn a_folder_that_cannot_be_written_does_no_harm() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("a file");
    std::fs::write(&file, "").unwrap();
    build_and_save(&WgpuOptions { pipeline_cache: Some(file.join("folder")), ..Default::default() });
    build_and_save(&WgpuOptions { pipeline_cache: None, ..Default::default() });
}
