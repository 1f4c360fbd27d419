//! Products of encoders: which kernels compute them, and in which form they read and store rows.

use std::sync::Arc;

use metal_attention_model::vision::{EncoderActivation, EncoderFeedForward, EncoderLinear, EncoderOps};

use super::CudaEncoderTypes;
use super::ops::{CudaEncoderOps, elements_args, function_of};
use super::rows::CudaRows;
use crate::CudaError;
use crate::activations::packed;
use crate::args::{ElementsArgs, Epilogue, NormArgs, ResultRowsArgs};
use crate::device::CudaBuffer;
use crate::kernels;
use crate::matrix::PANEL;
use crate::runner::linear::{GEMV_TOKENS, LinearInput, LinearOp, norm_args};
use crate::runner::{WideOutput, WideProduct, max_few_tokens, packed_layout};
use crate::slice::DevicePtr;

impl CudaEncoderOps {
    /// Whether products of `n_rows` rows read packed F16 inputs.
    pub(super) fn packs(&self, n_rows: usize) -> bool {
        !self.exact && n_rows > GEMV_TOKENS
    }

    /// Memory for packed rows.
    pub(super) fn packed_rows(&mut self, n_rows: usize, width: usize) -> Result<Arc<CudaBuffer>, CudaError> {
        self.memory.buffer::<u8>(packed(width, n_rows))
    }

    /// Launches `activation(x)`, times `y` if there is one, as packed rows alone.
    pub(super) fn activated(
        &mut self,
        activation: EncoderActivation,
        x: &CudaRows,
        y: Option<&CudaRows>,
    ) -> Result<Arc<CudaBuffer>, CudaError> {
        let packed = self.packed_rows(x.n_rows, x.width)?;
        let y = y.map(|y| (y.slice(), y.width));
        let args = ElementsArgs {
            packed: packed.ptr(),
            n_token_tiles: self.packed_order(x.n_rows, x.width),
            ..elements_args(function_of(activation), x, y)
        };
        self.launch_rows(kernels::ENCODER_ELEMENTS, x.n_rows, x.width.next_multiple_of(PANEL), &args)?;
        Ok(packed)
    }

    /// The layout of packed rows ([`packed_layout`]).
    pub(super) fn packed_order(&self, n_rows: usize, width: usize) -> u32 {
        let summary = self.gpu.summary();
        packed_layout(summary, max_few_tokens(summary, width), n_rows)
    }

    /// The rows as input of products: packed, unless they are few or in `exact` mode.
    pub(super) fn input(&mut self, x: &CudaRows) -> Result<LinearInput, CudaError> {
        if !self.packs(x.n_rows) {
            return Ok(LinearInput::rows(x.slice()));
        }
        let rows = x.packed(|| {
            let rows = self.packed_rows(x.n_rows, x.width)?;
            let args = NormArgs { packed: rows.ptr(), ..norm_args(None, x.slice(), x.width) };
            self.launcher(x.width).norm(args, x.n_rows)?;
            Ok(rows)
        })?;
        Ok(LinearInput::Packed(rows.slice()))
    }

    /// Launches a product with rows of `width` elements; `epilogue`: stores it to `y` or adds it there.
    pub(super) fn product(
        &mut self,
        (input, width): (LinearInput, usize),
        linear: &EncoderLinear<CudaEncoderTypes>,
        y: &mut CudaRows,
        epilogue: Epilogue,
    ) -> Result<(), CudaError> {
        check_widths(linear, width, y.width)?;
        if y.n_rows == 0 {
            return Ok(());
        }
        let (n_rows, y, bias) = (y.n_rows, y.slice_mut(), bias_of(linear));
        let op = LinearOp { epilogue, bias, y, ..LinearOp::stored("picture", &linear.matrix) };
        self.launcher(width).product(&op, input, width, n_rows)
    }

    /// `W x + b`, without clamps.
    pub(super) fn stored_product(
        &mut self,
        x: &CudaRows,
        linear: &EncoderLinear<CudaEncoderTypes>,
    ) -> Result<CudaRows, CudaError> {
        let mut y = self.memory.rows(x.n_rows, linear.n_out)?;
        let input = self.input(x)?;
        self.product((input, x.width), linear, &mut y, Epilogue::Store)?;
        Ok(y)
    }

    /// Launches the products of packed rows `x` with up to three matrices as one, if these are of `matmul_wide.rs` and clamp nothing.
    /// `None`: they are not.
    pub(super) fn joined_products<const N: usize>(
        &mut self,
        x: &CudaRows,
        linears: [&EncoderLinear<CudaEncoderTypes>; N],
    ) -> Result<Option<[CudaRows; N]>, CudaError> {
        let fits = self.packs(x.n_rows) && self.launcher(x.width).is_wide(x.n_rows);
        if !fits || linears.iter().any(|linear| linear.clamp.is_some()) {
            return Ok(None);
        }
        for linear in linears {
            check_widths(linear, x.width, linear.n_out)?;
        }
        let LinearInput::Packed(input) = self.input(x)? else { return Ok(None) };
        let mut rows = Vec::with_capacity(N);
        for linear in linears {
            rows.push(self.memory.rows(x.n_rows, linear.n_out)?);
        }
        let Ok(rows) = <[CudaRows; N]>::try_from(rows) else { return Ok(None) };
        let results: [ResultRowsArgs; N] = std::array::from_fn(|i| ResultRowsArgs {
            y: rows[i].slice().ptr(),
            bias: bias_of(linears[i]),
            n_out: linears[i].n_out as u32,
            unused: 0,
        });
        let product = WideProduct {
            label: "picture",
            matrices: &linears.map(|linear| (&linear.matrix, 0)),
            results: &results,
            output: WideOutput::Epilogue { epilogue: Epilogue::Store, activation: 0 },
            scale: 1.0,
            packed: DevicePtr::NULL,
        };
        self.launcher(x.width).wide_product(&product, input, x.n_rows)?;
        Ok(Some(rows))
    }

    /// The input of a feed-forward's last product as packed rows, with their width. `None` where products read F32 rows or clamp them.
    pub(super) fn packed_hidden(
        &mut self,
        x: &CudaRows,
        feed_forward: &EncoderFeedForward<CudaEncoderTypes>,
    ) -> Result<Option<(Arc<CudaBuffer>, usize)>, CudaError> {
        if !self.packs(x.n_rows) || feed_forward.down().clamp.is_some() {
            return Ok(None);
        }
        match feed_forward {
            EncoderFeedForward::Plain { up, activation, .. } => {
                let is_wide = self.launcher(x.width).is_wide(x.n_rows) && up.clamp.is_none();
                if let (true, LinearInput::Packed(input)) = (is_wide, self.input(x)?) {
                    check_widths(up, x.width, up.n_out)?;
                    let packed = self.packed_rows(x.n_rows, up.n_out)?;
                    let product = WideProduct {
                        label: "picture",
                        matrices: &[(&up.matrix, 0)],
                        results: &[ResultRowsArgs {
                            y: DevicePtr::NULL,
                            bias: bias_of(up),
                            n_out: up.n_out as u32,
                            unused: 0,
                        }],
                        output: WideOutput::Activated(function_of(*activation)),
                        scale: 1.0,
                        packed: packed.ptr(),
                    };
                    self.launcher(x.width).wide_product(&product, input, x.n_rows)?;
                    return Ok(Some((packed, up.n_out)));
                }
                let up = self.linear(x, up)?;
                Ok(Some((self.activated(*activation, &up, None)?, up.width)))
            }
            EncoderFeedForward::Gated { gate, up, activation, .. } => {
                let [gate, up] = match self.joined_products(x, [gate, up])? {
                    Some(rows) => rows,
                    None => [self.linear(x, gate)?, self.linear(x, up)?],
                };
                Ok(Some((self.activated(*activation, &gate, Some(&up))?, gate.width)))
            }
        }
    }
}

/// An error unless a product has these widths.
fn check_widths(linear: &EncoderLinear<CudaEncoderTypes>, n_in: usize, n_out: usize) -> Result<(), CudaError> {
    if (linear.matrix.n_in, linear.matrix.n_rows, linear.n_out) == (n_in, n_out, n_out) {
        return Ok(());
    }
    Err(CudaError::UnsupportedPart { part: "a picture encoder whose widths differ" })
}

/// The bias of a product, or null.
fn bias_of(linear: &EncoderLinear<CudaEncoderTypes>) -> DevicePtr<f32> {
    linear.bias.as_ref().map_or(DevicePtr::NULL, |bias| bias.buffer.ptr())
}
