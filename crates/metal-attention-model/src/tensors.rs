//! Sources of weights: a GGUF file, or a list that records which tensors a model has.

use std::convert::Infallible;
use std::ops::Range;

use half::f16;
use metal_attention_gguf::{GgufFile, Tensor, TensorType};

use crate::attention::LatentAttentionSpec;
use crate::weights::{Linear, Weights, build};
use crate::{ModelError, ModelSpec};

/// A tensor of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// GGUF name, e.g. `blk.0.attn_q.weight`.
    pub name: String,
    /// Shape in GGUF order: row length first, then the number of rows; for experts, their number last.
    pub shape: Vec<usize>,
    /// Whether a file must have it.
    pub required: bool,
}

impl TensorSpec {
    /// Whether it is a matrix that may be quantised. Vectors, biases of experts, the taps of convolutions, and RWKV's
    /// vectors of channels stay F32.
    pub fn is_matrix(&self) -> bool {
        let small = ["ssm_a", "ssm_d", "ssm_norm", "time_mix_lerp_fused", "time_mix_first"];
        let is_small = small.iter().any(|name| self.role() == *name || self.name.contains(&format!("{name}.")));
        let is_convolution = ["shortconv.conv", "ssm_conv1d"].iter().any(|part| self.name.contains(part));
        self.shape.len() > 1 && !self.is_bias() && !is_small && !is_convolution
    }

    /// Whether its values must be negative: decay rates of a recurrent state.
    pub fn is_decay(&self) -> bool {
        self.role() == "ssm_a"
    }

    /// The last part of its name.
    fn role(&self) -> &str {
        self.name.rsplit('.').next().unwrap_or_default()
    }

    /// Whether it is a bias.
    pub fn is_bias(&self) -> bool {
        self.role() == "bias"
    }
}

impl ModelSpec {
    /// Every tensor of the model in file order, optional ones included.
    pub fn tensors(&self) -> Vec<TensorSpec> {
        let mut list = TensorList(Vec::new());
        let Ok(_) = build(self, &mut list);
        list.0
    }
}

/// Shape of a matrix in GGUF order: `[n_in, n_out]`.
pub(crate) type MatrixShape = [usize; 2];

/// Whether a tensor must be there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Presence {
    /// It must be there.
    Required,
    /// It may be there.
    Optional,
    /// It is not read.
    None,
}

/// A source of weights. Names of matrices are given without `.weight` and `.bias`. An error means that a required
/// tensor is missing or that a tensor has a wrong shape.
pub(crate) trait WeightSource {
    /// A matrix with its bias.
    type Linear: Clone;
    /// Why a weight is not available.
    type Error;

    /// A matrix with its bias; `None` if the matrix is not there or not read.
    fn linear(
        &mut self,
        name: &str,
        shape: MatrixShape,
        weight: Presence,
        bias: Presence,
    ) -> Result<Option<Self::Linear>, Self::Error>;

    /// A matrix that must be there, with its bias.
    fn required(&mut self, name: &str, shape: MatrixShape, bias: Presence) -> Result<Self::Linear, Self::Error>;

    /// The embedding table of an assistant's target model.
    fn target_table(&mut self, shape: MatrixShape) -> Result<Self::Linear, Self::Error>;

    /// Whether an unusual matrix of that name is there, beside those that the family's files usually have.
    fn has(&self, name: &str) -> bool;

    /// Parts of a required matrix, with their rows in another order. For each part: its number of rows, and a function
    /// from a row of the part to a row of the matrix.
    fn reordered<const N: usize>(
        &mut self,
        name: &str,
        shape: MatrixShape,
        parts: [(usize, &dyn Fn(usize) -> usize); N],
    ) -> Result<[Self::Linear; N], Self::Error>;

    /// A matrix with any number of rows; `None` if it is not there.
    fn any_rows(&mut self, name: &str, n_in: usize) -> Result<Option<Self::Linear>, Self::Error>;

    /// A vector.
    fn vector(&mut self, name: &str, n: usize, presence: Presence) -> Result<Option<Vec<f32>>, Self::Error>;

    /// The weight of a norm of `n` elements: a vector, or, with `n_head`, a row for each head.
    fn norm_weight(&mut self, name: &str, n: usize, n_head: Option<usize>) -> Result<Vec<f32>, Self::Error>;

    /// The `n` values of each of `width` channels, `[width, n]`.
    fn channels(&mut self, name: &str, n: usize, width: usize) -> Result<Vec<f32>, Self::Error>;

    /// The values of a tensor of any shape.
    fn values(&mut self, name: &str, shape: &[usize], presence: Presence) -> Result<Option<Vec<f32>>, Self::Error>;

    /// [`channels`](Self::channels) of a tensor that may have a dimension of 1 between the two, as some converters
    /// write it.
    fn single_channels(&mut self, name: &str, n: usize, width: usize) -> Result<Vec<f32>, Self::Error>;

    /// `n` ones: the weight of a norm that has none.
    fn ones(&mut self, n: usize) -> Vec<f32>;

    /// The first row of a matrix.
    fn first_row(&mut self, name: &str, shape: MatrixShape) -> Result<Vec<f32>, Self::Error>;

    /// Divisors of frequencies, all above 0; `None` if they are not there.
    fn divisors(&mut self, name: &'static str, n: usize) -> Result<Option<Vec<f32>>, Self::Error>;

    /// The matrices in one tensor, `[n_in, n_out, n]`, with a row of biases each.
    fn matrices(&mut self, name: &str, shape: [usize; 3], bias: Presence) -> Result<Vec<Self::Linear>, Self::Error>;

    /// Matrices that share their input: for each its name and number of rows. They are stacked in the tensor `fused`,
    /// or each has its own tensor. `by_default`: whether the family's files usually have the fused one.
    fn parts<const N: usize>(
        &mut self,
        prefix: &str,
        fused: &str,
        parts: [(&str, usize); N],
        n_in: usize,
        bias: Presence,
        by_default: bool,
    ) -> Result<[Self::Linear; N], Self::Error>;

    /// Gates and ups of experts, `[n_in, n_ff, n]` each, in one tensor or in two as in [`parts`](Self::parts).
    #[expect(clippy::type_complexity)]
    fn expert_pairs(
        &mut self,
        prefix: &str,
        shape: [usize; 3],
        bias: Presence,
        by_default: bool,
    ) -> Result<(Vec<Self::Linear>, Vec<Self::Linear>), Self::Error>;

    /// Latent attention's expansions for each head, to keys and to values.
    #[expect(clippy::type_complexity)]
    fn expansions(
        &mut self,
        prefix: &str,
        a: &LatentAttentionSpec,
    ) -> Result<(Vec<Self::Linear>, Vec<Self::Linear>), Self::Error>;
}

/// A source that records the requested tensors.
struct TensorList(Vec<TensorSpec>);

impl TensorList {
    /// Records a tensor, unless it is not read.
    fn push(&mut self, name: String, shape: &[usize], presence: Presence) {
        let required = match presence {
            Presence::Required => true,
            Presence::Optional => false,
            Presence::None => return,
        };
        self.0.push(TensorSpec { name, shape: shape.to_vec(), required });
    }
}

impl WeightSource for TensorList {
    type Linear = ();
    type Error = Infallible;

    fn linear(
        &mut self,
        name: &str,
        shape: MatrixShape,
        weight: Presence,
        bias: Presence,
    ) -> Result<Option<()>, Infallible> {
        self.push(format!("{name}.weight"), &shape, weight);
        self.push(format!("{name}.bias"), &shape[1..], bias);
        Ok(Some(()))
    }

    fn required(&mut self, name: &str, shape: MatrixShape, bias: Presence) -> Result<(), Infallible> {
        self.linear(name, shape, Presence::Required, bias).map(|_| ())
    }

    /// It is not in the assistant's file.
    fn target_table(&mut self, _shape: MatrixShape) -> Result<(), Infallible> {
        Ok(())
    }

    fn has(&self, _name: &str) -> bool {
        false
    }

    fn reordered<const N: usize>(
        &mut self,
        name: &str,
        shape: MatrixShape,
        _parts: [(usize, &dyn Fn(usize) -> usize); N],
    ) -> Result<[(); N], Infallible> {
        self.required(name, shape, Presence::None)?;
        Ok([(); N])
    }

    fn any_rows(&mut self, name: &str, n_in: usize) -> Result<Option<()>, Infallible> {
        self.linear(name, [n_in, n_in], Presence::Optional, Presence::Optional)
    }

    fn vector(&mut self, name: &str, n: usize, presence: Presence) -> Result<Option<Vec<f32>>, Infallible> {
        self.push(name.to_owned(), &[n], presence);
        Ok(None)
    }

    fn norm_weight(&mut self, name: &str, n: usize, n_head: Option<usize>) -> Result<Vec<f32>, Infallible> {
        match n_head {
            Some(n_head) => self.push(name.to_owned(), &[n / n_head.max(1), n_head], Presence::Required),
            None => self.push(name.to_owned(), &[n], Presence::Required),
        }
        Ok(Vec::new())
    }

    fn channels(&mut self, name: &str, n: usize, width: usize) -> Result<Vec<f32>, Infallible> {
        self.push(name.to_owned(), &[n, width], Presence::Required);
        Ok(Vec::new())
    }

    fn values(&mut self, name: &str, shape: &[usize], presence: Presence) -> Result<Option<Vec<f32>>, Infallible> {
        self.push(name.to_owned(), shape, presence);
        Ok(None)
    }

    fn single_channels(&mut self, name: &str, n: usize, width: usize) -> Result<Vec<f32>, Infallible> {
        self.push(name.to_owned(), &[n, 1, width], Presence::Required);
        Ok(Vec::new())
    }

    fn ones(&mut self, _n: usize) -> Vec<f32> {
        Vec::new()
    }

    fn first_row(&mut self, name: &str, shape: MatrixShape) -> Result<Vec<f32>, Infallible> {
        self.push(name.to_owned(), &shape, Presence::Required);
        Ok(Vec::new())
    }

    fn divisors(&mut self, name: &'static str, n: usize) -> Result<Option<Vec<f32>>, Infallible> {
        let name = format!("{name}.weight");
        // Recorded once: layers share them.
        if !self.0.iter().rev().take(2).any(|tensor| tensor.name == name) {
            self.push(name, &[n], Presence::Optional);
        }
        Ok(None)
    }

    fn matrices(&mut self, name: &str, shape: [usize; 3], bias: Presence) -> Result<Vec<()>, Infallible> {
        self.push(format!("{name}.weight"), &shape, Presence::Required);
        self.push(format!("{name}.bias"), &shape[1..], bias);
        Ok(vec![(); shape[2]])
    }

    fn parts<const N: usize>(
        &mut self,
        prefix: &str,
        fused: &str,
        parts: [(&str, usize); N],
        n_in: usize,
        bias: Presence,
        by_default: bool,
    ) -> Result<[(); N], Infallible> {
        if by_default {
            let n_out = parts.iter().map(|(_, n)| n).sum();
            self.required(&format!("{prefix}{fused}"), [n_in, n_out], bias)?;
        } else {
            for (name, n_out) in parts {
                self.required(&format!("{prefix}{name}"), [n_in, n_out], bias)?;
            }
        }
        Ok([(); N])
    }

    fn expert_pairs(
        &mut self,
        prefix: &str,
        [n_in, n_ff, n]: [usize; 3],
        bias: Presence,
        by_default: bool,
    ) -> Result<(Vec<()>, Vec<()>), Infallible> {
        if by_default {
            self.matrices(&format!("{prefix}ffn_gate_up_exps"), [n_in, 2 * n_ff, n], bias)?;
        } else {
            self.matrices(&format!("{prefix}ffn_gate_exps"), [n_in, n_ff, n], bias)?;
            self.matrices(&format!("{prefix}ffn_up_exps"), [n_in, n_ff, n], bias)?;
        }
        Ok((vec![(); n], vec![(); n]))
    }

    fn expansions(&mut self, prefix: &str, a: &LatentAttentionSpec) -> Result<(Vec<()>, Vec<()>), Infallible> {
        if a.fused_expansions {
            self.required(
                &format!("{prefix}attn_kv_b"),
                [a.kv_rank, a.n_head * (a.n_nope + a.value_dim)],
                Presence::None,
            )?;
            return Ok((vec![(); a.n_head], vec![(); a.n_head]));
        }
        let k_b = self.matrices(&format!("{prefix}attn_k_b"), [a.n_nope, a.kv_rank, a.n_head], Presence::None)?;
        Ok((k_b, self.matrices(&format!("{prefix}attn_v_b"), [a.kv_rank, a.value_dim, a.n_head], Presence::None)?))
    }
}

/// A GGUF file as a source.
pub(crate) struct FileSource<'f> {
    /// The file.
    pub(crate) file: &'f GgufFile,
    /// The weights of a model whose embedding table and output head are read where the file lacks them; of an assistant's target
    /// model.
    pub(crate) first: Option<&'f Weights>,
    /// Whether the head of that model is read although the file has a table, so that the head is not tied to the table.
    pub(crate) head_apart: bool,
}

impl FileSource<'_> {
    /// The tensor of that name. An error if its shape is wrong, apart from trailing dimensions of 1.
    fn find(&self, name: &str, shape: &[usize], presence: Presence) -> Result<Option<Tensor>, ModelError> {
        let trimmed = |shape: &[usize]| {
            let len = shape.iter().rposition(|&n| n != 1).map_or(1, |last| last + 1);
            shape[..len].to_vec()
        };
        match (self.file.tensor(name), presence) {
            (_, Presence::None) | (None, Presence::Optional) => Ok(None),
            (Some(tensor), _) if tensor.ty().is_integer() => {
                Err(ModelError::TensorOfIntegers { name: name.to_owned(), ty: tensor.ty().name() })
            }
            (Some(tensor), _) if trimmed(tensor.shape()) == trimmed(shape) => Ok(Some(tensor.clone())),
            (Some(tensor), _) => Err(ModelError::TensorShape {
                name: name.to_owned(),
                found: tensor.shape().to_vec(),
                expected: shape.to_vec(),
            }),
            (None, Presence::Required) => {
                Err(ModelError::MissingTensor { name: name.to_owned(), shape: shape.to_vec() })
            }
        }
    }

    /// The first model's table or head, for the name of one that the file lacks.
    fn of_first(&self, name: &str, shape: MatrixShape) -> Result<Option<Linear>, ModelError> {
        let is_missing = !self.has(name) && (self.head_apart || !self.has("token_embd"));
        let Some(first) = self.first.filter(|_| is_missing) else { return Ok(None) };
        let found = match name {
            "token_embd" => first.token_embd.as_ref(),
            "output" => first.output.as_ref(),
            _ => None,
        };
        match found.map(|linear| [linear.weight.row_len(), linear.weight.n_rows()]) {
            Some(found) if found != shape => {
                Err(ModelError::FirstTensorShape { name: format!("{name}.weight"), found, expected: shape })
            }
            Some(_) | None => Ok(found.cloned()),
        }
    }

    /// A matrix without a separate scale.
    fn matrix(&self, name: &str, shape: &[usize], presence: Presence) -> Result<Option<Tensor>, ModelError> {
        check_scale(self.file, name)?;
        self.find(&format!("{name}.weight"), shape, presence)
    }

    /// A matrix that must be there.
    fn must(&self, name: &str, shape: &[usize]) -> Result<Tensor, ModelError> {
        // CodeShell's files name a table that is both embedding and head after the head.
        let name = if name == "token_embd" && !self.has(name) && self.has("output") { "output" } else { name };
        let missing = || ModelError::MissingTensor { name: format!("{name}.weight"), shape: shape.to_vec() };
        self.matrix(name, shape, Presence::Required)?.ok_or_else(missing)
    }

    /// The biases of several matrices, concatenated; `None` unless all have one.
    fn biases<const N: usize>(
        &mut self,
        prefix: &str,
        parts: [(&str, usize); N],
    ) -> Result<Option<Vec<f32>>, ModelError> {
        let biases = parts.map(|(name, n)| self.vector(&format!("{prefix}{name}.bias"), n, Presence::Optional));
        let biases = biases.into_iter().collect::<Result<Option<Vec<_>>, _>>()?;
        Ok(biases.map(|biases| biases.concat()))
    }

    /// A range of rows of a matrix and of its bias.
    fn rows(tensor: &Tensor, bias: Option<&[f32]>, rows: Range<usize>) -> Linear {
        Linear { weight: tensor.rows(rows.clone()), bias: bias.map(|bias| bias[rows].to_vec()) }
    }
}

impl WeightSource for FileSource<'_> {
    type Linear = Linear;
    type Error = ModelError;

    fn linear(
        &mut self,
        name: &str,
        shape: MatrixShape,
        weight: Presence,
        bias: Presence,
    ) -> Result<Option<Linear>, ModelError> {
        if let Some(linear) = self.of_first(name, shape)? {
            return Ok(Some(linear));
        }
        let Some(weight) = self.matrix(name, &shape, weight)? else { return Ok(None) };
        Ok(Some(Linear { weight, bias: self.vector(&format!("{name}.bias"), shape[1], bias)? }))
    }

    fn required(&mut self, name: &str, shape: MatrixShape, bias: Presence) -> Result<Linear, ModelError> {
        if let Some(linear) = self.of_first(name, shape)? {
            return Ok(linear);
        }
        let weight = self.must(name, &shape)?;
        Ok(Linear { weight, bias: self.vector(&format!("{name}.bias"), shape[1], bias)? })
    }

    fn target_table(&mut self, shape: MatrixShape) -> Result<Linear, ModelError> {
        let name = || "token_embd.weight".to_owned();
        match self.first.and_then(|target| target.token_embd.as_ref()) {
            Some(table) if [table.weight.row_len(), table.weight.n_rows()] == shape => Ok(table.clone()),
            Some(table) => {
                let found = [table.weight.row_len(), table.weight.n_rows()];
                Err(ModelError::FirstTensorShape { name: name(), found, expected: shape })
            }
            None => Err(ModelError::MissingTensor { name: name(), shape: shape.to_vec() }),
        }
    }

    fn has(&self, name: &str) -> bool {
        self.file.tensor(&format!("{name}.weight")).is_some()
    }

    fn reordered<const N: usize>(
        &mut self,
        name: &str,
        shape: MatrixShape,
        parts: [(usize, &dyn Fn(usize) -> usize); N],
    ) -> Result<[Linear; N], ModelError> {
        let tensor = self.must(name, &shape)?;
        Ok(parts.map(|(n_rows, row)| {
            let bytes: Vec<u8> = (0..n_rows).flat_map(|i| tensor.row(row(i))).copied().collect();
            let weight = Tensor::in_memory(tensor.name(), [tensor.row_len(), n_rows], tensor.ty(), &bytes);
            Linear { weight, bias: None }
        }))
    }

    fn any_rows(&mut self, name: &str, n_in: usize) -> Result<Option<Linear>, ModelError> {
        match self.file.tensor(&format!("{name}.weight")) {
            Some(tensor) => {
                let n_out = tensor.n_rows();
                self.linear(name, [n_in, n_out], Presence::Optional, Presence::Optional)
            }
            None => Ok(None),
        }
    }

    fn vector(&mut self, name: &str, n: usize, presence: Presence) -> Result<Option<Vec<f32>>, ModelError> {
        Ok(self.find(name, &[n], presence)?.map(|tensor| tensor.to_f32()))
    }

    fn norm_weight(&mut self, name: &str, n: usize, n_head: Option<usize>) -> Result<Vec<f32>, ModelError> {
        let shape = n_head.map_or(vec![n], |n_head| vec![n / n_head.max(1), n_head]);
        Ok(self.find(name, &shape, Presence::Required)?.map(|tensor| tensor.to_f32()).unwrap_or_default())
    }

    fn channels(&mut self, name: &str, n: usize, width: usize) -> Result<Vec<f32>, ModelError> {
        Ok(self.find(name, &[n, width], Presence::Required)?.map(|tensor| tensor.to_f32()).unwrap_or_default())
    }

    fn values(&mut self, name: &str, shape: &[usize], presence: Presence) -> Result<Option<Vec<f32>>, ModelError> {
        Ok(self.find(name, shape, presence)?.map(|tensor| tensor.to_f32()))
    }

    fn single_channels(&mut self, name: &str, n: usize, width: usize) -> Result<Vec<f32>, ModelError> {
        let flat = self.file.tensor(name).is_some_and(|tensor| tensor.shape() == [n, width]);
        let shape: &[usize] = if flat { &[n, width] } else { &[n, 1, width] };
        Ok(self.find(name, shape, Presence::Required)?.map(|tensor| tensor.to_f32()).unwrap_or_default())
    }

    fn ones(&mut self, n: usize) -> Vec<f32> {
        vec![1.0; n]
    }

    fn first_row(&mut self, name: &str, shape: MatrixShape) -> Result<Vec<f32>, ModelError> {
        let tensor = self.find(name, &shape, Presence::Required)?;
        Ok(tensor.map(|tensor| tensor.rows(0..1).to_f32()).unwrap_or_default())
    }

    fn divisors(&mut self, name: &'static str, n: usize) -> Result<Option<Vec<f32>>, ModelError> {
        let name = format!("{name}.weight");
        let divisors = self.vector(&name, n, Presence::Optional)?;
        match divisors.iter().flatten().find(|d| !(d.is_finite() && **d > 0.0)) {
            None => Ok(divisors),
            Some(&value) => {
                Err(ModelError::TensorValue { name, value, why: "frequencies are divided by it: it must be above 0" })
            }
        }
    }

    fn matrices(&mut self, name: &str, shape: [usize; 3], bias: Presence) -> Result<Vec<Linear>, ModelError> {
        let [n_in, n_out, n] = shape;
        let tensor = self.must(name, &[n_in, n_out, n])?;
        let bias = self.find(&format!("{name}.bias"), &[n_out, n], bias)?;
        let bias = bias.map(|bias| bias.to_f32());
        Ok((0..n).map(|i| Self::rows(&tensor, bias.as_deref(), i * n_out..(i + 1) * n_out)).collect())
    }

    fn parts<const N: usize>(
        &mut self,
        prefix: &str,
        fused: &str,
        parts: [(&str, usize); N],
        n_in: usize,
        bias: Presence,
        by_default: bool,
    ) -> Result<[Linear; N], ModelError> {
        let all = format!("{prefix}{fused}");
        let (first, last) = (parts[0].0, parts[N - 1].0);
        let n_out = parts.iter().map(|(_, n)| n).sum();
        let in_one = if fused == last {
            // The fused matrix and the last part have the same name: the number of rows decides.
            let rows = self.file.tensor(&format!("{all}.weight")).map(Tensor::n_rows);
            !self.has(&format!("{prefix}{first}")) && (by_default || rows == Some(n_out))
        } else {
            self.has(&all) || (by_default && !self.has(&format!("{prefix}{first}")))
        };
        if !in_one {
            let mut found = Vec::with_capacity(N);
            for (name, n_out) in parts {
                found.push(self.required(&format!("{prefix}{name}"), [n_in, n_out], bias)?);
            }
            let found: Result<[Linear; N], _> = found.try_into();
            return Ok(found.expect("one for each part"));
        }
        // Old files have separate biases beside a fused matrix.
        let separate = if fused == last { None } else { self.biases(prefix, parts)? };
        let presence = if separate.is_some() { Presence::Optional } else { bias };
        let Linear { weight, bias } = self.required(&all, [n_in, n_out], presence)?;
        let bias = bias.or(separate);
        let mut start = 0;
        Ok(parts.map(|(_, n)| {
            start += n;
            Self::rows(&weight, bias.as_deref(), start - n..start)
        }))
    }

    fn expert_pairs(
        &mut self,
        prefix: &str,
        [n_in, n_ff, n]: [usize; 3],
        bias: Presence,
        by_default: bool,
    ) -> Result<(Vec<Linear>, Vec<Linear>), ModelError> {
        let [fused, gate, up] =
            ["ffn_gate_up_exps", "ffn_gate_exps", "ffn_up_exps"].map(|name| format!("{prefix}{name}"));
        if !self.has(&fused) && (self.has(&gate) || !by_default) {
            return Ok((self.matrices(&gate, [n_in, n_ff, n], bias)?, self.matrices(&up, [n_in, n_ff, n], bias)?));
        }
        let both = self.matrices(&fused, [n_in, 2 * n_ff, n], bias)?;
        let half = |rows: Range<usize>| {
            let half = |both: &Linear| Self::rows(&both.weight, both.bias.as_deref(), rows.clone());
            both.iter().map(half).collect()
        };
        Ok((half(0..n_ff), half(n_ff..2 * n_ff)))
    }

    fn expansions(&mut self, prefix: &str, a: &LatentAttentionSpec) -> Result<(Vec<Linear>, Vec<Linear>), ModelError> {
        let both = format!("{prefix}attn_kv_b");
        let separate = self.has(&format!("{prefix}attn_k_b")) || !a.fused_expansions;
        if separate && !self.has(&both) {
            let k_b = self.matrices(&format!("{prefix}attn_k_b"), [a.n_nope, a.kv_rank, a.n_head], Presence::None)?;
            let v_b =
                self.matrices(&format!("{prefix}attn_v_b"), [a.kv_rank, a.value_dim, a.n_head], Presence::None)?;
            return Ok((k_b, v_b));
        }
        // Older files have one matrix: for each head the rows to keys, then those to values, over the compressed row.
        let of_head = a.n_nope + a.value_dim;
        let tensor = self.must(&both, &[a.kv_rank, a.n_head * of_head])?;
        let keys = |head: usize| {
            let keys = tensor.rows(head * of_head..head * of_head + a.n_nope);
            Linear { weight: transposed(&keys), bias: None }
        };
        let values = |head: usize| Self::rows(&tensor, None, head * of_head + a.n_nope..(head + 1) * of_head);
        Ok(((0..a.n_head).map(keys).collect(), (0..a.n_head).map(values).collect()))
    }
}

/// The transposed matrix, in F32 for F32 and BF16, otherwise in F16.
fn transposed(tensor: &Tensor) -> Tensor {
    let (n_rows, n) = (tensor.n_rows(), tensor.row_len());
    let values = tensor.to_f32();
    let transposed_values = (0..n).flat_map(|column| (0..n_rows).map(move |row| row * n + column)).map(|at| values[at]);
    let (ty, bytes): (_, Vec<u8>) = match tensor.ty() {
        TensorType::F32 | TensorType::BF16 => (TensorType::F32, transposed_values.flat_map(f32::to_le_bytes).collect()),
        _ => (TensorType::F16, transposed_values.flat_map(|x| f16::from_f32(x).to_le_bytes()).collect()),
    };
    Tensor::in_memory(tensor.name(), [n_rows, n], ty, &bytes)
}

/// An error if the matrix `name` has a separate scale that is not 1, as files in `NVFP4` may have.
fn check_scale(file: &GgufFile, name: &str) -> Result<(), ModelError> {
    // The loader reads these two scales.
    if name.ends_with("ffn_down_exps") || name.ends_with("ffn_gate_inp") {
        return Ok(());
    }
    let scale = file.tensor(&format!("{name}.scale"));
    let other = scale.and_then(|scale| Some((scale, scale.to_f32().into_iter().find(|x| *x != 1.0)?)));
    match other {
        None => Ok(()),
        Some((scale, value)) => Err(ModelError::TensorValue {
            name: scale.name().to_owned(),
            value,
            why: "factors of whole matrices are not applied yet: use a file without them, in Q4_K_M for instance",
        }),
    }
}
