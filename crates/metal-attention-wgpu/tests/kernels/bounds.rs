//! The bounds of buffer accesses, which release builds do not check in shaders: each shader states them in a comment,
//! and the code that binds buffers and records dispatches checks them.

use std::path::Path;

use crate::support::gpu;
use metal_attention_gguf::TensorType;
use metal_attention_model::BatchToken;
use metal_attention_wgpu::kernels::{RmsNormShape, residual_add, rmsnorm};
use metal_attention_wgpu::{BatchBuffer, BatchDims, InputPlace, WgpuError, catalogue, wgpu};

#[test]
fn every_shader_states_its_bounds() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("shaders");
    let paths = |folder: &Path| std::fs::read_dir(folder).expect("a folder").map(|entry| entry.unwrap().path());
    let files: Vec<_> = paths(&folder).chain(paths(&folder.join("recurrent"))).collect();
    let read = |path: &Path| std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    for path in files.iter().filter(|path| path.extension().is_some_and(|e| e == "wgsl")) {
        let stated = read(path).lines().any(|line| line.starts_with("// Bounds: ") && line.len() > 20);
        assert!(stated, "{} does not say `// Bounds: ...`", path.display());
    }
    for key in catalogue() {
        assert!(files.contains(&folder.join(format!("{}.wgsl", key.file))), "{}: no file {}", key.name, key.file);
    }
    // The file of each tensor type includes the file that states the bounds of its reads.
    for ty in TensorType::ALL {
        let source = read(&folder.join(format!("types/{}.wgsl", ty.name().to_lowercase())));
        let through_another = source.contains("types/two_bits.wgsl");
        assert!(source.contains("types/unit.wgsl") || through_another, "{source}");
    }
    assert!(read(&folder.join("types/two_bits.wgsl")).contains("types/unit.wgsl"));
    assert!(read(&folder.join("types/unit.wgsl")).contains("// Bounds: "));
}

/// Whether `f` panics.
fn panics(f: impl FnOnce()) -> bool {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).is_err()
}

#[test]
fn buffers_that_are_too_short_are_refused_when_bound() {
    let Some(gpu) = gpu() else { return };
    let [long, short] = [256, 64].map(|bytes| gpu.buffer("x", bytes).unwrap());
    let shape = RmsNormShape { n: 32, eps: 1e-5, outputs_only: false };
    assert!(rmsnorm(gpu, shape, &long, &long, &long, &long).is_ok());
    let error = rmsnorm(gpu, shape, &long, &short, &long, &long).unwrap_err();
    assert!(matches!(error, WgpuError::Mismatch { .. }), "{error}");
    assert!(error.to_string().contains("the buffers of rmsnorm cannot be put together: one is too short"), "{error}");
}

#[test]
fn batches_larger_than_the_buffers_are_not_recorded() {
    let Some(gpu) = gpu() else { return };
    let x = gpu.buffer("x", 4 * 32 * 3).unwrap();
    let add = residual_add(gpu, 32, &x, &x).unwrap();
    let step = |n_tokens| BatchDims { n_tokens, n_outputs: 0, n_runs: 1, n_splits: 1 };
    assert!(add.fits(step(3)) && !add.fits(step(4)) && !add.fits(step(u32::MAX)));
    let record = |n_tokens| {
        let mut encoder = gpu.encoder();
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        add.record(gpu, &mut pass, step(n_tokens));
    };
    assert!(!panics(|| record(3)) && panics(|| record(4)));
}

#[test]
fn batches_have_only_valid_indices() {
    let Some(gpu) = gpu() else { return };
    let batch = || BatchBuffer::new(gpu, 2, 3, 130, &[9, 5]).unwrap();
    let token = |seq, pos| BatchToken { id: 0, seq, pos, output: true };
    let writes = |tokens: &[BatchToken]| !panics(|| batch().write_tokens(gpu, tokens));
    assert!(writes(&[token(2, 129), token(0, 0)]));
    assert!(!writes(&[token(0, 0); 3]), "more tokens than the buffer has");
    assert!(!writes(&[token(3, 0)]), "a sequence that does not exist");
    assert!(!writes(&[token(0, 130)]) && !writes(&[token(0, usize::MAX)]), "a position beyond the context");
    let places = |rope_row, position| {
        let place = InputPlace { rope_row, position, has_row: false };
        !panics(|| batch().write_tokens_at(gpu, &[token(0, 0)], |_| place))
    };
    assert!(places(131, 129));
    assert!(!places(132, 0) && !places(u32::MAX, 0), "a row behind those of the inputs");
    assert!(!places(0, 130) && !places(0, u32::MAX), "a position that no sequence reaches");
    let pages = |seq, pages: &[u32]| !panics(|| batch().write_pages(gpu, 1, seq, pages));
    assert!(!panics(|| batch().write_pages(gpu, 0, 0, &[8])), "a page of another cache group");
    assert!(panics(|| batch().write_pages(gpu, 2, 0, &[0])), "a cache group that does not exist");
    assert!(pages(2, &[4, 0, 3]));
    assert!(!pages(0, &[0, 1, 2, 3]), "more pages than a sequence has");
    assert!(!pages(0, &[0, 5]) && !pages(0, &[u32::MAX]), "a page that does not exist");
    assert!(!pages(3, &[0]), "a sequence that does not exist");
}
