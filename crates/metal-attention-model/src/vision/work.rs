//! The work of an encoder: its operations, counted from the shapes of rows, and its matrix products without what is between them.

use std::marker::PhantomData;
use std::time::{Duration, Instant};

use super::geometry::Layout;
use super::kept::KeptRows;
use super::ops::{AttentionSegment, EncoderOps};
use super::run::{State, run_stages};
use super::stages::{Encoder, EncoderActivation, EncoderLinear, EncoderNorm, EncoderTypes};

/// The arithmetic operations of one run of an encoder. A multiplication with its addition counts as two. Norms, activations, softmax
/// and rotations are not counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EncoderWork {
    /// Operations of products with weights, convolutions as products included.
    pub products: u64,
    /// Operations of attention's two products: of queries and keys, and of weights and values.
    pub attention: u64,
    /// Operations of convolutions of each column by itself.
    pub depthwise: u64,
    /// Rows that come out, of all pictures.
    pub n_rows: usize,
}

impl EncoderWork {
    /// All operations.
    pub fn flops(&self) -> u64 {
        self.products + self.attention + self.depthwise
    }
}

/// The shape of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shape {
    /// Elements of all rows.
    n: usize,
    width: usize,
}

impl Shape {
    pub(super) fn n_rows(self) -> usize {
        self.n / self.width.max(1)
    }
}

/// Operations over shapes: they compute nothing, but for products, for which they call `product` with the shape of the input.
pub(super) struct ShapeOps<T, F> {
    product: F,
    /// What was counted so far.
    work: EncoderWork,
    types: PhantomData<T>,
}

impl<T, F> ShapeOps<T, F> {
    pub(super) fn new(product: F) -> Self {
        Self { product, work: EncoderWork::default(), types: PhantomData }
    }
}

impl<T: EncoderTypes> Encoder<T> {
    /// The operations of a run over pictures of these sizes, `[width, height]` in pixels.
    pub fn work(&self, pictures: &[[usize; 2]]) -> EncoderWork {
        let Ok(work) = self.visit_products(pictures, |_, _| Ok::<_, std::convert::Infallible>(()));
        work
    }

    /// The time of the matrix products of a run over pictures of these sizes, `[width, height]` in pixels: of all of them, in their order,
    /// with the encoder's weights and with inputs of the same shapes that are on the device before the time begins. It ends when the
    /// result of the last one has been read.
    ///
    /// # Errors
    ///
    /// Those of `ops`.
    pub fn time_products<O: EncoderOps<Types = T>>(
        &self,
        ops: &mut O,
        pictures: &[[usize; 2]],
    ) -> Result<Duration, O::Error> {
        let mut inputs: Vec<(Shape, O::Rows)> = Vec::new();
        self.visit_products(pictures, |shape, _| {
            if shape.n > 0 && inputs.iter().all(|(known, _)| *known != shape) {
                // Numbers between -1 and 1, since a device's clock may depend on the bits.
                let values = || (0..shape.n as u32).map(pseudo_random).collect();
                inputs.push((shape, ops.upload([shape.n_rows(), shape.width], values)?));
            }
            Ok(())
        })?;
        for (_, input) in inputs.iter().take(1) {
            // Uploads are in the order of the operations: the last one has ended.
            let last = ops.gather(input, &[0])?;
            let width = ops.width(&last);
            ops.read(&last, width)?;
        }
        let start = Instant::now();
        let mut last = None;
        self.visit_products(pictures, |shape, linear| {
            if let Some((_, input)) = inputs.iter().find(|(known, _)| *known == shape) {
                last = Some(ops.linear(input, linear)?);
            }
            Ok(())
        })?;
        if let Some(rows) = &last {
            let width = ops.width(rows);
            ops.read(rows, width)?;
        }
        Ok(start.elapsed())
    }

    /// Calls `product` for each matrix product of a run, in their order, with the shape of its input.
    fn visit_products<E>(
        &self,
        pictures: &[[usize; 2]],
        product: impl FnMut(Shape, &EncoderLinear<T>) -> Result<(), E>,
    ) -> Result<EncoderWork, E> {
        let side = self.patch.side;
        let layouts: Vec<_> =
            pictures.iter().map(|[width, height]| Layout::grid(width / side, height / side)).collect();
        let width = 3 * side * side;
        let rows = Shape { n: layouts.iter().map(|layout| layout.places.len() * width).sum(), width };
        let mut ops = ShapeOps::new(product);
        let state = run_stages(&mut ops, &mut KeptRows::default(), &self.stages, State { rows, layouts })?;
        let n_rows = state.layouts.iter().map(|layout| layout.places.len()).sum();
        Ok(EncoderWork { n_rows, ..ops.work })
    }
}

/// A number between -1 and 1 (Knuth's multiplicative hash).
fn pseudo_random(i: u32) -> f32 {
    i.wrapping_mul(2_654_435_761) as i32 as f32 / 2.0f32.powi(31)
}

impl<T: EncoderTypes, E, F: FnMut(Shape, &EncoderLinear<T>) -> Result<(), E>> EncoderOps for ShapeOps<T, F> {
    type Types = T;
    type Rows = Shape;
    type Error = E;

    fn upload(&mut self, [n_rows, width]: [usize; 2], _: impl FnOnce() -> Vec<f32>) -> Result<Shape, E> {
        Ok(Shape { n: n_rows * width, width })
    }

    fn read(&mut self, rows: &Shape, columns: usize) -> Result<Vec<Vec<f32>>, E> {
        Ok(vec![vec![0.0; rows.n_rows() * columns]; rows.width / columns.max(1)])
    }

    fn width(&self, rows: &Shape) -> usize {
        rows.width
    }

    fn reshape(&mut self, rows: Shape, width: usize) -> Shape {
        Shape { width, ..rows }
    }

    fn copy(&mut self, rows: &Shape) -> Result<Shape, E> {
        Ok(*rows)
    }

    fn linear(&mut self, x: &Shape, linear: &EncoderLinear<T>) -> Result<Shape, E> {
        self.work.products += 2 * x.n as u64 * linear.n_out as u64;
        (self.product)(*x, linear)?;
        Ok(Shape { n: x.n_rows() * linear.n_out, width: linear.n_out })
    }

    fn norm(&mut self, x: &Shape, _: &EncoderNorm<T>) -> Result<Shape, E> {
        Ok(*x)
    }

    fn activate(&mut self, _: &mut Shape, _: EncoderActivation) -> Result<(), E> {
        Ok(())
    }

    fn activate_gated(&mut self, _: &mut Shape, _: EncoderActivation, _: &Shape) -> Result<(), E> {
        Ok(())
    }

    fn add(&mut self, _: &mut Shape, _: &Shape) -> Result<(), E> {
        Ok(())
    }

    fn add_row(&mut self, _: &mut Shape, _: &T::Vector) -> Result<(), E> {
        Ok(())
    }

    fn scale(&mut self, _: &mut Shape, _: f32) -> Result<(), E> {
        Ok(())
    }

    fn scale_columns(&mut self, _: &mut Shape, _: &T::Vector) -> Result<(), E> {
        Ok(())
    }

    fn gather(&mut self, x: &Shape, rows: &[u32]) -> Result<Shape, E> {
        Ok(Shape { n: rows.len() * x.width, ..*x })
    }

    fn join_rows(&mut self, x: &Shape, y: &Shape) -> Result<Shape, E> {
        Ok(Shape { n: x.n + y.n, ..*x })
    }

    fn join_columns(&mut self, parts: &[&Shape]) -> Result<Shape, E> {
        Ok(Shape { n: parts.iter().map(|part| part.n).sum(), width: parts.iter().map(|part| part.width).sum() })
    }

    fn mean(&mut self, x: &Shape, n: usize) -> Result<Shape, E> {
        Ok(Shape { n: x.n / n, ..*x })
    }

    fn weighted_sum(&mut self, x: &Shape, rows: &[u32], n: usize, _: &T::Vector) -> Result<Shape, E> {
        self.work.depthwise += 2 * rows.len() as u64 * x.width as u64;
        Ok(Shape { n: rows.len() / n * x.width, ..*x })
    }

    fn interleave(&mut self, x: &Shape, _: usize) -> Result<Shape, E> {
        Ok(*x)
    }

    fn rotate(&mut self, _: &mut Shape, _: &Shape, _: usize, _: usize) -> Result<(), E> {
        Ok(())
    }

    fn attention(
        &mut self,
        q: &Shape,
        _: &Shape,
        _: &Shape,
        _: usize,
        _: f32,
        segments: &[AttentionSegment],
    ) -> Result<Shape, E> {
        // Each query is multiplied by each key, and each weight by a value, in all heads: two products of the width of queries.
        let pairs: u64 = segments.iter().map(|segment| segment.queries.len() as u64 * segment.keys.len() as u64).sum();
        self.work.attention += 4 * pairs * q.width as u64;
        Ok(*q)
    }
}
