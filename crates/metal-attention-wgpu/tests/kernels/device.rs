//! `WgpuDevice`: contents of buffers, and errors in place of panics.

use crate::support::{gpu, open};
use metal_attention_wgpu::kernels::residual_add;
use metal_attention_wgpu::{WgpuError, WgpuOptions};

#[test]
fn buffers_of_any_length_keep_their_contents() {
    let Some(gpu) = gpu() else { return };
    let bytes: Vec<u8> = (1..=37).collect();
    for n in [1, 3, 4, 5, 16, 18, 37] {
        let buffer = gpu.upload("bytes", &bytes[..n]).unwrap();
        assert_eq!(gpu.read::<u8>(&buffer, n).unwrap(), bytes[..n]);
        let padded: Vec<u8> = gpu.read(&buffer, n.next_multiple_of(16)).unwrap();
        assert!(padded[n..].iter().all(|&byte| byte == 0), "{padded:?}");
    }
    let empty = gpu.upload::<u32>("nothing", &[]).unwrap();
    assert_eq!(gpu.read::<u32>(&empty, 4).unwrap(), [0; 4]);
}

#[test]
fn buffers_and_grids_that_are_too_large_are_refused() {
    let Some(gpu) = gpu() else { return };
    let max = gpu.summary().max_binding;
    for bytes in [max + 1, u64::MAX] {
        let error = gpu.buffer("the KV cache", bytes).unwrap_err();
        assert!(matches!(error, WgpuError::TooLarge { .. }), "{error}");
        assert!(
            error.to_string().starts_with(&format!("the KV cache would take {bytes} bytes in one buffer")),
            "{error}"
        );
    }
    let x = gpu.buffer("x", 64).unwrap();
    let error = residual_add(gpu, u32::MAX as usize, &x, &x).unwrap_err().to_string();
    assert!(
        error.starts_with("the grid of residual_add cannot be put together: it takes 16777216 workgroups"),
        "{error}"
    );
}

#[test]
fn a_lost_device_gives_no_buffers() {
    let Some(gpu) = open(&WgpuOptions { checked: true, ..Default::default() }) else { return };
    gpu.destroy();
    assert!(matches!(gpu.wait(None), Err(WgpuError::Lost { .. })));
    for error in [gpu.buffer("x", 64).err(), gpu.upload("x", &[0; 16]).err(), gpu.upload("x", &[0; 3]).err()] {
        assert!(matches!(error, Some(WgpuError::Lost { .. })), "{error:?}");
    }
}

#[test]
fn out_of_memory_errors_state_the_size_if_it_is_known() {
    let error = |bytes| WgpuError::OutOfMemory { what: "a step".into(), bytes }.to_string();
    let hint = "use a smaller context (-c) or a smaller model, or run on the CPU with --device cpu";
    assert_eq!(error(None), format!("the GPU has no room for a step: {hint}"));
    assert_eq!(error(Some(3 << 19)), format!("the GPU has no room for a step (1.5 MiB): {hint}"));
}
