//! [`WgpuEncoder`] against the encoder of the CPU.
