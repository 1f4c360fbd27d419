//! Tests of the recurrences against the formulas of their papers, token by token, in float64.

mod channels;
mod heads;
mod time_mix;

use std::ops::Range;

use crate::kernels::recurrent::{StridedRows, StridedRowsMut};
use crate::simd::Isa;
use crate::test_support::TestRandom;

/// A range of decay factors.
#[derive(Debug, Clone, Copy)]
enum DecayRange {
    /// Like those of models.
    Usual,
    /// So close to one that F32 hardly distinguishes them from one.
    NearOne,
    /// Zeros and subnormal numbers.
    NearZero,
    /// All of these and others, in random order.
    Any,
}

const DECAYS: [DecayRange; 4] = [DecayRange::Usual, DecayRange::NearOne, DecayRange::NearZero, DecayRange::Any];

impl DecayRange {
    fn random(self, random: &mut TestRandom) -> f32 {
        let x = f64::from(random.float(1.0));
        let decay = match self {
            Self::Usual => (-(2.0 * x - 3.0).exp()).exp(),
            Self::NearOne => 1.0 - 1e-7 * x.abs(),
            Self::NearZero if x < -0.5 => 0.0,
            Self::NearZero => 1e-40 * x.abs(),
            Self::Any => match random.bits() % 8 {
                0 => 0.0,
                1 => 1.0,
                2 => 1e-40,
                3 => 1e-20,
                4 => 0.5 + 0.5 * x,
                _ => return Self::Usual.random(random),
            },
        };
        decay as f32
    }
}

/// The squared error of `is`, relative to the squares of `want`.
fn nmse(is: impl IntoIterator<Item = f64>, want: &[f64]) -> f64 {
    let (mut error, mut squares, mut n) = (0.0, 0.0, 0);
    for (is, want) in is.into_iter().zip(want) {
        error += (is - want).powi(2);
        squares += want * want;
        n += 1;
    }
    assert_eq!(n, want.len());
    assert!(f64::is_finite(error), "a number is none");
    if squares == 0.0 { error } else { error / squares }
}

/// The numbers in float64.
fn wide(x: &[f32]) -> impl Iterator<Item = f64> {
    x.iter().map(|&x| f64::from(x))
}

/// Rows with NaN between them, which kernels must neither read nor write.
struct Padded {
    data: Vec<f32>,
    width: usize,
}

/// Elements between two rows of [`Padded`].
const BETWEEN: usize = 3;

impl Padded {
    fn new(rows: usize, width: usize, mut value: impl FnMut() -> f32) -> Self {
        let data = (0..rows * (width + BETWEEN))
            .map(|i| if i % (width + BETWEEN) < width { value() } else { f32::NAN })
            .collect();
        Self { data, width }
    }

    fn row(&self, i: usize) -> &[f32] {
        &self.data[i * (self.width + BETWEEN)..][..self.width]
    }

    fn wide(&self, i: usize) -> Vec<f64> {
        wide(self.row(i)).collect()
    }

    /// All rows, one after the other.
    fn all(&self) -> Vec<f32> {
        self.data.chunks_exact(self.width + BETWEEN).flat_map(|row| &row[..self.width]).copied().collect()
    }

    fn rows(&self, rows: Range<usize>) -> StridedRows<'_> {
        self.part(rows, 0..self.width)
    }

    fn part(&self, rows: Range<usize>, columns: Range<usize>) -> StridedRows<'_> {
        let stride = self.width + BETWEEN;
        StridedRows::new(&self.data[rows.start * stride + columns.start..], rows.len(), columns.len(), stride)
    }

    fn part_mut(&mut self, rows: Range<usize>, columns: Range<usize>) -> StridedRowsMut<'_> {
        let stride = self.width + BETWEEN;
        StridedRowsMut::new(&mut self.data[rows.start * stride + columns.start..], rows.len(), columns.len(), stride)
    }

    fn check_between(&self) {
        for row in self.data.chunks_exact(self.width + BETWEEN) {
            assert!(row[self.width..].iter().all(|x| x.is_nan()), "written between the rows");
        }
    }
}

/// A recurrence with its inputs for some tokens, the kernel, and the reference.
trait TestedRecurrence: Sized {
    /// Random inputs; `rows` and `columns` are those of the state.
    fn random(random: &mut TestRandom, decay: DecayRange, n_tokens: usize, rows: usize, columns: usize) -> Self;
    /// Rows of the state.
    fn rows(&self) -> usize;
    /// Columns of the state.
    fn columns(&self) -> usize;
    /// The number of tokens.
    fn n_tokens(&self) -> usize;
    /// Runs the kernel for some tokens and some columns. `out` has all tokens and columns.
    fn run(&self, isa: Isa, tokens: Range<usize>, columns: Range<usize>, state: &mut Padded, out: &mut Padded);
    /// Computes all tokens in float64 as in the paper; `state`, `[rows, columns]`, is updated.
    fn reference(&self, state: &mut [f64]) -> Vec<f64>;

    fn empty_out(&self) -> Padded {
        Padded::new(self.n_tokens(), self.columns(), || f32::NAN)
    }

    /// Output and state of the kernel, all tokens in one call.
    fn run_all(&self, isa: Isa, before: &[f32]) -> (Vec<f32>, Vec<f32>) {
        self.run_pieces(isa, before, &[self.n_tokens()])
    }

    /// Output and state of the kernel, in calls of `pieces` tokens.
    fn run_pieces(&self, isa: Isa, before: &[f32], pieces: &[usize]) -> (Vec<f32>, Vec<f32>) {
        let mut out = self.empty_out();
        let mut values = before.iter();
        let mut state = Padded::new(self.rows(), self.columns(), || *values.next().expect("one for each element"));
        let mut token = 0;
        for &n in pieces {
            self.run(isa, token..token + n, 0..self.columns(), &mut state, &mut out);
            token += n;
        }
        out.check_between();
        state.check_between();
        (out.all(), state.all())
    }
}

/// Compares the kernel with the reference, on every instruction set, from a random state.
fn agrees_with_the_reference<M: TestedRecurrence>(shapes: &[(usize, usize)], lengths: &[usize]) {
    let mut random = TestRandom(1);
    for (&(rows, columns), &n_tokens) in shapes.iter().flat_map(|shape| lengths.iter().map(move |n| (shape, n))) {
        for decay in DECAYS {
            let mixer = M::random(&mut random, decay, n_tokens, rows, columns);
            let before = random.floats(rows * columns, 1.0);
            let mut state: Vec<f64> = wide(&before).collect();
            let want = mixer.reference(&mut state);
            for isa in Isa::available() {
                let (out, after) = mixer.run_all(isa, &before);
                let (of_out, of_state) = (nmse(wide(&out), &want), nmse(wide(&after), &state));
                assert!(
                    of_out < 1e-11 && of_state < 1e-11,
                    "{isa:?} {decay:?} [{rows}, {columns}] {n_tokens} tokens: {of_out:e} {of_state:e}"
                );
            }
        }
    }
}

/// Compares the last outputs and the state after 8192 tokens with the reference.
fn stays_exact_in_long_sequences<M: TestedRecurrence>(rows: usize, columns: usize) {
    const LAST: usize = 64;
    let mut random = TestRandom(3);
    for decay in DECAYS {
        let mixer = M::random(&mut random, decay, 8192, rows, columns);
        let mut state = vec![0.0; rows * columns];
        let want = mixer.reference(&mut state);
        let (out, after) = mixer.run_all(Isa::best(), &vec![0.0; rows * columns]);
        let last = want.len() - LAST * columns;
        let errors = (nmse(wide(&out), &want), nmse(wide(&out[last..]), &want[last..]), nmse(wide(&after), &state));
        assert!(errors.0 < 1e-6 && errors.1 < 1e-6 && errors.2 < 1e-6, "{decay:?}: {errors:?}");
    }
}

/// Checks that results do not depend on the number of tokens in a call, nor on the columns of a task.
fn results_do_not_depend_on_the_division_into_calls<M: TestedRecurrence>() {
    let mut random = TestRandom(4);
    let (rows, columns) = (48, 150);
    let mixer = M::random(&mut random, DecayRange::Usual, 40, rows, columns);
    let before = random.floats(rows * columns, 1.0);
    for isa in Isa::available() {
        let want = mixer.run_all(isa, &before);
        assert_eq!(mixer.run_pieces(isa, &before, &[1; 40]), want, "{isa:?}");
        assert_eq!(mixer.run_pieces(isa, &before, &[17, 1, 22]), want, "{isa:?}");
        let mut values = before.iter();
        let mut state = Padded::new(rows, columns, || *values.next().expect("one for each element"));
        let mut out = mixer.empty_out();
        for part in [0..64, 64..80, 80..columns] {
            mixer.run(isa, 0..40, part, &mut state, &mut out);
        }
        assert_eq!((out.all(), state.all()), want, "{isa:?}");
    }
}
