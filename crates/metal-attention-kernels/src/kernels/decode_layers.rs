//! All layers of one token in one dispatch.

use metal_attention_gguf::TensorType;

use super::attention::AttentionShape;
use crate::arena::{Bind, Slice};
use crate::device::GpuDevice;
use crate::dispatch::{Dispatch, Extent, Reach};
use crate::error::GpuError;
use crate::pso::PsoKey;
use crate::shader::ShaderFeatures;
use crate::weights::{GpuMatrix, type_info, type_name};

/// Sizes of a model whose layers are all alike.
#[derive(Debug, Clone, Copy, PartialEq)]
#[allow(clippy::struct_excessive_bools)] // independent biases
pub struct LayersShape {
    /// Attention of each layer; `qk_norm_eps` included.
    pub attention: AttentionShape,
    /// Layers.
    pub n_layer: usize,
    /// Width of the residual stream.
    pub n_embd: usize,
    /// Width of gate and up.
    pub n_ff: usize,
    /// Epsilon of the norms before attention and feed-forward.
    pub norm_eps: f32,
    /// Which of the four matrices have a bias: Q, K and V; attention's output; gate and up; down.
    pub biases: [bool; 4],
}

impl LayersShape {
    /// Numbers of a layer in [`LayersBuffers::params`]: its two norms, its biases, the norms of query and key heads.
    pub fn params(&self) -> usize {
        let a = &self.attention;
        let lens = [a.qkv_len(), self.n_embd, 2 * self.n_ff, self.n_embd];
        let biases: usize = lens.iter().zip(self.biases).filter(|(_, has)| *has).map(|(n, _)| n).sum();
        2 * self.n_embd + biases + if a.qk_norm_eps.is_some() { 2 * a.head_dim } else { 0 }
    }

    /// Whether matrix `i` of a layer has the size that the others ask for.
    fn fits(&self, i: usize, layer: &LayerMatrices<'_>) -> bool {
        let a = &self.attention;
        let matrix = [layer.qkv, layer.out, layer.gate_up, layer.down][i];
        let n_in = [self.n_embd, a.att_len(), self.n_embd, self.n_ff][i];
        let n_out = [a.qkv_len(), self.n_embd, 2 * self.n_ff, self.n_embd][i];
        (matrix.n_in(), matrix.n_out()) == (n_in, n_out)
    }

    /// Bytes of [`LayersBuffers::flow`].
    pub fn flow_bytes(&self, groups: usize) -> u64 {
        let a = &self.attention;
        let layer = a.qkv_len() + max_splits(a, groups) * (a.att_len() + a.n_head) + 2 * self.n_embd + self.n_ff;
        8 * (self.n_layer * layer) as u64
    }
}

/// The matrices of one layer.
#[derive(Debug, Clone, Copy)]
pub struct LayerMatrices<'a> {
    /// Queries, keys and values, one below the other.
    pub qkv: &'a GpuMatrix,
    /// Attention's output.
    pub out: &'a GpuMatrix,
    /// Rows of gate and up by turns.
    pub gate_up: &'a GpuMatrix,
    /// The down projection.
    pub down: &'a GpuMatrix,
}

/// Buffers of [`decode_layers`].
#[derive(Debug, Clone, Copy)]
pub struct LayersBuffers<'a> {
    /// F32 `[n_layer, params]`, see [`LayersShape::params`].
    pub params: &'a wgpu::Buffer,
    /// F32 `[n_embd]`: the token's embedding, then the residual stream after the last layer.
    pub x: &'a wgpu::Buffer,
    /// What workgroups hand to each other, [`LayersShape::flow_bytes`] long, zero at first.
    pub flow: &'a wgpu::Buffer,
    /// Two words, zero at first: how many workgroups have ended, and whether one gave up waiting for another.
    pub state: &'a wgpu::Buffer,
    /// As [`AttentionBuffers::rope`](super::AttentionBuffers::rope), the same for all layers.
    pub rope: &'a wgpu::Buffer,
    /// Cached keys and values of each layer.
    pub cache: &'a [(Slice, Slice)],
    /// The batch: one token, with the pages of its sequence, which have to lie one after the other.
    pub batch: &'a wgpu::Buffer,
}

/// Weights of a layer, in words, that a workgroup reads ahead of the time: what stays in its core's cache until then.
const AHEAD: usize = 16 << 10;

/// Most threads of a workgroup where weights are read ahead, and where they are not: so many then wait for them that
/// memory is busy. Both measured on an H200.
const THREADS: [usize; 2] = [256, 512];

/// Positions that a workgroup sees of a context that is not longer than [`MAX_SPLITS`] times as much.
const SPLIT: usize = 128;

/// Most parts that a context is cut into.
const MAX_SPLITS: usize = 8;

/// How often a thread looks for numbers that are not there before it gives up: some tens of milliseconds on a GPU. Below
/// 65535, where llvmpipe leaves every loop.
const PATIENCE: u32 = 1 << 15;

/// Looks of a turn where the CPU plays the GPU, more than one: the system may hold the thread up that another one waits for.
const SOFTWARE_LOOKS: usize = 16;

fn max_splits(shape: &AttentionShape, groups: usize) -> usize {
    (groups / shape.n_head).clamp(2, MAX_SPLITS)
}

/// All layers of one token, `x` from the embedding to the head, in one dispatch of `groups` workgroups that stay until
/// the end and hand each other what they make. `None` where the model or the device does not suit: layers that differ,
/// matrices in several parts or buffers, sizes that are no multiples of 8, no subgroups of one known size, too little
/// workgroup memory.
///
/// All workgroups have to run at once. No API tells whether they will: run it once and look at
/// [`LayersBuffers::state`].
pub fn decode_layers(
    gpu: &GpuDevice,
    shape: &LayersShape,
    groups: usize,
    layers: &[LayerMatrices<'_>],
    buffers: &LayersBuffers<'_>,
) -> Result<Option<Dispatch>, GpuError> {
    let Some(matrices) = Matrices::of(layers) else { return Ok(None) };
    let Some((keys, values, layer_cache)) = cache_layout(buffers.cache) else { return Ok(None) };
    let a = &shape.attention;
    let sizes = [shape.n_embd, a.att_len(), shape.n_ff];
    let subgroup_size = gpu.features().subgroup_size as usize;
    let limits = gpu.wgpu().limits();
    let suits = (4..=32).contains(&subgroup_size)
        && sizes.iter().all(|n| n.is_multiple_of(8))
        && a.head_dim.is_multiple_of(4)
        && layers.len() == shape.n_layer
        && buffers.cache.len() == shape.n_layer
        && (0..4).all(|i| layers.iter().all(|layer| shape.fits(i, layer)));
    if !suits {
        return Ok(None);
    }
    let looks = if gpu.summary().is_software() { SOFTWARE_LOOKS } else { 1 };
    let layout = Layout::new(shape, groups, &matrices, layer_cache / unit_bytes(a), looks, gpu.features());
    if layout.threads > limits.max_compute_invocations_per_workgroup as usize
        || layout.workgroup_bytes(shape, subgroup_size) > limits.max_compute_workgroup_storage_size as usize
    {
        return Ok(None);
    }
    a.check()?;
    let LayersBuffers { params, x, flow, state, rope, batch, .. } = *buffers;
    let weights = layers[0].qkv.parts()[0].buffer.buffer();
    // Each slice lies in its buffer; those of all layers are as far apart as those of the first two.
    let ends = layers.iter().flat_map(|layer| [layer.qkv, layer.out, layer.gate_up, layer.down]).map(|matrix| {
        let part = &matrix.parts()[0];
        part.buffer.offset() + part.bytes(matrix.n_in())
    });
    let cache = Reach::Fixed(layer_cache * (shape.n_layer as u64 - 1) + a.cache_bytes(1));
    let bound: [(&dyn Bind, Reach); 9] = [
        (weights, Reach::Fixed(ends.max().unwrap_or(0))),
        (params, Reach::floats(shape.n_layer * shape.params())),
        (x, Reach::floats(shape.n_embd)),
        (flow, Reach::Fixed(shape.flow_bytes(groups))),
        (state, Reach::floats(2)),
        (rope, Reach::floats(a.n_ctx * a.n_rot)),
        (keys, cache),
        (values, cache),
        (batch, Reach::Batch),
    ];
    let one = Extent::Fixed(1);
    Ok(Some(Dispatch::new(gpu, &layout.key, &bound, [Extent::Fixed(groups as u32), one, one])?))
}

/// Bytes of four elements of the cache.
fn unit_bytes(shape: &AttentionShape) -> u64 {
    4 * shape.cache.bytes() as u64
}

/// The buffers of all layers' keys and values, and the bytes from one layer to the next.
fn cache_layout(cache: &[(Slice, Slice)]) -> Option<(&wgpu::Buffer, &wgpu::Buffer, u64)> {
    let (keys, values) = cache.first()?;
    let stride = cache.get(1).map_or(0, |(k, _)| k.offset().wrapping_sub(keys.offset()));
    let regular = cache.iter().enumerate().all(|(i, (k, v))| {
        let at = i as u64 * stride;
        k.buffer() == keys.buffer() && v.buffer() == values.buffer() && (k.offset(), v.offset()) == (at, at)
    });
    regular.then_some((keys.buffer(), values.buffer(), stride))
}

/// Where the matrices of all layers lie in their buffer.
#[derive(Debug, Clone, Copy)]
struct Matrices {
    types: [TensorType; 4],
    /// Words before each matrix of the first layer.
    at: [u32; 4],
    /// Words from one layer to the next.
    layer: u32,
}

impl Matrices {
    fn of(layers: &[LayerMatrices<'_>]) -> Option<Self> {
        let parts = |layer: &LayerMatrices<'_>| {
            let all = [layer.qkv, layer.out, layer.gate_up, layer.down].map(|m| match m.parts() {
                [part] if part.row_step == 1 => Some((part.ty, part.buffer.clone())),
                _ => None,
            });
            all.iter().all(Option::is_some).then(|| all.map(|part| part.expect("checked")))
        };
        let first = parts(layers.first()?)?;
        let words = |slice: &Slice| (slice.offset() / 4) as u32;
        let at = first.each_ref().map(|(_, slice)| words(slice));
        let layer = match layers.get(1) {
            Some(layer) => words(&parts(layer)?[0].1).checked_sub(at[0])?,
            None => 0,
        };
        for (i, matrices) in layers.iter().enumerate() {
            for ((ty, slice), (first, at)) in parts(matrices)?.iter().zip(first.iter().zip(at)) {
                let same = *ty == first.0 && slice.buffer() == first.1.buffer();
                if !same || words(slice) != at + i as u32 * layer {
                    return None;
                }
            }
        }
        let types = first.map(|(ty, _)| ty);
        Some(Self { types, at, layer })
    }
}

/// How a product is laid over the lanes of a subgroup.
#[derive(Debug, Clone, Copy)]
struct Tile {
    /// Lanes that share a row, a power of two.
    lanes: usize,
    /// Units that a lane asks for at once.
    unroll: usize,
    /// How often, for all of a row.
    stretches: usize,
}

impl Tile {
    fn new(n_in: usize, rows: usize, ty: TensorType, subgroup_size: usize) -> Self {
        let units = n_in / 8;
        let lanes = units.next_power_of_two().min(subgroup_size);
        let steps = units.div_ceil(lanes);
        let most = (48 / (rows * type_info(ty).words)).clamp(1, 8);
        let stretches = steps.div_ceil(most);
        Self { lanes, unroll: steps.div_ceil(stretches), stretches }
    }

    /// Units of the input that lanes read, with those past its end.
    fn units(&self) -> usize {
        self.lanes * self.unroll * self.stretches
    }
}

/// The constants of each matrix.
const NAMES: [[&str; 6]; 4] = [
    ["qkv_type", "qkv_at", "qkv_lanes", "qkv_unroll", "qkv_stretches", "qkv_bias"],
    ["out_type", "out_at", "out_lanes", "out_unroll", "out_stretches", "out_bias"],
    ["gate_up_type", "gate_up_at", "gate_up_lanes", "gate_up_unroll", "gate_up_stretches", "gate_up_bias"],
    ["down_type", "down_at", "down_lanes", "down_unroll", "down_stretches", "down_bias"],
];

/// The kernel's constants.
struct Layout {
    key: PsoKey,
    /// Of a workgroup.
    threads: usize,
    h_units: usize,
    wide_units: usize,
}

impl Layout {
    fn new(
        shape: &LayersShape,
        groups: usize,
        matrices: &Matrices,
        layer_units: u64,
        looks: usize,
        features: ShaderFeatures,
    ) -> Self {
        let a = &shape.attention;
        let subgroup_size = features.subgroup_size as usize;
        let inputs = [shape.n_embd, a.att_len(), shape.n_embd, shape.n_ff];
        let rows = [1, 1, 2, 1];
        let tiles: [Tile; 4] = std::array::from_fn(|i| Tile::new(inputs[i], rows[i], matrices.types[i], subgroup_size));
        let h_units = tiles[0].units().max(tiles[2].units());
        let wide_units = tiles[1].units().max(tiles[3].units());
        let sizes = [a.qkv_len(), shape.n_embd, 2 * shape.n_ff, shape.n_embd];
        let words: usize = (0..4).map(|i| sizes[i] * inputs[i] / 8 * type_info(matrices.types[i]).words).sum();
        let ahead = words / groups <= AHEAD;
        // No more subgroups than one has lanes, which join what the subgroups found.
        let threads = THREADS[usize::from(!ahead)].min(subgroup_size * subgroup_size);
        // Turning inputs into bytes takes a while, which small products do not make up for.
        let integer = !ahead && features.integer_dot && matrices.types.iter().all(|&ty| type_info(ty).packed);
        let mut key = a.key("decode_layers", &[&a.rope_constants()]);
        key.constants.extend([
            ("threads", threads.into()),
            ("ahead", ahead.into()),
            ("integer", integer.into()),
            ("subgroup", subgroup_size.into()),
            ("groups", groups.into()),
            ("patience", PATIENCE.into()),
            ("looks", looks.into()),
            ("n_layer", shape.n_layer.into()),
            ("n_embd", shape.n_embd.into()),
            ("n_qkv", a.qkv_len().into()),
            ("n_att", a.att_len().into()),
            ("n_ff", shape.n_ff.into()),
            ("norm_eps", shape.norm_eps.into()),
            ("layer_words", matrices.layer.into()),
            ("layer_units", (layer_units as usize).into()),
            ("split", SPLIT.into()),
            ("max_splits", max_splits(a, groups).into()),
            ("scale", a.scale.into()),
            a.window_constant(),
            ("kv_lanes", (a.head_dim / 4).next_power_of_two().into()),
            ("h_units", h_units.into()),
            ("wide_units", wide_units.into()),
        ]);
        for (i, [ty, at, lanes, unroll, stretches, bias]) in NAMES.into_iter().enumerate() {
            let tile = tiles[i];
            key.constants.extend([
                (ty, type_name(matrices.types[i]).into()),
                (at, matrices.at[i].into()),
                (lanes, tile.lanes.into()),
                (unroll, tile.unroll.into()),
                (stretches, tile.stretches.into()),
                (bias, shape.biases[i].into()),
            ]);
        }
        Self { key, threads, h_units, wide_units }
    }

    /// Bytes of workgroup memory.
    fn workgroup_bytes(&self, shape: &LayersShape, subgroup_size: usize) -> usize {
        let a = &shape.attention;
        let warps = self.threads / subgroup_size;
        let kv_units = a.head_dim / 4;
        let wide = (2 * self.wide_units).max(warps * kv_units);
        let heads = 3 * kv_units.next_multiple_of(4);
        16 * (2 * self.h_units + wide + heads) + 4 * warps + 8 * warps + 4 * 3 * a.head_dim / 2
    }
}

/// Named after the type of the feed-forward's matrices.
pub(crate) fn catalogue() -> Vec<PsoKey> {
    let shape = LayersShape {
        attention: AttentionShape::EXAMPLE,
        n_layer: 30,
        n_embd: 576,
        n_ff: 1536,
        norm_eps: 1e-5,
        biases: [false; 4],
    };
    let matrices = Matrices { types: [TensorType::Q4_0; 4], at: [0, 100_000, 200_000, 500_000], layer: 1_000_000 };
    let features = ShaderFeatures { subgroups: true, subgroup_size: 32, integer_dot: true, ..Default::default() };
    vec![Layout::new(&shape, 128, &matrices, 100_000, 1, features).key]
}
