//! [`LayerRun`]: one layer, that is, a mixer and a feed-forward, each with its norms and its residual join.
//!
//! The residual stream `x` (F32 `[n_tokens, n_embd]`) is read and updated in place. A mixer or a feed-forward stops short of its
//! last product and returns it as [`SublayerOutput`], so that [`join`](ModelRunner::join) can let that product add to the residual stream
//! itself where no norm and no sum over ranks comes between.

use metal_attention_model::{FeedForward, LayerOps, Mixer};

use super::linear::{LinearInput, LinearOp, norm_args};
use super::{MicroBatch, ModelRunner};
use crate::CudaError;
use crate::args::{Epilogue, ExpertsSumArgs, NormArgs};
use crate::parts::CudaBlockConv;
use crate::parts::{CudaLayer, CudaParts};
use crate::slice::DeviceSlice;
use crate::weights::{CudaLinear, CudaNorm};

/// What a mixer or a feed-forward computes, mostly not computed yet.
#[derive(Clone, Copy)]
pub(crate) enum SublayerOutput<'w> {
    /// The product `linear` of `input`.
    Product { label: &'static str, linear: &'w CudaLinear, input: LinearInput },
    /// F32 rows `[n_tokens, n_embd]`.
    Rows(DeviceSlice<f32>),
    /// The weighted sum over the experts of each token. `out`, `add` and `scale` are still to be set.
    Sum(ExpertsSumArgs),
}

/// The result of a mixer or a feed-forward.
pub(crate) struct BranchOutput<'w> {
    /// What is added up, the first one first: two for attention and Mamba-2, none if there is no mixer or no feed-forward.
    outputs: [Option<SublayerOutput<'w>>; 2],
    /// Whether these are partial sums of this rank, to be added up over all ranks.
    is_sharded: bool,
}

/// The input of a mixer or a feed-forward.
#[derive(Clone, Copy)]
pub(crate) struct BranchInput<'w> {
    /// What the products read.
    input: LinearInput,
    /// In a decode step of a mixture of experts, the norm that the router's kernel applies before it writes the rows of
    /// `input`, which is valid only after the router has run.
    router_norm: Option<&'w CudaNorm>,
}

impl BranchInput<'_> {
    /// An input that is complete.
    fn new(input: LinearInput) -> Self {
        Self { input, router_norm: None }
    }
}

/// The launches of one layer: the operations of [`LayerOps`], which has their order.
pub(crate) struct LayerRun<'r, 'b> {
    /// The launches.
    pub(crate) runner: &'r mut ModelRunner,
    /// The micro-batch.
    pub(crate) batch: MicroBatch<'b>,
    /// The layer's index.
    pub(crate) i: usize,
}

impl<'w> LayerOps<'w, CudaParts> for LayerRun<'_, '_> {
    type Input = BranchInput<'w>;
    type Output = BranchOutput<'w>;
    type Error = CudaError;

    fn predict_streams(&mut self, layer: &'w CudaLayer) -> Result<(), CudaError> {
        self.runner.predict_streams(self.batch, layer)
    }

    fn mixer_input(&mut self, layer: &'w CudaLayer, shared: bool) -> Result<BranchInput<'w>, CudaError> {
        if self.batch.spec.attends_to_state() {
            return Ok(BranchInput::new(self.runner.states_input(self.batch)?));
        }
        let reads_rows = mixer_reads_rows(&layer.mixer) || layer.mixer_conv.is_some();
        let as_rows = reads_rows || shared && feed_forward_reads_rows(&layer.feed_forward);
        Ok(BranchInput::new(self.runner.normed_input(self.batch, layer.mixer_norm.as_ref(), as_rows)?))
    }

    /// The normed rows are in `h`.
    fn convolve_input(
        &mut self,
        conv: &'w CudaBlockConv,
        input: BranchInput<'w>,
    ) -> Result<BranchInput<'w>, CudaError> {
        let (runner, batch) = (&mut *self.runner, self.batch);
        let (n, taps, rows) = (batch.size.n_tokens, runner.buffers.block_taps.slice(), runner.buffers.h.slice());
        runner.store("taps", &conv.proj, input.input, taps, n)?;
        let convolved = runner.block_conv(batch, conv, 0, rows)?;
        Ok(BranchInput::new(runner.rows(convolved, batch.spec.n_embd, n)?))
    }

    fn convolve_output(
        &mut self,
        conv: &'w CudaBlockConv,
        output: BranchOutput<'w>,
    ) -> Result<BranchOutput<'w>, CudaError> {
        let (runner, batch) = (&mut *self.runner, self.batch);
        let BranchOutput { outputs: [Some(SublayerOutput::Product { label, linear, input }), None], is_sharded: false } =
            output
        else {
            // `supports` refuses other parts, and block drafters are not shared by ranks.
            return Err(CudaError::UnsupportedPart { part: "a convolution of another result than one product" });
        };
        let result = runner.buffers.result.slice();
        runner.store(label, linear, input, result, batch.size.n_tokens)?;
        let rows = SublayerOutput::Rows(runner.block_conv(batch, conv, 1, result)?);
        Ok(BranchOutput { outputs: [Some(rows), None], is_sharded: false })
    }

    fn store_context(&mut self, layer: &'w CudaLayer) -> Result<(), CudaError> {
        let attention = layer.mixer.attention_alone();
        let attention =
            attention.ok_or(CudaError::UnsupportedPart { part: "context rows of other mixers than attention" })?;
        self.runner.store_context(self.batch, self.i, attention)
    }

    fn laurel(&mut self, layer: &'w CudaLayer, input: BranchInput<'w>) -> Result<(), CudaError> {
        self.runner.laurel(self.batch, layer, input.input)
    }

    fn mixer(&mut self, layer: &'w CudaLayer, input: BranchInput<'w>) -> Result<BranchOutput<'w>, CudaError> {
        let (runner, batch, i, input) = (&mut *self.runner, self.batch, self.i, input.input);
        let outputs = match &layer.mixer {
            Mixer::Attention(w) => [Some(runner.attention(batch, i, w, input)?), None],
            Mixer::LatentAttention(w) => [Some(runner.latent_attention(batch, i, w, input)?), None],
            Mixer::ShortConv(w) => [Some(runner.short_conv(batch, i, w, input)?), None],
            Mixer::Mamba(w) => [Some(runner.mamba(batch, i, w, input)?), None],
            Mixer::Mamba2(w) => [Some(runner.mamba2(batch, i, w, input)?), None],
            Mixer::AttentionAndMamba2(both) => {
                let attention = runner.attention(batch, i, &both.attention, input)?;
                [Some(attention), Some(runner.mamba2(batch, i, &both.mamba2, input)?)]
            }
            Mixer::DeltaRule(w) => [Some(runner.delta_rule(batch, i, w, input)?), None],
            Mixer::Rwkv6(w) => [Some(runner.rwkv6(batch, i, w)?), None],
            Mixer::Rwkv7(w) => [Some(runner.rwkv7(batch, i, w)?), None],
            Mixer::None => [None, None],
        };
        let exchange = self.runner.exchange.as_ref();
        let is_sharded = exchange.is_some_and(|exchange| exchange.shard.plan.shards_mixer(&layer.mixer));
        Ok(BranchOutput { outputs, is_sharded })
    }

    fn add_laurel(&mut self, layer: &'w CudaLayer) -> Result<(), CudaError> {
        self.runner.add_laurel(self.batch, layer)
    }

    /// In a decode step of a mixture of experts the router's kernel applies the norm.
    fn feed_forward_input(&mut self, layer: &'w CudaLayer) -> Result<BranchInput<'w>, CudaError> {
        let norm = layer.feed_forward_norm.as_ref();
        if let (FeedForward::Experts(w), Some(norm)) = (&layer.feed_forward, norm)
            && self.runner.router_norms(self.batch, w, norm)
        {
            let input = LinearInput::rows(self.runner.buffers.h.slice());
            return Ok(BranchInput { input, router_norm: Some(norm) });
        }
        let as_rows = feed_forward_reads_rows(&layer.feed_forward) || layer.feed_forward_conv.is_some();
        Ok(BranchInput::new(self.runner.normed_input(self.batch, norm, as_rows)?))
    }

    fn feed_forward(
        &mut self,
        layer: &'w CudaLayer,
        input: BranchInput<'w>,
        _scale: f32,
    ) -> Result<BranchOutput<'w>, CudaError> {
        let (runner, batch, BranchInput { input, router_norm }) = (&mut *self.runner, self.batch, input);
        let outputs = match &layer.feed_forward {
            FeedForward::Dense(w) => [Some(runner.dense(batch, w, input)?), None],
            FeedForward::Experts(w) => [Some(runner.experts(batch, w, input, router_norm)?), None],
            FeedForward::ChannelMix(w) => [Some(runner.channel_mix(batch, self.i, w)?), None],
            FeedForward::None => [None, None],
        };
        let exchange = self.runner.exchange.as_ref();
        let is_sharded = exchange.is_some_and(|exchange| exchange.shard.plan.feed_forwards[self.i]);
        Ok(BranchOutput { outputs, is_sharded })
    }

    fn join(&mut self, output: BranchOutput<'w>, norm: Option<&'w CudaNorm>, scale: f32) -> Result<(), CudaError> {
        self.runner.join(self.batch, &output, norm, scale)
    }

    fn normalize(&mut self, norm: &'w CudaNorm) -> Result<(), CudaError> {
        let x = self.runner.buffers.x.slice();
        let args = norm_args(Some(norm), x, self.batch.spec.n_embd);
        self.runner.norm(NormArgs { out: x.ptr(), ..args }, self.batch.size.n_tokens)
    }

    fn finish(&mut self, layer: &'w CudaLayer) -> Result<(), CudaError> {
        self.runner.add_layer_embedding(self.batch, self.i, layer)?;
        if layer.output_scale != 1.0 {
            let x = self.runner.buffers.x.slice();
            let args =
                NormArgs { out: x.ptr(), scale: layer.output_scale, ..norm_args(None, x, self.batch.spec.n_embd) };
            self.runner.norm(args, self.batch.size.n_tokens)?;
        }
        Ok(())
    }
}

/// Whether a mixer reads the normalised residual stream as F32 rows (for token shifts), and not through products only.
fn mixer_reads_rows(mixer: &Mixer<CudaParts>) -> bool {
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

/// Whether a feed-forward does so.
fn feed_forward_reads_rows(feed_forward: &FeedForward<CudaParts>) -> bool {
    match feed_forward {
        FeedForward::Experts(_) | FeedForward::ChannelMix(_) => true,
        FeedForward::Dense(_) | FeedForward::None => false,
    }
}

impl ModelRunner {
    /// Launches layer `i`; of context rows, what stores their keys and values there.
    pub(crate) fn layer(&mut self, batch: MicroBatch<'_>, i: usize, layer: &CudaLayer) -> Result<(), CudaError> {
        let mut layer_run = LayerRun { runner: self, batch, i };
        if batch.context.is_some() { layer_run.store_context(layer) } else { layer_run.run_layer(layer) }
    }

    /// The normalised residual stream as input of products; if `as_rows`, also as F32 rows in `h`.
    fn normed_input(
        &mut self,
        batch: MicroBatch<'_>,
        norm: Option<&CudaNorm>,
        as_rows: bool,
    ) -> Result<LinearInput, CudaError> {
        let (n, n_embd) = (batch.size.n_tokens, batch.spec.n_embd);
        if as_rows { self.normed_with_f32(norm, n_embd, n) } else { self.normed(norm, n_embd, n) }
    }

    /// `x += scale * norm(sum of outputs)`, where partial sums of this rank are added up over all ranks first.
    pub(crate) fn join(
        &mut self,
        batch: MicroBatch<'_>,
        output: &BranchOutput<'_>,
        norm: Option<&CudaNorm>,
        scale: f32,
    ) -> Result<(), CudaError> {
        let (n, n_embd, x, result) =
            (batch.size.n_tokens, batch.spec.n_embd, self.buffers.x.slice(), self.buffers.result.slice());
        let BranchOutput { outputs, is_sharded } = *output;
        let is_empty = outputs[0].is_none();
        for (i, output) in outputs.iter().flatten().enumerate() {
            // A norm, and a sum over the ranks, need the complete sum of the outputs in `result`; else each output is added to
            // `x` directly.
            let (y, epilogue, scale) = match (norm.is_some() || is_sharded, i) {
                (false, _) => (x, Epilogue::Add, scale),
                (true, 0) => (result, Epilogue::Store, 1.0),
                (true, _) => (result, Epilogue::Add, 1.0),
            };
            match *output {
                SublayerOutput::Product { label, linear, input } => {
                    let product =
                        LinearOp { epilogue, scale, bias: linear.bias(), y, ..LinearOp::stored(label, &linear.weight) };
                    self.product(&product, input, linear.weight.n_in, n)?;
                }
                SublayerOutput::Sum(args) => {
                    let add = u32::from(epilogue == Epilogue::Add);
                    self.experts_sum(batch, &ExpertsSumArgs { out: y.ptr(), add, scale, ..args })?;
                }
                SublayerOutput::Rows(rows) => {
                    let accumulate = u32::from(epilogue == Epilogue::Add);
                    self.norm(NormArgs { out: y.ptr(), scale, accumulate, ..norm_args(None, rows, n_embd) }, n)?;
                }
            }
        }
        if is_sharded && !is_empty {
            let (out, how) = if norm.is_some() { (result, (false, 1.0)) } else { (x, (true, scale)) };
            self.all_reduce(result, out, n * n_embd, how)?;
        }
        if norm.is_some() && !is_empty {
            self.norm(NormArgs { out: x.ptr(), scale, accumulate: 1, ..norm_args(norm, result, n_embd) }, n)?;
        }
        Ok(())
    }
}
