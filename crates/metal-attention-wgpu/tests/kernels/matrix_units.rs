//! The memory layouts of matrix-unit operands, as `matmul_cooperative.wgsl` assumes them, in a shader of their own.

use metal_attention_wgpu::wgpu;
use wgpu::util::DeviceExt;

/// One 16x16 product with the operands in memory as in the kernel: `a` row by row, `b` column by column, four numbers per
/// vector and six vectors per row; the product row by row.
const SOURCE: &str = "
enable f16;
enable wgpu_cooperative_matrix;
@group(0) @binding(0) var<storage, read> a: array<f32>;
@group(0) @binding(1) var<storage, read> b: array<f32>;
@group(0) @binding(2) var<storage, read_write> c: array<f32>;
var<workgroup> tile_a: array<vec4<f16>, 96>;
var<workgroup> tile_b: array<vec4<f16>, 96>;
var<workgroup> result: array<f32, 320>;
@compute @workgroup_size(32)
fn main(@builtin(local_invocation_index) tid: u32) {
    for (var i = tid; i < 64u; i += 32u) {
        let at = i / 4u * 6u + i % 4u;
        tile_a[at] = vec4<f16>(vec4(a[4u * i], a[4u * i + 1u], a[4u * i + 2u], a[4u * i + 3u]));
        tile_b[at] = vec4<f16>(vec4(b[4u * i], b[4u * i + 1u], b[4u * i + 2u], b[4u * i + 3u]));
    }
    workgroupBarrier();
    let left = coopLoadT<coop_mat16x16<f16, A>>(&tile_a[0], 6u);
    let right = coopLoad<coop_mat16x16<f16, B>>(&tile_b[0], 6u);
    var sum = coop_mat16x16<f32, C>();
    sum = coopMultiplyAdd(left, right, sum);
    coopStoreT(sum, &result[0], 20u);
    workgroupBarrier();
    for (var i = tid; i < 256u; i += 32u) { c[i] = result[i / 16u * 20u + i % 16u]; }
}";

/// A device with 16x16x16 matrix units for 16-bit floats; `None` if this machine has none.
fn device() -> Option<(wgpu::Device, wgpu::Queue)> {
    let mut instance = wgpu::InstanceDescriptor::new_without_display_handle();
    instance.backends = wgpu::Backends::VULKAN;
    let instance = wgpu::Instance::new(instance);
    let adapters = pollster::block_on(instance.enumerate_adapters(wgpu::Backends::all()));
    let adapter = adapters.into_iter().find(|adapter| {
        adapter.features().contains(wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX | wgpu::Features::SHADER_F16)
            && adapter.cooperative_matrix_properties().iter().any(|p| {
                (p.m_size, p.n_size, p.k_size) == (16, 16, 16)
                    && (p.ab_type, p.cr_type) == (wgpu::CooperativeScalarType::F16, wgpu::CooperativeScalarType::F32)
            })
    })?;
    let descriptor = wgpu::DeviceDescriptor {
        required_features: wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX | wgpu::Features::SHADER_F16,
        // SAFETY: only cooperative matrices are experimental here, and this test checks that they work.
        experimental_features: unsafe { wgpu::ExperimentalFeatures::enabled() },
        ..Default::default()
    };
    Some(pollster::block_on(adapter.request_device(&descriptor)).unwrap())
}

/// The product that the device computes with [`SOURCE`], `[16, 16]`.
fn product(device: &wgpu::Device, queue: &wgpu::Queue, a: &[f32], b: &[f32]) -> Vec<f32> {
    let upload = |contents: &[f32]| {
        let contents = bytemuck::cast_slice(contents);
        let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC;
        device.create_buffer_init(&wgpu::util::BufferInitDescriptor { label: None, contents, usage })
    };
    let buffers = [upload(a), upload(b), upload(&[0.0; 256])];
    let source = wgpu::ShaderSource::Wgsl(SOURCE.into());
    let module = device.create_shader_module(wgpu::ShaderModuleDescriptor { label: None, source });
    let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
        label: None,
        layout: None,
        module: &module,
        entry_point: None,
        compilation_options: wgpu::PipelineCompilationOptions::default(),
        cache: None,
    });
    let entries =
        [0, 1, 2].map(|i| wgpu::BindGroupEntry { binding: i as u32, resource: buffers[i].as_entire_binding() });
    let layout = &pipeline.get_bind_group_layout(0);
    let group = device.create_bind_group(&wgpu::BindGroupDescriptor { label: None, layout, entries: &entries });
    let staging = device.create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: 1024,
        usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
        mapped_at_creation: false,
    });
    let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    {
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        pass.set_pipeline(&pipeline);
        pass.set_bind_group(0, &group, &[]);
        pass.dispatch_workgroups(1, 1, 1);
    }
    encoder.copy_buffer_to_buffer(&buffers[2], 0, &staging, 0, 1024);
    queue.submit([encoder.finish()]);
    staging.map_async(wgpu::MapMode::Read, .., |_| {});
    device.poll(wgpu::PollType::wait_indefinitely()).unwrap();
    bytemuck::pod_collect_to_vec(&staging.get_mapped_range(..).unwrap()[..])
}

#[test]
fn layouts_are_those_that_the_kernel_assumes() {
    let Some((device, queue)) = device() else {
        metal_attention_testing::skip("this machine has no 16x16x16 matrix units for 16-bit floats");
        return;
    };
    // Small integers, so that every product and sum is exact.
    let a: Vec<f32> = (0..256).map(|i| (i * 7 % 31) as f32).collect();
    let b: Vec<f32> = (0..256).map(|i| (i * 5 % 23) as f32).collect();
    let got = product(&device, &queue, &a, &b);
    let at =
        |transposed: bool, row: usize, column: usize| if transposed { 16 * column + row } else { 16 * row + column };
    let mut fits = Vec::new();
    for (ta, tb, tc) in (0..8).map(|i| (i & 1 != 0, i & 2 != 0, i & 4 != 0)) {
        let fit = (0..256).all(|i| {
            let (row, column) = (i / 16, i % 16);
            let sum: f32 = (0..16).map(|k| a[at(ta, row, k)] * b[at(tb, k, column)]).sum();
            got[at(tc, row, column)] == sum
        });
        if fit {
            fits.push((ta, tb, tc));
        }
    }
    // Expected: the left factor and the product row by row, the right factor column by column.
    assert!(fits.contains(&(false, true, false)), "layouts (column by column?) that fit: {fits:?}; product {got:?}");
}
