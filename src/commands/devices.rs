//! `devices`: lists the devices of this machine that can run models.

use std::io::Write;

use metal_attention::backends::{self, Gpu, GpuDetails, GpuList};
use metal_attention::{cpu_simd_name, physical_cores};
use serde::Serialize;

use crate::cli_error::CliError;
use crate::units;

const AFTER_HELP: &str = "\
A GPU is named wgpu, wgpu:INDEX or wgpu:NAME (a part of its name) after --device, an NVIDIA GPU through CUDA cuda or \
cuda:NUMBER. --device auto takes the first CUDA device, else the first hardware GPU, in which the model's weights, KV cache \
and scratch buffers fit with a tenth of the memory left free; else the CPU.

With --json stdout gets one object with the keys cpu (simd, physical_cores), gpus (list of device, index, name, backend, \
kind, driver, memory_bytes or null, max_binding_bytes, subgroups, subgroup_sizes, f16, cooperative_matrices), no_gpu \
(why the list is empty, or null), cuda (list of device, name, capability, driver, memory_bytes, multiprocessors), no_cuda (why \
that is empty, or null), and auto (device, reason).

Examples:
  metal-attention devices
  metal-attention devices --json";

/// List the devices that can run models
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Args {
    /// Write one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<(), CliError> {
    let devices = Devices::of_this_machine();
    let text = if args.json {
        let json = serde_json::to_string_pretty(&devices);
        json.map_err(|e| CliError::General(format!("cannot write JSON: {e}")))? + "\n"
    } else {
        devices.lines().join("\n") + "\n"
    };
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).map_err(CliError::stdout)
}

/// The devices of this machine: the JSON object of `--json`.
#[derive(Serialize)]
struct Devices {
    /// The CPU.
    cpu: Cpu,
    /// The GPUs that wgpu finds.
    gpus: Vec<Adapter>,
    /// The reason if `gpus` is empty.
    no_gpu: Option<String>,
    /// The GPUs that CUDA finds.
    cuda: Vec<Cuda>,
    /// The reason if `cuda` is empty.
    no_cuda: Option<String>,
    /// The choice of `--device auto`.
    auto: AutoDevice,
}

/// A GPU that CUDA finds.
#[derive(Serialize)]
struct Cuda {
    /// The name for `--device`.
    device: String,
    /// The GPU's name.
    name: String,
    /// The compute capability, as `9.0`.
    capability: String,
    /// The newest CUDA version that the driver supports.
    driver: String,
    /// Total memory in bytes.
    memory_bytes: u64,
    /// The number of streaming multiprocessors.
    multiprocessors: usize,
}

/// The CPU.
#[derive(Serialize)]
struct Cpu {
    /// The instruction set that the kernels use.
    simd: &'static str,
    /// The number of physical cores.
    physical_cores: usize,
}

/// A GPU that wgpu finds.
#[derive(Serialize)]
struct Adapter {
    /// The name for `--device`.
    device: String,
    /// The number of the GPU in wgpu's order.
    index: usize,
    /// The GPU's name.
    name: String,
    /// The graphics interface: vulkan, metal, ...
    backend: &'static str,
    /// The kind: discrete, integrated, virtual, software or other.
    kind: &'static str,
    /// The driver's name and version.
    driver: String,
    /// Memory in bytes. `None`: not known.
    memory_bytes: Option<u64>,
    /// The largest buffer that a kernel can use, in bytes.
    max_binding_bytes: u64,
    /// Whether kernels can use subgroups.
    subgroups: bool,
    /// The smallest and the largest number of lanes of a subgroup.
    subgroup_sizes: (u32, u32),
    /// Whether kernels can use 16-bit floats.
    f16: bool,
    /// The shapes of matrix units: `MxNxK`, the type of the factors, the type of the sum.
    cooperative_matrices: Vec<String>,
}

/// The choice of `--device auto`.
#[derive(Serialize)]
struct AutoDevice {
    /// The name for `--device`.
    device: String,
    /// The reason for the choice.
    reason: String,
}

impl AutoDevice {
    /// The choice among the GPUs of the backends, which are in the order in which they are tried.
    fn of(lists: &[&GpuList]) -> Self {
        let mut reason = String::new();
        for list in lists {
            match &list.auto {
                Ok(i) => {
                    let reason = "for models that fit in its memory".into();
                    return Self { device: list.gpus[*i].device.clone(), reason };
                }
                Err(why) => reason.clone_from(why),
            }
        }
        Self { device: "cpu".into(), reason }
    }
}

impl Devices {
    /// Finds the devices.
    fn of_this_machine() -> Self {
        let (wgpu, cuda) = (backends::WGPU.gpus(), backends::CUDA.gpus());
        Self {
            cpu: Cpu::of_this_machine(),
            auto: AutoDevice::of(&[&cuda, &wgpu]),
            gpus: wgpu.gpus.into_iter().filter_map(Adapter::of).collect(),
            no_gpu: wgpu.why_none,
            cuda: cuda.gpus.into_iter().filter_map(Cuda::of).collect(),
            no_cuda: cuda.why_none,
        }
    }

    /// The devices as lines of text, each with the name of a device or indented.
    fn lines(&self) -> Vec<String> {
        let line = |what: &str, value: &str| format!("{what:<6}  {value}");
        let cores = units::count(self.cpu.physical_cores, "physical core");
        let mut lines = vec![line("cpu", &format!("{}, {cores}", self.cpu.simd))];
        for gpu in &self.gpus {
            for (i, text) in gpu.texts().iter().enumerate() {
                lines.push(line(if i == 0 { &gpu.device } else { "" }, text));
            }
        }
        lines.extend(self.no_gpu.iter().map(|why| line("gpu", why)));
        for gpu in &self.cuda {
            lines.push(line(&gpu.device, &gpu.name));
            let memory = units::bytes(gpu.memory_bytes);
            let (capability, driver, n) = (&gpu.capability, &gpu.driver, gpu.multiprocessors);
            lines.push(line("", &format!("compute capability {capability}, driver for CUDA {driver}")));
            lines.push(line("", &format!("memory {memory}, {n} multiprocessors")));
        }
        lines.extend(self.no_cuda.iter().map(|why| line("cuda", why)));
        lines.push(line("auto", &format!("{}: {}", self.auto.device, self.auto.reason)));
        lines
    }
}

impl Cuda {
    /// A GPU that CUDA has found; `None` for one of another backend.
    fn of(gpu: Gpu) -> Option<Self> {
        let (capability, multiprocessors) = match gpu.details {
            GpuDetails::Cuda { ordinal: _, capability, n_sm } => (capability, n_sm),
            GpuDetails::Wgpu { .. } => return None,
        };
        Some(Self {
            device: gpu.device,
            name: gpu.name,
            capability: format!("{}.{}", capability.0, capability.1),
            driver: gpu.driver,
            memory_bytes: gpu.memory.unwrap_or(0),
            multiprocessors,
        })
    }
}

impl Cpu {
    /// The CPU of this machine.
    fn of_this_machine() -> Self {
        Self { simd: cpu_simd_name(), physical_cores: physical_cores() }
    }
}

impl Adapter {
    /// A GPU that wgpu has found; `None` for one of another backend.
    fn of(gpu: Gpu) -> Option<Self> {
        match gpu.details {
            GpuDetails::Cuda { .. } => None,
            GpuDetails::Wgpu {
                index,
                backend,
                kind,
                max_binding,
                subgroups,
                subgroup_sizes,
                f16,
                cooperative_matrices,
            } => Some(Self {
                device: gpu.device,
                index,
                name: gpu.name,
                backend,
                kind,
                driver: gpu.driver,
                memory_bytes: gpu.memory,
                max_binding_bytes: max_binding,
                subgroups,
                subgroup_sizes,
                f16,
                cooperative_matrices,
            }),
        }
    }

    /// The lines of text about the GPU; its name is the first.
    fn texts(&self) -> Vec<String> {
        let memory = self.memory_bytes.map_or("unknown".into(), units::bytes);
        let subgroups = match self.subgroup_sizes {
            _ if !self.subgroups => "no subgroups".into(),
            (min, max) if min == max => format!("subgroups of {min}"),
            (min, max) => format!("subgroups of {min} to {max}"),
        };
        let f16 = if self.f16 { "f16" } else { "no f16" };
        let matrices = match &self.cooperative_matrices[..] {
            [] => "no cooperative matrices".into(),
            shapes => format!("cooperative matrices {}", shapes.join(", ")),
        };
        vec![
            self.name.clone(),
            format!("{}, {}, driver {}", self.kind, self.backend, self.driver),
            format!("memory {memory}, largest binding {}", units::bytes(self.max_binding_bytes)),
            format!("{subgroups}, {f16}, {matrices}"),
        ]
    }
}
