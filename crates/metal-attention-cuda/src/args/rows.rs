//! Arguments of kernels that take rows of the residual stream, of activations or of logits: embedding, norms, activations, residual
//! streams, argmax and the highest logits; and of the kernels that measure the device.

use super::{MatrixArgs, TokenArgs, kernel_args};
use crate::bounds::{Bounds, KernelArgs, Launch};
use crate::ids::STEPS;
use crate::runner::TOP_K;
use crate::slice::{DevicePtr, F16};

kernel_args! {
    /// Arguments of the embedding (`ends.cu`).
    pub(crate) struct EmbeddingArgs = "EmbeddingArgs" in "ends.cu" {
        pub(crate) table: MatrixArgs,
        pub(crate) positions: MatrixArgs,
        pub(crate) types: DevicePtr<f32>,
        pub(crate) rows: DevicePtr<f32>,
        pub(crate) tokens: DevicePtr<TokenArgs>,
        pub(crate) x: DevicePtr<f32>,
        pub(crate) scale: f32,
        pub(crate) n_embd: u32,
    }

    /// Arguments of the norm of rows (`norm.cu`).
    pub(crate) struct NormArgs = "NormArgs" in "norm.cu" {
        pub(crate) x: DevicePtr<f32>,
        pub(crate) weight: DevicePtr<f32>,
        pub(crate) bias: DevicePtr<f32>,
        pub(crate) packed: DevicePtr<F16>,
        pub(crate) out: DevicePtr<f32>,
        pub(crate) rows: DevicePtr<u32>,
        pub(crate) n_in: u32,
        pub(crate) n_token_tiles: u32,
        pub(crate) kind: u32,
        pub(crate) eps: f32,
        pub(crate) scale: f32,
        pub(crate) accumulate: u32,
    }

    /// Arguments of a feed-forward's activation (`activation.cu`).
    pub(crate) struct ActivationArgs = "ActivationArgs" in "activation.cu" {
        pub(crate) gate: DevicePtr<f32>,
        pub(crate) up: DevicePtr<f32>,
        pub(crate) out: DevicePtr<f32>,
        pub(crate) packed: DevicePtr<F16>,
        pub(crate) gate_stride: u32,
        pub(crate) up_stride: u32,
        pub(crate) n_ff: u32,
        pub(crate) n_token_tiles: u32,
        pub(crate) activation: u32,
        pub(crate) parameter: f32,
    }

    /// Arguments of the kernel that rescales rows to the norm of others (`streams.cu`).
    pub(crate) struct StretchArgs = "StretchArgs" in "streams.cu" {
        pub(crate) a: DevicePtr<f32>,
        pub(crate) goal: DevicePtr<f32>,
        pub(crate) y: DevicePtr<f32>,
        pub(crate) n: u32,
        pub(crate) a_stride: u32,
        pub(crate) goal_stride: u32,
        pub(crate) y_stride: u32,
        pub(crate) accumulate: u32,
        pub(crate) scale: f32,
    }

    /// Arguments of the kernels of several residual streams (`streams.cu`).
    pub(crate) struct StreamsArgs = "StreamsArgs" in "streams.cu" {
        pub(crate) router: DevicePtr<f32>,
        pub(crate) matrix: DevicePtr<f32>,
        pub(crate) streams: DevicePtr<f32>,
        pub(crate) x: DevicePtr<f32>,
        pub(crate) scale: DevicePtr<f32>,
        pub(crate) scaled: DevicePtr<f32>,
        pub(crate) n: u32,
        pub(crate) n_streams: u32,
    }

    /// Arguments of a convolution within blocks (`block_conv.cu`).
    pub(crate) struct BlockConvArgs = "BlockConvArgs" in "block_conv.cu" {
        pub(crate) x: DevicePtr<f32>,
        pub(crate) base: DevicePtr<f32>,
        pub(crate) taps: DevicePtr<f32>,
        pub(crate) y: DevicePtr<f32>,
        pub(crate) tokens: DevicePtr<TokenArgs>,
        pub(crate) n: u32,
        pub(crate) n_tap: u32,
        pub(crate) group_size: u32,
        pub(crate) side: u32,
    }

    /// Arguments of the scaling of logits (`ends.cu`).
    pub(crate) struct LogitsArgs = "LogitsArgs" in "ends.cu" {
        pub(crate) logits: DevicePtr<f32>,
        pub(crate) n: u32,
        pub(crate) scale: f32,
        pub(crate) soft_cap: f32,
        pub(crate) unused: u32,
    }

    /// Arguments of argmax over logits (`ends.cu`).
    pub(crate) struct ArgmaxArgs = "ArgmaxArgs" in "ends.cu" {
        pub(crate) logits: DevicePtr<f32>,
        pub(crate) n_vocab: u32,
        pub(crate) advance: u32,
        pub(crate) best: DevicePtr<u64>,
        pub(crate) tickets: DevicePtr<u32>,
        pub(crate) ids: DevicePtr<u64>,
        pub(crate) tokens: DevicePtr<TokenArgs>,
        pub(crate) numbers: DevicePtr<u32>,
    }

    /// Arguments of the search for the highest logits (`top_k.cu`).
    pub(crate) struct TopKArgs = "TopKArgs" in "top_k.cu" {
        pub(crate) logits: DevicePtr<f32>,
        pub(crate) lists: DevicePtr<u64>,
        pub(crate) tickets: DevicePtr<u32>,
        pub(crate) best: DevicePtr<u64>,
        pub(crate) n_vocab: u32,
        pub(crate) chunk: u32,
    }

    /// Arguments of the kernels that measure the device (`rates.cu`).
    pub(crate) struct RateArgs = "RateArgs" in "rates.cu" {
        pub(crate) from: DevicePtr<[u32; 4]>,
        pub(crate) to: DevicePtr<[u32; 4]>,
        pub(crate) n: u64,
        pub(crate) steps: u32,
        pub(crate) unused: u32,
    }
}

impl KernelArgs for EmbeddingArgs {
    fn bounds(&self, launch: &Launch, bounds: &mut Bounds) {
        let (n, n_embd) = (launch.grid.blocks[1], self.n_embd as usize);
        bounds.matrices("table", &self.table, 1);
        bounds.matrices("positions", &self.positions, 1);
        bounds.array("types", self.types, n_embd);
        bounds.array("rows", self.rows, n * n_embd);
        bounds.array("tokens", self.tokens, n);
        bounds.array("x", self.x, n * n_embd);
    }
}

impl KernelArgs for NormArgs {
    fn bounds(&self, launch: &Launch, bounds: &mut Bounds) {
        let (n, n_in) = (launch.grid.blocks[0], self.n_in as usize);
        bounds.array("x", self.x, if self.rows.is_null() { n * n_in } else { n_in });
        bounds.array("weight", self.weight, n_in);
        bounds.array("bias", self.bias, n_in);
        bounds.packed("packed", self.packed, self.n_token_tiles, n_in);
        bounds.array("out", self.out, n * n_in);
        bounds.array("rows", self.rows, n);
    }
}

impl KernelArgs for ActivationArgs {
    fn bounds(&self, launch: &Launch, bounds: &mut Bounds) {
        let (n, n_ff) = (launch.grid.blocks[1], self.n_ff as usize);
        bounds.rows("gate", self.gate, n, self.gate_stride, n_ff);
        bounds.rows("up", self.up, n, self.up_stride, n_ff);
        bounds.array("out", self.out, n * n_ff);
        bounds.packed("packed", self.packed, self.n_token_tiles, n_ff);
    }
}

impl KernelArgs for StretchArgs {
    fn bounds(&self, launch: &Launch, bounds: &mut Bounds) {
        let (n_rows, n) = (launch.grid.blocks[0], self.n as usize);
        bounds.rows("a", self.a, n_rows, self.a_stride, n);
        bounds.rows("goal", self.goal, n_rows, self.goal_stride, n);
        bounds.rows("y", self.y, n_rows, self.y_stride, n);
    }
}

impl KernelArgs for StreamsArgs {
    fn bounds(&self, launch: &Launch, bounds: &mut Bounds) {
        let (n_tokens, n, n_streams) = (launch.grid.blocks[1], self.n as usize, self.n_streams as usize);
        bounds.array("router", self.router, n_tokens * n_streams);
        // A prediction has a matrix for each coefficient of the router.
        let of_each = if launch.kernel == "predict_streams" { n_streams } else { 1 };
        bounds.array("matrix", self.matrix, of_each * n_streams * n_streams);
        bounds.array("streams", self.streams, n_tokens * n_streams * n);
        bounds.array("x", self.x, n_tokens * n);
        bounds.array("scale", self.scale, n);
        bounds.array("scaled", self.scaled, n_tokens * n);
    }
}

impl KernelArgs for BlockConvArgs {
    fn bounds(&self, launch: &Launch, bounds: &mut Bounds) {
        let (n_tokens, n, n_tap) = (launch.grid.blocks[1], self.n as usize, self.n_tap as usize);
        bounds.array("x", self.x, n_tokens * n);
        bounds.array("base", self.base, 2 * n_tap * n);
        bounds.array("taps", self.taps, n_tokens * 2 * n_tap * (n / self.group_size as usize));
        bounds.array("y", self.y, n_tokens * n);
        bounds.array("tokens", self.tokens, n_tokens);
    }
}

impl KernelArgs for LogitsArgs {
    fn bounds(&self, _: &Launch, bounds: &mut Bounds) {
        bounds.array("logits", self.logits, self.n as usize);
    }
}

impl KernelArgs for ArgmaxArgs {
    fn bounds(&self, launch: &Launch, bounds: &mut Bounds) {
        let [n_blocks, n_rows, _] = launch.grid.blocks;
        bounds.array("logits", self.logits, n_rows * self.n_vocab as usize);
        bounds.array("best", self.best, n_rows * n_blocks);
        bounds.array("tickets", self.tickets, n_rows);
        bounds.array("ids", self.ids, n_rows * STEPS as usize);
        if self.advance == 1 {
            bounds.array("tokens", self.tokens, n_rows);
        }
        bounds.array("numbers", self.numbers, n_rows);
    }
}

impl KernelArgs for TopKArgs {
    fn bounds(&self, launch: &Launch, bounds: &mut Bounds) {
        let [n_blocks, n_rows, _] = launch.grid.blocks;
        bounds.array("logits", self.logits, n_rows * self.n_vocab as usize);
        bounds.array("lists", self.lists, n_rows * n_blocks * launch.grid.threads);
        bounds.array("tickets", self.tickets, n_rows);
        bounds.array("best", self.best, n_rows * TOP_K);
    }
}

impl KernelArgs for RateArgs {
    fn bounds(&self, launch: &Launch, bounds: &mut Bounds) {
        let words_of_threads = (launch.grid.blocks[0] * launch.grid.threads).div_ceil(4);
        let n = self.n as usize;
        let (from, to) = match launch.kernel {
            "rate_read" => (n, words_of_threads),
            "rate_copy" => (n, n),
            "rate_mma" => (64, words_of_threads),
            "rate_floats" => (1, words_of_threads),
            // `rate_link`: a word each.
            _ => (1, 1),
        };
        bounds.array("from", self.from, from);
        bounds.array("to", self.to, to);
    }
}
