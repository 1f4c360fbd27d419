//! The bindings of the recurrences' kernels. A kernel reads some columns of rows, and some elements of states, in
//! buffers that other kernels lay out and that may coincide. So each binding comes with a WGSL function that finds an
//! element of it.

use crate::arena::Bind;
use crate::device::WgpuDevice;
use crate::dispatch::{AccessRange, Dispatch, GridExtent};
use crate::error::WgpuError;
use crate::pipelines::PipelineKey;
use crate::shader::Constant;

/// The columns of a buffer's rows that a kernel accesses. There is a row for each token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ColumnRange {
    /// Elements from one row to the next.
    pub stride: usize,
    /// The first column.
    pub first: usize,
}

impl ColumnRange {
    /// Whole rows of `n` elements.
    pub fn whole(n: usize) -> Self {
        Self { stride: n, first: 0 }
    }
}

/// The part of a layer's recurrent states that a kernel accesses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateRange {
    /// Number of slots.
    pub n_slots: usize,
    /// Elements from one slot to the next.
    pub stride: usize,
    /// The first element in each slot.
    pub at: usize,
}

/// The access of a kernel to a binding called NAME. The number is that of its elements (for each token, slot or run).
#[derive(Debug, Clone, Copy)]
pub(super) enum RecurrentBinding {
    /// Read through `fn NAME(token, i) -> f32`.
    Rows(ColumnRange, usize),
    /// Written through `fn set_NAME(token, i, v)`.
    Results(ColumnRange, usize),
    /// Read as `NAME[i]`.
    Floats(usize),
    /// Read and written as `NAME[NAME_place(slot) + i]`.
    States(StateRange, usize),
    /// Runs and segments, read by `segments.wgsl`.
    Segments,
    /// Atomic counters of each run, `NAME[run * n + i]`, zero before and after each dispatch.
    Counters(usize),
}

impl RecurrentBinding {
    fn range(self) -> AccessRange {
        match self {
            Self::Rows(rows, _) | Self::Results(rows, _) => AccessRange::Tokens(4 * rows.stride as u64),
            Self::Floats(n) => AccessRange::floats(n),
            // Every run has at least one token.
            Self::Counters(n) => AccessRange::Tokens(4 * n as u64),
            Self::States(states, _) => {
                AccessRange::Fixed(4 * (states.n_slots as u64).saturating_mul(states.stride as u64))
            }
            Self::Segments => AccessRange::Segments,
        }
    }

    /// Whether the elements are within their rows or slots.
    fn fits(self) -> bool {
        match self {
            Self::Rows(ColumnRange { stride, first: at }, n)
            | Self::Results(ColumnRange { stride, first: at }, n)
            | Self::States(StateRange { n_slots: _, stride, at }, n) => fits(at, n, stride),
            Self::Floats(_) | Self::Segments | Self::Counters(_) => true,
        }
    }

    fn declaration(self, name: &str, binding: usize) -> String {
        let var = |access: &str, ty: &str| format!("@group(0) @binding({binding}) var<storage, {access}> {ty};\n");
        match self {
            Self::Rows(ColumnRange { stride, first: at }, _) => {
                let find = format!("{{ return {name}_rows[token * {stride}u + {at}u + i]; }}");
                var("read", &format!("{name}_rows: array<f32>"))
                    + &format!("fn {name}(token: u32, i: u32) -> f32 {find}\n")
            }
            Self::Results(ColumnRange { stride, first: at }, _) => {
                let set = format!("{{ {name}_rows[token * {stride}u + {at}u + i] = v; }}");
                var("read_write", &format!("{name}_rows: array<f32>"))
                    + &format!("fn set_{name}(token: u32, i: u32, v: f32) {set}\n")
            }
            Self::Floats(_) => var("read", &format!("{name}: array<f32>")),
            Self::States(StateRange { n_slots: _, stride, at }, _) => {
                var("read_write", &format!("{name}: array<f32>"))
                    + &format!("fn {name}_place(slot: u32) -> u32 {{ return slot * {stride}u + {at}u; }}\n")
            }
            Self::Segments => var("read", "segments: array<vec4<u32>>"),
            Self::Counters(_) => var("read_write", &format!("{name}: array<atomic<u32>>")),
        }
    }
}

fn fits(at: usize, n: usize, stride: usize) -> bool {
    at.checked_add(n).is_some_and(|end| end <= stride)
}

/// The bindings of a kernel with their names in the shader, in the order of the bindings.
pub(super) type Bindings = Vec<(&'static str, RecurrentBinding)>;

/// The key of the kernel of `file` with these bindings and `constants`.
pub(super) fn key(file: &'static str, bindings: &Bindings, constants: Vec<(&'static str, Constant)>) -> PipelineKey {
    let each = bindings.iter().enumerate();
    let declarations: String = each.map(|(i, (name, access))| access.declaration(name, i)).collect();
    let name = file.strip_prefix("recurrent/").unwrap_or(file).to_owned();
    let declarations = ("declarations", declarations.into());
    PipelineKey { name, file, constants: constants.into_iter().chain([declarations]).collect() }
}

/// Binds `buffers`, in the order of `bindings`, to the kernel of `key`. An error if elements are beyond their rows or
/// slots.
pub(super) fn dispatch(
    gpu: &WgpuDevice,
    key: &PipelineKey,
    bindings: &Bindings,
    buffers: &[&dyn Bind],
    grid: [GridExtent; 3],
) -> Result<Dispatch, WgpuError> {
    assert_eq!(bindings.len(), buffers.len(), "a buffer for each binding of {}", key.name);
    if let Some((name, access)) = bindings.iter().find(|(_, access)| !access.fits()) {
        let why = format!("{name} of {access:?} reaches beyond its rows");
        return Err(WgpuError::Mismatch { what: format!("the buffers of {}", key.name), why });
    }
    let ranges = bindings.iter().map(|(_, access)| access.range());
    let buffers: Vec<(&dyn Bind, AccessRange)> = buffers.iter().copied().zip(ranges).collect();
    Dispatch::new(gpu, key, &buffers, grid)
}
