//! [`CudaRows`] on the device, and [`RowMemory`], from which they get their buffers.

use std::cell::OnceCell;
use std::sync::Arc;

use crate::device::CudaBuffer;
use crate::slice::DeviceSlice;
use crate::{CudaDevice, CudaError};

/// Rows of F32, `[n_rows, width]`.
#[derive(Debug)]
pub(crate) struct CudaRows {
    buffer: Arc<CudaBuffer>,
    /// The rows as packed F16, once a product has read them: several products often have the same input.
    packed: OnceCell<Arc<CudaBuffer>>,
    /// Rows.
    pub(super) n_rows: usize,
    /// Elements of a row.
    pub(super) width: usize,
}

impl CudaRows {
    /// All elements.
    pub(super) fn slice(&self) -> DeviceSlice<f32> {
        self.buffer.slice().take(self.n_rows * self.width)
    }

    /// All elements, to write to. Rows that were packed before are packed anew.
    pub(super) fn slice_mut(&mut self) -> DeviceSlice<f32> {
        self.packed.take();
        self.slice()
    }

    /// The rows with their packed F16, which a kernel has stored beside them.
    pub(super) fn with_packed(mut self, packed: Arc<CudaBuffer>) -> Self {
        self.packed = OnceCell::from(packed);
        self
    }

    /// The rows as packed F16, from `pack` where no product has read them yet.
    pub(super) fn packed(
        &self,
        pack: impl FnOnce() -> Result<Arc<CudaBuffer>, CudaError>,
    ) -> Result<Arc<CudaBuffer>, CudaError> {
        if let Some(packed) = self.packed.get() {
            return Ok(Arc::clone(packed));
        }
        let packed = pack()?;
        Ok(Arc::clone(self.packed.get_or_init(|| packed)))
    }

    /// The buffer, which may be larger than the rows.
    pub(super) fn buffer(&self) -> &CudaBuffer {
        &self.buffer
    }

    /// The same elements as rows of `width`.
    pub(super) fn reshaped(self, width: usize) -> Self {
        let n_rows = self.n_rows * self.width / width.max(1);
        Self { n_rows, width, packed: OnceCell::new(), ..self }
    }
}

/// The buffers of the encoder's present call and of the last one. A buffer that nothing holds any more serves anew: launches that
/// use it are before those that will, in the order of the stream.
#[derive(Debug)]
pub(super) struct RowMemory {
    gpu: Arc<CudaDevice>,
    /// Each with the number of the last call that used it.
    buffers: Vec<(Arc<CudaBuffer>, u64)>,
    /// The number of the present call.
    call: u64,
}

impl RowMemory {
    pub(super) fn new(gpu: Arc<CudaDevice>) -> Self {
        Self { gpu, buffers: Vec::new(), call: 0 }
    }

    /// Rows with undefined contents.
    pub(super) fn rows(&mut self, n_rows: usize, width: usize) -> Result<CudaRows, CudaError> {
        let buffer = self.buffer::<f32>(n_rows * width)?;
        Ok(CudaRows { buffer, packed: OnceCell::new(), n_rows, width })
    }

    /// A buffer of `n` elements `T`, with undefined contents: a free one of up to twice the size, or a new one.
    pub(super) fn buffer<T>(&mut self, n: usize) -> Result<Arc<CudaBuffer>, CudaError> {
        let bytes = (n * size_of::<T>()).max(16) as u64;
        let fits =
            |buffer: &Arc<CudaBuffer>| Arc::strong_count(buffer) == 1 && (bytes..=2 * bytes).contains(&buffer.bytes());
        let free = self.buffers.iter_mut().filter(|(buffer, _)| fits(buffer)).min_by_key(|(buffer, _)| buffer.bytes());
        let buffer = if let Some((buffer, last_call)) = free {
            *last_call = self.call;
            Arc::clone(buffer)
        } else {
            let new = self.gpu.buffer("the rows of pictures", bytes).or_else(|_| {
                // The buffers that are free may be what is missing.
                self.buffers.retain(|(buffer, _)| Arc::strong_count(buffer) > 1);
                self.gpu.buffer("the rows of pictures", bytes)
            });
            let buffer = Arc::new(new?);
            self.buffers.push((Arc::clone(&buffer), self.call));
            buffer
        };
        // So that debug builds refuse launches beyond the elements.
        buffer.note_parts(&[buffer.slice::<u8>().take(bytes as usize)]);
        Ok(buffer)
    }

    /// A buffer with these contents.
    pub(super) fn upload<T: bytemuck::Pod>(&mut self, values: &[T]) -> Result<Arc<CudaBuffer>, CudaError> {
        let buffer = self.buffer::<T>(values.len())?;
        buffer.write(0, bytemuck::cast_slice(values))?;
        Ok(buffer)
    }

    /// Rows with these values.
    pub(super) fn uploaded_rows(&mut self, values: &[f32], width: usize) -> Result<CudaRows, CudaError> {
        let (buffer, n_rows) = (self.upload(values)?, values.len() / width.max(1));
        Ok(CudaRows { buffer, packed: OnceCell::new(), n_rows, width })
    }

    /// Ends a call: frees the buffers that it has not used. The others serve the next one, since to allocate them takes longer than
    /// the launches.
    pub(super) fn end_call(&mut self) {
        let call = self.call;
        self.buffers.retain(|(_, last_call)| *last_call == call);
        self.call += 1;
    }
}
