//! [`LayerOps`]: the operations of one layer, which each backend has, and the order of them, which is the same for all.

use crate::{Layer, Parts, Residual};

/// The operations that a layer is made of, on a backend's residual stream `x`, `[n_tokens, n_embd]`. `'w` is the
/// lifetime of the weights. [`run_layer`](Self::run_layer) calls them.
///
/// Mixers and most feed-forwards end before their last product, so that [`join`](Self::join) can let it add to `x`
/// directly. Several residual streams (AltUp) and LAuReL exist only in layers with [`Residual::Sequential`], which
/// [`ModelSpec::check_residuals`](crate::ModelSpec::check_residuals) checks.
pub trait LayerOps<'w, P: Parts + 'w> {
    /// The input of a mixer or a feed-forward: the normed residual stream, computed or still to be computed by the products
    /// that read it.
    type Input: Copy;
    /// The result of a mixer or a feed-forward, mostly not computed yet. It has a value for [`Mixer::None`](crate::Mixer::None)
    /// and [`FeedForward::None`](crate::FeedForward::None), which [`join`](Self::join) adds nothing for.
    type Output;
    /// Why an operation failed.
    type Error;

    /// Predicts all residual streams, and makes the active one `x`. Nothing in models with one stream.
    fn predict_streams(&mut self, layer: &'w Layer<P>) -> Result<(), Self::Error>;

    /// The mixer's input. `shared`: the feed-forward reads the same input.
    fn mixer_input(&mut self, layer: &'w Layer<P>, shared: bool) -> Result<Self::Input, Self::Error>;

    /// `conv` of a mixer's or a feed-forward's input, in layers that have such a convolution.
    fn convolve_input(&mut self, conv: &'w P::BlockConv, input: Self::Input) -> Result<Self::Input, Self::Error>;

    /// `conv` of the result of the mixer or feed-forward whose input [`convolve_input`](Self::convolve_input) computed last.
    fn convolve_output(&mut self, conv: &'w P::BlockConv, output: Self::Output) -> Result<Self::Output, Self::Error>;

    /// Stores the keys and values of the rows of `x` themselves, which are context rows
    /// ([`ModelSpec::takes_context`](crate::ModelSpec::takes_context)). Leaves `x` as it is.
    fn store_context(&mut self, layer: &'w Layer<P>) -> Result<(), Self::Error>;

    /// Computes LAuReL's branch of the mixer's input. Nothing in models with one stream.
    fn laurel(&mut self, layer: &'w Layer<P>, input: Self::Input) -> Result<(), Self::Error>;

    /// The mixer, which stores keys, values and states of the tokens.
    fn mixer(&mut self, layer: &'w Layer<P>, input: Self::Input) -> Result<Self::Output, Self::Error>;

    /// Adds LAuReL's branch to `x`. Nothing in models with one stream.
    fn add_laurel(&mut self, layer: &'w Layer<P>) -> Result<(), Self::Error>;

    /// The feed-forward's input, if it is not the mixer's.
    fn feed_forward_input(&mut self, layer: &'w Layer<P>) -> Result<Self::Input, Self::Error>;

    /// The feed-forward. It does not multiply by `scale`, the factor that [`join`](Self::join) will apply to its output; a
    /// backend may let the feed-forward add to `x` itself only where that is 1.
    fn feed_forward(
        &mut self,
        layer: &'w Layer<P>,
        input: Self::Input,
        scale: f32,
    ) -> Result<Self::Output, Self::Error>;

    /// `x += scale * norm(output)`; without a norm `x += scale * output`. It alone multiplies by `scale`. Nothing if the
    /// output is that of no mixer or no feed-forward, or was added to `x` already.
    fn join(&mut self, output: Self::Output, norm: Option<&'w P::Norm>, scale: f32) -> Result<(), Self::Error>;

    /// `x = norm(x)`
    fn normalize(&mut self, norm: &'w P::Norm) -> Result<(), Self::Error>;

    /// What follows the feed-forward: corrects the residual streams, adds the layer's own embedding, and multiplies `x`
    /// by the layer's output scale; each in models that have it.
    fn finish(&mut self, layer: &'w Layer<P>) -> Result<(), Self::Error>;

    /// Runs a layer in the order that its [`Residual`] prescribes.
    fn run_layer(&mut self, layer: &'w Layer<P>) -> Result<(), Self::Error> {
        let (mixer_post, post) = (layer.mixer_post_norm.as_ref(), layer.feed_forward_post_norm.as_ref());
        match &layer.residual {
            // x += scale * m(x); x += scale * f(x)
            Residual::Sequential { scale } => {
                self.predict_streams(layer)?;
                let mut input = self.mixer_input(layer, false)?;
                if let Some(conv) = &layer.mixer_conv {
                    input = self.convolve_input(conv, input)?;
                }
                self.laurel(layer, input)?;
                let mut mixed = self.mixer(layer, input)?;
                if let Some(conv) = &layer.mixer_conv {
                    mixed = self.convolve_output(conv, mixed)?;
                }
                self.join(mixed, mixer_post, *scale)?;
                self.add_laurel(layer)?;
                let mut input = self.feed_forward_input(layer)?;
                if let Some(conv) = &layer.feed_forward_conv {
                    input = self.convolve_input(conv, input)?;
                }
                let mut output = self.feed_forward(layer, input, *scale)?;
                if let Some(conv) = &layer.feed_forward_conv {
                    output = self.convolve_output(conv, output)?;
                }
                self.join(output, post, *scale)?;
            }
            // x += m(x) + f(x). Both outputs are joined at the end, since the feed-forward reads x without the mixer's.
            Residual::Parallel => {
                let shared = layer.feed_forward_norm.is_none();
                let input = self.mixer_input(layer, shared)?;
                let mixed = self.mixer(layer, input)?;
                let input = if shared { input } else { self.feed_forward_input(layer)? };
                let output = self.feed_forward(layer, input, 1.0)?;
                self.join(mixed, mixer_post, 1.0)?;
                self.join(output, post, 1.0)?;
            }
            // x = norm(x + m(x)); x = norm(x + f(x))
            Residual::PostNorm { mixer_sum_norm, feed_forward_sum_norm } => {
                let input = self.mixer_input(layer, false)?;
                let mixed = self.mixer(layer, input)?;
                self.join(mixed, mixer_post, 1.0)?;
                self.normalize(mixer_sum_norm)?;
                let input = self.feed_forward_input(layer)?;
                let output = self.feed_forward(layer, input, 1.0)?;
                self.join(output, post, 1.0)?;
                self.normalize(feed_forward_sum_norm)?;
            }
        }
        self.finish(layer)
    }
}
