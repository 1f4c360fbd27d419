//! Launches that would reach beyond a buffer are refused, with the kernel's and the argument's name, before anything runs.

use std::sync::Arc;

use bytemuck::Zeroable;
use metal_attention_gguf::TensorType;

use super::{device, pass, poisoned, read, tensor};
use crate::args::{MatvecArgs, NormArgs};
use crate::bounds::KernelArgs;
use crate::kernels::{self, EntryPoint};
use crate::launch::{LaunchGrid, LaunchOrder};
use crate::matrix::CudaMatrix;
use crate::runner::linear::norm_args;
use crate::slice::DevicePtr;
use crate::{CudaDevice, CudaError};

/// The kernel, the argument and the bytes of a launch that is refused: those that it needs, and those that there are.
fn refused<A: KernelArgs>(
    gpu: &Arc<CudaDevice>,
    entry: EntryPoint<A>,
    blocks: [usize; 3],
    args: &A,
) -> Option<(&'static str, &'static str, u64, u64)> {
    let (kernel, grid) = (gpu.kernel(entry).unwrap(), LaunchGrid { blocks, threads: 256, shared: 64 << 10 });
    // SAFETY: the launch either is within its buffers, or is refused.
    match unsafe { gpu.launch(kernel, grid, args, LaunchOrder::AfterPrevious) } {
        Ok(()) => None,
        Err(CudaError::OutOfBounds { kernel, field, needed, available }) => Some((kernel, field, needed, available)),
        Err(why) => panic!("{why}"),
    }
}

#[test]
fn cuda_launches_beyond_a_buffer_are_refused() {
    let Some(gpu) = device() else { return };
    let (x, out) = (gpu.upload("x", &[1.0f32; 3 * 8]).unwrap(), poisoned(&gpu, 2 * 8));
    let args = NormArgs { out: out.ptr(), ..norm_args(None, x.slice(), 8) };
    let norm = |n_rows, args| refused(&gpu, kernels::NORM_ROWS, [n_rows, 1, 1], &args);
    assert_eq!(norm(3, args), Some(("norm_rows", "out", 96, 64)));
    assert_eq!(read::<f32>(&gpu, &out, 16).iter().filter(|v| v.is_nan()).count(), 16, "nothing has run");
    assert_eq!(norm(4, NormArgs { out: x.ptr(), ..args }), Some(("norm_rows", "x", 128, 96)));
    // From the middle of a buffer, and at an address of none.
    let middle = NormArgs { out: out.slice().skip(9).ptr(), ..args };
    assert_eq!(norm(1, middle), Some(("norm_rows", "out", 32, 28)));
    let nowhere = NormArgs { weight: DevicePtr::from_address(8), ..args };
    assert_eq!(norm(2, nowhere), Some(("norm_rows", "weight", 32, 0)));
    assert_eq!(norm(2, args), None);
    assert_eq!(read::<f32>(&gpu, &out, 16), [1.0; 16]);
    // A buffer that was freed. Another test may be given its memory at once, so one of several is enough.
    let is_unknown = |_| {
        let freed = poisoned(&gpu, 16).ptr();
        norm(2, NormArgs { out: freed, ..args }).is_some_and(|(_, field, _, left)| (field, left) == ("out", 0))
    };
    assert!((0..50).any(is_unknown));
}

#[test]
fn cuda_products_of_larger_matrices_than_there_are_are_refused() {
    let Some(mut pass) = pass() else { return };
    let gpu = Arc::clone(&pass.runner.gpu);
    let matrix = CudaMatrix::new(&gpu, &mut pass.runner.kernels, &tensor(TensorType::Q8_0, 64, 32, 1)).unwrap();
    let (x, y) = (gpu.upload("x", &[0.5f32; 64]).unwrap(), poisoned(&gpu, 32));
    let mut args = MatvecArgs { n_matrices: 1, n_in: 64, n_out: 32, warps_per_tile: 1, ..MatvecArgs::zeroed() };
    args.matrices[0] = matrix.args(0);
    (args.x, args.y, args.block_ends) = (x.ptr(), y.ptr(), [1; 3]);
    // 16 rows of 64 columns are 1088 bytes.
    let wide = |n_rows: u32| {
        let mut args = args;
        (args.matrices[0].n_rows, args.n_out) = (n_rows, n_rows);
        refused(&gpu, kernels::MATVEC[0], [1, 1, 1], &args)
    };
    assert_eq!(wide(33), Some(("matvec_1", "matrices", 3 * 1088, 2 * 1088)));
    assert_eq!(refused(&gpu, kernels::MATVEC[1], [1, 1, 1], &args), Some(("matvec_2", "x", 512, 256)));
}

#[test]
fn cuda_launches_from_one_part_of_the_scratch_into_the_next_are_refused() {
    let Some(pass) = pass() else { return };
    let gpu = &pass.runner.gpu;
    let buffer = gpu.zeros("scratch", 4 * 256).unwrap();
    let whole = buffer.slice::<f32>();
    let (first, second) = (whole.take(100), whole.skip(128).take(128));
    let norm = |n_rows| {
        let args = NormArgs { out: first.ptr(), ..norm_args(None, second, 50) };
        refused(gpu, kernels::NORM_ROWS, [n_rows, 1, 1], &args)
    };
    buffer.note_parts(&[first, second]);
    assert_eq!(norm(2), None);
    assert_eq!(norm(3), Some(("norm_rows", "x", 600, 512)));
    let args = NormArgs { out: first.ptr(), ..norm_args(None, second, 101) };
    assert_eq!(refused(gpu, kernels::NORM_ROWS, [1, 1, 1], &args), Some(("norm_rows", "out", 404, 400)));
}
