//! `devices`: lists the devices of this machine that can run models.

use std::io::Write;

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
    /// Whether the program's kernels run on it.
    #[serde(skip)]
    is_new_enough: bool,
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
    /// A GPU.
    #[cfg_attr(not(any(feature = "cuda", feature = "wgpu")), allow(dead_code))]
    fn gpu(device: String) -> Self {
        Self { device, reason: "for models that fit in its memory".into() }
    }

    /// The first of these GPUs on which the kernels run.
    fn cuda(found: &[Cuda]) -> Option<Self> {
        found.iter().find(|gpu| gpu.is_new_enough).map(|gpu| Self::gpu(gpu.device.clone()))
    }
}

impl Devices {
    /// Finds the devices.
    #[cfg(feature = "wgpu")]
    fn of_this_machine() -> Self {
        use metal_attention::kernels::{AdapterChoice, WgpuError, adapter_summaries, no_hardware};
        let found = adapter_summaries();
        // The same choice as that of `WgpuDevice::open`.
        let chosen = no_hardware().map_or_else(|| AdapterChoice::Hardware { bytes: 0 }.choose(&found), Err);
        let (cuda, no_cuda) = cuda_devices();
        let auto = match &chosen {
            Ok(i) => AutoDevice::gpu(format!("gpu:{i}")),
            Err(why) => AutoDevice { device: "cpu".into(), reason: why.why_the_cpu() },
        };
        let auto = AutoDevice::cuda(&cuda).unwrap_or(auto);
        Self {
            cuda,
            no_cuda,
            cpu: Cpu::of_this_machine(),
            gpus: found.iter().enumerate().map(|(i, gpu)| Adapter::new(i, gpu)).collect(),
            no_gpu: found.is_empty().then(|| WgpuError::NoAdapter.to_string()),
            auto,
        }
    }

    #[cfg(not(feature = "wgpu"))]
    fn of_this_machine() -> Self {
        let why = "this program was built without GPUs (the Cargo feature \"wgpu\")";
        let (cuda, no_cuda) = cuda_devices();
        let auto = AutoDevice::cuda(&cuda).unwrap_or_else(|| AutoDevice { device: "cpu".into(), reason: why.into() });
        Self { cuda, no_cuda, cpu: Cpu::of_this_machine(), gpus: Vec::new(), no_gpu: Some(why.into()), auto }
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

/// The GPUs that CUDA finds, or the reason why there are none.
#[cfg(feature = "cuda")]
fn cuda_devices() -> (Vec<Cuda>, Option<String>) {
    let cuda = |gpu: metal_attention::CudaSummary| Cuda {
        is_new_enough: gpu.is_new_enough(),
        device: format!("cuda:{}", gpu.ordinal),
        name: gpu.name,
        capability: format!("{}.{}", gpu.capability.0, gpu.capability.1),
        driver: format!("{}.{}", gpu.driver / 1000, gpu.driver % 1000 / 10),
        memory_bytes: gpu.memory,
        multiprocessors: gpu.n_sm,
    };
    match metal_attention::cuda_summaries() {
        Ok(found) => (found.into_iter().map(cuda).collect(), None),
        Err(why) => (Vec::new(), Some(why.to_string())),
    }
}

#[cfg(not(feature = "cuda"))]
fn cuda_devices() -> (Vec<Cuda>, Option<String>) {
    (Vec::new(), Some("this program was built without CUDA (the Cargo feature \"cuda\")".into()))
}

impl Cpu {
    /// The CPU of this machine.
    fn of_this_machine() -> Self {
        Self { simd: cpu_simd_name(), physical_cores: physical_cores() }
    }
}

impl Adapter {
    /// Describes the GPU at `index`.
    #[cfg(feature = "wgpu")]
    fn new(index: usize, gpu: &metal_attention::kernels::AdapterSummary) -> Self {
        use metal_attention::kernels::wgpu::{CooperativeScalarType as Scalar, DeviceType, Features};
        let scalar = |ty| match ty {
            Scalar::F32 => "f32",
            Scalar::F16 => "f16",
            Scalar::I32 => "i32",
            Scalar::U32 => "u32",
        };
        Self {
            device: format!("gpu:{index}"),
            index,
            name: gpu.name.clone(),
            backend: gpu.backend,
            kind: match gpu.kind {
                DeviceType::DiscreteGpu => "discrete",
                DeviceType::IntegratedGpu => "integrated",
                DeviceType::VirtualGpu => "virtual",
                DeviceType::Cpu => "software",
                DeviceType::Other => "other",
            },
            driver: gpu.driver.clone(),
            memory_bytes: gpu.memory,
            max_binding_bytes: gpu.max_binding,
            subgroups: gpu.features.contains(Features::SUBGROUP),
            subgroup_sizes: gpu.subgroup_sizes,
            f16: gpu.features.contains(Features::SHADER_F16),
            cooperative_matrices: gpu
                .cooperative_matrices
                .iter()
                .map(|p| {
                    let (ab, cr) = (scalar(p.ab_type), scalar(p.cr_type));
                    format!("{}x{}x{} {ab} {cr}", p.m_size, p.n_size, p.k_size)
                })
                .collect(),
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
