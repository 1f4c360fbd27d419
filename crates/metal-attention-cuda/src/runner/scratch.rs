//! Rows that mixers and experts work on between their products, one for each token, and the kernels that many of them share.

use metal_attention_model::{FeedForward, Mixer, ModelSpec};

use super::linear::{LinearInput, LinearOp, norm_args};
use super::{MicroBatch, ModelRunner, delta_rule, experts, latent_attention, mamba, rwkv, short_conv};
use crate::CudaError;
use crate::args::{ConvolutionArgs, ElementwiseFunction, FunctionArgs, GroupNormArgs, MAX_PARTS, NormArgs, RunsArgs};
use crate::device::CudaBuffer;
use crate::launch::LaunchGrid;
use crate::matrix::CudaMatrix;
use crate::recurrent_state::RunSizes;
use crate::weights::{CudaJoined, CudaLinear, CudaNorm};

/// Elements that each kind of rows begins with a multiple of.
const ALIGNED: usize = 64;

/// Most tokens of a run that a block of `convolution` or of `token_shift` takes: `CONVOLVED` and `SHIFTED`.
const TOKENS_OF_BLOCK: usize = 16;

/// Elements of a group up to which a warp normalises it and not a block.
const SMALL_GROUP: u32 = 256;

/// Elements of what a mixer or a feed-forward keeps of `n_tokens` tokens while it runs; each has the room for itself.
fn elements_of_layers(model: &ModelSpec, n: usize) -> Vec<Vec<usize>> {
    fn times_tokens<const N: usize>(widths: [usize; N], n: usize) -> Vec<usize> {
        widths.map(|width| width.saturating_mul(n)).to_vec()
    }
    let mut all = Vec::new();
    for layer in &model.layers {
        match &layer.mixer {
            Mixer::Attention(_) | Mixer::None => {}
            Mixer::LatentAttention(spec) => all.push(latent_attention::elements(spec, n).to_vec()),
            Mixer::ShortConv(spec) => all.push(times_tokens(short_conv::widths(spec), n)),
            Mixer::Mamba(spec) => all.push(times_tokens(mamba::widths(spec), n)),
            Mixer::Mamba2(spec) => all.push(times_tokens(mamba::widths2(spec), n)),
            Mixer::AttentionAndMamba2(spec) => all.push(times_tokens(mamba::widths2(&spec.mamba2), n)),
            Mixer::DeltaRule(spec) => all.push(times_tokens(delta_rule::widths(spec), n)),
            Mixer::Rwkv6(spec) => all.push(times_tokens(rwkv::widths6(spec), n)),
            Mixer::Rwkv7(spec) => all.push(times_tokens(rwkv::widths7(spec), n)),
        }
        match &layer.feed_forward {
            FeedForward::Dense(_) | FeedForward::None => {}
            FeedForward::Experts(spec) => all.push(experts::elements(spec, model.n_embd, n).to_vec()),
            FeedForward::ChannelMix(spec) => all.push(times_tokens(rwkv::widths_of_channel_mix(spec), n)),
        }
    }
    all
}

/// Elements of all rows of `n_tokens` tokens, and the widest row that products take.
pub(crate) fn scratch_elements(spec: &ModelSpec, n_tokens: usize) -> (usize, usize) {
    let of_layers = |n| elements_of_layers(spec, n).into_iter();
    let room = of_layers(n_tokens).map(|all| all.iter().map(|n| n.next_multiple_of(ALIGNED)).sum::<usize>());
    (room.max().unwrap_or(0), of_layers(1).flatten().max().unwrap_or(0))
}

/// Whether a mixer reads its input otherwise than by products.
pub(crate) fn mixer_reads_rows(mixer: &Mixer) -> bool {
    match mixer {
        Mixer::Rwkv6(_) | Mixer::Rwkv7(_) => true,
        Mixer::Attention(_)
        | Mixer::LatentAttention(_)
        | Mixer::ShortConv(_)
        | Mixer::Mamba(_)
        | Mixer::Mamba2(_)
        | Mixer::AttentionAndMamba2(_)
        | Mixer::DeltaRule(_)
        | Mixer::None => false,
    }
}

/// Whether a feed-forward does.
pub(crate) fn feed_forward_reads_rows(feed_forward: &FeedForward) -> bool {
    match feed_forward {
        FeedForward::Experts(_) | FeedForward::ChannelMix(_) => true,
        FeedForward::Dense(_) | FeedForward::None => false,
    }
}

impl ModelRunner {
    /// Where rows of these widths lie, which those of another call overwrite.
    pub(super) fn scratch_rows<const N: usize>(&self, batch: MicroBatch<'_>, widths: [usize; N]) -> [u64; N] {
        self.scratch(widths.map(|width| width * batch.size.n_tokens))
    }

    /// The same for so many elements each.
    pub(super) fn scratch<const N: usize>(&self, elements: [usize; N]) -> [u64; N] {
        let mut at = 0;
        let places = elements.map(|n| {
            let place = self.buffers.rows.ptr() + 4 * at as u64;
            at += n.next_multiple_of(ALIGNED);
            place
        });
        assert!(4 * at as u64 <= self.buffers.rows.bytes(), "{at} elements of rows");
        places
    }

    /// F32 rows, perhaps through a norm, as a product takes them; they may become what it gives. Only one such input is there at a
    /// time.
    pub(super) fn rows_input(
        &mut self,
        batch: MicroBatch<'_>,
        x: u64,
        width: usize,
        norm: Option<&CudaNorm>,
    ) -> Result<LinearInput, CudaError> {
        let n = batch.size.n_tokens;
        if !self.uses_f32_inputs(n) {
            let packed = self.buffers.packed_rows.ptr();
            self.norm(NormArgs { packed, ..norm_args(norm, x, width) }, n)?;
            return Ok(LinearInput::Packed(packed));
        }
        match norm {
            Some(norm) if norm.fuses_with_product() => {
                return Ok(LinearInput::Rows { x, norm: norm.weight.ptr(), eps: norm.eps });
            }
            Some(norm) => self.norm_rows(batch, x, width, norm, x)?,
            None => {}
        }
        Ok(LinearInput::Rows { x, norm: 0, eps: 0.0 })
    }

    /// `norm(x)` of all tokens' rows, to rows at `out`.
    pub(super) fn norm_rows(
        &mut self,
        batch: MicroBatch<'_>,
        x: u64,
        width: usize,
        norm: &CudaNorm,
        out: u64,
    ) -> Result<(), CudaError> {
        self.norm(NormArgs { out, ..norm_args(Some(norm), x, width) }, batch.size.n_tokens)
    }

    /// `y = W x + b` of all tokens, for matrices one below the other.
    pub(super) fn store_all<const N: usize>(
        &mut self,
        batch: MicroBatch<'_>,
        label: &'static str,
        linears: [&CudaLinear; N],
        input: LinearInput,
        y: u64,
    ) -> Result<(), CudaError> {
        let bias = if let [linear] = linears[..] { linear.bias() } else { 0 };
        self.store_matrices(batch, label, linears.map(|linear| &linear.weight), bias, input, y)
    }

    /// The same of matrices that are joined.
    pub(super) fn store_joined(
        &mut self,
        batch: MicroBatch<'_>,
        label: &'static str,
        joined: &CudaJoined,
        input: LinearInput,
        y: u64,
    ) -> Result<(), CudaError> {
        let mut n_rows = 0;
        let parts = joined.parts.iter().map(|part| {
            n_rows += part.n_rows;
            (part, n_rows - part.n_rows)
        });
        let bias = joined.bias.as_ref().map_or(0, CudaBuffer::ptr);
        for parts in parts.collect::<Vec<_>>().chunks(MAX_PARTS) {
            let stored = LinearOp::stored(label, parts[0].0);
            let product = LinearOp { matrices: parts.to_vec(), n_out: joined.n_rows(), bias, y, ..stored };
            self.product(&product, input, parts[0].0.n_in, batch.size.n_tokens)?;
        }
        Ok(())
    }

    /// The same without biases, or with all of them in one.
    pub(super) fn store_matrices<const N: usize>(
        &mut self,
        batch: MicroBatch<'_>,
        label: &'static str,
        matrices: [&CudaMatrix; N],
        bias: u64,
        input: LinearInput,
        y: u64,
    ) -> Result<(), CudaError> {
        let mut n_out = 0;
        let parts = matrices.map(|matrix| {
            let first = n_out;
            n_out += matrix.n_rows;
            (matrix, first)
        });
        let parts = parts.to_vec();
        let Some((first, _)) = parts.first() else { return Ok(()) };
        let (n_in, stored) = (first.n_in, LinearOp::stored(label, first));
        let product = LinearOp { matrices: parts, n_out, bias, y, ..stored };
        self.product(&product, input, n_in, batch.size.n_tokens)
    }

    /// `y = W x + b` of F32 rows, of which this is all that is made.
    pub(super) fn store_rows(
        &mut self,
        batch: MicroBatch<'_>,
        label: &'static str,
        linear: &CudaLinear,
        x: u64,
        y: u64,
    ) -> Result<(), CudaError> {
        let input = self.rows_input(batch, x, linear.weight.n_in, None)?;
        self.store_all(batch, label, [linear], input, y)
    }

    /// The runs of a step's batch.
    pub(super) fn runs(batch: MicroBatch<'_>) -> (RunsArgs, RunSizes) {
        (batch.recurrent.runs(), batch.size.runs)
    }

    /// The convolution of layer `i`, perhaps between gates, whose last inputs are the beginning of the layer's states. `args`: but
    /// for what the step says.
    pub(super) fn convolution(
        &mut self,
        batch: MicroBatch<'_>,
        i: usize,
        args: ConvolutionArgs,
    ) -> Result<(), CudaError> {
        let args = Self::convolution_of(batch, i, args);
        let name = if args.n_tap <= 4 { "convolution" } else { "convolution_long" };
        self.launch(name, "", Self::channels_of_runs(batch, args.channels as usize), &args)
    }

    /// Its `args` with what the step says.
    pub(super) fn convolution_of(batch: MicroBatch<'_>, i: usize, args: ConvolutionArgs) -> ConvolutionArgs {
        let (runs, _) = Self::runs(batch);
        ConvolutionArgs { runs, states: batch.recurrent.of_layer(i, 0), ..args }
    }

    /// The grid of kernels that take a channel of a run, 128 to a block.
    pub(super) fn channels_of_runs(batch: MicroBatch<'_>, channels: usize) -> LaunchGrid {
        let (_, sizes) = Self::runs(batch);
        let blocks = [channels.div_ceil(128), sizes.longest.div_ceil(TOKENS_OF_BLOCK), sizes.n];
        LaunchGrid { blocks, threads: 128, shared: 0 }
    }

    /// Norm and gate of groups of each token's row.
    pub(super) fn group_norm(&mut self, batch: MicroBatch<'_>, args: &GroupNormArgs) -> Result<(), CudaError> {
        // Four elements a thread, as far as a block has threads.
        let (name, groups, threads) = match args.n {
            0..=SMALL_GROUP => ("group_norm_small", 4, 128),
            n => ("group_norm", 1, (n as usize / 4).next_multiple_of(32).min(1024)),
        };
        let blocks = [(args.n_group as usize).div_ceil(groups), batch.size.n_tokens, 1];
        self.launch(name, "", LaunchGrid { blocks, threads, shared: 0 }, args)
    }

    /// A function of each element of all tokens' rows.
    pub(super) fn elementwise(
        &mut self,
        batch: MicroBatch<'_>,
        function: ElementwiseFunction,
        x: u64,
        with: u64,
        width: usize,
    ) -> Result<(), CudaError> {
        let n = width * batch.size.n_tokens;
        let args = FunctionArgs { x, with, n: n as u32, function: function as u32 };
        let grid = LaunchGrid { blocks: [n.div_ceil(256).clamp(1, 1024), 1, 1], threads: 256, shared: 0 };
        self.launch("of_each", "", grid, &args)
    }
}
