//! The operations of an encoder: each records its dispatches.

use std::collections::HashMap;
use std::sync::Arc;

use metal_attention_model::DeviceInfo;
use metal_attention_model::vision::{
    AttentionSegment, EncoderActivation, EncoderLinear, EncoderNorm, EncoderOps, split_columns,
};
use wgpu::Buffer;

use super::products::{Products, parts};
use super::recorder::Recorder;
use super::rows::{RowPool, WgpuRows};
use super::{WgpuEncoderTypes, WgpuVector};
use crate::arena::Bind;
use crate::device::WgpuDevice;
use crate::error::WgpuError;
use crate::kernels::{
    ColumnPlace, ElementOp, NormShape, RotateShape, SegmentAttentionRows, SegmentAttentionShape, SummedRows,
    elementwise, norm, place_columns, rotate_pairs, row_sums, segment_attention, segment_attention_cooperative,
    segments_on_matrix_units,
};

/// The range without bounds.
const UNLIMITED: [f32; 2] = [f32::NEG_INFINITY, f32::INFINITY];

/// The device, what is recorded for it, and buffers.
pub(super) struct WgpuEncoderOps {
    gpu: Arc<WgpuDevice>,
    /// Whether products and attention keep 32-bit floats.
    exact: bool,
    recorder: Recorder,
    pool: RowPool,
    products: Products,
    /// Numbers in GPU memory, by their bits: factors and ranges, which are no constants of pipelines, since each block may have
    /// its own.
    numbers: HashMap<[u32; 2], Buffer>,
}

fn mismatch(what: &str, why: String) -> WgpuError {
    WgpuError::Mismatch { what: format!("{what} of the picture encoder"), why }
}

impl WgpuEncoderOps {
    pub(super) fn new(gpu: Arc<WgpuDevice>, exact: bool) -> Self {
        Self {
            recorder: Recorder::new(Arc::clone(&gpu)),
            pool: RowPool::default(),
            products: Products::new(Arc::clone(&gpu), exact),
            numbers: HashMap::new(),
            gpu,
            exact,
        }
    }

    /// The GPU.
    pub(super) fn device(&self) -> DeviceInfo {
        self.gpu.info()
    }

    /// Forgets what is not submitted, and gives back all memory but that of weights.
    pub(super) fn clear(&mut self) {
        self.recorder.clear();
        self.pool.clear();
        self.products.clear();
        self.numbers.clear();
    }

    /// Rows for a result.
    fn rows(&self, n_rows: usize, width: usize) -> Result<WgpuRows, WgpuError> {
        self.pool.rows(&self.gpu, n_rows, width)
    }

    /// Two numbers in GPU memory.
    fn numbers(&mut self, numbers: [f32; 2]) -> Result<Buffer, WgpuError> {
        let bits = numbers.map(f32::to_bits);
        if let Some(buffer) = self.numbers.get(&bits) {
            return Ok(buffer.clone());
        }
        let buffer = self.gpu.upload("numbers of the picture encoder", &numbers)?;
        self.numbers.insert(bits, buffer.clone());
        Ok(buffer)
    }

    /// `x = op(x)`
    fn apply(&mut self, x: &WgpuRows, op: ElementOp<'_>) -> Result<(), WgpuError> {
        let dispatch = elementwise(&self.gpu, op, x.slice())?;
        self.recorder.dispatch(dispatch, x.n_rows());
        Ok(())
    }

    /// An error unless `y` has the shape of `x`.
    fn check_equal(what: &str, x: &WgpuRows, y: &WgpuRows) -> Result<(), WgpuError> {
        let [x, y] = [x, y].map(|rows| [rows.n_rows(), rows.width()]);
        if x == y { Ok(()) } else { Err(mismatch(what, format!("rows of {x:?} and {y:?} elements"))) }
    }

    /// The values within a range; infinite bounds are none.
    fn clamp(&mut self, x: &WgpuRows, range: [f32; 2]) -> Result<(), WgpuError> {
        if range == UNLIMITED {
            return Ok(());
        }
        // Shaders have finite numbers only.
        let range = self.numbers(range.map(|bound| bound.clamp(f32::MIN, f32::MAX)))?;
        self.apply(x, ElementOp::Clamp(&range))
    }

    /// Rows of `width` elements each of which is a sum of rows of `x`.
    fn sums(&mut self, x: &WgpuRows, n_rows: usize, rows: SummedRows<'_>) -> Result<WgpuRows, WgpuError> {
        let y = self.rows(n_rows, x.width())?;
        self.recorder.dispatch(row_sums(&self.gpu, rows, x.width(), x.slice(), y.slice())?, n_rows);
        Ok(y)
    }

    /// Puts the rows of `x` into columns of `y`.
    fn place(&mut self, place: ColumnPlace, x: &WgpuRows, y: &WgpuRows) -> Result<(), WgpuError> {
        self.recorder.dispatch(place_columns(&self.gpu, place, x.slice(), y.slice())?, x.n_rows());
        Ok(())
    }

    /// The indices of rows in GPU memory.
    fn indices(&self, rows: &[u32]) -> Result<Buffer, WgpuError> {
        self.gpu.upload("the order of rows of the picture encoder", rows)
    }
}

impl EncoderOps for WgpuEncoderOps {
    type Types = WgpuEncoderTypes;
    type Rows = WgpuRows;
    type Error = WgpuError;

    fn upload(&mut self, [_, width]: [usize; 2], values: impl FnOnce() -> Vec<f32>) -> Result<WgpuRows, WgpuError> {
        WgpuRows::upload(&self.gpu, &values(), width)
    }

    fn read(&mut self, rows: &WgpuRows, columns: usize) -> Result<Vec<Vec<f32>>, WgpuError> {
        self.recorder.submit();
        if rows.n_elements() == 0 {
            return Ok(vec![Vec::new(); rows.width() / columns.max(1)]);
        }
        // Rows begin where their buffer does.
        let values: Vec<f32> = self.gpu.read(rows.slice().buffer(), rows.n_elements())?;
        Ok(if columns == rows.width() { vec![values] } else { split_columns(&values, rows.width(), columns) })
    }

    fn width(&self, rows: &WgpuRows) -> usize {
        rows.width()
    }

    fn reshape(&mut self, rows: WgpuRows, width: usize) -> WgpuRows {
        rows.reshape(width)
    }

    fn copy(&mut self, rows: &WgpuRows) -> Result<WgpuRows, WgpuError> {
        let copy = self.rows(rows.n_rows(), rows.width())?;
        self.recorder.copy(rows.slice().clone(), copy.slice().clone());
        Ok(copy)
    }

    fn linear(&mut self, x: &WgpuRows, linear: &EncoderLinear<WgpuEncoderTypes>) -> Result<WgpuRows, WgpuError> {
        self.gpu.check()?;
        let y = self.rows(x.n_rows(), linear.matrix.n_out())?;
        let within = match linear.clamp {
            Some(clamp) if clamp.input != UNLIMITED => {
                let copy = self.copy(x)?;
                self.clamp(&copy, clamp.input)?;
                Some(copy)
            }
            Some(_) | None => None,
        };
        let x = within.as_ref().unwrap_or(x);
        let bias = linear.bias.as_ref().map(|bias| bias.of(y.width())).transpose()?;
        self.products.multiply(&mut self.recorder, &linear.matrix, bias, x, &y)?;
        if let Some(clamp) = linear.clamp {
            self.clamp(&y, clamp.output)?;
        }
        Ok(y)
    }

    fn norm(&mut self, x: &WgpuRows, norm_of: &EncoderNorm<WgpuEncoderTypes>) -> Result<WgpuRows, WgpuError> {
        let EncoderNorm { kind, eps, width, ref weight, ref bias } = *norm_of;
        if width == 0 || !x.width().is_multiple_of(width) {
            return Err(mismatch("a norm", format!("rows of {} elements in parts of {width}", x.width())));
        }
        let (y, weight) = (self.rows(x.n_rows(), x.width())?, weight.of(width)?);
        let rows = x.width() / width;
        let shape = NormShape { rows, kind: Some(kind), eps, weight: true, ..NormShape::of_row(width) };
        for (first, n) in parts(x.n_rows()) {
            let (x, y) = (x.part(first, n), y.part(first, n));
            // The kernel reads no batch, as it computes all rows.
            let dispatch = norm(&self.gpu, shape, Some(&x as &dyn Bind), Some(weight), &y, weight)?;
            self.recorder.dispatch(dispatch, n);
        }
        if let Some(bias) = bias {
            self.apply(&y, ElementOp::AddRow(bias.of(width)?, width))?;
        }
        Ok(y)
    }

    fn activate(&mut self, x: &mut WgpuRows, activation: EncoderActivation) -> Result<(), WgpuError> {
        self.apply(x, ElementOp::Activate(activation))
    }

    fn activate_gated(
        &mut self,
        x: &mut WgpuRows,
        activation: EncoderActivation,
        y: &WgpuRows,
    ) -> Result<(), WgpuError> {
        Self::check_equal("a gate", x, y)?;
        self.apply(x, ElementOp::ActivateGated(activation, y.slice()))
    }

    fn add(&mut self, x: &mut WgpuRows, y: &WgpuRows) -> Result<(), WgpuError> {
        Self::check_equal("a sum", x, y)?;
        self.apply(x, ElementOp::Add(y.slice()))
    }

    fn add_row(&mut self, x: &mut WgpuRows, row: &WgpuVector) -> Result<(), WgpuError> {
        self.apply(x, ElementOp::AddRow(row.of(x.width())?, x.width()))
    }

    fn scale(&mut self, x: &mut WgpuRows, factor: f32) -> Result<(), WgpuError> {
        let factor = self.numbers([factor; 2])?;
        self.apply(x, ElementOp::MultiplyRow(&factor, 1))
    }

    fn scale_columns(&mut self, x: &mut WgpuRows, factors: &WgpuVector) -> Result<(), WgpuError> {
        self.apply(x, ElementOp::MultiplyRow(factors.of(x.width())?, x.width()))
    }

    fn gather(&mut self, x: &WgpuRows, rows: &[u32]) -> Result<WgpuRows, WgpuError> {
        let indices = self.indices(rows)?;
        self.sums(x, rows.len(), SummedRows::Listed { rows: &indices, n: 1, weights: None })
    }

    fn join_rows(&mut self, x: &WgpuRows, y: &WgpuRows) -> Result<WgpuRows, WgpuError> {
        if x.width() != y.width() {
            return Err(mismatch("rows below each other", format!("of {} and {} elements", x.width(), y.width())));
        }
        let joined = self.rows(x.n_rows() + y.n_rows(), x.width())?;
        self.recorder.copy(x.slice().clone(), joined.part(0, x.n_rows()));
        self.recorder.copy(y.slice().clone(), joined.part(x.n_rows(), y.n_rows()));
        Ok(joined)
    }

    fn join_columns(&mut self, parts: &[&WgpuRows]) -> Result<WgpuRows, WgpuError> {
        let n_rows = parts.first().map_or(0, |part| part.n_rows());
        if parts.iter().any(|part| part.n_rows() != n_rows) {
            let counts: Vec<_> = parts.iter().map(|part| part.n_rows()).collect();
            return Err(mismatch("columns beside each other", format!("of {counts:?} rows")));
        }
        let y_width = parts.iter().map(|part| part.width()).sum();
        let joined = self.rows(n_rows, y_width)?;
        let mut at = 0;
        for part in parts {
            self.place(ColumnPlace { width: part.width(), n: 1, at, y_width }, part, &joined)?;
            at += part.width();
        }
        Ok(joined)
    }

    fn mean(&mut self, x: &WgpuRows, n: usize) -> Result<WgpuRows, WgpuError> {
        self.sums(x, x.n_rows() / n.max(1), SummedRows::Mean { n })
    }

    fn weighted_sum(
        &mut self,
        x: &WgpuRows,
        rows: &[u32],
        n: usize,
        weights: &WgpuVector,
    ) -> Result<WgpuRows, WgpuError> {
        let weights = weights.of(n * x.width())?;
        let indices = self.indices(rows)?;
        self.sums(x, rows.len() / n.max(1), SummedRows::Listed { rows: &indices, n, weights: Some(weights) })
    }

    fn interleave(&mut self, x: &WgpuRows, n: usize) -> Result<WgpuRows, WgpuError> {
        let y = self.rows(x.n_rows(), x.width())?;
        let place = ColumnPlace { width: x.width() / n.max(1), n, at: 0, y_width: x.width() };
        self.place(place, x, &y)?;
        Ok(y)
    }

    fn rotate(&mut self, x: &mut WgpuRows, table: &WgpuRows, head_dim: usize, block: usize) -> Result<(), WgpuError> {
        let shape = RotateShape { width: x.width(), head_dim, block };
        self.recorder.dispatch(rotate_pairs(&self.gpu, shape, x.slice(), table.slice())?, x.n_rows());
        Ok(())
    }

    fn attention(
        &mut self,
        q: &WgpuRows,
        k: &WgpuRows,
        v: &WgpuRows,
        head_dim: usize,
        scale: f32,
        segments: &[AttentionSegment],
    ) -> Result<WgpuRows, WgpuError> {
        self.gpu.check()?;
        if head_dim == 0 || ![q, k, v].iter().all(|rows| rows.width().is_multiple_of(head_dim)) {
            return Err(mismatch("attention", format!("rows of {} elements, heads of {head_dim}", q.width())));
        }
        let (n_head, n_head_kv) = (q.width() / head_dim, k.width() / head_dim);
        let shape = SegmentAttentionShape { n_head, n_head_kv, head_dim, scale };
        let result = self.rows(q.n_rows(), q.width())?;
        let rows = SegmentAttentionRows { q: q.slice(), k: k.slice(), v: v.slice(), result: result.slice() };
        let dispatch = if segments_on_matrix_units(&self.gpu, shape, self.exact) {
            segment_attention_cooperative(&self.gpu, shape, segments, rows)?
        } else {
            segment_attention(&self.gpu, shape, segments, rows)?
        };
        self.recorder.dispatch(dispatch, q.n_rows());
        Ok(result)
    }
}
