//! Time per dispatch of the attention kernels on the best GPU, in a chain of dispatches that wait for each other as
//! those of a forward pass do: `cargo run --release -p metal-attention-kernels --example attention_time`.

use std::time::Instant;

use metal_attention_kernels::kernels::{
    AttentionBuffers, AttentionShape, decode_attention, decode_attention_merge, kv_cache_copy, n_splits, partial_bytes,
    prefill_attention, rope_apply_dual, rope_table,
};
use metal_attention_kernels::wgpu::ComputePassDescriptor;
use metal_attention_kernels::{Dispatch, GpuDevice, GpuError, GpuOptions, StepSize, batch_words};
use metal_attention_model::{BatchToken, CacheType, Rope, RopeLayout, RopeScaling};

/// Microseconds per repetition of `dispatches`: the best of a few submissions of many.
fn time(gpu: &GpuDevice, dispatches: &[Dispatch], size: StepSize) -> Result<f64, GpuError> {
    const TIMES: u32 = 200;
    let mut best = f64::INFINITY;
    for _ in 0..5 {
        let mut encoder = gpu.encoder();
        {
            let mut pass = encoder.begin_compute_pass(&ComputePassDescriptor::default());
            for _ in 0..TIMES {
                for dispatch in dispatches {
                    dispatch.record(gpu, &mut pass, size);
                }
            }
        }
        let start = Instant::now();
        let submission = gpu.submit(encoder);
        gpu.wait(Some(submission))?;
        best = best.min(start.elapsed().as_secs_f64() * 1e6 / f64::from(TIMES));
    }
    Ok(best)
}

fn main() -> Result<(), GpuError> {
    let gpu = GpuDevice::open(&GpuOptions::default())?;
    println!("{}", gpu.summary().name);
    for (model, n_head, n_head_kv, head_dim) in
        [("SmolLM-135M", 9, 3, 64), ("Llama-3.2-1B", 32, 8, 64), ("Qwen3-4B", 32, 8, 128)]
    {
        let shape = AttentionShape {
            n_head,
            n_head_kv,
            head_dim,
            scale: 0.125,
            window: None,
            n_ctx: 8192,
            n_rot: head_dim,
            rope_layout: RopeLayout::Interleaved,
            qk_norm_eps: None,
            cache: CacheType::F16,
        };
        let n_most = 2048;
        let rope = Rope { n_rot: head_dim, layout: shape.rope_layout, freq_base: 10_000.0, scaling: RopeScaling::None };
        let rope = gpu.upload("rope", &rope_table(&rope, None, shape.n_ctx))?;
        let qkv = gpu.buffer("qkv", (n_most * shape.qkv_len() * 4) as u64)?;
        let keys = gpu.buffer("keys", shape.cache_bytes(1))?;
        let values = gpu.buffer("values", shape.cache_bytes(1))?;
        let att = gpu.buffer("att", (n_most * shape.att_len() * 4) as u64)?;
        let partial = gpu.buffer("partial", partial_bytes(&shape, 1))?;
        let batch = gpu.buffer("batch", ((1 + n_most) * 16) as u64)?;
        let buffers = AttentionBuffers {
            qkv: &qkv,
            rope: &rope,
            qk_norm: None,
            keys: &keys,
            values: &values,
            att: &att,
            partial: &partial,
            batch: &batch,
        };
        let tokens = |from: usize, n: usize| -> Vec<BatchToken> {
            (from..from + n).map(|pos| BatchToken { id: 0, seq: 0, pos, logits: true }).collect()
        };
        let decode = decode_attention(&gpu, &shape, &buffers)?;
        let merge = decode_attention_merge(&gpu, &shape, &buffers)?;
        for pos in [0, 31, 63, 127, 255, 511, 1023, 4095, 8191] {
            gpu.write(&batch, &batch_words(&tokens(pos, 1)));
            let size = StepSize { n_tokens: 1, n_wanted: 1, n_splits: n_splits(pos) };
            let us = time(&gpu, &[decode.clone(), merge.clone()], size)?;
            println!("{model}: decode at position {pos}, {} splits: {us:.2} us", size.n_splits);
        }
        let rope = rope_apply_dual(&gpu, &shape, &buffers)?;
        let copy = kv_cache_copy(&gpu, &shape, &buffers)?;
        let prefill = prefill_attention(&gpu, &shape, &buffers)?;
        for n in [16, 128, 512, 2048] {
            gpu.write(&batch, &batch_words(&tokens(0, n)));
            let size = StepSize { n_tokens: n as u32, n_wanted: n as u32, n_splits: 1 };
            for dispatch in [&rope, &copy, &prefill] {
                let us = time(&gpu, std::slice::from_ref(dispatch), size)?;
                println!("{model}: {} of {n} tokens: {us:.2} us", dispatch.kernel());
            }
        }
    }
    Ok(())
}
