//! The names of the devices that run models.

use std::fmt;
use std::str::FromStr;

use crate::Error;

/// What runs a model: `auto`, `cpu`, `gpu`, `gpu:1` or `gpu:NAME`.
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
    /// A GPU that is no software and has room for the model, where there is one; else the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
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
        match s {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "gpu" => Ok(Self::Gpu),
            _ => match s.strip_prefix("gpu:").filter(|gpu| !gpu.trim().is_empty()) {
                Some(gpu) => Ok(gpu.parse().map_or_else(|_| Self::GpuName(gpu.to_owned()), Self::GpuIndex)),
                None => Err(Error::UnknownDevice { device: s.to_owned() }),
            },
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
        for name in ["", "tpu", "GPU", "gpu:", "gpu: ", "gpus", "cpu:0"] {
            let error = name.parse::<Device>().unwrap_err();
            assert!(matches!(&error, Error::UnknownDevice { device } if device == name), "{error}");
        }
    }
}
