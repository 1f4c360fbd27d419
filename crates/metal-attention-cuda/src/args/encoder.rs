//! Arguments of the kernels of encoders of pictures (`encoder.cu`, `encoder_attention.cu`).

use super::kernel_args;
use crate::bounds::{Bounds, KernelArgs, Launch};
use crate::slice::{DevicePtr, F16};

/// What `encoder_elements` computes of each element: `Function` of `elements.cuh`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum ElementsFunction {
    /// GELU by tanh, times `y` where there is one, as the other activations.
    Gelu = 0,
    /// GELU by the error function.
    GeluErf = 1,
    /// `x / (1 + exp(-1.702 x))`.
    QuickGelu = 2,
    /// `x / (1 + exp(-x))`.
    Silu = 3,
    /// `x + y`.
    Add = 4,
    /// `x * y`.
    Multiply = 5,
    /// `x * a`.
    Scale = 6,
    /// `x`, at least `a` and at most `b`.
    Clamp = 7,
    /// `max(x, 0)^2`, times `y` where there is one.
    SquaredRelu = 8,
}

kernel_args! {
    /// Arguments of functions of elements.
    pub(crate) struct ElementsArgs = "ElementsArgs" in "encoder.cu" {
        pub(crate) x: DevicePtr<f32>,
        pub(crate) y: DevicePtr<f32>,
        pub(crate) out: DevicePtr<f32>,
        pub(crate) packed: DevicePtr<F16>,
        pub(crate) n_rows: u32,
        pub(crate) width: u32,
        pub(crate) y_stride: u32,
        pub(crate) function: u32,
        pub(crate) a: f32,
        pub(crate) b: f32,
        pub(crate) n_token_tiles: u32,
        pub(crate) unused: u32,
    }

    /// Arguments of the cutting of a picture.
    pub(crate) struct PatchesArgs = "PatchesArgs" in "encoder.cu" {
        pub(crate) rgb: DevicePtr<u8>,
        pub(crate) out: DevicePtr<f32>,
        pub(crate) width: u32,
        pub(crate) height: u32,
        pub(crate) side: u32,
        pub(crate) pixel_first: u32,
        pub(crate) mean: [f32; 3],
        pub(crate) std: [f32; 3],
    }

    /// Arguments of sums of rows.
    pub(crate) struct SumRowsArgs = "SumRowsArgs" in "encoder.cu" {
        pub(crate) x: DevicePtr<f32>,
        pub(crate) rows: DevicePtr<u32>,
        pub(crate) weights: DevicePtr<f32>,
        pub(crate) out: DevicePtr<f32>,
        pub(crate) n_rows: u32,
        pub(crate) width: u32,
        pub(crate) n: u32,
        pub(crate) out_stride: u32,
        pub(crate) divisor: f32,
        pub(crate) unused: u32,
    }

    /// Arguments of the transposition of each row.
    pub(crate) struct InterleaveArgs = "InterleaveArgs" in "encoder.cu" {
        pub(crate) x: DevicePtr<f32>,
        pub(crate) out: DevicePtr<f32>,
        pub(crate) n_rows: u32,
        pub(crate) width: u32,
        pub(crate) n: u32,
        pub(crate) unused: u32,
    }

    /// Arguments of the rotation of heads.
    pub(crate) struct RotateArgs = "RotateArgs" in "encoder.cu" {
        pub(crate) x: DevicePtr<f32>,
        pub(crate) table: DevicePtr<f32>,
        pub(crate) n_rows: u32,
        pub(crate) width: u32,
        pub(crate) head_dim: u32,
        pub(crate) block: u32,
    }

    /// Queries that attend to the same keys.
    pub(crate) struct EncoderTileArgs = "EncoderTile" in "encoder_units.cuh" {
        pub(crate) query: u32,
        pub(crate) n: u32,
        pub(crate) key: u32,
        pub(crate) n_keys: u32,
    }

    /// Arguments of attention in F32.
    pub(crate) struct EncoderAttentionArgs = "EncoderAttentionArgs" in "encoder_attention.cu" {
        pub(crate) q: DevicePtr<f32>,
        pub(crate) k: DevicePtr<f32>,
        pub(crate) v: DevicePtr<f32>,
        pub(crate) out: DevicePtr<f32>,
        pub(crate) tiles: DevicePtr<EncoderTileArgs>,
        pub(crate) n_queries: u32,
        pub(crate) n_keys: u32,
        pub(crate) width: u32,
        pub(crate) kv_width: u32,
        pub(crate) head_dim: u32,
        pub(crate) scale: f32,
    }

    /// Arguments of the conversion of keys and values to F16.
    pub(crate) struct EncoderHeadsArgs = "EncoderHeadsArgs" in "encoder_units.cuh" {
        pub(crate) k: DevicePtr<f32>,
        pub(crate) v: DevicePtr<f32>,
        pub(crate) k_heads: DevicePtr<F16>,
        pub(crate) v_heads: DevicePtr<F16>,
        pub(crate) n_keys: u32,
        pub(crate) width: u32,
        pub(crate) head_dim: u32,
        pub(crate) padded: u32,
    }

    /// Arguments of attention on the tensor cores.
    pub(crate) struct EncoderUnitsArgs = "EncoderUnitsArgs" in "encoder_units.cuh" {
        pub(crate) q: DevicePtr<f32>,
        pub(crate) k_heads: DevicePtr<F16>,
        pub(crate) v_heads: DevicePtr<F16>,
        pub(crate) out: DevicePtr<f32>,
        pub(crate) packed: DevicePtr<F16>,
        pub(crate) tiles: DevicePtr<EncoderTileArgs>,
        pub(crate) n_queries: u32,
        pub(crate) n_keys: u32,
        pub(crate) width: u32,
        pub(crate) kv_width: u32,
        pub(crate) head_dim: u32,
        pub(crate) n_token_tiles: u32,
        pub(crate) scale: f32,
        pub(crate) unused: u32,
    }
}

impl KernelArgs for ElementsArgs {
    fn bounds(&self, _: &Launch, bounds: &mut Bounds) {
        let (n_rows, width) = (self.n_rows as usize, self.width as usize);
        bounds.array("x", self.x, n_rows * width);
        bounds.rows("y", self.y, n_rows, self.y_stride, width);
        bounds.array("out", self.out, n_rows * width);
        bounds.packed("packed", self.packed, self.n_token_tiles, width);
    }
}

impl KernelArgs for PatchesArgs {
    fn bounds(&self, _: &Launch, bounds: &mut Bounds) {
        let (width, height, side) = (self.width as usize, self.height as usize, self.side.max(1) as usize);
        bounds.array("rgb", self.rgb, 3 * width * height);
        bounds.array("out", self.out, 3 * side * side * (width / side) * (height / side));
    }
}

impl KernelArgs for SumRowsArgs {
    fn bounds(&self, _: &Launch, bounds: &mut Bounds) {
        let (n_rows, width, n) = (self.n_rows as usize, self.width as usize, self.n as usize);
        bounds.array("x", self.x, if self.rows.is_null() { n_rows * n * width } else { width });
        bounds.array("rows", self.rows, n_rows * n);
        bounds.array("weights", self.weights, n * width);
        bounds.rows("out", self.out, n_rows, self.out_stride, width);
    }
}

impl KernelArgs for InterleaveArgs {
    fn bounds(&self, _: &Launch, bounds: &mut Bounds) {
        let n = self.n_rows as usize * self.width as usize;
        bounds.array("x", self.x, n);
        bounds.array("out", self.out, n);
    }
}

impl KernelArgs for RotateArgs {
    fn bounds(&self, _: &Launch, bounds: &mut Bounds) {
        let n_rows = self.n_rows as usize;
        bounds.array("x", self.x, n_rows * self.width as usize);
        bounds.array("table", self.table, n_rows * self.head_dim as usize);
    }
}

impl KernelArgs for EncoderAttentionArgs {
    fn bounds(&self, launch: &Launch, bounds: &mut Bounds) {
        let (queries, keys) =
            (self.n_queries as usize * self.width as usize, self.n_keys as usize * self.kv_width as usize);
        bounds.array("q", self.q, queries);
        bounds.array("k", self.k, keys);
        bounds.array("v", self.v, keys);
        bounds.array("out", self.out, queries);
        bounds.array("tiles", self.tiles, launch.grid.blocks[0]);
    }
}

impl KernelArgs for EncoderHeadsArgs {
    fn bounds(&self, _: &Launch, bounds: &mut Bounds) {
        let (n_keys, width) = (self.n_keys as usize, self.width as usize);
        let heads = n_keys * (width / self.head_dim.max(1) as usize) * self.padded as usize;
        bounds.array("k", self.k, n_keys * width);
        bounds.array("v", self.v, n_keys * width);
        bounds.array("k_heads", self.k_heads, heads);
        bounds.array("v_heads", self.v_heads, heads);
    }
}

impl KernelArgs for EncoderUnitsArgs {
    fn bounds(&self, launch: &Launch, bounds: &mut Bounds) {
        let queries = self.n_queries as usize * self.width as usize;
        // The zeros behind heads are only more.
        let keys = self.n_keys as usize * self.kv_width as usize;
        bounds.array("q", self.q, queries);
        bounds.array("k_heads", self.k_heads, keys);
        bounds.array("v_heads", self.v_heads, keys);
        bounds.array("out", self.out, queries);
        bounds.packed("packed", self.packed, self.n_token_tiles, self.width as usize);
        bounds.array("tiles", self.tiles, launch.grid.blocks[0]);
    }
}
