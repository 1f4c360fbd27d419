//! [`EncoderReader`]: the metadata and the tensors of an `mmproj` file.

use metal_attention_gguf::{GgufFile, Tensor, TensorType};
use metal_attention_pictures::{Layout, PixelRange};

use super::positions::{Interpolation, PositionTable};
use super::stages::{
    Block, Clamp, Colours, Encoder, EncoderActivation, EncoderAttention, EncoderFeedForward, EncoderLinear,
    EncoderNorm, FileWeights, PatchOrder, PatchSpec, Stage,
};
use crate::metadata_reader::MetadataReader;
use crate::{ModelError, NormKind};

/// Largest side of a patch, and of a merge of patches, in pixels or patches.
const MAX_SIDE: usize = 64;
/// Longest side of the kernel of a convolution that is plausible: its patches are unfolded to rows.
const MAX_KERNEL: usize = 16;

/// Reads an `mmproj` file: the sizes that all families have, and tensors with a check of their shapes.
#[derive(Clone)]
pub(crate) struct EncoderReader<'a> {
    file: &'a GgufFile,
    /// The metadata, with keys under `clip.`.
    pub(crate) keys: MetadataReader<'a>,
    /// Pixels of a patch's side.
    pub(crate) patch: usize,
    /// Pixels of the side of a picture, or of a tile.
    pub(crate) image: usize,
    /// Width of the encoder's rows.
    pub(crate) width: usize,
    /// Width of a row of embeddings of the text model.
    pub(crate) n_embd: usize,
    /// Blocks.
    pub(crate) n_block: usize,
    /// Heads.
    pub(crate) n_head: usize,
    /// Heads of keys and values, of which neighbouring heads of queries share one.
    pub(crate) n_head_kv: usize,
    /// Epsilon of norms.
    pub(crate) eps: f32,
    /// The activation of blocks.
    pub(crate) activation: EncoderActivation,
    /// Mean of each colour.
    pub(crate) mean: [f32; 3],
    /// Standard deviation of each colour.
    pub(crate) std: [f32; 3],
}

/// The tensor's name, e.g. `v.blk.0.ln1`, without `.weight`.
fn weight(name: &str) -> String {
    format!("{name}.weight")
}

/// A number for each colour.
fn colours(keys: &MetadataReader<'_>, key: &str, default: f32) -> Result<[f32; 3], ModelError> {
    let Some(values) = keys.opt_f32s(key)? else { return Ok([default; 3]) };
    let plausible = values.len() == 3 && values.iter().all(|v| v.is_finite() && (default == 0.0 || *v > 0.0));
    keys.check(key, format!("{values:?}"), plausible, "must be a number for each of three colours")?;
    Ok([values[0], values[1], values[2]])
}

impl<'a> EncoderReader<'a> {
    /// Reads the sizes. Errors: one is missing or implausible.
    pub(crate) fn new(file: &'a GgufFile) -> Result<Self, ModelError> {
        let keys = MetadataReader::new(file.metadata(), Some(file))?;
        let patch = keys.positive("vision.patch_size")?;
        keys.check("vision.patch_size", patch, patch <= MAX_SIDE, "at most 64 pixels are plausible")?;
        let (gelu, silu) = (keys.opt_bool("use_gelu")?, keys.opt_bool("use_silu")?);
        let activation = match (gelu.unwrap_or(false), silu.unwrap_or(false)) {
            (true, _) => EncoderActivation::Gelu,
            (false, true) => EncoderActivation::Silu,
            (false, false) => EncoderActivation::QuickGelu,
        };
        let n_block = keys.opt_usize("vision.block_count")?.unwrap_or(0);
        keys.check("vision.block_count", n_block, n_block <= 1024, "at most 1024 blocks are plausible")?;
        let (width, n_head) =
            (keys.positive("vision.embedding_length")?, keys.opt_usize("vision.attention.head_count")?);
        let n_head = n_head.unwrap_or(0);
        let whole = n_block == 0 || (n_head > 0 && width.is_multiple_of(n_head));
        keys.check("vision.attention.head_count", n_head, whole, "must divide vision.embedding_length")?;
        let n_head_kv = keys.opt_size("vision.attention.head_count_kv")?.unwrap_or(n_head);
        let whole = n_block == 0 || n_head.is_multiple_of(n_head_kv);
        keys.check("vision.attention.head_count_kv", n_head_kv, whole, "must divide vision.attention.head_count")?;
        Ok(Self {
            file,
            patch,
            image: keys.positive("vision.image_size")?,
            width,
            n_embd: keys.positive("vision.projection_dim")?,
            n_block,
            n_head,
            n_head_kv,
            mean: colours(&keys, "vision.image_mean", 0.0)?,
            std: colours(&keys, "vision.image_std", 1.0)?,
            eps: keys.positive_f32("vision.attention.layer_norm_epsilon", 1e-6)?,
            activation,
            keys,
        })
    }

    /// The same file with another epsilon of norms.
    pub(crate) fn with_eps(&self, eps: f32) -> Self {
        Self { eps, ..self.clone() }
    }

    /// Elements of a head.
    pub(crate) fn head_dim(&self) -> usize {
        self.width / self.n_head.max(1)
    }

    /// A picture of about its own size with sides of whole merges of `side` patches, of `least` to `most` tokens.
    pub(crate) fn kept(&self, side: usize, [least, most]: [usize; 2]) -> Layout {
        let multiple = self.patch * side;
        Layout::Kept { multiple, pixels: PixelRange::of_tokens(least, most, multiple) }
    }

    /// A picture of about its own size with sides of whole merges of `side` patches, within the limits of the file.
    pub(crate) fn kept_in_pixels(&self, side: usize) -> Result<Layout, ModelError> {
        Ok(Layout::Kept { multiple: self.patch * side, pixels: self.pixels(PixelRange::ALL)? })
    }

    /// The limits of the file on the pixels of a picture.
    pub(crate) fn pixels(&self, default: PixelRange) -> Result<PixelRange, ModelError> {
        let min = self.keys.opt_usize("vision.image_min_pixels")?.unwrap_or(default.min);
        let max = self.keys.opt_size("vision.image_max_pixels")?.unwrap_or(default.max);
        self.keys.check("vision.image_min_pixels", min, min <= max, "must be at most vision.image_max_pixels")?;
        Ok(PixelRange { min, max })
    }

    /// The side of merges of patches, of the key `key`.
    pub(crate) fn merge_side(&self, key: &str, default: usize) -> Result<usize, ModelError> {
        let side = self.keys.opt_size(key)?.unwrap_or(default);
        self.keys.check(key, side, side <= MAX_SIDE, "at most 64 is plausible").map(|()| side)
    }

    /// The tensor `name`. `shape`: what it should have, for the error if it is missing.
    fn tensor(&self, name: &str, shape: &[usize]) -> Result<&'a Tensor, ModelError> {
        let missing = || ModelError::MissingTensor { name: name.to_owned(), shape: shape.to_vec() };
        self.file.tensor(name).ok_or_else(missing)
    }

    /// Whether the file has the tensor.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.file.tensor(name).is_some()
    }

    /// An error unless the tensor has this shape, in GGUF order.
    fn check_shape(tensor: &Tensor, shape: &[usize]) -> Result<(), ModelError> {
        let ones = |shape: &[usize]| -> Vec<usize> { shape.iter().copied().filter(|&n| n != 1).collect() };
        if ones(tensor.shape()) == ones(shape) {
            return Ok(());
        }
        Err(ModelError::TensorShape {
            name: tensor.name().to_owned(),
            found: tensor.shape().to_vec(),
            expected: shape.to_vec(),
        })
    }

    /// The values of a tensor of `n` elements.
    pub(crate) fn values(&self, name: &str, n: usize) -> Result<Vec<f32>, ModelError> {
        let tensor = self.tensor(name, &[n])?;
        if tensor.n_elements() == n {
            return Ok(tensor.to_f32());
        }
        Self::check_shape(tensor, &[n]).map(|()| tensor.to_f32())
    }

    /// The values of a tensor of rows of `width` elements.
    pub(crate) fn all_values(&self, name: &str, width: usize) -> Result<Vec<f32>, ModelError> {
        let tensor = self.tensor(name, &[width, 1])?;
        if tensor.row_len() == width {
            return Ok(tensor.to_f32());
        }
        Self::check_shape(tensor, &[width, tensor.n_rows()]).map(|()| tensor.to_f32())
    }

    /// A vector; `None` if it is missing.
    pub(crate) fn opt_vector(&self, name: &str, n: usize) -> Result<Option<Vec<f32>>, ModelError> {
        if self.has(name) { self.values(name, n).map(Some) } else { Ok(None) }
    }

    /// A matrix `[n_out, n_in]` with its bias, if it has one. `n_out`: `None` for any.
    pub(crate) fn linear(
        &self,
        name: &str,
        n_in: usize,
        n_out: Option<usize>,
    ) -> Result<EncoderLinear<FileWeights>, ModelError> {
        let tensor = self.tensor(&weight(name), &[n_in, n_out.unwrap_or(0)])?;
        let n_out = n_out.unwrap_or_else(|| tensor.n_elements() / n_in.max(1));
        Self::check_shape(tensor, &[n_in, n_out])?;
        self.with_bias(name, tensor.clone(), n_out)
    }

    /// The matrix with its bias and its clamps.
    fn with_bias(&self, name: &str, matrix: Tensor, n_out: usize) -> Result<EncoderLinear<FileWeights>, ModelError> {
        let bias = self.opt_vector(&format!("{name}.bias"), n_out)?;
        let limit = |what: &str, default: f32| {
            Ok::<_, ModelError>(self.opt_vector(&format!("{name}.{what}"), 1)?.map_or(default, |v| v[0]))
        };
        let range = |what: &str| {
            Ok::<_, ModelError>([
                limit(&format!("{what}_min"), f32::NEG_INFINITY)?,
                limit(&format!("{what}_max"), f32::INFINITY)?,
            ])
        };
        let clamp = Clamp { input: range("input")?, output: range("output")? };
        let none = [f32::NEG_INFINITY, f32::INFINITY];
        let clamp = Some(clamp).filter(|clamp| clamp.input != none || clamp.output != none);
        Ok(EncoderLinear { matrix, bias, clamp, n_out })
    }

    /// A matrix whose file tensor has other dimensions, or another type, as F32 `[n_out, n_in]` of these values.
    pub(crate) fn computed(
        &self,
        name: &str,
        [n_in, n_out]: [usize; 2],
        values: &[f32],
    ) -> Result<EncoderLinear<FileWeights>, ModelError> {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let matrix = Tensor::in_memory(name, [n_in, n_out], TensorType::F32, &bytes);
        self.with_bias(name, matrix, n_out)
    }

    /// A convolution over patches as a matrix, `[n_out, n_in]`: the sum of the kernels `name.weight` and, if it is there,
    /// `name.weight.1`, which a picture and the same picture as the next frame go through.
    pub(crate) fn patch_kernel(
        &self,
        name: &str,
        n_in: usize,
        n_out: usize,
    ) -> Result<EncoderLinear<FileWeights>, ModelError> {
        let mut kernel = self.values(&weight(name), n_in * n_out)?;
        if let Some(second) = self.opt_vector(&format!("{name}.weight.1"), n_in * n_out)? {
            kernel.iter_mut().zip(second).for_each(|(v, second)| *v += second);
        }
        self.computed(name, [n_in, n_out], &kernel)
    }

    /// A convolution whose windows do not overlap, `name.weight`, with its bias, as a matrix `[n_out, n_in]` of any `n_out`.
    pub(crate) fn kernel_of(&self, name: &str, n_in: usize) -> Result<EncoderLinear<FileWeights>, ModelError> {
        let tensor = self.tensor(&weight(name), &[n_in, 0])?;
        self.patch_kernel(name, n_in, tensor.n_elements() / n_in)
    }

    /// A convolution `name.weight`, `[n_out, n_in, side, side]`, with its bias, as a matrix for rows of unfolded patches,
    /// `[n_out, side * side * n_in]`, and its side.
    pub(crate) fn convolution(
        &self,
        name: &str,
        n_in: usize,
    ) -> Result<(usize, EncoderLinear<FileWeights>), ModelError> {
        let tensor = self.tensor(&weight(name), &[1, 1, n_in, 1])?;
        let side = tensor.row_len();
        self.keys.check(name, side, (1..=MAX_KERNEL).contains(&side), "a convolution has an implausible side")?;
        let n_out = tensor.n_elements() / (side * side * n_in).max(1);
        Self::check_shape(tensor, &[side, side, n_in, n_out])?;
        let kernel = tensor.to_f32();
        let mut matrix = Vec::with_capacity(kernel.len());
        for of_output in kernel.chunks_exact(side * side * n_in) {
            let at = |i: usize| of_output[i % n_in * side * side + i / n_in];
            matrix.extend((0..side * side * n_in).map(at));
        }
        Ok((side, self.computed(name, [side * side * n_in, n_out], &matrix)?))
    }

    /// A convolution of each column by itself, `name.weight`, `[width, 1, side, side]`: its side, and the kernel as
    /// `[side * side, width]`.
    pub(crate) fn depthwise(&self, name: &str, width: usize) -> Result<(usize, Vec<f32>), ModelError> {
        let tensor = self.tensor(&weight(name), &[1, 1, 1, width])?;
        let side = tensor.row_len();
        self.keys.check(name, side, (1..=MAX_KERNEL).contains(&side), "a convolution has an implausible side")?;
        Self::check_shape(tensor, &[side, side, width])?;
        let kernel = tensor.to_f32();
        Ok((side, (0..side * side * width).map(|i| kernel[i % width * side * side + i / width]).collect()))
    }

    /// A norm of `width` elements, with a bias if the file has one.
    pub(crate) fn norm(
        &self,
        name: &str,
        width: usize,
        kind: NormKind,
        eps: f32,
    ) -> Result<EncoderNorm<FileWeights>, ModelError> {
        let weight = self.values(&weight(name), width)?;
        let bias = self.opt_vector(&format!("{name}.bias"), width)?;
        Ok(EncoderNorm { kind, eps, width, weight, bias })
    }

    /// A norm that may be missing.
    pub(crate) fn opt_norm(
        &self,
        name: &str,
        width: usize,
        kind: NormKind,
        eps: f32,
    ) -> Result<Option<EncoderNorm<FileWeights>>, ModelError> {
        if self.has(&weight(name)) { self.norm(name, width, kind, eps).map(Some) } else { Ok(None) }
    }

    /// An encoder without deepstack rows.
    pub(crate) fn encoder(&self, patch: PatchSpec, stages: Vec<Stage<FileWeights>>) -> Encoder<FileWeights> {
        let colours = Colours { mean: self.mean, std: self.std };
        Encoder { colours, patch, stages, n_embd: self.n_embd, n_deepstack: 0 }
    }

    /// The patches, and the stage that makes a row of each.
    pub(crate) fn patches(&self) -> Result<(PatchSpec, Stage<FileWeights>), ModelError> {
        let n_in = 3 * self.patch * self.patch;
        let kernel = self.patch_kernel("v.patch_embd", n_in, self.width)?;
        Ok((PatchSpec { side: self.patch, order: PatchOrder::ColourFirst }, Stage::Linear(kernel)))
    }

    /// The table of positions for a square grid, without the `others` rows that stand before those of patches.
    pub(crate) fn positions(&self, others: usize, interpolation: Interpolation) -> Result<PositionTable, ModelError> {
        let mut table = self.positions_before(others, interpolation)?;
        table.rows.drain(..others * self.width);
        Ok(table)
    }

    /// The table of positions for a square grid, with `others` further rows.
    pub(crate) fn positions_before(
        &self,
        others: usize,
        interpolation: Interpolation,
    ) -> Result<PositionTable, ModelError> {
        self.table("v.position_embd.weight", self.width, others, interpolation)
    }

    /// The table `name` of positions for a square grid, of rows of `width` elements, with `others` further rows.
    pub(crate) fn table(
        &self,
        name: &str,
        width: usize,
        others: usize,
        interpolation: Interpolation,
    ) -> Result<PositionTable, ModelError> {
        let tensor = self.tensor(name, &[width, others + 1])?;
        let n = (tensor.n_elements() / width).saturating_sub(others);
        let side = n.isqrt();
        let is_square = side > 0 && side * side == n && tensor.row_len() == width;
        let no_grid = "must have a row for each patch of a square picture";
        let fits = match interpolation {
            Interpolation::None => side == self.image / self.patch,
            Interpolation::Axes
            | Interpolation::Corners
            | Interpolation::Antialiased
            | Interpolation::Cubic
            | Interpolation::AntialiasedCubic
            | Interpolation::Buckets
            | Interpolation::Linear
            | Interpolation::Lengthened => true,
        };
        self.keys.check(name, format!("{:?}", tensor.shape()), is_square && fits, no_grid)?;
        let rows = tensor.to_f32();
        Ok(PositionTable { rows, width, size: [side, side], interpolation })
    }

    /// The heads of attention of a block or of a merger, whose tensors begin with `prefix`.
    pub(crate) fn attention(&self, prefix: &str) -> Result<EncoderAttention<FileWeights>, ModelError> {
        let (width, head_dim) = (self.width, self.head_dim());
        let kv_width = self.n_head_kv * head_dim;
        let fused = format!("{prefix}attn_qkv");
        let [q, k, v] = if self.has(&weight(&fused)) {
            self.fused(&fused, width, kv_width)?
        } else {
            [
                self.linear(&format!("{prefix}attn_q"), width, Some(width))?,
                self.linear(&format!("{prefix}attn_k"), width, Some(kv_width))?,
                self.linear(&format!("{prefix}attn_v"), width, Some(kv_width))?,
            ]
        };
        let norm = |name: &str| self.opt_norm(&format!("{prefix}{name}"), head_dim, NormKind::Rms, self.eps);
        Ok(EncoderAttention {
            q,
            k,
            v,
            q_norm: norm("attn_q_norm")?,
            k_norm: norm("attn_k_norm")?,
            v_norm: None,
            n_head: self.n_head,
            head_dim,
            scale: 1.0 / (head_dim as f32).sqrt(),
            rope: None,
            window: None,
            causal_others: false,
            relative: Vec::new(),
            out: self.linear(&format!("{prefix}attn_out"), width, Some(width))?,
        })
    }

    /// The matrices of queries, `[width, width]`, keys and values, `[kv_width, width]` each, that are stacked in one.
    pub(crate) fn fused(
        &self,
        name: &str,
        width: usize,
        kv_width: usize,
    ) -> Result<[EncoderLinear<FileWeights>; 3], ModelError> {
        let n_out = width + 2 * kv_width;
        let tensor = self.tensor(&weight(name), &[width, n_out])?;
        Self::check_shape(tensor, &[width, n_out])?;
        let bias = self.opt_vector(&format!("{name}.bias"), n_out)?;
        Ok([0..width, width..width + kv_width, width + kv_width..n_out].map(|rows| EncoderLinear {
            bias: bias.as_ref().map(|bias| bias[rows.clone()].to_vec()),
            clamp: None,
            n_out: rows.len(),
            matrix: tensor.rows(rows),
        }))
    }

    /// The feed-forward `prefix`up, `prefix`gate (if it is there) and `prefix`down.
    pub(crate) fn feed_forward(
        &self,
        prefix: &str,
        [n_in, n_out]: [usize; 2],
        activation: EncoderActivation,
    ) -> Result<EncoderFeedForward<FileWeights>, ModelError> {
        let name = |part: &str| format!("{prefix}{part}");
        let (mut up, mut down) = (name("up"), name("down"));
        // Old converters have swapped the names.
        let row_len = |name: &str| self.tensor(&weight(name), &[n_in, 0]).map(Tensor::row_len);
        let (up_in, down_in) = (row_len(&up)?, row_len(&down)?);
        if up_in != n_in && down_in == n_in {
            std::mem::swap(&mut up, &mut down);
        }
        let up = self.linear(&up, n_in, None)?;
        let down = self.linear(&down, up.n_out, Some(n_out))?;
        let gate = name("gate");
        if self.has(&weight(&gate)) {
            let gate = self.linear(&gate, n_in, Some(up.n_out))?;
            return Ok(EncoderFeedForward::Gated { gate, up, activation, down });
        }
        Ok(EncoderFeedForward::Plain { up, activation, down })
    }

    /// Block `i`, with norms of `kind`, without rotation and windows.
    pub(crate) fn block(&self, i: usize, kind: NormKind) -> Result<Block<FileWeights>, ModelError> {
        let prefix = format!("v.blk.{i}.");
        let name = |part: &str| format!("{prefix}{part}");
        let width = self.width;
        let scale = self.opt_vector(&weight(&name("out_scale")), 1)?;
        Ok(Block {
            attention_norm: self.norm(&name("ln1"), width, kind, self.eps)?,
            attention: self.attention(&prefix)?,
            attention_post_norm: self.opt_norm(&name("attn_post_norm"), width, kind, self.eps)?,
            attention_scale: self.opt_vector(&weight(&name("ls1")), width)?,
            feed_forward_norm: self.norm(&name("ln2"), width, kind, self.eps)?,
            feed_forward: self.feed_forward(&name("ffn_"), [width, width], self.activation)?,
            feed_forward_post_norm: self.opt_norm(&name("ffn_post_norm"), width, kind, self.eps)?,
            feed_forward_scale: self.opt_vector(&weight(&name("ls2")), width)?,
            output_scale: scale.map_or(1.0, |scale| scale[0]),
        })
    }

    /// The first `n` blocks as stages, each changed by `with`.
    pub(crate) fn blocks(
        &self,
        n: usize,
        kind: NormKind,
        with: impl Fn(usize, &mut Block<FileWeights>),
    ) -> Result<Vec<Stage<FileWeights>>, ModelError> {
        let block = |i| {
            let mut block = self.block(i, kind)?;
            with(i, &mut block);
            Ok(Stage::Block(Box::new(block)))
        };
        (0..n).map(block).collect()
    }
}
