//! The names of devices.

use std::fmt;
use std::str::FromStr;

use crate::Error;

/// The device that runs a model, by name: `auto`, `cpu`, `cuda`, `cuda:1`, `wgpu`, `wgpu:1` or `wgpu:NAME`. `gpu` is an
/// older name of `wgpu`; it is still the one that is written, for programs that read it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Device {
    /// An NVIDIA GPU through CUDA, otherwise another hardware GPU, if it has enough memory for the model; otherwise the
    /// CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// The NVIDIA GPU with this ordinal of the driver, through CUDA.
    Cuda(usize),
    /// The first GPU of wgpu; hardware comes before software.
    Wgpu,
    /// The GPU of wgpu with this index, as `metal-attention devices` lists it.
    WgpuIndex(usize),
    /// The first GPU of wgpu whose name contains this, in any case. Not a number: that is an index.
    WgpuName(String),
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.pad("auto"),
            Self::Cpu => f.pad("cpu"),
            Self::Cuda(0) => f.pad("cuda"),
            Self::Cuda(i) => f.pad(&format!("cuda:{i}")),
            Self::Wgpu => f.pad("gpu"),
            Self::WgpuIndex(i) => f.pad(&format!("gpu:{i}")),
            Self::WgpuName(name) => f.pad(&format!("gpu:{name}")),
        }
    }
}

impl FromStr for Device {
    type Err = Error;

    /// Parses what [`Display`](fmt::Display) writes, and `wgpu`; anything else is [`Error::UnknownDevice`].
    fn from_str(s: &str) -> Result<Self, Error> {
        let unknown = || Error::UnknownDevice { device: s.to_owned() };
        match (s, s.split_once(':')) {
            ("auto", _) => Ok(Self::Auto),
            ("cpu", _) => Ok(Self::Cpu),
            ("cuda", _) => Ok(Self::Cuda(0)),
            ("wgpu" | "gpu", _) => Ok(Self::Wgpu),
            (_, Some(("cuda", number))) => number.parse().map(Self::Cuda).map_err(|_| unknown()),
            (_, Some(("wgpu" | "gpu", adapter))) if !adapter.trim().is_empty() => {
                Ok(adapter.parse().map_or_else(|_| Self::WgpuName(adapter.to_owned()), Self::WgpuIndex))
            }
            _ => Err(unknown()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_names_read_back() {
        for (name, device) in [
            ("auto", Device::Auto),
            ("cpu", Device::Cpu),
            ("gpu", Device::Wgpu),
            ("cuda", Device::Cuda(0)),
            ("cuda:2", Device::Cuda(2)),
            ("gpu:0", Device::WgpuIndex(0)),
            ("gpu:12", Device::WgpuIndex(12)),
            ("gpu:llvmpipe (LLVM 15)", Device::WgpuName("llvmpipe (LLVM 15)".into())),
            ("gpu:-1", Device::WgpuName("-1".into())),
        ] {
            assert_eq!(name.parse::<Device>().unwrap(), device);
            assert_eq!(device.to_string(), name);
        }
        for (name, device) in [
            ("wgpu", Device::Wgpu),
            ("wgpu:12", Device::WgpuIndex(12)),
            ("wgpu:geforce", Device::WgpuName("geforce".into())),
        ] {
            assert_eq!(name.parse::<Device>().unwrap(), device);
        }
        assert_eq!(format!("{:>6}|{:<6}", Device::Cpu, Device::WgpuIndex(1)), "   cpu|gpu:1 ");
    }

    #[test]
    fn other_names_are_refused() {
        for name in ["", "tpu", "GPU", "gpu:", "gpu: ", "gpus", "wgpu:", "cpu:0", "cuda:", "cuda:a", "cuda:-1"] {
            let error = name.parse::<Device>().unwrap_err();
            assert!(matches!(&error, Error::UnknownDevice { device } if device == name), "{error}");
        }
    }
}
