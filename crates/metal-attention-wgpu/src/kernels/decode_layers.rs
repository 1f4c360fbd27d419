//! The persistent kernel: all layers of one token, or those whose weights are in one buffer, in one dispatch. Its
//! workgroups stay resident, compute the rows of each product that are theirs, and wait for each other's results
//! through memory. The shader is `decode_layers.wgsl`.

use std::ops::Range;

use metal_attention_gguf::TensorType;

use super::attention::AttentionShape;
use crate::arena::{Bind, Slice};
use crate::device::WgpuDevice;
use crate::dispatch::{AccessRange, Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::matrix::{IntegerCodes, MatrixPart, WgpuMatrix, type_info, type_name};
use crate::pipelines::PipelineKey;
use crate::shader::ShaderFeatures;

/// The sizes of a model whose layers are equal, except for the tensor types of their matrices.
#[derive(Debug, Clone, Copy, PartialEq)]
#[allow(clippy::struct_excessive_bools)] // independent biases
pub struct DecodeLayersShape {
    /// The attention of each layer; its `qk_norm_eps` included.
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

impl DecodeLayersShape {
    /// Floats of a layer in [`DecodeLayersBuffers::params`]: its two norms, its biases, the norms of query and key
    /// heads.
    pub fn params(&self) -> usize {
        let a = &self.attention;
        let lens = [a.qkv_len(), self.n_embd, 2 * self.n_ff, self.n_embd];
        let biases: usize = lens.iter().zip(self.biases).filter(|(_, has)| *has).map(|(n, _)| n).sum();
        2 * self.n_embd + biases + if a.qk_norm_eps.is_some() { 2 * a.head_dim } else { 0 }
    }

    /// Whether matrix `i` of a layer (QKV, output, gate and up, down) has the right number of rows and columns.
    fn fits(&self, i: usize, layer: &LayerMatrices<'_>) -> bool {
        let a = &self.attention;
        let matrix = [layer.qkv, layer.out, layer.gate_up, layer.down][i];
        let n_in = [self.n_embd, a.att_len(), self.n_embd, self.n_ff][i];
        let n_out = [a.qkv_len(), self.n_embd, 2 * self.n_ff, self.n_embd][i];
        (matrix.n_in(), matrix.n_out()) == (n_in, n_out)
    }

    /// Bytes of [`DecodeLayersBuffers::flow`]: two words for every value that workgroups pass to each other.
    pub fn flow_bytes(&self, groups: usize) -> u64 {
        let a = &self.attention;
        let layer = a.qkv_len() + max_splits(a, groups) * (a.att_len() + a.n_head) + 2 * self.n_embd + self.n_ff;
        8 * (self.n_layer * layer) as u64
    }
}

/// The matrices of one layer.
#[derive(Debug, Clone, Copy)]
pub struct LayerMatrices<'a> {
    /// Queries, keys and values, stacked.
    pub qkv: &'a WgpuMatrix,
    /// Attention's output.
    pub out: &'a WgpuMatrix,
    /// Gate and up with interleaved rows.
    pub gate_up: &'a WgpuMatrix,
    /// The down projection.
    pub down: &'a WgpuMatrix,
}

/// Buffers of [`decode_layers`].
#[derive(Debug, Clone, Copy)]
pub struct DecodeLayersBuffers<'a> {
    /// F32 `[n_layer, params]`, see [`DecodeLayersShape::params`].
    pub params: &'a wgpu::Buffer,
    /// F32 `[n_embd]`: the residual stream. The kernel reads it before the first layer and replaces it after the last.
    pub x: &'a wgpu::Buffer,
    /// The values that workgroups pass to each other, [`DecodeLayersShape::flow_bytes`] bytes, zero at first. The
    /// kernel leaves it ready for its next run.
    pub flow: &'a wgpu::Buffer,
    /// One word, zero at first: how many workgroups reached their end, in all runs of the kernel.
    pub ended: &'a wgpu::Buffer,
    /// One word, zero at first: set when a workgroup times out waiting for another. Several dispatches may share it.
    pub timed_out: &'a wgpu::Buffer,
    /// The RoPE cos/sin table, as [`AttentionBuffers::rope`](super::AttentionBuffers::rope), the same for all layers.
    pub rope: &'a wgpu::Buffer,
    /// Keys and values of each layer, all keys in one buffer and all values in one.
    pub cache: &'a [(Slice, Slice)],
    /// The batch buffer with one token. The KV pages of its sequence have to be consecutive.
    pub batch: &'a wgpu::Buffer,
}

/// Most words of a layer's weights for each workgroup that it prefetches: those stay in the core's cache until they are
/// used.
const AHEAD: usize = 16 << 10;

/// Threads of a workgroup with and without prefetching, at most. Without it, enough threads have to wait for weights to
/// keep memory busy. Measured on an H200.
const THREADS: [usize; 2] = [256, 512];

/// Most words that a lane requests at once.
const WORDS: usize = 40;

/// Positions of one split of the attention, unless the context is longer than [`MAX_SPLITS`] of them.
const SPLIT: usize = 128;

/// Most splits of the attention of a head.
const MAX_SPLITS: usize = 8;

/// The number of polls for a missing value before a thread times out: some tens of milliseconds on a GPU. Below 65535,
/// at which llvmpipe leaves every loop.
const PATIENCE: u32 = 1 << 15;

/// Loads in each round of polling on a software GPU; one on others. More than one, as the system may suspend the thread
/// that is waited for.
const SOFTWARE_POLLS: usize = 16;

/// Most splits of the attention of a head with `groups` workgroups.
fn max_splits(shape: &AttentionShape, groups: usize) -> usize {
    (groups / shape.n_head).clamp(2, MAX_SPLITS)
}

/// The layers of one token, from `x` before the first to `x` after the last, in one dispatch of `groups` workgroups.
/// The weights of all layers have to be in one buffer, and likewise all keys and all values. The tensor types of
/// matrices may differ between layers, and between the rows of a matrix. The inner error is the reason why a model or a
/// device does not suit the kernel.
///
/// All workgroups have to run at the same time, which no API reports: run the kernel once and check
/// [`DecodeLayersBuffers::ended`] and [`DecodeLayersBuffers::timed_out`].
pub fn decode_layers(
    gpu: &WgpuDevice,
    shape: &DecodeLayersShape,
    groups: usize,
    layers: &[LayerMatrices<'_>],
    buffers: &DecodeLayersBuffers<'_>,
) -> Result<Result<Dispatch, &'static str>, WgpuError> {
    let matrices = match LayerPlacements::of(layers) {
        Ok(matrices) => matrices,
        Err(why) => return Ok(Err(why)),
    };
    let Some((keys, values, layer_cache)) = cache_layout(buffers.cache) else {
        return Ok(Err("the KV cache of layers is not in one buffer"));
    };
    let a = &shape.attention;
    let sizes = [shape.n_embd, a.att_len(), shape.n_ff];
    let subgroup_size = gpu.features().subgroup_size as usize;
    let limits = gpu.wgpu().limits();
    if !(4..=32).contains(&subgroup_size) {
        return Ok(Err("the GPU's subgroups have no size from 4 to 32"));
    }
    let fits = |layer: &LayerMatrices<'_>| (0..4).all(|i| shape.fits(i, layer));
    if !sizes.iter().all(|n| n.is_multiple_of(8)) || !a.head_dim.is_multiple_of(4) || !layers.iter().all(fits) {
        return Ok(Err("widths are no multiples of 8, or of 4 for heads"));
    }
    if layers.len() != shape.n_layer || buffers.cache.len() != shape.n_layer {
        return Ok(Err("layers and caches differ in number"));
    }
    let looks = if gpu.summary().is_software() { SOFTWARE_POLLS } else { 1 };
    let layout = KernelLayout::new(shape, groups, &matrices, layer_cache / unit_bytes(a), looks, gpu.features());
    if layout.threads > limits.max_compute_invocations_per_workgroup as usize
        || layout.workgroup_bytes(shape, subgroup_size) > limits.max_compute_workgroup_storage_size as usize
    {
        return Ok(Err("a workgroup has too little memory for the widths"));
    }
    a.check()?;
    a.check_ungated()?;
    let DecodeLayersBuffers { params, x, flow, ended, timed_out, rope, batch, .. } = *buffers;
    let weights = layers[0].qkv.parts()[0].buffer.buffer();
    let ends = layers
        .iter()
        .flat_map(|layer| [layer.qkv, layer.out, layer.gate_up, layer.down])
        .flat_map(|matrix| matrix.parts().iter().map(|part| part.buffer.offset() + part.bytes(matrix.n_in())));
    let cache = AccessRange::Fixed(layer_cache * (shape.n_layer as u64 - 1) + a.cache_bytes(1));
    let cached = layer_cache * (shape.n_layer as u64 - 1) + keys.size();
    let (keys, values) = (keys.with_those_behind(cached), values.with_those_behind(cached));
    let places = match matrices.stride() {
        Some(_) => None,
        None => Some(gpu.upload("where the layers' matrices lie", &matrices.places())?),
    };
    let mut bound: Vec<(&dyn Bind, AccessRange)> = vec![
        (weights, AccessRange::Fixed(ends.max().unwrap_or(0))),
        (params, AccessRange::floats(shape.n_layer * shape.params())),
        (x, AccessRange::floats(shape.n_embd)),
        (flow, AccessRange::Fixed(shape.flow_bytes(groups))),
        (ended, AccessRange::floats(1)),
        (rope, AccessRange::floats(a.n_ctx * a.n_rot)),
        (&keys, cache),
        (&values, cache),
        (batch, AccessRange::Batch),
        (timed_out, AccessRange::floats(1)),
    ];
    bound.extend(places.iter().map(|places| (places as &dyn Bind, AccessRange::Fixed(places.size()))));
    let one = GridExtent::Fixed(1);
    Ok(Ok(Dispatch::new(gpu, &layout.key, &bound, [GridExtent::Fixed(groups as u32), one, one])?))
}

/// Bytes of four elements of the KV cache.
fn unit_bytes(shape: &AttentionShape) -> u64 {
    4 * shape.cache.bytes() as u64
}

/// The first layer's keys and values, and the bytes from one layer to the next. `None` unless all keys are in one
/// buffer, all values in one, at equal distances.
fn cache_layout(cache: &[(Slice, Slice)]) -> Option<(&Slice, &Slice, u64)> {
    let (keys, values) = cache.first()?;
    let stride = cache.get(1).map_or(Some(0), |(k, _)| k.offset().checked_sub(keys.offset()))?;
    let regular = cache.iter().enumerate().all(|(i, (k, v))| {
        let at = |first: &Slice| first.offset() + i as u64 * stride;
        let lies = |slice: &Slice, first: &Slice| slice.buffer() == first.buffer() && slice.offset() == at(first);
        lies(k, keys) && lies(v, values)
    });
    regular.then_some((keys, values, stride))
}

/// A part of a matrix, without its place: rows of one tensor type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct RowBlock {
    /// The tensor type.
    ty: TensorType,
    /// The matrix row that is its row 0.
    first_row: usize,
    /// Number of rows.
    n_rows: usize,
}

/// Where a layer's matrix is, and what it consists of.
#[derive(Debug, Clone, PartialEq, Eq)]
struct MatrixPlacement {
    /// Index in [`LayerPlacements::variants`].
    variant: u32,
    /// The word of the buffer at which each of its parts begins.
    at: Vec<u32>,
}

/// Where the matrices of all layers are in their buffer, and what they consist of. The four matrices of a layer are
/// QKV, output, gate and up, down.
#[derive(Debug, Clone)]
struct LayerPlacements {
    /// The different lists of parts of each of the four matrices, over all layers.
    variants: [Vec<Vec<RowBlock>>; 4],
    /// The four matrices of each layer.
    layers: Vec<[MatrixPlacement; 4]>,
}

impl LayerPlacements {
    /// The placements of `layers`; the error is the reason why the kernel does not suit them.
    fn of(layers: &[LayerMatrices<'_>]) -> Result<Self, &'static str> {
        let mut variants: [Vec<Vec<RowBlock>>; 4] = Default::default();
        let all = || layers.iter().map(|layer| [layer.qkv, layer.out, layer.gate_up, layer.down]);
        let mut parts = all().flatten().flat_map(WgpuMatrix::parts);
        let buffer = parts.next().map(|part| part.buffer.buffer());
        if parts.any(|part| Some(part.buffer.buffer()) != buffer) {
            return Err("a layer's weights are more than one buffer can hold");
        }
        if all().flatten().flat_map(WgpuMatrix::parts).any(|part| part.row_step != 1) {
            return Err("gate and up have different types");
        }
        let mut place = |i: usize, matrix: &WgpuMatrix| {
            let part = |part: &MatrixPart| RowBlock { ty: part.ty, first_row: part.first_row, n_rows: part.n_rows };
            let parts: Vec<_> = matrix.parts().iter().map(part).collect();
            let known = variants[i].iter().position(|known| *known == parts);
            let variant = known.unwrap_or_else(|| {
                variants[i].push(parts);
                variants[i].len() - 1
            });
            let at = matrix.parts().iter().map(|part| (part.buffer.offset() / 4) as u32).collect();
            MatrixPlacement { variant: variant as u32, at }
        };
        let layers = all().map(|[a, b, c, d]| [place(0, a), place(1, b), place(2, c), place(3, d)]).collect();
        Ok(Self { variants, layers })
    }

    /// Most parts of a matrix.
    fn n_parts(&self) -> usize {
        self.variants.iter().flatten().map(Vec::len).max().unwrap_or(1)
    }

    /// Whether tensor types differ between layers, or between the rows of a matrix.
    fn is_mixed(&self) -> bool {
        self.n_parts() > 1 || self.variants.iter().any(|variants| variants.len() > 1)
    }

    /// Words from one layer's weights to the next one's, if all layers are equal and at equal distances.
    fn stride(&self) -> Option<u32> {
        let first = self.layers.first()?;
        let stride = match self.layers.get(1) {
            Some(layer) => layer[0].at[0].checked_sub(first[0].at[0])?,
            None => 0,
        };
        let is_regular = |(layer, places): (usize, &[MatrixPlacement; 4])| {
            let at = |first: &MatrixPlacement| u64::from(first.at[0]) + layer as u64 * u64::from(stride);
            places.iter().zip(first).all(|(place, first)| u64::from(place.at[0]) == at(first))
        };
        (!self.is_mixed() && self.layers.iter().enumerate().all(is_regular)).then_some(stride)
    }

    /// The table that the kernel reads if there is no stride: for each layer and matrix the variant and the words at
    /// which its parts begin, padded to the largest number of parts.
    fn places(&self) -> Vec<u32> {
        let n_parts = self.n_parts();
        let words = |place: &MatrixPlacement| {
            let at = place.at.iter().copied().chain(std::iter::repeat(0)).take(n_parts);
            std::iter::once(place.variant).chain(at).collect::<Vec<_>>()
        };
        self.layers.iter().flatten().flat_map(words).collect()
    }

    /// The tensor types of matrix `i`.
    fn types(&self, i: usize) -> impl Iterator<Item = TensorType> + '_ {
        self.variants[i].iter().flatten().map(|part| part.ty)
    }
}

/// The division of a product's rows among the lanes of a subgroup.
#[derive(Debug, Clone, Copy)]
struct SubgroupTile {
    /// Lanes that share a row, a power of two.
    lanes: usize,
    /// Units (of 8 weights) that a lane requests at once.
    unroll: usize,
    /// The number of such requests for a whole row.
    stretches: usize,
}

impl SubgroupTile {
    fn new(n_in: usize, rows: usize, ty: TensorType, subgroup_size: usize) -> Self {
        let units = n_in / 8;
        let lanes = units.next_power_of_two().min(subgroup_size);
        let steps = units.div_ceil(lanes);
        let most = (WORDS / (rows * type_info(ty).words)).clamp(1, 8);
        let stretches = steps.div_ceil(most);
        Self { lanes, unroll: steps.div_ceil(stretches), stretches }
    }

    /// Units of the input that lanes read, including those beyond its end.
    fn units(&self) -> usize {
        self.lanes * self.unroll * self.stretches
    }
}

/// Divides `groups` workgroups among `parts` so that the slowest part is as fast as possible; `time(part, n)` is the
/// time of `n` workgroups for a part. With fewer workgroups than parts, all of them compute all parts, one after the
/// other.
fn divide_workgroups(groups: usize, parts: &[RowBlock], time: impl Fn(&RowBlock, usize) -> u64) -> Vec<Range<usize>> {
    if groups < parts.len() {
        return vec![0..groups; parts.len()];
    }
    let mut shares = vec![1; parts.len()];
    for _ in parts.len()..groups {
        let slowest = (0..parts.len()).max_by_key(|&i| time(&parts[i], shares[i]));
        if let Some(slowest) = slowest {
            shares[slowest] += 1;
        }
    }
    let mut end = 0;
    let range = |share| {
        end += share;
        end - share..end
    };
    shares.into_iter().map(range).collect()
}

/// The names of each matrix's constants: its variants, the word at which it begins in the first layer, whether it has a
/// bias.
const NAMES: [[&str; 3]; 4] = [
    ["qkv_variants", "qkv_at", "qkv_bias"],
    ["out_variants", "out_at", "out_bias"],
    ["gate_up_variants", "gate_up_at", "gate_up_bias"],
    ["down_variants", "down_at", "down_bias"],
];

/// The key of the kernel, and the sizes that its workgroup memory depends on.
struct KernelLayout {
    /// The key.
    key: PipelineKey,
    /// Threads of a workgroup.
    threads: usize,
    /// Units of the input of QKV, and of gate and up, in workgroup memory.
    h_units: usize,
    /// Units of the input of the output projection, and of down, in workgroup memory.
    wide_units: usize,
}

impl KernelLayout {
    fn new(
        shape: &DecodeLayersShape,
        groups: usize,
        matrices: &LayerPlacements,
        layer_units: u64,
        looks: usize,
        features: ShaderFeatures,
    ) -> Self {
        let a = &shape.attention;
        let subgroup_size = features.subgroup_size as usize;
        let inputs = [shape.n_embd, a.att_len(), shape.n_embd, shape.n_ff];
        let rows = [1, 1, 2, 1];
        let tile = |i: usize, part: &RowBlock| SubgroupTile::new(inputs[i], rows[i], part.ty, subgroup_size);
        let units =
            |i: usize| matrices.variants[i].iter().flatten().map(|part| tile(i, part).units()).max().unwrap_or(0);
        let h_units = units(0).max(units(2));
        let wide_units = units(1).max(units(3));
        let sizes = [a.qkv_len(), shape.n_embd, 2 * shape.n_ff, shape.n_embd];
        let widest = |i: usize| matrices.types(i).map(|ty| type_info(ty).words).max().unwrap_or(0);
        let words: usize = (0..4).map(|i| sizes[i] * inputs[i] / 8 * widest(i)).sum();
        let ahead = words / groups <= AHEAD && !matrices.is_mixed();
        // One subgroup combines the results of all: there are no more subgroups than it has lanes.
        let threads = THREADS[usize::from(!ahead)].min(subgroup_size * subgroup_size);
        // Quantising the inputs to bytes takes time, which small products do not make up for.
        let integer = !ahead
            && features.integer_dot
            && (0..4).flat_map(|i| matrices.types(i)).all(|ty| type_info(ty).integer_codes != IntegerCodes::No);
        let stride = matrices.stride();
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
            ("placed", stride.is_none().into()),
            ("layer_words", stride.unwrap_or(0).into()),
            ("n_parts", matrices.n_parts().into()),
            ("layer_units", (layer_units as usize).into()),
            ("split", SPLIT.into()),
            ("max_splits", max_splits(a, groups).into()),
            ("scale", a.scale.into()),
            a.window_constant(),
            ("kv_lanes", (a.head_dim / 4).next_power_of_two().into()),
            ("h_units", h_units.into()),
            ("wide_units", wide_units.into()),
        ]);
        let describe = |i: usize, part: &RowBlock, workgroups: Range<usize>| {
            let SubgroupTile { lanes, unroll, stretches } = tile(i, part);
            let Range { start, end } = workgroups;
            let RowBlock { ty, first_row, n_rows } = *part;
            format!("{}:{first_row}:{n_rows}:{lanes}:{unroll}:{stretches}:{start}:{}", type_name(ty), end - start)
        };
        for (i, [variants, at, bias]) in NAMES.into_iter().enumerate() {
            // Rounds of rows that one of `n` workgroups computes, times the bytes of a row.
            let time = |part: &RowBlock, n: usize| {
                let rows_at_once = rows[i] * threads / tile(i, part).lanes;
                part.n_rows.div_ceil(rows_at_once * n) as u64 * WgpuMatrix::bytes_of(part.ty, inputs[i], 1)
            };
            let parts = |parts: &Vec<RowBlock>| {
                let described = parts.iter().zip(divide_workgroups(groups, parts, time));
                described.map(|(part, workgroups)| describe(i, part, workgroups)).collect::<Vec<_>>().join("+")
            };
            let all: Vec<_> = matrices.variants[i].iter().map(parts).collect();
            // A place that the kernel reads from the table is not part of its key.
            let first = stride.map_or(0, |_| matrices.layers[0][i].at[0]);
            key.constants.extend([
                (variants, all.join("/").into()),
                (at, first.into()),
                (bias, shape.biases[i].into()),
            ]);
        }
        Self { key, threads, h_units, wide_units }
    }

    /// Bytes of a workgroup's memory.
    fn workgroup_bytes(&self, shape: &DecodeLayersShape, subgroup_size: usize) -> usize {
        let a = &shape.attention;
        let warps = self.threads / subgroup_size;
        let kv_units = a.head_dim / 4;
        let wide = (2 * self.wide_units).max(warps * kv_units);
        let heads = 3 * kv_units.next_multiple_of(4);
        16 * (2 * self.h_units + wide + heads) + 4 * warps + 8 * warps + 4 * 3 * a.head_dim / 2
    }
}

/// The key of the kernel for SmolLM-135M.
pub(crate) fn catalogue() -> Vec<PipelineKey> {
    let shape = DecodeLayersShape {
        attention: AttentionShape::EXAMPLE,
        n_layer: 30,
        n_embd: 576,
        n_ff: 1536,
        norm_eps: 1e-5,
        biases: [false; 4],
    };
    let rows = [shape.attention.qkv_len(), shape.n_embd, 2 * shape.n_ff, shape.n_embd];
    let variants = rows.map(|n_rows| vec![vec![RowBlock { ty: TensorType::Q4_0, first_row: 0, n_rows }]]);
    let place = |at| MatrixPlacement { variant: 0, at: vec![at] };
    let layers = (0..30).map(|i| [0, 100_000, 200_000, 500_000].map(|at| place(at + i * 1_000_000))).collect();
    let matrices = LayerPlacements { variants, layers };
    let features =
        ShaderFeatures { subgroups: true, subgroup_size: 32, neighbours: 32, integer_dot: true, ..Default::default() };
    vec![KernelLayout::new(&shape, 128, &matrices, 100_000, 1, features).key]
}
