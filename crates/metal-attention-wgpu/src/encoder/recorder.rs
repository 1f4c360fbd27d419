//! [`Recorder`]: commands in their order, submitted in portions.

use std::sync::Arc;

use wgpu::{CommandEncoder, ComputePassDescriptor};

use crate::arena::Slice;
use crate::device::WgpuDevice;
use crate::dispatch::{BatchDims, Dispatch};

/// Commands of a submission. Fewer keep a GPU waiting for the CPU; more could run for longer than a driver allows.
const PORTION: usize = 64;

/// A command.
#[derive(Debug)]
enum Command {
    /// A dispatch for so many rows.
    Dispatch(Dispatch, u32),
    /// A copy of the first slice to the start of the second.
    Copy(Slice, Slice),
}

/// Records commands.
#[derive(Debug)]
pub(super) struct Recorder {
    gpu: Arc<WgpuDevice>,
    commands: Vec<Command>,
}

impl Recorder {
    pub(super) fn new(gpu: Arc<WgpuDevice>) -> Self {
        Self { gpu, commands: Vec::new() }
    }

    /// Appends a dispatch for `n_rows` rows, as far as its grid depends on them.
    pub(super) fn dispatch(&mut self, dispatch: Dispatch, n_rows: usize) {
        self.push(Command::Dispatch(dispatch, n_rows as u32));
    }

    /// Appends a copy of `from` to the start of `to`.
    pub(super) fn copy(&mut self, from: Slice, to: Slice) {
        self.push(Command::Copy(from, to));
    }

    fn push(&mut self, command: Command) {
        self.commands.push(command);
        if self.commands.len() >= PORTION {
            self.submit();
        }
    }

    /// Forgets what is not submitted.
    pub(super) fn clear(&mut self) {
        self.commands.clear();
    }

    /// Submits what is recorded. Does not wait.
    pub(super) fn submit(&mut self) {
        let mut encoder = self.gpu.encoder();
        // Dispatches up to the next copy share a pass.
        for run in self.commands.split_inclusive(|command| matches!(command, Command::Copy(..))) {
            let mut pass = encoder.begin_compute_pass(&ComputePassDescriptor::default());
            let mut last = None;
            for command in run {
                match command {
                    Command::Dispatch(dispatch, n_rows) => {
                        let n = *n_rows;
                        let size = BatchDims { n_tokens: n, n_outputs: n, n_runs: 1, n_splits: 1 };
                        dispatch.record(&self.gpu, &mut pass, size);
                    }
                    Command::Copy(from, to) => last = Some((from, to)),
                }
            }
            drop(pass);
            if let Some((from, to)) = last {
                copy(&mut encoder, from, to);
            }
        }
        self.commands.clear();
        self.gpu.submit(encoder);
    }
}

/// Encodes a copy of `from` to the start of `to`.
fn copy(encoder: &mut CommandEncoder, from: &Slice, to: &Slice) {
    if from.size() > 0 {
        encoder.copy_buffer_to_buffer(from.buffer(), from.offset(), to.buffer(), to.offset(), Some(from.size()));
    }
}
