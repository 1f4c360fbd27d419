//! Tests of the recurrences whose state is a matrix for each head.

use std::ops::Range;

use super::{DecayRange, Padded, TestedRecurrence};
use crate::kernels::recurrent::delta_rule::DeltaRule;
use crate::kernels::recurrent::mamba2::Mamba2;
use crate::kernels::recurrent::rwkv6::Rwkv6;
use crate::kernels::recurrent::rwkv7::Rwkv7;
use crate::kernels::recurrent::{StridedRows, StridedRowsMut, run_tokens};
use crate::simd::Isa;
use crate::test_support::TestRandom;

/// Random rows with an L2 norm of 1.
fn unit(random: &mut TestRandom, n: usize, width: usize) -> Padded {
    let mut rows = Padded::new(n, width, || random.float(1.0));
    normalise(&mut rows);
    rows
}

fn normalise(rows: &mut Padded) {
    let width = rows.width;
    for row in rows.data.chunks_exact_mut(width + super::BETWEEN) {
        let factor = 1.0 / row[..width].iter().map(|x| x * x).sum::<f32>().sqrt();
        for x in row {
            *x *= factor;
        }
    }
}

/// Rows with an L2 norm of 1, halfway between random rows and `keys`. Where the decay is 0, a result is `q . k` times what the
/// token wrote. Random queries and keys may be almost orthogonal; the sum is then as small as the rounding errors of its terms.
fn leaning_to(keys: &Padded, random: &mut TestRandom, n: usize) -> Padded {
    let mut rows = unit(random, n, keys.width);
    for (x, key) in rows.data.iter_mut().zip(&keys.data) {
        *x += key;
    }
    normalise(&mut rows);
    rows
}

/// `sum over i of x[i] * state[i][column]`
fn read(x: &[f64], state: &[f64], columns: usize, column: usize) -> f64 {
    x.iter().enumerate().map(|(i, x)| x * state[i * columns + column]).sum()
}

/// Gated `DeltaNet`, arXiv 2412.06464, equation 10: `S = S (alpha (I - beta k k^T)) + beta v k^T; o = S q`, here transposed.
struct Delta {
    q: Padded,
    k: Padded,
    v: Padded,
    decay: Padded,
    beta: Padded,
}

impl TestedRecurrence for Delta {
    fn random(random: &mut TestRandom, decay: DecayRange, n: usize, rows: usize, columns: usize) -> Self {
        let k = unit(random, n, rows);
        Self {
            q: leaning_to(&k, random, n),
            k,
            v: Padded::new(n, columns, || random.float(2.0)),
            decay: Padded::new(n, 1, || decay.random(random)),
            beta: Padded::new(n, 1, || random.float(0.5) + 0.5),
        }
    }

    fn rows(&self) -> usize {
        self.k.width
    }

    fn columns(&self) -> usize {
        self.v.width
    }

    fn n_tokens(&self) -> usize {
        self.beta.all().len()
    }

    fn run(&self, isa: Isa, tokens: Range<usize>, columns: Range<usize>, state: &mut Padded, out: &mut Padded) {
        let head = DeltaRule {
            q: self.q.rows(tokens.clone()),
            k: self.k.rows(tokens.clone()),
            v: self.v.part(tokens.clone(), columns.clone()),
            decay: self.decay.rows(tokens.clone()),
            beta: self.beta.rows(tokens.clone()),
            before: None,
            next: None,
            state: state.part_mut(0..self.rows(), columns.clone()),
            out: out.part_mut(tokens, columns),
        };
        run_tokens(isa, &head);
    }

    fn reference(&self, state: &mut [f64]) -> Vec<f64> {
        let (rows, columns) = (self.rows(), self.columns());
        let mut out = Vec::new();
        for t in 0..self.n_tokens() {
            let (q, k, v) = (self.q.wide(t), self.k.wide(t), self.v.wide(t));
            let (alpha, beta) = (self.decay.wide(t)[0], self.beta.wide(t)[0]);
            for j in 0..columns {
                let known = read(&k, state, columns, j);
                for i in 0..rows {
                    let s = &mut state[i * columns + j];
                    *s = alpha * (*s - beta * k[i] * known) + beta * k[i] * v[j];
                }
                out.push(read(&q, state, columns, j));
            }
        }
        out
    }
}

/// Kimi Delta Attention, arXiv 2510.26692, equation 1: `S = (I - beta k k^T) Diag(alpha) S + beta k v^T; o = S^T q`.
struct ChannelDelta(Delta);

impl TestedRecurrence for ChannelDelta {
    fn random(random: &mut TestRandom, decay: DecayRange, n: usize, rows: usize, columns: usize) -> Self {
        let delta = Delta::random(random, decay, n, rows, columns);
        Self(Delta { decay: Padded::new(n, rows, || decay.random(random)), ..delta })
    }

    fn rows(&self) -> usize {
        self.0.rows()
    }

    fn columns(&self) -> usize {
        self.0.columns()
    }

    fn n_tokens(&self) -> usize {
        self.0.n_tokens()
    }

    fn run(&self, isa: Isa, tokens: Range<usize>, columns: Range<usize>, state: &mut Padded, out: &mut Padded) {
        self.0.run(isa, tokens, columns, state, out);
    }

    fn reference(&self, state: &mut [f64]) -> Vec<f64> {
        let (rows, columns) = (self.rows(), self.columns());
        let mut out = Vec::new();
        for t in 0..self.n_tokens() {
            let (q, k, v) = (self.0.q.wide(t), self.0.k.wide(t), self.0.v.wide(t));
            let (alpha, beta) = (self.0.decay.wide(t), self.0.beta.wide(t)[0]);
            for j in 0..columns {
                for i in 0..rows {
                    state[i * columns + j] *= alpha[i];
                }
                let known = read(&k, state, columns, j);
                for i in 0..rows {
                    state[i * columns + j] += beta * k[i] * (v[j] - known);
                }
                out.push(read(&q, state, columns, j));
            }
        }
        out
    }
}

/// Mamba-2, arXiv 2405.21060, equation 1 with `A` a scalar, discretised as in Mamba: `h = exp(dt A) h + dt B x; y = C h + D x`.
struct Space {
    x: Padded,
    dt: Padded,
    b: Padded,
    c: Padded,
    a: f32,
    d: f32,
}

impl TestedRecurrence for Space {
    fn random(random: &mut TestRandom, decay: DecayRange, n: usize, rows: usize, columns: usize) -> Self {
        let a = -3.0;
        Self {
            x: Padded::new(n, columns, || random.float(2.0)),
            // A decay of 0 becomes a step with a decay close to 0.
            dt: Padded::new(n, 1, || (decay.random(random).max(1e-45).ln() / a).max(1e-9)),
            b: Padded::new(n, rows, || random.float(1.0)),
            c: Padded::new(n, rows, || random.float(1.0)),
            a,
            d: 0.7,
        }
    }

    fn rows(&self) -> usize {
        self.b.width
    }

    fn columns(&self) -> usize {
        self.x.width
    }

    fn n_tokens(&self) -> usize {
        self.dt.all().len()
    }

    fn run(&self, isa: Isa, tokens: Range<usize>, columns: Range<usize>, state: &mut Padded, out: &mut Padded) {
        let head = Mamba2 {
            x: self.x.part(tokens.clone(), columns.clone()),
            dt: self.dt.rows(tokens.clone()),
            b: self.b.rows(tokens.clone()),
            c: self.c.rows(tokens.clone()),
            a: self.a,
            d: self.d,
            before: None,
            state: state.part_mut(0..self.rows(), columns.clone()),
            out: out.part_mut(tokens, columns),
        };
        run_tokens(isa, &head);
    }

    fn reference(&self, state: &mut [f64]) -> Vec<f64> {
        let (rows, columns) = (self.rows(), self.columns());
        let mut out = Vec::new();
        for t in 0..self.n_tokens() {
            let (x, b, c, dt) = (self.x.wide(t), self.b.wide(t), self.c.wide(t), self.dt.wide(t)[0]);
            let decay = (dt * f64::from(self.a)).exp();
            for j in 0..columns {
                for i in 0..rows {
                    let s = &mut state[i * columns + j];
                    *s = decay * *s + dt * b[i] * x[j];
                }
                out.push(read(&c, state, columns, j) + f64::from(self.d) * x[j]);
            }
        }
        out
    }
}

/// RWKV-6, arXiv 2404.05892, section 4.2: `wkv = diag(u) k^T v + S; S = diag(w) S + k^T v; o = r wkv`.
struct Finch {
    r: Padded,
    k: Padded,
    v: Padded,
    w: Padded,
    u: Vec<f32>,
}

impl TestedRecurrence for Finch {
    fn random(random: &mut TestRandom, decay: DecayRange, n: usize, rows: usize, columns: usize) -> Self {
        Self {
            r: Padded::new(n, rows, || random.float(1.0)),
            k: Padded::new(n, rows, || random.float(1.0)),
            v: Padded::new(n, columns, || random.float(2.0)),
            w: Padded::new(n, rows, || decay.random(random)),
            u: random.floats(rows, 1.0),
        }
    }

    fn rows(&self) -> usize {
        self.k.width
    }

    fn columns(&self) -> usize {
        self.v.width
    }

    fn n_tokens(&self) -> usize {
        self.k.data.len() / (self.k.width + super::BETWEEN)
    }

    fn run(&self, isa: Isa, tokens: Range<usize>, columns: Range<usize>, state: &mut Padded, out: &mut Padded) {
        let head = Rwkv6 {
            r: self.r.rows(tokens.clone()),
            k: self.k.rows(tokens.clone()),
            v: self.v.part(tokens.clone(), columns.clone()),
            decay: self.w.rows(tokens.clone()),
            bonus: Some(&self.u),
            state: state.part_mut(0..self.rows(), columns.clone()),
            out: out.part_mut(tokens, columns),
        };
        run_tokens(isa, &head);
    }

    fn reference(&self, state: &mut [f64]) -> Vec<f64> {
        let (rows, columns) = (self.rows(), self.columns());
        let mut out = Vec::new();
        for t in 0..self.n_tokens() {
            let (r, k, v, w) = (self.r.wide(t), self.k.wide(t), self.v.wide(t), self.w.wide(t));
            for j in 0..columns {
                let mut sum = 0.0;
                for i in 0..rows {
                    let s = &mut state[i * columns + j];
                    sum += r[i] * (f64::from(self.u[i]) * k[i] * v[j] + *s);
                    *s = w[i] * *s + k[i] * v[j];
                }
                out.push(sum);
            }
        }
        out
    }
}

/// Gated linear attention, arXiv 2312.06635, equation 3: `S = diag(alpha) S + k^T v; o = q S`.
struct Linear(Finch);

impl TestedRecurrence for Linear {
    fn random(random: &mut TestRandom, decay: DecayRange, n: usize, rows: usize, columns: usize) -> Self {
        Self(Finch::random(random, decay, n, rows, columns))
    }

    fn rows(&self) -> usize {
        self.0.rows()
    }

    fn columns(&self) -> usize {
        self.0.columns()
    }

    fn n_tokens(&self) -> usize {
        self.0.n_tokens()
    }

    fn run(&self, isa: Isa, tokens: Range<usize>, columns: Range<usize>, state: &mut Padded, out: &mut Padded) {
        let head = Rwkv6 {
            r: self.0.r.rows(tokens.clone()),
            k: self.0.k.rows(tokens.clone()),
            v: self.0.v.part(tokens.clone(), columns.clone()),
            decay: self.0.w.rows(tokens.clone()),
            bonus: None,
            state: state.part_mut(0..self.rows(), columns.clone()),
            out: out.part_mut(tokens, columns),
        };
        run_tokens(isa, &head);
    }

    fn reference(&self, state: &mut [f64]) -> Vec<f64> {
        let (rows, columns) = (self.rows(), self.columns());
        let mut out = Vec::new();
        for t in 0..self.n_tokens() {
            let (q, k, v, alpha) = (self.0.r.wide(t), self.0.k.wide(t), self.0.v.wide(t), self.0.w.wide(t));
            for (i, row) in state.chunks_exact_mut(columns).enumerate() {
                for (s, v) in row.iter_mut().zip(&v) {
                    *s = alpha[i] * *s + k[i] * v;
                }
            }
            out.extend((0..columns).map(|j| (0..rows).map(|i| q[i] * state[i * columns + j]).sum::<f64>()));
        }
        out
    }
}

/// RWKV-7, arXiv 2503.14456, equation 16: `S = S (diag(w) - kappa^T (a * kappa)) + v^T k; o = r S^T`, here transposed.
struct Goose {
    r: Padded,
    w: Padded,
    k: Padded,
    v: Padded,
    kappa: Padded,
    rate: Padded,
    /// The removal keys of the kernel, `-kappa`.
    removal: Padded,
    /// The replacement keys of the kernel, `kappa` times the rates.
    replacement: Padded,
}

impl TestedRecurrence for Goose {
    fn random(random: &mut TestRandom, decay: DecayRange, n: usize, rows: usize, columns: usize) -> Self {
        let kappa = unit(random, n, rows);
        let rate = Padded::new(n, rows, || random.float(0.5) + 0.5);
        let (mut removal, mut replacement) = (Padded::new(n, rows, || 0.0), Padded::new(n, rows, || 0.0));
        for (i, kappa) in kappa.data.iter().enumerate() {
            (removal.data[i], replacement.data[i]) = (-kappa, kappa * rate.data[i]);
        }
        Self {
            r: Padded::new(n, rows, || random.float(1.0)),
            w: Padded::new(n, rows, || decay.random(random)),
            k: Padded::new(n, rows, || random.float(1.0)),
            v: Padded::new(n, columns, || random.float(2.0)),
            kappa,
            rate,
            removal,
            replacement,
        }
    }

    fn rows(&self) -> usize {
        self.k.width
    }

    fn columns(&self) -> usize {
        self.v.width
    }

    fn n_tokens(&self) -> usize {
        self.k.data.len() / (self.k.width + super::BETWEEN)
    }

    fn run(&self, isa: Isa, tokens: Range<usize>, columns: Range<usize>, state: &mut Padded, out: &mut Padded) {
        let head = Rwkv7 {
            r: self.r.rows(tokens.clone()),
            decay: self.w.rows(tokens.clone()),
            k: self.k.rows(tokens.clone()),
            v: self.v.part(tokens.clone(), columns.clone()),
            a: self.removal.rows(tokens.clone()),
            b: self.replacement.rows(tokens.clone()),
            state: state.part_mut(0..self.rows(), columns.clone()),
            out: out.part_mut(tokens, columns),
        };
        run_tokens(isa, &head);
    }

    fn reference(&self, state: &mut [f64]) -> Vec<f64> {
        let (rows, columns) = (self.rows(), self.columns());
        let mut out = Vec::new();
        for t in 0..self.n_tokens() {
            let (r, w, k, v) = (self.r.wide(t), self.w.wide(t), self.k.wide(t), self.v.wide(t));
            let (kappa, rate) = (self.kappa.wide(t), self.rate.wide(t));
            for j in 0..columns {
                let known = read(&kappa, state, columns, j);
                for i in 0..rows {
                    let s = &mut state[i * columns + j];
                    *s = w[i] * *s - known * rate[i] * kappa[i] + k[i] * v[j];
                }
                out.push(read(&r, state, columns, j));
            }
        }
        out
    }
}

macro_rules! of_each_head {
    ($($name:ident: $mixer:ty, $long:expr;)*) => {
        $(mod $name {
            use super::*;

            #[test]
            fn agrees_with_the_reference() {
                let shapes = [(16, 16), (64, 64), (5, 7), (33, 50), (100, 81), (128, 128), (256, 40)];
                super::super::agrees_with_the_reference::<$mixer>(&shapes, &[1, 7, 8, 65, 100]);
            }

            #[test]
            fn stays_exact_in_long_sequences() {
                super::super::stays_exact_in_long_sequences::<$mixer>($long, 32);
            }

            #[test]
            fn results_do_not_depend_on_the_division_into_calls() {
                super::super::results_do_not_depend_on_the_division_into_calls::<$mixer>();
            }
        })*
    };
}

of_each_head! {
    delta_rule: Delta, 128;
    channel_delta_rule: ChannelDelta, 128;
    mamba2: Space, 128;
    rwkv6: Finch, 64;
    gated_linear: Linear, 64;
    rwkv7: Goose, 64;
}

/// The state before the first token is read from one buffer and left unchanged; the new state goes to another.
#[test]
fn a_state_can_be_written_to_another_buffer() {
    let mut random = TestRandom(5);
    let (rows, columns) = (24, 40);
    for n in [1, 40] {
        let delta = Delta::random(&mut random, DecayRange::Usual, n, rows, columns);
        let before = random.floats(rows * columns, 1.0);
        for isa in Isa::available() {
            let want = delta.run_all(isa, &before);
            let mut state = Padded::new(rows, columns, || f32::NAN);
            let mut out = delta.empty_out();
            let head = DeltaRule {
                q: delta.q.rows(0..n),
                k: delta.k.rows(0..n),
                v: delta.v.rows(0..n),
                decay: delta.decay.rows(0..n),
                beta: delta.beta.rows(0..n),
                before: Some(StridedRows::new(&before, rows, columns, columns)),
                next: Some(rows * columns),
                state: state.part_mut(0..rows, 0..columns),
                out: out.part_mut(0..n, 0..columns),
            };
            run_tokens(isa, &head);
            assert_eq!((out.all(), state.all()), want, "{isa:?} {n} tokens");
        }
    }
}

/// After a single token, state rows of whole cache lines are written past the caches.
#[test]
fn aligned_rows_are_streamed_to_another_buffer() {
    const LINE: usize = 16;
    let mut random = TestRandom(6);
    let rows = 21;
    for columns in [16, 64, 80, 144] {
        let delta = Delta::random(&mut random, DecayRange::Usual, 1, rows, columns);
        let space = Space::random(&mut random, DecayRange::Usual, 1, rows, columns);
        let before = random.floats(rows * columns, 1.0);
        for isa in Isa::available() {
            let mut memory = vec![f32::NAN; rows * columns + LINE];
            let first = memory.as_ptr().align_offset(4 * LINE);
            let state = &mut memory[first..first + rows * columns];
            let mut out = delta.empty_out();
            run_tokens(
                isa,
                &DeltaRule {
                    q: delta.q.rows(0..1),
                    k: delta.k.rows(0..1),
                    v: delta.v.rows(0..1),
                    decay: delta.decay.rows(0..1),
                    beta: delta.beta.rows(0..1),
                    before: Some(StridedRows::new(&before, rows, columns, columns)),
                    next: Some(rows * columns),
                    state: StridedRowsMut::new(state, rows, columns, columns),
                    out: out.part_mut(0..1, 0..columns),
                },
            );
            assert_eq!((out.all(), state.to_vec()), delta.run_all(isa, &before), "{isa:?} {columns}");
            let mut out = space.empty_out();
            run_tokens(
                isa,
                &Mamba2 {
                    x: space.x.rows(0..1),
                    dt: space.dt.rows(0..1),
                    b: space.b.rows(0..1),
                    c: space.c.rows(0..1),
                    a: space.a,
                    d: space.d,
                    before: Some(StridedRows::new(&before, rows, columns, columns)),
                    state: StridedRowsMut::new(state, rows, columns, columns),
                    out: out.part_mut(0..1, 0..columns),
                },
            );
            assert_eq!((out.all(), state.to_vec()), space.run_all(isa, &before), "{isa:?} {columns}");
        }
    }
}
