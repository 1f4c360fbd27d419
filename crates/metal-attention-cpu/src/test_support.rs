//! Helpers of the unit tests: random numbers, tensors and thread pools.

use metal_attention_gguf::{GgufFile, GgufWriter, Metadata, Tensor, TensorDecl, TensorType};

use crate::kernels::matmul::WeightMatrix;
use crate::memory::PackedMemory;
use crate::pool::ThreadPool;

/// A reproducible sequence of random numbers (`SplitMix64`).
pub(crate) struct TestRandom(pub(crate) u64);

impl TestRandom {
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in `-limit..limit`.
    pub(crate) fn float(&mut self, limit: f32) -> f32 {
        ((self.bits() >> 40) as f32 / (1u32 << 23) as f32 - 1.0) * limit
    }

    pub(crate) fn floats(&mut self, n: usize, limit: f32) -> Vec<f32> {
        (0..n).map(|_| self.float(limit)).collect()
    }

    pub(crate) fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.bits() as u8).collect()
    }
}

/// A matrix `[n_out, n_in]` of `bytes`.
pub(crate) fn tensor(ty: TensorType, n_in: usize, n_out: usize, bytes: &[u8]) -> Tensor {
    let decl = TensorDecl { name: "w".into(), shape: vec![n_in, n_out], ty };
    let mut writer = GgufWriter::new(Vec::new(), 3, &Metadata::new(), &[decl]).expect("a valid tensor");
    writer.write(bytes).expect("as many bytes as declared");
    let file = GgufFile::from_bytes(&writer.finish().expect("all bytes written")).expect("a valid file");
    file.tensor("w").expect("the tensor just written").clone()
}

/// `tensor` prepared for the kernels.
pub(crate) fn matrix(pool: &ThreadPool, tensor: &Tensor, exact: bool) -> WeightMatrix {
    WeightMatrix::new(pool, &mut PackedMemory::default(), tensor, exact).expect("memory")
}

pub(crate) fn pool(n_threads: usize) -> ThreadPool {
    ThreadPool::new(n_threads).expect("threads")
}
