//! Helpers of the CPU backend's tests.

use metal_attention_cpu::{CpuExecutor, CpuForwardPass, CpuOptions, Isa};
use metal_attention_gguf::{GgufFile, GgufWriter, Metadata, TensorDecl};
use metal_attention_model::{BatchToken, ForwardPass, SessionOptions};

/// Builds a GGUF file in memory.
#[allow(dead_code)] // not every test file uses it
pub fn gguf(metadata: &Metadata, tensors: &[(TensorDecl, Vec<u8>)]) -> GgufFile {
    let decls: Vec<_> = tensors.iter().map(|(decl, _)| decl.clone()).collect();
    let mut writer = GgufWriter::new(Vec::new(), 3, metadata, &decls).expect("valid tensors");
    for (_, bytes) in tensors {
        writer.write(bytes).expect("as many bytes as declared");
    }
    GgufFile::from_bytes(&writer.finish().expect("all bytes written")).expect("a valid file")
}

/// The model of `file` on two threads.
pub fn start(file: &GgufFile, options: &SessionOptions) -> CpuForwardPass {
    start_on(&on_threads(2), file, options)
}

/// `n_threads` threads.
pub fn on_threads(n_threads: usize) -> CpuOptions {
    CpuOptions { n_threads, ..CpuOptions::default() }
}

/// Two threads with the instruction set `isa`.
pub fn on_isa(isa: Isa) -> CpuOptions {
    CpuOptions { isa: Some(isa), ..on_threads(2) }
}

/// The model of `file` on `cpu`.
pub fn start_on(cpu: &CpuOptions, file: &GgufFile, options: &SessionOptions) -> CpuForwardPass {
    CpuExecutor::session_of_file(cpu, file, options).expect("a model that runs")
}

/// The batch that appends `ids` to sequence `seq`, with the logits of every token.
pub fn batch(model: &CpuForwardPass, seq: usize, ids: &[u32]) -> Vec<BatchToken> {
    let start = model.n_past(seq);
    ids.iter().enumerate().map(|(i, &id)| BatchToken { id, seq, pos: start + i, output: true }).collect()
}

/// The bits of floats, for comparisons that must be exact.
pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}
