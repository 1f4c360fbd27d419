//! The names of the devices that run models.

use std::fmt;
use std::str::FromStr;

use crate::Error;

/// What runs a model: `auto`, `cpu`, `cuda`, `cuda:1`, `gpu`, `gpu:1` or `gpu:NAME`.
///
/// ```
/// use metal_attention::Device;
///
/// let device: Device = "gpu:geforce".parse()?;
/// assert_eq!(device, Device::GpuName("geforce".into()));
/// assert_eq!(device.to_string(), "gpu:geforce");
/// # Ok::<(), metal_attention::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Device {
    /// A GPU that is no software and has room for the model, where there is one, an NVIDIA GPU through CUDA; else the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// The NVIDIA GPU with this number among the driver's, through CUDA.
    Cuda(usize),
    /// The first GPU: real ones come before software ones.
    Gpu,
    /// The GPU with this index, as `metal-attention devices` lists them.
    GpuIndex(usize),
    /// The first GPU whose name has this in it, in upper or lower case. Not a number: that is an index.
    GpuName(String),
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.pad("auto"),
            Self::Cpu => f.pad("cpu"),
            Self::Cuda(0) => f.pad("cuda"),
            Self::Cuda(i) => f.pad(&format!("cuda:{i}")),
            Self::Gpu => f.pad("gpu"),
            Self::GpuIndex(i) => f.pad(&format!("gpu:{i}")),
            Self::GpuName(name) => f.pad(&format!("gpu:{name}")),
        }
    }
}

impl FromStr for Device {
    type Err = Error;

    /// Reads what [`Display`](fmt::Display) writes; anything else is [`Error::UnknownDevice`].
    fn from_str(s: &str) -> Result<Self, Error> {
        let unknown = || Error::UnknownDevice { device: s.to_owned() };
        match (s, s.split_once(':')) {
            ("auto", _) => Ok(Self::Auto),
            ("cpu", _) => Ok(Self::Cpu),
            ("cuda", _) => Ok(Self::Cuda(0)),
            ("gpu", _) => Ok(Self::Gpu),
            (_, Some(("cuda", number))) => number.parse().map(Self::Cuda).map_err(|_| unknown()),
            (_, Some(("gpu", gpu))) if !gpu.trim().is_empty() => {
                Ok(gpu.parse().map_or_else(|_| Self::GpuName(gpu.to_owned()), Self::GpuIndex))
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
            ("gpu", Device::Gpu),
            ("cuda", Device::Cuda(0)),
            ("cuda:2", Device::Cuda(2)),
            ("gpu:0", Device::GpuIndex(0)),
            ("gpu:12", Device::GpuIndex(12)),
            ("gpu:llvmpipe (LLVM 15)", Device::GpuName("llvmpipe (LLVM 15)".into())),
            ("gpu:-1", Device::GpuName("-1".into())),
        ] {
            assert_eq!(name.parse::<Device>().unwrap(), device);
            assert_eq!(device.to_string(), name);
        }
        assert_eq!(format!("{:>6}|{:<6}", Device::Cpu, Device::GpuIndex(1)), "   cpu|gpu:1 ");
    }

    #[test]
    fn other_names_are_refused() {
        for name in ["", "tpu", "GPU", "gpu:", "gpu: ", "gpus", "cpu:0", "cuda:", "cuda:a", "cuda:-1"] {
            let error = name.parse::<Device>().unwrap_err();
            assert!(matches!(&error, Error::UnknownDevice { device } if device == name), "{error}");
        }
    }
}
